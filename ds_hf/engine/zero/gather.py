"""``GatheredParameters``: the whole values of sharded parameters, for as long as a ``with`` block runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ds_hf.engine.comm.collectives import all_reduce_max
from ds_hf.engine.zero.at_rest import LOST_WRITES, name_of
from ds_hf.engine.zero.buffer import FlatBuffer, ParamHome, buffers_of, home_of, unshard
from ds_hf.engine.zero.cut import cut_of
from ds_hf.engine.zero.external import register_external_parameter
from ds_hf.engine.zero.param_names import mark_newcomers
from ds_hf.errors import DsHfError
from ds_hf.log import warn_once

__all__ = ["GatheredParameters", "unwrap_model_for_generation"]


class GatheredParameters:
    """Gather sharded parameters inside a ``with`` block (DeepSpeed's ``zero.GatheredParameters``).

    All ranks must enter it; each may name the parameters in an order of its own. Whatever has no engine - ordinary
    parameters, buffers - is passed over, so the same code runs at every stage: of parameters that every rank has whole,
    what ``modifier_rank`` writes reaches the others and the optimizer's masters too. Blocks may be nested.

    Args:
        params: a parameter, a module, or an iterable of parameters.
        modifier_rank: global rank whose changes are kept, on all ranks, when the block ends; of parameters that are
            divided over processes (tensor parallelism, experts) by those with the same part, and by others of the
            first one of them. ``None``: the values are for reading, changes are lost. Inside a block with the same
            rank, the outer block keeps them.
        fwd_module: also register the parameters as external parameters of this module.
        enabled: ``False`` turns the block into nothing.

    Raises:
        DsHfError: with ``enable_sanity_checks``, at the end of the block, on all ranks: one of them changed a parameter
            and ``modifier_rank`` is ``None``.
    """

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self.params = _as_list(params) if enabled else []
        self.modifier_rank = modifier_rank
        self.buffers: list[FlatBuffer] = []
        self._written: list[FlatBuffer] = []
        self._seen: list[tuple[Tensor, tuple[int, int, int]]] = []
        self._versions: list[tuple[Tensor, Callable[[Tensor], Any], Any]] = []
        self._kept_before: dict[FlatBuffer, int] = {}
        self._held = ExitStack()
        if fwd_module is not None:
            for param in self.params:
                register_external_parameter(fwd_module, param)

    def __enter__(self) -> None:
        found = [*buffers_of(self.params), *_replicated(self.params, all_of_them=self.modifier_rank is not None)]
        # transformers gives a set of parameters, whose order is that of addresses: another one on each rank.
        self.buffers = sorted(found, key=lambda buffer: buffer.number)
        self._held.enter_context(unshard(self.buffers))
        if any(buffer.sharded for buffer in self.buffers):
            mark_newcomers(self.params)
        if self.modifier_rank is None:
            self._kept_before = {buffer: buffer.kept_writes for buffer in self.buffers}
            # A block around this one may keep what is written here.
            watched = [p for b in self.buffers if b.hold.reports_changes and not b.hold.writers for p in b.params]
            given = {id(param) for param in self.params}
            self._seen = [(param, _fingerprint(param)) for param in watched if id(param) in given]
            unwatched = [b for b in self.buffers if not (b.hold.reports_changes or b.hold.writers or b.aliased)]
            for buffer in unwatched:
                buffer.hold.looked_at += bool(buffer.users)  # while a model is loaded that would take time
                sign = _fingerprint if 0 < buffer.hold.looked_at <= _LOOKS else _version
                self._versions += [(p, sign, sign(p)) for p in buffer.owners if id(p) in given]
        else:
            # What a block around this one writes back anyway is left to it: transformers enters inner blocks on the
            # modifier's rank alone.
            self._written = [buffer for buffer in self.buffers if self.modifier_rank not in buffer.hold.writers]
            for buffer in self._written:
                buffer.hold.writers.append(self.modifier_rank)
            _tell_parts(self.params)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for buffer in self._written:
            assert self.modifier_rank is not None
            buffer.hold.writers.remove(self.modifier_rank)
            if kind is None:
                buffer.write_back(buffer.replicas.axis.in_place_of(self.modifier_rank), partly=True)
        self._written = []
        try:
            if kind is None and self._seen:
                _report_changes(self._seen, self._is_kept)
            if kind is None:
                _tell_changes([each for each in self._versions if not self._is_kept(each[0])])
        finally:
            self._seen, self._versions = [], []
            self._held.close()

    def _is_kept(self, param: Tensor) -> bool:
        """A block inside this one kept what was written."""
        home = home_of(param)
        return home is not None and self._kept_before.get(home.buffer) != home.buffer.kept_writes


def _tell_parts(params: list[Tensor]) -> None:
    """Of layers and experts that processes divide the modifier has, and writes, a part."""
    cut = next((param for param in params if cut_of(param) is not None), None)
    if cut is not None:
        warn_once(
            f"{name_of(cut)} is divided over processes, of which each has a part: what modifier_rank writes inside "
            "GatheredParameters reaches those with the same part as it, and of the others the first one's values "
            "count. To change all of it write on every process, each its part",
            about="writes to a part",
        )


_LOOKS = 3  # blocks in which a buffer's values are compared, and not only what torch counts as written


def _version(param: Tensor) -> int:
    return param._version


def _tell_changes(versions: list[tuple[Tensor, Callable[[Tensor], Any], Any]]) -> None:
    """Say what was written and will be lost: as torch counts it, and in the first blocks through ``.data`` too. Not
    collective."""
    for param, sign, before in versions:
        home = home_of(param)
        if home is None or home.buffer.hold.writers or sign(param) == before or _was_merged_for_the_block(param, home):
            continue
        warn_once(
            f"{name_of(param)} was changed inside GatheredParameters(modifier_rank=None) (said once, for the first of "
            "them): the change is lost when the block ends. Give modifier_rank=0 to keep what rank 0 writes; "
            "zero_optimization.enable_sanity_checks makes it an error and compares values too",
            about=LOST_WRITES,
        )
        return


def _was_merged_for_the_block(param: Tensor, home: ParamHome) -> bool:
    """PEFT has merged adapters into it and taken them out again: only rounding is lost, which needs no warning."""
    modules = [m for hooks in home.buffer.users for unit in hooks.units for m in unit.modules if not home.buffer.states]
    layers = (layer for module in modules for layer in module.modules() if hasattr(layer, "merged_adapters"))
    return any(not layer.merged for layer in layers if any(param is each for each in layer.parameters()))


def _fingerprint(param: Tensor) -> tuple[int, int, int]:
    """What changes with the values: where they lie, writes that torch counts, and the sum of their bytes; of the
    classes of libraries, which need not know such operators, what torch counts."""
    values = param.detach()
    if type(values) is not Tensor:
        return 0, param._version, 0
    return values.data_ptr(), param._version, int(values.reshape(-1).view(torch.uint8).sum(dtype=torch.int64))


def _report_changes(seen: list[tuple[Tensor, tuple[int, int, int]]], is_kept: Callable[[Tensor], bool]) -> None:
    """Raise on all ranks if a parameter is not what it was on one of them, and that is not kept. Collective."""
    changed = [param for param, before in seen if not is_kept(param) and _fingerprint(param) != before]
    home = home_of(seen[0][0])
    assert home is not None
    axis = home.buffer.replicas.axis
    told = torch.tensor(float(bool(changed)), dtype=torch.float32, device=home.buffer.device)
    if all_reduce_max(told, axis, "whether parameters were changed").item():
        shapes = ", ".join(str(tuple(param.shape)) for param in changed[:3])
        here = f"here {len(changed)} (of shape {shapes})" if changed else "on another rank"
        raise DsHfError(
            f"parameters were changed inside GatheredParameters(modifier_rank=None), {here}: the change is lost when "
            "the block ends. Give modifier_rank=0 to keep what rank 0 writes (zero_optimization.enable_sanity_checks)"
        )


def _replicated(params: list[Any], *, all_of_them: bool) -> list[FlatBuffer]:
    """Buffers that no rank shards: what one rank writes to them has to reach the others as well. Where nothing is
    written, only those of small parameters among sharded ones."""
    homes = [home_of(param) for param in params if isinstance(param, Tensor)]
    found = dict.fromkeys(home.buffer for home in homes if home is not None and not home.buffer.sharded)
    return [buffer for buffer in found if all_of_them or buffer.kept_whole]


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Keep all parameters of an engine gathered inside the context, so that generating gathers nothing. Collective."""
    with GatheredParameters(model.parameters()):
        yield model


def _as_list(params: Any) -> list[Any]:
    if isinstance(params, nn.Module):
        return list(params.parameters())
    if isinstance(params, Iterable) and not hasattr(params, "requires_grad"):
        return list(params)
    return [params]
