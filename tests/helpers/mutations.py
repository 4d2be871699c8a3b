"""Plausible files with one thing wrong: what a crash, an editor, another program or an attacker leaves.

Drawn by hypothesis, which shrinks what fails and prints the line that repeats it (``@reproduce_failure``).
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

QUICK, LONG = 40, 200  # examples among the fast tests, and among the slow ones

WRONG = st.sampled_from(
    [None, True, 0, -1, 10**20, 10**4000, 1e308, -1e308, float("nan"), float("inf"), "", "x", "\0", "../../x", "\ud800",
     [], [1], [[]], {}, {"x": None}, [0] * 1000]
)  # fmt: skip
BYTES = st.one_of(
    st.sampled_from([b"", b"\0", b"\xff\xfe", b"[" * 10**5, b"{}", b"null\n", b"\n" * 100]), st.binary(max_size=40)
)


def examples(count: int) -> settings:
    """Without a database and without limits of time, which a busy machine would exceed."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=count, deadline=None, database=None, suppress_health_check=checks, print_blob=True)


def places(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in nested dicts and lists; of long lists the first and last entries."""
    yield here
    if isinstance(value, dict):
        for key, each in value.items():
            yield from places(each, (*here, key))
    elif isinstance(value, list):
        for index in sorted({0, 1, len(value) - 1} & set(range(len(value)))):
            yield from places(value[index], (*here, index))


@st.composite
def wrong_values(draw: Any, value: Any) -> Any:
    """``value`` with one thing in it replaced, or left out."""
    path = draw(st.sampled_from(list(places(value))))
    if not path:
        return draw(WRONG)
    made = copy.deepcopy(value)
    inside = made
    for key in path[:-1]:
        inside = inside[key]
    if draw(st.booleans()) and isinstance(inside, dict):
        del inside[path[-1]]
    else:
        inside[path[-1]] = draw(WRONG)
    return made


@st.composite
def wrong_bytes(draw: Any, content: bytes) -> bytes:
    """``content`` cut off, with a part replaced, or with something behind it."""
    place = draw(st.integers(0, max(len(content) - 1, 0)))
    kind = draw(st.sampled_from(["cut", "replaced", "flipped", "longer"]))
    if kind == "cut":
        return content[:place]
    if kind == "flipped" and content:
        return content[:place] + bytes([content[place] ^ (1 << draw(st.integers(0, 7)))]) + content[place + 1 :]
    more = draw(BYTES)
    return content + more if kind == "longer" else content[:place] + more + content[place + len(more) :]


@st.composite
def wrong_file(draw: Any, path: Path) -> str:
    """Spoils a file in place: bytes, or a value of its (lines of) JSON, or what it is. Returns what was done."""
    kind = draw(st.sampled_from(["bytes", "json", "json", "gone", "pipe", "endless", "folder", "dangling"]))
    content = path.read_bytes()
    if kind == "json":
        try:
            lines = (
                [json.loads(line) for line in content.splitlines()]
                if path.suffix == ".jsonl"
                else [json.loads(content)]
            )
        except ValueError:
            kind = "bytes"
        else:
            number = draw(st.integers(0, len(lines) - 1))
            lines[number] = draw(wrong_values(lines[number]))
            path.write_text("\n".join(map(json.dumps, lines)) + "\n", "utf-8", "surrogatepass")
            return f"{path.name}: {json.dumps(lines[number])[:300]}"
    if kind == "bytes":
        path.write_bytes(draw(wrong_bytes(content)))
        return f"{path.name}: bytes"
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "dangling":
        path.symlink_to("nowhere")
    return f"{path.name}: {kind}"


@st.composite
def exchanged(draw: Any, path: Path, files: list[Path]) -> str:
    """A file gets the content of another one, or a second name beside it: what copying by hand leaves."""
    other = draw(st.sampled_from(files))
    kind = draw(st.sampled_from(["exchanged", "overwritten", "doubled"]))
    if kind == "doubled":
        place = path.with_name(draw(st.sampled_from(["model.safetensors", f"copy of {path.name}", other.name])))
        if not place.exists():
            place.write_bytes(path.read_bytes())
        return f"{place.name}: a copy of {path.name}"
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    if kind == "exchanged":
        other.write_bytes(content)
    return f"{path.name}: {kind} with {other.name}"
