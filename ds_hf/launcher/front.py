"""The launching process: from options to processes on every host, and to their end.

One host that is this machine runs in this very process (``node.run_node``). Otherwise a process per host, or one pdsh,
mpirun or srun, starts the far sides; this one waits, passes signals on, and returns when nothing runs any more. What
happens inside a host is ``node``'s, and how one host's failure ends the others ``leash``'s.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import FrameType

from ds_hf.launcher.environment import exported, read_environment_files
from ds_hf.launcher.errors import LaunchError
from ds_hf.launcher.node import check_can_start, run_node
from ds_hf.launcher.options import DEFAULT_PORT, LaunchOptions
from ds_hf.launcher.ports import bindable
from ds_hf.launcher.preflight import MeetingPlace, end_far_sides, preflight
from ds_hf.launcher.remote import Start, check_tools, start_commands
from ds_hf.launcher.resources import Resources, find_resources
from ds_hf.launcher.spec import NodeSpec
from ds_hf.log import complain

__all__ = ["launch"]

OTHERS_S = 12.0  # after one host has ended badly, for the others to end by the leash
END_S = 14.0  # after they were told to end
FAR_END_S = 10.0


def launch(options: LaunchOptions) -> int:
    """Start what ``options`` ask for and wait for its end.

    Returns:
        0, or the exit code of the process that failed first, or 128 + signal.

    Raises:
        LaunchError: nothing was started.
    """
    options.check()
    resources = find_resources(options, os.environ)
    options = replace(options, launcher=(options.launcher or "ssh").lower())
    hosts = list(resources.pool)
    here = options.no_ssh or (
        len(hosts) == 1 and not options.force_multi and (resources.local or is_this_host(hosts[0]))
    )
    spec = _spec(options, resources, travels=not here)
    if here:
        return _here(spec, options)
    if options.dry_run:
        _print_plan(spec, options, start_commands(spec, options))
        return 0
    check_tools(options)
    spec = _at_meeting(spec, options)
    return _supervise(start_commands(spec, options), spec, options)


def is_this_host(name: str) -> bool:
    """Whether ``name`` is this machine: by name, or because its address can be bound here."""
    host = name.rpartition("@")[2]
    if host in ("localhost", socket.gethostname(), socket.getfqdn()):
        return True
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.bind(address)
            return True
    except OSError:
        return False


def _spec(options: LaunchOptions, resources: Resources, *, travels: bool) -> NodeSpec:
    hosts = list(resources.pool)
    alone = len(hosts) == 1 and not travels
    least = options.min_elastic_nodes if options.min_elastic_nodes > 0 else 1
    return NodeSpec(
        run_id="no_ssh" if options.no_ssh else uuid.uuid4().hex[:16],  # hosts started one by one must agree on it
        hosts=hosts,
        slots=[list(slots) for slots in resources.pool.values()],
        command=options.command,
        master_addr=options.master_addr or ("127.0.0.1" if alone else hosts[0].rpartition("@")[2]),
        master_port=_port(options.master_port, look_here=alone and not options.dry_run),
        any_port=alone and options.master_port == -1,
        env=_travelling(options) if travels else {},
        devices=dict(resources.devices),
        set_devices=resources.set_devices and options.launcher != "slurm",
        cwd=os.getcwd() if travels else None,
        module=options.module,
        no_python=options.no_python,
        local_rank_argument=not options.no_local_rank,
        max_restarts=options.max_restarts,
        min_nodes=least if options.elastic_training and len(hosts) > 1 else 0,
        max_nodes=max(options.max_elastic_nodes, 0) if options.elastic_training else 0,
        prefix=options.prefix_output,
        log_dir=os.path.abspath(options.log_dir) if options.log_dir else None,
        pid_file_of=os.getpid() if options.save_pid else 0,
        bind_cores=options.bind_core_list if options.bind_cores_to_rank else None,
        quiet=options.quiet,
    )


def _travelling(options: LaunchOptions) -> dict[str, str]:
    """The environment that goes to the other hosts; Python finds modules of the current folder there, too."""
    env = {**exported(os.environ, options.export), **read_environment_files()}
    env.pop("CUDA_VISIBLE_DEVICES", None)
    env["PYTHONPATH"] = ":".join(filter(None, [os.getcwd(), env.get("PYTHONPATH", "")]))
    return env


def _port(asked: int, *, look_here: bool) -> int:
    """The port asked for, DeepSpeed's, or a free one where that is taken and was not asked for."""
    wanted = asked if asked != -1 else DEFAULT_PORT
    if not look_here:
        return wanted
    for port in (wanted, 0):
        try:
            return bindable(port)
        except OSError as error:
            reason = error.strerror
        if asked != -1:
            break
    raise LaunchError(
        f"port {wanted} cannot be used: {reason}\n  fix: another --master_port, or leave it out to get a free one"
    )


