"""Tests of GPUs call helpers of the other tests and the engine's insides, and most machines skip them: here their names
and the arguments of their calls are looked up without running them; of benchmarks, which run on GPUs too, what they
import."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

from tests.conftest import wants_gpus

GPU_TESTS = sorted((Path(__file__).parent.parent / "gpu").glob("test_*.py"))
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def is_ours(thing: ModuleType | FunctionType) -> bool:
    name = thing.__name__ if isinstance(thing, ModuleType) else thing.__module__
    return name.split(".")[0] in ("tests", "ds_hf")


def looked_up(node: ast.expr, module: ModuleType) -> Any:
    """What an expression of a name, or of an attribute of a module of ours, stands for in ``module``, else None.
    AttributeError: the module of ours has no such attribute."""
    if isinstance(node, ast.Name):
        return vars(module).get(node.id)
    if isinstance(node, ast.Attribute):
        owner = looked_up(node.value, module)
        if isinstance(owner, ModuleType) and is_ours(owner):
            return getattr(owner, node.attr)
    return None


def check_call(call: ast.Call, module: ModuleType) -> None:
    """TypeError: the function does not take these arguments."""
    function = looked_up(call.func, module)
    if not isinstance(function, FunctionType) or not is_ours(function) or hasattr(function, "__wrapped__"):
        return
    plain = [each for each in call.args if not isinstance(each, ast.Starred)]
    named = {each.arg: each.value for each in call.keywords if each.arg}
    whole = len(plain) + len(named) == len(call.args) + len(call.keywords)
    signature = inspect.signature(function)
    (signature.bind if whole else signature.bind_partial)(*plain, **named)


def check_patch(call: ast.Call, module: ModuleType) -> None:
    """AttributeError: what ``monkeypatch.setattr(module, "name", …)`` replaces is not there."""
    match call:
        case ast.Call(ast.Attribute(ast.Name("monkeypatch"), "setattr"), [owner, ast.Constant(str(name)), _]):
            looked_up(ast.Attribute(owner, name), module)


def faults(tree: ast.Module, module: ModuleType) -> Iterator[str]:
    for node in ast.walk(tree):
        try:
            if isinstance(node, ast.Attribute):
                looked_up(node, module)
            elif isinstance(node, ast.Call):
                check_patch(node, module)
                check_call(node, module)
        except (AttributeError, TypeError) as error:
            yield f"line {node.lineno}: {ast.unparse(node)}: {error}"


@pytest.mark.parametrize("path", GPU_TESTS, ids=lambda path: path.stem)
def test_names_and_arguments(path: Path) -> None:
    module = importlib.import_module(f"tests.gpu.{path.stem}")  # skips where a package is missing, as the file does
    assert list(faults(ast.parse(path.read_text("utf-8")), module)) == []


def imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """What a script has from ours, wherever it imports it: modules, and names in them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("tests", "ds_hf"):
            yield from ((node.module, alias.name) for alias in node.names)


def is_there(module: str, name: str) -> bool:
    owner = importlib.import_module(module)
    return hasattr(owner, name) or (hasattr(owner, "__path__") and find_spec(f"{module}.{name}") is not None)


def test_what_benchmarks_import_is_there() -> None:
    found = {
        (path.name, module, name)
        for path in sorted(BENCHMARKS.glob("*.py"))
        for module, name in imported(ast.parse(path.read_text("utf-8")))
    }
    assert len(found) > 40
    lost = [each for each in sorted(found) if not is_there(*each[1:])]
    assert lost == []


def test_what_is_found() -> None:
    module = ModuleType("sample")
    vars(module).update(helpers=importlib.import_module(__name__), own=check_call, ast=ast)
    lines = {
        "helpers.nowhere": False,
        "helpers.faults(1, 2)": True,
        "helpers.faults(1, 2, 3)": False,
        "helpers.faults(*several)": True,
        "helpers.faults(1, tree=2)": False,
        "own(1)": False,
        "own(1, **more)": True,
        "unknown(1).attribute": True,
        "ast.nowhere()": True,
        "monkeypatch.setattr(helpers, 'nothing', 1)": False,
        "monkeypatch.setattr(helpers, 'faults', 1)": True,
    }
    assert {line: not list(faults(ast.parse(line), module)) for line in lines} == lines


@pytest.mark.parametrize(
    ("arguments", "marks", "wanted"),
    [
        (["tests"], "not slow and not gpu", False),
        (["tests/engine", "tests/hf/test_auto_gpu.py"], "", False),
        (["tests/engine", "tests/gpu/test_parity.py::test_stages[3]"], "", True),
        (["/checkout/tests/gpu"], "", True),
        (["tests"], "gpu", True),
    ],
)
def test_only_runs_of_these_tests_see_gpus(arguments: list[str], marks: str, wanted: bool) -> None:
    assert wants_gpus(arguments, marks) is wanted


def test_a_run_of_other_tests_sees_none() -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
