"""How many collectives a step issues, and that ranks which compute different things still reduce the same."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hf import Engine, initialize
from ds_hf.engine.comm import collectives, streams
from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.zero.buffer import FlatBuffer
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.engine.zero.gradients import GradientBuffer, GradientPolicy
from ds_hf.engine.zero.reduction import Reducer
from ds_hf.engine.zero.unit import Unit
from ds_hf.errors import DsHfError, LossError
from ds_hf.log import logger
from tests.engine.zero.zoo import WIDTH, Layer, Stack, mean_square
from tests.helpers.distributed import run_distributed
from tests.helpers.parity import base_config, sgd, train_both

SGD = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}
UNITS = 4  # Stack: the root and three blocks, one flat buffer each


class Counting:
    """Counts the collectives of model states while it is active."""

    NAMES = ("all_gather", "reduce_gradient", "all_reduce_sum", "broadcast")

    def __enter__(self) -> Counter[str]:
        self.counts: Counter[str] = Counter()
        self.before = {name: getattr(collectives, name) for name in self.NAMES}
        for name, function in self.before.items():
            setattr(collectives, name, self._counted(name, function))
        return self.counts

    def _counted(self, name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.counts[name] += 1
            return function(*args, **kwargs)

        return call

    def __exit__(self, *error: object) -> None:
        for name, function in self.before.items():
            setattr(collectives, name, function)


def _micro(engine: Engine, x: Tensor) -> None:
    engine.backward(mean_square(engine(x)))
    engine.step()


def _engine(stage: int, gas: int, model: nn.Module | None = None) -> Engine:
    torch.manual_seed(11)
    config = base_config(stage, optimizer=SGD, gradient_accumulation_steps=gas)
    return initialize(model=model or Stack(), config=config)[0]


def count_step(stage: int, gas: int) -> dict[str, int]:
    """Collectives of the second accumulation (the first agrees on an order)."""
    engine = _engine(stage, gas)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(gas):
        _micro(engine, x)
    with Counting() as counts:
        for _ in range(gas):
            _micro(engine, x)
    return dict(counts)


def count_all() -> dict[tuple[int, int], dict[str, int]]:
    return {(stage, gas): count_step(stage, gas) for stage in range(4) for gas in (1, 3)}


def test_collectives_of_a_step() -> None:
    for counts in run_distributed(count_all, 2, timeout=60):
        for gas in (1, 3):
            assert counts[0, gas] == {"reduce_gradient": UNITS}  # at the boundary only; no gather, no norm to sum
            assert counts[1, gas] == {"reduce_gradient": UNITS, "all_reduce_sum": 1, "all_gather": UNITS}
            assert counts[2, gas] == {"reduce_gradient": UNITS * gas, "all_reduce_sum": 1, "all_gather": UNITS}
            # forward gathers all; backward gathers the blocks again, but the root and the last stayed
            assert counts[3, gas] == {
                "reduce_gradient": UNITS * gas,
                "all_reduce_sum": 1,
                "all_gather": (2 * UNITS - 2) * gas,
            }


def waits_of_a_step(stage: int, alone: bool, more: dict[str, Any]) -> tuple[int, Tensor]:
    """How often the third step waits for collectives that are under way, and the weights after it."""
    if alone:
        streams.UNDER_WAY_NBYTES = collectives.EXCHANGED_NBYTES = 0
    torch.manual_seed(11)
    engine = initialize(model=Stack(), config=base_config(stage, optimizer=SGD, **more))[0]
    waits, original = 0, streams.CommStream.arrive

    def counted(comm_stream: streams.CommStream) -> None:
        nonlocal waits
        waits += bool(comm_stream._under_way)
        original(comm_stream)

    streams.CommStream.arrive = counted  # type: ignore[method-assign]
    for step in range(3):
        waits = 0
        _micro(engine, torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2 * step + dist.get_rank())))
    return waits, _weights(engine)


@pytest.mark.parametrize("more", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_small_collectives_are_waited_for_together(stage: int, more: dict[str, Any]) -> None:
    """A newcomer's model on the CPU: what it waits for is the other rank, once for the gradients, once for weights; and
    the weights are to the bit those of gloo's own sums, each waited for."""
    together = run_distributed(waits_of_a_step, 2, stage, False, more, timeout=60)
    alone = run_distributed(waits_of_a_step, 2, stage, True, more, timeout=60)
    for (waits, weights), (more, same) in zip(together, alone, strict=True):
        assert waits == (1 if stage == 0 else 2)
        assert more == (UNITS if stage == 0 else 2 * UNITS)
        assert torch.equal(weights, same)


