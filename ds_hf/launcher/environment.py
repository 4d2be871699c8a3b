"""Which environment variables travel to the other hosts.

By prefix what DeepSpeed exports and what torch, NCCL and HuggingFace read, but no secrets; what ``--export GLOB`` asks
for; and the lines of ``.deepspeed_env`` in the home and then the current folder (the later wins). Values travel as they
are: no shell sees them, so ``$HOME`` in a file stays ``$HOME``. One pair of quotes around a value is taken off.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ds_hf.launcher.errors import LaunchError, mistake
from ds_hf.regular_files import TEXT_NBYTES, read_regular

__all__ = ["ENVIRONMENT_FILE", "EXPORT_PREFIXES", "exported", "parse_environment_file", "read_environment_files"]

ENVIRONMENT_FILE = ".deepspeed_env"
EXPORT_PREFIXES = (
    *("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL", "LD_LIBRARY", "PATH"),  # DeepSpeed's
    *("ACCELERATE_", "CUDA_DEVICE_", "CUDA_MODULE_", "DS_HF_", "FI_", "GLOO_", "HF_", "OMP_", "MKL_", "TOKENIZERS_"),
    *("TORCH", "TRANSFORMERS_", "PYTORCH_", "TRITON_"),
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|API_?KEY", re.IGNORECASE)
# Set anew for every process, or describing this machine's processes alone.
_NEVER = ("TORCHELASTIC_", "TORCH_ELASTIC_", "OMPI_", "PMI_", "PMIX_", "DS_HF_LAUNCH_")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def exported(env: Mapping[str, str], globs: Sequence[str] = ()) -> dict[str, str]:
    """The variables of ``env`` that travel; ``globs`` are further names (``WANDB_*``), secrets included when named.

    Raises:
        LaunchError: a glob that is an exact name and names nothing, or is empty.
    """
    chosen = {}
    for name, value in env.items():
        default = name.startswith(EXPORT_PREFIXES) and not _SECRET.search(name)
        asked = any(fnmatch.fnmatchcase(name, glob) for glob in globs)
        if (default or asked) and not name.startswith(_NEVER) and _NAME.fullmatch(name):
            chosen[name] = value
    for glob in globs:
        if not glob or (not re.search(r"[*?\[]", glob) and glob not in env):
            raise LaunchError(f"--export {glob}: there is no such variable\n  fix: set it, or correct the name")
    return chosen


def read_environment_files(folders: Sequence[str | Path] | None = None, name: str | None = None) -> dict[str, str]:
    """The variables of ``.deepspeed_env`` (or ``$DS_ENV_FILE``) in ``folders``: the home and the current one."""
    found: dict[str, str] = {}
    for folder in (Path.home(), Path.cwd()) if folders is None else folders:
        path = Path(folder, name or os.environ.get("DS_ENV_FILE", ENVIRONMENT_FILE))
        if not path.exists() or path.is_dir():
            continue
        try:
            text = read_regular(path, TEXT_NBYTES).decode("utf-8", errors="surrogateescape")
        except OSError as error:
            raise LaunchError(f"{path}: {error.strerror}\n  fix: correct DS_ENV_FILE, or remove the file") from None
        found.update(parse_environment_file(text, str(path)))
    return found


def parse_environment_file(text: str, source: str = ENVIRONMENT_FILE) -> dict[str, str]:
    """``NAME=value`` a line; blank lines and lines that start with ``#`` are passed over.

    Raises:
        LaunchError: names line, column and fix of the first mistake.
    """
    found = {}
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        name, equals, value = stripped.removeprefix("export ").partition("=")
        name, column = name.strip(), len(line) - len(line.lstrip()) + 1
        if not equals:
            raise mistake(
                source, number, column, line, "there is no '=' in this line", "write NAME=value, one per line"
            )
        if not _NAME.fullmatch(name):
            message = f"{name[:40]!r} is not a variable's name"
            raise mistake(source, number, column, line, message, "letters, digits and _ are allowed")
        if "\0" in value:
            raise mistake(source, number, line.index("\0") + 1, line, "a NUL character", "take it out")
        found[name] = _unquoted(value.strip())
    return found


def _unquoted(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
        return value[1:-1]
    return value
