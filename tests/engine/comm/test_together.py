"""What one process refuses while building ends all; what processes have to have in common is compared."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig

import ds_hf
from ds_hf.deepspeed_api.pipeline import PipelineModule
from ds_hf.engine.comm.together import Building, building
from ds_hf.engine.parallel.pipeline.specs import LayerSpec
from ds_hf.errors import DsHfError
from tests.helpers.distributed import DistributedFailure, run_distributed
from tests.helpers.logs import Lines

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    "zero_optimization": {"stage": 1},
}


def _told(config: dict[str, Any], width: int = 4, **given: Any) -> str:
    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4))
    try:
        engine = ds_hf.initialize(model=model, config=config, **given)[0]
    except (DsHfError, OSError) as error:
        return str(error)
    engine.destroy()
    return ""


def _differences(folder: Path) -> list[str]:
    odd = dist.get_rank() == 1
    changes: list[dict[str, Any]] = [
        {"optimizer": {"type": "SGD", "params": {"lr": 0.001}}},
        {"gradient_clipping": 0.3},
        {"bf16": {"enabled": True}},
        {"zero_optimization": {"stage": 2}},
        {"csv_monitor": {"output_path": str(folder / str(odd))}},  # its own business
    ]
    found = [_told({**CONFIG, **change} if odd else CONFIG) for change in changes]
    found.append(_told(CONFIG, width=5 if odd else 4))
    plain = {key: value for key, value in CONFIG.items() if key != "optimizer"}
    model = nn.Linear(4, 4)
    given = torch.optim.SGD(model.parameters(), lr=0.2 if odd else 0.1)
    try:
        ds_hf.initialize(model=model, optimizer=given, config=plain)
    except DsHfError as error:
        found.append(str(error))
    return found


def test_the_first_difference_is_told_on_all_processes(tmp_path: Path) -> None:
    for told in run_distributed(_differences, 2, tmp_path, timeout=60):
        assert "/optimizer/type is 'AdamW' on rank 0 and 'SGD' on rank 1" in told[0]
        assert "/gradient_clipping is 1.0 on rank 0 and 0.3 on rank 1" in told[1]
        assert "/bf16/enabled is False on rank 0 and True on rank 1" in told[2]
        assert "/zero_optimization/stage is 1 on rank 0 and 2 on rank 1" in told[3]
        assert told[4] == ""
        assert "parameter 0.weight is [4, 4] float32 on rank 0 and [5, 4] float32 on rank 1" in told[5]
        assert "optimizer.defaults.lr is 0.1 on rank 0 and 0.2 on rank 1" in told[6]


class _Scaled(nn.Module):
    """A user's, with numbers of its own."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale, self.rank, self.layer = scale, dist.get_rank(), nn.Linear(4, 4)


def _numbers_that_are_no_shapes() -> tuple[list[str], list[str]]:
    odd, lines = dist.get_rank() == 1, Lines()
    logging.getLogger("ds_hf").addHandler(lines)

    def told(model: nn.Module, **given: Any) -> str:
        try:
            ds_hf.initialize(model=model, config=CONFIG, **given)[0].destroy()
        except DsHfError as error:
            return str(error)
        return ""

    def rates(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 if odd else 1.0)

    def configured(rate: float) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4))
        model.config = PretrainedConfig(attention_dropout=rate, name_or_path=str(odd))  # type: ignore[assignment]
        return model

    found = [
        told(nn.Sequential(nn.LayerNorm(4, eps=1e-2 if odd else 1e-5))),
        told(configured(0.1 if odd else 0.0)),
        told(nn.Linear(4, 4), lr_scheduler=rates),
        told(_Scaled(2.0 if odd else 1.0)),
        told(_Scaled(1.0)),
    ]
    try:
        PipelineModule([LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Dropout, 0.1 if odd else 0.2)], num_stages=1)
    except DsHfError as error:
        found.append(str(error))
    return found, [text for text in lines.texts if "rank 0 and" in text]


