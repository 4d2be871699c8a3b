"""States that go up before the step that updates them: they are there, and nobody's writes are lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_hf import Engine, initialize
from ds_hf.engine.offload.link import HostLink
from ds_hf.engine.optim import offloading, stream_share
from ds_hf.engine.optim.host_store import HostPlace, HostStore
from ds_hf.engine.optim.streamed_updates import StreamedUpdates
from ds_hf.engine.zero.access import safe_get_full_optimizer_state, safe_set_full_optimizer_state
from ds_hf.engine.zero.gather import GatheredParameters
from tests.helpers.distributed import run_distributed
from tests.helpers.models import TinyLM, token_batches
from tests.helpers.parity import base_config, full_weights

DEPTH, WAYS = 12, 6


def make(stage: int, rule: str = "AdamW", share: float = 1.0) -> Engine:
    offloading.room_for_streams = lambda device: 1 << 30  # as on a GPU
    torch.manual_seed(3)
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    own = {"offload": {"stream": share}, "join_blocks": False}
    params = {"lr": 1e-2} if rule == "AdamW" else {"lr": 0.1, "momentum": 0.9}
    optimizer = {"type": rule, "params": params}
    config = base_config(stage, bf16={"enabled": True}, optimizer=optimizer, ds_hf=own, gradient_clipping=1.0)
    engine = initialize(model=TinyLM(depth=DEPTH, tied=False), config=config | {"zero_optimization": zero})[0]
    if share == 1.0:
        assert set(store(engine).places.values()) == {HostPlace.STREAMED}
        assert len(store(engine)._streamed._slots) == WAYS
    return engine


def store(engine: Engine) -> HostStore:
    found: Any = engine.optimizer.store  # type: ignore[union-attr]
    assert isinstance(found, HostStore)
    return found


def step(engine: Engine, seed: int) -> float:
    rank = torch.distributed.get_rank()
    loss = engine(token_batches(2, 6, seed=10 * seed + rank).to(engine.device))
    engine.backward(loss)
    engine.step()
    return float(loss.item())


def ahead(engine: Engine) -> int:
    return sum(slot.ahead is not None for slot in store(engine)._streamed._slots)


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes of each copy up of states."""
    seen: list[int] = []
    up = HostLink.up

    def count(self: HostLink, target: Tensor, source: Tensor, **kwargs: Any) -> Any:
        if target.dtype is torch.uint8:
            seen.append(target.numel())
        return up(self, target, source, **kwargs)

    HostLink.up = count  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        HostLink.up = up  # type: ignore[method-assign]


# -- they are there ---------------------------------------------------------------------------------------------------


def goes_up_once() -> None:
    for stage in (1, 2, 3):
        engine = make(stage)
        step(engine, 0)  # makes the moments
        assert ahead(engine) == 0
        step(engine, 1)  # and the slots as large as they must be
        assert ahead(engine) == WAYS
        for seed in (2, 3):
            with counted() as copies:
                step(engine, seed)
            assert len(copies) == len(store(engine).places), "each unit once"
            assert ahead(engine) == WAYS
        engine.destroy()


def test_every_unit_goes_up_once_a_step() -> None:
    run_distributed(goes_up_once, 2, timeout=100)


def after_the_cpu() -> None:
    engine = make(2, share=0.5)
    assert set(store(engine).places.values()) == {HostPlace.STREAMED, HostPlace.HOST}
    for seed in range(2):
        step(engine, seed)
    assert (len(store(engine)._pending) > 2, ahead(engine)) == (True, 0), "the CPU needs the memory"
    loss = engine(token_batches(2, 6).to(engine.device))
    assert ahead(engine) == 3
    with counted() as copies:
        engine.backward(loss)
        engine.step()
    assert len(copies) == sum(place is HostPlace.STREAMED for place in store(engine).places.values()) - 3
    engine.destroy()


def test_they_go_up_when_the_cpu_is_done() -> None:
    run_distributed(after_the_cpu, 1, timeout=60)


def test_how_many_are_on_their_way() -> None:
    each = stream_share.HostUnit(10**6, 10**7, 2 * 10**6)
    units = [each] * 16
    gradients = 16 * each.gradient
    assert stream_share.streaming(units, 1.0, 10**9).in_flight == 8, "half"
    assert stream_share.streaming(units, 0.5, 10**9).in_flight == 4
    assert stream_share.streaming(units, 1.0, gradients + 3 * each.states).in_flight == 3, "what there is room for"
    found = stream_share.streaming(units, 1.0, gradients + 2 * each.states - 1)
    assert (found.in_flight, sum(found.stays) < 16) == (2, True)
    assert stream_share.streaming(units[:3], 1.0, 10**9).slots == 2 * each.states