def _here(spec: NodeSpec, options: LaunchOptions) -> int:
    node = options.node_rank if options.no_ssh else 0
    if node >= len(spec.hosts):
        raise LaunchError(f"--node_rank is {node}, and there are {len(spec.hosts)} hosts\n  fix: 0 is the first one")
    if options.dry_run:
        _print_plan(spec, options, [])
        return 0
    check_can_start(spec)
    return run_node(spec, node)


def _at_meeting(spec: NodeSpec, options: LaunchOptions) -> NodeSpec:
    if options.no_ssh_check or options.launcher == "slurm":
        return spec
    meeting: MeetingPlace = preflight(spec.hosts, options, spec.env.get("PYTHONPATH", ""), spec.cwd)
    return replace(spec, master_addr=meeting.address, master_port=meeting.port)


@dataclass
class _Running:
    start: Start
    process: subprocess.Popen[bytes]


def _supervise(starts: list[Start], spec: NodeSpec, options: LaunchOptions) -> int:
    """Run ``starts`` to their end; a failure or a signal ends them all."""
    received: list[int] = []
    with _signals(received):
        running = [_Running(start, _popen(start)) for start in starts]
        try:
            code = _wait(running, received, spec)
        finally:
            _end(running, received, lambda hosts: end_far_sides(hosts, spec.run_id, options, FAR_END_S))
    return 128 + received[0] if received else code


def _wait(running: list[_Running], received: list[int], spec: NodeSpec) -> int:
    """Until all have ended, or one badly and the others have had their time; returns the exit code."""
    failed_at: float | None = None
    codes: dict[int, int] = {}
    while len(codes) < len(running) and not received:
        for index, one in enumerate(running):
            code = one.process.poll()
            if code is None or index in codes:
                continue
            codes[index] = code
            if code != 0 and not _goes_on(running, codes, spec):
                failed_at = failed_at or time.monotonic()
                if code == 255 and one.start.command[0] == "ssh":
                    complain(f"host {one.start.hosts[0]}: ssh ended with 255: the connection failed or was lost")
        if failed_at is not None and time.monotonic() - failed_at > OTHERS_S:
            break
        time.sleep(0.1)
    bad = [code for code in codes.values() if code != 0]
    if spec.min_nodes and 0 in codes.values():
        return 0
    told = [code for code in bad if code > 0 and code != 255]
    return (told or [128 - code if code < 0 else code for code in bad] or [0])[0]


def _goes_on(running: list[_Running], codes: dict[int, int], spec: NodeSpec) -> bool:
    """Whether an elastic run has hosts enough without those that ended."""
    return 0 < spec.min_nodes <= len(running) - sum(code != 0 for code in codes.values())


def _popen(start: Start) -> subprocess.Popen[bytes]:
    # A session of its own: Ctrl-C reaches this process alone, which then ends the others in order.
    stdin = subprocess.PIPE if start.stdin_leash else subprocess.DEVNULL
    return subprocess.Popen(start.command, stdin=stdin, env={**os.environ, **start.env}, start_new_session=True)


def _end(running: list[_Running], received: list[int], end_far_sides: Callable[[list[str]], None]) -> None:
    """Tell those that still run to end, and make sure that they have."""
    alive = [one for one in running if one.process.poll() is None]
    for one in alive:
        if one.process.stdin is not None:
            one.process.stdin.close()
            continue
        if one.start.end_by_ssh:
            end_far_sides(one.start.hosts)
            with suppress(subprocess.TimeoutExpired):
                one.process.wait(1.0)  # it ends when its far sides have
        if one.process.poll() is None:
            with suppress(ProcessLookupError):
                one.process.terminate()
    limit = time.monotonic() + END_S
    while any(one.process.poll() is None for one in alive) and time.monotonic() < limit and len(received) < 2:
        time.sleep(0.1)
    for one in alive:
        if one.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(one.process.pid, signal.SIGKILL)
        one.process.wait()


@contextmanager
def _signals(received: list[int]) -> Iterator[None]:
    def note(signum: int, frame: FrameType | None) -> None:
        received.append(signum)

    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {signum: signal.signal(signum, note) for signum in names}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _print_plan(spec: NodeSpec, options: LaunchOptions, starts: list[Start]) -> None:
    """``--dry-run``: who gets which ranks, what each process executes, and the exact commands."""
    from ds_hf.launcher.plan import plan_lines

    sys.stdout.write(
        "\n".join(plan_lines(spec, options, [(one.hosts, one.env, shlex.join(one.command)) for one in starts]))
    )
    sys.stdout.write("\n")
