"""``tensor_parallel.vocab_parallel_lm_head``: the output layer and the embedding that shares its weight, divided by the
vocabulary, against the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_hf import initialize
from ds_hf.config.load import examine
from ds_hf.deepspeed_api.pipeline import PipelineModule
from ds_hf.engine.modules.tiling.logits import PartialLogits
from ds_hf.engine.parallel.pipeline.specs import LayerSpec
from ds_hf.engine.parallel.pipeline.topology import PipeModelDataParallelTopology
from ds_hf.engine.parallel.tensor.plan import plan_division
from ds_hf.engine.zero.cut import cut_of
from ds_hf.errors import ConfigError
from tests.contract.test_tensor_parallel import config
from tests.contract.test_tensor_parallel_life import engine_of, plain, steps
from tests.helpers.distributed import run_distributed
from tests.helpers.tensor import PARTITION, batches_of, build, tensor_section

HEAD = "vocab_parallel_lm_head"


def section(kind: str, value: bool = True) -> dict[str, Any]:
    return {"tensor_parallel": {**tensor_section(kind, 2), HEAD: value}}


def tied(kind: str) -> Any:
    return build(kind) if kind == "gpt2" else build(kind, tie_word_embeddings=True)


def life(folder: str, kind: str, stages: list[int]) -> dict[str, Any]:
    """Of two processes: training, generation, checkpoints and exports of a model whose ends are one divided tensor."""
    from transformers.integrations import HfDeepSpeedConfig

    found: dict[str, Any] = {}
    for stage in stages:
        engine = engine_of(kind, 2, stage, tied(kind), **section(kind))
        head, ends = engine.module.get_output_embeddings(), engine.module.get_input_embeddings()
        cut = cut_of(head.weight)
        assert cut is not None
        assert head.weight is ends.weight
        assert (cut.dim, cut.shape[0]) == (0, 32)
        found[f"losses {stage}"] = steps(engine, batches_of(3, 1, 1))
        engine.save_checkpoint(f"{folder}/{stage}")
        found[f"weights {stage}"] = engine._zero3_consolidated_16bit_state_dict()
        engine.export_pretrained(f"{folder}/exported{stage}")
        engine.eval()
        prompt = batches_of(1, 1, 1)[0, 0, 0][:, :4]
        generated = engine.module.generate(prompt, do_sample=False, max_new_tokens=6, pad_token_id=3)
        reference = type(engine.module).from_pretrained(f"{folder}/exported{stage}").eval()
        assert reference.get_output_embeddings().weight is reference.get_input_embeddings().weight
        assert torch.equal(generated, reference.generate(prompt, do_sample=False, max_new_tokens=6, pad_token_id=3))
        engine.train()
        found[f"later {stage}"] = steps(engine, batches_of(5, 1, 1)[3:])
        engine.destroy()
    kept = HfDeepSpeedConfig(config(kind, 2, 3, **section(kind)))  # from_pretrained shards at once
    sharded = type(engine.module).from_pretrained(f"{folder}/exported{stages[-1]}")
    del kept
    engine = engine_of(kind, 2, 3, sharded, **section(kind))
    assert cut_of(engine.module.get_input_embeddings().weight) is not None
    found["loaded in shards"] = steps(engine, batches_of(4, 1, 1)[3:])
    engine.destroy()
    settings = config(kind, 2, 1)
    del settings["tensor_parallel"]  # both processes train on the same samples
    whole = initialize(model=tied(kind), config=settings)[0]
    whole.load_checkpoint(f"{folder}/{stages[-1]}")
    found["loaded whole"] = [
        float(whole(input_ids=ids, labels=ids).loss.detach()) for ids in batches_of(4, 1, 1)[3:, 0, 0]
    ]
    return found


@pytest.mark.parametrize(
    ("kind", "stages"), [("llama", [1, 3]), pytest.param("gpt2", [0, 2, 3], marks=pytest.mark.slow)]
)
def test_ends_that_are_one_tensor(tmp_path: Path, kind: str, stages: list[int]) -> None:
    expected, shapes = plain(tied(kind), count=5), {name: p.shape for name, p in tied(kind).named_parameters()}
    for found in (ranks := run_distributed(life, 2, str(tmp_path), kind, stages, timeout=120)):
        for stage in stages:
            assert found[f"losses {stage}"] == pytest.approx(expected[:3], rel=1e-5)
            assert found[f"later {stage}"] == pytest.approx(expected[3:], rel=1e-5)
        assert found["loaded in shards"] == pytest.approx(expected[3:4], rel=1e-5)
        assert found["loaded whole"] == pytest.approx(expected[3:4], rel=1e-5)
    for stage in stages:
        weights = ranks[0][f"weights {stage}"]
        assert {name: weights[name].shape for name in shapes} == shapes


def logits_of(value: bool | None) -> bool:
    """Whether a training step leaves the logits in parts."""
    asked = {} if value is None else {HEAD: value}
    engine = engine_of("llama", 2, 1, tensor_parallel={**tensor_section("llama", 2), **asked})
    ids = batches_of(1, 1, 1)[0, 0, 0]
    outputs = engine(input_ids=ids, labels=ids)
    found = isinstance(outputs.logits, PartialLogits)
    assert outputs.logits.shape == (2, 10, 64)
    engine.destroy()
    return found


def of_a_pipeline() -> str:
    topology = PipeModelDataParallelTopology(1, 2, 1)
    module = PipelineModule([LayerSpec(nn.Linear, 4, 4)], topology=topology, loss_fn=nn.functional.mse_loss)
    rules = {"use_default_specs": False, "layer_specs": [{"patterns": [r"0\.weight"], "partition_type": "row"}]}
    section = {"autotp_size": 2, "partition_config": rules, HEAD: True}
    try:
        initialize(model=module, config=config("", 2, 1, tensor_parallel=section))
    except ConfigError as error:
        return " ".join(str(error).split())
    return ""


def each_value() -> tuple[list[bool], str]:
    return [logits_of(value) for value in (None, True, False)], of_a_pipeline()


def test_logits_are_gathered_where_that_is_asked_for() -> None:
    for partial, refused in run_distributed(each_value, 2):
        assert partial == [True, True, False]
        assert "a process of a pipeline has one stage" in refused


def faults_of(model: nn.Module, given: dict[str, Any] | None = None) -> str:
    asked = {**(given or {"autotp_size": 2}), HEAD: True}
    settings = examine({"tensor_parallel": asked}, world=None, allow_auto=True)
    try:
        divisions = plan_division(model, settings.tensor_parallel, 2)
    except ConfigError as error:
        return " ".join(str(error).split())
    return ",".join(
        f"{each.name}:{each.style.cuts}"
        for each in divisions
        if "layers" not in each.name and "blocks" not in each.name
    )


def test_what_is_divided_and_what_is_refused() -> None:
    assert faults_of(tied("llama")) == "lm_head:out,model.embed_tokens:rows"
    rules = {**PARTITION, "layer_specs": PARTITION["layer_specs"][:3]}  # which leave both ends whole
    assert faults_of(build("fused"), {"autotp_size": 2, "partition_config": rules}) == "lm_head:out"
    assert "the vocabulary of model.embed_tokens (weight (65, 32)) is 65" in faults_of(
        build("llama", tie_word_embeddings=True, vocab_size=65)
    )
    assert "LlamaModel has no output layer that ds_hf knows" in faults_of(build("llama").model)  # type: ignore[arg-type]
    fused = build("llama")
    fused.forward = lambda **kwargs: None  # type: ignore[assignment, method-assign]
    assert "which may multiply by the weight of lm_head without calling it" in faults_of(fused)
