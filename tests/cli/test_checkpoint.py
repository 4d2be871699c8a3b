"""``ds-hf checkpoint``: what it prints and writes, and its exit codes."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import shutil
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from ds_hf.checkpoint.few_bits import two_of_four
from ds_hf.checkpoint.format import SavedParameter
from ds_hf.checkpoint.formats import open_source
from ds_hf.checkpoint.source import Source
from ds_hf.cli import checkpoint, main
from ds_hf.cli.root import app
from tests.engine.checkpoint.workload import Model, config, engine_of, train
from tests.helpers.archives import unpack
from tests.helpers.distributed import run_distributed
from tests.helpers.few_bits import opened, unpacked

run = CliRunner().invoke
ARCHIVE = Path(__file__).parents[1] / "checkpoint/deepspeed/data/deepspeed.tar.xz"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    with engine_of(config(2, "bf16")) as engine:
        train(engine, 3)
        engine.save_checkpoint(folder, client_state={"epoch": 1})
    return folder


@pytest.fixture(scope="module")
def deepspeed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("deepspeed")
    unpack(ARCHIVE, root)
    return root / "stage3-fp16-world2"


def test_a_loops_checkpoint_is_read_by_from_pretrained(tmp_path: Path) -> None:
    """What the README does: nothing but the checkpoint knows the model."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, rope_theta=1234.0, **sizes))
    with engine_of(config(3, "bf16"), model) as engine:
        engine.save_checkpoint(tmp_path / "saved")
        whole = {name: value.clone() for name, value in engine.named_weights()}
    for source, to in (("saved", "dcp"), ("dcp", "ds_hf"), ("ds_hf", "hf")):
        code, output = _run("convert", tmp_path / source, tmp_path / to, "--to", to)
        assert code == 0, output
    (tmp_path / "hf").rename(tmp_path / "model")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(found) is LlamaForCausalLM
    assert found.config.rope_parameters["rope_theta"] == 1234.0
    assert found.dtype is torch.bfloat16
    assert all(torch.equal(value, whole[name]) for name, value in found.state_dict().items())


def test_weights_that_are_not_compressed_yet_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    group = {"params": {"dense_ratio": 0.5}, "modules": ["mlp"]}
    shared = {"enabled": True, "schedule_offset": 0}
    section = {"sparse_pruning": {"shared_parameters": shared, "different_groups": {"mlp": group}}}
    for name, more in (("plain", {}), ("pruned", {"compression_training": section})):
        with engine_of({**config(0, "bf16"), **more}, _llama(tmp_path / f"{name} model")) as engine:
            engine.save_checkpoint(tmp_path / name)
        caplog.clear()
        code, output = _run("convert", tmp_path / name, tmp_path / f"{name} weights", "--to", "hf")
        assert code == 0, output
        assert ("neither quantized nor pruned" in output + caplog.text) == (name == "pruned")


def _run(*arguments: Any) -> tuple[int, str]:
    result = run(app, ["checkpoint", *map(str, arguments)])
    return result.exit_code, result.output


def test_inspect(own: Path) -> None:
    code, text = _run("inspect", own)
    assert code == 0
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert lines["step"].endswith("3 (6 samples, 0 steps skipped)")
    assert "1 process" in lines["saved by"]
    assert "head.weight = embedding.weight" in lines["tied"]
    elements = sum(p.numel() for p in Model().parameters())
    assert f"{elements} elements in 11, {elements - 11} trained; {elements} bfloat16" in lines["parameters"]
    assert f"master {4 * (elements - 11)} B" in lines["states"]
    assert f"{elements} elements of 11 parameters of rank 0" in text
    assert all(name in lines["besides"] for name in ("moments", "scheduler", "checksums", "client state (epoch)"))


