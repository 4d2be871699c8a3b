"""A trial on a GPU: step times by events, peaks by the allocator, an artificial limit that it keeps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ds_hf.engine.observe.flops import products
from tests.engine.observe.probes.trial.test_driver import batch_of, events_of, make_engine, requested
from tests.helpers.distributed import run_distributed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
MIB = 2**20


def trial(folder: str, limit: int | None, compiled: bool) -> list[int]:
    engine = make_engine(2, bf16={"enabled": True}, ds_hf={"compile": "blocks" if compiled else False})
    from ds_hf.engine.observe.probes.trial.driver import attach

    sizes = ((64, 2), (1024, 1), (1 << 20, 1), (1 << 21, 1))
    driver = attach(engine, requested(folder, points=sizes, survey=True, memory_limit=limit, natural_steps=3))
    for index in range(12):
        batch = {name: value.to(engine.device) for name, value in batch_of(engine, index).items()}
        engine.backward(engine(**batch)["loss"])
        engine.step()
    assert driver is not None
    return [int(driver.done), engine.global_steps]


@pytest.mark.timeout(300)  # blocks are compiled anew for each of five sizes
@pytest.mark.parametrize("compiled", [False, True])
def test_trial_with_a_limit(tmp_path: Path, compiled: bool) -> None:
    limit = 512 * MIB
    assert run_distributed(trial, 1, str(tmp_path), limit, compiled, backend="nccl", timeout=270) == [[1, 6]]
    events = events_of(tmp_path)
    points: dict[int, dict[str, Any]] = {e["micro"]: e for e in events if e["event"] == "point"}
    assert [points[m]["outcome"] for m in (64, 1024, 1 << 20, 1 << 21)] == ["ok", "ok", "oom", "oom"]
    for micro in (64, 1024):
        assert 0 < points[micro]["low"] <= points[micro]["seconds"] <= points[micro]["high"] < 1
        assert 0 < points[micro]["peak"] <= limit
        assert 0 < points[micro]["optimizer_seconds"] < points[micro]["seconds"]
    facts = next(e for e in events if e["event"] == "facts")
    assert facts["cuda"]
    assert facts["memory"] == limit
    shares = next(e for e in events if e["event"] == "split")
    assert shares["compute"] > 0
    assert abs(shares["compute"] + shares["communication"] + shares["idle"] - 1) < 1e-6


@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "CUDNN_ATTENTION"])
def test_operations_where_heads_of_queries_share_keys(kernel: str) -> None:
    """Torch 2.11's own table raises there: each search, profile and count of a Llama 3 ended with it."""
    sizes = ((8, 64), (2, 64), (2, 64))
    tensors = [torch.randn(2, heads, 128, width, device="cuda", dtype=torch.bfloat16) for heads, width in sizes]
    query, key, value = (tensor.requires_grad_() for tensor in tensors)
    with sdpa_kernel(getattr(SDPBackend, kernel)), FlopCounterMode(display=False, custom_mapping=products()) as counter:
        nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).sum().backward()
    assert counter.get_total_flops() == 2 * (2 + 5) * 2 * 8 * 128 * 128 * 64


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", [0, 8])
def test_a_whole_search(tmp_path: Path, rank: int) -> None:
    """Of a Trainer's script: experts, heads that share keys, adapters. What is measured in processes that were there
    takes no more than what was measured first."""
    found = tmp_path / "figures.json"
    command = f"benchmarks/autotune.py --model tiny-moe --lora {rank} --processes 1 --micros 2:2 --budget 150s"
    command += f" --accumulation 1 --tune zero_optimization.stage,gradient_checkpointing --parts search --json {found}"
    folder = ["--folder", str(tmp_path / "search")]
    subprocess.run([sys.executable, *command.split(), *folder], check=True, timeout=280)
    trials = json.loads(found.read_text())["search"]["trials"]
    assert len(trials) >= 2
    peaks = [points[0][5] for trial in trials if (points := trial["points"])]
    assert max(peaks) < 2 * min(peaks)
