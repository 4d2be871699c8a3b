"""The mesh of processes: sizes from every source, sources that disagree, sizes that do not fit, missing features."""

from __future__ import annotations

import dataclasses
import itertools
import types
from typing import Any

import pytest

from ds_hf.config import ConfigError, load_config
from ds_hf.config.load import examine
from ds_hf.config.mesh import Claim, MeshShape, find_mesh, given_claims, mesh_shape
from ds_hf.config.triple import WorldSize

BASE = {"train_micro_batch_size_per_gpu": 1}
NO_CHECKS: dict[str, Any] = {"check_batch": False}


def config(**tree: Any) -> Any:
    """A configuration with values whose features the engine may lack: the file's own check would refuse those."""
    plain = load_config({**BASE}, **NO_CHECKS)

    def put(section: Any, values: dict[str, Any]) -> Any:
        changes = {k: put(getattr(section, k), v) if isinstance(v, dict) else v for k, v in values.items()}
        return dataclasses.replace(section, **changes)

    return put(plain, tree)


def mpu(**sizes: Any) -> Any:
    """A module of functions, as Megatron's ``parallel_state`` is one."""
    module = types.ModuleType("parallel_state")
    module.get_data_parallel_group = lambda: None  # type: ignore[attr-defined]
    for name, size in sizes.items():
        setattr(module, f"get_{name}_parallel_world_size", lambda size=size: size)
    return module


class Topology:
    def __init__(self, **dims: int) -> None:
        self.dims = dims

    def get_axis_names(self) -> list[str]:
        return list(self.dims)

    def get_dim(self, axis: str) -> int:
        return self.dims[axis]