# -- writes -----------------------------------------------------------------------------------------------------------


def moments_by_name(engine: Engine, folder: str) -> None:
    state: Any = engine.optimizer.state  # type: ignore[union-attr]
    for values in state.values():
        values["exp_avg"].mul_(0.5)


def moments_that_were_held(engine: Engine, folder: str) -> None:
    for moment in held:
        moment.mul_(0.5)
    assert ahead(engine) in (0, WAYS), "nobody has said that they change"


def moments_by_function(engine: Engine, folder: str) -> None:
    for param in engine.module.parameters():
        value = safe_get_full_optimizer_state(param, "exp_avg_sq")
        assert value is not None
        safe_set_full_optimizer_state(param, value * 4, "exp_avg_sq")


def parameters_by_hand(engine: Engine, folder: str) -> None:
    for param in engine.module.parameters():
        with GatheredParameters(param, modifier_rank=0), torch.no_grad():
            param.mul_(0.9)


def a_checkpoint(engine: Engine, folder: str) -> None:
    engine.load_checkpoint(folder, tag="first")


def the_optimizers_state(engine: Engine, folder: str) -> None:
    kept: Any = engine.optimizer.state_dict()  # type: ignore[union-attr]
    for values in kept["optimizer"]["state"].values():
        values["exp_avg"] = values["exp_avg"] * 0.5
    engine.optimizer.load_state_dict(kept)  # type: ignore[union-attr]


WRITERS: tuple[Callable[[Engine, str], None], ...] = (
    moments_by_name,
    moments_that_were_held,
    moments_by_function,
    parameters_by_hand,
    a_checkpoint,
    the_optimizers_state,
)
held: list[Tensor] = []


def trained(stage: int, write: Callable[[Engine, str], None] | None, folder: str) -> list[Any]:
    engine = make(stage)
    losses = [step(engine, 0)]
    if write is a_checkpoint:
        engine.save_checkpoint(folder, tag="first")
    losses += [step(engine, seed) for seed in (1, 2)]
    state: Any = engine.optimizer.state  # type: ignore[union-attr]
    held[:] = [values["exp_avg"] for values in state.values()]
    losses.append(step(engine, 3))
    if write is not None:
        write(engine, folder)
    losses += [step(engine, seed) for seed in (4, 5)]
    found = [torch.tensor(losses), *full_weights(engine.module).values()]
    engine.destroy()
    return found


def equal(found: list[Any], expected: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def writes_count(stage: int, folder: str) -> None:
    goes_ahead = StreamedUpdates.ahead
    plain = trained(stage, None, folder)
    for write in WRITERS:
        found = trained(stage, write, folder)
        StreamedUpdates.ahead = lambda self, blocks: None  # type: ignore[method-assign, assignment]
        expected = trained(stage, write, folder)
        StreamedUpdates.ahead = goes_ahead  # type: ignore[method-assign]
        assert equal(found, expected), write.__name__
        assert not equal(found, plain), write.__name__


@pytest.mark.parametrize(
    ("world", "stage"), [(2, 3), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 2), (1, 3), (2, 2)))]
)
def test_whoever_writes_between_steps_is_heard(world: int, stage: int, tmp_path: Path) -> None:
    run_distributed(writes_count, world, stage, str(tmp_path), timeout=200)


def rules() -> None:
    """Also of torch's own, whose operators are counted as writes; and with steps left out."""
    for rule in ("AdamW", "SGD"):
        found = []
        for goes in (True, False):
            kept = StreamedUpdates.ahead
            if not goes:
                StreamedUpdates.ahead = lambda self, blocks: None  # type: ignore[method-assign, assignment]
            engine = make(2, rule)
            losses = [step(engine, seed) for seed in range(5)]
            found.append([torch.tensor(losses), *full_weights(engine.module).values()])
            engine.destroy()
            StreamedUpdates.ahead = kept  # type: ignore[method-assign]
        assert equal(*found), rule


def test_other_rules() -> None:
    run_distributed(rules, 1, timeout=100)
