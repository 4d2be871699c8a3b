"""Writing files of a checkpoint: what a failure says."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

from ds_hf.checkpoint.files import write_bytes, write_text
from tests.helpers.distributed import run_distributed


def _too_large(folder: Path) -> list[str]:
    """What a full disk does as well: the write itself fails, and knows no name."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    said = []
    for write, content in ((write_bytes, b"x" * 5000), (write_text, "x" * 5000)):
        try:
            write(folder / write.__name__, content)  # type: ignore[operator]
        except OSError as error:
            said.append(str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return said


def test_a_write_that_fails_names_the_file(tmp_path: Path) -> None:
    assert run_distributed(_too_large, 1, tmp_path, backend=None)[0] == [
        f"[Errno 27] File too large: '{tmp_path}/{name}'" for name in ("write_bytes", "write_text")
    ]
