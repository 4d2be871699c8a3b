"""Liger's kernels (``use_liger_kernel=True``) under the Trainer: its fused loss reads ``lm_head.weight``.

``pip install liger-kernel`` first; without it, or without a GPU, the tests are skipped.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compat.common import largest_difference, run_user_code
from tests.compat.trainer_code import config, fit, tiny_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel"),
]

VOCAB = 65536  # times 64: the head is a unit of its own


def trained(folder: str, tied: bool, deepspeed: dict[str, Any] | None, **more: Any) -> list[dict[str, float]]:
    model = tiny_llama(vocab_size=VOCAB, hidden_size=64, tie_word_embeddings=tied)
    return fit(folder, deepspeed, samples=24, max_steps=3, trainer_arguments={"model": model}, **more)


def runs(folder: str, tied: bool, kernels: dict[str, bool] | None = None) -> dict[str, list[dict[str, float]]]:
    """Without Liger and DeepSpeed, then with Liger: without DeepSpeed, at each stage, with checkpointing, and where the
    file asks for compiled or captured blocks, which those with Liger's kernels are not.

    Liger replaces classes of transformers, for good: the run without it comes first. ``kernels`` says which are used;
    Triton's interpreter (``TRITON_INTERPRET=1``, no GPU) knows what ``fused_linear_cross_entropy`` needs.
    """
    liger: dict[str, Any] = {"use_liger_kernel": True, "liger_kernel_config": kernels}
    found = {"plain": trained(folder, tied, None), "liger": trained(folder, tied, None, **liger)}
    for stage in range(4):
        found[f"stage {stage}"] = trained(folder, tied, config(stage), **liger)
    for key, stage in (("compile", 0), ("capture", 2), ("compile", 3)):
        found[f"{key}, stage {stage}"] = trained(folder, tied, config(stage, ds_hf={key: "blocks"}), **liger)
    found["checkpointing"] = trained(folder, tied, config(3), gradient_checkpointing=True, **liger)
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_trainer_with_liger(tmp_path: Path, tied: bool, world: int) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA devices, found {torch.cuda.device_count()}")
    for found in run_user_code(runs, str(tmp_path), tied, world_size=world, timeout=110):
        check(found)


def check(found: dict[str, list[dict[str, float]]]) -> None:
    plain, liger = found.pop("plain"), found.pop("liger")
    assert largest_difference(liger, plain) <= 1e-2, "its kernels are those of the model"
    for name, ours in found.items():
        assert largest_difference(ours, liger) <= 2e-4, f"{name}: {ours} instead of {liger}"


def predicted() -> tuple[float, float]:
    """Bytes of activations, plain and with Liger's norms and activations; and the GPU computes afterwards."""
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    from ds_hf.memory.predictor import Workload, predict

    settings = {**config(0), "train_micro_batch_size_per_gpu": 2}
    found = []
    for kernels in (False, True):
        model = tiny_llama(hidden_size=64)
        if kernels:
            losses = {"fused_linear_cross_entropy": False, "cross_entropy": False}
            _apply_liger_kernel_to_instance(model=model, **losses)
        found.append(float(predict(model, settings, Workload(seq_len=64)).device["activations"]))
        assert float(torch.ones(2, device="cuda").sum()) == 2
    return found[0], found[1]


def test_a_model_with_its_kernels_is_traced_without_launching_them() -> None:
    for plain, liger in run_user_code(predicted, world_size=1, timeout=110):
        assert 0 < liger < plain
