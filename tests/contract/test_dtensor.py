"""Models of DTensors: what torch's ``parallelize_module`` or transformers' ``tp_plan=`` divided, ZeRO divides further.

2 data-parallel x 2 tensor-parallel processes against plain torch in one process: fp32 weights agree to 1e-6 relative
after the steps, gradient norms to 1e-5.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

from ds_hf import initialize
from ds_hf.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from ds_hf.engine.zero.cut import cut_of
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.errors import ConfigError
from tests.contract.test_mesh_parity import config, reference
from tests.contract.test_parity import ADAMW, CLIP, batches, model
from tests.helpers.distributed import run_distributed
from tests.helpers.parity import full_weights

DATA, TENSOR, STEPS = 2, 2, 2
PLAN = {"blocks.*.up": ColwiseParallel, "blocks.*.down": RowwiseParallel}


def tensor_mesh(size: int = TENSOR) -> DeviceMesh:
    whole = init_device_mesh("cpu", (dist.get_world_size() // size, size), mesh_dim_names=("data", "tensor"))
    return whole["tensor"]


def divided(mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(model(), mesh, {name: style() for name, style in PLAN.items()})


def whole_weights(trained: nn.Module, mesh: DeviceMesh) -> dict[str, Tensor]:
    """By name, each made whole over ZeRO and over the tensor-parallel processes. Collective."""
    found = {}
    for name, value in full_weights(trained).items():
        cut = cut_of(dict(trained.named_parameters())[name])
        placements = [Replicate() if cut is None else Shard(cut.dim)]
        found[name] = DTensor.from_local(value, mesh, placements).full_tensor()
    return found


def train(stage: int, folder: str, made_before: bool) -> dict[str, Any]:
    """One rank's run: losses, norms, whole weights, what is saved, and how the weights are seen."""
    mesh = tensor_mesh()
    trained = divided(mesh)
    before = {name: param.shape for name, param in trained.named_parameters()}
    optimizer = torch.optim.AdamW(trained.parameters(), **ADAMW) if made_before else None
    engine, *_ = initialize(model=trained, optimizer=optimizer, config=config(stage, 2, CLIP))
    losses, norms = [], []
    for step in batches(2, DATA)[:STEPS]:
        total = 0.0
        for micro in step:
            loss = engine(micro[dist.get_rank() // TENSOR])
            total += loss.item() / 2
            engine.backward(loss)
            engine.step()
        losses.append(total)
        norms.append(engine.get_global_grad_norm())
    weights = whole_weights(trained, mesh)
    engine.save_checkpoint(folder)
    with GatheredParameters(list(trained.parameters())):
        state = trained.state_dict()
        seen = {
            "as DTensors": isinstance(trained.blocks[0].up.weight, DTensor),
            "as parameters": not any(isinstance(param, DTensor) for param in trained.parameters()),
            "saved": {name: value.shape for name, value in state.items() if name in before} == before,
            "taken": not trained.load_state_dict({**state, "blocks.0.up.weight": weights["blocks.0.up.weight"]})[0],
        }
    engine.destroy()
    mean = torch.tensor(losses)
    dist.all_reduce(mean)
    return {"losses": (mean / DATA / TENSOR).tolist(), "norms": norms, "weights": weights, "seen": seen}


@pytest.mark.parametrize(("stage", "made_before"), [(0, False), (1, True), (2, False), (3, True)])
def test_a_model_of_dtensors_trains_as_the_whole(stage: int, made_before: bool, tmp_path: Path) -> None:
    losses, norms, weights = reference(2, CLIP, STEPS)
    ranks = run_distributed(train, DATA * TENSOR, stage, str(tmp_path), made_before, timeout=90)
    for found in ranks:
        assert found["losses"] == pytest.approx(losses, rel=1e-5)
        assert found["norms"] == pytest.approx(norms, rel=1e-5)
        assert all(found["seen"].values()), found["seen"]
        for name, value in weights.items():
            assert float((found["weights"][name] - value).norm() / value.norm()) < 1e-6, name
    saved = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    for name, value in ranks[0]["weights"].items():
        assert torch.equal(saved[name], value), name  # whole, from the parts


def load_elsewhere(folder: str) -> dict[str, Tensor]:
    engine, *_ = initialize(model=model(), config=config(2))
    engine.load_checkpoint(folder)
    return full_weights(engine.module)


def test_what_it_saved_is_loaded_by_data_parallel_processes(tmp_path: Path) -> None:
    ranks = run_distributed(train, DATA * TENSOR, 1, str(tmp_path), False, timeout=90)
    for found in run_distributed(load_elsewhere, 2, str(tmp_path)):
        for name, value in ranks[0]["weights"].items():
            assert torch.equal(found[name], value), name


def compiled(blocks: bool) -> list[float]:
    """Losses; and, compiled, that there is one graph for all blocks and no break."""
    more = {"ds_hf": {"compile": "blocks"}} if blocks else {}
    engine, *_ = initialize(model=divided(tensor_mesh()), config=config(1, **more))
    losses = []
    for step in batches(1, 1)[:STEPS]:
        loss = engine(step[0][0])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if blocks:
        report = engine.compile_report()
        assert (report.graphs, report.breaks) == (1, {})
    engine.destroy()
    return losses


@pytest.mark.slow
def test_compiled_blocks() -> None:
    plain, *_ = run_distributed(compiled, TENSOR, False)
    for found in run_distributed(compiled, TENSOR, True, timeout=120):
        assert found == pytest.approx(plain, rel=1e-6)


class Head(nn.Module):
    """A head that is a unit by itself, called or multiplied by as fused losses do."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(64, 32)
        self.lm_head = nn.Linear(32, 1 << 16, bias=False)
        self.fused = fused

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        if not self.fused:
            return cross_entropy(self.lm_head(hidden).flatten(0, 1), tokens.flatten())
        weight: Any = self.lm_head.weight
        if isinstance(weight, DTensor):
            weight = weight.redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])
        return cross_entropy((hidden @ weight.t()).flatten(0, 1), tokens.flatten())


def train_head(fused: bool) -> tuple[list[float], list[float]]:
    mesh = tensor_mesh()
    trained = Head(fused)
    if fused:
        trained.lm_head.weight = nn.Parameter(distribute_tensor(trained.lm_head.weight.detach(), mesh, [Shard(0)]))
    else:
        parallelize_module(trained, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})
    engine, *_ = initialize(model=trained, config=config(3))
    with GatheredParameters(list(trained.parameters())):
        copied = copy.deepcopy(trained)
    assert all(type(module._parameters) is dict for module in copied.modules())
    losses, norms = [], []
    for _ in range(2):
        loss = engine(torch.arange(16).view(2, 8))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    engine.destroy()
    return losses, norms


@pytest.mark.parametrize("fused", [False, True])
def test_a_large_head(fused: bool) -> None:
    plain = Head(False)
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW)
    losses, norms = [], []
    for _ in range(2):
        loss = plain(torch.arange(16).view(2, 8))
        optimizer.zero_grad()
        loss.backward()
        grads = [param.grad for param in plain.parameters() if param.grad is not None]
        norms.append(float(sum(grad.double().square().sum() for grad in grads)) ** 0.5)  # torch's own rounds at 1.5e-5
        optimizer.step()
        losses.append(loss.item())
    for found in run_distributed(train_head, DATA * TENSOR, fused, timeout=90):
        assert found[0] == pytest.approx(losses, rel=1e-5)
        assert found[1] == pytest.approx(norms, rel=1e-5)


def refusals() -> dict[str, str]:
    def refused(trained: nn.Module, **more: Any) -> str:
        try:
            initialize(model=trained, config=config(1), **more)
        except ConfigError as error:
            return " ".join(str(error).split())
        return ""

    def linear(mesh: DeviceMesh, *placements: Any, **more: Any) -> nn.Module:
        made = nn.Linear(8, 6, bias=False)
        made.weight = nn.Parameter(distribute_tensor(made.weight.detach(), mesh, list(placements)), **more)
        return made

    line = tensor_mesh()
    plane = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    across = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "data"))["tp"]
    both = nn.Sequential(linear(line, Shard(0)), linear(across, Shard(0)))
    part = nn.Linear(8, 6, bias=False)
    part.weight = nn.Parameter(DTensor.from_local(part.weight.detach(), line, [Partial()]))
    stepped = linear(line, Shard(0))
    optimizer = torch.optim.AdamW(stepped.parameters(), lr=1e-3)
    stepped.weight.grad = stepped.weight.detach().clone()
    optimizer.step()
    sharded = nn.Linear(8, 8)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (4,)))
    return {
        "plane": refused(linear(plane, Shard(0), Shard(1))),
        "across": refused(linear(across, Shard(0))),
        "both": refused(both),
        "uneven": refused(linear(init_device_mesh("cpu", (4,)), Shard(0))),
        "part": refused(part),
        "stepped": refused(stepped, optimizer=optimizer),
        "fsdp": refused(sharded),
        "file": refused(linear(line, Shard(0)), mesh_param=(4, 1)),
    }


def test_layouts_that_do_not_fit_are_refused_by_name() -> None:
    for rank, found in enumerate(run_distributed(refusals, 4)):
        assert "weight is a DTensor (2 x 2 processes, fsdp, tp; placements S(0), S(1)): only one axis" in found["plane"]
        assert f"rank {rank} is in the group {[rank % 2, rank % 2 + 2]}, and tensor-parallel ranks" in found["across"]
        assert "1.weight is a DTensor" in found["both"]
        assert "0.weight lies on another mesh" in found["both"]
        assert "dimension 0 is not divided equally" in found["uneven"]
        assert "only Shard and Replicate can be trained" in found["part"]
        assert "has made steps over wrapped parameters (DTensors" in found["stepped"]
        assert "fully_shard() has divided the model already" in found["fsdp"]
        assert "data-parallel 4 (mesh_param[0])" in found["file"]
        assert "there are 4 processes" in found["file"]
