"""What changes outside of objects belongs to the process or to torch, and is listed here with whose it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "ds_hf"

ADVICE = "put it into the engine, or what belongs to one, or add it to ALLOWED with whose it is"

# Beside caches (``functools.cache``) of what does not change while a process lives. An engine's state is in the engine.
ALLOWED = {
    "checkpoint/deepspeed/pickles.py": {"_ADMITTING"},  # a lock around torch's list of admitted classes
    "deepspeed_api/groups.py": {"_experts", "_experts_of", "latest"},  # DeepSpeed takes no engine
    "deepspeed_api/initialize.py": {"_stand_in"},  # `ds-hf memory train.py` ends the script's run here
    "compat/deepspeed/runtime/activation_checkpointing/offload_activations.py": {
        "_marker"
    },  # DeepSpeed's functions take no engine
    "deepspeed_api/sequence/division.py": {"_forwards", "_modules"},  # transformers' registry is the process's
    "deepspeed_api/sequence/layer.py": {"_LAST"},  # DeepSpeed's function is not told on the way back
    "deepspeed_api/sequence/parallel_state.py": {"_SEQUENCE_PARALLEL_GROUP", "_WORLD"},  # DeepSpeed's functions
    "deepspeed_api/sequence/ulysses.py": {"_waiting"},  # models that are still to be made
    "compat/deepspeed/runtime/pipe/p2p.py": {"_grid"},  # DeepSpeed's functions take no pipeline
    "deepspeed_api/tensor_parallel.py": {"_mode"},  # set_autotp_mode of DeepSpeed takes no engine
    "engine/comm/comms_logger.py": {"comms_logger"},  # deepspeed.comm.log_summary takes no engine
    "engine/comm/log.py": {"_logs"},  # of process groups, which several engines may use
    "engine/comm/process_group.py": {"_captured"},  # the group that torch destroys at exit
    "engine/comm/streams.py": {"_streams"},  # of the device
    "engine/comm/together.py": {
        "_numbers",
        "_open",
        "_watching",
        "_worlds",
    },  # exchanges, numbered alike on all processes, and threads for which the end of Python waits
    "engine/modules/activations/offload.py": {"ActivationOffload.rounds"},  # compared before and after a call
    "engine/modules/capturing.py": {"_engines"},  # torch's graphs share memory, and a round of replays is of all
    "engine/modules/quantized/layers.py": {"_DERIVED"},  # classes, one for each that was derived from
    "engine/parallel/tensor/styles.py": {"_DERIVED"},  # the same
    "engine/observe/probes/trial/driver.py": {
        "_DRIVERS"
    },  # a trial is a process's, whose script may make several engines
    "engine/observe/python_gc.py": {"_engines", "_lock", "_was_on"},  # Python's collector
    "engine/observe/report/attach.py": {"_active"},  # logs of collectives and loaders are the process's
    "engine/ops/cpu.py": {"_thread"},  # threads of OpenMP
    "engine/zero/buffer.py": {"FlatBuffer._next_id"},  # ds_id is unique in a process
    "engine/zero/hooks.py": {"_live", "_running", "_untracked"},  # calls and backwards: autograd is the process's
    "engine/zero/init.py": {"Init._active"},  # torch's constructors are replaced for the process
    "engine/zero/reduction.py": {"_by_hand", "_driven"},  # autograd is the process's
    "hf/modeling.py": {"_whole"},  # transformers asks the model, and not the engine, to save itself
    "hf/autoload.py": {"_absent", "_unfit"},  # what is installed
    "log.py": {"_seen"},  # what was said once
    "memory/predictor.py": {"_ONE_AT_A_TIME"},  # the lock of all threads: a recording replaces what they call
}
_CHANGING = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "set",
    "setdefault", "update",
}  # fmt: skip
_LIVING = ("Weak", "local", "ContextVar", "deque", "defaultdict", "count", "Lock")


def _root(node: ast.AST) -> str | None:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, (ast.Assign, ast.Delete)):
        return node.targets
    return [node.target] if isinstance(node, (ast.AnnAssign, ast.AugAssign)) else []


def _inside(tree: ast.Module) -> Iterator[ast.AST]:
    """What runs later than the import: the bodies of functions."""
    functions = (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return (node for function in functions for node in ast.walk(function))


def changing(text: str) -> set[str]:
    """Names of a module, and attributes of its classes, that functions change; and what is made to be changed."""
    tree = ast.parse(text)
    made = {target.id: node for node in tree.body for target in _targets(node) if isinstance(target, ast.Name)}
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    found = {
        name for name, node in made.items()
        if isinstance(value := getattr(node, "value", None), ast.Call)
        and any(word in ast.unparse(value.func) for word in _LIVING)
    }  # fmt: skip
    for node in _inside(tree):
        if isinstance(node, ast.Global):
            found.update(node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING:
            found.update({_root(node.func.value)} & made.keys() if isinstance(node.func.value, ast.Name) else ())
        for target in _targets(node):
            if isinstance(target, (ast.Attribute, ast.Subscript)):
                found.update({_root(target)} & made.keys())
            if isinstance(target, ast.Attribute) and _root(target) in classes:
                found.add(f"{_root(target)}.{target.attr}")
    return found - {None}  # type: ignore[return-value]


def test_nothing_else_changes_outside_of_objects() -> None:
    told = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith("compat/"):
            listed, found = ALLOWED.get(name, set()), changing(path.read_text())
            told += [f"{name}: {each} changes outside of an object: {ADVICE}" for each in sorted(found - listed)]
            told += [f"{name}: {each} is listed and no longer changes" for each in sorted(listed - found)]
    assert not told, "\n".join(told)


def test_what_is_found() -> None:
    text = """
A = []
B = {}
C = 0
FIXED = {"a": 1}
class K:
    n = 0
def f():
    global C
    A.append(1); B["x"] = 2; K.n += 1
    local = []; local.append(FIXED["a"])
"""
    assert changing(text) == {"A", "B", "C", "K.n"}
