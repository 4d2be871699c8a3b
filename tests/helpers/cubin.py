"""Compiling kernels where there is no GPU, and what a cubin says of the kernels in it."""

from __future__ import annotations

import contextlib
import functools
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ds_hf.engine.ops import cuda_build

# Of the sections .nv.info: attributes with one number for each kernel.
_FRAME_SIZE, _REGISTERS = 0x11, 0x2F
_SYMBOLS, _VALUE_WITH_SIZE = 2, 4


@functools.cache
def compiler() -> str | None:
    """``"nvrtc"`` or ``"nvcc"``, whichever is here, in this order."""
    if cuda_build.missing() is None:
        with contextlib.suppress(Exception):  # cuda-core without NVRTC's library
            cuda_build.compile_cubin("", "sm_80")
            return "nvrtc"
    return "nvcc" if shutil.which("nvcc") else None


def compiled(text: str, arch: str) -> bytes:
    """The cubin of a program."""
    if compiler() == "nvrtc":
        return cuda_build.compile_cubin(text, arch)
    with tempfile.TemporaryDirectory() as folder:
        source, result = Path(folder) / "program.cu", Path(folder) / "program.cubin"
        source.write_text(text)
        options = ["-cubin", f"-arch={arch}", f"-std={cuda_build.STANDARD}", "-Werror", "all-warnings"]
        done = subprocess.run(["nvcc", *options, source, "-o", result], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return result.read_bytes()


def frame_nbytes(cubin: bytes) -> dict[str, int]:
    """For each kernel, the local memory that a thread needs: not 0 where registers were spilled."""
    return _per_kernel(cubin, _FRAME_SIZE)


def registers(cubin: bytes) -> dict[str, int]:
    """For each kernel, the registers of a thread."""
    return _per_kernel(cubin, _REGISTERS)


def _per_kernel(cubin: bytes, wanted: int) -> dict[str, int]:
    names = _symbols(cubin)
    found: dict[str, int] = {}
    for name, data in _sections(cubin):
        at = 0
        while name == ".nv.info" and at < len(data):
            form, attribute, size = struct.unpack_from("<BBH", data, at)
            at += 4
            if form != _VALUE_WITH_SIZE:
                continue
            if attribute == wanted:
                symbol, value = struct.unpack_from("<II", data, at)
                found[names[symbol]] = value
            at += size
    return found


def _symbols(cubin: bytes) -> list[str]:
    sections = list(_sections(cubin))
    table, strings = dict(sections)[".symtab"], dict(sections)[".strtab"]
    return [_string(strings, struct.unpack_from("<I", table, at)[0]) for at in range(0, len(table), 24)]


def _sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and contents of each section of a 64-bit ELF file."""
    (begin,) = struct.unpack_from("<Q", cubin, 0x28)
    nbytes, count, names_at = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, begin + index * nbytes) for index in range(count)]
    names = cubin[headers[names_at][4] : headers[names_at][4] + headers[names_at][5]]
    for name, kind, _, _, offset, size in headers:
        yield _string(names, name), b"" if kind == 8 else cubin[offset : offset + size]


def _string(table: bytes, at: int) -> str:
    return table[at : table.index(b"\0", at)].decode()
