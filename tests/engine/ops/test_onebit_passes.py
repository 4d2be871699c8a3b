"""The passes of 1-bit optimizers around their exchange: formulas, and the C++ library against plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_hf.engine.ops import cpu, cpu_onebit, onebit

SIZES = (1, 31, 64, 8192 + 5, 100_003)
BETA1, EPS, LR, DECAY = 0.9, 1e-6, 0.01, 0.1


@pytest.fixture(params=["baseline", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    if reason := cpu_onebit.available():
        pytest.skip(reason)
    if not cpu.set_instruction_set(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    cpu.set_instruction_set("")


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator).to(dtype) for n in SIZES]


def lists(dtype: torch.dtype) -> dict[str, Any]:
    seconds = [second.square() for second in tensors(2)]
    return {
        "grads": tensors(0, dtype),
        "momenta": tensors(1),
        "sizes": (seconds, [0.3 * second.mean() for second in seconds]),
        "values": [torch.full((n,), torch.nan) for n in SIZES],
        "params": tensors(3),
        "means": tensors(4),
        "outs": tensors(5, torch.bfloat16),
    }


def step(dtype: torch.dtype, inside: bool, scale: Tensor | None, outs: bool) -> dict[str, list[Tensor]]:
    given = lists(dtype)
    sizes = onebit.Sizes(*given["sizes"], EPS, inside)
    onebit.to_values_(given["values"], given["momenta"], given["grads"], sizes, scale, beta1=BETA1)
    moved = [momentum.clone() for momentum in given["momenta"]]
    written = given["outs"] if outs else []
    onebit.apply_means_(given["params"], given["momenta"], written, given["means"], sizes, lr=LR, weight_decay=DECAY)
    return {"moved": moved, "seconds": given["sizes"][0], **{k: given[k] for k in ("values", "momenta", "params")}} | (
        {"outs": written} if outs else {}
    )


@pytest.mark.parametrize("inside", [False, True])
def test_formulas(monkeypatch: pytest.MonkeyPatch, inside: bool) -> None:
    monkeypatch.setattr(cpu_onebit, "available", lambda: "not wanted here")
    given, found = lists(torch.float32), step(torch.float32, inside, torch.tensor([0.5, 0.0]), True)
    for index, (second, floor) in enumerate(zip(*given["sizes"], strict=True)):
        known = second.maximum(floor)
        size = (known + EPS).sqrt() if inside else known.sqrt() + EPS
        moved = BETA1 * given["momenta"][index] + (1 - BETA1) * 0.5 * given["grads"][index]
        param = given["params"][index] * (1 - LR * DECAY) - LR * given["means"][index]
        for name, wanted in (
            ("moved", moved),
            ("values", moved / size),
            ("params", param),
            ("momenta", given["means"][index] * size),
            ("outs", param.bfloat16()),
            ("seconds", second),
        ):
            torch.testing.assert_close(found[name][index], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_cpu(isa: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for inside, scale, outs in ((False, None, True), (True, torch.tensor([0.5, 0.0]), False)):
        found = step(dtype, inside, scale, outs)
        with monkeypatch.context() as plain:
            plain.setattr(cpu_onebit, "available", lambda: "not wanted here")
            wanted = step(dtype, inside, scale, outs)
        for name, tensors_of in wanted.items():
            for got, want in zip(found[name], tensors_of, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-2 if name == "outs" else 2e-5, atol=1e-6)


def test_what_is_not_finite_stays_seen() -> None:
    value, momentum, second = torch.zeros(3), torch.ones(3), torch.tensor([torch.nan, torch.inf, 1.0])
    grad = torch.tensor([1.0, 1.0, torch.nan])
    sizes = onebit.Sizes([second], [torch.tensor(0.1)], EPS)
    onebit.to_values_([value], [momentum], [grad], sizes, None, beta1=BETA1)
    assert value.isnan().tolist() == [True, False, True]
    assert value[1] == 0


def test_a_library_from_before_leaves_it_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_onebit, "ABI", -1)
    cpu_onebit.available.cache_clear()
    try:
        assert cpu_onebit.available()
        assert step(torch.float32, False, None, False)["params"][0].isfinite().all()
    finally:
        monkeypatch.undo()
        cpu_onebit.available.cache_clear()
