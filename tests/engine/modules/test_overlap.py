"""The order of compiled graphs whose blocks processes share: what runs between a collective and its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx
from torch._inductor.fx_passes.control_dependencies import control_deps
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from ds_hf import initialize
from ds_hf.engine.modules import overlap
from ds_hf.engine.modules.compiling import ModuleCompiler
from tests.contract.test_divided_tokens import KEY
from tests.helpers.compiled import BACKEND
from tests.helpers.distributed import run_distributed
from tests.helpers.tensor import build, tensor_section

c10d: Any = torch.ops._c10d_functional


def summed(x: Tensor) -> Tensor:
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", "0"))  # type: ignore[no-any-return]


def linear_backward(grad: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Of a layer that is cut along its outputs: gradients of its weight, and of its input."""
    of_weight = grad.t() @ x
    return of_weight, summed(grad @ w)


def two_layers(grad: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Two such layers, the second one's output being the first one's input; a bias's gradient beside."""
    second, between = linear_backward(grad, x, w)
    first, start = linear_backward(between, x + 1, w)
    return second.t() * 2, first, grad.sum(0), start


def traced(function: Callable[..., Any], *shapes: tuple[int, ...], device: str = "cpu", **options: Any) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [torch.empty(shape, device=device, **options) for shape in shapes]
        return make_fx(function)(*inputs)


def told(graph: fx.Graph) -> list[str]:
    """Products and collectives, in the order in which they start."""
    found = []
    for node in graph.nodes:
        inner = getattr(graph.owning_module, str(node.args[1])).graph if node.target is control_deps else graph
        nodes = inner.nodes if inner is not graph else [node]
        names = [str(each.target).split(".") for each in nodes if each.op == "call_function"]
        found += [name[1] for name in names if name[1:] and name[1] in ("mm", "all_reduce", "wait_tensor")]
    return found


BLOCKS = 3  # of the tests' Llama
SQUARE = ((8, 8),) * 3


def test_gradients_of_weights_run_beside_the_sum() -> None:
    module = traced(linear_backward, *SQUARE)
    assert told(module.graph) == ["mm", "mm", "all_reduce", "wait_tensor"]
    overlap.reorder(module.graph)
    module.graph.lint()
    assert told(module.graph) == ["mm", "all_reduce", "mm", "wait_tensor"]
    product, wait = (node for node in module.graph.nodes if node.target is control_deps)
    # the dependencies hold whatever inductor does to the order: the sum starts first, and ends last
    assert [each.target for each in product.args[0]] == [c10d.all_reduce.default]
    assert list(wait.args[0]) == [product]


class OfOne(fx.Interpreter):
    """Runs a graph in one process, without a group."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return args[0] if target is c10d.all_reduce.default else super().call_function(target, args, kwargs)


def test_values_stay_to_the_bit() -> None:
    module, again = (traced(two_layers, *SQUARE) for _ in range(2))
    overlap.reorder(again.graph)
    again.recompile()
    inputs = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(0))
    expected, found = (OfOne(each).run(*inputs) for each in (module, again))
    assert told(again.graph) == ["mm", "all_reduce", "mm", "wait_tensor"] * 2
    assert len(expected) == 4
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


def test_as_many_products_as_take_its_time() -> None:
    """A product of 4096 has 2 * 4096³ operations, more than _COVERS for each of the 4 * 4096² bytes: one is enough."""

    def three(grad: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        of_weights = [grad.t() @ (x + number) for number in range(3)]
        first = summed(grad @ w)
        return *of_weights, summed(first @ w)

    for size, expected in (
        (4096, ["mm", "all_reduce", "mm", "wait_tensor", "mm", "all_reduce", "mm", "wait_tensor", "mm"]),
        (16, ["mm", "all_reduce", "mm", "mm", "mm", "wait_tensor", "mm", "all_reduce", "wait_tensor"]),
    ):
        module = traced(three, *((size, size),) * 3)
        overlap.reorder(module.graph)
        module.graph.lint()
        assert told(module.graph) == expected


def needed_by_a_product(grad: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """As an adapter's: the gradient of one factor needs another product."""
    low = x @ w
    return grad.t() @ low, summed(grad @ w), low


def written(grad: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    of_weight = grad.t() @ x
    x.copy_(grad)
    return of_weight, summed(grad @ w)


def test_what_is_needed_comes_first() -> None:
    module = traced(needed_by_a_product, *SQUARE)
    overlap.reorder(module.graph)
    module.graph.lint()
    assert told(module.graph) == ["mm", "mm", "all_reduce", "mm", "wait_tensor"]  # low before, and its user beside


def test_nothing_passes_what_writes_into_its_input() -> None:
    module = traced(written, *SQUARE)
    before = [node.name for node in module.graph.nodes]
    overlap.reorder(module.graph)
    assert [node.name for node in module.graph.nodes] == before


def test_graphs_without_collectives_stay() -> None:
    module = traced(lambda x, w: (x @ w, w @ x), (8, 8), (8, 8))
    before = [node.name for node in module.graph.nodes]
    overlap.reorder(module.graph)
    assert [node.name for node in module.graph.nodes] == before


def test_sizes_may_be_symbols() -> None:
    module = make_fx(linear_backward, tracing_mode="symbolic")(*(torch.randn(shape) for shape in SQUARE))
    overlap.reorder(module.graph)
    assert told(module.graph) == ["mm", "all_reduce", "mm", "wait_tensor"]


@pytest.mark.parametrize(
    ("dtype", "capability", "leaves"),
    [
        (torch.bfloat16, (9, 0), True),
        (torch.float16, (9, 0), True),
        (torch.float32, (9, 0), False),
        (torch.bfloat16, (8, 0), False),
        (torch.bfloat16, (10, 0), False),
    ],
)
def test_products_leave_room_on_hopper(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, capability: tuple[int, int], leaves: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    module = traced(linear_backward, *SQUARE, device="cuda", dtype=dtype)
    overlap.reorder(module.graph)
    targets = [
        node.target
        for name, graph in module.named_children()
        if name.startswith("subgraph_")
        for node in graph.graph.nodes
    ]
    assert (torch.ops.ds_hf_overlap.mm.default in targets) is leaves
    needed = [node.target for node in module.graph.nodes]
    assert torch.ops.ds_hf_overlap.mm.default not in needed  # what the sum waits for has all multiprocessors


def test_what_leaves_room_sets_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, Any]] = []
    settings: Any = torch._C
    monkeypatch.setattr(overlap, "_warn_nobody", lambda: None)
    monkeypatch.setattr(settings, "_set_blas_preferred_backend", lambda value: seen.append(("library", str(value))))
    monkeypatch.setattr(settings, "_set_sm_carveout_experimental", lambda value: seen.append(("left", value)))
    left, right = torch.randn(4, 6), torch.randn(6, 3)
    assert torch.equal(torch.ops.ds_hf_overlap.mm(left, right), left @ right)
    now = str(settings._get_blas_preferred_backend())
    assert seen == [("library", "_BlasBackend.Cublaslt"), ("left", 32), ("left", None), ("library", now)]


# -- sums that are added ----------------------------------------------------------------------------------------------


def of_one_input(a: Tensor, b: Tensor, c: Tensor, w: Tensor) -> Tensor:
    """The gradient of what q, k and v have as their input."""
    return summed(a @ w) + summed(b @ w) + summed(c @ w)


def test_sums_that_are_added_are_one() -> None:
    module, again = (traced(of_one_input, *((8, 8),) * 4) for _ in range(2))
    overlap.join_sums(again.graph)
    again.graph.lint()
    again.recompile()
    assert told(module.graph).count("all_reduce") == 3
    assert told(again.graph) == ["mm", "mm", "mm", "all_reduce", "wait_tensor"]
    inputs = torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    torch.testing.assert_close(OfOne(again).run(*inputs), inputs[:3].sum(0) @ inputs[3], rtol=1e-12, atol=1e-12)
    values = {str(node.target): node.meta["val"].shape for node in again.graph.nodes if "val" in node.meta}
    assert set(values.values()) == {(8, 8)}


def test_lengths_may_be_symbols() -> None:
    """Batches of several lengths: torch compiles blocks for all of them from the second on."""
    module = make_fx(of_one_input, tracing_mode="symbolic")(*torch.randn(4, 8, 8))
    assert any(isinstance(size, torch.SymInt) for node in module.graph.nodes for size in node.meta["val"].shape)
    overlap.ExchangesOfBlocks()(module.graph)
    module.graph.lint()
    assert told(module.graph) == ["mm", "mm", "mm", "all_reduce", "wait_tensor"]


def scattered(x: Tensor, group: str = "0") -> Tensor:
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, "sum", 2, group))  # type: ignore[no-any-return]


