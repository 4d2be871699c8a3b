"""DeepSpeed's own unit tests, of a checkout of its sources, against the name ``deepspeed`` that ds_hf serves.

    python -m tests.tools.deepspeed_tests CHECKOUT unit/v1/zero unit/pipe --limit 600 --json FILE

Prints for each file how many tests passed, failed and were skipped, and what the failures say. Nothing of the checkout
is changed or kept: its ``tests`` are copied to a temporary folder. There

- what a file imports from DeepSpeed and ds_hf does not have becomes an object that fails when it is used, so that the
  other tests of the file run; tests that use it are *internals*, and not counted as failed;
- of other failures ``deepspeed_tests.txt`` says what is known: *choice* (ds_hf does otherwise on purpose), *wording*
  (the same error in other words), *internals*, *needs* (a GPU, the net or a package);
- a machine without accelerators may have any number of processes (DeepSpeed skips tests of more than it has sockets),
  models that are compared with torch's DDP lie on the CPU, and the model from the net is a small one;
- a test that hangs ends with its file's processes, and those behind it run.

With ``--state-defaults`` files say what DeepSpeed does where they say nothing and ds_hf does otherwise: parameters of
fewer than 100,000 elements stay whole at stage 3 (``stage3_param_persistence_threshold``), gradients of bf16 are summed
in bf16 (``grad_accum_dtype``), and weights are rounded to bf16 before masters are made of them (``model.bfloat16()``).
"""

from __future__ import annotations

import argparse
import ast
import collections
import functools
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["Outcome", "adapt", "run_files", "summarise"]

ROOT = Path(__file__).parents[2]
KNOWN = Path(__file__).with_suffix(".txt")
INTERNAL = "not in ds_hf, and an internal of DeepSpeed: "
# What a failure says that comes of a name which ds_hf has not.
_ABSENT = re.compile(
    rf"{INTERNAL}|there is no deepspeed\.\S+ in DeepSpeed|ds_hf does not provide deepspeed\."
    r"|<module 'deepspeed\.[^>]*> (has no|does not have the) attribute"
)

# Kinds of failures by what they say; the others are those of ``deepspeed_tests.txt``.
_SAID = {
    "internals": re.compile(rf"{_ABSENT.pattern}|has (no|an) attribute '_[a-z]"),
    "wording": re.compile(r"^E\s+.*Regex pattern did not match", re.M),
    "needs": re.compile(
        r"NCCL >= |not compiled with CUDA|couldn't connect to 'http|torch\.cpu' has no attribute"
        r"|No module named '(?!deepspeed|ds_hf)|Allocated memory .* should decrease after offload"
    ),
}
_KINDS = ("passed", "failed", "choice", "wording", "internals", "needs", "skipped", "unfinished")

_PLUGIN = f'''

# -- added by ds_hf's tests/tools/deepspeed_tests.py --
def _absent(name):
    class Absent(type):
        def __getattr__(cls, key):
            if key.startswith("__"):
                raise AttributeError(key)
            raise RuntimeError("{INTERNAL}" + name)
        def fail(cls, *args, **kwargs):
            raise RuntimeError("{INTERNAL}" + name)
        __call__ = __iter__ = __len__ = __eq__ = fail
        __hash__ = type.__hash__
    return Absent(name.rpartition(".")[2], (), {{}})


import builtins
builtins._ds_hf_absent = _absent
'''

# Appended with --state-defaults: it changes what the script says, not the engine.
_STATED = """
import functools, deepspeed
def _stating(function, names):
    @functools.wraps(function)
    def call(*args, **kwargs):
        for name in names:
            found = kwargs.get(name)
            zero = found.get("zero_optimization") if isinstance(found, dict) else None
            stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
            if stage == 3 and "param_persistence_threshold" not in zero:
                zero = {"stage3_param_persistence_threshold": 100_000, **zero}
            if stage and isinstance(found.get("bf16"), dict) and found["bf16"].get("enabled") is True:
                found = {"data_types": {"grad_accum_dtype": "bf16"}, **found}
                kwargs["model"].bfloat16()
            if stage:
                kwargs[name] = {**found, "zero_optimization": zero}
        return function(*args, **kwargs)
    return call
if not hasattr(deepspeed.initialize, "__wrapped__"):
    deepspeed.initialize = _stating(deepspeed.initialize, ("config", "config_params"))
"""

# What a test's processes have from the start, so that they begin in a moment, and collect only what they made.
_PRELOAD = """
import torch, deepspeed, unit.common, unit.simple_model, torch._dynamo, torch.onnx, torch.distributed.tensor, gc
import torch.distributed._shard.sharded_tensor, ds_hf.engine.builder, ds_hf.engine.features
gc.collect()
gc.freeze()
"""

_BERT = '__import__("transformers").BertModel(__import__("transformers").BertConfig(num_hidden_layers=1))'

