"""Metrics of a Weights & Biases run; needs the package ``wandb``.

A run that is active already, the Trainer's for instance, is used and not replaced. wandb ends the run when Python does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from ds_hf.engine.observe.monitor.base import Event, Writer, require

__all__ = ["WandbMonitor", "check_wandb_availability"]

_NEEDS = ("wandb", "wandb", "wandb")  # module, section, package


class WandbMonitor(Writer):
    """The section ``wandb``. Where to send the data, and the key, are wandb's own settings (``WANDB_MODE``, ...).

    Attributes:
        project, group, team: the section's.
    """

    section = "wandb"

    def __init__(self, wandb_config: Any) -> None:
        self.group: str | None = wandb_config.group
        self.team: str | None = wandb_config.team
        self.project: str = wandb_config.project
        self._wandb: Any = None
        super().__init__(wandb_config)

    def _open(self) -> None:
        self._wandb = require(*_NEEDS)
        self._wandb.init(project=self.project, group=self.group, entity=self.team)

    def log(self, data: Mapping[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        """``wandb.log`` on rank 0."""
        if self._writes:
            self._wandb.log(dict(data), step=step, commit=commit)

    def _write(self, events: Sequence[Event]) -> None:
        for samples, alike in groupby(events, key=lambda event: event[2]):
            self.log({name: value for name, value, _ in alike}, step=samples)


def check_wandb_availability() -> None:
    """Raises:
    ConfigError: the package ``wandb`` cannot be imported.
    """
    require(*_NEEDS)
