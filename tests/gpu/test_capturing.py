"""Captured blocks on GPUs: the numbers of the eager ones to the bit, in whatever order forwards and backwards come."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

import ds_hf
from tests.helpers.distributed import run_distributed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")]

GPUS = min(2, torch.cuda.device_count())
STEPS = 6


def model(checkpointing: bool | None, lora: bool, dropout: float) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=512, use_cache=False, attn_implementation="sdpa", attention_dropout=dropout,
    )  # fmt: skip
    with torch.device("cuda", torch.cuda.current_device()):
        found: Any = LlamaForCausalLM(config)
    if checkpointing is not None:
        found.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    if lora:
        import peft

        found = peft.get_peft_model(found, peft.LoraConfig(r=4, target_modules="all-linear"))
        found.enable_input_require_grads()
    return found.train()


def ids(seed: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(512, (1, length), generator=generator).cuda()


def trained(
    capture: bool,
    stage: int,
    accumulation: int = 1,
    *,
    checkpointing: bool | None = None,
    lora: bool = False,
    dropout: float = 0.0,
    lengths: tuple[int, ...] = (64,),
    padded: int | None = None,
    twice: bool = False,
    evaluate: bool = False,
    compile: bool = False,
) -> tuple[list[float], list[Tensor], int]:
    own: dict[str, Any] = {"fused_lora": False}  # as PEFT rounds, to the bit
    if capture:
        own = {"capture": "blocks", "capture_pad_to_multiple_of": padded}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "ds_hf": {**own, **({"compile": "blocks"} if compile else {})},
    }
    engine, *_ = ds_hf.initialize(model=model(checkpointing, lora, dropout), config=config)
    torch.cuda.manual_seed(3)
    losses = []
    for step in range(STEPS):
        for micro in range(accumulation):
            batch = ids(100 * step + 10 * micro + torch.distributed.get_rank(), lengths[step % len(lengths)])
            loss = engine(input_ids=batch, labels=batch).loss
            if twice:  # with another captured forward before the backward of the first
                loss = loss + engine(input_ids=batch.flip(1), labels=batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        if evaluate:
            engine.eval()
            with torch.no_grad():
                losses.append(engine(input_ids=ids(step, 48), labels=ids(step, 48)).loss)
            engine.train()
    weights = [value.detach().cpu() for _, value in engine.named_weights()]
    captured = len(engine.compiler.compiled)
    engine.destroy()
    return [loss.item() for loss in losses], weights, captured


def as_eager(cells: list[dict[str, Any]]) -> None:
    for cell in cells:
        eager, captured = trained(False, **cell), trained(True, **cell)
        assert captured[2] == 4, cell
        assert captured[0] == eager[0], cell
        assert all(map(torch.equal, captured[1], eager[1])), cell


@pytest.mark.parametrize("stage", range(4))
def test_stages(stage: int) -> None:
    cells = [{"stage": stage, "accumulation": accumulation} for accumulation in (1, 3)]
    run_distributed(as_eager, GPUS, cells, backend="nccl", timeout=120)


def test_other_orders_and_shapes() -> None:
    cells: list[dict[str, Any]] = [{"twice": True}, {"evaluate": True}, {"lengths": (64, 48, 32)}, {"dropout": 0.1}]
    run_distributed(as_eager, GPUS, [{"stage": 2, **cell} for cell in cells], backend="nccl", timeout=120)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool) -> None:
    cells = [{"stage": stage, "checkpointing": reentrant, "accumulation": 2} for stage in (1, 3)]
    run_distributed(as_eager, GPUS, cells, backend="nccl", timeout=120)


def test_adapters() -> None:
    cells = [{"stage": 2, "lora": True, "accumulation": 2}, {"stage": 3, "lora": True, "checkpointing": False}]
    run_distributed(as_eager, GPUS, cells, backend="nccl", timeout=120)


def many_lengths() -> None:
    """Of six lengths in four graphs a block: losses of the eager run but for what other kernels round in bf16."""
    lengths = (61, 17, 49, 33, 20, 64, 7, 31)
    for cell in (
        {"stage": 2, "accumulation": 2},
        {"stage": 3},
        {"stage": 1, "lora": True},
        {"stage": 2, "compile": True},
    ):
        eager = trained(False, lengths=lengths, **cell)
        padded = trained(True, lengths=lengths, padded=16, **cell)
        assert padded[2] == 4, cell
        torch.testing.assert_close(torch.tensor(padded[0]), torch.tensor(eager[0]), rtol=5e-3, atol=0)


def test_many_lengths() -> None:
    run_distributed(many_lengths, GPUS, backend="nccl", timeout=240)


def with_the_compiler() -> None:
    plain, captured = (trained(capture, 2, 2, compile=True) for capture in (False, True))
    assert captured[0] == plain[0]
    assert all(map(torch.equal, captured[1], plain[1]))


def test_with_the_compiler() -> None:
    run_distributed(with_the_compiler, GPUS, backend="nccl", timeout=240)


def memory() -> list[int]:
    found = []
    for _ in range(4):
        trained(True, 2)
        gc.collect()
        torch.cuda.empty_cache()
        found.append(torch.cuda.memory_reserved())
    return found


def test_engines_give_the_memory_of_their_graphs_back() -> None:
    first, *others = run_distributed(memory, GPUS, backend="nccl", timeout=120)[0]
    assert max(others) <= first + (4 << 20)
