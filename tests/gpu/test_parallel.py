"""Layers, sequences and stages divided over two GPUs by NCCL, and few bits: by the checks of the CPU's tests.

References are computed on a GPU too: transformers has cosines of positions and losses in fp32 even in an fp64 model.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_hf import initialize
from ds_hf.deepspeed_api.sequence import attention
from ds_hf.engine.comm import peer_exchanges
from ds_hf.engine.modules import overlap  # noqa: F401 - its operator
from tests.contract import test_hierarchical, test_onebit, test_sequence_parity, test_tensor_parallel, test_wire
from tests.contract.test_parity import CLIP
from tests.engine.parallel.pipeline import test_training as pipelines
from tests.engine.parallel.pipeline.models import batches, pairs, pipeline
from tests.helpers.distributed import DistributedFailure, run_distributed
from tests.helpers.tensor import build, tensor_section

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
FP64 = torch.float64


def on_two(fn: Any, *args: Any, **kwargs: Any) -> list[Any]:
    return run_distributed(fn, 2, *args, timeout=150, backend="nccl", **kwargs)


def by_copies(fn: Any, *args: Any, **kwargs: Any) -> Any:
    """``fn`` with activations that travel by copies between the GPUs, however small; how many exchanges they were."""
    peer_exchanges.LEAST_EXCHANGED_NBYTES = attention._LEAST_TOKENS = 0
    brought = 0
    travel = peer_exchanges.PeerExchanges._travel

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal brought
        brought += 1
        return travel(*args, **kwargs)

    peer_exchanges.PeerExchanges._travel = counted  # type: ignore[method-assign]
    return fn(*args, **kwargs), brought


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("kind", ["llama", "fused", "gpt2", "one, in fp64"])
def test_cut_layers(kind: str, stage: int) -> None:
    found = on_two(test_tensor_parallel.train, kind, 2, stage, 2, CLIP, dtype=FP64)
    test_tensor_parallel.check(found, kind, 2, CLIP, 1, test_tensor_parallel.STEPS, FP64, "cuda")


@pytest.mark.parametrize(("kind", "stage"), [("llama", 0), ("fused", 1), ("gpt2", 3)])
def test_divided_tokens(kind: str, stage: int) -> None:
    own = {"tensor_sequence_parallel": True}
    found = on_two(test_tensor_parallel.train, kind, 2, stage, 2, CLIP, dtype=FP64, ds_hf=own)
    test_tensor_parallel.check(found, kind, 2, CLIP, 1, test_tensor_parallel.STEPS, FP64, "cuda")


def compiled_layers(stage: int, **own: Any) -> tuple[list[float], Any]:
    """Losses in bf16 of compiled blocks, and graphs and breaks."""
    own["compile"] = "blocks"
    settings = test_tensor_parallel.config("llama", 2, stage, bf16={"enabled": True}, ds_hf=own)
    engine, *_ = initialize(model=build("llama"), config=settings)
    losses = []
    for step in range(4):
        ids = torch.randint(4, 64, (2, 16), generator=torch.Generator().manual_seed(step)).to(engine.device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    report = engine.compile_report()
    engine.destroy()
    return losses, (report.graphs, report.breaks)


@pytest.mark.parametrize("stage", [1, 3])
def test_compiled_cut_layers(stage: int) -> None:
    (first, report), (second, _) = on_two(compiled_layers, stage)
    assert first == second
    assert report[1] == {}
    (divided, report), (other, _) = on_two(compiled_layers, stage, tensor_sequence_parallel=True)
    assert divided == other == pytest.approx(first, rel=0.01)
    assert report[1] == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_that_leave_room(dtype: torch.dtype) -> None:
    left, right = (
        torch.randn(4096, 512, device="cuda", dtype=dtype).t(),
        torch.randn(4096, 768, device="cuda", dtype=dtype),
    )
    settings: Any = torch._C
    before = settings._get_blas_preferred_backend(), settings._get_sm_carveout_experimental()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = torch.ops.ds_hf_overlap.mm(left, right)
    torch.testing.assert_close(found, left @ right)
    assert (settings._get_blas_preferred_backend(), settings._get_sm_carveout_experimental()) == before


def generated(stage: int) -> tuple[Tensor, Tensor]:
    plain = build("llama").cuda().eval()
    ids = torch.arange(4, 12, device="cuda").view(1, -1)
    how = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = plain.generate(ids, **how).cpu()  # type: ignore[operator]
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        "tensor_parallel": tensor_section("llama", 2),
    }
    engine, *_ = initialize(model=build("llama"), config=settings)
    return engine.generate(ids, **how).cpu(), expected


@pytest.mark.parametrize("stage", [0, 3])
def test_a_cut_model_generates(stage: int) -> None:
    for found, expected in on_two(generated, stage):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("more", [{}, {"kv_heads": 1, "checkpointing": True}], ids=["heads", "few key heads"])
def test_divided_sequences(more: dict[str, Any]) -> None:
    for errors in on_two(test_sequence_parity.gradients_of_stages, [0, 1, 2, 3], 2, **more):
        assert max(errors) < 1e-10


@pytest.mark.parametrize("more", [{}, {"kv_heads": 4, "checkpointing": True}], ids=["at once", "in chunks"])
def test_divided_sequences_by_copies(more: dict[str, Any]) -> None:
    for errors, brought in on_two(by_copies, test_sequence_parity.gradients_of_stages, [0, 2, 3], 2, **more):
        assert brought > 0
        assert max(errors) < 1e-10


@pytest.mark.parametrize(("clip", "tolerance"), pipelines.FP64_TOLERANCES)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stages_of_a_pipeline(stage: int, clip: float, tolerance: float) -> None:
    tokens, options = batches(6, pipelines.MICRO, lengths=True), {"lr": 1e-3, "weight_decay": 0.01}
    settings = pipelines.config(stage, gradient_clipping=clip)
    found = on_two(pipelines.train, tokens, torch.optim.AdamW, settings, True, 2, options, dtype=FP64)
    wanted = pipelines.reference(torch.optim.AdamW, tokens, True, clip, FP64, "cuda", **options)
    pipelines.check(found, wanted, exactly=False, tolerance=tolerance)


def narrow_stages() -> list[float]:
    module = pipeline(True, 2)
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    settings = pipelines.config(1, bf16={"enabled": True}, optimizer=optimizer)
    engine, *_ = initialize(model=module, config=settings)
    losses = [
        float(engine.train_batch(pairs(step.to(engine.device)))) for step in batches(12, pipelines.MICRO, lengths=True)
    ]
    engine.destroy()
    return losses


def test_stages_in_bf16() -> None:
    first, second = on_two(narrow_stages)
    assert first == second
    tokens = batches(12, pipelines.MICRO, lengths=True)
    wanted = pipelines.reference(torch.optim.AdamW, tokens, True, lr=1e-3)["losses"]
    assert first == pytest.approx(wanted, rel=1e-2)


def one_stage_fails() -> None:
    module = pipeline(False, 2)
    engine, *_ = initialize(model=module, config=pipelines.config(0, optimizer={"type": "SGD", "params": {"lr": 0.1}}))
    if dist.get_rank() == 1:
        module.forward_funcs[-1].forward = None  # what the second stage calls
    for step in batches(2, pipelines.MICRO):
        engine.train_batch(pairs(step.to(engine.device)))


def test_a_fault_of_one_stage_ends_both() -> None:
    began = time.monotonic()
    with pytest.raises(DistributedFailure, match="NoneType"):
        on_two(one_stage_fails)
    assert time.monotonic() - began < 140


@pytest.mark.parametrize("more", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_and_parameters_in_few_bits(stage: int, more: dict[str, Any]) -> None:
    test_wire.compare(stage, 2, 2, more, backend="nccl")


@pytest.mark.parametrize("more", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", test_onebit.OPTIMIZERS)
def test_one_bit_optimizers(name: str, more: dict[str, Any]) -> None:
    found = on_two(test_onebit.both, name, 2, more)
    for (losses, _, _), (packed, _, _) in found:
        assert packed == pytest.approx(losses, rel=0.05)
    if name != "ZeroOneAdam":  # which may be between two meetings
        (_, (_, _, first)), (_, (_, _, second)) = found
        assert all(torch.equal(second[key], value) for key, value in first.items())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_whole_on_each_gpu(stage: int) -> None:
    """MiCS with one GPU to a shard: sums go over both, copies do not drift."""
    ranks = on_two(test_hierarchical.train_each, [(stage, 2, {}), (stage, 2, {"mics_shard_size": 1})])
    for plain, found in ranks:
        assert found["inner"] == 1
        assert found["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert found["norms"] == pytest.approx(plain["norms"], rel=1e-5)
        assert test_hierarchical.distance(found["weights"], plain["weights"]) < 1e-5
        for name, value in ranks[0][1]["weights"].items():
            assert torch.equal(found["weights"][name].cpu(), value.cpu())
