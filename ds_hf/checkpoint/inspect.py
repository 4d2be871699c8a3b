"""What a checkpoint holds, told without reading its tensors."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ds_hf.checkpoint.complete import incomplete
from ds_hf.checkpoint.format import SavedParameter
from ds_hf.checkpoint.formats import locate, open_folder
from ds_hf.checkpoint.manifest import read_manifest
from ds_hf.checkpoint.pretrained import read_pretrained
from ds_hf.checkpoint.source import CheckpointKind, Source
from ds_hf.checkpoint.trust.pickled import check_pickled
from ds_hf.checkpoint.verify import verify
from ds_hf.dtypes import name_of
from ds_hf.errors import CheckpointError

__all__ = ["CheckpointVerdict", "Content", "faults_of", "inspect", "verdict_of"]

_RANK = re.compile(r"(?:rank_|zero_pp_rank_|__)(\d+)")


@dataclass(frozen=True)
class FileContent:
    """One file: its size and what is in it."""

    name: str
    nbytes: int
    holds: str


@dataclass(frozen=True)
class Content:
    """One checkpoint.

    Attributes:
        states: bytes of each state of the parameters ("master", "exp_avg", ...).
        dtypes: elements of the parameters by the dtype that they had in the model.
    """

    folder: str
    kind: str
    written_by: dict[str, Any]
    step: int
    samples: int
    skipped: int
    world_size: int
    stage: int | None
    optimizer: str
    parameters: int
    elements: int
    trainable: int
    buffers: int
    tied: dict[str, str]
    excluded: list[str]
    states: dict[str, int]
    dtypes: dict[str, int]
    nbytes: int
    has: list[str]
    files: list[FileContent]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def inspect(source: Source) -> Content:
    """Describe an opened checkpoint.

    Raises:
        CheckpointError: a tensor that it speaks of is not there.
    """
    manifest = source.manifest
    counters = manifest.extra.get("counters") or {}
    saved = list(manifest.parameters.values())
    dtypes: dict[str, int] = {}
    for weight in source.weights():
        if isinstance(weight.saved, SavedParameter):
            name = name_of(weight.dtype)
            dtypes[name] = dtypes.get(name, 0) + weight.saved.numel
    states: dict[str, int] = {}
    for parameter in saved:
        for state in parameter.states:
            nbytes = parameter.numel * source.stored_dtype(parameter, state).itemsize
            states[state] = states.get(state, 0) + nbytes
    optimizer = manifest.extra.get("optimizer") or {}
    return Content(
        folder=str(source.folder),
        kind=source.kind.value,
        written_by=manifest.extra.get("written_by") or {},
        step=int(counters.get("global_steps", 0)),
        samples=int(counters.get("global_samples", 0)),
        skipped=int(counters.get("skipped_steps", 0)),
        world_size=manifest.world_size,
        stage=source.stage,
        optimizer=str(optimizer.get("class", "")),
        parameters=len(saved),
        elements=sum(parameter.numel for parameter in saved),
        trainable=sum(parameter.numel for parameter in saved if parameter.trainable),
        buffers=len(manifest.buffers),
        tied=dict(manifest.tied),
        excluded=sorted(manifest.excluded),
        states=states,
        dtypes=dtypes,
        nbytes=sum(manifest.files.values()),
        has=_rest(source),
        files=[FileContent(name, nbytes, _holds(source, name)) for name, nbytes in sorted(manifest.files.items())],
    )


def _rest(source: Source) -> list[str]:
    """What there is besides weights."""
    common = source.common
    found = {
        "moments": any(saved.moments for saved in source.manifest.parameters.values()),
        "parameter groups": bool(common.get("param_groups")),
        "scheduler": common.get("lr_scheduler") is not None,
        "loss scaler": isinstance(common.get("loss_scaler"), dict),
        "data position": common.get("data") is not None,
        "checksums": bool(source.manifest.extra.get("checksums")),
        "digest": bool(source.manifest.extra.get("digest")),
    }
    client = [f"client state ({', '.join(map(str, common['client_state']))})"] if common.get("client_state") else []
    return [name for name, there in found.items() if there] + client


def _holds(source: Source, file: str) -> str:
    """What one file is for."""
    manifest = source.manifest
    rank = _RANK.search(file)
    whose = f" of rank {int(rank[1])}" if rank else ""
    if source.kind is CheckpointKind.DS_HF:
        if file.endswith(".safetensors"):
            here = [s for s in manifest.parameters.values() if any(f.file == file for f in s.fragments)]
            elements = sum(f.numel for s in here for f in s.fragments if f.file == file)
            return f"{elements:_} elements of {len(here)} parameters{whose}"
        if file == manifest.extra.get("common_file"):
            return "counters, scheduler, options and client state"
        return f"random state{whose}" if file.endswith("_optim_states.pt") else f"counters{whose}"
    if source.kind is CheckpointKind.DEEPSPEED:
        what = "masters and moments" if file.endswith("_optim_states.pt") else "module, counters and client state"
        return f"{what}{whose}"
    if source.kind is CheckpointKind.UNIVERSAL:
        if file.startswith("zero/"):
            return "options and loss scaler" if file.endswith("optimizer_state.pt") else "one state of a parameter"
        return f"module, counters and client state{whose}"
    if source.kind is CheckpointKind.DCP:
        return "names, shapes and places" if file == ".metadata" else f"tensors{whose}"
    return f"{sum(any(f.file == file for f in s.fragments) for s in manifest.parameters.values())} weights"


@dataclass(frozen=True)
class CheckpointVerdict:
    """What reading all of a checkpoint has shown.

    Attributes:
        faults: sentences, each with its file; empty when there are none.
        unsummed: what has no checksum, so that a changed value in it would not be seen; empty when all has one.
    """

    faults: list[str]
    unsummed: str = ""

    @property
    def text(self) -> str:
        """In a few words."""
        count = len(self.faults)
        if count:
            return f"{count} fault{'s' if count > 1 else ''}"
        if self.unsummed:
            return f"readable, but {self.unsummed} no checksums: a changed value there would not be seen"
        return "whole"


def faults_of(path: str | Path, tag: str | None = None, report: Any = None) -> list[str]:
    """Everything that is wrong with a checkpoint in any format; empty when nothing is."""
    return verdict_of(path, tag, report).faults


def verdict_of(path: str | Path, tag: str | None = None, report: Any = None) -> CheckpointVerdict:
    """Read the whole of a checkpoint in any format.

    Ours have checksums and digests, files of ``torch.save`` (DeepSpeed's, and the items of torch.distributed) a
    checksum of each record, safetensors none. Sizes, headers and cover are checked in all, and every tensor is read.
    """
    try:
        kind, folder = locate(path, tag)
        if kind is CheckpointKind.DS_HF:
            faults = verify(folder, progress=report)
            faults = faults or incomplete(open_folder(folder))
            summed = bool(faults) or bool(read_manifest(folder).extra.get("checksums"))
            return CheckpointVerdict(faults, "" if summed else "it was saved before there were any and has")
        return _read_all(kind, folder, report)
    except CheckpointError as error:
        return CheckpointVerdict([str(error)])


def _read_all(kind: CheckpointKind, folder: Path, report: Any) -> CheckpointVerdict:
    """Read every tensor of another library's checkpoint."""
    sums: list[bool] = []
    if kind is CheckpointKind.DCP:
        from ds_hf.checkpoint.dcp import read_dcp

        source = read_dcp(folder, sums=sums)
    else:
        source = read_pretrained(folder) if kind is CheckpointKind.HF else open_folder(folder)
    source.check()
    if kind in (CheckpointKind.DEEPSPEED, CheckpointKind.UNIVERSAL):
        sums += [check_pickled(source.folder / file).summed for file in source.manifest.files]
    weights = list(source.weights())
    for number, weight in enumerate(weights, 1):
        weight.read()
        if isinstance(weight.saved, SavedParameter):
            for state in weight.saved.moments:
                source.state(weight.saved, state)
        if report is not None:
            report(number, len(weights))
    faults = incomplete(source)
    if not sums or not all(sums):
        return CheckpointVerdict(faults, "it has")
    return CheckpointVerdict(faults, ".metadata has" if kind is CheckpointKind.DCP else "")
