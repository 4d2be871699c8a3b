"""What neighbouring stages send each other: activations forward, gradients back.

Nothing blocks head to head: sends are under way on their own, at most ``window`` of a kind at once; receives are
announced before the work that comes before them. Each kind and direction has a process group of its own, in which a
pair of processes sends one way only, for NCCL runs the messages of a pair one after another.

A message of activations begins with a flag on the host: 0 where its tensors are like those of the message before, else
the length of the description that follows. Gradients need none, for the tensors they belong to are known.

On the CPU flag and tensors are one message (``_PackedLink``). gloo moves the bytes of a message only once its receive
is announced, and a receive of too many bytes takes fewer: so the whole message is announced as if nothing changed, and
where something does, the flag comes alone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hf.engine.comm.mesh import Mesh, group_of
from ds_hf.engine.comm.message_log import MessageLog
from ds_hf.engine.parallel.pipeline.partition import part_of, stage_of
from ds_hf.errors import PipelineError

__all__ = ["Link", "Links", "Received", "Turn"]

_DTYPES = (
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float16, torch.bfloat16,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
)  # fmt: skip
_FLAG, _DATA = 1, 2  # tags
_ALIGNED = 64  # bytes: where the flag ends and each tensor of a packed message starts


@dataclass(frozen=True)
class Received:
    """Activations of a message.

    Attributes:
        value: a tensor or a tuple of them, those that need gradients as leaves.
    """

    value: Any

    @property
    def leaves(self) -> list[Tensor]:
        """Those that need gradients, in order."""
        return [tensor for tensor in _listed(self.value) if tensor.requires_grad]


@dataclass
class _Group:
    """Of one kind and direction. ``flags``: for what the host reads."""

    data: Any
    flags: Any


@dataclass
class Link:
    """One way between two processes.

    Args:
        peer: global rank of the other process.
        group: in which it is.
        log: of this process.
        what: what is sent, for people.
        window: messages that may be under way at once.
        device: where received tensors lie.
    """

    peer: int
    group: _Group
    log: MessageLog
    what: str
    window: int
    device: torch.device
    _described: list[int] = field(default_factory=list)  # the tensors of the last message
    _under_way: deque[list[tuple[Any, Tensor]]] = field(default_factory=deque)
    _expected: tuple[Any, Any] | None = None

    # -- activations ----------------------------------------------------------------------------------------------

    def send(self, value: Any) -> None:
        """Send a tensor or a tuple of tensors.

        Raises:
            PipelineError: it is neither, or has a dtype that cannot be sent.
        """
        self._make_room()
        description = _describe(value)
        again = description == self._described
        flag = torch.tensor([0 if again else len(description)])
        messages = [(self._start(dist.isend, flag, flags=True), flag)]
        if not again:
            text = torch.tensor(description)
            messages.append((self._start(dist.isend, text, flags=True), text))
            self._described = description
        self._under_way.append([*messages, *self._sends(_listed(value))])

    def expect(self) -> None:
        """A message will be received next: be ready for its beginning."""
        if self._expected is None:
            flag = torch.empty(1, dtype=torch.int64)
            self._expected = self._start(dist.irecv, flag, flags=True), flag

    def receive(self) -> Received:
        """The next message."""
        self.expect()
        assert self._expected is not None
        work, flag = self._expected
        self._expected = None
        with self.log.awaiting(self.peer):
            work.wait()
            if length := int(flag):
                text = torch.empty(length, dtype=torch.int64)
                self._start(dist.irecv, text, flags=True).wait()
                self._described = text.tolist()
            whole, specs = _read(self._described)
            tensors = [torch.empty(shape, dtype=dtype, device=self.device) for dtype, shape, _ in specs]
            for started in [self._start(dist.irecv, tensor) for tensor in tensors]:
                started.wait()
        return _received(whole, specs, tensors)

    # -- gradients ------------------------------------------------------------------------------------------------

    def send_gradients(self, leaves: Sequence[Tensor]) -> None:
        """Send the gradients of what was received, zeros for what has none, and drop them."""
        self._make_room()
        self._under_way.append(self._sends(_gradients_of(leaves)))

    def expect_gradients(self, outputs: Sequence[Tensor]) -> None:
        """Gradients of ``outputs`` will be received next."""
        if self._expected is None:
            gradients = [torch.empty(out.shape, dtype=out.dtype, device=self.device) for out in outputs]
            self._expected = [self._start(dist.irecv, gradient) for gradient in gradients], gradients

    def receive_gradients(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of ``outputs``, in order."""
        self.expect_gradients(outputs)
        assert self._expected is not None
        works, gradients = self._expected
        self._expected = None
        with self.log.awaiting(self.peer):
            for work in works:
                work.wait()
        return list(gradients)

    # -- both -----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait for what is still under way."""
        while self._under_way:
            self._finish_oldest()

    def _make_room(self) -> None:
        """Let go of what has arrived; wait where too much is under way."""
        while self._under_way and (len(self._under_way) >= self.window or _arrived(self._under_way[0])):
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        with self.log.awaiting(self.peer):
            for work, _ in self._under_way.popleft():
                work.wait()

    def _sends(self, tensors: Sequence[Tensor]) -> list[tuple[Any, Tensor]]:
        found = []
        for tensor in tensors:
            sent = tensor.detach().contiguous()
            found.append((self._start(dist.isend, sent), sent))
        return found

    def _start(self, call: Any, tensor: Tensor, *, flags: bool = False) -> Any:
        self.log("send" if call is dist.isend else "receive", self.what, tensor)
        group, tag = (self.group.flags, _FLAG) if flags else (self.group.data, _DATA)
        try:
            return call(tensor, self.peer, group=group, tag=tag)
        except RuntimeError as error:  # gloo, where the connection is closed by now
            self.log.failed(error)
            raise


