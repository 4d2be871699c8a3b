"""Sharded safetensors as transformers writes and reads them: cutting into shards, writing tensor by tensor, reading.

Invariant: what was in the folder is read until the new files are whole and synced, then these and nothing else, see
``publish_weights``. Only the tensor given to ``put`` is in memory.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from ds_hf.checkpoint.aside import CONFIG, in_shards, pointed_at, publish_weights, weights_aside
from ds_hf.checkpoint.files import naming_the_file, safetensors_header
from ds_hf.checkpoint.format import SavedFragment, SavedParameter
from ds_hf.checkpoint.manifest import Manifest
from ds_hf.checkpoint.model_files import Switched, copy_model_files, edit_config, find_model_folder, require_config
from ds_hf.checkpoint.source import CheckpointKind, MappedFiles, Report, Source, TensorPiece, Weight
from ds_hf.checkpoint.trust.pickled import reading
from ds_hf.dtypes import name_of
from ds_hf.errors import CheckpointError
from ds_hf.log import logger
from ds_hf.regular_files import check_regular, read_regular

__all__ = [
    "AsTheyAre",
    "Form",
    "ShardedWriter",
    "Spec",
    "export_source",
    "floating",
    "is_pretrained",
    "main_dtype",
    "no_model",
    "open_weights",
    "read_pretrained",
    "weight_files",
    "weights_in",
    "write_single",
]

SINGLE = "model.safetensors"
_SAVE = "ds_hf_save"  # in the header of each of several files: a mark of what wrote them together
INDEX = f"{SINGLE}.index.json"
_ADAPTED = re.compile(r"^base_model\.|\.base_layer\.|\.lora_[AB]\.")  # what PEFT calls parameters
_INDEX_NBYTES = 2**28  # that an index may have
_ASIDE = re.compile(r"\.weights\.saving-[\w-]+/(?P<name>[^/]+)")  # of a writer that was killed between two names


@dataclass(frozen=True)
class Spec:
    """A tensor that is going to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _Shard:
    """One safetensors file that is filled in any order."""

    def __init__(self, folder: Path, name: str, specs: Sequence[Spec], metadata: dict[str, str]) -> None:
        self.name, self.path = name, folder / name
        self.missing = len(specs)
        self._file: BinaryIO | None = None
        ordered = sorted(specs, key=lambda spec: -spec.dtype.itemsize)  # so that each starts aligned
        tensors = ((spec.name, spec.shape, spec.dtype) for spec in ordered)
        self._head, self._offsets = safetensors_header(tensors, metadata)

    def write(self, name: str, value: Tensor) -> None:
        with naming_the_file(self.path):
            if self._file is None:
                self._file = self.path.open("xb")
                self._file.write(self._head)
            self._file.seek(len(self._head) + self._offsets[name])
            self._file.write(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self.missing -= 1
        if not self.missing:
            self.sync()

    def sync(self) -> None:
        """Make the file durable and close it; also one that has no tensors."""
        if self._file is None and not self.path.exists():
            self.path.write_bytes(self._head)
        if self._file is not None:
            with naming_the_file(self.path):
                self._file.flush()
                os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def close(self) -> None:
        """Of a file that is not whole, and goes: what it could not take it cannot take now."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()


class ShardedWriter:
    """Writes ``specs`` into ``folder``, in any order; use it as a context manager.

    Args:
        max_shard_size: bytes, text such as ``"5GB"``, or None for one file.
        single: name of the one file to write instead of ``model*.safetensors``.
        metadata: text kept in each file's header.
        report: told how many bytes of how many are written.
        fill: puts the files into a folder that belong to the weights and come with them, see ``Switched``.
    """

    def __init__(
        self,
        folder: Path,
        specs: Sequence[Spec],
        max_shard_size: str | int | None = "5GB",
        *,
        single: str | None = None,
        metadata: dict[str, str] | None = None,
        report: Report | None = None,
        fill: Callable[[Path], object] | None = None,
    ) -> None:
        self.folder, self._report, self._single, self._fill = folder, report, single, fill
        self._specs = {spec.name: spec for spec in specs}
        self._total, self._done = sum(spec.nbytes for spec in specs), 0
        parts = in_shards(((spec, spec.nbytes) for spec in specs), None if single else max_shard_size)
        own = {"format": "pt", **({_SAVE: secrets.token_hex(8)} if len(parts) > 1 else {}), **(metadata or {})}
        self._home: dict[str, _Shard] = {}
        self._shards: list[_Shard] = []
        with ExitStack() as stack:  # what is wrong with a spec leaves nothing there
            aside = stack.enter_context(weights_aside(folder))
            for number, part in enumerate(parts, 1):
                name = single or (f"model-{number:05d}-of-{len(parts):05d}.safetensors" if len(parts) > 1 else SINGLE)
                shard = _Shard(aside, name, part, own)
                self._shards.append(shard)
                self._home.update({spec.name: shard for spec in part})
            self._aside = stack.pop_all()

    def __enter__(self) -> ShardedWriter:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            for shard in self._shards:
                shard.close()
            self._aside.close()

    def put(self, name: str, value: Tensor) -> None:
        """Write one tensor; its values take the dtype that was announced."""
        spec = self._specs[name]
        assert tuple(value.shape) == spec.shape, name
        self._home[name].write(name, value.detach().to("cpu", spec.dtype))
        self._done += spec.nbytes
        if self._report is not None:
            self._report(self._done, self._total)

    def _finish(self) -> None:
        missing = [shard.name for shard in self._shards if shard.missing]
        assert not missing, f"tensors of {missing} were never written"
        for shard in self._shards:
            shard.sync()
        names = [shard.name for shard in self._shards]
        index = self._index() if len(names) > 1 else None
        aside = self._shards[0].path.parent
        beside = None if self._fill is None else Switched(aside, self.folder, self._fill)
        publish_weights(aside, self.folder, names, index, sole=self._single is None, beside=beside)

    def _index(self) -> dict[str, Any]:
        parameters = sum(math.prod(spec.shape) for spec in self._specs.values())
        return {
            "metadata": {"total_parameters": parameters, "total_size": self._total},
            "weight_map": {name: self._home[name].name for name in sorted(self._home)},
        }


# -- a whole checkpoint --------------------------------------------------------------------------------------------


def floating(dtype: torch.dtype | None, own: torch.dtype) -> torch.dtype:
    """``dtype`` for a tensor of floating-point ``own``."""
    return dtype if dtype is not None and own.is_floating_point else own


class Form(Protocol):
    """How weights are written; ``section`` is what ``config.json`` says of it."""

    def specs(self, weight: Weight, dtype: torch.dtype | None) -> list[Spec]: ...

    def tensors(self, weight: Weight, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]: ...

    @property
    def section(self) -> dict[str, Any]: ...


class AsTheyAre:
    """Each weight under its name; ``dtype`` for those of floating-point dtypes."""

    section: dict[str, Any] = {}  # noqa: RUF012  # which nothing writes to

    def specs(self, weight: Weight, dtype: torch.dtype | None) -> list[Spec]:
        return [Spec(weight.name, weight.shape, floating(dtype, weight.dtype))]

    def tensors(self, weight: Weight, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        yield weight.name, weight.read()


def export_source(
    source: Source,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: str | int | None = "5GB",
    model_folder: str | Path | None = None,
    report: Report | None = None,
    form: Form | None = None,
) -> list[str]:
    """Write the weights of a checkpoint as ``model*.safetensors``; one tensor is in memory at a time.

    Args:
        dtype: of floating-point weights; default what each had in the model.
        model_folder: where ``config.json``, the generation configuration, the tokenizer and a model's own code are
            copied from; default a folder beside the checkpoint that has them, see ``find_model_folder``, else the
            configuration that the checkpoint has itself.
        form: of the weights, by default as they are.

    Returns:
        what was copied.

    Raises:
        CheckpointError: the checkpoint is damaged, or no model with its ``model_folder``; what was in ``folder`` is as
            it was.
    """
    if model_folder is not None:
        require_config(Path(model_folder))
    why = no_model(source)
    if why and model_folder is not None:
        raise CheckpointError(f"no config.json goes with these weights: {why}")
    if why:
        logger.warning("no config.json is written: %s", why)
    source.check()
    source.manifest.refuse_blocks(source.manifest.parameters)
    features = source.common.get("features")
    if isinstance(features, dict) and "compression" in features:
        logger.warning(
            "%s was trained with compression_training, and its weights are those of the optimizer: what is written is "
            "neither quantized nor pruned, and another model than was trained. To write that, load the checkpoint into "
            "an engine, and save what redundancy_clean(engine) gives", source.folder,
        )  # fmt: skip
    form = form or AsTheyAre()
    weights = list(source.weights())
    plain = [Spec(w.name, w.shape, floating(dtype, w.dtype)) for w in weights]
    specs = [spec for weight in weights for spec in form.specs(weight, dtype)]
    found = find_model_folder(source.folder) if model_folder is None else Path(model_folder)
    copied: list[str] = []
    config = source.manifest.extra.get("model_config")
    if why:
        found = config = None

    def fill(place: Path) -> None:
        if found is not None:
            copied.extend(copy_model_files(found, place, main_dtype(plain), links=model_folder is not None))
            if form.section:
                edit_config(place / CONFIG, form.section)
        elif isinstance(config, dict) and config.get("model_type") and not config.get("auto_map"):
            (place / CONFIG).write_text(json.dumps(config), "utf-8")
            edit_config(place / CONFIG, {"dtype": main_dtype(plain), **form.section})
            copied.append(CONFIG)

    with ShardedWriter(Path(folder), specs, max_shard_size, report=report, fill=fill) as writer:
        for weight in weights:
            for name, value in form.tensors(weight, dtype):
                writer.put(name, value)
    return copied


def no_model(source: Source) -> str:
    """Why ``from_pretrained`` would make another model of these weights, silently but for a table; empty if it would
    not."""
    names = [*source.manifest.parameters, *source.manifest.excluded]
    adapted = next((name for name in names if _ADAPTED.search(name)), None)
    if adapted is not None:
        return (
            f"{source.folder} is of a model with PEFT's adapters ({adapted}), whose names from_pretrained does not "
            "know. Load it into an engine and call export_pretrained(folder, merged=True), or load what PEFT has saved"
        )
    if source.manifest.excluded:
        count, first = len(source.manifest.excluded), min(source.manifest.excluded)
        return f"{source.folder} was saved without {count} frozen parameters ({first}), so it is not the whole model"
    return ""


def write_single(
    source: Source, path: str | Path, *, dtype: torch.dtype | None = torch.float32, report: Report | None = None
) -> None:
    """Write all weights into one file: streamed if it is ``.safetensors``, otherwise pickled by torch.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    source.check()
    source.manifest.refuse_blocks(source.manifest.parameters)
    path = Path(path)
    weights = list(source.weights())
    if path.suffix == ".safetensors":
        specs = [Spec(w.name, w.shape, floating(dtype, w.dtype)) for w in weights]
        further = dict(source.manifest.tied)  # as safetensors.torch.load_model wants it
        with ShardedWriter(path.parent, specs, single=path.name, metadata=further, report=report) as writer:
            for weight in weights:
                writer.put(weight.name, weight.read())
        return
    state: dict[str, Tensor] = {}
    total = sum(torch.Size(w.shape).numel() for w in weights)
    for weight in weights:
        value = weight.read()
        state[weight.name] = value.to(floating(dtype, value.dtype))
        if report is not None:
            report(sum(tensor.numel() for tensor in state.values()), total)
    state.update({alias: state[name] for alias, name in source.manifest.tied.items() if name in state})
    with weights_aside(path.parent) as aside:
        torch.save(state, aside / path.name)
        publish_weights(aside, path.parent, [path.name], sole=False)


def main_dtype(specs: Sequence[Spec]) -> str:
    """The floating-point dtype that most elements have."""
    sizes: dict[torch.dtype, int] = {}
    for spec in specs:
        if spec.dtype.is_floating_point:
            sizes[spec.dtype] = sizes.get(spec.dtype, 0) + torch.Size(spec.shape).numel()
    return name_of(max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32))


