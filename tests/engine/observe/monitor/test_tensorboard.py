"""TensorBoard: what its writer is told; without the package an error. With the package its files are read back."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ds_hf.config.types import TensorboardSection
from ds_hf.engine.observe.monitor import TensorBoardMonitor
from ds_hf.engine.observe.monitor.tensorboard import check_tb_availability
from ds_hf.errors import ConfigError

INSTALLED = importlib.util.find_spec("tensorboard") is not None
EVENTS = [("Train/Samples/lr", 0.25, 8), ("Train/Samples/train_loss", 1.5, 8), ("Train/Samples/lr", 0.5, 16)]


def section(folder: Path, enabled: bool = True) -> TensorboardSection:
    return TensorboardSection(enabled=enabled, output_path=str(folder), job_name="run")


class FakeWriter:
    calls: list[Any]

    def __init__(self, log_dir: str) -> None:
        self.calls = [("open", log_dir)]

    def add_scalar(self, *event: Any) -> None:
        self.calls.append(event)

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")


def test_its_writer_gets_each_event_and_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake: Any = ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = FakeWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    monitor = TensorBoardMonitor(section(tmp_path))
    monitor.write_events(EVENTS)
    monitor.write_events([("a", 1.0, 17)], flush=False)
    monitor.close()
    calls = monitor.get_summary_writer().calls
    assert calls == [("open", str(tmp_path / "run")), *EVENTS, "flush", ("a", 1.0, 17), "close"]


@pytest.mark.skipif(not INSTALLED, reason="the package tensorboard is not installed")
def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-not-found]

    monitor = TensorBoardMonitor(section(tmp_path))
    monitor.write_events(EVENTS)
    read = EventAccumulator(str(tmp_path / "run"))  # before it is closed: each call flushes
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("Train/Samples/lr")] == [(8, 0.25), (16, 0.5)]
    assert [(event.step, event.value) for event in read.Scalars("Train/Samples/train_loss")] == [(8, 1.5)]


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'tensorboard', or set tensorboard\.enabled to false") as caught:
        TensorBoardMonitor(section(tmp_path))
    assert caught.value.faults[0].pointer == "/tensorboard/enabled"
    with pytest.raises(ConfigError):
        check_tb_availability()
    assert TensorBoardMonitor(section(tmp_path, enabled=False)).summary_writer is None
    assert not list(tmp_path.iterdir())
