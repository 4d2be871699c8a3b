"""The engine's life: errors in the middle, evaluation, several engines, destroy and start again, bad input."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hf import Engine, initialize
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.errors import ConfigError, DsHfError
from ds_hf.log import forget_said, logger
from tests.engine.zero.zoo import WIDTH, Layer, Stack, mean_square
from tests.helpers.distributed import run_distributed
from tests.helpers.logs import Lines
from tests.helpers.parity import base_config, full_weights, sgd, weight_error

STAGES = (0, 1, 2, 3)
SGD = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}


def make(stage: int, model: nn.Module | Callable[[], nn.Module] = Stack, **more: Any) -> Engine:
    torch.manual_seed(11)
    model = model if isinstance(model, nn.Module) else model()
    return initialize(model=model, config=base_config(stage, optimizer=SGD, **more))[0]


def batch(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator)


def train(engine: Engine, steps: int, seed: int = 0) -> None:
    for index in range(steps):
        engine.backward(mean_square(engine(batch(seed + index))))
        engine.step()


def weights(engine: Engine) -> Tensor:
    return torch.cat([w.flatten() for w in full_weights(engine.module).values()])


def every_stage(*scenarios: Callable[[int], None]) -> None:
    for scenario in scenarios:
        for stage in STAGES:
            print("case", scenario.__name__, stage)
            scenario(stage)


def untouched(stage: int) -> Tensor:
    engine = make(stage)
    train(engine, 3)
    return weights(engine)


# -- interruptions -------------------------------------------------------------------------------------------------


class Fails(Stack):
    """Raises where it is told to."""

    where = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.inlet(x))
        if self.where == "forward":
            raise ValueError("in forward")
        x = self.blocks[2](self.blocks[1](x))
        if self.where == "backward":
            x.register_hook(self._fail)
        if self.where == "late in backward":
            self.inlet.weight.register_hook(self._fail)
        return self.outlet(x)

    def _fail(self, grad: Tensor) -> None:
        if self.where:
            raise torch.OutOfMemoryError("no memory")


def failures(stage: int) -> None:
    """After an exception the next step is as if nothing had happened."""
    engine = make(stage, Fails)
    model: Any = engine.module
    for index, where in enumerate(("forward", "backward", "late in backward")):
        model.where = where
        with pytest.raises((ValueError, torch.OutOfMemoryError)):
            engine.backward(mean_square(engine(batch(50))))
        model.where = ""
        train(engine, 1, index)
    assert torch.equal(weights(engine), untouched(stage))


def raw_failure(stage: int) -> None:
    """The same with ``loss.backward()``."""
    engine = make(stage, Fails)
    model: Any = engine.module
    model.where = "backward"
    with pytest.raises(torch.OutOfMemoryError):
        mean_square(engine(batch(50))).backward()
    model.where = ""
    train(engine, 3)
    assert torch.equal(weights(engine), untouched(stage))


def evaluation(stage: int) -> None:
    """Evaluation of all kinds between steps, and a forward that is dropped, change nothing."""
    engine = make(stage)
    for index in range(3):
        engine.eval()
        with torch.no_grad():
            first = engine(batch(7))
        with torch.inference_mode():
            second = engine(batch(7))
        third = engine.module(batch(7))  # with a graph, never used
        assert torch.equal(first, second)
        assert torch.equal(first, third)
        engine.train()
        train(engine, 1, index)
    assert torch.equal(weights(engine), untouched(stage))


def cleared(stage: int) -> None:
    """``optimizer.zero_grad()`` drops an accumulation; ``engine.zero_grad()`` and ``model.zero_grad()`` do not. Each is
    told, and neither where a loop calls it after the step, or has one micro-batch in each."""
    engine = make(stage, gradient_accumulation_steps=2)
    assert engine.optimizer is not None
    for clear, what in ((engine.optimizer.zero_grad, "has dropped"), (engine.zero_grad, "keeps")):
        forget_said()
        logger.addHandler(lines := Lines())
        clear()
        engine.backward(mean_square(engine(batch(60))) * 0)
        assert not lines.texts, lines.texts
        clear()
        logger.removeHandler(lines)
        told = [text for text in lines.texts if f"zero_grad() within an accumulation {what} the gradients" in text]
        assert len(told) == (dist.get_rank() == 0), lines.texts
        engine.optimizer.zero_grad()
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(mean_square(engine(batch(60))), scale_wrt_gas=False)
    engine.step()
    engine.optimizer.zero_grad()
    engine.set_gradient_accumulation_boundary(True)
    for index in range(3):
        engine.backward(mean_square(engine(batch(index))), scale_wrt_gas=False)
        engine.zero_grad()
        engine.module.zero_grad()
        engine.step()
    assert torch.equal(weights(engine), untouched(stage))


@pytest.mark.parametrize("world", [1, 2])
def test_interruptions(world: int) -> None:
    run_distributed(every_stage, world, failures, raw_failure, evaluation, cleared, timeout=100)


# -- several engines, and one after the other ----------------------------------------------------------------------


def teacher_and_student(stage: int) -> None:
    """A teacher without an optimizer, sharded, beside a student that trains; the same as with a plain teacher."""
    torch.manual_seed(3)
    plain = Stack()
    teacher, nothing, _, _ = initialize(model=copy.deepcopy(plain), config=base_config(3, optimizer=None))
    assert nothing is None
    with pytest.raises(DsHfError, match="no optimizer"):
        teacher.step()
    results = []
    for target in (plain, teacher):
        engine = make(stage)
        for index in range(3):
            with torch.no_grad():
                wanted = target(batch(index))
            engine.backward((engine(batch(index)) - wanted).square().mean())
            engine.step()
        results.append(weights(engine))
        engine.destroy()
    assert torch.equal(*results)
    assert weight_error(teacher.module, plain) == 0.0


def through_a_frozen_engine(stage: int) -> None:
    """Gradients flow through an engine without an optimizer (a reward model) into one that trains."""
    torch.manual_seed(3)
    reference_student, reference_judge = nn.Linear(WIDTH, WIDTH), Stack()
    student = make(stage, copy.deepcopy(reference_student))
    judge, *_ = initialize(model=copy.deepcopy(reference_judge), config=base_config(stage, optimizer=None))
    optimizer = sgd(reference_student)
    for index in range(2):
        student.backward(mean_square(judge(student(batch(index)))))
        student.step()
        optimizer.zero_grad()
        for rank in range(dist.get_world_size()):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * index + rank))
            (mean_square(reference_judge(reference_student(x))) / dist.get_world_size()).backward()
        optimizer.step()
    assert weight_error(student.module, reference_student) < 1e-5
    assert weight_error(judge.module, reference_judge) == 0.0


@pytest.mark.parametrize("world", [1, 2])
def test_engines_side_by_side(world: int) -> None:
    run_distributed(every_stage, world, teacher_and_student, through_a_frozen_engine, timeout=100)


def one_after_the_other() -> None:
    """A model trained at each stage in turn ends as one trained at one stage (SGD without momentum)."""
    plain = {"type": "SGD", "params": {"lr": 0.05}}
    results = []
    for order in ((0, 0, 0, 0, 0), (3, 1, 0, 2, 3)):
        torch.manual_seed(11)
        model = Stack()
        for index, stage in enumerate(order):
            engine, *_ = initialize(model=model, config=base_config(stage, optimizer=plain))
            assert engine.module is model
            train(engine, 2, index)
            last = weights(engine)
            engine.destroy()
            engine.destroy()
            with pytest.raises(DsHfError, match="initialize"):
                engine(batch())
        results.append(last)
    assert torch.allclose(*results, rtol=0, atol=1e-6)


def freed() -> None:
    """destroy() lets everything but the module go, and leaves no hook on it."""
    for stage in STAGES:
        model = Stack()
        engine = make(stage, model, bf16={"enabled": True})  # masters apart from the parameters
        train(engine, 2)
        engine.backward(mean_square(engine(batch())))
        assert engine.optimizer is not None
        parts: list[Any] = [engine, engine.optimizer, engine.optimizer.optimizer, engine.reducer, engine.hooks]
        watched = [weakref.ref(part) for part in [*parts, *engine.optimizer.masters.values()]]
        engine.destroy()
        parts.clear()
        for module in model.modules():
            assert not module._forward_pre_hooks
            assert not module._forward_hooks
            assert "_ds_attach_external" not in module.__dict__
        assert all(not p._post_accumulate_grad_hooks for p in model.parameters())  # type: ignore[attr-defined]
        assert all(p.grad is None for p in model.parameters())
        del engine
        gc.collect()
        assert [type(ref()) for ref in watched] == [type(None)] * len(watched), stage


def given_back() -> None:
    """After destroy() the user's optimizer holds the model's parameters again, and makes another engine."""
    for stage in STAGES:
        model = Stack()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(2):
            engine, *_ = initialize(model=model, optimizer=optimizer, config=base_config(stage))
            before = weights(engine)
            train(engine, 1)
            assert not torch.equal(weights(engine), before)
            engine.destroy()
            assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]


def forgotten() -> None:
    """An engine and a model that nobody holds any more are gone, without destroy()."""
    for stage in STAGES:
        engine = make(stage)
        train(engine, 1)
        watched = [weakref.ref(engine), *(weakref.ref(param) for param in engine.module.parameters())]
        del engine
        gc.collect()
        assert [ref() for ref in watched] == [None] * len(watched), stage


def cycles() -> None:
    """Twenty lives of one model: the number and bytes of tensors do not grow."""
    model = Stack()

    def alive() -> tuple[int, int]:
        gc.collect()
        tensors = [t for t in gc.get_objects() if isinstance(t, Tensor)]
        return len(tensors), sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())

    counts = []
    for index in range(20):
        engine = make(index % 4, model)
        train(engine, 1)
        engine.destroy()
        del engine
        if index % 4 == 3:
            deadline = time.monotonic() + 60
            while (count := alive()) > min(counts[1:], default=count):  # gloo's threads let go of tensors a little late
                assert time.monotonic() < deadline, (counts, count)
                time.sleep(0.05)
            counts.append(count)
    assert counts[-1] <= counts[1], counts


@pytest.mark.parametrize("world", [1, 2])
def test_lives(world: int) -> None:
    run_distributed(lives, world, timeout=100)


def lives() -> None:
    gc.freeze()  # what was imported before: it makes the walks slow
    one_after_the_other()
    freed()
    given_back()
    forgotten()
    cycles()


def copied(stage: int) -> None:
    """A deep copy of a model in training (EMA) is an ordinary model of its own and leaves the engine alone."""
    engine = make(stage)
    train(engine, 1)
    with GatheredParameters(list(engine.module.parameters())):
        twin = copy.deepcopy(engine.module)
        mine = dict(engine.module.named_parameters())
        for name, param in twin.named_parameters():
            assert param.untyped_storage()._cdata != mine[name].untyped_storage()._cdata
            assert torch.equal(param, mine[name])
    twin(batch())
    train(engine, 2, 1)
    assert torch.equal(weights(engine), untouched(stage))


def test_deep_copies() -> None:
    run_distributed(every_stage, 2, copied, timeout=60)


# -- bad input -----------------------------------------------------------------------------------------------------


class HandsOn(torch.optim.Optimizer):
    """Steps by an optimizer of its own."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        super().__init__(params, {})
        self.inner = torch.optim.Adam(params)


