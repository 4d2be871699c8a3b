"""Adapters behind silu(gate) * up: the product is not kept where the graph says what it is, and nobody else sees it."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ds_hf.engine.modules import adapter_products
from ds_hf.engine.modules.gated import Half, activation_between
from tests.engine.modules.test_adapters import (
    assert_alike,
    assert_same_step,
    fuse,
    gradients,
    ids,
    loss_of,
    make,
    of_gradients,
)

LAYERS = 2


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the gradient went to gate and up at once."""
    calls: list[int] = []

    def counted(grad: Tensor, gate: Tensor, up: Tensor, act: Any) -> Any:
        calls.append(len(grad))
        return own(grad, gate, up, act)

    own = adapter_products.halves_backward
    monkeypatch.setattr(adapter_products, "halves_backward", counted)
    return calls


def mlps(net: Any) -> list[Any]:
    return [block.mlp for block in net.base_model.model.model.layers]


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"use_rslora": True}])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_numbers_are_those_of_peft(halves: list[int], options: dict[str, Any], dtype: torch.dtype) -> None:
    assert_same_step(make(dtype=dtype, **options), 1e-12 if dtype is torch.float64 else 1e-4)
    assert halves == [24] * LAYERS


@pytest.mark.parametrize("act", [nn.GELU(), nn.GELU("tanh")])
def test_other_activations(halves: list[int], act: nn.Module) -> None:
    model = make(dtype=torch.float64)
    for mlp in mlps(model):
        mlp.act_fn = act
    assert_same_step(model, 1e-12)
    plain = copy.deepcopy(model)
    assert_same_step(plain, 1e-12, of_gradients)
    assert halves == [24] * LAYERS * 2  # of which the latter are of the loss that is differentiated again


def test_gemma(halves: list[int]) -> None:
    assert_same_step(make("gemma2", torch.float64), 1e-12)
    assert halves == [24] * LAYERS


def test_sixteen_bits_round_where_torch_does(halves: list[int]) -> None:
    """With A of the last layer alone behind it, all other gradients are those of the product kept, to the bit."""
    model = make(dtype=torch.bfloat16)
    plain = copy.deepcopy(model)
    for net in (plain, model):
        fuse(net)
    for mlp in mlps(plain):
        mlp.act_fn.register_forward_hook(lambda module, args, out: None)  # what is seen is kept
    for net in (plain, model):
        loss_of(net).backward()
    assert halves == [24] * LAYERS
    assert_alike(gradients(model), gradients(plain), 0.0)


def _keeps(net: Any) -> list[bool]:
    """Whether the product of each MLP lives after a forward."""
    seen: list[weakref.ref[Tensor]] = []

    def forward(self: Any, x: Tensor) -> Tensor:
        product = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        seen.append(weakref.ref(product))
        return self.down_proj(product)  # type: ignore[no-any-return]

    computed_by(net, forward)
    loss = loss_of(net)
    found = [each() is not None for each in seen]
    loss.backward()
    return found


def test_the_product_is_not_kept(halves: list[int]) -> None:
    model = make()
    assert _keeps(model) == [True] * LAYERS
    fused = fuse(model)
    assert _keeps(model) == [False] * LAYERS
    assert halves == [24] * LAYERS
    assert all(layer.made is None for layer in fused.layers)


def _dropout(net: Any) -> None:
    for mlp in mlps(net):
        for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            layer.lora_dropout["default"] = nn.Dropout(0.2)


def _frozen(net: Any) -> None:
    for mlp in mlps(net):
        mlp.down_proj.lora_A["default"].weight.requires_grad_(False)


def _tanh(net: Any) -> None:
    for mlp in mlps(net):
        mlp.act_fn = nn.Tanh()


def computed_by(net: Any, forward: Callable[[Any, Tensor], Any]) -> None:
    """``forward`` in the place of each MLP's; a copy of ``net`` has its own."""
    for mlp in mlps(net):
        mlp.forward = MethodType(forward, mlp)


