"""``ds-hf config``: what it prints, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from typer.testing import CliRunner

from ds_hf.cli.root import app
from ds_hf.config import load_config
from ds_hf.config.docs import configuration_pages
from ds_hf.config.presets import PRESETS, preset
from ds_hf.config.schema import schema_address, schema_moved, schema_text
from ds_hf.errors import ConfigError

ROOT = Path(__file__).parents[2]
run = CliRunner().invoke


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.fixture
def good(tmp_path: Path) -> str:
    path = tmp_path / "good.json"
    lines = [
        '"train_batch_size": 16,',
        '"bf16": {"enabled": "auto"},',
        '"graph_harvesting": true,',
        '"fp16_enabled": false}',
    ]
    path.write_text("\n".join(["{", *lines]))
    return str(path)


@pytest.fixture
def bad(tmp_path: Path) -> str:
    path = tmp_path / "bad.json"
    path.write_text('{\n"train_batch_size": 16,\n"zero_optimization": {"stgae": 2}}')
    return str(path)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_pass_their_own_check(name: str) -> None:
    config = load_config(name, allow_auto=True, world_size=1)
    assert config.warnings == ()
    assert config.zero_optimization.stage == int(name[4])
    assert (config.zero_optimization.offload_optimizer.device == "cpu") == name.endswith("offload")
    result = run(app, ["config", "check", name])
    assert result.exit_code == 0
    assert f"stage {name[4]}" in result.output
    assert json.loads(run(app, ["config", "new", "-p", name]).output) == preset(name)
    assert json.loads(run(app, ["config", "new", "-p", name, "--for", "trainer"]).output) == preset(name)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("world_size", [1, 8])
def test_presets_for_a_loop_leave_nothing_open(name: str, world_size: int) -> None:
    tree = json.loads(run(app, ["config", "new", "--preset", name, "--for", "loop"]).output)
    assert tree == preset(name, loop=True)
    config = load_config(tree, world_size=world_size)  # without allow_auto
    assert config.warnings == ()
    assert tree["zero_optimization"] == preset(name)["zero_optimization"]
    assert (config.train_batch_size, config.gradient_clipping, config.bf16.enabled) == (world_size, 1.0, True)
    assert config.optimizer is not None
    assert config.optimizer.type == "AdamW"


@pytest.mark.parametrize("name", PRESETS)
def test_an_unfilled_auto_offers_the_preset_for_a_loop_once(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(preset(name), world_size=2)
    offers = [line for line in str(error.value).splitlines() if "--for loop" in line]
    assert [line.strip() for line in offers] == [f"for your own loop: ds-hf config new --for loop --preset {name}"]
    assert len(error.value.faults) == 6


@pytest.mark.parametrize("stage", [True, "auto", 7, [], None])
def test_the_offer_of_a_file_with_an_impossible_stage(stage: Any) -> None:
    tree = {"train_batch_size": "auto", "zero_optimization": {"stage": stage}}
    with pytest.raises(ConfigError, match=r"(?m)--for loop --preset zero2$"):
        load_config(tree, world_size=2)


def test_check_of_a_good_file(good: str) -> None:
    result = run(app, ["config", "check", good])
    assert result.exit_code == 0
    assert result.output.startswith(f"ok: {good}: ZeRO stage 0, precision from the Trainer, clip 1")
    assert "the Trainer or accelerate fills 1: bf16.enabled" in result.output
    assert "note: graph_harvesting (line 4): no effect" in result.output


def test_check_of_a_bad_file(bad: str) -> None:
    result = run(app, ["config", "check", bad])
    assert result.exit_code == 1
    assert 'zero_optimization.stgae (line 3): unknown key "stgae"' in result.output
    assert 'fix: did you mean "stage"?' in result.output


def test_check_with_a_world_size(good: str) -> None:
    assert run(app, ["config", "check", good, "--world-size", "8"]).exit_code == 0
    result = run(app, ["config", "check", good, "-w", "3"])
    assert result.exit_code == 1
    assert "not divisible by the world size 3" in result.output


def test_check_as_json(good: str, bad: str) -> None:
    result = json.loads(run(app, ["config", "check", good, "--json"]).output)
    assert (result["ok"], result["auto"], len(result["warnings"])) == (True, ["bf16.enabled"], 2)
    faulty = run(app, ["config", "check", bad, "--json"])
    assert faulty.exit_code == 1
    (fault,) = json.loads(faulty.output)["faults"]
    assert fault["pointer"] == "/zero_optimization/stgae"
    assert fault["line"] == 3


def test_check_of_standard_input_and_of_a_missing_file() -> None:
    assert run(app, ["config", "check", "-"], input='{"train_batch_size": 8}').exit_code == 0
    result = run(app, ["config", "check", "nowhere.json"])
    assert result.exit_code == 1
    assert 'there is no file "nowhere.json"' in result.output


def test_explain_shows_values_and_origins(good: str) -> None:
    lines = run(app, ["config", "explain", good]).output.splitlines()
    rows = {line.split()[0]: line for line in lines}
    assert "line 2" in rows["train_batch_size"]
    assert "Trainer: bf16" in rows["bf16.enabled"]
    assert "default  " in rows["gradient_clipping"]
    assert "was 0 in DeepSpeed before 2026-06" in rows["gradient_clipping"]
    assert "renamed from fp16_enabled, line 5" in rows["fp16.enabled"]
    assert "vocabulary_size" not in rows
    everything = run(app, ["config", "explain", good, "--all"]).output
    assert "vocabulary_size" in everything
    assert len(everything.splitlines()) > 300


def test_explain_names_the_name_that_was_written(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8, "zero_optimization": {\n"stage": 3,\n"param_persistence_threshold": 9}}')
    lines = run(app, ["config", "explain", str(path)]).output.splitlines()
    (row,) = [line for line in lines if line.startswith("zero_optimization.stage3_param_persistence_threshold")]
    assert "line 3" in row
    assert "written as param_persistence_threshold" in row


def test_explain_shows_what_was_set_and_is_auto(good: str) -> None:
    lines = run(app, ["config", "explain", good]).output.splitlines()
    keys = [line.split()[0] for line in lines[1:-1]]
    assert {"train_batch_size", "bf16.enabled"} <= set(keys)
    assert not [key for key in keys if key.startswith(("zero_optimization.offload", "aio", "wandb"))]
    assert lines[-1].endswith("more keys are at their defaults; --all shows them.")


def test_packages_that_monitors_lack_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_hf.config.explain.find_spec", lambda name: None if name == "wandb" else object())
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 1, "wandb": {"enabled": true}, "comet": {"enabled": true}}')
    out = run(app, ["config", "check", str(file)]).output
    assert "wandb.enabled: it needs the package wandb, which is not installed here, so no training starts -> pip" in out
    assert "comet_ml" not in out


def test_how_layers_are_shared_needs_that_they_are(tmp_path: Path) -> None:
    file, said = tmp_path / "ds.json", "ds_hf.tensor_sequence_parallel: no effect without tensor_parallel.autotp_size"
    given = {"train_micro_batch_size_per_gpu": 1, "ds_hf": {"tensor_sequence_parallel": True}}
    for more, expected in (({}, True), ({"tensor_parallel": {"autotp_size": 2}}, False)):
        file.write_text(json.dumps({**given, **more}))
        assert (said in run(app, ["config", "check", str(file)]).output) == expected


@pytest.mark.parametrize("name", ["mlflow", "trackio", "swanlab"])
def test_what_the_trainer_reports_to_is_no_section(name: str, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"train_batch_size": 1, name: {"enabled": True}}))
    assert f"the Trainer writes there: --report_to {name}" in run(app, ["config", "check", str(file)]).output


def test_a_new_file_names_its_schema_wherever_it_goes(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    assert run(app, ["config", "new", "--preset", "zero2", "-o", str(file)]).exit_code == 0
    address = json.loads(file.read_text())["$schema"]
    assert address == schema_address()
    assert json.loads(Path(unquote(urlsplit(address).path)).read_text())["title"]
    moved = schema_moved({"$schema": "../ds_hf/schemas/ds_config.schema.json"}, str(ROOT / "examples" / "x.json"))
    assert moved == {"$schema": address}
    assert schema_moved({"$schema": "gone.json"}, str(file)) == {"$schema": address}
    for kept in ({"$schema": "https://example.org/s.json"}, {"$schema": "/a/b.json"}, {}):
        assert schema_moved(kept, str(file)) == kept


def test_explain_as_json(good: str) -> None:
    rows = {row["key"]: row for row in json.loads(run(app, ["config", "explain", good, "--json"]).output)}
    assert rows["train_batch_size"] == {
        "key": "train_batch_size",
        "value": 16,
        "from": "set",
        "detail": "line 2",
        "note": "",
    }
    assert rows["zero_optimization.stage"]["from"] == "default"


def test_explain_says_what_the_trainer_fills_and_that_it_has_no_effect() -> None:
    source = '{"train_batch_size": 8, "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}'
    output = run(app, ["config", "explain", "-"], input=source).output
    (line,) = [line for line in output.splitlines() if line.startswith("zero_optimization.reduce_bucket_size")]
    assert "hidden_size x hidden_size" in line
    assert "no buckets" in line


def test_explain_says_where_the_experts_of_a_model_are() -> None:
    """Of a description, so without weights: two dense layers of five, a router and shared experts beside the others."""
    model = "deepseek_v3:layers=5,first_k_dense_replace=2,n_routed_experts=8,hidden=32,heads=4,kv_heads=4,vocab=64"
    source = '{"train_batch_size": 8, "expert_parallel": {"enabled": %s, "autoep_size": 4}}'
    command = ["config", "explain", "-", "--model"]
    (line,) = (
        line
        for line in run(app, [*command, model], input=source % "true").output.splitlines()
        if line.startswith("experts of ")
    )
    assert line.startswith("experts of 3 layers are divided over 4 processes, 2 of 8 on each: model.layers.*.mlp.exp")
    assert (
        "mlp.experts (gate_up_proj, down_proj), model.layers.2.mlp.experts the first, found by the model's plan" in line
    )
    assert line.endswith("model.layers.*.mlp.gate, model.layers.*.mlp.shared_experts, all outside of these blocks")
    rows = json.loads(run(app, [*command, model, "--json"], input=source % "true").output)
    assert rows[-1] == {"key": "expert_parallel", "value": line, "from": "model", "detail": model, "note": ""}
    assert "3 layers of experts have transformers' own" in run(app, [*command, model], input=source % "false").output
    dense = run(app, [*command, "llama:layers=1,hidden=32,heads=4,kv_heads=4,vocab=64"], input=source % "true")
    assert dense.exit_code == 1
    assert "moe_layer_pattern" in dense.output


def test_explain_of_a_bad_file(bad: str) -> None:
    result = run(app, ["config", "explain", bad])
    assert result.exit_code == 1
    assert "stgae" in result.output


def test_new_lists_writes_and_does_not_overwrite(tmp_path: Path) -> None:
    listing = run(app, ["config", "new"]).output
    assert all(name in listing for name in PRESETS)
    assert "--for loop" in listing
    assert run(app, ["config", "new", "-p", "zero2", "--for", "others"]).exit_code == 2
    path = tmp_path / "ds.json"
    assert run(app, ["config", "new", "-p", "zero2", "-o", str(path)]).exit_code == 0
    assert json.loads(path.read_text())["zero_optimization"]["stage"] == 2
    assert run(app, ["config", "new", "-p", "zero3", "-o", str(path)]).exit_code == 2
    assert json.loads(path.read_text())["zero_optimization"]["stage"] == 2
    assert run(app, ["config", "new", "-p", "zero3", "-o", str(path), "--force"]).exit_code == 0
    assert run(app, ["config", "new", "-p", "zero9"]).exit_code == 2
    link = tmp_path / "link.json"  # that names a file which is not there
    link.symlink_to(tmp_path / "another.json")
    assert run(app, ["config", "new", "-p", "zero2", "-o", str(link)]).exit_code == 2
    assert not (tmp_path / "another.json").exists()
    assert "--force" not in run(app, ["config", "new", "-p", "zero2", "-o", str(tmp_path)]).output  # nor would it help


def test_schema_is_printed() -> None:
    assert json.loads(run(app, ["config", "schema"]).output) == json.loads(schema_text())


def test_the_documentation_is_current() -> None:
    pages, docs = configuration_pages(), ROOT / "docs"
    found = {path.stem: path.read_text("utf-8") for path in (docs / "configuration").glob("*.md")}
    found[""] = (docs / "configuration.md").read_text("utf-8")
    assert found == pages, "renew them: ds-hf config docs -o docs/configuration.md"
    for output in ("", "pages"):
        result = run(app, ["config", "docs", "-o", output])
        assert result.exit_code == 2
        assert "--output names a page" in result.output
    listed = [name for name in pages if name and f"- configuration/{name}.md\n" in (ROOT / "mkdocs.yml").read_text()]
    assert listed == [name for name in pages if name], "mkdocs.yml lists each page"


def test_it_starts_without_torch_and_before_installation(good: str) -> None:
    code = "import sys, ds_hf.cli.root; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    command = [sys.executable, "-m", "ds_hf.cli", "config", "check", good]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_file_of_very_many_unknown_keys_is_told_in_a_page(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps({f"key_{index}" + "x" * 300: 1 for index in range(20000)}))
    for command in ("check", "explain"):
        result = run(app, ["config", command, str(path)])
        assert result.exit_code == 1
        assert len(result.output) < 12000
        assert "... and 31 more" in result.output
        assert "x" * 100 not in result.output


def test_paths_that_the_system_refuses(tmp_path: Path) -> None:
    """In any command: a sentence with the path, and no wait."""
    os.mkfifo(tmp_path / "pipe")
    long = str(tmp_path / ("x" * 300))
    commands = [["config", "new", "-p", "zero2", "-fo"], ["config", "schema", "-o"], ["checkpoint", "inspect"]]
    for command in [*commands, ["checkpoint", "verify"], ["config", "check"]]:
        result = run(app, [*command, long])
        assert result.exit_code in (1, 2), result
        assert "File name too long" in result.output
        assert long in result.output
    for command in commands[:2]:
        result = run(app, [*command, str(tmp_path / "pipe"), "--force"])
        assert result.exit_code == 2
        assert "not a regular file but a pipe" in result.output
