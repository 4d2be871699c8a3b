"""What the file alone says about ZenFlow that cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from ds_hf.config import load_config
from ds_hf.errors import ConfigError


def zenflow(section: dict[str, Any], zero: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    whole = {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": section, **(zero or {})}
    return {"train_batch_size": 1, "zero_optimization": whole, **more}


STEPS = {"select_strategy": "step", "select_interval": 8}


@pytest.mark.parametrize(
    ("config", "pointer", "text"),
    [
        (zenflow({}, {"offload_optimizer": {"device": "none"}}), "/zero_optimization/zenflow", "host memory"),
        (
            zenflow({}, {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/fast"}}),
            "/zero_optimization/offload_param/device",
            "in files",
        ),
        (zenflow({}, optimizer={"type": "Lion"}), "/optimizer/type", "Adam and AdamW, not for Lion"),
        (zenflow({"select_strategy": "step"}), "/zero_optimization/zenflow/select_interval", "needs a number"),
        (zenflow({**STEPS, "update_interval": 9}), "/zero_optimization/zenflow/select_interval", "all are updated"),
        (zenflow({}, ds_hf={"offload": {"delayed": True}}), "/ds_hf/offload/delayed", "in its own way"),
        (zenflow({}, {"compute_grad_norm": False}), "/zero_optimization/compute_grad_norm", "norm"),
        (
            zenflow({}, bf16={"enabled": True, "bf16_master_weights_and_grads": True}),
            "/bf16/bf16_master_weights_and_grads",
            "fp32",
        ),
    ],
)
def test_what_zenflow_does_not_go_with(config: dict[str, Any], pointer: str, text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(config, world_size=1)
    (fault,) = raised.value.faults
    assert (fault.pointer, text in fault.message) == (pointer, True), fault


@pytest.mark.parametrize(
    ("config", "warned"),
    [
        (zenflow({}), []),
        (zenflow({**STEPS, "update_interval": 4, "overlap_step": True}), []),
        (zenflow({"select_interval": 5}), ["/zero_optimization/zenflow/select_interval"]),
        (zenflow({}, ds_hf={"offload": {"stream": 0.5}}), ["/ds_hf/offload"]),
        (
            zenflow({}, {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}),
            ["/zero_optimization/offload_optimizer/ratio"],
        ),
    ],
)
def test_what_is_without_effect_beside_zenflow(config: dict[str, Any], warned: list[str]) -> None:
    assert [fault.pointer for fault in load_config(config, world_size=1).warnings] == warned
