"""Folders of torch.distributed.checkpoint, both ways.

Layout, which ``get_state_dict`` and ``set_state_dict`` of torch know: ``model.<name>`` are the weights (masters where
there are some), ``optimizer.state.<name>.<moment>`` and ``optimizer.param_groups.<n>.<option>`` the optimizer, and
``ds_hf`` holds counters, scheduler, scaler and client state, pickled into bytes. Invariant: one tensor is in memory
at a time. torch unpickles these folders freely, we do it with an allow-list.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import warnings
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from ds_hf.checkpoint.commit import publish, stage
from ds_hf.checkpoint.convert import state_bytes
from ds_hf.checkpoint.deepspeed.layout import count_of
from ds_hf.checkpoint.format import SavedBuffer, SavedFragment, SavedParameter
from ds_hf.checkpoint.manifest import Manifest
from ds_hf.checkpoint.scalars import encode_scalar
from ds_hf.checkpoint.source import CheckpointKind, MappedFiles, Report, Source
from ds_hf.checkpoint.trust.archive import Window
from ds_hf.checkpoint.trust.pickle_walk import FrugalUnpickler, walk
from ds_hf.checkpoint.trust.pickled import check_archive, reading
from ds_hf.dtypes import name_of
from ds_hf.errors import CheckpointError
from ds_hf.printable import harmless
from ds_hf.regular_files import TEXT_NBYTES, open_regular, read_regular

__all__ = ["read_dcp", "write_dcp"]

_METADATA = ".metadata"
_OWN = "ds_hf.state"
_OPTIMIZERS = ("optimizer", "optim")  # names in use for the same thing


# -- writing --------------------------------------------------------------------------------------------------------


class _LazyPlanner(DefaultSavePlanner):
    """Plans with tensors that have no data, and makes each when it is written."""

    def __init__(self, make: dict[str, Callable[[], Tensor]], report: Report | None) -> None:
        super().__init__()
        self._make, self._report, self._done = make, report, 0

    def lookup_object(self, index: MetadataIndex) -> Any:
        make = self._make.get(index.fqn)
        if make is None:
            return super().lookup_object(index)
        self._done += 1
        if self._report is not None:
            self._report(self._done, len(self._make))
        return make()


def write_dcp(
    source: Source,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    report: Report | None = None,
    over: bool = False,
) -> None:
    """Write ``folder``; ``dtype`` is that of the floating-point weights, default as stored.

    Args:
        over: replace a checkpoint that is there.

    Raises:
        CheckpointError: the source is damaged, or the folder exists.
    """
    source.check()
    target = Path(folder)
    make: dict[str, Callable[[], Tensor]] = {}
    state = _state(source, dtype, make)
    with stage(target, state_bytes(source), over=over) as staged:
        writer = FileSystemWriter(staged, thread_count=1, sync_files=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no process group is there is intended
            save(state, storage_writer=writer, planner=_LazyPlanner(make, report), no_dist=True)
        publish(staged, target, over=over)


def _state(source: Source, dtype: torch.dtype | None, make: dict[str, Callable[[], Tensor]]) -> dict[str, Any]:
    """The nested state dict with empty tensors; ``make`` has for each path what gives the values."""
    manifest = source.manifest
    model: dict[str, Any] = {}

    def lazy(path: str, shape: tuple[int, ...], kind: torch.dtype, value: Callable[[], Tensor]) -> Tensor:
        make[path] = lambda: value().to(kind).reshape(shape)
        return torch.empty(shape, dtype=kind, device="meta")

    for weight in source.weights():
        saved = weight.saved
        own = source.stored_dtype(saved) if isinstance(saved, SavedParameter) else weight.dtype
        kind = dtype if dtype is not None and own.is_floating_point else own
        model[weight.name] = lazy(f"model.{weight.name}", weight.shape, kind, weight.read)
    for alias, name in manifest.tied.items():
        if name in model:
            model[alias] = lazy(f"model.{alias}", tuple(model[name].shape), model[name].dtype, make[f"model.{name}"])
    state: dict[str, Any] = {"model": model, "ds_hf": _rest(source)}
    if any(saved.moments or saved.scalars for saved in manifest.parameters.values()):
        state["optimizer"] = {"state": {}, "param_groups": _groups(source)}
        for name, saved in manifest.parameters.items():
            entry: dict[str, Any] = {}
            for key in saved.moments:
                kind = source.stored_dtype(saved, key)
                path = f"optimizer.state.{name}.{key}"
                entry[key] = lazy(path, saved.shape, kind, lambda saved=saved, key=key: source.state(saved, key))  # type: ignore[misc]
            for key, value in saved.scalars.items():
                entry[key] = _decode(value)
            if entry:
                state["optimizer"]["state"][name] = entry
    return state


def _decode(value: Any) -> Any:
    """A scalar of a manifest as the optimizer has it."""
    return torch.tensor(value[1], dtype=getattr(torch, value[0])) if isinstance(value, list) else value


def _groups(source: Source) -> list[dict[str, Any]]:
    names = source.manifest.extra.get("groups") or []
    options = source.common.get("param_groups") or []
    return [{**group, "params": list(known)} for group, known in zip(options, names, strict=False)]


def _rest(source: Source) -> dict[str, Any]:
    """What torch has no place for; pickled as one object."""
    manifest = source.manifest
    trainable = [name for name, saved in manifest.parameters.items() if saved.trainable]
    masters = [name for name, saved in manifest.parameters.items() if "master" in saved.states]
    dtypes = {weight.name: name_of(weight.dtype) for weight in source.weights()}
    kept = {
        "common": {key: value for key, value in source.common.items() if key != "param_groups"},
        "counters": dict(manifest.extra.get("counters") or {}),
        "optimizer": manifest.extra.get("optimizer"),
        "trainable": trainable,
        "masters": masters,
        "dtypes": dtypes,
        "tied": dict(manifest.tied),
        "buffers": list(manifest.buffers),
        "excluded": sorted(manifest.excluded),
        "of_weights": manifest.of_weights,
    }
    stream = io.BytesIO()
    torch.save(kept, stream)  # bytes: torch would take nested dictionaries apart and lose their types
    return {"state": torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)}


# -- reading --------------------------------------------------------------------------------------------------------

_ADMITTED = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.planner", "WriteItem"),
    ("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"), ("pathlib", "Path"), ("pathlib._local", "PosixPath"),
    ("builtins", "set"), ("builtins", "frozenset"),
}  # fmt: skip


class _Unpickler(FrugalUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        admitted = (module, name) in _ADMITTED or (
            module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)
        )
        if not admitted:
            raise pickle.UnpicklingError(f"it holds {module}.{name}, which is not allowed")
        return super().find_class(module, name)


def _member(kind: Any, name: Any) -> Enum:
    """What Python 3.11.0 to 3.11.3 pickle members of enums as: ``getattr(kind, name)``."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError("it holds builtins.getattr of something else than an enum, which is not allowed")
    return kind[name]


