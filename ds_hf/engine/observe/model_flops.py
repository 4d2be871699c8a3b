"""How much arithmetic a token of training takes, and how much of the device's rate that is: MFU.

Model FLOPs utilisation as in PaLM (Chowdhery et al. 2022, appendix B): a token takes ``6 N + 12 L H Q T`` operations,
with ``N`` parameters in matrix products, ``L`` layers, ``H Q`` the width of all heads and ``T`` tokens in a sequence;
what is computed a second time (checkpointing) does not count. Weights that do not train take ``4``, for they have no
gradient of their own.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_hf.engine.events import Observer, Phase
from ds_hf.engine.observe.monitor.late import LateCopy, later
from ds_hf.engine.zero.buffer import home_of, logical_shape

if TYPE_CHECKING:
    from ds_hf.engine.engine import CoreEngine

__all__ = ["ModelFlops", "Tokens", "count_tokens", "matrix_rate"]

# Dense rates of the data sheets, operations a second in 16 bits; the longest name that fits counts.
_PEAKS = {
    "B200": 2250e12, "GB200": 2500e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12,
    "H800": 989e12, "H20": 148e12, "GH200": 989e12, "A100": 312e12, "A800": 312e12, "A40": 150e12, "A10": 125e12,
    "A6000": 155e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12, "V100": 125e12, "T4": 65e12, "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}  # fmt: skip
_NARROW = (torch.bfloat16, torch.float16)
_SIZE, _SECONDS = 512, 0.02  # of the product by which an unknown device is measured


@dataclass(frozen=True)
class ModelFlops:
    """Of what this process computes of a model.

    Attributes:
        matrices: operations a token in products with weights, forward and backward.
        attention: the same for each token of the sequence, in attention.
    """

    matrices: float
    attention: float

    @classmethod
    def of(cls, model: nn.Module) -> ModelFlops:
        """Counted from the parameters of at least two dimensions; of embeddings, those that are a head too."""
        heads, tables = {}, set()
        for module in model.modules():
            for param in module.parameters(recurse=False):
                if isinstance(module, nn.Embedding):
                    tables.add(id(param))
                elif len(_shape(param)) > 1:
                    heads[id(param)] = param
        tied = getattr(model, "get_output_embeddings", None)
        head = tied() if callable(tied) else None
        if isinstance(head, nn.Module):
            heads.update({id(param): param for param in head.parameters() if len(_shape(param)) > 1})
        share = _experts_share(model)
        total = 0.0
        for name, param in model.named_parameters():
            if id(param) in heads:
                active = share if ".experts." in f".{name}." else 1.0
                total += _shape(param).numel() * active * (6 if param.requires_grad else 4)
        return cls(total, _attention(model))

    def of_step(self, tokens: float, samples: float) -> float:
        """Operations for ``tokens`` of ``samples`` sequences of about the same length."""
        return tokens * (self.matrices + self.attention * tokens / max(samples, 1))


def _shape(param: nn.Parameter) -> torch.Size:
    return logical_shape(param) if home_of(param) is not None else param.shape


def _experts_share(model: nn.Module) -> float:
    """Which part of its experts a token goes through."""
    config = getattr(model, "config", None)
    chosen = getattr(config, "num_experts_per_tok", None)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((getattr(config, name) for name in names if getattr(config, name, None)), None)
    return chosen / experts if isinstance(chosen, int) and isinstance(experts, int) and experts else 1.0


def _attention(model: nn.Module) -> float:
    config: Any = getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    names = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    layers, heads, width = (getattr(config, name, 0) for name in names)
    if not (isinstance(layers, int) and isinstance(heads, int) and isinstance(width, int) and heads):
        return 0.0
    each = getattr(config, "head_dim", None)
    return 12.0 * layers * heads * (each if isinstance(each, int) else width // heads)


@cache
def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second in matrix products of ``dtype``: the data sheet's, or measured for a device not listed."""
    if device.type == "cuda" and dtype in _NARROW:
        name = torch.cuda.get_device_name(device)
        known = max((each for each in _PEAKS if each in name), key=len, default=None)
        if known is not None:
            return _PEAKS[known]
    with torch.no_grad():
        size = _SIZE if device.type == "cpu" else 8 * _SIZE
        one = torch.ones(size, size, dtype=dtype, device=device)
        out, best, until = one @ one, 0.0, time.perf_counter() + _SECONDS
        while True:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            begun = time.perf_counter()
            torch.mm(one, one, out=out)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            ended = time.perf_counter()
            best = max(best, 2 * size**3 / max(ended - begun, 1e-9))
            if ended > until:
                return best


def count_tokens(args: Any, kwargs: Any) -> Any:
    """Tokens of a micro-batch: those that ``attention_mask`` does not hide, or all of ``input_ids``; ``None`` where
    inputs have neither and are no integers of ``[samples, positions]``. On a GPU it may be a tensor."""
    mask = kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        total = mask.sum()
        return total if total.is_cuda else int(total)
    for value in (kwargs.get("input_ids"), *args, *kwargs.values()):
        if (
            isinstance(value, torch.Tensor)
            and value.dim() == 2
            and not (value.is_floating_point() or value.is_complex())
        ):
            return value.numel()
    return None


class Tokens(Observer):
    """Counts the tokens that ``engine`` trains with, and knows what they take."""

    def __init__(self, engine: CoreEngine) -> None:
        self._counts = list[Any]()
        self._flops: ModelFlops | None = None
        self._module = weakref.ref(engine.module)
        dtype = engine.compute_dtype or next((p.dtype for p in engine.module.parameters()), torch.float32)
        self._device, self._dtype = engine.device, dtype
        self._same = engine.mesh.shape.data * engine.mesh.shape.sequence
        self._engine = weakref.ref(engine)

    def on_phase(self, name: Phase, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Count those of a forward that trains."""
        engine = self._engine()
        if name != "forward" or engine is None or not engine.training or not torch.is_grad_enabled():
            return
        if (found := count_tokens(args, kwargs)) is not None:
            self._counts.append(later(found))

    def drop(self) -> None:
        """Count from here on."""
        self._counts.clear()

    def said(self, seconds: float, samples: float) -> str:
        """Tokens a second of all processes, and this one's share of its matrix rate; empty where inputs have none."""
        counts, self._counts = self._counts, []
        tokens = sum(each.item() if isinstance(each, LateCopy) else each for each in counts)
        module = self._module()
        if not tokens or module is None:
            return ""
        self._flops = self._flops or ModelFlops.of(module)
        rate = self._flops.of_step(tokens, samples / self._same) / seconds / matrix_rate(self._device, self._dtype)
        return f", {tokens * self._same / seconds:,.5g} tokens/s, MFU {rate:.1%}"
