"""bf16 masters, gradients and moments (``bf16_master_weights_and_grads``, ``bf16_optimizer_states``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ds_hf import Engine, initialize, log
from tests.contract.test_parity import NextTokenLM
from tests.helpers.distributed import run_distributed
from tests.helpers.models import token_batches
from tests.helpers.parity import base_config

STEPS = 12
ADAMW = {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.01}}


def settings(stage: int, moments: bool, optimizer: dict[str, Any] = ADAMW, **own: Any) -> dict[str, Any]:
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": moments}
    return base_config(stage, bf16=bf16, optimizer=optimizer, gradient_clipping=1.0, ds_hf=own)


def build(config: dict[str, Any], given: bool = False) -> Engine:
    torch.manual_seed(1)
    model = NextTokenLM()
    optimizer = None
    if given:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
        config = {key: value for key, value in config.items() if key != "optimizer"}
    return initialize(model=model, config=config, optimizer=optimizer)[0]


def train(engine: Engine, steps: int = STEPS) -> list[float]:
    losses = []
    batch = token_batches(4, 12)  # one, so that the loss falls
    for _ in range(steps):
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def curves(stage: int) -> dict[str, Any]:
    result: dict[str, Any] = {"fp32": train(build(base_config(stage, optimizer=ADAMW, gradient_clipping=1.0)))}
    for name, moments, given in (("fp32 moments", False, False), ("bf16 moments", True, False), ("torch", False, True)):
        engine = build(settings(stage, moments), given)
        result[name] = train(engine)
        optimizer = engine.optimizer
        assert optimizer is not None
        numel = sum(master.numel() for master in optimizer.masters.values())
        result[name, "bytes"] = optimizer.nbytes / numel
        result[name, "alias"] = all(
            master.data_ptr() == buffer.owned(whole=False).data_ptr() for buffer, master in optimizer.masters.items()
        )
    return result


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_losses_follow_fp32_in_the_bytes_that_were_asked_for(stage: int) -> None:
    for result in run_distributed(curves, 2, stage):
        for name, per_element in (("fp32 moments", 8), ("bf16 moments", 4), ("torch", 8)):
            assert result[name] == pytest.approx(result["fp32"], rel=0.02), name
            assert result[name][-1] < result[name][0] - 0.05
            # alignment gaps have masters and no moments
            assert 0.9 * per_element < result[name, "bytes"] <= per_element
            assert result[name, "alias"], "masters are the parameters: nothing is kept twice"


def moved(stochastic: bool) -> float:
    """How far the weights go by updates of a hundredth of what bf16 can tell apart, as a share of what they should."""
    optimizer = {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 0.0, "betas": [0.0, 0.0]}}
    engine = build(settings(1, False, optimizer, stochastic_rounding=stochastic))
    assert engine.optimizer is not None
    (master, *_) = engine.optimizer.masters.values()
    with torch.no_grad():
        for value in engine.optimizer.masters.values():
            value.fill_(0.5)
    batch = token_batches(4, 12)
    for _ in range(20):
        engine.backward(engine(batch))
        engine.step()
    moments = next(iter(engine.optimizer.state.values()))
    hit = int((moments["exp_avg_sq"] > 0).sum())
    return float((master.float() - 0.5).abs().sum()) / (hit * 20 * 1e-5)


def test_small_updates_count_on_average_with_stochastic_rounding_only() -> None:
    assert moved(False) == 0.0
    assert moved(True) > 0.2


def resumed(folder: str, stage: int) -> None:
    for optimizer in (ADAMW, {"type": "Lion", "params": {"lr": 1e-3}}, {"type": "Adagrad", "params": {"lr": 0.01}}):
        config = settings(stage, True, optimizer)
        whole = build(config)
        train(whole, 2)
        whole.save_checkpoint(folder, tag=str(optimizer["type"]))
        second = build(config)
        second.load_checkpoint(folder, tag=str(optimizer["type"]))
        assert train(second, 3) == train(whole, 3), optimizer
        assert second.optimizer is not None
        assert whole.optimizer is not None
        for one, other in zip(second.optimizer.masters.values(), whole.optimizer.masters.values(), strict=True):
            assert torch.equal(one, other)
        assert second.optimizer.moment_dtypes == {torch.bfloat16}


@pytest.mark.parametrize("stage", [2, 3])
def test_a_resumed_run_rounds_as_the_uninterrupted_one(tmp_path: Path, stage: int) -> None:
    run_distributed(resumed, 2, str(tmp_path), stage)


def loaded(folder: str) -> None:
    wide = build(base_config(2, optimizer=ADAMW, gradient_clipping=1.0, bf16={"enabled": True}))
    train(wide, 2)
    wide.save_checkpoint(folder, tag="wide")
    narrow = build(settings(3, True))
    narrow.load_checkpoint(folder, tag="wide")
    assert narrow.optimizer is not None
    assert narrow.optimizer.moment_dtypes == {torch.bfloat16}
    assert train(narrow, 3) == pytest.approx(train(wide, 3), rel=0.02)


def test_a_checkpoint_of_fp32_states_loads_into_narrow_ones(tmp_path: Path) -> None:
    run_distributed(loaded, 2, str(tmp_path))


@pytest.mark.parametrize(("name", "warned"), [("Lamb", True), ("AdamW", False), ("RMSprop", True)])
def test_a_rule_that_rounds_to_nearest_says_so(name: str, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    log.forget_said()
    build(settings(1, False, {"type": name, "params": {"lr": 1e-3}})).destroy()
    assert ("rounds bf16 master weights to nearest" in caplog.text) is warned
