"""What becomes of a step: the norm of its gradients, whether it is made, what users are told of one that is infinite.

``global_scale_and_skip`` takes the norm. Sums of squares are taken in fp32 over what each rank owns; one all-reduce of
one number over all processes follows, unless each of them owns everything. What several own is divided by their number,
so that each element counts once. Gaps and padding of flat gradients are zero and add nothing. So the factor that clips
is an fp32 number for gradients of fp64 as well: processes need not agree whether anyone's are.

``Outcome`` keeps it. The GPU knows first, the host when it asks, which waits until the norm is there and no longer:
what was queued after it, the update, goes on meanwhile.

``NonFinite`` tells of a norm that is not finite: which step, which parameter, whose loss (``ds_hf.nonfinite``). While
norms are finite, all that happens is that the host compares a number that it has anyway: nothing is launched, sent or
waited for. Ranks speak to each other only where all of them have the norm before the update: on the CPU, and with
"error". On a GPU the host learns of it at the next step, and each rank tells what it sees itself. So it does where a
loss scale adapts, whose overflows are told only with a loss that is not finite, or at the least scale.

``Unused`` names parameters that no process has a gradient of and that the step changes all the same.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ds_hf.config.plan import NonFiniteMode
from ds_hf.engine.comm import collectives
from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.comm.report import ranks_text
from ds_hf.engine.ops import library as ops
from ds_hf.engine.optim.segments import Segment, fragments_of
from ds_hf.engine.zero.at_rest import name_of
from ds_hf.engine.zero.buffer import FlatBuffer
from ds_hf.engine.zero.gradients import GradientBuffer
from ds_hf.errors import DsHfError, NonFiniteError
from ds_hf.log import logger, warn_once

__all__ = ["LastStep", "NonFinite", "Outcome", "Unused", "global_scale_and_skip", "shared"]


class Outcome:
    """Of the latest step.

    Attributes:
        taken: there was a step.
        looked_at: the host has seen whether its norm is finite.
    """

    def __init__(self) -> None:
        self.taken = False
        self.looked_at = True
        self.scale = 1.0
        self.checked = False
        self._event: torch.cuda.Event | None = None
        self._norm = torch.zeros((), dtype=torch.float32)
        self._pinned: Tensor | None = None  # allocated once: that may wait for the device, holding the interpreter

    def take(self, norm: Tensor, scale: float, checked: bool) -> None:
        """Of a new step; ``overflow`` of the one before must have been asked for, if it is to be.

        Args:
            norm: 0-dim, of the gradients with their loss scale; inf or nan if one of them is.
            scale: that loss scale.
            checked: a norm that is not finite skips the step.
        """
        self.scale, self.checked, self.taken = scale, checked, True
        self._norm, self._event = norm, None
        if norm.is_cuda:
            if self._pinned is None:
                self._pinned = torch.empty_like(norm, device="cpu", pin_memory=True)
            self._norm = self._pinned
            self._norm.copy_(norm, non_blocking=True)
            self._event = torch.cuda.current_stream(norm.device).record_event()

    @property
    def known(self) -> bool:
        """Asking will not wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def _value(self) -> float:
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return float(self._norm)

    @property
    def on_host(self) -> bool:
        """The norm never was anywhere else."""
        return self._event is None

    @property
    def value(self) -> float:
        """The norm with the loss scale, as it is; waits for it."""
        return self._value()

    @property
    def norm(self) -> float:
        """Without the loss scale; infinite also where a gradient was nan: accelerate's users compare with numbers."""
        value = self._value()
        return value / self.scale if math.isfinite(value) else math.inf

    @property
    def overflow(self) -> bool:
        """The step was skipped."""
        return self.checked and not math.isfinite(self._value())


