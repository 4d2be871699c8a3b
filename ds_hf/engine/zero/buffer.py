"""Flat buffers: the values of the parameters of one layout, whole or sharded, and the parameters as views of them.

Invariants
- ``full`` is ``[numel]``, ``shard`` is ``[shard_numel]``, both in the parameters' dtype.
- Replicated: ``full`` always has its storage, ``shard`` is this rank's slice of it, ``param.data`` are views of it.
- Sharded and released: ``full`` has no storage and ``param.data`` is an empty tensor, so that misuse is a Python
  error and never a read of freed memory; the parameter is of the class ``rests_as`` (``at_rest``). Gathered again,
  ``full`` refills *the same storage object*, so tensors that autograd saved as views of it (``weight.t()``) are valid
  again in backward.
- With one process ``full`` *is* ``shard``: gathering attaches views and copies nothing.
- Where gathers are rounded, ``gather`` gives the model rounded values, the same on all ranks; what is saved, shown to
  users or written back comes from ``gather_exactly``.
- Gathers run on the buffer's stream: in flight, ``full`` has its storage, and parameters are as if released. Replicated
  and in flight, after a step, they are guarded (``pending``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ds_hf.engine.comm import collectives
from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.comm.streams import Awaited, CommStream, wait
from ds_hf.engine.events import Waits
from ds_hf.engine.zero.at_rest import AtRest, ParamStatus, Released, is_ordinary, name_of, tell_lost_write, wake
from ds_hf.engine.zero.gathering import Gathering
from ds_hf.engine.zero.layout import ALIGNMENT, FlatLayout, Fragment, Labels, Slot
from ds_hf.engine.zero.param_names import mark, unmark
from ds_hf.engine.zero.pending import can_be_pending, mark_arrived, mark_pending
from ds_hf.engine.zero.replicas import Replicas
from ds_hf.engine.zero.storage import DeviceShardStorage, ShardStorage, differ
from ds_hf.errors import DsHfError

__all__ = [
    "BufferState",
    "FlatBuffer",
    "ParamHome",
    "ParamStatus",
    "StateHolder",
    "buffers_of",
    "home_of",
    "leave_home",
    "logical_shape",
    "own_dtype",
    "unshard",
]


NOTICED_EVERY = 23  # releases, the first few; odd, as each micro-batch makes two of them


class BufferState(Enum):
    RELEASED = "released"
    IN_FLIGHT = "in flight"
    GATHERED = "gathered"


class ParamHome:
    """Back-reference from a parameter to its place. Pickles and deep-copies as ``None``: a copy has no place."""

    __slots__ = ("buffer", "slot")

    def __init__(self, buffer: FlatBuffer, slot: Slot) -> None:
        self.buffer = buffer
        self.slot = slot

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return _no_home, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def leave(self, param: Tensor) -> None:
        """Make ``param``, whose home this is, an ordinary parameter."""
        self.buffer.give_up(param)
        wake(param)
        unmark(param)
        del param._ds_home  # type: ignore[attr-defined]


def _no_home() -> None:
    return None


def home_of(param: Tensor) -> ParamHome | None:
    """Where the values of ``param`` live, ``None`` for an ordinary tensor."""
    home: ParamHome | None = getattr(param, "_ds_home", None)
    return home


def logical_shape(param: Tensor) -> torch.Size:
    """Shape of the whole parameter, also while it is released."""
    home = home_of(param)
    return param.shape if home is None else home.slot.shape


class StateHolder(Protocol):
    """What keeps the states behind a buffer's values; tensors are flat and cover what the rank owns."""

    def master(self, buffer: FlatBuffer) -> Tensor | None:
        """Master weights, ``[owned]`` as a rule in fp32; ``None`` when no optimizer updates the buffer."""

    def values_changed(self, buffer: FlatBuffer, *, partly: bool = False) -> None:
        """The parameters' values were written from outside: take masters from them, or ``partly``: only of those
        elements that are not what their masters round to."""


