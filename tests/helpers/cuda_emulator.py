"""Runs the kernels of ``csrc/cuda`` on the host, thread by thread: a stand-in for ``cuda_launch.Machine``.

The sources are compiled by g++ behind ``cuda_emulator.hpp``. What depends on the GPU's memory model or its speed is not
seen here; indices, tails, alignment, formulas, barriers and the host's side of each call are.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ds_hf.engine.ops import cuda_launch
from ds_hf.engine.ops.cuda_build import Macros, program_text
from ds_hf.engine.ops.cuda_launch import COUNTERS, Counters, Tuning, Tunings

HEADER = Path(__file__).with_name("cuda_emulator.hpp")
SMALL = Tuning(threads=64, blocks=2)

# The kernels of each source, and how their arguments are passed on.
_KERNELS = {
    "update.cu": {"update": "*(Table*)a[0]"},
    "norm.cu": {
        "gradient_norm": "*(Table*)a[0], *(u64**)a[1], *(float**)a[2]",
        "clip_control": "*(Table*)a[0], *(const float**)a[1], *(float**)a[2]",
    },
    "sum.cu": {"sum_parts": "*(Table*)a[0]"},
    "blocks.cu": {"to_blocks": "*(Blocks*)a[0]", "from_blocks": "*(Blocks*)a[0]"},
    "rows.cu": {
        **dict.fromkeys(("add_up", "gate"), "*(Rows*)a[0]"),
        **dict.fromkeys(("weigh", "weigh_backward"), "*(Weighed*)a[0]"),
        "gate_backward": "*(Gate*)a[0]",
    },
    "routes.cu": {
        **dict.fromkeys(("count_items", "group_items"), "*(Routes*)a[0]"),
        **dict.fromkeys(("label", "unlabel", "pick", "unpick"), "*(Labels*)a[0]"),
    },
    "lamb.cu": {
        "lamb_moments": "*(Table*)a[0]",
        "lamb_norms": "*(Table*)a[0], *(u32*)a[1], *(float**)a[2]",
        "lamb_apply": "*(Table*)a[0], *(const float**)a[1]",
    },
    "lamb_stream.cu": {"lamb_stream": "*(Table*)a[0], *(Lamb*)a[1], *(u64**)a[2]"},
    "lamb_fused.cu": {"lamb_fused": "*(Table*)a[0], *(double2**)a[1], *(float**)a[2], *(u32**)a[3]"},
}
_WRAPPER = """
extern "C" int emulate_{name}(void** a, unsigned grid, unsigned threads, size_t shared) {{
  return emulated::run(grid, threads, shared, [](void** a) {{ {name}({arguments}); }}, a);
}}
"""


def missing() -> str | None:
    """Why kernels cannot be emulated here."""
    if platform.machine() != "x86_64":
        return f"the emulator converts fp16 with instructions of x86, and this is {platform.machine()}"
    return None if shutil.which("g++") else "g++ is not installed"


@dataclass
class Emulator:
    """A GPU with few multiprocessors, and few threads a block, so that small tensors reach every case.

    Attributes:
        folder: for the libraries.
        launches: kernels launched so far, with their grids.
        early: launches may say that they are.
    """

    folder: Path
    multiprocessors: int = 2
    shared_nbytes: int = 20 << 10
    tunings: Tunings = field(
        default_factory=lambda: Tunings(
            update=SMALL,
            norm=SMALL,
            lamb=SMALL,
            lamb_fused=Tuning(threads=64, blocks=2, groups=1),
            lamb_stream=Tuning(threads=64, blocks=2, groups=1),
        )
    )
    launches: list[tuple[str, int]] = field(default_factory=list)
    early: bool = False
    _counters: Counters = field(default_factory=lambda: Counters.with_messages(2000, "cpu"))
    _kernels: dict[tuple[str, str, Macros], Any] = field(default_factory=dict)

    def kernel(self, source: str, name: str, macros: Macros) -> Any:
        key = (source, name, macros)
        if key not in self._kernels:
            self._kernels[key] = self._compiled(*key)
        return self._kernels[key]

    def launch(
        self,
        kernel: Any,
        grid: int,
        threads: int,
        arguments: Sequence[Any],
        shared_nbytes: int = 0,
        cooperative: bool = False,
        early: bool = False,
    ) -> None:
        name, function = kernel
        self.launches.append((name, grid))
        assert grid > 0
        if cooperative:
            assert grid <= self.multiprocessors * self.resident(kernel, threads, shared_nbytes)
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        assert function(pointers, grid, threads, ctypes.c_size_t(shared_nbytes)) == 0, f"{name} does not end"

    def starts_early(self) -> bool:
        return self.early

    def counters(self, messages: int = 0) -> Counters:
        assert not self._counters.memory[:COUNTERS].any()
        assert messages <= self._counters.messages
        return self._counters.next()

    def resident(self, kernel: Any, threads: int, shared_nbytes: int) -> int:
        return min(self.shared_nbytes // max(shared_nbytes, 1), 3)

    def _compiled(self, source: str, name: str, macros: Macros) -> Any:
        calls = [_WRAPPER.format(name=each, arguments=arguments) for each, arguments in _KERNELS[source].items()]
        text = program_text(source, macros) + "".join(calls)
        digest = hashlib.sha256((text + HEADER.read_text()).encode()).hexdigest()
        library = self.folder / f"{digest}.so"
        if not library.exists():
            code = self.folder / f"{digest}.{os.getpid()}.cpp"  # workers of one test run share the folder
            code.write_text(text)
            made = code.with_suffix(".so")
            options = "-std=c++17 -O0 -fPIC -shared -mf16c -Wall -Wno-unknown-pragmas -Wno-maybe-uninitialized"
            subprocess.run(["g++", *options.split(), "-include", HEADER, code, "-o", made], check=True)
            os.replace(made, library)
        return name, getattr(ctypes.CDLL(str(library)), f"emulate_{name}")


def emulate(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let launches of this test run on the host; libraries are shared by the workers of a run."""
    if reason := missing():
        pytest.skip(reason)
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "emulator"
    folder.mkdir(exist_ok=True)
    machine = Emulator(folder)
    monkeypatch.setattr(cuda_launch, "machine_of", lambda _: machine)
