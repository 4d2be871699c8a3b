"""Packed documents in models that carry a state along a row: layers of recurrence and convolution compute each apart.

Such a layer of transformers resets its state between documents at most in kernels that are given their bounds, and its
own code of torch never does: what one document left changes the next. Where positions begin again inside a row, its
hidden states are taken apart into a row for each document, and put back. Attention has masks for that, which
transformers makes of positions as long as there is no cache, so none is kept while such a batch is computed.
"""

from __future__ import annotations

import inspect
import re
import sys
import weakref
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ds_hf.engine.events import Observer
from ds_hf.engine.modules.compiling import StandIn
from ds_hf.engine.zero.hooks import Hook
from ds_hf.engine.zero.unit import in_backward
from ds_hf.errors import DsHfError
from ds_hf.log import warn_once

__all__ = ["Bounds", "Documents", "attach", "bounds_of", "is_recurrent"]

_CLASS = re.compile(
    r"(GatedDeltaNet|DeltaAttention|Mamba2?Mixer|(Bamba|FalconH1)Mixer|MambaLayer|ShortConv|RecurrentBlock|LightningAttention)$"
)
_BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
_DROPPED = (*_BOUNDS, "position_ids", "cache_position", "position_embeddings")
_CACHES = ("cache_params", "past_key_values", "past_key_value")


class Bounds(NamedTuple):
    """Documents of a batch.

    Attributes:
        rows: int64 ``[documents, longest]``: places among ``batch * positions``; -1 behind a document's end.
        shape: batch and positions.
    """

    rows: Tensor
    shape: tuple[int, int]


def is_recurrent(module: nn.Module) -> bool:
    """Whether a layer carries a state along a row."""
    return bool(_CLASS.search(type(module).__name__))


def bounds_of(kwargs: Mapping[str, Any]) -> Bounds | None:
    """Of a model's arguments; ``None`` where no row has several documents. Waits for the device."""
    tokens = kwargs.get("input_ids") if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")
    places, ends = kwargs.get("position_ids"), kwargs.get("cu_seq_lens_q")
    if not isinstance(tokens, Tensor) or tokens.ndim < 2:
        return None
    batch, positions = tokens.shape[:2]
    starts = torch.zeros(batch, positions, dtype=torch.bool)
    if isinstance(places, Tensor) and places.ndim >= 2 and places.shape[-1] == positions:
        found = (places[0] if places.ndim == 3 else places).detach().cpu().expand(batch, positions)
        starts[:, 1:] = (found[:, 1:] < found[:, :-1]) | (found[:, 1:] == found.min())
    elif isinstance(ends, Tensor) and batch == 1:
        inner = ends.detach().cpu().long()
        starts[0, inner[(inner > 0) & (inner < positions)]] = True
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        starts &= mask.detach().cpu() != 0  # positions of padding say nothing
    if not bool(starts.any()):
        return None
    starts[:, 0] = True
    begins = starts.flatten().nonzero().flatten()
    lengths = torch.diff(begins, append=torch.tensor([batch * positions]))
    longest = torch.arange(int(lengths.max()))
    rows = torch.where(longest < lengths[:, None], begins[:, None] + longest, -1)
    return Bounds(rows.to(tokens.device), (batch, positions))


