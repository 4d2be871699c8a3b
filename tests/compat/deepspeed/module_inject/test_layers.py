"""``deepspeed.module_inject``: layers cut by hand against whole ones, and what the engine's modules are there."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.module_inject.autotp_config import AutoTPConfig, AutoTPPresets, PartitionType
from deepspeed.module_inject.layers import (
    GatherReplacedLayerParams,
    LinearAllreduce,
    LinearLayer,
    LmHeadLinearAllreduce,
    SubParamLinearLayer,
    is_autotp_training_mode,
    set_autotp_mode,
)
from deepspeed.module_inject.tp_shard import get_shard_size_list
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils import groups
from torch import nn

from tests.helpers.distributed import run_distributed
from tests.helpers.tensor import batches_of, build, loss_of, tensor_section

TENSOR = 2


def by_hand(outputs: int) -> dict[str, float]:
    """The largest differences of outputs and gradients from the whole layer's."""
    groups._init_tp_mesh_device(tensor_model_parallel_size=TENSOR)
    group, rank = groups.get_tensor_model_parallel_group(), groups.get_tensor_model_parallel_rank()
    assert (groups.get_tensor_model_parallel_world_size(), groups.get_data_parallel_world_size()) == (2, 1)
    assert groups.get_tensor_model_parallel_src_rank() == dist.get_rank() // 2 * 2
    torch.manual_seed(3)
    whole = nn.Linear(16, outputs).double()
    x = torch.randn(2, 3, 16, dtype=torch.float64, requires_grad=True)
    expected = whole(x)
    expected.square().sum().backward()
    sizes = get_shard_size_list(outputs, TENSOR)
    found: dict[str, float] = {}

    def compare(name: str, layer: Any, inputs: Any, dim: int, parts: list[int]) -> None:
        own = inputs.detach().requires_grad_()
        output = layer(own)
        output.square().sum().backward()
        found[f"{name} output"] = float((output - expected).abs().max())
        grad = whole.weight.grad
        assert grad is not None
        found[f"{name} gradient"] = float((layer.weight.grad - grad.split(parts, dim)[rank]).abs().max())
        assert is_model_parallel_parameter(layer.weight)
        with GatherReplacedLayerParams([layer.weight, layer.bias], layer):
            found[f"{name} gathered"] = float((layer.weight - whole.weight).abs().max())
        layer.weight.gather_params([layer.weight])
        assert layer.weight.shape == whole.weight.shape
        layer.weight._tp_partition([layer.weight])
        assert layer.weight.shape[dim] == parts[rank]

    compare("column", LinearLayer(deepcopy(whole), group, gather_output=True), x, 0, sizes)
    compare("row", LinearAllreduce(deepcopy(whole), group), x.chunk(2, -1)[rank], 1, [8, 8])
    compare("head", LmHeadLinearAllreduce(deepcopy(whole), group), x, 1, [8, 8])
    return found


@pytest.mark.parametrize("outputs", [12, 9])
def test_layers_made_by_hand(outputs: int) -> None:
    for found in run_distributed(by_hand, TENSOR, outputs):
        assert max(found.values()) < 1e-12, found


