"""Whether a checkpoint is whole: sizes, headers and cover at once, checksums and digests by reading all of it.

``verify`` tells all faults that it finds, and changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ds_hf.checkpoint.checksum import add, hexadecimal, sum_of_slice, sum_of_tensor
from ds_hf.checkpoint.format import SavedBuffer, SavedParameter
from ds_hf.checkpoint.manifest import Manifest
from ds_hf.checkpoint.manifest import read_manifest as read
from ds_hf.checkpoint.places import find_folder
from ds_hf.checkpoint.tensors import TensorFiles
from ds_hf.dtypes import name_of
from ds_hf.errors import CheckpointError

__all__ = ["checksum_faults", "quick_faults", "verify"]

Progress = Callable[[int, int], None]  # bytes read, bytes in all


def verify(folder: str | Path, tag: str | None = None, progress: Progress | None = None) -> list[str]:
    """Everything that is wrong with a checkpoint, as sentences that name the file; empty when it is whole.

    Args:
        folder: folder given to ``save_checkpoint``, or the checkpoint's own.
        tag: default what ``latest`` names.
        progress: called now and then.
    """
    try:
        place = find_folder(folder, tag)
        faults = quick_faults(place)
        if faults:
            return faults
        manifest = read(place)
        total = 2 * sum(manifest.files.values())
        faults = checksum_faults(manifest, progress=None if progress is None else lambda n, _: progress(n, total))
        return faults + _digest_faults(manifest)
    except CheckpointError as error:
        return [str(error)]
    finally:
        if progress is not None:
            progress(1, 1)


def quick_faults(folder: Path) -> list[str]:
    """What sizes, headers and the manifest itself show; reads no tensor."""
    if not folder.is_dir():
        return [f"{folder} does not exist"]
    try:
        manifest = read(folder)
    except CheckpointError as error:
        return [str(error)]
    faults = list(manifest.size_faults())
    if manifest.extra.get("common_file") not in manifest.files:
        faults.append(f"{folder}: the manifest names no common file")
    if not faults:
        try:
            manifest.check_tensors(TensorFiles(folder))
        except CheckpointError as error:
            faults.append(str(error))
    return faults


def checksum_faults(
    manifest: Manifest, rank: int = 0, world_size: int = 1, progress: Progress | None = None
) -> list[str]:
    """Files whose content is not what was written; of several ranks each reads its share of the files.

    At the world size that saved it that is the rank's own file, so that its host then has it in memory.
    """
    known = manifest.extra.get("checksums") or {}
    if not isinstance(known, dict):
        return [f"{manifest.folder}: the checksums in the manifest cannot be read"]
    faults, done = [], 0
    for name in sorted(manifest.files):
        if _rank_of(name) % world_size != rank:
            continue
        faults.append(manifest.sum_fault(name))
        done += manifest.files[name]
        if progress is not None:
            progress(done, sum(manifest.files.values()))
    return [fault for fault in faults if fault]


def _rank_of(file: str) -> int:
    """Which rank wrote a file."""
    found = re.match(r"(?:rank_|(?:bf16_)?zero_pp_rank_)(\d{1,9})[._]", file)
    return 0 if found is None else int(found[1])


def _digest_faults(manifest: Manifest) -> list[str]:
    """States whose elements, put together from the fragments, are not those that were saved."""
    digest: Any = manifest.extra.get("digest")
    tensors = digest.get("tensors") if isinstance(digest, dict) else None
    if not isinstance(tensors, dict):
        return []
    files = TensorFiles(manifest.folder)
    faults = []
    everything: list[SavedParameter | SavedBuffer] = [*manifest.parameters.values(), *manifest.buffers.values()]
    for saved in everything:
        expected = tensors.get(saved.name)
        if not isinstance(expected, dict):
            continue
        for state, text in _sums(files, saved):
            if expected.get(state, text) != text:
                kind = state.partition(":")[0]
                faults.append(f"{manifest.folder}: {saved.name} ({kind}) does not have the digest that was saved")
    return faults


def _sums(files: TensorFiles, saved: SavedParameter | SavedBuffer) -> Iterator[tuple[str, str]]:
    if isinstance(saved, SavedBuffer):
        value = files.buffer(saved)
        yield f"buffer:{name_of(value.dtype)}", hexadecimal(sum_of_tensor(value))
        return
    for state, key in saved.states.items():
        total, dtype = (0, 0), ""
        for fragment in saved.fragments:
            part = files.piece(fragment.file, key).read(fragment.offset, fragment.offset + fragment.numel)
            found = sum_of_slice(part, saved.shape, fragment.cut, fragment.start)
            if found is None:
                break
            total = add(total, found)
            dtype = name_of(part.dtype)
        else:
            if saved.fragments:
                yield f"{state}:{dtype}", hexadecimal(total)
