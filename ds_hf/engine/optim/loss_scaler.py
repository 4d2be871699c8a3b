"""Loss scaling for fp16: DeepSpeed's dynamic rule, a static scale, and none.

The engine multiplies the loss by ``scale`` before backward, divides gradients by it before the update, and tells
the scaler after each boundary whether the gradients overflowed (the step was then skipped). One interface for all
three, chosen at construction by ``build_loss_scaler``, so the engine never asks which precision it runs in.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch

from ds_hf.errors import LossScaleError
from ds_hf.log import logger, warn_once

__all__ = [
    "DynamicLossScaler",
    "LossScaler",
    "NoLossScaler",
    "StaticLossScaler",
    "build_loss_scaler",
    "checked_scale",
    "create_loss_scaler",
]

_FACTOR = 2.0
_TINY = torch.finfo(torch.float32).tiny


class LossScaler(Protocol):
    """What the engine knows of a loss scaler."""

    dynamic: bool
    cur_scale: float

    @property
    def use_grad_scaling(self) -> bool:
        """Whether gradients carry a scale."""

    @property
    def scale(self) -> float:
        """The factor for the next loss."""

    @property
    def at_minimum(self) -> bool:
        """Whether the scale cannot fall, so that an overflow has another cause."""

    def update(self, overflow: bool) -> None:
        """Take note of one boundary."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()`` of another scaler."""


class _DeepSpeedNames:
    """What scripts read of DeepSpeed's loss scalers, and of ``optimizer.loss_scale_config``."""

    dynamic = False
    scale_factor = _FACTOR
    _scale: float

    @property
    def at_minimum(self) -> bool:
        """Whether the scale cannot fall, so that an overflow has another cause."""
        return True

    @property
    def cur_scale(self) -> float:
        """The scale for the next loss; may be set."""
        return self._scale

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        self._scale = checked_scale(value)

    @property
    def loss_scale(self) -> float:
        return self._scale

    @property
    def dynamic_loss_scale(self) -> bool:
        return self.dynamic

    @property
    def use_grad_scaling(self) -> bool:
        """Whether gradients carry a scale."""
        return True

    def update_scale(self, overflow: bool) -> None:
        """Take note of one boundary."""
        self.update(overflow)  # type: ignore[attr-defined]


def checked_scale(value: float) -> float:
    """``value`` as a loss scale.

    Raises:
        ValueError: it is not a positive number.
    """
    scale = float(value)
    if not math.isfinite(scale):
        raise ValueError(f"loss_scale must be finite, not {scale}")
    if scale <= 0:
        raise ValueError(f"loss_scale must be greater than 0, not {scale}")
    return scale


class StaticLossScaler(_DeepSpeedNames):
    """A fixed scale (``fp16.loss_scale`` > 0); an overflow skips the step and leaves the scale alone."""

    dynamic = False

    def __init__(self, scale: float) -> None:
        if not scale > 0:
            raise ValueError(f"fp16.loss_scale must be positive, got {scale}; 0 in the JSON asks for dynamic scaling")
        self._scale = float(scale)

    @property
    def scale(self) -> float:
        return self._scale

    def update(self, overflow: bool) -> None:
        """Nothing to move; that a step is skipped, the engine says."""

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self._scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore: a fixed scale is the configuration's, also when it changed between runs."""


class NoLossScaler(StaticLossScaler):
    """bf16 and fp32: the scale is 1."""

    def __init__(self) -> None:
        super().__init__(1.0)

    @property
    def use_grad_scaling(self) -> bool:
        return False


