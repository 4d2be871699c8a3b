"""Processes that share sequences or layers: which divisions there are, what they cost, and that the batch stays."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig, MixtralConfig

from ds_hf.autotune import division
from ds_hf.autotune.command import Command
from ds_hf.autotune.cost import MEETING, UNDIVIDED, CostModel, Survey
from ds_hf.autotune.division import EXPERTS, HPZ, MICS, SEQUENCE, TENSOR, TOKENS, MeshDivision, division_of, sizes_of
from ds_hf.autotune.footprint import Footprint
from ds_hf.autotune.options import Metric, Options
from ds_hf.autotune.records import value_of
from ds_hf.autotune.result import Result
from ds_hf.autotune.space import (
    ACTIVATIONS,
    CHECKPOINTING,
    CHUNKED_LOSS,
    COMPILE,
    STAGE,
    Space,
    config_of,
    label_of,
    points,
)
from ds_hf.config import load_config
from ds_hf.config.load import examine
from ds_hf.log import logger
from ds_hf.memory import Predictor, Workload
from tests.autotune.conftest import KEPT
from tests.autotune.test_footprint import SHAPE
from tests.autotune.world import GLOBAL_MICRO, GLOBAL_STEPS, World

LENGTH = 64
FIXED = (*KEPT, CHECKPOINTING, COMPILE, ACTIVATIONS, CHUNKED_LOSS)


def events(processes: int = 4, config: Any = None, tokens: int = LENGTH, **facts: Any) -> dict[str, Any]:
    """What the first launch says: a small Llama on one host."""
    config = config or LlamaConfig(**{**SHAPE, "num_key_value_heads": 2})
    kind = "GPT2LMHeadModel" if isinstance(config, GPT2Config) else "LlamaForCausalLM"
    numel = 512 * 64 * 2 + 2 * (3 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64
    model = {"class": kind, "config": json.loads(config.to_json_string(False)), "attention": "sdpa"}
    known = {"total": numel, "whole_total": numel, "trainable": numel, "largest_unit": numel // 3, "micro": 1,
             "accumulation": 4, "module_dtype": "float32", "world_size": processes, "processes": processes,
             "on_host": processes, "data": processes, "sequence": 1, "tensor": 1, "optimizer": "FusedAdam",
             "cuda": True, "can_checkpoint": True, "checkpointing": False, "model": model}  # fmt: skip
    inputs = {name: ([1, tokens], "int64") for name in ("input_ids", "labels")}
    return {"facts": {**known, **facts}, "survey": {"inputs": inputs, "bandwidth": 1e9}}


def test_sizes_that_processes_and_model_allow() -> None:
    found = sizes_of(events(8), {})
    # four processes compute the two heads of keys by twos
    assert found.values == {TENSOR: (1, 2, 4), SEQUENCE: (1, 2, 4), MICS: (-1, 2, 4), HPZ: (1, 2, 4)}
    two = {TENSOR: (1, 2), SEQUENCE: (1, 2), MICS: (-1, 2), HPZ: (1, 2)}
    assert sizes_of(events(8, on_host=2), {}).values == two
    assert "one process a host" in sizes_of(events(8, on_host=1), {}).why_not[TENSOR]
    assert sizes_of(events(4, tokens=62), {}).values[SEQUENCE] == (1, 2)
    assert "63 tokens" in sizes_of(events(2, tokens=63), {}).why_not[SEQUENCE]
    assert "has no tp_plan" in sizes_of(events(2, GPT2Config(n_layer=1)), {}).why_not[TENSOR]
    assert TOKENS not in found.why_not
    drops = {"partition_config": {"layer_specs": [{"patterns": [r".*mlp\.c_proj\.weight$"], "partition_type": "row"}]}}
    dropping = sizes_of(events(2, GPT2Config(n_layer=2, resid_pdrop=0.1)), {"tensor_parallel": drops})
    assert dropping.values[TENSOR] == (1, 2)
    assert "drops elements" in dropping.why_not[TOKENS]
    eager = events(2)
    eager["facts"]["model"]["attention"] = "eager"
    assert "eager attention" in sizes_of(eager, {}).why_not[SEQUENCE]
    given = events(4, world_size=4, data=2, sequence=2)
    assert sizes_of(given, {}).why_not == {SEQUENCE: "given by the script"}
    assert sizes_of(given, {SEQUENCE: 2}).values[SEQUENCE] == (1, 2, 4)
    assert "data_parallel_size" in sizes_of(events(4), {"data_parallel_size": 4}).why_not[TENSOR]
    assert "not one that transformers builds" in sizes_of(events(4, model=None), {}).why_not[TENSOR]


def test_only_the_thread_that_tries_a_division_is_quiet() -> None:
    """Memory is traced in a thread that may outlive the search."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    begun, over = threading.Event(), threading.Event()

    def trace() -> None:
        with division._quiet():
            logger.warning("from inside")
            begun.set()
            assert over.wait(30)

    thread = threading.Thread(target=trace)
    try:
        thread.start()
        assert begun.wait(30)
        logger.warning("from outside")
    finally:
        over.set()
        thread.join()
        logger.warning("afterwards")
        logger.removeHandler(handler)
    assert heard == ["from outside", "afterwards"]


