"""``ds-hf profile [options] train.py <its arguments> --deepspeed ds_config.json``, and ``ds-hf profile FOLDER``.

Options come before the script; everything from the script on is passed on untouched. Exit codes: 0 fine, 1 nothing was
recorded, 2 wrong usage, 130 after Ctrl-C.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ds_hf.errors import ConfigError, DsHfError
from ds_hf.log import complain
from ds_hf.printable import printable

__all__ = ["AS_GIVEN", "profile_command"]

AS_GIVEN = {"allow_interspersed_args": False, "ignore_unknown_options": False}


def profile_command(
    words: Annotated[
        list[str], typer.Argument(help="The script and its arguments, or a folder of a report.", show_default=False)
    ],
    steps: Annotated[int, typer.Option(min=3, help="Steps to record, the first ones among them.")] = 20,
    whole: Annotated[bool, typer.Option("--whole", help="Train to the end, and save as the script does.")] = False,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the report.")] = Path("ds_hf_profile"),
    processes: Annotated[
        int | None, typer.Option("--num-gpus", "-n", min=1, help="Processes; default one a GPU.")
    ] = None,
    launcher: Annotated[str, typer.Option(help="Words that start the script in place of torchrun.")] = "",
    apply: Annotated[
        bool, typer.Option("--apply", help="Write the suggested changes into your file; it stays as NAME.before.")
    ] = False,
    budget: Annotated[str, typer.Option(help="Time limit for the script: 90s, 10m, 1.5h.")] = "30m",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Record where the time of each step goes, on every rank, and say what limits it and what would help."""
    from ds_hf.autotune.options import seconds_of
    from ds_hf.profile.command import apply_to, record
    from ds_hf.profile.report import PAGE, closing_words, write_report

    console = Console(stderr=True, highlight=False)
    folder = output
    try:
        if len(words) == 1 and Path(words[0]).is_dir():
            folder = Path(words[0])
        else:
            limit = seconds_of(budget)
            _record(
                console,
                record,
                words,
                folder,
                steps=None if whole else steps,
                processes=processes,
                launcher=shlex.split(launcher),
                budget=limit,
            )
        verdict = write_report(folder)
    except ConfigError as error:
        complain(error)
        raise typer.Exit(2) from None
    except (DsHfError, OSError) as error:
        complain(error)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(_as_json(verdict), indent=1))
        console.print(f"report: {folder / PAGE}", soft_wrap=True)
    else:
        typer.echo("\n".join(printable(line) for line in closing_words(verdict)))
    if apply:
        try:
            target = apply_to(folder, verdict)
        except (DsHfError, OSError) as error:
            complain(error)
            raise typer.Exit(1) from None
        told = ", ".join(f"{key} {value}" for key, value in verdict.changes.items())
        console.print(printable(f"wrote {target}: {told}"), soft_wrap=True)


def _record(console: Console, record: Any, words: list[str], folder: Path, **options: Any) -> None:
    """With a line that stays in place on a terminal, and one a step elsewhere."""
    try:
        if console.is_terminal:
            with console.status("starting the script") as status:
                record(words, folder, show=lambda line: status.update(_fitting(printable(line), console)), **options)
        else:
            record(words, folder, show=lambda line: console.print(printable(line), soft_wrap=True), **options)
    except KeyboardInterrupt:
        complain("interrupted; the report is of the steps until then")


def _fitting(line: str, console: Console) -> Text:
    """``line`` cut to the width that is left beside the spinner: a second line would leave traces."""
    text = Text(line)
    text.truncate(max(console.width - 3, 1), overflow="ellipsis")
    return text


def _as_json(verdict: Any) -> dict[str, Any]:
    a = verdict.analysis
    return {
        "steps": a.steps,
        "seconds": a.seconds,
        "kinds": a.kinds,
        "samples_a_second": a.samples_a_second if a.steps else None,
        "tokens_a_second": a.tokens_a_second if a.steps else None,
        "mfu": a.mfu if a.steps else None,
        "summary": verdict.summary,
        "findings": [
            {
                "kind": f.kind, "share": f.share, "seconds": f.seconds, "text": f.text, "advice": f.advice,
                "changes": dict(f.changes), "option": f.option, "gain": f.gain, "rank": f.rank, "place": f.place,
            }
            for f in verdict.findings
        ],
        "config": verdict.config,
    }  # fmt: skip
