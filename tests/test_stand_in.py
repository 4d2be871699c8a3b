"""``import ds_hf as deepspeed``: the modules of the stand-in, found below ``ds_hf``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.interpreter import python
from tests.helpers.once import made_once

_EARLY = """
import json, sys
import ds_hf
print(json.dumps(sorted(name for name in sys.modules if name.startswith(("ds_hf", "deepspeed", "torch")))))
"""

# What a script has of `deepspeed`, by either name; `served` is the module that `ds_hf` took it from.
_SAME = """
import importlib, json, pkgutil, sys
import ds_hf as by_ours
import ds_hf.zero
from ds_hf.ops.adam import FusedAdam
from ds_hf.runtime.zero.partition_parameters import ZeroParamStatus
from ds_hf.checkpoint.utils import clone_tensors_for_torch_save
from ds_hf.checkpoint import DeepSpeedCheckpoint, ds_to_universal
from ds_hf.compression.compress import init_compression, redundancy_clean
from ds_hf.launcher.runner import fetch_hostfile
from ds_hf.inference.config import DeepSpeedInferenceConfig, load_inference_config
import deepspeed as by_theirs
from deepspeed.ops import adam
different = [name for name in by_theirs.__all__ if getattr(by_ours, name) is not getattr(by_theirs, name)]
modules = [info.name for info in pkgutil.walk_packages(by_theirs.__path__, "deepspeed.")]
others = []
for name in modules:
    if name.split(".")[-1].startswith("_") or name == "deepspeed.env_report":
        continue
    ours = importlib.import_module("ds_hf." + name.partition(".")[2])
    if ours is not importlib.import_module(name):
        others.append(name)
loaded = [module for name, module in sys.modules.items() if name.startswith(("ds_hf", "deepspeed"))]
files = [module.__file__ for module in {id(m): m for m in loaded}.values() if getattr(module, "__file__", None)]
print(json.dumps({
    "different": different, "modules": len(modules), "others": others,
    "twice": sorted({file for file in files if files.count(file) > 1}),
    "zero": by_ours.zero is by_theirs.zero is ds_hf.zero is sys.modules["ds_hf.zero"],
    "class": adam.FusedAdam is FusedAdam, "spec": adam.__spec__.name,
    "version": by_ours.__version__ == importlib.import_module("ds_hf").__version__,
}))
"""

_REFUSED = """
import json, sys
import ds_hf as deepspeed
told = {}
for line in ("deepspeed.nonsense", "import ds_hf.nonsense", "import ds_hf.linear", "import ds_hf.ops.transformer",
             "from ds_hf.checkpoint import nonsense", "deepspeed.autotune", "deepspeed._private",
             "import deepspeed.nothing"):
    try:
        exec(line)
    except (AttributeError, ImportError) as error:
        told[line] = [type(error).__name__, str(error)]
import deepspeed.runtime
served = deepspeed.comm.__name__
from ds_hf.ops.adam import FusedAdam
print(json.dumps({"told": told, "served": served, "adam": FusedAdam.__module__}))
"""

ROOMS = ("checkpoint", "compression", "inference", "launcher")  # called like modules of DeepSpeed
_REAL = _REFUSED.replace("import deepspeed.runtime\n", "")


_EACH_ROOM = """
import importlib, json, os, pkgutil, sys  # each room is imported in a fork
assert not {"deepspeed", *(f"ds_hf.{name}" for name in sys.argv[1:])} & set(sys.modules)
told = {}
for name in sys.argv[1:]:
    end, begin = os.pipe()
    if not os.fork():
        room = importlib.import_module(f"ds_hf.{name}")
        before = "deepspeed" in sys.modules
        asked = [hasattr(room, info.name) for info in pkgutil.iter_modules(room.__path__)]
        os.write(begin, json.dumps(["deepspeed" in sys.modules and not before, len(asked)]).encode())
        os._exit(0)
    os.close(begin)
    told[name] = json.loads(os.read(end, 1000))
print(json.dumps(told))
"""

_IN_THREADS = """
import importlib, json, threading
import deepspeed.utils  # a package that imports its own module deadlocks threads by itself
found = []
names = ["ds_hf.utils.z3_leaf_module", "deepspeed.utils.z3_leaf_module"] * 2
threads = [threading.Thread(target=lambda name=name: found.append(importlib.import_module(name))) for name in names]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps([len(found), len(set(map(id, found)))]))
"""

# Runs each code in a fork of an interpreter that has loaded other libraries, and nothing of ds_hf.
_SERVER = """
import json, os, sys
codes, folder, rooms = json.load(sys.stdin)

