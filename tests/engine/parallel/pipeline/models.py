"""Layers for pipelines, and the same computed by plain torch in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_hf.deepspeed_api.pipeline import PipelineModule
from ds_hf.engine.parallel.pipeline.specs import LayerSpec, TiedLayerSpec
from tests.helpers.models import Block, token_batches

VOCAB, WIDTH, DEPTH, SEED = 32, 16, 4, 100


class Embedding(nn.Module):
    def __init__(self, vocab: int = VOCAB, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocab, width) * 0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, WIDTH) * 0.3)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight.t()


class Masked(nn.Module):
    """A block that passes an int mask and a bool mask on beside the hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block(WIDTH)

    def forward(self, inputs: Any) -> Any:
        hidden, counts, mask = inputs
        hidden = self.inner(hidden) * mask.unsqueeze(-1)
        return hidden, counts + mask, mask


def project(module: nn.Module, hidden: Tensor) -> Tensor:
    return hidden @ module.weight.t()  # type: ignore[operator,union-attr]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    wide = logits.float() if logits.dtype.itemsize < 4 else logits
    return F.cross_entropy(wide.flatten(0, 1), labels.flatten())


def specs(tied: bool, depth: int = DEPTH) -> list[Any]:
    blocks = [LayerSpec(Block, WIDTH) for _ in range(depth)]
    if tied:
        return [TiedLayerSpec("embed", Embedding), *blocks, TiedLayerSpec("embed", Embedding, forward_fn=project)]
    return [LayerSpec(Embedding), *blocks, LayerSpec(Head)]


def pipeline(tied: bool = True, stages: int = 2, depth: int = DEPTH, **options: Any) -> PipelineModule:
    """Its layers have the same values whatever the number of stages."""
    options = {"partition_method": "uniform", "loss_fn": cross_entropy, **options}
    module = PipelineModule(specs(tied, depth), num_stages=stages, seed_layers=True, base_seed=SEED, **options)
    module.seed_layers = False
    return module


def plain(tied: bool = True, depth: int = DEPTH, dtype: torch.dtype = torch.float32) -> dict[str, nn.Module]:
    """The same layers by name, without stages."""
    found: dict[str, nn.Module] = {}
    for index, spec in enumerate(specs(tied, depth)):
        torch.manual_seed(SEED + index)
        name = f"tied_modules.{spec.key}" if isinstance(spec, TiedLayerSpec) else str(index)
        if name not in found:
            found[name] = spec.build().to(dtype)
    return found


def logits_of(layers: dict[str, nn.Module], tokens: Tensor) -> Tensor:
    modules = list(layers.values())
    hidden = modules[0](tokens)
    for block in modules[1:] if len(modules) == DEPTH + 1 else modules[1:-1]:
        hidden = block(hidden)
    return project(modules[0], hidden) if len(modules) == DEPTH + 1 else modules[-1](hidden)


def parameters_of(layers: dict[str, nn.Module]) -> dict[str, nn.Parameter]:
    return {f"{name}.{inner}": p for name, layer in layers.items() for inner, p in layer.named_parameters()}


def batches(steps: int, micro_batches: int, pipelines: int = 1, *, lengths: bool = False) -> list[Tensor]:
    """``[micro_batches, pipelines, 2, length]`` tokens of each step."""
    return [
        token_batches(micro_batches, pipelines, 2, 5 + (7 * step) % 11 if lengths else 6, vocab=VOCAB, seed=step)
        for step in range(steps)
    ]


def pairs(tokens: Tensor, place: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Items of one pipeline."""
    return iter([(ids, ids) for ids in tokens[:, place]])