class _Reader(FileSystemReader):
    """Reads the metadata once and with the allow-list; files it names have to lie in the folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._known = _metadata(folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._known


def _metadata(folder: Path) -> Metadata:
    path = folder / _METADATA
    with reading(path):
        content = read_regular(path, TEXT_NBYTES + sum(_sizes(folder).values()))
        walk(content, "", {}, len(content))
        metadata = _Unpickler(io.BytesIO(content)).load()
    storage = getattr(metadata, "storage_data", None)
    if not isinstance(metadata, Metadata) or not isinstance(storage, dict):
        raise CheckpointError(f"{path} is not metadata of torch.distributed.checkpoint")
    for info in storage.values():
        name = getattr(info, "relative_path", None)
        if not isinstance(name, str) or os.path.isabs(name) or ".." in Path(name).parts or "\0" in name:
            raise CheckpointError(f"{path}: {name!r} is not a file inside the folder")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(f"{path}: its tensors were transformed (compressed) when written; save it without")
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    return metadata


class _SafePlanner(DefaultLoadPlanner):
    """What is pickled beside the tensors is loaded without running code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)


def _reason(error: BaseException) -> str:
    """One line of what torch wraps in much text, without its advice to switch the protection off."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    text = str(error).rpartition("WeightsUnpickler error:")[2].strip()
    return (text.splitlines() or [type(error).__name__])[0].partition(". Please use")[0]


class _Folder:
    """A folder, read item by item; each item is looked at before torch loads it.

    Args:
        sums: where it is noted which items, which are archives of ``torch.save``, had checksums to compare.
    """

    def __init__(self, folder: Path, *, sums: list[bool] | None) -> None:
        self.folder, self._sums = folder, sums
        self.reader = _Reader(folder)
        metadata = self.reader.read_metadata()
        self.items = metadata.state_dict_metadata
        self.tensors = {name: entry for name, entry in self.items.items() if isinstance(entry, TensorStorageMetadata)}
        self._parts: dict[str, list[Any]] = {}
        for index, info in metadata.storage_data.items():
            self._parts.setdefault(str(index.fqn), []).append(info)
        self._check_parts()

    def _check_parts(self) -> None:
        """No byte is read for two items, and the parts of a tensor are the whole of it."""
        wanted = sum(count_of(info.length) for parts in self._parts.values() for info in parts)
        if wanted > sum(_sizes(self.folder).values()):
            raise CheckpointError(
                f"{self.folder}: its items have {wanted} bytes, more than its files: it is incomplete"
            )
        for name, entry in self.tensors.items():
            places = {tuple(chunk.offsets) for chunk in entry.chunks}
            numel = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if len(places) != len(entry.chunks) or numel != math.prod(entry.size):
                raise CheckpointError(f"{self.folder}: the parts of {name} are not the whole of it: it is incomplete")

    def _check(self, name: str) -> None:
        """The item's archives, once."""
        for info in self._parts.pop(name, ()):
            path = self.folder / info.relative_path
            with reading(path, f": {name}"), open_regular(path) as file:
                window = Window(file, count_of(info.offset), info.length)
                archive = check_archive(io.BufferedReader(window), info.length, sums=True)
                if self._sums is not None:
                    self._sums.append(archive.summed)

    def load(self, name: str) -> Any:
        self._check(name)
        entry = self.items[name]
        state: dict[str, Any] = {name: None}
        if isinstance(entry, TensorStorageMetadata):
            state[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        try:
            planner = _SafePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            _load_state_dict(state, self.reader, planner=planner, no_dist=True)
        except (Exception, CheckpointException) as error:
            raise CheckpointError(f"{self.folder}: {name} cannot be read: {_reason(error)}") from harmless(error)
        return state[name]


class _Item:
    """One tensor of a folder, read whole when it is sliced."""

    def __init__(self, folder: _Folder, name: str) -> None:
        self._folder, self._name = folder, name
        self._shape = tuple(folder.tensors[name].size)

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def __getitem__(self, place: Any) -> Tensor:
        if isinstance(place, slice) and place.start == place.stop == 0:  # asked for its dtype
            return torch.empty(0, *self._shape[1:], dtype=self._folder.tensors[self._name].properties.dtype)
        whole: Tensor = self._folder.load(self._name)
        return whole[place]


def read_dcp(folder: Path, *, sums: list[bool] | None = None) -> Source:
    """Open a folder: one that ``write_dcp`` wrote, or any with the weights under ``model`` or at the top.

    Args:
        sums: the checksum of each item is compared when it is read first; here is noted whether it had one.

    Raises:
        CheckpointError: it is damaged, or holds what is not admitted.
    """
    try:
        return _read(_Folder(folder, sums=sums))
    except CheckpointError:
        raise
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{folder} is not as torch writes it: {type(error).__name__}: {error}") from harmless(
            error
        )


def _read(found: _Folder) -> Source:
    folder, tensors = found.folder, found.tensors
    _check_sizes(folder, tensors)
    rest = _own_part(found)
    prefix = "model." if any(name.startswith("model.") for name in tensors) else ""
    optimizer = next((f"{o}." for o in _OPTIMIZERS if any(name.startswith(f"{o}.") for name in found.items)), None)
    weights = {
        name.removeprefix(prefix): name
        for name in tensors
        if name.startswith(prefix) and name != _OWN and not (optimizer and name.startswith(optimizer))
    }
    tied = {str(alias): str(name) for alias, name in (rest.get("tied") or {}).items() if name in weights}
    manifest = _manifest(found, {n: p for n, p in weights.items() if n not in tied}, optimizer, rest, tied)
    mapped = {(_METADATA, name): _Item(found, name) for name in tensors}
    common = {"client_state": {}, "lr_scheduler": None, "extra_state": {}, **(rest.get("common") or {})}
    groups = _saved_groups(found, optimizer)
    if groups:
        common["param_groups"] = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        manifest.extra["groups"] = [[str(name) for name in group.get("params", ())] for group in groups]
    return Source(CheckpointKind.DCP, manifest, MappedFiles(folder, mapped), common)


def _own_part(found: _Folder) -> dict[str, Any]:
    """What ``_rest`` wrote; nothing in folders of others."""
    if _OWN not in found.items:
        return {}
    with reading(found.folder, f": {_OWN}"):
        content = found.load(_OWN).numpy().tobytes()
        check_archive(io.BytesIO(content), len(content), sums=True)
        rest = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return rest if isinstance(rest, dict) else {}