# -- reading --------------------------------------------------------------------------------------------------------


def is_pretrained(path: Path) -> bool:
    """Whether ``path`` is a safetensors file or a folder that holds a model's."""
    if not path.is_dir():
        return path.exists() and path.suffix == ".safetensors"
    entries = [SINGLE, INDEX, *([pointed] if isinstance(pointed := pointed_at(path), str) else [])]
    return any(place.exists() and not place.is_dir() for place in (path / entry for entry in entries))


def read_pretrained(path: Path) -> Source:
    """Open weights in safetensors; there are neither moments nor counters.

    Raises:
        CheckpointError: the index or a file is damaged, or they are not of one model.
    """
    folder = path if path.is_dir() else path.parent
    tensors: dict[tuple[str, str], Any] = {}
    parameters: dict[str, SavedParameter] = {}
    dtypes: dict[str, Any] = {}
    files, listed = weight_files(folder) if path.is_dir() else ([path.name], {})
    handles = {file: open_weights(folder / file) for file in files}
    _require_one_save(folder, handles)
    for name, file in _homes(folder, {file: list(handle.keys()) for file, handle in handles.items()}, listed).items():
        view = handles[file].get_slice(name)
        tensors[file, name] = view
        shape = tuple(view.get_shape())
        rows = (SavedFragment(file, 0, 0, math.prod(shape)),) if math.prod(shape) else ()
        parameters[name] = SavedParameter(name, shape, True, {"weight": name}, rows, {})
        dtypes[name] = {"dtype": name_of(TensorPiece(folder / file, name, view).dtype)}
    sizes = {file: (folder / file).stat().st_size for file in files}
    extra: dict[str, Any] = {"parameters": dtypes, "counters": {}, "groups": None}
    manifest = Manifest(folder, 1, parameters, {}, {}, frozenset(), sizes, extra)
    return Source(CheckpointKind.HF, manifest, MappedFiles(folder, tensors), {"client_state": {}, "extra_state": {}})


