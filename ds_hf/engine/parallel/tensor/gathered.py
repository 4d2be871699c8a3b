"""Whole values of cut parameters, for as long as a block runs: ``GatherReplacedLayerParams``, and the two functions
that DeepSpeed puts on each cut parameter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ds_hf.engine.comm import collectives
from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.zero.buffer import buffers_of, home_of, unshard
from ds_hf.engine.zero.cut import Cut, cut_of

__all__ = ["Divided", "GatherReplacedLayerParams", "divided_over", "mark_divided", "was_gathered"]


class Divided:
    """How a cut parameter is divided: its cuts on all processes of the tensor axis. The parameter's ``_ds_divided``.

    Attributes:
        axis: the processes; cuts: of each of them.
        local: what was here before the parameter was gathered.
        shown: it was gathered where graphs are made, so what is in them may be of all of it.
    """

    def __init__(self, axis: Axis, cuts: Sequence[Cut]) -> None:
        self.axis, self.cuts = axis, tuple(cuts)
        self.local: Tensor | None = None
        self.shown = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Divided:
        return Divided(self.axis, self.cuts)

    def __reduce__(self) -> tuple[Any, tuple[()]]:  # a pickle has no processes
        return _nothing, ()

    @torch.no_grad()
    def gather(self, param: Tensor) -> None:
        """Make ``param`` whole. Collective over the axis."""
        if self.local is not None:
            return
        self.local = local = param.data
        most = max(cut.shape.numel() for cut in self.cuts)
        mine = local.new_zeros(most)
        mine[: local.numel()] = local.reshape(-1)
        parts = local.new_empty(self.axis.world_size, most)
        collectives.all_gather(parts.view(-1), mine, self.axis, "the parts of a cut parameter")
        whole = local.new_empty(self.cuts[0].whole)
        for cut, part in zip(self.cuts, parts, strict=True):
            cut.put(whole, part[: cut.shape.numel()].view(cut.shape))
        param.data = whole

    @torch.no_grad()
    def partition(self, param: Tensor) -> bool:
        """Make ``param`` the part again that is here, with the values it has now; whether those are new."""
        local, self.local = self.local, None
        if local is None:
            return False
        values = self.cuts[self.axis.rank].take(param.data)
        changed = not torch.equal(values, local)
        if changed:
            local.copy_(values)
        param.data = local
        return changed


def _nothing() -> None:
    return None


def _itself(param: Any) -> Any:
    """The parameter that was read by name, of which the reader may have got a view (``reads``)."""
    return getattr(param, "_ds_read_of", param)


def divided_over(param: nn.Parameter, axis: Axis, cuts: Sequence[Cut]) -> None:
    """Let ``param`` be gathered by name: DeepSpeed's marks and functions."""
    param._ds_divided = Divided(axis, cuts)  # type: ignore[attr-defined]
    mark_divided(param)


def mark_divided(param: nn.Parameter) -> None:
    """DeepSpeed's marks and functions, of a parameter that is divided over the tensor axis."""
    param.tensor_model_parallel = param.ds_is_replaced_module = True  # type: ignore[attr-defined]
    param.partition_dim = param._ds_divided.cuts[0].dim  # type: ignore[attr-defined]
    param.gather_params, param._tp_partition = _gather, _partition  # type: ignore[attr-defined]


def _gather(params_list: Sequence[Tensor | None]) -> None:
    """``param.gather_params([param])``: whole values, until ``_tp_partition``. Collective."""
    for param in map(_itself, params_list):
        if param is not None and (divided := getattr(param, "_ds_divided", None)) is not None:
            divided.shown |= torch.is_grad_enabled()
            divided.gather(param)


def was_gathered(param: Tensor) -> bool:
    """Whether graphs may have all of ``param``."""
    return getattr(getattr(param, "_ds_divided", None), "shown", False)


def _partition(params_list: Sequence[Tensor | None]) -> None:
    """``param._tp_partition([param])``: the part that is here, of the values that the parameter has now."""
    for param in map(_itself, params_list):
        if param is not None and (divided := getattr(param, "_ds_divided", None)) is not None:
            _take_over([param] if divided.partition(param) else [])


def _take_over(changed: Iterable[Tensor]) -> None:
    """Tell the masters behind changed parameters."""
    homes = [home for param in changed if (home := home_of(param)) is not None]
    for buffer in dict.fromkeys(home.buffer for home in homes):
        buffer.write_back()


class GatherReplacedLayerParams:
    """Whole values of cut parameters inside a ``with`` block (DeepSpeed's ``module_inject.layers``). Collective.

    What is written to them inside, alike on all processes, is kept. Shards of ZeRO stage 3 are gathered as well.
    Parameters that are not cut are passed over.

    Args:
        params: a parameter, or an iterable of parameters.
        module: for DeepSpeed's signature.
        enabled: ``False`` turns the block into nothing.
    """

    def __init__(self, params: Any, module: nn.Module | None = None, enabled: bool = True) -> None:
        given = list(params) if isinstance(params, Iterable) and not isinstance(params, Tensor) else [params]
        given = [_itself(p) for p in given]
        self.params = [p for p in given if enabled and isinstance(p, Tensor) and cut_of(p) is not None]
        self.params = [p for p in dict.fromkeys(self.params) if getattr(p, "_ds_divided", None) is not None]
        self._held = ExitStack()

    def __enter__(self) -> None:
        self._held.enter_context(unshard(buffers_of(self.params)))
        _gather(self.params)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            changed = [param for param in self.params if param._ds_divided.partition(param)]  # type: ignore[attr-defined]
            if kind is None:
                _take_over(changed)
        finally:
            self._held.close()
