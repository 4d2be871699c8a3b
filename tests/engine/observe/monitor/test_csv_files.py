"""CSV files: names, header, rows; what goes on, what cannot be written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ds_hf.config.types import CsvMonitorSection
from ds_hf.engine.observe.monitor import CsvMonitor
from ds_hf.errors import ConfigError, DsHfError
from tests.helpers.distributed import DistributedFailure
from tests.helpers.interpreter import python


def section(folder: Path, enabled: bool = True) -> CsvMonitorSection:
    return CsvMonitorSection(enabled=enabled, output_path=str(folder), job_name="run")


def test_a_file_for_each_name_with_a_header_and_a_row_for_each_event(tmp_path: Path) -> None:
    monitor = CsvMonitor(section(tmp_path))
    monitor.write_events(
        [("Train/Samples/lr", 0.1, 8), ("My own", torch.tensor(2.5), 8), ("Train/Samples/lr", 0.3, 16)]
    )
    folder = tmp_path / "run"
    assert monitor.log_dir == str(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["My_own.csv", "Train_Samples_lr.csv"]
    assert (folder / "Train_Samples_lr.csv").read_text().splitlines() == ["step,lr", "8,0.1", "16,0.3"]
    assert (folder / "My_own.csv").read_text().splitlines() == ["step,My own", "8,2.5"]
    assert monitor.filenames == ["Train_Samples_lr", "My_own"]
    assert (monitor.enabled, monitor.output_path, monitor.job_name) == (True, str(tmp_path), "run")


def test_a_file_that_is_there_goes_on_without_another_header(tmp_path: Path) -> None:
    for x in (1, 2, 3):
        monitor = CsvMonitor(section(tmp_path))
        monitor.write_events([("a", 0.5 * x, x)])
        monitor.close()
        monitor.write_events([("a", -0.5 * x, x)])
        monitor.close()
    lines = (tmp_path / "run" / "a.csv").read_text().splitlines()
    assert lines == ["step,a", "1,0.5", "1,-0.5", "2,1.0", "2,-1.0", "3,1.5", "3,-1.5"]


def test_a_process_that_is_killed_leaves_its_rows(tmp_path: Path) -> None:
    code = f"""
import os, signal
from ds_hf.config.types import CsvMonitorSection
from ds_hf.engine.observe.monitor import CsvMonitor
monitor = CsvMonitor(CsvMonitorSection(True, {str(tmp_path)!r}, "run"))
for x in range(3):
    monitor.write_events([("a", x / 4, x)])
os.kill(os.getpid(), signal.SIGKILL)
"""
    with pytest.raises(DistributedFailure, match="exit code -9 "):
        python("-c", code)
    assert (tmp_path / "run" / "a.csv").read_text().splitlines() == ["step,a", "0,0.0", "1,0.25", "2,0.5"]


def test_without_output_path_the_folder_lies_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monitor = CsvMonitor(CsvMonitorSection(enabled=True))
    monkeypatch.chdir("/")
    monitor.write_events([("a", 1, 1)])
    assert (tmp_path / "DeepSpeedJobName" / "a.csv").is_file()


def test_switched_off_it_makes_nothing(tmp_path: Path) -> None:
    monitor = CsvMonitor(section(tmp_path / "x", enabled=False))
    monitor.write_events([("a", 1.0, 1)])
    assert not (tmp_path / "x").exists()
    assert monitor.log_dir is None


def test_another_rank_makes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monitor = CsvMonitor(section(tmp_path / "x"))
    monitor.write_events([("a", 1.0, 1)])
    assert monitor.enabled
    assert not (tmp_path / "x").exists()


def test_a_folder_that_cannot_be_made_is_an_error_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        CsvMonitor(section(tmp_path / "file"))
    assert caught.value.faults[0].pointer == "/csv_monitor/output_path"
    assert f"cannot write into {tmp_path / 'file' / 'run'}: Not a directory" in str(caught.value)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a file of Linux that is always full")
def test_a_full_disk_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    monitor = CsvMonitor(section(tmp_path))
    (tmp_path / "run" / "a.csv").symlink_to("/dev/full")
    with pytest.raises(DsHfError, match=rf"csv_monitor cannot write into {tmp_path / 'run'}: No space left"):
        monitor.write_events([("a", 1.0, 1)])