def count_no_sync(stage: int) -> tuple[dict[str, int], dict[str, int], float]:
    """Collectives inside no_sync(), then of the synchronized micro-batch, and the distance from no no_sync()."""
    x = torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    plain, engine = _engine(stage, 3), _engine(stage, 3)
    for micro in x:
        _micro(plain, micro)
    _weights(engine)
    with Counting() as inside:
        for micro in x[:2]:
            with engine.no_sync():
                engine.backward(mean_square(engine(micro)))
    engine.set_gradient_accumulation_boundary(True)
    with Counting() as outside:
        _micro(engine, x[2])
    return dict(inside), dict(outside), float((_weights(engine) - _weights(plain)).abs().max())


def _weights(engine: Engine) -> Tensor:
    return torch.cat([p.detach().flatten() for p in engine.module.parameters()])


@pytest.mark.parametrize("stage", [0, 1])
def test_no_sync_reduces_once(stage: int) -> None:
    for inside, outside, distance in run_distributed(count_no_sync, 2, stage, timeout=60):
        assert inside == {}
        assert outside["reduce_gradient"] == UNITS
        assert distance < 1e-7


def held_and_dropped(stage: int) -> float:
    """Distance of weights that a dropped accumulation inside no_sync() could have moved."""
    plain, engine = _engine(stage, 1), _engine(stage, 1)
    x = torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    with engine.no_sync():
        for micro in x[:2]:
            engine.backward(mean_square(engine(micro)))
    engine.zero_grad()
    for one in (plain, engine):
        _micro(one, x[2])
    return float((_weights(engine) - _weights(plain)).abs().max())


@pytest.mark.parametrize("stage", [0, 1])
def test_zero_grad_drops_what_no_sync_left(stage: int) -> None:
    assert run_distributed(held_and_dropped, 2, stage, timeout=60) == [0.0, 0.0]


def refused() -> list[str]:
    messages = []
    for stage in (2, 3):
        engine = _engine(stage, 1)
        with pytest.raises(DsHfError) as error, engine.no_sync():
            pass
        messages.append(str(error.value))
    engine = _engine(1, 1)
    with engine.no_sync():
        engine.backward(mean_square(engine(torch.randn(2, WIDTH))))
        with pytest.raises(DsHfError, match="no_sync"):
            engine.step()
        with pytest.raises(DsHfError, match="inside"), engine.no_sync():
            pass
    return messages


def test_no_sync_is_refused_where_gradients_are_sharded() -> None:
    for message in run_distributed(refused, 1, timeout=60)[0]:
        assert "stage 0 or 1" in message


def coalesced(stage: int) -> tuple[dict[str, int], dict[str, int], float]:
    """Collectives of backwards in the block, and of the whole step; distance from one backward of the sum."""
    x = torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    plain, engine = _engine(stage, 1), _engine(stage, 1)
    with Counting() as inside, engine.coalesce_grad_reduction():
        for micro in x[:2]:
            engine.backward(mean_square(engine(micro)))
        mean_square(engine(x[2])).backward()
        block = dict(inside)
    assert inside["reduce_gradient"] == UNITS
    with Counting() as step:
        engine.step()
    sum(mean_square(plain(micro)) for micro in x).backward()  # type: ignore[union-attr]
    plain.step()
    with GatheredParameters([*engine.module.parameters(), *plain.module.parameters()]):
        distance = float((_weights(engine) - _weights(plain)).abs().max())
    assert (engine.global_steps, engine.skipped_steps) == (1, 0)
    return block, dict(step), distance


def every_coalesced() -> list[tuple[dict[str, int], dict[str, int], float]]:
    return [coalesced(stage) for stage in range(4)]


