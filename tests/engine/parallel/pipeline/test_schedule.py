"""Schedules: DeepSpeed's lists written by hand, torch's orders as the oracle of what runs."""

from __future__ import annotations

from collections import Counter, deque
from itertools import product
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from ds_hf.engine.parallel.pipeline import schedule
from ds_hf.engine.parallel.pipeline.schedule import Work, interleaved, one_forward_one_backward


def names(steps: list[list[schedule.PipeInstruction]]) -> list[str]:
    return [" ".join(repr(each).replace("buffer_id=", "") for each in step) for step in steps]


def test_the_first_stage_of_two() -> None:
    assert names(list(schedule.TrainSchedule(micro_batches=2, stages=2, stage_id=0))) == [
        "LoadMicroBatch(0) ForwardPass(0)",
        "SendActivation(0)",
        "LoadMicroBatch(1) ForwardPass(1)",
        "RecvGrad(0) SendActivation(1) BackwardPass(0)",
        "",
        "RecvGrad(1) BackwardPass(1) ReduceTiedGrads() ReduceGrads() OptimizerStep()",
    ]


def test_the_last_stage_of_two() -> None:
    assert names(list(schedule.TrainSchedule(2, 2, 1))) == [
        "",
        "RecvActivation(0) LoadMicroBatch(0) ForwardPass(0)",
        "BackwardPass(0)",
        "SendGrad(0) RecvActivation(1) LoadMicroBatch(1) ForwardPass(1)",
        "BackwardPass(1)",
        "SendGrad(1) ReduceTiedGrads() ReduceGrads() OptimizerStep()",
    ]


def test_inference_and_data_parallel_schedules() -> None:
    assert names(list(schedule.InferenceSchedule(2, 3, 1))) == [
        "",
        "RecvActivation(0) ForwardPass(0)",
        "RecvActivation(1) SendActivation(0) ForwardPass(1)",
        "SendActivation(1)",
    ]
    steps = list(schedule.DataParallelSchedule(2, 1, 0))
    assert names(steps)[1] == "LoadMicroBatch(0) ForwardPass(0) BackwardPass(0) ReduceGrads() OptimizerStep()"


@pytest.mark.parametrize("kind", [schedule.TrainSchedule, schedule.InferenceSchedule])
def test_what_is_sent_is_received_in_the_same_step_or_before_it_is_needed(kind: type[schedule.PipeSchedule]) -> None:
    for micro_batches, stages in product((1, 3, 8), (1, 2, 3, 5)):
        found = [list(kind(micro_batches, stages, stage)) for stage in range(stages)]
        assert len({len(steps) for steps in found}) == 1
        for stage in range(stages - 1):
            for step in range(len(found[0])):
                here = Counter(each.name for each in found[stage][step])
                there = Counter(each.name for each in found[stage + 1][step])
                assert here["SendActivation"] == there["RecvActivation"]
                assert here["RecvGrad"] == there["SendGrad"]
        for stage, steps in enumerate(found):
            count = Counter(each.name for step in steps for each in step)
            assert count["ForwardPass"] == micro_batches
            assert count["BackwardPass"] == (micro_batches if kind is schedule.TrainSchedule else 0)
            buffers = kind(micro_batches, stages, stage).num_pipe_buffers()
            assert all(getattr(each, "buffer_id", 0) < buffers for step in steps for each in step)


def test_one_forward_one_backward_has_the_order_of_the_instructions() -> None:
    for micro_batches, stages in product((1, 2, 4, 9), (1, 2, 4)):
        for stage in range(stages):
            steps = schedule.TrainSchedule(micro_batches, stages, stage)
            kinds = [each.name for step in steps for each in step if each.name in ("ForwardPass", "BackwardPass")]
            order = one_forward_one_backward(micro_batches, stages, stage)
            assert ["ForwardPass" if work.forward else "BackwardPass" for work in order] == kinds


def torch_order(micro_batches: int, stages: int, stage: int, chunks: int) -> list[Work]:
    rounds = max(1, micro_batches // stages)
    sizes = SimpleNamespace(
        n_local_stages=chunks,
        microbatches_per_round=micro_batches // rounds,
        pp_group_size=stages,
        _n_microbatches=micro_batches,
    )
    found = ScheduleInterleaved1F1B._calculate_single_rank_operations(sizes, stage)
    return [
        Work(each.computation_type.name == "FORWARD", each.microbatch_index, each.stage_index // stages)
        for each in found
        if each is not None and each.computation_type.name in ("FORWARD", "FULL_BACKWARD")
    ]


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (2, 8), (4, 4), (4, 12)])
def test_the_interleaved_order_is_that_of_torch(stages: int, micro_batches: int, chunks: int) -> None:
    for stage in range(stages):
        found = interleaved(micro_batches, stages, stage, chunks)
        if chunks > 1:
            assert found == torch_order(micro_batches, stages, stage, chunks)
        assert len(found) == len(set(found)) == 2 * micro_batches * chunks


@pytest.mark.parametrize(
    ("stages", "micro_batches", "chunks"), [(2, 1, 1), (3, 2, 1), (4, 9, 1), (2, 4, 3), (4, 8, 2), (3, 9, 4)]
)
def test_no_stage_waits_for_one_that_waits_for_it(stages: int, micro_batches: int, chunks: int) -> None:
    """Every stage runs in order as soon as what it needs has been computed: all come to their ends."""
    left = [deque(interleaved(micro_batches, stages, stage, chunks)) for stage in range(stages)]
    last, done = stages * chunks - 1, set()
    while any(left):
        moved = False
        for stage, order in enumerate(left):
            if not order:
                continue
            work = order[0]
            part = work.chunk * stages + stage
            needs = (
                part == 0 or (True, work.micro_batch, part - 1) in done
                if work.forward
                else (True, work.micro_batch, part) in done
                and (part == last or (False, work.micro_batch, part + 1) in done)
            )
            if needs:
                done.add((work.forward, work.micro_batch, part))
                order.popleft()
                moved = True
        assert moved


def test_micro_batches_that_do_not_fit_the_chunks() -> None:
    with pytest.raises(ValueError, match="5 micro-batches are not a multiple of 2 stages"):
        interleaved(5, 2, 0, 2)
