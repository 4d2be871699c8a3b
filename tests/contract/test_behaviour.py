"""What a training loop may do, against the same loop in plain torch: accumulation, optimizers, groups, schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hf import Engine, initialize
from tests.helpers.distributed import run_distributed
from tests.helpers.models import TinyLM, token_batches
from tests.helpers.parity import Outcome, base_config, full_weights, sgd, train_both, weight_error

STAGES = (0, 1, 2, 3)
TOLERANCE = 1e-5
SGD = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}
SMOOTH = {"lr": 1e-2, "eps": 1e-4}  # Adam amplifies rounding where gradients are near zero


def model() -> TinyLM:
    torch.manual_seed(1)
    return TinyLM(vocab=19, width=12, depth=2)


def tokens(steps: int, gas: int) -> Tensor:
    return token_batches(steps, gas, dist.get_world_size(), 2, 6, vocab=19)


def call(engine: Any, batch: Tensor) -> Tensor:
    return engine(batch)


def run_all(*functions: Callable[[int], Outcome]) -> dict[str, float]:
    """The worst error of each scenario and stage, one process start for all."""
    worst = {}
    for function in functions:
        for stage in STAGES:
            print("case", function.__name__, stage)
            worst[f"{function.__name__}-{stage}"] = function(stage).worst
    return worst


def check(world: int, *functions: Callable[[int], Outcome], tolerance: float = TOLERANCE) -> None:
    for worst in run_distributed(run_all, world, *functions, timeout=110):
        assert not {case: error for case, error in worst.items() if not error < tolerance}


# -- backward ------------------------------------------------------------------------------------------------------


def several_backwards(stage: int) -> Outcome:
    """Two losses of one forward each, two backwards, one step."""

    def halves(engine: Engine, loss: Tensor) -> None:
        engine.backward(loss * 0.25, retain_graph=True)
        engine.backward(loss * 0.75)

    return train_both(model(), call, tokens(2, 2), base_config(stage, optimizer=SGD), reference_optimizer=sgd,
                      backwards=halves, same="several")  # fmt: skip


def two_forwards(stage: int) -> Outcome:
    """Both losses are computed before either goes backward."""
    pending: list[Tensor] = []

    def loss(engine: Any, batch: Tensor) -> Tensor:
        first = engine(batch[:1])
        pending.append(first)
        return first + engine(batch[1:])

    def separately(engine: Engine, loss: Tensor) -> None:
        engine.backward(loss, retain_graph=True)
        engine.backward(pending[-1] * 0.0)

    return train_both(model(), loss, tokens(2, 1), base_config(stage, optimizer=SGD), reference_optimizer=sgd,
                      backwards=separately)  # fmt: skip


def unscaled(stage: int) -> Outcome:
    """The caller divides, as the Trainer does."""

    def backward(engine: Engine, loss: Tensor) -> None:
        engine.backward(loss / 3, scale_wrt_gas=False)

    return train_both(model(), call, tokens(2, 3), base_config(stage, optimizer=SGD), reference_optimizer=sgd,
                      backwards=backward, same="unscaled")  # fmt: skip


def raw_backward(stage: int) -> Outcome:
    """``loss.backward()``, not the engine's: divided by the accumulation steps all the same."""

    def backward(engine: Engine, loss: Tensor) -> None:
        loss.backward()

    return train_both(model(), call, tokens(2, 2), base_config(stage, optimizer=SGD), reference_optimizer=sgd,
                      backwards=backward, same="raw")  # fmt: skip


def clipped(stage: int) -> Outcome:
    return train_both(model(), call, tokens(3, 2), base_config(stage, optimizer=SGD, gradient_clipping=0.05),
                      reference_optimizer=sgd, same="clipped")  # fmt: skip


@pytest.mark.parametrize("world", [1, 2])
def test_backwards(world: int) -> None:
    check(world, several_backwards, two_forwards, unscaled, raw_backward, clipped)


