"""``ds-hf lr-find`` with real scripts: one that works, and those that do not."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from hypothesis import given, note
from hypothesis import strategies as st
from typer.testing import CliRunner

from ds_hf.autotune.lr import FindOptions, LrOptions, LrSearchError, find
from ds_hf.autotune.lr.find import _read, launch_command, total_steps_in
from ds_hf.autotune.lr.report import report
from ds_hf.cli.root import app
from ds_hf.lr import LrResult
from tests.helpers.mutations import QUICK, examples, wrong_file
from tests.helpers.started import ForkedProgram

SCRIPT = """
import sys
import torch
import ds_hf

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def forward(self, x, y):
        return {"loss": (self.net(x) - y).square().mean()}

torch.manual_seed(0)
config = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 3},
          "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
engine = ds_hf.initialize(model=Model(), config=config)[0]
for _ in range(int(sys.argv[sys.argv.index("--max_steps") + 1])):
    x = torch.randn(8, 8)
    loss = engine(x=x, y=x.sum(1, keepdim=True))["loss"]
    engine.backward(loss)
    engine.step()
print("the script's own end")
"""
OPTIONS = ["--steps", "30", "--confirm-steps", "8", "--seeds", "1", "--train-batches", "8", "--held-out-batches", "2"]


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(SCRIPT)
    return str(tmp_path / "train.py")


def lr_find(folder: Path, *words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["lr-find", "-o", str(folder), "--nproc", "1", *words])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts run in processes that have torch already."""
    monkeypatch.setattr(sys.modules["ds_hf.autotune.lr.find"], "start_program", ForkedProgram)


def test_a_script_is_launched_and_the_result_shown(script: str, tmp_path: Path) -> None:
    code, out, err = lr_find(tmp_path / "lr", *OPTIONS, script, "--max_steps", "40")
    assert code == 0, out + err
    result = LrResult.from_dict(json.loads((tmp_path / "lr" / "lr_result.json").read_text()))
    assert 1e-4 < result.lr < 1
    assert result.total_steps == 40
    assert f"learning rate  {result.lr:.3g}" in out
    assert f"--learning_rate {result.lr:.3g} --lr_scheduler_type linear --warmup_steps 3" in out
    assert '"type": "OneCycle"' in out
    assert "reading batches from the script: 10 of 10" in err
    page = (tmp_path / "lr" / "lr_report.html").read_text()
    assert "Confirming runs" in page
    assert 'src="http' not in page
    assert len(page) < 200_000
    assert out.splitlines()[-1].startswith(
        f"Train with a learning rate of {result.lr:.3g} for 40 updates: --learning_rate"
    )
    assert "the script's own end" not in (tmp_path / "lr" / "log.txt").read_text()


SAVES = """
import os
import torch

torch.save(engine.module.state_dict(), "model.pt")
open("metrics.json", "w").write("{}")
engine.save_checkpoint("checkpoints")
"""


