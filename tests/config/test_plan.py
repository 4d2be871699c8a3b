"""The state plan: what sections of the configuration put into its cells."""

from __future__ import annotations

from typing import Any

from ds_hf.config import load_config
from ds_hf.config.plan import SAFE_MODULES, StatePlan, plan_states


def plan(**section: Any) -> StatePlan:
    tree = {"train_batch_size": 1, "torch_autocast": {"enabled": True, **section}}
    return plan_states(load_config(tree, world_size=1))


def test_autocast() -> None:
    default = plan()
    assert (default.autocast, default.narrow_modules, default.scales_loss) == ("bfloat16", SAFE_MODULES, False)
    assert default.parameters.dtype is None
    half = plan(dtype="torch.float16", lower_precision_safe_modules=["a.B"])
    assert (half.autocast, half.narrow_modules, half.scales_loss) == ("float16", ("a.B",), True)
    for off in (plan(dtype="fp32"), plan(enabled=False, dtype="fp16")):
        assert (off.autocast, off.narrow_modules, off.scales_loss) == (None, (), False)