class LastStep:
    """Whether an engine's latest step was applied. Where the host learns that later, the schedule has advanced by then,
    and is taken back if the step was not.

    Attributes:
        applied: as far as it is known.
        skipped: how many steps were not, so far.
    """

    def __init__(self) -> None:
        self.applied = False
        self.skipped = 0
        self._undo: Callable[[], None] | None = None  # while it is open

    def advance(self, optimizer: Any, scheduler: Any, **kwargs: Any) -> bool:
        """Advance ``scheduler``, if there is one, unless ``optimizer`` skipped its step; whether that is known.

        Raises:
            DsHfError: it needs a metric.
        """
        if isinstance(scheduler, ReduceLROnPlateau) and "metrics" not in kwargs:
            raise DsHfError(
                'ReduceLROnPlateau needs a metric at each step: engine.step(lr_kwargs={"metrics": value}). To step it '
                "by the loss of an evaluation, do not give it to initialize(), and call its step(value) there"
            )
        later = optimizer.learns_later and (scheduler is None or hasattr(scheduler, "load_state_dict"))
        self._undo = _remember(scheduler, optimizer.param_groups) if later and scheduler is not None else _nothing
        if scheduler is not None and (later or not optimizer.skipped):
            scheduler.step(**kwargs)
        if not later:
            self._undo = _nothing
        return not later

    def learn(self, optimizer: Any) -> bool | None:
        """Whether ``optimizer`` applied it; ``None`` where that was known."""
        undo, self._undo = self._undo, None
        if optimizer is None:
            return None
        optimizer.look_back()
        if undo is None:
            return None
        self.applied = not optimizer.skipped
        if not self.applied:
            undo()
            self.skipped += 1
        return self.applied


def _nothing() -> None:
    return None


def _remember(scheduler: Any, groups: list[dict[str, Any]]) -> Callable[[], None]:
    """A function that takes a scheduler, and what it writes into ``groups``, back to where they are now."""
    state = {key: list(value) if type(value) is list else value for key, value in scheduler.state_dict().items()}
    values = [{key: value for key, value in group.items() if key != "params"} for group in groups]

    def undo() -> None:
        scheduler.load_state_dict(state)
        for group, before in zip(groups, values, strict=True):
            group.update(before)

    return undo


# -- the norm ----------------------------------------------------------------------------------------------------------


def shared(square: Tensor, owners: int) -> Tensor:
    """What each of so many processes that own the same adds to a sum over all."""
    return square if owners == 1 else square / owners


def global_scale_and_skip(
    owned: Sequence[Tensor],
    world: Axis,
    *,
    alone: bool,
    device: torch.device,
    owners: Sequence[int],
    known: Sequence[Tensor] = (),
    scale: float = 1.0,
    max_norm: float = 0.0,
    checked: bool = False,
) -> Tensor:
    """fp32 ``[3]``: factor that unscales and clips, flag that forbids the step, norm of all gradients as they are.

    The norm is inf or nan if any gradient on any rank is.

    Args:
        owned: what this rank owns, any floating dtypes ...
        owners: ... and how many processes of the world own the same.
        world: all processes that own something of the model.
        alone: every rank owns everything, so there is nothing to sum over ranks.
        device: where the result lies, and where the processes of ``world`` meet.
        known: squared norms of what else this rank owns, divided by the number of their owners.
        scale: the gradients carry this loss scale.
        max_norm: ``gradient_clipping``, of the gradients without it; 0 for none.
        checked: forbid the step when the norm is not finite.
    """
    clip: dict[str, Any] = {"scale": scale, "max_norm": max_norm, "checked": checked}
    kinds: dict[tuple[int, torch.device, torch.dtype], list[Tensor]] = {}
    for tensor, count in zip(owned, owners, strict=True):
        kinds.setdefault((1 if alone else count, tensor.device, tensor.dtype), []).append(tensor)
    if alone and len(kinds) == 1 and not known:
        return ops.norm_control(next(iter(kinds.values())), **clip).to(device)
    squares = [shared(ops.squared_norm(tensors).to(device), count) for (count, _, _), tensors in kinds.items()]
    for place in dict.fromkeys(square.device for square in known):
        squares.append(torch.stack([square for square in known if square.device == place]).sum().to(device))
    nothing = torch.zeros((), device=device, dtype=torch.float32)  # whatever torch's default dtype is
    if not alone:
        total = torch.stack(squares).sum() if squares else nothing
        squares = [collectives.all_reduce_sum(total, world, "the gradient norm")]
    return ops.clip_control(squares or [nothing], **clip)