def bad_calls() -> None:
    config = base_config(1)
    stack = Stack()
    schedule = torch.optim.lr_scheduler.LambdaLR(sgd(stack), lambda step: 1.0)
    for arguments, message in [
        ({}, "needs model="),
        ({"model": "gpt2"}, "needs model="),
        ({"model": Stack()}, "no configuration"),
        ({"model": Stack(), "config": config, "config_params": config}, "not both"),
        ({"model": Stack(), "config": config, "optimizer": "AdamW"}, "torch.optim.Optimizer or a function"),
        ({"model": Stack().to("meta"), "config": config}, "meta device"),
        ({"model": Stack().requires_grad_(False), "config": config}, "no parameter requires a gradient"),
        ({"model": Stack(), "config": config, "optimizer": sgd(Stack())}, "not a parameter of the model.* holds both"),
        ({"model": Stack(), "config": {**config, "zero_optimisation": {}}}, "zero_optimization"),
        ({"model": Stack(), "config": {**config, "optimizer": {"type": "AdamX"}}}, "AdamX"),
        ({"model": Stack(), "config": config, "mesh_param": (2, 2)}, "mesh_param"),
        ({"model": stack, "config": config, "lr_scheduler": schedule}, "LambdaLR on an optimizer of its own"),
        ({"model": stack, "config": config, "optimizer": sgd, "lr_scheduler": schedule}, "optimizer of its own"),
        ({"model": stack, "config": config, "optimizer": HandsOn(list(stack.parameters()))}, r"\(inner: Adam\)"),
    ]:
        with pytest.raises(ConfigError, match=message):
            initialize(**arguments)  # type: ignore[arg-type]
        with pytest.raises(AssertionError, match=message):  # what DeepSpeed raises
            initialize(**arguments)  # type: ignore[arg-type]
    logger.addHandler(lines := Lines())
    engine = make(2, ds_hf={"pipeline": {"chunks": 2}})
    logger.removeHandler(lines)
    assert "ds_hf.pipeline.chunks has no effect: Stack is not a PipelineModule" in lines.texts
    output = engine(batch())
    for loss, kind, message in [
        (output, ValueError, "reduce it"),
        (1.0, ValueError, "float"),
        ({"loss": output}, ValueError, "dict"),
        (output.detach().sum(), ValueError, "no graph"),
    ]:
        with pytest.raises(kind, match=message):
            engine.backward(loss)
    assert engine.optimizer is not None
    with pytest.raises(DsHfError, match="no parameter of the engine's model"):
        engine.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert len(engine.optimizer.param_groups) == 1
    with pytest.raises(ValueError, match="closures"):
        engine.optimizer.step(lambda: None)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = engine.no_such_thing
    engine.destroy()
    for call in (lambda: engine(batch()), lambda: engine.backward(output.sum()), engine.step):
        with pytest.raises(DsHfError, match="destroyed"):
            call()  # type: ignore[no-untyped-call]


