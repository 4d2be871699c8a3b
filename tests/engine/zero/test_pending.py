"""Parameters whose values are on the way: any use of the values waits, questions about the form do not."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ds_hf import initialize
from ds_hf.engine.comm import collectives
from ds_hf.engine.comm.streams import CommStream
from ds_hf.engine.zero.grad_watch import GradientWatch
from ds_hf.engine.zero.pending import can_be_pending, mark_arrived, mark_pending
from tests.engine.zero.zoo import WIDTH, Stack
from tests.helpers.distributed import run_distributed
from tests.helpers.logs import Lines


class Flight:
    """Two parameters on their way, and how often somebody waited for them."""

    def __init__(self) -> None:
        self.params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((3,), 2.0))]
        self.waits = 0
        assert can_be_pending(self.params)
        mark_pending(self.params, self.land)
        assert not can_be_pending(self.params)

    def land(self) -> None:
        self.waits += 1
        mark_arrived(self.params)


@torch.no_grad()
def _overwrite(p: nn.Parameter) -> None:
    p.copy_(torch.zeros(3))


USES: dict[str, Callable[[nn.Parameter, nn.Parameter], object]] = {
    "data": lambda p, q: p.data,
    "detach": lambda p, q: p.detach(),
    "arithmetic": lambda p, q: 1 + p,
    "in a list": lambda p, q: torch.stack([q, p]),
    "as a keyword": lambda p, q: F.linear(torch.ones(1, 3), weight=p),
    "foreach": lambda p, q: torch._foreach_norm([p, q]),
    "pointer": lambda p, q: p.data_ptr(),
    "storage": lambda p, q: p.untyped_storage(),
    "text": lambda p, q: repr(p),
    "number": lambda p, q: p.tolist(),
    "deepcopy": lambda p, q: copy.deepcopy(p),
    "save": lambda p, q: torch.save(p, io.BytesIO()),
    "write": lambda p, q: _overwrite(p),
    "replace": lambda p, q: setattr(p, "data", torch.ones(3)),
    "move": lambda p, q: p.to(torch.float64),
    "version": lambda p, q: p._version,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_use_waits_once(use: Callable[[nn.Parameter, nn.Parameter], object]) -> None:
    flight = Flight()
    use(*flight.params)
    assert flight.waits == 1
    assert all(type(param) is nn.Parameter for param in flight.params)
    use(*flight.params)
    assert flight.waits == 1


def test_form_and_gradient_do_not_wait() -> None:
    flight = Flight()
    p = flight.params[0]
    assert (p.shape, p.dtype, p.device.type, p.numel(), p.dim(), p.size(0)) == ((3,), torch.float32, "cpu", 3, 1, 3)
    assert p.requires_grad
    assert p.is_leaf
    assert p.is_floating_point()
    p.grad = torch.ones(3)
    assert p.grad is not None
    p.grad = None
    assert isinstance(p, nn.Parameter)
    assert flight.waits == 0


def test_module_sees_ordinary_parameters() -> None:
    module = nn.Linear(3, 2)
    mark_pending(module.parameters(), lambda: mark_arrived(module.parameters()))
    module.zero_grad()
    assert type(module.weight) is not nn.Parameter
    module(torch.ones(1, 3))
    assert type(module.weight) is nn.Parameter
    mark_pending(module.parameters(), lambda: mark_arrived(module.parameters()))
    assert set(module.state_dict()) == {"weight", "bias"}
    assert type(module.weight) is nn.Parameter


class Arrival:
    """Stands in for an event of a GPU."""

    waits = 0

    def wait(self) -> None:
        Arrival.waits += 1


def train_with_late_arrivals(stage: int, kind: str) -> None:
    """An engine on the CPU that believes its gathers after a step to be under way."""
    CommStream.event = lambda self: Arrival()  # type: ignore[method-assign,assignment,return-value]
    gather = collectives.all_gather

    def through_copies(
        full: Tensor, shard: Tensor, axis: Any, what: str = "", comm_stream: CommStream | None = None
    ) -> None:
        """gloo goes on holding the tensors that it was given, for a while: they would look like somebody's aliases."""
        copy = torch.empty_like(full)
        gather(copy, shard.clone(), axis, what)
        full.copy_(copy)

    collectives.all_gather = through_copies  # type: ignore[assignment]
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": kind, "params": {"lr": 0.01}},
    }
    engine = initialize(model=Stack(), config=config)[0]
    params = list(engine.module.parameters())
    for seed in range(3):
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * seed + dist.get_rank()))
        loss = engine(x).float().square().mean()
        assert all(type(param) is nn.Parameter for param in params), "forward used them all"
        engine.backward(loss)
        engine.step()
        engine.zero_grad()
        assert all(type(param) is not nn.Parameter for param in params), "nobody has asked for a value yet"
    waits = Arrival.waits
    told, watch = Lines(logging.WARNING), GradientWatch("accelerator.backward()")
    logging.getLogger("ds_hf").addHandler(told)
    watch.begin([params])
    torch.nn.utils.clip_grad_norm_(params, 0.5)
    assert len(told.texts) == (dist.get_rank() == 0), told.texts
    assert all("clip_grad_norm_() changes nothing after accelerator.backward()" in text for text in told.texts)
    assert Arrival.waits == waits, "gradients do not wait"
    values = torch.cat([param.detach().flatten() for param in params]).float()
    assert Arrival.waits > waits
    watch.end()
    assert all(type(param) is nn.Parameter for param in params)
    others = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(others, values)
    assert torch.equal(others[0], others[1])
    alias = params[0].data
    engine.backward(engine(x).float().square().mean())
    engine.step()
    assert type(params[0]) is nn.Parameter, "somebody could look at its memory"
    assert type(engine.module.blocks[1].up.weight) is not nn.Parameter, "of another unit"
    assert torch.equal(alias, params[0])
    engine.destroy()
    assert all(type(param) is nn.Parameter for param in params)


@pytest.mark.parametrize(("stage", "kind"), [(1, "AdamW"), (2, "AdamW"), (2, "Lamb"), (2, "Adafactor")])
def test_engine_lets_parameters_land_late(stage: int, kind: str) -> None:
    run_distributed(train_with_late_arrivals, 2, stage, kind, timeout=60)
