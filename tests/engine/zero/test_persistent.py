"""``stage3_param_persistence_threshold``, where it is set: small parameters stay whole, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_hf import initialize
from ds_hf.engine.zero.access import safe_get_full_fp32_param
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.engine.zero.init import Init
from tests.helpers.distributed import run_distributed
from tests.helpers.models import TinyLM, token_batches
from tests.helpers.parity import base_config, full_weights

ADAM = {"type": "AdamW", "params": {"lr": 1e-2}}


def trained(threshold: int | None, in_all: int | None = None, *, under_init: bool = False) -> tuple[Any, list[float]]:
    zero: dict[str, Any] = {"stage": 3}
    if threshold is not None:
        zero["stage3_param_persistence_threshold"] = threshold
    if in_all is not None:
        zero["stage3_model_persistence_threshold"] = in_all
    config = {**base_config(3, optimizer=ADAM, gradient_clipping=1.0), "zero_optimization": zero}
    torch.manual_seed(1)
    if under_init:
        with Init(config_dict_or_path=config):
            model = TinyLM(vocab=32, width=16, depth=2)
    else:
        model = TinyLM(vocab=32, width=16, depth=2)
    engine, *_ = initialize(model=model, config=config)
    losses = []
    for step in range(3):
        loss = engine(token_batches(2, 4, vocab=32) + 0 * step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return engine, losses


def readable(engine: Any) -> dict[str, Tensor]:
    """Parameters that can be used between calls."""
    return {name: param for name, param in engine.module.named_parameters() if param.numel()}


def small_ones_stay() -> None:
    plain, expected = trained(None)
    assert not readable(plain), "by default every parameter is sharded"
    weights = full_weights(plain.module)
    for under_init in (False, True):
        engine, losses = trained(100, under_init=under_init)
        if not under_init:
            assert losses == pytest.approx(expected, rel=1e-6)
            for name, value in full_weights(engine.module).items():
                torch.testing.assert_close(value, weights[name], rtol=1e-6, atol=1e-7)
        whole = readable(engine)
        assert set(whole) == {name for name, value in weights.items() if value.numel() < 100}
        assert whole
        for name, param in engine.module.named_parameters():  # TRL and others ask every parameter of a stage-3 model
            assert (param.ds_persist, param.ds_status.name == "AVAILABLE") == (name in whole,) * 2
            assert (param.ds_shape, param.ds_active_sub_modules) == (weights[name].shape, set())
            param.all_gather()
            assert param.shape == param.ds_shape
            param.partition()
        for name, value in whole.items():
            assert torch.equal(engine.module.get_parameter(name).ds_tensor, value.flatten())
            assert torch.equal(value, full_weights(engine.module)[name]), "the values after the step, on every rank"
        engine.destroy()
    engine, losses = trained(100, in_all=40)
    assert sum(p.numel() for p in readable(engine).values()) <= 40
    assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("world", [1, 2])
def test_small_parameters_stay_whole(world: int) -> None:
    run_distributed(small_ones_stay, world, timeout=90)


def checkpoints(folder: Path) -> None:
    """A checkpoint fits with and without, as at another stage."""
    engine, _ = trained(100)
    engine.save_checkpoint(str(folder))
    expected = full_weights(engine.module)
    other, _ = trained(None)
    assert other.load_checkpoint(str(folder))[0] is not None
    again, _ = trained(50)
    again.load_checkpoint(str(folder))
    for loaded in (other, again):
        for name, value in full_weights(loaded.module).items():
            assert torch.equal(value, expected[name]), name


def test_checkpoints_with_and_without(tmp_path: Path) -> None:
    run_distributed(checkpoints, 2, tmp_path, timeout=90)


def written_by_one_rank() -> None:
    """What a rank writes inside ``GatheredParameters`` reaches all, and the masters, of small parameters too."""
    for more in ({}, {"bf16": {"enabled": True}}):
        model = torch.nn.Linear(8, 8)
        zero = {"stage": 3, "stage3_param_persistence_threshold": 20}
        engine, *_ = initialize(model=model, config={**base_config(3, **more), "zero_optimization": zero})
        assert [model.weight.numel(), model.bias.numel()] == [0, 8]
        with GatheredParameters([model.weight, model.bias], modifier_rank=1):
            if dist.get_rank() == 1:
                with torch.no_grad():
                    model.weight.fill_(3.0)
                    model.bias.fill_(7.0)
        assert model.bias.tolist() == [7.0] * 8
        for param, value in ((model.weight, 3.0), (model.bias, 7.0)):
            master = safe_get_full_fp32_param(param)
            assert master is not None
            assert master.eq(value).all()
        engine.destroy()


def test_written_by_one_rank() -> None:
    run_distributed(written_by_one_rank, 2, timeout=60)