def test_bad_input_is_refused_with_the_reason() -> None:
    run_distributed(bad_calls, 1, timeout=60)


def moved_away() -> None:
    """A model that was cast after initialize() would train without a word into buffers that nobody reads."""
    for stage in (0, 1, 2):
        engine = make(stage)
        engine.module.double()
        engine.module.float()
        engine.backward(mean_square(engine(batch())))
        with pytest.raises(DsHfError, match="after initialize"):
            engine.step()


def hooked() -> list[int]:
    """Calls of step hooks registered after initialize()."""
    calls = []
    for stage in STAGES:
        engine = make(stage)
        assert engine.optimizer is not None
        seen: list[Any] = []
        engine.optimizer.register_step_pre_hook(lambda *_, seen=seen: seen.append(1))
        engine.optimizer.register_step_post_hook(lambda *_, seen=seen: seen.append(2))
        train(engine, 2)
        calls.append(seen)
    return calls


def test_moved_models_and_step_hooks() -> None:
    run_distributed(moved_away, 2, timeout=60)
    assert run_distributed(hooked, 1, timeout=60)[0] == [[1, 2, 1, 2]] * 4


# -- what users read -----------------------------------------------------------------------------------------------


class WithExtras(Stack):
    label = "mine"

    def greet(self) -> str:
        return "hello"


