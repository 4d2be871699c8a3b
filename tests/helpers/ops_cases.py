"""What every implementation of the optimizer operators is held to: the reference, in fp64, on the same numbers.

``check_update`` and its like take ``ops``, a module with the functions of ``reference.py``, and raise AssertionError.
Tensors are views into larger buffers at a chosen offset; elements around them must stay as they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ds_hf.engine.ops import reference
from ds_hf.engine.ops.split_master import LOW, join, split_fp32

GUARD = 9
ADAM = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
LAMB = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "eps_inside_sqrt": False, "weight_decay": 0.1}
TRUST = {"lr": 0.01, "bias_correction": True, "min_coeff": 0.01, "max_coeff": 10.0}
SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1, "nesterov": False, "first": False}

# operator, how many tensors of state it has, whether it takes steps, its numbers
UPDATES: dict[str, tuple[str, int, bool, dict[str, Any]]] = {
    "adamw": ("adam_", 2, True, ADAM),
    "adam": ("adam_", 2, True, {**ADAM, "decoupled": False}),
    "adam-plain": ("adam_", 2, True, {**ADAM, "weight_decay": 0.0, "bias_correction": False}),
    "lion": ("lion_", 1, False, {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}),
    "adagrad": ("adagrad_", 1, True, {"lr": 0.1, "lr_decay": 0.01, "eps": 1e-10, "weight_decay": 0.1}),
    "sgd": ("sgd_", 1, False, SGD),
    "sgd-first": ("sgd_", 1, False, {**SGD, "first": True}),
    "sgd-nesterov": ("sgd_", 1, False, {**SGD, "nesterov": True, "dampening": 0.0}),
    "sgd-plain": ("sgd_", 0, False, {**SGD, "momentum": 0.0, "weight_decay": 0.0}),
}


@dataclass
class Data:
    """Tensors of one call, with the buffers they lie in."""

    device: str
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    states: list[list[Tensor]] = field(default_factory=list)
    outs: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    buffers: list[tuple[Tensor, Tensor, int, int]] = field(default_factory=list)

    def check_guards(self) -> None:
        """Nothing around the tensors was written."""
        for buffer, before, begin, end in self.buffers:
            for part in (slice(0, begin), slice(end, None)):
                assert torch.equal(buffer[part], before[part]), "written outside of a tensor"

    def copied(self, dtype: torch.dtype | None = torch.float64) -> Data:
        """The same numbers in ``dtype``, or each in its own, without outs."""
        lists = [[t.to(dtype or t.dtype, copy=True) for t in ts] for ts in (self.params, self.grads, *self.states)]
        return Data(self.device, lists[0], lists[1], lists[2:], [], self.steps)

    def written(self) -> list[Tensor]:
        """All that a call writes."""
        return [*self.params, *(tensor for tensors in self.states for tensor in tensors), *self.outs]


def make(
    numels: Sequence[int],
    device: str = "cpu",
    *,
    rule: str = "adamw",
    param: torch.dtype = torch.float32,
    grad: torch.dtype = torch.float32,
    moment: torch.dtype = torch.float32,
    out: torch.dtype | None = None,
    offset: int = 0,
    seed: int = 0,
) -> Data:
    """Fresh random tensors for ``rule``; what is a sum of squares is not negative."""
    states = UPDATES[rule][1]
    generator = torch.Generator(device).manual_seed(seed)
    data = Data(device)

    def view(numel: int, dtype: torch.dtype, positive: bool = False) -> Tensor:
        buffer = torch.randn(offset + numel + GUARD, generator=generator, device=device)
        if dtype is LOW:
            buffer *= 1 << 13  # few are beyond the range
        buffer = (buffer.abs() if positive else buffer).to(dtype)
        data.buffers.append((buffer, buffer.clone(), offset, offset + numel))
        return buffer[offset : offset + numel]

    data.states = [[] for _ in range(states)]
    for index, numel in enumerate(numels):
        data.params.append(view(numel, param))
        data.grads.append(view(numel, grad))
        for place, tensors in enumerate(data.states):
            tensors.append(view(numel, moment, positive=place == 1 or rule == "adagrad"))
        if out is not None:
            data.outs.append(view(numel, out))
        data.steps.append(torch.tensor(float(index % 7 + 1), device=device))
    return data


def scale_and_skip_of(device: str, scale: float = 0.5, flag: float = 0.0) -> Tensor:
    """A control tensor."""
    return torch.tensor([scale, flag], device=device)


def close(got: Tensor, want: Tensor, what: str, slack: Tensor | float = 0.0) -> None:
    """``got`` is ``want``, which is fp64, to the precision of its dtype and of arithmetic in fp32, plus ``slack``."""
    relative = {torch.float32: 4e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[got.dtype]
    least = {torch.float32: 2e-6, torch.float16: 2e-6, torch.bfloat16: 2e-6}[got.dtype]
    got, want = got.double(), want.double()
    same = (got == want) | (got.isnan() & want.isnan())
    wrong = ~same & ~((got - want).abs() <= relative * want.abs() + least + slack)
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        message = f"{what}[{at}] is {got[at].item()!r}, not {want[at].item()!r}; {int(wrong.sum())} of {len(got)} wrong"
        raise AssertionError(message)


def call_update(ops: Any, rule: str, data: Data, scale_and_skip: Tensor | None, **changes: Any) -> None:
    """``ops``'s operator of ``rule`` on ``data``."""
    name, states, steps, numbers = UPDATES[rule]
    lists = [data.params, data.grads, *(data.states[:states] if states or name != "sgd_" else [[]]), data.outs]
    if steps:
        lists.append(data.steps)
    getattr(ops, name)(*lists, scale_and_skip, **{**numbers, **changes})