def test_inspect_as_json(own: Path, deepspeed: Path) -> None:
    code, text = _run("inspect", own / "global_step3", "--json")
    found = json.loads(text)
    assert (code, found["ok"], found["kind"], found["step"], found["world_size"]) == (0, True, "ds_hf", 3, 1)
    assert {file["name"]: file["nbytes"] for file in found["files"]} == {
        path.name: path.stat().st_size
        for path in (own / "global_step3").iterdir()
        if path.name not in ("manifest.json", "zero_to_fp32.py")
    }
    found = json.loads(_run("inspect", deepspeed, "--json")[1])
    assert (found["kind"], found["stage"], found["world_size"], found["dtypes"]) == (
        "deepspeed",
        3,
        2,
        {"float16": 186},
    )
    assert found["states"] == {"weight": 22, "master": 700, "exp_avg": 700, "exp_avg_sq": 700}


def test_verify(own: Path, deepspeed: Path, tmp_path: Path) -> None:
    assert _run("verify", own)[1].endswith(": whole\n")
    assert json.loads(_run("verify", deepspeed, "--json")[1]) == {"ok": True, "faults": [], "checksums": True}
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in (own / "global_step3").iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    path = copy / "rank_00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-20] ^= 1  # one bit, which no size tells
    path.write_bytes(content)
    code, text = _run("verify", copy)
    assert code == 1
    assert "rank_00000.safetensors" in text
    assert "checksum" in text
    path.unlink()
    code, text = _run("verify", copy, "--json")
    assert (code, json.loads(text)["ok"]) == (1, False)
    assert "is missing" in json.loads(text)["faults"][0]
    assert _run("inspect", copy, "--tag", "nothing")[0] == 1


@pytest.mark.parametrize("to", ["ds_hf", "deepspeed", "universal", "dcp", "hf", "x.safetensors"])
def test_what_is_written_does_not_hide_damage(own: Path, tmp_path: Path, to: str) -> None:
    """It would get checksums of its own, which fit."""
    shutil.copytree(own, tmp_path / "own")
    path = tmp_path / "own/global_step3/rank_00000.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-20] + bytes([content[-20] ^ 1]) + content[-19:])
    command = ["consolidate", tmp_path / "own", tmp_path / to] if "." in to else [
        "convert", tmp_path / "own", tmp_path / to, "--to", to
    ]  # fmt: skip
    code, text = _run(*command)
    assert (code, "does not have the checksum" in text) == (1, True)
    assert not [each for each in tmp_path.rglob("*") if each.is_file() and "own" not in each.parts]


def test_a_universal_folder_is_of_one_save(own: Path, tmp_path: Path) -> None:
    """DeepSpeed reads one file of the model at stages 1 and 2 and another at stage 3; we read the first."""
    for name in ("a", "b"):
        assert _run("convert", own, tmp_path / name, "--to", "universal")[0] == 0
    file = "global_step3_universal/zero_pp_rank_0_mp_rank_00_model_states.pt"
    assert _run("verify", tmp_path / "a")[0] == 0
    shutil.copy(tmp_path / "b" / file, tmp_path / "a" / file)
    code, text = _run("verify", tmp_path / "a")
    assert (code, "are of different saves" in text) == (1, True)


def _with(own: Path, folder: Path, **entries: Any) -> Path:
    """A copy whose manifest says more."""
    shutil.copytree(own, folder)
    path = folder / "global_step3/manifest.json"
    content = {**json.loads(path.read_text()), **entries}
    del content["checksum"]
    path.write_text(json.dumps(content))
    return folder


def test_blocks_stay_blocks(own: Path, tmp_path: Path) -> None:
    """Without what is said of them they would be loaded into blocks of another kind, or exported as numbers."""
    blocks = {"blocks": {"embedding.weight": {"num_bits": 4}}}
    source = _with(own, tmp_path / "own", **blocks)
    for to, place in (("ds_hf", "again"), ("dcp", "dcp")):
        assert _run("convert", source, tmp_path / place, "--to", to)[0] == 0
        assert open_source(tmp_path / place).manifest.of_weights == blocks
    for to in ("deepspeed", "universal", "hf"):
        for saved in (source, tmp_path / "again", tmp_path / "dcp"):
            code, text = _run("convert", saved, tmp_path / "out", "--to", to)
            assert (code, "are blocks of 8 or 4 bits" in " ".join(text.split())) == (1, True)


