"""Experts divided over two and four GPUs by NCCL, by the checks of the CPU's tests."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import ds_hf
from ds_hf.engine.comm import peers
from tests.contract import test_expert_adapters as lora
from tests.contract import test_expert_blocks as blocks
from tests.contract import test_expert_parallel as contract
from tests.helpers.distributed import run_distributed
from tests.helpers.experts import build

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


@pytest.fixture(autouse=True)
def _over_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (contract, lora, blocks):
        monkeypatch.setattr(module, "run_distributed", functools.partial(run_distributed, backend="nccl"))
    for module in (lora, blocks):  # against the CPU, whose fp32 parts (routers, rotary embeddings) round otherwise
        monkeypatch.setattr(module, "NEAR", 1e-6)
    contract.reference.cache_clear()


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_stages(kind: str) -> None:
    contract.check(kind, 2, 2, [(0, 1), (1, 2), (2, 1), (3, 2)])


def large(stage: int) -> dict[str, Any]:
    """Every buffer counts as large enough for copies between GPUs."""
    peers.LEAST_COPIED_NBYTES = 0
    more = {"bf16": {"enabled": True}}
    engine, *_ = ds_hf.initialize(
        model=build("qwen3_moe", experts="grouped_mm"), config=contract.config(2, stage, **more)
    )
    return contract.run(engine)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_copies_between_gpus_are_of_those_that_hold_the_same(stage: int) -> None:
    wanted = contract.run_distributed(contract.narrow, 2, "bf16", stage, 1, timeout=100)
    for found, alone in zip(contract.run_distributed(large, 2, stage, timeout=100), wanted, strict=True):
        assert found["losses"] == pytest.approx(alone["losses"][: contract.STEPS], rel=0.02)


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
@pytest.mark.parametrize("size", [2, 4])
def test_four(size: int) -> None:
    contract.check("mixtral", 4, size, [(0, 1), (1, 2), (2, 1), (3, 2)])


@pytest.mark.parametrize(("dtype", "stage"), [("bf16", 3), ("fp16", 1)])
def test_16_bits_and_grouped_products(dtype: str, stage: int) -> None:
    contract.test_16_bits_and_grouped_products(dtype, stage)


@pytest.mark.parametrize("stage", [1, 3])
def test_experts_without_a_token(stage: int) -> None:
    contract.test_experts_without_a_token_keep_their_values(stage)


@pytest.mark.parametrize("stage", [0, 3])
def test_adapters(stage: int, tmp_path: Path) -> None:
    contract.test_adapters_on_frozen_experts_are_saved_and_loaded(stage, tmp_path)


def test_adapters_of_experts() -> None:
    lora.test_stages_train_as_peft_does(2, 2, torch.float64, [(1, 1), (3, 2)], "qwen3_moe")
    lora.test_adapters_are_switched_while_training(2, 3, True)


def test_experts_in_blocks() -> None:
    blocks.test_stages_train_as_peft_does_on_rounded_weights(2, "mixtral", [(2, 1, 2), (1, 3, 1)])
    for size, stage, compile in ((1, 3, False), (2, 2, "blocks")):
        blocks.test_what_rests_and_what_is_kept(size, stage, compile)


@pytest.mark.parametrize(("kind", "lora"), [("qwen3_moe", False), ("gpt_oss", False), ("qwen3_moe", True)])
def test_compiled_grouped_products(kind: str, lora: bool) -> None:
    """By inductor, with experts whose tokens fill no vectors."""
    contract.check_compiled_in_16_bits(kind, lora, quick=False)
