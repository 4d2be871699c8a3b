"""What the commands share: one name for options of one meaning, and ``--version``.

Former names still work and are not shown. Dashes and underscores are the same, except where options of a script may
stand among those of the command.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import typer

import ds_hf

__all__ = ["FORMER", "one_name", "version_option"]

FORMER = {
    "nproc": "num-gpus",
    "nproc-per-node": "num-gpus",
    "results-dir": "output",
    "overwrite": "force",
    "no-overwrite": "no-force",
    "memory-limit": "device-memory",
    "timeout": "budget",
}


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
