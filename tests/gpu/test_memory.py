"""Predicted memory against what CUDA's allocator saw."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from ds_hf import initialize
from ds_hf.memory import Predictor, Workload
from tests.helpers.distributed import run_distributed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LLAMA = "llama:hidden=1024,layers=8,heads=16,kv_heads=8,intermediate=2816,vocab=32000"
T5 = "t5:d_model=768,d_ff=3072,num_layers=4,num_heads=12"  # whose attention has a bias that is trained


def peaks(world_size: int, cells: list[tuple[str, int, bool, str]]) -> list[tuple[int, int]]:
    """Predicted and measured bytes of the third step."""
    found = []
    for spec, stage, checkpointing, dtype in cells:
        workload = Workload(micro_batch=4, seq_len=1024, gradient_checkpointing=checkpointing)
        predictor = Predictor(spec, workload)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
            "zero_optimization": {"stage": stage},
        } | ({dtype: {"enabled": True}} if dtype != "fp32" else {})
        predicted = predictor.predict(config, world_size=world_size).device_peak
        like: Any = predictor.model
        with torch.device("cuda", torch.cuda.current_device()):
            model = type(like)._from_config(like.config).train()
            tokens = torch.randint(0, 32000, (4, 1024))
        if checkpointing:
            model.gradient_checkpointing_enable()
        engine, *_ = initialize(model=model, config=config, model_parameters=model.parameters())
        for _ in range(3):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            del loss
            engine.step()
        found.append((predicted, torch.cuda.max_memory_allocated()))
        engine.destroy()
        del engine, model
        gc.collect()
        torch.cuda.empty_cache()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_within_ten_percent(world_size: int) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} CUDA devices, found {torch.cuda.device_count()}")
    llamas = [(0, False, "bf16"), (2, True, "bf16"), (3, False, "bf16"), (3, True, "bf16"), (2, False, "fp32")]
    cells = [*((LLAMA, *cell) for cell in llamas), (T5, 2, False, "bf16")]
    for rank in run_distributed(peaks, world_size, world_size, cells, timeout=120, backend="nccl"):
        for cell, (predicted, measured) in zip(cells, rank, strict=True):
            assert predicted == pytest.approx(measured, rel=0.1), cell


def reserved(stage: int) -> tuple[int, int]:
    """Bytes that are used and that the allocator holds, when an engine has taken a model that is on the GPU."""
    like: Any = Predictor(LLAMA, Workload(micro_batch=1, seq_len=8)).model
    with torch.device("cuda", torch.cuda.current_device()):
        model = type(like)._from_config(like.config).bfloat16()
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    engine, *_ = initialize(model=model, config={**config, "optimizer": {"type": "AdamW"}})
    found = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_what_the_buffers_replaced_is_given_back(stage: int) -> None:
    ((used, held),) = run_distributed(reserved, 1, stage, timeout=60, backend="nccl")
    assert held < 1.1 * used + (64 << 20), (used >> 20, held >> 20)
