"""The only place that registers module and autograd hooks: they gather, release and reduce units around user code.

Per unit: before forward gather; after forward release, unless backward will follow at once (the root) or this *is*
backward (recomputation under activation checkpointing); before backward - a hook on the outputs - gather again;
after backward reduce and release, when the gradients are complete. Frozen buffers have no gradients to wait for:
they are released when the gradients of all inputs of the call have been computed, at the latest when backward ends.

Hooks sit on the modules, not on the engine, so ``model.generate()`` works at every stage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_hf.engine.zero.external import external_parameters
from ds_hf.engine.zero.reduction import Reducer
from ds_hf.engine.zero.unit import Unit

__all__ = ["UnitHooks", "in_backward", "tensors_in"]


def in_backward() -> bool:
    """Whether autograd is running backward in this thread: recomputation under checkpointing is forward inside it."""
    return bool(torch._C._current_graph_task_id() != -1)


def tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """All tensors in a nest of lists, tuples, mappings, dataclasses and plain objects."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from tensors_in(item, depth)
    elif hasattr(value, "values") and callable(value.values) and hasattr(value, "keys"):
        for item in value.values():
            yield from tensors_in(item, depth)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name), depth)
    elif depth < 2 and hasattr(value, "__dict__") and not isinstance(value, type | nn.Module) and not callable(value):
        for item in vars(value).values():
            yield from tensors_in(item, depth + 1)


class UnitHooks:
    """Installs and removes the hooks of one engine.

    Args:
        units: all units; the one named ``""`` is the root.
        reducer: told of uses and gradients; its ``flush`` runs at the end of each backward.
    """

    def __init__(self, units: list[Unit], reducer: Reducer) -> None:
        self.units = units
        self.reducer = reducer
        self.handles: list[RemovableHandle] = []
        self._external_modules: list[nn.Module] = []
        self._calls: dict[Unit, _Call] = {}
        self._flush_queued = False
        self.driven = False  # Engine.backward runs: it flushes by itself
        self.unit_of = {id(param): unit for unit in units for param in unit.params}

    def install(self, model: nn.Module) -> None:
        """Register everything. Call once."""
        for unit in self.units:
            for module in [unit.module, *unit.owners]:
                self._scope(module, unit)
        for module in model.modules():
            module.__dict__["_ds_attach_external"] = self._attach_external
            self._external_modules.append(module)
            for param in external_parameters(module):
                self._attach_external(module, param)
        for buffers in self.reducer.by_unit.values():
            for buffer in buffers:
                for index, param in enumerate(buffer.buffer.params):
                    hook = partial(self._on_gradient, buffer, index)
                    self.handles.append(_on_accumulated(param, hook))
        managed = {id(p) for bs in self.reducer.by_unit.values() for b in bs for p in b.buffer.params}
        for unit in self.units:
            for param in unit.params if unit.sharded else ():
                if param.requires_grad and id(param) not in managed:  # no optimizer has it: its gradient has no home
                    self.handles.append(_on_accumulated(param, _drop_gradient))

    def remove(self) -> None:
        """Take all hooks away."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        for module in self._external_modules:
            module.__dict__.pop("_ds_attach_external", None)
        self._external_modules.clear()

    def reset(self) -> None:
        """Forget calls that ended in an exception."""
        for unit in self.units:
            unit.depth = 0
            unit.open_calls.clear()
        self._calls.clear()
        self._flush_queued = False

    def _scope(self, module: nn.Module, unit: Unit) -> None:
        pre = partial(self._pre_forward, unit)
        post = partial(self._post_forward, unit)
        self.handles.append(module.register_forward_pre_hook(pre, with_kwargs=True, prepend=True))
        self.handles.append(module.register_forward_hook(post, with_kwargs=True, always_call=True))

    def _attach_external(self, module: nn.Module, param: nn.Parameter) -> None:
        unit = self.unit_of.get(id(param))
        if unit is not None and unit.sharded:
            self._scope(module, unit)

    # -- forward ------------------------------------------------------------------------------------------------

    def _pre_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> None:
        unit.gather()
        if not in_backward():
            unit.depth += 1
            if unit.depth > 1:
                return
            if torch.is_grad_enabled():
                self.reducer.record_use(unit)
        if unit.sharded and torch.is_grad_enabled():
            call = self._calls[unit] = _Call(unit)
            call.watch_inputs((args, kwargs))

    def _post_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        recomputing = in_backward()
        if not recomputing:
            unit.depth = max(unit.depth - 1, 0)
            if unit.depth:
                return
        if torch.is_grad_enabled() and (unit.sharded or unit.name == ""):
            watched = [t for t in tensors_in(output) if t.requires_grad]
            call = self._calls.pop(unit, None)
            for tensor in watched:
                _on_gradient(tensor, partial(self._pre_backward, unit, call))
            if unit.name == "" and module is unit.module and watched:
                return  # backward starts with the root: keep it
        if not recomputing:
            unit.release()

    # -- backward -----------------------------------------------------------------------------------------------

    def _pre_backward(self, unit: Unit, call: _Call | None, grad: Tensor) -> None:
        if call is not None:
            unit.open_calls.add(call)
            unit.gather()
        self._queue_flush()

    def _queue_flush(self) -> None:
        """Have backward end with a flush also when user code calls ``loss.backward()`` itself."""
        if not self.driven and not self._flush_queued:
            self._flush_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._flush_callback)

    def _flush_callback(self) -> None:
        self._flush_queued = False
        if not self.driven:
            self.flush()

    def flush(self) -> None:
        """End of backward."""
        for unit in self.units:
            unit.open_calls.clear()
        self.reducer.flush()

    def _on_gradient(self, buffer: Any, index: int, param: Tensor) -> None:
        if param.grad is not None:
            self.reducer.on_gradient(buffer, index)


class _Call:
    """One call of a unit's module: its backward is over when the gradients of all its inputs are computed."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.pending = 0

    def watch_inputs(self, inputs: Any) -> None:
        """Only frozen buffers need it: trainable ones are over when their own gradients are complete."""
        if self.unit.name == "" or not any(buffer.sharded and buffer.frozen for buffer in self.unit.buffers):
            return
        watched = {id(t): t for t in tensors_in(inputs) if t.requires_grad}
        self.pending = len(watched)
        for tensor in watched.values():
            _on_gradient(tensor, self._on_input_gradient)

    def _on_input_gradient(self, grad: Tensor) -> None:
        self.pending -= 1
        if self.pending == 0:
            self.unit.open_calls.discard(self)
            if not self.unit.open_calls:
                for buffer in self.unit.buffers:
                    if buffer.frozen:
                        buffer.release()


def _drop_gradient(param: Tensor) -> None:
    param.grad = None


def _on_gradient(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Call ``hook`` when the gradient of ``tensor`` has been computed."""
    tensor.register_hook(hook)  # type: ignore[no-untyped-call]


def _on_accumulated(param: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Call ``hook`` when the gradient of ``param`` is in its ``.grad``."""
    handle: RemovableHandle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle
