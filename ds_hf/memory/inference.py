"""What a model takes that only generates: weights, cache, and what a prompt needs beside them, without a GPU.

Weights and cache follow from shapes: those of the parameters, in the format that ``init_inference`` would keep them in,
and those of the keys and values that one token leaves. What a prompt needs is its own cache, which the static one is
filled from, or the widest layer's inputs and outputs, whichever is more.

Loading begins with the whole model in host memory, in the dtype that it computes in. Weights that are quantized go to
the device and are packed there layer after layer. Weights that rest in host memory pass through it unit after unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ds_hf.engine.modules.quantized.format import WeightFormat
from ds_hf.engine.ops.triton_launches import launching_nothing
from ds_hf.engine.parallel.tensor.divide import divide_without_values
from ds_hf.engine.zero.planning import make_units
from ds_hf.inference.config import InferenceConfig
from ds_hf.inference.decode import cache_length
from ds_hf.inference.layers import section_for
from ds_hf.inference.static import cache_of
from ds_hf.memory.models import META
from ds_hf.memory.prediction import UnpredictableError
from ds_hf.memory.pricing import CONTEXT
from ds_hf.memory.tracker import LiveTensors

__all__ = ["Need", "cached_bytes", "predict_inference", "quantized_layers"]

_SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Need:
    """What one process takes, in bytes.

    Attributes:
        dtype: of the weights: fp32, bf16, fp16, int8 or int4.
        offload: whether the weights rest in host memory.
        device: by part: weights, cache, prompt, CUDA context.
        host: of weights that rest there.
        loading: the most while the weights are on their way, on the device (without the CUDA context) and in host
            memory.
    """

    dtype: str
    offload: bool
    device: dict[str, int]
    host: int
    loading: dict[str, int]

    @property
    def device_total(self) -> int:
        return sum(self.device.values())

    @property
    def device_peak(self) -> int:
        """The most of the device, while it loads or generates."""
        return max(self.device_total, self.loading["device"] + self.device["CUDA context"])

    @property
    def host_peak(self) -> int:
        """The most of host memory."""
        return max(self.host, self.loading["host"])

    def as_json(self) -> dict[str, Any]:
        total = {"parts": self.device, "total": self.device_total}
        return {
            "dtype": self.dtype,
            "offload": self.offload,
            "device": total,
            "host": self.host,
            "loading": self.loading,
        }


def predict_inference(
    model: nn.Module, dtype: str, *, batch: int, prompt: int, new: int, tp: int = 1, offload: bool = False
) -> Need:
    """What one process takes for ``batch`` prompts of ``prompt`` tokens and ``new`` more.

    Args:
        model: on the meta device, whole; it is divided here.
        dtype: fp32, bf16, fp16, int8 or int4.
        tp: processes that share each layer.
        offload: weights in host memory, by ``zero`` at stage 3.

    Raises:
        ConfigError: layers do not divide.
        UnpredictableError: the model keeps no cache of keys and values.
    """
    size = _SIZES.get(dtype, 2)
    token, encoder = cached_bytes(model, size)
    whole = sum(dict(_weights(model, size, None)).values())
    width = max((max(p.shape) for n, p in model.named_parameters() if p.dim() == 2 and _is_inside(n)), default=0)
    if tp > 1:
        divide_without_values(model, tp, section_for(model, InferenceConfig(tensor_parallel={"tp_size": tp})))
        token, encoder, width = token // tp, encoder // tp, width // tp
    bits = {"int8": 8, "int4": 4}.get(dtype)
    weights = dict(_weights(model, size, bits))
    total = sum(weights.values())
    both = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    positions = new + 1 if both else prompt + new
    cache = batch * (token * cache_length(positions) + encoder * prompt)
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", 0)
    beside = batch * prompt * width * size * 3 + batch * vocabulary * 8
    prompt_bytes = max(beside, batch * token * (0 if both else prompt))
    here = total if not offload else _passing(weights)
    device = {"weights": here, "cache": cache, "prompt": prompt_bytes, "CUDA context": CONTEXT}
    way = 2 * _widest_unit(model, weights) if offload else _packing(model, size, weights)
    return Need(dtype, offload, device, total if offload else 0, {"device": way, "host": whole})


def _is_inside(name: str) -> bool:
    return ".layers." in name or ".h." in name or ".block." in name


def _passing(weights: dict[str, int]) -> int:
    """Of weights that come block by block: the widest block twice, as the next is on its way, and what is in none."""
    blocks: dict[str, int] = {}
    for name, nbytes in weights.items():
        parts = name.split(".")
        number = next((index for index, part in enumerate(parts) if part.isdigit()), None)
        key = name if number is None else ".".join(parts[: number + 1])
        blocks[key] = blocks.get(key, 0) + nbytes
    numbered = [nbytes for key, nbytes in blocks.items() if key.rpartition(".")[2].isdigit()]
    rest = sum(blocks.values()) - sum(numbered)
    return rest + 2 * max(numbered, default=0)


def _packing(model: nn.Module, size: int, weights: dict[str, int]) -> int:
    """The most of the device while layers go there: what is packed, and the next one in both forms."""
    held = most = 0
    for name, module in quantized_layers(model):
        whole = module.get_parameter("weight").numel() * size
        if weights[name] != whole:
            held += weights[name]
            most = max(most, held + whole)
    return max(most, sum(weights.values()))


def _widest_unit(model: nn.Module, weights: dict[str, int]) -> int:
    """Of what travels together, at stage 3: it is laid out in one buffer, and another is made for its gathers."""
    names = {id(param): name for name, param in model.named_parameters()}
    return max(sum(weights[names[id(param)]] for param in unit.params) for unit in make_units(model))


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers whose weights ``init_inference`` would quantize, by the name of the weight."""
    holders: dict[int, int] = {}
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                holders[id(param)] = holders.get(id(param), 0) + 1
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        kind = isinstance(module, nn.Linear | nn.Embedding) or any(c.__name__ == "Conv1D" for c in type(module).__mro__)
        if weight is not None and kind and weight.dim() == 2 and holders[id(weight)] == 1:
            yield f"{name}.weight" if name else "weight", module


