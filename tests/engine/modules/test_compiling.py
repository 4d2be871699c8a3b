"""Compiled blocks: the same numbers at every stage, no graph break by ds_hf, and nothing left behind."""

from __future__ import annotations

import copy
import inspect
import io
import logging
from collections.abc import Callable, Sequence
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_hf import Engine, initialize
from ds_hf.engine.modules.compiling import CompileReport
from ds_hf.log import forget_said
from tests.helpers.distributed import run_distributed
from tests.helpers.parity import base_config, full_weights

STAGES = tuple(range(4))
SGD = {"type": "SGD", "params": {"lr": 0.1}}
EAGER = "aot_eager"  # traces and differentiates ahead of time as inductor does, without its compile times


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * self.outer(torch.tanh(self.inner(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Broken(Block):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x, scale)


def make(stage: int, model: nn.Module | None = None, **more: object) -> Engine:
    torch.manual_seed(2)
    return initialize(model=model or Model(), config=base_config(stage, optimizer=SGD, **more))[0]


def train(engine: Engine, steps: int = 3) -> list[float]:
    losses = []
    for step in range(steps):
        x = torch.linspace(-1, 1, 24).view(4, 6) * (step + 1 + dist.get_rank())
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def by_engine(engine: Engine) -> None:
    engine.compile(backend=EAGER)


def by_blocks(engine: Engine) -> None:
    """accelerate's regional compilation."""
    for block in engine.module.blocks:  # type: ignore[union-attr]
        block.compile(backend=EAGER)


def by_model(engine: Engine) -> None:
    engine.module.compile(backend=EAGER)


def same_numbers(how: Callable[[Engine], None], modules: int, stages: Sequence[int]) -> None:
    for stage in stages:
        torch._dynamo.reset()
        plain = make(stage)
        expected, weights = train(plain), full_weights(plain.module)
        engine = make(stage)
        with mock.patch.object(torch, "compile", wraps=torch.compile) as compiled:
            how(engine)
            assert engine.is_compiled
            assert train(engine) == pytest.approx(expected, rel=1e-6)
        assert [call.kwargs for call in compiled.call_args_list] == [{"backend": EAGER}] * modules
        for name, value in full_weights(engine.module).items():
            torch.testing.assert_close(value, weights[name], rtol=1e-6, atol=1e-7)
        report = engine.compile_report()
        assert report.modules == modules
        assert report.graphs == modules - 2, "the three blocks share one graph"
        assert report.breaks == {}
        engine.destroy()
        for module in engine.module.modules():
            assert not {"forward", "compile", "_compiled_call_impl"} & set(vars(module))


@pytest.mark.parametrize(
    ("how", "modules", "stages"),
    [
        pytest.param(by_engine, 3, STAGES, marks=pytest.mark.slow),
        (by_blocks, 3, (1, 3)),  # whole weights, and gathered ones
        pytest.param(by_model, 4, STAGES, marks=pytest.mark.slow),
    ],
)
def test_numbers_and_graphs(how: Callable[[Engine], None], modules: int, stages: Sequence[int]) -> None:
    run_distributed(same_numbers, 2, how, modules, stages, timeout=100)


def copies() -> None:
    """A copy of a compiled model is an ordinary model, and not the original in disguise."""
    engine = make(1)
    engine.compile(backend=EAGER)
    train(engine)
    copied = copy.deepcopy(engine.module)
    buffer = io.BytesIO()
    torch.save(engine.module, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    x = torch.ones(2, 6)
    for model in (copied, loaded):
        assert torch.equal(model(x), engine.module(x))
        with torch.no_grad():
            model.blocks[1].inner.weight.add_(1)
        assert not torch.equal(model(x), engine.module(x)), "its own weights"
        model.blocks[0].compile(backend=EAGER)
    assert inspect.signature(engine.module.blocks[0].forward) == inspect.signature(Model().blocks[0].forward)


def test_copies_of_a_compiled_model() -> None:
    run_distributed(copies, 1, timeout=60)


def reported() -> tuple[CompileReport, list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_hf").addHandler(handler)
    model = Model()
    model.blocks = nn.ModuleList(Broken() for _ in range(2))
    engine = make(2, model)
    engine.compile(backend=EAGER)
    train(engine, 4)
    return engine.compile_report(), [line for line in lines if "torch.compile" in line]


def test_graph_breaks_are_counted_and_told_once() -> None:
    ((report, lines),) = run_distributed(reported, 1, timeout=60)
    assert report.modules == 2
    assert sum(report.breaks.values()) == 1, "alike blocks share it"
    assert len(lines) == 1
    assert lines[0].startswith("torch.compile: 2 modules, ")
    assert "1 graph break\n" in lines[0]


def other_ways() -> None:
    compiled = torch.compile(Model(), backend=EAGER)
    engine = initialize(model=compiled, config=base_config(3, optimizer=SGD))[0]
    assert type(engine.module) is Model, "torch.compile(model) is taken apart: its graphs would have the hooks inside"
    assert engine.compiler.report().modules == 3
    assert make(0, ds_hf={"compile": "blocks"}).is_compiled
    with pytest.raises(ValueError, match="schedule"):
        engine.compile(schedule=[])


def test_other_ways_to_ask_for_it() -> None:
    run_distributed(other_ways, 1, timeout=60)


class Checkpointed(Model):
    """Its blocks are computed again in backward from around their forward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


def tried_eagerly(how: Callable[[Engine], None]) -> list[int]:
    """Graphs after a forward that is eager and its backward, and after the next ones; no optimizer's step between, as
    where the autotuner measures."""
    torch.compiler.reset()
    engine = make(1, Checkpointed())
    how(engine)
    x, found = torch.linspace(-1, 1, 24).view(4, 6), []
    for stance in ("force_eager", "default"):
        with torch.compiler.set_stance(stance):
            loss = engine(x)
        engine.backward(loss)
        found.append(engine.compiler.report().graphs)
    return found


@pytest.mark.parametrize("how", [by_engine, by_blocks])
def test_what_was_tried_eagerly_is_computed_again_so_and_compiled_behind_it(how: Callable[[Engine], None]) -> None:
    ((before, after),) = run_distributed(tried_eagerly, 1, how, timeout=60)
    assert before == 0 < after


def several_forwards() -> tuple[list[float], list[float], int]:
    """Gradients of three forwards, of which the first two are eager, in turns with two backwards; and plainly."""
    torch.compiler.reset()
    x, found, graphs = torch.linspace(-1, 1, 24).view(4, 6), [], 0
    model = Checkpointed()
    for compiled in (True, False):
        engine = make(1, copy.deepcopy(model), gradient_accumulation_steps=2)
        if compiled:
            by_engine(engine)
        with torch.compiler.set_stance("force_eager"):
            losses = [engine(x), engine(2 * x)]
        third = engine(3 * x)
        engine.backward(losses[0] + third)
        engine.step()
        engine.backward(losses[1] + engine(4 * x))
        engine.step()
        weights = full_weights(engine.module)
        found.append(torch.cat([weights[name].flatten() for name in sorted(weights)]).tolist())
        graphs += engine.compile_report().graphs if compiled else 0
    return found[0], found[1], graphs


def test_forwards_that_were_eager_beside_compiled_ones_before_a_backward() -> None:
    ((found, plain, graphs),) = run_distributed(several_forwards, 1, timeout=60)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(plain), rtol=1e-6, atol=1e-7)
    assert graphs > 0


class Small(nn.Module):
    """No repeated block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x))).square().mean()


class Alike(nn.Module):
    """Repeated layers without anything inside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def without_blocks() -> list[tuple[bool, int, dict[str, int], bool]]:
    """Whether compiled, calls of the backend (none before the first forward), graph breaks, the same losses."""
    found = []
    for stage in STAGES:
        for kind in (Small, Alike):
            torch._dynamo.reset()
            graphs: list[int] = []

            def backend(graph: torch.fx.GraphModule, inputs: list[Tensor], graphs: list[int] = graphs) -> object:
                graphs.append(len(inputs))
                return graph.forward

            torch.manual_seed(2)
            model = kind()
            plain, engine = make(stage, copy.deepcopy(model)), make(stage, model)
            engine.compile(backend=backend)
            assert not graphs
            same = train(engine) == train(plain)
            found.append((engine.is_compiled, bool(graphs), engine.compile_report().breaks, same))
    return found


def test_models_without_repeated_blocks_are_compiled_too() -> None:
    for found in run_distributed(without_blocks, 2, timeout=100):
        assert found == [(True, True, {}, True)] * 8


@pytest.mark.parametrize("whole", [True, False])
def test_options_that_were_given_before_the_engine_was_there_are_missed(
    whole: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for options, told in (({"backend": EAGER}, 1), ({"mode": "reduce-overhead"}, 1), ({}, 0)):
        forget_said()
        caplog.clear()
        model = Model()
        (model if whole else model.blocks[1]).compile(**options)
        with caplog.at_level(logging.WARNING, "ds_hf"):
            make(0, model).destroy()
        assert sum("call engine.compile(" in text for text in caplog.messages) == told, options


def test_where_torch_compiles_nothing_no_options_are_missed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    forget_said()
    model = Model()
    model.compile(mode="reduce-overhead")
    with caplog.at_level(logging.WARNING, "ds_hf"):
        make(0, model).destroy()
    assert "call engine.compile(" not in caplog.text


def rotate(x: Tensor) -> Tensor:
    return x


rotate.__module__ = "liger_kernel.transformers.rope"


class Rotated(Block):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(rotate(x), scale)


@pytest.mark.parametrize("bound", [True, False])
def test_what_computes_with_kernels_of_liger_runs_as_it_is(bound: bool, caplog: pytest.LogCaptureFixture) -> None:
    """On a GPU an illegal access of memory, or an error in torch's recording."""
    forget_said()
    model = Model()
    for index in range(2 if bound else 3):
        if bound:
            inner: nn.Module = model.blocks[index].inner  # type: ignore[assignment]
            inner.forward = partial(nn.functional.linear, weight=inner.weight, bias=inner.bias)  # type: ignore[assignment, arg-type]
            inner.forward.__module__ = "liger_kernel.transformers.rms_norm"  # type: ignore[attr-defined]
        else:
            model.blocks[index] = Rotated()
    engine, expected = make(0, model), train(make(0, copy.deepcopy(model)))
    engine.compile(backend=EAGER)
    assert set(engine.compiler.compiled) == ({model.blocks[2]} if bound else set())
    assert [text for text in caplog.messages if "computes with Liger's kernels" in text]
    assert train(engine) == expected
    engine.destroy()


def test_a_run_says_what_its_first_step_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    forget_said()
    engine = make(0)
    with caplog.at_level(logging.INFO, "ds_hf"):
        engine.compile(backend=EAGER)
        assert "torch.compile: the first" not in caplog.text
        again = make(1)
        again.compile()
        make(2).compile()
    told = [record.getMessage() for record in caplog.records if "torch.compile: the first step" in record.getMessage()]
    assert len(told) == 1
    assert "torchinductor" in told[0]
