"""Compression, data efficiency and DeepSpeed's layer of experts on two GPUs, by the checks of the CPU's tests."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from ds_hf import initialize
from ds_hf.compression import init_compression
from tests.compression import test_stages as compression
from tests.compression.common import batches, config, net, run
from tests.deepspeed_api.moe import test_layer as moe
from tests.engine.modules import test_curriculum as curriculum
from tests.engine.modules import test_documents as documents
from tests.engine.modules import test_layer_drop as layer_drop
from tests.helpers.distributed import run_distributed
from tests.helpers.parity import full_weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


def on_gpu(module: str, made_by: str, work: Callable[..., Any], *args: Any) -> Any:
    """``work`` of a test for CPUs in this process, with what ``module.made_by`` makes on its GPU."""
    place = importlib.import_module(module)
    make = getattr(place, made_by)
    setattr(place, made_by, lambda *given: tree_map_only(torch.Tensor, torch.Tensor.cuda, make(*given)))
    return work(*args)


def compressed(stage: int) -> dict[str, tuple[list[float], dict[str, torch.Tensor]]]:
    found = {}
    for name, (key, section) in compression.METHODS.items():
        model, file = net(), config({key: section}, stage)
        init_compression(model, file)
        engine = initialize(model=model, config=file)[0]
        losses = run(engine, batches(2), engine.axis.rank)
        found[name] = (losses, full_weights(model))
        engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_compression(stage: int) -> None:
    first, second = run_distributed(compressed, 2, stage, backend="nccl", timeout=120)
    for name, (losses, weights) in first.items():
        expected, kept = compression.reference(name)
        mean = [(one + other) / 2 for one, other in zip(losses, second[name][0], strict=True)]
        assert mean == pytest.approx(expected, rel=1e-4), name
        for key, weight in kept.items():
            torch.testing.assert_close(weights[key], weight, rtol=1e-4, atol=1e-4, msg=f"{name}: {key}")


@pytest.fixture
def over_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes a module's tests, written for CPUs, start their processes on GPUs, where ``made_by`` makes its tensors."""

    def change(module: ModuleType, made_by: str) -> None:
        start = functools.partial(run_distributed, on_gpu)
        monkeypatch.setattr(
            module,
            "run_distributed",
            lambda work, count, *args, timeout=60, **more: start(
                count, module.__name__, made_by, work, *args, backend="nccl", timeout=2 * timeout, **more
            ),
        )

    return change


def rounded(own: bool) -> list[Any]:
    from tests.engine.modules import test_qat as qat

    # The least value of a group lies between two codes, and where it goes is a matter of the last bit: of this device.
    plain = qat.plain_training(qat.QAT, torch.float32, device="cuda")
    return [plain, *qat.at_stages(qat.QAT, [0, 2, 3], own, {})]


@pytest.mark.parametrize("own", [True, False], ids=["json", "quantize_"])
def test_quantized_training(own: bool) -> None:
    pytest.importorskip("torchao.quantization.qat")
    work = ("tests.engine.modules.test_qat", "batch", rounded, own)
    for rank, (plain, *stages) in enumerate(run_distributed(on_gpu, 2, *work, backend="nccl", timeout=120)):
        losses, weights = plain
        for found, values in stages:
            assert found == pytest.approx(losses[rank::2], rel=1e-4)
            for name, value in values.items():
                torch.testing.assert_close(value, weights[name], rtol=1e-3, atol=1e-4)


def test_layer_drop(tmp_path: Path, over_gpus: Callable[..., None]) -> None:
    over_gpus(layer_drop, "batch")
    layer_drop.test_two_processes_at_every_stage_resumed_in_the_middle(tmp_path, False)


def test_curriculum(tmp_path: Path, over_gpus: Callable[..., None]) -> None:
    over_gpus(curriculum, "batches")
    curriculum.test_two_processes_at_every_stage_resumed_in_the_middle(tmp_path)


def test_documents(over_gpus: Callable[..., None]) -> None:
    over_gpus(documents, "packed")
    documents.test_two_processes_with_checkpointing_at_stages_2_and_3()


def layers_of_experts(stages: list[int]) -> list[Any]:
    wanted, norms = moe.plain_training(2, moe.STEPS, device="cuda")  # of equal tokens topk takes others than on a CPU
    found: list[Any] = [(norms, {name: weight.cpu() for name, weight in wanted.items()})]
    for stage in stages:
        engine = moe.engine_of((2, 2, 2), stage, gradient_clipping=0.0)
        found.append((moe.train(engine, 0, moe.STEPS), full_weights(engine.module)))
        engine.destroy()
    return found


def test_deepspeeds_layer_of_experts() -> None:
    work = (moe.__name__, "batch", layers_of_experts, [0, 1, 2, 3])
    for (norms, wanted), *stages in run_distributed(on_gpu, 2, *work, backend="nccl", timeout=120):
        for found, weights in stages:
            assert found == pytest.approx(norms, rel=1e-6)
            for name, weight in weights.items():
                torch.testing.assert_close(weight, wanted[name], rtol=1e-10, atol=1e-10, msg=name)
