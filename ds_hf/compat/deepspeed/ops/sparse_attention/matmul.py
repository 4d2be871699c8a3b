"""``MatMul`` and ``Softmax`` of ``deepspeed.ops.sparse_attention``: products and softmax of matrices kept as blocks.

A block-sparse matrix is a tensor ``[batch, blocks, block, block]`` with the blocks of all heads in the order of
``layout.nonzero()``. These are in torch's operators: they take memory and time in proportion to the blocks, on any
device and in any float dtype. ``SparseSelfAttention`` does without them, and is faster.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["MatMul", "Softmax"]

_MODES = ("sdd", "dsd", "dds")


class _ModeError(ValueError, NotImplementedError):
    """A mode that does not exist: an ordinary wrong value, for which DeepSpeed raises the latter."""


class _Blocks:
    """Where the blocks of a layout are.

    Args:
        layout: ``[heads, rows, columns]`` or ``[rows, columns]`` of 0 and 1.
        block: size of a block's sides.
    """

    def __init__(self, layout: Tensor, block: int) -> None:
        if layout.dim() not in (2, 3):
            raise ValueError(
                f"a layout is [heads, rows, columns] or [rows, columns], and this one {list(layout.shape)}"
            )
        self.layout, self.block = layout if layout.dim() == 3 else layout[None], block
        self.heads, self.rows, self.columns = self.layout.shape
        self._found: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}

    @property
    def count(self) -> int:
        return int((self.layout != 0).sum())

    def places(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Head, row and column of each block."""
        if device not in self._found:
            head, row, column = self.layout.to(device).nonzero(as_tuple=True)
            self._found[device] = head, row, column
        return self._found[device]

    def check(self, name: str, sparse: Tensor) -> None:
        """Whether ``sparse`` has the blocks of this layout."""
        wanted = (self.count, self.block, self.block)
        if tuple(sparse.shape[-3:]) != wanted:
            raise ValueError(
                f"{name} has the shape {list(sparse.shape)}, and [batch, {', '.join(map(str, wanted))}] is expected"
            )


