"""Train a model with plain torch and with an engine on the same data, and say how far apart they end.

Invariant: the reference sees every rank's data in one process, with torch's own clipping and optimizer; the engine
sees this rank's part. What is compared are whole weights, as relative distances in the L2 norm, and gradient norms.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hf import Engine, initialize
from ds_hf.engine.zero.gather import GatheredParameters

__all__ = ["Outcome", "adamw", "base_config", "full_weights", "sgd", "train_both", "weight_error"]

LossFn = Callable[[Any, Any], Tensor]
OptimizerFn = Callable[[nn.Module], torch.optim.Optimizer]


class Outcome(NamedTuple):
    """Largest relative error of a weight, of a gradient norm and of a loss over all steps."""

    weights: float
    norms: float
    losses: float

    @property
    def worst(self) -> float:
        return max(self)


def base_config(stage: int, **more: Any) -> dict[str, Any]:
    """The smallest configuration: no clipping, AdamW unless ``optimizer`` is in ``more`` (``None``: none)."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage},
    }
    config.update(more)
    if config["optimizer"] is None:
        del config["optimizer"]
    return config


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """What ``base_config`` asks for, in torch."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.01)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum, whose steps are as small as the gradients: rounding stays rounding."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the whole weights in host memory. Collective."""
    with GatheredParameters(model.parameters()):
        return {name: param.detach().cpu().clone() for name, param in model.named_parameters()}


def weight_error(model: nn.Module, reference: nn.Module) -> float:
    """Largest relative distance of a parameter. Collective."""
    worst = 0.0
    theirs = dict(reference.named_parameters())
    for name, mine in full_weights(model).items():
        other = theirs[name].detach()
        assert mine.shape == other.shape, (name, mine.shape, other.shape)
        if other.numel():
            worst = max(worst, _relative(mine.double().cpu(), other.double().cpu()))
    return worst


def _relative(mine: Tensor, other: Tensor) -> float:
    return float((mine - other).norm() / other.norm().clamp_min(1e-3))  # biases that stay near zero are rounding


class Reference(NamedTuple):
    """A training in plain torch: losses ``[step][micro-batch]`` of this rank's share, norms of each step, the model."""

    losses: list[list[float]]
    norms: list[float]
    model: nn.Module


_references: dict[str, Reference] = {}  # of this process, by the name that the caller gave


def train_both(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Sequence[Sequence[Sequence[Any]]],
    config: dict[str, Any],
    *,
    reference_optimizer: OptimizerFn = adamw,
    optimizer: Any = None,
    backwards: Callable[[Engine, Tensor], None] | None = None,
    each_step: Callable[[nn.Module, int], None] | None = None,
    same: str = "",
    **initialize_kwargs: Any,
) -> Outcome:
    """Train a copy of ``model`` with torch and ``model`` with an engine.

    Args:
        loss_fn: loss of (model or engine, batch).
        batches: ``[step][micro-batch][rank]``; every step is one accumulation.
        optimizer: given to ``initialize`` (a function of the model is called first when it has ``takes_model``).
        backwards: replaces ``engine.backward(loss)``.
        each_step: called with the reference and with the engine's module before each step.
        same: the name of the training in torch, which is done once in this process for all calls that give it: they
            have the same model, data and rule, and differ in what the engine does with them.
    """
    reference = copy.deepcopy(model)
    if optimizer is not None and getattr(optimizer, "takes_model", False):
        optimizer = optimizer(model)
    config = {**config, "gradient_accumulation_steps": len(batches[0])}
    clip = config["gradient_clipping"]
    expected = _references.get(same)
    if expected is None:
        expected = _train_plainly(reference, loss_fn, batches, clip, reference_optimizer, each_step)
        if same:
            _references[same] = expected
    engine, _, _, _ = initialize(model=model, optimizer=optimizer, config=config, **initialize_kwargs)
    norms = losses = 0.0
    for index, (step, values, norm) in enumerate(zip(batches, expected.losses, expected.norms, strict=True)):
        if each_step is not None:
            each_step(model, index)
        for micro, value in zip(step, values, strict=True):
            loss = loss_fn(engine, micro[dist.get_rank()])
            losses = max(losses, abs(float(loss.detach()) - value) / max(abs(value), 1e-6))
            if backwards is None:
                engine.backward(loss)
            else:
                backwards(engine, loss)
            engine.step()
        measured = engine.get_global_grad_norm()
        assert measured is not None
        norms = max(norms, abs(measured - norm) / max(norm, 1e-12))
    error = weight_error(model, expected.model)
    engine.destroy()
    return Outcome(error, norms, losses)


def _train_plainly(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Sequence[Sequence[Sequence[Any]]],
    clip: float,
    make: OptimizerFn,
    each_step: Callable[[nn.Module, int], None] | None,
) -> Reference:
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizer = make(model)
    losses, norms = [], []
    for index, step in enumerate(batches):
        if each_step is not None:
            each_step(model, index)
        optimizer.zero_grad()
        losses.append(list[float]())
        for micro in step:
            shares = [loss_fn(model, batch) for batch in micro]
            for share in shares:
                (share / world / len(step)).backward()
            losses[-1].append(float(shares[rank].detach()))
        trained = [p for g in optimizer.param_groups for p in g["params"]]
        for param in trained:
            if param.grad is not None and param.grad.is_sparse:
                param.grad = param.grad.to_dense()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, clip or float("inf"))))
        optimizer.step()
    return Reference(losses, norms, model)
