"""``UlyssesSPDataLoaderAdapter``: batches divided along the sequence (``ulysses_sp``).

Every process of a sequence has a loader with batches of its own. From one batch of each come as many micro-batches as
there are processes: all share the first one's batch, then the second one's. Each process gets its part of all batches
in one all-to-all. The loaders of an engine that divides sequences give all of them the same batch: it is shared once.
"""

from __future__ import annotations

import contextlib
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ds_hf.deepspeed_api.sequence.checks import PACKED, looks_packed
from ds_hf.engine.comm.collectives import all_to_all
from ds_hf.engine.comm.mesh import Axis, axis_of
from ds_hf.log import warn_once

__all__ = ["UlyssesSPDataLoaderAdapter"]

_IGNORED = -100
Batch = dict[str, Any]


class UlyssesSPDataLoaderAdapter:
    """A loader of parts of batches; what it does not have itself is the wrapped loader's (``dataset``, ``set_epoch``
    ...), which has ``ds_owner``: whose batch a micro-batch is of, among the loader's last ones, else ``None``.

    Batches are mappings with ``input_ids`` (or ``inputs_embeds``), tensors of ``[batch, tokens, ...]`` and whatever
    else, which is handed on whole. ``labels`` become ``shift_labels``: those of the next token, before the sequence is
    divided; ``labels`` themselves are left in if ``keeps_labels`` is set. ``position_ids`` are made where there are
    none, unless documents are packed. Micro-batches wait on the CPU, and are handed out on ``device``.

    Args:
        dl: the loader of this process.
        sp_rank, sp_world_size: place among the processes that share sequences, and their number; of ``sp_group``.
        device: where the model computes, and tensors travel.
    """

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        self.dl = dl
        self.sp_rank, self.sp_group, self.sp_world_size = sp_rank, sp_group, sp_world_size
        self.device, self.keeps_labels = device, False
        self.micro_batches: deque[Batch] = deque()
        self.iter: Iterator[Any] | None = None
        self._skip = 0  # micro-batches that the next pass leaves out
        self._state: Any = None  # of the wrapped loader, before the batches that are being handed out

    def __len__(self) -> int:
        return len(self.dl) * (1 if self._same else self.sp_world_size)

    @property
    def _same(self) -> bool:
        """Whether all processes have one batch: an engine's own loader deals samples to data-parallel processes."""
        return bool(getattr(self.dl, "same_in_sequence", False))

    def __getattr__(self, name: str) -> Any:
        if name == "dl":  # before __init__, when it is copied
            raise AttributeError(name)
        return getattr(self.dl, name)

    def __iter__(self) -> Iterator[Batch]:
        """Start a pass."""
        self.micro_batches.clear()
        self.iter = iter(self.dl)
        return _Pass(self)

    def __next__(self) -> Batch:
        """The next micro-batch of the pass that is under way, or the first of a new one."""
        if self.iter is None:
            iter(self)
        if self._skip:
            skipped, self._skip = self._skip, 0
            for _ in range(skipped):
                next(self)
        if not self.micro_batches:
            self.refill()
        batch = self.micro_batches.popleft()
        if hasattr(self.dl, "end_of_dataloader"):  # a loader of accelerate
            turn = self.sp_world_size - 1 - len(self.micro_batches)
            self.dl.ds_owner = dist.get_global_rank(self.sp_group, turn) if self._last and not self._same else None
        if not self.micro_batches and self._last:
            self.dl.end_of_dataloader = True
        return tree_map_only(Tensor, lambda value: value.to(self.device), batch)  # type: ignore[no-any-return]

    _last = False  # the batches in hand are the loader's last ones
    _compared = False

    def refill(self) -> None:
        """One batch of every process, divided. Collective.

        Raises:
            StopIteration: a loader has ended, on all processes; the next pass starts by itself.
            ValueError: batches that do not divide, on all processes.
        """
        assert self.iter is not None
        with contextlib.suppress(AttributeError):  # accelerate's loaders have the method, and a state if it is used
            self._state = self.dl.state_dict()
        batch = next(self.iter, None)
        # accelerate takes this for the end of an accumulation, and there are several micro-batches left.
        self._last = bool(getattr(self.dl, "end_of_dataloader", False))
        if self._last:
            self.dl.end_of_dataloader = False
        axis, compares = axis_of(self.sp_group, "sequence"), not (self._same or self._compared)
        self._compared = True
        found = divide_batches(batch, axis, torch.device(self.device), self.keeps_labels, compares)
        if found is None:
            self.iter = None
            raise StopIteration
        self.micro_batches.extend(found[:1] if self._same else found)

    def skipping(self, micro_batches: int, loader: Any) -> UlyssesSPDataLoaderAdapter:
        """This adapter around ``loader``, which leaves out whole batches, without as many micro-batches of the next."""
        found = UlyssesSPDataLoaderAdapter(loader, self.sp_rank, self.sp_group, self.sp_world_size, self.device)
        found._skip, found.keeps_labels = micro_batches, self.keeps_labels
        return found

    def state_dict(self) -> dict[str, Any]:
        """Where the wrapped loader stood before the batches in hand, and how many micro-batches of them were taken.

        Raises:
            AttributeError: the wrapped loader has no ``state_dict``.
        """
        if not self.micro_batches:
            return {"loader": self.dl.state_dict(), "taken": 0}
        return {"loader": self._state, "taken": self.sp_world_size - len(self.micro_batches)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass go on where ``state`` was taken."""
        self.dl.load_state_dict(state["loader"])
        self.iter, self._skip = None, state["taken"]
        self.micro_batches.clear()


class _Pass:
    """An iterator over an adapter: iterating over it goes on and does not start anew."""

    def __init__(self, adapter: UlyssesSPDataLoaderAdapter) -> None:
        self._adapter: UlyssesSPDataLoaderAdapter | None = adapter

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Batch:
        if self._adapter is None:
            raise StopIteration
        try:
            return next(self._adapter)
        except StopIteration:
            self._adapter = None
            raise


def divide_batches(
    batch: Any, axis: Axis, device: torch.device, keeps_labels: bool = False, compares: bool = False
) -> list[Batch] | None:
    """This process's part of the batch of every process, in their order; ``None`` where one has ended. Collective.

    Args:
        compares: say if all processes have the same batch.

    Raises:
        ValueError: on all processes, where the batch of one cannot be divided.
    """
    fault, prepared = "", {}
    if batch is not None:
        try:
            prepared = _prepared(dict(batch), axis.world_size, keeps_labels)
        except ValueError as error:
            fault = str(error)
    divided = {key: value for key, value in prepared.items() if _is_divided(key, value)}
    others = {key: value for key, value in prepared.items() if key not in divided}
    forms = {key: (tuple(value.shape), value.dtype) for key, value in divided.items()}
    every: list[Any] = [None] * axis.world_size
    sums = {key: _checksum(value) for key, value in divided.items()} if compares else {}
    own = (batch is None, fault, forms, others, sums)
    with axis.log("all-gather", "forms of the batches"):
        dist.all_gather_object(every, own, group=axis.group)
    if faults := [f"rank {axis.global_rank(rank)}: {told[1]}" for rank, told in enumerate(every) if told[1]]:
        raise ValueError("; ".join(dict.fromkeys(faults)))
    if any(ended for ended, *_ in every):
        return None
    if compares and all(told[4] == sums for told in every):
        warn_once(
            f"the {axis.world_size} processes of a sequence gave UlyssesSPDataLoaderAdapter the same batch: it takes a "
            "batch of each in turn, so every batch is trained that many times. Give each process batches of its own "
            "(DistributedSampler), or set loader.same_in_sequence = True, and each is shared once"
        )
    parts = _exchange_parts(divided, [told[2] for told in every], axis, device)
    return [{**part, **told[3]} for part, told in zip(parts, every, strict=True)]


def _exchange_parts(divided: Batch, forms: list[Any], axis: Axis, device: torch.device) -> list[Batch]:
    """Bytes of all tensors travel together: dtypes and lengths differ from tensor to tensor and batch to batch."""
    n = axis.world_size
    pieces = [value.detach().to(device).chunk(n, 1) for value in divided.values()]
    sent = [_bytes([piece[rank] for piece in pieces], device) for rank in range(n)]
    sizes = [sum(_nbytes(form, n) for form in told.values()) for told in forms]
    received = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    all_to_all(received, torch.cat(sent), axis, "parts of the batches", sizes, [len(each) for each in sent])
    parts = []
    for flat, told in zip(torch.split(received.cpu(), sizes), forms, strict=True):
        part: Batch = {}
        for (key, form), values in zip(
            told.items(), torch.split(flat, [_nbytes(form, n) for form in told.values()]), strict=True
        ):
            shape, dtype = form
            part[key] = values.clone().view(dtype).view(shape[0], shape[1] // n, *shape[2:])
        parts.append(part)
    return parts


def _nbytes(form: tuple[tuple[int, ...], torch.dtype], n: int) -> int:
    shape, dtype = form
    return torch.Size(shape).numel() // n * dtype.itemsize


def _bytes(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=device)


def _checksum(value: Tensor) -> int:
    return zlib.crc32(_bytes([value.detach().cpu()], torch.device("cpu")).numpy().tobytes())


def _is_divided(key: str, value: Any) -> bool:
    return (isinstance(value, Tensor) and key not in PACKED) or (key == "seq_idx" and isinstance(value, Tensor))


def _prepared(batch: Batch, n: int, keeps_labels: bool) -> Batch:
    """With ``position_ids``, and labels shifted, beside them or in their place.

    Raises:
        ValueError: it cannot be divided into ``n`` parts.
    """
    name = "input_ids" if batch.get("input_ids") is not None else "inputs_embeds"
    tokens = batch.get(name)
    if not isinstance(tokens, Tensor) or tokens.ndim < 2:
        raise ValueError("a batch needs input_ids, or inputs_embeds, of [batch, tokens]")
    length = tokens.shape[1]
    if length % n:
        raise ValueError(
            f"batch's seqlen={length} isn't divisible by sp-size={n}: pad to a multiple of it "
            f"(pad_to_multiple_of={n} of the collator)"
        )
    if batch.get("position_ids") is None:
        if sign := looks_packed(batch):
            raise ValueError(
                f"Ulysses SP requires `position_ids` where documents are packed, as {sign} says: they begin anew with "
                "every document; have the collator give them (DataCollatorWithFlattening does)"
            )
        batch["position_ids"] = torch.arange(length, device=tokens.device).repeat(tokens.shape[0], 1)
    labels = batch.get("labels") if keeps_labels else batch.pop("labels", None)
    if isinstance(labels, Tensor) and batch.get("shift_labels") is None:
        batch["shift_labels"] = torch.nn.functional.pad(labels, (0, 1), value=_IGNORED)[..., 1:].contiguous()
    for key, value in batch.items():
        if _is_divided(key, value) and (value.ndim < 2 or value.shape[1] != length):
            raise ValueError(
                f"{key}'s shape {list(value.shape)} must match {name}'s shape {list(tokens.shape)}: tensors are "
                "divided along dimension 1"
            )
    return batch
