"""``ds-hf lr-find`` with real scripts: one that works, and those that do not."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from ds_hf.autotune.lr import FindOptions, LrOptions, LrSearchError, find
from ds_hf.autotune.lr.find import launch_command, total_steps_in
from ds_hf.cli import app
from ds_hf.lr import LrResult

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
    assert "the script's own end" not in (tmp_path / "lr" / "log.txt").read_text()


def test_a_script_that_ends_too_early(script: str, tmp_path: Path) -> None:
    code, _, err = lr_find(tmp_path, *OPTIONS, "python", script, "--max_steps", "4")
    assert code == 1
    assert "ended after 4 micro-batches of the 10 that the search needs" in err
    assert "the script's own end" in err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("print('before'); raise KeyError('its own fault')", "failed with exit code 1"),
        ("print('nothing to do')", "never trained with a ds_hf engine"),
        ("import time; time.sleep(60)", "did not end within 2 s"),
    ],
)
def test_scripts_that_never_train(text: str, said: str, tmp_path: Path) -> None:
    """Plain python is the launcher here: nothing imports torch."""
    (tmp_path / "bad.py").write_text(text)
    start = time.monotonic()
    with pytest.raises(LrSearchError, match=said) as error:
        find(["python", str(tmp_path / "bad.py")], FindOptions(output=tmp_path / "out", timeout_s=2))
    assert time.monotonic() - start < 20
    if "its own fault" in text:
        assert "KeyError: 'its own fault'" in str(error.value)
    here = psutil.Process().children(recursive=True)
    assert not [child for child in here if str(tmp_path) in " ".join(child.cmdline())]


def test_an_old_result_is_not_taken_for_the_new_one(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("raise SystemExit(3)")
    (tmp_path / "lr_result.json").write_text('{"result": {}}')
    with pytest.raises(LrSearchError, match="exit code 3"):
        find(["python", str(tmp_path / "bad.py")], FindOptions(output=tmp_path, timeout_s=20))


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
