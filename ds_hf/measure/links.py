"""What ``ds-hf doctor`` measured of a machine's links, kept for commands that come later.

A small file of JSON, ``$XDG_CACHE_HOME/ds_hf/links.json`` (or ``~/.cache``), with one entry for each host and device.
Whatever else lies there is no figure: it is told in a sentence, never an error.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import date
from pathlib import Path
from typing import Any

from ds_hf.host import user_cache
from ds_hf.regular_files import read_regular

__all__ = ["MeasuredLinks", "links_file", "load_links", "save_links"]

VERSION = 1
_MOST = 1 << 20  # bytes of the file
_ENTRIES = 64  # the latest are kept


@dataclass(frozen=True)
class MeasuredLinks:
    """What was measured on one host with one kind of device; 0 where it was not.

    Attributes:
        device: its name.
        neighbours: bytes a second from one GPU of the host to the next.
        between: bytes a second that a process sends in an all-reduce of all processes of a launch ...
        processes, hosts: of that launch; backend: over which.
        latency: seconds of an all-reduce of a single number.
        packed: values a second that become blocks of 8 bits and values again.
        day: when, as 2026-11-25.
    """

    device: str
    neighbours: float = 0.0
    between: float = 0.0
    processes: int = 0
    hosts: int = 0
    backend: str = ""
    latency: float = 0.0
    packed: float = 0.0
    day: str = ""

    def __str__(self) -> str:
        if self.between:
            hosts = f"{self.hosts} hosts" if self.hosts > 1 else "one host"
            where = f"{self.processes} processes on {hosts} over {self.backend}, {_speed(self.between)} each"
        else:
            where = f"from GPU to GPU of this host, {_speed(self.neighbours)}"
        return where


def links_file() -> Path:
    """Where they are kept."""
    return user_cache() / "links.json"


def save_links(links: MeasuredLinks) -> None:
    """Keep ``links`` for this host; what an earlier launch measured and this one did not stays.

    Raises:
        OSError: the file cannot be written.
    """
    key, path = f"{socket.gethostname()}/{links.device}", links_file()
    try:
        entries = _entries(path)
    except (OSError, ValueError):
        entries = {}
    before = entries.pop(key, None)
    entry = asdict(links) | {"day": date.today().isoformat()}
    if before is not None:
        kept = ("neighbours",) if links.between else ("between", "processes", "hosts", "backend", "latency", "packed")
        entry |= {name: before[name] for name in kept if not entry[name]}
    entries[key] = entry  # the latest is the last
    text = json.dumps({"version": VERSION, "machines": dict(list(entries.items())[-_ENTRIES:])}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=".links", dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def load_links() -> tuple[MeasuredLinks | None, str]:
    """The latest figures of this host, and why there are none if there are none: a sentence."""
    path = links_file()
    try:
        entries = _entries(path)
    except FileNotFoundError:
        return None, "run ds-hf doctor"
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return None, f"{path} is not what ds-hf doctor writes ({reason}) and is ignored: run ds-hf doctor"
    prefix = f"{socket.gethostname()}/"
    found = [entry for key, entry in entries.items() if key.startswith(prefix)]
    if not found:
        return None, "run ds-hf doctor on this host"
    return MeasuredLinks(**found[-1]), ""


def _entries(path: Path) -> dict[str, dict[str, Any]]:
    """The entries of the file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is none of ours.
    """
    try:
        tree = json.loads(read_regular(path, _MOST))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(tree, dict) or not isinstance(tree.get("machines"), dict):
        raise ValueError("it has no machines")
    if tree.get("version") != VERSION:
        raise ValueError(f"its version is not {VERSION}")
    for entry in tree["machines"].values():
        _check(entry)
    return dict(tree["machines"])


def _check(entry: object) -> None:
    if not isinstance(entry, Mapping) or set(entry) != {field.name for field in fields(MeasuredLinks)}:
        raise ValueError("an entry has other keys")
    for field in fields(MeasuredLinks):
        value, kind = entry[field.name], type(getattr(MeasuredLinks(""), field.name))
        if kind is str:
            if not isinstance(value, str) or len(value) > 200 or not value.isprintable():
                raise ValueError(f"{field.name} is no text")
        elif type(value) not in (int, kind) or not 0 <= value < 1e18:
            raise ValueError(f"{field.name} is no number that can be")


def _speed(speed: float) -> str:
    return f"{speed / 1e9:.3g} GB/s" if speed >= 1e9 else f"{speed / 1e6:.3g} MB/s"
