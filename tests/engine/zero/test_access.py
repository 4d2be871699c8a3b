"""safe_get/set of weights, gradients and moments at every stage, against the values torch has."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_hf import initialize
from ds_hf.engine.zero import access
from ds_hf.engine.zero.buffer import home_of
from tests.engine.zero.zoo import WIDTH, Stack, mean_square
from tests.helpers.distributed import run_distributed
from tests.helpers.parity import base_config, full_weights

ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.0, "torch_adam": True}}


def data(index: int) -> Tensor:
    return torch.randn(dist.get_world_size(), 4, WIDTH, generator=torch.Generator().manual_seed(index))


def against_torch(stage: int, dtype: str) -> None:
    torch.manual_seed(7)
    model = Stack()
    model.blocks[1].requires_grad_(False)
    reference = copy.deepcopy(model)
    theirs = torch.optim.AdamW(
        [p for p in reference.parameters() if p.requires_grad], lr=1e-2, eps=1e-4, weight_decay=0
    )
    more: dict[str, Any] = {} if dtype == "fp32" else {"fp16": {"enabled": True, "initial_scale_power": 6}}
    engine, *_ = initialize(model=model, config=base_config(stage, optimizer=ADAM, **more))
    rank, world = dist.get_rank(), dist.get_world_size()
    tolerance: dict[str, float] = {"rtol": 1e-5, "atol": 1e-6} if dtype == "fp32" else {"rtol": 5e-2, "atol": 5e-3}
    pairs = [(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True) if q.requires_grad]
    assert access.safe_get_full_fp32_param(model.blocks[1].up.weight) is None
    assert access.safe_get_full_optimizer_state(pairs[0][0], "exp_avg") is None
    assert access.safe_get_full_grad(pairs[0][0]) is None
    with pytest.raises(ValueError, match="no gradient"):
        access.safe_set_full_grad(pairs[0][0], torch.zeros(WIDTH, WIDTH))
    for index in range(2):
        shares = data(index)
        theirs.zero_grad()
        for share in shares:
            (mean_square(reference(share)) / world).backward()
        engine.backward(mean_square(engine(shares[rank]).float()))
        for mine, other in pairs:
            gradient = access.safe_get_full_grad(mine)
            assert gradient is not None
            torch.testing.assert_close(gradient.float(), other.grad, **tolerance)
        engine.step()
        theirs.step()
        for mine, other in pairs:
            master = access.safe_get_full_fp32_param(mine)
            assert master is not None
            assert (master.dtype, master.shape) == (torch.float32, other.shape)
            torch.testing.assert_close(master, other.detach(), **tolerance)
            for key in ("exp_avg", "exp_avg_sq"):
                moment = access.safe_get_full_optimizer_state(mine, key)
                torch.testing.assert_close(moment, theirs.state[other][key], **tolerance)
    _fragments_make_the_whole(pairs[0][0])
    _writing(engine, model)
    engine.destroy()


def _fragments_make_the_whole(param: Tensor) -> None:
    """The local forms' pieces, one after another, are the full form (one of them where all own everything)."""
    home = home_of(param)
    assert home is not None
    masters = (access.safe_get_local_fp32_param(param), access.safe_get_full_fp32_param(param))
    key = "exp_avg"
    moments = (access.safe_get_local_optimizer_state(param, key), access.safe_get_full_optimizer_state(param, key))
    for local, full in (masters, moments):
        assert local is not None
        assert full is not None
        pieces: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(pieces, local)
        if home.buffer.states.whole:  # type: ignore[union-attr]
            pieces = pieces[:1]
        assert torch.equal(torch.cat(pieces), full.flatten())


