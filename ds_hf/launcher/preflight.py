"""Before a run on several hosts: does ssh work, is it the same Python with the same packages, is the port reachable.

All hosts are asked at once, each by one ssh that carries ``probe`` along. Every host that is not as it should be is in
the error, with its fix. What comes out is where the processes can meet: an address of the first host that every host
reaches, and a free port there.
"""

from __future__ import annotations

import base64
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_hf.launcher import probe
from ds_hf.launcher.errors import LaunchError
from ds_hf.launcher.options import DEFAULT_PORT, LaunchOptions
from ds_hf.launcher.remote import ssh_command

__all__ = ["PACKAGES", "MeetingPlace", "end_far_sides", "preflight"]

PACKAGES = ("ds-hf", "torch", "transformers", "accelerate", "safetensors", "numpy")
ANSWER_S = 30.0
_RUN = "import sys,base64;exec(compile(base64.b64decode(sys.argv[1]),'probe','exec'))"


@dataclass(frozen=True)
class MeetingPlace:
    """Where the processes meet."""

    address: str
    port: int


@dataclass(frozen=True)
class _Question:
    options: LaunchOptions
    pythonpath: str
    cwd: str | None


def preflight(
    hosts: Sequence[str], options: LaunchOptions, pythonpath: str = "", cwd: str | None = None
) -> MeetingPlace:
    """Check ``hosts`` and find the meeting point; the environment's ``PYTHONPATH`` counts for the packages.

    Raises:
        LaunchError: lists what is wrong on which host.
    """
    question = _Question(options, pythonpath, cwd)
    task = {"look": {"packages": PACKAGES, "pythonpath": pythonpath, "cwd": cwd}}
    with ThreadPoolExecutor(min(64, len(hosts))) as pool:
        answers = list(pool.map(lambda host: _ask(host, task, question), hosts))
        faults = [answer for answer in answers if isinstance(answer, str)]
        looks = [answer for answer in answers if not isinstance(answer, str)]
        if not faults:
            faults = _differences(hosts, looks, cwd)
        if faults:
            raise LaunchError("not ready to start:\n" + "\n".join(f"- {fault}" for fault in faults))
        return _meet(hosts, looks[0]["addresses"], question, pool)


def end_far_sides(hosts: Sequence[str], run_id: str, options: LaunchOptions, seconds: float) -> None:
    """Tell the node processes of a run to end, on all hosts at once, and wait for it; hosts out of reach end alone."""
    question = _Question(options, "", None)
    with ThreadPoolExecutor(min(64, len(hosts))) as pool:
        list(pool.map(lambda host: _ask(host, {"end": run_id, "seconds": seconds}, question), hosts))


def _differences(hosts: Sequence[str], looks: list[dict[str, Any]], cwd: str | None) -> list[str]:
    faults = []
    reference = looks[0]["versions"]
    for host, look in zip(hosts, looks, strict=True):
        if not look["cwd"]:
            faults.append(
                f"host {host}: there is no folder {cwd}\n  fix: the same folders on every host, or share them"
            )
        if look["versions"].get("ds-hf") is None:
            faults.append(f"host {host}: ds_hf is not installed for {sys.executable}\n  fix: pip install it there")
            continue
        for name, version in look["versions"].items():
            if version != reference[name]:
                other = f"host {hosts[0]} has {reference[name] or 'none'}"
                fix = f"install the same {name} on both"
                faults.append(f"host {host}: {name} is {version or 'not installed'}, {other}\n  fix: {fix}")
    return faults


def _meet(hosts: Sequence[str], addresses: list[str], question: _Question, pool: ThreadPoolExecutor) -> MeetingPlace:
    """Listen on the first host while all hosts try to reach it."""
    options, first = question.options, hosts[0]
    wanted = options.master_port if options.master_port != -1 else DEFAULT_PORT
    candidates = [options.master_addr] if options.master_addr else [*_outward(addresses), first.rpartition("@")[2]]
    if len(hosts) == 1:
        candidates.append("127.0.0.1")
    listener, port = _listen(first, wanted, question)
    try:
        targets = [[address, port] for address in candidates]
        answers = list(pool.map(lambda host: _ask(host, {"reach": targets}, question), hosts))
    finally:
        listener.communicate()  # closes its input, which ends it, and the port is free again
    for index, address in enumerate(candidates):
        if all(isinstance(answer, list) and answer[index] for answer in answers):
            return MeetingPlace(address, port)
    raise LaunchError(_unreachable(hosts, candidates, answers, port))


def _listen(host: str, port: int, question: _Question) -> tuple[subprocess.Popen[str], int]:
    options = question.options
    for attempt in (port, 0):
        process = subprocess.Popen(
            ssh_command(host, _remote({"listen": attempt}), options),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        answer = _last_json(process.stdout.readline())
        if isinstance(answer, dict) and "port" in answer:
            return process, int(answer["port"])
        process.communicate()
        reason = answer.get("busy") if isinstance(answer, dict) else "ssh ended"
        if options.master_port != -1:
            break
    raise LaunchError(f"host {host}: port {port} cannot be used: {reason}\n  fix: another --master_port")


def _unreachable(hosts: Sequence[str], candidates: list[str], answers: list[Any], port: int) -> str:
    lines = [f"not every host reaches port {port} of host {hosts[0]}:"]
    for host, answer in zip(hosts, answers, strict=True):
        if isinstance(answer, str):
            lines.append(f"- {answer}")
            continue
        missed = [address for address, reached in zip(candidates, answer, strict=True) if not reached]
        if missed:
            lines.append(f"- host {host} does not reach {', '.join(missed)}")
    lines.append("  fix: open the port in the firewall, take another --master_port, or say --master_addr")
    return "\n".join(lines)


def _outward(addresses: list[str]) -> list[str]:
    return [address for address in addresses if not address.startswith(("127.", "::1", "fe80:", "169.254."))]


def _ask(host: str, task: dict[str, Any], question: _Question) -> Any:
    """What ``host`` answers, or a sentence with the fix."""
    command = ssh_command(host, _remote(task), question.options)
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_S,
            check=False,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        return f"host {host}: no answer within {ANSWER_S:.0f} s\n  fix: check that `ssh {host} true` works"
    answer = _last_json(done.stdout)
    if done.returncode == 0 and answer is not None:
        return answer
    said = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
    if done.returncode == 255:
        fix = f"make `ssh {host} true` work without a password (ssh-copy-id {host}), or --no_ssh on each host"
        return f"host {host}: ssh failed: {said}\n  fix: {fix}"
    if done.returncode in (126, 127):
        return f"host {host}: {sys.executable} cannot be run: {said}\n  fix: the same Python at the same path there"
    return (
        f"host {host}: the check ended with code {done.returncode}: {said}\n  fix: see `ssh {host} {sys.executable} -V`"
    )


def _remote(task: dict[str, Any]) -> str:
    source = base64.b64encode(Path(probe.__file__).read_bytes()).decode("ascii")
    word = base64.urlsafe_b64encode(json.dumps(task).encode("ascii")).decode("ascii")
    return shlex.join([sys.executable, "-c", _RUN, source, word])


def _last_json(text: str) -> Any:
    """The last line of ``text`` as JSON (a login script may print before it); None if it is none."""
    try:
        return json.loads((text.strip().splitlines() or [""])[-1])
    except ValueError:
        return None
