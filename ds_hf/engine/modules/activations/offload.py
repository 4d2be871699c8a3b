"""What checkpointed functions save, in host memory from forward to backward, copied beside the computation.

Checkpointing keeps the inputs of each block, ``blocks x tokens x hidden`` elements, and nothing else. An
``ActivationOffload`` takes an input down when the block begins and lets go of it on the device one block later; in
backward the input of the block before comes up while one is recomputed. A block computes far longer than its input
travels: at 50 GB/s and 500 TFLOP/s the copy takes 833 / hidden of the forward.

Invariants
- What autograd gets back has the values, shape and strides of what it saved, however often it asks (``retain_graph``).
- A tensor that several functions save has one copy on the host, and one at most on the device. One whose original is
  still alive on the device when it is asked for (a script kept it) is not copied up.
- The device's memory is given back only after the copy from it, in the order of the computation's stream; host memory
  is written again only after the copies from it.
- What runs inside backward is recomputation, and stays on the device.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ds_hf.engine.modules.activations.arena import Arena, Stretch
from ds_hf.engine.offload.link import DONE, HostLink

__all__ = ["LEAST_NBYTES", "ActivationOffload", "Offloaded"]

LEAST_NBYTES = 1 << 20  # smaller tensors stay: the launch of a copy would cost more than they weigh
_IN_FLIGHT_NBYTES = 256 << 20  # inputs on their way down that may be alive on the device; one always is


class Offloaded:
    """A tensor that was saved: on the device, on the host, or both.

    Attributes:
        shape, stride, dtype, device: the tensor's.
        before: the one that was saved before it, which backward asks for after it.
        uses: how many times it was saved and not asked for yet.
    """

    def __init__(self, tensor: Tensor, before: Offloaded | None) -> None:
        self.shape, self.stride = tensor.shape, tensor.stride()
        self.dtype, self.device, self.nbytes = tensor.dtype, tensor.device, tensor.numel() * tensor.element_size()
        self.before = weakref.ref(before) if before is not None else lambda: None
        self.uses = 0
        self.host: Stretch | None = None
        self.down = DONE  # the copy to the host
        self.here: Tensor | None = None  # on the device
        self.up = DONE  # the copy that filled it
        self._offset, self._version = tensor.storage_offset(), tensor._version
        self._base = weakref.ref(_base(tensor))

    def __del__(self) -> None:
        if self.here is not None:  # came up, and was not asked for: its memory goes back after the copy
            with contextlib.suppress(Exception):  # at exit the modules may be gone
                self.up.on_stream()

    @property
    def changed(self) -> bool:
        """What is on the device is the tensor that was saved, and was written to since."""
        return self.here is not None and self.here._version != self._version

    def original(self) -> Tensor | None:
        """The tensor itself, if it is still alive and unchanged."""
        base = self._base()
        if base is None or base._version != self._version:
            return None
        return base.detach().as_strided(self.shape, self.stride, self._offset)


class _Descent:
    """The device's memory of a tensor on its way down."""

    def __init__(self, of: Offloaded, source: Tensor) -> None:
        self.of, self.nbytes = weakref.ref(of), of.nbytes
        self.memory, self.source, self.arrival = of.here, source, of.down

    def end(self) -> None:
        """The memory may be taken by what the current stream gets next."""
        self.arrival.on_stream()
        if (of := self.of()) is not None and of.here is self.memory:
            of.here = None
        self.memory = None
        del self.source


