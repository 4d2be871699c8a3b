"""The script that lies in each checkpoint: one file that is whole by itself, the same at every save."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

from ds_hf.checkpoint.standalone import standalone_script


def _names(nodes: list[ast.stmt]) -> Iterator[str]:
    """What a module's statements name."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from (
                found.id for target in node.targets for found in ast.walk(target) if isinstance(found, ast.Name)
            )
        elif isinstance(node, ast.Try):
            yield from _names(node.body)


def test_no_name_stands_in_it_twice_and_none_is_missing() -> None:
    text = standalone_script()
    tree = ast.parse(text)
    names = Counter(_names(tree.body))
    assert {name for name, count in names.items() if count > 1} == set()
    (fallback,) = (node for node in tree.body if isinstance(node, ast.Try))
    assert set(_names(fallback.handlers[0].body)) == set(_names(fallback.body))
    assert [line for line in text.splitlines() if "ds_hf." in line and "import" in line] == [
        f"    {ast.unparse(node)}" for node in fallback.body
    ]
    compile(text, "zero_to_fp32.py", "exec")
    assert subprocess.run([sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", "-"], input=text,
                          text=True, capture_output=True, check=False).stdout == "All checks passed!\n"  # fmt: skip


def test_it_is_the_same_in_every_process() -> None:
    code = "import sys; from ds_hf.checkpoint.standalone import standalone_script as s; sys.stdout.write(s())"
    texts = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert texts == {standalone_script().encode()}
