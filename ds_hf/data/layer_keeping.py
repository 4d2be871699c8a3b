"""Progressive layer drop: the share of layers that a step keeps, over steps."""

from __future__ import annotations

import math
from typing import Any

from ds_hf.errors import ConfigError

__all__ = ["ProgressiveLayerDrop", "kept_share"]


class ProgressiveLayerDrop:
    """``theta`` of a step: it begins at 1 and falls to ``theta``, as ``(1 - theta) exp(-gamma step) + theta``."""

    def __init__(self, theta: float = 0.5, gamma: float = 0.001) -> None:
        if not (0 < theta <= 1 and gamma >= 0):
            raise ConfigError(
                f"progressive_layer_drop: theta {theta} and gamma {gamma} give no share of layers: give a theta above "
                "0 and at most 1, and a gamma of at least 0",
                "progressive_layer_drop",
            )
        self.theta, self.gamma, self.current_theta = theta, gamma, 1.0

    def get_state(self) -> dict[str, Any]:
        """What a model is called with."""
        return {"progressive_layer_drop": True, "pld_theta": self.get_theta()}

    def get_theta(self) -> float:
        """Of the present step."""
        return self.current_theta

    def update_state(self, global_step: int) -> None:
        """Go to a step, the first being 0."""
        self.current_theta = (1.0 - self.theta) * math.exp(-self.gamma * global_step) + self.theta


def kept_share(theta: float, index: int, depth: int) -> float:
    """With what probability block ``index`` (from 0) of ``depth`` is computed: the later, the less."""
    return 1.0 - (index + 1) / depth * (1.0 - theta)
