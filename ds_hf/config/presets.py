"""Ready-made configurations, for ``ds-hf config new``, ``--deepspeed zero2`` and ``load_config("zero2")``.

For the Trainer every value that it can fill is "auto", so that a preset never contradicts the command line. A loop of
one's own has nothing that fills them: its presets hold values that work at once, an optimizer included.
"""

from __future__ import annotations

import copy
from typing import Any

__all__ = ["PRESETS", "preset", "preset_like"]

_BASE: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
}
# What the Trainer would fill in for its own defaults, but one sample at a time, which fits where anything fits.
_LOOP: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 5e-5}},
}
_HOST = {"device": "cpu", "pin_memory": True}
_SAVE = {"stage3_gather_16bit_weights_on_model_save": True}

PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero0": ("plain data parallelism, everything on every process", {"stage": 0}),
    "zero1": ("optimizer states divided", {"stage": 1}),
    "zero2": ("optimizer states and gradients divided", {"stage": 2}),
    "zero3": ("optimizer states, gradients and parameters divided", {"stage": 3, **_SAVE}),
    "zero2-offload": ("stage 2, optimizer in host memory", {"stage": 2, "offload_optimizer": _HOST}),
    "zero3-offload": (
        "stage 3, optimizer and parameters in host memory",
        {"stage": 3, "offload_optimizer": _HOST, "offload_param": _HOST, **_SAVE},
    ),
}


def preset(name: str, *, loop: bool = False) -> dict[str, Any]:
    """The configuration of one preset, as a new dict; with ``loop`` the one for a plain ``initialize()``."""
    return copy.deepcopy({**(_LOOP if loop else _BASE), "zero_optimization": PRESETS[name][1]})


def preset_like(tree: dict[str, Any]) -> str:
    """The name of the preset whose stage and offload are nearest to those of ``tree``."""
    zero = tree.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    stage = zero.get("stage", 0)
    name = f"zero{stage}" if f"zero{stage}" in PRESETS else "zero2"
    offloads = any(isinstance(zero.get(key), dict) for key in ("offload_optimizer", "offload_param"))
    return f"{name}-offload" if offloads and f"{name}-offload" in PRESETS else name
