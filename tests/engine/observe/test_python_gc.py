"""``disable_python_gc``: the collector is off while engines want it so, and on again afterwards."""

from __future__ import annotations

import gc
import multiprocessing
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ds_hf import Engine, initialize
from ds_hf.engine.observe import python_gc
from ds_hf.errors import DsHfError
from tests.helpers.parity import base_config


@pytest.fixture(autouse=True)
def on() -> Iterator[None]:
    gc.enable()
    yield
    assert python_gc._engines == 0
    gc.enable()


def make(**more: Any) -> Engine:
    engine: Engine = initialize(model=nn.Linear(2, 1), config=base_config(1, **more))[0]
    return engine


def test_it_is_off_until_the_last_engine_is_destroyed() -> None:
    first, plain, second = make(disable_python_gc=True), make(), make(disable_python_gc=True)
    assert not gc.isenabled()
    first.destroy()
    first.destroy()
    plain.destroy()
    assert not gc.isenabled()
    second.destroy()
    assert gc.isenabled()


def test_an_engine_that_does_not_ask_leaves_it_alone() -> None:
    make().destroy()
    assert gc.isenabled()


def test_it_stays_off_where_it_was_off() -> None:
    gc.disable()
    make(disable_python_gc=True).destroy()
    assert not gc.isenabled()


def test_cycles_wait_for_the_caller() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.me = self

    engine = make(disable_python_gc=True)
    gone = weakref.ref(Cycle())
    many: list[list[int]] = [[] for _ in range(20_000)]  # of themselves they would have it collected
    assert len(many) == 20_000
    assert gone() is not None
    assert engine.collect_python_gc() > 0
    assert gone() is None
    engine.destroy()


def is_on(answers: Any) -> None:
    answers.put((gc.isenabled(), python_gc._engines))


def test_workers_collect() -> None:
    engine = make(disable_python_gc=True)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    worker = context.Process(target=is_on, args=(answers,))
    worker.start()
    assert answers.get(timeout=600) == (True, 0)
    worker.join(600)
    assert not gc.isenabled()
    engine.destroy()


@pytest.mark.parametrize(
    "wrong",
    [
        torch.ones(2, requires_grad=True) * 1,
        torch.ones(()),
        1.0,
        torch.ones((), dtype=torch.complex64, requires_grad=True) * 1,
    ],
)
def test_a_loss_that_is_none_is_an_error_of_both_kinds(wrong: Any) -> None:
    engine = make()
    for kind in (ValueError, AssertionError, DsHfError):
        with pytest.raises(kind, match="loss"):
            engine.backward(wrong)
    engine.destroy()
