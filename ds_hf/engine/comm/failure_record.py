"""A worker's last exception, written where torch's elastic agent looks for it.

torchrun names a file in TORCHELASTIC_ERROR_FILE and shows what is in it when the worker fails; torch fills it for
functions decorated with ``@record``, which scripts rarely have. The format is torch's. Where ds_hf's launcher shows
what is recorded (it names the file once more in ``TOLD_BY_LAUNCHER``) the process does not print it as well.

A wrong configuration is not a fault of the code: its traceback shows only the script's own lines, and only the first
process of each host prints it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from ds_hf.errors import ConfigError

__all__ = ["record_failures"]

TOLD_BY_LAUNCHER = "DS_HF_LAUNCH_TELLS"

Hook = Callable[[type[BaseException], BaseException, "TracebackType | None"], object]


@functools.cache
def record_failures() -> None:
    """Record uncaught exceptions from now on, in a process that an elastic agent started; once."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        sys.excepthook = _recording(os.environ["TORCHELASTIC_ERROR_FILE"], os.getpid(), sys.excepthook)


def _recording(path: str, pid: int, then: Hook) -> Hook:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> object:
        if os.getpid() == pid and issubclass(kind, Exception) and not os.path.exists(path):
            wrong = issubclass(kind, ConfigError)
            text = _of_script(error, trace) if wrong else "".join(traceback.format_exception(kind, error, trace))
            extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
            with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
                json.dump({"message": {"message": f"{kind.__name__}: {error}", "extraInfo": extra}}, file)
            if os.environ.get(TOLD_BY_LAUNCHER) == path and os.path.exists(path):
                return None
            if wrong and os.path.exists(path):
                if os.environ.get("LOCAL_RANK", "0") == "0":
                    sys.stderr.write(text)
                return None
        return then(kind, error, trace)

    return hook


def _of_script(error: BaseException, trace: TracebackType | None) -> str:
    """A traceback without the lines of ds_hf and of what called it from inside of a library."""
    own, libraries = (
        str(Path(__file__).parents[2]),
        (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"),
    )
    frames = [
        frame
        for frame in traceback.extract_tb(trace)
        if not frame.filename.startswith(own) and not any(part in frame.filename for part in libraries)
    ]
    head = ["Traceback (of the script alone):\n", *traceback.format_list(frames)] if frames else []
    return "".join([*head, *traceback.format_exception_only(type(error), error)])
