"""A script that is only measured writes nothing of its user's: it is told apart where it begins to save.

The functions that write models are wrapped for as long as the process lives, wherever the script found them; besides,
Python's audit events tell of files from before this run that are about to be emptied, replaced or removed. What happens
then is the measuring side's to say, as a rule ``leave``. Redirecting the files instead was considered: a script goes on
with what it has just written, so half of them would be read from the wrong place.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import psutil
import wrapt

from ds_hf.measure.protocol import TRIAL_ENV

__all__ = ["LR_ENV", "MEASURING", "PROFILE_ENV", "SaveGuard", "being_measured", "leave"]

LR_ENV = "DS_HF_LR_PROBE"
PROFILE_ENV = "DS_HF_PROFILE"
MEASURING = (LR_ENV, TRIAL_ENV, PROFILE_ENV)

WRITERS: Mapping[str, tuple[str, ...]] = {
    "torch": ("save",),
    "torch.serialization": ("save",),
    "torch.distributed.checkpoint": ("save", "async_save"),
    "safetensors.torch": ("save_file", "save_model", "serialize_file"),
    "safetensors.numpy": ("save_file", "serialize_file"),
    "huggingface_hub.hf_api": ("HfApi.create_repo", "HfApi.create_commit", "HfApi.upload_folder", "HfApi.upload_file"),
    "transformers.trainer": ("Trainer._finalize_training", "Trainer.save_model", "Trainer.push_to_hub"),
    "transformers.modeling_utils": ("PreTrainedModel.save_pretrained",),
    "transformers.configuration_utils": ("PreTrainedConfig.save_pretrained",),
    "transformers.generation.configuration_utils": ("GenerationConfig.save_pretrained",),
    "transformers.tokenization_utils_base": ("PreTrainedTokenizerBase.save_pretrained",),
    "transformers.processing_utils": ("ProcessorMixin.save_pretrained",),
    "transformers.utils.hub": ("PushToHubMixin.push_to_hub",),
    "accelerate.accelerator": ("Accelerator.save", "Accelerator.save_model", "Accelerator.save_state"),
    "peft.peft_model": ("PeftModel.save_pretrained",),
    "ds_hf.deepspeed_api.engine": ("Engine.save_checkpoint", "Engine.save_16bit_model", "Engine.save_fp16_model"),
}
TRAINING_IS_OVER = "Trainer._finalize_training"
CACHES = ("HF_HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
CACHE_PARTS = (".cache", ".triton", "__pycache__")
# Among the arguments of an event: each path that changes, and the descriptor of the folder it may be relative to.
CHANGES: Mapping[str, tuple[tuple[int, int | None], ...]] = {
    "open": ((0, None),), "os.truncate": ((0, None),), "os.remove": ((0, 1),), "shutil.rmtree": ((0, 1),),
    "os.rename": ((0, 2), (1, 3)),
}  # fmt: skip


def being_measured() -> bool:
    """Whether this process runs for ``ds-hf lr-find``, ``ds-hf autotune`` or ``ds-hf profile``."""
    return any(map(os.environ.get, MEASURING))


def leave(code: int) -> NoReturn:
    """End the process here: SystemExit would be caught by scripts, and run what saves or uploads at the end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class SaveGuard:
    """Calls ``stop`` with words for what the script is about to write; if it returns, that is left out.

    Args:
        stop: "model.save_pretrained()", or the path of a file. Nothing can be left out of what ``watch_files`` sees.

    Attributes:
        active: set to False when the script is over and the process goes on: what is written then is not the script's.
    """

    def __init__(self, stop: Callable[[str], None]) -> None:
        self.stop = stop
        self.active = True
        self._pid = os.getpid()  # workers of a DataLoader inherit the hooks, and do no harm
        self._started = psutil.Process().create_time()
        self._caches = [Path(os.environ[name]).absolute() for name in CACHES if os.environ.get(name)]
        for module, names in WRITERS.items():
            wrapt.register_post_import_hook(self._wrapper(names), module)

    def watch_files(self) -> None:
        """From now on also stop before a file from before this run is emptied, replaced or removed."""
        sys.addaudithook(self._audit)

    def _wrapper(self, names: tuple[str, ...]) -> Callable[[ModuleType], None]:
        def wrap(module: ModuleType) -> None:
            for name in names:
                if _has(module, name):
                    wrapt.wrap_function_wrapper(module, name, self._call(name))

        return wrap

    def _call(self, name: str) -> Callable[..., Any]:
        shown = "the end of the training" if name == TRAINING_IS_OVER else f"{name}()"

        def call(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self.active or os.getpid() != self._pid or (name == "save" and not _to_a_file(args, kwargs)):
                return wrapped(*args, **kwargs)
            self.stop(shown)
            return None

        return call

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.active or event not in CHANGES or os.getpid() != self._pid:
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & os.O_TRUNC):
            return
        for place, folder in CHANGES[event]:
            path = arguments[place]
            relative = folder is not None and len(arguments) > folder and arguments[folder] not in (None, -1)
            if not isinstance(path, str | bytes | os.PathLike) or relative:
                continue
            name = os.fsdecode(path)
            # ``tempfile.NamedTemporaryFile`` opens its folder by name, and a new file in it by its own opener.
            if not (event == "open" and os.path.isdir(name)) and self._is_from_before(name):
                self.stop(name)

    def _is_from_before(self, path: str) -> bool:
        """Whether at ``path`` there is, or are, files with content that this run did not write, outside caches."""
        whole = Path(path).absolute()
        if any(part in CACHE_PARTS or part.startswith("torchinductor_") for part in whole.parts):
            return False
        if any(whole.is_relative_to(cache) for cache in self._caches):
            return False
        try:
            if not whole.is_dir():
                return self._is_old(whole)
            return any(self._is_old(Path(root, name)) for root, _, names in os.walk(whole) for name in names)
        except (OSError, ValueError):
            return False

    def _is_old(self, path: Path) -> bool:
        found = path.lstat()
        return stat.S_ISREG(found.st_mode) and found.st_size > 0 and found.st_mtime < self._started


def _has(module: ModuleType, name: str) -> bool:
    owner, _, method = name.rpartition(".")
    return hasattr(getattr(module, owner, None) if owner else module, method)


def _to_a_file(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """``torch.save`` also serves to copy values through memory. DCP names its place otherwise, or not at all."""
    target = args[1] if len(args) > 1 else kwargs.get("f")
    return target is None or isinstance(target, str | os.PathLike) or hasattr(target, "name")
