"""Rules across keys, and the line in which ``explain`` sums a configuration up."""

from __future__ import annotations

from typing import Any

import pytest

from ds_hf.config import ConfigError, load_config
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


def offload(own: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    zero = {"stage": 2, "offload_optimizer": {"device": device}}
    return {"train_batch_size": 1, "zero_optimization": zero, "ds_hf": {"offload": own}}


@pytest.mark.parametrize(
    ("own", "stream"),
    [({}, "auto"), ({"stream": "auto"}, "auto"), ({"stream": 0}, 0.0), ({"stream": 0.3}, 0.3), ({"stream": 1}, 1.0)],
)
def test_stream_is_a_share_or_auto(own: dict[str, Any], stream: Any) -> None:
    config = load_config(offload(own), world_size=1)
    assert config.ds_hf.offload.stream == stream
    assert type(config.ds_hf.offload.stream) is type(stream)
    assert config.warnings == ()


@pytest.mark.parametrize(
    ("stream", "message", "fix"),
    [
        ("fast", '"fast" is a text; expected a number or "auto"', 'give a number or "auto" (default "auto")'),
        (True, 'true is a boolean; expected a number or "auto"', 'give a number or "auto" (default "auto")'),
        (1.5, "1.5 is too large", "give at most 1"),
        (-0.1, "-0.1 is too small", "give at least 0"),
    ],
)
def test_stream_is_nothing_else(stream: Any, message: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(offload({"stream": stream}), world_size=1)
    (fault,) = caught.value.faults
    assert (fault.pointer, fault.message, fault.fix) == ("/ds_hf/offload/stream", message, fix)


@pytest.mark.parametrize(
    ("own", "device", "warned"),
    [
        ({"delayed": True}, "cpu", ""),
        ({"delayed": True, "stream": "auto"}, "cpu", ""),
        ({"delayed": True, "stream": 0.0}, "cpu", ""),
        ({"delayed": True, "stream": 0.3}, "cpu", "/ds_hf/offload/stream"),
        ({"stream": "auto"}, "none", ""),
        ({"stream": 0.0}, "none", ""),
        ({"stream": 0.3}, "none", "/ds_hf/offload"),
        ({"ratio": 0.5}, "none", "/ds_hf/offload"),
        ({"delayed": True}, "none", "/ds_hf/offload"),
    ],
)
def test_only_what_was_asked_for_can_be_without_effect(own: dict[str, Any], device: str, warned: str) -> None:
    config = load_config(offload(own, device), world_size=1)
    assert [fault.pointer for fault in config.warnings] == ([warned] if warned else [])
