"""States that leave the device at the user's word: the storages themselves, and the engine around them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ds_hf import initialize
from ds_hf.engine.offload.parking import Parking
from ds_hf.engine.zero.access import safe_get_full_fp32_param
from ds_hf.errors import DsHfError
from tests.engine.zero.zoo import WIDTH, Stack, mean_square
from tests.helpers.distributed import run_distributed
from tests.helpers.parity import base_config, full_weights


def test_storages_come_back_under_the_same_tensors() -> None:
    base = torch.arange(12.0)
    view, other = base[3:6], torch.ones(2, dtype=torch.bfloat16)
    pinned_by_numpy = torch.ones(3)
    array = pinned_by_numpy.numpy()
    parking = Parking()
    parking.park([base, view, other, pinned_by_numpy], pinned=False)
    assert parking
    assert [t.untyped_storage().nbytes() for t in (base, view, other, pinned_by_numpy)] == [0, 0, 0, 12]
    parking.restore()
    assert not parking
    assert base.tolist() == list(range(12))
    assert view.tolist() == [3.0, 4.0, 5.0]
    assert other.tolist() == [1.0, 1.0]
    view.zero_()
    assert base.sum() == sum(range(12)) - 12
    assert array.sum() == 3


def around_an_engine() -> None:
    for stage in (0, 1, 2, 3):
        for bf16 in (False, True):
            more: dict[str, Any] = {"bf16": {"enabled": True}} if bf16 else {}
            torch.manual_seed(3)
            engine, *_ = initialize(model=Stack(), config=base_config(stage, **more))

            def step(engine: Any = engine) -> None:
                engine.backward(mean_square(engine(torch.ones(2, WIDTH))))
                engine.step()

            step()
            before = full_weights(engine.module)
            engine.offload_states(pin_memory=False)
            cpu = {torch.device("cpu")}
            # masters in fp32 are the parameters themselves
            names = ("optim_states", "lp_params", "hp_params") if bf16 else ("optim_states", "lp_params")
            assert [engine.state_devices(name) for name in names] == [cpu] * len(names)
            for forbidden, arguments in ((step, ()), (engine.step, ()), (engine.save_checkpoint, ("/nowhere",))):
                with pytest.raises(DsHfError, match="reload_states"):
                    forbidden(*arguments)
            engine.reload_states()
            assert all(torch.equal(value, before[name]) for name, value in full_weights(engine.module).items())
            engine.offload_states(include=["optim_states"], non_blocking=True)
            engine.eval()
            engine(torch.ones(2, WIDTH))  # what a forward needs is here
            engine.train()
            engine.reload_states(non_blocking=True)
            step()
            assert safe_get_full_fp32_param(engine.module.outlet.weight) is not None
            with pytest.raises(ValueError, match="device is 'cpu'"):
                engine.offload_states(device="nvme")
            engine.destroy()
    inference, *_ = initialize(model=nn.Linear(2, 2), config=base_config(0, optimizer=None))
    inference.offload_states()
    with pytest.raises(DsHfError, match="reload_states"):
        inference(torch.ones(2, 2))
    inference.reload_states()
    inference(torch.ones(2, 2))


def test_around_an_engine() -> None:
    run_distributed(around_an_engine, 2, timeout=100)
