"""Finding out who wrote a checkpoint, and opening it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ds_hf.checkpoint.deepspeed.read import is_deepspeed, read_deepspeed
from ds_hf.checkpoint.deepspeed.read_universal import LATEST as LATEST_UNIVERSAL
from ds_hf.checkpoint.deepspeed.read_universal import is_universal, read_universal
from ds_hf.checkpoint.format import LATEST, MANIFEST
from ds_hf.checkpoint.manifest import Manifest, open_own, read_manifest
from ds_hf.checkpoint.places import find_folder, folder_of
from ds_hf.checkpoint.pretrained import is_pretrained, read_pretrained
from ds_hf.checkpoint.source import CheckpointKind, Source
from ds_hf.checkpoint.tensors import TensorFiles
from ds_hf.checkpoint.trust.pickled import read_pickled
from ds_hf.errors import CheckpointError

__all__ = [
    "kind_of",
    "lacks_metadata",
    "lies_at",
    "locate",
    "named_by_latest",
    "open_folder",
    "open_source",
    "open_whole",
]

DCP_METADATA = ".metadata"


def locate(path: str | Path, tag: str | None = None) -> tuple[CheckpointKind, Path]:
    """Kind and place of the checkpoint at ``path``: a tag's folder, one that holds ``latest``, or one file.

    Raises:
        CheckpointError: there is none.
    """
    root = folder_of(path, "the folder of the checkpoint")
    kind = kind_of(root) if tag is None else None
    if kind is not None:
        return kind, root
    named = named_by_latest(root)
    if tag is not None or (named is not None and not (root / named).is_dir()):
        folder = find_folder(root, tag, named or LATEST)
        kind = kind_of(folder)
        if kind is not None:
            return kind, folder
        if folder.is_dir():
            raise CheckpointError(f"{folder} is not a complete checkpoint of ds_hf, DeepSpeed or torch.distributed")
        raise CheckpointError(f"{folder} does not exist")
    if is_pretrained(root):  # after 'latest': the Trainer puts the weights beside the checkpoint
        return CheckpointKind.HF, root
    if not root.exists():
        raise CheckpointError(f"{root} does not exist")
    raise CheckpointError(
        f"{root} holds no checkpoint: neither {MANIFEST}, 'latest', *_model_states.pt, {DCP_METADATA} nor safetensors"
    )


def named_by_latest(root: Path, *, universal: bool = False) -> str | None:
    """The file in ``root`` that names a checkpoint: ``latest``, or else that of universal ones; ``None``: neither is
    there.

    Args:
        universal: the other way round.
    """
    names = (LATEST_UNIVERSAL, LATEST) if universal else (LATEST, LATEST_UNIVERSAL)
    return next((name for name in names if os.path.lexists(root / name)), None)


def kind_of(folder: Path) -> CheckpointKind | None:
    """Who wrote what lies in ``folder`` itself, ``None`` when there is no complete checkpoint."""
    if (folder / MANIFEST).is_file():
        return CheckpointKind.DS_HF
    if (folder / DCP_METADATA).is_file():
        return CheckpointKind.DCP
    if any(folder.glob("rank_*.safetensors")):  # of ds_hf, whose pickled files have DeepSpeed's names: incomplete
        return None
    if is_universal(folder):
        return CheckpointKind.UNIVERSAL
    return CheckpointKind.DEEPSPEED if is_deepspeed(folder) else None


def lies_at(target: Path, kind: str) -> bool:
    """Whether a checkpoint of ``kind`` is at the place where one is to be written.

    Raises:
        CheckpointError: something else is.
    """
    if not os.path.lexists(target) or (target.is_dir() and not any(target.iterdir())):
        return False
    if target.is_dir() and kind_of(target) == kind:
        return True
    raise CheckpointError(f"{target} exists and is not a checkpoint of format {kind}: give another place")


def lacks_metadata(folder: Path) -> bool:
    """Whether tensors of torch.distributed.checkpoint lie in ``folder`` without the file that says what they are."""
    return any(folder.glob("*.distcp")) and not (folder / DCP_METADATA).is_file()


def open_source(path: str | Path, tag: str | None = None, kind: CheckpointKind | None = None) -> Source:
    """Open a checkpoint for reading; ``kind`` is found out if not given.

    Raises:
        CheckpointError: there is none, it is of another kind, or it contradicts itself.
    """
    found, folder = locate(path, tag)
    if kind is CheckpointKind.HF and found is not CheckpointKind.HF and is_pretrained(Path(path)):
        found, folder = CheckpointKind.HF, Path(path)
    if kind is not None and kind is not found:
        raise CheckpointError(f"{folder} is a checkpoint of kind {found.value}, not {kind.value}")
    return read_pretrained(folder) if found is CheckpointKind.HF else open_folder(folder)


def open_folder(folder: Path) -> Source:
    """Open the checkpoint that lies in ``folder`` itself.

    Raises:
        CheckpointError: it is not complete, or contradicts itself.
    """
    kind = kind_of(folder)
    if kind is CheckpointKind.DEEPSPEED:
        return read_deepspeed(folder)
    if kind is CheckpointKind.UNIVERSAL:
        return read_universal(folder)
    if kind is CheckpointKind.DCP:
        from ds_hf.checkpoint.dcp import read_dcp  # torch.distributed.checkpoint takes half a second to import

        return read_dcp(folder)
    if lacks_metadata(folder):
        raise CheckpointError(
            f"{folder / DCP_METADATA} is missing: what torch.distributed.checkpoint saved here is not complete. Copy "
            "that file too if the folder was copied, or load another checkpoint"
        )
    manifest = read_manifest(folder)
    return Source(CheckpointKind.DS_HF, manifest, TensorFiles(folder), _read_common(folder, manifest))


def open_whole(path: str | Path, tag: str | None = None) -> tuple[Manifest, TensorFiles]:
    """Manifest and tensors of a checkpoint that was read as far as it has to be to know that it is whole.

    Raises:
        CheckpointError: it is missing, incomplete or damaged.
    """
    try:
        kind, folder = locate(path, tag)
    except (CheckpointError, OSError):  # the search for ours says what is wrong
        return open_own(path, tag)
    if kind in (CheckpointKind.DS_HF, CheckpointKind.HF):
        return open_own(path, tag)
    source = open_folder(folder)
    source.check()
    return source.manifest, source.files


def _read_common(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """What is one for all ranks: client state, scheduler, loss scaler, options of the groups."""
    name = manifest.extra.get("common_file")
    if name not in manifest.files:
        raise CheckpointError(f"{folder}: the manifest names no common file")
    return {"client_state": {}, "lr_scheduler": None, "extra_state": {}, **read_pickled(folder / name)}
