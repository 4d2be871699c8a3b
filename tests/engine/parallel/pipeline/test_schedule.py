"""Schedules: DeepSpeed's lists written by hand, torch's orders as the oracle of what runs."""

from __future__ import annotations

from collections import Counter, deque
from itertools import product
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining.schedules import ScheduleDualPipeV, ScheduleInterleaved1F1B

from ds_hf.engine.parallel.pipeline import schedule
from ds_hf.engine.parallel.pipeline.partition import part_of, stage_of
from ds_hf.engine.parallel.pipeline.schedule import (
    Work,
    bubble,
    dual_pipe_v,
    in_flight,
    interleaved,
    one_forward_one_backward,
    order_of,
)


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


def idle_share(micro_batches: int, stages: int, chunks: int, folded: bool) -> float:
    """Every stage computes in order as soon as what it needs is there, backward for twice as long as forward.

    All come to their ends: no stage waits for one that waits for it.
    """
    left = [deque(order_of(micro_batches, stages, stage, chunks, folded=folded)) for stage in range(stages)]
    last, done, clock = stages * chunks - 1, dict[tuple[bool, int, int], float](), [0.0] * stages
    while any(left):
        moved = False
        for stage, order in enumerate(left):
            if not order:
                continue
            forward, micro_batch, chunk = order[0]
            part = part_of(stage, chunk, stages, folded=folded)
            needs = [(True, micro_batch, part)] if not forward else []
            needs += [(forward, micro_batch, part - 1)] if forward and part > 0 else []
            needs += [(forward, micro_batch, part + 1)] if not forward and part < last else []
            if all(need in done for need in needs):
                begun = max([clock[stage], *(done[need] for need in needs)])
                clock[stage] = done[forward, micro_batch, part] = begun + (1 if forward else 2) / chunks
                order.popleft()
                moved = True
        assert moved
    return 1 - 3 * micro_batches / max(clock)


@pytest.mark.parametrize(
    ("stages", "micro_batches", "chunks", "folded"),
    [
        *[(2, 1, 1, False), (3, 2, 1, False), (4, 9, 1, False), (2, 4, 3, False), (4, 8, 2, False), (3, 9, 4, False)],
        *[(2, 4, 2, True), (2, 9, 2, True), (4, 8, 2, True), (4, 17, 2, True), (8, 16, 2, True), (1, 3, 2, True)],
    ],
)
def test_every_stage_comes_to_its_end_and_waits_as_long_as_is_said(
    stages: int, micro_batches: int, chunks: int, folded: bool
) -> None:
    share = idle_share(micro_batches, stages, chunks, folded)
    if micro_batches >= stages:  # with fewer, 1F1B never comes to its middle
        assert share == pytest.approx(bubble(micro_batches, stages, chunks, folded=folded), abs=1e-9)
    if folded and stages > 1:
        assert share < bubble(micro_batches, stages)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (2, 7), (3, 9), (4, 8), (4, 12)])
