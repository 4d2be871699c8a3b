"""The command lines of every launcher, and that what users write passes through shells unchanged."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hf.launcher.errors import LaunchError
from ds_hf.launcher.options import LAUNCHERS, LaunchOptions
from ds_hf.launcher.remote import start_commands
from ds_hf.launcher.spec import NodeSpec, decode, encode

NASTY = [
    "a b",
    "'",
    '"',
    "$HOME `id` $(id)",
    "new\nline",
    "%n %h",
    "-x",
    "*",
    "\\",
    "é\U0001f600",
    "",
    "${local_rank}",
    "!#;&|",
]
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


def spec(**changes: object) -> NodeSpec:
    given = {"run_id": "r", "hosts": ["a", "b"], "slots": [[0, 1], [1]], "command": ["train.py", *NASTY], **changes}
    return NodeSpec(**given)  # type: ignore[arg-type]


@given(st.lists(TEXT), st.dictionaries(TEXT, TEXT))
def test_a_spec_is_one_harmless_word(command: list[str], env: dict[str, str]) -> None:
    word = encode(spec(command=command, env=env))
    assert re.fullmatch(r"[A-Za-z0-9_=-]+", word)
    assert decode(word) == spec(command=command, env=env)


@pytest.mark.parametrize("word", ["", "x", "eyJ4IjoxfQ==", "é", "W10="])
def test_damaged_specs_are_refused(word: str) -> None:
    with pytest.raises(LaunchError, match="damaged description"):
        decode(word)


def test_too_much_for_a_command_line_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"shorten .deepspeed_env"):
        encode(spec(env={"A": "x" * 200_000}))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_starts_one_node_a_host(launcher: str) -> None:
    slots = [[0, 1], [0]] if launcher == "slurm" else [[0, 1], [1]]
    whole = spec(slots=slots, env={"PYTHONPATH": "/p q"})
    starts = start_commands(whole, LaunchOptions(["x"], launcher=launcher, ssh_port=2222 if launcher == "ssh" else 0))
    assert [host for start in starts for host in start.hosts] == ["a", "b"]
    assert len(starts) == (2 if launcher == "ssh" else 1)
    assert starts[0].command[0] == {"ssh": "ssh", "pdsh": "pdsh", "slurm": "srun"}.get(launcher, "mpirun")
    if launcher == "ssh":
        assert starts[1].command[starts[1].command.index("-p") :][:2] == ["-p", "2222"]
    for start in starts:
        line = " ".join(start.command)
        words = [word for word in re.split(r"[\s']+", line) if len(word) > 200]
        assert words
        assert all(decode(word.rstrip("'")) == whole for word in words)
        assert all(nasty not in line for nasty in ("$HOME", "new\nline", "train.py"))


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_the_remote_command_survives_a_login_shell(shell: str, tmp_path: Path) -> None:
    """What ssh hands to the far shell, run by that shell, with the node replaced by an echo of its arguments."""
    (tmp_path / "ds_hf" / "launcher").mkdir(parents=True)
    (tmp_path / "ds_hf" / "__init__.py").touch()
    (tmp_path / "ds_hf" / "launcher" / "__init__.py").touch()
    (tmp_path / "ds_hf" / "launcher" / "node.py").write_text(
        "import json, sys\nprint(json.dumps([sys.argv, sys.path]))"
    )
    odd = str(tmp_path) + ":/with space/and'quote$x"
    for launcher in ("ssh", "pdsh"):
        whole = spec(env={"PYTHONPATH": odd})
        remote = start_commands(whole, LaunchOptions(["x"], launcher=launcher))[0].command[-1]
        remote = remote.replace("%n", "0").replace("%%", "%")  # as pdsh does
        done = subprocess.run([shell, "-c", remote], capture_output=True, text=True, check=True, cwd="/")
        arguments, path = json.loads(done.stdout)
        assert decode(arguments[-1]) == whole
        assert "/with space/and'quote$x" in path


def test_a_venv_is_sourced(tmp_path: Path) -> None:
    script = tmp_path / "act'iv ate"
    script.write_text("export FROM_VENV=yes\n")
    command = start_commands(spec(), LaunchOptions(["x"], launcher="ssh", venv_script=str(script)))[0].command[-1]
    words = shlex.split(command)
    start = words.index(sys.executable)
    probe = shlex.join([*words[1:start], sys.executable, "-c", "import os; print(os.environ['FROM_VENV'])"])
    done = subprocess.run(["sh", "-c", probe], capture_output=True, text=True, check=False)
    assert done.stdout == "yes\n", done.stderr


def test_slurm_cannot_choose_slots() -> None:
    with pytest.raises(LaunchError, match=r"cannot choose slots \[1\] on b"):
        start_commands(spec(), LaunchOptions(["x"], launcher="slurm"))


@settings(max_examples=5, deadline=None)
@given(st.lists(TEXT.filter(lambda text: len(text) < 100), max_size=4))
def test_workers_get_their_arguments_unchanged(arguments: list[str]) -> None:
    """Through torch's agent's templates and the wrapper, by the wrapper itself."""
    from ds_hf.launcher import worker

    setup = json.dumps({"agent": os.getpid(), "local_rank_at": 3, "cores": None, "log_dir": None, "restart": None})
    show = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.argv[1:]))", *arguments]
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(worker.__file__), setup, *show],
        capture_output=True,
        text=True,
        check=True,
        env={"LOCAL_RANK": "1", "RANK": "3", "PYTHONUTF8": "1"},
    )
    assert json.loads(done.stdout) == ["--local_rank=1", *arguments]
