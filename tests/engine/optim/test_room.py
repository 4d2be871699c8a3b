"""States that move to the device while there is room: which, when, and that the numbers stay."""

from __future__ import annotations

import pytest
import torch

from ds_hf import initialize
from ds_hf.engine.optim.host_store import HostPlace, HostStore
from ds_hf.engine.optim.stream_share import Room
from tests.contract.test_parity import ADAMW, MICRO, batches, model
from tests.helpers.distributed import run_distributed


def moved(nbytes: int) -> None:
    Room.free_nbytes = lambda self: nbytes  # type: ignore[method-assign]
    weights = []
    for offload in ({}, {"ratio": "auto"}):
        trained = model()
        config = {
            "train_micro_batch_size_per_gpu": MICRO,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.0,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": [0.9, 0.999]}},  # type: ignore[call-overload]
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "ds_hf": {"offload": offload},
        }
        engine, *_ = initialize(model=trained, config=config)
        assert isinstance(engine.optimizer.store, HostStore)
        places = engine.optimizer.store.places
        for index, step in enumerate(batches(2, 1)[:4]):
            assert (HostPlace.DEVICE in places.values()) == (bool(offload) and index > 1)
            for micro in step:
                engine.backward(engine(micro[0]))
                engine.step()
        kinds = set(places.values())
        assert kinds == ({HostPlace.DEVICE, HostPlace.HOST} if offload else {HostPlace.HOST})
        weights.append([p.detach().clone() for p in trained.parameters()])
        engine.destroy()
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@pytest.mark.parametrize("share", [0.5])
def test_units_move_after_the_second_step_as_far_as_there_is_room(share: float) -> None:
    numel = sum(p.numel() for p in model().parameters())
    run_distributed(moved, 1, int(share * 18 * numel), timeout=60)  # 12 of states, 2 of gradients, 4 of sums


def all_moved() -> None:
    Room.free_nbytes = lambda self: 1 << 40  # type: ignore[method-assign]
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "ds_hf": {"offload": {"ratio": "auto", "stream": 0.5}},
    }
    engine, *_ = initialize(model=model(), config=config)
    store = engine.optimizer.store
    assert isinstance(store, HostStore)
    taken = []
    for (micro,) in batches(1, 1)[:4]:
        engine.backward(engine(micro[0]))
        engine.step()
        taken.append(sum(slot.states.numel() for slot in store._streamed._slots))
    assert set(store.places.values()) == {HostPlace.DEVICE}
    assert taken[0] > 0
    assert taken[1:] == [0, 0, 0]
    engine.destroy()


def test_slots_are_given_back_when_nobody_is_streamed_any_more() -> None:
    run_distributed(all_moved, 1, timeout=60)