@pytest.mark.usefixtures("forked")
def test_fewer_batches_make_a_shorter_search_and_nothing_is_saved(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script is over after 5 batches of the 10 that are wanted: it would write what training has left now."""
    monkeypatch.chdir(tmp_path)
    Path(script).write_text(SCRIPT.replace('print("the script', SAVES + 'print("the script'))
    Path("model.pt").write_text("the user's model")
    code, out, err = lr_find(tmp_path / "lr", *OPTIONS, "python", script, "--max_steps", "5")
    assert code == 0, out + err
    assert Path("model.pt").read_text() == "the user's model"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lr", "model.pt", "train.py"]
    said = "the script trained on 5 batches until it came to save(), before which it was stopped"
    assert f"a shorter search: {said}" in " ".join(out.split())
    assert f"starting again for a shorter search: {said}" in " ".join(err.split())
    result = json.loads((tmp_path / "lr" / "lr_result.json").read_text())
    assert 1e-4 < result["lr"] < 1
    assert result["notes"] == [f"a shorter search: {said}"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_loop_that_feeds_the_search_and_ends(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is the script's own, so each batch counts once: 40 of them suffice for a range test alone."""
    monkeypatch.chdir(tmp_path)
    own = SCRIPT.replace('return {"loss": (self.net(x) - y).square().mean()}', "return self.net(x)")
    own = own.replace('loss = engine(x=x, y=x.sum(1, keepdim=True))["loss"]',
                      "loss = (engine(x=x, y=None) - x.sum(1, keepdim=True)).square().mean()")  # fmt: skip
    Path(script).write_text(own + SAVES)
    code, out, err = lr_find(tmp_path / "lr", *OPTIONS, "python", script, "--max_steps", "60")
    assert code == 0, out + err
    assert "without confirming runs" in out
    assert "a shorter search: the script trained on 60 batches" in " ".join(out.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lr", "train.py"]


TRAINER = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

model = LlamaForCausalLM(LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                     num_attention_heads=1, num_key_value_heads=1))
rows = [{"input_ids": (ids := torch.randint(0, 16, (6,))), "labels": ids} for _ in range(12)]
config = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}
arguments = TrainingArguments("out", deepspeed=config, per_device_train_batch_size=2, num_train_epochs=2, save_steps=3,
                              disable_tqdm=True, report_to="tensorboard", save_total_limit=1)
trainer = Trainer(model, arguments, train_dataset=rows)
try:
    trainer.train()
except SystemExit:
    pass
finally:
    trainer.save_model("final")
