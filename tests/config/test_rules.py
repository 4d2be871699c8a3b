"""Rules across keys, and the line in which ``explain`` sums a configuration up."""

from __future__ import annotations

from typing import Any

import pytest

from ds_hf.config import load_config
from ds_hf.config.explain import summary

BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}


@pytest.mark.parametrize(
    ("section", "beside", "warned", "said"),
    [
        ({}, {}, "", "fp32 under autocast to bf16"),
        ({"dtype": "fp32"}, {}, "no effect", "fp32 under autocast to fp32"),
        ({}, BF16, "", "bf16 under autocast to bf16"),
        ({}, FP16, "parameters in fp16", "fp16 under autocast to bf16"),
        ({"dtype": "fp16"}, BF16, "parameters in bf16", "bf16 under autocast to fp16"),
    ],
)
def test_autocast_beside_other_formats(section: dict[str, Any], beside: dict[str, Any], warned: str, said: str) -> None:
    tree = {"train_batch_size": 1, "torch_autocast": {"enabled": True, **section}, **beside}
    config = load_config(tree, world_size=1)
    messages = [f"{fault.pointer} {fault.message}" for fault in config.warnings]
    assert len(messages) == bool(warned)
    assert all(text.startswith("/torch_autocast/dtype ") and warned in text for text in messages)
    assert said in summary(config)
