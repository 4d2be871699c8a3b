"""A public function on tensors says their shape and their dtype: in ``engine/ops``, ``engine/comm`` and
``engine/zero``.

What takes a parameter of the model takes any. An implementation without a docstring has that of what it implements: a
method that of its class' protocol or base, an operator that of ``reference.py``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.tools.trace_files import PACKAGE

SHAPE = re.compile(r"(?i)\[[\w* ,./+…:()-]*\]|\bshapes?\b|0-dim|\bscalar|\bflat\b|\bany tensors?\b|\bparameter's own\b")
DTYPE = re.compile(
    r"\bdtypes?\b|\bfp\d+|\bbf16|\bfloat\d*\b|\bu?int\d+|\bbytes?\b|\bbool\b|\bany tensors?\b|\bparameter's own\b"
)
PARAMETERS = {"param", "params", "parameter", "parameters", "firsts"}
# How many do not; a figure here may only fall.
SILENT = {"ops": 0, "comm": 0, "zero": 0}

REFERENCE = {
    node.name
    for name in ("reference.py", "reference_blocks.py")
    for node in ast.parse((PACKAGE / "engine/ops" / name).read_text()).body
    if isinstance(node, ast.FunctionDef)
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(room: str) -> Iterator[tuple[str, Function]]:
    """Public ones of a package, with the file, whose tensors are not all parameters."""
    for path in sorted((PACKAGE / "engine" / room).rglob("*.py")):
        tree = ast.parse(path.read_text())
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
        for node in [*_public(tree.body), *(node for owner in classes for node in _public(owner.body))]:
            has_reference = not path.name.startswith("reference") and node.name in REFERENCE and room == "ops"
            if _on_tensors(node) and ast.get_docstring(node) is not None and not has_reference:
                yield f"{path.name}:{node.name}", node


def _public(body: list[ast.stmt]) -> list[Function]:
    return [node for node in body if isinstance(node, Function) and not node.name.startswith("_")]


def _on_tensors(node: Function) -> bool:
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    hints = [a.annotation for a in arguments if a.annotation is not None and a.arg not in PARAMETERS]
    return any(re.search(r"\bTensor\b", ast.unparse(hint)) for hint in [*hints, *filter(None, [node.returns])])


@pytest.mark.parametrize("room", SILENT)
def test_shape_and_dtype_are_told(room: str) -> None:
    found = list(functions(room))
    assert found
    silent = [
        name
        for name, node in found
        if not all(pattern.search(ast.get_docstring(node) or "") for pattern in (SHAPE, DTYPE))
    ]
    assert len(silent) <= SILENT[room], (
        f"docstrings say shape and dtype of tensors, as in 'flat, fp32' or '``[rows, k]``, any dtype': {silent}"
    )