_REPORTS = """
import multiprocessing
multiprocessing.set_forkserver_preload(["ds_hf_preload"])


def _report(name, what, text=""):
    import json, os
    with open(os.environ["DS_HF_REPORTS"], "a") as file:
        file.write(json.dumps([name, what, text]) + "\\n")


def pytest_runtest_logstart(nodeid):
    _report(nodeid, "started")


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        _report(report.nodeid, report.outcome, "" if report.passed else str(report.longrepr))


def pytest_collectreport(report):
    if report.failed:
        _report(report.nodeid, "failed", str(report.longrepr))


def pytest_collection_modifyitems(items):
    import json, os, pathlib
    reports = pathlib.Path(os.environ["DS_HF_REPORTS"])
    done = {json.loads(line)[0] for line in reports.read_text().splitlines()} if reports.exists() else set()
    items[:] = [item for item in items if item.nodeid not in done]
"""


class Outcome(collections.Counter[str]):
    """Counts of ``_KINDS``, and what failures said.

    Attributes:
        reasons: one line of each failure, by name of the test.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reasons: dict[str, str] = {}


def adapt(tests: Path, *, state_defaults: bool = False) -> None:
    """Change a copy of DeepSpeed's folder ``tests``, see the top of the module."""
    plugin = _PLUGIN + (_STATED if state_defaults else "")
    (tests / "ds_hf_preload.py").write_text(_PRELOAD)
    conftest = tests / "conftest.py"
    conftest.write_text((conftest.read_text() if conftest.exists() else "") + plugin + _REPORTS)
    for path in sorted(tests.rglob("*.py")):
        text = path.read_text()
        changed = re.sub(r"get_accelerator\(\)\.device_count\(\) < (num_procs|\w*world_size)", "False", text)
        changed = re.sub(r",\s*(device_ids=\[[^\]]*\]|output_device=[\w.]+)", "", changed)  # of torch's DDP
        changed = changed.replace("AutoModel.from_pretrained('bert-base-uncased')", _BERT)
        changed = _without_missing_imports(changed)
        if path.name == "common.py":  # its processes import it, and no conftest
            changed = changed.replace("import os\n", f"import os\n{plugin}", 1)
            changed = changed.replace("            time.sleep(0.5)\n", "")  # after each test
            # It waits for processes that hang, and never ends.
            changed = changed.replace('pytest.exit("Test hanged, exiting", returncode=1)', "os._exit(3)")
            # pytest's own failures are no Exception: they would end the process, which is then waited for.
            whole = "raise e if isinstance(e, Exception) else AssertionError(repr(e))"
            changed = changed.replace("                raise e\n", f"                {whole}\n")
        if changed != text:
            path.write_text(changed)


def _without_missing_imports(text: str) -> str:
    """Imports of what is not there replaced, in place, on as many lines."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        found = list(_replacements(node))
        if not found:
            continue
        assert isinstance(node, ast.Import | ast.ImportFrom)
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        indent = lines[first][: node.col_offset]
        lines[first : last + 1] = [f"{indent}{'; '.join(found)}\n", *["\n"] * (last - first)]
    return "".join(lines)


def _replacements(node: ast.AST) -> Iterator[str]:
    """What stands in the place of an import of DeepSpeed's that fails; nothing for other nodes."""
    if isinstance(node, ast.ImportFrom) and node.level == 0 and str(node.module).partition(".")[0] == "deepspeed":
        module = str(node.module)
        have = [_has(module, alias.name) for alias in node.names]
        if all(have):
            return
        for alias, there in zip(node.names, have, strict=True):
            name = alias.asname or alias.name
            yield (
                f"from {module} import {alias.name} as {name}"
                if there and alias.name != "*"
                else f"{name} = _ds_hf_absent('{module}.{alias.name}')"
                if alias.name != "*"
                else "pass"
            )
    elif isinstance(node, ast.Import):
        gone = [a for a in node.names if a.name.startswith("deepspeed.") and not _has(a.name, None)]
        for alias in node.names if gone else ():
            as_ = f" as {alias.asname}" if alias.asname else ""
            absent = f"{alias.asname} = _ds_hf_absent('{alias.name}')" if alias.asname else "import deepspeed"
            yield absent if alias in gone else f"import {alias.name}{as_}"


def _has(module: str, name: str | None) -> bool:
    try:
        found = importlib.import_module(module)
        if name is not None and name != "*" and not hasattr(found, name):
            importlib.import_module(f"{module}.{name}")
    except ImportError:
        return False
    return True


def run_files(
    checkout: Path, chosen: list[str], *, limit: float, each: float, more: list[str], state_defaults: bool = False
) -> Iterator[tuple[str, Outcome]]:
    """Run the files below ``chosen`` (paths below ``tests``) one after another; each one's name, and what came of it.

    Args:
        limit: seconds for a file. each: seconds for a test that hangs. more: arguments for pytest.
        state_defaults: see the top of the module.
    """
    with tempfile.TemporaryDirectory() as folder:
        tests = Path(folder) / "tests"
        shutil.copytree(checkout / "tests", tests)
        adapt(tests, state_defaults=state_defaults)
        for start in chosen:
            place = tests / start
            for path in sorted(place.rglob("test_*.py")) if place.is_dir() else [place]:
                name = path.relative_to(tests).as_posix()
                yield name, _run_file(tests, name, limit, each, more)


