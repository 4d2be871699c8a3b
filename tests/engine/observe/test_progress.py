"""What a run says of itself when it begins."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import ds_hf
from ds_hf.deepspeed_api.initialize import initialize
from tests.helpers.distributed import run_distributed
from tests.helpers.models import TinyLM, token_batches

STATES = ("parameters", "gradients", "master weights", "moments")


def _config(**more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        **more,
    }


def _summary(**more: Any) -> Any:
    engine = initialize(model=TinyLM(), config=_config(**more))[0]
    found = engine.summary()
    tokens = token_batches(2, 8)
    for _ in range(3):
        engine.backward(engine(tokens))
        engine.step()
    assert replace(engine.summary(), states=()) == replace(found, states=())
    return found, engine.optimizer.nbytes, sum(unit.numel for unit in engine.units)


@pytest.mark.parametrize("stage", [0, 3])
def test_value(stage: int) -> None:
    summary, kept, numel = run_distributed(_by_stage, 2, stage, timeout=60)[1]
    assert (summary.stage, summary.processes, summary.mesh) == (stage, 2, "data 2")
    assert (summary.batch, summary.micro, summary.accumulation, summary.data) == (12, 2, 3, 2)
    assert summary.parameters == summary.trained == numel
    rows = {row.name: row for row in summary.states}
    assert rows["master weights"].nbytes + rows["moments"].nbytes == kept
    assert rows["parameters"].dtype == "bf16"
    share = 2 if stage else 1
    assert numel / share <= rows["parameters"].numel < numel / share + 4000  # padding
    assert str(summary).startswith(f"ds_hf {ds_hf.__version__}: ZeRO stage {stage}, 2 processes (data 2) on CPU, ")
    assert " in bf16 with fp32 masters, FusedAdam by " in str(summary)
    sent = ", gradients sent in 4 bits" * (stage == 3)  # and TinyLM has no loss that could be in chunks
    assert str(summary).endswith("batch 12 = 2 micro-batch x 3 accumulation x 2 data" + sent)
    assert summary.table().splitlines()[-1].split()[:2] == ["in", "all"]


def _divided() -> list[str]:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=32, num_hidden_layers=1, num_local_experts=4, **sizes))
    whole = f"{sum(param.numel() for param in model.parameters()):,} parameters in"
    zero, found = {"stage": 3}, []
    for more in (
        {"expert_parallel": {"enabled": True, "autoep_size": 2}, "zero_optimization": {"stage": 1}},
        {"zero_optimization": {**zero, "zero_hpz_partition_size": 2}},
        {"zero_optimization": {**zero, "mics_shard_size": 2}},
    ):
        engine = initialize(model=copy.deepcopy(model), config=_config(**more))[0]
        found.append(str(engine.summary()))
        engine.destroy()
    assert [whole in line for line in found] == [False, True, True]
    return found


def test_what_is_divided() -> None:
    experts, second, groups = run_distributed(_divided, 4, timeout=60)[0]
    assert " parameters of this process in fp32" in experts
    assert "experts divided by 2" in experts
    assert "parameters divided once more within groups of 2" in second
    assert ", states divided within groups of 2" in groups


def _by_stage(stage: int) -> Any:
    return _summary(
        zero_optimization={"stage": stage, "zero_quantized_gradients": stage == 3},
        bf16={"enabled": True},
        ds_hf={"chunked_loss": True, "summary": False},
    )


def _said(asked: dict[str, Any], kind: str = "Llama") -> tuple[str, ...]:
    """Notes of the line for a model with layers that multiply in fp8, blocks, MLPs and a causal loss, or without."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=64, use_cache=False)
    model = LlamaForCausalLM(llama) if kind == "Llama" else torch.nn.Sequential(torch.nn.Linear(3, 3))
    config = {"optimizer": {"type": "AdamW"}, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, **asked}
    engine = initialize(model=model, config=config)[0]
    notes: tuple[str, ...] = engine.summary().notes
    engine.destroy()
    return notes


EVERYTHING: dict[str, Any] = {
    "zero_optimization": {"zero_quantized_gradients": True, "stage": 2},
    "activation_checkpointing": {"cpu_checkpointing": True},
    "ds_hf": {"chunked_loss": True, "tiled_mlp": 2, "capture": "blocks", "fp8": {"enabled": True, "smallest": 1}},
}


def test_only_what_is_so() -> None:
    """What was asked for and has no effect is not stated: on one CPU nothing is sent, captured or multiplied in fp8."""
    assert _said(EVERYTHING, "Linear") == ()
    assert _said(EVERYTHING) == ("MLPs in tiles", "loss in chunks")
    emulated = {"fp8": {"enabled": True, "smallest": 1, "emulate": True}, "compile": "blocks"}
    assert _said({"ds_hf": emulated}) == ("products in fp8, tensorwise, emulated", "blocks compiled")


SCRIPT = """
import logging, sys
{before}
import torch, deepspeed
config = {{"train_micro_batch_size_per_gpu": 1, "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-3}}}}, {more}}}
for _ in range(3):
    model = torch.nn.Linear(4, 4)
    deepspeed.initialize(model=model, config=config)
"""


def said_by(code: str) -> tuple[str, str]:
    """What a script writes, to its output and its errors, in a process in which nothing was said or made yet."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        exec(code, {"__name__": "__main__"})
    return out.getvalue(), err.getvalue()


@pytest.mark.parametrize(
    ("before", "more", "lines"),
    [
        ("", "", 1),
        ("logging.basicConfig(stream=sys.stderr)", "", 1),
        ("logging.basicConfig(level='ERROR')", "", 0),
        ("", "'log_level': 'WARNING'", 0),
        ("", "'ds_hf': {'summary': False}", 0),
        ("", "'ds_hf': {'summary': 'full'}, 'log_level': 'INFO'", 1),
    ],
)
def test_said_once(before: str, more: str, lines: int) -> None:
    """Three equal engines in a script: one line; a level that was chosen is obeyed."""
    ((output, errors),) = run_distributed(said_by, 1, SCRIPT.format(before=before, more=more), backend=None)
    assert errors.count(f"ds_hf {ds_hf.__version__}: ZeRO stage 0, 1 process (data 1) on CPU") == lines
    assert errors.count("\nmaster weights") == 0  # fp32 parameters are the masters
    assert errors.count("\nmoments") == ("full" in more)
    assert "ds_hf 0" not in output


def test_handlers_of_the_script_alone(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a handler is configured the line goes there and nowhere else."""
    config = _config(train_batch_size=2, gradient_accumulation_steps=1)
    engine = initialize(model=torch.nn.Linear(5, 3), config=config)[0]
    assert [record.levelno for record in caplog.records if record.getMessage() == str(engine.summary())] == [
        logging.INFO
    ]
    assert "ZeRO stage" not in capsys.readouterr().err
    engine.destroy()
