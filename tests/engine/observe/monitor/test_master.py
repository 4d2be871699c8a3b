"""All monitors as one: order, numbers that arrive later, what is off, what goes wrong on rank 0."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_hf.config.types import CsvMonitorSection, WandbSection
from ds_hf.deepspeed_api.config import DeepSpeedConfig
from ds_hf.deepspeed_api.monitor_config import DeepSpeedMonitorConfig, get_monitor_config
from ds_hf.engine.comm.mesh import data_parallel_axis
from ds_hf.engine.observe.monitor import MonitorMaster, master, open_monitors
from ds_hf.engine.observe.monitor.late import later
from ds_hf.errors import ConfigError
from tests.engine.observe.monitor.common import make
from tests.engine.observe.monitor.slow_device import Slow, slow
from tests.helpers.distributed import run_distributed


def csv_only(folder: Path) -> DeepSpeedMonitorConfig:
    return DeepSpeedMonitorConfig(csv_monitor=CsvMonitorSection(True, str(folder), "run"))


@pytest.fixture
def slow_device(monkeypatch: pytest.MonkeyPatch) -> type[Slow]:
    monkeypatch.setattr(Slow, "made", [], raising=False)
    monkeypatch.setattr(master, "later", slow)
    return Slow


def lines(folder: Path, name: str = "a") -> list[str]:
    path = folder / "run" / f"{name}.csv"
    return path.read_text().splitlines()[1:] if path.is_file() else []


def test_only_what_is_on_is_there(tmp_path: Path) -> None:
    monitor = MonitorMaster(csv_only(tmp_path))
    assert monitor.enabled
    assert monitor.csv_monitor is not None
    assert (monitor.tb_monitor, monitor.wandb_monitor, monitor.comet_monitor) == (None, None, None)
    off = MonitorMaster(DeepSpeedMonitorConfig())
    assert (off.enabled, off.writes, off.csv_monitor) == (False, False, None)
    off.write_events([("a", 1.0, 1)])


def test_numbers_that_have_not_arrived_are_not_waited_for_and_keep_their_order(
    tmp_path: Path, slow_device: type[Slow]
) -> None:
    monitor = MonitorMaster(csv_only(tmp_path))
    value = torch.tensor(1.0)
    monitor.write_events([("a", value, 1)])
    value.fill_(9.0)  # the copy has the old one
    monitor.write_events([("a", 2.0, 2)])
    monitor.write_events([("a", torch.tensor(3.0), 3)])
    assert lines(tmp_path) == []
    slow_device.made[0].arrived = True
    monitor.write_events([("a", 4.0, 4)])
    assert lines(tmp_path) == ["1,1.0", "2,2.0"]
    monitor.flush()
    assert lines(tmp_path) == ["1,1.0", "2,2.0", "3,3.0", "4,4.0"]


def test_so_many_wait_and_no_more(tmp_path: Path, slow_device: type[Slow], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(master, "_MOST_WAITING", 2)
    monitor = MonitorMaster(csv_only(tmp_path))
    for x in range(4):
        monitor.write_events([("a", torch.tensor(float(x)), x)])
    assert lines(tmp_path) == ["0,0.0", "1,1.0"]


@pytest.mark.slow
def test_what_waits_is_written_when_python_exits(tmp_path: Path) -> None:
    """The last step of an engine, and what has arrived; what never arrives does not keep the process."""
    code = f"""
import logging
from pathlib import Path
import torch
from ds_hf import initialize
from ds_hf.deepspeed_api.monitor_config import get_monitor_config
from ds_hf.engine.observe.monitor import MonitorMaster, master
from tests.engine.observe.monitor.slow_device import Slow, become_slow
become_slow()
logging.getLogger("ds_hf").setLevel(logging.WARNING)  # the line with which a run begins is no fault
master.PATIENCE_AT_EXIT = 0.2
content = {{
    "train_batch_size": 2,
    "csv_monitor": {{"enabled": True, "output_path": {str(tmp_path)!r}, "job_name": "run"}},
    "optimizer": {{"type": "SGD", "params": {{"lr": 0.5}}}},
}}
comes, hangs = (MonitorMaster(get_monitor_config(content)) for _ in range(2))
comes.write_events([("a", torch.tensor(1.0), 1)])
hangs.write_events([("a", torch.tensor(2.0), 2)])
Slow.made[0].arrived = True
engine = initialize(model=torch.nn.Linear(2, 1), config=content)[0]
for _ in range(3):
    engine.backward(engine(torch.ones(2, 2)).sum())
    engine.step()
