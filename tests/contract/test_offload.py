"""Every way to offload gives what the same training without it gives: bit for bit on one device and with one kernel.

Where the model computes on the CPU, as here, states on the host, streamed ones and those on the device are updated by
the same kernel, so that weights must be equal to the last bit. With clipping they are to 1e-6: the norm is summed unit
by unit. tests/gpu/test_offload.py has other kernels.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_hf import initialize
from ds_hf.engine.zero.gather import GatheredParameters
from tests.contract.test_parity import ADAMW, CLIP, MICRO, batches, model
from tests.helpers.distributed import run_distributed

CPU = {"device": "cpu"}
STEPS = 4
Run = tuple[list[float], list[float], dict[str, torch.Tensor]]


def train(
    stage: int,
    dtype: str,
    accumulation: int,
    zero: dict[str, Any],
    own: dict[str, Any] | None = None,
    clip: float = 0.0,
) -> Run:
    """Losses, gradient norms and whole weights after a few steps."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    trained = model()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},  # type: ignore[call-overload]
        "zero_optimization": {"stage": stage, **zero},
        "ds_hf": {"offload": own or {}},
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True, **({"initial_scale_power": 8} if dtype == "fp16" else {})}
    engine, *_ = initialize(model=trained, config=config)
    losses, norms = [], []
    for step in batches(accumulation, world)[:STEPS]:
        for micro in step:
            loss = engine(micro[rank])
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        norms.append(engine.get_global_grad_norm())
    with GatheredParameters(trained.parameters()):
        weights = {n: p.detach().clone() for n, p in trained.named_parameters()}
    engine.destroy()
    return losses, norms, weights


def assert_same(found: Run, expected: Run, what: Any) -> None:
    assert found[0] == expected[0], what
    assert found[1] == pytest.approx(expected[1], rel=1e-6), what
    for name, weight in expected[2].items():
        assert torch.equal(found[2][name], weight), (what, name)


def assert_close(found: Run, expected: Run) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found[1] == pytest.approx(expected[1], rel=1e-6)
    for name, weight in expected[2].items():
        assert ((found[2][name] - weight).norm() / weight.norm()).item() < 1e-6, name


def host_cells() -> None:
    """All ways over host memory, against no offload."""
    plain: dict[Any, Run] = {}
    for stage, dtype, accumulation, zero, own in [
        (1, "bf16", 1, {"offload_optimizer": CPU}, {}),
        (2, "fp32", 4, {"offload_optimizer": CPU}, {}),
        (2, "bf16", 4, {"offload_optimizer": {**CPU, "pin_memory": False}}, {"stream": 1.0}),
        (3, "fp16", 1, {"offload_optimizer": {**CPU, "ratio": 0.4}}, {"stream": 0.5}),
        (3, "bf16", 1, {"offload_optimizer": CPU, "offload_param": CPU}, {"stream": 0.3}),
        (3, "bf16", 4, {"offload_param": CPU}, {}),
        (3, "bf16", 1, {"offload_optimizer": CPU}, {"ratio": "auto"}),
    ]:
        key = (stage, dtype, accumulation)
        if key not in plain:
            plain[key] = train(stage, dtype, accumulation, {})
        assert_same(train(stage, dtype, accumulation, zero, own), plain[key], (key, zero, own))

    clipped = train(2, "fp32", 4, {"offload_optimizer": CPU}, {"stream": 0.5}, CLIP)
    assert_close(clipped, train(2, "fp32", 4, {}, {}, CLIP))


@pytest.mark.parametrize("world", [1, 2])
def test_states_on_the_host(world: int) -> None:
    run_distributed(host_cells, world, timeout=100)


def file_cells(folder: str) -> None:
    """Optimizer states, parameters and both in files; every slot is used by several units."""
    nvme = {"device": "nvme", "nvme_path": folder}
    both = {
        "offload_optimizer": {**nvme, "buffer_count": 3},
        "offload_param": {**nvme, "buffer_count": 2, "max_in_cpu": 0},
    }
    plain: dict[Any, Run] = {}
    for dtype, accumulation, zero in [
        ("bf16", 1, both),
        ("fp32", 4, {"offload_optimizer": nvme}),
        ("fp16", 1, {"offload_optimizer": CPU, "offload_param": {**nvme, "max_in_cpu": 2000}}),
        ("fp32", 1, {"offload_param": {**nvme, "max_in_cpu": 0}}),
    ]:
        key = (dtype, accumulation)
        if key not in plain:
            plain[key] = train(3, dtype, accumulation, {})
        assert_same(train(3, dtype, accumulation, zero), plain[key], (key, zero))
    states = {"offload_optimizer": nvme}
    assert_same(train(2, "fp32", 4, states), train(2, "fp32", 4, {"offload_optimizer": CPU}), "stage 2")
    gc.collect()
    torch.distributed.barrier()
    assert os.listdir(folder) == []


@pytest.mark.parametrize("world", [1, 2])
def test_states_in_files(world: int, tmp_path: Path) -> None:
    run_distributed(file_cells, world, str(tmp_path), timeout=100)
