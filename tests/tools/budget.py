"""How large the house is, and how large it may be: ``budget.txt``, in which a figure that grows says why beside it.

    .venv/bin/python -m tests.tools.budget                 what is over its limit, and what has none
    .venv/bin/python -m tests.tools.budget --lower         write down what has become less
    .venv/bin/python -m tests.tools.budget --raise "WHY"   write down what has become more, and why

Limits are of five kinds: the files that a phase of training runs through (one Linear at stage 3, ``trace_files``);
files and lines of a room; lines of a file beyond 450; attributes and methods of a class beyond 20 or 25; how many
classes have the same public name (``homes``).
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.tools.trace_files import MOST_ATTRIBUTES, MOST_METHODS, PACKAGE, attributes_of, methods_of

TABLE = Path(__file__).with_name("budget.txt")
MOST_FILE_LINES = 450
_ADVICE = "take something out, or say why (--raise 'WHY')"
_LINE = re.compile(r"(?P<kind>\w+) (?P<name>\S+)(?P<numbers>( \d+)+)\s*(?P<why>#.*)?")

Key = tuple[str, str]  # kind, name
Figures = dict[Key, tuple[int, ...]]


def sources() -> list[Path]:
    """Of the whole package."""
    return sorted(PACKAGE.rglob("*.py"))


def measure() -> Figures:
    """All but the phases, for which something has to run."""
    rooms: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    classes: Counter[str] = Counter()
    found: Figures = {}
    for path in sources():
        name, text = path.relative_to(PACKAGE).as_posix(), path.read_text()
        count, room = len(text.splitlines()), _room(name)
        rooms[room] += 1
        lines[room] += count
        if count > MOST_FILE_LINES:
            found["file", name] = (count,)
        for node in _classes(ast.parse(text)):
            if not node.name.startswith("_"):
                classes[node.name] += 1
            size = len(attributes_of(node)), len(methods_of(node))
            if size[0] > MOST_ATTRIBUTES or size[1] > MOST_METHODS:
                found["class", f"{name}:{node.name}"] = size
    found |= {("room", room): (rooms[room], lines[room]) for room in rooms}
    found |= {("homes", name): (count,) for name, count in classes.items() if count > 1}
    return found


def _room(name: str) -> str:
    """The package of a file; of the engine, whose packages are rooms of their own, the one below it, or two below."""
    parts = name.split("/")[:-1]
    depth = 1 if parts[:1] != ["engine"] else 3 if parts[1:2] in (["modules"], ["observe"], ["parallel"]) else 2
    return "/".join(parts[:depth]) or "."


def _classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    return (node for node in tree.body if isinstance(node, ast.ClassDef))


def read_limits(text: str) -> Figures:
    """Of the table."""
    limits: Figures = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            match = _LINE.fullmatch(line.strip())
            if match is None:
                raise ValueError(f"{TABLE.name}: {line!r} is no KIND NAME NUMBERS  # why")
            key = match["kind"], match["name"]
            if key in limits:
                raise ValueError(f"{TABLE.name} has two lines for {' '.join(key)}: delete one")
            limits[key] = tuple(map(int, match["numbers"].split()))
    return limits


def over(figures: Figures, limits: Figures) -> list[str]:
    """What is more than its limit, as sentences."""
    found = []
    for (kind, name), now in sorted(figures.items()):
        limit = limits.get((kind, name))
        if limit is None:
            found.append(f"{kind} {name} is {_text(now)}, and has no line in {TABLE.name}: {_ADVICE}")
        elif any(figure > most for figure, most in zip(now, limit, strict=True)):
            found.append(f"{kind} {name} is {_text(now)}, and at most {_text(limit)}: {_ADVICE}")
    return found


def _text(numbers: tuple[int, ...]) -> str:
    return " ".join(map(str, numbers))


def lowered(text: str, figures: Figures) -> str:
    """The table with limits that are higher than they need be brought down, and lines of what is gone left out."""
    kept = []
    for line in text.splitlines():
        match = _LINE.fullmatch(line.strip())
        if match is None:
            kept.append(line)
            continue
        key, limit = (match["kind"], match["name"]), tuple(map(int, match["numbers"].split()))
        if key[0] == "phase" or key in figures:
            now = tuple(map(min, figures.get(key, limit), limit))
            kept.append(f"{key[0]} {key[1]} {_text(now)}{'  ' + match['why'] if match['why'] else ''}")
    return "\n".join(kept) + "\n"


def raised(text: str, figures: Figures, why: str) -> str:
    """The table with what is over its limit written down, each line with the reason; new ones behind their kind's."""
    limits, lines = read_limits(text), text.splitlines()
    for key, now in sorted(figures.items()):
        limit = limits.get(key)
        if limit is not None and all(figure <= most for figure, most in zip(now, limit, strict=True)):
            continue
        kind = [place for place, line in enumerate(lines) if line.startswith(f"{key[0]} ")]
        known = [place for place in kind if lines[place].startswith(f"{key[0]} {key[1]} ")]
        new = f"{key[0]} {key[1]} {_text(now)}  # {why}"
        if known:
            lines[known[0]] = new
        else:
            lines.insert(kind[-1] + 1 if kind else len(lines), new)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print, lower or raise."""
    figures, text = measure(), TABLE.read_text()
    if "--lower" in sys.argv:
        TABLE.write_text(lowered(text, figures))
    if "--raise" in sys.argv:
        why = " ".join(sys.argv[sys.argv.index("--raise") + 1 :]).strip()
        if not why:
            sys.exit('a reason belongs to it: python -m tests.tools.budget --raise "WHY"')
        TABLE.write_text(raised(text, figures, why))
        text = TABLE.read_text()
    sys.stdout.write("\n".join(over(figures, read_limits(text)) or ["all within their limits"]) + "\n")


if __name__ == "__main__":
    main()
