"""The estimate gives the figures of the ZeRO paper, and the plan's rows one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ds_hf.config import load_config
from ds_hf.config.plan import StatePlan, plan_states
from ds_hf.engine.zero.estimate import (
    ModelSize,
    estimate_states,
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_live,
    measure,
)

PAPER = ModelSize(total=7_500_000_000, trainable=7_500_000_000, largest_unit=0)


def plan(stage: int, *, bf16: bool = True, **zero: Any) -> StatePlan:
    content = {"bf16": {"enabled": bf16}, "zero_optimization": {"stage": stage, **zero}}
    return plan_states(load_config(content, check_batch=False))


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_figure_1_of_the_zero_paper(stage: int, gigabytes: float) -> None:
    """7.5 B parameters, 64 GPUs, Adam in mixed precision: 120, 31.4, 16.6 and 1.9 GB (arXiv:1910.02054)."""
    assert estimate_states(plan(stage), PAPER, 64).device / 1e9 == pytest.approx(gigabytes, abs=0.05)


def test_fp32_has_no_master_weights() -> None:
    size = ModelSize(1000, 1000, 0)
    needs = estimate_states(plan(0, bf16=False), size, 1)
    assert (needs.parameters, needs.gradients, needs.optimizer) == (4000, 4000, 8000)


def test_frozen_parameters_have_neither_gradients_nor_states() -> None:
    needs = estimate_states(plan(2), ModelSize(1000, 100, 10), 4)
    assert (needs.parameters, needs.gradients, needs.optimizer) == (2000, 50, 300)
    assert needs.in_use == 20  # one unit's gradient on its way


def test_sums_over_micro_batches_are_kept_in_fp32() -> None:
    size = ModelSize(1000, 1000, 0)
    assert estimate_states(plan(2), size, 2, accumulates=False).gradients == 1000
    assert estimate_states(plan(2), size, 2, accumulates=True).gradients == 2000


def test_offload_moves_rows_to_the_host() -> None:
    size = ModelSize(1000, 1000, 100)
    cpu = {"device": "cpu"}
    optimizer = estimate_states(plan(2, offload_optimizer=cpu), size, 2)
    assert (optimizer.device, optimizer.host) == (2000 + 200, 1000 + 6000)
    everything = estimate_states(plan(3, offload_optimizer=cpu, offload_param=cpu), size, 2)
    assert (everything.device, everything.host) == (2 * 200 + 200, 1000 + 1000 + 6000)


def test_gathered_units_are_counted_only_where_parameters_are_sharded() -> None:
    size = ModelSize(1000, 1000, 100)
    assert estimate_states(plan(1), size, 4).in_use == 0
    assert estimate_states(plan(3), size, 4).in_use == 2 * 200 + 200
    assert estimate_states(plan(3), size, 1).in_use == 0


def test_measure_counts_tied_weights_once_and_finds_the_largest_unit() -> None:
    with torch.device("meta"):
        blocks = nn.ModuleList([nn.Linear(10, 10), nn.Linear(10, 10)])
        model = nn.ModuleDict(
            {"blocks": blocks, "embedding": nn.Embedding(5, 10), "head": nn.Linear(10, 5, bias=False)}
        )
    model["head"].weight = model["embedding"].weight
    model["embedding"].weight.requires_grad_(False)
    assert measure(model) == ModelSize(total=2 * 110 + 50, trainable=220, largest_unit=110)


def test_deepspeeds_functions(capsys: pytest.CaptureFixture[str]) -> None:
    total = 1_000_000
    host, device = estimate_zero2_model_states_mem_needs(total, num_gpus_per_node=4, cpu_offload=False)
    assert (host, device) == (0, 2 * total + 14 * total // 4)
    host, device = estimate_zero2_model_states_mem_needs(total, num_gpus_per_node=4, cpu_offload=True)
    assert (host, device) == (14 * total * 3 // 2, 2 * total)
    host, device, unit = estimate_zero3_model_states_mem_needs(total, 1000, num_gpus_per_node=2)
    assert (host, device, unit) == (16 * total * 3 // 2, 2 * 2000 + 2000, 4000)
    without_init = estimate_zero3_model_states_mem_needs(total, 1000, 2, cpu_offload=False, zero_init=False)
    assert without_init[0] == 4 * total * 2 * 3 // 2

    estimate_zero2_model_states_mem_needs_all_cold(total)
    estimate_zero3_model_states_mem_needs_all_live(nn.Linear(1000, 1000, bias=False), num_gpus_per_node=2)
    printed = capsys.readouterr().out
    assert printed.count("Model states of 1 M parameters") == 2
    assert printed.count("GiB |") == 2 * (2 + 6)


def test_states_divided_inside() -> None:
    size = ModelSize(1200, 800, 100)
    inside, second = plan(3, mics_shard_size=2), plan(3, zero_hpz_partition_size=2)
    needs = estimate_states(inside, size, 4)
    assert (needs.parameters, needs.gradients, needs.optimizer) == (1200, 800, 400 * 12)
    needs = estimate_states(second, size, 4)
    assert (needs.parameters, needs.gradients, needs.optimizer) == (1200 + 400, 400, 200 * 12)
    assert estimate_states(plan(1, mics_shard_size=2), size, 4).optimizer == 400 * 12
    assert estimate_states(inside, size, 1) == estimate_states(plan(3), size, 1)