def test_coalesced_backwards_are_reduced_once() -> None:
    for found in run_distributed(every_coalesced, 2, timeout=60):
        for inside, step, distance in found:
            assert "reduce_gradient" not in inside
            assert "reduce_gradient" not in step
            assert distance < 1e-6


def coalesced_wrongly() -> None:
    for stage in (0, 2, 3):
        engine = _engine(stage, 1)
        x = torch.randn(2, WIDTH)
        before = engine.global_steps
        with engine.coalesce_grad_reduction():
            engine.backward(mean_square(engine(x)))
            with pytest.raises(DsHfError, match="inside no_sync"), engine.coalesce_grad_reduction():
                pass
            with pytest.raises(DsHfError, match="coalesce_grad_reduction"):
                engine.step()
        engine.step()  # the misuse lost nothing
        assert engine.get_global_grad_norm()
        with pytest.raises(LossError), engine.coalesce_grad_reduction():
            engine.backward(mean_square(engine(x)) + engine.backward(mean_square(engine(x))).new_zeros(2))
        assert all(buffer.empty for buffer in engine.reducer.buffers)
        engine.backward(mean_square(engine(x)))
        engine.step()
        assert engine.global_steps == before + 2
    engine = _engine(1, 1)
    with engine.no_sync(), pytest.raises(DsHfError, match="inside no_sync"), engine.coalesce_grad_reduction():
        pass
    with engine.coalesce_grad_reduction(), pytest.raises(DsHfError, match="inside"), engine.no_sync():
        pass
    content = base_config(1, managed_gradient_accumulation=False)
    engine = initialize(model=nn.Linear(2, 1), config=content)[0]
    with pytest.raises(DsHfError, match="managed_gradient_accumulation"), engine.coalesce_grad_reduction():
        pass
    engine = initialize(model=nn.Linear(2, 1), config=base_config(1, optimizer=None))[0]
    with pytest.raises(DsHfError, match="no optimizer"), engine.coalesce_grad_reduction():
        pass


@pytest.mark.parametrize("world", [1, 2])
def test_coalesce_used_wrongly(world: int) -> None:
    run_distributed(coalesced_wrongly, world, timeout=60)


# -- ranks that compute different things ---------------------------------------------------------------------------


