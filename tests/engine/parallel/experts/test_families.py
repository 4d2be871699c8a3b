"""Gradients of one backward over two and four processes against one with plain torch, in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import ds_hf
from ds_hf.config.types.parallel import ExpertParallelSection
from ds_hf.config.types.root import MeshShape
from ds_hf.engine.comm.mesh import Mesh
from ds_hf.engine.parallel.experts.divide import divide_experts
from ds_hf.engine.zero.access import safe_get_full_grad
from ds_hf.engine.zero.cut import cut_of
from tests.helpers.distributed import run_distributed
from tests.helpers.experts import FAMILIES, FEW, batches_of, build, loss_of, planned, section


def farthest(kind: str, size: int) -> tuple[float, int]:
    """How far any gradient is off, in parts of the parameter's largest, and how many parameters are cut."""
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = batches_of(1, 1, world)[0]
    alone = build(kind).double()
    for each in batches:
        loss_of(alone, each).backward()
    model, mesh = build(kind).double(), Mesh(MeshShape(data=world, expert=size))
    divide_experts(model, mesh, ExpertParallelSection(enabled=True, autoep_size=size))
    loss_of(model, batches[rank]).backward()
    far, cuts = 0.0, 0
    for param, other in zip(model.parameters(), alone.parameters(), strict=True):
        cut = cut_of(param)
        cuts += cut is not None
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        whole = torch.zeros_like(other) if other.grad is None else other.grad
        dist.all_reduce(grad, group=mesh.world.group if cut is None else mesh.experts[1].group)
        wanted = whole if cut is None else cut.take(whole)
        far = max(far, float((grad - wanted).abs().max() / whole.abs().max().clamp_min(1e-30)) if whole.any() else 0.0)
    return far, cuts


def gradients(kinds: tuple[str, ...], size: int) -> dict[str, tuple[float, int]]:
    torch.set_num_threads(1)
    return {kind: farthest(kind, size) for kind in kinds}


def check(kinds: tuple[str, ...], world: int, size: int, timeout: float) -> None:
    for found in run_distributed(gradients, world, kinds, size, timeout=timeout):
        assert {kind: far for kind, (far, _) in found.items() if not far <= 1e-12} == {}
        assert all(cuts >= 2 for _, cuts in found.values())


@pytest.mark.parametrize(("world", "size"), [(2, 2), (4, 2)])
def test_gradients_are_those_of_one_process(world: int, size: int) -> None:
    assert len(planned(FEW)) >= 4
    check(planned(FEW), world, size, 100)


def farthest_at(kind: str, stage: int, size: int) -> float:
    """As ``farthest``, of the gradients that an engine has averaged, in fp32, and divided as the stage says."""
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = batches_of(1, 1, world)[0]
    alone = build(kind).double()
    for each in batches:
        (loss_of(alone, each) / world).backward()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
        "expert_parallel": section(size),
    }
    engine, *_ = ds_hf.initialize(model=build(kind).double(), config=config)
    engine.backward(loss_of(engine, batches[rank]))
    far = 0.0
    for param, other in zip(engine.module.parameters(), alone.parameters(), strict=True):
        grad, cut = safe_get_full_grad(param), cut_of(param)
        if other.grad is None or not other.grad.any():
            continue
        assert grad is not None
        wanted = other.grad if cut is None else cut.take(other.grad)
        far = max(far, float((grad.view(wanted.shape) - wanted).abs().max() / other.grad.abs().max()))
    engine.destroy()
    return far


def gradients_at(kinds: tuple[str, ...], size: int) -> dict[tuple[str, int], float]:
    torch.set_num_threads(1)
    return {(kind, stage): farthest_at(kind, stage, size) for kind in kinds for stage in range(4)}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))  # a slice of the slow tests waits for the one that it began last
@pytest.mark.parametrize(("world", "size"), [(2, 2), (4, 4)])
@pytest.mark.minutes(4)
def test_gradients_of_all_families_at_all_stages(world: int, size: int, part: int) -> None:
    kinds = planned(FAMILIES)[part::3]
    for found in run_distributed(gradients_at, world, kinds, size, timeout=600):
        assert len(found) == 4 * len(kinds) >= 40
        assert {cell: far for cell, far in found.items() if not far <= 1e-6} == {}


@pytest.mark.slow
@pytest.mark.parametrize(("world", "size"), [(2, 2), (4, 4)])
def test_gradients_of_all_families(world: int, size: int) -> None:
    assert len(planned(FAMILIES)) >= 50
    check(planned(FAMILIES), world, size, 400)
