"""The command line itself: DeepSpeed's spelling, help, refusals, dry runs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from ds_hf import cli
from ds_hf.cli import launch as launch_cli
from ds_hf.cli.root import app
from ds_hf.launcher import front, handover, resources
from ds_hf.launcher.options import LaunchOptions
from ds_hf.launcher.spec import decode


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["run", *arguments])
    return result.exit_code, result.output


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[LaunchOptions]:
    """The options of each launch, which does not happen."""
    found: list[LaunchOptions] = []

    def launch(options: LaunchOptions) -> int:
        found.append(options)
        return 7

    monkeypatch.setattr(launch_cli, "launch", launch)
    return found


def test_deepspeeds_spelling_and_ours(asked: list[LaunchOptions]) -> None:
    code, _ = run(
        "-H", "h", "-i", "a:1", "--master-port=5", "--no_local_rank", "--no-ssh-check", "train.py", "--num_gpus", "3"
    )
    assert code == 7
    assert asked[0].command == ["train.py", "--num_gpus", "3"]
    assert (asked[0].hostfile, asked[0].include, asked[0].master_port) == ("h", "a:1", 5)
    assert (asked[0].no_local_rank, asked[0].no_ssh_check, asked[0].num_gpus) == (True, True, -1)


def test_what_accelerate_calls(asked: list[LaunchOptions]) -> None:
    """accelerate 1.15, utils/launch.py, prepare_deepspeed_cmd_env."""
    words = "--hostfile None --no_local_rank --launcher pdsh --exclude a:1 --master_addr 1.2.3.4 --master_port 29500"
    run(*words.split(), "--module", "m", "x")
    run(*["--hostfile", "f", "--node_rank", "1", "--no_ssh", "--num_gpus", "4", "--master_port", "1", "t.py"])
    assert (asked[0].hostfile, asked[0].launcher, asked[0].module, asked[0].command) == (
        "None",
        "pdsh",
        True,
        ["m", "x"],
    )
    assert (asked[1].no_ssh, asked[1].node_rank, asked[1].num_gpus) == (True, 1, 4)


def test_deepspeeds_whole_command_line_is_understood(asked: list[LaunchOptions]) -> None:
    """Every option of DeepSpeed 0.19.8's launcher (and those that earlier versions had for elastic training)."""
    flags = (
        "--module --no_local_rank --no_ssh_check --force_multi --save_pid --bind_cores_to_rank -q --elastic_training"
    )
    values = (
        "--num_nodes 1 --num_accelerators 2 --ssh_port 22 --venv_script v --log_level info --enable_each_rank_log None"
    )
    code, output = run(*flags.split(), *values.split(), "--bind_core_list", "0-1", "--launcher_args", "-v", "t.py")
    assert code == 7, output
    assert (asked[0].num_gpus, asked[0].log_dir, asked[0].venv_script) == (2, "", "v")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num_gpus", "2", "--include", "a", "t.py"], "both given"),
        (["--module", "--no_python", "t.py"], "both given"),
        (["--master_port", "70000", "t.py"], "a port is from 1 to 65535"),
        (["--launcher", "rsh", "t.py"], "one of pdsh, ssh"),
        (["--no_ssh", "t.py"], "--no_ssh needs --node_rank"),
        (["--node_rank", "1", "t.py"], "no effect without --no_ssh"),
        (["--hostfile", "/no/such", "t.py"], "hostfile /no/such: No such file"),
        (["--num_nodes", "2", "t.py"], "there is no hostfile"),
        (["--num_gpus", "0", "t.py"], "--num_gpus is 0"),
        (["--bind_core_list", "0", "t.py"], "no effect alone"),
        (["--include", "localhost:x", "t.py"], "--include, line 1, column 11"),
        (["--max_restarts", "-1", "t.py"], "0 or more"),
        (["--export", "NOT_SET_ANYWHERE", "-H", "HOSTS", "t.py"], "there is no such variable"),
    ],
)
def test_what_is_refused_starts_nothing(arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("h1 slots=1\nh2 slots=1\n")
    code, output = run(*[str(tmp_path / "hosts") if word == "HOSTS" else word for word in arguments])
    assert code == 2
    assert message in " ".join(output.split())
    assert "Traceback" not in output


def test_wrong_usage() -> None:
    assert run("--no_such_option", "t.py")[0] == 2
    assert run()[0] == 2


def test_help_has_examples() -> None:
    code, output = run("--help")
    assert code == 0
    assert "ds-hf run --hostfile hosts.txt" in output
    assert all(option in output for option in ("--include", "--hostfile", "--max_restarts", "--dry-run"))


def test_dry_run_prints_a_command_that_can_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    (tmp_path / "hosts").write_text("h1 slots=4\nh2 slots=2\n")
    code, output = run("-H", "hosts", "-i", "h1:1,3@h2", "--dry-run", "train.py", "it's $HOME", "b\nc")
    assert code == 0
    lines = output.splitlines()
    assert "# 4 processes on 2 hosts" in lines
    assert "# host h1: ranks 0-1 on GPU 1,3" in lines
    assert "# host h2: ranks 2-3 on GPU 0,1" in lines
    commands = [shlex.split(line) for line in lines if line.startswith("ssh ")]
    assert [command[command.index("--") + 1] for command in commands] == ["h1", "h2"]
    spec = decode(shlex.split(commands[1][-1])[-1])
    assert spec.command == ["train.py", "it's $HOME", "b\nc"]
    assert spec.env["NCCL_DEBUG"] == "INFO"
    assert spec.cwd == str(tmp_path)
    assert spec.slots == [[1, 3], [0, 1]]


def test_dry_run_on_this_machine() -> None:
    code, output = run("--num_gpus", "3", "--max_restarts", "2", "--dry-run", "train.py", "x y")
    assert code == 0
    assert "# host localhost: ranks 0-2" in output
    assert "--nproc-per-node=3 --max-restarts=2 train.py --local_rank=N 'x y'" in output


@pytest.mark.parametrize(
    ("visible", "arguments", "expected"),
    [
        (None, [], "GPU 0,1,2,3"),
        ("2,3", [], "GPU 2,3"),
        ("2,3", ["--num_gpus", "1"], "GPU 2"),
        ("2,3", ["--include", "localhost:3"], "GPU 3"),
        ("GPU-ab,MIG-cd", ["--num_gpus", "2"], "GPU GPU-ab,MIG-cd"),
    ],
)
def test_cuda_visible_devices_is_respected(
    visible: str | None, arguments: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    count = 4 if visible is None else len(visible.split(","))
    monkeypatch.setattr(resources, "gpu_count", lambda: count)
    code, output = run(*arguments, "--dry-run", "t.py")
    assert code == 0, output
    assert f"on {expected}\n" in output


def test_a_gpu_that_is_not_visible_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.setattr(resources, "gpu_count", lambda: 2)
    code, output = run("--include", "localhost:0", "--dry-run", "t.py")
    assert code == 2
    assert "its slots are 2, 3" in output


def test_one_far_host_is_not_taken_for_this_one(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("far-away.invalid slots=1\nlocalhost slots=1\n")
    hosts = str(tmp_path / "hosts")
    assert "ssh " in run("-H", hosts, "-i", "far-away.invalid", "--dry-run", "t.py")[1]
    assert "\nssh " not in run("-H", hosts, "-i", "localhost", "--dry-run", "t.py")[1]
    assert front.is_this_host("127.0.0.1")
    assert not front.is_this_host("192.0.2.1")


def test_no_ssh_without_hostfile_numbers_the_hosts() -> None:
    code, output = run(
        "--no_ssh", "--node_rank", "1", "--num_nodes", "2", "--num_gpus", "2", "--master_addr", "m", "--dry-run", "t"
    )
    assert code == 0
    assert "# host node1: ranks 2-3" in output
    assert "they meet at m:29500" in output


def test_autotuning_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, list[str]]] = []

    def tune(mode: str, command: list[str]) -> int:
        calls.append((mode, command))
        return 3

    monkeypatch.setitem(sys.modules, "ds_hf.autotune", SimpleNamespace(run_from_deepspeed=tune))
    assert run("--autotuning", "run", "t.py", "--deepspeed", "c.json")[0] == 3
    assert calls == [("run", ["t.py", "--deepspeed", "c.json"])]


def test_a_real_deepspeed_takes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert handover.real_deepspeed() is None
    package = tmp_path / "deepspeed" / "launcher"
    package.mkdir(parents=True)
    (tmp_path / "deepspeed" / "__init__.py").write_text("raise ImportError('must not be imported to be found')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    assert handover.real_deepspeed() == tmp_path / "deepspeed"
    called = []
    monkeypatch.setattr(launch_cli, "call_real", lambda module, function: called.append((module, function)))
    with pytest.raises(SystemExit):
        launch_cli.deepspeed_main()
    assert called == [("deepspeed.launcher.runner", "main")]
    real = SimpleNamespace(import_module=lambda name: SimpleNamespace(main=lambda: 0))
    monkeypatch.setattr(handover, "importlib", real)
    assert handover.call_real("deepspeed.launcher.runner", "main") == 0
    monkeypatch.setattr(sys, "argv", ["ds-hf", "config", "schema"])
    with pytest.raises(SystemExit):
        cli.main()
    said = f"ds_hf: the real DeepSpeed at {tmp_path / 'deepspeed'} still serves the name deepspeed"
    assert [line.startswith(said) for line in capsys.readouterr().err.splitlines()] == [True, True]
