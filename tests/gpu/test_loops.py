"""Loops of accelerate, weights used past their modules' calls, and a student beside its teacher, on two GPUs.

The checks are those of the tests for CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.compat import test_accelerate_backward as backward
from tests.compat import test_accelerate_prepare as prepare
from tests.distillation import test_student as distillation
from tests.engine.zero import test_external as external
from tests.helpers.distributed import run_distributed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

LOOPS = [
    backward.test_gradients_of_no_sync_are_added_up_at_every_stage,
    backward.test_several_backwards_for_a_step_are_told,
    backward.test_a_loop_means_what_it_means_without_deepspeed,
    prepare.test_every_combination_of_optimizer_and_scheduler_trains_like_torch,
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loops_of_accelerate(loop: Callable[[], None]) -> None:
    loop()


def used_on_a_gpu(ways: list[str], kinds: list[str]) -> Any:
    build, data = external.build, external.data
    external.build = lambda *given: build(*given).cuda()
    external.data = lambda *given: data(*given).cuda()
    return external.ways_of_kinds(ways, kinds)


@pytest.mark.parametrize("kind", external.KINDS)
def test_weights_used_past_calls(kind: str) -> None:
    for outcomes in run_distributed(used_on_a_gpu, 2, external.WAYS, [kind], backend="nccl", timeout=120):
        assert external.wrong(outcomes, 1e-5) == {}


def to_gpus(put: Callable[[Any, str, Any], None]) -> None:
    """Models and batches of the student's tests are made on this process's GPU, as are then the projections."""
    student, teacher, batch = distillation.student, distillation.teacher, distillation.batch
    put(distillation, "student", lambda: student().cuda())
    put(distillation, "teacher", lambda: teacher().cuda())
    put(distillation, "batch", lambda number: {name: value.cuda() for name, value in batch(number).items()})


def taught_on_a_gpu(fields: dict[str, Any], cells: list[tuple[int, Any]]) -> Any:
    to_gpus(setattr)
    return distillation.by_engines(fields, cells)


@pytest.mark.parametrize("name", distillation.RECIPES)
def test_a_student_and_its_teacher(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    to_gpus(monkeypatch.setattr)
    distillation.check(name, taught_on_a_gpu, 1e-4, "nccl")