"""


@pytest.mark.slow
def test_a_trainer_is_ended_before_it_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two epochs of six steps on two processes, with checkpoints on the way, of which 15 batches are wanted."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAINER)
    for name in ("out/checkpoint-3", "final"):
        Path(name).mkdir(parents=True)
        Path(name, "model.safetensors").write_text("the user's model")
    words = [*OPTIONS, "--train-batches", "13", "--nproc", "2", "train.py"]
    result = CliRunner().invoke(app, ["lr-find", "-o", "lr", *words])
    assert result.exit_code == 0, result.output
    assert "came to the end of the training" in " ".join(result.stdout.split())
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*") if path.parts[-2] != "lr")
    assert files == ["final/model.safetensors", "out/checkpoint-3/model.safetensors", "train.py"]
    assert Path("final/model.safetensors").read_text() == "the user's model"


@pytest.mark.usefixtures("forked")
def test_a_script_that_ends_too_early(script: str, tmp_path: Path) -> None:
    code, _, err = lr_find(tmp_path, *OPTIONS, "python", script, "--max_steps", "1")
    assert code == 1
    assert "the script trained on 1 batch until it ended, too few for a search" in err
    assert "the script's own end" in err


@pytest.mark.parametrize(
    ("text", "timeout", "said"),
    [
        ("print('before'); raise KeyError('its own fault')", 600, "failed with exit code 1"),
        ("print('nothing to do')", 600, "never trained with a ds_hf engine"),
        (
            "import time; time.sleep(3600)",
            2,
            "the 2 s of the budget were over before .*; it had not trained on a batch",
        ),
    ],
)
def test_scripts_that_never_train(text: str, timeout: int, said: str, tmp_path: Path) -> None:
    """Plain python is the launcher here: nothing imports torch."""
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(LrSearchError, match=said) as error:
        find(["python", str(tmp_path / "bad.py")], FindOptions(output=tmp_path / "out", timeout_s=timeout))
    if "its own fault" in text:
        assert "KeyError: 'its own fault'" in str(error.value)
    here = psutil.Process().children(recursive=True)
    assert not [child for child in here if str(tmp_path) in " ".join(child.cmdline())]


def test_an_old_result_is_not_taken_for_the_new_one(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("raise SystemExit(3)")
    (tmp_path / "lr_result.json").write_text('{"result": {}}')
    with pytest.raises(LrSearchError, match="exit code 3"):
        find(["python", str(tmp_path / "bad.py")], FindOptions(output=tmp_path, timeout_s=600))


def test_commands() -> None:
    assert launch_command([__file__, "--deepspeed", "x"], 2)[-4:] == [
        "--nproc-per-node=2",
        __file__,
        "--deepspeed",
        "x",
    ]
    assert launch_command(["torchrun", "--nproc-per-node", "4", "t.py"]) == [
        sys.executable,  # torchrun of this environment, which need not be the first in the path
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "4",
        "t.py",
    ]
    with pytest.raises(LrSearchError, match="there is no script"):
        launch_command(["nowhere.py"])
    with pytest.raises(LrSearchError, match="no script: ds-hf lr-find"):
        launch_command([])
    assert total_steps_in(["t.py", "--max_steps", "70"]) == 70
    assert total_steps_in(["t.py", "--max_steps=70"]) == 70
    assert total_steps_in(["t.py", "--max_steps", "-1"]) is None
    assert total_steps_in(["t.py"]) is None


def test_wrong_usage(tmp_path: Path) -> None:
    code, _, err = lr_find(tmp_path, "--min-lr", "2", "--max-lr", "1", "t.py")
    assert code == 2
    assert "0 < min_lr < max_lr" in err
    assert lr_find(tmp_path)[0] == 2
    code, _, err = lr_find(tmp_path, "nowhere.py")
    assert code == 1
    assert "there is no script nowhere.py" in err


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LrSearchError, match="cannot write into"):
        find(["python", "t.py"], FindOptions(search=LrOptions(), output=tmp_path / "file" / "out"))


def _result(folder: Path) -> Path:
    """A result as an engine writes it."""
    marks = {"low": 1e-4, "best": 1e-3, "limit": 1e-2, "bounded": True, "steepest": None, "valley": 2e-3, "fallen": 0.5}
    rows = {
        "lrs": [1e-4, 1e-3],
        "train": [1.0, None],
        "held_out_lrs": [1e-4],
        "held_out": [1.0],
        "grad_norms": [0.1, 0.2],
    }
    sweep = {**rows, "seed": 0, "skipped": 0, "diverged_at": None}
    found = {
        "lr": 1e-3, "interval": [1e-4, 1e-2], "near": [1e-3, 1e-3], "reason": "lowest", "marks": marks,
        "sweeps": [sweep],
        "runs": [{"lr": 1e-3, "steps": 5, "seed": 1, "loss": None}], "optimizer": "AdamW", "cycles_momentum": True,
        "total_steps": 100, "updates": 20, "seconds": 1.5, "notes": ["short"],
    }  # fmt: skip
    path = folder / "lr_result.json"
    path.write_text(json.dumps({"result": found}))
    return path


@given(data=st.data())
@examples(QUICK)
def test_a_result_that_is_none_is_told(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        note(data.draw(wrong_file(_result(folder))))
        try:
            found = _read(folder / "lr_result.json", folder / "log.txt", 0, 1.0)
        except LrSearchError:
            return
        assert isinstance(found, LrResult)
        json.dumps(found.to_dict())
        report(found, ["train.py"])


def test_files_of_a_search_are_not_written_through_links(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (tmp_path / "mine").write_text("mine")
    for name in ("job.json", "log.txt", "progress.jsonl", "lr_result.json"):
        (folder / name).symlink_to(tmp_path / "mine")
    script = tmp_path / "train.py"
    script.write_text("print('no engine')\n")
    with pytest.raises(LrSearchError, match="never trained"):
        find(["python", str(script)], FindOptions(LrOptions(), folder))
    assert (tmp_path / "mine").read_text() == "mine"
    (folder / "log.txt").unlink()
    os.mkfifo(folder / "log.txt")
    with pytest.raises(LrSearchError, match="no engine"):
        find(["python", str(script)], FindOptions(LrOptions(), folder))