def test_no_config_is_put_beside_weights_of_no_model(
    own: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With one ``from_pretrained`` makes a model of random weights of it, in which ours have no part."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "llama"}')
    short = _with(own, tmp_path / "short", excluded=["left.out"])
    with engine_of(config(2, "bf16"), torch.nn.Sequential(OrderedDict(base_model=Model()))) as engine:
        engine.save_checkpoint(tmp_path / "adapted", tag="global_step3")
    for source, said in ((short, "without 1 frozen parameters (left.out)"), (tmp_path / "adapted", "PEFT's adapters")):
        command = ["convert", source, tmp_path / "out", "--to", "hf"]
        code, text = _run(*command, "--model", tmp_path / "model")
        assert (code, said in " ".join(text.split())) == (1, True)
        assert not (tmp_path / "out").exists()
        shutil.copy(tmp_path / "model/config.json", source)
        code, text = _run(*command)
        assert (code, "no config.json is written" in caplog.text, "--model" in text) == (0, True, False)
        assert said in caplog.text
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
        shutil.rmtree(tmp_path / "out")
        caplog.clear()


@pytest.mark.parametrize(("to", "unsummed", "found"), [("hf", "it has", False), ("dcp", ".metadata has", True)])
def test_verify_says_what_has_no_checksums(own: Path, tmp_path: Path, to: str, unsummed: str, found: bool) -> None:
    """safetensors have none at all; of torch.distributed each item has one, so that a changed value is seen."""
    assert _run("convert", own, tmp_path / "x", "--to", to)[0] == 0
    code, text = _run("verify", tmp_path / "x")
    assert (code, f"readable, but {unsummed} no checksums" in text, "whole" in text) == (0, True, False)
    assert json.loads(_run("verify", tmp_path / "x", "--json")[1])["checksums"] is False
    path = max((tmp_path / "x").iterdir(), key=lambda path: path.stat().st_size)
    content, value = path.read_bytes(), open_source(own).state(*_a_master(own)).numpy().tobytes()[:64]
    place = content.index(value) + 9 if to == "dcp" else len(content) - 9
    path.write_bytes(content[:place] + bytes([content[place] ^ 2]) + content[place + 1 :])
    code, text = _run("verify", tmp_path / "x")
    assert code == (1 if found else 0)
    assert "is damaged" in text if found else "no checksums" in text


def _a_master(own: Path) -> tuple[SavedParameter, str]:
    saved = next(p for p in open_source(own).manifest.parameters.values() if p.numel >= 16 and "master" in p.states)
    return saved, "master"


def _values(source: Source, saved: SavedParameter) -> dict[str, list[float]]:
    """All states as numbers; moments of a parameter of one number may be scalars."""
    found = {state: source.state(saved, state).tolist() for state in saved.states}
    return {**found, **{key: [value[1]] for key, value in saved.scalars.items()}}


def test_around_through_all_formats(own: Path, tmp_path: Path) -> None:
    """ds_hf -> deepspeed -> dcp -> ds_hf loses no state."""
    steps = [
        ("deepspeed", own, ["--stage", 3, "-w", 3, "--sub-group-size", 20]),
        ("dcp", tmp_path / "deepspeed", []),
        ("ds_hf", tmp_path / "dcp", ["--from", "dcp", "--out-tag", "again"]),
    ]
    for to, source, more in steps:
        code, text = _run("convert", source, tmp_path / to, "--to", to, *more)
        assert code == 0, text
        assert text.startswith(f"wrote {tmp_path / to}")
    assert (tmp_path / "ds_hf/latest").read_text() == "again"
    before, after = open_source(own), open_source(tmp_path / "ds_hf")
    assert before.manifest.parameters.keys() == after.manifest.parameters.keys()
    for name, saved in before.manifest.parameters.items():
        other = after.manifest.parameters[name]
        assert (saved.trainable, saved.shape) == (other.trainable, other.shape)
        assert _values(before, saved) == _values(after, other)
    assert after.manifest.tied == before.manifest.tied
    assert after.manifest.extra["counters"] == {**before.manifest.extra["counters"], "micro_steps": 3}
    assert after.common["client_state"] == {"epoch": 1}
    assert after.common["lr_scheduler"] == before.common["lr_scheduler"]
    assert _run("verify", tmp_path / "ds_hf")[0] == 0


def test_weights(own: Path, tmp_path: Path) -> None:
    assert _run("convert", own, tmp_path / "hf", "--to", "hf", "--max-shard-size", "200B")[0] == 0
    assert len(list(tmp_path.glob("hf/model-*.safetensors"))) == 3
    assert _run("convert", own, tmp_path / "one.safetensors", "--to", "fp32")[0] == 0
    assert _run("consolidate", own, tmp_path / "two.safetensors", "--dtype", "bf16")[0] == 0
    assert _run("consolidate", own, tmp_path / "three.bin")[0] == 0
    wide, narrow = load_file(tmp_path / "one.safetensors"), load_file(tmp_path / "two.safetensors")
    pickled = torch.load(tmp_path / "three.bin", weights_only=True)
    assert wide["scale"].dtype is torch.float32
    assert all(torch.equal(wide[name].to(narrow[name].dtype), narrow[name]) for name in wide)
    assert all(torch.equal(wide[name], pickled[name]) for name in wide)
    assert json.loads(_run("inspect", tmp_path / "hf", "--json")[1])["kind"] == "hf"
    again = _run("consolidate", tmp_path / "hf", tmp_path / "four.safetensors", "--json")
    assert json.loads(again[1]) == {"ok": True, "written": str(tmp_path / "four.safetensors")}
    assert torch.equal(load_file(tmp_path / "four.safetensors")["scale"], narrow["scale"].float())


@pytest.mark.parametrize(
    ("to", "output"),
    [
        ("ds_hf", "x"),
        ("deepspeed", "x"),
        ("universal", "x"),
        ("dcp", "x"),
        ("hf", "x"),
        ("fp32", "x"),
        ("fp32", "x.safetensors"),
    ],
)
def test_force_replaces_what_is_there(own: Path, tmp_path: Path, to: str, output: str) -> None:
    def written() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}

    command = ["convert", own, tmp_path / output, "--to", to]
    assert _run(*command)[0] == 0
    before = written()
    code, text = _run(*command)
    assert (code, "exists; --force replaces it" in " ".join(text.split())) == (2, True)
    assert written() == before
    if to in ("hf", "fp32"):
        assert _run("consolidate", own, tmp_path / output)[0] == 2
    assert _run(*command, "--force")[0] == 0
    assert written().keys() == before.keys()
    assert written() != before


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["inspect", "nowhere"], 2, "nowhere does not exist"),
        (["inspect"], 2, "Missing argument"),
        (["convert", "OWN", "out", "--to", "tarball"], 2, "tarball"),
        (["convert", "OWN", "out", "--dtype", "bf16"], 2, "keeps states as they are"),
        (["convert", "OWN", "out", "--to", "hf", "--dtype", "int3"], 2, "--dtype int3: use fp32"),
        (["convert", "OWN", "out", "--to", "hf", "--max-shard-size", "huge"], 2, "is not a size"),
        (["convert", "OWN", "out", "--to", "hf", "--model", "nowhere"], 1, "has no config.json"),
        (["convert", "OWN", "out", "--from", "dcp"], 1, "is a checkpoint of kind ds_hf, not dcp"),
        (["convert", "OWN", "OWN"], 2, "exists; --force replaces it"),
        (["convert", "OWN", "OWN", "--to", "deepspeed", "-f"], 1, "exists and is not a checkpoint of format deepspeed"),
        (["convert", "OWN", "/dev/null"], 1, "/dev/null is no folder: give another place"),
        (["convert", "OWN", "/dev/null/out", "--to", "hf"], 1, "/dev/null is no folder: give another place"),
        (["verify", "."], 1, "holds no checkpoint"),
        (["convert", "OWN", "out", "--out-tag", "../evil"], 1, "'../evil' cannot be the tag of a checkpoint"),
        (["convert", "OWN", "out", "--out-tag", "/tmp/evil"], 1, "it leads out of the folder"),
        (["convert", "OWN", "out", "--to", "deepspeed", "--out-tag", "../evil"], 1, "it leads out of the folder"),
        (["convert", "OWN", "out", "--to", "dcp", "--out-tag", "later"], 2, "--out-tag: dcp has no tags"),
        (["convert", "OWN", "out", "--to", "dcp", "--model", "."], 2, "--model goes with weights"),
        (["convert", "OWN", "out", "--to", "deepspeed", "-w", "9" * 20], 2, "65536"),
        (["convert", "OWN", "out", "--out-tag", "latest"], 1, "'latest' is the name of a file"),
        (["convert", "OWN", "", "--to", "hf"], 2, "is empty"),
        (["verify", ""], 2, "is empty"),
        (["inspect", "OWN", "--tag", "../evil"], 1, "it leads out of the folder"),
    ],
)
def test_what_is_wrong_is_told(
    arguments: list[str], code: int, message: str, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = _run(*(str(own) if argument == "OWN" else argument for argument in arguments))
    assert found[0] == code, found
    assert message in " ".join(found[1].split())
    assert not (tmp_path.parent / "evil").exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_names_in_files_do_not_steer_the_terminal(own: Path, tmp_path: Path, as_json: list[str]) -> None:
    folder = tmp_path / "\x1b]0;title\x07"
    shutil.copytree(own, folder)
    (folder / "latest").write_text("\x1b[2J\u202e")
    commands = [
        ["verify", folder], ["inspect", folder], ["inspect", folder, "--tag", "global_step3"],
        ["convert", folder, tmp_path / "\x9b2J", "--tag", "global_step3"], ["consolidate", folder, tmp_path / "out"],
        ["verify", folder, "--tag", "nowhere\x1b"],
    ]  # fmt: skip
    for command in commands:
        code, text = _run(*command, *as_json)
        assert code in (0, 1)
        assert text.replace("\n", "").isprintable()
        assert ("title" in text) == (r"u001b]0;title" in text or r"x1b]0;title" in text)


def on_a_terminal(quiet: float, *words: str) -> str:
    """What a command writes to a terminal as standard error."""
    leader, follower = pty.openpty()
    os.dup2(follower, 2)
    os.close(follower)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    assert checkpoint._QUIET_S == 2.0
    checkpoint._QUIET_S = quiet
    sys.argv = ["ds-hf", *words]
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    os.set_blocking(leader, False)
    try:
        return os.read(leader, 100_000).decode()
    except BlockingIOError:  # nothing was written
        return ""


@pytest.mark.parametrize(("quiet", "shown"), [(0.0, True), pytest.param(100.0, False, marks=pytest.mark.slow)])
def test_progress_is_shown_on_a_terminal_after_some_time(own: Path, tmp_path: Path, quiet: float, shown: bool) -> None:
    words = ("checkpoint", "convert", str(own), str(tmp_path / "out"))
    environment = {"TERM": "xterm", "COLUMNS": "100"}
    (written,) = run_distributed(on_a_terminal, 1, quiet, *words, backend=None, env=environment)
    assert ("%" in written) == shown
    assert (written != "") == shown


# -- few bits ----------------------------------------------------------------------------------------------------------

READER = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
prompt = torch.tensor([json.loads(sys.argv[2])])
with torch.no_grad():
    logits = model(prompt).logits[0].float()
    tokens = model.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)[0].tolist()