def forced_boundaries(stage: int) -> Outcome:
    """Groups of 3, 1 and 4 micro-batches in a configuration of 2, divided by the caller."""
    reference, trained = model(), model()
    theirs = sgd(reference)
    engine, *_ = initialize(model=trained, config=base_config(stage, optimizer=SGD, gradient_accumulation_steps=2))
    rank, world = dist.get_rank(), dist.get_world_size()
    for length, group in zip((3, 1, 4), tokens(3, 4), strict=True):
        theirs.zero_grad()
        for index, micro in enumerate(group[:length]):
            for share in micro:
                (reference(share) / world / length).backward()
            engine.set_gradient_accumulation_boundary(index == length - 1)
            assert engine.is_gradient_accumulation_boundary() == (index == length - 1)
            engine.backward(engine(micro[rank]) / length, scale_wrt_gas=False)
            before = engine.global_steps
            engine.step()
            assert engine.global_steps == before + (index == length - 1)
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), float("inf"))
        theirs.step()
        assert engine.get_global_grad_norm() == pytest.approx(float(norm), rel=1e-5)
    assert engine.micro_steps == 8
    error = weight_error(trained, reference)
    engine.destroy()
    return Outcome(error, 0.0, 0.0)


@pytest.mark.parametrize("world", [1, 2])
def test_boundaries_set_by_the_caller(world: int) -> None:
    check(world, forced_boundaries)


# -- optimizers ----------------------------------------------------------------------------------------------------


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """The usual split: matrices decay, vectors do not; the embedding has its own rate."""
    decay = [p for n, p in model.named_parameters() if p.dim() > 1 and "embedding" not in n]
    plain = [p for n, p in model.named_parameters() if p.dim() <= 1]
    tables = [p for n, p in model.named_parameters() if "embedding" in n]
    return [
        {"params": decay, "weight_decay": 0.3},
        {"params": plain, "weight_decay": 0.0, "lr": 3e-3},
        {"params": tables, "weight_decay": 0.1, "lr": 1e-3},
    ]