@dataclass
class _PackedLink(Link):
    """A link whose activations travel with their flag, as bytes: see the top of the module."""

    def send(self, value: Any) -> None:
        """As ``Link``."""
        self._make_room()
        description = _describe(value)
        again = description == self._described
        whole = torch.empty(_packed_size(description), dtype=torch.uint8)
        for place, tensor in zip(_places(description, whole), _listed(value), strict=True):
            place.copy_(tensor.detach())
        flag = whole[:8].view(torch.int64).fill_(0 if again else len(description))
        messages = [whole] if again else [flag, torch.tensor(description), whole[_ALIGNED:]]
        self._under_way.append(self._sends(messages))
        self._described = description

    def expect(self) -> None:
        """As ``Link``; all of the message, if it is like the last one."""
        if self._expected is None:
            whole = torch.empty(_packed_size(self._described), dtype=torch.uint8)
            self._expected = self._start(dist.irecv, whole), whole

    def receive(self) -> Received:
        """As ``Link``."""
        self.expect()
        assert self._expected is not None
        work, whole = self._expected
        self._expected = None
        with self.log.awaiting(self.peer):
            work.wait()
            if length := int(whole[:8].view(torch.int64)):
                text = torch.empty(length, dtype=torch.int64)
                self._start(dist.irecv, text).wait()
                self._described = text.tolist()
                whole = torch.empty(_packed_size(self._described), dtype=torch.uint8)
                self._start(dist.irecv, whole[_ALIGNED:]).wait()
        single, specs = _read(self._described)
        return _received(single, specs, _places(self._described, whole))


def _arrived(messages: Sequence[tuple[Any, Tensor]]) -> bool:
    return all(work.is_completed() for work, _ in messages)


