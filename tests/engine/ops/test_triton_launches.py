"""Kernels of Triton beside tensors without values. Triton is not installed here: a module stands for it."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_hf.engine.ops.triton_launches import launching_nothing
from ds_hf.memory.timeline import Sharding, record


class Interface:
    """How Triton's kernels are launched: ``kernel[grid](*args)``."""

    def __init__(self) -> None:
        self.launched: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self.launched.append((grid, args))


def test_kernels_of_triton_are_not_launched_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU such a launch ends every later use of it: --deepspeed auto traced Liger's kernels so."""
    with launching_nothing():  # Triton is not there
        pass
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", types.SimpleNamespace(KernelInterface=Interface))
    kernel, launch = Interface(), Interface.__getitem__
    with launching_nothing():
        kernel[2,](torch.empty(3, device="meta"), 3)
        kernel[2,](3, out=torch.empty(3, device="meta"))
        assert kernel.launched == []
        kernel[2,](5)  # another thread's, of real values
    assert kernel.launched == [((2,), (5,))]
    assert Interface.__getitem__ is launch


class Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        KERNEL[1,](x, out := torch.empty_like(x))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        KERNEL[1,](grad)
        return grad


KERNEL = Interface()


def test_a_model_of_such_kernels_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", types.SimpleNamespace(KernelInterface=Interface))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, input_ids: Tensor) -> Tensor:
            return Kernel.apply(self.layer(input_ids.float())).sum()  # type: ignore[no-any-return, no-untyped-call]

    with torch.device("meta"):
        model = Model()
    timeline = record(model, {"input_ids": torch.zeros(2, 8, device="meta")}, Sharding(False))
    assert timeline.steps
    assert KERNEL.launched == []