def _swapped(net: Any) -> None:
    computed_by(net, lambda mlp, x: mlp.down_proj(mlp.gate_proj(x) * F.silu(mlp.up_proj(x))))


def _scaled(net: Any) -> None:
    computed_by(net, lambda mlp, x: mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x) * 2))


def _written(net: Any) -> None:
    computed_by(net, lambda mlp, x: mlp.down_proj((F.silu(mlp.gate_proj(x)) * mlp.up_proj(x)).mul_(0.5)))


def _clamped(mlp: Any, x: Tensor) -> Any:
    act = F.silu(mlp.gate_proj(x))
    with torch.no_grad():
        act.clamp_(max=0.05)
    return mlp.down_proj(act * mlp.up_proj(x))


def _clamped_unseen(net: Any) -> None:
    """Autograd has no node for it."""
    computed_by(net, _clamped)


def _between(net: Any) -> None:
    computed_by(net, lambda mlp, x: mlp.down_proj(F.silu(mlp.gate_proj(x) * 1.5) * mlp.up_proj(x)))


@pytest.mark.parametrize("change", [_dropout, _frozen, _tanh, _swapped, _scaled, _written, _clamped_unseen, _between])
def test_what_is_something_else_is_kept(halves: list[int], change: Callable[[Any], None]) -> None:
    model = make(dtype=torch.float64)
    change(model)
    assert_same_step(model, 1e-12)
    assert halves == []


def test_hooks_see_the_product_and_its_gradient(halves: list[int]) -> None:
    model = make(dtype=torch.float64)
    plain = copy.deepcopy(model)
    found: list[list[Tensor]] = [[], []]
    for net, seen in zip((plain, model), found, strict=True):
        mlps(net)[0].act_fn.register_full_backward_hook(lambda module, given, taken, seen=seen: seen.append(taken[0]))
        mlps(net)[1].down_proj.register_forward_pre_hook(
            lambda module, args, seen=seen: args[0].register_hook(seen.append) and None
        )
    fuse(model)
    for net in (plain, model):
        loss_of(net).backward()
    assert halves == []
    assert len(found[0]) == 2
    assert all(torch.allclose(*pair, rtol=1e-12, atol=1e-15) for pair in zip(*found, strict=True))


def _twice(grad: Tensor) -> Tensor:
    return grad * 2


def _at_silu(mlp: Any, x: Tensor) -> Any:
    given = F.silu(mlp.gate_proj(x))
    given.register_hook(_twice)
    return mlp.down_proj(given * mlp.up_proj(x))


def _of_old_kind(net: Any) -> None:
    for mlp in mlps(net):
        mlp.act_fn.register_backward_hook(lambda module, taken, given: (_twice(taken[0]),))


@pytest.mark.parametrize("change", [lambda net: computed_by(net, _at_silu), _of_old_kind])
def test_hooks_on_what_silu_gave(halves: list[int], change: Callable[[Any], None]) -> None:
    model = make(dtype=torch.float64)
    change(model)
    assert_same_step(model, 1e-12)
    assert halves == []


def test_the_gradient_of_what_silu_gave_is_retained() -> None:
    found: list[Tensor] = []

    def forward(mlp: Any, x: Tensor) -> Any:
        found.append(F.silu(mlp.gate_proj(x)))
        found[-1].retain_grad()
        return mlp.down_proj(found[-1] * mlp.up_proj(x))

    model = make(dtype=torch.float64)
    computed_by(model, forward)
    assert_same_step(model, 1e-12)
    plain, own = found[:LAYERS], found[LAYERS:]
    assert all(torch.allclose(mine.grad, its.grad, 1e-12, 1e-15) for mine, its in zip(own, plain, strict=True))  # type: ignore[arg-type]


def test_halves_that_a_checkpoint_computes_again_are_not_kept(halves: list[int]) -> None:
    """It ends before the last layer, which saves without hooks."""

    def forward(mlp: Any, x: Tensor) -> Any:
        return mlp.down_proj(checkpoint(lambda x: F.silu(mlp.gate_proj(x)) * mlp.up_proj(x), x, use_reentrant=False))

    model = make(dtype=torch.float64)
    computed_by(model, forward)
    assert_same_step(model, 1e-12)
    assert halves == []


