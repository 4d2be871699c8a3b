"""Parallel models that the engine does not train are refused by name, before anything is built."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from ds_hf import initialize
from ds_hf.engine.zero.init import Init
from ds_hf.errors import ConfigError
from tests.helpers.distributed import run_distributed

CONFIG = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}


class Stages:
    """Two stages of a pipeline, as Megatron says it."""

    def get_data_parallel_group(self) -> Any:
        return None

    def get_pipeline_model_parallel_world_size(self) -> int:
        return dist.get_world_size()


class Topology:
    def get_axis_names(self) -> list[str]:
        return ["pipe", "data"]

    def get_dim(self, axis: str) -> int:
        return 2 if axis == "pipe" else 1


class Pipeline(nn.Linear):
    def topology(self) -> Topology:
        return Topology()


def refusal(**given: Any) -> str:
    model = given.pop("model", None) or nn.Linear(4, 2)
    try:
        initialize(model=model, config=given.pop("config", CONFIG), **given)
    except ConfigError as error:
        return str(error)
    return ""


def on_two_ranks() -> dict[str, str]:
    found = {
        "mpu": refusal(mpu=Stages()),
        "topology": refusal(model=Pipeline(4, 2)),
        "sequence": refusal(mesh_param=(1, 2)),
        "data": refusal(mesh_param=(2, 1)),
        "too many": refusal(mesh_param=(8, 1)),
        "json": refusal(config={**CONFIG, "tensor_parallel": {"autotp_size": 2}}),
        "json sequence": refusal(config={**CONFIG, "sequence_parallel_size": 2}),
        "json data": refusal(config={**CONFIG, "data_parallel_size": 4}),
        "all": refusal(mpu=Stages(), config={**CONFIG, "sequence_parallel_size": 2}),
    }
    try:
        with Init(mpu=Stages()):
            nn.Linear(4, 2)
    except ConfigError as error:
        found["zero.Init"] = str(error)
    return found


def test_initialize_refuses_what_is_parallel() -> None:
    for found in run_distributed(on_two_ranks, 2):
        for case in ("mpu", "zero.Init", "all"):
            text = "mpu.get_pipeline_model_parallel_world_size() is 2, and the model is not a PipelineModule: nothing"
            assert text in found[case], case
            assert "topology=PipeModelDataParallelTopology(num_pp, num_mp, num_dp)" in found[case], case
        assert "topology.get_dim('pipe') is 2, and the model is not a PipelineModule" in found["topology"]
        assert found["sequence"] == found["json sequence"] == ""  # the model has no attention to divide
        assert found["data"] == ""
        assert "is 8, and there are 2 processes" in found["too many"]
        assert "Linear has no tp_plan, and nothing else says how its layers are divided over 2" in found["json"]
        assert "data-parallel 4 (data_parallel_size) is 4, and there are 2 processes" in found["json data"]
