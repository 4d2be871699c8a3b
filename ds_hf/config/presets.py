"""Ready-made configurations, for ``ds-hf config new``, ``--deepspeed zero2`` and ``load_config("zero2")``.

Every value that the Trainer can fill is "auto", so that a preset never contradicts the command line.
"""

from __future__ import annotations

import copy
from typing import Any

__all__ = ["PRESETS", "preset"]

_BASE: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
}
_HOST = {"device": "cpu", "pin_memory": True}
_SAVE = {"stage3_gather_16bit_weights_on_model_save": True}

PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero0": ("plain data parallelism, everything on every process", {"stage": 0}),
    "zero1": ("optimizer states divided", {"stage": 1}),
    "zero2": ("and gradients divided", {"stage": 2}),
    "zero3": ("and parameters divided", {"stage": 3, **_SAVE}),
    "zero2-offload": ("stage 2, optimizer in host memory", {"stage": 2, "offload_optimizer": _HOST}),
    "zero3-offload": (
        "stage 3, optimizer and parameters in host memory",
        {"stage": 3, "offload_optimizer": _HOST, "offload_param": _HOST, **_SAVE},
    ),
}


def preset(name: str) -> dict[str, Any]:
    """The configuration of one preset, as a new dict."""
    return copy.deepcopy({**_BASE, "zero_optimization": PRESETS[name][1]})
