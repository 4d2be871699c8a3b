"""``torch_autocast``: trains as plain torch under torch.autocast does, at every stage, whatever the caller opened."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.torch_autocast import get_autocast_dtype, init_autocast_params, is_autocast_initialized
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_hf import Engine, initialize, log
from ds_hf.engine.comm import collectives
from ds_hf.errors import ConfigError, DsHfError
from tests.helpers.distributed import run_distributed
from tests.helpers.models import TinyLM, token_batches
from tests.helpers.parity import Outcome, base_config, full_weights, sgd, train_both

STAGES = (0, 1, 2, 3)
BF16 = {"enabled": True, "dtype": "bf16"}
FP16 = {"enabled": True, "dtype": "fp16"}
SGD = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}
WORLD = 2


def loss_under_autocast(model: nn.Module, batch: Tensor) -> Tensor:
    """The reference opens autocast itself; the engine has to."""
    with torch.autocast("cpu", torch.bfloat16, enabled=not isinstance(model, Engine)):
        loss: Tensor = model(batch)
    return loss


def parity(stage: int, checkpointing: Any, micro: int, section: dict[str, Any], **more: Any) -> Outcome:
    torch.manual_seed(3)
    model = TinyLM(checkpointing=checkpointing, tied=False)
    for name, param in model.named_parameters():
        if name.endswith("norm.bias"):
            nn.init.normal_(param, std=0.5)  # from zero, rounding would be all there is of them
    batches = token_batches(3, micro, WORLD, 2, 6)
    config = base_config(stage, optimizer=SGD, torch_autocast=section, **more)
    same = f"{checkpointing} {micro}"
    return train_both(model, loss_under_autocast, batches, config, reference_optimizer=sgd, same=same)


def parities(stage: int) -> list[Outcome]:
    off = {"enabled": False}
    return [
        parity(stage, None, 1, BF16),
        parity(stage, "nonreentrant", 2, BF16),
        parity(stage, "reentrant", 1, {**BF16, "lower_precision_safe_modules": []}),
        parity(stage, None, 1, {"enabled": True}),  # bf16 as documented
        parity(stage, None, 1, off),
    ]


@pytest.mark.parametrize("stage", STAGES)
def test_trains_as_torch_under_autocast(stage: int) -> None:
    """Two processes against torch on the whole batch. bf16 has 8 bits: gradients that travel in it are off by 2**-9;
    where all of them travel in fp32 nothing is off."""
    for outcomes in run_distributed(parities, WORLD, stage, timeout=100):
        *under, without = outcomes
        for outcome in under:
            assert outcome.weights < 1e-3, outcomes
            assert outcome.losses < 1e-3, outcomes
            assert outcome.norms < 2e-3, outcomes
        in_fp32 = under[2]
        assert in_fp32.weights == in_fp32.losses == 0.0, outcomes
        assert without.weights > 1e-4, outcomes
        assert without.losses > 1e-5, outcomes


def offloaded() -> list[Outcome]:
    there = {"offload_optimizer": {"device": "cpu"}}
    return [
        parity(2, None, 2, BF16, zero_optimization={"stage": 2, **there}),
        parity(3, None, 1, BF16, zero_optimization={"stage": 3, "offload_param": {"device": "cpu"}, **there}),
    ]


def test_offloaded_states() -> None:
    for outcomes in run_distributed(offloaded, WORLD, timeout=60):
        assert all(outcome.weights < 1e-3 and outcome.losses < 1e-3 for outcome in outcomes), outcomes


# -- what travels -----------------------------------------------------------------------------------------------------


def sent_by_dtype(stage: int, section: dict[str, Any], **more: Any) -> dict[str, int]:
    """Bytes of the gradients that one backward reduces, by dtype, without the padding of the flat layouts."""
    torch.manual_seed(1)
    engine, *_ = initialize(model=TinyLM(tied=False), config=base_config(stage, torch_autocast=section, **more))
    sent: Counter[str] = Counter()
    original = collectives.reduce_gradient

    def counted(full: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        sent[str(full.dtype)] += full.nbytes
        return original(full, *args, **kwargs)

    collectives.reduce_gradient = counted
    try:
        engine.backward(engine(token_batches(2, 4)))
    finally:
        collectives.reduce_gradient = original
    engine.step()
    for gradient in engine.reducer.buffers:
        layout = gradient.buffer.layout
        padding = layout.numel - sum(slot.numel for slot in layout.slots)
        sent[str(gradient.dtype)] -= padding * gradient.dtype.itemsize
    assert {param.dtype for param in engine.module.parameters()} == {torch.float32}
    engine.destroy()
    return dict(sent)


def all_sent() -> list[Any]:
    default = [sent_by_dtype(stage, BF16) for stage in STAGES]
    embedding = {**BF16, "lower_precision_safe_modules": ["torch.nn.Embedding"]}
    wide = sent_by_dtype(2, BF16, communication_data_type="fp16")
    return [default, sent_by_dtype(2, embedding), sent_by_dtype(2, {"enabled": False}), wide]


def test_bytes_of_reduced_gradients() -> None:
    model = TinyLM(tied=False)
    numel = Counter[type]()
    for module in model.modules():
        numel[type(module)] += sum(p.numel() for p in module.parameters(recurse=False))
    linear, embedding = numel[nn.Linear], numel[nn.Embedding]
    rest = sum(numel.values()) - linear
    for default, chosen, off, wide in run_distributed(all_sent, WORLD, timeout=60):
        assert default == [{"torch.bfloat16": 2 * linear, "torch.float32": 4 * rest}] * 4
        others = 4 * (linear + rest - embedding)
        assert chosen == {"torch.bfloat16": 2 * embedding, "torch.float32": others}
        assert off == {"torch.float32": 4 * (linear + rest)}
        assert wide == {"torch.bfloat16": 2 * linear, "torch.float16": 2 * rest}


# -- contexts ---------------------------------------------------------------------------------------------------------


class Witness(nn.Module):
    """Notes the autocast under which each call of its block runs, recomputations included."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(8, 8)
        self.seen: list[Any] = []

    def _run(self, x: Tensor) -> Tensor:
        enabled = torch.is_autocast_enabled("cpu")
        self.seen.append(torch.get_autocast_dtype("cpu") if enabled else None)
        self.cached = torch.is_autocast_cache_enabled()
        return self.block(x)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self._run, x, use_reentrant=False)
        return out