def surface() -> None:
    config = base_config(3, gradient_accumulation_steps=2, train_micro_batch_size_per_gpu=4)
    data = [torch.full((WIDTH,), float(index)) for index in range(40)]
    model = WithExtras()
    engine, optimizer, loader, scheduler = initialize(model=model, config=config, training_data=data)
    assert scheduler is None
    assert engine.config is config
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (8 * dist.get_world_size(), 4)
    assert (engine.greet(), engine.label) == ("hello", "mine")
    assert (engine.zero_optimization_stage(), engine.gradient_accumulation_steps()) == (3, 2)
    assert optimizer is engine.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert [name for name, _ in engine.named_parameters()] == [f"module.{name}" for name, _ in model.named_parameters()]
    seen: list[float] = []
    for inputs in loader:
        seen += inputs[:, 0].tolist()
        engine.backward(mean_square(engine(inputs)))
        engine.step()
    assert engine.micro_steps == len(loader) == 40 // 4 // dist.get_world_size()
    assert engine.global_steps == engine.micro_steps // 2
    assert engine.global_samples == engine.global_steps * engine.train_batch_size()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, seen)
    assert sorted(value for part in gathered for value in part) == [float(index) for index in range(40)]


def test_what_users_read() -> None:
    run_distributed(surface, 2, timeout=60)


def test_layers_are_units() -> None:
    """The zoo's Stack has the units that other tests count on."""
    from ds_hf.engine.zero.planning import make_units

    assert [unit.name for unit in make_units(Stack())] == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert isinstance(Stack().blocks[0], Layer)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_option_of_constructors_that_comes_later_is_refused(stage: int) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine, *_ = initialize(model=model, optimizer=optimizer, config=base_config(stage, optimizer=None))
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    optimizer.param_groups[0]["maximize"] = True
    engine.backward(engine(torch.ones(1, 2)).sum())
    with pytest.raises(DsHfError, match="maximize was set in a parameter group of AdamW after initialize"):
        engine.step()
    engine.destroy()
