"""A linear layer in tiles: each tile is a module of its own, so stage 3 gathers them one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ds_hf.engine.zero.gather import GatheredParameters

__all__ = ["TiledLinear", "TiledLinearReturnBias"]


class TiledLinear(nn.Module):
    """``nn.Linear`` cut into ``out_splits`` x ``in_splits`` tiles.

    Args:
        in_features, out_features, bias: as of ``nn.Linear``.
        in_splits, out_splits: number of tiles along each dim; a split that does not come out even leaves tiles whose
            sizes differ by one.
        input_is_already_split: forward takes a list, one tensor a column of tiles.
        combine_out_splits: forward returns one tensor, not a list.
        linear_cls: class of the tiles; ``kwargs`` go to it.
        init_linear: a whole layer whose weights the tiles take.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Any = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, splits, features in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise RuntimeError(f"{name}_splits is {splits}, and there are {features} {name}_features to split")
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_parts, self.out_parts = _bounds(in_features, in_splits), _bounds(out_features, out_splits)
        # Bias belongs to one tile of a row: their outputs are added up.
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(
                    self.in_parts[column + 1] - self.in_parts[column],
                    self.out_parts[row + 1] - self.out_parts[row],
                    bias=bias and column == in_splits - 1,
                    **kwargs,
                )
                for column in range(in_splits)
            )
            for row in range(out_splits)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        """``[..., in_features]`` to ``[..., out_features]``."""
        if not self.input_is_already_split:
            widths = [high - low for low, high in zip(self.in_parts, self.in_parts[1:], strict=False)]
            input_ = torch.split(input_, widths, dim=-1)
        if len(input_) != self.in_splits:
            raise RuntimeError(f"the input has {len(input_)} parts, and the layer {self.in_splits} columns of tiles")
        rows = [self._row(tiles, input_) for tiles in self._rows()]
        return self._combine(rows)

    def _rows(self) -> list[list[Any]]:
        return [list(row) for row in self.linears if isinstance(row, nn.ModuleList)]

    def _row(self, tiles: Sequence[nn.Module], parts: Sequence[Tensor]) -> Any:
        return sum(tile(part) for tile, part in zip(tiles[1:], parts[1:], strict=True)) + tiles[0](parts[0])

    def _combine(self, rows: list[Any]) -> Any:
        return torch.cat(rows, dim=-1) if self.combine_out_splits else rows

    @torch.no_grad()
    def copy_params_from(self, other: nn.Module) -> None:
        """Take the weights of a whole layer; sharded parameters on either side are gathered for it."""
        weight, bias = other.weight, other.bias
        assert isinstance(weight, Tensor)
        if (bias is not None) != self.use_bias:
            raise RuntimeError("one of the two layers has a bias and the other does not")
        with GatheredParameters([p for p in (weight, bias) if isinstance(p, Tensor)]):
            if tuple(weight.shape) != (self.out_features, self.in_features):
                raise RuntimeError(
                    f"the layer to copy has weights of shape {tuple(weight.shape)}, "
                    f"not {(self.out_features, self.in_features)}"
                )
            for row, tiles in enumerate(self._rows()):
                low, high = self.out_parts[row], self.out_parts[row + 1]
                for column, tile in enumerate(tiles):
                    with GatheredParameters(list(tile.parameters()), modifier_rank=0):
                        left, right = self.in_parts[column], self.in_parts[column + 1]
                        tile.weight.copy_(weight[low:high, left:right])
                        if tile.bias is not None and isinstance(bias, Tensor):
                            tile.bias.copy_(bias[low:high])


class TiledLinearReturnBias(TiledLinear):
    """For tiles that return their output and their bias apart, as Megatron's layers do."""

    def _row(self, tiles: Sequence[nn.Module], parts: Sequence[Tensor]) -> Any:
        found = [tile(part) for tile, part in zip(tiles, parts, strict=True)]
        biases = [bias for _, bias in found if bias is not None]
        return sum(output for output, _ in found), (sum(biases) if biases else None)

    def _combine(self, rows: list[Any]) -> Any:
        outputs, biases = [output for output, _ in rows], [bias for _, bias in rows]
        if not self.combine_out_splits:
            return outputs, biases
        return torch.cat(outputs, dim=-1), None if biases[0] is None else torch.cat(biases, dim=-1)


def _bounds(features: int, splits: int) -> list[int]:
    length, longer = divmod(features, splits)
    return [part * length + min(part, longer) for part in range(splits + 1)]
