"""DeepSpeed's names for a cross entropy in blocks of rows, against torch's and transformers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.runtime.chunked_cross_entropy import (
    ChunkedCausalLMLoss,
    chunked_cross_entropy,
    install_chunked_causal_lm_loss,
)
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_values_and_gradients(reduction: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (4 * torch.randn(37, 50)).to(dtype).requires_grad_()
    target = torch.randint(0, 50, (37,))
    target[::5] = -100
    weight = torch.rand(37) if reduction == "none" else 1.0
    (F.cross_entropy(logits.float(), target, reduction=reduction) * weight).sum().backward()
    wanted, logits.grad = logits.grad, None
    assert wanted is not None
    for rows in (None, 1, 10, 100):
        loss = chunked_cross_entropy(logits, target, reduction=reduction, block_rows=rows)
        torch.testing.assert_close(loss, F.cross_entropy(logits.float(), target, reduction=reduction))
        (loss * weight).sum().backward()
        assert logits.grad is not None
        torch.testing.assert_close(logits.grad, wanted, rtol=1e-5, atol=1e-6)  # in fp32 inside, whatever they come as
        logits.grad = None


def test_faults() -> None:
    logits, target = torch.randn(4, 8, requires_grad=True), torch.zeros(4, dtype=torch.long)
    for more, kind in (
        ({"reduction": "max"}, ValueError),
        ({"backend": "cuda"}, ValueError),
        ({"backend": "triton"}, RuntimeError),
        ({"block_rows": 0}, ValueError),
        ({"block_rows": 1.5}, TypeError),
    ):
        with pytest.raises(kind):
            chunked_cross_entropy(logits, target, **more)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Expected"):
        chunked_cross_entropy(logits, target[:3])
    with pytest.raises(RuntimeError, match=r"torch\.long"):
        chunked_cross_entropy(logits, target.int())
    with pytest.raises(RuntimeError, match="out of range"):
        chunked_cross_entropy(logits, target + 8)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(chunked_cross_entropy(logits, target), logits, create_graph=True)
    assert chunked_cross_entropy(logits, torch.full((4,), -100)).isnan()


def test_in_a_model() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=40
    )
    model: Any = LlamaForCausalLM(config)
    ids = torch.randint(0, 40, (2, 9))
    for more in ({}, {"num_items_in_batch": torch.tensor(11)}, {"shift_labels": ids}):
        model.loss_function = ForCausalLMLoss
        plain = model(input_ids=ids, labels=ids, **more).loss
        assert isinstance(install_chunked_causal_lm_loss(model), ChunkedCausalLMLoss)
        torch.testing.assert_close(model(input_ids=ids, labels=ids, **more).loss, plain)
    with pytest.raises(ValueError, match="only replaces the stock"):
        install_chunked_causal_lm_loss(model)