def space(folder: Path, file: dict[str, Any], flag: str = "--deepspeed", **options: Any) -> Space:
    (folder / "train.py").write_text("")
    command = Command.parse([str(folder / "train.py"), flag, "ds.json"])
    config, said = examine({"train_batch_size": 8, **file}, world=None, allow_auto=True), events(4)
    known = {"cuda": True, "can_checkpoint": True, "division": division_of(said["facts"])}
    return Space(config, command, Options(**options), sizes=sizes_of(said, config.resolved), **known)


def test_layers_are_shared_where_the_trainer_reads_the_data(tmp_path: Path) -> None:
    by_trainer = space(tmp_path, {}, fix=FIXED)
    assert {setting[TENSOR] for setting in by_trainer.settings()} == {1, 2, 4}
    assert next(iter(by_trainer.settings()))[TENSOR] == 1
    assert by_trainer.kept[SEQUENCE] == "free only when named by --tune"
    assert "free only when named" in space(tmp_path, {}, "--deepspeed_config").kept[TENSOR]
    named = space(tmp_path, {}, "--deepspeed_config", tune=(TENSOR, SEQUENCE), fix=FIXED)
    both = {(setting[TENSOR], setting[SEQUENCE]) for setting in named.settings()}
    assert both == {(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2)}  # 2 x 4 are more than the processes
    assert space(tmp_path, {"tensor_parallel": {"autotp_size": 2}}).kept[TENSOR] == "given in the file"
    assert space(tmp_path, {"tensor_parallel": {"tp": {"tp_size": 2}}}).kept[TENSOR] == "given in the file"
    tokens = {(setting[TENSOR], setting[TOKENS]) for setting in by_trainer.settings()}
    assert tokens == {(1, False), (2, False), (2, True), (4, False), (4, True)}
    assert label_of({STAGE: 2, TENSOR: 2, TOKENS: True}) == "stage 2, tensor parallel 2, its tokens divided"
    assert label_of({STAGE: 2, TENSOR: 2, SEQUENCE: 4}) == "stage 2, tensor parallel 2, sequence parallel 4"


def mixture(processes: int = 4, **facts: Any) -> dict[str, Any]:
    said = events(processes, MixtralConfig(**{**SHAPE, "num_key_value_heads": 2, "num_local_experts": 6}), **facts)
    said["facts"]["model"]["class"] = "MixtralForCausalLM"
    return said


def test_experts_are_divided_where_the_model_has_some(tmp_path: Path) -> None:
    assert sizes_of(mixture(), {}).values[EXPERTS] == (0, 1, 2)  # 4 do not divide 6
    assert sizes_of(mixture(6), {}).values[EXPERTS] == (0, 1, 2, 3, 6)
    assert sizes_of(mixture(1), {}).values == {EXPERTS: (0, 1)}
    assert EXPERTS not in space(tmp_path, {}).kept
    (tmp_path / "train.py").write_text("")
    command = Command.parse([str(tmp_path / "train.py"), "--deepspeed", "ds.json"])
    known = {"cuda": True, "can_checkpoint": True, "division": division_of(mixture()["facts"])}
    config = examine({"train_batch_size": 8}, world=None, allow_auto=True)
    found = Space(config, command, Options(fix=FIXED), sizes=sizes_of(mixture(), {}), **known)
    assert {setting[EXPERTS] for setting in found.settings()} == {0, 1, 2}
    assert not any(setting[EXPERTS] == 2 and setting[TENSOR] > 1 for setting in found.settings())
    tree = config_of({}, {STAGE: 2, EXPERTS: 2})
    assert tree["expert_parallel"] == {"enabled": True, "autoep_size": 2}
    assert "expert_parallel" not in config_of({}, {STAGE: 2, EXPERTS: 0})
    assert label_of({STAGE: 2, EXPERTS: 2}) == "stage 2, experts over 2"
    config = examine({"train_batch_size": 8, "expert_parallel": {"enabled": True}}, world=None, allow_auto=True)
    own = Space(config, command, Options(tune=(EXPERTS,)), sizes=sizes_of(mixture(), config.resolved), **known)
    assert own.own[EXPERTS] == 1


