"""What a monitor is: it takes events, which are (name, number, samples seen so far).

Invariant: a ``Writer`` whose section is off, or on another process than that of global rank 0, opens and writes nothing
and imports no other package.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ds_hf.errors import ConfigError, Fault

__all__ = ["Event", "Monitor", "Writer", "is_writing_rank", "number", "require", "writable_folder"]

Event = tuple[str, Any, int]


class Monitor(ABC):
    """The interface, which users may implement: ``write_events([("Train/Samples/lr", 1e-3, 64), ...])``."""

    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config

    @abstractmethod
    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write each event."""


class Writer(Monitor):
    """A monitor of one section of the configuration.

    Args:
        monitor_config: the section, for instance ``DeepSpeedConfig(...).monitor_config.csv_monitor``.

    Attributes:
        enabled: the section's, on every rank.

    Raises:
        ConfigError: the package or the folder that it needs is not there.
    """

    section = ""  # its name in the configuration

    def __init__(self, monitor_config: Any) -> None:
        super().__init__(monitor_config)
        self.enabled: bool = monitor_config.enabled
        self._writes = self.enabled and is_writing_rank()
        if self._writes:
            self._open()

    @abstractmethod
    def _open(self) -> None:
        """Get ready to write."""

    @abstractmethod
    def _write(self, events: Sequence[Event]) -> None:
        """Write them where they outlive this process."""

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write each event; a number that lies on a device is waited for (``MonitorMaster`` does not wait)."""
        if self._writes:
            self._write([(name, number(value), samples) for name, value, samples in event_list])

    def close(self) -> None:
        """Let go of files; a later event opens them again. Services end their runs themselves, when Python exits."""


def is_writing_rank() -> bool:
    """Whether this process has global rank 0."""
    return dist.get_rank() == 0 if dist.is_initialized() else os.environ.get("RANK", "0") == "0"


def number(value: Any) -> Any:
    """``value``, out of its tensor if it is in one of one element."""
    return value.item() if isinstance(value, Tensor) else value


def require(module: str, section: str, package: str) -> ModuleType:
    """Import what a section needs.

    Raises:
        ConfigError: it cannot be imported; the text says what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        problem = f"it needs the package {package.split('>')[0]}, which cannot be imported here ({error})"
        fix = f"pip install '{package}', or set {section}.enabled to false"
        raise ConfigError([Fault(f"/{section}/enabled", problem, fix)]) from error


def writable_folder(section: str, output_path: str, job_name: str) -> Path:
    """Make ``output_path/job_name``, from the working directory on, and try to write there.

    Raises:
        ConfigError: that failed.
    """
    folder = (Path(output_path).expanduser() / job_name).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        problem = f"cannot write into {folder}: {error.strerror or error}"
        fix = "name a folder that the process of rank 0 can make and write to"
        raise ConfigError([Fault(f"/{section}/output_path", problem, fix)]) from error
    return folder
