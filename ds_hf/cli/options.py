"""What the commands share: one name for options of one meaning, and ``--version``.

Former names still work and are not shown. Dashes and underscores are the same, except where options of a script may
stand among those of the command.
"""

from __future__ import annotations

import errno
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

import ds_hf
from ds_hf.log import complain
from ds_hf.printable import printable_json

__all__ = ["FORMER", "Commands", "one_name", "print_json", "version_option", "wrong_usage"]

FORMER = {
    "nproc": "num-gpus",
    "nproc-per-node": "num-gpus",
    "results-dir": "output",
    "overwrite": "force",
    "no-overwrite": "no-force",
    "memory-limit": "device-memory",
    "timeout": "budget",
}


# Packages that come with an extra of ds-hf -> the extra.
EXTRAS = {"datasets": "examples", "optuna": "autotune", "peft": "adapters", "plotly": "autotune"}


class Commands(TyperGroup):
    """Commands in which a path that the system refuses is a sentence: no permission, a name too long, a full disk; and
    so is a package that came with an extra, and is not there."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            if error.name not in EXTRAS:
                raise
            complain(f"this needs the package {error.name}: pip install 'ds-hf[{EXTRAS[error.name]}]'")
            raise typer.Exit(1) from None
        except OSError as error:
            if error.filename is None and error.errno == errno.ENOSPC:
                complain(f"what the command printed could not be written: {error.strerror}")
                raise typer.Exit(1) from None
            if error.filename is None or error.errno == errno.EPIPE:  # who reads the output is gone
                raise
            complain(f"{error.filename}: {error.strerror}")
            raise typer.Exit(2) from None


def one_name(token: str) -> str:
    """The name that an option has now; click asks for that of every word that it looks up."""
    dashed = token.replace("_", "-")
    return FORMER.get(dashed, dashed)


def version_option(**more: Any) -> Any:
    """The option ``--version``: prints what runs, and ends."""
    return typer.Option("--version", help="Print versions and exit.", is_eager=True, callback=_print_version, **more)


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    found = []
    for name in ("torch", "transformers", "accelerate"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    typer.echo(f"ds_hf {ds_hf.__version__} ({', '.join(found)})")
    raise typer.Exit


def print_json(value: Any) -> None:
    """On standard output, as any terminal shows it."""
    print(printable_json(value))


def wrong_usage(message: str) -> NoReturn:
    """End a command whose arguments do not fit together."""
    complain(message)
    raise typer.Exit(2)
