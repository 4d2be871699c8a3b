"""``deepspeed.runtime.sparse_tensor.SparseTensor``: rows of a matrix, by their numbers.

A plain holder that scripts make of the sparse gradient of an embedding; the engine's own gradients are dense.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["SparseTensor"]


class SparseTensor:
    """Some rows of a dense tensor.

    Args:
        dense_tensor: a sparse COO tensor whose first dimension is the sparse one, or a matrix, of which the rows count
            that are not zero; ``None`` for an empty holder, to fill by hand.

    Attributes:
        indices: numbers of the rows, ``[rows]``; they ascend and differ until something is added.
        values: the rows, ``[rows, ...]``.
        dense_size: shape of the whole, as a list.
    """

    def __init__(self, dense_tensor: Tensor | None = None) -> None:
        self.orig_dense_tensor = dense_tensor
        self.indices: Tensor | None = None
        self.values: Tensor | None = None
        self.dense_size: list[int] | None = None
        if dense_tensor is None:
            return
        self.is_sparse = dense_tensor.is_sparse
        self.dtype = dense_tensor.dtype
        self.dense_size = list(dense_tensor.size())
        if self.is_sparse:
            rows = dense_tensor.coalesce()
            self.indices, self.values = rows.indices().flatten(), rows.values()
        else:
            self.indices = dense_tensor.flatten(1).any(dim=1).nonzero().flatten()
            self.values = dense_tensor[self.indices]

    def to_dense(self) -> Tensor:
        """The whole; rows that are there twice add up."""
        indices, values, size = self._held()
        return values.new_zeros(size).index_add_(0, indices, values)

    def to_coo_tensor(self) -> Tensor:
        """As a sparse tensor of torch; rows that are there twice add up when it is made dense."""
        indices, values, size = self._held()
        return torch.sparse_coo_tensor(indices.unsqueeze(0), values, size)

    @staticmethod
    def type() -> str:
        """The name of the type, as DeepSpeed has it."""
        return "deepspeed.SparseTensor"

    def sparse_size(self) -> tuple[int, int]:
        """Numbers that are kept, indices included, and elements of the whole."""
        indices, values, size = self._held()
        return indices.numel() + values.shape[0] * values.shape[1], size[0] * size[1]

    def add(self, b: SparseTensor) -> None:
        """Put the rows of ``b`` behind these.

        Raises:
            AssertionError: the shapes of the whole differ.
        """
        if self.dense_size != b.dense_size:
            raise AssertionError(f"rows of a {b.dense_size} tensor cannot be added to those of a {self.dense_size} one")
        indices, values, _ = self._held()
        more_indices, more_values, _ = b._held()
        self.indices, self.values = torch.cat([indices, more_indices]), torch.cat([values, more_values])

    def _held(self) -> tuple[Tensor, Tensor, list[int]]:
        if self.indices is None or self.values is None or self.dense_size is None:
            raise AttributeError("this SparseTensor is empty: set its indices, values and dense_size")
        return self.indices, self.values, self.dense_size

    def __repr__(self) -> str:
        if self.indices is None:
            return "SparseTensor(empty)"
        indices, values, size = self._held()
        kept, whole = self.sparse_size()
        return (
            f"DeepSpeed.SparseTensor(indices_size={indices.size()}, values_size={values.size()}, dense_size={size}, "
            f"device={indices.get_device()}, reduction_factor={whole / kept})"
        )