def check_update(
    ops: Any,
    rule: str,
    data: Data,
    scale_and_skip: Tensor | None = None,
    *,
    dtype: torch.dtype | None = torch.float64,
    **changes: Any,
) -> None:
    """One call of ``rule`` gives what the reference gives in ``dtype``, and writes nothing else."""
    want = data.copied(dtype)
    call_update(reference, rule, want, scale_and_skip, **changes)
    call_update(ops, rule, data, scale_and_skip, **changes)
    _check(data, want, UPDATES[rule][1])


def check_split(ops: Any, rule: str, data: Data, scale_and_skip: Tensor | None = None, **changes: Any) -> None:
    """A split master becomes what the whole one becomes; ``data`` has bf16 params and LOW outs.

    To a unit of the last place, for a GPU's compiler may join another product and sum for each kernel.
    """
    assert {tensor.dtype for tensor in data.outs} <= {LOW}
    want = data.copied(None)
    want.params = [join(high, low) for high, low in zip(data.params, data.outs, strict=True)]
    want.outs = [torch.empty_like(param, dtype=torch.bfloat16) for param in want.params]
    call_update(ops, rule, want, scale_and_skip, **changes)
    call_update(ops, rule, data, scale_and_skip, **changes)
    for index, (high, low) in enumerate(zip(data.params, data.outs, strict=True)):
        master = join(high, low)
        close(master, want.params[index].double(), f"params[{index}]")
        assert torch.equal(split_fp32(master)[0].nan_to_num(7), high.nan_to_num(7)), f"params[{index}]"
    for place in range(UPDATES[rule][1]):
        for state, wanted in zip(data.states[place], want.states[place], strict=True):
            close(state, wanted.double(), f"states[{place}]")
    data.check_guards()


def _check(data: Data, want: Data, states: int, slack: Sequence[Tensor] = ()) -> None:
    for index, (param, wanted) in enumerate(zip(data.params, want.params, strict=True)):
        close(param, wanted, f"params[{index}]", slack[index] if slack else 0.0)
    for place in range(states):
        for index, (state, wanted) in enumerate(zip(data.states[place], want.states[place], strict=True)):
            close(state, wanted, f"states[{place}][{index}]")
    for index, (out, param) in enumerate(zip(data.outs, data.params, strict=bool(data.outs))):
        assert torch.equal(out.nan_to_num(7), param.to(out.dtype).nan_to_num(7)), f"outs[{index}] is not the param"
    data.check_guards()


def call_lamb(ops: Any, data: Data, scale_and_skip: Tensor | None, fused: bool, **changes: Any) -> Tensor | None:
    """LAMB in one call, or in two with the norms in between, which are returned."""
    numbers = {**LAMB, **TRUST, **changes}
    first = {name: numbers[name] for name in LAMB}
    lists = (data.params, data.grads, *data.states)
    if fused:
        ops.lamb_(*lists, data.outs, data.steps, scale_and_skip, **numbers)
        return None
    norms: Tensor = ops.lamb_moments_(*lists, scale_and_skip, **first)
    ops.lamb_apply_(data.params, *data.states, data.outs, data.steps, norms, scale_and_skip, **numbers)
    return norms


