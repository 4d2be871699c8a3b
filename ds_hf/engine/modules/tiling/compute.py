"""A function computed tile by tile along the sequence, and once more in backward: what it saves inside is one tile's.

The idea is ALST's (arXiv:2506.13996). The function must treat positions alike and apart, as an MLP or a loss does.

Invariants
- The gradients of the tiles are summed here, in fp32, and given to autograd once: a weight's gradient is complete when
  autograd says so, and whoever waits for that (ZeRO's hooks, DDP) knows nothing of tiles.
- A tile in backward sees the random numbers and the autocast of the one in forward.
- Inside, calls of modules are not tracked, whatever hooks they have: no collective depends on the number of tiles, so
  processes may have different ones.
- Where a checkpointed block ends with tiles, its recomputation ends before they run: their input is saved first. So
  they run twice in all, as often as the block without tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ds_hf.engine.zero.hooks import untracked_calls

__all__ = [
    "GradientSums",
    "Surroundings",
    "apply",
    "bounds",
    "compute_tiles",
    "computed_tiles",
    "deliver",
    "leaves_behind",
]

_Fn = Callable[[list[Tensor], list[Tensor]], Tensor]


def bounds(length: int, tiles: int) -> list[tuple[int, int]]:
    """Start and end of each tile, as ``torch.chunk`` has them: the last may be shorter, none is empty."""
    step = max(-(-length // max(tiles, 1)), 1)
    return [(start, min(start + step, length)) for start in range(0, length, step)] or [(0, 0)]


def computed_tiles(cuts: Sequence[tuple[int, int]], like: Tensor) -> list[tuple[int, tuple[int, int]]]:
    """The tiles to compute, with their numbers: all. Where there are no values (meta), tiles only show what memory they
    take, and thousands of equal ones show it no better than the first three, after which sums are as they stay."""
    numbered = list(enumerate(cuts))
    return [*numbered[:3], *numbered[3:][-1:]] if like.is_meta else numbered


class Surroundings:
    """What a computation meets beyond its arguments: generators and autocast. ``again`` brings it back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        kinds = {"cpu", device.type} if torch.amp.is_autocast_available(device.type) else {"cpu"}
        cache = torch.is_autocast_cache_enabled()
        self._autocast: list[dict[str, Any]] = [
            {
                "device_type": kind,
                "enabled": torch.is_autocast_enabled(kind),
                "dtype": torch.get_autocast_dtype(kind),
                "cache_enabled": cache,
            }
            for kind in sorted(kinds)
        ]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside it is as it was; what comes after draws as if nothing had been inside."""
        devices = [] if self._cuda is None else [self.device]
        with torch.random.fork_rng(devices=devices), ExitStack() as stack:
            torch.set_rng_state(self._cpu)
            if self._cuda is not None:
                torch.cuda.set_rng_state(self._cuda, self.device)
            for settings in self._autocast:
                stack.enter_context(torch.autocast(**settings))
            yield


class GradientSums:
    """Sums of gradients over tiles: in fp32 as soon as there is more than one."""

    def __init__(self, count: int) -> None:
        self.sums: list[Tensor | None] = [None] * count

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """Of one tile; ``None`` where there is none."""
        for index, grad in enumerate(grads):
            if grad is None:
                continue
            before = self.sums[index]
            if before is None:
                self.sums[index] = grad
            elif before.dtype in (torch.float16, torch.bfloat16):
                self.sums[index] = before.float().add_(grad)
            else:
                self.sums[index] = before.add_(grad) if before is not grad else before + grad

    def as_of(self, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        """The sums, each in the dtype of its tensor."""
        return [None if s is None else s.to(t.dtype) for s, t in zip(self.sums, tensors, strict=True)]


def leaves_behind(output: Tensor, known: Sequence[Tensor]) -> list[Tensor]:
    """The leaves that ``output`` was computed of and that want gradients, but for ``known``: weights that a function
    reads beside its arguments."""
    found: dict[int, Tensor] = {}
    seen, todo = set(), [output.grad_fn]
    ids = {id(tensor) for tensor in known}
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in ids:
            found[id(leaf)] = leaf
        todo += [former for former, _ in node.next_functions]
    return list(found.values())


def compute_tiles(
    fn: _Fn,
    split: Sequence[Tensor],
    whole: Sequence[Tensor],
    weights: Sequence[nn.Parameter],
    *,
    cuts: Sequence[tuple[int, int]],
    dim: int,
    join: int | None,
) -> Tensor:
    """``fn(split, whole)``, tile by tile.

    Args:
        fn: of the tiles of ``split`` and all of ``whole`` to a tensor. What else it reads are weights.
        split: tensors that are cut along ``dim`` at ``cuts``.
        whole: tensors that every tile gets; their gradients are summed.
        weights: those that ``fn`` reads, as far as known: autograd then knows them as inputs. The gradients of others
            are put into their ``.grad`` in backward.
        join: the dim of the output along which tiles are joined, as long as the input's; ``None``: stacked, as outputs
            without dims always are.

    Raises:
        ValueError: an output is not as long along ``join`` as its tile.
    """
    weights = [weight for weight in dict.fromkeys(weights) if weight.requires_grad]
    tensors = [*split, *whole]
    if len(cuts) == 1:
        output = fn(list(split), list(whole))
        return output if join is not None and output.dim() else output.unsqueeze(0)
    if not torch.is_grad_enabled():
        with untracked_calls():
            return _run(fn, tensors, len(split), cuts, dim, join)
    node = None
    index = next((index for index, tensor in enumerate(tensors) if tensor.requires_grad), None)
    if index is not None:
        tensors[index] = apply(_Hold, index, *tensors)
        node = tensors[index].grad_fn
    return apply(_Tiles, fn, node, len(split), len(tensors), tuple(cuts), dim, join, *tensors, *weights)


def apply(function: Any, *args: Any) -> Tensor:
    """``function.apply``, which torch does not type."""
    output: Tensor = function.apply(*args)
    return output


class _Hold(torch.autograd.Function):
    """Saves ``tensors`` and gives back one of them."""

    @staticmethod
    def forward(ctx: Any, index: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.index, ctx.count = index, len(tensors)
        return tensors[index].view_as(tensors[index])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (None, *(grad if index == ctx.index else None for index in range(ctx.count)))


class _Tiles(torch.autograd.Function):
    """``compute_tiles``, of which ``_Hold`` has saved the tensors; where none needs a gradient, of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        fn: _Fn,
        node: Any,
        split: int,
        count: int,
        cuts: tuple[tuple[int, int], ...],
        dim: int,
        join: int | None,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.fn, ctx.node, ctx.split, ctx.cuts, ctx.dim, ctx.join = fn, node, split, cuts, dim, join
        ctx.needs = ctx.needs_input_grad[7 : 7 + count]
        ctx.weights = tensors[count:]
        if node is None:
            ctx.save_for_backward(*tensors[:count])
        ctx.surroundings = Surroundings(tensors[0].device)
        with untracked_calls():
            return _run(fn, tensors[:count], split, cuts, dim, join)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        tensors = ctx.saved_tensors if ctx.node is None else ctx.node.saved_tensors
        with untracked_calls(), ctx.surroundings.again():
            grads = _Backward(ctx, tensors).run(grad)
        return (*[None] * 7, *grads)


