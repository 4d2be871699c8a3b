"""States in host memory of which the device updates a share in every step, see the package.

The order of a step, once there are chosen columns: the device updates those and the gather of all parameters is
queued; then gradients, times the factor that unscales and clips, are added up in host memory by a thread. In every
``update_interval``-th one the same thread goes on with the optimizer's update of everything from their mean. With
``overlap_step`` its parameters come up when the next such update begins; the step itself waits for nothing but the
gradients' way down. What the host has written over chosen elements is replaced by theirs as parameters come up.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from ds_hf.config.types.zero import ZenFlowSection
from ds_hf.engine.comm import collectives
from ds_hf.engine.offload.link import DONE, Arrival, HostLink
from ds_hf.engine.offload.memory import host_empty
from ds_hf.engine.offload.worker import Worker
from ds_hf.engine.ops import library as ops
from ds_hf.engine.optim.host_store import HostStore
from ds_hf.engine.optim.segments import Segment
from ds_hf.engine.optim.stepping import UnitsJob
from ds_hf.engine.optim.store import HostSettings, MakeJob
from ds_hf.engine.optim.streamed_updates import InFlightUpdate, Outputs, StreamedUpdates
from ds_hf.engine.optim.zenflow.chosen import Chosen, ChosenJob
from ds_hf.engine.optim.zenflow.columns import Columns
from ds_hf.engine.optim.zenflow.gradients import ColumnGradients
from ds_hf.engine.optim.zenflow.pressure import Pressure
from ds_hf.engine.optim.zenflow.rounds import Rounds
from ds_hf.engine.zero.buffer import FlatBuffer
from ds_hf.engine.zero.gradients import GradientBuffer
from ds_hf.engine.zero.storage import GradientStorage, summed_in

__all__ = ["ZenFlowStore"]


class ZenFlowStore(HostStore):
    """See the module.

    Args:
        section: what the user asks for.

    Attributes:
        rounds: what each step does.
    """

    splits = "zenflow keeps the states of some columns apart"
    delays = True
    skips = False  # rounds are counted, so it has to be known which are made

    def __init__(self, device: torch.device, settings: HostSettings, section: ZenFlowSection) -> None:
        super().__init__(device, settings)
        every = None if isinstance(section.update_interval, str) else section.update_interval
        self.rounds = Rounds(section.full_warm_up_rounds, every, _choose_every(section))
        self._share, self._overlaps, self._offloads = section.topk_ratio, section.overlap_step, section.offload
        self._pressure = Pressure(section.auto_ratio) if self.rounds.automatic else None
        self._summing = Worker()  # micro-batches: a step that needs their norm must not wait for an update
        self._travelling = StreamedUpdates(device, pinned=settings.pinned)  # where chosen states are on the host
        self._chosen: dict[GradientBuffer, Chosen] = {}
        self._asked_again: set[GradientBuffer] = set()  # of buffers without chosen columns
        self._put_off: dict[GradientBuffer, _PutOff] = {}
        self._running: list[tuple[GradientBuffer, Future[None]]] = []
        self._over = _ChosenOver(self.link, self._chosen, pinned=settings.pinned)
        self.outputs = self._over

    # -- building -------------------------------------------------------------------------------------------------

    def gradient_storage(self, buffer: FlatBuffer) -> GradientStorage:
        return ColumnGradients(
            self.link,
            self._summing,
            self._settings.accumulation_dtype,
            accumulates=self._settings.accumulates,
            pinned=self._settings.pinned,
            measures=self._measures,
        )

    def _measures(self) -> bool:
        """Whether sums over columns are wanted of the coming step."""
        choosing = self._inner is not None and self.rounds.ranks_next(self._inner.param_groups[0])
        return choosing or (self._pressure is not None and bool(self._chosen))

    def bind(self, inner: Optimizer, segments: Mapping[GradientBuffer, Sequence[Segment]]) -> Sequence[FlatBuffer]:
        for gradient, chosen in self._chosen.items():  # one process may cut where others need not
            self._travelling.arrived(chosen.block)
            chosen.cut(segments[gradient])
        for gradient, waiting in self._put_off.items():
            waiting.cut(segments[gradient])
        split = super().bind(inner, segments)
        for gradient in segments:
            storage = _storage(gradient)
            if storage.columns is None:
                layout, rank = gradient.buffer.layout, gradient.buffer.axis.rank
                storage.columns = Columns(layout, list(layout.fragments(rank, whole=gradient.policy.whole)))
        return split

    # -- the step -------------------------------------------------------------------------------------------------

    def stream(self, gradients: Sequence[GradientBuffer], make: MakeJob) -> Iterator[Sequence[GradientBuffer]]:
        assert self._inner is not None
        due = self._pressure is not None and self._pressure.due
        now = self.rounds.advance(self._inner.param_groups[0], due=due)
        late = self._finish_running() if now.full or now.updates else []
        late = [gradient for gradient in late if gradient not in gradients]
        whole = [gradient for gradient in gradients if now.full or gradient not in self._chosen]
        others = [gradient for gradient in gradients if gradient not in whole]
        plain = make([])  # its groups and its factor, without waiting for gradients to come down
        assert isinstance(plain, UnitsJob)
        chooses = gradients if now.ranks else [] if now.full else whole
        sums: dict[GradientBuffer, Tensor] = {}
        if chooses or (self._pressure is not None and not now.full):
            sums = {gradient: _storage(gradient).sums(gradient.owned, self._compute) for gradient in gradients}
        waits = now.full or (now.updates and (now.ranks or not self._overlaps))
        begun = list(self._submitted(whole, make))
        if not now.full:
            self._update_chosen(others, plain)
            if not waits:
                yield [*others, *late]
            self._weigh(sums, plain, updates=now.updates)
            self._put_by(others, make)
            if now.updates:
                self._update_from_means()
        self._finish(begun)
        if waits:
            self._finish_running()
        if whole or waits:
            yield [*whole, *([*others, *late] if waits else [])]
        self._choose_columns({gradient: sums[gradient] for gradient in chooses})

    def _update_chosen(self, gradients: Sequence[GradientBuffer], plain: UnitsJob) -> None:
        """On the device, and give the parameters there their values."""
        assert self._inner is not None
        under_way: list[tuple[GradientBuffer, Chosen, InFlightUpdate | None]] = []
        for gradient in gradients:
            chosen, owned = self._chosen.get(gradient), gradient.owned
            if chosen is None or owned is None:
                continue
            if chosen.stale:
                self._travelling.arrived(chosen.block)
                chosen.from_host(self._master(gradient))
            grad = _storage(gradient).picked(owned, self._compute)
            job = ChosenJob(chosen, self._inner, plain.groups, grad, plain.control.on(self._compute))
            chosen.last = torch.empty(chosen.positions.shape, dtype=gradient.buffer.dtype, device=self._compute)
            update = None
            if self._offloads:
                update = self._travelling.start(chosen.block, job, chosen.last)
            else:
                job([chosen.last])
            under_way.append((gradient, chosen, update))
        for gradient, chosen, update in under_way:
            if update is not None:
                update.wait()
            chosen.write(self._target(gradient))

    def _weigh(self, sums: Mapping[GradientBuffer, Tensor], plain: UnitsJob, *, updates: bool) -> None:
        """For "auto": whether an update is due in the next step."""
        if self._pressure is None or updates:
            if self._pressure is not None:
                self._pressure.forget()
            return
        measured = []
        for gradient, sum_ in sums.items():
            columns, chosen = _storage(gradient).columns, self._chosen.get(gradient)
            if columns is not None and chosen is not None:
                measured.append((columns, sum_, chosen.mask))
        if measured:
            self._pressure.take(measured, next(iter(sums)).buffer.axis, plain.control.on(self._compute))

    def _put_by(self, gradients: Sequence[GradientBuffer], make: MakeJob) -> None:
        """Add this step's gradients to those that wait, in host memory, by the thread."""
        for gradient in gradients:
            job = make([gradient])
            assert isinstance(job, UnitsJob)
            (grads,) = job.grads
            if grads is None:
                continue
            waiting = self._put_off.get(gradient)
            if waiting is None:
                total = host_empty(grads.numel(), summed_in(torch.float32, grads.dtype), pinned=False)
                waiting = self._put_off[gradient] = _PutOff(total, job)
            scale_and_skip = job.control.on(grads.device)
            waiting.job = job
            waiting.count(self._segments[gradient])
            waiting.added = self.worker.submit(_add, waiting.total, grads, scale_and_skip)
            _storage(gradient).read_by(waiting.added)

    def _update_from_means(self) -> None:
        """Let the thread update everything by the mean of what waits, and begin with nothing again."""
        for gradient, waiting in self._put_off.items():
            if waiting.steps:
                segments = [(s, waiting.steps_of.get(s.start, 0)) for s in self._segments[gradient]]
                mean = torch.tensor([1 / waiting.steps, 0.0], dtype=torch.float32)
                waiting.job.replace(waiting.total, mean, [(segment, steps > 0) for segment, steps in segments])
                fewer = [(s.start, s.end, waiting.steps / n) for s, n in segments if 0 < n < waiting.steps]
                out = self.outputs.begin(gradient, self._master(gradient))
                befores = waiting.added, self._over.copied.pop(gradient, DONE)
                update = self.worker.submit(_update, waiting.job, out, waiting.total, fewer, *befores)
                self._running.append((gradient, update))
                waiting.forget()

    def _finish_running(self) -> list[GradientBuffer]:
        """Wait for the host's updates, and have their parameters brought where they are used; whose they were."""
        running, self._running = self._running, []
        return self._finish(running)

    def _finish(self, updates: Sequence[tuple[GradientBuffer, Future[None]]]) -> list[GradientBuffer]:
        for gradient, update in updates:
            update.result()
            self.outputs.finish(gradient)
        return [gradient for gradient, _ in updates]

    # -- the choice -----------------------------------------------------------------------------------------------

    def _choose_columns(self, sums: Mapping[GradientBuffer, Tensor]) -> None:
        """The columns that the next steps update, by the sums in this process. Collective. Nothing runs on ``sums``'s.

        Where a matrix has no gradient yet (the first matrices of adapters: the second ones begin at zero), its buffer
        is updated as a whole and asked again in the next step; once, if others in it have one.
        """
        if not sums:
            return
        axis = next(iter(sums)).buffer.axis
        together = collectives.all_reduce_sum(torch.cat(list(sums.values())), axis, "the sizes of gradient columns")
        for gradient, sum_ in zip(sums, torch.split(together, [len(each) for each in sums.values()]), strict=True):
            storage, master = _storage(gradient), self._master(gradient)
            assert storage.columns is not None
            if gradient not in self._chosen and gradient not in self._asked_again:
                has_some = [bool(of.any()) for of in torch.split(sum_, storage.columns.counts)]
                if not all(has_some):
                    if any(has_some):
                        self._asked_again.add(gradient)
                    continue
            self._to_host(gradient)
            mask = storage.columns.largest(sum_, self._share)
            storage.positions = storage.columns.positions(mask)
            segments, name = self._segments[gradient], gradient.buffer.labels.name
            self._chosen[gradient] = Chosen(mask, storage.positions, segments, master, name)

    def _master(self, gradient: GradientBuffer) -> Tensor:
        return self._blocks[gradient.buffer].values

    def _to_host(self, gradient: GradientBuffer) -> None:
        """Let the host's masters be the newest of all elements."""
        chosen = self._chosen.get(gradient)
        if chosen is not None and not chosen.stale:
            self._travelling.arrived(chosen.block)
            chosen.to_host(self._master(gradient))

    def _drop_chosen(self) -> None:
        """Let the next round be a full one. Nothing runs."""
        for gradient in self._chosen:
            self._to_host(gradient)
            _storage(gradient).positions = None
        self._chosen.clear()
        self._asked_again.clear()
        self.rounds.forget()
        if self._pressure is not None:
            self._pressure.forget()

    # -- what looks at states -------------------------------------------------------------------------------------

    def visit(self, buffer: FlatBuffer, *, write: bool = True) -> None:
        gradient = self._gradient_of(buffer)
        if gradient is None:
            return
        for each, update in self._running:
            if each is gradient:
                update.result()
                if write:
                    self._over.rewritten.add(gradient)
        self._to_host(gradient)
        if write and gradient in self._chosen:
            self._chosen[gradient].stale = True

    def wait_for_states(self) -> None:
        for _, update in self._running:
            update.result()

    def kept_apart(self) -> Mapping[str, Sequence[Tensor]]:
        found: dict[str, list[Tensor]] = {"hp_params": [], "optim_states": []}
        for chosen in self._chosen.values():
            found["hp_params"] += [chosen.block.values, *([] if chosen.last is None else [chosen.last])]
            found["optim_states"] += [value for state in chosen.state.values() for value in state.values()]
            found["optim_states"] += [chosen.positions, chosen.mask]
        return found

    def settle(self, *, last: bool = False) -> Iterator[Sequence[GradientBuffer]]:
        """Parameters that the host has updated come up at their round whoever reads or saves weights before: training
        is the same with that and without. What ends an interval (``last``) brings them."""
        if not last:
            self.wait_for_states()
            return
        done = self._finish_running()
        self._update_from_means()
        done += self._finish_running()
        self._drop_chosen()
        yield list(dict.fromkeys(done))

    def close(self) -> None:
        super().close()
        self._summing.close()
        self._travelling.close()
        self._chosen.clear()
        self._put_off.clear()


