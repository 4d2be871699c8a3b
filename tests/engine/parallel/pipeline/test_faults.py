"""What goes wrong in a pipeline ends on all stages, and says where."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_hf import initialize
from ds_hf.deepspeed_api.pipeline import PipelineModule
from ds_hf.engine.parallel.pipeline.specs import LayerSpec, TiedLayerSpec
from ds_hf.engine.parallel.pipeline.topology import PipeModelDataParallelTopology
from ds_hf.errors import ConfigError, LossError, PipelineError
from ds_hf.measure.saving import LR_ENV
from tests.engine.parallel.pipeline.models import VOCAB, Embedding, batches, cross_entropy, pairs, pipeline
from tests.helpers.distributed import free_port, run_distributed
from tests.helpers.patience import patient
from tests.helpers.started import ForkedProgram

SGD = {"type": "SGD", "params": {"lr": 0.1}}
CONFIG = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "optimizer": SGD}
SCRIPT = Path(__file__).parent / "faulty_script.py"


def both_ends(how: str, folder: Path) -> list[tuple[int, str]]:
    """Exit code and output of each of two stages."""
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    environment |= {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2", "PYTHONPATH": os.pathsep.join(sys.path)}
    outputs = [folder / f"stage{rank}" for rank in range(2)]
    start: Any = ForkedProgram if how.startswith("kill") else subprocess.Popen  # others end by themselves
    stages = []
    for rank, output in enumerate(outputs):
        with output.open("w") as said:
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            stages.append(start([sys.executable, str(SCRIPT), how], env=own, stdout=said, stderr=subprocess.STDOUT))
    try:
        return [(stage.wait(patient(90)), said.read_text()) for stage, said in zip(stages, outputs, strict=True)]
    finally:
        for stage in stages:
            stage.kill()
            stage.wait()


@pytest.mark.parametrize(
    "how", ["kill", "kill early", *(pytest.param(how, marks=pytest.mark.slow) for how in ("raise", "hang"))]
)
def test_a_stage_that_fails_ends_the_other_one(how: str, tmp_path: Path) -> None:
    (code, output), (other_code, other_output) = both_ends(how, tmp_path)
    assert code != 0
    assert other_code != 0
    assert "DivergenceError" in output or how == "hang"
    report = output if "DivergenceError" in output else other_output
    assert "stage 0 of 2, " in report, report
    assert "of micro-batch" in report
    assert "train_batch" in report  # the stack
    if how == "raise":
        assert "ValueError: this layer has had enough" in other_output
        assert "in stage 1 of 2, forward of micro-batch 2" in other_output or sys.version_info < (3, 11)
    if how == "hang":
        assert "which has issued nothing for" in report
        assert "stage 1 of 2, forward of micro-batch 2" in report
        assert "go_wrong" in report


def refused(action: Any, kind: type[BaseException]) -> str:
    try:
        action()
    except kind as error:
        return str(error)
    return ""


class Megatron:
    """An ``mpu`` of two stages; ``alike``: with the groups of the topology."""

    def __init__(self, alike: Any) -> None:
        self.alike = alike

    def get_data_parallel_group(self) -> Any:
        return self.alike.get_data_parallel_group() if self.alike else None

    def get_pipeline_model_parallel_world_size(self) -> int:
        return 2

    def get_model_parallel_group(self) -> Any:
        return self.alike.get_model_parallel_group() if self.alike else None


def on_two_stages() -> dict[str, str]:
    rank = dist.get_rank()
    found = {
        "stage 3": refused(
            lambda: initialize(model=pipeline(), config={**CONFIG, "zero_optimization": {"stage": 3}}), ConfigError
        ),
        "no module": refused(
            lambda: initialize(model=nn.Linear(2, 2), config={**CONFIG, "pipeline": {"stages": 2}}), ConfigError
        ),
        "other stages": refused(
            lambda: initialize(model=pipeline(), config={**CONFIG, "pipeline": {"stages": 4}}), ConfigError
        ),
        "sequence": refused(
            lambda: initialize(model=pipeline(), config={**CONFIG, "sequence_parallel_size": 2}), ConfigError
        ),
        "few layers": refused(lambda: pipeline_of([LayerSpec(nn.Linear, 2, 2)]), ConfigError),
        "no layer": refused(lambda: pipeline_of([nn.Linear(2, 2), 3]), ConfigError),
        "a pipeline": refused(lambda: pipeline_of([nn.Linear(2, 2), pipeline(False)]), ConfigError),
        "shapes": refused(
            lambda: pipeline_of([TiedLayerSpec("e", Embedding, 8), TiedLayerSpec("e", Embedding, 9)]), ConfigError
        ),
        "stages": refused(lambda: pipeline(stages=3), RuntimeError),
        "mpu": refused(lambda: initialize(model=pipeline(), config=CONFIG, mpu=Megatron(None)), ConfigError),
    }
    chunked = {**CONFIG, "gradient_accumulation_steps": 3, "ds_hf": {"pipeline": {"chunks": 2}}}
    found["chunks"] = refused(lambda: initialize(model=pipeline(), config=chunked), ConfigError)
    os.environ[LR_ENV] = "{}"
    found["rates"] = refused(lambda: initialize(model=pipeline(), config=CONFIG), ConfigError)
    del os.environ[LR_ENV]
    module = pipeline(False)
    mpu = Megatron(module.mpu())
    engine, *_ = initialize(model=module, config={**CONFIG, "wall_clock_breakdown": True}, mpu=mpu)
    assert engine.mpu is module.mpu()
    tokens = batches(4, 4)
    found["other items"] = refused(lambda: engine.train_batch(pairs(tokens[rank])), PipelineError)
    engine._compared = False
    engine.train_batch(pairs(tokens[0]))
    short = tokens[1] if rank == 0 else tokens[1][:2]
    found["end"] = refused(lambda: engine.train_batch(pairs(short)), StopIteration)
    found["steps"] = str(engine.global_steps)
    engine.set_dataiterator(None if rank else pairs(tokens[2]))
    found["no data"] = refused(engine.train_batch, PipelineError)
    engine.train_batch(pairs(tokens[3]))  # training goes on
    found["steps after"] = str(engine.global_steps)
    engine.destroy()
    for name, count in (("other values", 16), ("other lengths", 16 - rank)):  # of a loader of ours the order decides
        data = [((ids + rank) % VOCAB, ids) for ids in batches(1, 16)[0][:, 0, 0]][:count]
        engine, *_ = initialize(model=pipeline(False), config=CONFIG, training_data=data)
        found[name] = refused(engine.train_batch, PipelineError)
        engine.destroy()
    return found


def pipeline_of(layers: list[Any]) -> Any:
    from ds_hf.deepspeed_api.pipeline import PipelineModule

    return PipelineModule(layers, num_stages=2)


def test_what_cannot_work_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    for found in run_distributed(on_two_stages, 2, timeout=90):
        assert "ZeRO stage 3 with a pipeline" in found["stage 3"]
        assert "use stage 1 or 2" in found["stage 3"]
        assert "pipeline.stages is 2, and the model is not a PipelineModule" in found["no module"]
        assert "from_transformers" in found["no module"]
        assert "pipeline-parallel size is given as 4 (pipeline.stages) and 2" in found["other stages"]
        assert "inside a pipeline are not supported" in found["sequence"]
        assert "1 layer cannot be divided over 2 stages" in found["few layers"]
        assert "layer 1 is of type int" in found["no layer"]  # on the stage that does not have it, too
        assert "layer 1 is a PipelineModule itself" in found["a pipeline"]
        assert "shape [8, 16] in one and [9, 16] in the other" in found["shapes"]
        assert "its data-parallel group is [0, 1], and that of the topology [0]" in found["mpu"]
        assert "num_stages (3) must divide distributed world size (2)" in found["stages"]
        assert "read different items" in found["other items"]
        assert found["other values"] == ""
        assert "read different items" in found["other lengths"]
        assert "the data end after 2 of 4 micro-batches" in found["end"]
        assert found["steps"] == "1"
        assert "was given none" in found["no data"]
        assert found["steps after"] == "2"
        assert "3 micro-batches a step are not a multiple of the 2 stages" in found["chunks"]
        assert "the LR finder runs forward and backward of an engine by itself" in found["rates"]
    output = capsys.readouterr().out
    assert re.search(r"idle \| stage 0: [\d.]+% \| stage 1: [\d.]+% \| bubble of the schedule: 20.0%", output), output


def on_one_stage() -> list[str]:
    engine, *_ = initialize(model=pipeline(False, 1, loss_fn=None), config=CONFIG)
    return [
        refused(lambda: engine.train_batch(pairs(batches(1, 4)[0])), LossError),
        refused(lambda: engine.train_batch(iter([{"x": 1}] * 4)), PipelineError),
    ]


def test_no_loss_and_no_pairs() -> None:
    loss, form = run_distributed(on_one_stage, 1)[0]
    assert "the loss of a pipeline is one number" in loss
    assert "pairs (inputs, labels), and this item is a dict of 1" in form


def stops_and_goes_on() -> list[int]:
    """The middle stage has no data at all."""
    module = pipeline(False, 3)
    engine, *_ = initialize(model=module, config=CONFIG)
    tokens = batches(3, 4)
    items = [pair for step in tokens for pair in pairs(step)][:10]
    iterator = iter(items) if engine.is_first_stage() or engine.is_last_stage() else None
    steps = 0
    try:
        while True:
            engine.train_batch(iterator)
            steps += 1
    except StopIteration:
        pass
    engine.destroy()
    return [steps, engine.global_steps]


@pytest.mark.slow
def test_the_end_of_the_data_is_seen_by_all_stages() -> None:
    assert run_distributed(stops_and_goes_on, 3) == [[2, 2]] * 3


def test_specs_are_described() -> None:
    assert repr(LayerSpec(nn.Linear, 2, 3, bias=False)) == "Linear(2, 3, bias=False)"
    assert cross_entropy(torch.zeros(1, 2, 4), torch.zeros(1, 2, dtype=torch.int64)) > 1


def odd_on_the_last_stage() -> str:
    layers = [LayerSpec(nn.Linear, 8, 8), LayerSpec(nn.Linear, 8, 7)]
    module = PipelineModule(layers, topology=PipeModelDataParallelTopology(2, 2, 1), loss_fn=nn.functional.mse_loss)
    rules = {"use_default_specs": False, "layer_specs": [{"patterns": [".*weight"], "partition_type": "column"}]}
    settings = {**CONFIG, "tensor_parallel": {"autotp_size": 2, "partition_config": rules}}
    return refused(lambda: initialize(model=module, config=settings), ConfigError)


@pytest.mark.slow
def test_a_layer_of_one_stage_that_does_not_divide_stops_all() -> None:
    for text in run_distributed(odd_on_the_last_stage, 4, timeout=40):
        assert "are 7, which 2 does not divide" in text