def _writing(engine: Any, model: Stack) -> None:
    weight = model.blocks[2].up.weight
    name = "blocks.2.up.weight"
    value = torch.arange(float((2 * WIDTH + 1) * WIDTH)).view(-1, WIDTH) / 128
    access.safe_set_full_fp32_param(weight, value)
    assert torch.equal(access.safe_get_full_fp32_param(weight), value)  # type: ignore[arg-type]
    assert torch.equal(full_weights(model)[name].float(), value.to(weight.dtype).float())
    untouched = access.safe_get_full_fp32_param(model.blocks[2].up.bias)
    access.safe_set_full_optimizer_state(weight, torch.full_like(value, 2.0), "exp_avg")
    access.safe_set_full_optimizer_state(weight, torch.full_like(value, 4.0), "exp_avg_sq")
    assert torch.equal(access.safe_get_full_optimizer_state(weight, "exp_avg"), torch.full_like(value, 2.0))  # type: ignore[arg-type]
    local = access.safe_get_local_fp32_param(weight)
    assert local is not None
    access.safe_set_local_fp32_param(weight, local * 2)
    assert torch.equal(full_weights(model)[name].float(), (value * 2).to(weight.dtype).float())
    assert torch.equal(access.safe_get_full_fp32_param(model.blocks[2].up.bias), untouched)  # type: ignore[arg-type]
    local = access.safe_get_local_optimizer_state(weight, "exp_avg")
    assert local is not None
    access.safe_set_local_optimizer_state(weight, local + 1.0, "exp_avg")
    assert torch.equal(access.safe_get_full_optimizer_state(weight, "exp_avg"), torch.full_like(value, 3.0))  # type: ignore[arg-type]
    engine.backward(mean_square(engine(data(9)[dist.get_rank()]).float()))
    access.safe_set_full_grad(weight, torch.full_like(value, 0.5))
    assert torch.equal(access.safe_get_full_grad(weight), torch.full_like(value, 0.5))  # type: ignore[arg-type]
    local = access.safe_get_local_grad(weight)
    assert local is not None
    access.safe_set_local_grad(weight, local - 0.25)
    assert torch.equal(access.safe_get_full_grad(weight), torch.full_like(value, 0.25))  # type: ignore[arg-type]
    engine.step()
    moment = access.safe_get_full_optimizer_state(weight, "exp_avg")
    torch.testing.assert_close(moment, torch.full_like(value, 0.9 * 3.0 + 0.1 * 0.25))
    for wrong in (
        lambda: access.safe_set_full_fp32_param(weight, torch.zeros(3)),
        lambda: access.safe_set_full_fp32_param(model.blocks[1].up.weight, torch.zeros(3)),
        lambda: access.safe_set_full_optimizer_state(weight, value, "no_such"),
    ):
        with pytest.raises(ValueError):
            wrong()


def every_cell() -> None:
    for dtype in ("fp32", "fp16"):
        for stage in range(4):
            print("case", dtype, stage)
            against_torch(stage, dtype)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_states_of_parameters(world: int) -> None:
    run_distributed(every_cell, world, timeout=100)


def updated_together() -> None:
    for stage in (1, 2, 3):
        model = Stack()
        model.outlet.requires_grad_(False)
        engine, *_ = initialize(model=model, config=base_config(stage))
        engine.backward(mean_square(engine(data(1)[dist.get_rank()])))
        before = access.safe_get_full_grad(model.inlet.weight)
        assert before is not None
        kept = id(model.inlet.bias)

        def tripled(old: Tensor | None, param: Tensor, kept: int = kept) -> Tensor | None:
            return None if old is None or id(param) == kept else old * 3

        bias = access.safe_get_full_grad(model.inlet.bias)
        access.safe_update_full_grad_vectorized(list(model.parameters()), tripled)
        torch.testing.assert_close(access.safe_get_full_grad(model.inlet.weight), before * 3)
        torch.testing.assert_close(access.safe_get_full_grad(model.inlet.bias), bias)
        engine.destroy()


def test_updated_together() -> None:
    run_distributed(updated_together, 2, timeout=60)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_module_in_another_dtype_than_its_last_engine(stage: int) -> None:
    """Masters were made of values rounded to the dtype of the engine before."""
    model = Stack()
    values = [p.detach().clone() for p in model.parameters()]
    narrow = {**base_config(stage), "bf16": {"enabled": True}}
    for config in (narrow, narrow, base_config(stage)):
        model.float()
        with torch.no_grad():
            for param, value in zip(model.parameters(), values, strict=True):
                param.copy_(value)
        engine, *_ = initialize(model=model, config=config)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16 if config is narrow else torch.float32}
        for param, value in zip(model.parameters(), values, strict=True):
            torch.testing.assert_close(access.safe_get_full_fp32_param(param), value, rtol=0, atol=0)
        engine.destroy()
