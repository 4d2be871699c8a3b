"""What compressed layers have in common: their masks, bits and ranges, and what a weight is in forward.

A method is prepared first (``enable_*``, DeepSpeed's names), and acts while its switch (``weight_quantization_enabled``
and so on) is on, which the schedule sets. Order: weights are quantized, then masked, so zeros are exact.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ds_hf.compression.quantizers import (
    AsymQuantizer,
    BinaryQuantizer,
    SymQuantizer,
    TernaryQuantizer,
    TopKBinarizer,
    count_kept,
    kept_mask,
)
from ds_hf.engine.zero.buffer import logical_shape
from ds_hf.errors import ConfigError

__all__ = ["Compressed", "QuantAct", "pack", "quantizer_of", "unpack"]

_QUANTIZERS: dict[str, Any] = {"symmetric": SymQuantizer, "asymmetric": AsymQuantizer}
_binarizer: Any = TopKBinarizer


def quantizer_of(bits: int, kind: str) -> Any:
    """The quantizer of so many bits; ``kind`` is "symmetric" or "asymmetric"."""
    if bits < 3:
        if kind != "symmetric":
            raise ConfigError(f"{bits} bits have values around zero alone: choose symmetric quantization")
        return BinaryQuantizer if bits == 1 else TernaryQuantizer
    return _QUANTIZERS[kind]


class QuantAct(nn.Module):
    """Quantizes its input by a running range.

    Args:
        act_range_momentum: what is kept of the range when a new one is seen.
        quant_mode: "symmetric" or "asymmetric".
        by_steps: what is seen is gathered until ``update`` is called; else each call in training mode updates.

    Attributes:
        x_min_max: ``[2]``, fp32: the range; equal values where none was seen.
        seen: ``[2]``, fp32: minus the least, and the largest value since the last ``update``.
    """

    x_min_max: Tensor
    seen: Tensor

    def __init__(self, act_range_momentum: float = 0.95, quant_mode: str = "symmetric", by_steps: bool = False) -> None:
        super().__init__()
        self.act_range_momentum = act_range_momentum
        self.quant_mode, self.by_steps = quant_mode, by_steps
        self.act_function: Any = _QUANTIZERS[quant_mode]
        self.register_buffer("x_min_max", torch.zeros(2, dtype=torch.float32))
        self.register_buffer("seen", torch.full((2,), -math.inf, dtype=torch.float32), persistent=False)

    def observe(self, x: Tensor) -> None:
        """Take the range of ``x`` (any shape) into account."""
        x = x.detach()
        self.seen.copy_(torch.maximum(self.seen, torch.stack([-x.amin(), x.amax()]).float()))

    def update(self, seen: Tensor) -> None:
        """The range moves towards ``seen``, as the attribute of that name; nothing where that is of no input."""
        new = torch.stack([-seen[0], seen[1]])
        low, high = self.x_min_max.float().unbind()
        old = torch.where(low == high, new, self.x_min_max.float())
        moved = self.act_range_momentum * old + (1 - self.act_range_momentum) * new
        self.x_min_max.copy_(torch.where(torch.isfinite(new).all(), moved, self.x_min_max.float()))
        self.seen.fill_(-math.inf)

    def forward(self, x: Tensor, num_bits: int, *args: Any) -> Tensor:
        """``x`` in ``num_bits``; as it is while no range is known."""
        if self.training:
            self.observe(x)
            if not self.by_steps:
                self.update(self.seen)
        low, high = self.x_min_max.unbind()
        quantized: Tensor = self.act_function.apply(x, num_bits, low, high, 1)
        return torch.where(low == high, x, quantized)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _draw(like: Tensor, layer: Compressed) -> Tensor:
    """Noise in [0, 1) that follows from a layer's name and the step: the same on all processes, and when a block is
    computed again. Compilers see neither, as graphs are shared by layers and steps."""
    generator = torch.Generator(like.device).manual_seed(zlib.crc32(f"{layer.full_name} {layer.step}".encode()))
    return torch.rand(like.shape, generator=generator, device=like.device, dtype=torch.float32)


def pack(mask: Tensor) -> Tensor:
    """A bool mask of any shape as bits: uint8, ``[ceil(numel / 8)]``, the first bit lowest, filled up with ones."""
    flat = functional.pad(mask.flatten().to(torch.uint8), (0, -mask.numel() % 8), value=1).view(-1, 8)
    places = torch.arange(8, device=mask.device, dtype=torch.uint8)
    return (flat << places).sum(dim=1, dtype=torch.uint8)


def unpack(bits: Tensor, shape: torch.Size) -> Tensor:
    """The bool mask of ``shape`` that was packed."""
    places = torch.arange(8, device=bits.device, dtype=torch.uint8)
    return ((bits[:, None] >> places) & 1).flatten()[: shape.numel()].view(shape).bool()


class Compressed(nn.Module):
    """What compressed layers have in common.

    Attributes:
        weight_quantization_enabled and so on: whether a method acts.
        weight_bits: of the weights now.
        mixed: how much of the way to quantized values is left, 1 to 0, a tensor ``[]``; ``None`` for none.
        step: that the engine is in, for rounding by chance.
        recomputes: what is made of the weight is not kept for backward, but made again: where weights are gathered for
            use and released, copies of all layers would be the whole model.
        sparse_pruning_mask: packed bits of the mask of single weights, see ``pack``.
        row_pruning_mask, head_pruning_mask, channel_pruning_mask: bool, ``[rows]``, ``[heads]``, ``[channels]``.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    sparse_pruning_mask: Tensor
    activation_quantizer: QuantAct
    full_name = ""
    out_dim: ClassVar[int] = 0  # of the weight
    plain: ClassVar[type[nn.Module]]  # the class that it had
    weight_quantization_enabled = activation_quantization_enabled = False
    sparse_pruning_enabled = row_pruning_enabled = head_pruning_enabled = channel_pruning_enabled = False
    weight_bits = 0
    weight_quantize_num_groups = 1
    mixed: Tensor | None = None
    step = 0
    recomputes = False

    # -- preparing ------------------------------------------------------------------------------------------------

    def enable_weight_quantization(
        self,
        start_bits: int,
        target_bits: int,
        quantization_period: int = 0,
        weight_quantization_enabled_in_forward: bool = True,
        quantization_type: str = "symmetric",
        num_groups: int = 1,
        *,
        stochastic: bool = False,
    ) -> None:
        """Prepare quantized weights: ``start_bits`` at first, ``num_groups`` stretches with a scale each.

        Raises:
            ConfigError: the stretches do not divide the weight.
        """
        total = logical_shape(self.weight).numel()
        if total % num_groups:
            raise ConfigError(f"{self._told()} has {total} weights, which {num_groups} groups do not divide")
        quantizer_of(target_bits, quantization_type)
        self.weight_bits, self.target_bits, self.quantization_period = start_bits, target_bits, quantization_period
        self.weight_quantization_type, self.weight_quantize_num_groups = quantization_type, num_groups
        self.rounds_by_chance = stochastic

    def enable_activation_quantization(
        self,
        bits: int,
        quantization_type: str = "symmetric",
        range_calibration: str = "dynamic",
        *,
        by_steps: bool = False,
    ) -> None:
        """Prepare quantized inputs."""
        self.activation_bits, self.activation_quantization_type = bits, quantization_type
        self.has_static_range = range_calibration == "static"
        if self.has_static_range:
            self.activation_quantizer = QuantAct(quant_mode=quantization_type, by_steps=by_steps)

    def enable_sparse_pruning(self, ratio: float, method: str, *, pattern: tuple[int, int] | None = None) -> None:
        """Prepare a mask of single weights, ``pattern`` (kept, of so many neighbours)."""
        shape = logical_shape(self.weight)
        if pattern is not None and self._inputs() % pattern[1]:
            raise ConfigError(f"{self._told()} has {self._inputs()} inputs, which {pattern[1]} does not divide")
        self.sparse_pruning_ratio, self.sparse_pruning_method, self.sparse_pruning_pattern = ratio, method, pattern
        if method == "topk":
            self._add_scores("sparse_mask_scores", tuple(shape))
        else:
            bits = torch.full(((shape.numel() + 7) // 8,), 255, dtype=torch.uint8, device=self.weight.device)
            self.register_buffer("sparse_pruning_mask", bits)

    def enable_row_pruning(self, ratio: float, method: str) -> None:
        """Prepare a mask of outputs."""
        self._enable_masks("row", ratio, method, self._outputs())

    def enable_head_pruning(self, ratio: float, method: str, num_heads: int) -> None:
        """Prepare a mask of heads, which this layer, the one after attention, reads."""
        if self._inputs() % num_heads:
            raise ConfigError(f"{self._told()} reads {self._inputs()} values, which {num_heads} heads do not divide")
        self.num_heads = num_heads
        self._enable_masks("head", ratio, method, num_heads)

    def enable_channel_pruning(self, ratio: float, method: str) -> None:
        """Prepare a mask of a convolution's outputs."""
        self._enable_masks("channel", ratio, method, self._outputs())

    def _enable_masks(self, what: str, ratio: float, method: str, size: int) -> None:
        setattr(self, f"{what}_pruning_ratio", ratio)
        setattr(self, f"{what}_pruning_method", method)
        if method == "topk":
            self._add_scores(f"{what}_mask_scores", (1, size))
        else:
            mask = torch.ones(size, dtype=torch.bool, device=self.weight.device)
            self.register_buffer(f"{what}_pruning_mask", mask)

    def _add_scores(self, name: str, shape: tuple[int, ...]) -> None:
        """Scores that train, from the same draw on all processes."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.full_name} {name}".encode()))
        bound = 1 / math.sqrt(max(math.prod(shape[1:]), 1))
        values = torch.rand(shape, generator=generator, dtype=torch.float32) * (2 * bound) - bound
        scores: Any = nn.Parameter(values.to(self.weight.device))
        scores.use_muon = False  # they are no matrix, whatever their shape
        self.register_parameter(name, scores)

    def _told(self) -> str:
        return self.full_name or f"a {type(self).__name__}"

    def _outputs(self) -> int:
        return logical_shape(self.weight)[self.out_dim]

    def _inputs(self) -> int:
        shape = logical_shape(self.weight)
        return shape.numel() // shape[self.out_dim]

    # -- masks ----------------------------------------------------------------------------------------------------

    def has_scores(self, what: str) -> bool:
        """Whether the mask of ``what`` (sparse, row, head, channel) follows scores that train."""
        return f"{what}_mask_scores" in self._parameters

    def keeps_more(self, what: str, ratio: float) -> bool:
        """Whether the mask of ``what`` (of magnitudes, not of scores) leaves more than ``ratio`` says: it is not yet
        that share's, whenever it was made or loaded. Waits for the device."""
        kept = self.mask_of(what)
        pattern = self.sparse_pruning_pattern if what == "sparse" and ratio < 1 else None
        share = ratio if pattern is None else pattern[0] / pattern[1]
        return int(kept.sum()) > count_kept(share, kept.numel())

    @torch.no_grad()
    def choose_mask(self, what: str, ratio: float | None = None) -> None:
        """Fill the mask of ``what`` by the magnitudes of the whole weight, which has to be there.

        Args:
            ratio: that is kept, in place of the prepared one. What is masked already stays so.
        """
        weight = self._matrix(self.weight.detach()).abs().float()
        share = getattr(self, f"{what}_pruning_ratio") if ratio is None else ratio
        if what == "sparse":
            weight = weight * unpack(self.sparse_pruning_mask, weight.shape)
            if self.sparse_pruning_pattern is not None:
                kept, size = self.sparse_pruning_pattern
                order = weight.reshape(-1, size).sort(dim=1, descending=True, stable=True).indices
                mask = torch.zeros(order.shape, dtype=torch.bool, device=order.device)
                mask.scatter_(1, order[:, :kept], True)
            else:
                mask = kept_mask(weight, count_kept(share, weight.numel()))
            self.sparse_pruning_mask.copy_(pack(mask))
            return
        if what == "head":
            weight = weight.reshape(weight.shape[0], self.num_heads, -1).transpose(0, 1)
        sums = weight.flatten(1).sum(dim=1) * self.mask_of(what).view(-1)
        getattr(self, f"{what}_pruning_mask").copy_(kept_mask(sums, count_kept(share, sums.numel())))

    def mask_of(self, what: str) -> Tensor:
        """The mask of ``what``: in the shape of ``_matrix`` for single weights, else ``[1, size]``; bool, or of the
        scores' dtype, with their gradient."""
        scores = getattr(self, f"{what}_mask_scores", None)
        if scores is not None:
            mask: Tensor = _binarizer.apply(scores, getattr(self, f"{what}_pruning_ratio"), False)
            return self._matrix(mask) if what == "sparse" else mask
        if what == "sparse":
            return unpack(self.sparse_pruning_mask, self._matrix_shape())
        found: Tensor = getattr(self, f"{what}_pruning_mask")
        return found.view(1, -1)

    def _matrix(self, weight: Tensor) -> Tensor:
        """The weight as ``[outputs, ...]``."""
        return weight

    def _matrix_shape(self) -> torch.Size:
        return logical_shape(self.weight)

    # -- computing ------------------------------------------------------------------------------------------------

    def computed(self, compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """``compute(x)``; recomputed in backward where nothing of the weight is to be kept until then."""
        again = self.recomputes and self._acts() and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if not again:
            return compute(x)
        return checkpoint(compute, x, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]

    def _acts(self) -> bool:
        return (
            self.weight_quantization_enabled
            or self.sparse_pruning_enabled
            or self.row_pruning_enabled
            or self.head_pruning_enabled
            or self.channel_pruning_enabled
        )

    def compressed(self) -> tuple[Tensor, Tensor | None]:
        """Weight, as ``[outputs, ...]``, and bias, as forward computes with them."""
        weight, bias = self._matrix(self.weight), getattr(self, "bias", None)
        if self.weight_quantization_enabled:
            weight = self._quantized(weight)
        if self.sparse_pruning_enabled:
            weight = weight * self.mask_of("sparse").to(weight.dtype)
        if self.row_pruning_enabled or self.channel_pruning_enabled:
            what = "row" if self.row_pruning_enabled else "channel"
            mask = self.mask_of(what).to(weight.dtype)
            weight = weight * mask.view(-1, *(1 for _ in weight.shape[1:]))
            bias = None if bias is None else bias * mask.view(-1)
        if self.head_pruning_enabled:
            mask = self.mask_of("head").to(weight.dtype).view(1, self.num_heads, 1)
            weight = (weight.reshape(weight.shape[0], self.num_heads, -1) * mask).reshape(weight.shape)
        return weight, bias

    def _quantized(self, weight: Tensor) -> Tensor:
        noise = None
        if self.rounds_by_chance and self.training:
            noise = _draw(weight, self)
        quantizer = quantizer_of(self.weight_bits, self.weight_quantization_type)
        values: Tensor = quantizer.apply(weight, self.weight_bits, None, None, self.weight_quantize_num_groups, noise)
        return values if self.mixed is None else (values + (weight - values) * self.mixed).to(weight.dtype)

    def quantized_input(self, x: Tensor) -> Tensor:
        """``x``, ``[..., features]``, as forward computes with it."""
        if not self.activation_quantization_enabled or x.numel() == 0:  # an expert without tokens
            return x
        if self.has_static_range:
            values: Tensor = self.activation_quantizer(x, self.activation_bits)
            return values
        groups = x.numel() // x.shape[-1]
        quantizer = quantizer_of(self.activation_bits, self.activation_quantization_type)
        by_token: Tensor = quantizer.apply(x, self.activation_bits, None, None, groups)
        return by_token
