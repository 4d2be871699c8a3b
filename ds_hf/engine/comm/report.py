"""The text about ranks that have diverged: the first collective that differs, who issued what, and where they are.

With one axis that is all. With several, a rank that others wait for in one axis may wait for a third rank in another,
so the text also says who waits for whom in which axis, and who is late without waiting for anybody.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import indent
from typing import Any

__all__ = ["describe", "first_difference", "ranks_text"]

SHOWN = 4  # groups of ranks that a report tells apart

HINT = (
    "Usual reasons: a call that is collective at this ZeRO stage (forward, backward, evaluate, state_dict, "
    "save_checkpoint) under `if rank == 0:` or after an exception that one rank caught; ranks with different numbers "
    "of batches; layers that run or not depending on the data of a rank, as a vision tower does where some batches "
    "have no images (deepspeed.utils.set_z3_leaf_modules(model, [the class whose forward calls them or not]))."
)

GONE = (
    "What a rank that does not answer printed last tells more. One that was killed (SIGKILL) often was so by the "
    "kernel, when host memory ran out; one that is stopped goes on after SIGCONT, too late for this run."
)

Answer = Mapping[str, Any]
_Waits = dict[int, "list[tuple[_AxisReport, list[int]]]"]  # by rank: in which axes, and for whom


def describe(reason: str, answers: Mapping[int, Answer], ranks: Sequence[int]) -> str:
    """The report.

    Args:
        reason: what raised the alarm.
        answers: of each rank that answered: its ``axes`` by key, each with its ``name``, its ``ranks``, the ``count``
            of collectives, the latest ``entries`` (from index ``first``), whether the rank is ``inside`` of the last
            one and seconds ``idle``; its ``stack``, seconds ``idle`` on all axes and, if the process has ended,
            ``ended`` with its exception or ``""``.
        ranks: all that should have answered.
    """
    lines = [reason]
    silent = [rank for rank in ranks if rank not in answers]
    if silent:
        verb = "does" if len(silent) == 1 else "do"
        lines.append(f"{ranks_text(silent).capitalize()} {verb} not answer: ended, stopped, or not able to run Python.")
    axes = _axes(answers)
    used = [axis for axis in axes if any(place["count"] for place in axis.places.values())]
    lines += _one_axis((used or axes)[0], bool(silent)) if len(used) <= 1 else _several(used, answers, silent)
    apart = any(first_difference(axis.places) is not None for axis in axes)
    return "\n".join([*lines, "", GONE if silent and not apart else HINT])


@dataclass(frozen=True)
class _AxisReport:
    """An axis: its ranks, and of those that answered how far they are, with what else they said."""

    name: str
    ranks: tuple[int, ...]
    places: dict[int, Answer]

    def __str__(self) -> str:
        return f"the axis {self.name!r} of {ranks_text(self.ranks)}"

    def waiting(self, silent: Iterable[int]) -> dict[int, list[int]]:
        """For whom each rank waits here: for those that have issued less, and inside of a collective for those that do
        not answer."""
        least = min(place["count"] for place in self.places.values())
        absent = [rank for rank in silent if rank in self.ranks]
        found = {}
        for rank, place in self.places.items():
            behind = absent if place["inside"] or place["count"] > least else []
            if place["count"] > least:
                behind = sorted([*behind, *(r for r, other in self.places.items() if other["count"] < place["count"])])
            if behind and "ended" not in place:
                found[rank] = behind
        return found


def _axes(answers: Mapping[int, Answer]) -> list[_AxisReport]:
    found: dict[str, _AxisReport] = {}
    for rank, answer in sorted(answers.items()):
        said = {name: answer[name] for name in ("stack", "ended", "at") if name in answer}
        for key, place in answer["axes"].items():
            if not place.get("compared", True):  # messages between single processes
                continue
            axis = found.setdefault(key, _AxisReport(place["name"], tuple(place["ranks"]), {}))
            axis.places[rank] = {**place, **said}
    return list(found.values())


# -- one axis -----------------------------------------------------------------------------------------------------


def _one_axis(axis: _AxisReport, some_are_silent: bool) -> list[str]:
    answers, lines = axis.places, []
    index = first_difference(answers)
    if index is None:
        last = max(answer["count"] for answer in answers.values()) - 1
        whose = (
            f"Rank {next(iter(answers))}" if len(answers) == 1 else "These ranks" if some_are_silent else "All ranks"
        )
        what = f"{'' if len(answers) == 1 else 'the same '}{last + 1:,} collectives"
        lines.append(f"{whose} issued {what}, the last one:")
    else:
        lines += [f"First difference: collective {index + 1:,}.", *_before(answers, index)]
    place = last if index is None else index
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, answer in sorted(answers.items()):
        groups[_at(answer, _doing(answer, place), index is None)].append(rank)
    for doing, ranks in list(groups.items())[:SHOWN]:
        lines += ["", f"{ranks_text(ranks)}: {doing}", *_stack(ranks[0], answers[ranks[0]])]
    if len(groups) > SHOWN:
        lines.append(f"and {len(groups) - SHOWN} more kinds of ranks")
    return lines


def first_difference(answers: Mapping[int, Answer]) -> int | None:
    """Index of the first collective that not all of ``answers`` have alike, ``None`` if there is none.

    Of logs that begin later than that, the first index that all of them still know.
    """
    start = max(answer["first"] for answer in answers.values())
    for index in range(start, max(answer["count"] for answer in answers.values())):
        if len({_entry(answer, index) for answer in answers.values()}) > 1:
            return index
    return None


def _before(answers: Mapping[int, Answer], index: int) -> list[str]:
    before = {_entry(answer, index - 1) for answer in answers.values()} - {None}
    return [f"All issued before it: {before.pop()}"] if len(before) == 1 else []


def _entry(answer: Answer, index: int) -> str | None:
    place = index - answer["first"]
    return entry_text(answer["entries"][place]) if 0 <= place < len(answer["entries"]) else None


def _at(answer: Answer, doing: str, past: bool = False) -> str:
    """``doing``, with where in the batch of a pipeline the rank is, which may be long after it."""
    if not answer.get("at") or "ended" in answer:
        return doing
    return f"{doing}; now in {answer['at']}" if past else f"{answer['at']}: {doing}"


def _doing(answer: Answer, index: int) -> str:
    entry = _entry(answer, index)
    if entry is not None:
        return entry
    if "ended" in answer:
        return f"ended before it{_with(answer)}"
    return f"nothing, for {answer['idle']:.0f} s"


def _with(answer: Answer) -> str:
    return f" with {answer['ended']}" if answer["ended"] else ""


def _stack(rank: int, answer: Answer) -> list[str]:
    return [f"  rank {rank} is at", indent(answer["stack"].rstrip(), "  ")] if answer["stack"] else []


# -- several ------------------------------------------------------------------------------------------------------


def _several(axes: Sequence[_AxisReport], answers: Mapping[int, Answer], silent: Sequence[int]) -> list[str]:
    """Where the ranks of an axis part, or else who is late; then each rank, and those first."""
    waits: _Waits = defaultdict(list)
    late: dict[int, list[_AxisReport]] = defaultdict(list)
    for axis in axes:
        waiting = axis.waiting(silent)
        for rank, behind in waiting.items():
            waits[rank].append((axis, behind))
        for rank in sorted({rank for behind in waiting.values() for rank in behind}):
            late[rank].append(axis)
    parted = [axis for axis in axes if _contradict(axis.places)]
    if parted:
        named = {rank for axis in parted for rank in axis.places}
        lines = _differences(parted)
    else:
        first, circle = {rank for rank in late if rank not in waits}, _circle(waits)
        named = first | circle or set(late)
        lines = [*_who_wait_for_each_other(circle, waits), *_who_is_late(first, late)]
        lines += _differences([axis for axis in axes if any(axis in late[rank] for rank in named & set(late))])
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank in sorted(answers, key=lambda rank: (rank not in named, rank)):
        doing, more = _state_of(rank, answers[rank], parted, waits[rank], late[rank])
        groups[_at(answers[rank], doing), more].append(rank)
    for (doing, more), ranks in list(groups.items())[:SHOWN]:
        whom = _for_whom(ranks, waits) if more else ""
        lines += ["", f"{ranks_text(ranks)}: {doing}{whom}{more}", *_stack(ranks[0], answers[ranks[0]])]
    if len(groups) > SHOWN:
        lines.append(f"and {len(groups) - SHOWN} more kinds of ranks")
    return lines


def _differences(axes: Sequence[_AxisReport]) -> list[str]:
    lines = []
    for axis in axes[:SHOWN]:
        index = first_difference(axis.places)
        if index is not None:
            lines += [f"First difference in {axis}: collective {index + 1:,} there.", *_before(axis.places, index)]
    return lines


def _who_is_late(first: Iterable[int], late: Mapping[int, list[_AxisReport]]) -> list[str]:
    groups: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(first):
        groups[_names(late[rank])].append(rank)
    return [f"Late: {ranks_text(ranks)} in {names}." for names, ranks in groups.items()]


def _circle(waits: _Waits) -> set[int]:
    """Ranks that wait for each other: each has issued in one axis what the other has not, and the other way round."""
    pairs = {(rank, other) for rank, found in waits.items() for _, behind in found for other in behind}
    return {rank for rank, other in pairs if (other, rank) in pairs}


def _who_wait_for_each_other(circle: set[int], waits: _Waits) -> list[str]:
    if not circle:
        return []
    names = _names([axis for rank in sorted(circle) for axis, behind in waits[rank] if circle & set(behind)])
    return [
        f"{ranks_text(sorted(circle)).capitalize()} wait for each other in {names}: one of them has left out what the "
        "others do, or has done more."
    ]


def _names(axes: Iterable[_AxisReport]) -> str:
    """``the axis 'data'``, ``the axes 'data' and 'tensor'``."""
    names = [repr(name) for name in dict.fromkeys(axis.name for axis in axes)]
    return f"the axis {names[0]}" if len(names) == 1 else f"the axes {', '.join(names[:-1])} and {names[-1]}"


def _contradict(answers: Mapping[int, Answer]) -> bool:
    """Two ranks have issued different collectives, and not only one of them less."""
    index = first_difference(answers)
    entries = {_entry(answer, index) for answer in answers.values()} if index is not None else set()
    return len(entries - {None}) > 1


def _state_of(
    rank: int,
    answer: Answer,
    parted: Sequence[_AxisReport],
    waits: Sequence[tuple[_AxisReport, list[int]]],
    late: Sequence[_AxisReport],
) -> tuple[str, str]:
    """What a rank does, in words that are the same for ranks that do the same; for whom it waits comes between."""
    where = next((axis for axis in parted if rank in axis.places), None)
    index = first_difference(where.places) if where is not None else None
    if where is not None and index is not None:
        return f"{_doing(where.places[rank], index)}, in the axis {where.name!r}", ""
    if "ended" not in answer and waits:
        axis, behind = _latest(rank, waits)
        also = f"; late itself in {_names(late)}" if late else ""
        seconds = axis.places[rank]["idle"]
        return f"waiting in the axis {axis.name!r}", f", for {seconds:.0f} s: {_missing(axis, rank, behind)}{also}"
    said = f"ended{_with(answer)}" if "ended" in answer else f"nothing, for {answer['idle']:.0f} s"
    return f"{said}; late in {_names(late)}" if late else said, ""


def _latest(rank: int, waits: Sequence[tuple[_AxisReport, list[int]]]) -> tuple[_AxisReport, list[int]]:
    """Where it issued something last: there it is."""
    return min(waits, key=lambda wait: wait[0].places[rank]["idle"])


def _missing(axis: _AxisReport, rank: int, behind: Sequence[int]) -> str:
    """What ``rank`` has issued and those ``behind`` have not; of what is no longer known, its last one."""
    place = axis.places[rank]
    counts = [axis.places[other]["count"] for other in behind if other in axis.places]
    return _entry(place, min(counts, default=place["count"] - 1)) or _entry(place, place["count"] - 1) or "a collective"


def _for_whom(ranks: Sequence[int], waits: _Waits) -> str:
    others = sorted({other for rank in ranks if waits[rank] for other in _latest(rank, waits[rank])[1]})
    return f" for {ranks_text(others)}" if others else ""


# -- words --------------------------------------------------------------------------------------------------------


def entry_text(entry: Sequence[Any]) -> str:
    """A collective in words."""
    operation, what, numel, dtype = entry
    size = f" ({numel:,} x {dtype})" if numel else ""
    return f"{operation} of {what or 'a tensor'}{size}"


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-3, 5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
