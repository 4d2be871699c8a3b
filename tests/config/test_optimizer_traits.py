"""The one table of optimizers: rows against the classes that they speak of."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ds_hf.config.optimizer_traits import TRAITS, most_moments, traits_of
from ds_hf.engine.optim.adagrad import FusedAdagrad
from ds_hf.engine.optim.adam import FusedAdam
from ds_hf.engine.optim.lion import FusedLion
from ds_hf.engine.optim.streaming import is_elementwise, streamed_update

OWN = {"FusedAdam": FusedAdam, "FusedLion": FusedLion, "Adagrad": FusedAdagrad}
TORCH = sorted(name for name in TRAITS if hasattr(torch.optim, name))


def stepped(kind: type[torch.optim.Optimizer]) -> tuple[torch.optim.Optimizer, int]:
    """The optimizer after a step, and how many tensors of its state are as large as the parameter."""
    param = nn.Parameter(torch.ones(8, 6))
    optimizer = kind([param], lr=1e-2)  # type: ignore[call-arg]
    param.grad = torch.ones(8, 6)
    optimizer.step()
    return optimizer, sum(torch.is_tensor(v) and v.shape == param.shape for v in optimizer.state[param].values())


@pytest.mark.parametrize(("name", "kind"), OWN.items())
def test_own_rules(name: str, kind: type[torch.optim.Optimizer]) -> None:
    optimizer, moments = stepped(kind)
    traits = traits_of(name)
    assert (moments, traits.at_most) == (traits.moments, traits.moments)
    assert (is_elementwise(optimizer), streamed_update(optimizer) is not None) == (traits.elementwise, traits.streamed)


@pytest.mark.parametrize("name", [name for name in TORCH if name not in ("Muon", "ASGD", "Adagrad")])
def test_classes_of_torch(name: str) -> None:
    optimizer, moments = stepped(getattr(torch.optim, name))
    traits = traits_of(name)
    assert moments == traits.moments
    assert is_elementwise(optimizer) is traits.elementwise
    assert (streamed_update(optimizer) is not None) is traits.streamed


def test_names_in_any_case_and_of_other_libraries() -> None:
    assert traits_of("adamw") is TRAITS["AdamW"]
    assert traits_of("muadam") == (2, 2, False, False), "not in the table"
    found = [most_moments(name) for name in ("Lion8bit", "DeepSpeedCPUAdagrad", "SGD", "RMSprop", "Muon", "Prodigy")]
    assert found == [1, 1, 1, 1, 2, 2]
