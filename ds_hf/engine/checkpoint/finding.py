"""Which checkpoint to load when none was asked for by name: the one that ``latest`` names, if it is whole.

Otherwise it is named in a warning and the newest whole one is taken; when there is none the fault is raised.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from ds_hf.checkpoint.format import MANIFEST
from ds_hf.checkpoint.manifest import read_manifest
from ds_hf.checkpoint.places import recover
from ds_hf.checkpoint.verify import checksum_faults, quick_faults
from ds_hf.engine.checkpoint.agreement import collect, share, together
from ds_hf.engine.comm.mesh import Axis
from ds_hf.errors import CheckpointError
from ds_hf.log import logger

__all__ = ["undamaged", "whole_or_newest"]

_NONE: Mapping[Path, str] = MappingProxyType({})


def whole_or_newest(root: Path, named: Path, refused: Mapping[Path, str] = _NONE) -> Path:
    """``named``, or the newest whole checkpoint in ``root`` if it is damaged, incomplete or ``refused`` for a reason.

    Raises:
        CheckpointError: no checkpoint there is whole; it says what is wrong with ``named``.
    """
    if named in refused:
        faults = [refused[named]]
    elif named.is_dir():
        faults = quick_faults(named)
    else:
        faults = [f"{root / 'latest'} names {named}, which does not exist"]
    if not faults:
        return named
    for other in _newest_first(root):
        if other not in (named, *refused) and not quick_faults(other):
            logger.warning("%s is not loaded: %s. %s is the newest that is whole", named, faults[0], other)
            return other
    raise CheckpointError(faults[0])


def _newest_first(root: Path) -> list[Path]:
    """Checkpoints in ``root`` by the time at which they were written, those first that a killed save left aside."""
    found = [path.parent for path in (*root.glob(f"*/{MANIFEST}"), *root.glob(f"*/*/{MANIFEST}"))]
    places = {path for path in found if not any(part.startswith(".") for part in path.relative_to(root).parts)}
    for path in root.glob(f".*.old-*/{MANIFEST}"):
        home = path.parent.with_name(path.parent.name[1:].rpartition(".old-")[0])
        if not home.exists():
            places.add(recover(home))
    return sorted(places, key=_written_at, reverse=True)


def _written_at(folder: Path) -> float:
    """A copy of a folder has another time of its own: the manifest's counts."""
    try:
        written = read_manifest(folder).extra.get("written_at")
        return float(written) if isinstance(written, int | float) else (folder / MANIFEST).stat().st_mtime
    except (CheckpointError, OSError):
        return 0.0


def undamaged(axis: Axis, root: Path, folder: Path, *, named: bool) -> Path:
    """``folder`` if all its files have their checksums, else the newest checkpoint whose files do. Collective.

    Args:
        named: it was asked for by name: no other will do.

    Raises:
        CheckpointError: no other will do, or there is none.
    """
    asked, refused = folder, dict[Path, str]()
    while True:
        doing = f"checking the checksums of {folder}"
        with together(axis, doing):
            faults = checksum_faults(read_manifest(folder), axis.rank, axis.world_size)
        found = [fault for others in collect(axis, faults) for fault in others]
        if not found:
            return folder
        if named:
            raise CheckpointError(found[0])
        refused[folder] = found[0]
        with together(axis, doing):
            if axis.rank == 0:
                folder = whole_or_newest(root, asked, refused)
        folder = share(axis, folder)
