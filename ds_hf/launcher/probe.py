"""Sent to every host by the preflight, as an argument of ``python -c``: needs the standard library alone.

Its last argument is base64 of JSON. ``{"look": ...}`` prints versions, addresses and what is missing;
``{"listen": port}`` prints the port it took and answers on it until its input closes; ``{"reach": [[address, port],
...]}`` prints which of them answer; ``{"end": run, "seconds": s}`` ends the node processes of a run and prints how
many.
"""

from __future__ import annotations

import base64
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any


def look(wanted: dict[str, Any]) -> dict[str, Any]:
    """Versions of Python and packages, addresses, and whether the folder is there."""
    from importlib import metadata, util

    sys.path[:0] = [path for path in wanted["pythonpath"].split(":") if path]
    versions: dict[str, str | None] = {"Python": platform.python_version()}
    for name in wanted["packages"]:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    if util.find_spec("ds_hf") is None:
        versions["ds-hf"] = None
    elif versions.get("ds-hf") is None:
        versions["ds-hf"] = "from PYTHONPATH"
    cwd = wanted["cwd"]
    return {"versions": versions, "addresses": addresses(), "cwd": cwd is None or os.path.isdir(cwd)}


def addresses() -> list[str]:
    """This host's addresses, the one of its default route first, as far as the standard library can tell."""
    found = []
    for family, target in ((socket.AF_INET, "10.255.255.255"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect((target, 9))
                found.append(sock.getsockname()[0])
        except OSError:
            continue
    try:
        text = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=False).stdout
    except OSError:
        text = ""
    return list(dict.fromkeys([*found, *text.split()]))


def listen(port: int) -> None:
    """Take ``port`` (0: any) on all addresses and answer until standard input closes."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(("", port))
    except OSError as error:
        print(json.dumps({"busy": error.strerror}), flush=True)
        return
    sock.listen(64)
    print(json.dumps({"port": sock.getsockname()[1]}), flush=True)

    def serve() -> None:
        while True:
            connection, _ = sock.accept()
            connection.sendall(b"ds_hf\n")
            connection.close()

    threading.Thread(target=serve, daemon=True).start()
    sys.stdin.read()


def reach(targets: list[tuple[str, int]]) -> list[bool]:
    """Which of the targets answer as ``listen`` does."""
    found = []
    for address, port in targets:
        try:
            with socket.create_connection((address, port), 3) as sock:
                sock.settimeout(3)
                found.append(sock.recv(16) == b"ds_hf\n")
        except OSError:
            found.append(False)
    return found


def end(run: str, seconds: float) -> int:
    """Ask the processes whose arguments have ``--run=RUN`` to end, kill what is left after ``seconds``."""
    pids = _of_run(run)
    for pid in pids:
        _send(pid, signal.SIGTERM)
    limit = time.monotonic() + seconds
    while time.monotonic() < limit and _of_run(run):
        time.sleep(0.1)
    for pid in _of_run(run):
        _send(pid, signal.SIGKILL)
    return len(pids)


def _of_run(run: str) -> list[int]:
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
        except OSError:
            continue
        if b"ds_hf.launcher.node" in words and b"--run=" + run.encode("ascii") in words:
            found.append(int(name))
    return found


def _send(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except OSError:  # it has ended
        return


def main() -> None:
    """Do the task in the last argument."""
    task = json.loads(base64.urlsafe_b64decode(sys.argv[-1]))
    if "look" in task:
        print(json.dumps(look(task["look"])), flush=True)
    elif "listen" in task:
        listen(task["listen"])
    elif "end" in task:
        print(end(task["end"], task["seconds"]), flush=True)
    else:
        print(json.dumps(reach(task["reach"])), flush=True)


if __name__ == "__main__":
    main()
