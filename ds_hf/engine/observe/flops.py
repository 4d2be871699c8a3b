"""Operations, parameters and time of a model: DeepSpeed's flops profiler on torch's ``FlopCounterMode``.

torch counts what the matrix products, convolutions and attention of forward (and backward, when it runs while
profiling) really do, whatever module asked for them; ``_formulas`` adds what it leaves out. A multiply-accumulate
counts as two operations; a bias, and sums and products element by element, as one operation an element.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from ds_hf.engine.comm.device import synchronize
from ds_hf.engine.observe.flops_text import (
    ModuleProfile,
    StepTimes,
    aggregated,
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
    totals,
)
from ds_hf.engine.observe.flops_text import detailed as each_module
from ds_hf.engine.zero.buffer import home_of, logical_shape
from ds_hf.log import warn_once

__all__ = [
    "FlopsProfiler",
    "duration_to_string",
    "flops_to_string",
    "get_model_profile",
    "macs_to_string",
    "number_to_string",
    "params_to_string",
    "products",
]

_HAS_BIASES = 11  # argument of mkldnn_rnn_layer after its input; without them zeros stand for biases


class FlopsProfiler:
    """Counts between ``start_profile`` and ``stop_profile``.

    Args:
        model: the model, or an engine's ``module``.
        ds_engine: the engine around it, if there is one.
        recompute_fwd_factor: 1 where activations are checkpointed; torch counts recomputation by itself.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model = model
        self.ds_engine = ds_engine
        self.started = False
        self._counter: FlopCounterMode | None = None
        self.times: StepTimes | None = None  # of the step, where an engine knows
        self._flops: dict[str, int] = {}
        self._macs = 0
        self._module_macs: dict[str, int] = {}
        self._module_seconds: dict[str, float] = {}
        self._hooks: list[Any] = []
        self._since = self._duration = 0.0

    def start_profile(self, ignore_list: Sequence[type] | None = None) -> None:
        """Begin to count; what was counted before is forgotten."""
        self.reset_profile()
        self._counter = FlopCounterMode(display=False, custom_mapping=_formulas(self._add_macs))
        self._counter.__enter__()  # type: ignore[no-untyped-call]
        for path, module in self.model.named_modules():
            if path:
                self._watch(path, module)
        synchronize()
        self._since, self.started = time.perf_counter(), True

    def stop_profile(self) -> None:
        """Stop counting; what was counted stays until ``end_profile``."""
        if self._counter is None:
            return
        synchronize()
        self._duration = time.perf_counter() - self._since
        self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._flops = {name: sum(found.values()) for name, found in self._counter.get_flop_counts().items()}
        self._counter = None
        while self._hooks:
            self._hooks.pop().remove()

    def _watch(self, path: str, module: nn.Module) -> None:
        """Add up the seconds of its forwards; the device is waited for at both ends."""
        begun: list[float] = []

        def before(*_: Any) -> None:
            synchronize()
            begun.append(time.perf_counter())

        def after(*_: Any) -> None:
            synchronize()
            if begun:
                self._module_seconds[path] = self._module_seconds.get(path, 0.0) + time.perf_counter() - begun.pop()

        self._hooks += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]

    def reset_profile(self) -> None:
        """Forget what was counted."""
        if self._counter is not None:
            self.stop_profile()
        self._flops, self._macs, self._duration = {}, 0, 0.0
        self._module_macs, self._module_seconds = {}, {}

    def _add_macs(self, count: int) -> None:
        self._macs += count
        if self._counter is not None:
            for name in self._counter.mod_tracker.parents:
                self._module_macs[name] = self._module_macs.get(name, 0) + count

    def end_profile(self) -> None:
        """Forget what was counted, and end."""
        self.reset_profile()
        self.started = False

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Floating-point operations."""
        found = self._flops.get("Global", 0)
        return number_to_string(found) if as_string else found

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Multiply-accumulates of matrix products, convolutions and attention."""
        return macs_to_string(self._macs) if as_string else self._macs

    def get_total_params(self, as_string: bool = False) -> Any:
        """Parameters, those of other ranks' shards too."""
        found = sum(_numel(param) for param in self.model.parameters())
        return params_to_string(found) if as_string else found

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Seconds."""
        return duration_to_string(self._duration) if as_string else self._duration

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print the totals, the top modules, and (``detailed``) each module's share, or write them to ``output_file``.

        Args:
            module_depth: of the modules that are told of; -1: all.
            top_modules: how many of each depth are named.
        """
        modules, kinds = self._by_module()
        lines = [f"flops profile of step {profile_step}", *totals(modules[""], self.times)]
        lines += ["", "Aggregated Profile per GPU", *aggregated(modules, kinds, module_depth, top_modules)]
        if detailed:
            lines += ["", "Detailed Profile per GPU", *each_module(modules, kinds, module_depth)]
        text = "\n".join(lines) + "\n"
        if not output_file:  # of DeepSpeed's files "" too
            sys.stdout.write(text)
        else:
            Path(output_file).parent.mkdir(parents=True, exist_ok=True)
            Path(output_file).write_text(text)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print for each depth the modules with the most parameters, multiply-accumulates and seconds."""
        sys.stdout.writelines(line + "\n" for line in aggregated(*self._by_module(), module_depth, top_modules))

    def _by_module(self) -> tuple[dict[str, ModuleProfile], dict[str, str]]:
        """What was counted, and the class, of each module by its path; "" is the model."""
        root = type(self.model).__name__
        found, kinds = {}, {}
        for path, module in self.model.named_modules():
            name = f"{root}.{path}" if path else root
            params = sum(_numel(param) for param in module.parameters())
            if path:
                macs, flops, seconds = self._module_macs.get(name, 0), self._flops.get(name, 0), 0.0
                seconds = self._module_seconds.get(path, 0.0)
            else:
                macs, flops, seconds = self._macs, self._flops.get("Global", 0), self._duration
            found[path], kinds[path] = ModuleProfile(params, macs, flops, seconds), type(module).__name__
        return found, kinds


def _formulas(add_macs: Callable[[int], None]) -> dict[Any, Callable[..., int]]:
    """How many operations each of torch's operators takes; ``add_macs`` is told what is multiplied and added up."""
    aten = torch.ops.aten

    def product(formula: Callable[..., int], bias: Callable[..., bool] | None = None) -> Callable[..., int]:
        def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
            found = int(formula(*args, out_val=out_val, **kwargs))
            add_macs(found // 2)
            return found + (out_val.numel() if bias is not None and bias(*args) else 0)

        return _raw(count)

    def elements(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return int(out_val.numel())

    def recurrent(x: Tensor, *weights: Any, out_val: Any = None, **kwargs: Any) -> int:
        """Each matrix is multiplied with every position of the sequences, each bias added there."""
        places = x.numel() // x.shape[-1]
        macs: int = places * sum(weight.numel() for weight in weights if weight.dim() > 1)
        add_macs(macs)
        biases: int = places * sum(weight.numel() for weight in weights if weight.dim() == 1)
        return 2 * macs + biases

    biases: dict[Any, Callable[..., bool]] = {
        aten.addmm: lambda *_: True,
        aten.baddbmm: lambda *_: True,
        aten.convolution: lambda x, weight, bias=None, *_: bias is not None,
    }
    found = {op: product(formula, biases.get(op)) for op, formula in products().items()}
    found |= {op: _raw(elements) for op in (aten.add, aten.sub, aten.mul, aten.div)}
    found[aten.mv] = product(lambda matrix, vector, **_: 2 * matrix.numel())
    found[aten.dot] = product(lambda one, other, **_: 2 * one.numel())
    # recurrent layers that one operator computes: one layer and direction of a CPU's, all of a GPU's
    found[aten.mkldnn_rnn_layer] = _raw(lambda x, *args, **_: recurrent(x, *args[: 4 if args[_HAS_BIASES] else 2]))
    found[aten._cudnn_rnn] = _raw(lambda x, weights, *_, **__: recurrent(x, *weights))
    return found


def products() -> dict[Any, Callable[..., int]]:
    """Operations of matrix products, convolutions and attention, by operator: torch's table, and what it lacks.

    Where a product is given the dtype of its result, torch takes that for the shape (Liger's loss calls ``addmm`` so).
    It has no attention of CPUs, and up to torch 2.11 fails where several heads of queries share one of keys. An
    operator whose formula fails is told of and counts as nothing: a count must not end a training.
    """
    aten = torch.ops.aten

    def of(one: Tensor, other: Tensor) -> int:
        return 2 * one.numel() * other.shape[-1]

    def scores(query: Tensor, key: Tensor) -> int:
        return math.prod(query.shape[:-1]) * key.shape[-2]  # of all heads of queries, (batch, heads, length, width)

    def attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
        return 2 * scores(query, key) * (query.shape[-1] + value.shape[-1])

    def backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
        # scores once more and the gradients of queries and keys; of values and scores
        return 2 * scores(query, key) * (3 * query.shape[-1] + 2 * value.shape[-1])

    kinds = ("efficient_attention", "flash_attention", "cudnn_attention", "flash_attention_for_cpu")
    own = {
        aten.addmm: lambda bias, one, other, *_, **__: of(one, other),
        aten.bmm: lambda one, other, *_, **__: of(one, other),
        aten.baddbmm: lambda bias, one, other, *_, **__: of(one, other),
        **{getattr(aten, f"_scaled_dot_product_{kind}"): attention for kind in kinds},
        **{getattr(aten, f"_scaled_dot_product_{kind}_backward"): backward for kind in kinds},
    }
    return {op: _raw(_guarded(op, formula)) for op, formula in (flop_registry | own).items()}


def _guarded(op: Any, formula: Callable[..., int]) -> Callable[..., int]:
    def count(*args: Any, **kwargs: Any) -> int:
        try:
            return int(formula(*args, **kwargs))
        except Exception as fault:
            warn_once(f"operations of {op} are not counted: its formula says {fault or type(fault).__name__}", str(op))
            return 0

    return count


def _raw(formula: Callable[..., int]) -> Callable[..., int]:
    """Mark ``formula`` as one that takes the operator's tensors, and not their shapes."""
    formula._get_raw = True  # type: ignore[attr-defined]
    return formula


def get_model_profile(
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Sequence[type] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Operations, multiply-accumulates and parameters of one call of ``model``.

    Args:
        input_shape: give the model ones of this shape, instead of ``args`` and ``kwargs``.
        warm_up: calls before the one that counts.
        as_string: ``"1.5 GMACs"`` and not a number.
        mode: ``"forward"``, or ``"generate"`` to call ``model.generate``.
    """
    call = model if mode == "forward" else model.generate
    positional = list(args)
    if input_shape is not None:
        first = next(model.parameters())
        positional = [torch.ones(tuple(input_shape), dtype=first.dtype, device=first.device)]
    profiler = FlopsProfiler(model)
    for _ in range(warm_up):
        call(*positional, **(kwargs or {}))  # type: ignore[operator]
    profiler.start_profile(ignore_modules)
    call(*positional, **(kwargs or {}))  # type: ignore[operator]
    profiler.stop_profile()
    found = (
        profiler.get_total_flops(as_string),
        profiler.get_total_macs(as_string),
        profiler.get_total_params(as_string),
    )
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    profiler.end_profile()
    return found


def _numel(param: Tensor) -> int:
    return logical_shape(param).numel() if home_of(param) is not None else param.numel()
