"""From ``csrc/cuda`` to machine code: sources, NVRTC through cuda-core, and a cache on disk.

A kernel is compiled for just the dtypes and flags of a call, which are macros in front of its source. The cache is
``$XDG_CACHE_HOME/ds_hf/cubin`` (or ``~/.cache``); a file is named by everything its contents depend on and begins with
their digest. A cache that cannot be written, or a file that is not what it should be, costs time and is never an error.
Invariant: what is given to a GPU was compiled here, or written by this user or root where no other user can write.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import Any

from ds_hf.host import user_cache
from ds_hf.log import warn_once
from ds_hf.regular_files import open_regular

__all__ = ["Macros", "compile_cubin", "cubin", "missing", "program_text"]

Macros = tuple[tuple[str, str | int], ...]

INSTALL = "pip install cuda-core cuda-bindings"
STANDARD = "c++17"
_INCLUDE = re.compile(r'#include "([\w.]+)"\n')
_DIGEST = hashlib.sha256().digest_size


def missing() -> str | None:
    """What kernels are compiled with and is not installed, or ``None``."""
    for module, package in (("cuda.bindings.driver", "cuda-bindings"), ("cuda.core", "cuda-core")):
        try:
            importlib.import_module(module)
        except ImportError as error:
            return f"{package} cannot be imported ({error}): {INSTALL}"
    return None


def program_text(source: str, macros: Macros) -> str:
    """The whole text of a program: macros, then ``source`` with its own headers in place of the includes."""
    lines = "".join(f"#define {name} {value}\n" for name, value in macros)
    return lines + _flattened(source)


@functools.cache
def _flattened(source: str) -> str:
    seen: set[str] = set()

    def read(name: str) -> str:
        seen.add(name)
        text = (_folder() / name).read_text(encoding="utf-8").replace("#pragma once\n", "")
        return _INCLUDE.sub(lambda match: "" if match[1] in seen else read(match[1]), text)

    return read(source)


def _folder() -> Path:
    """Where the sources are: in the wheel beside this file, in a checkout in ``csrc``."""
    here = Path(__file__).resolve()
    candidates = (here.parent / "_cuda", here.parents[3] / "csrc" / "cuda")
    for folder in candidates:
        if (folder / "core.cuh").is_file():
            return folder
    raise FileNotFoundError(f"the sources of the CUDA kernels are not in {' or '.join(map(str, candidates))}")


def cubin(text: str, arch: str) -> bytes:
    """Machine code of the program ``text`` for ``arch`` (``"sm_90"``), from the cache where it has it."""
    key = hashlib.sha256("\0".join([text, arch, STANDARD, compiler_version()]).encode()).hexdigest()
    folder = cache_folder()
    fault = _fault_of(folder)
    if fault:
        warn_once(f"compiled kernels are not kept: {fault} set XDG_CACHE_HOME to a folder of your own")
        return compile_cubin(text, arch)
    path = folder / f"{key}.cubin"
    code = _read(path)
    if code is None:
        code = compile_cubin(text, arch)
        _write(path, code)
    return code


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    return user_cache() / "cubin"


def compile_cubin(text: str, arch: str, **options: Any) -> bytes:
    """Compile without the cache.

    Raises:
        Exception: of cuda-core, with the compiler's log in its text.
    """
    core = _core()
    program = core.Program(text, "c++", core.ProgramOptions(std=STANDARD, arch=arch, **options))
    try:
        return bytes(program.compile("cubin").code)
    finally:
        program.close()


def _core() -> Any:
    """``cuda.core``; its releases before 0.5 had everything in ``cuda.core.experimental``."""
    core = importlib.import_module("cuda.core")
    return core if hasattr(core, "Program") else importlib.import_module("cuda.core.experimental")


@functools.cache
def compiler_version() -> str:
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    return ".".join(map(str, nvrtc.nvrtcVersion()[1:]))


def _fault_of(folder: Path) -> str:
    """Which folder on the way to the cache another user can write into, and what else helps than to have another
    cache; empty where there is none.

    In a sticky one, such as /tmp, others can make files and not replace those of this user. A folder that is not there
    yet will be made by this user.
    """
    place = Path(os.path.realpath(folder))
    for path in (place, *place.parents):
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{path} cannot be looked at ({error.strerror}):"
        if status.st_uid not in (0, os.geteuid()):
            return f"{path} belongs to another user, who could change them:"
        if status.st_mode & 0o022 and (path == place or not status.st_mode & stat.S_ISVTX):
            return f"{path} can be written by other users, who could change them: take that right away (chmod go-w), or"
    return ""


def _read(path: Path) -> bytes | None:
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
                return None  # left by others when they still could: it is replaced
            content = file.read()
    except OSError:
        return None
    digest, code = content[:_DIGEST], content[_DIGEST:]
    return code if hashlib.sha256(code).digest() == digest else None


def _write(path: Path, code: bytes) -> None:
    """Written beside and renamed: ranks on one machine compile the same kernels at the same time."""
    with contextlib.suppress(OSError):
        for folder in reversed([each for each in (path.parent, *path.parent.parents) if not each.exists()]):
            folder.mkdir(mode=0o700, exist_ok=True)  # whatever the umask
        handle, name = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            os.replace(name, path)
        except OSError:
            os.unlink(name)
