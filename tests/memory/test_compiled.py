"""Compiled blocks in predictions, without values. Against real training: ``test_against_engine``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

from ds_hf.memory import Predictor, Workload
from ds_hf.memory.compiled import CompiledBlocks

SHAPE = "llama:hidden=128,layers=2,heads=4,kv_heads=4,intermediate=352,vocab=512"


@pytest.mark.slow
def test_budgets_lower_the_peak() -> None:
    predictor = Predictor(SHAPE, Workload(micro_batch=4, seq_len=512))

    def peak(**own: Any) -> int:
        config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}, "ds_hf": own}
        return predictor.predict(config, micro_batch=4).device_peak

    peaks = [peak(), peak(compile="blocks"), peak(compile="blocks", activation_memory_budget=0.5)]
    assert peaks[0] > peaks[1] > peaks[2], peaks


class Looks(nn.Module):
    """A block whose code depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) if x.sum().item() >= 0 else x


class Squares(Looks):
    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.linear(x * scale).square()


def test_what_cannot_be_traced_stays_as_it_is() -> None:
    blocks: list[nn.Module] = [Looks(), Squares(), Squares()]
    compiled, x = CompiledBlocks(blocks, None), torch.ones(2, 8)
    expected = torch.tanh(blocks[0].linear(x))  # type: ignore[operator]
    torch.testing.assert_close(blocks[0](x), expected)
    assert list(compiled.eager) == blocks[:1]
    for block, scale in zip(blocks[1:], (1.0, 2.0), strict=True):  # another number: other code
        y = block(x, scale=scale)
        torch.testing.assert_close(y, type(block).forward(block, x, scale=scale))
        y.sum().backward()
        assert block.linear.weight.grad is not None  # type: ignore[union-attr]
    assert len(compiled.eager) == 1
    compiled.remove()
    assert not any("forward" in vars(block) for block in blocks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_router_logits_that_are_recorded_outside_a_block(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    """Those of the traced block stayed among them ("'NoneType' object has no attribute 'export'")."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = MixtralConfig(
        **sizes, vocab_size=64, num_hidden_layers=2, num_local_experts=4, output_router_logits=True, use_cache=False
    )
    model = MixtralForCausalLM(config).to(dtype)
    tokens = torch.ones(2, 16, dtype=torch.long)
    inputs = {"input_ids": tokens, "labels": tokens, "attention_mask": tokens}
    predictor = Predictor(model, Workload(micro_batch=2, inputs=inputs))
    files = [{"ds_hf": {"compile": compile}, "zero_optimization": {"stage": 2}} for compile in (False, "blocks")]
    files = [{**file, "bf16": {"enabled": dtype is torch.bfloat16}} for file in files]
    eager, compiled = (predictor.predict(file, micro_batch=2).device_peak for file in files)
    assert compiled == eager
    assert "Traceback" not in caplog.text


def test_a_check_of_values_is_taken_to_hold() -> None:
    """As many image tokens as features (Gemma 3): "cond must be a bool, but got <class 'int'>"."""

    class Checks(Squares):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            torch._check_tensor_all_with(ValueError, (x != 0).sum() == x.numel(), lambda: "not as many")
            return {"loss": self.linear(x).sum()}

    config = {"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW"}}
    predictor = Predictor(Checks(), Workload(micro_batch=2, inputs={"x": torch.ones(2, 8)}))
    assert predictor.predict(config, micro_batch=2).device_peak > 0