class MatMul:
    """A product in which one of the three matrices is block-sparse.

    Args:
        layout: of the sparse one, ``[heads, rows, columns]``, or ``[rows, columns]`` for one head.
        block: size of a block's sides.
        mode: of result, a and b, which is sparse: "sdd", "dsd" or "dds".
        trans_a, trans_b: take the matrix transposed; the layout is that of the matrix as it is given.
        bench: without effect.
    """

    def __init__(
        self, layout: Tensor, block: int, mode: str, trans_a: bool = False, trans_b: bool = False, bench: bool = False
    ) -> None:
        if mode not in _MODES:
            raise _ModeError(f"mode is one of {', '.join(_MODES)}, not {mode!r}")
        self.layout, self.block, self.mode = layout, block, mode
        self.trans_a, self.trans_b, self.bench = trans_a, trans_b, bench
        self._blocks = _Blocks(layout, block)

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """``a b``; dense matrices are ``[batch, heads, rows, columns]``, leading dims of size 1 may be missing.

        Raises:
            ValueError: shapes, dtypes or devices that do not go together.
        """
        if a.device != b.device or a.dtype != b.dtype:
            raise ValueError(f"a and b differ: {a.dtype} on {a.device}, {b.dtype} on {b.device}")
        dims = max(a.dim(), b.dim())
        if dims > 4:
            raise ValueError(f"matrices have at most 4 dimensions, and here are {dims}")
        a, b = (tensor.reshape((1,) * (4 - tensor.dim()) + tuple(tensor.shape)) for tensor in (a, b))
        product = {"sdd": self._sdd, "dsd": self._dsd, "dds": self._dds}[self.mode](a, b)
        while product.dim() > dims and product.shape[0] == 1:
            product = product[0]
        return product

    def _sdd(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = _turned(a, self.trans_a), _turned(b, self.trans_b)
        at = self._blocks
        at_rows, at_columns = _cut(a, 2, at.rows, self.block, "a"), _cut(b, 3, at.columns, self.block, "b")
        _heads(at, a, b)
        head, row, column = at.places(a.device)
        return at_rows[:, head, row] @ at_columns[:, head, :, column].movedim(0, 1)

    def _dsd(self, a: Tensor, b: Tensor) -> Tensor:
        at, b = self._blocks, _turned(b, self.trans_b)
        at.check("a", a)
        _heads(at, b)
        head, row, column = at.places(a.device)
        into, of, number = (column, row, at.columns) if self.trans_a else (row, column, at.rows)
        inner = at.rows if self.trans_a else at.columns
        pieces = _turned(a, self.trans_a) @ _cut(b, 2, inner, self.block, "b")[:, head, of]
        result = b.new_zeros(b.shape[0], at.heads * number, self.block, b.shape[3])
        result = result.index_add(1, head * number + into, pieces)
        return result.view(b.shape[0], at.heads, number * self.block, b.shape[3])

    def _dds(self, a: Tensor, b: Tensor) -> Tensor:
        other = MatMul(self.layout, self.block, "dsd", trans_a=not self.trans_b, trans_b=not self.trans_a)
        return other._dsd(b, a).transpose(2, 3)  # (a b)^T = b^T a^T


class Softmax:
    """Softmax over the rows of a block-sparse matrix.

    Args:
        layout, block: as of ``MatMul``.
        bench: without effect.
    """

    def __init__(self, layout: Tensor, block: int, bench: bool = False) -> None:
        self.layout, self.block, self.bench = layout, block, bench
        self._blocks = _Blocks(layout, block)
        self.num_blocks, self.spdims = self._blocks.count, layout.shape

    def __call__(
        self,
        x: Tensor,
        scale: float = 1.0,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "add",
    ) -> Tensor:
        """softmax(scale * x + rpe + masks), ``[batch, blocks, block, block]``; computed in fp32 at least.

        Args:
            x: block-sparse. rpe: ``[batch, heads, rows, columns]``.
            key_padding_mask: ``[batch, columns]``. attn_mask: ``[rows, columns]``.
            key_padding_mask_mode, attn_mask_mode: "add", or "mul": where a mask is 0 the score does not count.

        Raises:
            ValueError: a mask of another dtype than ``x``, or a wrong shape.
        """
        at, block = self._blocks, self.block
        at.check("x", x)
        for name, given in (("rpe", rpe), ("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            if given is not None and given.dtype != x.dtype:
                raise ValueError(f"{name} is {given.dtype}, and x {x.dtype}: they have to be the same")
        head, row, column = at.places(x.device)
        scores = x.to(torch.promote_types(x.dtype, torch.float32)) * scale
        if rpe is not None:
            cells = _cut(_cut(rpe, 2, at.rows, block, "rpe"), 4, at.columns, block, "rpe")
            scores = scores + cells[:, head, row, :, column].movedim(0, 1)
        if key_padding_mask is not None:
            keys = _cut(key_padding_mask, 1, at.columns, block, "key_padding_mask")[:, column, None]
            scores = _masked(scores, keys, key_padding_mask_mode)
        if attn_mask is not None:
            cells = _cut(_cut(attn_mask, 0, at.rows, block, "attn_mask"), 2, at.columns, block, "attn_mask")
            scores = _masked(scores, cells[row, :, column], attn_mask_mode)
        return self._over_rows(scores, head * at.rows + row, at.heads * at.rows).to(x.dtype)

    def _over_rows(self, scores: Tensor, row: Tensor, rows: int) -> Tensor:
        batch, _, block, _ = scores.shape
        where = row[None, :, None].expand(batch, -1, block)
        top = scores.detach().amax(-1)
        lowest = scores.new_full((batch, rows, block), float("-inf"))
        highest = lowest.scatter_reduce(1, where, top, "amax").gather(1, where)[..., None]
        weights = torch.exp(scores - highest.masked_fill(highest == float("-inf"), 0.0))
        total = scores.new_zeros(batch, rows, block).index_add(1, row, weights.sum(-1))
        sums = total.gather(1, where)[..., None]
        return weights / sums.masked_fill(sums == 0, 1.0)


def _turned(tensor: Tensor, transposed: bool) -> Tensor:
    return tensor.transpose(-2, -1) if transposed else tensor


def _cut(tensor: Tensor, dim: int, number: int, block: int, name: str) -> Tensor:
    """``dim`` as ``[number, block]``."""
    if tensor.shape[dim] != number * block:
        raise ValueError(
            f"dimension {dim} of {name} has {tensor.shape[dim]} elements, and {number} blocks of {block} are expected"
        )
    return tensor.unflatten(dim, (number, block))  # type: ignore[no-untyped-call, no-any-return]


def _heads(at: _Blocks, *dense: Tensor) -> None:
    for tensor in dense:
        if tensor.shape[1] != at.heads:
            raise ValueError(f"the layout has {at.heads} heads, and a matrix {tensor.shape[1]}")


def _masked(scores: Tensor, mask: Tensor, mode: str) -> Tensor:
    if mode not in ("add", "mul"):
        raise ValueError(f'the mode of a mask is "add" or "mul", not {mode!r}')
    return scores + mask if mode == "add" else scores.masked_fill(mask == 0, float("-inf"))
