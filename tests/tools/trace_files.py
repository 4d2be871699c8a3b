"""What a reader of the engine has to open: one Linear at stage 3, traced, and the shape of the core's files.

    .venv/bin/python -m tests.tools.trace_files

Two gloo processes train one ``nn.Linear`` for five steps. For ``initialize`` and for forward, backward and step of the
last one, the first process counts what runs of ds_hf: files, functions, and calls from one file into another (through
torch, if it lies between). Below that stand the functions of more than 60 lines, and the classes of more than 20
attributes or 25 methods, in the core: ``ds_hf/engine`` without DeepSpeed's interface. How many files there may be
stands in ``budget.txt``. Other releases of Python than 3.12 count comprehensions as functions.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import ds_hf
from tests.helpers.distributed import run_distributed

PACKAGE = Path(ds_hf.__file__).parent
ENGINE = PACKAGE / "engine"
PHASES = ("initialize", "forward", "backward", "step")
MOST_LINES, MOST_ATTRIBUTES, MOST_METHODS = 60, 20, 25
# Rooms beside the core: what no step of training runs through.
OUTSIDE = ("checkpoint", "probes", "monitor", "ops", "schedules")
STEPS = 5  # the last is like all that follow; in the first three something watches for what users forget


@dataclass
class Trace:
    """What ran of ds_hf while ``watching`` it."""

    files: set[str] = field(default_factory=set)
    functions: set[tuple[str, str]] = field(default_factory=set)
    crossings: int = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        name = _file(frame)
        if event != "call" or name is None or frame.f_code.co_name == "<module>":
            return
        self.files.add(name)
        self.functions.add((name, frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name))
        above = frame.f_back
        while above is not None and _file(above) is None:
            above = above.f_back
        self.crossings += above is not None and _file(above) != name

    def watching(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call it and note what runs."""
        sys.setprofile(self)
        try:
            return function(*args, **kwargs)
        finally:
            sys.setprofile(None)


def _file(frame: FrameType) -> str | None:
    path = frame.f_code.co_filename
    return path[len(str(PACKAGE)) + 1 :] if path.startswith(str(PACKAGE)) else None


CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}


def trace_linear(config: dict[str, Any]) -> dict[str, Trace]:
    """On each of two processes."""
    torch.manual_seed(0)
    traces = {phase: Trace() for phase in PHASES}
    model, inputs = nn.Linear(16, 16), torch.randn(2, 16)
    engine = traces["initialize"].watching(ds_hf.initialize, model=model, config=config)[0]
    for step in range(STEPS):
        now = traces if step == STEPS - 1 else {phase: Trace() for phase in PHASES}
        loss = now["forward"].watching(engine, inputs).sum()
        now["backward"].watching(engine.backward, loss)
        now["step"].watching(engine.step)
    engine.destroy()
    return traces


# -- the shape of the sources ---------------------------------------------------------------------------------------


def core_files() -> list[Path]:
    """The files of the core."""
    found = sorted(ENGINE.rglob("*.py"))
    return [path for path in found if not path.relative_to(ENGINE).as_posix().startswith(OUTSIDE)]


def long_functions() -> list[tuple[str, int]]:
    """Path and name, lines."""
    found = []
    for path in core_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MOST_LINES:
                    found.append((f"{path.relative_to(PACKAGE)}:{node.name}", lines))
    return sorted(found, key=lambda item: -item[1])


def large_classes() -> list[tuple[str, int, int]]:
    """Path and name, attributes that its methods set on ``self`` or that are declared, methods."""
    found = []
    for path in core_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                attributes, methods = attributes_of(node), methods_of(node)
                if len(attributes) > MOST_ATTRIBUTES or len(methods) > MOST_METHODS:
                    found.append((f"{path.relative_to(PACKAGE)}:{node.name}", len(attributes), len(methods)))
    return sorted(found, key=lambda item: -item[1])


def methods_of(owner: ast.ClassDef) -> set[str]:
    return {node.name for node in owner.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def attributes_of(owner: ast.ClassDef) -> set[str]:
    names = {
        node.target.id for node in owner.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for node in ast.walk(owner):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            names.add(node.attr)
    return names


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def main() -> None:
    """Print the table."""
    traces = run_distributed(trace_linear, 2, CONFIG, timeout=120)[0]
    print("| one Linear, stage 3 | files | functions | calls across files |")
    print("|---|---|---|---|")
    for phase, trace in traces.items():
        print(f"| {phase} | {len(trace.files)} | {len(trace.functions)} | {trace.crossings} |")
    if "-v" in sys.argv:
        for phase, trace in traces.items():
            print(f"\n{phase}: {' '.join(sorted(trace.files))}")
    print(f"\nFunctions of more than {MOST_LINES} lines in the core:", long_functions() or "none")
    print(f"Classes of more than {MOST_ATTRIBUTES} attributes or {MOST_METHODS} methods:", large_classes() or "none")


if __name__ == "__main__":
    main()