@dataclass
class Hold:
    """The contexts that want a buffer to stay gathered.

    Attributes:
        count: how many there are.
        release_wanted: a release came meanwhile.
        writers: ranks whose changes an open ``GatheredParameters`` will keep.
        reports_changes: what is written where nothing is kept is an error (``enable_sanity_checks``).
        looked_at: in how many contexts where nothing is kept it was asked whether something was written.
        looks: after how many uses it will still be asked, outside of contexts.
        turns: releases so far, of which some let a parameter rest as one that notices reads.
    """

    count: int = 0
    release_wanted: bool = False
    writers: list[int] = field(default_factory=list)
    reports_changes: bool = False
    looked_at: int = 0
    looks: int = 0
    turns: int = 0


class FullMemory:
    """The memory of all values of a buffer, given back and filled again in the same storage object.

    Attributes:
        tensor: ``[numel]``.
        storage: its storage.
        own_users: tensors of the engine that share the storage: ``tensor`` and the views of it.
        users_at_rest: tensors that share that of a replicated buffer when only the engine and the model look at it.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.storage = tensor, tensor.untyped_storage()
        self.own_users = self.users_at_rest = 0

    def users(self) -> int:
        """How many tensors share the storage."""
        return torch._C._storage_Use_Count(self.storage._cdata)


class FlatBuffer:
    """Values of ``params`` in one flat tensor.

    Args:
        params: distinct parameters, in layout order.
        axis: the processes over which the states of the parameters are divided: shards are numbered along it.
        dtype: dtype of ``full`` and ``shard``; values are cast to it when taken over.
        device: where the model computes.
        sharded: whether each rank keeps only its shard between uses (the plan's parameter placement).
        shard_storage: where a sharded buffer's shard is between uses; default on ``device``.
        alignment: see ``FlatLayout``.
        replicas: of the parameters, by default the processes of ``axis``.
        gathering: how the values of all ranks come together; default by a collective over ``axis``.
    """

    _next_id = 0
    _numbers = count()
    waits: Waits | None = None

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        axis: Axis,
        *,
        dtype: torch.dtype,
        device: torch.device,
        sharded: bool,
        shard_storage: ShardStorage | None = None,
        alignment: int = ALIGNMENT,
        replicas: Replicas | None = None,
        gathering: Gathering | None = None,
    ) -> None:
        self.number = next(FlatBuffer._numbers)  # all ranks make their buffers in one order
        self.params = tuple(params)
        self.owners = self.params  # the model's parameters whose values lie here
        self.axis = axis
        self.gathering = gathering or Gathering(axis)
        self.replicas = replicas or Replicas.along(axis)
        shapes = ", ".join(str(tuple(logical_shape(p))) for p in self.params[:3])
        self.labels = Labels.of(f"parameters of shape {shapes}")  # the builder gives it the path of the module
        self.dtype = dtype
        self.device = device
        self.sharded = sharded
        self.shard_storage = shard_storage or DeviceShardStorage(device, device)
        self.layout = FlatLayout(self._stored_shapes(), axis.world_size, alignment)
        self.state = BufferState.GATHERED
        self.hold = Hold()
        self.states: StateHolder | None = None  # who keeps masters, gradients and moments of this buffer
        self.kept_whole = False  # small parameters of a model whose others are sharded
        self.keeps_memory = False  # also released: the next gather brings the values to the same place
        self.frozen = not any(p.requires_grad for p in params)
        self.rests_as: type[AtRest] = Released
        self.duplicate: Callable[[nn.Parameter], nn.Parameter] | None = None  # what a copy of a released one is
        self.param_names: tuple[str, ...] = ()  # in the model, for messages
        self.comm_stream = CommStream()  # the builder gives the buffers of an engine one in common
        self._arrival: Awaited | None = None
        self._arrived: torch.cuda.Event | None = None  # of gathers of this buffer alone, recorded for each of them
        self.placeholders = (torch.empty(0, dtype=dtype, device=device),) * len(self.params)
        self._gone: set[int] = set()  # parameters that another buffer took over
        self.kept_writes = 0  # how often values from outside became the truth
        self.let_go = False  # by an engine that was destroyed
        self.users: dict[Any, None] = {}  # the hooks of the engines whose models use it, in the order of all ranks

    def _stored_shapes(self) -> list[torch.Size]:
        return [logical_shape(p) for p in self.params]

    def form_of(self, slot: Slot) -> tuple[torch.dtype, torch.Size]:
        """In which dtype and shape files have the values of a slot, however they lie here."""
        return self.dtype, slot.shape

    def order_of(self, slot: Slot) -> tuple[int, ...]:
        """The dims of a slot's parameter in the order in which they lie here, if that is another."""
        return ()

    def piece_of(self, flat: Tensor, fragment: Fragment) -> tuple[int, Tensor]:
        """The place of the first element in the parameter, and those of ``fragment`` in ``flat`` ``[shard_numel]``:
        ``[numel]`` in the dtype that ``form_of`` tells."""
        return fragment.start, flat[fragment.shard_start : fragment.shard_start + fragment.numel]

    # -- taking values over -------------------------------------------------------------------------------------

    def adopt(self, *, synchronize: bool = True) -> Tensor:
        """Move the parameters' values in and make the parameters views of this buffer, ``[numel]``.

        Returns the whole buffer in the widest dtype of the sources, from which exact master weights can be made;
        the caller drops it. Peak memory: this buffer once more, in that dtype.

        Args:
            synchronize: take rank 0's values on all ranks.
        """
        sources = {own_dtype(p) for p in self.params}
        wide = torch.float32 if torch.float32 in sources else self.dtype
        if torch.float64 in sources:
            wide = torch.float64
        staged = torch.zeros(self.layout.numel, dtype=wide, device=self.device)
        with torch.no_grad(), unshard(buffers_of(self.params)):
            for param, slot, empty in zip(self.params, self.layout.slots, self.placeholders, strict=True):
                slot.of(staged).copy_(param.data)
                param.data = empty  # free the source at once: the peak is one parameter
        if synchronize:
            collectives.broadcast(staged, self.replicas.axis, what=self.labels.weights)
        self._place(staged.to(self.dtype) if wide != self.dtype else staged)
        return staged

    @torch.no_grad()
    def adopt_shard(self, values: Tensor) -> None:
        """A copy of ``values``, ``[shard_numel]`` in any dtype, is this rank's shard; what the parameters were does not
        count."""
        full = torch.empty(self.layout.numel, dtype=self.dtype, device=self.device)
        low, high = self.layout.shard_range(self.axis.rank)
        full[low:high].copy_(values)
        self._place(full)

    def _place(self, full: Tensor) -> None:
        low, high = self.layout.shard_range(self.axis.rank)
        if self.sharded and (self.axis.world_size > 1 or self.shard_storage.apart):
            self._shard = self.shard_storage.keep(full[low:high], self.gathering.place(high - low, self.dtype))
            # adopt()'s result may be this very tensor: give back our own storage, never the caller's
            self._memory = FullMemory(torch.empty(self.layout.numel, dtype=self.dtype, device=self.device))
        else:
            place = self.gathering.place(self.layout.numel, self.dtype, visible=True)
            full = full if place is None else place.copy_(full)
            self._memory = FullMemory(full)
            self._shard = full[low:high]
        self.aliased = not self.sharded or self._shard.data_ptr() == self._memory.tensor.data_ptr()
        self._make_views()
        self._mark_params()
        # Parameters that a library gave a class keep it.
        self._changes_class = self.sharded and self.owners is self.params and all(map(is_ordinary, self.params))
        self._attach()
        if self.sharded:
            self.release(force=True)

    def _mark_params(self) -> None:
        for param, slot in zip(self.params, self.layout.slots, strict=True):
            _mark(param, self, slot)

    def _make_views(self) -> None:
        self.views = tuple(slot.of(self._memory.tensor) for slot in self.layout.slots)
        ranges = [slice(*self.layout.shard_range(rank)) for rank in range(self.axis.world_size)]
        self.gathering.aim(self._memory.tensor, ranges, sharded=self.sharded)
        self._memory.own_users = self._memory.users()

    @property
    def full(self) -> Tensor:
        """All values, ``[numel]`` in the buffer's dtype, as far as they are here."""
        if not self.sharded:
            self.gather()
        return self._memory.tensor

    @property
    def shard(self) -> Tensor:
        """This rank's, ``[shard_numel]`` in the buffer's dtype."""
        if not self.sharded:
            self.gather()
        return self._shard

    # -- gather and release -------------------------------------------------------------------------------------

    def start_gather(self, *, exact: bool = False) -> bool:
        """Begin to fetch the whole parameters, unless it has begun; collective as ``gather``, which finds them."""
        if self.state is not BufferState.RELEASED:
            return False
        if not self.aliased:
            with self.comm_stream:
                storage, nbytes = self._memory.storage, self.layout.numel * self.dtype.itemsize
                if storage.nbytes() != nbytes:  # resizing moves a storage, whatever its size
                    storage.resize_(nbytes)
                self.fill(exact=exact)
            self._arrival = self._arrived = self.comm_stream.event(self._arrived)
        self.state = BufferState.IN_FLIGHT
        return True

    def fill(self, *, exact: bool = False) -> None:
        """Gather the values of all ranks into ``full``, on the communication stream. Collective."""
        shard = self.shard_storage.fetch if self.sharded else lambda: self._shard
        self.gathering.fill(self._memory.tensor, shard, self.labels.weights, exact=exact)

    def gather(self) -> None:
        """Make the whole parameters available. Collective when sharded over several processes."""
        if self.state is BufferState.GATHERED:
            return
        if self.waits is None:
            self._arrive()
        else:
            with self.waits(self, "gather") or nullcontext():
                self._arrive()

    def _arrive(self) -> None:
        self.start_gather()
        wait(self._arrival)
        self._arrival = None
        if self.sharded:
            self._attach()
        else:
            mark_arrived(self.params)
            self.state = BufferState.GATHERED

    def gather_exactly(self) -> None:
        """Make the whole parameters available as the optimizer wrote them, whatever the model computes with. Collective
        as ``gather``."""
        if self.gathering.rounds and not self.aliased:
            self.start_gather(exact=True)
            if not self.gathering.exact:
                wait(self._arrival)
                with self.comm_stream:
                    self.fill(exact=True)
                self._arrival = self._arrived = self.comm_stream.event(self._arrived)
                wait(self._arrival)
        self.gather()

    def release(self, *, force: bool = False, spare_users: bool = False) -> None:
        """Give the whole parameters' memory back; nothing happens while a ``GatheredParameters`` holds it.

        Args:
            force: also while it is held, or released already.
            spare_users: other tensors may still use the storage (``state_dict()`` taken inside a
                ``GatheredParameters``): then they keep it, and the buffer starts another one.
        """
        if not self.sharded or (self.state is BufferState.RELEASED and not force):
            return
        if self.hold.count and not force:
            self.hold.release_wanted = True
            return
        self.hold.release_wanted = False
        wait(self._arrival)  # in flight still: the next write to the shard must not be faster
        self._arrival = None
        if self.state is BufferState.GATHERED:
            if self.hold.looks and not (force or spare_users):
                self._tell_writes()
            self._point(self.placeholders, ParamStatus.NOT_AVAILABLE)
        if not self.aliased:
            in_use = spare_users and self._memory.users() > self._memory.own_users
            if in_use or not self._memory.storage.resizable():  # .numpy() of a parameter pins it
                self._leave_memory()
            if not self.keeps_memory:
                self._memory.storage.resize_(0)
        self.state = BufferState.RELEASED

    def _tell_writes(self) -> None:
        """Warn if the model has written to the parameters while it used them: releasing them loses that. Torch does not
        count writes through ``.data``, so values are compared with this rank's shard, in the first uses only."""
        if not torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            return  # an evaluation before training would use up all looks
        self.hold.looks -= 1
        pairs = zip(self.params, self.views, strict=True)
        moved = ((p, view) for p, view in pairs if not _shares(p, view) and id(p) not in self._gone)
        lost = next((p for p, view in moved if differ(p, view)), None)
        if lost is None and not self.aliased and self.shard_storage.stays and not self.gathering.rounds:
            low, high = self.layout.shard_range(self.axis.rank)
            here = self._memory.tensor[low:high]
            parts = [slice(max(slot.offset - low, 0), max(slot.end - low, 0)) for slot in self.layout.slots]
            each = zip(self.params, parts, strict=True)
            lost = next((p for p, part in each if differ(here[part], self._shard[part])), None)
        if lost is not None:
            tell_lost_write(lost, "that is lost: at ZeRO stage 3 its values are not here between uses")

    def _leave_memory(self) -> None:
        """To those who look at it; the parameters' values go to another."""
        self._memory = FullMemory(torch.empty_like(self._memory.tensor))
        self._make_views()

    def drop_memory(self) -> None:
        """Give back what ``keeps_memory`` left, and keep none from now on."""
        self.keeps_memory = False
        if self.sharded and self.state is BufferState.RELEASED and not self.aliased:
            self._memory.storage.resize_(0)

    @property
    def on_loan(self) -> bool:
        """What is written to the gathered values now is lost when the one hold on them ends: the shard has the truth,
        and no other tensor looks at them."""
        lent = self.hold.count == 1 and self.hold.release_wanted and not self.aliased
        return lent and not self.has_other_users

    @property
    def has_other_users(self) -> bool:
        """Whether tensors beside the parameters (saved by a graph, taken by a user) look at the gathered values."""
        attached = sum(map(_shares, self.params, self.views))
        return self._memory.users() > self._memory.own_users + attached

    @property
    def missing_nbytes(self) -> int:
        """Bytes that a gather will take of the device."""
        whole = 0 if self.aliased else self.layout.numel * self.dtype.itemsize
        return max(whole - self._memory.storage.nbytes(), 0)

    def _attach(self) -> None:
        self._point(self.views, ParamStatus.AVAILABLE)
        self.state = BufferState.GATHERED

    def _point(self, values: Sequence[Tensor], status: ParamStatus) -> None:
        gone = self._gone
        if self._changes_class and not gone:  # often, and for each parameter: in one loop
            if status is ParamStatus.AVAILABLE:
                for param, value in zip(self.params, values, strict=True):
                    param.__class__ = nn.Parameter
                    param.data = value
            else:
                resting = self.rests_as
                for param, value in zip(self.params, values, strict=True):
                    param.data = value
                    param.__class__ = resting
                turn = self.hold.turns = self.hold.turns + 1
                if resting.noticed is not None and turn % NOTICED_EVERY < 4:
                    for param in self.params if turn < 4 else self.params[:1]:
                        param.__class__ = resting.noticed
            return
        for param, value in zip(self.params, values, strict=True):
            if not gone or id(param) not in gone:
                wake(param)
                param.data = value
                if self._changes_class and status is not ParamStatus.AVAILABLE:
                    param.__class__ = self.rests_as
        for param in self.owners if self.sharded and not self._changes_class else ():
            if not gone or id(param) not in gone:
                param.ds_status = status  # type: ignore[attr-defined]

    @property
    def keeps_all(self) -> bool:
        """No other buffer took any of its parameters over."""
        return not self._gone

    def give_up(self, param: Tensor) -> None:
        """Another buffer took ``param`` over (a second ``initialize``): this one does not touch it any more."""
        self._gone.add(id(param))
        self._free_if_left()

    def leave(self) -> None:
        """An engine that used it was destroyed: no backward of that engine looks for its values here any more."""
        self.let_go = True
        self._free_if_left()

    def _free_if_left(self) -> None:
        """Give the memory back once nothing lives here: variables of a script may keep the engine and this buffer."""
        if not self.let_go or self.users or not self._gone.issuperset(map(id, self.params)):
            return
        self.close()
        nothing = torch.empty(0, dtype=self.dtype, device=self.device)
        self._memory, self._shard, self.views = FullMemory(nothing), nothing, self.placeholders
        self.gathering, self.shard_storage = Gathering(self.axis), DeviceShardStorage(self.device, self.device)
        self.aliased = True  # there is nothing to gather

    # -- values -------------------------------------------------------------------------------------------------

    @property
    def stays(self) -> bool:
        """Whether the shard is in memory all the time."""
        return self.aliased or self.shard_storage.stays

    def owned(self, *, whole: bool, write: bool = True, fresh: bool = False) -> Tensor:
        """The values this rank's optimizer writes, in the buffer's dtype: all ``[numel]`` (``whole``) or its shard.

        Args:
            write: the caller may write to them, and then syncs the weights.
            fresh: the caller writes all of them.
        """
        if whole:
            return self.full
        if write and self.gathering.region is not None:
            self.gathering.region.writing()
        if not self.aliased:
            self.shard_storage.visit(write=write, fresh=fresh)
        return self.shard

    def count_users(self) -> None:
        """Note how many tensors share the parameters' memory. A tensor that does so later sees every step at once."""
        self._memory.users_at_rest = self._memory.users()

    def refresh(self) -> None:
        """The shard was written: whatever is gathered, or on its way up, is stale."""
        self.shard_storage.changed()
        if self.state is not BufferState.RELEASED:
            self.release(force=True)
        if self.hold.count:
            self.gather_exactly()

    def check_views(self) -> None:
        """The parameters of a replicated buffer are still where it keeps them.

        Raises:
            DsHfError: they were moved.
        """
        if list(map(Tensor.data_ptr, self.params)) == list(map(Tensor.data_ptr, self.views)):
            return
        for param, view in zip(self.params, self.views, strict=True):
            if param.data_ptr() != view.data_ptr() and id(param) not in self._gone:
                raise DsHfError(
                    f"a parameter of shape {tuple(view.shape)} no longer lives where the engine keeps it: the model "
                    "was cast or moved, or param.data replaced, after initialize(). Do that before it, or write in "
                    "place (param.data.copy_(...))"
                )

    def defer_gather(self, arrival: Awaited | None) -> bool:
        """Wait for ``arrival`` when the values are used; ``False`` where stale ones might be seen."""
        if arrival is None or self._memory.users() > self._memory.users_at_rest or not can_be_pending(self.params):
            return False
        self._arrival = arrival
        self.state = BufferState.IN_FLIGHT
        mark_pending(self.params, self.gather)
        return True

    @torch.no_grad()
    def write_back(self, source_rank: int | None = None, *, partly: bool = False) -> None:
        """Take the gathered parameters' present values as the truth, those of ``source_rank`` if given.

        Also takes over tensors that were put in place of the views (``param.data = other``).

        With ``partly``, masters of elements that are as before keep what rounding to the parameters' dtype takes away.
        """
        assert self.state is BufferState.GATHERED
        self.kept_writes += 1
        here = [n for n, param in enumerate(self.params) if id(param) not in self._gone]
        moved = [n for n in here if not _shares(self.params[n], self.views[n])]
        if moved and not self.aliased and self.has_other_users:
            moved = here  # what was kept of the old values, maybe as another parameter's, stays as it is
            self._leave_memory()
        for n, value in [(n, self.params[n].data.clone()) for n in moved]:  # of two that were swapped, both
            if value.shape != self.views[n].shape:
                raise DsHfError(
                    f"{name_of(self.params[n])} was given values of shape {tuple(value.shape)} inside "
                    "GatheredParameters: resize a model before initialize(), or build another engine around it"
                )
            self.params[n].data = self.views[n].copy_(value)
        if source_rank is not None:
            collectives.broadcast(self._memory.tensor, self.replicas.axis, source_rank, self.labels.weights)
        if not self.aliased:
            low, high = self.layout.shard_range(self.axis.rank)
            self.owned(whole=False, fresh=True).copy_(self._memory.tensor[low:high])
            self.shard_storage.changed()
        if self.states is not None:
            self.states.values_changed(self, partly=partly)

    def close(self) -> None:
        """All parameters have other places: give the memory back that others would still hold."""
        self.release(force=True)
        self.shard_storage.close()

    @property
    def nbytes(self) -> int:
        """Bytes this buffer holds now on its devices."""
        held = self._memory.tensor.untyped_storage().nbytes()
        return held if self.aliased else held + self._shard.untyped_storage().nbytes()

    def detach(self) -> None:
        """Make the parameters ordinary tensors again, each with its own whole value. Collective when sharded."""
        self.gather_exactly()
        for param, view in zip(self.params, self.views, strict=True):
            param.data = view.clone()
        for param in self.owners:
            unmark(param)
            if hasattr(param, "_ds_home"):
                del param._ds_home


def _shares(param: Tensor, view: Tensor) -> bool:
    return param.data_ptr() == view.data_ptr()


def leave_home(param: Tensor) -> None:
    """Make ``param`` an ordinary parameter that its buffer does not touch any more; the caller gives it values."""
    if (home := home_of(param)) is not None:
        home.leave(param)


def own_dtype(param: Tensor) -> torch.dtype:
    """Dtype of the parameter's values, also while it is released."""
    home = home_of(param)
    if home is None or home.slot.index < 0:  # of bytes, each its own
        return param.dtype
    return home.buffer.dtype if home.buffer.sharded else param.dtype  # which a user may cast after ``destroy``


def _mark(param: nn.Parameter, buffer: FlatBuffer, slot: Slot) -> None:
    former = home_of(param)
    if former is not None and former.buffer is not buffer:
        former.buffer.give_up(param)
    param._ds_home = ParamHome(buffer, slot)  # type: ignore[attr-defined]
    wake(param)
    if buffer.sharded or buffer.kept_whole:
        if not hasattr(param, "ds_id"):
            param.ds_id = FlatBuffer._next_id  # type: ignore[attr-defined]
            FlatBuffer._next_id += 1
        param.ds_status = ParamStatus.AVAILABLE  # type: ignore[attr-defined]
        mark(param, buffer, slot)
    else:
        unmark(param)


def buffers_of(params: Iterable[Any]) -> list[FlatBuffer]:
    """The distinct sharded buffers in which ``params`` live; anything that has none is passed over."""
    found: dict[int, FlatBuffer] = {}
    for param in params:
        home = home_of(param) if isinstance(param, Tensor) else None
        if home is not None and home.buffer.sharded:
            found[id(home.buffer)] = home.buffer
    return list(found.values())


@contextmanager
def unshard(buffers: Sequence[FlatBuffer]) -> Iterator[None]:
    """Keep ``buffers`` gathered inside the context. Collective; may be nested, also inside a forward that uses them."""
    for buffer in buffers:
        buffer.hold.release_wanted |= buffer.state is BufferState.RELEASED
        buffer.gather_exactly()
        buffer.hold.count += 1
    try:
        yield
    finally:
        for buffer in buffers:
            buffer.hold.count -= 1
            if buffer.hold.release_wanted and not buffer.hold.count:
                buffer.release(spare_users=True)