def test_as_many_samples_a_step() -> None:
    assert points(Options(), 2, (1, 3), 4) == [(1, 6), (2, 3), (3, 2), (6, 1)]
    assert points(Options(), 4, (1, 3), 2) == []  # 6 samples do not divide over 4 processes
    assert points(Options(fix=("gradient_accumulation_steps",)), 2, (1, 3), 4) == [(2, 3)]
    assert points(Options(fix=("train_micro_batch_size_per_gpu",)), 2, (1, 3), 4) == [(1, 6)]
    assert MeshDivision(4, 1, 1).of({TENSOR: 2}) == MeshDivision(2, 1, 2)
    assert division_of({"world_size": 4}) == MeshDivision(4)  # of an older journal


def test_what_sharing_costs() -> None:
    """Compute is divided, and what is exchanged is not behind it."""
    said = events(4)
    own = {STAGE: 1, CHECKPOINTING: False, TENSOR: 1, SEQUENCE: 1}
    model = CostModel({}, own, Survey(said["facts"], said["survey"], {1: (1.0, 1, 0.0, 10**9)}), None)
    plain = model.roofline(own, 1, 1)
    around = model._around(own, 1, 1.0)
    compute = plain - around
    hidden = 2 * LENGTH * 64 * 4 * 2 / 1e9  # layers x tokens x width x bytes, forward and backward
    meet = 2 * 2 * MEETING  # layers, forward and backward
    for sizes, exchanged in (
        ({TENSOR: 2}, 4 * (1 / 2) * hidden + 2 * meet),
        ({SEQUENCE: 2}, (2 + 2 * 2 / 4) * (1 / 2) / 2 * hidden + 4 * meet),
    ):
        setting = {**own, **sizes}
        assert model._inside(setting, 1) == pytest.approx(exchanged)
        again = 1 + UNDIVIDED if TENSOR in sizes else 1  # norms and residuals
        each = again * compute / 2 + exchanged
        assert model.roofline(setting, 1, 1) == pytest.approx(each + model._around(setting, 1, each))
    divided = {**own, TENSOR: 2, TOKENS: True}  # what travels is as much
    each = compute / 2 + 4 * (1 / 2) * hidden + 4 * meet
    assert model.roofline(divided, 1, 1) == pytest.approx(each + model._around(divided, 1, each))
    assert model.states({**own, TENSOR: 2}, 1).parameters == pytest.approx(
        model.states(own, 1).parameters / 2, rel=1e-5
    )
    assert model.states({**own, SEQUENCE: 2}, 1) == model.states(own, 1)


