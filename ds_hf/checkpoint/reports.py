"""The manifest of a checkpoint that several ranks wrote, out of what each reports of its part.

Every rank writes the same thing at every stage, its shard of each flat buffer, so replicated states are stored once
and the format does not depend on the stage. Only where a rank holds slices of parameters is the manifest of version 2:
without any, older versions of ds_hf read it. ``zero_to_fp32`` reads what is made here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ds_hf.checkpoint.boxes import cover_fault
from ds_hf.checkpoint.checksum import add, hexadecimal
from ds_hf.checkpoint.files import tensors_name
from ds_hf.checkpoint.format import ORDERED_VERSION, SLICED_VERSION, SavedCut, SavedFragment
from ds_hf.errors import CheckpointError

__all__ = ["RankReport", "buffer_key", "complete", "flat_key", "loose_key"]

Json = dict[str, Any]


@dataclass
class RankReport:
    """What one rank has written.

    Attributes:
        files: size of each file in bytes.
        parameters: what the rank has written of each: the whole shape, ``cut`` (``[dim, ranges]`` if the rank has a
            slice), ``fragments`` (``[start, start in the tensor, numel]``), the tensor keys of its ``states`` and the
            optimizer's ``scalars``, encoded.
        buffers: shape and dtype of the module's buffers that the rank has written.
        excluded: frozen parameters that were to be left out.
        tied: further names of tied parameters and buffers, each with the first name.
        groups: parameter group of each parameter of which the rank updates a part.
        irregular: ``Piece.where`` of states that lie in the rank's pickled file.
        packs: whether packed moments lie there too, which the tensors hold as numbers.
        rng: digests of the rank's random states.
        options: of each parameter group as this rank has it, the digests of its options.
        optimizer: class of the optimizer that this rank has.
        common: rank 0's digests of what is one for all.
        checksums: of each file.
        sums: for each state of each parameter, the sum of the rank's part, see ``checksum``; ``None`` if it has none.
    """

    files: dict[str, int] = field(default_factory=dict)
    parameters: dict[str, Json] = field(default_factory=dict)
    buffers: dict[str, Json] = field(default_factory=dict)
    excluded: list[str] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)
    irregular: list[tuple[Any, ...]] = field(default_factory=list)
    packs: bool = False
    rng: dict[str, str] = field(default_factory=dict)
    options: list[dict[str, str]] = field(default_factory=list)
    optimizer: str = ""
    common: dict[str, Any] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)
    sums: dict[str, dict[str, tuple[int, int] | None]] = field(default_factory=dict)


def flat_key(index: int, state: str) -> str:
    """Tensor key of a state of the flat buffer ``index``."""
    return f"flat.{index:05d}.{state}"


def loose_key(name: str) -> str:
    """Tensor key of a parameter that lives in no unit."""
    return f"parameter.{name}"


def buffer_key(name: str) -> str:
    """Tensor key of a module's buffer."""
    return f"buffer.{name}"


def complete(description: Json, reports: Sequence[RankReport]) -> Json:
    """The manifest of a checkpoint whose ranks wrote what ``reports`` say; ``description`` is used up.

    Raises:
        CheckpointError: what the ranks wrote of a parameter is not the whole of it, each element once; or their
            optimizers are not alike.
    """
    _check_alike(reports)
    table: dict[SavedCut, int] = {}
    found: dict[str, Json | None] = dict.fromkeys(description["parameters"])
    for rank, report in enumerate(reports):
        for name, entry in report.parameters.items():
            _merge(found, name, entry, rank, table)
    parameters = {name: entry for name, entry in found.items() if entry is not None}
    cuts = list(table)
    for name, entry in parameters.items():
        entry["fragments"].sort(key=lambda row: (row[4:], row[1]))
        _check_cover(name, entry, cuts)
    tied, excluded, buffers = dict[str, str](), dict[str, None](), dict[str, Json]()
    for rank, report in enumerate(reports):
        tied = {**report.tied, **tied}
        excluded.update(dict.fromkeys(report.excluded))
        places = {name: {"file": tensors_name(rank), "key": buffer_key(name)} for name in report.buffers}
        buffers.update({name: {**entry, **places[name]} for name, entry in report.buffers.items()})
    if description["groups"] is not None:
        description["groups"] = _groups(description["groups"], reports)
    sums, without = _digests(reports)
    ordered = any(entry.get("order") for entry in parameters.values())
    slices = {
        "version": ORDERED_VERSION if ordered else SLICED_VERSION,
        "cuts": [[c.dim, [list(pair) for pair in c.ranges]] for c in cuts],
    }
    return {
        **description,
        **(slices if cuts or ordered else {}),
        "parameters": parameters,
        "excluded": list(excluded),
        "tied": tied,
        "buffers": buffers,
        "written_at": time.time(),
        "files": {name: nbytes for report in reports for name, nbytes in report.files.items()},
        "checksums": {name: text for report in reports for name, text in report.checksums.items()},
        "irregular": [[rank, *entry] for rank, report in enumerate(reports) for entry in report.irregular],
        **({"packs": True} if any(report.packs for report in reports) else {}),
        "digest": {
            "tensors": sums,
            **({"without": without} if without else {}),
            "rng": [report.rng for report in reports],
            "groups": [report.options for report in reports],
            **reports[0].common,
        },
    }


