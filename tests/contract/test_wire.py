"""Gradients and parameters that travel in few bits: what the model computes with, what is kept exact, what is sent.

One and two hops, stages, accumulation, dtypes, feedback, resumed runs. Off is bit-identical: test_collectives_recorded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_hf import initialize
from ds_hf.engine.comm.log import CollectiveLog
from ds_hf.engine.zero.access import safe_get_full_fp32_param
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.errors import ConfigError
from tests.contract.test_hierarchical import config
from tests.contract.test_parity import batches, model
from tests.helpers.distributed import run_distributed

STEPS = 6
QWZ, QGZ = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
WHOLE = {"stage3_gather_16bit_weights_on_model_save": True}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
Cell = tuple[int, int, dict[str, Any], dict[str, Any]]  # stage, accumulation, keys of zero, others


def wire(**keys: Any) -> dict[str, Any]:
    return {"ds_hf": {"wire": keys}}


def train(stage: int, accumulation: int, zero: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Losses, norms, bytes by operation in the last step, and how far gathered weights are from the masters."""
    rank, world = dist.get_rank(), dist.get_world_size()
    trained = model()
    engine, *_ = initialize(model=trained, config=config(stage, accumulation, zero, **more))
    losses, norms = [], []
    nbytes: dict[str, int] = {}
    note = CollectiveLog.__call__

    def record(log: CollectiveLog, operation: str, what: str, tensor: Any = None) -> CollectiveLog:
        if tensor is not None and "the " in what:
            nbytes[operation] = nbytes.get(operation, 0) + tensor.nbytes
        return note(log, operation, what, tensor)

    for step in batches(accumulation, world)[:STEPS]:
        nbytes.clear()
        CollectiveLog.__call__ = record  # type: ignore[method-assign]
        total = torch.zeros((), device=engine.device)
        for micro in step:
            loss = engine(micro[rank].to(engine.device))
            total += loss.detach().float() / accumulation
            engine.backward(loss)
            engine.step()
        CollectiveLog.__call__ = note  # type: ignore[method-assign]
        dist.all_reduce(total)
        losses.append(total.item() / world)
        norms.append(engine.get_global_grad_norm())
    with GatheredParameters(trained.parameters()):
        shown = {n: p.detach().float().cpu().clone() for n, p in trained.named_parameters()}
    masters = {n: safe_get_full_fp32_param(p).cpu() for n, p in trained.named_parameters()}
    dtype = next(trained.parameters()).dtype
    nearest = {n: (value.to(dtype).float() - value).abs() for n, value in masters.items()}
    exact = all(bool(((shown[n] - masters[n]).abs() <= nearest[n]).all()) for n in shown)  # ties round away from zero
    skipped = engine.skipped_steps
    engine.destroy()
    return {"losses": losses, "norms": norms, "nbytes": nbytes, "exact": exact, "weights": shown, "skipped": skipped}


def train_each(cells: list[Cell]) -> list[dict[str, Any]]:
    return [train(*cell) for cell in cells]


def close(one: list[float], other: list[float], tolerance: float) -> bool:
    return all(abs(a - b) <= tolerance * abs(b) for a, b in zip(one, other, strict=True))


def compare(stage: int, accumulation: int, world: int, more: dict[str, Any], backend: str = "gloo") -> None:
    cells: list[Cell] = [
        (stage, accumulation, {}, more),
        (stage, accumulation, {}, {**more, **wire(gradients=8)}),
        (stage, accumulation, QGZ, more),
    ]
    if stage == 3:
        cells += [(3, accumulation, QWZ, more), (3, accumulation, {}, {**more, **wire(gradients=8, parameters=8)})]
    for plain, *packed in run_distributed(train_each, world, cells, timeout=120, backend=backend):
        assert plain["exact"]
        for index, found in enumerate(packed):
            assert found["exact"]  # gathered for users: the masters, whatever forward saw
            assert found["losses"] != plain["losses"]
            four = index == 1
            assert close(found["losses"], plain["losses"], 0.01), (index, found["losses"])
            assert close(found["norms"], plain["norms"], 0.1 if four else 0.03), (index, found["norms"], plain["norms"])


def test_stage_3_follows_plain_training() -> None:
    compare(3, 2, 2, {})


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("more", [{}, BF16, {"fp16": {"enabled": True, "initial_scale_power": 8}}], ids=str)
def test_stages_follow_plain_training(stage: int, world: int, more: dict[str, Any]) -> None:
    compare(stage, 1 + world % 2, world, more)