def test_sums_of_own_tokens_too() -> None:
    module = traced(lambda x, y: scattered(x) + scattered(y), (8, 8), (8, 8))
    overlap.join_sums(module.graph)
    module.graph.lint()
    start, wait = list(module.graph.nodes)[3:5]
    assert start.target is c10d.reduce_scatter_tensor.default
    assert start.args[0].target is torch.ops.aten.add.Tensor
    assert (start.args[0].meta["val"].shape, start.meta["val"].shape, wait.meta["val"].shape) == (
        (8, 8),
        (4, 8),
        (4, 8),
    )


def largest(x: Tensor) -> Tensor:
    return c10d.wait_tensor(c10d.all_reduce(x, "max", "0"))  # type: ignore[no-any-return]


def both_used(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    first = summed(x)
    return first + summed(y), first * 2


def twice(x: Tensor, y: Tensor) -> Tensor:
    first = summed(x + y)
    return first + first


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: largest(x) + largest(y),
        lambda x, y: torch.add(summed(x), summed(y), alpha=2),
        lambda x, y: summed(x) + c10d.wait_tensor(c10d.all_reduce(y, "sum", "1")),
        lambda x, y: summed(x) + scattered(torch.cat([y, y])),
        lambda x, y: summed(x) + summed(y[:1]),
        lambda x, y: summed(x) + summed(y.double()),
        lambda x, y: summed(x) + y,
        lambda x, y: summed(x) * summed(y),
        both_used,
        twice,
    ],
)
def test_what_is_something_else_stays(function: Callable[..., Any]) -> None:
    module = traced(function, (8, 8), (8, 8))
    before = [node.name for node in module.graph.nodes]
    overlap.join_sums(module.graph)
    assert [node.name for node in module.graph.nodes] == before


