"""Recorded runs whose processes do not all hold the same: exchanges of layers and sequences, bubbles of pipelines."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_hf import initialize
from ds_hf.deepspeed_api.pipeline import PipelineModule
from ds_hf.engine.observe.report import attach
from ds_hf.engine.parallel.pipeline.specs import LayerSpec
from tests.contract import test_sequence_parity as sequences
from tests.engine.observe.report.common import read_rank
from tests.engine.parallel.pipeline.models import WIDTH, Embedding, Head, batches, cross_entropy, pairs
from tests.helpers import tensor as tensors
from tests.helpers.distributed import run_distributed
from tests.helpers.models import Block

STEPS, SLEEP_S = 4, 0.1


class Slow(nn.Module):
    """A layer that takes its time."""

    def forward(self, hidden: Tensor) -> Tensor:
        time.sleep(SLEEP_S)
        return hidden


def config(folder: Path, **more: Any) -> dict[str, Any]:
    attach.makes_pages = False
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    report = {"report": str(folder), "report_steps": "all"}
    return {"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, "ds_hf": report, **more}


def tensor(folder: Path) -> None:
    section = tensors.tensor_section("llama", 2)
    engine, *_ = initialize(model=tensors.build("llama"), config=config(folder, tensor_parallel=section))
    ids = torch.randint(0, tensors.VOCABULARY, (2, 10), generator=torch.Generator().manual_seed(1))
    for _ in range(STEPS):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.destroy()


def sequence(folder: Path) -> None:
    settings = config(folder, zero_optimization={"stage": 2})
    engine, *_ = initialize(model=sequences.model(), mesh_param=(1, 2), config=settings)
    ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(engine.global_rank))
    for _ in range(STEPS):
        engine.backward(engine(input_ids=ids, labels=ids, shift_labels=ids).loss)
        engine.step()
    engine.destroy()


def pipes(folder: Path) -> None:
    settings = config(folder, gradient_accumulation_steps=2)
    layers = [LayerSpec(Embedding), LayerSpec(Block, WIDTH), LayerSpec(Slow), LayerSpec(Head)]
    module = PipelineModule(layers, num_stages=2, partition_method="uniform", loss_fn=cross_entropy)
    engine, *_ = initialize(model=module, config=settings)
    for tokens in batches(STEPS, 2):
        engine.train_batch(pairs(tokens))
    engine.destroy()


@pytest.mark.parametrize(("train", "kind"), [(tensor, "tensor"), (sequence, "sequence"), (pipes, "pipeline")])
def test_their_time_is_told_apart(tmp_path: Path, train: Callable[[Path], None], kind: str) -> None:
    run_distributed(train, 2, tmp_path)
    for rank in (0, 1):
        recorded = read_rank(tmp_path, rank)
        assert [step["step"] for step in recorded.steps] == list(range(1, STEPS + 1))
        for step in recorded.steps[1:]:
            kinds = recorded.by_kind(step)
            assert kinds[kind] > 0, kinds
            assert kinds["compute"] > 0
            if kind == "pipeline" and rank == 0:  # it waits while the second stage sleeps
                assert kinds[kind] >= SLEEP_S
            assert sum(kinds.values()) <= step["seconds"] * (1 + 1e-6)
    keys = [key for key in recorded.keys.values() if key.kind == kind]
    if kind == "pipeline":
        assert "rank 0" in {key.place for key in keys}
    else:
        other = "all-to-all" if kind == "sequence" else "all-reduce"
        assert other in {key.operation for key in keys}