def answer(name, words=(), path=()):
    end, begin = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(begin, 1)
        sys.argv, sys.path[1:1] = ["-c", *words], path
        exec(compile(codes[name], name, "exec"), {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    os.close(begin)
    with open(end) as said:
        text = said.read()
    assert os.waitpid(child, 0)[1] == 0, name
    return json.loads(text.splitlines()[-1])

told = {"early": answer("early")}
import torch, torch._dynamo, torch.distributed.checkpoint, torch.distributed.fsdp, torch.export
assert not [name for name in sys.modules if name.startswith(("ds_hf", "deepspeed"))]
told |= {name: answer(name) for name in ("same", "refused", "threads")}
told |= {"real": answer("real", path=[folder]), "rooms": answer("rooms", words=rooms)}
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each code says, by name."""
    found: dict[str, Any] = made_once(tmp_path_factory, "stand_in", lambda: _told(tmp_path_factory.mktemp("real")))
    return found


def _told(folder: Path) -> Any:
    (folder / "deepspeed").mkdir()
    (folder / "deepspeed" / "__init__.py").write_text("__version__ = '0.18.9'\n")
    codes = {
        "early": _EARLY,
        "same": _SAME,
        "refused": _REFUSED,
        "real": _REAL,
        "rooms": _EACH_ROOM,
        "threads": _IN_THREADS,
    }
    environment = {**os.environ, "PYTHONPATH": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    given = json.dumps([codes, str(folder), ROOMS])
    done = subprocess.run([sys.executable, "-c", _SERVER], env=environment, capture_output=True, text=True, input=given)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_ds_hf_imports_nothing(told: dict[str, Any]) -> None:
    assert told["early"] == ["ds_hf"]


def test_every_name_and_module_is_the_one_below_deepspeed(told: dict[str, Any]) -> None:
    found = told["same"]
    # The rooms that are called like DeepSpeed's modules stay what they are.
    assert found["different"] == ["checkpoint", "inference", "launcher"]
    inside = {"deepspeed.compression.compress", "deepspeed.inference.config", "deepspeed.inference.engine"}
    assert set(found["others"]) == inside | {f"deepspeed.{room}" for room in ROOMS}
    assert found["modules"] > 120
    assert found["twice"] == []
    assert (found["zero"], found["class"], found["version"]) == (True, True, True)
    assert found["spec"] == "deepspeed.ops.adam"


def test_what_is_not_there_is_told(told: dict[str, Any]) -> None:
    found = told["refused"]
    told = found["told"]
    assert found["served"] == "deepspeed.comm"
    absent = "in DeepSpeed or in ds_hf, which serves the name deepspeed here"
    assert told["deepspeed.nonsense"] == ["AttributeError", f"there is no deepspeed.nonsense {absent}"]
    assert told["import ds_hf.nonsense"] == ["ModuleNotFoundError", f"there is no deepspeed.nonsense {absent}"]
    assert "Take LoRA of peft instead" in told["import ds_hf.linear"][1]
    assert "does not provide deepspeed.ops.transformer (yet)" in told["import ds_hf.ops.transformer"][1]
    assert f"there is no deepspeed.checkpoint.nonsense {absent}" in told["from ds_hf.checkpoint import nonsense"][1]
    assert told["deepspeed.autotune"] == [
        "AttributeError",
        "module 'ds_hf' has no attribute 'autotune' before it is imported",
    ]
    assert told["deepspeed._private"] == ["AttributeError", "module 'ds_hf' has no attribute '_private'"]


def test_beside_a_real_deepspeed_the_modules_are_still_those_of_ds_hf(told: dict[str, Any]) -> None:
    found = told["real"]
    assert found["served"] == "ds_hf.compat.deepspeed.comm"
    assert found["adam"] == "ds_hf.engine.optim.adam"
    # What the real one lacks is not ours to explain.
    assert found["told"]["import deepspeed.nothing"] == ["ModuleNotFoundError", "No module named 'deepspeed.nothing'"]
    assert found["told"]["import ds_hf.nonsense"] == ["ModuleNotFoundError", "No module named 'ds_hf.nonsense'"]


def test_rooms_answer_without_the_stand_in_for_their_own_modules(told: dict[str, Any]) -> None:
    assert set(told["rooms"]) == set(ROOMS)
    for room, (loaded, asked) in told["rooms"].items():
        assert not loaded, room
        assert asked > 3, room


def test_threads_may_import_both_names_at_once(told: dict[str, Any]) -> None:
    """Each waited for the other: Python holds its lock of all imports while a finder looks."""
    assert told["threads"] == [4, 1]


def test_a_second_name_runs_as_a_script() -> None:
    done = python("-m", "ds_hf.env_report")
    assert (done.returncode, "served by ds_hf" in done.stdout) == (0, True), done.stderr[-500:]
