"""The commands ``deepspeed`` (also ``ds``) and ``ds-hf run``.

They are one command with DeepSpeed's launcher arguments; where a real DeepSpeed is installed, ``deepspeed``
hands over to it. Exit codes: 0 fine, 2 wrong usage or not ready to start (nothing was started),
otherwise that of the process that failed first, 128 + N where signal N ended it.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import fields
from enum import Enum
from typing import Annotated, Any

import typer

from ds_hf.cli.options import version_option
from ds_hf.launcher.errors import LaunchError
from ds_hf.launcher.front import launch
from ds_hf.launcher.handover import call_real, real_deepspeed
from ds_hf.launcher.hostfile import DEFAULT_HOSTFILE
from ds_hf.launcher.options import LAUNCHERS, LaunchOptions
from ds_hf.log import complain
from ds_hf.printable import speak_any_language
from ds_hf.processes import signals_interrupt

__all__ = ["EXAMPLES", "add_run_command", "deepspeed_main"]


def _dashes_too(token: str) -> str:
    """``--num-gpus`` is ``--num_gpus``."""
    return token.replace("-", "_")


CONTEXT = {
    "allow_interspersed_args": False,  # everything after the script is the script's
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": _dashes_too,
}
EXAMPLES = """\b
Examples:
  deepspeed train.py --deepspeed ds_config.json
  deepspeed --num_gpus 2 train.py --deepspeed ds_config.json
  deepspeed --include localhost:1,3 train.py
  deepspeed --hostfile hosts.txt --exclude worker-2:0 train.py
  deepspeed --hostfile hosts.txt --export 'WANDB_*' --dry-run train.py
  deepspeed --hostfile hosts.txt --no_ssh --node_rank 1 train.py
  deepspeed --autotuning tune train.py --deepspeed ds_config.json