def _check_alike(reports: Sequence[RankReport]) -> None:
    """All ranks have one optimizer: what each keeps of its elements would otherwise fit no optimizer."""
    first = reports[0].optimizer
    rank = next((rank for rank, report in enumerate(reports) if report.optimizer != first), None)
    if rank is not None:
        raise CheckpointError(
            f"rank {rank} has optimizer {reports[rank].optimizer} and rank 0 {first}: nothing could load such a "
            "checkpoint. Give all ranks the same configuration and optimizer"
        )


def _merge(found: dict[str, Json | None], name: str, entry: Json, rank: int, table: dict[SavedCut, int]) -> None:
    """Add what a rank has written of a parameter."""
    known = found.get(name)
    alike = ("shape", "dtype", "trainable")
    if known is None:
        fixed = (*alike, *(("order",) if "order" in entry else ()))
        known = found[name] = {key: entry[key] for key in fixed} | {"states": {}, "fragments": []}
    for key in alike:
        if known[key] != entry[key]:
            raise CheckpointError(
                f"{name} has {key} {entry[key]} on rank {rank} and {known[key]} on another: on all ranks it has to be "
                "the same whole parameter, of which each may hold a slice"
            )
    for kind in ("states", "scalars"):
        mine, others = (set(each.get(kind) or ()) for each in (entry, known))
        if known["fragments"] and entry["fragments"] and mine != others:
            raise CheckpointError(
                f"the optimizer of rank {rank} keeps {sorted(mine)} for {name}, that of another {sorted(others)}: on "
                "all ranks it has to be the same optimizer, after as many steps"
            )
    known["states"] = {**entry["states"], **known["states"]}
    if entry.get("scalars"):
        known.setdefault("scalars", {}).update(entry["scalars"])
    number = []
    if entry["cut"] is not None:
        dim, ranges = entry["cut"]
        number = [table.setdefault(SavedCut(dim, tuple(map(tuple, ranges))), len(table))]
    known["fragments"] += [[tensors_name(rank), *row, *number] for row in entry["fragments"]]


def _check_cover(name: str, entry: Json, cuts: list[SavedCut]) -> None:
    fragments = [SavedFragment(*row[:4], *(cuts[number] for number in row[4:])) for row in entry["fragments"]]
    fault = cover_fault(entry["shape"], fragments)
    if fault:
        raise CheckpointError(
            f"the parts of {name} that the ranks hold {fault}: what a model-parallel layer marks as its place in the "
            "whole parameter (partition_dim, partition_stride) has to be so on every rank"
        )


def _digests(reports: Sequence[RankReport]) -> tuple[dict[str, dict[str, str]], list[str]]:
    """For each state of each parameter the sum of all ranks' parts, which does not depend on how it was cut.

    Also the names of parameters of which some rank has a slice without a sum.
    """
    total: dict[str, dict[str, tuple[int, int]]] = {}
    without: dict[str, None] = {}
    for report in reports:
        for name, states in report.sums.items():
            found = total.setdefault(name, {})
            for state, value in states.items():
                if value is None:
                    without[name] = None
                else:
                    found[state] = add(found.get(state, (0, 0)), (value[0], value[1]))
    known = {name: states for name, states in total.items() if name not in without}
    return {name: {s: hexadecimal(value) for s, value in states.items()} for name, states in known.items()}, [*without]


def _groups(given: list[list[str]], reports: Sequence[RankReport]) -> list[list[str]]:
    """Names of the parameters of each parameter group that are in the checkpoint."""
    groups: list[dict[str, None]] = [{} for _ in given]
    for report in reports:
        for name, group in report.groups.items():
            groups[group].setdefault(name)
    places = [{name: place for place, name in enumerate(names)} for names in given]
    return [
        sorted(names, key=lambda name, known=known: known.get(name, len(known)))  # type: ignore[misc]
        for names, known in zip(groups, places, strict=True)
    ]
