"""Imports the modules of a run's tests where its workers and their ranks are forked from: each of them has them then.

A file that cannot be imported is left out; the workers tell.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from typing import Any

import pytest

__all__ = ["ARGUMENTS", "MODULE"]

ARGUMENTS = "DS_HF_TEST_ARGUMENTS"  # of the run, as JSON
MODULE = "tests.helpers.collected"


class _Imported(pytest.Module):
    """A test module of which nothing but its import is wanted."""

    def collect(self) -> list[Any]:
        try:
            assert self.obj
        except BaseException:  # pytest leaves what it has imported in part, and a worker would take that for the module
            for name, module in list(sys.modules.items()):
                if getattr(module, "__file__", None) == str(self.path):
                    del sys.modules[name]
            raise
        return []


class _ImportAll:
    @staticmethod
    def pytest_pycollect_makemodule(module_path: Any, parent: Any) -> _Imported:
        imported: _Imported = _Imported.from_parent(parent, path=module_path)
        return imported


if ARGUMENTS in os.environ:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        arguments = ["--collect-only", "-pno:cacheprovider", *json.loads(os.environ.pop(ARGUMENTS))]
        pytest.main(arguments, plugins=[_ImportAll()])
