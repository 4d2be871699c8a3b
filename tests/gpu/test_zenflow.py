"""ZenFlow on CUDA devices: the numbers of the same rule in plain torch, and steps that do not wait for the host."""

from __future__ import annotations

import pytest
import torch

from tests.contract.test_parity import CLIP
from tests.contract.test_zenflow import CELLS, EVERY, engine_of, plain, steps, weights
from tests.engine.optim.zenflow.test_store import steps_beside_an_update
from tests.helpers.distributed import run_distributed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def need(world: int) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA devices, found {torch.cuda.device_count()}")


def cells() -> None:
    world = torch.distributed.get_world_size()
    offloaded = [(3, 1, 0.0, {"zero": {"offload_param": {"device": "cpu"}}})]
    for stage, accumulation, clip, own in [*CELLS, *offloaded]:
        section, more = {**EVERY, **own}, {}
        if "zero" in section:
            more["zero"] = section.pop("zero")
        engine = engine_of(section, stage, accumulation, gradient_clipping=clip, **more)
        losses, found = steps(engine, accumulation), weights(engine)
        engine.destroy()
        expected = plain(section, accumulation, world, clip, device=str(engine.device), of_sums=stage == 1)
        assert losses == pytest.approx(expected[0], rel=1e-4), (stage, own)
        for name, value in expected[1].items():
            assert ((found[name] - value).norm() / value.norm()).item() < 2e-3, (stage, own, name)


@pytest.mark.parametrize("world", [1, 2])
def test_against_plain_torch(world: int) -> None:
    need(world)
    run_distributed(cells, world, timeout=120, backend="nccl")


def narrow() -> None:
    for dtype in ("bf16", "fp16"):
        section = {**EVERY, "overlap_step": True}
        own = {"enabled": True, **({"initial_scale_power": 8} if dtype == "fp16" else {})}
        engine = engine_of(section, 3, gradient_clipping=CLIP, **{dtype: own})
        losses, found = steps(engine), weights(engine)
        engine.destroy()
        expected = plain(section, 1, torch.distributed.get_world_size(), CLIP, device=str(engine.device))
        assert losses == pytest.approx(expected[0], rel=1e-2), dtype
        # together: a bias of which little is left but rounding is another one on each device
        ours, theirs = (torch.cat([each[name].flatten() for name in expected[1]]) for each in (found, expected[1]))
        assert ((ours - theirs).norm() / theirs.norm()).item() < 1e-2, dtype


@pytest.mark.parametrize("world", [1, 2])
def test_narrow_parameters(world: int) -> None:
    need(world)
    run_distributed(narrow, world, timeout=120, backend="nccl")


@pytest.mark.parametrize("dtype", [None, "bf16"])
@pytest.mark.parametrize("world", [1, 2])
def test_steps_return_before_the_update_on_the_host_ends(world: int, dtype: str | None) -> None:
    need(world)
    run_distributed(steps_beside_an_update, world, dtype, timeout=120, backend="nccl")


def away() -> None:
    """Chosen states leave the device's memory and come back, and training goes on as if they had not."""
    found = []
    for goes in (False, True):
        engine = engine_of({**EVERY, "overlap_step": True, "topk_ratio": 0.5, "select_interval": 50}, 2)
        losses = steps(engine, last=5)
        if goes:
            (chosen, *_) = engine.optimizer.store._chosen.values()
            kept = [chosen.block.values, *(t for state in chosen.state.values() for t in state.values() if t.dim())]
            engine.offload_states()
            assert not any(t.untyped_storage().nbytes() for t in [*kept, chosen.positions, chosen.last])
            engine.reload_states()
        found.append((losses + steps(engine, first=5), weights(engine)))
        engine.destroy()
    (losses, values), (expected, others) = found
    assert losses == pytest.approx(expected, rel=1e-6)
    assert all(torch.allclose(value, others[name], atol=1e-6) for name, value in values.items())


def test_chosen_states_that_are_away() -> None:
    run_distributed(away, 1, timeout=60, backend="nccl")
