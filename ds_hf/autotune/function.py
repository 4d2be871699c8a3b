"""A function in the place of a script, as one in a notebook: ``tune(train, "ds_config.json")``.

It is written to a file with what it refers to, by cloudpickle, and launched as a script of its own: this module, run
with ``python -m``, loads it and calls it with the path of the configuration. So launches are processes like any others:
they share nothing with the process that searches, and end with it. A function that takes ``**arguments`` gets the
Trainer's options with them, as a script would on its command line.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_hf.errors import ConfigError
from ds_hf.measure.protocol import TRIAL_ENV
from ds_hf.regular_files import replace_file

if TYPE_CHECKING:
    from rich.console import Console

    from ds_hf.autotune.options import Options
    from ds_hf.autotune.result import Result

__all__ = ["main", "tune_function", "words_of"]

FOLDER = "function"  # behind the name of the folder of results
SOONEST = "define it with def, of one parameter: the path of a configuration"


def tune_function(
    function: Callable[..., object],
    config: str | Path | Mapping[str, Any] | None,
    options: Options,
    console: Console | None = None,
) -> Result:
    """``run.tune`` of a function; ``config`` as in ``words_of``.

    Raises:
        ConfigError: as ``words_of`` and ``run.tune``.
        TuneError: the function fails by itself, or never trains.
    """
    from ds_hf.autotune.run import tune  # a launch, which is this module too, needs none of it
    from ds_hf.autotune.study import TuneError

    words = words_of(function, config, options.results_dir)
    try:
        return tune(words, options, console)
    except TuneError as error:
        log = options.results_dir / "trials" / "0000-own" / "output.log"
        raise TuneError(f"{str(error).replace('script', 'function')}; its output is in {log}", error.tail) from None


def words_of(
    function: Callable[..., object], config: str | Path | Mapping[str, Any] | None, results: Path
) -> list[str]:
    """The command that calls ``function`` with ``config``, for which files are written beside the folder ``results``.

    Args:
        function: trains; takes the path of a configuration, and perhaps ``**arguments``.
        config: a file, a preset, or what would be in a file.

    Raises:
        ConfigError: the function cannot be called so in another process.
    """
    takes_arguments = _check(function, config)
    folder = results.resolve().with_name(f"{results.resolve().name}_{FOLDER}")
    folder.mkdir(parents=True, exist_ok=True)
    parcel = _packed(function)
    file = folder / f"{blake2b(parcel, digest_size=6).hexdigest()}.pkl"
    file.unlink(missing_ok=True)
    with file.open("xb") as opened:  # never through a link
        opened.write(parcel)
    if isinstance(config, Mapping):
        replace_file(folder / "ds_config.json", json.dumps(dict(config), indent=2) + "\n")
        config = folder / "ds_config.json"
    flag = "--deepspeed" if takes_arguments else "--deepspeed_config"
    return ["-m", __name__, str(file), flag, str(config)]


def _check(function: Callable[..., object], config: Any) -> bool:
    """Whether it takes more arguments than the configuration.

    Raises:
        ConfigError: it is not a function that can be launched.
    """
    name = getattr(function, "__name__", type(function).__name__)
    if os.environ.get(TRIAL_ENV):
        raise ConfigError(f"tune({name}) is called in a launch of a search: call it outside of what is tuned")
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise ConfigError(f"tune({name}) starts processes itself: call it in one process, without torchrun")
    if config is None:
        raise ConfigError(f"tune({name}, ...) needs a configuration: a path, a preset, or a dict")
    if not inspect.isfunction(function) or name == "<lambda>":
        raise ConfigError(f"tune() takes a function that trains, not {_kind(function)}: {SOONEST}")
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        raise ConfigError(f"{name} would not run when it is called (it yields or awaits): {SOONEST}")
    try:
        inspect.signature(function).bind("ds_config.json")
    except TypeError as error:
        raise ConfigError(f"{name} cannot be called with a configuration alone ({error}): {SOONEST}") from None
    return any(each.kind is each.VAR_KEYWORD for each in inspect.signature(function).parameters.values())


def _kind(value: object) -> str:
    return "a lambda" if getattr(value, "__name__", "") == "<lambda>" else f"a {type(value).__name__}"


def _packed(function: Callable[..., Any]) -> bytes:
    """
    Raises:
        ConfigError: something that the function refers to cannot be sent; named where it is known.
    """
    pickler = _pickler()
    for name, value in _referred(function):
        if where := _on_device(value):
            raise ConfigError(
                f"{function.__name__} uses {name}, which is on {where} in this process: make it inside the function, "
                "for each launch is a process of its own"
            )
    _check_device(function.__name__)
    try:
        path = list(dict.fromkeys(sys.path))  # a cell that appends to it again changes nothing
        return pickle.dumps((path, pickler.dumps(function)))
    except Exception as error:  # whatever an object raises that cannot be pickled
        culprit = next((name for name, value in _referred(function) if not _can_be_sent(value)), "something in it")
        raise ConfigError(
            f"{function.__name__} cannot be sent to another process because of {culprit} ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''}): make it inside the function"
        ) from None


def _pickler() -> Any:
    """Pickles functions by what they do, and not by where they are found: a notebook cannot be imported."""
    try:
        import cloudpickle
    except ImportError:
        raise ConfigError("tune() of a function needs cloudpickle: pip install cloudpickle") from None
    return cloudpickle


def _can_be_sent(value: Any) -> bool:
    try:
        _pickler().dumps(value)
    except Exception:
        return False
    return True


def _referred(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Names and values from outside of it, one function deep."""
    found = inspect.getclosurevars(function)
    yield from found.nonlocals.items()
    yield from found.globals.items()


def _on_device(value: Any) -> str:
    """The accelerator that it lies on; empty where it does not."""
    import torch

    tensors = [value] if isinstance(value, torch.Tensor) else []
    if isinstance(value, torch.nn.Module):
        tensors = [*value.parameters(), *value.buffers()]
    return next((str(each.device) for each in tensors if each.device.type not in ("cpu", "meta")), "")


def _check_device(name: str) -> None:
    """
    Raises:
        ConfigError: this process holds memory of the devices that launches are to have.
    """
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        held = sum(torch.cuda.memory_reserved(index) for index in range(torch.cuda.device_count()))
        if held:
            raise ConfigError(
                f"this process holds {held / 2**30:.2f} GiB of GPU memory, which the launches of {name} would lack: "
                "delete what is there and call torch.cuda.empty_cache(), or restart the kernel"
            )


def main(words: Sequence[str]) -> None:
    """Call the function in the first of ``words`` with the configuration and the options that follow."""
    file, _, config, *others = words
    path, function = pickle.loads(Path(file).read_bytes())  # which the search has written
    sys.path[:] = dict.fromkeys([*path, *sys.path])
    names = [each.removeprefix("--") for each in others[::2]]
    pickle.loads(function)(config, **dict(zip(names, map(_value, others[1::2]), strict=True)))


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


if __name__ == "__main__":
    main(sys.argv[1:])