def environ(**sizes: Any) -> dict[str, str]:
    named = {f"PARALLELISM_CONFIG_{name}_SIZE": str(size) for name, size in sizes.items()}
    return {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", **named}


TP2 = {"tensor_parallel": {"autotp_size": 2}}
MICS = {"zero_optimization": {"mics_shard_size": 2}}


@pytest.mark.parametrize(
    ("tree", "given", "world", "shape"),
    [
        ({}, {}, 1, MeshShape()),
        ({}, {}, 8, MeshShape(data=8)),
        (TP2, {}, 8, MeshShape(data=4, tensor=2)),
        ({"tensor_parallel": {"autotp_size": 0}}, {}, 8, MeshShape(data=8)),
        ({"sequence_parallel_size": 4}, {}, 8, MeshShape(data=2, sequence=4)),
        ({"sequence_parallel_size": 4, "data_parallel_size": 2}, {}, 8, MeshShape(data=2, sequence=4)),
        ({"data_parallel_size": 8}, {}, 8, MeshShape(data=8)),
        ({"pipeline": {"stages": 2}}, {}, 8, MeshShape(pipe=2, data=4)),
        ({"pipeline": {"stages": "auto"}}, {}, 8, MeshShape(data=8)),
        ({"expert_parallel": {"enabled": True, "autoep_size": 4}}, {}, 8, MeshShape(data=8, expert=4)),
        (MICS, {}, 8, MeshShape(data=8, inner=2)),
        ({"zero_optimization": {"zero_hpz_partition_size": 4}}, {}, 8, MeshShape(data=8, inner=4)),
        (MICS, {"mpu": mpu(model=2)}, 8, MeshShape(data=4, tensor=2, inner=2)),
        ({}, {"mesh_param": (4, 2)}, 8, MeshShape(data=4, sequence=2)),
        ({}, {"mpu": mpu(model=2)}, 8, MeshShape(data=4, tensor=2)),
        ({}, {"mpu": mpu(tensor_model=2, data=4)}, 8, MeshShape(data=4, tensor=2)),
        ({}, {"mpu": mpu(slice=2, model=2)}, 8, MeshShape(data=4, tensor=2)),
        ({}, {"mpu": mpu(model=4, pipe=2)}, 8, MeshShape(pipe=2, data=2, tensor=2)),
        ({}, {"mpu": mpu(model=4, pipe=2, slice=2, data=2)}, 8, MeshShape(pipe=2, data=2, tensor=2)),
        # Megatron-core says the same size by several names
        ({}, {"mpu": mpu(tensor_model=2, expert_tensor=2, tensor_and_context=2)}, 8, MeshShape(data=4, tensor=2)),
        (TP2, {"mpu": mpu(tensor_model=2)}, 8, MeshShape(data=4, tensor=2)),
        ({}, {"topology": Topology(pipe=2, data=2, model=2)}, 8, MeshShape(pipe=2, data=2, tensor=2)),
        ({}, {"environ": environ(TP=2, SP=2)}, 8, MeshShape(data=2, sequence=2, tensor=2)),
        ({}, {"environ": environ(DP_REPLICATE=2, DP_SHARD=4)}, 8, MeshShape(data=8, inner=4)),
        ({}, {"environ": environ(DP_SHARD=8)}, 8, MeshShape(data=8)),
        ({}, {"environ": {"PARALLELISM_CONFIG_TP_SIZE": "2"}}, 8, MeshShape(data=8)),  # accelerate does not look either
    ],
)
def test_the_shape(tree: dict[str, Any], given: dict[str, Any], world: int, shape: MeshShape) -> None:
    assert mesh_shape(config(**tree), world, given_claims(**given)) == shape
    assert shape.processes == world


def text_of(tree: dict[str, Any], world: int = 8, **given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        mesh_shape(config(**tree), world, given_claims(**given))
    return str(caught.value)


def test_a_topology_an_mpu_and_a_file_that_disagree_are_all_named() -> None:
    text = text_of(TP2, mpu=mpu(tensor_model=4), topology=Topology(pipe=1, data=1, model=8))
    said = "2 (tensor_parallel.autotp_size), 4 (mpu.get_tensor_model_parallel_world_size())"
    assert f"the tensor-parallel size is given as {said} and 8 (topology.get_dim('model'))" in text
    assert "/tensor_parallel/autotp_size" in text
    assert "make them agree" in text


def test_model_sizes_that_disagree() -> None:
    text = text_of({}, mpu=mpu(model=4, tensor_model=2))
    assert "the model-parallel size (pipe x tensor) is given as" in text
    assert "2 (mpu.get_tensor_model_parallel_world_size()) and 4 (mpu.get_model_parallel_world_size())" in text


def test_all_disagreements_at_once() -> None:
    tree = {**TP2, "sequence_parallel_size": 2, **MICS}
    tree["zero_optimization"] = {"mics_shard_size": 2, "zero_hpz_partition_size": 4}
    with pytest.raises(ConfigError) as caught:
        mesh_shape(config(**tree), 8, given_claims(mpu=mpu(model=4), mesh_param=(4, 1)))
    messages = [fault.message for fault in caught.value.faults]
    assert len(messages) == 4
    assert any(
        "the sequence-parallel size is given as 2 (sequence_parallel_size) and 1 (mesh_param[1])" in m for m in messages
    )
    assert any("the model-parallel size" in m for m in messages)
    assert any("the inner (hierarchical ZeRO) size is given as 2" in m for m in messages)
    assert any("two different ways" in m for m in messages)


@pytest.mark.parametrize(
    ("tree", "given", "world", "said", "near"),
    [
        (
            {"tensor_parallel": {"autotp_size": 3}},
            {},
            8,
            "tensor-parallel 3 (tensor_parallel.autotp_size) does not divide the 8 processes",
            ["data 2 x tensor 4", "data 4 x tensor 2", "data 1 x tensor 8", "data 8"],
        ),
        (
            {},
            {"mpu": mpu(tensor_model=2, data=4)},
            4,
            "(mpu.get_data_parallel_world_size()) is 8, and there are 4 processes",
            ["data 2 x tensor 2", "data 4"],
        ),
        ({}, {"mesh_param": (8, 1)}, 4, "data-parallel 8 (mesh_param[0]) is 8, and there are 4", ["data 4"]),
        ({"data_parallel_size": 3}, {"mesh_param": (3, 1)}, 4, ": data-parallel 3 (mesh_param[0]) is 3,", ["data 4"]),
        ({"data_parallel_size": 3}, {}, 4, "data-parallel 3 (data_parallel_size) is 3, and there are 4", ["data 4"]),
        (
            {},
            {"topology": Topology(pipe=2, data=2, model=3)},
            8,
            "is 12, and there are 8 processes",
            ["pipe 2 x data 2 x tensor 2", "pipe 2 x data 1 x tensor 4", "pipe 4 x data 2", "pipe 2 x data 4"],
        ),
    ],
)
def test_sizes_that_do_not_multiply_list_the_near_ones(
    tree: dict[str, Any], given: dict[str, Any], world: int, said: str, near: list[str]
) -> None:
    text = text_of(tree, world, **given)
    assert said in text
    shown = [line.strip() for line in text.splitlines()]
    assert shown[-len(near) :] == near or set(near[:1]) <= set(shown[-4:])


def test_what_is_listed_multiplies_to_the_world() -> None:
    for world, tensor, pipe in itertools.product((1, 2, 6, 8, 12), (2, 3, 5), (1, 2, 4)):
        shape, faults = find_mesh(config(), world, [Claim("tensor", tensor, "t", "t"), Claim("pipe", pipe, "p", "p")])
        assert bool(faults) == (pipe > 1 or world % tensor != 0)  # the pipeline is missing
        claims = [Claim("tensor", tensor, "mpu.t()", "initialize(mpu=...)")]
        shape, faults = find_mesh(config(), world, claims)
        if world % tensor == 0:
            assert (shape, faults) == (MeshShape(data=world // tensor, tensor=tensor), [])
            continue
        assert len(faults) == 1
        lines = [line.split() for line in faults[0].fix.splitlines()[1:]]
        assert 1 <= len(lines) <= 4
        for line in lines:
            sizes = dict(zip(line[::3], map(int, line[1::3]), strict=True))
            assert sizes["data"] * sizes.get("tensor", 1) == world


@pytest.mark.parametrize(
    ("tree", "said", "fix"),
    [
        (
            {"zero_optimization": {"mics_shard_size": 3}},
            "zero_optimization.mics_shard_size 3 does not divide the 8",
            "2 or",
        ),
        ({"zero_optimization": {"zero_hpz_partition_size": 16}}, "does not divide the 8 processes", "or 8"),
        ({"expert_parallel": {"enabled": True, "autoep_size": 6}}, "expert_parallel.autoep_size 6 does not", "or 8"),
    ],
)
def test_parts_divide_the_processes_that_hold_the_same(tree: dict[str, Any], said: str, fix: str) -> None:
    text = text_of(tree)
    assert said in text
    assert fix in text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mesh_param": (4,)}, "(4,) is not a mesh"),
        ({"mesh_param": "41"}, "'41' is not a mesh"),
        ({"mesh_param": 4}, "4 is not a mesh"),
        ({"mesh_param": (4, 0)}, "(4, 0) is not a mesh"),
        ({"mesh_param": (4, True)}, "(4, True) is not a mesh"),
        ({"mpu": mpu(model="two")}, "mpu.get_model_parallel_world_size() gives 'two', not a number"),
        ({"mpu": mpu(model=0)}, "mpu.get_model_parallel_world_size() gives 0, which is not a number of processes"),
        ({"mpu": object()}, "object has no get_data_parallel_group()"),
        ({"topology": Topology(pipe=2, depth=2)}, "it has an axis 'depth'"),
        ({"environ": environ(TP="two")}, "PARALLELISM_CONFIG_TP_SIZE gives 'two', not a number"),
    ],
)
def test_what_is_no_size(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        given_claims(**given)
    assert said in str(caught.value)
    assert next(iter(given)) in str(caught.value)  # where


def test_what_is_no_size_is_found_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        given_claims(mpu=mpu(model="two", pipe=-1), mesh_param=(1,), environ=environ(SP="x"))
    assert len(caught.value.faults) == 4


def test_groups_that_were_never_made_are_passed_over() -> None:
    def never() -> int:
        raise AssertionError("context parallel group is not initialized")

    given = mpu(model=2)
    given.get_context_parallel_world_size = never
    given.get_expert_parallel_world_size = lambda group_name: 4  # DeepSpeed's: of one group of experts
    assert [claim.axis for claim in given_claims(mpu=given)] == ["model"]


def test_names_that_only_getattr_knows() -> None:
    class Wrapper:
        def __getattr__(self, name: str) -> Any:
            return getattr(mpu(tensor_model=2), name)

    assert [(claim.axis, claim.size) for claim in given_claims(mpu=Wrapper())] == [("tensor", 2)]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("context", "context parallelism"),
        ("expert_model", "expert parallelism"),
        ("hierarchical_context", "hierarchical context parallelism"),  # in no list: found by its form
    ],
)
def test_missing_features_of_an_mpu_are_refused_by_name(name: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(BASE, world_size=12, given=given_claims(mpu=mpu(**{name: 3})))
    text = str(caught.value)
    assert f"mpu.get_{name}_parallel_world_size() is 3: {what} is not supported yet" in text
    assert "ZeRO stage 3" in text
    assert len(caught.value.faults) == 1


@pytest.mark.parametrize("name", ["pipeline_model", "pipe"])
def test_stages_of_an_mpu_need_a_pipeline_module(name: str) -> None:
    given = given_claims(mpu=mpu(**{name: 3}))
    with pytest.raises(ConfigError) as caught:
        load_config(BASE, world_size=12, given=given)
    assert f"mpu.get_{name}_parallel_world_size() is 3, and the model is not a PipelineModule" in str(caught.value)
    assert len(caught.value.faults) == 1
    with_topology = [*given, *given_claims(topology=Topology(pipe=3, data=4))]
    assert load_config(BASE, world_size=12, given=with_topology).mesh == MeshShape(pipe=3, data=4)
    with pytest.raises(ConfigError, match="the pipeline-parallel size is given as 3"):
        load_config(BASE, world_size=12, given=[*given, *given_claims(topology=Topology(pipe=4, data=3))])


def test_missing_features_of_the_environment_and_mesh_param() -> None:
    given = given_claims(mesh_param=(2, 2), environ=environ(TP=2, CP=2))
    with pytest.raises(ConfigError) as caught:
        load_config({**BASE, "sequence_parallel_size": 2}, world_size=8, given=given)
    text = str(caught.value)
    assert "PARALLELISM_CONFIG_TP_SIZE" not in text
    assert "PARALLELISM_CONFIG_CP_SIZE is 2: context parallelism is not supported yet" in text
    assert "cp_size is for FSDP2" in text
    assert len(caught.value.faults) == 1


def test_an_mpu_that_divides_sequences_alone() -> None:
    module = types.ModuleType("parallel_state_sp")
    for name in ("sequence", "sequence_data", "model"):  # the last is another name of the first
        setattr(module, f"get_{name}_parallel_world_size", lambda name=name: 8 if name == "sequence_data" else 4)
    given = given_claims(mpu=module)
    assert given == [Claim("sequence", 4, "mpu.get_sequence_parallel_world_size()", "initialize(mpu=...)")]
    for total in (1, 8, 2):  # of accelerate, of a Trainer, and right
        tree = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "train_batch_size": total}
        found = load_config(tree, world_size=8, given=given)
        assert (found.mesh, found.train_batch_size) == (MeshShape(data=2, sequence=4), 2)


def test_the_batch_counts_processes_that_read_different_samples() -> None:
    given = given_claims(mpu=mpu(model=2))
    found = load_config({"train_micro_batch_size_per_gpu": 2}, world_size=8, given=given)
    assert found.mesh == MeshShape(data=4, tensor=2)
    assert found.train_batch_size == 8
    with pytest.raises(ConfigError) as caught:
        load_config({"train_batch_size": 18, "train_micro_batch_size_per_gpu": 2}, world_size=8, given=given)
    text = str(caught.value)
    assert "x data-parallel size 4 = 8" in text
    assert "(data-parallel size 4: 8 processes, given as world_size, are data 4 x tensor 2)" in text


def test_a_total_that_counts_tensor_parallel_processes_is_derived_anew() -> None:
    """transformers fills in micro-batch x accumulation x all processes."""
    given = given_claims(mpu=mpu(model=2))
    tree = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    found = load_config({**tree, "train_batch_size": 48}, world_size=8, given=given)
    assert (found.train_batch_size, found.resolved["train_batch_size"]) == (24, 24)
    assert any("it counts 8 processes, of which 4 read different samples" in str(each) for each in found.warnings)
    assert load_config({**tree, "train_batch_size": 24}, world_size=8, given=given).warnings == ()
    with pytest.raises(ConfigError):
        load_config({**tree, "train_batch_size": 36}, world_size=8, given=given)
    with pytest.raises(ConfigError):  # without a mesh it is a contradiction as ever
        load_config({**tree, "train_batch_size": 96}, world_size=8)


def test_an_unknown_world_fits_everything() -> None:
    tree = {**BASE, "data_parallel_size": 3}
    assert examine(tree, world=WorldSize(0, "unknown"), allow_auto=True).mesh is None
    assert load_config(BASE, check_batch=False).mesh is None
    assert load_config(BASE, world_size=3).mesh == MeshShape(data=3)