def _run(
    fn: _Fn, tensors: Sequence[Tensor], split: int, cuts: Sequence[tuple[int, int]], dim: int, join: int | None
) -> Tensor:
    """The output of all tiles, which is written tile by tile."""
    whole = list(tensors[split:])
    output: Tensor | None = None
    for index, (start, end) in computed_tiles(cuts, tensors[0]):
        tile = fn([_tile(tensor, dim, start, end) for tensor in tensors[:split]], whole)
        if tile.dim() == 0:
            join = None
        if join is not None and not (join < tile.dim() and tile.shape[join] == end - start):
            raise ValueError(
                f"a tile of {end - start} positions gave an output of shape {tuple(tile.shape)}, which cannot be "
                f"joined along dim {join}: that has to be its positions"
            )
        if output is None:
            shape = list(tile.shape)
            if join is None:
                shape.insert(0, len(cuts))
            else:
                shape[join] = cuts[-1][1]
            output = tile.new_empty(shape)
        (output[index] if join is None else output.narrow(join, start, end - start)).copy_(tile)
    assert output is not None
    return output


def _tile(tensor: Tensor, dim: int, start: int, end: int) -> Tensor:
    """A stretch of ``tensor``, without a graph; in one piece, as whole tensors mostly are: functions count on it."""
    return tensor.detach().narrow(dim, start, end - start).contiguous()