def _weights(model: nn.Module, size: int, bits: int | None) -> Iterator[tuple[str, int]]:
    packed = dict(quantized_layers(model)) if bits is not None else {}
    for name, param in model.named_parameters():
        if bits is not None and name in packed:
            rows, columns = param.shape
            yield name, rows * WeightFormat(bits).blocks.nbytes(columns)
        else:
            yield name, param.numel() * (size if param.is_floating_point() else param.element_size())
    for name, buffer in model.named_buffers():
        yield name, buffer.numel() * buffer.element_size()


def cached_bytes(model: Any, size: int) -> tuple[int, int]:
    """Bytes that a position of one sequence takes in the decoder's cache, and a position of the encoder's output.

    Raises:
        UnpredictableError: the model does not generate, does not run without values, or keeps none.
    """
    if not getattr(model, "can_generate", lambda: True)():
        raise UnpredictableError(f"{type(model).__name__} does not generate: --inference is for models that do")
    one = torch.zeros(1, 1, dtype=torch.long, device=META)
    both = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    config = getattr(model, "config", None)
    pad = getattr(config, "pad_token_id", None)
    try:
        if config is not None:
            config.pad_token_id = None  # GPT-2 would look for padding among tokens that have no values
        with torch.no_grad(), launching_nothing(), LiveTensors(lambda *_: None):
            outputs = model.eval()(input_ids=one, use_cache=True, **({"decoder_input_ids": one} if both else {}))
    except Exception as error:  # whatever a model's forward raises of sizes that do not go together
        raise UnpredictableError(
            f"{type(model).__name__} does not run without values (on the meta device): {type(error).__name__}: {error}"
        ) from error
    finally:
        if config is not None:
            config.pad_token_id = pad
    try:
        cache = cache_of(outputs)
        own = getattr(cache, "self_attention_cache", cache)
        cross = getattr(cache, "cross_attention_cache", None)
        return _of_layers(own, size), 0 if cross is None else _of_layers(cross, size)
    except (AttributeError, TypeError, RuntimeError, NotImplementedError) as error:
        raise UnpredictableError(f"{type(model).__name__} keeps no cache of keys and values: {error}") from error


def _of_layers(cache: Any, size: int) -> int:
    tensors: list[Tensor] = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return sum(tensor.numel() for tensor in tensors) * size
