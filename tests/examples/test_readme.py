"""The README: every command in it runs, the two ways to train work as they are written, every link leads somewhere."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ds_hf.cli.root import app
from tests.compat.common import WORLD, run_user_code, save_tiny_model
from tests.helpers.distributed import free_port, run_distributed
from tests.helpers.pages import ROOT, blocks, commands

README = ROOT / "README.md"
HERE = ("ds-hf config", "ds-hf checkpoint", "ds-hf doctor")  # run below, in this order of the page
TESTED_ELSEWHERE = {
    "make demo": "tests/examples/test_demo.py",
    "make test": "what runs this",
    "pip install .": "tests/test_packaging.py",
    'pip install ".[all]"': "tests/test_packaging.py",
    "pip uninstall deepspeed && pip install deepspeed": "tests/test_packaging.py",
    "pip uninstall deepspeed": "tests/test_packaging.py",
    "pip install --force-reinstall --no-deps .": "tests/test_packaging.py",
    "torchrun --nproc-per-node 2 loop.py": "the loop, below",
}
SCRIPTS = [line for line in commands(README) if "train.py" in line]
run = CliRunner().invoke


def test_every_command_is_run_by_a_test() -> None:
    left = {line for line in commands(README) if not line.startswith(HERE) and line not in SCRIPTS}
    assert left == set(TESTED_ELSEWHERE)
    assert len(SCRIPTS) == 10
    assert len(blocks(README, "python")) == 1


def test_the_first_result_is_on_the_first_screen() -> None:
    assert "make demo" in "\n".join(README.read_text().splitlines()[:12])


def test_links_and_pictures_exist() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", README.read_text()):
        assert (ROOT / target).is_file(), target


def test_the_home_page_shows_the_same_loop() -> None:
    home = textwrap.dedent((ROOT / "docs" / "index.md").read_text().replace("\n    ", "\n"))
    assert blocks(README, "python")[0] in home


def test_the_chart_is_what_the_records_say() -> None:
    script = ROOT / "benchmarks" / "chart.py"
    names = runpy.run_path(str(script))
    groups = [names["newest"](setting) for setting in names["SETTINGS"]]
    assert names["CHART"].read_text() == names["draw"](groups), "draw it again: python benchmarks/chart.py"
    for group in groups:
        shown = re.search(rf">{group.ms['ds_hf']:,.0f}   ([\d.]+) x<", names["CHART"].read_text())
        assert shown is not None
        assert float(shown[1]) == pytest.approx(group.ms["ds_hf"] / group.ms["deepspeed"], abs=0.005)


def _follow(folder: str, code: str) -> list[float]:
    """The README's loop with a Llama of two layers and eight samples; the loss of each step."""
    from transformers import AutoModelForCausalLM

    os.chdir(folder)
    torch.manual_seed(0)
    ids = torch.randint(0, 128, (8, 16))
    names: dict[str, Any] = {
        "model": AutoModelForCausalLM.from_pretrained("tiny"),
        "data": [{"input_ids": row, "labels": row} for row in ids],
        "losses": [],
    }
    exec(code.replace("engine.step()", "engine.step()\n    losses.append(loss.item())"), names)
    torch.distributed.destroy_process_group()
    return list(names["losses"])


def _all_succeed(folder: str, lines: list[str]) -> None:
    os.chdir(folder)
    for line in lines:
        done = run(app, shlex.split(line)[1:])
        assert done.exit_code == 0, f"{line}\n{done.output}"


@pytest.mark.skipif(WORLD < 2, reason="needs two devices")
def test_the_own_loop_and_the_commands_around_it(tmp_path: Path) -> None:
    run_distributed(save_tiny_model, 1, tmp_path / "tiny", backend=None)
    lines = [line for line in commands(README) if line.startswith(HERE) and "for_deepspeed" not in line]
    after = [line for line in lines if line.startswith("ds-hf checkpoint")]
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}  # the doctor's
    before = [line for line in lines if line not in after]
    run_distributed(_all_succeed, 1, str(tmp_path), before, backend=None, env=cache)
    (code,) = blocks(README, "python")
    losses = run_user_code(_follow, str(tmp_path), code, world_size=2)
    assert [len(each) for each in losses] == [4, 4]  # 8 samples, one a process and step
    assert all(4.5 < loss < 5.2 for each in losses for loss in each)  # ln(128) = 4.85
    after.append("ds-hf checkpoint convert checkpoints for_deepspeed --to deepspeed")
    run_distributed(_all_succeed, 1, str(tmp_path), after, backend=None)
    assert list((tmp_path / "model").glob("*.safetensors"))
    assert list((tmp_path / "for_deepspeed").rglob("*_optim_states.pt"))


TRAIN = """
import sys
import torch
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
model = AutoModelForCausalLM.from_pretrained("tiny")
ids = torch.randint(0, 128, (64, 16), generator=torch.Generator().manual_seed(0))
Trainer(model=model, args=args, train_dataset=[{"input_ids": row, "labels": row} for row in ids]).train()
print("trained", flush=True)
"""
SHORT = {  # what makes a command short, after its first words
    "ds-hf autotune": "--budget 5m --trials 2 --no-confirm -n 2",
    "ds-hf lr-find": "-n 1 --steps 12 --seeds 1 --confirm-steps 0 --train-batches 4 --held-out-batches 2",
    "ds-hf memory": "--device-memory 80GiB --world-size 2",
}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("line", SCRIPTS)
def test_a_trainer_script_in_every_way(line: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "tiny")
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "hosts.txt").write_text("localhost slots=2\n")
    assert run(app, ["config", "new", "--preset", "zero2", "-o", str(tmp_path / "ds_config.json")]).exit_code == 0
    arguments = "--output_dir out --max_steps 2 --report_to none --save_strategy no"
    line = line.replace(" ...", "").replace("train.py", f"train.py {arguments}")
    for words, more in SHORT.items():
        line = line.replace(words, f"{words} {more}")
    if line.startswith("torchrun"):
        line = line.replace("torchrun", f"torchrun --master-port {free_port()}")
    if "accelerate" in line:
        line = line.replace("launch", f"launch --main_process_port {free_port()}")
    if line.startswith("deepspeed"):
        line = line.replace("deepspeed", f"deepspeed --master_port {free_port()}", 1)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        shlex.split(line), cwd=tmp_path, env=environment, text=True, check=False, timeout=360,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    if not line.startswith("ds-hf"):
        assert done.stdout.count("trained") == 2