class Turn:
    """A link between two chunks of one process: what is sent is received here, in order."""

    def __init__(self) -> None:
        self._activations: deque[Received] = deque()
        self._gradients: deque[list[Tensor]] = deque()

    def send(self, value: Any) -> None:
        """As ``Link``."""
        description = _describe(value)
        self._activations.append(_received(*_read(description), [tensor.detach() for tensor in _listed(value)]))

    def receive(self) -> Received:
        """As ``Link``."""
        return self._activations.popleft()

    def send_gradients(self, leaves: Sequence[Tensor]) -> None:
        """As ``Link``."""
        self._gradients.append(_gradients_of(leaves))

    def receive_gradients(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """As ``Link``."""
        return self._gradients.popleft()

    def expect(self) -> None:
        """Nothing is under way."""

    def expect_gradients(self, outputs: Sequence[Tensor]) -> None:
        """Nothing is under way."""

    def settle(self) -> None:
        """Nothing is under way."""


class Links:
    """The links of this process. All processes make them.

    Args:
        chunks: parts of the model that each stage has; with several the last stage sends to the first one, too, or,
            ``folded``, all send both ways.

    Attributes:
        log: of all messages.
        before, after: activations from the previous stage, and to the next one, by chunk.
        gradients_before, gradients_after: gradients to the previous stage, and from the next one, by chunk.
    """

    def __init__(self, mesh: Mesh, device: torch.device, chunks: int, *, folded: bool = False) -> None:
        axis, stages, stage = mesh.axis("pipe"), mesh.shape.pipe, mesh.stage_rank
        self.log = MessageLog(mesh.world.log.ranks, dist.get_rank(), "pipe", mesh.world.log.key)
        if mesh.world.log.watch is not None:
            mesh.world.log.watch.take_in(self.log)
        ranks = mesh.lists_along("pipe")
        hosts = None if device.type == "cpu" or stages == 1 else group_of(ranks, "gloo")

        def make(back: bool) -> _Group | None:
            if stages == 1 or (back and chunks == 1):
                return None
            group = group_of(ranks)
            return _Group(group, group if hosts is None else hosts)

        groups = {(kind, back): make(back) for kind in ("activations", "gradients") for back in (False, True)}
        last, window, turns = stages * chunks - 1, stages * chunks + 2, dict[int, Turn]()

        def link(kind: str, here: int, there: int) -> Link | Turn | None:
            """Between two of the parts of the model, numbered from the first to the last."""
            if not 0 <= there <= last:
                return None
            peer, after = stage_of(there, stages, folded=folded), max(here, there)
            if peer == stage:
                return turns.setdefault(after, Turn())
            group = groups[kind, after > stages if folded else after % stages == 0]
            assert group is not None
            kind_of_link = _PackedLink if device.type == "cpu" else Link
            return kind_of_link(axis.global_rank(peer), group, self.log, kind, window, device)

        parts = [part_of(stage, chunk, stages, folded=folded) for chunk in range(chunks)]
        # A pair of processes has one link each way and kind, whichever chunks it serves: messages come in one order.
        self.before = _shared([link("activations", part, part - 1) for part in parts])
        self.after = _shared([link("activations", part, part + 1) for part in parts])
        self.gradients_before = _shared([link("gradients", part, part - 1) for part in parts])
        self.gradients_after = _shared([link("gradients", part, part + 1) for part in parts])
        if device.type == "cuda":
            self._connect(parts, last, device)

    def _connect(self, parts: Sequence[int], last: int, device: torch.device) -> None:
        """One number over each link, from the first part of the model to the last.

        The first call of a pair makes NCCL's communicator, for which both wait on the host. In a batch a stage would
        wait for gradients there before it has sent what they come from: with fewer micro-batches than stages, or with
        chunks, for ever.
        """
        met: set[tuple[int, int]] = set()
        number = torch.zeros(1, dtype=torch.float32, device=device)

        def meet(link: Link | Turn | None, call: Any) -> None:
            if isinstance(link, Link) and (key := (link.peer, id(link.group))) not in met:
                met.add(key)
                call(number, link.peer, group=link.group.data, tag=_DATA).wait()

        chunk_of = {part: chunk for chunk, part in enumerate(parts)}
        for part in range(1, last + 1):  # what lies before it
            if (chunk := chunk_of.get(part - 1)) is not None:
                meet(self.after[chunk], dist.isend)
                meet(self.gradients_after[chunk], dist.irecv)
            if (chunk := chunk_of.get(part)) is not None:
                meet(self.before[chunk], dist.irecv)
                meet(self.gradients_before[chunk], dist.isend)

    def settle(self) -> None:
        """Wait for all messages that are under way."""
        for link in (*self.before, *self.after, *self.gradients_before, *self.gradients_after):
            if link is not None:
                link.settle()


def _shared(links: list[Link | Turn | None]) -> list[Link | Turn | None]:
    found: dict[tuple[int, int], Link] = {}
    return [found.setdefault((each.peer, id(each.group)), each) if isinstance(each, Link) else each for each in links]


# -- descriptions -------------------------------------------------------------------------------------------------


def _listed(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def _gradients_of(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Taken from them; zeros for what has none."""
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return gradients


def _received(whole: bool, specs: Sequence[tuple[Any, Any, bool]], tensors: Sequence[Tensor]) -> Received:
    for tensor, (_, _, needs_grad) in zip(tensors, specs, strict=True):
        tensor.requires_grad_(needs_grad)
    return Received(tensors[0] if whole else tuple(tensors))


def _packed_size(description: Sequence[int]) -> int:
    """Bytes of a packed message of such tensors; of an empty description, of a flag alone."""
    return _ALIGNED + sum(_room(dtype, shape) for dtype, shape, _ in _read(description)[1])


def _places(description: Sequence[int], whole: Tensor) -> list[Tensor]:
    """The tensors of a packed message. Each counts its changes in place for itself (``.data``), as if it lay alone."""
    found, start = [], _ALIGNED
    for dtype, shape, _ in _read(description)[1]:
        part = whole[start : start + math.prod(shape) * dtype.itemsize]
        found.append(part.view(dtype).view(shape).data)
        start += _room(dtype, shape)
    return found


def _room(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED


def _describe(value: Any) -> list[int]:
    """Whether it is one tensor, and of each its dtype, whether it needs a gradient, and its shape."""
    tensors = _listed(value) if isinstance(value, Tensor | tuple | list) else []
    if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
        kinds = type(value).__name__ if not tensors else ", ".join(type(item).__name__ for item in value)
        raise PipelineError(f"a stage gives its next one a tensor or a tuple of tensors, not {kinds:.80}")
    found = [int(isinstance(value, Tensor))]
    for tensor in tensors:
        if tensor.dtype not in _DTYPES:
            raise PipelineError(f"a tensor of {tensor.dtype} cannot be sent to the next stage")
        needs = tensor.requires_grad and (tensor.is_floating_point() or tensor.is_complex())
        found += [_DTYPES.index(tensor.dtype), int(needs), tensor.dim(), *tensor.shape]
    return found


def _read(description: Sequence[int]) -> tuple[bool, list[tuple[torch.dtype, list[int], bool]]]:
    whole, *rest = description or (0,)
    found = []
    while rest:
        dtype, needs, dims = rest[:3]
        found.append((_DTYPES[dtype], list(rest[3 : 3 + dims]), bool(needs)))
        rest = rest[3 + dims :]
    return bool(whole), found