class Branches(nn.Module):
    """Which blocks run, and in which order, depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(4))
        self.outlet = nn.Linear(WIDTH, 3)
        self.sometimes = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        positive = bool(x[0, 0] > 0)
        for index in (0, 2) if positive else (1, 0):
            x = self.blocks[index](x)
        return self.outlet(x * self.sometimes if positive else x)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """The sign of the first sample decides whether all experts run or one."""
        chosen = self.experts if x[0, 0] > 0 else self.experts[1:2]
        return self.router(x) + sum(expert(x) for expert in chosen)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(torch.cat([x[:1].detach(), x[1:]]))
        return x


def branching(make: type[nn.Module], stage: int, leaf: bool) -> float:
    """Every step another rank takes another way. All take part in what they do not use."""
    data = torch.randn(4, 2, dist.get_world_size(), 4, WIDTH, generator=torch.Generator().manual_seed(3))
    for step, micro, rank in [(s, m, r) for s in range(4) for m in range(2) for r in range(dist.get_world_size())]:
        data[step, micro, rank, 0, 0] = 1.0 if (step + micro + rank) % 2 else -1.0
    torch.manual_seed(11)
    config = base_config(stage, optimizer=SGD)
    if leaf:
        config["zero_optimization"]["leaf_module"] = {"classes": ["Experts"]}
    return train_both(
        make(), lambda m, x: mean_square(m(x)), data, config, reference_optimizer=sgd, same=make.__name__
    ).worst


def branching_at_stages(make: type[nn.Module], stages: tuple[int, ...], leaf: bool) -> list[float]:
    return [branching(make, stage, leaf) for stage in stages]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_may_use_different_blocks(world: int) -> None:
    for errors in run_distributed(branching_at_stages, world, Branches, (0, 1, 2), False, timeout=60):
        assert max(errors) < 1e-5


def test_ranks_may_use_different_experts_of_a_leaf() -> None:
    for errors in run_distributed(branching_at_stages, 2, Mixture, (0, 1, 2, 3), True, timeout=60):
        assert max(errors) < 1e-5


def order_of(stage: int) -> str:
    """Of a backward: c for a buffer whose gradients are complete, r for a reduction."""
    engine = initialize(model=Stack(), config=base_config(stage, optimizer=SGD))[0]
    events: list[str] = []
    complete, reduce = engine.reducer.on_complete, GradientBuffer.reduce

    def noted(buffer: GradientBuffer) -> None:
        events.append("c")
        complete(buffer)

    def reduced(self: GradientBuffer) -> None:
        events.append("r")
        reduce(self)

    engine.reducer.on_complete, GradientBuffer.reduce = noted, reduced  # type: ignore[method-assign]
    _micro(engine, torch.ones(2, WIDTH))
    GradientBuffer.reduce = reduce  # type: ignore[method-assign]
    engine.destroy()
    return "".join(events)


def orders() -> list[str]:
    return [order_of(stage) for stage in (0, 1, 2)]


def test_on_the_cpu_whole_gradients_are_reduced_when_backward_ends() -> None:
    """Nothing runs beside it, and no memory would come back earlier."""
    for at_0, *others in run_distributed(orders, 2, timeout=60):
        assert at_0 == "c" * UNITS + "r" * UNITS
        assert all(other.startswith("cr") for other in others)


# -- joined blocks ----------------------------------------------------------------------------------------------------


class Recorded(GradientBuffer):
    """Notes what is asked of it."""

    def __init__(self, unit: Unit) -> None:
        buffer = FlatBuffer(
            unit.params, Axis(None, 0, 1), dtype=torch.float32, device=torch.device("cpu"), sharded=True
        )
        buffer.adopt()
        unit.buffers.append(buffer)
        super().__init__(buffer, GradientPolicy(False, True, 1.0, 1.0, None, torch.float32))
        self.asked: list[str] = []

    def collect(self, factor: float = 1.0, *, soon: bool = False) -> None:
        self.asked.append("collect")

    def reduce(self) -> None:
        self.asked.append("reduce")


def recorded_unit() -> tuple[Unit, Recorded, Reducer]:
    linear = nn.Linear(2, 2)
    unit = Unit("blocks.0", linear, list(linear.parameters()))
    buffer = Recorded(unit)
    return unit, buffer, Reducer([unit], {unit: [buffer]}, every_micro_batch=True)


def test_blocks_of_one_unit_are_collected_and_reduced_together() -> None:
    """The end of backward of one of its blocks is not that of the unit: the others' gradients are still to come."""
    unit, buffer, reducer = recorded_unit()
    unit.awaited = 3
    reducer.end_call(unit, partly=True)
    reducer.end_call(unit, partly=True)
    assert buffer.asked == []
    reducer.end_call(unit)
    assert buffer.asked == ["collect", "reduce"]


def test_a_unit_that_is_called_again_is_reduced_after_its_last_call() -> None:
    unit, buffer, reducer = recorded_unit()
    unit.awaited = 2
    reducer.end_call(unit)
    assert buffer.asked == ["collect"]
    reducer.end_call(unit)
    assert buffer.asked == ["collect", "collect", "reduce"]


def left_out(stage: int) -> list[str]:
    """A micro-batch ends in an exception, and the script goes on: each of the step's others is told to be lost."""
    torch.manual_seed(0)
    engine = initialize(model=nn.Linear(WIDTH, 1), config=base_config(stage) | {"gradient_accumulation_steps": 2})[0]
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    found = []
    for fails in (True, False, True):  # the first has no others before it
        if fails:
            outputs = engine(torch.ones(1, WIDTH, device=engine.device))
            outputs.register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.backward(outputs.mean())
        else:
            engine.backward(engine(torch.ones(1, WIDTH, device=engine.device)).mean())
        found.append("; ".join(text for text in texts if "a backward ended in an exception" in text))
    logger.removeHandler(handler)
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_that_go_with_a_backward_that_failed_are_told(stage: int) -> None:
    ((first, before, told),) = run_distributed(left_out, 1, stage, timeout=60)
    assert first == before == ""
    assert "are dropped" in told
