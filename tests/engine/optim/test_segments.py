"""Segments: what the inner optimizer takes for its parameters covers what a process owns, once, without the gaps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ds_hf import initialize
from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.optim.segments import Segment, cut_segments, take_over_state
from ds_hf.engine.zero.buffer import FlatBuffer
from ds_hf.engine.zero.gradients import GradientBuffer, GradientPolicy
from ds_hf.engine.zero.init import Init
from ds_hf.errors import ConfigError
from tests.helpers.distributed import run_distributed

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


def made_of_empty_parameters() -> tuple[list[float], list[float], str]:
    """Losses with Adagrad, and the refusal of a rule that is not known, made of what ``zero.Init`` has divided."""

    def train(model: Any, optimizer: torch.optim.Optimizer, engine: Any = None) -> list[float]:
        losses = []
        for step in range(3):
            loss = (engine or model)(torch.linspace(-1, 1, 12).view(2, 6) * (step + 1)).square().mean()
            losses.append(float(loss.detach()))
            loss.backward()
            (engine or optimizer).step()
            optimizer.zero_grad()
        return losses

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))

    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    settings = {"train_batch_size": 2, "gradient_clipping": 0.0, "zero_optimization": zero}
    options = {"lr": 0.1, "initial_accumulator_value": 0.2}
    model = build()
    expected = train(model, torch.optim.Adagrad(model.parameters(), **options))
    with Init(config_dict_or_path=settings):
        model = build()
    inner = torch.optim.Adagrad(model.parameters(), **options)
    assert not any(inner.state[param]["sum"].numel() for param in model.parameters())
    engine = initialize(model=model, optimizer=inner, config=settings)[0]
    found = train(model, inner, engine)
    engine.destroy()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    for param in model.parameters():
        other.state[param]["averages"] = torch.ones_like(param)
    with pytest.raises(ConfigError) as error:
        initialize(model=model, optimizer=other, config=settings)
    return expected, found, str(error.value)


def test_states_made_of_empty_parameters() -> None:
    for expected, found, refused in run_distributed(made_of_empty_parameters, 2, timeout=30):
        assert found == pytest.approx(expected, rel=1e-6)
        assert "SGD made its state 'averages' of a parameter whose values were not here (of shape (5, 6)" in refused
