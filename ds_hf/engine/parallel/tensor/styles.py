"""The styles of Hugging Face's tensor-parallel plans: how parameters are cut, and what the layer computes then.

A cut module keeps its identity, its parameters and its hooks; only its class becomes one that is derived from its own
and has another ``forward``. So ``isinstance`` still holds, copies compute as the original does, and compiled blocks
see plain code.

===================================  ================================  ============================================
style                                cut                               forward
===================================  ================================  ============================================
colwise                              outputs, bias                     copy in
colwise_rep, colwise_gather_output   the same                          copy in, gather the outputs
packed_colwise                       each of two packed matrices       copy in
rowwise                              inputs                            sum of the outputs, then the bias once
rowwise_rep, rowwise_split_input     the same                          split the input, then as rowwise
packed_rowwise                       inputs, as two packed ones        as rowwise
embedding_rowwise                    vocabulary                        rows that are here, sum
embedding_colwise                    hidden size                       gather
replicated_with_grad_allreduce       nothing                           its gradient is summed over the axis
all_reduce                           nothing                           sum of the outputs
moe_tp_experts                       by entries of its parameters      copy in, sum of the outputs
mla_kv_a_proj                        nothing                           copy of the rotary part of the output
local_params, replicate              nothing                           as before
===================================  ================================  ============================================
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_hf.engine.parallel.tensor.functions import (
    Place,
    copy_behind,
    copy_to,
    gather_heads,
    gather_last,
    reduce_from,
    split_last,
)
from ds_hf.engine.zero.cut import is_cut
from ds_hf.errors import DsHfError

__all__ = [
    "ALONE",
    "FUSED",
    "STYLES",
    "AlibiPart",
    "ColwiseGathered",
    "CutModule",
    "Style",
    "change_own_class",
    "derived_class",
    "is_transposed",
    "own_class",
    "part_of_outputs",
    "place_of",
    "swap_class",
]


class CutModule(nn.Module):
    """What the classes below have in common: the first base of the class of a cut module."""

    gather_output = False
    _ds_place: Place
    _ds_plain: bool  # a linear layer of torch or transformers, whose product is computed here


def place_of(module: nn.Module) -> Place | None:
    """``None`` for a module that is not cut."""
    found: Place | None = module.__dict__.get("_ds_place")
    return found


class Colwise(CutModule):
    """Computes this process's part of the outputs, and gathers heads that it shares with neighbours."""

    _ds_heads: Place | None = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        part = super().forward(copy_to(x, self._ds_place, owns_gradient=self._ds_plain), *args, **kwargs)
        return part if self._ds_heads is None else gather_heads(part, self._ds_heads)


class ColwiseFused(Colwise):
    """The same of several matrices in one, each of which is cut."""


class ColwiseGathered(Colwise):
    """Computes its part of the outputs, and gathers all, unless it is called by ``part_of_outputs``."""

    gather_output = True
    _ds_in_part = False

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        part = super().forward(x, *args, **kwargs)
        return part if self._ds_in_part else gather_last(part, self._ds_place)


def part_of_outputs(module: ColwiseGathered, x: Tensor) -> Tensor:
    """What ``module(x)`` would gather: this process's outputs ``[..., n / processes]``."""
    module.__dict__["_ds_in_part"] = True
    try:
        part: Tensor = module(x)
    finally:
        del module.__dict__["_ds_in_part"]
    module._ds_place.copied[0] = None
    return part


class Rowwise(CutModule):
    """Takes its part of the inputs; the outputs are summed, and the bias is added once."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        weight, bias = self.weight, getattr(self, "bias", None)
        if not self._ds_plain and bias is None:
            return reduce_from(super().forward(x, *args, **kwargs), self._ds_place)
        assert isinstance(weight, Tensor)
        parts = torch.matmul(x, weight) if is_transposed(self) else F.linear(x, weight)
        total = reduce_from(parts, self._ds_place, in_place=True)
        return total if bias is None else total + bias.to(total.dtype)


class RowwiseFused(Rowwise):
    """The same of several matrices in one."""


class RowwiseSplit(Rowwise):
    """The same of an input that is whole."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(split_last(x, self._ds_place), *args, **kwargs)


class VocabularyEmbedding(CutModule):
    """Looks up the rows that are here; what others have is zero until the sum."""

    _ds_first_row: int

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        weight = self.weight
        assert isinstance(weight, Tensor)
        rows = ids - self._ds_first_row
        elsewhere = (rows < 0) | (rows >= weight.shape[0])
        found = super().forward(rows.masked_fill(elsewhere, 0), *args, **kwargs)
        return reduce_from(found.masked_fill(elsewhere.unsqueeze(-1), 0), self._ds_place, in_place=True)


class ColumnsEmbedding(CutModule):
    """Looks up a part of each vector, and gathers all."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return gather_last(super().forward(*args, **kwargs), self._ds_place)


class AllReduced(CutModule):
    """Its outputs are parts of a sum; layers in it that are cut know their inputs, parameters of its own do not."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if any(param is not None and is_cut(param) for param in self._parameters.values()):
            args, kwargs = tuple(map(self._copied, args)), {key: self._copied(value) for key, value in kwargs.items()}
        found = super().forward(*args, **kwargs)
        return None if found is None else reduce_from(found, self._ds_place)

    def _copied(self, value: Any) -> Any:
        is_input = isinstance(value, Tensor) and value.is_floating_point()
        return copy_to(value, self._ds_place) if is_input else value


