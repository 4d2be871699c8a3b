"""``ds-hf profile``: of a folder and of a script, ``--apply``, ``--json``, and what is wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ds_hf.cli.root import app
from ds_hf.config.source import read_source
from ds_hf.profile import command
from tests.engine.observe.report.common import make_engine, train
from tests.helpers.distributed import run_distributed
from tests.helpers.started import ForkedProgram
from tests.profile.test_verdict import slow_link

SCRIPT = """
import sys
from pathlib import Path
import ds_hf
from tests.helpers.models import TinyLM, token_batches
config = sys.argv[sys.argv.index("--deepspeed_config") + 1]
engine = ds_hf.initialize(model=TinyLM(), config=config)[0]
while True:
    engine.backward(engine(token_batches(1, 16)))
    engine.step()
    if engine.global_steps == 2:
        engine.save_checkpoint(str(Path(config).parent / "saved"))
"""
FILE = """{
  // the user's own
  "train_micro_batch_size_per_gpu": 1,
  "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
  "zero_optimization": {"stage": 2},
}
"""


def run(*words: str) -> tuple[int, str, str]:
    found = CliRunner().invoke(app, ["profile", *words])
    return found.exit_code, found.stdout, found.stderr


def small_run(folder: Path) -> None:
    engine = make_engine(1, folder)
    train(engine, 4)
    engine.destroy()


def test_a_folder(tmp_path: Path) -> None:
    run_distributed(small_run, 1, tmp_path)
    code, out, _ = run(str(tmp_path))
    assert code == 0
    assert out.startswith("where the time went (steps 3 to 4, 2 of them recorded):\na step takes ")
    assert (tmp_path / "report.html").exists()
    code, out, _ = run("--json", str(tmp_path))
    found = json.loads(out)
    assert code == 0
    assert found["steps"] == [3, 4]
    assert sum(found["kinds"].values()) == pytest.approx(found["seconds"], rel=1e-3)


def test_apply_puts_the_changes_into_the_users_file(tmp_path: Path) -> None:
    own = tmp_path / "ds.json"
    own.write_text(FILE.replace('"stage": 2', '"stage": 3'))
    folder = tmp_path / "run"
    run_distributed(slow_link, 2, folder)
    (folder / "profiled.json").write_text(json.dumps({"config": str(own)}))
    code, _, errors = run("--apply", str(folder))
    assert code == 0, errors
    assert f"wrote {own}: zero_optimization.stage " in errors.replace("\n", "")
    changed = json.loads(own.read_text())
    assert changed["zero_optimization"]["stage"] < 3
    assert changed["optimizer"] == {"type": "AdamW", "params": {"lr": 0.01}}
    assert "// the user's own" in (tmp_path / "ds.json.before").read_text()


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    code, _, errors = run(str(tmp_path))
    assert code == 1
    assert "has no report" in errors
    code, _, errors = run("no_such.py", "--deepspeed", "ds.json")
    assert code == 2
    assert "no_such.py does not exist" in errors
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('nothing to train')")
    (tmp_path / "ds.json").write_text(FILE)
    line = [str(script), "--deepspeed", str(tmp_path / "ds.json")]
    for words, said in (
        (["-n", "2", "torchrun", "--nproc-per-node", "2", *line], "-n is for a script alone"),
        (["--launcher", "srun", "torchrun", *line], "--launcher, and torchrun before the script: give one of them"),
        (["--launcher", "no-such-launcher", *line], "there is no program no-such-launcher"),
    ):
        code, _, errors = run(*words)
        assert code == 2
        assert said in errors.replace("\n", " ")
    words = ["-n", "1", "-o", str(tmp_path / "file" / "out"), str(script), "--deepspeed", str(tmp_path / "ds.json")]
    (tmp_path / "file").write_text("")
    code, _, errors = run(*words)
    assert code == 2
    assert f"--output names {tmp_path / 'file' / 'out'}, which cannot be written to" in errors.replace("\n", "")


def test_a_script_is_recorded_and_saves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, config, folder = tmp_path / "train.py", tmp_path / "ds.json", tmp_path / "out"
    script.write_text(SCRIPT)
    config.write_text(FILE)
    started: list[Sequence[str]] = []

    def start(words: Sequence[str], **options: Any) -> ForkedProgram:
        started.append(words)
        return ForkedProgram(words, **options)

    monkeypatch.setattr(command, "start_program", start)
    code, out, errors = run(
        "-n", "1", "--steps", "6", "-o", str(folder), str(script), "--deepspeed_config", str(config)
    )
    assert code == 0, errors
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    assert started == [[*torchrun, str(script), "--deepspeed_config", str(folder / "ds_config.json")]]
    # in the third step the script tries to save, which is no usual step
    assert out.startswith("where the time went (steps 4 to 6, 3 of them recorded):")
    assert "step 6: " in errors
    assert not (tmp_path / "saved").exists()
    assert config.read_text() == FILE
    assert json.loads((folder / "profiled.json").read_text()) == {
        "config": str(config),
        "written": read_source(config).tree,
    }


@pytest.mark.parametrize(
    "more",
    [
        {"gradient_accumulation_steps": 1, "train_batch_size": 4},
        {"expert_parallel": {"enabled": True, "autoep_size": 2}},
    ],
)
def test_a_file_for_more_processes_than_this_one_is_taken(more: dict[str, Any], tmp_path: Path) -> None:
    content = {"train_micro_batch_size_per_gpu": 2, **more}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(content))
    assert command._written(str(path)) == content
