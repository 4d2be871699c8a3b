"""Checkpoints that any mesh reads: saved by data- and model-parallel processes in one division, loaded in another.

The model is divided by hand (``tests.helpers.megatron``) over 1, 2 or 4 of four processes; the others are
data-parallel and read the same batches, so that the losses of every mesh are the same numbers but for rounding. Or the
four are two "hosts" of two, inside which states are divided (MiCS, hybrid sharding) or parameters once more (hpZ).
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import ds_hf
from ds_hf.checkpoint.manifest import read_manifest
from ds_hf.checkpoint.verify import verify
from ds_hf.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.engine.checkpoint.workload import config, on_both
from tests.helpers.distributed import run_distributed
from tests.helpers.megatron import Mpu, divide
from tests.helpers.models import TinyLM, token_batches

Mesh = int | str  # model-parallel size, or how states are divided inside hosts
Cell = tuple[Mesh, int]  # mesh, stage

WORLD = 4
STEPS = 2
INSIDE: dict[Mesh, dict[str, int]] = {"mics": {"mics_shard_size": 2}, "hpz": {"zero_hpz_partition_size": 2}}
HYBRID = {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
}


class NextToken(TinyLM):
    """Losses that are not nearly zero: the embedding alone does not know the next token."""

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.logits(tokens)[:, :-1]
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def engine_on(mesh: Mesh, stage: int, dtype: str = "fp32", seed: int = 0, **more: Any) -> Any:
    torch.manual_seed(seed)
    model, mpu = NextToken(), Mpu(mesh) if isinstance(mesh, int) and mesh > 1 else None
    model.embedding.weight.requires_grad_(dtype != "frozen")
    if mpu is not None:
        divide(model, mpu)
    content = config(stage, "fp32" if dtype == "frozen" else dtype, **more)
    content["zero_optimization"].update(INSIDE.get(mesh, {}))
    params = [p for p in model.parameters() if p.requires_grad]
    with patch.dict(os.environ, HYBRID if mesh == "hybrid" else {}):
        engine = ds_hf.initialize(model=model, model_parameters=params, config=content, mpu=mpu)[0]
    assert (engine.mesh.shape.inner == 2) is isinstance(mesh, str)
    return engine


def steps(engine: Any, first: int, count: int) -> list[float]:
    losses = []
    for number in range(first, first + count):
        loss = engine(token_batches(2, 8, seed=number).to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def save(folder: Path, mesh: Mesh, stage: int, dtype: str = "fp32", **more: Any) -> dict[str, Any]:
    """Train, save, train on: losses after saving, and the whole weights at the moment of saving (on rank 0)."""
    engine = engine_on(mesh, stage, dtype, **more)
    steps(engine, 0, STEPS)
    engine.save_checkpoint(folder, "saved", client_state={"epoch": 3})
    engine.wait_for_checkpoint()
    state = engine._zero3_consolidated_16bit_state_dict()
    engine.export_pretrained(folder / "pretrained")
    engine.save_16bit_model(folder, "model.bin")
    scale = engine.optimizer.loss_scaler.state_dict()
    found = {"losses": steps(engine, STEPS, 2), "state": state, "scale": scale["scale"]}
    engine.destroy()
    return found


def load(folder: Path, again: Path, mesh: Mesh, stage: int, dtype: str = "fp32") -> dict[str, Any]:
    """Load into another model of another mesh, save again, train on."""
    engine = engine_on(mesh, stage, dtype, seed=7)
    steps(engine, 50, 1)
    _, client = engine.load_checkpoint(folder, "saved")
    engine.save_checkpoint(again, "saved")
    scale = engine.optimizer.loss_scaler.state_dict()["scale"]
    counters = engine.global_steps, engine.skipped_steps, engine.lr_scheduler.state_dict()
    found = {"losses": steps(engine, STEPS, 2), "client": client, "scale": scale, "counters": counters}
    engine.destroy()
    return found


def digests(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_manifest(folder / "saved").extra["digest"]["tensors"]
    return found


def run_pairs(root: Path, pairs: list[tuple[Cell, Cell]], dtype: str) -> None:
    """Save in each first cell, load in each second, and compare everything."""
    sources = list(dict.fromkeys(source for source, _ in pairs))
    places = {cell: root / f"{cell[0]}-stage{cell[1]}" for cell in sources}
    agains = {pair: root / f"again-{number}" for number, pair in enumerate(pairs)}
    calls: list[Any] = [(save, (places[cell], *cell, dtype)) for cell in sources]
    calls += [(load, (places[pair[0]], agains[pair], *pair[1], dtype)) for pair in pairs]
    ranks = run_distributed(on_both, WORLD, calls, timeout=20 * len(calls))
    for found in ranks:  # each process alike
        saved = dict(zip(sources, found, strict=False))
        for pair, loaded in zip(pairs, found[len(sources) :], strict=True):
            (source, target), one = pair, saved[pair[0]]
            if source == target or {source, target} == {(1, 3), ("hpz", 3)}:
                assert loaded["losses"] == one["losses"], pair
            narrow = dtype in ("bf16", "fp16")
            assert loaded["losses"] == pytest.approx(one["losses"], rel=1e-2 if narrow else 1e-5), pair
            assert loaded["client"] == {"epoch": 3}
            assert loaded["scale"] == one["scale"]
            assert loaded["counters"][:2] == (STEPS, 0)
    for (source, target), again in agains.items():
        assert digests(again) == digests(places[source]), (source, target)
        assert verify(again, "saved") == []
        assert read_manifest(again / "saved").extra["version"] == (2 if target[0] in (2, 4) else 1)
    for cell in sources:
        check_whole(places[cell], ranks[0][sources.index(cell)]["state"])


def check_whole(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """Everything that is read or written of one checkpoint gives whole tensors of the shapes of the whole model."""
    from safetensors.torch import load_file

    whole = {name: value.shape for name, value in TinyLM().state_dict().items()}
    assert verify(folder, "saved") == []
    assert {name: value.shape for name, value in state.items()} == whole
    masters = get_fp32_state_dict_from_zero_checkpoint(folder, "saved")
    assert {name: value.shape for name, value in masters.items()} == whole
    assert all(torch.equal(masters[name].to(value.dtype), value) for name, value in state.items())
    pretrained = load_file(folder / "pretrained" / "model.safetensors")
    assert all(torch.equal(state[name], value) for name, value in pretrained.items())
    assert {*pretrained, "head.weight"} == {*whole}
    written = torch.load(folder / "model.bin", weights_only=True)
    assert all(torch.equal(state[name], value) for name, value in written.items())
    assert written.keys() == whole.keys()


def test_every_mesh_to_another(tmp_path: Path) -> None:
    """Each stage on each side once."""
    pairs = [((1, 3), (2, 0)), ((2, 1), (4, 3)), ((4, 2), (1, 1)), ((2, 1), (2, 1)), ((4, 2), (2, 2))]
    run_pairs(tmp_path, pairs, "fp32")


def test_states_divided_inside_hosts_to_every_other_mesh(tmp_path: Path) -> None:
    """What several hosts hold is written once; the second shards of hpZ not at all."""
    pairs: list[tuple[Cell, Cell]] = [
        (("mics", 3), (1, 1)),
        (("hpz", 3), (1, 3)),
        ((1, 3), ("hpz", 3)),
        (("mics", 1), ("hpz", 3)),
        (("hpz", 3), ("hybrid", 2)),
        (("hybrid", 2), (2, 3)),
        ((2, 1), ("mics", 2)),
        (("mics", 3), ("mics", 3)),
    ]
    run_pairs(tmp_path, pairs, "bf16")


def test_masters_and_the_scaler_in_fp16(tmp_path: Path) -> None:
    run_pairs(tmp_path, [((2, 3), (4, 1)), ((4, 0), (2, 3))], "fp16")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "frozen"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_matrix(tmp_path: Path, stage: int, dtype: str) -> None:
    """From each mesh at one stage to each mesh at each."""
    cells = itertools.product((1, 2, 4), (0, 1, 2, 3))
    pairs = [((parts, stage), cell) for cell in cells for parts in (1, 2, 4)]
    run_pairs(tmp_path, pairs, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "frozen"])
def test_the_matrix_of_states_divided_inside_hosts(tmp_path: Path, dtype: str) -> None:
    """From each mesh to each other."""
    cells: list[Cell] = [(1, 3), ("hybrid", 3), ("hpz", 3), ("mics", 2), ("mics", 1), (2, 3), (4, 1)]
    run_pairs(tmp_path, list(itertools.product(cells, cells)), dtype)
