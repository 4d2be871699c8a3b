"""A search started from within the training script: by its first process, before the others use anything."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from ds_hf.autotune.options import Options
from ds_hf.autotune.result import TUNED
from ds_hf.autotune.study import TuneError
from ds_hf.errors import DsHfError
from ds_hf.regular_files import read_object, replace_file

__all__ = ["search_from_script"]

LAUNCHED_BY = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK",
               "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
               "TORCHELASTIC_USE_AGENT_STORE")  # fmt: skip
FAILED = "failed.json"
REPORT = "report.html"  # is written last


def search_from_script(config: str, changes: dict[str, Any]) -> str:
    """Path of the tuned file; every process of the script calls it with the same arguments.

    Raises:
        TuneError: the search failed, on every process.
    """
    options = Options().changed(**changes)
    folder = options.results_dir
    tuned, failed, last = folder / TUNED, folder / FAILED, folder / REPORT
    if last.exists() and not options.overwrite:
        return str(tuned)
    if int(os.environ.get("RANK") or 0) == 0:
        failed.unlink(missing_ok=True)
        _search(config, options, failed)
    end = time.monotonic() + options.budget + options.trial_timeout
    while not last.exists():
        if failed.exists() or time.monotonic() > end:
            reason = _reason_in(failed) if failed.exists() else "it took too long"
            raise TuneError(f"the search for a faster configuration failed: {reason}")
        time.sleep(0.2)
    return str(tuned)


def _reason_in(failed: Path) -> str:
    try:
        return str(read_object(failed)["reason"])
    except (OSError, ValueError, KeyError):
        return f"see the output of the first process ({failed} is not what it writes)"


def _search(config: str, options: Options, failed: Path) -> None:
    """Search with what this process was started with, outside its process group."""
    from ds_hf.autotune.run import tune

    words = [sys.argv[0], *sys.argv[1:]]
    if not any(word.split("=", 1)[0] in ("--deepspeed", "--deepspeed_config") for word in words):
        raise TuneError("tuned_config() needs the configuration on the script's command line: add --deepspeed FILE")
    kept = {name: os.environ.pop(name) for name in LAUNCHED_BY if name in os.environ}
    try:
        processes = options.processes or (int(kept["LOCAL_WORLD_SIZE"]) if "LOCAL_WORLD_SIZE" in kept else None)
        tune(words, Options(**{**options.__dict__, "processes": processes}), Console(stderr=True))
    except DsHfError as error:
        failed.parent.mkdir(parents=True, exist_ok=True)
        replace_file(failed, json.dumps({"reason": str(error)}))
        raise
    finally:
        os.environ.update(kept)