@dataclass(eq=False)
class _PutOff:
    """Gradients of one buffer that wait for an update.

    Attributes:
        total: fp32, ``[shard_numel]``, their sum, each times its step's factor.
        job: of the last step, which becomes the update.
        steps: of how many steps.
        steps_of: in how many of them each segment was not frozen, by its start.
        added: the last addition.
    """

    total: Tensor
    job: UnitsJob
    steps: int = 0
    steps_of: dict[int, int] = field(default_factory=dict)
    added: Future[None] | None = None

    def count(self, segments: Sequence[Segment]) -> None:
        """One more step was added."""
        self.steps += 1
        for segment in segments:
            self.steps_of[segment.start] = self.steps_of.get(segment.start, 0) + segment.active

    def cut(self, segments: Sequence[Segment]) -> None:
        """Follow the segments, which may have been cut further since."""
        starts = sorted(self.steps_of)
        if starts:
            self.steps_of = {s.start: self.steps_of[starts[bisect_right(starts, s.start) - 1]] for s in segments}

    def forget(self) -> None:
        """It is updated with what there is."""
        self.steps, self.steps_of = 0, {}


class _ChosenOver(Outputs):
    """Parameters that the host has updated, with the values of chosen elements over them.

    Attributes:
        rewritten: their masters were written to after the update.
        copied: over when the host's memory that a unit's last parameters came from may be written to.
    """

    def __init__(self, link: HostLink, chosen: Mapping[GradientBuffer, Chosen], *, pinned: bool) -> None:
        super().__init__(link, pinned=pinned, at_once=False)
        self._chosen = chosen
        self.rewritten: set[GradientBuffer] = set()
        self.copied: dict[GradientBuffer, Arrival] = {}
        self._masters: dict[GradientBuffer, Tensor] = {}

    def begin(self, gradient: GradientBuffer, master: Tensor) -> Tensor | None:
        self._masters[gradient] = master
        return super().begin(gradient, master)

    def finish(self, gradient: GradientBuffer, unused: Arrival | None = None) -> None:
        master = self._masters.pop(gradient)
        if gradient in self.rewritten:
            self.rewritten.discard(gradient)
            self._written[gradient][0].copy_(master)
        super().finish(gradient, unused)
        self.copied[gradient] = self._link.now()
        chosen = self._chosen.get(gradient)
        if chosen is not None:
            chosen.write(gradient.buffer.owned(whole=gradient.policy.whole))


