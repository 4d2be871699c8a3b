"""``checkpoint convert --to hf`` of what a Trainer leaves: ``from_pretrained`` loads the result, with its tokenizer."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import ds_hf
from ds_hf.checkpoint.manifest import sealed
from ds_hf.checkpoint.model_files import copy_model_files, find_model_folder
from ds_hf.cli.root import app
from ds_hf.errors import CheckpointError
from tests.engine.checkpoint.test_export import _llama
from tests.engine.checkpoint.workload import config

TOKENS = torch.arange(12).reshape(1, 12)
CODE = """
from transformers import LlamaForCausalLM
from .helping import factor

class Doubled(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        found = super().forward(*args, **kwargs)
        found.logits = found.logits * factor
        return found
"""


def run(*arguments: Any) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    return result.exit_code, result.output


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]")
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """``checkpoint-2`` as the Trainer lays it out, and the logits of the trained model."""
    folder = tmp_path_factory.mktemp("output") / "checkpoint-2"
    model = _llama()
    engine = ds_hf.initialize(model=model, model_parameters=model.parameters(), config=config(3, "bf16"))[0]
    for _ in range(2):
        engine.backward(engine(input_ids=TOKENS, labels=TOKENS).loss)
        engine.step()
    engine.save_checkpoint(folder)
    model.config.save_pretrained(folder)
    model.generation_config.max_new_tokens = 7
    model.generation_config.save_pretrained(folder)
    save_tokenizer(folder)
    with torch.no_grad():
        logits = engine(input_ids=TOKENS).logits.float()
    engine.destroy()
    return folder, logits


def logits_of(folder: Path, **more: Any) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, **more)
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=TOKENS).logits.float()
    return found


def test_from_pretrained_loads_the_result(trained: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    folder, logits = trained
    code, text = run("convert", folder, tmp_path / "hf", "--to", "hf", "--max-shard-size", "4KB")
    assert code == 0
    assert "with config.json, generation_config.json, tokenizer.json, tokenizer_config.json, chat_template" in text
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 1
    assert (tmp_path / "hf/model.safetensors.index.json").is_file()
    assert not (tmp_path / "hf/zero_to_fp32.py").exists()
    assert torch.equal(logits_of(tmp_path / "hf"), logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("b a c")["input_ids"] == [2, 1, 0]
    assert tokenizer.chat_template == "{{ messages }}"
    assert GenerationConfig.from_pretrained(tmp_path / "hf").max_new_tokens == 7


@pytest.mark.parametrize(
    ("place", "arguments", "dtype"),
    [
        ("checkpoint-2/global_step2", ["convert", "--to", "hf", "--dtype", "fp16"], "float16"),
        ("checkpoint-2", ["convert", "--to", "fp32"], "float32"),
        ("checkpoint-2", ["consolidate"], "float32"),
    ],
)
def test_config_says_the_dtype_that_is_written(
    trained: tuple[Path, torch.Tensor], tmp_path: Path, place: str, arguments: list[str], dtype: str
) -> None:
    command, *rest = arguments
    code, text = run(command, trained[0].parent / place, tmp_path / "out", *rest, "--json")
    assert code == 0
    assert json.loads(text)["copied"][0] == "config.json"
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == dtype
    weights = load_file(tmp_path / "out/model.safetensors")
    assert {str(value.dtype) for value in weights.values()} == {f"torch.{dtype}"}


def test_without_a_configuration_the_way_to_one_is_told(trained: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    folder, logits = trained
    bare = tmp_path / "checkpoint-2"
    shutil.copytree(folder / "global_step2", bare / "global_step2")
    shutil.copy(folder / "latest", bare)
    (bare / "config.json").write_text('{"learning_rate": 1}')  # not a model's
    code, text = run("convert", bare, tmp_path / "own", "--to", "hf")
    assert code == 0
    assert "with config.json" in text
    assert torch.equal(logits_of(tmp_path / "own"), logits)
    manifest = bare / "global_step2" / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["checksum"], content["model_config"]  # an older checkpoint, or a model with code of its own
    manifest.write_text(sealed(content))
    code, text = run("convert", bare, tmp_path / "hf", "--to", "hf")
    assert code == 0
    assert "hf has no config.json" in text
    assert "--model FOLDER" in text
    code, text = run("convert", bare, tmp_path / "hf", "--to", "hf", "--model", folder, "--force")
    assert code == 0
    assert "has no config.json" not in text
    assert torch.equal(logits_of(tmp_path / "hf"), logits)
    shutil.copy(folder / "config.json", tmp_path)  # the Trainer's output_dir, after save_model()
    (bare / "config.json").unlink()
    assert find_model_folder(bare / "global_step2") == tmp_path
    assert find_model_folder(folder / "global_step2") == folder


def test_code_of_a_model_comes_along(
    trained: tuple[Path, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    folder, logits = trained
    own = Path(shutil.copytree(folder, tmp_path / "own"))
    content = json.loads((own / "config.json").read_text())
    content["auto_map"] = {"AutoModelForCausalLM": "modeling_doubled.Doubled"}
    (own / "config.json").write_text(json.dumps(content))
    (own / "modeling_doubled.py").write_text(CODE)
    (own / "helping.py").write_text("factor = 2\n")
    code, text = run("convert", own, tmp_path / "hf", "--to", "hf")
    assert code == 0
    assert "helping.py, modeling_doubled.py" in text
    assert not (tmp_path / "hf/zero_to_fp32.py").exists()
    assert torch.equal(logits_of(tmp_path / "hf", trust_remote_code=True), 2 * logits)


def test_links_of_strangers_are_not_followed(trained: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    own = Path(shutil.copytree(trained[0], tmp_path / "own"))
    (tmp_path / "secret").write_text("mine")
    (own / "merges.txt").symlink_to(tmp_path / "secret")
    os.mkfifo(own / "vocab.txt")
    assert run("convert", own, tmp_path / "hf", "--to", "hf")[0] == 0
    assert not (tmp_path / "hf/merges.txt").exists()
    assert not (tmp_path / "hf/vocab.txt").exists()
    (tmp_path / "given").mkdir()
    assert "merges.txt" in copy_model_files(own, tmp_path / "given", "float32")  # a cache of the Hub has links alone
    for content in ("[1]", "{", '{"a": ' * 100_000):
        (own / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"config.json cannot be read"):
            copy_model_files(own, tmp_path / "given", "float32")
        assert find_model_folder(own / "global_step2") is None
