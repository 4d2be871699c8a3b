"""fp16 and bf16: loss scales, skipped steps, unscaled norms; nothing changes in a step that is skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hf import Engine, initialize
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.errors import DsHfError, LossScaleError
from tests.helpers.distributed import run_distributed
from tests.helpers.parity import base_config, full_weights

STAGES = (0, 1, 2, 3)
ADAM = {"type": "AdamW", "params": {"lr": 1e-2}}


class Switchable(nn.Module):
    """``loss * factor``: a factor of inf makes every gradient infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.float().square().mean() * factor


def make(stage: int, **config: Any) -> Engine:
    torch.manual_seed(4)
    return initialize(model=Switchable(), config=base_config(stage, optimizer=ADAM, **config))[0]


def states(engine: Engine) -> list[Tensor]:
    """Weights, masters and moments, copied."""
    assert engine.optimizer is not None
    with GatheredParameters(engine.module.parameters()):
        found = [p.detach().clone() for p in engine.module.parameters()]
    found += [m.clone() for m in engine.optimizer.masters.values()]
    return found + [v.clone() for s in engine.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]


def same(mine: list[Tensor], others: list[Tensor]) -> bool:
    return len(mine) == len(others) and all(torch.equal(a, b) for a, b in zip(mine, others, strict=True))


def step(engine: Engine, factor: float = 1.0) -> None:
    x = torch.linspace(-1, 1, 20).view(4, 5) + dist.get_rank()
    engine.backward(engine(x, factor))
    engine.step()


def dynamic(stage: int) -> list[tuple[float, int, bool, float]]:
    """Scale, skipped steps, applied, learning rate after each of good, bad, bad, good, good, good."""
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 2, "loss_scale_window": 2, "min_loss_scale": 1}
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 8, "warmup_type": "linear"}}
    engine = make(stage, fp16=fp16, scheduler=schedule)
    trace = []
    for factor in (1.0, float("inf"), float("inf"), 1.0, 1.0, 1.0):
        # only one rank overflows: all must skip
        bad = factor != 1.0
        before = states(engine)
        step(engine, factor if dist.get_rank() == dist.get_world_size() - 1 else 1.0)
        assert same(before, states(engine)) == bad
        assert engine.optimizer is not None
        assert engine.optimizer.overflow == bad
        assert engine.was_step_applied() != bad
        trace.append((engine.loss_scale(), engine.skipped_steps, engine.was_step_applied(), engine.get_lr()[0]))
    assert engine.global_steps == 6
    engine.destroy()
    return trace


def every_stage(function: Any) -> list[Any]:
    return [function(stage) for stage in STAGES]


@pytest.mark.parametrize("world", [1, 2])
def test_overflow_skips_everything(world: int) -> None:
    for traces in run_distributed(every_stage, world, dynamic, timeout=60):
        for stage, trace in enumerate(traces):
            without_zero = [256.0, 128.0, 64.0, 64.0, 64.0, 128.0]  # DeepSpeed's FP16_Optimizer has no hysteresis
            expected = [256.0, 256.0, 128.0, 128.0, 128.0, 256.0] if stage else without_zero
            assert [scale for scale, *_ in trace] == expected
            assert [skipped for _, skipped, *_ in trace] == [0, 1, 2, 2, 2, 2]
            lrs = [lr for *_, lr in trace]
            assert lrs[0] == lrs[1] == lrs[2] < lrs[3] < lrs[4] < lrs[5]


def norms(stage: int) -> dict[str, float]:
    """Norm of the first step in each precision."""
    found = {}
    for name, more in {
        "fp32": {},
        "bf16": {"bf16": {"enabled": True}},
        "static": {"fp16": {"enabled": True, "loss_scale": 64}},
        "dynamic": {"fp16": {"enabled": True, "initial_scale_power": 10}},
    }.items():
        engine = make(stage, **more)
        assert engine.get_global_grad_norm() is None
        step(engine)
        norm = engine.get_global_grad_norm()
        assert norm is not None
        found[name] = norm
        engine.destroy()
    return found


def test_norms_are_unscaled_and_equal_at_all_stages() -> None:
    for found in run_distributed(every_stage, 2, norms, timeout=60):
        for name, tolerance in (("fp32", 1e-6), ("bf16", 1e-6), ("static", 1e-3), ("dynamic", 1e-3)):
            values = [by_stage[name] for by_stage in found]
            assert values == pytest.approx([values[0]] * 4, rel=tolerance)
            assert values[0] == pytest.approx(found[0]["fp32"], rel=2e-2)


def static(stage: int) -> None:
    engine = make(stage, fp16={"enabled": True, "loss_scale": 32})
    assert not engine.dynamic_loss_scale()
    step(engine)
    before = states(engine)
    step(engine, float("nan"))
    assert same(before, states(engine))
    assert (engine.loss_scale(), engine.skipped_steps) == (32.0, 1)
    step(engine)
    assert not same(before, states(engine))
    engine.destroy()


