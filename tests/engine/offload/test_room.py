"""States that move to the device while there is room: which, when, and that the numbers stay."""

from __future__ import annotations

import pytest
import torch

from ds_hf.engine.builder import initialize
from ds_hf.engine.optim.host_store import HostStore, Place
from ds_hf.engine.optim.room import Room
from tests.contract.test_parity import ADAMW, MICRO, batches, model
from tests.helpers.distributed import run_distributed


def moved(nbytes: int) -> None:
    Room._free = lambda self: nbytes  # type: ignore[method-assign]
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
            assert (Place.DEVICE in places.values()) == (bool(offload) and index > 1)
            for micro in step:
                engine.backward(engine(micro[0]))
                engine.step()
        kinds = set(places.values())
        assert kinds == ({Place.DEVICE, Place.HOST} if offload else {Place.HOST})
        weights.append([p.detach().clone() for p in trained.parameters()])
        engine.destroy()
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@pytest.mark.parametrize("share", [0.5])
def test_units_move_after_the_second_step_as_far_as_there_is_room(share: float) -> None:
    numel = sum(p.numel() for p in model().parameters())
    run_distributed(moved, 1, int(share * 18 * numel), timeout=60)  # 12 of states, 2 of gradients, 4 of sums
