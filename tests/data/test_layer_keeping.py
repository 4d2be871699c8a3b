"""The share of layers that are kept, over steps."""

from __future__ import annotations

import math

import pytest
from deepspeed.runtime.progressive_layer_drop import ProgressiveLayerDrop

from ds_hf.data.layer_keeping import kept_share
from ds_hf.errors import ConfigError


def test_theta_falls_from_one() -> None:
    schedule = ProgressiveLayerDrop(theta=0.5, gamma=0.01)
    assert schedule.get_state() == {"progressive_layer_drop": True, "pld_theta": 1.0}
    for step in (0, 1, 100, 10_000):
        schedule.update_state(step)
        assert schedule.get_theta() == pytest.approx(0.5 * math.exp(-0.01 * step) + 0.5)


def test_later_blocks_are_kept_less_often() -> None:
    assert [kept_share(0.5, index, 4) for index in range(4)] == [0.875, 0.75, 0.625, 0.5]


@pytest.mark.parametrize(("theta", "gamma"), [(0, 0.1), (1.5, 0.1), (0.5, -1)])
def test_what_gives_no_share_is_refused(theta: float, gamma: float) -> None:
    with pytest.raises(ConfigError, match="give no share of layers"):
        ProgressiveLayerDrop(theta, gamma)
