"""Models of transformers as a sequence of layers: the embedding, each block, the norm, the head.

A stage has the model's own forward with holes: layers of other stages pass their input on.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from ds_hf.errors import ConfigError

__all__ = ["PLAN", "Skip", "Swapped", "is_tied", "keep_shared", "layers_of", "parts_of", "tie", "with_holes"]

PLAN = ("embed_tokens", "layers", "norm")  # of most decoders
_WHERE = "PipelineModule.from_transformers(...)"


class Skip(nn.Module):
    """Stands for what another stage has: passes hidden states on."""

    _ds_elsewhere = True  # so the rules of tensor parallelism that name it are for that stage

    def __init__(self, like: nn.Module | None = None) -> None:
        super().__init__()
        kind = getattr(like, "attention_type", None)  # some models choose the mask by it
        if kind is not None:
            self.attention_type = kind

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


def parts_of(model: Any) -> tuple[Any, str | None]:
    """The base model, whose plan is that of most decoders, and the name of the head.

    Raises:
        ConfigError: the plan is another, or there is none.
    """
    base = model.base_model
    plan = getattr(model.config.get_text_config(), "base_model_pp_plan", None) or {}
    fits = tuple(plan) == PLAN and all(hasattr(base, name) for name in PLAN)
    if not fits:
        found = f"its base_model_pp_plan is {', '.join(plan)}" if plan else "it has no base_model_pp_plan"
        raise ConfigError(
            f"{type(model).__name__}: {found}, and not {', '.join(PLAN)}: write its layers as LayerSpecs", _WHERE
        )
    others = [(name, child) for name, child in model.named_children() if child is not base]
    heads = [name for name, child in others if any(True for _ in child.parameters())]
    known = set(getattr(model, "_pp_plan", None) or ())
    if len(heads) > 1 or not set(heads) <= known:
        raise ConfigError(f"{', '.join(heads)} of {type(model).__name__} are in no plan for pipelines", _WHERE)
    return base, heads[0] if heads else None


def layers_of(model: Any) -> list[nn.Module]:
    """The layers that are divided over the stages, in order.

    Raises:
        ConfigError: as ``parts_of``.
    """
    base, head = parts_of(model)
    return [base.embed_tokens, *base.layers, base.norm, *([getattr(model, head)] if head else ())]


def is_tied(model: Any, head: str) -> bool:
    """Whether the head has the weight of the embedding."""
    embedding, output = model.base_model.embed_tokens.weight, getattr(model, head).weight
    if embedding is output:
        return True
    return bool(embedding.is_meta and model.config.get_text_config().tie_word_embeddings)


def tie(embedding: Any, head: Any) -> None:
    """The head computes with the embedding's weight, which making values may have taken apart.

    Adapters around them hold it in a layer inside, and where they do it was never apart: they come with a model.
    """
    if head.weight is not embedding.weight:
        head.weight = embedding.weight


def keep_shared(embedding: nn.Module, head: nn.Module) -> None:
    """Of an embedding that is here for the head alone: an adapter of it would stay as it was, under a name that trains
    on the first stage."""
    shared = {id(param) for param in (*head.parameters(), getattr(embedding, "weight", None))}
    for module in embedding.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if id(param) not in shared:
                delattr(module, name)


def with_holes(blocks: list[nn.Module], norm: nn.Module, here: Collection[int]) -> tuple[nn.ModuleList, nn.Module]:
    """Blocks and norm, where those whose layers are not ``here`` pass on; the first block is layer 1."""
    kept = [block if index in here else Skip(block) for index, block in enumerate(blocks, 1)]
    return nn.ModuleList(kept), norm if len(blocks) + 1 in here else Skip()


class Swapped:
    """Inside, the model has these blocks and this norm."""

    def __init__(self, base: nn.Module, blocks: nn.ModuleList, norm: nn.Module) -> None:
        self.base, self.inside = base, {"layers": blocks, "norm": norm}

    def __enter__(self) -> None:
        self.before = {name: self.base._modules[name] for name in self.inside}
        self.base._modules.update(self.inside)

    def __exit__(self, *error: object) -> None:
        self.base._modules.update(self.before)
