"""Nothing else in the file, nothing else on the wire: data parallelism alone does what it did before there was a mesh.

``collectives_recorded.json`` was written at 88fbf40, the commit before the first change for the mesh, by

    python -m tests.contract.test_collectives_recorded

Per configuration it holds the collectives of two processes in order, losses, gradient norms and a digest of the
weights. The model's numbers are few bits long, so sums are exact in every order and the record holds on every machine;
of norms, whose squares are longer, but for the last bit or two. Inside ``GatheredParameters`` the
gathers have been in the order of the buffers since 27 November 2026, not of the parameters that are named.
"""

from __future__ import annotations

import hashlib
import json
import os
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_hf import initialize
from ds_hf.engine.comm.log import CollectiveLog
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.engine.zero.init import Init
from tests.helpers.distributed import run_distributed

RECORD = Path(__file__).with_name("collectives_recorded.json")
WORLD, STEPS, MICRO = 2, 3, 2
WIDTH, DEPTH, WORDS = 16, 9, 32
CPU = {"device": "cpu"}


class Block(nn.Module):
    """Adds ``relu(W x + b)`` to what the blocks before it added up; ``x`` is the same for all."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Tensor, total: Tensor) -> Tensor:
        return total + torch.relu(self.linear(given))


class Sum(nn.Module):
    """Blocks side by side, not one on the other: no parameter is multiplied by another, so numbers stay short."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.shift = nn.Parameter(torch.empty(WIDTH))
        self.frozen = nn.Parameter(torch.empty(WORDS, WIDTH), requires_grad=False)
        self.never_used = nn.Parameter(torch.empty(3))

    def forward(self, words: Tensor) -> Tensor:
        given = self.frozen[words]
        total = self.embed(words) + self.shift
        for block in self.blocks:
            total = block(given, total)
        signs = torch.tensor([1, -1]).to(total.dtype).repeat(WIDTH // 2)
        return (total * signs).to(torch.promote_types(total.dtype, torch.float32)).sum() / 64


def fill(model: nn.Module) -> None:
    """Whole numbers from -2 to 2."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randint(-2, 3, value.shape, generator=generator))


def batches(accumulation: int) -> Tensor:
    """Words ``[step, micro-batch, rank, sample, position]``."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, WORDS, (STEPS, accumulation, WORLD, MICRO, 8), generator=generator)


def config(stage: int, dtype: str, accumulation: int, zero: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1e4,  # the norm is known, and nothing is clipped
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": stage, **zero},
        "ds_hf": own,
    }
    if dtype != "fp32":
        found[dtype] = {"enabled": True}
    if dtype == "fp16":
        found[dtype]["initial_scale_power"] = 4
    return found


CELLS: dict[str, dict[str, Any]] = {
    f"stage {stage}, {dtype}, accumulation {accumulation}": {
        "config": config(stage, dtype, accumulation, {}, {}),
        "accumulation": accumulation,
    }
    for stage, dtype, accumulation in product((0, 1, 2, 3), ("fp32", "bf16", "fp16"), (1, 2))
}
CELLS |= {
    f"stage {stage}, blocks alone": {
        "config": config(stage, "bf16", 2, {}, {"join_blocks": False}),
        "accumulation": 2,
    }
    for stage in (0, 1, 2, 3)
}
CELLS |= {
    f"stage {stage}, optimizer on the CPU": {
        "config": config(stage, "bf16", 2, {"offload_optimizer": CPU}, {}),
        "accumulation": 2,
    }
    for stage in (1, 2, 3)
}
CELLS["stage 3, parameters on the CPU"] = {
    "config": config(3, "bf16", 1, {"offload_optimizer": CPU, "offload_param": CPU}, {}),
    "accumulation": 1,
}
CELLS["stage 3, zero.Init"] = {"config": config(3, "fp32", 1, {}, {}), "accumulation": 1, "init": True}
CELLS["stage 3, small parameters whole"] = {
    "config": config(3, "fp32", 1, {"stage3_param_persistence_threshold": 20}, {}),
    "accumulation": 1,
}


def train(cell: dict[str, Any]) -> dict[str, Any]:
    """One rank's run of a cell."""
    noted: list[str] = []
    note = CollectiveLog.__call__

    def noting(self: CollectiveLog, operation: str, what: str, tensor: Tensor | None = None) -> CollectiveLog:
        size = "" if tensor is None else f", {tensor.numel()} of {str(tensor.dtype).removeprefix('torch.')}"
        noted.append(f"{operation}: {what}{size}")
        return note(self, operation, what, tensor)

    CollectiveLog.__call__ = noting  # type: ignore[method-assign]
    try:
        if cell.get("init"):
            with Init(config_dict_or_path=cell["config"]):
                model = Sum()
            with GatheredParameters(list(model.parameters()), modifier_rank=0):
                fill(model)
        else:
            model = Sum()
            fill(model)
        engine, *_ = initialize(model=model, config=cell["config"])
        losses, norms = [], []
        for step in batches(cell["accumulation"]):
            for micro in step:
                loss = engine(micro[torch.distributed.get_rank()])
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
            norm = engine.get_global_grad_norm()
            norms.append(None if norm is None else float(norm))
    finally:
        CollectiveLog.__call__ = note  # type: ignore[method-assign]
    digest = hashlib.sha256()
    with GatheredParameters(list(model.parameters())):
        for value in model.parameters():
            digest.update(value.detach().float().cpu().numpy().tobytes())
    engine.destroy()
    return {"losses": losses, "norms": norms, "weights": digest.hexdigest(), "collectives": noted}


def train_all() -> dict[str, dict[str, Any]]:
    return {name: train(cell) for name, cell in CELLS.items()}


@cache
def found() -> list[dict[str, dict[str, Any]]]:
    return run_distributed(train_all, WORLD, timeout=240)


@cache
def recorded() -> dict[str, dict[str, Any]]:
    record = json.loads(RECORD.read_text())
    lines = record["lines"]
    for cell in record["cells"].values():
        cell["collectives"] = [lines[index] for index in cell["collectives"]]
    return dict(record["cells"])


def test_every_cell_has_a_record() -> None:
    assert recorded().keys() == CELLS.keys()


@pytest.mark.parametrize("name", CELLS)
def test_numbers_and_collectives_are_those_of_before_the_mesh(name: str) -> None:
    mine, others = (rank[name] for rank in found())
    assert mine["collectives"] == others["collectives"] == recorded()[name]["collectives"]
    assert mine["weights"] == others["weights"] == recorded()[name]["weights"]
    # squares have twice the bits, and torch adds them up in another order on another kind of processor
    assert mine["norms"] == others["norms"] == pytest.approx(recorded()[name]["norms"], rel=4e-7)
    assert [mine["losses"], others["losses"]] == recorded()[name]["losses"]


def test_the_arithmetic_is_exact() -> None:
    """Plain torch in double precision finds the fp32 losses to the bit: no sum was ever rounded."""
    model = Sum().double()
    fill(model)
    trained = [value for value in model.parameters() if value.requires_grad]
    losses: list[list[float]] = [[], []]
    for step in batches(2):
        for micro in step:
            for rank, words in enumerate(micro):
                loss = model(words)
                losses[rank].append(loss.item())
                (loss / 4).backward()
        with torch.no_grad():
            for value in trained:
                if value.grad is not None:
                    value -= 0.5 * value.grad
                    value.grad = None
    assert losses == recorded()["stage 2, fp32, accumulation 2"]["losses"]


def record() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    first, second = found()
    lines = sorted({line for cell in first.values() for line in cell["collectives"]})
    cells = {}
    for name, cell in first.items():
        assert cell["collectives"] == second[name]["collectives"], name
        order = [lines.index(line) for line in cell["collectives"]]
        cells[name] = {**cell, "losses": [cell["losses"], second[name]["losses"]], "collectives": order}
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(cell)}" for name, cell in cells.items())
    listed = ",\n".join(f"  {json.dumps(line)}" for line in lines)
    RECORD.write_text(f'{{\n"lines": [\n{listed}\n],\n"cells": {{\n{rows}\n}}\n}}\n')


if __name__ == "__main__":
    record()