assert len((Path({str(tmp_path)!r}) / "run" / "Train_Samples_lr.csv").read_text().splitlines()) == 3
"""
    root = Path(__file__).parents[4]
    done = subprocess.run([sys.executable, "-c", code], check=False, cwd=root, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")
    assert lines(tmp_path) == ["1,1.0"]
    assert lines(tmp_path, "Train_Samples_lr") == ["2,0.5", "4,0.5", "6,0.5"]


def test_values_are_numbers_of_one_element() -> None:
    assert later(torch.tensor([[2.5]])) == 2.5
    assert later(3) == 3
    with pytest.raises(ValueError, match=r"one number, but the value has shape \(2,\)"):
        later(torch.zeros(2))


def test_sections_from_a_whole_configuration_and_from_a_dict(tmp_path: Path) -> None:
    content: dict[str, Any] = {"train_batch_size": 4, "csv_monitor": {"enabled": True, "job_name": "x"}}
    assert DeepSpeedConfig(content).monitor_config == get_monitor_config(content)
    assert get_monitor_config(content).csv_monitor == CsvMonitorSection(True, "", "x")
    assert get_monitor_config(content).enabled
    assert get_monitor_config({"train_batch_size": "x"}) == DeepSpeedMonitorConfig()
    with pytest.raises(ConfigError, match="/wandb/projekt"):
        get_monitor_config({"wandb": {"projekt": "p"}})


def _opened(folder: Path, on: dict[str, Any], silent: bool) -> tuple[bool, bool, str]:
    sections = {"tensorboard": {}, "wandb": {}, "comet": {}, **on}
    settings: Any = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **sections}).settings
    if dist.get_rank() == 0:
        sys.modules["wandb"] = None  # type: ignore[assignment]
    else:  # it is there, and nobody calls it
        sys.modules["wandb"] = SimpleNamespace()  # type: ignore[assignment]
    try:
        opened = open_monitors(settings, data_parallel_axis(), silent=silent)
    except ConfigError as error:
        return False, False, str(error)
    return opened.enabled, opened.writes, ""


def test_what_fails_on_rank_0_is_raised_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for on in ({"wandb": {"enabled": True}}, {"csv_monitor": {"enabled": True, "output_path": str(tmp_path / "file")}}):
        answers = run_distributed(_opened, 2, tmp_path, on, False)
        expected = "pip install 'wandb'" if "wandb" in on else f"cannot write into {tmp_path / 'file'}"
        assert all(expected in answer[2] for answer in answers)
        assert "on rank 0" in answers[1][2]


def test_enabled_everywhere_and_written_on_rank_0_and_silent_in_trials(tmp_path: Path) -> None:
    on = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path)}}
    assert run_distributed(_opened, 2, tmp_path, on, False) == [(True, True, ""), (True, False, "")]
    assert run_distributed(_opened, 2, tmp_path, {"wandb": {"enabled": True}}, True) == [(False, False, "")] * 2


def _trial(folder: Path) -> str:
    return str(make(folder).monitor.enabled)


def test_an_engine_of_a_learning_rate_search_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"options": {}, "result": "r", "progress": "p"}')
    found = run_distributed(_trial, 1, tmp_path / "out", env={"DS_HF_LR_PROBE": str(tmp_path / "job.json")})
    assert found == ["False"]
    assert not (tmp_path / "out").exists()


def test_a_service_that_refuses_is_an_error_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise PermissionError("no key")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=refuse))  # type: ignore[arg-type]
    settings: Any = DeepSpeedMonitorConfig(wandb=WandbSection(enabled=True))
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    with pytest.raises(ConfigError, match=r"a monitor could not be opened: PermissionError: no key"):
        open_monitors(settings, None)  # type: ignore[arg-type]
