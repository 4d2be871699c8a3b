"""Which units go up to be updated by the GPU, and what "auto" makes of sizes, memory and the link."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
import torch

from ds_hf import initialize, log
from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.offload.link import HostLink
from ds_hf.engine.offload.link_speed import speed_both_ways
from ds_hf.engine.optim import offloading, stream_share
from ds_hf.engine.optim.host_store import HostPlace, HostStore
from ds_hf.engine.optim.stream_share import AutoShare, HostUnit, auto_share, streaming, why_not
from tests.contract.test_parity import ADAMW, MICRO, batches, model
from tests.helpers.distributed import run_distributed

CPU = torch.device("cpu")
MILLION = 10**6
GB = 10**9


def units(*millions: int, movable: bool = True) -> list[HostUnit]:
    """As AdamW has them with bf16 parameters and masters split, sizes in millions of elements."""
    return [HostUnit(n * MILLION, 10 * n * MILLION, 2 * n * MILLION, movable) for n in millions]


def going_up(given: list[HostUnit], share: float) -> list[bool]:
    return list(streaming(given, share, 0).up)


# -- which units ------------------------------------------------------------------------------------------------------


def test_streamed_units_lie_between_the_others() -> None:
    assert going_up(units(*[10] * 10), 0.3) == [False, True, False, False, True, False, False, False, True, False]
    assert going_up(units(*[10] * 4), 1.0) == [True] * 4
    assert going_up(units(*[10] * 4), 0.0) == [False] * 4
    assert going_up(units(10, 10, movable=False), 1.0) == [False, False]
    assert going_up([], 0.3) == []
    # a large one would make the slots large, but goes where the share needs it
    large = going_up(units(25, *[10] * 10), 0.65)
    assert (large[0], sum(large)) == (False, 8)
    assert going_up(units(25, *[10] * 10), 1.0) == [True] * 11


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.8])
def test_about_the_share_goes(share: float) -> None:
    sizes = list(itertools.islice(itertools.cycle([50, 80, 80, 20]), 40))
    up = sum(size for size, goes in zip(sizes, going_up(units(*sizes), share), strict=True) if goes)
    assert up / sum(sizes) == pytest.approx(share, abs=0.05)


def test_slots_hold_the_largest_unit_that_goes_twice() -> None:
    found = streaming(units(164, 80, 80, 80), 0.3, 0)
    assert (found.slots, found.gradients) == (2 * 80 * MILLION * (10 + 2), 0)
    assert streaming(units(164), 0.3, 0).slots == 0


def test_gradients_stay_as_far_as_there_is_room() -> None:
    given = units(*[100] * 6)
    slots = 2 * 100 * MILLION * 10
    all_stay = streaming(given, 1.0, slots + 6 * 200 * MILLION)
    assert all_stay.stays == all_stay.up == (True,) * 6
    assert (all_stay.slots, all_stay.gradients) == (slots, 6 * 200 * MILLION)
    some = streaming(given, 1.0, slots + 6 * 200 * MILLION - 1)  # those that do not need places to come up to
    assert some.stays == (True,) * 3 + (False,) * 3
    assert (some.slots, some.gradients) == (slots + 400 * MILLION, 600 * MILLION)
    assert streaming(given, 1.0, 0).stays == (False,) * 6
    between = streaming(given, 0.5, slots + 3 * 200 * MILLION)
    assert between.stays == between.up
    assert sum(between.up) == 3


# -- what sizes say ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "room", "reason"),
    [
        ([164, *[79] * 32], 80 * GB // 16, ""),  # 2.7 B on an H100
        ([262, *[202] * 32], 80 * GB // 16, ""),  # 6.7 B
        ([328, *[317] * 40], 80 * GB // 16, "would take 7.1 GiB of the device, and 4.7 may be taken"),  # 13 B
        ([1, 1, 1, 1], 80 * GB, "less than 64 MiB"),
        ([], 80 * GB, "less than 64 MiB"),
        ([1000], 80 * GB, "too few units (1)"),  # nothing would go
        ([100, 100], 80 * GB, ""),  # half of them goes
        ([50, 150], 80 * GB, "too few units (2)"),
    ],
)
def test_what_sizes_say(sizes: list[int], room: int, reason: str) -> None:
    found = why_not(units(*sizes), room)
    assert reason in found
    assert bool(found) == bool(reason)


# -- the decision -----------------------------------------------------------------------------------------------------


class Faked(AutoShare):
    """On a machine with this link and this much memory for slots."""

    def __init__(self, speed: float, room: int, axis: Axis | None = None) -> None:
        super().__init__(CPU, axis or Axis(None, 0, 1))
        self.speed, self.room, self.measured = speed, room, 0

    def _room(self) -> int:
        return self.room

    def _speed(self, link: HostLink) -> float:
        self.measured += 1
        return self.speed


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    log.forget_said()
    caplog.set_level(logging.INFO, "ds_hf")
    return caplog


@pytest.mark.parametrize(
    ("sizes", "speed", "room", "share", "words"),
    [
        ([100] * 8, 45e9, 3 * GB, 0.6, ("updates 60% of the states", "45 GB/s each way", "2.8 GiB")),
        ([100] * 8, 45e9, 4 * GB, 0.6, ("updates 60% of the states", "2.8 GiB")),
        ([100] * 8, 34e9, 3 * GB, 0.3, ("updates 30% of the states", "34 GB/s each way", "2.2 GiB")),
        ([100] * 8, 20e9, 3 * GB, 0.3, ("20 GB/s each way",)),
        ([100] * 8, 12e9, 3 * GB, 0.0, ("CPU updates all states", "12 GB/s each way at once", "from 20 on")),
        ([100] * 8, 45e9, 2 * GB, 0.0, ("CPU updates all states", "2.2 GiB of the device, and 1.9")),
        ([1] * 5, 45e9, 3 * GB, 0.0, ("CPU updates all states", "less than 64 MiB")),
    ],
)
def test_the_decision_is_one_line(
    sizes: list[int], speed: float, room: int, share: float, words: tuple[str, ...], said: pytest.LogCaptureFixture
) -> None:
    auto = Faked(speed, room)
    assert auto.decide(units(*sizes), HostLink(CPU)) == (share, room)
    (record,) = said.records
    assert record.levelno == logging.INFO
    assert all(word in record.getMessage() for word in ("stream: auto", *words)), record.getMessage()
    fits = why_not(units(*sizes), room) == ""
    assert auto.measured == fits, "the link is measured where sizes allow it, and only there"


@pytest.mark.parametrize(
    ("given", "here", "share"),
    [
        (units(*[100] * 8), 1, 0.6),
        (units(*[100] * 8), 2, 1.0),  # their links take all of the host's memory
        (units(50, *[100] * 4), 1, 0.6),
        ([HostUnit(u.numel, 12 * u.numel, u.gradient) for u in units(*[100] * 8)], 1, 0.3),  # whole masters
        (units(*[1] * 5), 1, 0.0),
        ([*units(*[100] * 4), *units(*[100] * 4, movable=False)], 2, 0.3),  # half of them cannot go
    ],
)
def test_the_share_of_a_fast_link(given: list[HostUnit], here: int, share: float) -> None:
    assert auto_share(given, here, 5 * GB) == share


@pytest.mark.parametrize(
    ("speed", "here", "share"), [(33e9, 1, 0.3), (33e9, 2, 1.0), (25e9, 2, 1.0), (24e9, 2, 0.3), (35e9, 1, 0.6)]
)
def test_what_is_fast(speed: float, here: int, share: float) -> None:
    assert auto_share(units(*[100] * 8), here, 5 * GB, speed) == share


def decided(speeds: list[float], rooms: list[int]) -> tuple[float, int]:
    rank = torch.distributed.get_rank()
    auto = Faked(speeds[rank], rooms[rank], Axis(None, rank, 2))
    return auto.decide(units(*[100] * 8), HostLink(CPU))


@pytest.mark.parametrize(
    ("speeds", "rooms", "share"),
    [
        ([45e9, 44e9], [3 * GB, 4 * GB], 0.6),
        ([45e9, 30e9], [3 * GB, 4 * GB], 0.3),
        ([45e9, 10e9], [3 * GB, 3 * GB], 0.0),
        ([45e9, 45e9], [1 * GB, 3 * GB], 0.0),
    ],
)
def test_the_least_of_all_ranks_counts(speeds: list[float], rooms: list[int], share: float) -> None:
    assert run_distributed(decided, 2, speeds, rooms, timeout=60) == [(share, min(rooms))] * 2


def test_both_ways_are_measured_when_everybody_is_ready() -> None:
    calls: list[int] = []
    assert speed_both_ways(HostLink(CPU), lambda: calls.append(1)) > 0
    assert calls == [1]


# -- in the engine ----------------------------------------------------------------------------------------------------


def places_of(stream: Any, **zero: Any) -> tuple[set[HostPlace], list[torch.Tensor]]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": [0.9, 0.999]}},  # type: ignore[call-overload]
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", **zero}},
        "ds_hf": {"offload": {} if stream is None else {"stream": stream}},
    }
    trained = model()
    engine, *_ = initialize(model=trained, config=config)
    store = engine.optimizer.store
    assert isinstance(store, HostStore)
    for (micro,) in batches(1, 1)[:3]:
        engine.backward(engine(micro[0]))
        engine.step()
    weights = [p.detach().clone() for p in trained.parameters()]
    places = set(store.places.values())
    engine.destroy()
    return places, weights


def engines() -> None:
    plain, weights = places_of(0.0)
    assert plain == {HostPlace.HOST}
    for stream in (None, "auto"):  # the model computes on the CPU
        found, same = places_of(stream)
        assert found == {HostPlace.HOST}
        assert all(torch.equal(a, b) for a, b in zip(same, weights, strict=True))
    # as on a GPU with a fast link, and then with a slow one
    offloading.auto_share_of = lambda *_: Faked(45e9, GB)  # type: ignore[assignment]
    stream_share.LEAST_STATES = 1
    found, same = places_of("auto")
    assert found == {HostPlace.HOST, HostPlace.STREAMED}
    assert all(torch.equal(a, b) for a, b in zip(same, weights, strict=True))
    assert places_of(0.0)[0] == {HostPlace.HOST}, "numbers are taken as they are"
    assert places_of(1.0)[0] == {HostPlace.STREAMED}
    offloading.auto_share_of = lambda *_: Faked(10e9, GB)  # type: ignore[assignment]
    assert places_of("auto")[0] == {HostPlace.HOST}


def test_engines_do_what_was_decided() -> None:
    run_distributed(engines, 1, timeout=100)


@pytest.mark.parametrize(
    ("device", "optimizer", "pinned", "by_unit", "reason"),
    [
        ("cuda", "AdamW", True, True, ""),
        ("cpu", "AdamW", True, True, "does not compute on a CUDA device"),
        ("cuda", "AdamW", False, True, "not page-locked"),
        ("cuda", "Lamb", True, True, "FusedLamb does not update unit after unit"),
        ("cuda", "AdamW", True, False, "AdamW does not update unit after unit"),
    ],
)
def test_where_it_cannot_pay(
    device: str, optimizer: str, pinned: bool, by_unit: bool, reason: str, said: pytest.LogCaptureFixture
) -> None:
    from ds_hf.config import load_config
    from ds_hf.engine.optim.lamb import FusedLamb

    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": pinned}}
    settings = load_config({"zero_optimization": zero}, check_batch=False)
    params = [torch.nn.Parameter(torch.zeros(2))]
    inner = FusedLamb(params) if optimizer == "Lamb" else torch.optim.AdamW(params)
    machine = offloading._Machine(Axis(None, 0, 1), torch.device(device), trained=2, numel=2)
    assert (offloading.auto_share_of(settings, machine, inner, by_unit) is None) == bool(reason)
    assert [reason in record.getMessage() for record in said.records] == [True] * bool(reason)