class _Backward:
    """One backward of ``_Tiles``: the tiles once more, each with its gradient."""

    def __init__(self, ctx: Any, tensors: Sequence[Tensor]) -> None:
        self.fn, self.cuts, self.dim, self.join = ctx.fn, ctx.cuts, ctx.dim, ctx.join
        split = ctx.split
        self.split, self.split_needs = tensors[:split], ctx.needs[:split]
        whole = zip(tensors[split:], ctx.needs[split:], strict=True)
        self.whole = [tensor.detach().requires_grad_(need) for tensor, need in whole]
        self.weights = ctx.weights
        self.made = [
            torch.empty_like(tensor) if need else None
            for tensor, need in zip(self.split, self.split_needs, strict=True)
        ]

    def run(self, grad: Tensor) -> list[Tensor | None]:
        """The gradients of the tensors and of the weights."""
        shared = [*(tensor for tensor in self.whole if tensor.requires_grad), *self.weights]
        others: list[Tensor] | None = None
        sums = GradientSums(len(shared))
        for index, cut in computed_tiles(self.cuts, grad):
            tiles, output = self._again(*cut)
            own = [tile for tile in tiles if tile.requires_grad]
            if not output.requires_grad:
                self._put(cut, [None] * len(own))
                continue
            if others is None:
                others = leaves_behind(output, [*own, *shared])
                sums.sums += [None] * len(others)
            stacked = self.join is None or output.dim() == 0
            of_tile = grad[index] if stacked else grad.narrow(self.join, cut[0], cut[1] - cut[0])
            grads = torch.autograd.grad(output, [*own, *shared, *others], of_tile, allow_unused=True)
            del output, tiles
            self._put(cut, grads[: len(own)])
            sums.add(grads[len(own) :])
        totals = sums.as_of([*shared, *(others or [])])
        deliver(others or [], totals[len(shared) :])
        of_shared = iter(totals[: len(shared)])
        of_whole = [next(of_shared) if tensor.requires_grad else None for tensor in self.whole]
        return [*self.made, *of_whole, *of_shared]

    def _again(self, start: int, end: int) -> tuple[list[Tensor], Tensor]:
        tiles = [
            _tile(tensor, self.dim, start, end).requires_grad_(need)
            for tensor, need in zip(self.split, self.split_needs, strict=True)
        ]
        with torch.enable_grad():
            return tiles, self.fn(tiles, self.whole)

    def _put(self, cut: tuple[int, int], grads: Sequence[Tensor | None]) -> None:
        """The gradients of one tile's inputs, at their place in those of the whole."""
        start, end = cut
        for whole, part in zip((made for made in self.made if made is not None), grads, strict=True):
            target = whole.narrow(self.dim, start, end - start)
            target.zero_() if part is None else target.copy_(part)


def deliver(leaves: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Put gradients into ``.grad`` of weights that autograd does not know as inputs, as a backward would."""
    pairs = [(leaf, grad) for leaf, grad in zip(leaves, grads, strict=True) if grad is not None]
    if pairs:
        torch.autograd.backward([leaf for leaf, _ in pairs], [grad for _, grad in pairs])
