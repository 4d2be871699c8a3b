"""The how-to pages: configurations are legal, commands have the options that are shown, Python runs as it stands."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from ds_hf.cli.root import app
from ds_hf.config.load import load_config
from tests.helpers.distributed import run_distributed
from tests.helpers.pages import ROOT, blocks, commands

PAGES = sorted((ROOT / "docs" / "how-to").glob("*.md"))
NAMES = [page.stem for page in PAGES]
OTHERS = ("torchrun", "accelerate launch", "deepspeed", "docker")  # run by tests/compat, tests/launcher
WITH_PYTHON = [
    page.stem
    for page in PAGES
    if page.stem != "ray" and (blocks(page, "python") or "    ```python" in page.read_text())
]


def unindented(page: Path, language: str) -> list[str]:
    """Also blocks inside lists."""
    inner = re.findall(rf"^    ```{language}\n(.*?)^    ```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return blocks(page, language) + [re.sub(r"^    ", "", text, flags=re.MULTILINE) for text in inner]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_configurations_are_legal(page: Path) -> None:
    for text in unindented(page, "json"):
        load_config(json.loads(text), allow_auto=True, check_batch=False)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_have_the_options_that_are_shown(page: Path) -> None:
    root = typer.main.get_command(app)
    for line in commands(page):
        program, *rest = shlex.split(line)
        if program != "ds-hf":
            assert line.startswith(OTHERS), line
            continue
        command: Any = root
        while hasattr(command, "commands"):
            command = command.commands[rest.pop(0)]
        known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        mine = rest[: next((at for at, word in enumerate(rest) if word.endswith(".py")), len(rest))]
        assert {word for word in mine if word.startswith("-")} <= known, line


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_other_files_can_be_read(page: Path) -> None:
    import yaml

    for text in blocks(page, "yaml"):
        assert yaml.safe_load(text)["kind"]
    for text in blocks(page, "bash"):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=20)


def run_page(name: str, folder: str) -> None:
    """Its Python, in order, with what a script would have."""
    import torch
    from peft import LoraConfig, get_peft_model

    import ds_hf
    from tests.compat.trainer_code import tiny_llama

    os.chdir(folder)
    tiny_llama().save_pretrained("base")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2 if name == "notebooks" else 3},
    }
    Path("ds_config.json").write_text(json.dumps(config))
    rows = torch.randint(1, 128, (4, 8))
    model: Any = tiny_llama().train()
    if name == "one-gpu":
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    scope: dict[str, Any] = {
        "folder": "base",
        "config": config,
        "data": [{"input_ids": row, "labels": row} for row in rows],
        "model": model,
        "quantized": False,
    }
    if name in ("checkpoints", "monitoring", "one-gpu"):
        scope["engine"] = ds_hf.initialize(model=model, config=config)[0]
    for text in unindented(ROOT / "docs" / "how-to" / f"{name}.md", "python"):
        exec(compile(text, name, "exec"), scope)
    if name == "one-gpu":
        assert {"model.safetensors", "config.json"} <= {path.name for path in Path("merged").iterdir()}
    if name == "out-of-memory":
        assert scope["model"].model.norm.weight.numel() == 0  # divided when it was made


@pytest.mark.parametrize("name", WITH_PYTHON)
def test_python_runs(name: str, tmp_path: Path) -> None:
    run_distributed(run_page, 1, name, str(tmp_path), timeout=60)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray[train]")
def test_ray_goes_on_where_it_ended(tmp_path: Path) -> None:
    (script,) = blocks(ROOT / "docs" / "how-to" / "ray.md", "python")
    (tmp_path / "train_ray.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "train_ray.py", str(tmp_path / "storage")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'ds_hf' / 'compat'}"},
    )
    steps = [ast.literal_eval(line)["step"] for line in done.stdout.splitlines() if line.startswith("{'loss'")]
    assert steps == [4, 8]
    assert sorted(path.name for path in (tmp_path / "storage").glob("step*")) == ["step2", "step4", "step6", "step8"]


def test_what_people_type_is_in_a_heading() -> None:
    headings = " ".join(
        line.lower() for page in PAGES for line in page.read_text("utf-8").splitlines() if line.startswith("#")
    )
    typed = ("out of memory", "nan loss", "hang", "slow", "qlora", "docker", "slurm", "kubernetes", "fsdp", "resume")
    for words in typed:
        assert words in headings


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert all(f"how-to/{name}.md" in text for name in NAMES)