class ActivationOffload:
    """Keeps what it is given in host memory, and brings it back.

    Attributes:
        rounds: how many checkpointed functions any of them was put around, in this process.

    Args:
        device: where the model computes. On the CPU the copies are made at once.
        pinned: page-lock the host memory.
        least_nbytes: smaller tensors stay where they are; default 1 MiB.
        in_flight_nbytes: what may stay on the device until its copy is over, beyond the last tensor.
        alike: how many tensors a forward saves, as far as is known: memory is asked for all of them at once.
        beside: copy on streams beside the computation.
    """

    rounds: ClassVar[int] = 0

    def __init__(
        self,
        device: torch.device,
        *,
        pinned: bool = True,
        least_nbytes: int | None = None,
        in_flight_nbytes: int = _IN_FLIGHT_NBYTES,
        alike: int = 1,
        beside: bool = True,
    ) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device, self.alike = device, alike
        self.least_nbytes = LEAST_NBYTES if least_nbytes is None else least_nbytes
        self.in_flight_nbytes = in_flight_nbytes
        self.arena = Arena(pinned=pinned and device.type == "cuda")
        self.kept_nbytes = 0  # copied to the host since it was made
        self.inside = 0  # functions that it is around now
        self._link = HostLink(device if beside else torch.device("cpu"), yielding=True)
        self._falling: deque[_Descent] = deque()
        self._alive: weakref.WeakSet[Offloaded] = weakref.WeakSet()
        self._last: Callable[[], Offloaded | None] = lambda: None
        self._saved: dict[_Key, weakref.ref[Offloaded]] = {}  # of tensors that were alive when they were saved
        self._ahead: Callable[[], Offloaded | None] = lambda: None  # came up unasked

    # -- around a function ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def around(self, args: Iterable[Any]) -> Iterator[None]:
        """Inside, those of ``args`` that autograd saves are offloaded; everything else that it saves stays."""
        ActivationOffload.rounds += 1
        mine = {id(arg): arg for arg in args if isinstance(arg, Tensor) and self.takes(arg)}

        def pack(tensor: Tensor) -> Any:
            return self.save(tensor) if mine.get(id(tensor)) is tensor else tensor

        self.inside += 1
        try:
            with saved_tensors_hooks(pack, self.unpack):
                yield
        finally:
            self.inside -= 1
            mine.clear()  # autograd keeps the hooks as long as what they gave

    def unpack(self, saved: Any) -> Tensor:
        """What autograd saved, of what ``save`` or nothing at all gave back."""
        return self.fetch(saved) if isinstance(saved, Offloaded) else saved

    def takes(self, tensor: Tensor) -> bool:
        """Whether ``save`` may be given ``tensor``: neither small nor a weight, nor a view that shows values twice."""
        if tensor.device != self.device or tensor.numel() * tensor.element_size() < self.least_nbytes:
            return False
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return False
        return tensor.layout is torch.strided and type(tensor) is Tensor and not _overlaps(tensor)

    # -- down -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def save(self, tensor: Tensor) -> Offloaded:
        """Begin to copy ``tensor`` to the host.

        Raises:
            OffloadError: the host has too little memory.
        """
        self._drop_ahead()
        if not self._alive:
            self._saved.clear()
        key = _key(tensor)
        known = self._saved[key]() if key in self._saved else None
        if known is not None and known.original() is not None:
            known.uses += 1
            return known
        saved = Offloaded(tensor, self._last())
        values = _dense(tensor)
        saved.host = self.arena.take(
            saved.nbytes, alike=self.alike - len(self._alive) % self.alike, what="activations in host memory"
        )
        saved.down = self._link.down(saved.host.view(values.numel(), values.dtype), values, kept=True)
        saved.here = tensor.detach()
        saved.uses = 1
        self._falling.append(_Descent(saved, values))
        while len(self._falling) > 1 and sum(each.nbytes for each in self._falling) > self.in_flight_nbytes:
            self._falling.popleft().end()
        self._alive.add(saved)
        self._last = weakref.ref(saved)
        self._saved[key] = self._last
        self.kept_nbytes += saved.nbytes
        return saved

    # -- up -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def fetch(self, saved: Offloaded) -> Tensor:
        """The tensor, for what the current stream gets next. The one that was saved before it begins to come up."""
        if self._ahead() is not saved:
            self._drop_ahead()
        self._ahead = lambda: None
        self._land(saved)
        here = saved.here
        if here is None:
            here = saved.original()
        if here is None:
            self._start(saved)
            here = saved.here
        assert here is not None
        saved.up.on_stream()
        saved.uses -= 1
        if saved.uses > 0:
            saved.here = here
        else:
            saved.here = None
        before = saved.before()
        if before is not None and before.here is None and before.original() is None:
            self._start(before)
            self._ahead = weakref.ref(before)
        return here

    def _start(self, saved: Offloaded) -> None:
        """Begin to copy it up."""
        assert saved.host is not None
        saved.here = torch.empty_strided(saved.shape, saved.stride, dtype=saved.dtype, device=saved.device)
        flat = _flat(saved.here)
        source = saved.host.view(saved.here.numel(), saved.dtype)
        if flat is not None:
            saved.up = self._link.up(flat, source, after=saved.down)
            return
        landing = torch.empty(saved.here.numel(), dtype=saved.dtype, device=saved.device)  # a view with gaps: rare
        self._link.up(landing, source, after=saved.down).on_stream()
        saved.here.copy_(landing.view(saved.shape))
        saved.up = DONE

    def _land(self, saved: Offloaded) -> None:
        """If it is on its way down, let the current stream go on after the copy, and count it no more."""
        for descent in self._falling:
            if descent.of() is saved:
                saved.down.on_stream()
                self._falling.remove(descent)
                if saved.changed:
                    saved.here = None
                return

    def _drop_ahead(self) -> None:
        """What came up unasked goes: the guess was wrong, or backward ended."""
        saved, self._ahead = self._ahead(), lambda: None
        if saved is not None:
            saved.up.on_stream()
            saved.here = None

    def close(self) -> None:
        """Wait for the copies and let go of the memory."""
        self._link.close()
        self._falling.clear()
        self._saved.clear()
        self.arena.clear()


_Key = tuple[int, Any, torch.Size, tuple[int, ...], torch.dtype]


def _base(tensor: Tensor) -> Tensor:
    """What it is a view of, or itself."""
    base = tensor._base if tensor._is_view() else None
    return tensor if base is None else base


def _key(tensor: Tensor) -> _Key:
    """The same for views of the same elements; ids come again, so that who finds one looks whether it is still that."""
    return id(_base(tensor)), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _overlaps(tensor: Tensor) -> bool:
    """Whether elements of it lie in the same place, as in ``expand``."""
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _flat(tensor: Tensor) -> Tensor | None:
    """All of its elements as ``[numel]`` in the order of memory, if there is nothing between them."""
    reach = 1 + sum(stride * (size - 1) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((tensor.numel(),), (1,)) if reach == tensor.numel() else None


def _dense(tensor: Tensor) -> Tensor:
    """Its elements, ``[numel]``: in the order of memory if there is nothing between them, else in that of its dims."""
    flat = _flat(tensor)
    return tensor.contiguous().view(-1) if flat is None else flat
