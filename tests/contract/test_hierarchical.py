"""Hierarchical ZeRO on four processes as two "hosts" of two: states divided inside a host against plain ZeRO over all.

MiCS and accelerate's hybrid sharding: fp32 weights agree to 1e-6 relative and norms to 1e-5 at stages 1 to 3. hpZ:
losses, norms and weights are those of stage 3 to the bit in every dtype, and forward and backward communicate inside a
host alone, but for the reduction.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch import Tensor

from ds_hf import initialize
from ds_hf.engine.comm.log import CollectiveLog
from ds_hf.engine.observe.probes.snapshot import Snapshot
from ds_hf.engine.zero.access import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
)
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.engine.zero.init import Init
from ds_hf.errors import ConfigError
from tests.contract.test_parity import ADAMW, CLIP, MICRO, batches, model
from tests.helpers.distributed import run_distributed
from tests.helpers.megatron import Mpu, divide, gathered_weights
from tests.helpers.parity import full_weights

WORLD, INNER, STEPS = 4, 2, 2
MICS, HPZ = {"mics_shard_size": INNER}, {"zero_hpz_partition_size": INNER}
HYBRID = {  # what accelerate's launcher sets for ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
}
DTYPES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}
CPU = {"device": "cpu"}


def config(stage: int, accumulation: int = 1, zero: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {"stage": stage, **(zero or {})},
        **more,
    }


def steps(engine: Any, accumulation: int = 1, first: int = 0, count: int = STEPS) -> tuple[list[float], list[float]]:
    """Losses of this process, and gradient norms."""
    losses, norms = [], []
    for step in batches(accumulation, WORLD)[first : first + count]:
        for micro in step:
            loss = engine(micro[dist.get_rank()].to(engine.device))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        norms.append(engine.get_global_grad_norm())
    return losses, norms


def train(stage: int, accumulation: int, zero: dict[str, Any], dtype: str = "fp32", **more: Any) -> dict[str, Any]:
    trained = model()
    engine, *_ = initialize(model=trained, config=config(stage, accumulation, zero, **DTYPES[dtype], **more))
    losses, norms = steps(engine, accumulation)
    found = {"losses": losses, "norms": norms, "weights": full_weights(trained), "inner": engine.mesh.shape.inner}
    engine.destroy()
    return found


def train_each(cells: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [train(*cell) for cell in cells]


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - value).norm() / value.norm()) for name, value in other.items())


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["losses"] == other["losses"]
    assert one["norms"] == other["norms"]
    for name, value in other["weights"].items():
        assert torch.equal(one["weights"][name], value), name


# -- the numbers --------------------------------------------------------------------------------------------------


@cache
def plain(stage: int, accumulation: int, dtype: str = "fp32") -> list[dict[str, Any]]:
    """What each process finds without the new keys."""
    return [found for (found,) in run_distributed(train_each, WORLD, [(stage, accumulation, {}, dtype)])]


@pytest.mark.parametrize(
    ("stage", "env"),
    [
        *(pytest.param(stage, {}, id=f"mics-{stage}") for stage in (1, 2, 3)),
        *(pytest.param(stage, HYBRID, id=f"hybrid-{stage}", marks=pytest.mark.slow) for stage in (1, 2)),
        pytest.param(3, HYBRID, id="hybrid-3"),
    ],
)
def test_states_divided_inside_and_copied_outside(stage: int, env: dict[str, str]) -> None:
    cells = [(stage, accumulation, {} if env else MICS) for accumulation in (1, 2)]
    ranks = run_distributed(train_each, WORLD, cells, env=env)
    for index, (_, accumulation, _) in enumerate(cells):
        for rank, whole in zip(ranks, plain(stage, accumulation), strict=True):
            assert whole["inner"] is None
            assert rank[index]["inner"] == INNER
            assert rank[index]["losses"] == pytest.approx(whole["losses"], rel=1e-5)
            assert rank[index]["norms"] == pytest.approx(whole["norms"], rel=1e-5)
            assert rank[index]["norms"] == ranks[0][index]["norms"]
            assert distance(rank[index]["weights"], whole["weights"]) < 1e-6
            for name, value in ranks[0][index]["weights"].items():
                assert torch.equal(rank[index]["weights"][name], value)  # copies do not drift


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_states_divided_inside_in_16_bits(dtype: str) -> None:
    cells = [(3, 2, MICS, dtype), (1, 2, MICS, dtype), (3, 2, {"mics_shard_size": 1}, dtype)]
    for whole, others in zip(plain(3, 2, dtype), run_distributed(train_each, WORLD, cells), strict=True):
        for found in others:
            assert found["losses"] == pytest.approx(whole["losses"], rel=1e-2)


def test_every_process_a_host_of_its_own() -> None:
    """Shards of one: each has everything, and sums go over all."""
    cells = [(stage, 1, {"mics_shard_size": 1}) for stage in (1, 2, 3)]
    for rank, whole in zip(run_distributed(train_each, WORLD, cells), plain(3, 1), strict=True):
        for found in rank:
            assert found["norms"] == pytest.approx(whole["norms"], rel=1e-5)
            assert distance(found["weights"], whole["weights"]) < 1e-6


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_second_shard_changes_no_bit(dtype: str) -> None:
    """Without accumulation, of 16 bits: ``test_parameters_seen_from_outside``."""
    accumulations = (1, 2) if dtype == "fp32" else (2,)
    ranks = run_distributed(train_each, WORLD, [(3, accumulation, HPZ, dtype) for accumulation in accumulations])
    for index, accumulation in enumerate(accumulations):
        for rank, whole in zip(ranks, plain(3, accumulation, dtype), strict=True):
            assert (whole["inner"], rank[index]["inner"]) == (None, INNER)
            assert_equal(rank[index], whole)


def test_small_parameters_that_stay_whole() -> None:
    whole = {"stage3_param_persistence_threshold": 100}
    cells = [(3, 1, {**zero, **whole}) for zero in ({}, HPZ, MICS)]
    for without, second, inside in run_distributed(train_each, WORLD, cells):
        assert_equal(second, without)
        assert distance(inside["weights"], without["weights"]) < 1e-6


def test_offload(tmp_path: Path) -> None:
    """States and parameters in host memory and in files."""
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    blocks = [
        {"offload_optimizer": CPU},
        {"offload_optimizer": CPU, "offload_param": CPU},
        {"offload_optimizer": nvme, "offload_param": nvme},
    ]
    cells = [(3, 2, {**block, **zero}, "bf16") for block in blocks for zero in ({}, HPZ, MICS)]
    for rank in run_distributed(train_each, WORLD, cells, timeout=120):
        for without, second, inside in zip(rank[::3], rank[1::3], rank[2::3], strict=True):
            assert_equal(second, without)
            assert inside["losses"] == pytest.approx(without["losses"], rel=1e-2)


BF16 = {"enabled": True}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "split masters": ({}, {"bf16": BF16, "ds_hf": {"split_masters": True}}),
    "bf16 masters": ({}, {"bf16": {**BF16, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}),
    "delayed": ({"offload_optimizer": CPU}, {"bf16": BF16, "ds_hf": {"offload": {"delayed": True}}}),
    "half on the device": ({"offload_optimizer": {**CPU, "ratio": 0.5}}, {"bf16": BF16}),
    "sums in fp32": ({}, {"bf16": BF16, "communication_data_type": "fp32"}),
    "division in two": ({}, {"gradient_predivide_factor": 2.0}),
    "autocast": ({}, {"torch_autocast": {"enabled": True}}),
}


def each_way() -> dict[str, list[dict[str, Any]]]:
    return {
        name: [train(3, 2, {**offload, **zero}, **more) for zero in ({}, HPZ, MICS)]
        for name, (offload, more) in WAYS.items()
    }


@pytest.mark.slow
def test_ways_of_updating_and_summing() -> None:
    """With split masters, ties are rounded another way than torch does, in second shards too; copies do not drift."""
    ranks = run_distributed(each_way, WORLD)
    for rank in ranks:
        for name, (plain, second, inside) in rank.items():
            assert_equal(second, plain)
            assert inside["losses"] == pytest.approx(plain["losses"], rel=1e-2), name
            first = ranks[0][name][2]["weights"]
            assert all(torch.equal(first[key], value) for key, value in inside["weights"].items()), name


def test_rules_that_look_at_whole_parameters() -> None:
    """Norms of parameters (LAMB), whole matrices (Muon), and an optimizer that makes its own step."""
    names = [{"type": "Lamb", "params": {"lr": 1e-3}}, {"type": "Muon", "params": {"lr": 1e-3}}]
    names.append({"type": "Adamax", "params": {"lr": 1e-3}})
    for rank in run_distributed(_train_rules, WORLD, names):
        for without, second, inside in rank:
            assert_equal(second, without)
            assert distance(inside["weights"], without["weights"]) < 2e-6


def _train_rules(optimizers: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    return [[_with_rule(optimizer, zero) for zero in ({}, HPZ, MICS)] for optimizer in optimizers]


def _with_rule(optimizer: dict[str, Any], zero: dict[str, Any]) -> dict[str, Any]:
    trained = model()
    engine, *_ = initialize(model=trained, config={**config(3, 1, zero), "optimizer": optimizer})
    losses, norms = steps(engine)
    found = {"losses": losses, "norms": norms, "weights": full_weights(trained)}
    engine.destroy()
    return found


# -- overflow, owners ---------------------------------------------------------------------------------------------


def overflow(stage: int, zero: dict[str, Any]) -> list[tuple[bool, float, bool]]:
    """Per step: whether it was applied, the loss scale after it, whether the weights stayed."""
    trained = model()
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    engine, *_ = initialize(model=trained, config=config(stage, 1, zero, fp16=fp16))
    assert engine.optimizer is not None
    found = []
    for number, step in enumerate(batches(1, WORLD)[:3]):
        before = full_weights(trained)
        loss = engine(step[0, dist.get_rank()])
        engine.backward(loss * float("inf") if number == 1 and dist.get_rank() == 3 else loss)
        engine.step()
        after = full_weights(trained)
        same = all(torch.equal(value, after[name]) for name, value in before.items())
        found.append((engine.was_step_applied(), engine.optimizer.loss_scaler.scale, same))
    engine.destroy()
    return found


def overflows() -> list[Any]:
    return [overflow(3, HPZ), overflow(3, MICS), overflow(1, MICS)]


def test_an_overflow_on_one_process_skips_everywhere() -> None:
    for rank in run_distributed(overflows, WORLD):
        for found in rank:
            assert found == [(True, 256.0, False), (False, 128.0, True), (True, 128.0, False)]


def owned_elements(stage: int, zero: dict[str, Any]) -> tuple[Counter[tuple[str, int]], set[int]]:
    """How often this process owns each element, and how many owners its buffers say that there are."""
    trained = model()
    engine, *_ = initialize(model=trained, config=config(stage, 1, zero))
    assert engine.optimizer is not None
    names = {id(param): name for name, param in trained.named_parameters()}
    counts: Counter[tuple[str, int]] = Counter()
    said = set()
    for buffer in engine.optimizer.masters:
        said.add(buffer.replicas.owners(whole=False, shards=buffer.axis))
        for fragment in buffer.layout.fragments(buffer.axis.rank):
            name = names[id(buffer.params[fragment.slot.index])]
            counts.update((name, place) for place in range(fragment.start, fragment.start + fragment.numel))
    engine.destroy()
    return counts, said


def owner_maps() -> list[Any]:
    return [owned_elements(3, HPZ), owned_elements(3, MICS), owned_elements(1, MICS)]


def test_every_element_has_the_owners_it_should() -> None:
    ranks = run_distributed(owner_maps, WORLD)
    numels = {name: param.numel() for name, param in model().named_parameters()}
    for index, owners in enumerate((1, WORLD // INNER, WORLD // INNER)):
        counts: Counter[tuple[str, int]] = Counter()
        for rank in ranks:
            counts.update(rank[index][0])
            assert rank[index][1] == {owners}
        assert len(counts) == sum(numels.values())
        assert set(counts.values()) == {owners}


# -- what is communicated -----------------------------------------------------------------------------------------


def recorded(zero: dict[str, Any], accumulation: int = 2) -> dict[str, list[tuple[str, str, int, int]]]:
    """By moment (forward, backward, step): operation, on what, processes, bytes that come out; in the third step."""
    noted: list[tuple[str, str, int, int]] = []
    note = CollectiveLog.__call__

    def record(log: CollectiveLog, operation: str, what: str, tensor: Tensor | None = None) -> CollectiveLog:
        noted.append((operation, what, log.world_size, 0 if tensor is None else tensor.nbytes))
        return note(log, operation, what, tensor)

    engine, *_ = initialize(model=model(), config=config(3, accumulation, zero, bf16={"enabled": True}))
    steps(engine, accumulation, 0, 2)
    CollectiveLog.__call__ = record  # type: ignore[method-assign]
    found: dict[str, list[tuple[str, str, int, int]]] = {"forward": [], "backward": [], "step": []}
    for micro in batches(accumulation, WORLD)[2]:
        for moment in found:
            if moment == "forward":
                loss = engine(micro[dist.get_rank()])
            elif moment == "backward":
                engine.backward(loss)
            else:
                engine.step()
            found[moment] += noted
            noted.clear()
    CollectiveLog.__call__ = note  # type: ignore[method-assign]
    engine.destroy()
    return found


def records() -> list[Any]:
    return [recorded({}), recorded(HPZ), recorded(MICS)]


def kinds(entries: list[tuple[str, str, int, int]]) -> set[tuple[str, int]]:
    return {(operation, processes) for operation, _, processes, _ in entries}


def test_what_crosses_hosts() -> None:
    for plain, second, inside in run_distributed(records, WORLD):
        assert kinds(plain["forward"]) == {("all-gather", WORLD)}
        # hpZ: gathers inside, the reduction of stage 3, and one exchange of 16-bit shards a step.
        assert kinds(second["forward"]) == {("all-gather", INNER)}
        assert kinds(second["backward"]) == {("all-gather", INNER), ("reduce-scatter", WORLD)}
        assert kinds(second["step"]) == {("all-reduce", WORLD), ("all-to-all", WORLD)}
        sums = [[entry for entry in each["backward"] if entry[0] == "reduce-scatter"] for each in (plain, second)]
        assert sums[0] == sums[1]
        assert [entry for entry in second["step"] if entry[0] == "all-reduce"] == plain["step"]
        whole = sum(nbytes for operation, _, _, nbytes in sums[1] if operation == "reduce-scatter") * WORLD // 2
        exchanged = sum(nbytes for operation, _, _, nbytes in second["step"] if operation == "all-to-all")
        assert exchanged == whole // INNER  # of two micro-batches, once
        assert kinds(inside["forward"]) == {("all-gather", INNER)}
        # MiCS and hybrid sharding: shards are summed over the hosts, and nothing else leaves one.
        assert kinds(inside["backward"]) == {("all-gather", INNER), ("reduce-scatter", INNER), ("all-reduce", INNER)}
        assert kinds(inside["step"]) == {("all-reduce", WORLD)}  # of the norm


# -- parameters seen from outside ---------------------------------------------------------------------------------


def seen_from_outside(zero: dict[str, Any]) -> dict[str, Any]:
    """Built under ``zero.Init``; read and written in every way."""
    content = config(3, 1, zero, bf16={"enabled": True})
    with Init(config_dict_or_path=content):
        trained = model()
    engine, *_ = initialize(model=trained, config=content)
    found: dict[str, Any] = {"losses": steps(engine, 1, 0, 2)[0]}
    loss = engine(batches(1, WORLD)[2, 0, dist.get_rank()])
    engine.backward(loss)
    param = trained.blocks[0].up.weight
    gradient = safe_get_full_grad(param)
    engine.step()
    found["values"] = [gradient, safe_get_full_fp32_param(param), safe_get_full_optimizer_state(param, "exp_avg")]
    safe_set_full_fp32_param(param, torch.full(tuple(param.ds_shape), 0.25))  # type: ignore[arg-type]
    with GatheredParameters([param]):
        found["set"] = param.detach().clone()
    with GatheredParameters([param], modifier_rank=3):
        if dist.get_rank() == 3:
            param.data.fill_(0.5)
    with GatheredParameters([param]):
        found["written"] = param.detach().clone()
    found["master"] = safe_get_full_fp32_param(param)
    found["later"] = steps(engine, 1, 3, 2)[0]
    engine.destroy()
    return found


def views() -> list[dict[str, Any]]:
    return [seen_from_outside(zero) for zero in ({}, HPZ, MICS)]


def test_parameters_seen_from_outside() -> None:
    for plain, second, inside in run_distributed(views, WORLD):
        for found in (plain, second, inside):
            assert bool((found["set"] == 0.25).all())
            assert bool((found["written"] == 0.5).all())
            assert bool((found["master"] == 0.5).all())
        assert second["losses"] + second["later"] == plain["losses"] + plain["later"]
        assert inside["losses"] + inside["later"] == pytest.approx(plain["losses"] + plain["later"], rel=1e-2)
        for mine, theirs in zip(second["values"], plain["values"], strict=True):
            assert torch.equal(mine, theirs)
        assert [value.shape for value in inside["values"]] == [value.shape for value in plain["values"]]


def away_and_back() -> tuple[bool, list[Any]]:
    """States that leave the device for a while; names of DeepSpeed."""
    engine, *_ = initialize(model=model(), config=config(3, 1, HPZ))
    names = engine._states_by_name()["lp_params"]
    second = sum(tensor.numel() for tensor in names) == sum(
        buffer.layout.shard_numel * (1 + WORLD // INNER) for unit in engine.units for buffer in unit.buffers
    )
    steps(engine, 1, 0, 1)
    engine.offload_states()
    engine.reload_states()
    steps(engine, 1, 1, 1)
    group = groups._get_zero_param_intra_parallel_group()
    found = [engine.zero_hpz_partition_size(), dist.get_process_group_ranks(group)]
    engine.destroy()
    return second, found


def test_states_that_leave_the_device_and_names() -> None:
    for rank, (second, found) in enumerate(run_distributed(away_and_back, WORLD)):
        assert second
        assert found == [INNER, [rank // 2 * 2, rank // 2 * 2 + 1]]


def searched(zero: dict[str, int]) -> tuple[float, list[str]]:
    """A search for the learning rate puts back what it changed; what it found."""
    trained = model()
    engine, *_ = initialize(model=trained, config=config(3, 1, zero, bf16={"enabled": True}))
    steps(engine, 1, 0, 2)
    before, snapshot = full_weights(trained), Snapshot(engine)
    data = [batch for step in batches(1, WORLD) for batch in step[:, dist.get_rank()]]
    result = engine.lr_range_test(
        data, num_steps=12, seeds=1, confirm_steps=3, moment_steps=2, train_batches=6, held_out_batches=1
    )
    wrong = snapshot.differences()
    after = full_weights(trained)  # gathered from second shards
    wrong += [name for name, value in before.items() if not torch.equal(after[name], value)]
    engine.destroy()
    return result.lr, wrong


def searched_each() -> list[Any]:
    return [searched(zero) for zero in ({}, HPZ, MICS)]


@pytest.mark.slow
def test_a_search_for_the_learning_rate_puts_everything_back() -> None:
    for plain, second, inside in run_distributed(searched_each, WORLD):
        assert (plain[1], second[1], inside[1]) == ([], [], [])
        assert second[0] == plain[0]


def frozen(zero: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], set[int]]:
    """Most parameters do not train: they have no second state that could be divided otherwise."""
    trained = model()
    for name, param in trained.named_parameters():
        param.requires_grad_("bias" in name)
    engine, *_ = initialize(model=trained, config=config(3, 1, zero))
    losses, _ = steps(engine)
    sizes = {buffer.axis.world_size for unit in engine.units for buffer in unit.buffers if buffer.frozen}
    weights = full_weights(trained)
    engine.destroy()
    return losses, weights, sizes


def frozen_each() -> list[Any]:
    return [frozen(zero) for zero in ({}, HPZ, MICS)]


def test_parameters_that_do_not_train() -> None:
    for plain, second, inside in run_distributed(frozen_each, WORLD):
        assert (plain[2], second[2], inside[2]) == ({WORLD}, {INNER}, {INNER})
        assert second[0] == plain[0]
        assert all(torch.equal(second[1][name], value) for name, value in plain[1].items())
        assert distance(inside[1], plain[1]) < 1e-6


# -- beside model parallelism -------------------------------------------------------------------------------------


def beside_mpu(zero: dict[str, Any], tensor: int, stage: int = 3) -> dict[str, Any]:
    mpu = Mpu(tensor)
    trained = divide(model(), mpu)
    engine, *_ = initialize(model=trained, mpu=mpu, config=config(stage, 1, zero))
    losses, norms = [], []
    for step in batches(1, mpu.get_data_parallel_world_size())[:STEPS]:
        loss = engine(step[0, mpu.get_data_parallel_rank()])
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        norms.append(engine.get_global_grad_norm())
    found = {"losses": losses, "norms": norms, "weights": gathered_weights(full_weights(trained), mpu)}
    engine.destroy()
    return found


def beside_mpu_each(tensor: int, cells: list[tuple[dict[str, Any], int]]) -> list[dict[str, Any]]:
    return [beside_mpu(zero, tensor, stage) for zero, stage in cells]


@pytest.mark.parametrize(
    ("world", "cells"),
    [
        (4, [({}, 3), ({"mics_shard_size": 1}, 3)]),
        pytest.param(8, [({}, 3), (HPZ, 3), (MICS, 3), (MICS, 1)], marks=pytest.mark.slow),
    ],
)
def test_beside_an_mpu(world: int, cells: list[tuple[dict[str, Any], int]]) -> None:
    for plain, *others in run_distributed(beside_mpu_each, world, 2, cells, timeout=120):
        for (zero, _), found in zip(cells[1:], others, strict=True):
            if zero is HPZ:
                assert_equal(found, plain)
            assert found["norms"] == pytest.approx(plain["norms"], rel=1e-5)
            assert distance(found["weights"], plain["weights"]) < 1e-6


# -- what is refused ----------------------------------------------------------------------------------------------


def refused(**zero: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        initialize(model=model(), config=config(zero.pop("stage", 3), 1, zero))
    return str(caught.value)


def refusals() -> list[str]:
    return [
        refused(mics_shard_size=3),
        refused(zero_hpz_partition_size=8),
        refused(mics_shard_size=2, zero_hpz_partition_size=2),
        refused(mics_shard_size=-2),
        refused(zero_hpz_partition_size="two"),
    ]


def test_sizes_that_do_not_fit() -> None:
    for three, eight, both, negative, text in run_distributed(refusals, WORLD):
        assert "zero_optimization.mics_shard_size 3 does not divide the 4 processes" in three
        assert "set it to 2 or 4" in three or "1 or 2 or 4" in three
        assert "zero_optimization.zero_hpz_partition_size 8 does not divide the 4 processes" in eight
        assert "or 4" in eight
        assert "two different ways" in both
        assert "mics_shard_size" in negative
        assert "zero_hpz_partition_size" in text


def test_accelerates_sizes_need_a_stage_that_divides() -> None:
    for text in run_distributed(refused, WORLD, stage=0, env=HYBRID):
        assert "PARALLELISM_CONFIG_DP_SHARD_SIZE is 2, and ZeRO stage 0 divides nothing" in text
        assert "leave dp_shard_size out" in text


def sizes_of_all() -> list[Any]:
    found = []
    for zero in ({"mics_shard_size": WORLD}, {"zero_hpz_partition_size": WORLD}):
        engine, *_ = initialize(model=model(), config=config(3, 1, zero))
        found.append((engine.mesh.shape.inner, engine.plan.inner))
        engine.destroy()
    return found


def test_a_host_of_all_processes_is_plain_zero() -> None:
    assert run_distributed(sizes_of_all, WORLD) == [[(None, None)] * 2] * WORLD


def warned_of_hosts(sizes: list[str]) -> list[str]:
    """Sizes of hosts that are warned of."""
    warned = []
    for local in sizes:
        with (
            patch.dict(os.environ, {"LOCAL_WORLD_SIZE": local}),
            patch("ds_hf.engine.builder.warn_once") as said,
        ):
            engine, *_ = initialize(model=model(), config=config(3, 1, MICS))
        engine.destroy()
        if any("some groups lie on two hosts" in str(call) for call in said.call_args_list):
            warned.append(local)
    return warned


def test_groups_that_do_not_fit_the_hosts() -> None:
    assert run_distributed(warned_of_hosts, WORLD, ["2", "4", "1", "3"])[0] == ["3"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_the_matrix(dtype: str) -> None:
    """Every stage and accumulation, MiCS and hpZ."""
    cells = [
        (stage, accumulation, zero, dtype)
        for stage, accumulation in product((1, 2, 3), (1, 4))
        for zero in ({}, MICS, HPZ if stage == 3 else {})
    ]
    for rank in run_distributed(train_each, WORLD, cells, timeout=240):
        for plain, inside, second in zip(rank[::3], rank[1::3], rank[2::3], strict=True):
            assert_equal(second, plain)
            assert inside["losses"] == pytest.approx(plain["losses"], rel=1e-5 if dtype == "fp32" else 1e-2)
