"""What ``from_pretrained`` needs besides weights: configuration, tokenizer or processor, and a model's own code.

Invariant: nothing is run, and from a folder that was found beside a checkpoint, which may be a stranger's, only files
that lie there themselves are taken: a link could lead to any file of the user's, and the copy is made to be published.
"""

from __future__ import annotations

import filecmp
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds_hf.checkpoint.aside import CONFIG, POINTER, is_folder
from ds_hf.checkpoint.files import replace_text, write_text
from ds_hf.checkpoint.holds import sync
from ds_hf.errors import CheckpointError
from ds_hf.regular_files import check_regular, read_object

__all__ = ["Switched", "copy_model_files", "edit_config", "find_model_folder", "require_config", "set_dtype"]

_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "bpe.codes",
    "spiece.model", "sentencepiece.model", "sentencepiece.bpe.model", "source.spm", "target.spm", "tekken.json",
    "normalizer.json", "chat_template.jinja", "chat_template.json", "preprocessor_config.json",
    "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
_VOCABULARIES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.model",
    "sentencepiece.bpe.model", "source.spm", "target.spm", "tekken.json",
)  # fmt: skip
_TOKENIZER = tuple(name for name in _FILES if name not in ("config.json", "generation_config.json"))
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
        folder: of the writer alone, see ``Beside``.
        links: also take what links lead to, as in the cache of the Hub.

    Returns:
        names of the files.

    Raises:
        CheckpointError: ``model`` is not a model's folder, or a file of it cannot be read.
    """
    require_config(model)
    names = [name for name in _FILES if (model / name).is_file()]
    names += [str(path.relative_to(model)) for pattern in _PATTERNS for path in sorted(model.glob(pattern))]
    if any(_has_code(model / name) for name in ("config.json", "tokenizer_config.json") if name in names):
        names += sorted(path.name for path in model.glob("*.py") if path.is_file() and path.name != _BESIDE)
    names = [name for name in names if links or _is_own(model / name)]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            check_regular(model / name)
            shutil.copyfile(model / name, folder / name)
        except OSError as error:
            raise CheckpointError(f"{model / name} cannot be copied: {error.strerror or error}") from error
    set_dtype(folder / "config.json", dtype)
    return names


class Switched:
    """The files that ``fill`` puts into a hidden folder get their names in ``folder`` together with weights.

    What is renamed one by one a reader may find half done: a process can be killed between any two. So by one rename
    the new configuration comes and leads to the new weights where they lie aside, until these have their names. A
    tokenizer cannot be led so: where it changes, the former one goes before and the new one comes after, and a reader
    in between finds none and says so.

    Invariant: a configuration or a tokenizer that is as it was is not touched.
    """

    def __init__(self, aside: Path, folder: Path, fill: Callable[[Path], object]) -> None:
        self.folder, self.staged = folder, aside / "beside"
        self.staged.mkdir()
        fill(self.staged)
        found = [str(path.relative_to(self.staged)) for path in self.staged.rglob("*") if path.is_file()]
        for name in found:
            place = folder / name
            if is_folder(place) or (place.parent != folder and place.parent.is_symlink()):
                raise CheckpointError(
                    f"{place} is a folder, or in a link to one: move it away, or write somewhere else"
                )
            sync(self.staged / name)
        changed = {name for name in found if not self._is_same(name)}
        tokenizer = {name for name in found if name in _TOKENIZER or Path(name).parent != Path()}
        self.stale = [*_TOKENIZER, *tokenizer] if changed & tokenizer else []
        self.changed = sorted(changed | (tokenizer if self.stale else set()), key=_importance)

    def begin(self, entry: str) -> None:
        """Take the former tokenizer away and put the configuration there that leads to ``entry``."""
        for name in sorted(self.stale, key=_importance, reverse=True):
            if not is_folder(self.folder / name):
                (self.folder / name).unlink(missing_ok=True)
        if CONFIG in self.changed:
            content = {**_read(self.staged / CONFIG), POINTER: entry}
            leading = self.staged / ".leading"  # no name in the folder itself, where a kill would leave it
            write_text(leading, json.dumps(content, indent=2, sort_keys=True) + "\n")
            os.replace(leading, self.folder / CONFIG)
            sync(self.folder)

    def end(self) -> None:
        """Give all their names."""
        for name in self.changed:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(self.staged / name, self.folder / name)
        sync(self.folder)

    def _is_same(self, name: str) -> bool:
        place = self.folder / name
        return _is_own(place) and filecmp.cmp(self.staged / name, place, shallow=False)


def _importance(name: str) -> tuple[int, str]:
    """The configuration first; a tokenizer's vocabulary, without which readers make none, last."""
    return 0 if name == CONFIG else 2 if name in _VOCABULARIES else 1, name


def _has_code(path: Path) -> bool:
    """Whether it names classes in files of its own folder (``REPOSITORY--module.Class`` lie elsewhere)."""
    found = _read(path).get("auto_map")
    return bool(found) and "--" not in json.dumps(found)


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_object(path, _CONFIG_NBYTES)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {getattr(error, 'strerror', '') or error}") from error


def set_dtype(path: Path, dtype: str) -> None:
    """Let a ``config.json`` say the dtype of the weights."""
    edit_config(path, {"dtype": dtype})


def edit_config(path: Path, changes: dict[str, Any]) -> None:
    """Let a ``config.json`` say ``changes``; the dtype under the name that it has there."""
    content = _read(path)
    content.pop(POINTER, None)  # to a file beside the configuration that was copied
    if "dtype" in changes and "torch_dtype" in content and "dtype" not in content:
        changes = {"torch_dtype" if key == "dtype" else key: value for key, value in changes.items()}
    replace_text(path, json.dumps({**content, **changes}, indent=2, sort_keys=True) + "\n")
