"""A teacher: an engine that only computes, or a module; it gives its outputs and nothing else of it changes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn

from ds_hf.errors import ConfigError

__all__ = ["names_of_inputs", "run_teacher", "teacher_engine"]


def teacher_engine(
    model: nn.Module,
    *,
    stage: int = 0,
    bits: Literal[8, 4] | None = None,
    offload: bool = False,
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16",
) -> Any:
    """An engine that only computes, for a teacher; ``initialize`` with a file of one's own does as well.

    Args:
        model: changed in place: frozen, in evaluation mode.
        stage: 3 divides its weights over the processes.
        bits: its weights rest in blocks of so many bits.
        offload: its weights rest in host memory (stage 3).
        dtype: of its weights.

    Raises:
        ConfigError: what is asked for does not go together.
    """
    from ds_hf.deepspeed_api.initialize import initialize

    if offload and stage != 3:
        raise ConfigError("weights in host memory are those of stage 3: teacher_engine(model, stage=3, offload=True)")
    zero: dict[str, Any] = {"stage": stage, **({"offload_param": {"device": "cpu"}} if offload else {})}
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    if bits is not None:
        config["weight_quantization"] = {"quantized_initialization": {"num_bits": bits, "group_size": 64}}
    engine, *_ = initialize(model=model.requires_grad_(False).eval(), config=config)
    return engine


def run_teacher(teacher: Any, inputs: Mapping[str, Any]) -> Any:
    """The teacher's outputs, without gradients, in evaluation mode; it is left as it was."""
    model = getattr(teacher, "module", teacher)
    names = names_of_inputs(type(model))
    accepted = {name: value for name, value in inputs.items() if name in names or name in _ASKED}
    if "use_cache" in names:
        accepted["use_cache"] = False
    trained = [module for module in model.modules() if module.training]
    if trained:
        teacher.eval()
    try:
        with torch.no_grad():
            return teacher(**accepted)
    finally:
        for module in trained:
            module.training = True


_ASKED = ("output_hidden_states", "output_attentions")  # which models of transformers take though they do not name them


def names_of_inputs(kind: type[nn.Module]) -> tuple[str, ...]:
    """Of the arguments of ``forward``, in their order."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]