def witnessed(stage: int, section: dict[str, Any], outside: torch.dtype | None) -> tuple[list[Any], Any]:
    """Autocast in forward, in its recomputation and in evaluation; the dtype of what is computed."""
    model = Witness()
    engine, *_ = initialize(model=model, config=base_config(stage, torch_autocast=section))
    x = torch.ones(2, 8)
    with torch.autocast("cpu", outside, enabled=outside is not None):
        out = engine(x)
        assert torch.is_autocast_enabled("cpu") == (outside is not None)
        assert outside is None or torch.get_autocast_dtype("cpu") == outside
    engine.backward(out.float().sum())
    engine.step()
    engine.eval()
    with torch.no_grad():
        assert engine(x).dtype == out.dtype
    engine.destroy()
    assert model.cached == (not section["enabled"] or stage != 3)  # a cast weight would outlive its unit
    return model.seen, out.dtype


def contexts(stage: int) -> list[Any]:
    cases = ((BF16, None), (BF16, torch.float16), (FP16, torch.bfloat16), ({"enabled": False}, torch.bfloat16))
    return [witnessed(stage, *case) for case in cases]


@pytest.mark.parametrize("stage", [0, 3])
def test_the_configuration_decides_in_forward_recomputation_and_evaluation(stage: int) -> None:
    for under_bf16, in_fp16, in_bf16, off in run_distributed(contexts, WORLD, stage, timeout=60):
        assert under_bf16 == in_fp16 == ([torch.bfloat16] * 3, torch.bfloat16)
        assert in_bf16 == ([torch.float16] * 3, torch.float16)
        assert off == ([None] * 3, torch.float32)


def test_an_autocast_that_is_switched_off_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    log.forget_said()
    engine, *_ = initialize(model=nn.Linear(4, 4), config=base_config(0))
    with caplog.at_level(logging.WARNING, logger="ds_hf"), torch.autocast("cpu", torch.bfloat16):
        assert engine(torch.ones(1, 4)).dtype is torch.float32
        engine(torch.ones(1, 4))
    engine.destroy()
    told = [record.getMessage() for record in caplog.records if "torch.autocast" in record.getMessage()]
    assert len(told) == 1
    assert '"torch_autocast": {"enabled": true' in told[0]


