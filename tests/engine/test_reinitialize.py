"""A second ``initialize`` on the same model: the weights are the new engine's, and the old one leaves them alone."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ds_hf
from ds_hf.engine.zero.gather import GatheredParameters
from tests.helpers.distributed import run_distributed
from tests.helpers.models import TinyLM, token_batches


def settings(stage: int, **more: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, **more}


def losses(engine: Any) -> list[float]:
    found = []
    for batch in token_batches(3, dist.get_world_size(), 1, 6):
        loss = engine(batch[dist.get_rank()].to(engine.device))
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def second_engine(first_stage: int, second_stage: int) -> None:
    adam = {"optimizer": {"type": "Adam", "params": {"lr": 1e-2}}}

    def frozen_in_part() -> TinyLM:
        torch.manual_seed(0)
        model = TinyLM()
        for block in model.blocks:
            block.up.requires_grad_(False)
        return model

    alone, *_ = ds_hf.initialize(model=frozen_in_part(), config=settings(second_stage, **adam))
    expected = losses(alone)
    # an inference engine first, whose buffers mix what trains later with what does not
    model = frozen_in_part()
    inference, *_ = ds_hf.initialize(model=model, config=settings(first_stage))
    batch = token_batches(1, 6).to(inference.device)
    with torch.no_grad():
        before = inference(batch).item()
    engine, *_ = ds_hf.initialize(model=model, config=settings(second_stage, **adam))
    assert losses(engine) == expected
    with torch.no_grad():
        after = inference(batch).item()  # calls the model, whose weights are the second engine's
        assert after == engine(batch).item() != before
    inference.destroy()
    assert losses(engine) == losses(alone)
    with GatheredParameters(model.parameters()):
        assert all(param.numel() for param in model.parameters())


@pytest.mark.parametrize(("first", "second"), [(3, 3), (3, 2), (0, 2), (0, 3), (2, 0)])
def test_the_second_engine_trains_as_if_alone(first: int, second: int) -> None:
    run_distributed(second_engine, 2, first, second)


def bytes_of_tensors() -> int:
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def engine_after_engine(stage: int, frozen: bool, late: bool) -> None:
    model = TinyLM()
    for block in model.blocks:
        block.requires_grad_(not frozen)
    adam = {"optimizer": {"type": "Adam", "params": {"lr": 1e-2}}}
    kept: list[Any] = []  # as a script's own variables, or the frame of a call that has not returned
    held = []
    for _ in range(4):
        engine, *_ = ds_hf.initialize(model=model, config=settings(stage, bf16={"enabled": True}, **adam))
        losses(engine)
        for each in kept if late else [engine]:
            each.destroy()
        kept.append(engine)
        held.append(bytes_of_tensors())
    assert max(held[1:]) - held[1] < 1024, held  # a shard, or the weights, are more


@pytest.mark.parametrize(("frozen", "late"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_engine_that_is_still_referred_to_keeps_no_memory(stage: int, frozen: bool, late: bool) -> None:
    """ds-hf autotune measured settings one after another in the same processes, each with the weights of all before."""
    run_distributed(engine_after_engine, 2, stage, frozen, late)
