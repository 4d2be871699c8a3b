"""The state plan: what sections of the configuration put into its cells."""

from __future__ import annotations

from typing import Any

import pytest

from ds_hf.config import load_config
from ds_hf.config.mesh import given_claims
from ds_hf.config.plan import SAFE_MODULES, Placement, StatePlan, less_divided, plan_states, stages_with
from ds_hf.errors import ConfigError


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


def over(stage: int, *, processes: int = 4, environ: dict[str, str] | None = None, **zero: Any) -> tuple[str, str, str]:
    """Of parameters, gradients and optimizer states."""
    tree = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage, **zero}}
    given = given_claims(environ=environ or {})
    found = plan_states(load_config(tree, world_size=processes, given=given))
    assert (found.inner is not None) is ("inner" in (found.parameters.over, found.optimizer.over))
    return found.parameters.over, found.gradients.over, found.optimizer.over


ALL, INSIDE = ("replicas",) * 3, ("inner",) * 3


@pytest.mark.parametrize(
    ("stage", "zero", "expected"),
    [
        (3, {}, ALL),
        (3, {"mics_shard_size": 2}, INSIDE),
        (2, {"mics_shard_size": 2}, ("replicas", "inner", "inner")),
        (1, {"mics_shard_size": 2}, ("replicas", "inner", "inner")),
        (0, {"mics_shard_size": 2}, ALL),
        (3, {"mics_shard_size": 4}, ALL),  # of 4
        (3, {"mics_shard_size": 1}, INSIDE),
        (3, {"mics_shard_size": -1}, ALL),
        (3, {"zero_hpz_partition_size": 2}, ("inner", "replicas", "replicas")),
        (2, {"zero_hpz_partition_size": 2}, ALL),
        (3, {"zero_hpz_partition_size": 4}, ALL),
        (3, {"zero_hpz_partition_size": 1}, ALL),
        (3, {"zero_hpz_partition_size": 0}, ALL),
    ],
)
def test_over_which_processes_states_are_divided(stage: int, zero: dict[str, int], expected: tuple[str, ...]) -> None:
    assert over(stage, **zero) == expected


def test_accelerates_sizes_divide_inside() -> None:
    sizes = {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}
    environ = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", **sizes}
    assert over(3, environ=environ) == INSIDE
    assert over(1, environ=environ) == ("replicas", "inner", "inner")
    assert over(3, environ={**environ, "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "1"}, processes=2) == ALL
    with pytest.raises(ConfigError) as caught:
        over(0, environ=environ)
    assert "PARALLELISM_CONFIG_DP_SHARD_SIZE is 2, and ZeRO stage 0 divides nothing" in str(caught.value)


def test_before_the_processes_are_known() -> None:
    tree = {"train_batch_size": 1, "zero_optimization": {"stage": 3, "mics_shard_size": 2}}
    found = plan_states(load_config(tree, check_batch=False))
    assert (found.inner, found.shards("inner", 8), found.shards("replicas", 8), found.shards("inner", 1)) == (
        2,
        2,
        8,
        1,
    )


def test_stages_by_what_they_divide() -> None:
    assert stages_with(gradients=Placement.PARTIAL, optimizer=Placement.SHARDED) == (1,)
    assert stages_with(parameters=Placement.REPLICATED) == (0, 1, 2)
    assert less_divided([Placement.REPLICATED, Placement.SHARDED, Placement.SHARDED]) == (0, 1)
    assert less_divided([Placement.REPLICATED, Placement.PARTIAL, Placement.REPLICATED]) == ()
