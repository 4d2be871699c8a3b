"""The two parts are the fp32 values again."""

from __future__ import annotations

import pytest
import torch

from ds_hf.engine.ops import library, reference
from ds_hf.engine.ops.split_master import LOW, join, split_fp32, write_split
from tests.helpers import ops_cases as cases

BF16 = torch.bfloat16


def test_every_pattern_comes_back() -> None:
    low = torch.arange(1 << 16, dtype=torch.int64)
    for upper in (0x0000, 0x8000, 0x0001, 0x007F, 0x3F80, 0x3F81, 0xBF81, 0x7F7E, 0x7F7F, 0xFF7F):
        values = (low | upper << 16).to(torch.int32).view(torch.float32)
        high, rest = split_fp32(values)
        assert high.dtype is BF16
        assert rest.dtype is LOW
        assert torch.equal(join(high, rest).view(torch.int32), values.view(torch.int32))
        other = (high != values.to(BF16)).nonzero().flatten().tolist()
        assert other == ([] if upper & 1 else [0x8000]), "ties above even numbers go up, the others torch sends up too"


def test_numbers_that_are_none() -> None:
    words = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1], dtype=torch.int64).to(torch.int32)
    values = torch.cat([words.view(torch.float32), torch.tensor([torch.inf, -torch.inf])])
    high, low = split_fp32(values)
    assert high.isnan().tolist() == join(high, low).isnan().tolist() == [True] * 4 + [False] * 2
    assert join(high, low).tolist()[4:] == [torch.inf, -torch.inf]


def test_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_hf.engine.ops.split_master._PIECE", 7)
    values = torch.randn(50)
    high, low = torch.empty(50, dtype=BF16), torch.empty(50, dtype=LOW)
    write_split(values, high, low)
    assert torch.equal(join(high, low), values)
    assert torch.equal(high, split_fp32(values)[0])
    write_split(values.double() / 2, high)
    assert torch.equal(high, split_fp32(values / 2)[0])


@pytest.mark.parametrize("ops", [reference, library])
@pytest.mark.parametrize("rule", cases.UPDATES)
def test_rules(ops: object, rule: str) -> None:
    data = cases.make([1, 33, 1000], rule=rule, param=BF16, grad=BF16, out=LOW)
    # the library's kernel of whole masters is another one than the reference, which takes split ones
    cases.check_split(reference, rule, data, cases.scale_and_skip_of("cpu"))
    again = cases.make([1, 33, 1000], rule=rule, param=BF16, grad=BF16, out=LOW)
    cases.call_update(ops, rule, again, cases.scale_and_skip_of("cpu"))
    assert all(map(torch.equal, again.written(), data.written()))


def test_a_sum_of_small_steps_arrives() -> None:
    high, low = torch.ones(4, dtype=BF16), torch.zeros(4, dtype=LOW)
    for _ in range(1000):  # bf16 knows nothing between 1 and 1.0078
        reference.sgd_(
            [high],
            [torch.full((4,), -1.0)],
            [],
            [low],
            None,
            lr=1.2e-4,
            momentum=0.0,
            dampening=0.0,
            weight_decay=0.0,
            nesterov=False,
            first=False,
        )
    torch.testing.assert_close(join(high, low), torch.full((4,), 1.12), rtol=1e-4, atol=0)


@pytest.mark.parametrize("param", [torch.float32, torch.float16])
def test_low_halves_of_something_else_are_refused(param: torch.dtype) -> None:
    data = cases.make([8], param=param, out=LOW)
    with pytest.raises(TypeError, match="must be bfloat16"):
        cases.call_update(library, "adamw", data, None)


def test_lamb_does_not_take_halves() -> None:
    data = cases.make([8], param=BF16, out=LOW)
    with pytest.raises(TypeError, match="not floating-point"):
        cases.call_lamb(library, data, None, True)
