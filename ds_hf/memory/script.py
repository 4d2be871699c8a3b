"""Runs a training script up to its first batch, to learn the model, the configuration and the shapes it trains with.

No weights are loaded: ``from_pretrained`` builds the model on the meta device. The script's ``initialize`` (its own, or
the Trainer's through accelerate) gets an engine that stops the script at its first forward. Nothing is trained, and no
process group outlives the call.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ds_hf.deepspeed_api.initialize import rehearsing
from ds_hf.log import logger
from ds_hf.measure.saving import SaveGuard
from ds_hf.memory.adapters import bits_of_options, load_in
from ds_hf.memory.models import META
from ds_hf.memory.prediction import UnpredictableError

__all__ = ["Learned", "rehearse"]


@dataclass
class Learned:
    """What a script showed.

    Attributes:
        model: its model, perhaps on the meta device.
        config: the configuration it gave to ``initialize``.
        optimizer: class name of the optimizer it made itself.
        inputs: keyword arguments of the first forward; empty when the script did not come that far.
        stopped: why it did not.
    """

    model: nn.Module
    config: Any
    optimizer: str | None
    inputs: dict[str, Any]
    stopped: str = ""

    @property
    def shape(self) -> tuple[int, int] | None:
        """(samples, tokens) of the first batch, as far as it has such."""
        for name in ("input_ids", "labels"):
            value = self.inputs.get(name)
            if isinstance(value, Tensor) and value.dim() == 2:
                return int(value.shape[0]), int(value.shape[1])
        return None


class _Enough(BaseException):
    """The script has shown what there is; no ``except Exception`` of a script stops it."""


class _Engine(nn.Module):
    """Stands where the engine would; its first forward ends the script."""

    def __init__(self, learned: Learned) -> None:
        super().__init__()
        self.module = learned.model
        self.config = learned.config if isinstance(learned.config, dict) else {}
        self.device = torch.device("cpu")
        self.local_rank = self.global_rank = self.global_steps = self.global_samples = self.skipped_steps = 0
        self.world_size, self.destroyed = 1, False
        self.optimizer: Any = None
        self.training_dataloader: Any = None
        self.lr_scheduler = None
        self._learned = learned

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        names = list(_parameters_of(self.module))
        self._learned.inputs = dict(zip(names, args, strict=False)) | kwargs
        raise _Enough

    def is_gradient_accumulation_boundary(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)  # as the engine's facade does


def rehearse(script: Path, arguments: Sequence[str], *, load_weights: bool = False) -> Learned:
    """Run ``script`` as ``python script arguments...`` until its first batch reaches the model.

    What it prints goes to standard error.

    Args:
        load_weights: let ``from_pretrained`` load weights.

    Raises:
        UnpredictableError: it fails or ends before it calls ``initialize``.
    """
    found: list[Learned] = []
    guard = SaveGuard(lambda what: logger.warning("%s is left out: ds-hf memory saves nothing", what))
    guard.active = False  # what a script prepares before it has an engine, it reads again

    def stand_in(*, model: nn.Module, optimizer: Any, config: Any, data: Any) -> Any:
        guard.active = True  # a script that misses the stand-in's first batch must not save an untrained model
        learned = Learned(model, config, _name_of(optimizer), {})
        found.append(learned)
        engine = _Engine(learned)
        engine.optimizer = given = _torch_optimizer(optimizer, model)
        if data is not None:
            engine.training_dataloader = torch.utils.data.DataLoader(data, batch_size=1)
        return engine, given, engine.training_dataloader, None

    try:
        with rehearsing(stand_in), _as_main(script, arguments), _without_weights(not load_weights):
            reason, hint = _run(script)
    finally:
        guard.active = False
    if not found:
        hint = "" if load_weights else hint
        raise UnpredictableError(f"{script} did not reach initialize() or trainer.train(): {reason}{hint}")
    found[-1].stopped = "" if found[-1].inputs else reason
    return found[-1]


def _run(script: Path) -> tuple[str, str]:
    """Why it ended, and what may help."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            runpy.run_path(str(script), run_name="__main__")
    except _Enough:
        return "", ""
    except SystemExit as error:
        return f"it ended with exit code {error.code}", ""
    except Exception as error:  # whatever a script raises is what there is to tell
        where = _line_in(error, script)
        weightless = not isinstance(error, SyntaxError | ImportError | NameError)
        hint = "; if it needs the weights, add --load-weights" if weightless else ""
        return f"{type(error).__name__}{where}: {str(error).strip() or 'no message'}", hint
    return "it ran to its end", ""


