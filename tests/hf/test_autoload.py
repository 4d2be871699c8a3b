"""The hooks get in at every order of imports, cost nothing before, and keep away from a real DeepSpeed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

BAD = "TrainingArguments(output_dir='x', deepspeed={'zero_optimization': {'stge': 2}})"
TRY = f"""
try:
    {BAD}
except Exception as error:
    print(type(error).__name__, "distributed:", torch.distributed.is_initialized())
"""


def python(code: str, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **(env or {})},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "imports",
    [
        "from transformers import TrainingArguments; import torch",  # torch is imported from within training_args
        pytest.param(
            "import accelerate; from transformers import Trainer, TrainingArguments; import torch",
            marks=pytest.mark.slow,
        ),
        pytest.param("import torch; from transformers import TrainingArguments", marks=pytest.mark.slow),
        pytest.param(
            "import transformers; transformers.Trainer; from transformers import TrainingArguments; import torch",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_arguments_are_checked_whatever_is_imported_first(imports: str) -> None:
    assert python(imports + TRY) == "ConfigError distributed: False"


@pytest.mark.parametrize(
    "imports",
    [
        pytest.param("from transformers import TrainingArguments; import torch, deepspeed", marks=pytest.mark.slow),
        pytest.param("import deepspeed, torch; from transformers import TrainingArguments", marks=pytest.mark.slow),
    ],
)
def test_import_of_deepspeed_installs_the_hooks_where_torch_does_not(imports: str) -> None:
    assert python(imports + TRY, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}) == "ConfigError distributed: False"


def test_import_torch_loads_no_engine_and_no_client() -> None:
    names = ["transformers", "accelerate", "deepspeed", "ds_hf.engine.engine", "ds_hf.config", "jsonschema"]
    code = f"import torch, sys; print('ds_hf.hf.autoload' in sys.modules, [n for n in {names} if n in sys.modules])"
    assert python(code) == "True []"


@pytest.mark.slow
def test_install_twice_wraps_once() -> None:
    code = (
        "from transformers import TrainingArguments as T; from ds_hf.hf.autoload import install; install(); install()\n"
        "import wrapt; inner = T.__dict__['__post_init__'].__wrapped__; print(isinstance(inner, wrapt.FunctionWrapper))"
    )
    assert python(code) == "False"


@pytest.mark.slow
def test_hooks_keep_away_from_a_real_deepspeed(tmp_path: Path) -> None:
    package = tmp_path / "deepspeed"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '0.19.8'\n")
    code = (
        "from transformers import TrainingArguments as T; import wrapt\n"
        "from ds_hf.hf.autoload import serves_deepspeed\n"
        "print(serves_deepspeed(), isinstance(T.__dict__['__post_init__'], wrapt.FunctionWrapper))"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert python(code, {"PYTHONPATH": path}) == "False False"
    assert python(code) == "True True"


@pytest.mark.slow
def test_a_hook_that_does_not_fit_warns_and_lets_the_import_go_on() -> None:
    code = (
        "import torch, warnings, logging, io\n"
        "stream = io.StringIO(); logging.getLogger('ds_hf').addHandler(logging.StreamHandler(stream))\n"
        "import ds_hf.hf.training_args as ours\n"
        "def fails(module): raise KeyError('renamed')\n"
        "ours.wrap_training_args = fails\n"
        "from transformers import TrainingArguments\n"
        "import transformers; from ds_hf.hf.autoload import unfit_hooks; print(unfit_hooks())\n"
        "said = f'does not fit transformers {transformers.__version__}: wrap_training_args has hooks that are off'\n"
        "print(said in stream.getvalue())"
    )
    assert python(code) == "{'transformers.training_args': \"KeyError: 'renamed'\"}\nTrue"


@pytest.mark.slow
def test_a_name_that_is_gone_takes_no_other_hook_with_it() -> None:
    code = (
        "import torch, logging, io\n"
        "stream = io.StringIO(); logging.getLogger('ds_hf').addHandler(logging.StreamHandler(stream))\n"
        "import wrapt, accelerate.accelerator as there\n"
        "from ds_hf.hf.autoload import _guarded, unfit_hooks\n"
        "del there.Accelerator.no_sync\n"
        "_guarded('accelerate.accelerator', 'ds_hf.hf.accelerate_state', 'wrap_accelerator')(there)\n"
        "twice = there.Accelerator.__dict__['save_state'].__wrapped__\n"
        "print(unfit_hooks(), isinstance(twice, wrapt.FunctionWrapper))\n"
        "print('there is no accelerate.accelerator.Accelerator.no_sync' in stream.getvalue())"
    )
    gone = "AttributeError: there is no accelerate.accelerator.Accelerator.no_sync"
    assert python(code) == f"{{'accelerate.accelerator': '{gone}'}} True\nTrue"


@pytest.mark.slow
def test_who_imports_a_real_deepspeed_is_told_once(tmp_path: Path) -> None:
    package = tmp_path / "deepspeed"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '0.19.8'\n")
    code = (
        "import torch, logging, io, multiprocessing, os, sys\n"
        "stream = io.StringIO(); logging.getLogger('ds_hf').addHandler(logging.StreamHandler(stream))\n"
        "import deepspeed, deepspeed, importlib; importlib.import_module('deepspeed')\n"
        "lines = stream.getvalue().splitlines(); print(len(lines), *lines)"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    said = python(code, {"PYTHONPATH": path})
    assert said.startswith(f"1 the real DeepSpeed at {package} still serves the name deepspeed")
    assert "pip uninstall deepspeed" in said
    assert python(code, {"PYTHONPATH": path, "RANK": "1"}) == "0"
    assert (
        python(code.replace("import deepspeed, deepspeed, importlib; importlib.import_module('deepspeed')", "")) == "0"
    )
    assert python(code) == "0"
