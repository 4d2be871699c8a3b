"""Reading and writing the pickled files of DeepSpeed without DeepSpeed, and without running what they say.

A file is loaded with ``weights_only=True``; besides tensors and plain containers only the classes named here are
admitted, and each is replaced by a stand-in that holds attributes and does nothing. Writing does the reverse: a
stand-in is pickled under the name of the class that DeepSpeed knows.
"""

from __future__ import annotations

import copyreg
import os
import pickle
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ds_hf.checkpoint.trust.pickled import check_pickled, reading, reason_of
from ds_hf.errors import CheckpointError
from ds_hf.log import warn_once
from ds_hf.printable import harmless

__all__ = [
    "SAVE",
    "DynamicScaler",
    "FragmentAddress",
    "StaticScaler",
    "SubparamShape",
    "ZeroStage",
    "as_step",
    "base_groups",
    "is_summed",
    "load_any",
    "load_pickled",
    "names_of_groups",
    "of",
    "options_of",
    "save_pickled",
    "scaler_of",
]

_RANKED = re.compile(r"(?:bf16_|fp16_)?(?:zero_pp_rank_\d+_)?mp_rank_\d+_(?:model|optim)_states")
_ADMITTING = threading.Lock()  # torch's list of admitted classes is the process's; leaving restores what entering saw
SAVE = "ds_hf_save"  # in each file of a folder that ds_hf writes: of which save it is. DeepSpeed passes over it
READ_WHOLE = 2**30  # bytes of a file up to which its own checksums are compared, which reads it


class _Record:
    """Attributes and nothing else."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copyreg.__newobj__, (type(self),), self.__dict__  # type: ignore[attr-defined]

    def get(self, name: str, default: Any = None) -> Any:
        return self.__dict__.get(name, default)


class FragmentAddress(_Record):
    """``numel`` elements of a parameter at ``start`` in a rank's partition."""


class StaticScaler(_Record):
    """A loss scale that stays."""


class DynamicScaler(_Record):
    """A loss scale that follows overflows."""


class ZeroStage(int):
    """The stage, an enum there."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self), (int(self),)


@dataclass
class SubparamShape:
    """Matrices that are packed along one dimension of a parameter, each of which is cut by itself.

    Attributes:
        patterns: regular expressions for names of parameters.
        shape: of the whole, as a view; at ``partition_dim`` the sizes of the matrices, or their number. -1 is the rest.
        partition_dim: along which they are packed and cut.
    """

    patterns: list[str]
    shape: tuple[tuple[int, ...] | int, ...]
    partition_dim: int


_NAMES: dict[Any, str] = {
    FragmentAddress: "deepspeed.utils.tensor_fragment.fragment_address",
    StaticScaler: "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    DynamicScaler: "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    SubparamShape: "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
    ZeroStage: "deepspeed.runtime.zero.config.ZeroStageEnum",
}


_GETATTR = ("builtins.getattr", "__builtin__.getattr")
_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3}


def _member(kind: Any, name: Any) -> ZeroStage:
    """What Python 3.11.0 to 3.11.3 pickle a stage as: ``getattr(ZeroStageEnum, "weights")``."""
    if kind is not ZeroStage or name not in _STAGES:
        raise pickle.UnpicklingError("it takes an attribute of something, which is not admitted")
    return ZeroStage(_STAGES[name])


def load_pickled(path: Path) -> dict[str, Any]:
    """The dict in one file, its tensors mapped and not read.

    Raises:
        CheckpointError: it is missing or damaged, holds an object that is not admitted, or is another rank's.
    """
    content = load_any(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__} instead of a dict")
    return content


def is_summed(path: Path) -> bool:
    """Whether the checksums in a file are compared when it is loaded; told once where it is too large for that."""
    if path.stat().st_size < READ_WHOLE:
        return True
    warn_once(
        f"{path} and other files above 1 GiB are loaded without comparing the checksums in them, which would read them "
        "twice: `ds-hf checkpoint verify` does",
        "pickled files that are large",
    )
    return False


def load_any(path: Path, *, sums: bool = True) -> Any:
    """As ``load_pickled``, whatever it holds.

    Args:
        sums: compare the archive's own checksums, which reads all of a file that is not too large for that.
    """
    admitted: list[Any] = [*_NAMES.items(), *((_member, name) for name in _GETATTR)]
    with reading(path):
        archive = check_pickled(path, sums=sums and is_summed(path))
        if archive.folder != path.stem and _RANKED.fullmatch(archive.folder):
            raise CheckpointError(f"{path} was written as {archive.folder}.pt: give the ranks' files their names back")
        foreign = set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) - {*_NAMES.values(), *_GETATTR}
        if foreign:
            raise CheckpointError(
                f"{path} holds objects of {', '.join(sorted(foreign))}, which are not admitted: nothing in a "
                "checkpoint may run code. Save it again with client_state of numbers, text, tensors, lists and dicts"
            )
        with _ADMITTING, torch.serialization.safe_globals(admitted):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


class _Pickler(pickle._Pickler):
    """Writes stand-ins under DeepSpeed's names; in Python, as the C pickler would import the class."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        known = _NAMES.get(obj) if isinstance(obj, type) else None
        if known is None:
            super().save_global(obj, name)  # type: ignore[misc]
            return
        module, _, attribute = known.rpartition(".")
        self.write(pickle.GLOBAL + f"{module}\n{attribute}\n".encode())  # type: ignore[attr-defined]
        self.memoize(obj)  # type: ignore[attr-defined]