class Halving(torch.optim.Optimizer):
    """A third-party rule with one moment, made in the constructor."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["running"] = torch.zeros_like(param)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    running = self.state[param]["running"]
                    running.mul_(0.5).add_(param.grad)
                    param.add_(running, alpha=-group["lr"])


class TunedAdamW(torch.optim.AdamW):
    """A subclass, which is not known to be elementwise."""


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw_groups": lambda m: torch.optim.AdamW(groups_of(m), **SMOOTH),
    "adam_amsgrad": lambda m: torch.optim.Adam(m.parameters(), amsgrad=True, **SMOOTH),
    "sgd_nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.02, initial_accumulator_value=0.1, eps=1e-3),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3, eps=1e-3, momentum=0.5),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), **SMOOTH),
    "third_party": lambda m: Halving(m.parameters()),
    "subclass": lambda m: TunedAdamW(groups_of(m), **SMOOTH),
}


class Made:
    """Makes the optimizer over the model that the engine gets, as a user does before ``initialize``."""

    takes_model = True

    def __init__(self, make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        self.make = make

    def __call__(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.make(model)


def optimizer_errors(names: list[str], stages: tuple[int, ...]) -> dict[str, float]:
    worst = {}
    for name in names:
        make = OPTIMIZERS[name]
        for stage in stages:
            print("case", name, stage)
            outcome = train_both(model(), call, tokens(3, 1), base_config(stage, optimizer=None, gradient_clipping=1.0),
                                 reference_optimizer=make, optimizer=Made(make), same=name)  # fmt: skip
            worst[f"{name}-{stage}"] = outcome.worst
    return worst


@pytest.mark.parametrize("world", [1, 2])
def test_optimizers_given_as_objects(world: int) -> None:
    for worst in run_distributed(optimizer_errors, world, list(OPTIMIZERS), STAGES, timeout=110):
        assert not {case: error for case, error in worst.items() if not error < TOLERANCE}


OPTIMIZERS_WHOLE = {"adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=1e-2)}


def adafactor_errors(stages: tuple[int, ...]) -> dict[int, float]:
    make = OPTIMIZERS_WHOLE["adafactor"]
    return {
        stage: train_both(model(), call, tokens(3, 1), base_config(stage, optimizer=None),
                          reference_optimizer=make, optimizer=Made(make), same="adafactor").worst
        for stage in stages
    }  # fmt: skip


def test_rules_over_whole_tensors_get_whole_tensors() -> None:
    """Exact wherever a rank has whole parameters: one process, or replicated optimizer states."""
    for world, stages in ((1, STAGES), (2, (0,))):
        for worst in run_distributed(adafactor_errors, world, stages, timeout=60):
            assert max(worst.values()) < TOLERANCE


def callable_and_json(stage: int) -> Outcome:
    """The same rule by name, as a function of parameters, and as groups with names in ``model_parameters``."""
    by_name = base_config(stage, optimizer={"type": "AdamW", "params": {**SMOOTH, "weight_decay": 0.01}})

    def theirs(m: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(m.parameters(), **SMOOTH, weight_decay=0.01)

    worst = [train_both(model(), call, tokens(2, 1), by_name, reference_optimizer=theirs, same="json")]
    worst.append(
        train_both(model(), call, tokens(2, 1), base_config(stage, optimizer=None), reference_optimizer=theirs,
                   same="json", optimizer=lambda params: torch.optim.AdamW(params, **SMOOTH, weight_decay=0.01))
    )  # fmt: skip
    trained = model()
    grouped = base_config(stage, optimizer={"type": "adamw", "params": {**SMOOTH, "torch_adam": True}})
    worst.append(
        train_both(trained, call, tokens(2, 1), grouped, model_parameters=groups_of(trained),
                   reference_optimizer=lambda m: torch.optim.AdamW(groups_of(m), **SMOOTH), same="groups")
    )  # fmt: skip
    return Outcome(*(max(column) for column in zip(*worst, strict=True)))


@pytest.mark.parametrize("world", [1, 2])
def test_optimizers_by_name_and_by_function(world: int) -> None:
    check(world, callable_and_json)


# -- schedules -----------------------------------------------------------------------------------------------------


def linear(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (step + 1))


def rates(stage: int) -> dict[str, list[float]]:
    """Learning rates used in four steps, with the scheduler as function, object, by name, and stepped by the user."""
    seen: dict[str, list[float]] = {}
    for way in ("function", "object", "on the engine's optimizer", "by name"):
        trained = model()
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.8)
        config = base_config(stage, optimizer=None)
        kwargs: dict[str, Any] = {}
        if way == "function":
            kwargs["lr_scheduler"] = linear
        elif way == "object":
            kwargs["lr_scheduler"] = linear(optimizer)
        elif way == "by name":
            params = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.8, "warmup_num_steps": 4, "warmup_type": "linear"}
            config["scheduler"] = {"type": "WarmupLR", "params": params}
        engine, returned, _, scheduler = initialize(model=trained, optimizer=optimizer, config=config, **kwargs)
        own = linear(returned) if way.startswith("on") else None
        assert (scheduler is None) == (own is not None)
        before = full_weights(trained)["norm.weight"]
        for batch in tokens(4, 1):
            engine.backward(engine(batch[0, dist.get_rank()]))
            used = engine.get_lr()[0]
            engine.step()
            if own is not None:
                own.step()
            seen.setdefault(way, []).append(used)
        assert not torch.equal(before, full_weights(trained)["norm.weight"])
        engine.destroy()
    return seen


def all_rates() -> list[dict[str, list[float]]]:
    return [rates(stage) for stage in (0, 3)]


def test_schedulers_drive_the_rates_that_the_update_uses() -> None:
    for seen in run_distributed(all_rates, 2, timeout=60)[0]:
        expected = [0.8, 0.4, 0.8 / 3, 0.2]
        for way in ("function", "object", "on the engine's optimizer"):
            assert seen[way] == pytest.approx(expected), way
        assert seen["by name"] == pytest.approx([0.0, 0.0, 0.2, 0.4])


# -- parameters that a step does not reach ----------------------------------------------------------------------------


class PartlyUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[2](self.blocks[0](x)).square().mean()


def unused(stage: int) -> Outcome:
    """A block and a parameter never used: without decay they keep their values, the rest trains on."""
    torch.manual_seed(2)
    data = torch.randn(3, 2, dist.get_world_size(), 4, 5)
    return train_both(PartlyUsed(), call, data, base_config(stage, optimizer=SGD), reference_optimizer=sgd)


@pytest.mark.parametrize("world", [1, 2])
def test_unused_parameters(world: int) -> None:
    check(world, unused)


def mismatch() -> float:
    def slower(m: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(m.parameters(), lr=0.0499, momentum=0.9)

    return train_both(model(), call, tokens(3, 1), base_config(2, optimizer=SGD), reference_optimizer=slower).weights


def test_the_comparison_can_fail() -> None:
    """A learning rate 0.2 % off is far outside of the tolerance."""
    assert run_distributed(mismatch, 1, timeout=60)[0] > 10 * TOLERANCE