class DynamicLossScaler(_DeepSpeedNames):
    """Halve the scale on overflow, double it after ``loss_scale_window`` boundaries without one.

    Args:
        initial_scale: the first scale (2 ** ``fp16.initial_scale_power``).
        loss_scale_window: boundaries without overflow before the scale doubles.
        hysteresis: overflows tolerated before the scale is halved, counting the one that halves it.
        consecutive_hysteresis: give the whole hysteresis back at every good boundary, not only when the scale grows.
        min_loss_scale: never go below.
        ends_at_minimum: an overflow there ends the run with LossScaleError, as DeepSpeed does it with ZeRO; otherwise
            the step is skipped like others.
    """

    dynamic = True

    def __init__(
        self,
        initial_scale: float = 2.0**16,
        loss_scale_window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_loss_scale: float = 1.0,
        ends_at_minimum: bool = True,
    ) -> None:
        positive = {
            "initial scale": initial_scale,
            "fp16.loss_scale_window": loss_scale_window,
            "fp16.hysteresis": hysteresis,
            "fp16.min_loss_scale": min_loss_scale,
        }
        for key, value in positive.items():
            if not value > 0:
                raise ValueError(f"{key} must be positive, got {value}")
        self._scale = float(initial_scale)
        self.loss_scale_window = loss_scale_window
        self.hysteresis = hysteresis
        self.consecutive_hysteresis = consecutive_hysteresis
        self.min_loss_scale = float(min_loss_scale)
        self.ends_at_minimum = ends_at_minimum
        self._hysteresis_left = hysteresis
        self._boundary = 0
        self._last_overflow = -1
        self._consecutive_overflows = 0

    @property
    def scale(self) -> float:
        return self._scale

    @property
    def at_minimum(self) -> bool:
        """Whether the scale cannot fall, so that an overflow has another cause."""
        return self._scale == self.min_loss_scale

    @property
    def cur_iter(self) -> int:
        """Boundaries so far."""
        return self._boundary

    @property
    def last_overflow_iter(self) -> int:
        """The boundary of the last overflow, -1 before one."""
        return self._last_overflow

    @property
    def cur_hysteresis(self) -> int:
        """Overflows left until the scale is halved."""
        return self._hysteresis_left

    @property
    def scale_window(self) -> int:
        return self.loss_scale_window

    @property
    def delayed_shift(self) -> int:
        return self.hysteresis

    @property
    def min_scale(self) -> float:
        return self.min_loss_scale

    def update(self, overflow: bool) -> None:
        if overflow:
            self._consecutive_overflows += 1
            self._shrink()
            self._last_overflow = self._boundary
        else:
            self._consecutive_overflows = 0
            self._maybe_grow()
        self._boundary += 1

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": self._scale,
            "boundary": self._boundary,
            "last_overflow": self._last_overflow,
            "hysteresis_left": self._hysteresis_left,
            "consecutive_overflows": self._consecutive_overflows,
            "settings": {  # for DeepSpeed, which reads them from its files; a resumed run has its configuration
                "loss_scale_window": self.loss_scale_window,
                "hysteresis": self.hysteresis,
                "consecutive_hysteresis": self.consecutive_hysteresis,
                "min_loss_scale": self.min_loss_scale,
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a dynamic scaler; a static scaler's state only sets the scale."""
        self._scale = float(state["scale"])
        self._boundary = int(state.get("boundary", 0))
        self._last_overflow = int(state.get("last_overflow", -1))
        self._hysteresis_left = int(state.get("hysteresis_left", self.hysteresis))
        self._consecutive_overflows = int(state.get("consecutive_overflows", 0))

    def _shrink(self) -> None:
        if self.hysteresis != 1 and self._hysteresis_left != 1:
            self._hysteresis_left -= 1
            logger.info(
                "fp16 overflow at loss scale %g: step skipped, scale kept (hysteresis left: %d).",
                self._scale,
                self._hysteresis_left,
            )
            return
        if self.at_minimum and self.ends_at_minimum:
            raise LossScaleError(
                f"fp16 gradients overflow at the smallest loss scale allowed ({self.min_loss_scale:g}, "
                f"fp16.min_loss_scale), {self._consecutive_overflows} boundaries in a row: the scale cannot be "
                "reduced further and no step would ever be made. Usual causes: a model trained in bf16 whose "
                "activations exceed fp16's 65504 (use bf16: set fp16.enabled to false and bf16.enabled to true), a "
                "learning rate that diverged (look at the loss before the first overflow), or bad values in the data."
            )
        reduced = max(self._scale / _FACTOR, self.min_loss_scale)
        logger.info("fp16 overflow at loss scale %g: step skipped, scale now %g.", self._scale, reduced)
        self._scale = reduced

    def _maybe_grow(self) -> None:
        if self.consecutive_hysteresis:
            self._hysteresis_left = self.hysteresis
        good = self._boundary - self._last_overflow - 1
        if good > 0 and good % self.loss_scale_window == 0:
            self._hysteresis_left = self.hysteresis
            self._scale *= _FACTOR


def create_loss_scaler(
    dtype: torch.dtype, static_loss_scale: float, dynamic_scaling: bool, dynamic_loss_args: dict[str, Any] | None
) -> LossScaler:
    """The scaler for a dtype (DeepSpeed's ``CreateLossScaler``); only fp16 has a scale.

    Args:
        dynamic_loss_args: ``init_scale``, ``scale_window``, ``delayed_shift`` (hysteresis),
            ``consecutive_hysteresis``, ``min_scale``; any of them may be missing.

    Raises:
        ValueError: a scale is not a positive number.
    """
    if dtype != torch.float16:
        return NoLossScaler()
    if not dynamic_scaling:
        return StaticLossScaler(checked_scale(static_loss_scale))
    given = dynamic_loss_args or {}
    initial = given.get("init_scale", 2.0**32)
    if not math.isfinite(initial):
        raise ValueError(f"dynamic_loss_args['init_scale'] must be finite, not {initial}")
    return DynamicLossScaler(
        initial,
        given.get("scale_window", 1000),
        given.get("delayed_shift", 1),
        given.get("consecutive_hysteresis", False),
        given.get("min_scale", 1.0),
    )


def build_loss_scaler(config: Any, *, sharded: bool = True, autocast: str | None = None) -> LossScaler:
    """The scaler that ``config.fp16`` asks for (``loss_scale`` 0 is dynamic), or none for bf16 and fp32.

    Args:
        sharded: the optimizer's states are. Where they are not, DeepSpeed has another rule (its ``FP16_Optimizer``):
            every overflow halves the scale, and one at the minimum does not end the run.
        autocast: name of the dtype of ``torch.autocast``: with float16 and no ``fp16`` the numbers are those of
            ``torch.amp.GradScaler``, which knows no smallest scale; the scale grows a step later than there.
    """
    fp16 = config.fp16
    if not fp16.enabled:
        return DynamicLossScaler(2.0**16, 2000, 1, False, _TINY, False) if autocast == "float16" else NoLossScaler()
    if fp16.loss_scale:
        return StaticLossScaler(fp16.loss_scale)
    initial = 2.0**fp16.initial_scale_power
    if initial < fp16.min_loss_scale:
        warn_once(
            f"fp16.initial_scale_power {fp16.initial_scale_power} (a scale of {initial:g}) starts below "
            f"fp16.min_loss_scale {fp16.min_loss_scale}; the first overflow will raise the scale to it"
        )
    return DynamicLossScaler(
        initial,
        fp16.loss_scale_window,
        fp16.hysteresis if sharded else 1,
        fp16.consecutive_hysteresis,
        fp16.min_loss_scale,
        sharded,
    )