def stale() -> tuple[float, float]:
    """The second loss inside one long autocast of the caller's, and the one of fresh weights."""
    torch.manual_seed(2)
    engine, *_ = initialize(model=nn.Linear(8, 1), config=base_config(0, torch_autocast=BF16, optimizer=SGD))
    x = torch.ones(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            engine.backward(engine(x).float().square().mean())
            engine.step()
        long = float(engine(x).detach().float().mean())
    return long, float(engine(x).detach().float().mean())


def test_casts_from_before_a_step_are_not_used_again() -> None:
    long, fresh = stale()
    assert long == fresh


# -- fp16 -------------------------------------------------------------------------------------------------------------


class Exploding(nn.Module):
    """``loss * factor``; a factor of inf makes every gradient infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return self.norm(self.layer(x)).float().square().mean() * factor


def scales(stage: int, folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    config = base_config(stage, torch_autocast=FP16)
    engine, *_ = initialize(model=Exploding(), config=config)
    x = torch.linspace(-1, 1, 12).view(2, 6)
    trace = []
    for factor in (1.0, float("inf"), float("inf"), 1.0):
        before = full_weights(engine.module)
        engine.backward(engine(x, factor if dist.get_rank() else 1.0))
        engine.step()
        after = full_weights(engine.module)
        kept = all(torch.equal(before[name], after[name]) for name in before)
        trace.append((engine.loss_scale(), engine.was_step_applied(), kept))
    norm = engine.get_global_grad_norm()
    engine.save_checkpoint(folder, "a")
    with pytest.raises(DsHfError, match=r"engine\.scale"):
        engine(x).backward()
    engine(x)
    engine.scale(engine(x)).backward()
    engine.step()
    found = {"trace": trace, "norm": norm, "dynamic": engine.dynamic_loss_scale(), "applied": engine.was_step_applied()}
    engine.destroy()
    again, *_ = initialize(model=Exploding(), config=config)
    again.load_checkpoint(folder, "a")
    found["loaded"] = again.loss_scale(), again.global_steps
    again.destroy()
    bf16, *_ = initialize(model=Exploding(), config=base_config(stage, torch_autocast=BF16))
    bf16.load_checkpoint(folder, "a")  # without a scaler
    plain, *_ = initialize(model=Exploding(), config=base_config(stage))
    plain.load_checkpoint(folder, "a")  # other units
    mine, theirs = full_weights(bf16.module), full_weights(plain.module)
    found["equal"] = all(torch.equal(mine[name], theirs[name]) for name in mine)
    found["bf16"] = bf16.loss_scale(), bf16.dynamic_loss_scale(), bf16.global_steps
    bf16.backward(bf16(x, float("inf")))  # as torch under bf16 autocast: nothing looks
    bf16.step()
    found["bf16 looks"] = not bf16.was_step_applied()
    bf16.destroy()
    plain.destroy()
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_fp16_scales_the_loss_and_bf16_does_not(stage: int, tmp_path: Path) -> None:
    """An overflow halves the scale at once, and skips the step on all ranks though one has it."""
    both = run_distributed(scales, WORLD, stage, str(tmp_path), timeout=60)
    assert both[0] == both[1]
    found = both[0]
    halved = [(2.0**16, True, False), (2.0**15, False, True), (2.0**14, False, True), (2.0**14, True, False)]
    assert found["trace"] == halved
    assert 0 < found["norm"] < 10
    assert (found["dynamic"], found["applied"], found["equal"]) == (True, True, True)
    assert found["loaded"] == (2.0**14, 4)
    assert (found["bf16"], found["bf16 looks"]) == ((1.0, False, 4), False)


# -- names and faults -------------------------------------------------------------------------------------------------


def test_names_of_deepspeed() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    engine, *_ = initialize(model=module, config=base_config(1, torch_autocast={"enabled": True}))
    names = engine.torch_autocast_lower_precision_safe_modules()
    assert names[0] == "torch.nn.modules.linear.Linear"
    assert (engine.torch_autocast_enabled(), engine.torch_autocast_dtype()) == (True, torch.bfloat16)
    assert (is_autocast_initialized(engine), get_autocast_dtype(engine)) == (True, torch.bfloat16)
    assert module[0].weight.comm_dtype is module[0].bias.comm_dtype is torch.bfloat16
    assert not hasattr(module[1].weight, "comm_dtype")
    init_autocast_params(engine, torch.bfloat16, ["torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d", *names[:1]])
    for dtype, classes in ((torch.float16, None), (torch.bfloat16, ["torch.nn.Linear"])):
        with pytest.raises(ConfigError, match="torch_autocast"):
            init_autocast_params(engine, dtype, classes)
    engine.destroy()
    plain, *_ = initialize(model=module, config=base_config(1))
    assert not hasattr(module[0].weight, "comm_dtype")
    assert not is_autocast_initialized(plain)
    plain.destroy()


def test_a_class_that_there_is_not_is_named() -> None:
    section = {**BF16, "lower_precision_safe_modules": ["torch.nn.Linear", "torch.nn.Linaer", "no_such.Thing"]}
    with pytest.raises(ConfigError) as caught:
        initialize(model=nn.Linear(2, 2), config=base_config(0, torch_autocast=section))
    pointers = [fault.pointer for fault in caught.value.faults]
    assert pointers == [f"/torch_autocast/lower_precision_safe_modules/{index}" for index in (1, 2)]
    assert "torch.nn.Linaer" in str(caught.value)


def in_sixteen_bits(stage: int) -> tuple[Any, ...]:
    """A bf16 block beside autocast, as accelerate's mixed_precision makes it: parameters in bf16, one buffer a unit."""
    torch.manual_seed(0)
    config = base_config(stage, torch_autocast=BF16, bf16={"enabled": True})
    engine, *_ = initialize(model=Exploding(), config=config)
    x = torch.linspace(-1, 1, 12).view(2, 6)
    losses = []
    for _ in range(5):
        loss = engine(x - dist.get_rank() * 0.1)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    dtypes = {gradient.dtype for gradient in engine.reducer.buffers}
    result = engine.dtype, dtypes, len(engine.reducer.buffers), losses[-1] < losses[0]
    engine.destroy()
    return result


@pytest.mark.parametrize("stage", [1, 3])
def test_beside_a_bf16_block(stage: int) -> None:
    for found in run_distributed(in_sixteen_bits, WORLD, stage, timeout=60):
        assert found == (torch.bfloat16, {torch.bfloat16}, 1, True)
