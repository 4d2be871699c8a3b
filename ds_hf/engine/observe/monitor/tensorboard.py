"""Scalars in TensorBoard's files, in ``output_path/job_name``; needs the package ``tensorboard``.

Each run adds a file of its own; TensorBoard shows those of one folder as one curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ds_hf.engine.observe.monitor.base import Event, Writer, require, writable_folder

__all__ = ["TensorBoardMonitor", "check_tb_availability"]

_NEEDS = ("torch.utils.tensorboard", "tensorboard", "tensorboard")  # module, section, package


class TensorBoardMonitor(Writer):
    """The section ``tensorboard``.

    Attributes:
        output_path, job_name: the section's.
        log_dir: the folder, absolute; ``None`` where nothing is written.
        summary_writer: torch's ``SummaryWriter``; ``None`` where nothing is written.
    """

    section = "tensorboard"

    def __init__(self, tensorboard_config: Any) -> None:
        self.output_path: str = tensorboard_config.output_path
        self.job_name: str = tensorboard_config.job_name
        self.log_dir: str | None = None
        self.summary_writer: Any = None
        super().__init__(tensorboard_config)

    def _open(self) -> None:
        module = require(*_NEEDS)
        self.log_dir = str(writable_folder(self.section, self.output_path, self.job_name))
        self.summary_writer = module.SummaryWriter(log_dir=self.log_dir)

    def get_summary_writer(self) -> Any:
        """``summary_writer``."""
        return self.summary_writer

    def write_events(self, event_list: Sequence[Event], flush: bool = True) -> None:
        """Write each event; with ``flush`` they are in the file on return."""
        super().write_events(event_list)
        if flush:
            self.flush()

    def _write(self, events: Sequence[Event]) -> None:
        for name, value, samples in events:
            self.summary_writer.add_scalar(name, value, samples)

    def flush(self) -> None:
        """Return when everything is in the file."""
        if self.summary_writer is not None:
            self.summary_writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self.summary_writer is not None:
            self.summary_writer.close()


def check_tb_availability() -> None:
    """Raises:
    ConfigError: the package ``tensorboard`` cannot be imported.
    """
    require(*_NEEDS)
