"""Two hosts on one machine: network namespaces on a bridge, each with its name, its address and its sshd.

They share the file system and the process table. The launching host is the machine itself, which reaches both. ``ssh``
is a wrapper in ``path`` that knows the names and keys, so that the user's own ssh files are not touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NAMES = ("host-a", "host-b")
WAIT_S = 15.0


@dataclass(frozen=True)
class Hosts:
    """What a test needs to reach them."""

    addresses: tuple[str, ...]
    links: tuple[str, ...]
    folder: Path

    @property
    def path(self) -> str:
        """PATH with the wrapper in front."""
        return f"{self.folder}/bin:{os.environ['PATH']}"

    def cut(self, index: int, *, off: bool = True) -> None:
        """Pull (or plug in again) the network cable of one host."""
        run("ip", "link", "set", self.links[index], "down" if off else "up")

    def ssh(self, host: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command there."""
        return subprocess.run([f"{self.folder}/bin/ssh", host, *words], capture_output=True, text=True, check=False)


def why_not() -> str | None:
    """Why there can be no such hosts here."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "unshare", "ssh", "sshd", "ssh-keygen") if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: iproute2, openssh-server)"
    probe = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, text=True, check=False)
    return None if probe.returncode == 0 else f"no namespaces: {probe.stderr.strip()}"


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[Hosts]:
    """Make them, and take everything away at the end."""
    tag = f"{os.getpid() % 100000}"
    subnet = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
    bridge, spaces = f"dsb{tag}", [f"ds{tag}{letter}" for letter in "ab"]
    links = tuple(f"dsv{tag}{letter}" for letter in "ab")
    addresses = (f"{subnet}.1", f"{subnet}.2")
    servers: list[subprocess.Popen[bytes]] = []
    try:
        run("ip", "link", "add", bridge, "type", "bridge")
        run("ip", "addr", "add", f"{subnet}.254/24", "dev", bridge)
        run("ip", "link", "set", bridge, "up")
        _keys(folder)
        for index, space in enumerate(spaces):
            _space(space, links[index], bridge, addresses[index])
            _names(Path("/etc/netns", space), addresses)
        _wrapper(folder, addresses)
        servers = [_sshd(folder, space, name) for space, name in zip(spaces, NAMES, strict=True)]
        for address, server in zip(addresses, servers, strict=True):
            _wait_for(address, server, folder)
        yield Hosts(addresses, links, folder)
    finally:
        for space in spaces:
            pids = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=False).stdout
            if pids.split():
                subprocess.run(["kill", "-9", *pids.split()], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
            shutil.rmtree(f"/etc/netns/{space}", ignore_errors=True)
        subprocess.run(["ip", "link", "del", bridge], check=False, capture_output=True)
        for server in servers:
            server.kill()
            server.wait()


def run(*command: str) -> None:
    """Run, and fail with what it said."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def _space(space: str, link: str, bridge: str, address: str) -> None:
    run("ip", "netns", "add", space)
    run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
    run("ip", "link", "set", link, "master", bridge, "up")
    run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
    run("ip", "-n", space, "link", "set", "eth0", "up")
    run("ip", "-n", space, "link", "set", "lo", "up")


def _names(folder: Path, addresses: tuple[str, ...]) -> None:
    """``ip netns exec`` mounts this over /etc/hosts."""
    folder.mkdir(parents=True)
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for address, name in zip(addresses, NAMES, strict=True))]
    (folder / "hosts").write_text("\n".join(lines) + "\n")


def _keys(folder: Path) -> None:
    for name in ("host_key", "user_key"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
    shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    (folder / "sshd_config").write_text(
        f"Port 22\nHostKey {folder}/host_key\nAuthorizedKeysFile {folder}/authorized_keys\nStrictModes no\nUsePAM no\n"
        "PidFile none\nPermitRootLogin yes\nPasswordAuthentication no\nMaxStartups 100\nMaxSessions 100\n"
    )


def _wrapper(folder: Path, addresses: tuple[str, ...]) -> None:
    config = f"IdentityFile {folder}/user_key\nIdentitiesOnly yes\nStrictHostKeyChecking no\nLogLevel ERROR\n"
    config += "UserKnownHostsFile /dev/null\n"
    config += "".join(f"Host {name}\n  HostName {ip}\n" for name, ip in zip(NAMES, addresses, strict=True))
    (folder / "ssh_config").write_text(config)
    (folder / "bin").mkdir()
    script = folder / "bin" / "ssh"
    script.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
    script.chmod(0o755)


def _sshd(folder: Path, space: str, name: str) -> subprocess.Popen[bytes]:
    start = f"hostname {name}; exec {shutil.which('sshd')} -D -e -f {folder}/sshd_config"
    with open(folder / f"{name}.log", "wb") as log:
        return subprocess.Popen(
            ["ip", "netns", "exec", space, "unshare", "--uts", "sh", "-c", start], stdout=log, stderr=log
        )


def _wait_for(address: str, server: subprocess.Popen[bytes], folder: Path) -> None:
    limit = time.monotonic() + WAIT_S
    while time.monotonic() < limit and server.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection((address, 22), 1):
            return
        time.sleep(0.1)
    logs = "".join(path.read_text() for path in folder.glob("*.log"))
    raise AssertionError(f"no sshd on {address}: {logs}")
