"""``ds-hf generate`` and ``ds-hf memory --inference`` as a user sees them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from ds_hf.cli.root import app
from tests.helpers.generating import small_model

TINY = "llama:hidden=64,layers=2,heads=4,kv_heads=2,intermediate=128,vocab=512"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with a tokenizer of words."""
    path = tmp_path_factory.mktemp("model")
    small_model("llama").save_pretrained(path)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{index}": index for index in range(3, 128)}}
    plain = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=plain, **special).save_pretrained(path)
    return path


def run(*words: str) -> tuple[int, str, str]:
    found = CliRunner().invoke(app, list(words))
    return found.exit_code, found.stdout, found.stderr


def test_texts_speed_and_reasons(folder: Path) -> None:
    words = ["--prompt", "w3 w9 w4", "--prompt", "w7", "--max-new-tokens", "5", "--json"]
    code, out, err = run("generate", str(folder), *words)
    assert code == 0, err
    found = json.loads(out[out.index("{") :])
    assert found["prompts"] == ["w3 w9 w4", "w7"]
    assert all(len(text.split()) <= 5 for text in found["texts"])
    assert found["tokens_per_second"] > 0
    assert found["weights_bytes"] == sum(p.numel() * 4 for p in small_model("llama").parameters())
    assert found["chosen"]["replace_with_kernel_inject"]
    assert found["why"] == ["dtype fp32: a CPU is fastest in it", "static cache"]
    alone = json.loads(run("generate", str(folder), "-p", "w7", "--max-new-tokens", "5", "--json")[1])
    assert alone["texts"][0] == found["texts"][1]  # padded on the left


def test_in_host_memory_in_words(folder: Path) -> None:
    code, out, err = run("generate", str(folder), "-p", "w3", "--max-new-tokens", "3", "--offload", "--dtype", "int8")
    assert code == 0, err
    assert "w3" in out
    assert "tokens/s, first token after" in out
    assert "no graphs: weights come block by block" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nosuch-folder", "-p", "x"], "cannot find the model 'nosuch-folder'"),
        (["FOLDER", "-p", "w3", "--dtype", "fp7"], '"fp7" is not a choice'),
        (["FOLDER", "-p", "w3", "--checkpoint", "/nowhere"], "/nowhere does not exist"),
    ],
)
def test_what_is_wrong(folder: Path, words: list[str], said: str) -> None:
    code, _, err = run("generate", *[word.replace("FOLDER", str(folder)) for word in words])
    assert code == 1
    assert said in err


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path)
    code, _, err = run("generate", str(tmp_path), "-p", "w3")
    assert code == 1
    assert f"cannot load a tokenizer of '{tmp_path}'" in err
    assert "tokenizer.save_pretrained(folder)" in err


def test_the_memory_of_generating() -> None:
    words = ["--inference", "--micro-batch", "2", "--seq-len", "64", "--device-memory", "1GiB"]
    code, out, _ = run("memory", TINY, *words)
    assert code == 0
    assert out.startswith("generating: 2 x 64 tokens, half of them the prompt; 1 process with 1.0 GiB each")
    assert [line.split()[0] for line in out.splitlines()[2:-1]] == ["fp32"] * 2 + ["bf16"] * 2 + ["int8"] * 2 + [
        "int4"
    ] * 2
    rows = json.loads(run("memory", TINY, *words, "--json")[1])["rows"]
    weights = {row["dtype"]: row["device"]["parts"]["weights"] for row in rows if not row["offload"]}
    assert weights["bf16"] == pytest.approx(weights["fp32"] / 2, rel=0.01)
    assert weights["int8"] == pytest.approx(weights["fp32"] / 3.76, rel=0.02)
    assert weights["int4"] == pytest.approx(weights["fp32"] / 7.11, rel=0.04)
    assert all(row["fits"] for row in rows)
    assert all(row["loading"]["host"] == weights["fp32" if row["dtype"] == "fp32" else "bf16"] for row in rows)
    code, _, err = run("memory", "nosuch-folder", "--inference")
    assert code == 1
    assert "cannot find the model" in err