def test_the_order_of_dual_pipe_v_is_that_of_torch(stages: int, micro_batches: int) -> None:
    """torch parts backward in two: that of the inputs counts, which the stage before waits for."""
    sizes = SimpleNamespace(pp_group_size=stages, _n_microbatches=micro_batches, _num_stages=2 * stages)
    kinds = {"FORWARD": True, "FULL_BACKWARD": False, "BACKWARD_INPUT": False}
    for stage in range(stages):
        sizes.rank = stage
        actions = [each for each in ScheduleDualPipeV._calculate_single_rank_operations(sizes, stage) if each]
        single = [one for each in actions for one in (each.sub_actions or [each])]
        expected = [
            Work(kinds[each.computation_type.name], each.microbatch_index, each.stage_index // stages)
            for each in single
            if each.computation_type.name in kinds
        ]
        found = dual_pipe_v(micro_batches, stages, stage)
        assert found == expected
        assert len(found) == len(set(found)) == 4 * micro_batches
        assert in_flight(micro_batches, stages, stage, 2, folded=True) == stages + 0.5  # alike on all stages
    with pytest.raises(ValueError, match=f"at least 2 \\* {stages} micro-batches"):
        dual_pipe_v(2 * stages - 1, stages, 0)


def test_parts_of_a_folded_model() -> None:
    assert [stage_of(part, 3, folded=True) for part in range(9)] == [0, 1, 2, 2, 1, 0, 0, 1, 2]
    assert [stage_of(part, 3) for part in range(6)] == [0, 1, 2, 0, 1, 2]
    for folded in (False, True):
        parts = [part_of(stage, chunk, 3, folded=folded) for stage in range(3) for chunk in range(2)]
        assert sorted(parts) == list(range(6))
        assert all(
            stage_of(part_of(stage, chunk, 3, folded=folded), 3, folded=folded) == stage
            for stage in range(3)
            for chunk in range(2)
        )


def test_instructions_of_dual_pipe_v() -> None:
    steps = names(list(schedule.DualPipeVSchedule(4, 2, 1)))
    assert steps[:4] == [
        "RecvActivation(0, phase=0) CommitP2P() ForwardPass(0, phase=0)",
        "CommitP2P() ForwardPass(4, phase=1) SendActivation(4, phase=1)",
        "RecvActivation(1, phase=0) CommitP2P() ForwardPass(1, phase=0)",
        "CommitP2P() ForwardPass(5, phase=1) SendActivation(5, phase=1)",
    ]
    assert names(list(schedule.DualPipeVSchedule(4, 2, 0)))[0] == (
        "CommitP2P() LoadMicroBatch(0) ForwardPass(0, phase=0) SendActivation(0, phase=0)"
    )
    assert steps[-1] == "CommitP2P() ReduceTiedGrads() ReduceGrads() OptimizerStep()"
    with pytest.raises(ValueError, match="at least 2"):
        schedule.DualPipeVSchedule(3, 2, 0)


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 2), (2, 4), (3, 7)])
def test_what_dual_pipe_v_sends_is_received_by_the_stage_beside(
    stages: int, micro_batches: int, forward_only: bool
) -> None:
    """Each goes on once all that it has to receive was sent: to the ends, in the order of sending."""
    left = [
        deque(each for step in schedule.DualPipeVSchedule(micro_batches, stages, stage, forward_only) for each in step)
        for stage in range(stages)
    ]
    sent: dict[tuple[str, int, int, int], deque[int]] = {}
    wanted: list[list[tuple[str, int, int, int, int]]] = [[] for _ in range(stages)]
    waiting: list[list[tuple[tuple[str, int, int, int], int]]] = [[] for _ in range(stages)]
    while any(left):
        moved = False
        for stage, order in enumerate(left):
            while order:
                name, buffer = order[0].name, getattr(order[0], "buffer_id", 0)
                phase = getattr(order[0], "phase", 0)
                below = stage + 1 if (name.startswith("Send") == (phase == 0)) == name.endswith("Activation") else -1
                peer = stage + 1 if below > 0 else stage - 1
                kind = name.removeprefix("Send").removeprefix("Recv")
                if name.startswith("Send"):
                    waiting[stage].append(((kind, phase, stage, peer), buffer))
                elif name.startswith("Recv"):
                    wanted[stage].append((kind, phase, peer, stage, buffer))
                elif name == "CommitP2P":
                    for key, each in waiting[stage]:
                        sent.setdefault(key, deque()).append(each)
                    waiting[stage].clear()
                    if not all(sent.get(key[:4]) for key in wanted[stage]):
                        break
                    assert all(sent[key[:4]].popleft() == key[4] for key in wanted[stage])
                    wanted[stage].clear()
                order.popleft()
                moved = True
        assert moved
    assert not any(sent.values())


def test_micro_batches_that_do_not_fit_the_chunks() -> None:
    with pytest.raises(ValueError, match="5 micro-batches are not a multiple of 2 stages"):
        interleaved(5, 2, 0, 2)
