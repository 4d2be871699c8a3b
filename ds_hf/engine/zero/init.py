"""``zero.Init``: every module built inside the context keeps only this rank's shard of its parameters.

A module's own parameters are sharded as the outermost ``__init__`` of the module returns, one flat buffer each;
``initialize`` regroups them into units block by block. What constructors around it do with them then is in
``building``; parameters that they put in place of others are sharded as each of them returns. Invariant: nothing stays
patched after the context.

This module is also known as ``deepspeed.runtime.zero.partition_parameters``: transformers replaces
``zero_wrapper_for_fp_tensor_constructor`` in its globals, so that name is looked up here at each use.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.utils._device
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from ds_hf.config import load_config
from ds_hf.config.plan import plan_states
from ds_hf.engine.comm.mesh import Axis, compute_device, data_parallel_axis
from ds_hf.engine.comm.process_group import init_distributed
from ds_hf.engine.zero.at_rest import AtRest, ParamStatus, Released
from ds_hf.engine.zero.buffer import FlatBuffer, home_of
from ds_hf.engine.zero.building import OpenParameters, rest_as
from ds_hf.engine.zero.external import register_external_parameter, unregister_external_parameter
from ds_hf.engine.zero.fp32_buffers import keep_buffers_in_fp32, keep_in_fp32_pattern, lists_of
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.engine.zero.storage import DeviceShardStorage
from ds_hf.log import warn_once

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "partitioned_param_data_shape",
    "register_external_parameter",
    "shard_again",
    "unregister_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]

ZeroParamStatus = ParamStatus
partitioned_param_data_shape = [0]  # of what a parameter shows while it is released

_CONSTRUCTORS = ("tensor", "empty", "zeros", "ones", "full", "arange", "eye", "randn", "rand")
_orig_torch_arange, _orig_torch_empty = torch.arange, torch.empty


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Tensor], target_fp_dtype: torch.dtype | None, target_device: torch.device | None
) -> Callable[..., Tensor]:
    """A constructor of tensors of any shape that builds on ``target_device`` by default and casts floating-point
    results to that dtype."""

    @functools.wraps(fn)
    def construct(*args: Any, **kwargs: Any) -> Tensor:
        if target_device is not None and kwargs.get("device") is None and not _builds_on_meta():
            kwargs["device"] = target_device
        result = fn(*args, **kwargs)
        if target_fp_dtype is not None and result.is_floating_point() and result.dtype != target_fp_dtype:
            result.data = result.data.to(target_fp_dtype)
        return result

    return construct


class Init:
    """Build a model whose parameters are sharded from the start (DeepSpeed's ``zero.Init``).

    Creates the process group if there is none. Batch sizes and "auto" values of the configuration are not looked at.

    Args:
        module: shard this existing module's parameters at once, no ``with`` needed.
        data_parallel_group: processes to shard over; default all (or the ``mpu``'s data-parallel group).
        remote_device: ``"cpu"`` keeps the shards in host memory (else as ``offload_param`` says).
        config_dict_or_path: configuration, for dtype and offload.
        config: the same, older name.
        enabled: ``False`` turns the context into nothing.
        dtype: dtype of floating-point parameters; overrides the configuration's.
        mpu: Megatron-style object with ``get_data_parallel_group()``.

    The remaining arguments are accepted for DeepSpeed's signature: memory-efficient linear and pinning follow the
    engine's own ways.

    Raises:
        ConfigError: the configuration is wrong.
    """

    _active = False

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: dict[str, Any] | str | Path | None = None,
        config: dict[str, Any] | str | Path | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        sequence_data_parallel_group: Any = None,
        **unused: Any,
    ) -> None:
        if unused:
            raise TypeError(f"zero.Init of ds_hf does not take {sorted(unused)}")
        self.enabled = enabled
        if not enabled:
            return
        source = config_dict_or_path if config_dict_or_path is not None else config
        shard_device = remote_device
        self.gathers_for_apply = True
        self.reports_changes = False
        self.kept_in_fp32: str | Sequence[str] = "auto"
        if source is not None:
            settings = load_config(source, allow_auto=True, check_batch=False)
            self.gathers_for_apply = settings.zero_optimization.override_module_apply
            self.reports_changes = settings.zero_optimization.enable_sanity_checks
            self.kept_in_fp32 = settings.data_types.keep_in_fp32_modules
            row = plan_states(settings).parameters
            # Neither fp16 nor bf16: as the model is written, or from_pretrained(dtype=...) asks, like at other stages.
            dtype = dtype or (getattr(torch, row.dtype) if row.dtype else None)
            shard_device = shard_device or (row.device if row.device != "device" else None)
        init_distributed()
        self.dtype = dtype
        self.device = compute_device()
        self.shard_device = torch.device("cpu") if shard_device in ("cpu", "nvme") else self.device
        self.axis = data_parallel_axis(mpu, data_parallel_group or sequence_data_parallel_group)
        self._undo: list[Callable[[], None]] = []
        self._building: set[int] = set()
        self._opened = OpenParameters()
        # Modules whose constructors have returned; in one order on all ranks, as a set is not.
        self._made: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
        self._left_on_meta: dict[int, nn.Parameter] = {}
        self._buffers: weakref.WeakSet[FlatBuffer] = weakref.WeakSet()
        self._rests_as: type[AtRest] = Released
        if module is not None:
            for child in module.modules():
                self._shard_own(child)
            self._keep_fp32(module)

    def __enter__(self) -> Init:
        if self.enabled and not Init._active:
            Init._active = True
            self._entered = True
            self._meta_before = _builds_on_meta()
            self._rests_as = self._opened.rests_as
            self._patch_constructors()
            self._patch_modules()
            self._patch_parameters()
        else:
            self._entered = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._entered:
            return
        try:
            if kind is None:
                self._opened.close()
                if self._left_on_meta:
                    warn_once(
                        "a model was built on the meta device inside zero.Init and its weights put in later "
                        "(from_pretrained), so each process loaded all of them before they were divided. To load at "
                        "ZeRO stage 3 without that, keep transformers.integrations.HfDeepSpeedConfig(config) alive "
                        "around from_pretrained, and leave zero.Init out"
                    )
                self._shard_made(self._made)
            else:
                self._opened.abandon()
        finally:
            Init._active = False
            while self._undo:
                self._undo.pop()()
            self._building.clear()
            self._rests_as = Released
            rest_as(self._buffers, Released)

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        had, before = name in vars(owner), vars(owner).get(name)
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, before) if had else delattr(owner, name))

    def _patch_constructors(self) -> None:
        torch.utils._device._device_constructors()  # a set that torch keeps: it must not be made of what is put here
        for name in _CONSTRUCTORS:
            original = getattr(torch, name)
            # Positions and frequencies are counted with arange: bf16 has no 257, and transformers keeps them in fp32.
            dtype = self.dtype if name != "arange" else None
            wrapper = zero_wrapper_for_fp_tensor_constructor(original, target_fp_dtype=dtype, target_device=self.device)
            self._replace(torch, name, wrapper)

    def _patch_modules(self) -> None:
        for cls in set(_subclasses(nn.Module)):
            self._patch_init(cls)
        context = self

        def on_new_class(cls: type[Any], /, **kwargs: Any) -> None:
            super(nn.Module, cls).__init_subclass__(**kwargs)  # type: ignore[misc]
            context._patch_init(cls)

        self._replace(nn.Module, "__init_subclass__", classmethod(on_new_class))
        if self.gathers_for_apply:
            self._replace(nn.Module, "apply", self._apply_to_whole)

    def _patch_parameters(self) -> None:
        """Copies of what is sharded are sharded, and ``nn.Parameter(child.weight)`` is whole."""
        opened, make = self._opened, nn.Parameter.__new__
        copied: Callable[[nn.Parameter, dict[int, Any]], nn.Parameter] = nn.Parameter.__deepcopy__

        def new(cls: type[nn.Parameter], data: Any = None, *args: Any, **kwargs: Any) -> nn.Parameter:
            return make(cls, opened.whole(data), *args, **kwargs)

        def deepcopy(param: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
            home = home_of(param)
            if home is None or home.buffer not in self._buffers:
                return copied(param, memo)
            if id(param) not in memo:
                memo[id(param)] = self._duplicate(param)
            duplicate: nn.Parameter = memo[id(param)]
            return duplicate

        self._replace(nn.Parameter, "__new__", staticmethod(new))
        self._replace(nn.Parameter, "__deepcopy__", deepcopy)

    def _duplicate(self, param: nn.Parameter) -> nn.Parameter:
        """A copy of a sharded parameter, sharded as it is: each rank copies its shard."""
        source = param._ds_home.buffer  # type: ignore[attr-defined]
        self._opened.settle(source)
        copied = nn.Parameter(source.views[0].new_empty(source.layout.slots[0].shape), param.requires_grad)
        buffer = self._buffer_for(copied, source.dtype)
        buffer.adopt_shard(source.shard)
        if self._opened.keeps(source):
            self._opened.keep(buffer)
        return copied

    @property
    def _apply_to_whole(self) -> Callable[[nn.Module, Callable[[nn.Module], None]], nn.Module]:
        """``Module.apply`` that gives the function whole parameters: a constructor initialises its children so."""
        source = self.axis.global_rank(0)

        def apply(module: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
            for child in module.children():
                child.apply(fn)
            with GatheredParameters(list(module.parameters(recurse=False)), modifier_rank=source):
                fn(module)
            return module

        return apply

    def _patch_init(self, cls: type[nn.Module]) -> None:
        original = vars(cls).get("__init__")
        if original is None or cls.__module__.startswith("torch.jit"):
            return
        context = self

        @functools.wraps(original)
        def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            if id(module) in context._building:  # super().__init__() of a class already being built
                original(module, *args, **kwargs)
                return
            context._building.add(id(module))
            opened = context._opened
            opened.depth += 1
            try:
                original(module, *args, **kwargs)
                opened.close(opened.depth)
            finally:
                context._building.discard(id(module))
                opened.depth -= 1
            context._made[module] = None
            context._shard_made(module.modules())
            if lists_of(module, context.dtype) or not context._building:  # complete, and nothing is loaded into it yet
                context._keep_fp32(module)

        self._replace(cls, "__init__", init)

    def _keep_fp32(self, module: nn.Module) -> None:
        """The constructors gave all buffers of ``module`` the parameters' dtype."""
        pattern = keep_in_fp32_pattern(module, self.kept_in_fp32, self.dtype)
        if pattern is not None:
            keep_buffers_in_fp32(module, pattern)

    def _shard_made(self, modules: Iterable[nn.Module]) -> None:
        """Shard what the modules of this context among ``modules`` have now; parents replace parameters of children."""
        for module in list(modules):
            if module in self._made:
                self._shard_own(module)

    def _shard_own(self, module: nn.Module) -> None:
        """Shard the parameters that ``module`` itself holds."""
        if "_parameters" not in module.__dict__:
            return
        for name, param in module._parameters.items():
            if param is None or is_lazy(param) or not param.is_floating_point():
                continue
            home = home_of(param)
            if home is None or not home.buffer.sharded:
                if param.is_meta:
                    if _builds_on_meta() and not self._meta_before:  # from_pretrained puts its own tensors in
                        self._left_on_meta[id(param)] = param
                    if id(param) in self._left_on_meta:  # nothing was put there: initialize() refuses it
                        continue
                    # torch.nn.utils.skip_init, which asks for memory when the module is made
                    empty = torch.empty_like(param, device=self.device)
                    param = module._parameters[name] = nn.Parameter(empty, requires_grad=param.requires_grad)
                buffer = self._buffer_for(param, self.dtype or param.dtype)
                buffer.adopt()
            else:
                buffer = home.buffer
            if isinstance(module, ParametrizationList) and buffer in self._buffers and not self._opened.keeps(buffer):
                # What it computes (weight norm) is an attribute that model code reads at any time, also on one rank
                # alone: these few parameters stay gathered until initialize() puts them into units.
                self._opened.keep(buffer)

    def _buffer_for(self, param: nn.Parameter, dtype: torch.dtype) -> FlatBuffer:
        buffer = _own_buffer(param, self.axis, dtype, self.device, self.shard_device)
        buffer.hold.reports_changes = self.reports_changes
        buffer.rests_as, buffer.duplicate = self._rests_as, self._duplicate
        self._buffers.add(buffer)
        return buffer


def _own_buffer(
    param: nn.Parameter, axis: Axis, dtype: torch.dtype, device: torch.device, shard_device: torch.device
) -> FlatBuffer:
    storage = DeviceShardStorage(device, shard_device)
    return FlatBuffer([param], axis, dtype=dtype, device=device, sharded=True, shard_storage=storage, alignment=1)


def shard_again(param: nn.Parameter, axis: Axis, like: FlatBuffer) -> None:
    """Shard an ordinary parameter over ``axis``, in a buffer of its own as ``like`` was. Collective."""
    buffer = _own_buffer(param, axis, like.dtype, like.device, like.shard.device)
    buffer.hold.reports_changes = like.hold.reports_changes
    buffer.duplicate = like.duplicate
    buffer.adopt(synchronize=False)


def _builds_on_meta() -> bool:
    """Whether a ``torch.device("meta")`` is around what runs now."""
    return _orig_torch_empty(0).is_meta


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    for child in cls.__subclasses__():
        yield child
        yield from _subclasses(child)