torch.save({"logits": logits, "weights": {n: p.detach() for n, p in model.named_parameters()}}, sys.argv[3])
print(json.dumps({"tokens": tokens, "strangers": [name for name in sys.modules if name.startswith("ds_hf")]}))
"""


def _llama(folder: Path) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=96, initializer_range=0.3, num_key_value_heads=1, **sizes))
    model = model.to(torch.bfloat16).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "sparse"), [(4, False), (8, False), (4, True)])
def test_transformers_alone_reads_few_bits(tmp_path: Path, bits: int, sparse: bool) -> None:
    """Its tokens and logits are those of the model with the rounded weights in memory."""
    pytest.importorskip("compressed_tensors")
    model = _llama(tmp_path / "plain")
    code, output = _run(
        "convert", tmp_path / "plain", tmp_path / "small", "--to", "hf", "--bits", bits, *(("--sparse", "2:4") * sparse)
    )
    assert code == 0, output
    for name, module in model.model.named_modules():
        if isinstance(module, torch.nn.Linear):
            weight = two_of_four(module.weight.data) if sparse else module.weight.data
            group = module.in_features if bits == 8 else 64
            module.weight.data = opened(weight, bits, group)
            assert not torch.equal(module.weight, weight), name
    prompt = [5, 17, 3]
    done = subprocess.run(
        [sys.executable, "-c", READER, str(tmp_path / "small"), json.dumps(prompt), str(tmp_path / "read")],
        capture_output=True, text=True, timeout=180, check=False,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["strangers"] == []
    read = torch.load(tmp_path / "read")
    for name, value in model.named_parameters():
        assert torch.equal(read["weights"][name], value), name
    with torch.no_grad():
        inputs = torch.tensor([prompt])
        torch.testing.assert_close(read["logits"], model(inputs).logits[0].float(), rtol=0.02, atol=0.05)
        tokens = model.generate(inputs, max_new_tokens=12, do_sample=False, pad_token_id=0)[0].tolist()
    assert found["tokens"] == tokens


def test_few_bits_of_a_checkpoint(tmp_path: Path) -> None:
    """Sizes are those of the files; the model is found in the checkpoint."""
    model = _llama(tmp_path / "plain")
    with engine_of(config(3, "bf16"), model) as engine:
        engine.save_checkpoint(tmp_path / "saved")
        whole = {name: value.clone() for name, value in engine.named_weights()}
    code, output = _run("convert", tmp_path / "saved", tmp_path / "small", "--to", "hf", "--bits", 8, "--json")
    assert code == 0, output
    found = json.loads(output)
    assert found["layers"] == "14 linear layers in 8 bits, one scale a row; as they were: 1 the head"
    tensors = load_file(tmp_path / "small/model.safetensors")
    before, after = found["nbytes"]
    assert before == sum(value.nbytes for value in whole.values())
    assert after == sum(value.nbytes for value in tensors.values())
    name = "model.layers.0.self_attn.q_proj"
    codes, scales = unpacked(tensors[f"{name}.weight_packed"], 8), tensors[f"{name}.weight_scale"]
    assert torch.equal(codes.to(torch.bfloat16) * scales, opened(whole[f"{name}.weight"], 8, 64))
    written = json.loads((tmp_path / "small/config.json").read_text())
    assert written["dtype"] == "bfloat16"
    assert written["quantization_config"]["ignore"] == ["lm_head"]


@pytest.mark.slow
def test_few_bits_beside_experts(tmp_path: Path) -> None:
    """They stay as they are; a folder that has them one by one would be read without them, and is refused."""
    from transformers import MixtralConfig, MixtralForCausalLM

    pytest.importorskip("compressed_tensors")
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=32, num_key_value_heads=2, num_local_experts=2, **sizes)).eval()
    model.save_pretrained(tmp_path / "plain")
    code, output = _run("convert", tmp_path / "plain", tmp_path / "none", "--to", "hf", "--bits", 4)
    assert code == 1
    assert "have other names than in the model (experts one by one)" in " ".join(output.split())
    with engine_of(config(3, "fp32"), model) as engine:
        engine.save_checkpoint(tmp_path / "saved")
        whole = {name: value.clone() for name, value in engine.named_weights()}
    code, output = _run("convert", tmp_path / "saved", tmp_path / "small", "--to", "hf", "--bits", 4)
    assert (code, "1 the head, 2 stacks of experts" in output) == (0, True)
    read, found = MixtralForCausalLM.from_pretrained(tmp_path / "small", output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    read(input_ids=torch.ones(1, 4, dtype=torch.long))  # opens the packed weights
    for name, value in read.state_dict().items():
        expected = opened(whole[name], 4, 64) if "self_attn" in name and name.endswith("weight") else whole.get(name)
        if expected is not None:
            assert torch.equal(value, expected), name


def test_a_pattern_alone(tmp_path: Path) -> None:
    model = _llama(tmp_path / "plain")
    arguments = ("convert", tmp_path / "plain", tmp_path / "out", "--to", "hf", "--sparse", "2:4", "--exclude", "mlp")
    code, output = _run(*arguments, "--time")
    assert code == 0, output
    assert "8 linear layers two of four values left; as they were: 6 excluded, 1 the head" in output
    assert "ms before" in output
    tensors = load_file(tmp_path / "out/model.safetensors")
    weights = dict(model.named_parameters())
    name = "model.layers.1.self_attn.v_proj.weight"
    assert torch.equal(tensors[name], two_of_four(weights[name]))
    assert torch.equal(tensors["model.layers.1.mlp.up_proj.weight"], weights["model.layers.1.mlp.up_proj.weight"])
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--bits", 3), "--bits 3: use 8 or 4"),
        (("--sparse", "1:2"), "--sparse 1:2: use 2:4"),
        (("--group-size", 32), "--group-size goes with --bits"),
        (("--time",), "--time goes with --bits or --sparse"),
        (("--bits", 4, "--exclude", "("), "it is no regular expression"),
        (("--bits", 4, "--text", "nowhere.txt"), "there is no such file"),
        (("--bits", 4, "--to", "dcp"), "--bits goes with a folder for from_pretrained: --to hf"),
    ],
)
def test_few_bits_that_do_not_fit_together(own: Path, tmp_path: Path, arguments: tuple[Any, ...], said: str) -> None:
    code, output = _run("convert", own, tmp_path / "out", "--to", "hf", *arguments)
    assert code == 2
    assert said in " ".join(output.split())
    assert not (tmp_path / "out").exists()


def test_few_bits_without_a_model_or_a_divisor(own: Path, tmp_path: Path) -> None:
    code, output = _run("convert", own, tmp_path / "out", "--to", "hf", "--bits", 4)
    assert code == 1
    assert "Convert with --model FOLDER" in " ".join(output.split())
    _llama(tmp_path / "plain")
    code, output = _run("convert", tmp_path / "plain", tmp_path / "out", "--to", "hf", "--bits", 4, "--group-size", 48)
    assert code == 1
    assert "--group-size 48 does not divide the 64 columns" in " ".join(output.split())
    assert not (tmp_path / "out").exists()


def test_who_cannot_read_few_bits_is_told_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *p: None if n == "compressed_tensors" else find(n, *p))
    _llama(tmp_path / "plain")
    code, output = _run("convert", tmp_path / "plain", tmp_path / "out", "--to", "hf", "--bits", 4, "--time")
    assert (code, "pip install 'ds-hf[few-bits]'" in output) == (2, True)
    code, output = _run("convert", tmp_path / "plain", tmp_path / "out", "--to", "hf", "--bits", 4)
    assert (code, "pip install 'ds-hf[few-bits]'" in output) == (0, True)
