"""The script that lies in each checkpoint: the parts of this package that read ours, put together into one file.

Invariant: it runs where there is no ds_hf, and no name stands in it twice.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

__all__ = ["standalone_script"]

_PARTS = (  # in the order in which they import one another
    "regular_files", "dtypes", "checkpoint/format", "checkpoint/boxes", "checkpoint/checksum", "checkpoint/tensors",
    "checkpoint/places", "checkpoint/manifest", "checkpoint/holds", "checkpoint/aside", "checkpoint/zero_to_fp32",
)  # fmt: skip
_INSTEAD = '''
try:
    from ds_hf.errors import CheckpointError, CheckpointPlaceError
    from ds_hf.host import rank_cores
    from ds_hf.printable import printable
except ImportError:  # alone in a checkpoint, on a machine without ds_hf

    class CheckpointError(RuntimeError):
        """A checkpoint is missing, incomplete, damaged or does not fit the model."""

    class CheckpointPlaceError(CheckpointError, ValueError):
        """What was given as the folder or the tag of a checkpoint cannot be one."""

    def rank_cores():
        """The cores of this process."""
        return os.sched_getaffinity(0)

    def printable(text):
        """``str(text)`` without what steers a terminal."""
        return "".join(c if c.isprintable() or c == "\\n" else c.encode("unicode_escape").decode() for c in str(text))
'''


@functools.cache
def standalone_script() -> str:
    """The text of ``zero_to_fp32.py``; it reads checkpoints of ds_hf alone."""
    package = Path(__file__).parents[1]
    imports: set[str] = set()
    names: dict[str, set[str]] = {}  # of each module from which they are imported
    bodies, title = [], ""
    for part in _PARTS:
        text = (package / f"{part}.py").read_text(encoding="utf-8")
        lines, (doc, *nodes) = text.splitlines(), ast.parse(text).body
        title = "\n".join(lines[: doc.end_lineno])
        for node in reversed(nodes):
            if isinstance(node, ast.Import):
                imports.add(ast.unparse(node))
            elif isinstance(node, ast.ImportFrom) and not str(node.module).startswith("ds_hf."):
                names.setdefault(str(node.module), set()).update(map(ast.unparse, node.names))
            if isinstance(node, ast.Import | ast.ImportFrom) or lines[node.lineno - 1].startswith("__all__ ="):
                del lines[node.lineno - 1 : node.end_lineno]
        bodies.append("\n".join(lines[doc.end_lineno :]).strip("\n"))
    first, *others = (f"from {module} import {', '.join(sorted(found))}" for module, found in sorted(names.items()))
    head = ["#!/usr/bin/env python\n" + title, first, "\n".join([*sorted(imports), *others]), _INSTEAD.strip("\n")]
    return "\n\n".join([*head, *bodies[:-1], "open_whole = open_own", bodies[-1]]) + "\n"