def trained_by_the_engine(stage: int) -> tuple[list[float], list[float]]:
    """Losses of three steps: of layers that are cut by hand beside one that no rule cuts, and of whole ones."""
    groups._init_tp_mesh_device(tensor_model_parallel_size=TENSOR)
    group = groups.get_tensor_model_parallel_group()
    torch.manual_seed(3)
    whole = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 16), nn.Linear(16, 4))
    model = deepcopy(whole)
    model[0], model[2] = LinearLayer(model[0], group), LinearAllreduce(model[2], group)
    rules = {"use_default_specs": False, "layer_specs": [{"patterns": [".*"], "partition_type": "skip"}]}
    config = {
        "train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "tensor_parallel": {"autotp_size": TENSOR, "partition_config": rules}, "zero_optimization": {"stage": stage},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    found, wanted = [], []
    for step in range(3):
        data = torch.randn(3, 16, generator=torch.Generator().manual_seed(step))
        loss, expected = engine(data).square().mean(), whole(data).square().mean()
        engine.backward(loss)
        engine.step()
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        found.append(loss.item())
        wanted.append(expected.item())
    return found, wanted


@pytest.mark.parametrize("stage", [0, 2])
def test_layers_made_by_hand_in_an_engine(stage: int) -> None:
    for found, wanted in run_distributed(trained_by_the_engine, 2, stage):
        assert found == pytest.approx(wanted, rel=1e-6)


def cut_by_the_engine(stage: int) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "tensor_parallel": tensor_section("fused", TENSOR),
    }
    engine, *_ = deepspeed.initialize(model=build("fused"), config=config)
    assert engine.autotp_size() == 2
    assert is_autotp_training_mode()
    said = engine.module.universal_checkpoint_info["parameter_with_row_parallelism_patterns"]
    assert said[0] == r"^blocks\.0\.attention\.out\.weight$"
    block = engine.module.blocks[0]
    assert isinstance(block.attention.qkv, SubParamLinearLayer)
    assert isinstance(block.attention.qkv, nn.Linear)
    assert isinstance(block.attention.out, LinearAllreduce)
    assert isinstance(engine.module.lm_head, LinearLayer)
    assert engine.module.lm_head.gather_output
    assert not isinstance(block.norm, LinearLayer)
    params = list(block.parameters())
    before = build("fused").blocks[0]
    with GatherReplacedLayerParams(params, block):
        for name, param in before.named_parameters():
            if is_model_parallel_parameter(block.get_parameter(name)):
                assert torch.equal(block.get_parameter(name), param), name
        with torch.no_grad():
            block.attention.out.weight.fill_(0.5)
    whole = engine._consolidated_16bit_state_dict()
    if dist.get_rank() == 0:
        assert torch.equal(whole["blocks.0.attention.out.weight"], torch.full((32, 32), 0.5))
        assert whole["blocks.0.attention.qkv.weight"].shape == (64, 32)
    engine.backward(loss_of(engine, batches_of(1, 1, 1)[0, 0, 0]))
    engine.step()  # the masters know of what was written
    after = engine._consolidated_16bit_state_dict()
    if dist.get_rank() == 0:
        assert 0.3 < float(after["blocks.0.attention.out.weight"].mean()) < 0.7


@pytest.mark.parametrize("stage", [1, 3])
def test_modules_that_the_engine_cut(stage: int) -> None:
    run_distributed(cut_by_the_engine, TENSOR, stage)


def test_rules_as_objects() -> None:
    given = {"patterns": [".*a$"], "partition_type": "row", "shape": [-1, [2, 4]]}
    rules = AutoTPConfig.from_dict({"layer_specs": [given]})
    spec = rules.find_matching_spec("x.a")
    assert spec is not None
    assert (spec.partition_type, spec.get_partition_dim(), spec.get_sub_param_sizes()) == (PartitionType.ROW, 1, (2, 4))
    with pytest.raises(ValueError, match="nested tuple only allowed"):
        AutoTPConfig.from_dict({"layer_specs": [{"patterns": ["a"], "shape": [-1, [2, 4]]}]})
    llama = AutoTPPresets.get_preset("llama")
    assert llama is not None
    found = llama.find_matching_spec("model.layers.3.mlp.down_proj.weight")
    assert found is not None
    assert found.partition_type is PartitionType.ROW
    set_autotp_mode(training=False)
    assert not is_autotp_training_mode()


def asked_for() -> dict[str, str]:
    """What ``tp_model_init`` refuses, and what it does."""
    base: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    rules = tensor_section("fused", 0)["partition_config"]

    def refused(size: int, dtype: torch.dtype, mpu: Any = None, **more: Any) -> str:
        group = more.pop("tp_group", None)
        try:
            model = deepspeed.tp_model_init(build("fused"), tp_size=size, dtype=dtype, config=None, tp_group=group)
            deepspeed.initialize(model=model, config={**base, **more}, mpu=mpu)
        except ValueError as error:
            return str(error)
        return ""

    group = dist.new_group(ranks=[0, 1])
    again = build("fused")
    assert deepspeed.tp_model_init(again, tp_size=2, dtype=torch.float32) is again
    with pytest.raises(ValueError, match="Conflicting tp_model_init arguments"):
        deepspeed.tp_model_init(again, tp_size=1, dtype=torch.float32)
    engine, *_ = deepspeed.initialize(model=again, config={**base, "tensor_parallel": {"partition_config": rules}})
    assert engine.autotp_size() == 2
    assert engine.train_batch_size() == 1
    return {
        "size": refused(2, torch.float32, tensor_parallel={"autotp_size": 4}),
        "dtype": refused(2, torch.float16, bf16={"enabled": True}, tensor_parallel={"partition_config": rules}),
        "mpu": refused(2, torch.float32, mpu=object(), tp_group=group),
        "group": refused(2, torch.float32, tp_group=group, tensor_parallel={"partition_config": rules}),
    }


def test_tp_model_init() -> None:
    for found in run_distributed(asked_for, TENSOR):
        assert "tensor_parallel.autotp_size" in found["size"]
        assert "Conflicting dtype" in found["dtype"]
        assert "tp_model_init provided tp_group" in found["mpu"]
        assert found["group"] == ""
