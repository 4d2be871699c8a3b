"""Reading the pickled files of a checkpoint that may come from a stranger.

``torch.load(weights_only=True)`` runs no foreign code, but it believes figures: a storage may claim more elements than
the file has bytes, a record may be compressed a thousandfold, ``bytearray(10**12)`` is an allowed call. So a file is
first looked at: the archive by ``archive``, the pickle in it by ``pickle_walk``.

Invariant: after ``check_pickled`` the memory and the time that loading and going through the content take are in
proportion to the size of the file.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ds_hf.checkpoint.trust.archive import Archive, Refused
from ds_hf.checkpoint.trust.pickle_walk import FrugalUnpickler, walk
from ds_hf.errors import CheckpointError
from ds_hf.printable import harmless
from ds_hf.regular_files import open_regular

__all__ = ["FrugalUnpickler", "check_archive", "check_pickled", "read_pickled", "reading", "reason_of"]


def read_pickled(path: Path) -> dict[str, Any]:
    """The content of a file that ``torch.save`` wrote.

    Raises:
        CheckpointError: it is damaged, would run code, or claims more than it has.
    """
    check_pickled(path)
    with reading(path):
        content = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__} instead of a dict")
    return content


def check_pickled(path: Path, *, sums: bool = True) -> Archive:
    """Raise ``CheckpointError`` unless ``path`` is an archive of ``torch.save`` whose figures are true.

    Args:
        sums: compare the archive's own checksums too, which reads all of it.
    """
    with reading(path), open_regular(path) as file:
        return check_archive(file, os.fstat(file.fileno()).st_size, sums=sums)


@contextmanager
def reading(path: Path, what: str = "") -> Iterator[None]:
    """Whatever goes wrong in the block is a ``CheckpointError`` that names the file and ``what`` was read of it.

    Damaged pickles and archives make Python and torch raise anything.
    """
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the checkpoint is incomplete") from None
    except Exception as error:
        raise CheckpointError(f"{path}{what} cannot be read: {reason_of(error)}") from harmless(error)


def check_archive(file: BinaryIO, nbytes: int, *, sums: bool) -> Archive:
    """Raise almost anything unless ``file``, of ``nbytes`` bytes, may be given to ``torch.load``."""
    archive = Archive(file, nbytes)
    if sums:
        archive.check_sums()
    walk(archive.pickle(), f"{archive.folder}/data/", archive.sizes, nbytes)
    return archive


def reason_of(error: BaseException) -> str:
    """One line of what Python or torch has to say about a file."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, pickle.UnpicklingError) and "WeightsUnpickler error:" in text:
        # The rest of torch's message advises to switch the protection off.
        text = "it holds what is not loaded from a checkpoint: " + text.rpartition("WeightsUnpickler error:")[2].strip()
    text = text.splitlines()[0] if text else type(error).__name__
    return text if isinstance(error, Refused | pickle.UnpicklingError) else f"{type(error).__name__}: {text}"[:500]
