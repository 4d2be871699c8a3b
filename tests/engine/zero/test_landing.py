"""Parameters whose values are on the way: any use of the values waits, questions about the form do not."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ds_hf.engine.zero.landing import can_land_later, landed, take_off


class Flight:
    """Two parameters on their way, and how often somebody waited for them."""

    def __init__(self) -> None:
        self.params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((3,), 2.0))]
        self.waits = 0
        assert can_land_later(self.params)
        take_off(self.params, self.land)
        assert not can_land_later(self.params)

    def land(self) -> None:
        self.waits += 1
        landed(self.params)


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
    take_off(module.parameters(), lambda: landed(module.parameters()))
    module.zero_grad()
    assert type(module.weight) is not nn.Parameter
    module(torch.ones(1, 3))
    assert type(module.weight) is nn.Parameter
    take_off(module.parameters(), lambda: landed(module.parameters()))
    assert set(module.state_dict()) == {"weight", "bias"}
    assert type(module.weight) is nn.Parameter
