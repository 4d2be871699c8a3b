"""Captured blocks: when a round of replays begins, what is computed eagerly, and that gradients are copied in time.

Without a GPU the graphs are stood in for; ``tests/gpu/test_capturing.py`` has the real ones.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_hf import initialize
from ds_hf.engine.modules.capturing import Captures, records
from ds_hf.engine.zero.buffer import FlatBuffer
from ds_hf.log import forget_said
from tests.engine.modules.test_compiling import Block, Model, make, train
from tests.helpers.distributed import run_distributed


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each round of replays that began."""
    begun: list[None] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(None))
    forget_said()
    gc.collect()  # engines of other tests, whose forwards are open
    return begun


class Captured:
    """A block whose graph is stood in for by its own forward, and which counts."""

    def __init__(self) -> None:
        self.captures, self.block, self.replays = Captures(lambda: None), Block(), 0
        own = self.block.forward

        def replay(*args: Any, **kwargs: Any) -> Any:
            self.replays += 1
            return own(*args, **kwargs)

        self.forward: Callable[..., Any] = self.captures.around(self.block, replay, own, own)

    def __call__(self, rows: int = 2) -> Tensor:
        return self.forward(torch.ones(rows, 6)).sum()  # type: ignore[no-any-return]


def test_a_round_begins_when_all_forwards_had_their_backward(rounds: list[None]) -> None:
    one = Captured()
    first, second = one(), one()
    assert len(rounds) == 1
    first.backward()
    third = one()  # the second's backward is to come
    assert len(rounds) == 1
    second.backward()
    third.backward()
    one().backward()
    assert len(rounds) == 2


def test_what_backward_keeps_or_never_comes_holds_a_round(rounds: list[None]) -> None:
    one = Captured()
    loss = one()
    loss.backward(retain_graph=True)
    one().backward()
    assert len(rounds) == 1
    loss.backward()
    one()  # nothing follows
    assert len(rounds) == 2
    one()
    assert len(rounds) == 2
    one.captures.after_step(None)
    one()
    assert len(rounds) == 3


def test_engines_share_rounds(rounds: list[None]) -> None:
    one, other = Captured(), Captured()
    loss = one()
    other().backward()
    other().backward()
    assert len(rounds) == 1
    loss.backward()
    other().backward()
    assert len(rounds) == 2


def test_what_leaves_a_block_is_a_copy(rounds: list[None]) -> None:
    one, memory = Captured(), torch.zeros(2, 6, requires_grad=True)
    forward = one.captures.around(one.block, lambda x: (memory, None, "text"), *2 * (one.block.forward,))
    found = forward(torch.ones(2, 6))
    assert found[1:] == (None, "text")
    assert found[0].data_ptr() != memory.data_ptr()


def test_what_is_computed_eagerly(rounds: list[None], caplog: pytest.LogCaptureFixture) -> None:
    one = Captured()
    one.block.eval()
    one()
    one.block.train()
    with torch.no_grad():
        one()
    assert one.replays == 0
    x = torch.ones(2, 6, requires_grad=True)
    for reentrant in (False, True):
        checkpoint(one.forward, x, use_reentrant=reentrant).sum().backward()
    with torch.autograd.graph.save_on_cpu():
        one().backward()
    one.block.gradient_checkpointing = True
    one().backward()
    one.block.gradient_checkpointing = False
    assert one.replays == 0
    assert "blocks that are checkpointed" in caplog.text
    for rows in range(1, 13):
        one(rows)
    assert one.replays == 8
    one(3)
    assert one.replays == 9
    assert "captured for 8 shapes" in caplog.text


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (("inductor", None, None), False),
        (("inductor", "default", None), False),
        (("inductor", "max-autotune-no-cudagraphs", None), False),
        (("inductor", "reduce-overhead", None), True),
        (("inductor", "max-autotune", None), True),
        (("inductor", None, {"triton.cudagraphs": True}), True),
        (("cudagraphs", None, None), True),
    ],
)
def test_what_records_graphs(given: tuple[Any, ...], found: bool) -> None:
    """Users reach the same memory by the options of ``torch.compile``."""
    assert records(*given) is found


def lent_gradients() -> None:
    engine = make(2, gradient_accumulation_steps=2)
    assert not any(buffer.lent for buffer in engine.reducer.buffers)
    engine.compile(mode="reduce-overhead")
    (buffer, *_) = engine.reducer.buffers
    assert buffer.lent
    flat: FlatBuffer = buffer.buffer
    memory = [torch.full_like(param, 3.0) for param in flat.params]
    for param, grad in zip(flat.params, memory, strict=True):
        param.grad = grad
    buffer.ready.update(range(len(memory)))
    buffer.collect(0.5, soon=True)
    for grad in memory:
        assert grad.eq(3.0).all()  # the graph's own
        grad.zero_()
    partial = buffer.partial
    assert partial is not None
    assert all(view.eq(1.5).all() for view in flat.layout.views(partial))
    engine.destroy()


def test_lent_gradients_are_copied_before_the_next_replay() -> None:
    run_distributed(lent_gradients, 1)


def on_the_cpu(stage: int) -> list[list[float]]:
    found = []
    for capture in (False, "blocks"):
        engine = make(stage, ds_hf={"capture": capture})
        found.append(train(engine))
        assert not engine.compiler.compiled
        engine.destroy()
    return found


def test_without_a_gpu_it_is_told_and_trains_as_before(caplog: pytest.LogCaptureFixture) -> None:
    eager, asked = run_distributed(on_the_cpu, 1, 1)[0]
    assert eager == asked


def test_the_reason_is_told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "0")
    with caplog.at_level(logging.WARNING, "ds_hf"):
        engine = initialize(model=Model(), config={"train_batch_size": 1, "ds_hf": {"capture": "blocks"}})[0]
    engine.destroy()
    assert "blocks are not captured" in caplog.text
    assert "CUDA graphs are for GPUs, and the model is on cpu" in caplog.text


def recaptured() -> None:
    engine = make(2)
    engine.compiler.captures.asked = True
    engine.compile(backend="cudagraphs")  # as the configuration does on a GPU; on the CPU nothing is recorded
    before = dict(engine.compiler.compiled)
    assert len(before) == 3
    engine.compile(backend="cudagraphs")
    assert engine.compiler.compiled == before
    engine.compile(backend="aot_eager")  # the compiler is asked for later: by the Trainer, as a rule
    assert all(engine.compiler.compiled[module] is not before[module] for module in before)
    assert isinstance(engine.module, nn.Module)
    losses = train(engine)
    engine.destroy()
    plain = make(2)
    assert losses == train(plain)
    plain.destroy()


def test_a_compiler_that_comes_later_compiles_captured_blocks() -> None:
    run_distributed(recaptured, 1)
