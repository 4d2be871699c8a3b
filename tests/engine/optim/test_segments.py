"""Segments: what the inner optimizer takes for its parameters covers what a process owns, once, without the gaps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.optim.segments import Segment, cut_segments, take_over_state
from ds_hf.engine.zero.buffer import FlatBuffer
from ds_hf.engine.zero.gradients import GradientBuffer, GradientPolicy

CPU = torch.device("cpu")
POLICY = GradientPolicy(True, False, 1.0, 1.0, None, torch.float32)
SHAPES = [(3, 5), (20,), (4, 4), (7,)]  # at 0, 16, 48, 64: gaps after the first two, padding after the last
GROUPS = [0, 0, 1, 1]


def gradient() -> GradientBuffer:
    params = [nn.Parameter(torch.randn(*shape)) for shape in SHAPES]
    buffer = FlatBuffer(params, Axis(None, 0, 1), dtype=torch.float32, device=CPU, sharded=False)
    buffer.adopt()
    return GradientBuffer(buffer, POLICY)


def cut(of: GradientBuffer, *, elementwise: bool) -> list[Segment]:
    return list(cut_segments(of, GROUPS, of.buffer.full, whole=True, elementwise=elementwise))


def test_one_a_group_where_elements_count_alone() -> None:
    of = gradient()
    segments = cut(of, elementwise=True)
    assert [(s.group, s.start, s.end) for s in segments] == [(0, 0, 36), (1, 48, 71)]
    assert all(s.param.data_ptr() == of.buffer.full[s.start].data_ptr() for s in segments)
    assert [s.fragment for s in segments] == [None, None]


def test_one_a_parameter_where_a_rule_looks_at_them_whole() -> None:
    of = gradient()
    segments = cut(of, elementwise=False)
    assert [(s.group, s.start, s.end) for s in segments] == [(0, 0, 15), (0, 16, 36), (1, 48, 64), (1, 64, 71)]
    assert [tuple(s.param.shape) for s in segments] == SHAPES
    for segment, param in zip(segments, of.buffer.params, strict=True):
        assert torch.equal(segment.param, param)
        assert segment.fragment is not None
        assert segment.fragment.whole


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_shards_together_are_everything(rank: int) -> None:
    """Of three processes each: pieces of parameters are flat, and lie where the layout says."""
    of = gradient()
    of.buffer.axis = Axis(None, rank, 3)
    of.buffer.layout = type(of.buffer.layout)([param.shape for param in of.buffer.params], 3)
    low, high = of.buffer.layout.shard_range(rank)
    master = torch.arange(low, high, dtype=torch.float32)
    found = list(cut_segments(of, GROUPS, master, whole=False, elementwise=False))
    places = torch.cat([s.param.detach().flatten() for s in found]).int().tolist() if found else []
    inside = [place for start, end in of.buffer.layout.runs for place in range(start, end) if low <= place < high]
    assert places == inside
    assert all(s.param.dim() == 1 or s.end - s.start == s.shape.numel() for s in found)


@pytest.mark.parametrize("elementwise", [True, False])
def test_states_from_before_are_cut_as_the_parameters(elementwise: bool) -> None:
    """An optimizer that has stepped brings its moments; what is no tensor of the parameter's shape is kept as it is."""
    of = gradient()
    params = of.buffer.params
    inner = torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:]}], lr=1e-3)
    for param in params:
        param.grad = torch.randn_like(param)
    inner.step()
    moments = [inner.state[param]["exp_avg"].clone() for param in params]
    segments = cut(of, elementwise=elementwise)
    take_over_state(inner, {of: segments}, whole=True)
    assert set(inner.state) == {segment.param for segment in segments}
    flat = torch.zeros_like(of.buffer.full)
    for slot, moment in zip(of.buffer.layout.slots, moments, strict=True):
        slot.of(flat).copy_(moment)
    for segment in segments:
        state = inner.state[segment.param]
        assert float(state["step"]) == 1.0
        assert torch.equal(state["exp_avg"].flatten(), flat[segment.start : segment.end])