def test_bytes() -> None:
    """Two gathers and a sum a step: of 16 bits, and of 8 bits and a scale for each 256."""
    cells: list[Cell] = [(3, 1, {}, BF16), (3, 1, {}, {**BF16, **wire(gradients=8, parameters=8)}), (3, 1, QGZ, BF16)]
    for plain, eight, four in run_distributed(train_each, 2, cells):
        summed = plain["nbytes"]["reduce-scatter"]  # what a rank keeps; in blocks, what it gets of both
        assert eight["nbytes"]["all-gather"] < 0.54 * plain["nbytes"]["all-gather"]
        assert eight["nbytes"]["all-to-all"] < 2 * 0.54 * summed
        assert four["nbytes"]["all-to-all"] < 2 * 0.29 * summed
        assert "reduce-scatter" not in eight["nbytes"]


def test_two_hops_second_shards_and_feedback() -> None:
    cells: list[Cell] = [
        (3, 1, {}, {}),
        (3, 1, {}, wire(gradients=8, first_hop=2)),
        (2, 1, {**QGZ, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}, wire(first_hop=2)),
        (3, 2, {**QWZ, "zero_hpz_partition_size": 2}, {}),
        (3, 2, {"zero_hpz_partition_size": 2}, {}),
    ]
    for plain, two, loco, both, second in run_distributed(train_each, 4, cells, timeout=120):
        assert close(two["losses"], plain["losses"], 0.01)
        assert close(loco["losses"], plain["losses"], 0.01)
        assert both["losses"] != second["losses"]
        assert close(both["losses"], second["losses"], 0.01)
        assert both["exact"]
        assert both["nbytes"]["all-to-all"] < 0.3 * second["nbytes"]["all-to-all"]  # of fp32


def test_one_process_changes_nothing() -> None:
    (plain, packed), *_ = run_distributed(
        train_each, 1, [(3, 1, {}, {}), (3, 1, {**QWZ, **QGZ}, wire(gradients=8, parameters=8))]
    )
    assert plain["losses"] == packed["losses"]


def overflow() -> list[int]:
    """A gradient that is infinite on one rank makes all skip the step, and nothing is left of it."""
    trained = model()
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
    zero = {**QGZ, "zeropp_loco_param": {}}
    engine, *_ = initialize(model=trained, config=config(2, 1, zero, **fp16))
    skipped = []
    for index, step in enumerate(batches(1, dist.get_world_size())[:4]):
        loss = engine(step[0, dist.get_rank()])
        engine.backward(loss * (float("inf") if index == 1 and dist.get_rank() == 1 else 1))
        engine.step()
        skipped.append(engine.skipped_steps)
    assert all(p.isfinite().all() for p in trained.parameters())
    engine.destroy()
    return skipped


def test_an_infinity_of_one_rank_skips_the_step_of_all() -> None:
    assert run_distributed(overflow, 2) == [[0, 1, 1, 1]] * 2


def save(folder: str) -> dict[str, torch.Tensor]:
    trained = model()
    engine, *_ = initialize(model=trained, config=config(3, 1, WHOLE, **wire(gradients=8, parameters=8)))
    for step in batches(1, dist.get_world_size())[:3]:
        engine.backward(engine(step[0, dist.get_rank()]))
        engine.step()
    engine.save_checkpoint(folder)
    weights = engine._consolidated_16bit_state_dict()
    with GatheredParameters(trained.parameters()):
        shown = {n: p.detach().clone() for n, p in trained.named_parameters()}
    if weights:  # on rank 0
        assert all(torch.equal(weights[n].cpu(), value) for n, value in shown.items())
    engine.destroy()
    return shown


def load(folder: str) -> dict[str, torch.Tensor]:
    trained = model()
    engine, *_ = initialize(model=trained, config=config(3, 1, {}, **wire(gradients=8, parameters=8)))
    engine.load_checkpoint(folder)
    with GatheredParameters(trained.parameters()):
        shown = {n: p.detach().clone() for n, p in trained.named_parameters()}
    engine.destroy()
    return shown


def test_what_is_saved_is_exact_and_loaded_at_another_world(tmp_path: Path) -> None:
    saved = run_distributed(save, 2, str(tmp_path))[0]
    for loaded in run_distributed(load, 3, str(tmp_path)):
        assert all(torch.equal(loaded[name], value) for name, value in saved.items())


def refused(hop: int) -> str:
    with pytest.raises(ConfigError) as error:
        initialize(model=model(), config=config(2, 1, QGZ, **wire(first_hop=hop)))
    return str(error.value)


def test_a_hop_that_does_not_divide_is_refused() -> None:
    for message in run_distributed(refused, 4, 3):
        assert "config: 1 fault\n  1. /ds_hf/wire/first_hop: " in message  # this process's own, or another's
        assert "groups of 3" in message
        assert "1, 2, 4" in message
