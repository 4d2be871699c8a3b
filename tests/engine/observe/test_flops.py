"""The flops profiler: every kind of operator against figures worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ds_hf.engine.observe import flops
from ds_hf.engine.observe.flops import FlopsProfiler, products


class Calls(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


def profile(model: nn.Module | Callable[..., Any], *shapes: tuple[int, ...], grad: bool = False) -> tuple[int, int]:
    """Operations and multiply-accumulates of one call with tensors of these shapes."""
    module = model if isinstance(model, nn.Module) else Calls(model)
    profiler = FlopsProfiler(module)
    inputs = [torch.randn(shape, requires_grad=grad) for shape in shapes]
    profiler.start_profile()
    output = module(*inputs)
    if grad:
        output.sum().backward()
    profiler.stop_profile()
    found = profiler.get_total_flops(), profiler.get_total_macs()
    profiler.end_profile()
    assert (profiler.get_total_flops(), profiler.get_total_macs()) == (0, 0)
    return found


@pytest.mark.parametrize(
    ("shapes", "macs"),
    [
        (((4, 8), (8, 5)), 160),
        (((4, 8), (8,)), 32),
        (((8,), (8, 5)), 40),
        (((8,), (8,)), 8),
        (((3, 4, 8), (3, 8, 5)), 480),
        (((2, 1, 4, 8), (3, 8, 5)), 960),
    ],
)
def test_products_of_matrices_and_vectors(shapes: tuple[tuple[int, ...], ...], macs: int) -> None:
    assert profile(torch.matmul, *shapes) == (2 * macs, macs)


@pytest.mark.parametrize("bias", [(4, 5), (5,), (1,)])
def test_a_bias_is_one_operation_an_element_of_the_result(bias: tuple[int, ...]) -> None:
    assert profile(torch.addmm, bias, (4, 8), (8, 5)) == (320 + 20, 160)
    assert profile(torch.baddbmm, bias, (2, 4, 8), (2, 8, 5)) == (640 + 40, 320)


OLD = torch.__version__ < "2.13"  # whose addmm with out_dtype computes on GPUs alone, and not on "meta"


def test_results_of_another_dtype() -> None:
    """Which only GPUs compute."""
    one, other, sums = (torch.empty(of, device="meta") for of in ((2, 4, 8), (2, 8, 5), (4, 5)))
    one, other = one.bfloat16(), other.bfloat16()
    profiler = FlopsProfiler(nn.Identity())
    profiler.start_profile()
    if not OLD:
        torch.addmm(sums, one[0], other[0], out_dtype=torch.float32)
    torch.mm(one[0], other[0], out_dtype=torch.float32)
    torch.bmm(one, other, out_dtype=torch.float32)
    profiler.stop_profile()
    assert profiler.get_total_flops() == (0 if OLD else 320 + 20) + 320 + 640
    assert profiler.get_total_macs() == (0 if OLD else 160) + 160 + 320
    profiler.end_profile()


def test_layers_with_and_without_bias() -> None:
    assert profile(nn.Linear(8, 16), (4, 8)) == (1024 + 64, 512)
    assert profile(nn.Linear(8, 16, bias=False), (4, 8)) == (1024, 512)
    conv = 2 * 6 * 6 * 5 * 3 * 3 * 3
    assert profile(nn.Conv2d(3, 5, 3), (2, 3, 8, 8)) == (2 * conv + 2 * 5 * 6 * 6, conv)
    assert profile(nn.Conv2d(3, 5, 3, bias=False), (2, 3, 8, 8)) == (2 * conv, conv)
    # a transposed convolution scatters each element of its input
    turned = 2 * 64 * 4 * (8 // 2) * 9
    layer = nn.ConvTranspose2d(4, 8, 3, stride=2, padding=1, output_padding=1, groups=2)
    assert profile(layer, (2, 4, 8, 8)) == (2 * turned + 2 * 8 * 16 * 16, turned)


@pytest.mark.parametrize("bias", [True, False])
def test_a_recurrent_layer_that_one_operator_computes(bias: bool) -> None:
    layer = nn.LSTM(6, 3, num_layers=2, bidirectional=True, bias=bias)
    macs = 2 * 5 * 4 * sum(param.numel() // 2 for param in layer.parameters() if param.dim() > 1)
    flops, found = profile(layer, (5, 4, 6))
    assert found == macs
    assert flops >= 2 * macs + bias * 5 * 4 * 2 * 2 * 2 * 12


@pytest.mark.parametrize("operator", [torch.mul, torch.add, torch.sub, torch.div])
def test_single_elements_are_counted_after_broadcasting(operator: Callable[..., Any]) -> None:
    assert profile(operator, (4, 1, 7), (1, 5, 7)) == (140, 0)


def test_attention_forward_and_backward() -> None:
    shapes = [(2, 4, 16, 8)] * 3
    attention = nn.functional.scaled_dot_product_attention
    once = 2 * 4 * 16 * 16 * 8  # one product of scores or values, in multiply-accumulates
    assert profile(attention, *shapes) == (4 * once, 2 * once)
    flops, macs = profile(attention, *shapes, grad=True)
    # backward: the scores again, and two products for each of the two in forward
    assert (flops, macs) == (2 * 7 * once, 7 * once)


@pytest.mark.parametrize("kind", ["flash", "cudnn"])
def test_heads_of_queries_that_share_one_of_keys(kind: str) -> None:
    """As GPUs compute Llama 3; the table of torch 2.11 raised there, and ended the trainings that were counted."""
    aten = torch.ops.aten
    forward = getattr(aten, f"_scaled_dot_product_{kind}_attention")
    with FlopCounterMode(display=False, custom_mapping=products()) as counter:
        query, key, value = (
            torch.empty(2, heads, 16, width, device="meta") for heads, width in ((4, 8), (2, 8), (2, 8))
        )
        found = forward(query, key, value, *((None, True) if kind == "cudnn" else ()))
        random = found[6], found[7]
        lengths = (None, None, 16, 16, 0.0, False, *random)
        grads = (torch.empty_like(query), query, key, value, *found[:2])
        backward = getattr(aten, f"_scaled_dot_product_{kind}_attention_backward")
        backward(*grads, *((*random, None, *lengths[:-2]) if kind == "cudnn" else lengths))
    once = 2 * 4 * 16 * 16 * 8
    assert counter.get_total_flops() == 2 * (2 + 5) * once


def test_a_formula_that_fails_is_told_and_counts_as_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> int:
        raise AssertionError("shapes are incompatible")

    told: list[str] = []
    monkeypatch.setitem(flops.flop_registry, torch.ops.aten.mm, fails)
    monkeypatch.setattr(flops, "warn_once", lambda text, about: told.append(text))
    assert profile(torch.matmul, (4, 8), (8, 5)) == (0, 0)
    assert told == ["operations of aten.mm are not counted: its formula says shapes are incompatible"]


def test_a_module_that_is_used_twice_counts_twice_and_has_its_parameters_once() -> None:
    layer = nn.Linear(10, 10, bias=False)
    model = nn.Sequential(layer, nn.Identity(), layer)
    assert profile(model, (1, 10)) == (400, 200)
    assert FlopsProfiler(model).get_total_params() == 100
