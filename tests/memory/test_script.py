"""Scripts run up to their first batch: native loops, the Trainer, weights that are never loaded, scripts that fail."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from ds_hf.memory import UnpredictableError
from ds_hf.memory.models import with_length
from ds_hf.memory.script import rehearse
from ds_hf.memory.subject import Request, Subject

NATIVE = """
import sys, torch, deepspeed
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="bfloat16")
config = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3},
          "optimizer": {"type": "Lion", "params": {"lr": 1e-3}}}
engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
model.to("cuda")
print("printed by the script")
try:
    tokens = torch.zeros(2, 24, dtype=torch.long)
    loss = engine(tokens, labels=tokens).loss
except Exception:
    print("a script cannot catch the end")
raise SystemExit("never reached")
"""
TRAINER = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
folder = sys.argv[1]
args = TrainingArguments(folder, per_device_train_batch_size=3, gradient_checkpointing=True, report_to=[],
                         deepspeed={"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto",
                                    "gradient_accumulation_steps": "auto", "bf16": {"enabled": "auto"}}, bf16=True)
model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=64,
                                     num_attention_heads=2, num_key_value_heads=2))
rows = [{"input_ids": torch.zeros(10, dtype=torch.long), "labels": torch.zeros(10, dtype=torch.long)}] * 12
Trainer(model, args, train_dataset=rows).train()
"""


def script(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(text, "utf-8")
    return path


def folder_of_a_model(folder: Path) -> Path:
    """A configuration and no weights: loading them would fail."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=64, num_attention_heads=2
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder / "model")
    return folder / "model"


def test_a_native_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv, path = sys.argv, list(sys.path)
    learned = rehearse(script(tmp_path, NATIVE), [str(folder_of_a_model(tmp_path))])
    assert {(p.device.type, p.dtype) for p in learned.model.parameters()} == {("meta", torch.bfloat16)}
    assert learned.config["optimizer"]["type"] == "Lion"
    assert learned.inputs["input_ids"].shape == (2, 24), "a positional argument goes by its name"
    assert learned.shape == (2, 24)
    assert learned.stopped == ""
    assert (sys.argv, sys.path) == (argv, path)
    assert not torch.distributed.is_initialized()
    streams = capsys.readouterr()
    assert "printed by the script" in streams.err
    assert streams.out == ""


def test_a_trainer(tmp_path: Path) -> None:
    subject = Subject.of(str(script(tmp_path, TRAINER)), [str(tmp_path / "out")], Request())
    assert subject.config["zero_optimization"]["stage"] == 2
    assert subject.config["train_micro_batch_size_per_gpu"] == 3
    assert subject.config["bf16"] == {"enabled": True}
    assert subject.predictor.workload.inputs is not None
    assert subject.predictor.workload.inputs["input_ids"].shape == (3, 10)
    assert subject.predictor.workload.gradient_checkpointing is None
    assert subject.predictor.model.model.gradient_checkpointing, "as the script has it"
    assert subject.predictor.predict(subject.config).micro_batch == 3


@pytest.mark.parametrize("as_file", [True, False])
def test_a_batch_of_more_processes_than_look_at_the_script(tmp_path: Path, as_file: bool) -> None:
    """A file for 8 processes was refused: a script is looked at by one."""
    batch = {"train_batch_size": 48, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}
    config = {**batch, "zero_optimization": {"stage": 2}}
    (tmp_path / "ds.json").write_text(json.dumps(config), "utf-8")
    given = repr(str(tmp_path / "ds.json")) if as_file else repr(config)
    arguments = f"gradient_accumulation_steps=2, deepspeed={given}"
    text = re.sub(r"deepspeed=\{.*\}, bf16=True", arguments, TRAINER, flags=re.S)
    subject = Subject.of(str(script(tmp_path, text)), [str(tmp_path / "out")], Request())
    assert subject.predictor.predict(subject.config, world_size=8).micro_batch == 3
    assert {key: subject.config[key] for key in batch} == batch
    fewer = text.replace("per_device_train_batch_size=3", "per_device_train_batch_size=1")
    with pytest.raises(UnpredictableError, match="per_device_train_batch_size"):
        Subject.of(str(script(tmp_path, fewer)), [str(tmp_path / "out")], Request())


def test_a_script_that_fails_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(UnpredictableError, match=r"ZeroDivisionError \(line 2\)") as failure:
        rehearse(script(tmp_path, "x = 1\nx / 0\n"), [])
    assert "--load-weights" in str(failure.value)
    for text, said in (
        ("x = 1\n", "ran to its end"), ("raise SystemExit(3)\n", "exit code 3"), ("x =\n", "SyntaxError"),
        ("import no_such_module\n", "ModuleNotFoundError"),
    ):  # fmt: skip
        with pytest.raises(UnpredictableError, match=said) as failure:
            rehearse(script(tmp_path, text), [])
        assert "--load-weights" not in str(failure.value), "which would not help"
    (tmp_path / "folder" / "train.py").mkdir(parents=True)
    with pytest.raises(UnpredictableError, match=r"train\.py is no file"):
        Subject.of(str(tmp_path / "folder" / "train.py"), [], Request())


def test_a_script_that_stops_before_its_first_batch(tmp_path: Path) -> None:
    broken = NATIVE.replace("tokens = torch.zeros", "tokens = torch.no_such").replace(
        "except Exception", "except KeyError"
    )
    path, model = str(script(tmp_path, broken)), str(folder_of_a_model(tmp_path))
    with pytest.raises(UnpredictableError, match="give --seq-len"):
        Subject.of(path, [model], Request())
    subject = Subject.of(path, [model], Request(seq_len=16))
    assert "no_such" in subject.notes[-1]
    assert subject.predictor.predict(subject.config).micro_batch == 2


def test_other_lengths(tmp_path: Path) -> None:
    subject = Subject.of(str(script(tmp_path, NATIVE)), [str(folder_of_a_model(tmp_path))], Request(seq_len=48))
    inputs = subject.predictor.workload.inputs
    assert inputs is not None
    assert inputs["labels"].shape == (2, 48)
    mask = with_length({"mask": torch.zeros(2, 1, 8, 8), "scale": torch.zeros(())}, 8, 16)
    assert mask["mask"].shape == (2, 1, 16, 16)
    assert mask["scale"].shape == ()


def test_no_such_script() -> None:
    with pytest.raises(UnpredictableError, match=r"nowhere.py does not exist"):
        Subject.of("nowhere.py", [], Request())


def test_a_script_that_never_reaches_a_batch_saves_nothing(tmp_path: Path) -> None:
    """It has an engine, trains something else, and would then write over its user's model."""
    kept = tmp_path / "model.pt"
    kept.write_bytes(b"the user's")
    text = """
import sys, torch, deepspeed
model = torch.nn.Linear(2, 2)
torch.save({"prepared": 1}, sys.argv[2])
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
deepspeed.initialize(model=model, config=config)
torch.save(model.state_dict(), sys.argv[1])
"""
    found = rehearse(script(tmp_path, text), [str(kept), str(tmp_path / "prepared.pt")])
    assert found.stopped == "it ran to its end"
    assert kept.read_bytes() == b"the user's"
    assert torch.load(tmp_path / "prepared.pt") == {"prepared": 1}
    torch.save(1, tmp_path / "mine.pt")  # the process goes on as it was
    assert torch.load(tmp_path / "mine.pt") == 1
