"""``CheckpointEngine`` and ``TorchCheckpointEngine``: how scripts of DeepSpeed's users write and read single files.

Checkpoints of the engine are written otherwise (``engine/checkpoint``) and ask none of these.
"""

from __future__ import annotations

import os
import pickle
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import torch

from ds_hf.checkpoint.files import check_loadable
from ds_hf.checkpoint.trust.archive import Refused
from ds_hf.checkpoint.trust.pickled import check_archive
from ds_hf.errors import CheckpointError
from ds_hf.log import logger
from ds_hf.regular_files import open_regular

__all__ = ["CheckpointCommitInfo", "CheckpointEngine", "TorchCheckpointEngine"]


@dataclass
class CheckpointCommitInfo:
    """Of one checkpoint: its tag, the folder that holds the tags, and whether ``latest`` will name it."""

    tag: str
    save_dir: str
    save_latest: bool


class CheckpointEngine(ABC):
    """What writes files of a checkpoint: ``create``, then any number of ``save``, then ``commit``."""

    def __init__(self, config_params: Any = None) -> None:
        self.name = type(self).__name__

    @abstractmethod
    def create(self, info: CheckpointCommitInfo) -> None:
        """A checkpoint begins."""

    @abstractmethod
    def save(self, state_dict: dict[str, Any], path: str) -> None:
        """Write a file."""

    @abstractmethod
    def load(self, path: str, map_location: Any = None) -> Any:
        """What a file holds."""

    @abstractmethod
    def commit(self, info: CheckpointCommitInfo) -> bool:
        """The checkpoint is complete; returns whether its files are readable now."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder and those above it."""
        os.makedirs(path, exist_ok=exist_ok)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Whether this data-parallel process writes what all of them hold alike: the first does."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """Whether ``save`` returns before the file is there."""
        return False

    def set_commit_info(self, info: CheckpointCommitInfo) -> None:
        """Kept by engines that are decoupled, and of no use to others."""
        return

    def get_commit_info(self) -> CheckpointCommitInfo | None:
        """What a decoupled engine has yet to commit."""
        return None

    def cleanup(self) -> None:
        """Training is over: let go of what is held, which here is nothing."""
        return

    def preserves_storage_sharing(self) -> bool:
        """Whether views of one storage are views of one storage when they are loaded."""
        return True


class TorchCheckpointEngine(CheckpointEngine):
    """Files of ``torch.save``, which are read without running code.

    Raises:
        CheckpointError: in ``save``, a value that such a file cannot hold, by its key; in ``load``, a file that would
            run code, or is damaged.
    """

    def create(self, info: CheckpointCommitInfo) -> None:
        """Tells the log which checkpoint begins."""
        logger.info("checkpoint %s is written to %s", info.tag, info.save_dir)

    def save(self, state_dict: dict[str, Any], path: str) -> None:
        """Write a file; one that is there is replaced when the new one is whole."""
        check_loadable(state_dict, "state_dict")
        staged = Path(path).with_name(f".{Path(path).name}.{os.getpid()}.new")
        try:
            torch.save(state_dict, staged)
            staged.replace(path)
        finally:
            staged.unlink(missing_ok=True)

    def load(self, path: str, map_location: Any = None) -> Any:
        """What a file holds, by ``torch.load(weights_only=True)``."""
        try:
            with open_regular(path) as file:
                if file.read(4) == b"PK\3\4":  # not the format that torch wrote before 1.6, which has no checksums
                    check_archive(file, os.fstat(file.fileno()).st_size, sums=True)
            return torch.load(path, map_location=map_location, weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{path}: cannot be read without running code of the file ({str(error).splitlines()[0]}). If you trust "
                "whoever wrote it, torch.load(path, weights_only=False) reads it"
            ) from error
        except (EOFError, RuntimeError, Refused, BadZipFile) as error:
            raise CheckpointError(f"{path}: damaged, or not a file of torch.save ({error})") from error

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """The files are readable: ``save`` has waited for each."""
        logger.info("checkpoint %s is complete", info.tag)
        return True