def save_pickled(path: Path, content: Any) -> int:
    """Write a file that ``torch.load`` of DeepSpeed reads; returns its size in bytes."""
    module = SimpleNamespace(
        **{name: getattr(pickle, name) for name in ("dump", "dumps", "load", "loads", "Unpickler")}
    )
    module.Pickler = _Pickler
    module.__name__ = "pickle"
    try:
        torch.save(content, path, pickle_module=module)  # by its path: the archive then says which rank's it is
    except RuntimeError as error:  # torch's writer: no space, for example
        raise CheckpointError(f"{path} cannot be written: {reason_of(error)}") from harmless(error)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path.stat().st_size


# -- options of parameter groups and the loss scaler, as they stand beside flat tensors --------------------------------


def of(kind: type[Any], value: Any, path: Path, what: str) -> Any:
    """``value`` if it is of the type ``kind``, else a ``CheckpointError`` that names it."""
    if not isinstance(value, kind):
        raise CheckpointError(f"{path}: {what} should be a {kind.__name__}, not a {type(value).__name__}")
    return value


def base_groups(base: Any) -> list[dict[str, Any]] | None:
    """The list ``param_groups`` of a torch optimizer's state, ``None`` where there is none."""
    groups = base.get("param_groups") if isinstance(base, dict) else None
    return groups if isinstance(groups, list) and all(isinstance(group, dict) for group in groups) else None


def options_of(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each group all but its parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def names_of_groups(groups: Sequence[dict[str, Any]], shapes: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Names of the parameters of each group: at stage 3 it may lie in several flat tensors."""
    found = []
    for group in groups:
        params = group.get("params", ())
        indices = [i for i in params if isinstance(i, int) and 0 <= i < len(shapes)] if isinstance(params, list) else []
        found.append([str(name) for index in indices for name in shapes[index]])
    return found


def scaler_of(scaler: Any) -> dict[str, Any] | None:
    """The loss scaler as our checkpoints have it."""
    if isinstance(scaler, DynamicScaler):
        return {"kind": "DynamicLossScaler", "state": _scaler_state(scaler)}
    if isinstance(scaler, StaticScaler):
        return {"kind": "StaticLossScaler", "state": {"scale": float(scaler.get("cur_scale", 1))}}
    return None


def as_step(key: str, value: Any) -> Any:
    """torch keeps the step as an fp32 tensor, DeepSpeed's own optimizers as a number."""
    return torch.tensor(float(value)) if key == "step" and not isinstance(value, Tensor) else value


def _scaler_state(scaler: DynamicScaler) -> dict[str, Any]:
    return {
        "scale": float(scaler.get("cur_scale", 1.0)),
        "boundary": int(scaler.get("cur_iter", 0)),
        "last_overflow": int(scaler.get("last_overflow_iter", -1)),
        "hysteresis_left": int(scaler.get("cur_hysteresis", 1)),
        "consecutive_overflows": 0,
        "settings": {
            "loss_scale_window": int(scaler.get("scale_window", 1000)),
            "hysteresis": int(scaler.get("delayed_shift", 2)),
            "consecutive_hysteresis": bool(scaler.get("consecutive_hysteresis", False)),
            "min_loss_scale": float(scaler.get("min_scale", 1.0)),
        },
    }
