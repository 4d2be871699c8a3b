"""Products in fp8 on a GPU: those of what was cast, and the losses of a run near those of bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ds_hf
from ds_hf.engine.modules.fp8 import E4M3, E5M2, Fp8Linear, cast, multiply
from tests.helpers.distributed import run_distributed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs products of 8 bits"
    ),
]
STEPS = 300


@pytest.mark.parametrize(("kind", "rows"), [(E4M3, False), (E5M2, False), (E4M3, True)])  # rows' gradients are E4M3
def test_products_are_those_of_what_was_cast(kind: torch.dtype, rows: bool) -> None:
    a = torch.randn(250, 512, device="cuda", dtype=torch.bfloat16) * torch.logspace(-3, 3, 250, device="cuda")[:, None]
    b = torch.randn(128, 512, device="cuda", dtype=torch.bfloat16)
    left, right = cast(a, kind, rows=rows), cast(b, E4M3, rows=rows)
    found = multiply(left, right, torch.bfloat16).float()
    expected = multiply(left, right, torch.float32, emulated=True)
    # What adds up to little is as exact as what it is the sum of: of the whole matrix, or with scales of a row's own.
    size = expected.abs().amax(1, keepdim=True) if rows else expected.abs().max()
    torch.testing.assert_close(found / size, expected / size, rtol=1e-2, atol=1e-2 if not rows else 2e-3)


def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8,
        vocab_size=512, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device("cuda", torch.cuda.current_device()):
        return LlamaForCausalLM(config).train()


def ids(seed: int) -> Tensor:
    """Something to learn: each token follows from the one before, with some that do not."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(512, (8, 1), generator=generator)
    found = (start + 7 * torch.arange(129)) % 512
    noise = torch.rand(found.shape, generator=generator) < 0.2
    return torch.where(noise, torch.randint(512, found.shape, generator=generator), found).cuda()


def trained(fp8: Any, stage: int, accumulation: int, compile: bool, steps: int) -> tuple[list[float], int]:
    own: dict[str, Any] = {"fp8": {"smallest": 0, **fp8}} if fp8 is not None else {}
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "ds_hf": {**own, **({"compile": "blocks"} if compile else {})},
    }
    engine, *_ = ds_hf.initialize(model=model(), config=config)
    losses = []
    for step in range(steps * accumulation):
        batch = ids(2 * step + torch.distributed.get_rank())
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    layers = sum(isinstance(module, Fp8Linear) for module in engine.module.modules())
    found = torch.stack(losses).tolist()
    engine.destroy()
    return found, layers


@pytest.mark.parametrize(("recipe", "stage"), [("tensorwise", 3), ("rowwise", 1)])
def test_a_run_ends_where_one_in_bf16_does(recipe: str, stage: int) -> None:
    processes = min(torch.cuda.device_count(), 2)
    run: Any = [run_distributed(trained, processes, each, stage, 1, False, STEPS, timeout=150, backend="nccl")
                for each in (None, {"recipe": recipe})]  # fmt: skip
    plain, (found, layers) = run[0][0][0], run[1][0]
    assert layers == 28
    last, other = (sum(each[-30:]) / 30 for each in (plain, found))
    assert last < 0.6 * plain[0]
    assert other == pytest.approx(last, rel=5e-3)


def both(fp8: Any, stage: int, compile: bool) -> list[list[float]]:
    plain = trained({"keep_weights": False}, 2, 3, False, 4)[0]
    return [plain, trained(fp8, stage, 3, compile, 4)[0]]


@pytest.mark.parametrize(
    ("fp8", "stage", "compile"), [({}, 2, False), ({}, 0, True), ({"keep_weights": True}, 1, True), ({}, 3, True)]
)
def test_kept_copies_compiled_blocks_and_stages_agree(fp8: Any, stage: int, compile: bool) -> None:
    expected, found = run_distributed(both, 1, fp8, stage, compile, timeout=140, backend="nccl")[0]
    assert found == pytest.approx(expected, rel=1e-2)