def _storage(gradient: GradientBuffer) -> ColumnGradients:
    assert isinstance(gradient.storage, ColumnGradients)
    return gradient.storage


def _add(total: Tensor, grads: Tensor, scale_and_skip: Tensor | None) -> None:
    """``total += grads * scale``, in one pass by all of the rank's threads."""
    ops.sgd_(
        [total], [grads], [], [], scale_and_skip,
        lr=-1.0, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, first=False,
    )  # fmt: skip


def _update(
    job: UnitsJob,
    out: Tensor | None,
    total: Tensor,
    fewer: Sequence[tuple[int, int, float]],
    added: Future[None] | None,
    copied: Arrival,
) -> None:
    """``fewer``: stretches that have gradients of fewer steps, and what makes the mean of all steps theirs."""
    if added is not None:
        added.result()  # over by now: an error of it is one of this update
    copied.on_host()  # the last parameters may still be on their way from ``out``
    for start, end, factor in fewer:
        total[start:end].mul_(factor)
    job([out])
    total.zero_()


def _choose_every(section: ZenFlowSection) -> int:
    """Steps between choices, as far as the section says them; 0 for none but the first."""
    every = (
        1 if isinstance(section.select_interval, str) or section.select_strategy == "auto" else section.select_interval
    )
    return every if section.select_strategy == "step" else every * (section.steps_per_epoch or 0)
