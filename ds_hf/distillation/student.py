"""A student whose loss is the distilled one: hooks around a model of transformers.

Invariants
- The teacher computes without gradients, in evaluation mode, once a forward of the student, and is no part of it: not
  of its parameters, checkpoints or engine.
- In evaluation mode, and without gradients, the student gives what it gave before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ds_hf.deepspeed_api.sequence.division import division_of
from ds_hf.distillation.losses import attention_loss, hidden_loss, logits_loss
from ds_hf.distillation.recipe import PROJECTIONS, Recipe, fitting_layers, is_causal
from ds_hf.distillation.teacher import names_of_inputs, run_teacher
from ds_hf.engine.zero.buffer import home_of
from ds_hf.errors import ConfigError
from ds_hf.log import warn_once

__all__ = ["Distilled", "distill"]

_UNUSED = 16  # forwards whose loss nothing went back from, after which that is told


@dataclass(eq=False)
class Distilled:
    """A student whose loss is the distilled one, until ``remove``.

    Attributes:
        layers: which layer learns from which.
        parts: the last forward's losses by name, without their weights; fp32 ``[]``, detached.
    """

    student: nn.Module
    teacher: Any
    recipe: Recipe
    layers: Mapping[int, int]
    shift: bool
    parts: dict[str, Tensor] = field(default_factory=dict)
    _handles: list[Any] = field(default_factory=list)
    _unused: int = 0  # forwards since a gradient came back to a loss

    def remove(self) -> None:
        """Make the student what it was, without the projections; before it is written for others."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.student._modules.pop(PROJECTIONS, None)

    # -- hooks around the student --------------------------------------------------------------------------------------

    def _learns(self) -> bool:
        return self.student.training and torch.is_grad_enabled()

    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if not self._learns():
            return None
        if division_of(self.student) is not None:
            raise ConfigError("a teacher reads whole sequences, and processes divide them: distill without Ulysses")
        if kwargs.get("return_dict") is False:
            raise ValueError("distillation reads the student's outputs by name: leave return_dict out")
        if args:
            kwargs = {**dict(zip(names_of_inputs(type(module)), args, strict=False)), **kwargs}
        return (), {**kwargs, **self._asks()}

    def _asks(self) -> dict[str, Any]:
        hidden, attention = bool(self.recipe.hidden), bool(self.recipe.attention)
        return {
            **({"output_hidden_states": True} if hidden else {}),
            **({"output_attentions": True} if attention else {}),
        }

    def _after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any) -> Any:
        if not self._learns():
            return None
        given = {name: value for name, value in kwargs.items() if name not in _OF_THE_LOSS}
        theirs = run_teacher(self.teacher, given)
        loss = self._loss(outputs, theirs, kwargs)
        outputs["loss"] = loss
        if loss.requires_grad:
            self._watch(loss)
        self._tell_balance(outputs)
        return outputs

    def _watch(self, loss: Tensor) -> None:
        """Tell where the distilled loss gets no gradient: a trainer may compute its own from the logits."""
        if self._unused == _UNUSED:
            warn_once(
                f"the distilled loss of {_UNUSED} forwards got no gradient: the trainer computes a loss of its own "
                "(label_smoothing_factor, compute_loss_func, ...), and the student learns nothing from the teacher. "
                "Train by outputs.loss"
            )
        self._unused += 1
        loss.register_hook(self._used)  # type: ignore[no-untyped-call]

    def _used(self, grad: Tensor) -> None:
        self._unused = 0

    def _tell_balance(self, outputs: Any) -> None:
        if not self.recipe.labels and outputs.get("aux_loss") is not None:
            warn_once(
                "the balance of the student's experts (aux_loss) is part of its own loss, whose weight is 0: experts "
                "are not balanced. Give labels a weight, or add the balance to outputs.loss"
            )

    def _loss(self, outputs: Any, theirs: Any, kwargs: Mapping[str, Any]) -> Tensor:
        recipe, items = self.recipe, kwargs.get("num_items_in_batch")
        shift = self.shift and not isinstance(kwargs.get("shift_labels"), Tensor)
        rows, shifted = _masks(kwargs, shift)
        parts: dict[str, Tensor] = {}
        if recipe.logits:
            ours, logits = outputs.logits, theirs.logits
            if ours.dim() == 2:  # of whole sequences: there are no positions to leave out
                shifted = None
            elif shift:
                ours, logits = ours[:, :-1], logits[:, :-1]
            parts["logits"] = logits_loss(
                ours, logits, shifted, temperature=recipe.temperature, beta=recipe.beta, num_items=items
            )
        share: Tensor | float = 1.0
        if items is not None and isinstance(_labels(kwargs), Tensor) and not _has_token_labels(kwargs):
            share, items = len(outputs.logits) / items, None  # items are sequences, and states are of positions
        if recipe.hidden:
            found = [
                hidden_loss(self._projected(number, ours), other, rows, kind=recipe.hidden_kind, num_items=items)
                for number, (ours, other) in enumerate(self._pairs(outputs, theirs, "hidden_states"))
            ]
            parts["hidden"] = torch.stack(found).mean() * share
        if recipe.attention:
            found = [
                attention_loss(ours, other, rows, kind=recipe.attention_kind, num_items=items)
                for ours, other in self._pairs(outputs, theirs, "attentions")
            ]
            parts["attention"] = torch.stack(found).mean() * share
        if recipe.labels:
            if outputs.get("loss") is None:
                raise ValueError("labels have a weight, and the student computed no loss of them: pass labels")
            parts["labels"] = outputs["loss"]
        self.parts = {name: part.detach() for name, part in parts.items()}
        weighted = [getattr(recipe, name) * part for name, part in parts.items()]
        return torch.stack([part.reshape(()) for part in weighted]).sum()

    def _pairs(self, outputs: Any, theirs: Any, name: str) -> list[tuple[Tensor, Tensor]]:
        first = int(name == "hidden_states")  # the first of these are the embeddings
        ours, others = outputs.get(name), theirs.get(name)
        if not ours or not others or ours[-1] is None or others[-1] is None:
            raise ValueError(
                f"the {'teacher' if ours else 'student'} gives no {name}"
                + (': load it with attn_implementation="eager"' if name == "attentions" else "")
            )
        return [(ours[one + first], others[other + first]) for one, other in self.layers.items()]

    def _projected(self, number: int, state: Tensor) -> Tensor:
        projections = self.student._modules.get(PROJECTIONS)
        if isinstance(projections, nn.ModuleList):
            layer = projections.get_submodule(str(number))
            if not layer.get_parameter("weight").requires_grad:
                raise ConfigError(
                    "projections of hidden states would not train, as something has frozen them: with PEFT call "
                    "distill() of the model that get_peft_model() gives"
                )
            if home_of(layer.get_parameter("weight")) is None and any(
                home_of(param) for param in self.student.parameters()
            ):
                raise ConfigError(
                    "projections of hidden states would not train: call distill() before initialize(), or the Trainer"
                )
            made: Tensor = layer(state)
            return made
        if isinstance(self.recipe.projection, Tensor):
            return functional.linear(state.float(), self.recipe.projection.to(state.device, torch.float32))
        return state


