"""Blocks in CUDA graphs: a block's forward is one launch, and so is its backward.

torch's graph trees record and replay what dynamo traces of a block. Without a compiler these are the kernels of the
eager block, and the numbers are its own, to the bit. A graph's tensors lie in memory that a later replay overwrites;
what has to hold for that is said to torch here, or made so.

Invariants
- The next round of replays begins when every captured forward, of all engines, had its backward, or its engine a step.
- What leaves a block is copied, and so are its gradients, on the stream that replays: others read them later.
- Forwards without gradients, of further shapes, and of blocks that are computed again for backward are the block's own.
- Where sequences are padded (``modules/padding.py``), what is behind a block's own sequence never leaves it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ds_hf.engine.zero.unit import in_backward, tensors_in
from ds_hf.log import warn_once

if TYPE_CHECKING:  # there where sequences are padded
    from ds_hf.engine.modules.padding import Padded, Padding

__all__ = ["EAGER", "Captures", "captures_of", "records"]

EAGER = "cudagraphs"  # torch's name of the backend that records what a block computes eagerly
_MOST_SHAPES = 8  # each is recorded for each block, which takes time and memory
_MOST_GRAPHS = 128  # of code that blocks share: of each shape one with an input that needs a gradient, one without, ...
_MODES = {"reduce-overhead", "max-autotune"}
_engines: WeakSet[Captures] = WeakSet()  # whose graphs share memory


def captures_of(engine: Any) -> Captures:
    """Those of ``engine``, which tells them of its steps."""
    made = Captures(engine.reducer.lend)
    engine.step_hooks.append(made.after_step)
    return made


def records(backend: Any, mode: str | None, options: Any) -> bool:
    """Whether ``torch.compile`` of these arguments gives CUDA graphs."""
    return backend == EAGER or mode in _MODES or bool((options or {}).get("triton.cudagraphs"))


class Captures:
    """The captured blocks of one engine.

    Args:
        lend: called once: gradients lie in memory that is overwritten.
    """

    def __init__(self, lend: Callable[[], None]) -> None:
        self.asked = False  # by the configuration, for all that is compiled
        self.padding: Padding | None = None
        self.open = 0  # forwards whose backward is to come
        self.used = False
        self._lend = lend
        self._stale = True  # something was replayed since the round began
        self._shapes: set[tuple[torch.Size, ...]] = set()
        self._seen: set[tuple[Any, ...]] = set()  # what blocks were called with

    def around(
        self, module: nn.Module, captured: Callable[..., Any], own: Callable[..., Any], eager: Callable[..., Any]
    ) -> Callable[..., Any]:
        """The ``forward`` of ``module``: ``captured`` where it can be replayed, else ``own``; ``eager`` is what both
        are made of."""
        if not self.used:
            self._lend()
            self.used = True
            _engines.add(self)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not (torch.is_grad_enabled() and module.training) or _is_checkpointed(module):
                return own(*args, **kwargs)
            padded = self._padded(module, eager, args, kwargs)
            if padded is None and not self._knows((*args, *kwargs.values())):
                return own(*args, **kwargs)
            if padded is not None:
                args, kwargs = padded.args, padded.kwargs
            self._begin()
            with self._maybe_compiling(module, (*args, *kwargs.values())):
                found = captured(*args, **kwargs)
            found = _copied(found if padded is None else padded.cut(found))
            last = next((each for each in tensors_in(found) if each.requires_grad), None)
            if last is not None:
                self.open += 1
                last.register_hook(self._reached)  # type: ignore[no-untyped-call]
            return found

        return forward

    def after_step(self, engine: Any) -> None:
        """What had no backward before this step will have none."""
        self.open = 0

    def close(self) -> None:
        """The engine's last: the memory of graphs that nothing calls is given back."""
        _engines.discard(self)
        if self.used and not _engines:
            from torch._inductor.cudagraph_trees import reset_cudagraph_trees  # there where something was captured

            reset_cudagraph_trees()

    def _padded(
        self, module: nn.Module, eager: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Padded | None:
        """The inputs with padding, of a length for which there is a graph or room for one."""
        if self.padding is None:
            return None
        for length in self.padding.lengths(args, kwargs):
            padded = self.padding.of(module, eager, args, kwargs, length)
            if padded is None or self._has_room((*padded.args, *padded.kwargs.values())):
                return padded
        return None

    def _has_room(self, values: tuple[Any, ...]) -> bool:
        shapes = tuple(each.shape for each in _tensors(values))
        if shapes not in self._shapes and len(self._shapes) < _MOST_SHAPES:
            self._shapes.add(shapes)
        return shapes in self._shapes

    def _knows(self, values: tuple[Any, ...]) -> bool:
        found = self._has_room(values)
        if not found:
            warn_once(
                f"blocks are captured for {_MOST_SHAPES} shapes, and compute eagerly with further ones: pad batches to "
                "a few lengths (pad_to_multiple_of of the data collator), or let blocks do so "
                '("ds_hf": {"capture_pad_to_multiple_of": 128})'
            )
        return found

    def _maybe_compiling(self, module: nn.Module, values: tuple[Any, ...]) -> AbstractContextManager[Any]:
        """What to call a block in: dynamo compiles the code of alike blocks for eight kinds of inputs, as it is set,
        and shapes are not all that differs."""
        seen = (module, *((each.shape, each.dtype, each.requires_grad) for each in _tensors(values)))
        if seen in self._seen:
            return nullcontext()
        self._seen.add(seen)
        limit = max(_MOST_GRAPHS, torch._dynamo.config.recompile_limit)
        more: AbstractContextManager[Any] = torch._dynamo.config.patch(recompile_limit=limit)
        return more

    def _begin(self) -> None:
        if any(each._stale for each in _engines) and not any(each.open for each in _engines):
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            for each in _engines:
                each._stale = False
        self._stale = True

    def _reached(self, grad: Tensor) -> None:
        """Backward comes to a block; if it keeps its graph, it may come again."""
        if self.open and not torch._C._autograd._get_current_graph_task_keep_graph():
            self.open -= 1


def _is_checkpointed(module: nn.Module) -> bool:
    """Whether what this forward keeps is not kept as it is: it is computed again, or goes elsewhere."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks
    found = getattr(module, "gradient_checkpointing", False) or in_backward() or hooks(True) is not None
    if found:
        warn_once(
            "blocks that are checkpointed, or whose activations are kept elsewhere, are not captured: they compute "
            "eagerly. Where memory allows, do without gradient checkpointing, and such blocks are captured"
        )
    return found


def _copied(found: Any) -> Any:
    return found.clone() if type(found) is Tensor else tree_map_only(Tensor, Tensor.clone, found)


def _tensors(values: tuple[Any, ...]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif value is not None and not isinstance(value, bool | int | float | str):
            yield from tensors_in(value)
