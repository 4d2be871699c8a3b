"""Parameters at rest: their values are in shards, and what they show has no elements.

While a sharded buffer is released, its parameters are of a class of their own: a copy of one would be empty, and what
is written to it goes nowhere. So a copy is an error, and a write or a read of values is told. When the buffer is
gathered they are ordinary parameters. Asking for anything but values (``requires_grad``, ``grad``, hooks) takes no
longer than of those.

Parameters of a class that a library made keep it; they show their emptiness only by their shape.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from enum import IntEnum
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ds_hf.config.types.zero import ZeroSection
from ds_hf.errors import DsHfError
from ds_hf.log import warn_once

__all__ = [
    "FORM",
    "HARMLESS",
    "LOST_WRITES",
    "AtRest",
    "Noticed",
    "ParamStatus",
    "Released",
    "is_ordinary",
    "name_of",
    "tell_lost_write",
    "tensors_of",
    "use",
    "wake",
]

_GET_DATA, _SET_DATA = (getattr(vars(torch._C.TensorBase)["data"], name) for name in ("__get__", "__set__"))
_FORM = ("shape", "ndim", "nbytes", "itemsize")
_FLAGS = (
    *("device", "dtype", "layout", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_leaf", "grad_fn"),
    *("grad", "requires_grad", "retains_grad", "_backward_hooks", "_post_accumulate_grad_hooks", "_version"),
    *("_base", "_is_param", "name", "output_nr"),
)


def _properties(names: Iterable[str], *accessors: str) -> set[Any]:
    found = (vars(torch._C.TensorBase).get(name, vars(Tensor).get(name)) for name in names)
    return {getattr(member, accessor) for member in found if member is not None for accessor in accessors}


# What is asked of the form that the whole parameter has ...
FORM = {
    *_properties(_FORM, "__get__"),
    *(Tensor.size, Tensor.numel, Tensor.nelement, Tensor.dim, Tensor.ndimension, Tensor.__len__),
    *(Tensor.stride, Tensor.is_contiguous, torch.numel),
}
# ... and of the tensor object, whatever its values.
HARMLESS = {
    *_properties(_FLAGS, "__get__"),
    *_properties(("requires_grad", "grad", "_backward_hooks"), "__set__"),
    *_properties(("grad",), "__delete__"),
    *(Tensor.requires_grad_, Tensor.element_size, Tensor.get_device, Tensor.__hash__, Tensor.register_hook),
    *(Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad, Tensor.is_floating_point, Tensor.is_complex),
    *(Tensor.is_signed, torch.is_floating_point, torch.is_complex, torch.is_tensor),
}


LOST_WRITES = "writes to parameters that are lost"  # of all warnings about them the first is given


def tensors_of(kind: type[Tensor], value: Any) -> list[Any]:
    """The tensors of ``kind``, of any shape and dtype, in the arguments of a function of torch."""
    if isinstance(value, kind):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for item in value for tensor in tensors_of(kind, item)]


class ParamStatus(IntEnum):
    """What ``param.ds_status`` says (DeepSpeed's ``ZeroParamStatus``)."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class AtRest(nn.Parameter):
    """What all parameters at rest have in common.

    Attributes:
        noticed: the class of those that notice more of what is done to them, and take longer for it.
    """

    noticed: type[AtRest] | None = None

    @property
    def ds_status(self) -> ParamStatus:
        """Of a gathered parameter it is an attribute, which waits below this."""
        return ParamStatus.NOT_AVAILABLE


def is_ordinary(param: Tensor) -> bool:
    """Whether ``param`` is of torch's own class, or at rest."""
    return type(param) is nn.Parameter or isinstance(param, AtRest)


def wake(param: Tensor) -> None:
    """Make ``param``, if it is at rest, an ordinary parameter that still shows no elements."""
    if isinstance(param, AtRest):
        param.__class__ = nn.Parameter  # type: ignore[assignment]


def name_of(param: Tensor) -> str:
    """For messages."""
    home = param._ds_home  # type: ignore[attr-defined]
    names: tuple[str, ...] = home.buffer.param_names
    shape = tuple(home.slot.shape)
    return f"{names[home.slot.index]} {shape}" if home.slot.index < len(names) else f"a parameter of shape {shape}"


def _refuse_copy(param: Tensor, what: str) -> NoReturn:
    raise DsHfError(_empty(param, what))


def _empty(param: Tensor, what: str) -> str:
    below = ZeroSection.stage3_param_persistence_threshold  # what DeepSpeed takes where a file says nothing
    small = (
        f". DeepSpeed keeps parameters of fewer than {below:,} elements whole, as ds_hf does where the file says "
        f'"stage3_param_persistence_threshold": {below}'
    )
    return (
        f"{what} of {name_of(param)} would be empty: at ZeRO stage 3 each process holds a part of it. Copy inside "
        "`with deepspeed.zero.GatheredParameters(list(model.parameters())):`, on all processes; to write whole weights "
        "to a file, call engine.save_16bit_model(folder) or engine.save_checkpoint(folder)"
        f"{small if param._ds_home.slot.shape.numel() < below else ''}"  # type: ignore[attr-defined]
    )


def _tell_write(param: Tensor, what: str) -> None:
    warn_once(
        f"{what} on {name_of(param)} has no effect (said once, for the first of them): at ZeRO stage 3 its values are "
        "not here between uses. Write inside `with deepspeed.zero.GatheredParameters(params, modifier_rank=0):`, on "
        "all processes",
        about=LOST_WRITES,
    )


def tell_lost_write(param: Tensor, why: str, *, everywhere: bool = True) -> None:
    """Of what was written where it was seen later; ``everywhere``: by a process that others need not agree with."""
    warn_once(
        f"{name_of(param)} was written (said once, for the first of them), and {why}. Write inside `with "
        "deepspeed.zero.GatheredParameters(params, modifier_rank=0):`, on all processes, or call "
        "engine.load_module_state_dict(), and the optimizer's follow",
        about=LOST_WRITES,
        everywhere=everywhere,
    )


def _tell_cast(param: Tensor, dtype: torch.dtype) -> None:
    warn_once(
        f"{name_of(param)} and what else rests at ZeRO stage 3 is not cast to {str(dtype).removeprefix('torch.')}: the "
        "engine gathers it in the dtype of its file (the sections bf16 and fp16), while buffers of the module are cast",
        about="casts of parameters at rest",
    )


def _tell_read(param: Tensor, what: str) -> None:
    buffer = param._ds_home.buffer  # type: ignore[attr-defined]
    if buffer.let_go and not buffer.users:
        warn_once(
            f"{what} of {name_of(param)} sees no values (said once, for the first of them): the engine of its model, "
            "of ZeRO stage 3, was destroyed, and each process keeps its part of the weights. Call initialize() with "
            "the model again, or use it inside `with deepspeed.zero.GatheredParameters(list(model.parameters())):`",
            about="reads of parameters whose engine is gone",
        )
        return
    warn_once(
        f"{what} of {name_of(param)} sees no values (said once, for the first of them): at ZeRO stage 3 they are not "
        "here between uses. Read inside `with deepspeed.zero.GatheredParameters(params):`, on all processes",
        about="reads of parameters at rest",
    )


def _tell_unnoticed(param: Tensor, what: str) -> None:
    if not isinstance(param, Noticed):  # which may gather it for that
        _tell_read(param, what)


def _check_reader(param: Tensor, reader: FrameType) -> None:
    """Of its address: safetensors writes what lies there."""
    if reader.f_globals.get("__name__") == "safetensors.torch":
        _refuse_copy(param, "a file")
    _tell_form(param, "data_ptr()", reader)


# They know of parameters without elements, or ask those that know.
_ZERO_AWARE = {"torch", "ds_hf", "deepspeed", "transformers", "accelerate", "peft", "trl", "diffusers", "lightning"}


def _tell_form(param: Tensor, what: str, reader: FrameType) -> None:
    """Of what is counted, grouped or compared by a form that has no elements, unless the reader knows of it."""
    package = str(reader.f_globals.get("__name__")).partition(".")[0]
    if package in _ZERO_AWARE:
        return
    code = reader.f_code
    if any(str(name).startswith("ds_") for name in (*code.co_names, *code.co_consts)):
        return  # param.ds_numel if hasattr(param, "ds_numel") else param.numel()
    warn_once(
        f"`.{what}` of {name_of(param)} is that of no elements (said once, for the first of them): at ZeRO stage 3 a "
        "parameter shows its shape, and lies in memory, only while it is used. Count and group parameters by "
        "`param.ds_numel` and `param.ds_shape`; tied ones are the same object",
        about="forms of parameters at rest",
    )


class Released(AtRest):
    """A parameter of a model that trains, or will."""

    @property
    def data(self) -> Tensor:
        """Nothing, ``[0]`` of the parameter's dtype, that knows of which parameter."""
        return _Nothing.of(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        # Nothing is put back by module.to(): in another form, or the same tensor again.
        cast = value.dtype != self.dtype
        alike = not cast and value.device == self.device
        again = value is self or isinstance(value, AtRest | _Nothing)
        _SET_DATA(self, value)
        if value.numel() or (alike and not again):
            _tell_write(self, "`.data = ...`")
        elif cast:
            _tell_cast(self, value.dtype)

    def detach(self) -> Tensor:
        # Of the same version: what is written through views of it is counted, and told at the step.
        return _Nothing.of(self, Tensor.detach(self))

    def clone(self, *args: Any, **kwargs: Any) -> Tensor:
        _refuse_copy(self, "a clone")

    def data_ptr(self) -> int:
        _check_reader(self, sys._getframe(1))
        return Tensor.data_ptr(self)

    def untyped_storage(self) -> torch.UntypedStorage:
        _tell_form(self, "untyped_storage()", sys._getframe(1))
        return Tensor.untyped_storage(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        buffer = self._ds_home.buffer  # type: ignore[attr-defined]
        if buffer.duplicate is None:
            _refuse_copy(self, "a copy")
        if id(self) not in memo:
            memo[id(self)] = buffer.duplicate(self)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse_copy(self, "a pickle")


class _Nothing(Tensor):
    """What ``.data``, ``state_dict()`` and casts show of a parameter at rest."""

    _of: nn.Parameter

    @classmethod
    def of(cls, param: nn.Parameter, nothing: Tensor | None = None) -> _Nothing:
        nothing = (_GET_DATA(param) if nothing is None else nothing).as_subclass(cls)
        nothing._of = param
        return nothing

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, param = getattr(func, "__name__", ""), tensors_of(_Nothing, (args, kwargs))[0]._of
        if name in _COPIES:
            # no error: transformers' save_pretrained copies what it then leaves to the first process
            warn_once(f"{_empty(param, f'`.{name}()`')}", about="copies of parameters at rest")
        elif name == "pad" and not any(args[1]):
            return args[0]  # by nothing: transformers, when it ties weights
        elif name == "data_ptr":
            _check_reader(param, sys._getframe(1))
        elif name == "detach" and sys._getframe(1).f_globals.get("__name__") == nn.Parameter.__module__:
            _refuse_copy(param, "a parameter made of the values")
        elif name == "__get__" and sys._getframe(1).f_code.co_name == "_load_from_state_dict":
            _tell_read(param, "loading")  # torch then says that the size [0] does not fit
        elif func in FORM:
            _tell_form(param, name if name != "__get__" else "shape", sys._getframe(1))
        elif name in _WRITES and isinstance(args[0], _Nothing):
            _tell_write(param, f"`.data.{name}()`")
        elif _reads(func):
            _tell_read(param, f"`{name}()`")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return cls.of(param, result) if name in _CASTS and type(result) is Tensor else result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        _refuse_copy(self._of, "a copy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        # no error yet: scripts for DeepSpeed write a state dict on one process, and in its place then what they gather
        sentence = _empty(self._of, "a pickle")
        warn_once(f"{sentence}. What was written now can not be read", about="pickles of parameters at rest")
        return written_without_values, (sentence,)


def written_without_values(sentence: str) -> NoReturn:
    """Stands in a file for a parameter that was at rest when it was written."""
    raise DsHfError(sentence)


_COPIES = ("clone", "cpu", "cuda", "numpy", "tolist")
_CASTS = ("to", "float", "double", "half", "bfloat16", "type", "contiguous", "detach")
_NO_VALUES = ("requires_grad_", "share_memory_", "detach_", "rename_")  # change something else than values
# Looked at, or given as a pattern, by those who do not want values: properties, storages, forms of new tensors.
_WITHOUT_VALUES = {
    *("__get__", "__set__", "__delete__", "__repr__", "__format__", "as_subclass", *_NO_VALUES),
    *("cpu", "cuda", "data_ptr", "untyped_storage", "storage", "_typed_storage", "storage_offset"),
    *("is_shared", "is_pinned", "is_inference"),
    *(f"{kind}_like" for kind in ("empty", "zeros", "ones", "full", "rand", "randn")),
    *(f"new_{kind}" for kind in ("empty", "zeros", "ones", "full", "tensor")),
    *("grad", "backward", "is_same_size", "result_type", "_has_compatible_shallow_copy_type"),
}
_WRITES = {
    *(name for name in dir(Tensor) if name.endswith("_") and name[0] != "_" and name not in _NO_VALUES),
    *("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__ipow__"),
}
# Methods that look at values.
_READS = {
    *("view", "reshape", "flatten", "ravel", "norm", "sum", "mean", "pow", "square", "abs", "std", "var", "max", "min"),
    *("item", "tolist", "numpy", "dot", "mm", "matmul", "mul", "add", "sub", "div", "isnan", "isinf", "isfinite"),
    *("equal", "allclose", "unbind", "split", "chunk", "transpose", "t", "permute", "unsqueeze", "squeeze"),
    *("any", "all", "prod", "median", "quantile", "histc", "nonzero", "count_nonzero", "topk", "sort"),
    *("argmax", "argmin"),
    *("eq", "ne", "lt", "le", "gt", "ge", "expand", "index_select", "lerp", "sigmoid", "exp", "sqrt"),
    *(f"__{name}__" for name in ("eq", "ne", "lt", "le", "gt", "ge", "array", "dlpack")),
    *(f"__{side}{name}__" for name in ("add", "sub", "mul", "truediv", "pow") for side in ("", "r")),
    *("__matmul__", "__neg__", "__getitem__"),
}


def _reads(function: Any) -> bool:
    """Whether a function of torch looks at the values of tensors that it is given."""
    name = getattr(function, "__name__", "")
    return not (function in HARMLESS or function in FORM or name in _WITHOUT_VALUES or name in _CASTS)


def _telling(name: str, tell: Callable[[Tensor, str], None]) -> Callable[..., Any]:
    method = getattr(Tensor, name)

    def told(param: Released, *args: Any, **kwargs: Any) -> Any:
        tell(param, f"`.{name}()`")
        return method(param, *args, **kwargs)

    return told


def _casting(name: str) -> Callable[..., Tensor]:
    method = getattr(Tensor, name)

    def cast(param: Released, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = method(param, *args, **kwargs)
        return _Nothing.of(param, result) if type(result) is Tensor else result

    return cast


def _form_method(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, name)

    def form(param: Released, *args: Any, **kwargs: Any) -> Any:
        _tell_form(param, f"{name}()", sys._getframe(1))
        return method(param, *args, **kwargs)

    return form


def _form_property(name: str) -> property:
    get = getattr(Tensor, name).__get__

    def form(param: Released) -> Any:
        _tell_form(param, name, sys._getframe(1))
        return get(param)

    return property(form)


for _name in ("numel", "nelement", "size", "dim", "ndimension", "__len__"):
    setattr(Released, _name, _form_method(_name))
for _name in ("shape", "ndim", "nbytes"):
    setattr(Released, _name, _form_property(_name))
for _name in _WRITES:
    setattr(Released, _name, _telling(_name, _tell_write))
for _name in _READS:
    setattr(Released, _name, _telling(_name, _tell_unnoticed))
for _name in {*_CASTS, "cpu", "cuda"} - {"detach"}:
    setattr(Released, _name, _casting(_name))


def use(tensors: Iterable[Tensor | None]) -> None:
    """``tensors``, of any shape and dtype, are computed with, beside others, which an autograd function does not show:
    an engine whose model is being called gathers those that rest."""
    for tensor in tensors:
        if isinstance(tensor, Noticed):
            for hooks in tensor._ds_home.buffer.users:  # type: ignore[attr-defined]
                hooks.on_use(tensor)


class Noticed(Released):
    """As ``Released``; functions of torch are noticed, too, for which every access to an attribute takes longer: so
    all parameters of a buffer rest as this at first, and later one of them at times. A function that is given other
    tensors as well computes with the parameter: an engine whose model is being called gathers it for that."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _reads(func):
            name = func.__name__  # "_foreach_mul_" writes, "__mul__" does not
            param, given = tensors_of(Noticed, (args, kwargs))[0], tensors_of(Tensor, (args, kwargs))
            if name.endswith("_") and not name.endswith("__") and tensors_of(Noticed, args[:1] or kwargs):
                _tell_write(param, f"`{name}()`")
            else:
                if any(not isinstance(t, AtRest) for t in given):
                    use([param])
                if isinstance(param, AtRest):
                    _tell_read(param, f"`{name}()`")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _as_written(name: str) -> Callable[..., Any]:
    """``hidden * param``, for which Python asks the class that derives from the other's first: not ``param * hidden``,
    whose graph keeps other tensors, and which rounds otherwise where it divides."""
    reflected, written = getattr(Tensor, f"__r{name}__"), getattr(Tensor, f"__{name}__")

    def compute(param: Noticed, other: Any) -> Any:
        return written(other, param) if isinstance(other, Tensor) else reflected(param, other)

    return compute


for _name in ("add", "sub", "mul", "truediv", "pow"):
    setattr(Noticed, f"__r{_name}__", _as_written(_name))
Released.noticed = Noticed
