"""Modules that import one another, also inside functions: import-linter counts those, but not within a ":" line."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _modules() -> dict[str, Path]:
    found = {}
    for path in (ROOT / "ds_hf").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def _imports(path: Path, name: str, modules: dict[str, Path]) -> Iterator[str]:
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield from (each for each in (f"{base}.{alias.name}", base) if each in modules)


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    left = [start]
    while left:
        new = graph[left.pop()] - found
        found |= new
        left += new
    return found


def test_no_module_imports_itself_through_others() -> None:
    modules = _modules()
    graph = {}
    for name, path in modules.items():
        above = {name.rsplit(".", count)[0] for count in range(name.count(".") + 1)}  # run before, whatever they import
        graph[name] = set(_imports(path, name, modules)) - above
    reached = {name: _reached(graph, name) for name in graph}
    circles = {tuple(sorted(o for o in reached[n] if n in reached[o])) for n in graph if n in reached[n]}
    assert not circles, "move what they share to a module that imports none of them"