def _run_file(tests: Path, name: str, limit: float, each: float, more: list[str]) -> Outcome:
    reports = tests.parent / "reports.jsonl"
    reports.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "DS_HF_REPORTS": str(reports),
        "DS_UNITTEST_TIMEOUT": str(int(each)),
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(tests), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--maxfail=1000", "-p", "no:cacheprovider", name, *more]
    end = time.monotonic() + limit
    while True:
        code = _run(command, tests, environment, end - time.monotonic())
        text = reports.read_text() if reports.exists() else ""
        open_ = _open(text)
        if code is None or not open_:
            break
        with reports.open("a") as file:  # that one hung, or ended the run; go on with those behind it
            file.write("".join(json.dumps([test, "failed", f"E   ended the run with {code}"]) + "\n" for test in open_))
    outcome = summarise(text)
    if code not in (0, 1, 5):  # 5: nothing was collected
        outcome["unfinished"] += 1
        outcome.reasons.setdefault(
            name, f"the run ended with {code}" if code is not None else f"not ended after {limit:.0f} s"
        )
    return outcome


def _run(command: list[str], folder: Path, environment: dict[str, str], seconds: float) -> int | None:
    """The command's exit code; None if it took longer."""
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            return process.wait(max(seconds, 0))
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process.pid)


def _open(reports: str) -> list[str]:
    """Tests that began and have no outcome."""
    lines = [json.loads(line) for line in reports.splitlines()]
    ended = {name for name, what, _ in lines if what != "started"}
    return [name for name, what, _ in lines if what == "started" and name not in ended]


def _end(group: int) -> None:
    """Processes that a test left: all of the session that was begun for it."""
    try:
        os.killpg(group, 9)
    except ProcessLookupError:
        return


def summarise(reports: str) -> Outcome:
    """Of the lines that a run wrote: ``[test, outcome, text of the failure]``."""
    outcome = Outcome()
    for line in reports.splitlines():
        name, what, text = json.loads(line)
        if what == "started":
            continue
        outcome[_kind(name, text) if what == "failed" else what] += 1
        if what == "failed":
            outcome.reasons[name.partition("::")[2] or name] = _reason(text)
    return outcome


def _kind(name: str, text: str) -> str:
    """Of a failed test."""
    for kind, pattern in _SAID.items():
        if pattern.search(text):
            return kind
    return next((kind for kind, pattern in known() if pattern.search(name)), "failed")


@functools.cache
def known() -> list[tuple[str, re.Pattern[str]]]:
    """Of each line of ``deepspeed_tests.txt`` the kind, and the pattern of names."""
    lines = [line.partition("#")[0].split() for line in KNOWN.read_text().splitlines()]
    return [(line[0], re.compile(line[1])) for line in lines if line]


def _reason(text: str) -> str:
    """The line of a failure that says most."""
    said = re.findall(r"^E\s+(\S.*)$", text, re.M) or [line for line in text.splitlines() if line.strip()][-1:]
    faults = [line for line in said if re.match(r"1\. /", line)]  # of a ConfigError
    named = [line for line in said if re.match(r"[\w.]*(Error|Exception|Exit|Timeout)\b", line)]
    return (faults or named or said or ["?"])[-1][:240]


def _counts(outcome: Outcome) -> str:
    return ", ".join(f"{outcome[kind]} {kind}" for kind in _KINDS if outcome[kind]) or "nothing"


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder of DeepSpeed's sources")
    parser.add_argument("chosen", nargs="+", help="files or folders below its tests")
    parser.add_argument("--limit", type=float, default=600, help="seconds for a file")
    parser.add_argument("--each", type=float, default=60, help="seconds for a test that hangs")
    parser.add_argument("--json", type=Path, help="where to write all reasons")
    parser.add_argument("--state-defaults", action="store_true", help="files of stage 3 say DeepSpeed's default")
    parser.add_argument("--pytest", default="", help="arguments for pytest")
    args = parser.parse_args(arguments)
    total, texts = Outcome(), dict[str, Any]()
    for name, outcome in run_files(
        args.checkout,
        args.chosen,
        limit=args.limit,
        each=args.each,
        more=args.pytest.split(),
        state_defaults=args.state_defaults,
    ):
        print(f"{name}: {_counts(outcome)}", flush=True)
        for test, reason in outcome.reasons.items():
            if not _ABSENT.search(reason):
                print(f"  {test}\n      {reason}", flush=True)
        total.update(outcome)
        texts[name] = {**outcome, "reasons": outcome.reasons}
        if args.json:
            args.json.write_text(json.dumps(texts, indent=1) + "\n")
    public = total["passed"] + total["failed"] + total["choice"]
    share = f", {total['passed'] / public:.1%} of public behaviour" if public else ""
    print(f"all: {_counts(total)}{share}")


if __name__ == "__main__":
    main()
