"""What ``from_pretrained`` needs besides weights: configuration, tokenizer or processor, and a model's own code.

Invariant: nothing is run, and from a folder that was found beside a checkpoint, which may be a stranger's, only files
that lie there themselves are taken: a link could lead to any file of the user's, and the copy is made to be published.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from ds_hf.engine.checkpoint.files import replace_text
from ds_hf.errors import CheckpointError
from ds_hf.regular_files import TEXT_NBYTES, read_regular

__all__ = ["copy_model_files", "find_model_folder", "require_config", "set_dtype"]

_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "bpe.codes",
    "spiece.model", "sentencepiece.model", "sentencepiece.bpe.model", "source.spm", "target.spm", "tekken.json",
    "normalizer.json", "chat_template.jinja", "chat_template.json", "preprocessor_config.json",
    "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
_PATTERNS = ("additional_chat_templates/*.jinja",)
_CONFIG_NBYTES = 2**24
_BESIDE = "zero_to_fp32.py"  # which save_checkpoint puts there


def find_model_folder(checkpoint: Path) -> Path | None:
    """The folder with the configuration of the model that a checkpoint is of, where transformers writes one.

    That is the checkpoint's own folder (weights), the one around it (``checkpoint-100/global_step100``), or the
    Trainer's ``output_dir``; ``None`` where none of them has a model's ``config.json``.
    """
    place = checkpoint.absolute()
    places = [place, place.parent]
    if re.fullmatch(r"checkpoint-\d+", place.parent.name):
        places.append(place.parent.parent)
    return next((folder for folder in places if _is_own(folder / "config.json") and _is_model(folder)), None)


def _is_model(folder: Path) -> bool:
    try:
        return "model_type" in _read(folder / "config.json")
    except CheckpointError:
        return False


def _is_own(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def require_config(model: Path) -> None:
    """Raise ``CheckpointError`` if ``model`` is not the folder of a model."""
    if not (model / "config.json").is_file():
        raise CheckpointError(f"{model} has no config.json: give the folder of the model that was trained")


def copy_model_files(model: Path, folder: Path, dtype: str, *, links: bool = True) -> list[str]:
    """Copy what a model's folder has besides weights; ``config.json`` says the dtype that was written.

    A model's own code (``auto_map``) comes along: ``from_pretrained`` runs it with ``trust_remote_code=True`` alone.

    Args:
        links: also take what links lead to, as in the cache of the Hub.

    Returns:
        names of the files.

    Raises:
        CheckpointError: ``model`` is not a model's folder, or its ``config.json`` cannot be read.
    """
    require_config(model)
    names = [name for name in _FILES if (model / name).is_file()]
    names += [str(path.relative_to(model)) for pattern in _PATTERNS for path in sorted(model.glob(pattern))]
    if any(_has_code(model / name) for name in ("config.json", "tokenizer_config.json") if name in names):
        names += sorted(path.name for path in model.glob("*.py") if path.is_file() and path.name != _BESIDE)
    names = [name for name in names if links or _is_own(model / name)]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (model / name).resolve() != (folder / name).resolve():
            shutil.copyfile(model / name, folder / name)
    set_dtype(folder / "config.json", dtype)
    return names


def _has_code(path: Path) -> bool:
    """Whether it names classes in files of its own folder (``REPOSITORY--module.Class`` lie elsewhere)."""
    found = _read(path).get("auto_map")
    return bool(found) and "--" not in json.dumps(found)


def _read(path: Path) -> dict[str, Any]:
    try:
        nbytes = path.stat().st_size
        if nbytes > _CONFIG_NBYTES:
            raise ValueError(f"it has {nbytes} bytes")
        content = json.loads(read_regular(path, TEXT_NBYTES))
        if not isinstance(content, dict):
            raise ValueError("it should be an object in braces")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return content


def set_dtype(path: Path, dtype: str) -> None:
    """Let a ``config.json`` say the dtype of the weights."""
    content = _read(path)
    key = "torch_dtype" if "torch_dtype" in content and "dtype" not in content else "dtype"
    replace_text(path, json.dumps({**content, key: dtype}, indent=2, sort_keys=True) + "\n")