def check_lamb(ops: Any, data: Data, scale_and_skip: Tensor | None = None, *, fused: bool, **changes: Any) -> None:
    """As ``check_update``. The second pass takes moments as stored, so those of 16 bits must be the reference's too."""
    narrow = any(tensor.dtype is not torch.float32 for tensors in data.states for tensor in tensors)
    want = data.copied(None if narrow else torch.float64)
    before = [param.clone() for param in want.params]
    wanted = call_lamb(reference, want, scale_and_skip, False, **changes)
    norms = call_lamb(ops, data, scale_and_skip, fused, **changes)
    if norms is not None and wanted is not None:
        assert norms.dtype is torch.float32
        close(norms.flatten() / (1 + norms.flatten()), (wanted / (1 + wanted)).double().flatten(), "norms")
    # A moment that lies between two 16-bit values may be rounded to the other one, which moves its step by as much.
    slack = (
        [2**-7 * (w.double() - b.double()).abs() for w, b in zip(want.params, before, strict=True)] if narrow else ()
    )
    _check(data, want, 2, slack)


def check_norm(ops: Any, tensors: Sequence[Tensor]) -> None:
    """The norm is right, fp32, and the same the second time."""
    got = ops.squared_norm(tensors)
    assert got.dtype is torch.float32
    assert got.shape == ()
    want = sum(float(tensor.double().square().sum()) for tensor in tensors)
    assert abs(float(got) - want) <= 4e-6 * want, (float(got), want)
    assert torch.equal(got, ops.squared_norm(tensors))


def check_sum(ops: Any, numels: Sequence[int], ranks: int, place: int, offset: int, **where: Any) -> None:
    """Sums of parts in fp32, rounded once; added to something or not; what lies beside them is left alone."""
    data = [make(numels, offset=offset, seed=seed, **where).grads for seed in range(ranks)]
    mine = data[place]
    dtype, device = mine[0].dtype, mine[0].device
    starts = [0, *accumulate(numel + 8 for numel in numels)]
    numel = starts.pop() + 64
    rows = torch.full((ranks - 1, numel), math.nan, dtype=dtype, device=device)
    cuts, wanted = [], torch.full((numel,), math.nan, device=device)
    for index, (start, part) in enumerate(zip(starts, mine, strict=True)):
        skipped = min(part.numel(), 8)  # a cut may begin within a tensor
        length = part.numel() - skipped
        cuts += [index, skipped, start, start, length]
        total = torch.zeros(length, device=device)
        for rank in range(ranks):
            piece = data[rank][index][skipped:]
            total += piece.float()
            if rank != place:
                rows[(rank - place - 1) % ranks, start : start + length] = piece
        wanted[start : start + length] = total * 0.25
    for out_dtype, added in ((dtype, None), (torch.float32, dtype), (torch.float32, torch.float32)):
        out = torch.full((offset + numel,), math.nan, dtype=out_dtype, device=device)[offset:]
        before = None if added is None else torch.ones(numel, dtype=added, device=device)
        if added is torch.float32:
            before = out
            out[~wanted.isnan()] = 1
        ops.sum_parts_(out, mine, before, rows, cuts=cuts, place=place, factor=0.25)
        expected = wanted if added is None else wanted + 1
        tolerance = 0 if added is None else 1e-6
        torch.testing.assert_close(out, expected.to(out_dtype), rtol=0, atol=tolerance, equal_nan=True)


def check_control(ops: Any, tensors: Sequence[Tensor]) -> None:
    """Factor, flag and norm as torch computes them, clipped or not; of numbers that are not finite as well."""
    norm = torch.linalg.vector_norm(torch.cat([tensor.double().flatten() for tensor in tensors])).item()
    squares = [ops.squared_norm([tensor]) for tensor in tensors]
    for scale, max_norm in ((1.0, 0.0), (1.0, norm / 3), (1.0, 2 * norm), (1024.0, norm / 5000), (8.0, 0.0)):
        for checked in (False, True):
            numbers = {"scale": scale, "max_norm": max_norm, "checked": checked}
            clip = min(1.0, max_norm / (norm / scale + 1e-6)) if max_norm else 1.0
            want = torch.tensor([clip / scale, 0.0, norm], device=tensors[0].device)
            for got in (ops.norm_control(tensors, **numbers), ops.clip_control(squares, **numbers)):
                torch.testing.assert_close(got, want, rtol=4e-6, atol=0)
    for bad in (math.inf, math.nan):
        last = torch.full_like(tensors[-1], bad)
        for checked in (False, True):
            got = ops.norm_control([*tensors, last], scale=2.0, max_norm=1.0, checked=checked).tolist()
            assert got[1] == checked
            assert math.isnan(got[2]) if math.isnan(bad) else got[2] == bad
            assert got[0] == 0.0


def check_skip(data: Data, call: Callable[[Tensor], Any]) -> None:
    """With the flag of ``scale_and_skip`` set, nothing is written."""
    before = [tensor.clone() for tensor in data.written()]
    for flag in (1.0, float("nan")):
        call(scale_and_skip_of(data.device, flag=flag))
    for tensor, was in zip(data.written(), before, strict=True):
        assert torch.equal(tensor, was)
