"""Meshes of four GPUs over NCCL, by the checks of the CPU's tests: data, tensor, sequence and pipeline parallelism
beside each other, states divided inside "hosts" of two, and checkpoints of each mesh in others."""

from __future__ import annotations

import functools
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract import test_hierarchical as hierarchical
from tests.contract import test_mesh_checkpoints as mesh_checkpoints
from tests.contract import test_parity as parity
from tests.contract import test_sequence_parity, test_tensor_parallel
from tests.contract.test_parity import ACCUMULATION, CLIP, CLIPS
from tests.engine.parallel.pipeline import test_checkpoints_3d as pipeline_checkpoints
from tests.engine.parallel.pipeline import test_training as pipelines
from tests.engine.parallel.pipeline import test_variants as pipeline_variants
from tests.engine.parallel.pipeline.models import batches
from tests.gpu.test_parallel import by_copies
from tests.helpers.distributed import run_distributed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")]
FP64 = torch.float64
over_nccl = functools.partial(run_distributed, backend="nccl")


@pytest.fixture(autouse=True)
def _over_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (hierarchical, mesh_checkpoints, pipeline_checkpoints, pipeline_variants):
        monkeypatch.setattr(module, "run_distributed", over_nccl)
    hierarchical.plain.cache_clear()


@pytest.mark.parametrize("stage", parity.STAGES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_data(stage: int, dtype: str) -> None:
    found = over_nccl(parity.train_cells, 4, stage, dtype, timeout=150)
    for cell in product(ACCUMULATION, CLIPS):
        parity.check([rank[cell] for rank in found], parity.reference(*cell, 4, "cuda"), dtype, 2e-5, cell)


@pytest.mark.parametrize(("tensor", "stage"), [(4, 1), (2, 0), (2, 2), (2, 3)])
def test_tensor_beside_data(tensor: int, stage: int) -> None:
    for kind in ("llama", "fused"):
        own = {"tensor_sequence_parallel": kind == "fused" or stage == 0}
        how = {"dtype": FP64, "ds_hf": own}
        found = over_nccl(test_tensor_parallel.train, 4, kind, tensor, stage, 2, CLIP, timeout=150, **how)
        steps = test_tensor_parallel.STEPS
        test_tensor_parallel.check(found, kind, 2, CLIP, 4 // tensor, steps, FP64, "cuda")


@pytest.mark.parametrize(("sequence", "stages"), [(2, [0, 1, 2, 3]), (4, [2, 3])])
def test_sequences_beside_data(sequence: int, stages: list[int]) -> None:
    for errors in over_nccl(test_sequence_parity.gradients_of_stages, 4, stages, sequence, timeout=150):
        assert max(errors) < 1e-10


@pytest.mark.parametrize(("sequence", "more"), [(2, {"kv_heads": 4}), (4, {})])
def test_sequences_beside_data_by_copies(sequence: int, more: dict[str, int]) -> None:
    """Two pairs of GPUs, each with memory of its own; and four, each of which has one head."""
    found = over_nccl(by_copies, 4, test_sequence_parity.gradients_of_stages, [0, 3], sequence, timeout=150, **more)
    for errors, brought in found:
        assert brought > 0
        assert max(errors) < 1e-10


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_pipelines(stages: int, stage: int) -> None:
    tokens, options = batches(6, pipelines.MICRO, 4 // stages, lengths=True), {"lr": 1e-3, "weight_decay": 0.01}
    settings = pipelines.config(stage)
    found = over_nccl(
        pipelines.train, 4, tokens, torch.optim.AdamW, settings, True, stages, options, dtype=FP64, timeout=150
    )
    wanted = pipelines.reference(torch.optim.AdamW, tokens, True, 0.0, FP64, "cuda", **options)
    pipelines.check(found, wanted, exactly=False, tolerance=1e-12)


@pytest.mark.parametrize("processes", [2, 4])
def test_chunks_of_pipelines(processes: int) -> None:
    pipeline_variants.test_chunks_from_the_file_are_one_process_to_the_bit(processes)


def test_a_folded_pipeline() -> None:
    pipeline_variants.test_a_folded_pipeline_is_one_process(4, 1, {}, True)


def test_fewer_micro_batches_than_stages() -> None:
    """NCCL's communicators are made before the first batch: in it, stages would wait for each other."""
    alone = over_nccl(pipeline_variants.run, 1, 1, {}, micro=3)[0]
    for one in over_nccl(pipeline_variants.run, 4, 4, {}, micro=3, timeout=60):
        assert one["losses"] == pytest.approx(alone["losses"], rel=1e-5)


@pytest.mark.parametrize(
    ("stage", "env"), [(1, {}), (2, {}), (3, {}), (2, hierarchical.HYBRID), (3, hierarchical.HYBRID)]
)
def test_states_divided_inside_hosts(stage: int, env: dict[str, str]) -> None:
    hierarchical.test_states_divided_inside_and_copied_outside(stage, env)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_second_shards(dtype: str) -> None:
    hierarchical.test_a_second_shard_changes_no_bit(dtype)


def test_offload_inside_hosts(tmp_path: Path) -> None:
    hierarchical.test_offload(tmp_path)


@pytest.mark.parametrize(
    "check",
    [
        mesh_checkpoints.test_every_mesh_to_another,
        mesh_checkpoints.test_states_divided_inside_hosts_to_every_other_mesh,
        mesh_checkpoints.test_masters_and_the_scaler_in_fp16,
        pipeline_checkpoints.test_to_other_divisions,
    ],
)
def test_checkpoints(check: Any, tmp_path: Path) -> None:
    check(tmp_path)