def distill(student: nn.Module, teacher: Any, recipe: Recipe | None = None, **fields: Any) -> Distilled:
    """Let ``student`` give the distilled loss while it trains; call it before ``initialize``.

    Args:
        student: a model of transformers; where widths differ it gets a submodule ``distillation``.
        teacher: a model, or an engine without optimizer, at any stage (``teacher_engine``).
        recipe: or its fields, as keywords.

    Returns:
        a handle, with the parts of the last loss, and ``remove()``.

    Raises:
        ConfigError: the two do not fit together, before anything is computed.
    """
    if recipe is not None and fields:
        raise ConfigError("give a recipe, or its fields, and not both")
    recipe = Recipe(**fields) if recipe is None else recipe
    model = getattr(teacher, "module", teacher)
    if model is student:
        raise ConfigError("the student is its own teacher: load the teacher as a model of its own")
    if getattr(teacher, "optimizer", None) is not None:
        raise ConfigError("the teacher's engine trains: build it without optimizer, see teacher_engine()")
    if PROJECTIONS in student._modules or any(_of(hook) for hook in student._forward_hooks.values()):
        raise ConfigError("the student is distilled already: call remove() of what distill() returned")
    layers = fitting_layers(student, model, recipe)
    shift = is_causal(student) if recipe.shift is None else recipe.shift
    found = Distilled(student, teacher, recipe, layers, shift)
    found._handles = [
        student.register_forward_pre_hook(found._before, with_kwargs=True),
        student.register_forward_hook(found._after, with_kwargs=True),
    ]
    return found


def _of(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), Distilled)


_OF_THE_LOSS = ("labels", "shift_labels", "num_items_in_batch")


def _labels(kwargs: Mapping[str, Any]) -> Any:
    shifted = kwargs.get("shift_labels")
    return shifted if isinstance(shifted, Tensor) else kwargs.get("labels")


def _has_token_labels(kwargs: Mapping[str, Any]) -> bool:
    labels = _labels(kwargs)
    return isinstance(labels, Tensor) and labels.dim() == 2 and not labels.is_floating_point()


def _masks(kwargs: Mapping[str, Any], shift: bool) -> tuple[Tensor | None, Tensor | None]:
    """Positions whose states count, and whose logits do: those of labels that are not ignored, or else all that are
    no padding."""
    attention = kwargs.get("attention_mask")
    mask = attention if isinstance(attention, Tensor) and attention.dim() == 2 else None
    if not _has_token_labels(kwargs):
        return mask, mask if mask is None or not shift else mask[:, 1:]
    counted = _labels(kwargs).ne(-100)
    if not shift:
        return counted, counted
    states = torch.zeros_like(counted)
    states[:, :-1] = counted[:, 1:]  # of the positions that predict what counts
    return states, counted[:, 1:]
