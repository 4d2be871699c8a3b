"""What a process makes once, made where ranks are forked from: each of them has it already.

Nothing here starts a thread or computes with torch, as what is forked afterwards has no threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from ds_hf.checkpoint.standalone import standalone_script
from ds_hf.config import load_config
from ds_hf.engine.ops import cpu

load_config({"train_batch_size": 1}, world_size=1)
standalone_script()
get_checkpoint_conversion_mapping("llama")  # compiles thousands of expressions
cpu.available()  # opens the library


def _in_huge_pages() -> None:
    """Half of what a fork costs is the table of the pages: in huge pages it is short. Elsewhere nothing changes."""
    collapse = 25  # MADV_COLLAPSE: at once, and whatever the machine has said of huge pages (Linux 6.1)
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, _, _, inode, *name = line.split()
        if access == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            begin, end = (int(address, 16) for address in span.split("-"))
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), collapse)


gc.enable()
gc.freeze()
with contextlib.suppress(OSError, AttributeError):
    _in_huge_pages()