"""
RESOURCES, HOSTS, PROCESSES, OUTPUT = "Which GPUs", "Several hosts", "Processes", "Output and checks"
Mode = Enum("Mode", {"tune": "tune", "run": "run"}, type=str)
LogLevel = Enum("LogLevel", {n: n for n in ("debug", "info", "warning", "error", "critical")}, type=str)  # type: ignore[misc]


def _option(panel: str, *names: str, text: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


def run_command(
    context: typer.Context,
    user_script: Annotated[str, typer.Argument(help="Script, module (--module) or program (--no_python).")],
    user_args: Annotated[list[str] | None, typer.Argument(help="Its arguments.", show_default=False)] = None,
    hostfile: Annotated[
        str, _option(RESOURCES, "--hostfile", "-H", text="File with a line `host slots=N` for each host.")
    ] = DEFAULT_HOSTFILE,
    include: Annotated[
        str, _option(RESOURCES, "--include", "-i", text="Use only these: host[:slot,slot...][@host...].")
    ] = "",
    exclude: Annotated[
        str, _option(RESOURCES, "--exclude", "-e", text="Use all but these; same form as --include.")
    ] = "",
    num_nodes: Annotated[int, _option(RESOURCES, "--num_nodes", text="Use the first N hosts; -1: all.")] = -1,
    num_gpus: Annotated[
        int,
        _option(
            RESOURCES,
            "--num_gpus",
            "--num_accelerators",
            text="Use the first N GPUs of each host, or N processes without GPUs; -1: all.",
        ),
    ] = -1,
    master_addr: Annotated[
        str, _option(HOSTS, "--master_addr", text="Address of the first host; found if left out.")
    ] = "",
    master_port: Annotated[
        int, _option(HOSTS, "--master_port", text="Rendezvous port; -1: 29500, or a free one where that is taken.")
    ] = -1,
    launcher: Annotated[str, _option(HOSTS, "--launcher", text=f"{', '.join(LAUNCHERS)}; ssh if left out.")] = "",
    launcher_args: Annotated[
        str, _option(HOSTS, "--launcher_args", text="More arguments for ssh, pdsh, mpirun or srun, in one quoted word.")
    ] = "",
    ssh_port: Annotated[int, _option(HOSTS, "--ssh_port", text="Port of ssh; 0: the one ssh is configured for.")] = 0,
    export: Annotated[
        list[str] | None,
        _option(
            HOSTS, "--export", text="Also pass on variables of this name or pattern; repeatable.", show_default=False
        ),
    ] = None,
    no_ssh: Annotated[
        bool, _option(HOSTS, "--no_ssh", text="Start this host's part only; run the same on each host.")
    ] = False,
    node_rank: Annotated[int, _option(HOSTS, "--node_rank", text="With --no_ssh: index of this host.")] = -1,
    no_ssh_check: Annotated[bool, _option(HOSTS, "--no_ssh_check", text="Skip the checks before the start.")] = False,
    force_multi: Annotated[
        bool, _option(HOSTS, "--force_multi", text="Start over the network even if only one host is left.")
    ] = False,
    venv_script: Annotated[
        str, _option(HOSTS, "--venv_script", text="Shell script to source on each host before Python.")
    ] = "",
    module: Annotated[bool, _option(PROCESSES, "--module", text="The script is a module: python -m.")] = False,
    no_python: Annotated[
        bool, _option(PROCESSES, "--no_python", text="Execute the script directly, without Python.")
    ] = False,
    no_local_rank: Annotated[
        bool, _option(PROCESSES, "--no_local_rank", text="Do not pass --local_rank=N; LOCAL_RANK is set anyway.")
    ] = False,
    bind_cores_to_rank: Annotated[
        bool, _option(PROCESSES, "--bind_cores_to_rank", text="Bind each process to its own cores.")
    ] = False,
    bind_core_list: Annotated[
        str, _option(PROCESSES, "--bind_core_list", text="The cores to divide among the processes, such as 0-3,8.")
    ] = "",
    max_restarts: Annotated[
        int,
        _option(PROCESSES, "--max_restarts", text="After a failure, start all processes again, up to this many times."),
    ] = 0,
    elastic_training: Annotated[
        bool, _option(PROCESSES, "--elastic_training", text="Continue with fewer hosts, and accept new ones.")
    ] = False,
    min_elastic_nodes: Annotated[
        int, _option(PROCESSES, "--min_elastic_nodes", text="Minimum number of hosts; -1: 1.")
    ] = -1,
    max_elastic_nodes: Annotated[
        int, _option(PROCESSES, "--max_elastic_nodes", text="Maximum number of hosts; -1: all.")
    ] = -1,
    autotuning: Annotated[
        Mode | None,
        _option(PROCESSES, "--autotuning", text="Search for a better configuration, then (run) train with it."),
    ] = None,
    dry_run: Annotated[
        bool, _option(OUTPUT, "--dry-run", text="Print the exact command of each host and start nothing.")
    ] = False,
    prefix_output: Annotated[
        bool, _option(OUTPUT, "--prefix_output", text="Put host and rank before each line of output.")
    ] = False,
    enable_each_rank_log: Annotated[
        str, _option(OUTPUT, "--enable_each_rank_log", text="Folder: each process writes a file there instead.")
    ] = "",
    save_pid: Annotated[
        bool, _option(OUTPUT, "--save_pid", text="Write the launcher's process id to /tmp/<id>.deepspeed.")
    ] = False,
    log_level: Annotated[
        LogLevel | None, _option(OUTPUT, "--log_level", text="Accepted for DeepSpeed's sake; see --quiet.", hidden=True)
    ] = None,
    quiet: Annotated[bool, _option(OUTPUT, "--quiet", "-q", text="Say nothing about what is started.")] = False,
    version: Annotated[bool, version_option(rich_help_panel=OUTPUT)] = False,
) -> None:
    """Train on the GPUs of this machine, or of the hosts in a hostfile."""
    given = dict(context.params)
    command = [given.pop("user_script"), *(given.pop("user_args") or [])]
    mode = given.pop("autotuning")
    given["log_dir"] = "" if enable_each_rank_log == "None" else enable_each_rank_log
    given["export"] = list(export or [])
    names = {field.name for field in fields(LaunchOptions)}
    options = LaunchOptions(command, **{name: value for name, value in given.items() if name in names})
    try:
        if mode is not None:
            options.check()
            tune = importlib.import_module("ds_hf.autotune").run_from_deepspeed
            with signals_interrupt():
                raise typer.Exit(tune(str(mode.value), command))
        code = launch(options)
    except LaunchError as error:
        if context.obj is LaunchError:
            raise
        complain(error)
        raise typer.Exit(2) from None
    raise typer.Exit(code)


def add_run_command(app: typer.Typer) -> None:
    """Put ``run`` into the application ``ds-hf``."""
    app.command("run", context_settings=CONTEXT, epilog=EXAMPLES.replace("  deepspeed ", "  ds-hf run "))(run_command)


def deepspeed_main(args: list[str] | None = None) -> None:
    """Entry point of the scripts ``deepspeed`` and ``ds``; with ``args`` in place of the command line's.

    Raises:
        LaunchError: a ``ValueError``: the run cannot be started as ``args`` ask. On the command line it is a message.
    """
    if real_deepspeed() is not None:
        sys.exit(call_real("deepspeed.launcher.runner", "main"))
    if args is None:
        speak_any_language()
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(context_settings=CONTEXT, epilog=EXAMPLES)(run_command)
    app(args, prog_name="deepspeed", obj=None if args is None else LaunchError)
