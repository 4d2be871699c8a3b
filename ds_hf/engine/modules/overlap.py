"""Compiled blocks that processes share: what they exchange is added up before, and runs beside products.

Layers of one input (q, k and v; gate and up) each sum their gradient of it over the processes, and the model adds these
sums. The sum over the processes of what was added up is the same, but for rounding, and one collective in place of
three. Code that is not compiled does so, too (``parallel/tensor/functions.py``).

Where a layer is cut, backward sums the gradient of its input over the processes, or gathers that of its output, and
autograd computes the gradients of the layer's weights before: the GPU then waits for the wire with nothing left to
do. Nothing in the block needs these products, so in the compiled graph they wait, and run between the start of a
collective and its end (Megatron-LM does the same by hand: Korthikanti et al. 2022, section 4.2.2). Each result is
computed by the same kernel from the same inputs, so it is the same to the bit, and as the order depends on shapes
alone it is that of all processes.

cuBLAS starts a product on all of a Hopper GPU's multiprocessors, and NCCL holds some of them: what found no place would
run when all others are done, which takes as long as if nothing ran beside. Such a product is told to leave some.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch.utils._ordered_set import OrderedSet

__all__ = ["PATCHES", "ExchangesOfBlocks", "join_sums", "reorder"]

_LEFT = 32  # multiprocessors; NCCL takes as many blocks at most, unless NCCL_MAX_CTAS says more
_COVERS = 1500  # operations of a product that take as long as a byte of a collective, at 600 TFLOP/s and 400 GB/s
_aten = torch.ops.aten
_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm", "aten::_grouped_mm"}


class ExchangesOfBlocks(CustomGraphPass):
    """``join_sums`` and ``reorder`` as inductor's pass; equal ones share compiled code."""

    def __call__(self, graph: fx.Graph) -> None:
        join_sums(graph)
        reorder(graph)

    def uuid(self) -> bytes:
        return get_hash_for_files((__file__,))

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    def __hash__(self) -> int:
        return hash(type(self))


PATCHES = {"post_grad_custom_post_pass": ExchangesOfBlocks()}  # of inductor's configuration


def join_sums(graph: fx.Graph) -> None:
    """Where two sums over the same processes are added and not used otherwise, add first and sum once, in place."""
    for node in list(graph.nodes):
        if node.target is not _aten.add.Tensor or node.kwargs or not all(map(_is_sum, node.args)):
            continue
        (first, second), before = node.args, list(node.all_input_nodes)
        sums = first.args[0], second.args[0]
        if first is second or sums[0].target is not sums[1].target or sums[0].args[1:] != sums[1].args[1:]:
            continue
        parts = [each.args[0] for each in sums]
        if len({(value.dtype, str(value.shape)) for value in _values(parts)}) > 1:  # symbols have no hash
            continue
        with graph.inserting_before(node):
            whole = graph.call_function(node.target, tuple(parts))
            start = graph.call_function(sums[0].target, (whole, *sums[0].args[1:]))
            wait = graph.call_function(first.target, (start,))
        whole.meta.update(parts[0].meta)
        start.meta.update(node.meta)
        wait.meta.update(node.meta)
        node.replace_all_uses_with(wait)
        for each in (node, *before, *sums):
            graph.erase_node(each)


def _is_sum(wait: Any) -> bool:
    """Whether it waits for a sum over processes that has no other user, and is used once itself."""
    if not isinstance(wait, fx.Node) or not _is_wait(wait) or len(wait.users) > 1:
        return False
    start = wait.all_input_nodes[0]
    sums = ("_c10d_functional::all_reduce", "_c10d_functional::reduce_scatter_tensor")
    return _schema_name(start) in sums and start.args[1] == "sum" and len(start.users) == 1 and not start.kwargs


def reorder(graph: fx.Graph) -> None:
    """Put products that nothing in ``graph`` needs between collectives and the waits for them, in place."""
    if not any(map(_is_wait, graph.nodes)):
        return
    movable = _movable(graph)
    late: dict[fx.Node, None] = {}  # in their order
    after: dict[fx.Node, OrderedSet[fx.Node]] = {}
    for node in list(graph.nodes):
        barrier = node.op == "output" or _writes(node)
        if not barrier and (node in movable or not late.keys().isdisjoint(node.all_input_nodes)):
            late[node] = None
        elif _is_wait(node):
            _cover(node, [each for each in late if each in movable], late, after)
        elif barrier:
            for each in late:
                node.prepend(each)
            late.clear()
    for node in after:
        _leave_room(node)
    preserve_node_ordering(graph, after)  # fused with what comes later, a kernel would draw the wait before a product


