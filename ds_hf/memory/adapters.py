"""What a user asks of a model that is only named: adapters to train, and a base in few bits. No values anywhere.

bitsandbytes keeps 4 bytes for 64 weights beside 4 bits each, as the engine's own blocks do: these stand for both.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_hf.engine.modules.quantized.format import WeightFormat
from ds_hf.engine.modules.quantized.layers import QuantizedWeight, quantize_layers
from ds_hf.memory.prediction import UnpredictableError

__all__ = ["LoraRequest", "add_lora", "bits_of_options", "count_parameters", "load_in"]

_LORA = "--lora r=16,targets=q_proj,v_proj (targets are all linear layers by default; dora=true)"
_OF_ROWS = 4096  # LLM.int8 has a scale a row


@dataclass(frozen=True)
class LoraRequest:
    """Attributes:
    rank: of the adapters. targets: ends of the names of layers; none for all linear ones but the last.
    dora: weights are decomposed.
    """

    rank: int = 16
    targets: tuple[str, ...] = ()
    dora: bool = False

    @classmethod
    def parse(cls, text: str) -> LoraRequest:
        """``"r=16,targets=q_proj,v_proj"``, ``"16"`` or ``""``.

        Raises:
            UnpredictableError: it is something else.
        """
        values: dict[str, list[str]] = {}
        key = "r"
        for word in filter(None, (word.strip() for word in text.split(","))):
            name, equals, value = word.partition("=")
            key, value = (name.strip(), value.strip()) if equals else (key, word)
            values.setdefault(key, []).append(value)
        rank, targets, dora = values.pop("r", ["16"]), values.pop("targets", []), values.pop("dora", ["false"])
        if values or len(rank) != 1 or not rank[0].isdecimal() or int(rank[0]) < 1 or dora[-1] not in ("true", "false"):
            raise UnpredictableError(f"--lora {text}: write {_LORA}")
        return cls(int(rank[0]), () if targets == ["all-linear"] else tuple(targets), dora == ["true"])

    def __str__(self) -> str:
        targets = f",targets={','.join(self.targets)}" if self.targets else ""
        return f"r={self.rank}{targets}{',dora=true' if self.dora else ''}"


def add_lora(model: nn.Module, asked: LoraRequest) -> nn.Module:
    """PEFT's adapters on ``model``, which alone train.

    Raises:
        UnpredictableError: there is no PEFT, or it has no adapters for the model.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise UnpredictableError(f"--lora needs the package peft: pip install 'ds-hf[adapters]' ({error})") from error
    targets = list(asked.targets) or "all-linear"
    try:
        task = "CAUSAL_LM" if hasattr(model, "prepare_inputs_for_generation") else None  # encoders do not generate
        config = LoraConfig(r=asked.rank, target_modules=targets, use_dora=asked.dora, task_type=task)
        with warnings.catch_warnings():  # of names that transformers will give up
            warnings.simplefilter("ignore")
            # Without values also while they are made, as the model's: numbers for a rank of 100,000 took minutes.
            without_values = all(param.is_meta for param in model.parameters())
            adapted: nn.Module = get_peft_model(model, config, low_cpu_mem_usage=without_values)
    except (ValueError, AttributeError, RuntimeError, NotImplementedError) as error:
        raise UnpredictableError(f"--lora {asked}: {' '.join(str(error).split())}") from error
    return adapted.train()


def load_in(model: nn.Module, bits: int, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The linear layers of ``model`` in few bits, all but the last, as ``from_pretrained`` loads them quantized.

    Args:
        dtype: in which they compute.
    """
    own: Any = model
    head = own.get_output_embeddings() if hasattr(own, "get_output_embeddings") else None
    form = WeightFormat(4, 64) if bits == 4 else WeightFormat(8, _OF_ROWS)

    def choose(name: str, module: nn.Module) -> WeightFormat | None:
        return form if isinstance(module, nn.Linear) and module is not head else None

    for param in model.parameters():
        param.requires_grad_(False)
    quantize_layers(model, choose, dtype)
    setattr(model, f"is_loaded_in_{bits}bit", True)  # PEFT asks before it makes fp32 of all others
    return model


def bits_of_options(given: Any) -> int | None:
    """Of a ``quantization_config``, an object or its dict: 4 or 8; ``None`` for others."""
    values = given if isinstance(given, Mapping) else vars(given)
    flags = {name.lstrip("_"): value for name, value in values.items()}
    if flags.get("load_in_4bit"):
        return 4
    if flags.get("load_in_8bit"):
        return 8
    bits = flags.get("bits", flags.get("nbits"))
    return bits if bits in (4, 8) else None


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """(all, those that train), of layers in few bits the weights that they stand for."""
    packed = {
        id(module._parameters["weight"]): module._ds_shape[0] * module._ds_shape[1]
        for module in model.modules()
        if isinstance(module, QuantizedWeight)
    }
    counts = [(packed.get(id(param), param.numel()), param.requires_grad) for param in model.parameters()]
    return sum(count for count, _ in counts), sum(count for count, trains in counts if trains)
