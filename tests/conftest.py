"""Settings that every test wants; what several tests share lies in ``tests/helpers``."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.patience import PATIENCE
from tests.helpers.rank_server import offer, take
from tests.helpers.slices import Slice

LONGEST_S = 3600.0  # of one test, below the time after which the process ends
MANY_OBJECTS = 30_000

gc.disable()  # a fifth of the time of importing the test modules

# Before anything imports torch or transformers, and inherited by every process that a test starts.
for name, value in {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
}.items():
    os.environ.setdefault(name, value)
# Processes that are woken up don't interrupt the one that woke them: on two busy cores, it mostly held a lock that they
# want. All that tests start inherits it: ranks of a small model had a fifth as many switches, a fifteenth less time.
with contextlib.suppress(AttributeError, OSError):  # Linux alone has it
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
# Unbuffered, a line of one rank is several writes, and lines of ranks that share a pipe mix.
os.environ.pop("PYTHONUNBUFFERED", None)

# What a shell starts with "&" ignores Ctrl-C, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

with contextlib.suppress(ModuleNotFoundError):  # the machines with GPUs lack it
    from hypothesis import settings

    # Tests don't time, as two cores are shared by many processes, nor do they fail by luck.
    settings.register_profile("ds_hf", deadline=None, derandomize=True)
    settings.load_profile("ds_hf")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("slices")
    group.addoption("--slice", metavar="N/OF", help="of the chosen tests this part, for example 3/7")
    group.addoption("--minutes", type=float, default=12.0, help="after which a slice begins no further test")


def pytest_configure(config: pytest.Config) -> None:
    if not wants_gpus(config.args, config.getoption("markexpr")):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks; workers and all that tests start inherit it
    given: dict[str, Any] = getattr(config, "workerinput", {})
    if "ranks" in given:
        take(given["ranks"])
    chosen = config.getoption("slice", None)  # None also where this file is loaded after the options were read
    if chosen:
        try:
            config.pluginmanager.register(Slice(chosen, config.getoption("minutes")))
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Of pytest-xdist, before a worker starts."""
    node.workerinput["ranks"] = offer()


def wants_gpus(arguments: list[str], marks: str) -> bool:
    """Whether a run's tests are those of GPUs: others train on the CPU, and also pass on a machine that has GPUs."""
    return marks == "gpu" or any("gpu" in Path(argument.split("::")[0]).parts for argument in arguments)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Limits of single tests get their patience; those marked ``gpu`` are skipped where there is no accelerator."""
    for item in items:
        limit = item.get_closest_marker("timeout")
        if limit is not None:
            item.add_marker(pytest.mark.timeout(min(limit.args[0] * PATIENCE, LONGEST_S)), append=False)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Libraries, test modules and items stay to the end: nothing is looked for among them, now or later."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """So do what a file's tests have imported: a collection took a second and a half by the end of a run."""
    yield
    if nextitem is not None and nextitem.path != item.path and len(gc.get_objects(2)) > MANY_OBJECTS:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _no_process_group_stays() -> Iterator[None]:
    """Engines made in the test's own process join a process group: the next test begins without one."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