# -- norms that are not finite -----------------------------------------------------------------------------------------


_ENDS: dict[NonFiniteMode, str] = {
    "warn": (
        'The step is made, and the weights are no longer finite: {"ds_hf": {"nonfinite": "skip"}} leaves such steps '
        'out, "error" ends training before them.'
    ),
    "skip": "The step is skipped; the weights are as they were.",
    "error": 'The weights are as they were before this step ("ds_hf": {"nonfinite": "error"}).',
}
_ABSENT = 1 << 62
_LONGEST = 240  # bytes of a name that processes tell each other, its last ones


class _Seen(NamedTuple):
    """What one rank knows: place of the first bad parameter in the model, whether a loss of its was bad, and that
    parameter's name: where experts or layers are divided, another one has its place elsewhere."""

    place: int = _ABSENT
    loss: bool = False
    name: str = ""


class NonFinite:
    """What the engine and its optimizer tell of their steps.

    Args:
        mode: what becomes of such a step.
        whole: every rank has the whole gradient.
        names: of the model's parameters by ``id``, in the order of the model.
        accumulation: micro-batches of a step, as a rule.

    Attributes:
        losses: of the micro-batches of the coming step.
    """

    def __init__(
        self, mode: NonFiniteMode, axis: Axis, *, whole: bool, names: Mapping[int, str], accumulation: int
    ) -> None:
        self.mode = mode
        self._axis, self._whole, self._names = axis, whole, names
        self._step = 0
        self.losses: deque[Tensor] = deque(maxlen=accumulation)
        self._past: deque[Tensor] = deque(maxlen=accumulation)
        self._told = False  # of this run of bad steps

    @property
    def waits(self) -> bool:
        """The host needs the norm before the update. After a bad step too: of the next one the parameter is told."""
        return self._told or self.mode == "error"

    @property
    def bad_loss(self) -> bool:
        """Whether a loss that this rank's step is made of is not finite. Waits for it."""
        return any(not bool(loss.isfinite().all()) for loss in self._past)

    def begin(self, step: int) -> None:
        """The step of this number, counted from 1, is made of the losses so far."""
        self._step = step
        self._past, self.losses = self.losses, self._past
        self.losses.clear()

    def fine(self) -> None:
        """The norm is finite."""
        self._told = False

    def tell(
        self, norm: float, values: Iterable[tuple[FlatBuffer, Tensor]], *, together: bool, device: torch.device
    ) -> None:
        """The norm is not finite.

        Args:
            values: over what this rank owns of each buffer, what is to be looked at: gradients, or what they became.
            together: all ranks are here, so that one tells of all.
            device: where they meet.

        Raises:
            NonFiniteError: the mode is "error".
        """
        if self._told and self.mode != "error":
            return
        self._told = True
        place = self._first(values)
        name = "" if place == _ABSENT else list(self._names.values())[place]
        mine = _Seen(place, self.bad_loss, name)
        ranks = range(self._axis.world_size) if together else [self._axis.rank]
        seen = dict(zip(ranks, self._gather(mine, device) if together else [mine], strict=True))
        text = self._text(norm, seen, complete=len(seen) == self._axis.world_size)
        if self.mode == "error":
            raise NonFiniteError(text)
        if self._axis.rank == 0 or (not together and (mine.loss or (mine.place != _ABSENT and not self._whole))):
            logger.warning("%s", text)

    def _first(self, values: Iterable[tuple[FlatBuffer, Tensor]]) -> int:
        """Place in the model of the first parameter with something bad in ``values``."""
        places = {key: place for place, key in enumerate(self._names)}
        found = _ABSENT
        for buffer, owned in values:
            if bool(owned.isfinite().all()):
                continue
            for fragment in buffer.layout.fragments(buffer.axis.rank, whole=self._whole):
                piece = owned[fragment.shard_start : fragment.shard_start + fragment.numel]
                place = places.get(id(buffer.params[fragment.slot.index]), _ABSENT)
                if place < found and not bool(piece.isfinite().all()):
                    found = place
        return found

    def _gather(self, mine: _Seen, device: torch.device) -> list[_Seen]:
        name = mine.name.encode()[-_LONGEST:].ljust(_LONGEST, b"\0")
        one = torch.tensor([mine.place, mine.loss, *name], dtype=torch.int64, device=device)
        every = one.new_empty(len(one) * self._axis.world_size)
        collectives.all_gather(every, one, self._axis, "what is not finite")
        told = every.view(-1, len(one)).tolist()
        return [_Seen(p, bool(loss), bytes(text).strip(b"\0").decode(errors="replace")) for p, loss, *text in told]

    def _text(self, norm: float, seen: Mapping[int, _Seen], *, complete: bool) -> str:
        alone = self._axis.world_size == 1
        parts = [f"step {self._step}: the norm of the gradients is {norm:g}."]
        first = min(one.place for one in seen.values())
        if first != _ABSENT:
            ranks = [rank for rank, one in seen.items() if one.place == first]
            where = "" if alone or self._whole else f", in the part of {ranks_text(ranks)}"
            which = "The first parameter" if complete or self._whole else "The first parameter that this rank sees"
            parts.append(f"{which} whose gradient is not finite is {seen[ranks[0]].name!r}{where}.")
        bad = [rank for rank, one in seen.items() if one.loss]
        if bad:
            parts.append(f"The loss was not finite{'' if alone else f' on {ranks_text(bad)}'}.")
        elif complete and self._past:
            parts.append(f"The loss was finite{'' if alone else ' on every rank'}: backward made it so.")
        return " ".join([*parts, _ENDS[self.mode]])