def test_a_product_that_is_used_twice(halves: list[int]) -> None:
    """Its other use has its own way to gate and up."""

    def run(net: Any) -> Tensor:
        products: list[Tensor] = []

        def forward(mlp: Any, x: Tensor) -> Any:
            products.append(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))
            return mlp.down_proj(products[-1])

        computed_by(net, forward)
        loss = loss_of(net)
        return loss + sum((each**2).mean() for each in products)

    assert_same_step(make(dtype=torch.float64), 1e-12, run)
    assert halves == [24] * LAYERS


def test_two_backwards_of_one_graph(halves: list[int]) -> None:
    model = make(dtype=torch.float64)
    plain = copy.deepcopy(model)
    fuse(model)
    for net in (plain, model):
        loss = loss_of(net)
        loss.backward(retain_graph=True)
        loss.backward()
    assert halves == [24] * 2 * LAYERS
    assert_alike(gradients(model), gradients(plain), 1e-12)


def test_checkpointed_and_moved_activations_are_as_before(halves: list[int]) -> None:
    """What hooks of saved tensors have taken away once is not taken away twice."""
    model = make(dtype=torch.float64)
    taken: list[int] = []

    def run(net: Any) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: taken.append(t.numel()) or t, lambda t: t):
            return loss_of(net)

    assert_same_step(model, 1e-12, run)
    assert halves == []
    assert taken


class LigerSiLUMulFunction(torch.autograd.Function):
    """As Liger's, in torch."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
        ctx.gate_multiplier, ctx.down_multiplier = gate_multiplier, down_multiplier
        ctx.save_for_backward(a, b)
        return F.silu(a * gate_multiplier) * b * down_multiplier

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        a, b = ctx.saved_tensors
        with torch.enable_grad():
            given = a.detach().requires_grad_(), b.detach().requires_grad_()
            out = F.silu(given[0] * ctx.gate_multiplier) * given[1] * ctx.down_multiplier
        return (*torch.autograd.grad(out, given, grads[0]), None, None)


@pytest.mark.parametrize("scales", [(), (1.0, 1.0), (0.5, 1.0), (1.0, 3.0)])
def test_ligers_function(halves: list[int], scales: tuple[float, ...]) -> None:
    model = make(dtype=torch.float64)

    def forward(mlp: Any, x: Tensor) -> Any:
        return mlp.down_proj(LigerSiLUMulFunction.apply(mlp.gate_proj(x), mlp.up_proj(x), *scales))  # type: ignore[no-untyped-call]

    computed_by(model, forward)
    assert_same_step(model, 1e-12)
    assert bool(halves) == (set(scales) <= {1.0})


def test_halves_of_other_calls_are_not_taken() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    gate, up = x * 2, x * 3
    first, second = Half.of(gate), Half.of(up)
    assert activation_between(F.silu(gate) * up, first, second) == "silu"
    assert activation_between(F.gelu(gate) * up, first, second) == "gelu"
    assert activation_between(F.gelu(gate, approximate="tanh") * up, first, second) == "gelu_tanh"
    kept = F.silu(gate) * up
    kept.retain_grad()
    product = F.silu(gate) * up
    others = [F.silu(up) * gate, F.silu(gate) * (x * 3), product.detach(), kept, F.silu(gate) * 2, F.relu(gate) * up]
    assert [activation_between(each, first, second) for each in others] == [None] * len(others)
    assert activation_between(product, second, first) is None
    with torch.no_grad():
        up.add_(1)
    assert activation_between(product, first, second) is None


def test_a_forward_that_ends_early_leaves_nothing() -> None:
    model = make()
    fused = fuse(model)
    computed_by(model, lambda mlp, x: mlp.gate_proj(x)[..., : x.shape[-1]])
    model(input_ids=ids())
    assert any(layer.made is not None for layer in fused.layers)
    fused.after_step(SimpleNamespace())
    assert all(layer.made is None for layer in fused.layers)
