"""Which variables travel, and .deepspeed_env."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hf.launcher.environment import exported, parse_environment_file, read_environment_files
from ds_hf.launcher.errors import LaunchError
from tests.launcher.common import read_or_refused

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,10}", fullmatch=True)


def test_prefixes_and_globs() -> None:
    env = {
        "NCCL_DEBUG": "INFO",
        "PATH": "/bin",
        "HOME": "/root",
        "WANDB_MODE": "x",
        "WANDB_API_KEY": "k",
        "HF_TOKEN": "t",
    }
    assert exported(env) == {"NCCL_DEBUG": "INFO", "PATH": "/bin"}
    assert exported(env, ["WANDB_*", "HF_TOKEN"]).keys() == env.keys() - {"HOME"}
    with pytest.raises(LaunchError, match="--export NONE: there is no such variable"):
        exported(env, ["NONE"])


def test_what_describes_a_process_of_here_stays_here() -> None:
    assert exported({"TORCHELASTIC_RUN_ID": "1", "OMPI_COMM_WORLD_RANK": "0", "BASH_FUNC_x%%": "() {"}, ["*"]) == {}


def test_file() -> None:
    text = "# comment\n\nA=1\n  B = two words \nexport C=a=b\nD='quo\"ted'\nE=$HOME `x` %n\nF=\n"
    assert parse_environment_file(text) == {
        "A": "1",
        "B": "two words",
        "C": "a=b",
        "D": 'quo"ted',
        "E": "$HOME `x` %n",
        "F": "",
    }


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("A=1\n  novalue", "line 2, column 3", "there is no '='"),
        ("A B=1", "line 1, column 1", "'A B' is not a variable's name"),
        ("=1", "line 1, column 1", "'' is not a variable's name"),
        ("A=1\nB=x\0y", "line 2, column 4", "a NUL character"),
    ],
)
def test_mistakes(text: str, place: str, message: str) -> None:
    with pytest.raises(LaunchError) as failure:
        parse_environment_file(text, "f")
    assert str(failure.value).startswith(f"f, {place}: ")
    assert message in str(failure.value)


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    found = read_or_refused(parse_environment_file, text)
    if isinstance(found, LaunchError):
        assert "fix: " in str(found)
        return
    assert all("=" not in name and "\n" not in value and "\0" not in value for name, value in found.items())


@given(st.dictionaries(NAMES, st.text(st.characters(exclude_characters="\n\r\0'\""), max_size=20).map(str.strip)))
def test_what_accelerate_writes_is_read(env: dict[str, str]) -> None:
    assert parse_environment_file("".join(f"{name}={value}\n" for name, value in env.items())) == env


def test_the_current_folder_wins_over_the_home(tmp_path: Path) -> None:
    for folder, value in (("home", "1"), ("here", "2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / ".deepspeed_env").write_text(f"A={value}\n{folder.upper()}=x\n")
    assert read_environment_files([tmp_path / "home", tmp_path / "here"]) == {"A": "2", "HOME": "x", "HERE": "x"}
