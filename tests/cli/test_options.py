"""What the commands have in common: versions, names of options, the form of complaints."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import click
import pytest
import typer
from typer.testing import CliRunner

import ds_hf
from ds_hf.cli.launch import deepspeed_main
from ds_hf.cli.options import FORMER, one_name
from ds_hf.cli.root import app


@pytest.mark.parametrize("words", [["--version"], ["run", "--version"]])
def test_versions(words: list[str]) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"ds_hf {ds_hf.__version__} (torch {version('torch')}, ")


def test_deepspeed_has_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        deepspeed_main(["--version"])
    assert not end.value.code
    assert capsys.readouterr().out.startswith(f"ds_hf {ds_hf.__version__} ")


def _options() -> dict[str, set[str]]:
    """The long options of each command, as ``--help`` shows them."""
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group) or hasattr(group, "commands")
    found: dict[str, set[str]] = {}
    for name, command in group.commands.items():
        for inner in getattr(command, "commands", {name: command}).values():
            options = [option for parameter in inner.params for option in (*parameter.opts, *parameter.secondary_opts)]
            found[f"{name} {inner.name}"] = {option[2:] for option in options if option.startswith("--")}
    return found


def test_one_meaning_has_one_name() -> None:
    """Former names are shown nowhere, and each means an option that is there."""
    options = _options()
    shown = {one for name, found in options.items() if name != "run run" for one in found}
    assert not shown & set(FORMER)
    assert set(FORMER.values()) <= shown
    for command in ("lr-find lr-find", "autotune autotune"):
        assert {"num-gpus", "output", "budget"} <= options[command]
    assert "num_gpus" in options["run run"]
    assert "world-size" in options["memory memory"] & options["config check"] & options["checkpoint convert"]


def test_former_names_and_underscores() -> None:
    assert [one_name(name) for name in ("nproc", "nproc_per_node", "results-dir", "min_lr")] == [
        "num-gpus", "num-gpus", "output", "min-lr",
    ]  # fmt: skip
    result = CliRunner().invoke(app, ["lr-find", "--nproc", "1", "--min_lr", "2", "--max-lr", "1", "t.py"])
    assert result.exit_code == 2
    assert result.stderr.startswith("ds_hf: 0 < min_lr < max_lr is needed")


@pytest.mark.parametrize(
    "words",
    [
        ["lr-find", "nosuch.py"],
        ["lr-find", "--budget", "soon", "t.py"],
        ["run", "nosuch.py"],
        ["autotune", "nosuch.py", "--deepspeed", "zero2"],
        ["checkpoint", "inspect", "nosuch"],
        ["checkpoint", "convert", ".", "out", "--dtype", "int8"],
        ["config", "schema", "-o", "/nosuch/folder/x"],
        ["memory", "nosuch.py"],
    ],
)
def test_faults_are_named_alike(words: list[str], tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(str(tmp_path))
    result = CliRunner().invoke(app, words)
    assert result.exit_code in (1, 2)
    assert any(line.startswith("ds_hf: ") for line in result.stderr.splitlines()), result.output
    assert "Traceback" not in result.output


def test_a_package_of_an_extra_is_named_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As where ds-hf was installed without extras."""
    monkeypatch.setitem(sys.modules, "optuna", None)
    for name in [name for name in sys.modules if name.startswith("ds_hf.autotune.")]:
        monkeypatch.delitem(sys.modules, name)
    script = tmp_path / "train.py"
    script.write_text("")
    result = CliRunner().invoke(app, ["autotune", str(script), "--deepspeed", "zero2"])
    assert result.exit_code == 1
    assert "this needs the package optuna: pip install 'ds-hf[autotune]'" in result.stderr


def test_python_runs_the_package() -> None:
    done = subprocess.run([sys.executable, "-m", "ds_hf", "--version"], capture_output=True, text=True, check=False)
    assert done.stdout.startswith(f"ds_hf {ds_hf.__version__} "), done.stderr


def test_variables_of_the_environment_are_documented() -> None:
    root = Path(ds_hf.__file__).parents[1]
    named = {
        name
        for path in (root / "ds_hf").rglob("*.py")
        for name in re.findall(r"DS_HF_[A-Z]+(?:_[A-Z]+)*", path.read_text("utf-8"))
    }
    page = (root / "docs" / "environment.md").read_text("utf-8")
    assert not [name for name in named - {"DS_HF_LAUNCH"} if f"`{name}`" not in page]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_output_onto_a_full_disk_is_a_sentence() -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-m", "ds_hf", "config", "schema"], stdout=full, stderr=-1, text=True)
    assert ended.returncode == 1
    assert "ds_hf: what the command printed could not be written: No space left on device" in ended.stderr
    assert "Traceback" not in ended.stderr