def test_bytes_are_those_of_the_prediction() -> None:
    """Also where the batch of the launch was a part of a sequence already."""
    config = LlamaConfig(**{**SHAPE, "num_key_value_heads": 2})
    workload = Workload(1, LENGTH, gradient_checkpointing=False, attention="sdpa", optimizer="FusedAdam")
    for keys, said in (
        ({"tensor_parallel": {"autotp_size": 2}}, events(4)),
        ({SEQUENCE: 2}, events(4)),
        ({SEQUENCE: 2}, events(4, tokens=LENGTH // 2, data=2, sequence=2)),
        ({}, events(4, tokens=LENGTH // 2, data=2, sequence=2)),
        ({}, events(4, data=2, tensor=2, world_size=2, total=1, trainable=1)),
    ):
        tree = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": False}, **keys}
        found = Footprint(said["facts"], said["survey"], [(1, 1)]).predict(tree, 1, 1, checkpointing=False)
        if not keys:
            tensor = said["facts"]["tensor"]
            keys = {"tensor_parallel": {"autotp_size": tensor}} if tensor > 1 else {SEQUENCE: 2}
        expected = Predictor(config, workload).predict(
            {**tree, **keys, "train_micro_batch_size_per_gpu": 1}, world_size=4
        )
        assert found.device_peak == expected.device_peak, said["facts"]


@dataclass
class Shared(World):
    """Where the user's processes share samples, and where layers may be shared by two: then a step takes ``gain`` of
    the time.

    Attributes:
        sequence, tensor: of the user's own launch. gain: of tensor parallelism over 2.
    """

    sequence: int = 1
    tensor: int = 1
    gain: float = 1.0

    def facts(self) -> dict[str, Any]:
        data = self.processes // self.sequence // self.tensor
        known = events(self.processes, data=data, sequence=self.sequence, tensor=self.tensor)["facts"]
        said = {name: known[name] for name in ("model", "on_host", "data", "sequence", "tensor", "processes")}
        return {**super().facts(), **said, "world_size": data * self.sequence, "train_batch": 32 * data}

    def run(self, launch: Any, watch: Any) -> Any:
        tree = json.loads((Path(launch.request.events).parent / "ds_config.json").read_text())
        own, self.tensor = self.tensor, tree.get("tensor_parallel", {}).get("autotp_size", 1)
        if tree["train_batch_size"] != "auto":
            load_config(tree, world_size=self.processes)  # as the engine checks it
        try:
            return super().run(launch, watch)
        finally:
            self.tensor = own

    def seconds(self, *args: Any) -> float:
        return super().seconds(*args) * (self.gain if self.tensor == 2 else 1)


def tuned(folder: Path) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((folder / "results" / "ds_config.tuned.json").read_text())
    return tree


@pytest.mark.parametrize("sizes", [{"sequence": 2}, {"tensor": 2}])
def test_samples_are_counted_once_where_the_file_shares_them(
    search: Callable[..., Result], words: list[str], tmp_path: Path, sizes: dict[str, int]
) -> None:
    """Four processes, of which two read different samples."""
    file = Path(words[words.index("--deepspeed") + 1])
    keys = {SEQUENCE: 2} if "sequence" in sizes else {"tensor_parallel": {"autotp_size": 2}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))
    result = search(Shared(memory=900 << 20, **sizes), tune=(STAGE,), fix=FIXED)
    tree = tuned(tmp_path)
    assert tree["train_batch_size"] == GLOBAL_MICRO * GLOBAL_STEPS * 2
    assert load_config(tree, world_size=4).train_micro_batch_size_per_gpu == result.best[1].micro
    point = result.best[1]
    assert value_of(point, Metric.THROUGHPUT) == pytest.approx(64 / point.seconds)
    assert result.own is not None
    assert result.gain == pytest.approx(result.own.seconds / point.seconds)


def test_layers_are_shared_if_that_is_faster(search: Callable[..., Result], tmp_path: Path) -> None:
    """With half as many processes that read samples, each step has twice as many micro-batches or samples in one."""
    result = search(Shared(gain=0.4), tune=(STAGE, TENSOR), fix=FIXED)
    tree, point = tuned(tmp_path), result.best[1]
    assert tree["tensor_parallel"] == {"autotp_size": 2}
    assert tree["train_batch_size"] == GLOBAL_MICRO * GLOBAL_STEPS * 4 == point.samples
    assert point.micro * point.accumulation == 2 * GLOBAL_MICRO * GLOBAL_STEPS
    assert load_config(tree, world_size=4).train_batch_size == tree["train_batch_size"]
    words = result.words
    assert words[words.index("--per_device_train_batch_size") + 1] == str(point.micro)
    assert {change.key for change in result.changes} >= {TENSOR}


def test_layers_stay_whole_if_that_is_slower(search: Callable[..., Result], tmp_path: Path) -> None:
    result = search(
        Shared(gain=0.9), tune=("zero_optimization.stage", TENSOR), fix=(CHECKPOINTING, "ds_hf.compile", *KEPT)
    )
    assert "tensor_parallel" not in tuned(tmp_path)
    assert result.best[1].data == 4
