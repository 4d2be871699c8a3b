"""``deepspeed.monitor`` as scripts use it: monitors made from a configuration, and monitors of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from deepspeed.monitor.config import DeepSpeedMonitorConfig
from deepspeed.monitor.csv_monitor import csvMonitor
from deepspeed.monitor.monitor import Monitor, MonitorMaster
from deepspeed.monitor.wandb import WandbMonitor
from deepspeed.runtime.config import DeepSpeedConfig


@pytest.mark.feature("deepspeed names", "`deepspeed.monitor`: `MonitorMaster`, its parts, and monitors of one's own")
def test_monitors_of_a_script(tmp_path: Path) -> None:
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "test"}
    ds_config = DeepSpeedConfig({"train_batch_size": 2, "csv_monitor": section})
    monitor = MonitorMaster(ds_config.monitor_config)
    monitor.write_events([("Time per step", 0.25, 16), ("Time per step", 0.5, 32)])
    monitor.close()
    lines = (tmp_path / "test" / "Time_per_step.csv").read_text().splitlines()
    assert lines == ["step,Time per step", "16,0.25", "32,0.5"]
    alone = csvMonitor(ds_config.monitor_config.csv_monitor)
    assert (alone.enabled, alone.output_path, alone.job_name) == (True, str(tmp_path), "test")
    assert ds_config.monitor_config.enabled
    assert not DeepSpeedMonitorConfig().enabled
    assert WandbMonitor(ds_config.monitor_config.wandb).project == "deepspeed"

    class Own(Monitor):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def write_events(self, event_list: Sequence[Any]) -> None:
            self.seen += event_list

    own = Own()
    own.write_events([("a", 1, 2)])
    assert own.seen == [("a", 1, 2)]
