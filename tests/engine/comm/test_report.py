"""The text of a report, from what ranks of large meshes would answer."""

from __future__ import annotations

from typing import Any

from ds_hf.engine.comm.report import describe, ranks_text

WORLD, TENSOR = 1024, 8
GATHER, REDUCE = (
    ("all-gather", "the weights of model.layers.3", 10, "bfloat16"),
    ("all-reduce", "outputs", 4, "bfloat16"),
)
NORM = ("all-reduce", "the gradient norm", 1, "float32")


def place(name: str, ranks: range, entries: list[tuple[str, str, int, str]], idle: float = 9.0) -> dict[str, Any]:
    count = len(entries)
    return {"name": name, "ranks": list(ranks), "count": count, "first": 0, "entries": entries, "idle": idle} | {
        "inside": True
    }


def answer(rank: int, data: int, tensor: int, world: int = 1) -> dict[str, Any]:
    """Of a rank of 128 x 8 that has issued so many collectives on each axis."""
    first = rank // TENSOR * TENSOR
    axes = {
        f"data/{rank % TENSOR}": place("data", range(rank % TENSOR, WORLD, TENSOR), [GATHER] * data),
        f"tensor/{first}": place("tensor", range(first, first + TENSOR), [REDUCE] * tensor, 8.0),
        "world": place("world", range(WORLD), [NORM] * world, 10.0),
    }
    return {"axes": axes, "idle": min(axis["idle"] for axis in axes.values()), "stack": f"  line of {rank}\n"}


def test_one_late_rank_of_many_is_found_through_two_axes() -> None:
    """Rank 8 has not come; 9 to 15 wait for it in "tensor", all others in "data" for 8 to 15."""
    answers = {rank: answer(rank, 5, 3 + (rank // TENSOR != 1)) for rank in range(WORLD)}
    for rank in range(8, 16):
        answers[rank] = answer(rank, 4, 4 - (rank == 8))
    text = describe("the reason", answers, range(WORLD))
    assert "Late: rank 8 in the axes 'data' and 'tensor'." in text
    assert "First difference in the axis 'tensor' of ranks 8-15: collective 4 there." in text
    assert "rank 8: nothing, for 8 s; late in the axes 'data' and 'tensor'\n  rank 8 is at\n    line of 8" in text
    others = "ranks 0-7, 16-1023: waiting in the axis 'data' for ranks 8-15, for 9 s: all-gather of the weights of"
    assert others in text
    waiting = "ranks 9-15: waiting in the axis 'tensor' for rank 8, for 8 s: all-reduce of outputs (4 x bfloat16)"
    assert f"{waiting}; late itself in the axis 'data'" in text
    assert text.index("rank 8: nothing") < text.index("ranks 0-7")
    assert len(text) < 4000


def test_ranks_that_wait_for_each_other_are_both_named() -> None:
    """Rank 1 has left out what 9 does in "data", and waits in "world" already."""
    answers = {rank: answer(rank, 5 - (rank == 1), 3, 1 + (rank == 1)) for rank in range(16)}
    text = describe("the reason", answers, range(16))
    assert "Ranks 1, 9 wait for each other in the axes 'world' and 'data': one of them has left out" in text
    assert "Late:" in text  # of those that wait for nobody, in "world"
    assert "rank 1: waiting in the axis" in text


def test_a_rank_that_does_not_answer_is_late_where_others_are_inside() -> None:
    answers = {rank: answer(rank, 5, 3) for rank in range(16) if rank != 9}
    text = describe("the reason", answers, range(16))
    assert "Rank 9 does not answer: ended, stopped, or not able to run Python." in text
    assert "Late: rank 9 in the axes" in text
    assert "ranks 8, 10-15: waiting in the axis 'tensor' for rank 9" in text


def test_one_axis_is_told_without_its_name() -> None:
    answers = {rank: answer(rank, 0, 0, 1 + (rank == 0)) for rank in range(3)}
    text = describe("the reason", answers, range(3))
    assert "First difference: collective 2.\nAll issued before it: all-reduce of the gradient norm" in text
    assert "rank 0: all-reduce of the gradient norm (1 x float32)\n" in text
    assert "ranks 1-2: nothing, for 10 s" in text
    assert "axis" not in text


def test_a_stage_whose_neighbour_is_gone() -> None:
    """What it issued last is long past, and the reasons for collectives that differ are none here."""
    at = {"at": "stage 0 of 2, backward of micro-batch 2, waiting for rank 1"}
    text = describe("the reason", {0: {**answer(0, 0, 0, 2), **at}}, range(2))
    assert "Rank 0 issued 2 collectives, the last one:" in text
    assert "(1 x float32); now in stage 0 of 2, backward of micro-batch 2, waiting for rank 1\n  rank 0 is at" in text
    assert "killed (SIGKILL)" in text
    assert "Usual reasons" not in text
    apart = describe("the reason", {rank: answer(rank, 0, 0, 1 + (rank == 0)) for rank in (0, 1)}, range(3))
    assert "Usual reasons" in apart  # two that answer have gone different ways


def test_ranks_in_words() -> None:
    assert [ranks_text(ranks) for ranks in ([3], [0, 1, 2, 5], [1, 3])] == ["rank 3", "ranks 0-2, 5", "ranks 1, 3"]