class Documents(Observer):
    """Keeps documents of packed batches apart in ``model``'s recurrent layers."""

    def __init__(self, engine: Any) -> None:
        model = engine.module
        self._engine = weakref.ref(engine)  # which models that outlive it do not keep
        self.layers = [module for module in model.modules() if is_recurrent(module)]
        self._bounds: Bounds | None = None
        self._seen: list[Bounds | None] = []  # of calls whose backward may be to come
        self._when: tuple[int, int] = (-1, -1)
        self._open: dict[int, list[Bounds]] = {}
        names = [name for name, _ in zip(inspect.signature(model.forward).parameters, range(8), strict=False)]
        self._names = names
        self._handles = [model.register_forward_pre_hook(Hook(self._begin), with_kwargs=True, prepend=True)]
        self._hooked = self._looked = False
        self._eager: list[StandIn] = []

    def _hook_layers(self) -> None:
        """With the first packed batch: layers of others have no hooks, which compiled blocks would have to trace."""
        self._hooked = True
        outside = torch.compiler.disable if "torch._dynamo" in sys.modules else _as_it_is
        for index, layer in enumerate(self.layers):
            names = list(inspect.signature(layer.forward).parameters)
            before, after = outside(_Apart(self, index, names)), outside(_Together(self, index, names))
            if outside is not _as_it_is and "forward" not in vars(layer):  # numbers of rows differ from batch to batch
                self._eager.append(StandIn(layer, "forward", outside(layer.forward)))
                layer.__dict__["forward"] = self._eager[-1]
            self._handles.append(layer.register_forward_pre_hook(Hook(before), with_kwargs=True))
            self._handles.append(layer.register_forward_hook(Hook(after), with_kwargs=True))

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        cached = given.get("past_key_values") is not None
        packs = isinstance(given.get("position_ids"), Tensor) or given.get("cu_seq_lens_q") is not None
        looks = self.layers and packs and not cached and not self._by_kernels(given)
        self._bounds = bounds_of(given) if looks else None
        if self._bounds is not None and not self._hooked:
            self._hook_layers()
        self._open.clear()
        if torch.is_grad_enabled():
            engine = self._engine()
            when = (-1, -1) if engine is None else (engine.global_steps, engine.reducer.backwards)
            self._seen = [*(self._seen if when == self._when else ()), self._bounds]
            self._when = when
        config = getattr(module, "config", None)
        if not packs or cached:
            return None
        if given.get("attention_mask") is not None:
            self._look_at_mask(config, given)
            return None
        # An evaluation keeps its cache, but not of packed documents: nothing is generated after such a row.
        keeps = getattr(config, "use_cache", False) and given.get("use_cache") is None
        if keeps and (module.training or self._bounds is not None or bounds_of(given) is not None):
            return args, {**kwargs, "use_cache": False}
        return None

    def _look_at_mask(self, config: Any, given: Mapping[str, Any]) -> None:
        """Tell, of the first batch, that transformers makes no mask of documents where one of padding is given."""
        places, mask = given.get("position_ids"), given["attention_mask"]
        if self._looked or torch.compiler.is_compiling() or not hasattr(config, "num_attention_heads"):
            return
        self._looked = True
        if not (isinstance(places, Tensor) and isinstance(mask, Tensor) and places.ndim == mask.ndim == 2):
            return
        inside = mask != 0
        again = (places[:, 1:] < places[:, :-1]) & inside[:, 1:] & inside[:, :-1]
        if bool(again.any()):
            warn_once(
                "positions begin again inside a row, as of packed documents, and a batch has an attention_mask as "
                "well: with it transformers lets each document attend to those before it. Leave attention_mask out "
                "of packed batches",
                about="packed documents beside a mask",
            )

    @staticmethod
    def _by_kernels(kwargs: Mapping[str, Any]) -> bool:
        """Whether kernels are there and are told all bounds."""
        told = kwargs.get("cu_seq_lens_q") is not None and kwargs.get("seq_idx") is not None
        return told and torch.cuda.is_available() and all(map(find_spec, ("fla", "causal_conv1d")))

    def apart(self, index: int, names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A layer's arguments with a row for each document."""
        bounds = self._now()
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        hidden = given.get("hidden_states", args[0] if args else None)
        if bounds is None or not isinstance(hidden, Tensor) or hidden.shape[:2] != bounds.shape:
            return None
        first = next(name for name, value in given.items() if value is hidden)
        flat = hidden.flatten(0, 1)
        rows = flat[bounds.rows.clamp(min=0)] * (bounds.rows >= 0).unsqueeze(-1).to(flat.dtype)
        changed = {first: rows}
        for name, value in given.items():
            if name == first or not (isinstance(value, Tensor | tuple) or name in _CACHES):
                continue
            if name not in (*_DROPPED, *_CACHES) and "mask" not in name:
                raise DsHfError(
                    f"packed documents: a layer of recurrence is given {name}, and what of it belongs to a document is "
                    "not known. Give each document a row of its own (packing=False, padding_free=False)"
                )
            changed[name] = None  # type: ignore[assignment]
        self._open.setdefault(index, []).append(bounds)
        kept = {name: changed.get(name, value) for name, value in given.items() if name not in _BOUNDS}
        return tuple(kept.pop(name) for name in names[: len(args)]), kept

    def together(self, index: int, output: Any) -> Any:
        """A layer's output with the rows of the batch."""
        if not self._open.get(index):
            return None
        bounds = self._open[index].pop()
        rows = output if isinstance(output, Tensor) else output[0]
        inside = bounds.rows >= 0
        flat = rows.new_zeros(bounds.shape[0] * bounds.shape[1], *rows.shape[2:])
        whole = flat.index_put((bounds.rows[inside],), rows[inside]).unflatten(0, bounds.shape)
        return whole if isinstance(output, Tensor) else type(output)([whole, *output[1:]])

    def _now(self) -> Bounds | None:
        """The documents of the call that is computed, also again in backward."""
        if not in_backward() or len(self._seen) < 2:
            return self._bounds
        if any(each is not None for each in self._seen):
            raise DsHfError(
                "packed documents, checkpointed layers, and several calls of the model before their backward: which "
                "documents a layer computes again is not known. Call backward after each, or leave checkpointing out"
            )
        return None

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        for eager in self._eager:
            if vars(eager.module).get("forward") is eager:
                del eager.module.__dict__["forward"]


def _as_it_is(hook: Any) -> Any:
    return hook


class _Apart:
    def __init__(self, documents: Documents, index: int, names: list[str]) -> None:
        self.documents, self.index, self.names = documents, index, names

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.documents.apart(self.index, self.names, args, kwargs)


class _Together(_Apart):
    def __call__(self, layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Any = None) -> Any:
        return self.documents.together(self.index, output)


def attach(engine: Any) -> None:
    """Keep documents apart from now on."""
    engine.events.add(Documents(engine))