def _check_sizes(folder: Path, tensors: dict[str, TensorStorageMetadata]) -> None:
    wanted = sum(math.prod(entry.size) * entry.properties.dtype.itemsize for entry in tensors.values())
    present = sum(_sizes(folder).values())
    if wanted > present:
        raise CheckpointError(f"{folder}: its tensors have {wanted} bytes and its files {present}: it is incomplete")


def _manifest(
    found: _Folder, weights: dict[str, str], optimizer: str | None, rest: dict[str, Any], tied: dict[str, str]
) -> Manifest:
    named, masters = set(rest.get("buffers") or ()), set(rest.get("masters") or ())
    trainable = set(rest.get("trainable") or weights)
    parameters: dict[str, SavedParameter] = {}
    buffers: dict[str, SavedBuffer] = {}
    dtypes: dict[str, Any] = {}
    kept: dict[str, dict[str, str]] = {}  # places by what stands before the last dot
    for place in found.items:
        before, _, key = place.rpartition(".")
        kept.setdefault(before, {})[key] = place
    for name, place in weights.items():
        shape = tuple(found.tensors[place].size)
        if name in named:
            buffers[name] = SavedBuffer(name, shape, _METADATA, place)
            continue
        moments, scalars = _states(found, kept.get(f"{optimizer}state.{name}", {}), shape)
        value = "master" if name in masters or (moments and not rest) else "weight"
        numel = math.prod(shape)
        rows = (SavedFragment(_METADATA, 0, 0, numel),) if numel else ()
        parameters[name] = SavedParameter(name, shape, name in trainable, {value: place, **moments}, rows, scalars)
        dtype = (rest.get("dtypes") or {}).get(name) or name_of(found.tensors[place].properties.dtype)
        dtypes[name] = {"dtype": dtype}
    extra: dict[str, Any] = {
        **(rest.get("of_weights") or {}),
        "counters": rest.get("counters") or {},
        "optimizer": rest.get("optimizer"),
        "groups": None,
        "parameters": dtypes,
        "written_by": {"torch.distributed.checkpoint": ""},
    }
    excluded = frozenset(map(str, rest.get("excluded") or ()))
    return Manifest(found.folder, 1, parameters, buffers, tied, excluded, _sizes(found.folder), extra)


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of each regular file."""
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}


def _states(found: _Folder, places: dict[str, str], shape: tuple[int, ...]) -> tuple[dict[str, str], dict[str, Any]]:
    """Moments of a parameter by their place, and its scalars."""
    moments: dict[str, str] = {}
    scalars: dict[str, Any] = {}
    for key, place in places.items():
        entry = found.items[place]
        if isinstance(entry, TensorStorageMetadata) and tuple(entry.size) == shape and shape:
            moments[key] = place
        elif not isinstance(entry, TensorStorageMetadata) or math.prod(entry.size) == 1:
            value = found.load(place)
            scalars[key] = encode_scalar(value.reshape(()) if isinstance(value, Tensor) else value)
    return moments, scalars


def _saved_groups(found: _Folder, optimizer: str | None) -> list[dict[str, Any]]:
    """Parameter groups: one object, or flattened into ``param_groups.<n>.<option>``."""
    prefix = f"{optimizer}param_groups"
    if optimizer is None:
        return []
    if prefix in found.items:
        whole = found.load(prefix)
        return [dict(group) for group in whole] if isinstance(whole, list) else []
    groups: dict[int, dict[str, Any]] = {}
    for place in found.items:
        number, _, key = place.removeprefix(f"{prefix}.").partition(".")
        if place.startswith(f"{prefix}.") and number.isdecimal() and key:
            groups.setdefault(int(number), {})[key] = found.load(place)
    return [groups[number] for number in sorted(groups)]