class Experts(CutModule):
    """Each process has a part of every expert: of ``(hidden states, indices, routing weights, ...)``, or the first."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        routed = list(args)
        if len(routed) >= 2:
            routed[1] = copy_to(routed[1], self._ds_place)
        return reduce_from(super().forward(copy_to(hidden, self._ds_place), *routed, **kwargs), self._ds_place)


class RotaryPart(CutModule):
    """The compressed keys and values of MLA, whole: their rotary part goes to each process's heads directly."""

    _ds_rotary: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        return copy_behind(found, found.shape[-1] - self._ds_rotary, self._ds_place)


class AlibiPart(CutModule):
    """Attention that is given a bias for all heads (ALiBi of Bloom and Falcon), ``[batch * heads, ...]``: it takes that
    of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        alibi, place = kwargs.get("alibi"), self._ds_place
        if isinstance(alibi, Tensor):
            hidden = args[0] if args else kwargs["hidden_states"]
            parts = alibi.view(hidden.shape[0], place.axis.world_size, -1, *alibi.shape[1:])
            kwargs["alibi"] = parts[:, place.axis.rank].flatten(0, 1)
        return super().forward(*args, **kwargs)


ALONE = (ColwiseGathered, RowwiseSplit, VocabularyEmbedding, ColumnsEmbedding)  # inputs and outputs are whole


@dataclass(frozen=True)
class Style:
    """One row of the table.

    Attributes:
        module: base of the class that a module of the style gets; ``None`` where its forward stays.
        cuts: ``"out"``, ``"in"``, ``"rows"`` (of an embedding), ``"columns"``, or nothing.
        packed: so many matrices lie one after another along the cut dimension.
        sums_gradient: the parameters are whole, and each process has a part of their gradient.
        takes_parameter: a plan may name a parameter, and not only a module.
    """

    module: type[CutModule] | None = None
    cuts: str = ""
    packed: int = 1
    sums_gradient: bool = False
    takes_parameter: bool = False

    @property
    def gathers(self) -> bool:
        """Whether what it computes is whole again."""
        return self.module is ColwiseGathered

    @property
    def stands_alone(self) -> bool:
        """Whether inputs and outputs are whole, so that a layer that is not cut takes its place."""
        return self.module in ALONE


STYLES = {
    "colwise": Style(Colwise, "out", takes_parameter=True),
    "colwise_rep": Style(ColwiseGathered, "out"),
    "colwise_gather_output": Style(ColwiseGathered, "out"),
    "packed_colwise": Style(Colwise, "out", packed=2, takes_parameter=True),
    "rowwise": Style(Rowwise, "in", takes_parameter=True),
    "rowwise_rep": Style(RowwiseSplit, "in"),
    "rowwise_split_input": Style(RowwiseSplit, "in"),
    "packed_rowwise": Style(Rowwise, "in", packed=2, takes_parameter=True),
    "embedding_rowwise": Style(VocabularyEmbedding, "rows"),
    "embedding_colwise": Style(ColumnsEmbedding, "columns"),
    "replicated_with_grad_allreduce": Style(sums_gradient=True, takes_parameter=True),
    "all_reduce": Style(AllReduced),
    "moe_tp_experts": Style(Experts),
    "mla_kv_a_proj": Style(RotaryPart),
    "local_params": Style(),
    "replicate": Style(takes_parameter=True),
}


FUSED = {"out": Style(ColwiseFused, "out"), "in": Style(RowwiseFused, "in")}  # by DeepSpeed's ``shape``


def is_transposed(module: nn.Module) -> bool:
    """transformers' ``Conv1D``, the linear layer of GPT-2: its weight is ``[inputs, outputs]``."""
    return any(cls.__name__ == "Conv1D" and "transformers" in cls.__module__ for cls in type(module).__mro__)


def swap_class(module: nn.Module, base: type[CutModule], place: Place, **known: Any) -> None:
    """Give ``module`` the class that computes as ``base`` says, which finds ``known`` in it."""
    own = type(module)
    plain = own.forward is nn.Linear.forward or is_transposed(module)
    module.__dict__.update(_ds_place=place, _ds_plain=plain, **known)
    module.__class__ = derived_class(base, own)


def change_own_class(module: nn.Module, change: Callable[[type[nn.Module]], type[nn.Module]]) -> None:
    """Give ``module`` the class that ``change`` makes of its own, and what it computes stays as ``swap_class`` said."""
    base, own = next((pair for pair, made in _DERIVED.items() if type(module) is made), (None, type(module)))
    module.__class__ = change(own) if base is None else derived_class(base, change(own))


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class that ``module`` had before ``swap_class``."""
    return next((own for (_, own), made in _DERIVED.items() if type(module) is made), type(module))


_DERIVED: dict[tuple[type[CutModule], type[nn.Module]], type[nn.Module]] = {}


def derived_class(base: type[CutModule], own: type[nn.Module]) -> type[nn.Module]:
    """One class for each pair, by which compiled code is shared."""
    if (base, own) in _DERIVED:
        return _DERIVED[base, own]
    methods = {"__module__": __name__, "__deepcopy__": _copy, "__reduce_ex__": _refuse}
    made = _DERIVED[base, own] = type(f"{base.__name__}{own.__name__}", (base, own), methods)
    return made


def _copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy has parts of the parameters, too, and computes with the same processes."""
    copied = memo[id(module)] = type(module).__new__(type(module))
    copied.__setstate__(copy.deepcopy(module.__dict__, memo))  # type: ignore[no-untyped-call]
    return copied


def _refuse(module: nn.Module, protocol: Any) -> Any:
    raise DsHfError(
        f"{type(module).__name__} cannot be pickled: its parameters are parts that mean nothing without the other "
        "tensor-parallel processes. save_16bit_model() and export_pretrained() write whole ones"
    )
