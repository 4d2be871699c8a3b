"""The longest sequences: which option of the script says how long they are, and what the report says of them.

The engine finds the longest that fit by making the script's own batch longer; for training with the result the script
has to be told, so that a search whose answer could not be used is refused before it starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ds_hf.autotune.charts import COLOURS, Bar, ChartAxis, bars
from ds_hf.autotune.command import LENGTH, Command
from ds_hf.autotune.options import gib
from ds_hf.autotune.page import section, table
from ds_hf.autotune.records import Record
from ds_hf.errors import ConfigError

__all__ = ["check_length", "length_section", "positions_warning", "with_option"]

USUAL = ("max_length", "max_seq_length", "block_size", "cutoff_len", "sequence_len", "seq_length", "seq_len")


def with_option(command: Command, named: str | None) -> Command:
    """``command`` with the option that sets the length among its mappings: as named, else by the names that are usual.

    Raises:
        ConfigError: it is not known, or there are several; with how to say it.
    """
    ask = "name it: --length-option=--max_length, or what your script calls it"
    if named is None and LENGTH in command.mappings:
        return command
    found = [named] if named else [f"--{each}" for each in USUAL if _is_given(command, f"--{each}")]
    if not found and command.script[-1].startswith("trl."):
        found = ["--max_length"]
    if len(found) != 1:
        several = f"{' and '.join(found)} are there: which of them sets the length of a sequence?"
        unknown = "it is not known which option of the script sets the length of a sequence;"
        raise ConfigError(f"--goal longest-sequence: {several if found else unknown} {ask}")
    option = found[0] if found[0].startswith("-") else f"--{found[0]}"
    return replace(command, mappings={**command.mappings, LENGTH: option})


def _is_given(command: Command, option: str) -> bool:
    return replace(command, mappings={LENGTH: option}).given(LENGTH) is not None


def check_length(command: Command, events: dict[str, Any]) -> int:
    """Tokens of the script's own sequences, by its first launch.

    Raises:
        ConfigError: they cannot be made longer, or the option does not set their length.
    """
    found, option = events.get("length") or {}, command.mappings[LENGTH]
    if not found.get("own"):
        note = (events.get("not resizable") or {}).get("text")
        why = found.get("why") or note or "it never came to its first batch"
        raise ConfigError(f"--goal longest-sequence: the script's sequences cannot be made longer: {why}")
    own, given = int(found["own"]), command.given(LENGTH)
    if given is not None and given.isdecimal() and int(given) < own:
        raise ConfigError(
            f"--goal longest-sequence: {option} is {given}, and the script's batch has sequences of {own} tokens, so "
            "that it does not set their length: name what does with --length-option"
        )
    return own


def positions_warning(events: dict[str, Any], tokens: int) -> list[str]:
    """That a model has no more positions, or has not seen so many, where it says how many it was made for."""
    if tokens == (events.get("length") or {}).get("most"):
        return [
            f"{tokens:,} tokens are all that the model's table of positions has: that is the limit, and not memory."
        ]
    config = ((events.get("facts") or {}).get("model") or {}).get("config") or {}
    places = (config.get("text_config") or config).get("max_position_embeddings")
    if not isinstance(places, int) or tokens <= places:
        return []
    return [f"{tokens:,} tokens fit into memory; the model was made for {places:,} (max_position_embeddings), and "
            "learns longer sequences only as far as its positions can be extended."]  # fmt: skip


def length_section(records: Sequence[Record]) -> str:
    """Of each setting the longest sequences, as the memory model had it and as measured; longest first."""
    measured = [(record, max(record.points, key=lambda point: point.length)) for record in records if record.points]
    measured.sort(key=lambda each: -each[1].length)
    if not measured:
        return ""
    rows, chart = [], []
    for record, point in measured:
        name = record.label + (" (yours)" if record.own else "")
        expected = (record.events.get("expected") or {}).get("tokens")
        pace = point.seconds / point.samples / point.length
        cells = (f"{expected:,}" if expected else "", f"{point.length:,}", gib(point.peak), f"{pace * 1e6:,.1f}")
        rows.append((name, f"{point.micro} x {point.accumulation}", *cells))
        chart.append(Bar(name, 0, point.length, COLOURS[0], f"{point.length:,}"))
    head = ("setting", "micro x acc.", "expected", "tokens", "memory", "µs a token")
    text = "What fits, of one more step of length the next does not. Expected: by the memory model, before a launch."
    inner = table(head, rows, numbers=(1, 2, 3, 4, 5))
    return section("The longest sequences", bars(chart, ChartAxis("tokens a sequence", low=0)), inner, text=text)