def weights_in(folder: Path) -> Iterator[tuple[str, Path]]:
    """Names of the tensors in a folder of weights, each with its file.

    Raises:
        CheckpointError: as ``read_pretrained``.
    """
    files, listed = weight_files(folder)
    handles = {file: open_weights(folder / file) for file in files}
    _require_one_save(folder, handles)
    held = {file: list(handle.keys()) for file, handle in handles.items()}
    yield from ((name, folder / file) for name, file in _homes(folder, held, listed).items())


def open_weights(path: Path) -> Any:
    """A file in safetensors, open.

    Raises:
        CheckpointError: it is missing, damaged, or no file.
    """
    with reading(path):
        check_regular(path)
        return safe_open(path, framework="pt")


def _require_one_save(folder: Path, handles: Mapping[str, Any]) -> None:
    """Of files that one save wrote each has its mark, so that one of another save, of the same shapes, is noticed."""
    marks = {file: (handle.metadata() or {}).get(_SAVE) for file, handle in handles.items()}
    first = next(((file, mark) for file, mark in marks.items() if mark), None)
    for file, mark in marks.items():
        if first is not None and mark != first[1]:
            if mark:
                raise CheckpointError(
                    f"{folder}: {first[0]} and {file} were written by different saves: copy all of one"
                )
            logger.warning(
                "%s: %s has no mark of the save that wrote %s: of another one, or edited", folder, file, first[0]
            )


