"""Compiled blocks on the meta device: what AOTAutograd saves of a block for backward, and when that is let go.

A block is traced as torch.compile's backend traces it and divided into forward and backward by the same partitioner,
under the same ``activation_memory_budget``. Both then run operator by operator. Inductor fuses operators, so of what
lives inside one block for a moment a GPU holds less.

Dynamo itself cannot take part: it leaves code alone as long as a dispatch mode, such as the one that counts, is there.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from ds_hf.engine.modules.compiling import StandIn
from ds_hf.memory.kernels import AsOnCuda
from ds_hf.memory.prediction import UnpredictableError

__all__ = ["CompiledBlocks"]

_PLAIN = (bool, int, float, str, type(None))
_NUMBER = "layer_idx"  # of a block in its model; without a cache of keys and values nothing depends on it


class CompiledBlocks:
    """Puts the divided code of each of ``blocks`` in the place of its ``forward``; ``remove`` takes it away.

    Alike blocks share their code. A block that cannot be traced without values stays as it is and takes more than it
    would compiled; ``eager`` has the reason.

    Args:
        blocks: on the meta device.
        budget: ``ds_hf.activation_memory_budget``.
    """

    def __init__(self, blocks: Iterable[nn.Module], budget: float | None) -> None:
        self.budget = budget
        self.eager: dict[nn.Module, str] = {}
        self._codes: dict[Hashable, Callable[..., Any]] = {}
        self._blocks = list(blocks)
        for block in self._blocks:
            block.__dict__["forward"] = StandIn(block, "forward", partial(self._call, block, block.forward))

    def remove(self) -> None:
        """Give the blocks their own forward back."""
        for block in self._blocks:
            del block.__dict__["forward"]
        self._blocks.clear()

    def _call(self, block: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        leaves, form = tree_flatten((args, kwargs))
        rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        checkpointed = getattr(block, "gradient_checkpointing", False) and block.training  # keeps inputs, eager or not
        if not torch.is_grad_enabled() or checkpointed or block in self.eager:
            return forward(*args, **kwargs)
        if not all(isinstance(leaf, (*_PLAIN, torch.dtype)) for leaf in rest):
            self.eager[block] = "it is given what is neither a tensor nor a number"
            return forward(*args, **kwargs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        states = {name: value for named in (block.named_parameters, block.named_buffers) for name, value in named()}
        kind = (_looks(block), form, tuple(rest), tuple(map(_meta, tensors)), tuple(map(_meta, states.values())))
        try:
            if kind not in self._codes:
                code = self._trace(_Holder(block, forward), list(states), leaves, form)
                with _disable_current_modes(), _told_by_us(), _nothing_recorded():  # the first call traces
                    code(list(states.values()), tensors)
                self._codes[kind] = code
            return self._codes[kind](list(states.values()), tensors)
        except Exception as error:  # whatever a forward raises that looks at values
            self.eager[block] = f"{type(error).__name__}: {error}"
            return forward(*args, **kwargs)

    def _trace(self, holder: _Holder, names: list[str], leaves: list[Any], form: Any) -> Callable[..., Any]:
        """``code(states, tensors)``, divided when it is called first."""
        from functorch.compile import (  # type: ignore[import-untyped]
            aot_function,
            min_cut_rematerialization_partition,
        )
        from torch._functorch import config
        from torch._inductor.decomposition import select_decomp_table

        places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        kept = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

        def compute(states: list[Tensor], tensors: list[Tensor]) -> Any:
            given = list(kept)
            for place, tensor in zip(places, tensors, strict=True):
                given[place] = tensor
            args, kwargs = tree_unflatten(given, form)
            by_name = {f"block.{name}": state for name, state in zip(names, states, strict=True)}
            with AsOnCuda():
                return torch.func.functional_call(holder, by_name, args, kwargs)

        def divide(*args: Any, **kwargs: Any) -> Any:
            with config.patch({} if self.budget is None else {"activation_memory_budget": self.budget}):
                return min_cut_rematerialization_partition(*args, compiler="inductor", **kwargs)

        return aot_function(  # type: ignore[no-any-return]
            compute,
            fw_compiler=_as_it_is,
            bw_compiler=_as_it_is,
            partition_fn=divide,
            decompositions=select_decomp_table(),
        )


@contextmanager
def _told_by_us() -> Iterator[None]:
    """torch logs a traceback of an operator that it cannot trace; here the block counts as eager."""
    told = logging.getLogger("torch._subclasses.fake_tensor")
    before = told.level
    told.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        told.setLevel(before)


@contextmanager
def _nothing_recorded() -> Iterator[None]:
    """Hooks of transformers record outputs of a block's modules (router logits, for the balance of experts): none that
    were made while it was traced stay.

    Raises:
        UnpredictableError: there were such, which divided code would not give.
    """
    collector = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    recorded = {} if collector is None else {k: v for k, v in (collector.get() or {}).items() if isinstance(v, list)}
    before = {name: len(outputs) for name, outputs in recorded.items()}
    try:
        yield
    finally:
        grown = [name for name, outputs in recorded.items() if len(outputs) > before[name]]
        for name in grown:
            del recorded[name][before[name] :]
    if grown:
        raise UnpredictableError(f"{', '.join(grown)} of its modules are recorded outside of it")


class _Holder(nn.Module):
    """Calls a block's forward past its hooks."""

    def __init__(self, block: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.block, self.compute = block, forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.compute(*args, **kwargs)


def _as_it_is(graph: GraphModule, inputs: Any) -> Callable[[list[Any]], Any]:
    """Runs a graph operator by operator, and lets go of inputs and results after their last use, as inductor does."""

    def run(args: list[Any]) -> Any:
        return Interpreter(graph).boxed_run(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _looks(block: nn.Module) -> Hashable:
    """Equal for blocks that compute the same: classes, and what they are set to."""
    return tuple(
        (
            name,
            type(module),
            tuple(sorted((key, repr(value)) for key, value in vars(module).items() if _counts(key, value))),
        )
        for name, module in block.named_modules()
    )


def _counts(key: str, value: Any) -> bool:
    return key != _NUMBER and isinstance(value, (*_PLAIN, tuple))


def _meta(tensor: Tensor) -> Hashable:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad
