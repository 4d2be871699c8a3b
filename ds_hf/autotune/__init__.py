"""The autotuner: from a script and a JSON file to the fastest JSON file, with reasons.

``command`` reads the user's command line, ``space`` says what is free, ``cost`` predicts, ``trial`` launches, ``study``
searches, ``workers`` and ``lr`` go on with what it found, ``result`` and ``report`` write it, ``run`` is the whole.
Nothing trains in this process: it starts others, and the engines in them answer by files (``ds_hf.measure``). Only
``footprint`` runs a model here, without values (``ds_hf.memory``). How it works is in docs/design/tools.md.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_hf.autotune.options import Options
    from ds_hf.autotune.result import Result

__all__ = ["run_from_deepspeed", "tune", "tuned_config"]


def tune(
    what: str | Sequence[str] | Callable[..., object],
    config: str | Path | Mapping[str, Any] | None = None,
    *,
    options: Options | None = None,
    show: bool = False,
    **changes: Any,
) -> Result:
    """Find the fastest configuration for ``["train.py", ..., "--deepspeed", "ds_config.json"]``, or for a function.

    Args:
        what: a command line; or a function that trains, with the path of a configuration as its argument. One that
            takes ``**arguments`` too gets those of ``TrainingArguments`` that go with it. It is called in processes
            of its own.
        config: of a function: a file, a preset, or a dict; a command line names its own.
        show: print what happens, as the command does.
        changes: fields of ``Options`` by name, or by that of the command line; texts as there (``budget="10m"``).

    Raises:
        ConfigError: the function cannot be called in other processes, or the configuration or an option is wrong.
        TuneError: what is tuned fails by itself, or never trains; ``tail`` is the end of its output.
    """
    import shlex

    from rich.console import Console

    from ds_hf.autotune.options import Options
    from ds_hf.autotune.run import tune as run
    from ds_hf.errors import ConfigError

    asked = (options or Options()).changed(**changes)
    console = Console() if show else None
    if callable(what):
        from ds_hf.autotune.function import tune_function

        return tune_function(what, config, asked, console)
    if config is not None:
        raise ConfigError("a command line names its configuration itself: tune([..., '--deepspeed', 'ds_config.json'])")
    return run(shlex.split(what) if isinstance(what, str) else what, asked, console)


def run_from_deepspeed(mode: str, command: list[str]) -> int:
    """``deepspeed --autotuning tune|run train.py ...``: search, and with "run" train with the result.

    Args:
        mode: "tune" or "run".
        command: the script with its arguments.

    Returns:
        exit code: 0, 1 for a failed search, or that of the training.
    """
    from ds_hf.autotune.cli import run_command

    return run_command(mode, command)


def tuned_config(config: str, **changes: Any) -> str:
    """For use inside a training script: path of the tuned file for this script and its arguments.

    The first time it searches, by launching this script again; later it finds the result. Call it before anything uses
    the GPU; under torchrun the first process searches and the others wait. In the launches themselves it returns
    ``config``.

    Args:
        config: the user's file.
        changes: fields of ``ds_hf.autotune.options.Options``, e.g. ``budget=600``.
    """
    from ds_hf.measure.protocol import TRIAL_ENV

    if os.environ.get(TRIAL_ENV):
        named = [word for word in sys.argv if word.endswith("ds_config.json")]
        return named[-1] if named else config
    from ds_hf.autotune.inside import search_from_script

    return search_from_script(config, changes)
