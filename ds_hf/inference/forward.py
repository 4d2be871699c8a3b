"""Calls of a model captured in CUDA graphs, for models that keep nothing between calls (encoders)."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ds_hf.log import log_once

__all__ = ["CapturedCalls"]

_WARM_UP = 2


class CapturedCalls:
    """``call`` by graphs, one for each shape of arguments; what cannot be captured is called as it is, with one line.

    Args:
        call: without side effects, with the same shapes out for the same shapes in.
        keep: how many graphs are kept.
    """

    def __init__(self, call: Callable[..., Any], keep: int = 8) -> None:
        self.call, self.keep = call, keep
        self._graphs: OrderedDict[Any, tuple[torch.cuda.CUDAGraph, list[Any], list[Any], Any] | None] = OrderedDict()

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The call's outputs, in memory of their own."""
        given, form = tree_flatten((args, kwargs))
        key = (tuple(_form(value) for value in given), str(form))
        if not any(isinstance(value, Tensor) and value.is_cuda for value in given):
            return self.call(*args, **kwargs)
        if key not in self._graphs:
            while len(self._graphs) >= self.keep:
                self._graphs.popitem(last=False)
            self._graphs[key] = self._captured(given, form)
        self._graphs.move_to_end(key)
        entry = self._graphs[key]
        if entry is None:
            return self.call(*args, **kwargs)
        graph, inputs, outputs, out_form = entry
        for mine, value in zip(inputs, given, strict=True):
            if isinstance(value, Tensor):
                mine.copy_(value)
        graph.replay()
        return tree_unflatten([o.clone() if isinstance(o, Tensor) else o for o in outputs], out_form)

    def _captured(self, given: list[Any], form: Any) -> Any:
        inputs = [value.clone() if isinstance(value, Tensor) else value for value in given]
        args, kwargs = tree_unflatten(inputs, form)
        try:
            aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(_WARM_UP):
                    out = self.call(*args, **kwargs)
            torch.cuda.current_stream().wait_stream(aside)
            kept = next((type(v).__name__ for v in tree_flatten(out)[0] if not _is_plain(v)), None)
            if kept is not None:
                log_once(f"forward: its outputs hold a {kept}, so calls are not captured in CUDA graphs")
                return None
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = self.call(*args, **kwargs)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # of an operator that cannot be captured
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            log_once(f"forward cannot be captured in a CUDA graph: {first}", logging.WARNING)
            return None
        outputs, out_form = tree_flatten(out)
        return graph, inputs, outputs, out_form

    def clear(self) -> None:
        """Give the graphs and their memory back."""
        self._graphs.clear()


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, Tensor | bool | int | float | str)


def _form(value: Any) -> Any:
    return (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else repr(value)
