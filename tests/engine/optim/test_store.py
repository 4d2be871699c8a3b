"""What every store of optimizer states does, wherever it keeps them and whoever updates them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.offload.aio import Aio
from ds_hf.engine.offload.folder import SwapFolder
from ds_hf.engine.offload.swap import SwapPool
from ds_hf.engine.optim.file_store import FileStore
from ds_hf.engine.optim.host_store import DelayedStore, HostStore
from ds_hf.engine.optim.segments import cut_segments
from ds_hf.engine.optim.store import DeviceStore, HostSettings, StateStore
from ds_hf.engine.zero.buffer import FlatBuffer
from ds_hf.engine.zero.gradients import GradientBuffer, GradientPolicy

CPU = torch.device("cpu")
ALONE = Axis(None, 0, 1)
POLICY = GradientPolicy(True, False, 1.0, 1.0, None, torch.float32)
UNITS, NUMEL = 5, 96
STORES = ["device", "host", "streamed", "half streamed", "part on the device", "delayed", "file"]


class States(NamedTuple):
    """A store with the masters of some units in it; their values, exact, at the start; and the folder of files."""

    store: StateStore
    masters: dict[FlatBuffer, Tensor]
    values: dict[FlatBuffer, Tensor]
    gradients: list[GradientBuffer]

    def weights(self) -> list[Tensor]:
        """The parameters, when everything of a step is over."""
        for gradient in self.gradients:
            gradient.buffer.gather()  # whoever uses them waits
        return [gradient.buffer.full[:NUMEL].clone() for gradient in self.gradients]

    def kept(self) -> list[Tensor]:
        """The masters, visited one after another."""
        found = []
        for gradient in self.gradients:
            self.store.visit(gradient.buffer, write=False)
            found.append(self.masters[gradient.buffer][:NUMEL].clone())
        return found


class Adding:
    """An update that adds one number to all masters of some units."""

    def __init__(self, states: States, units: Sequence[GradientBuffer], number: float, idle: bool = False) -> None:
        self.grads: list[Tensor | None] = [None if idle else torch.ones(1) for _ in units]
        self.idle = idle
        self._masters = [states.masters[unit.buffer] for unit in units]
        self._number = number

    def __call__(self, outs: Sequence[Tensor | None]) -> None:
        if self.idle:
            return
        for master, out in zip(self._masters, outs, strict=True):
            master.add_(self._number)
            if out is not None:
                out.copy_(master)


def make_store(kind: str, folder: Path) -> StateStore:
    def host(**more: float) -> HostSettings:
        return HostSettings(numel=UNITS * NUMEL, pinned=False, **more)  # type: ignore[arg-type]

    if kind == "device":
        return DeviceStore(CPU, torch.float32)
    if kind == "file":
        pool = SwapPool(SwapFolder(folder), Aio(block=8192, depth=2), 3, pinned=False)
        return FileStore(CPU, host(), pool)
    if kind == "delayed":
        return DelayedStore(CPU, host())
    shares = {"streamed": 1.0, "half streamed": 0.5}
    device_share = 0.4 if kind == "part on the device" else 0.0
    return HostStore(CPU, host(streamed_share=shares.get(kind, 0.0), device_share=device_share))


@pytest.fixture(params=STORES)
def states(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[States]:
    store = make_store(request.param, tmp_path)
    masters: dict[FlatBuffer, Tensor] = {}
    values: dict[FlatBuffer, Tensor] = {}
    gradients = []
    generator = torch.Generator().manual_seed(2)
    for _ in range(UNITS):
        params = [nn.Parameter(torch.randn(NUMEL, generator=generator))]
        buffer = FlatBuffer(params, ALONE, dtype=torch.bfloat16, device=CPU, sharded=False)
        exact = buffer.adopt()  # fp32, as the parameters were
        values[buffer] = exact.clone()
        masters[buffer] = store.place(buffer, buffer.full, exact, torch.float32)
        gradients.append(GradientBuffer(buffer, POLICY, storage=store.gradient_storage(buffer)))
    segments = {g: list(cut_segments(g, [0], masters[g.buffer], whole=True, elementwise=True)) for g in gradients}
    inner = SGD([segment.param for cut in segments.values() for segment in cut], lr=1.0)
    assert list(store.bind(inner, segments)) == [], "fp32 masters stay whole unless the settings say otherwise"
    yield States(store, masters, values, gradients)
    store.close()
    assert list(tmp_path.iterdir()) == []


def step(states: States, number: float, make: Callable[[Sequence[GradientBuffer]], Adding] | None = None) -> list[int]:
    """One update of all units; in which order they came back, those that ``settle`` gave back too."""
    numbers = {gradient: index for index, gradient in enumerate(states.gradients)}
    make = make or (lambda units: Adding(states, units, number))
    back = [unit for units in states.store.stream(states.gradients, make) for unit in units]
    back += [unit for units in states.store.settle() for unit in units]
    return [numbers[unit] for unit in back]


def test_masters_are_the_exact_values(states: States) -> None:
    """Not those of the bf16 parameters; and writing to the parameters later does not change them."""
    for gradient in states.gradients:
        gradient.buffer.full.zero_()
    for kept, gradient in zip(states.kept(), states.gradients, strict=True):
        assert kept.dtype is torch.float32
        assert torch.equal(kept, states.values[gradient.buffer][:NUMEL])


def test_every_unit_is_updated_once_a_step(states: States) -> None:
    expected = [states.values[gradient.buffer][:NUMEL].clone() for gradient in states.gradients]
    for number in (1.0, 0.25, 3.0):
        back = step(states, number)
        assert set(back) == set(range(UNITS))
        expected = [value + number for value in expected]
        for found, value in zip(states.weights(), expected, strict=True):
            assert torch.equal(found, value.to(torch.bfloat16))
        for kept, value in zip(states.kept(), expected, strict=True):
            assert torch.equal(kept, value)


def test_units_come_back_in_one_order(states: States) -> None:
    """Ranks gather in it: it follows from the units and the settings, never from what is ready first."""
    orders = []
    for _ in range(3):
        orders.append(step(states, 1.0))
        states.weights()
    assert orders[1] == orders[2]


def test_what_was_written_to_a_visited_state_is_updated(states: States) -> None:
    step(states, 1.0)
    states.weights()
    for index, gradient in enumerate(states.gradients):
        states.store.visit(gradient.buffer, write=True)
        states.masters[gradient.buffer].fill_(10.0 * index)
    step(states, 2.0)
    assert [float(found[0]) for found in states.weights()] == [10.0 * index + 2 for index in range(UNITS)]
    assert [float(kept[0]) for kept in states.kept()] == [10.0 * index + 2 for index in range(UNITS)]


def test_an_idle_update_changes_nothing(states: States) -> None:
    """What goes to the parameters then is what they were, and not what lay in memory that the update did not write."""
    step(states, 1.0)
    weights, masters = states.weights(), states.kept()

    def some(units: Sequence[GradientBuffer]) -> Adding:
        idle = all(unit is states.gradients[2] for unit in units)
        return Adding(states, units, 0.0, idle=idle)

    step(states, 0.0, some)
    for found, before in zip([*states.weights(), *states.kept()], [*weights, *masters], strict=True):
        assert torch.equal(found, before)


def test_states_at_rest_can_be_read_by_anybody(states: States) -> None:
    """Unless they are in files: that store says why they are not all there."""
    step(states, 1.0)
    states.weights()
    states.store.wait_for_states()
    if states.store.splits is None:
        for gradient in states.gradients:
            master = states.masters[gradient.buffer][:NUMEL]
            assert torch.equal(master, states.values[gradient.buffer][:NUMEL] + 1)
    else:
        assert "NVMe" in states.store.splits