def test_numbers_that_are_no_shapes_are_compared() -> None:
    for told, warned in run_distributed(_numbers_that_are_no_shapes, 2, timeout=60):
        epsilon, dropout, rates, *users, argument = told
        assert "0.eps is 1e-05 on rank 0 and 0.01 on rank 1" in epsilon
        assert "config attention_dropout is 0.0 on rank 0 and 0.1 on rank 1" in dropout
        assert "lr_scheduler.lr_lambdas[0] is [1.0, 1.0" in rates
        assert users == ["", ""]
        assert "layer 1: argument 0 is 0.2 on rank 0 and 0.1 on rank 1" in argument
        assert all("scale is 1.0 on rank 0 and 2.0 on rank 1" in text for text in warned)
    assert len(warned) == 1  # on the process that differs


class _Broken(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        if dist.get_rank() == 1 and self.weight.device.type != "meta":
            raise OSError("no room on this host")


def _faults() -> list[str]:
    def factory(groups: Any) -> torch.optim.Optimizer:
        if dist.get_rank() == 1:
            raise OSError("no such optimizer here")
        return torch.optim.SGD(groups, lr=0.1)

    here = {**CONFIG, "no_such_key": 1} if dist.get_rank() == 1 else CONFIG
    found = [_told(here), _told({key: value for key, value in CONFIG.items() if key != "optimizer"}, optimizer=factory)]
    try:
        PipelineModule([LayerSpec(nn.Linear, 4, 4), LayerSpec(_Broken)], num_stages=2, partition_method="uniform")
    except (DsHfError, OSError) as error:
        found.append(str(error))
    return found


def test_a_fault_of_one_process_is_raised_on_all() -> None:
    for told in run_distributed(_faults, 2, timeout=60):
        assert "no_such_key" in told[0]
        assert "no such optimizer here" in told[1]
        assert "no room on this host" in told[2]


def _waits_in_a_collective() -> None:
    try:
        with building("a house"):
            if dist.get_rank() == 1:
                raise OSError("no bricks")
            dist.all_reduce(torch.ones(1))
    except OSError:
        time.sleep(300)  # until the other has ended


class SlowToConnect:
    """A store whose second connection takes long, as where a name server does not answer."""

    def __init__(self) -> None:
        self.asked, self.may = threading.Event(), threading.Event()

    def clone(self) -> Any:
        self.asked.set()
        assert self.may.wait(60)
        return self

    def check(self, keys: list[str]) -> bool:
        return False


def test_nobody_waits_for_the_connection_that_watches() -> None:
    """It is made by a thread, only where building takes long, and that thread ends with what is built."""
    before, store = set(threading.enumerate()), SlowToConnect()
    made = Building(store, 0, (0, 1), "an engine")
    made.begin()
    (thread,) = set(threading.enumerate()) - before
    assert store.asked.wait(60)
    made.over()
    assert thread.is_alive()
    store.may.set()
    thread.join(60)
    assert not thread.is_alive()

    quick = SlowToConnect()
    made = Building(quick, 0, (0, 1), "an engine")
    made.over()  # before the thread has waited for it
    made.begin()
    for each in set(threading.enumerate()) - before:
        each.join(60)
    assert not quick.asked.is_set()


def test_a_process_that_sits_in_a_collective_is_ended_with_the_text() -> None:
    with pytest.raises(DistributedFailure, match="rank 1 failed in a house, so no process goes on: OSError: no bricks"):
        run_distributed(_waits_in_a_collective, 2, timeout=60)


class Stalled:
    """Of a process that the machine keeps waiting: however long a wait was to be, it is over when that goes on, and
    raises by itself soon after."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self, seconds: float) -> bool:
        self.waits += 1
        return self.waits > 3


def test_a_process_that_was_kept_waiting_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    told = json.dumps({"rank": 0, "what": "initialize()", "text": "", "config": True})
    store = SimpleNamespace(clone=lambda: store, check=lambda keys: True, get=lambda key: told)
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    made = Building(store, 1, (0, 1), "initialize()")
    made._done = Stalled()  # type: ignore[assignment]
    made._watch()
    assert ended == []
