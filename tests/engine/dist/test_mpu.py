"""An ``mpu`` or a mesh in which the model is parallel is refused by name, before anything is built."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from ds_hf import initialize
from ds_hf.engine.dist.mpu import check_mesh_param, check_mpu
from ds_hf.engine.zero.init import Init
from ds_hf.errors import ConfigError
from tests.helpers.distributed import run_distributed

CONFIG = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}


def mpu(**sizes: Any) -> Any:
    """A module of functions, as Megatron's ``parallel_state`` is one."""
    module = types.ModuleType("parallel_state")
    module.get_data_parallel_group = lambda: None  # type: ignore[attr-defined]
    for name, size in {"data": 8, "sequence_data": 8, "expert_data": 8, **sizes}.items():
        setattr(module, f"get_{name}_parallel_world_size", lambda size=size: size)
    return module


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model", "model parallel"),
        ("tensor_model", "tensor model parallel"),
        ("slice", "slice parallel"),
        ("pipeline_model", "pipeline model parallel"),
        ("pipe", "pipe parallel"),
        ("sequence", "sequence parallel"),
        ("context", "context parallel"),
        ("expert_model", "expert model parallel"),
        ("hierarchical_context", "hierarchical context parallel"),  # in no list: found by its form
    ],
)
def test_a_size_above_one_is_refused_by_name(name: str, kind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_mpu(mpu(**{name: 3}))
    text = str(caught.value)
    assert f"mpu.get_{name}_parallel_world_size() is 3: {kind} training is not supported yet" in text
    assert "ZeRO stage 3" in text


def test_sizes_of_one_and_groups_that_were_never_made_pass() -> None:
    def not_initialized() -> int:
        raise AssertionError("context parallel group is not initialized")

    plain = mpu(model=1, tensor_model=1, sequence=1, expert_model=0, slice=None)
    plain.get_context_parallel_world_size = not_initialized
    plain.get_expert_parallel_world_size = lambda group_name: 4  # DeepSpeed's groups: of one group of experts
    check_mpu(plain)


def test_names_that_only_getattr_knows() -> None:
    class Wrapper:
        def __getattr__(self, name: str) -> Any:
            return getattr(mpu(tensor_model=2), name)

    with pytest.raises(ConfigError, match=r"mpu\.get_tensor_model_parallel_world_size\(\) is 2"):
        check_mpu(Wrapper())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (mpu(model="two"), r"get_model_parallel_world_size\(\) gives 'two', not a number"),
        (object(), r"object has no get_data_parallel_group\(\)"),
    ],
)
def test_what_cannot_tell(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_mpu(given)


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ((2, 2), "the sequence-parallel size is 2"),
        ((8, 1), "it has 8 data-parallel processes, and 4 run"),
        ((4,), "is not a mesh"),
        ("41", "is not a mesh"),
        (4, "is not a mesh"),
        ((4, 0), "is not a mesh"),
        ((4, True), "is not a mesh"),
    ],
)
def test_meshes_that_are_refused(mesh: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_mesh_param(mesh, 4)
    check_mesh_param((4, 1), 4)
    check_mesh_param([4, 1], 4)


class Tensors:
    """Two processes that share each layer, as Megatron says it."""

    def get_data_parallel_group(self) -> Any:
        return None

    def get_tensor_model_parallel_world_size(self) -> int:
        return dist.get_world_size()


def refusal(**given: Any) -> str:
    model = given.pop("model", None) or nn.Linear(4, 2)
    try:
        initialize(model=model, config=given.pop("config", CONFIG), **given)
    except ConfigError as error:
        return str(error)
    return ""


def on_two_ranks() -> dict[str, str]:
    found = {
        "mpu": refusal(mpu=Tensors()),
        "sequence": refusal(mesh_param=(1, 2)),
        "data": refusal(mesh_param=(2, 1)),
        "json": refusal(config={**CONFIG, "tensor_parallel": {"autotp_size": 2}}),
        "json sequence": refusal(config={**CONFIG, "sequence_parallel_size": 2}),
    }
    try:
        with Init(mpu=Tensors()):
            nn.Linear(4, 2)
    except ConfigError as error:
        found["zero.Init"] = str(error)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallel = parallelize_module(nn.Sequential(nn.Linear(4, 2)), mesh, {"0": ColwiseParallel()})
    found["DTensor"] = refusal(model=parallel, config={**CONFIG, "zero_optimization": {"stage": 2}})
    frozen = nn.Linear(4, 2)
    whole = distribute_tensor(frozen.weight.detach(), init_device_mesh("cpu", (2, 1)))
    frozen.weight = nn.Parameter(whole, requires_grad=False)
    found["frozen DTensor"] = refusal(model=frozen)
    return found


def test_initialize_refuses_what_is_parallel() -> None:
    for found in run_distributed(on_two_ranks, 2):
        for case in ("mpu", "zero.Init"):
            assert "mpu.get_tensor_model_parallel_world_size() is 2" in found[case], case
        assert "the sequence-parallel size is 2" in found["sequence"]
        assert found["data"] == ""
        assert "tensor parallelism is not" in found["json"]
        assert "sequence parallelism is not" in found["json sequence"]
        assert "0.weight is a DTensor" in found["DTensor"]
        assert "(2 processes, tp; placements S(0))" in found["DTensor"]
        assert "weight is a DTensor" in found["frozen DTensor"]
        assert "(2 x 1 processes; placements R, R)" in found["frozen DTensor"]
        assert "quantized" not in found["DTensor"] + found["frozen DTensor"]
