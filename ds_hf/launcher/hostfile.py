"""The hostfile: which hosts there are and how many slots (GPUs, or processes without GPUs) each has.

A line is ``name slots=N``, in the form of Open MPI's hostfiles; ``#`` starts a comment and ``max_slots=M`` is allowed
and has no effect. Names reach ssh, pdsh and mpirun as arguments, so only what can be a host name is let in: nothing
that a shell, ssh (a leading ``-``) or pdsh (``,``, ``[``) would read as something else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ds_hf.launcher.errors import LaunchError, mistake
from ds_hf.regular_files import TEXT_NBYTES, read_regular

__all__ = ["DEFAULT_HOSTFILE", "Pool", "check_host_name", "parse_hostfile", "read_hostfile"]

DEFAULT_HOSTFILE = "/job/hostfile"
MAX_SLOTS = 4096
MAX_PROCESSES = 2**20  # of all hosts
_WORD = re.compile(r"\S+")
# name, user@name, IPv4 or IPv6 address
_HOST = re.compile(
    r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?(?:[A-Za-z0-9_][A-Za-z0-9_.-]*|[0-9A-Fa-f]*(?::[0-9A-Fa-f]*){2,7})"
)
_SLOTS = re.compile(r"slots=([0-9]{1,9})", re.ASCII)
_EXAMPLE = "write `worker-0 slots=4`, one host per line"

# Hosts in order, each with the ids of its slots.
Pool = Mapping[str, tuple[int, ...]]


def check_host_name(name: str) -> str | None:
    """Why ``name`` cannot be a host, or None."""
    if len(name) > 255:
        return f"{len(name)} characters are too many for a host name"
    if name.startswith("-"):
        return f"{name!r} would be read as an option"
    if not _HOST.fullmatch(name):
        return f"{name!r} is not a host name: letters, digits, '.', '-' and '_' are allowed, and user@ before it"
    return None


def read_hostfile(path: str, *, explicit: bool) -> Pool | None:
    """The hosts in ``path``; None if there is no such file and it was not asked for (``explicit`` False).

    accelerate writes ``--hostfile None`` when its own setting is absent: that does not ask for it either.
    """
    if path == "None":
        return None
    file = Path(path)
    if not explicit and (not file.exists() or file.is_dir()):
        return None
    try:
        raw = read_regular(file, TEXT_NBYTES)
    except OSError as error:
        raise LaunchError(
            f"hostfile {path}: {error.strerror}\n  fix: correct --hostfile, or leave it out to train on this machine"
        ) from None
    return parse_hostfile(_decode(raw, path), path)


def parse_hostfile(text: str, source: str = "hostfile") -> Pool:
    """Parse ``text``.

    Raises:
        LaunchError: names line, column and fix of the first mistake.
    """
    pool: dict[str, tuple[int, ...]] = {}
    first_seen: dict[str, int] = {}
    total = 0
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        entry = _parse_line(line.removesuffix("\r"), number, source)
        if entry is None:
            continue
        host, slots, column = entry
        total += slots
        if total > MAX_PROCESSES:
            raise mistake(source, number, column, line, f"more than {MAX_PROCESSES} slots in all", "give fewer")
        if host in pool:
            message = f"host {host} is already in line {first_seen[host]}"
            raise mistake(source, number, column, line, message, "give each host one line with all its slots")
        pool[host], first_seen[host] = tuple(range(slots)), number
    if not pool:
        raise LaunchError(f"{source}: no host in it\n  fix: {_EXAMPLE}, or leave --hostfile out")
    return pool


def _parse_line(line: str, number: int, source: str) -> tuple[str, int, int] | None:
    """Host, slots and the column of the host; None for a line without a host."""
    words = list(_WORD.finditer(line.partition("#")[0]))
    if not words:
        return None

    def wrong(column: int, message: str, fix: str = _EXAMPLE) -> LaunchError:
        return mistake(source, number, column, line, message, fix)

    host = words[0].group()
    column = words[0].start() + 1
    if reason := check_host_name(host):
        raise wrong(column, reason)
    if len(words) < 2:
        raise wrong(words[0].end() + 1, f"slots=N is missing after {host}")
    match = _SLOTS.fullmatch(words[1].group())
    if not match:
        raise wrong(words[1].start() + 1, f"slots=N is expected here, not {words[1].group()[:40]!r}")
    slots = int(match.group(1))
    if slots == 0:
        raise wrong(words[1].start() + 1, f"{host} has no slots", "leave the host out")
    if slots > MAX_SLOTS:
        raise wrong(words[1].start() + 1, f"{slots} slots are more than any host has (limit {MAX_SLOTS})")
    for word in words[2:]:
        if not re.fullmatch(r"max[_-]slots=[0-9]+", word.group(), re.ASCII):
            fix = "put a comment after #, and everything else elsewhere"
            raise wrong(word.start() + 1, f"{word.group()[:40]!r} is not understood here", fix)
    return host, slots, column


def _decode(raw: bytes, source: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        line, column = before.count(b"\n") + 1, error.start - (before.rfind(b"\n") + 1) + 1
        text = raw.split(b"\n")[line - 1].decode("ascii", "replace")
        raise mistake(source, line, column, text, "this is not UTF-8 text", _EXAMPLE) from None
