"""The folder of a report as objects. Files end where a killed run left them; ranks may be missing.

A folder may come from a stranger: numbers are looked at here (finite, and none that would be counted to without end),
and whatever else is not as a run writes it shows as one of ``FAULTS`` where it is used.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_hf.engine.observe.report.spans import Key, Span, self_times
from ds_hf.errors import DsHfError
from ds_hf.printable import harmless
from ds_hf.regular_files import open_regular, read_object

__all__ = ["FAULTS", "SOURCE", "Rank", "Run", "StepRecord", "read_run"]

# What Python raises where a value is of another type or size than a run writes.
FAULTS = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
    StopIteration,
)
_MOST_RANKS = 2**17
_MOST = 2**60  # of a count or a rate
_MOST_LINE = 2**28  # bytes
SOURCE = "profiled.json"  # of ds-hf profile: the user's own file, without the report


@dataclass
class StepRecord:
    """One recorded step of one rank.

    Attributes:
        begin: seconds on the rank's clock. seconds: its length. samples, tokens: of this rank.
        spans: of the host, or of the stream of the computation; ``beside``: of communication streams.
        starved: share of the marks at which the GPU had nothing to do.
    """

    number: int
    begin: float
    seconds: float
    samples: int
    tokens: int | None
    spans: list[Span]
    beside: list[Span]
    starved: float = 0.0


@dataclass
class Rank:
    """What one rank recorded.

    Attributes:
        header: what ran. keys: of the spans. steps: by number. memory: the last step in which it was looked at.
        experts: of each layer of them its name and the routes to each. ended: training came to its end.
    """

    number: int
    header: dict[str, Any]
    keys: list[Key] = field(default_factory=list)
    steps: dict[int, StepRecord] = field(default_factory=dict)
    memory: dict[str, Any] | None = None
    experts: list[dict[str, Any]] = field(default_factory=list)
    ended: bool = False

    def own_times(self, step: StepRecord) -> dict[Key, float]:
        """Own seconds of each key."""
        found: dict[Key, float] = {}
        for number, seconds in self_times(step.spans):
            key = self.keys[number]
            found[key] = found.get(key, 0.0) + seconds
        told = sum(found.values())
        if step.seconds > told:
            found[_SCRIPT] = found.get(_SCRIPT, 0.0) + step.seconds - told
        return found


_SCRIPT = Key("script", "outside of the engine")


@dataclass
class Run:
    """All ranks that left something.

    Attributes:
        world_size: processes that there were.
    """

    folder: Path
    ranks: list[Rank]

    @property
    def first(self) -> Rank:
        return self.ranks[0]

    @property
    def header(self) -> dict[str, Any]:
        """Of the first rank."""
        return self.first.header

    @property
    def written(self) -> dict[str, Any]:
        """The configuration as the user wrote it."""
        known = self.folder / SOURCE
        profiled = read_object(known) if known.is_file() else {}
        found: dict[str, Any] = profiled.get("written") or self.header.get("written") or self.header["config"]
        return found

    @property
    def world_size(self) -> int:
        return int(self.header["world_size"])

    @property
    def missing(self) -> list[int]:
        """Ranks without a file."""
        there = {rank.number for rank in self.ranks}
        return [number for number in range(self.world_size) if number not in there]

    @property
    def ended(self) -> bool:
        return all(rank.ended for rank in self.ranks) and not self.missing


def read_run(folder: str | Path) -> Run:
    """Read a folder.

    Raises:
        DsHfError: there is no report in it, or of another version.
    """
    path = Path(folder)
    if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
        raise DsHfError(f"{path} cannot be read (Permission denied): let its owner allow it (chmod)")
    files = sorted(path.glob("rank_*.jsonl")) if path.is_dir() else []
    ranks = [rank for file in files if (rank := _rank_of(file)) is not None]
    if not ranks:
        raise DsHfError(
            f'{path} has no report: a run writes one there with "ds_hf": {{"report": "{path}"}} in its configuration, '
            "or under ds-hf profile train.py ..."
        )
    started = max(rank.header["started"] for rank in ranks)
    # A run with fewer processes may have been here before: its files are older by more than a start takes.
    world = max(ranks, key=lambda rank: rank.header["started"]).header["world_size"]
    ranks = [r for r in ranks if r.header["world_size"] == world and r.number < world]
    return Run(path, [rank for rank in ranks if started - rank.header["started"] < 3600] or ranks)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines; the last may have been cut off."""
    with open_regular(path) as file:
        while line := file.readline(_MOST_LINE):
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                return
            if isinstance(found, dict):
                _check_numbers(found)
                yield found


def _check_numbers(value: Any) -> None:
    """Raise ``ValueError`` for a number that no run writes."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            _check_numbers(each)
    elif isinstance(value, int | float) and value != math.inf and not -_MOST < value < _MOST:  # a link of one process
        raise ValueError(f"{str(value)[:40]} is out of all proportion")


def _rank_of(path: Path) -> Rank | None:
    try:
        return _read_rank(path)
    except DsHfError:
        raise
    except PermissionError as error:  # of another user's run perhaps: nothing is wrong with it
        raise DsHfError(f"{path} cannot be read ({error.strerror}): let its owner allow it (chmod)") from None
    except (*FAULTS, OSError) as error:
        reason = error.strerror or error if isinstance(error, OSError) else f"{type(error).__name__}: {error!s:.200}"
        raise DsHfError(f"{path} is not as a run writes it ({reason}): remove it, or record again") from harmless(error)


def _read_rank(path: Path) -> Rank | None:
    rank: Rank | None = None
    for line in _lines(path):
        if rank is None:
            if line.get("header") != 1:
                raise DsHfError(f"{path} is not of this version of ds_hf: record the run again")
            rank = Rank(int(line["rank"]), line)
            if not 0 <= rank.number < int(line["world_size"]) <= _MOST_RANKS:
                raise ValueError(f"rank {rank.number} of {line['world_size']!s:.40}")
            for name, size in line["mesh"].items():
                if not 1 <= size <= _MOST_RANKS:
                    raise ValueError(f"mesh.{name} is {size!s:.40}")
        elif "keys" in line:
            rank.keys += [Key(*key) for key in line["keys"].values()]
        elif "step" in line:
            rank.steps[int(line["step"])] = StepRecord(
                int(line["step"]),
                float(line["begin"]),
                float(line["seconds"]),
                int(line["samples"]),
                line["tokens"],
                _spans(line["spans"]),
                _spans(line["beside"]),
                float(line.get("starved", 0.0)),
            )
        elif "memory" in line:
            rank.memory = line
        elif "experts" in line:
            rank.experts = [
                {"name": str(e["name"]), "processes": max(1, int(e["processes"])), "top": int(e["top"]),
                 "routes": [int(number) for number in e["routes"]]} for e in line["experts"]
            ]  # fmt: skip
        elif "end" in line:
            rank.ended = True
    return rank


def _spans(given: list[Any]) -> list[Span]:
    return [Span(key, start * 1e-6, seconds * 1e-6, depth) for key, start, seconds, depth in given]