def _cover(
    wait: fx.Node, products: list[fx.Node], late: dict[fx.Node, None], after: dict[fx.Node, OrderedSet[fx.Node]]
) -> None:
    """Put as many of ``products`` before ``wait`` as take its time."""
    start, done, enough = wait.all_input_nodes[0], 0.0, _COVERS * _bytes_moved(wait)
    for product in products:
        if done >= enough:
            return
        del late[product]
        wait.prepend(product)
        after[product] = OrderedSet([start])
        after.setdefault(wait, OrderedSet()).add(product)
        done += _operations(product)


_library: Any = torch.library.Library("ds_hf_overlap", "DEF")  # type: ignore[no-untyped-call]
_library.define("mm(Tensor left, Tensor right) -> Tensor", tags=(torch.Tag.flexible_layout,))


@torch.library.impl(_library, "mm", "CompositeExplicitAutograd")
def _mm(left: Tensor, right: Tensor) -> Tensor:
    """``[m, k]`` by ``[k, n]``, of one dtype, on all multiprocessors but ``_LEFT``."""
    now: Any = torch._C
    library, left_now = now._get_blas_preferred_backend(), now._get_sm_carveout_experimental()
    _warn_nobody()
    now._set_blas_preferred_backend(now._BlasBackend.Cublaslt)
    now._set_sm_carveout_experimental(_LEFT)
    try:
        return torch.mm(left, right)
    finally:
        now._set_sm_carveout_experimental(left_now)
        now._set_blas_preferred_backend(library)


@cache
def _warn_nobody() -> None:
    """torch says once in a process that a chosen library is an experiment, which the user did not choose."""
    now: Any = torch._C
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = now._get_blas_preferred_backend()
        now._set_blas_preferred_backend(now._BlasBackend.Cublaslt)
        now._set_blas_preferred_backend(before)


@torch.library.register_fake("ds_hf_overlap::mm", lib=_library)  # type: ignore[untyped-decorator]
def _mm_shape(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1])


def _leave_room(node: fx.Node) -> None:
    """Let a product of 16-bit values leave some of a Hopper GPU's multiprocessors."""
    value = next(_values([node]))
    if (
        _schema_name(node) == "aten::mm"
        and value.dtype in (torch.bfloat16, torch.float16)
        and value.is_cuda
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(value.device)[0] == 9
    ):
        node.target = torch.ops.ds_hf_overlap.mm.default


def _movable(graph: fx.Graph) -> set[fx.Node]:
    """Products that are in no collective's way, nor in another product's."""
    needed: set[fx.Node] = set()
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node not in needed and _schema_name(node) in _PRODUCTS:
            found.add(node)
        if node in needed or node in found or _is_collective(node):
            needed.update(node.all_input_nodes)
    return found


def _is_collective(node: fx.Node) -> bool:
    return _schema_name(node).startswith("_c10d_functional::")


def _is_wait(node: fx.Node) -> bool:
    return _schema_name(node) == "_c10d_functional::wait_tensor"


def _writes(node: fx.Node) -> bool:
    """Whether it may write into a tensor that another reads: products come before it, as they did."""
    if node.op != "call_function" or getattr(node.target, "__module__", "") == "_operator":
        return False
    schema = getattr(node.target, "_schema", None)
    return schema is None or bool(schema.is_mutable)


def _schema_name(node: fx.Node) -> str:
    return str(getattr(getattr(node.target, "_schema", None), "name", ""))


def _operations(node: fx.Node) -> float:
    """Multiplications and additions of a product; 0 for all else."""
    if _schema_name(node) not in _PRODUCTS:
        return 0.0
    left = [value for value in _values(node.args) if value.dim() >= 2][-2 if _adds(node) else 0]
    return 2.0 * sum(_numel(value) for value in _values([node])) * _size(left.shape[-1])


def _adds(node: fx.Node) -> bool:
    return "add" in _schema_name(node)


def _bytes_moved(wait: fx.Node) -> float:
    """Bytes of the larger one of what a collective is given and what it gives."""
    start = wait.all_input_nodes[0]
    return max((_numel(value) * value.element_size() for value in _values([start, *start.all_input_nodes])), default=0)


def _values(nodes: Iterable[Any]) -> Iterator[Tensor]:
    for node in nodes:
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        values = value if isinstance(value, tuple | list) else [value]
        yield from (each for each in values if isinstance(each, Tensor))


def _numel(value: Tensor) -> float:
    return math.prod((_size(size) for size in value.shape), start=1.0)


def _size(size: Any) -> float:
    """A dimension; where it is symbolic what it was when the code was traced."""
    hint = size if isinstance(size, int) else getattr(size.node, "hint", None)
    return float(hint) if hint is not None else 1.0
