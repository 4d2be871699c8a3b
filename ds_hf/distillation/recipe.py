"""What a student is to learn, and whether it can of this teacher."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from ds_hf.errors import ConfigError

__all__ = ["PROJECTIONS", "Recipe", "fitting_layers", "is_causal", "spread"]

PROJECTIONS = "distillation"  # name of the submodule that a student gets where widths differ


def spread(student: int, teacher: int) -> dict[int, int]:
    """Layers of a student of so many layers -> those of a teacher, evenly, the last by the last."""
    if not 0 < student <= teacher:
        raise ConfigError(f"{student} layers cannot be spread over {teacher}: give layers={{of student: of teacher}}")
    return {layer: (layer + 1) * teacher // student - 1 for layer in range(student)}


@dataclass(frozen=True)
class Recipe:
    """Weights of the losses, and how they are computed; a weight of 0 leaves one out.

    Attributes:
        logits: of ``logits_loss``.
        labels: of the loss that the student computes of its labels.
        hidden: of ``hidden_loss``, a mean over ``layers``.
        attention: of ``attention_loss``, a mean over ``layers``; both models need ``attn_implementation="eager"``.
        layers: layer of the student -> layer of the teacher, both from 0; default ``spread``.
        projection: ``"learned"``: where widths differ, the student's hidden states go through a linear layer for each
            pair that trains with the student (``student.distillation``). Else a matrix ``[teacher's width, student's
            width]`` that is not trained.
        shift: position ``i`` of the logits is for the label at ``i + 1``; default as the student is a causal language
            model or not.
    """

    logits: float = 1.0
    labels: float = 0.0
    hidden: float = 0.0
    attention: float = 0.0
    temperature: float = 1.0
    beta: float = 0.0
    layers: Mapping[int, int] | None = None
    hidden_kind: Literal["mse", "cosine"] = "mse"
    attention_kind: Literal["mse", "kl"] = "mse"
    projection: Literal["learned"] | Tensor = "learned"
    shift: bool | None = None

    def __post_init__(self) -> None:
        weights = {name: getattr(self, name) for name in ("logits", "labels", "hidden", "attention")}
        for name, value in weights.items():
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name}={value}: a weight is a number that is not negative")
        if not any(weights[name] for name in ("logits", "hidden", "attention")):
            raise ConfigError("nothing of the teacher is learned: give logits, hidden or attention a weight")
        for name, known in (("hidden_kind", ("mse", "cosine")), ("attention_kind", ("mse", "kl"))):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name}={getattr(self, name)!r}: it is {' or '.join(known)}")
        if not isinstance(self.projection, Tensor) and self.projection != "learned":
            raise ConfigError(f'projection={self.projection!r}: it is "learned", or a matrix')
        if not self.temperature > 0:
            raise ConfigError(f"temperature={self.temperature}: it is more than 0 (2 to 4 are usual)")
        if not 0 <= self.beta <= 1:
            raise ConfigError(f"beta={self.beta}: it is between 0, KL(teacher | student), and 1, KL(student | teacher)")


def fitting_layers(student: nn.Module, teacher: nn.Module, recipe: Recipe) -> Mapping[int, int]:
    """Which layer of ``student`` learns from which of ``teacher``; the student gets the projections that it needs.

    Raises:
        ConfigError: the two do not fit together.
    """
    ours, theirs = _text_config(student, "student"), _text_config(teacher, "teacher")
    if recipe.logits:
        _check_vocabulary(ours, theirs)
        _check_classes(student, teacher)
    if recipe.attention:
        _check_attention(student, "student")
        _check_attention(teacher, "teacher")
    if not recipe.hidden and not recipe.attention:
        return {}
    layers = _checked_layers(recipe, ours, theirs)
    if recipe.hidden:
        _set_projections(student, recipe, layers, ours, theirs)
    return layers


def _text_config(model: nn.Module, who: str) -> Any:
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise ConfigError(
            f"the {who} is no model of transformers: use logits_loss() and hidden_loss() in your own loop"
        )
    return config.get_text_config()


def _check_vocabulary(ours: Any, theirs: Any) -> None:
    sizes = [getattr(config, "vocab_size", None) for config in (ours, theirs)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"the student has {sizes[0]} tokens and the teacher {sizes[1]}: logits are compared token by token. "
            "Take a teacher with the student's tokenizer, resize_token_embeddings() the smaller one, or learn hidden "
            "states alone (logits=0, hidden=1)"
        )


def _check_classes(student: nn.Module, teacher: nn.Module) -> None:
    counts = [getattr(model.config, "num_labels", None) for model in (student, teacher)]
    if "Classification" in type(student).__name__ and counts[0] != counts[1]:
        raise ConfigError(
            f"the student has {counts[0]} classes and the teacher {counts[1]}: give both the same num_labels"
        )


def _checked_layers(recipe: Recipe, ours: Any, theirs: Any) -> Mapping[int, int]:
    counts = [int(config.num_hidden_layers) for config in (ours, theirs)]
    layers = spread(*counts) if recipe.layers is None else dict(recipe.layers)
    if not layers:
        raise ConfigError("layers={}: no layer learns; leave it out, or give {of student: of teacher}")
    for pair in layers.items():
        for who, layer, count in zip(("student", "teacher"), pair, counts, strict=True):
            if not 0 <= layer < count:
                raise ConfigError(f"layers has layer {layer} of the {who}, which has 0 to {count - 1}")
    return layers


def _check_attention(model: nn.Module, who: str) -> None:
    how = getattr(model.config, "_attn_implementation", None)
    if how not in (None, "eager"):
        raise ConfigError(
            f'attention maps exist with attn_implementation="eager" alone, and the {who} has {how!r}: load it so, or '
            "set attention=0"
        )


def _set_projections(student: nn.Module, recipe: Recipe, layers: Mapping[int, int], ours: Any, theirs: Any) -> None:
    widths = ours.hidden_size, theirs.hidden_size
    if isinstance(recipe.projection, Tensor):
        if tuple(recipe.projection.shape) != (widths[1], widths[0]):
            raise ConfigError(
                f"the projection is {list(recipe.projection.shape)}, and the student's {widths[0]} columns become the "
                f"teacher's {widths[1]} by one of {[widths[1], widths[0]]}"
            )
    elif widths[0] != widths[1]:
        like = next(student.parameters())
        made = [nn.Linear(*widths, bias=False, device=like.device, dtype=like.dtype) for _ in layers]
        student.add_module(PROJECTIONS, nn.ModuleList(made))


def is_causal(model: nn.Module) -> bool:
    return getattr(getattr(model, "loss_function", None), "__name__", "") == "ForCausalLMLoss" or (
        "CausalLM" in type(model).__name__
    )
