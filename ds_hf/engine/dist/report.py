"""The text about ranks that have diverged: the first collective that differs, who issued what, and where they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from textwrap import indent
from typing import Any

__all__ = ["describe"]

SHOWN = 4  # groups of ranks that a report tells apart

HINT = (
    "Usual reasons: a call that is collective at this ZeRO stage (forward, backward, evaluate, state_dict, "
    "save_checkpoint) under `if rank == 0:` or after an exception that one rank caught; ranks with different numbers "
    "of batches; layers that run or not depending on the data of a rank (deepspeed.utils.set_z3_leaf_modules)."
)


def describe(reason: str, answers: Mapping[int, Mapping[str, Any]], world_size: int) -> str:
    """The report.

    Args:
        reason: what raised the alarm.
        answers: of each rank that answered its ``count`` of collectives, the latest ``entries`` (from index ``first``),
            its ``stack``, seconds ``idle`` and, if the process has ended, ``ended`` with its exception or ``""``.
        world_size: number of ranks.
    """
    lines = [reason]
    silent = [rank for rank in range(world_size) if rank not in answers]
    if silent:
        verb = "does" if len(silent) == 1 else "do"
        lines.append(f"{ranks_text(silent).capitalize()} {verb} not answer: ended, stopped, or not able to run Python.")
    index = first_difference(answers)
    if index is None:
        last = max(answer["count"] for answer in answers.values()) - 1
        lines.append(f"{'These' if silent else 'All'} ranks issued the same {last + 1:,} collectives, the last one:")
    else:
        lines.append(f"First difference: collective {index + 1:,}.")
        before = next((_entry(a, index - 1) for a in answers.values() if _entry(a, index - 1)), None)
        if before:
            lines.append(f"All issued before it: {before}")
    place = last if index is None else index
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, answer in sorted(answers.items()):
        groups[_doing(answer, place)].append(rank)
    for doing, ranks in list(groups.items())[:SHOWN]:
        lines += ["", f"{ranks_text(ranks)}: {doing}"]
        answer = answers[ranks[0]]
        if answer["stack"]:
            lines += [f"  rank {ranks[0]} is at", indent(answer["stack"].rstrip(), "  ")]
    if len(groups) > SHOWN:
        lines.append(f"and {len(groups) - SHOWN} more kinds of ranks")
    return "\n".join([*lines, "", HINT])


def first_difference(answers: Mapping[int, Mapping[str, Any]]) -> int | None:
    """Index of the first collective that not all of ``answers`` have alike, ``None`` if there is none.

    Of logs that begin later than that, the first index that all of them still know.
    """
    start = max(answer["first"] for answer in answers.values())
    for index in range(start, max(answer["count"] for answer in answers.values())):
        if len({_entry(answer, index) for answer in answers.values()}) > 1:
            return index
    return None


def _entry(answer: Mapping[str, Any], index: int) -> str | None:
    place = index - answer["first"]
    return entry_text(answer["entries"][place]) if 0 <= place < len(answer["entries"]) else None


def _doing(answer: Mapping[str, Any], index: int) -> str:
    ended = answer.get("ended")
    entry = _entry(answer, index)
    if entry is not None:
        return entry
    if ended is not None:
        return f"ended before it{f' with {ended}' if ended else ''}"
    return f"nothing, for {answer['idle']:.0f} s"


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
