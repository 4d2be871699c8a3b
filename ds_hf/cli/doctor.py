"""The commands ``ds-hf doctor`` and ``ds_report``; what they tell lies in ``ds_hf.doctor``. Exit code: always 0."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ds_hf.launcher.handover import call_real, real_deepspeed
from ds_hf.printable import printable, printable_json, speak_any_language

__all__ = ["doctor_command", "report_main"]


def doctor_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    disk: Annotated[Path, typer.Option("--disk", help="Folder whose disk is timed.", show_default="here")] = Path(),
    no_disk: Annotated[bool, typer.Option("--no-disk", help="Do not time a disk.")] = False,
) -> None:
    """Tell what is installed, what devices, links, memory and disk there are, who computes what, and what is wrong."""
    from ds_hf.doctor import examine, take_part  # imports torch

    if take_part():
        return
    with _busy():
        report = examine(None if no_disk else disk.resolve())
    if as_json:
        print(printable_json(report.as_json()))
        return
    console = Console(highlight=False)
    width = max(len(fact.name) for fact in report.facts)
    for fact in report.facts:
        _line(console, fact.name, width, fact.value)
        if fact.fix:
            _line(console, "", width, f"-> {fact.fix}")
    console.print()
    reasons = {op.reason for op in report.operators if op.reason}
    for op in report.operators:
        why = f" ({op.reason})" if op.reason and len(reasons) > 1 else ""
        console.print(f"{op.name:<24} {op.device:<5} {op.implementation}{why}", soft_wrap=True)
    if len(reasons) == 1:
        console.print(f"plain torch because: {reasons.pop()}", soft_wrap=True)


def _line(console: Console, name: str, width: int, value: str) -> None:
    """A name and a text beside it, which wraps under itself on a terminal."""
    value = printable(value)
    if not console.is_terminal:
        print(f"{name:<{width}}  {value}".rstrip())
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_column(width=width)
    grid.add_column()
    grid.add_row(Text(name, "bold"), Text(value))
    console.print(grid)


@contextmanager
def _busy() -> Iterator[None]:
    """Something that moves while torch is imported and the disk is timed; nothing where output is not a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status("looking at this machine"):
        yield


def report_main() -> None:
    """Entry point of the script ``ds_report``: the doctor's report, or that of the DeepSpeed that is installed."""
    if real_deepspeed() is not None:
        sys.exit(call_real("deepspeed.env_report", "cli_main"))
    speak_any_language()
    app = typer.Typer(add_completion=False)
    app.command()(doctor_command)
    app(prog_name="ds_report")
