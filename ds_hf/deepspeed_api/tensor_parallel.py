"""``tp_model_init`` and what goes with it: tensor parallelism that is asked for in code, as DeepSpeed's users do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_hf.config.mesh import Claim
from ds_hf.config.types import Config
from ds_hf.dtypes import SHORT, torch_dtype
from ds_hf.errors import ConfigError

__all__ = [
    "ASKED",
    "AUTOTP_MODE",
    "Asked",
    "asked_of",
    "get_auto_tp_mode",
    "is_autotp_training_mode",
    "set_autotp_mode",
    "tp_model_init",
]


class AUTOTP_MODE(Enum):  # noqa: N801
    """DeepSpeed's two uses of cut layers."""

    TRAINING = "TRAINING"
    INFERENCE = "INFERENCE"


_mode = AUTOTP_MODE.INFERENCE
ASKED = "_ds_tp_model_init"
_SOURCE = "tp_model_init(tp_size=...)"


def set_autotp_mode(training: bool = False) -> None:
    """Say what cut layers are for. Layers of ds_hf do the same for both."""
    global _mode
    _mode = AUTOTP_MODE.TRAINING if training else AUTOTP_MODE.INFERENCE


def get_auto_tp_mode() -> AUTOTP_MODE:
    return _mode


def is_autotp_training_mode() -> bool:
    return _mode is AUTOTP_MODE.TRAINING


@dataclass(frozen=True)
class Asked:
    """What ``tp_model_init`` was given for a model."""

    size: int
    dtype: torch.dtype | None
    group: Any = None

    @property
    def claims(self) -> list[Claim]:
        """About the mesh."""
        return [Claim("tensor", self.size, _SOURCE, "tp_model_init()")]

    def check(self, settings: Config) -> None:
        """Compare with the configuration.

        Raises:
            ConfigError: it has another dtype.
        """
        given = settings.resolved.get("tensor_parallel", {}).get("dtype")
        used = torch.bfloat16 if settings.bf16.enabled else torch.float16 if settings.fp16.enabled else None
        if None not in (used, self.dtype) and used != self.dtype:
            raise ConfigError(f"Conflicting dtype: config uses {used} but tp_model_init requested {self.dtype}.")
        if given in SHORT.values() and self.dtype is not None and torch_dtype(given) != self.dtype:
            raise ConfigError(
                f"Conflicting tensor_parallel.dtype in config ({given}) and tp_model_init ({self.dtype})."
            )


def tp_model_init(
    model: nn.Module, tp_size: int, dtype: torch.dtype | None = None, config: Any = None, **kwargs: Any
) -> nn.Module:
    """Ask for ``model`` to be divided over ``tp_size`` processes (DeepSpeed's ``tp_model_init``).

    It records that and returns the model; ``initialize`` divides it, by the rules of ``tensor_parallel`` in its
    configuration or by the model's own plan.

    Args:
        tp_size: processes that share each layer, consecutive ranks.
        dtype: compared with the configuration.
        config: for DeepSpeed's signature.
        tp_group: the processes, when they exist as a group; then ``initialize`` takes no ``mpu``.

    Raises:
        ConfigError: it was called for the model before, with something else; or ``tp_size`` is no number of processes.
    """
    group = kwargs.pop("tp_group", None)
    if kwargs:
        raise TypeError(f"tp_model_init() takes no {', '.join(sorted(kwargs))}")
    if type(tp_size) is not int or tp_size < 1:
        raise ConfigError(f"tp_size is {tp_size!r:.40}, which is no number of processes", "tp_model_init()")
    asked, before = Asked(tp_size, dtype, group), vars(model).get(ASKED)
    if before is not None and (before.size, before.dtype) != (tp_size, dtype):
        raise ConfigError("Conflicting tp_model_init arguments detected across multiple calls.", "tp_model_init()")
    model.__dict__[ASKED] = asked
    set_autotp_mode(training=True)
    return model


def asked_of(model: nn.Module, mpu: Any) -> Asked | None:
    """What was asked for ``model``, or for one inside it.

    Raises:
        ConfigError: the group that was given does not fit.
    """
    found: Sequence[Asked] = [m.__dict__[ASKED] for m in model.modules() if ASKED in m.__dict__]
    if not found:
        return None
    asked = found[0]
    if any((each.size, each.dtype) != (asked.size, asked.dtype) for each in found):
        raise ConfigError("Conflicting tp_model_init arguments detected across multiple calls.", "tp_model_init()")
    if asked.group is not None and mpu is not None:
        raise ConfigError("tp_model_init provided tp_group; deepspeed.initialize must not receive mpu.")
    if asked.group is not None and isinstance(asked.group, dist.ProcessGroup):
        ranks, me = dist.get_process_group_ranks(asked.group), dist.get_rank()
        if len(ranks) != asked.size:
            raise ConfigError(f"tp_model_init tp_size ({asked.size}) does not match tp_group size ({len(ranks)}).")
        start = me // asked.size * asked.size
        if ranks != list(range(start, start + asked.size)):
            raise ConfigError(
                f"tp_group is {ranks} on rank {me}, and tensor-parallel ranks are consecutive: give a group of "
                f"{list(range(start, start + asked.size))}, or leave tp_group out"
            )
    return asked