# -- wired -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, overlap.PATCHES),
        ({"options": {"post_grad_custom_post_pass": None}}, {"post_grad_custom_post_pass": None}),
        ({"mode": "max-autotune-no-cudagraphs"}, {"max_autotune": True, **overlap.PATCHES}),
    ],
)
def test_shared_blocks_have_the_order(given: dict[str, Any], expected: dict[str, Any]) -> None:
    """Unless the user has a pass of theirs; other blocks are compiled as ever."""
    block = torch.nn.Linear(4, 4)
    with mock.patch("torch.compile") as compile:
        ModuleCompiler([block], shared=True).compile(block, **given)
        patches = compile.call_args.kwargs["backend"].options["config_patches"]
        assert {key: patches.get(key) for key in expected} == expected
        ModuleCompiler([other := torch.nn.Linear(4, 4)]).compile(other, **given)
        assert compile.call_args.kwargs == given


def test_a_pass_of_the_users_own_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.config.post_grad_custom_post_pass", overlap.ExchangesOfBlocks())
    block = torch.nn.Linear(4, 4)
    with mock.patch("torch.compile") as compile:
        ModuleCompiler([block], shared=True).compile(block)
        assert "post_grad_custom_post_pass" not in compile.call_args.kwargs["backend"].options["config_patches"]


class Exchanges(TorchDispatchMode):
    """Notes what compiled code exchanges."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and func._opname != "wait_tensor":
            self.names.append(func._opname.rstrip("_"))
        return func(*args, **(kwargs or {}))


def compiled(backend: str | None, own: dict[str, Any]) -> tuple[list[float], list[str]]:
    """Losses of two steps, and what blocks exchange in the second one's backward."""
    torch._dynamo.reset()
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1},
        "tensor_parallel": tensor_section("llama", 2),
        "ds_hf": own,
    }
    engine, *_ = initialize(model=build("llama", use_cache=False), config=config)
    engine.compile(**({"backend": backend} if backend else {}))
    ids, losses = torch.arange(4, 36).view(2, 16) % 60, []
    for _ in range(2):
        loss = engine(input_ids=ids, labels=ids).loss
        with Exchanges() as seen:
            engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    assert engine.compiler._shared
    return losses, sorted(seen.names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "apart", "joined"),
    [
        ({}, ["all_reduce"] * 5, ["all_reduce"] * 2),  # q, k and v, gate and up; their sums
        (KEY, [*["all_gather_into_tensor"] * 2, *["reduce_scatter_tensor"] * 2], None),
    ],
)
def test_inductor_computes_the_same(own: dict[str, Any], apart: list[str], joined: list[str] | None) -> None:
    (quick, exchanged), (other, _) = run_distributed(compiled, 2, BACKEND, own, timeout=100)
    (found, again), (same, _) = run_distributed(compiled, 2, None, own, timeout=250)
    assert exchanged == sorted(apart * BLOCKS)
    assert again == sorted((joined or apart) * BLOCKS)
    assert found == same
    assert found == pytest.approx(quick, rel=1e-6)
    assert other == quick