def _homes(folder: Path, held: Mapping[str, Sequence[str]], listed: Mapping[str, str]) -> dict[str, str]:
    """The file of each tensor: where it lies in one, that one; in several, the one that the index names."""
    homes: dict[str, str] = {}
    for file, names in held.items():
        for name in names:
            if name in homes and listed.get(name) not in (file, homes[name]):
                raise CheckpointError(f"{folder}: {name} lies in {homes[name]} and in {file}: which is right?")
            if listed.get(name) == file or name not in homes:
                homes[name] = file
    lost = [name for name in listed if name not in homes]
    if lost:
        more = f" and {len(lost) - 1} more" if lost[1:] else ""
        raise CheckpointError(
            f"{folder}: the index says that {listed[lost[0]]} has {lost[0]}{more}, and no file has: two models' files?"
        )
    return homes


def weight_files(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The files that transformers reads, and in which of them an index says that each tensor lies.

    Raises:
        CheckpointError: the index is damaged, or names what is no file of the folder.
    """
    pointed = pointed_at(folder)
    entry = SINGLE if os.path.lexists(folder / SINGLE) or not os.path.lexists(folder / INDEX) else INDEX
    if isinstance(pointed, str) and pointed.endswith((".safetensors", ".safetensors.index.json")):
        entry = pointed
    elif entry == SINGLE and os.path.lexists(folder / INDEX):
        logger.warning("%s is read, as transformers does, and not the files of %s beside it", folder / SINGLE, INDEX)
    _require_plain(folder / "config.json", entry)
    if not entry.endswith(".json"):
        return [entry], {}
    index = folder / entry
    with reading(index):
        listed = json.loads(read_regular(index, _INDEX_NBYTES))["weight_map"]
        names = sorted(set(listed.values()))
    for name in names:
        _require_plain(index, name)
    return names, listed


def _require_plain(path: Path, name: Any) -> None:
    plain = _ASIDE.sub(r"\g<name>", name) if isinstance(name, str) else ""
    if Path(plain).name != plain or plain in ("", ".", "..") or "\0" in plain:
        raise CheckpointError(f"{path}: {name!r} is not a plain file name")