# -- gradients that did not come ---------------------------------------------------------------------------------------


class Unused:
    """Tells of parameters without a gradient that the update changes, which torch's would not: once, with names.

    Looked at are the first steps in which one is without here: gradients and moments are asked whether they are zero.
    """

    def __init__(self) -> None:
        self._looks = 10

    def look(
        self, inner: Optimizer, groups: Mapping[GradientBuffer, Sequence[Segment]], states: Any, *, whole: bool
    ) -> None:
        """Before an update.

        Args:
            states: of the segments, those that are in memory.
            whole: every rank owns everything.
        """
        if not self._looks:
            return
        # A unit that has none at all, on one process, is passed over as in torch.
        lacking = {gradient: found for gradient in groups if (found := gradient.without) and gradient.has_reduced}
        if not lacking or not getattr(inner, "reduces", True):  # processes have gradients of their own
            return
        self._looks -= 1
        names = [n for g, found in lacking.items() for n in _moved(inner, groups[g], states, set(found), whole=whole)]
        if not names:
            return
        self._looks = 0
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        warn_once(
            f"{', '.join(names[:3])}{more}: no gradient in this step (said once, for the first such step). The step "
            "takes a gradient of zero, as DeepSpeed does beside others that have one: weight decay and momentum go on; "
            "torch passes over parameters without a gradient. Where they are not used on purpose, freeze them "
            "(requires_grad_(False), as PEFT's set_adapter() does with the other adapters) for as long, which leaves "
            "them and their moments as they are, or give them a group with weight_decay 0",
            everywhere=not whole,  # each process sees what it owns
        )


def _moved(
    inner: Optimizer, segments: Sequence[Segment], states: Any, lacking: set[int], *, whole: bool
) -> Iterator[str]:
    """Those of ``lacking`` whose gradient is zero wherever it is owned here and that the update changes."""
    for segment, inside in fragments_of(segments, whole=whole):
        owned, state = segment.gradient.settled(), states.get(segment.param, {})
        decays = bool(inner.param_groups[segment.group].get("weight_decay"))
        moments = [state[key].reshape(-1) for key in ("exp_avg", "momentum_buffer") if state.get(key) is not None]
        for fragment in inside if decays or moments else ():
            if fragment.slot.index not in lacking or not fragment.numel:
                continue
            here = slice(fragment.shard_start, fragment.shard_start + fragment.numel)
            there = slice(here.start - segment.start, here.stop - segment.start)
            if owned is not None and owned[here].any():
                continue
            if decays or any(bool(moment[there].any()) for moment in moments):
                lacking.discard(fragment.slot.index)
                yield name_of(segment.gradient.buffer.params[fragment.slot.index])