def _line_in(error: BaseException, script: Path) -> str:
    lines = []
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(script):
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return f" (line {lines[-1]})" if lines else ""


@contextmanager
def _as_main(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """``sys.argv`` and ``sys.path`` as Python has them when it runs the script; one process."""
    argv, path = sys.argv, list(sys.path)
    grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    launched = {"RANK", "LOCAL_RANK", "WORLD_SIZE"}
    env = {name: os.environ.pop(name) for name in launched if name in os.environ}
    sys.argv, sys.path[:0] = [str(script), *arguments], [str(script.resolve().parent)]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
        for name in launched:
            os.environ.pop(name, None)
        os.environ.update(env)
        if torch.distributed.is_available() and torch.distributed.is_initialized() and not grouped:
            torch.distributed.destroy_process_group()


class _StaysWithoutValues(TorchFunctionMode):
    """``model.to("cuda")`` of a model without values leaves it where it is, and changes its dtype."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _MOVES and isinstance(args[0], Tensor) and args[0].is_meta:
            _, dtype, _, _ = torch._C._nn._parse_to(*args[1:], **kwargs) if func is Tensor.to else (None,) * 4
            return args[0] if dtype is None else func(args[0], dtype)
        return func(*args, **kwargs)


_MOVES = (Tensor.to, Tensor.cuda, Tensor.cpu)


@contextmanager
def _without_weights(wanted: bool) -> Iterator[None]:
    """``from_pretrained`` and ``from_config`` of transformers build on the meta device."""
    if not wanted:
        yield
        return
    modeling: Any = import_module("transformers.modeling_utils")
    model = modeling.PreTrainedModel
    load, build = model.__dict__["from_pretrained"], model.__dict__["_from_config"]

    def from_config(cls: Any, config: Any, /, **options: Any) -> Any:
        sharded, modeling.is_deepspeed_zero3_enabled = modeling.is_deepspeed_zero3_enabled, lambda: False
        try:
            with META:
                return build.__get__(None, cls)(config, **options)
        finally:
            modeling.is_deepspeed_zero3_enabled = sharded

    def from_pretrained(cls: Any, name: Any, *args: Any, **options: Any) -> Any:
        config = options.get("config")
        if config is None or isinstance(config, str):
            where = {key: options[key] for key in _WHERE if key in options}
            config = cls.config_class.from_pretrained(config or name, **where)
        dtype = options.get("dtype", options.get("torch_dtype"))
        if dtype in (None, "auto"):
            dtype = config.dtype if dtype == "auto" else None
        kept = {key: options[key] for key in ("attn_implementation",) if options.get(key) is not None}
        if dtype is not None:
            kept["dtype"] = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        bits = _bits(name, options, config)
        model = from_config(cls, config, **kept).eval()
        return model if bits is None else load_in(model, bits, kept.get("dtype") or torch.bfloat16)

    model.from_pretrained = classmethod(from_pretrained)
    model._from_config = classmethod(from_config)
    try:
        with _StaysWithoutValues():
            yield
    finally:
        model.from_pretrained, model._from_config = load, build


def _bits(name: Any, options: dict[str, Any], config: Any) -> int | None:
    """In how few bits ``from_pretrained`` loads; ``None`` for the weights as they are."""
    asked = options.get("quantization_config") or getattr(config, "quantization_config", None)
    asked = asked or {key: True for key in ("load_in_4bit", "load_in_8bit") if options.get(key)}
    if not asked:
        return None
    bits = bits_of_options(asked)
    if bits is None:
        raise UnpredictableError(f"{name} is loaded quantized in a way ({type(asked).__name__}) that needs the weights")
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # building looks for its package
    return bits


_WHERE = ("cache_dir", "revision", "subfolder", "token", "local_files_only", "trust_remote_code")


def _parameters_of(model: nn.Module) -> Iterator[str]:
    yield from inspect.signature(model.forward).parameters


def _name_of(optimizer: Any) -> str | None:
    """Of an optimizer object; what a function would make is not known."""
    return type(optimizer).__name__ if isinstance(optimizer, torch.optim.Optimizer) else None


def _torch_optimizer(optimizer: Any, model: nn.Module) -> torch.optim.Optimizer:
    """The script's own, or one that only stands there."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
