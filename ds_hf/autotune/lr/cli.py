"""``ds-hf lr-find [options] train.py <its arguments> --deepspeed ds_config.json``.

Options come before the script; everything from the script on is passed on untouched. Exit codes: 0 found, 1 the search
failed, 2 wrong usage, 130 after Ctrl-C.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer
from rich.console import Console

from ds_hf.autotune.lr.find import FindOptions, find, total_steps_in
from ds_hf.autotune.lr.report import closing_line, report
from ds_hf.autotune.lr.summary import event_line, summary
from ds_hf.autotune.options import seconds_of
from ds_hf.errors import ConfigError, DsHfError
from ds_hf.log import complain
from ds_hf.lr import LrOptions, LrResult
from ds_hf.regular_files import replace_file

__all__ = ["REST", "lr_find_command"]

REST = {"allow_interspersed_args": False, "ignore_unknown_options": False}  # what follows the script is the script's

_DEFAULTS = LrOptions()
LINES_S = 10.0  # between lines off a terminal, at most, while something happens


def lr_find_command(
    command: Annotated[list[str], typer.Argument(help="The script and its arguments.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the result.")] = Path("ds_hf_lr"),
    processes: Annotated[
        int | None, typer.Option("--num-gpus", "-n", min=1, help="Processes; default one a GPU.")
    ] = None,
    min_lr: Annotated[float, typer.Option(help="Start of the sweep.")] = _DEFAULTS.min_lr,
    max_lr: Annotated[float, typer.Option(help="End of the sweep.")] = _DEFAULTS.max_lr,
    steps: Annotated[int, typer.Option(help="Number of updates in one sweep.")] = _DEFAULTS.num_steps,
    mode: Annotated[str, typer.Option(help="exp, or linear as DeepSpeed's LRRangeTest.")] = _DEFAULTS.mode,
    seeds: Annotated[
        int, typer.Option(help="Number of sweeps, each with the data in another order.")
    ] = _DEFAULTS.seeds,
    confirm_steps: Annotated[
        int, typer.Option(help="Number of updates in a confirming run; 0 for none.")
    ] = _DEFAULTS.confirm_steps,
    train_batches: Annotated[int, typer.Option(help="Number of batches to train on.")] = _DEFAULTS.train_batches,
    held_out_batches: Annotated[int, typer.Option(help="Number of batches held out.")] = _DEFAULTS.held_out_batches,
    total_steps: Annotated[int | None, typer.Option(help="Number of updates in the training to come.")] = None,
    budget: Annotated[
        str, typer.Option(help="Time for everything: 90s, 10m, 1.5h. At its end there is the best so far.")
    ] = "1h",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find a learning rate with your own script, model, data and optimizer."""
    try:
        search = LrOptions(
            min_lr=min_lr, max_lr=max_lr, num_steps=steps, mode=cast(Literal["exp", "linear"], mode), seeds=seeds,
            confirm_steps=confirm_steps, train_batches=train_batches, held_out_batches=held_out_batches,
            total_steps=total_steps_in(command) if total_steps is None else total_steps,
        )  # fmt: skip
        seconds = seconds_of(budget)
    except ConfigError as error:
        complain(error.faults[0].message)
        raise typer.Exit(2) from None
    except ValueError as error:
        complain(error)
        raise typer.Exit(2) from None
    console = Console(stderr=True, highlight=False)
    page = output / "lr_report.html"
    try:
        result = _find(command, FindOptions(search, output, processes, seconds), console)
        replace_file(page, report(result, command))
    except (DsHfError, OSError) as error:
        complain(error)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        complain(f"interrupted; what the script printed is in {output / 'log.txt'}")
        raise typer.Exit(130) from None
    typer.echo(json.dumps(result.to_dict(), indent=1) if as_json else f"{summary(result)}\n")
    typer.echo(closing_line(result, page), err=as_json)


def _find(command: list[str], options: FindOptions, console: Console) -> LrResult:
    if not console.is_terminal:
        return find(command, options, _plain(console))
    with console.status("starting the script") as status:
        return find(command, options, lambda event: status.update(event_line(event)))


def _plain(console: Console) -> Any:
    """Off a terminal: what ends, and a sign of life between."""
    said = time.monotonic()
    console.print("starting the script", soft_wrap=True)

    def show(event: dict[str, Any]) -> None:
        nonlocal said
        if event.get("step", event.get("of")) == event.get("of") or time.monotonic() - said > LINES_S:
            said = time.monotonic()
            console.print(event_line(event), soft_wrap=True)

    return show