def checked_bf16(stage: int) -> None:
    engine = make(stage, bf16={"enabled": True, "check_grad_overflow": True})
    step(engine)
    before = states(engine)
    step(engine, float("inf"))
    assert same(before, states(engine))
    assert engine.skipped_steps == 1
    step(engine)
    assert engine.global_steps == 3
    engine.destroy()


def at_minimum(stage: int) -> None:
    engine = make(stage, fp16={"enabled": True, "initial_scale_power": 1, "hysteresis": 1, "min_loss_scale": 1})
    step(engine, float("inf"))
    assert engine.loss_scale() == 1.0
    if stage:
        with pytest.raises(LossScaleError, match="bf16"):
            step(engine, float("inf"))
    else:  # as DeepSpeed: without ZeRO it goes on
        step(engine, float("inf"))
        assert (engine.skipped_steps, engine.loss_scale()) == (2, 1.0)
    engine.destroy()


def small_gradients(stage: int) -> float:
    """Gradients below fp16's smallest number survive by the loss scale; returns the norm."""
    engine = make(stage, fp16={"enabled": True, "initial_scale_power": 16})
    step(engine, 1e-6)
    norm = engine.get_global_grad_norm()
    assert norm is not None
    engine.destroy()
    return norm / 1e-6


def scenarios() -> list[list[float]]:
    for scenario in (static, checked_bf16, at_minimum):
        every_stage(scenario)
    return [every_stage(small_gradients)]


def test_static_scale_bf16_check_and_minimum() -> None:
    expected = run_distributed(every_stage, 2, norms, timeout=60)[0][0]["fp32"]
    for (found,) in run_distributed(scenarios, 2, timeout=60):
        assert found == pytest.approx([expected] * 4, rel=2e-2)


def inputs_and_buffers() -> list[Any]:
    """Dtypes that a bf16 model sees and keeps."""

    class Probe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.register_buffer("inv_freq", torch.ones(2))
            self.seen: list[Any] = []

        def forward(self, x: Tensor, *, extra: dict[str, Any]) -> Tensor:
            self.seen = [x.dtype, extra["ids"].dtype, extra["pair"][0].dtype]
            return self.norm(x).float().sum()

    probe = Probe()
    engine, *_ = initialize(model=probe, config=base_config(2, bf16={"enabled": True}))
    engine.backward(engine(torch.randn(4, 3), extra={"ids": torch.arange(3), "pair": (torch.ones(1), "x")}))
    engine.step()
    assert engine.dtype == torch.bfloat16
    masters = {m.dtype for m in engine.optimizer.masters.values()}  # type: ignore[union-attr]
    return [*probe.seen, probe.norm.weight.dtype, probe.inv_freq.dtype, probe.norm.num_batches_tracked.dtype, masters]


def test_dtypes() -> None:
    bf16 = torch.bfloat16
    assert run_distributed(inputs_and_buffers, 1, timeout=60) == [
        [bf16, torch.int64, bf16, bf16, torch.float32, torch.int64, {torch.float32}]
    ]


def unscaled_backward() -> None:
    """``loss.backward()`` would leave the loss scale out: gradients 2**16 times too small, without a word."""
    for stage in STAGES:
        engine = make(stage, fp16={"enabled": True})
        before = states(engine)
        with pytest.raises(DsHfError, match=r"engine\.backward"):
            engine(torch.ones(2, 5)).backward()
        x = torch.ones(2, 5, requires_grad=True)
        (gradient,) = torch.autograd.grad(engine(x), x)  # asks nothing of the parameters
        assert gradient.shape == x.shape
        step(engine)
        assert not same(before, states(engine))
        mine, theirs = make(stage, fp16={"enabled": True}), make(stage, fp16={"enabled": True})
        step(mine)
        theirs.scale(theirs(torch.linspace(-1, 1, 20).view(4, 5) + dist.get_rank())).backward()
        theirs.step()
        assert same(states(mine), states(theirs))


def test_fp16_refuses_raw_backwards() -> None:
    run_distributed(unscaled_backward, 2, timeout=60)


def stepped(optimizer: str, stage: int, default: torch.dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).float()
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float32)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        config = base_config(stage) | {"optimizer": {"type": optimizer, "params": {"lr": 1e-2}}}
        engine = initialize(model=model, config=config)[0]
        for _ in range(2):
            engine.backward(engine(x).pow(2).mean())
            engine.step()
        weights = full_weights(engine.module)
        engine.destroy()
    finally:
        torch.set_default_dtype(before)
    return weights


def with_another_default_dtype() -> None:
    for optimizer, stage in (("AdamW", 0), ("AdamW", 2), ("Lamb", 0), ("AdamW", 3)):
        wanted = stepped(optimizer, stage, torch.float32)
        for default in (torch.bfloat16, torch.float64):
            found = stepped(optimizer, stage, default)
            assert all(torch.equal(found[name], value) for name, value in wanted.items()), (optimizer, stage, default)


def test_the_default_dtype_of_a_script_changes_no_number() -> None:
    """``torch.set_default_dtype(torch.bfloat16)``: what the engine makes for itself is fp32 all the same."""
    run_distributed(with_another_default_dtype, 2, timeout=60)
