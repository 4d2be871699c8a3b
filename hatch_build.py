"""What hatchling does besides copying: the name ``deepspeed`` (docs/design/names.md), the C++ library, CUDA sources.

Owns three generated things. A ``.pth`` appends ``ds_hf/compat`` to sys.path, and the ``deepspeed`` stand-in gets a
RECORD. An editable install needs neither: ``dev-mode-dirs`` in pyproject.toml names the folders, and without a RECORD
pip refuses to uninstall ``deepspeed`` instead of deleting sources of the checkout. The library of ``csrc/`` is built by
CMake, into the wheel or, for an editable install, into the checkout. Where that is not possible the install succeeds
without it, and ``BUILD.txt`` in its place says why; ds_hf then computes in torch.

Hatchling and not scikit-build-core makes the wheel because the latter leaves out every folder called ``*.dist-info``
and runs code at Python's start-up in editable installs. What finds and drives CMake is scikit-build-core's.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMPAT = "ds_hf/compat"
# Files of paths run no code when Python starts; the late name keeps the folder behind everybody else's.
PTH_NAME = "zz_ds_hf.pth"
LIBRARIES = "ds_hf/engine/ops/_lib"
CUDA_SOURCES = "ds_hf/engine/ops/_cuda"  # compiled at first use; a checkout has them in csrc/cuda
REPORT = "BUILD.txt"
CMAKE = ">=3.18"
REINSTALL = "install g++ and reinstall ds_hf"


class NoLibraryError(Exception):
    """Why there is no library, in one line for the user."""


class DsHfHook(BuildHookInterface[Any]):
    """Adds the generated files to a standard wheel, and the library to any."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """CMake, and what it drives, from the package index where the system has none."""
        if _compiler() is None:
            return []
        try:
            _cmake()
            missing = []
        except (ImportError, NoLibraryError):
            missing = ["cmake" + CMAKE]
        return missing if shutil.which("ninja") or shutil.which("make") else [*missing, "ninja"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ds_hf_build_"))
        files = self._library()
        if version != "standard":
            _replace(Path(self.root) / LIBRARIES, files)
            return
        include = build_data["force_include"]
        include.update({str(path): f"{LIBRARIES}/{path.name}" for path in files})
        include[str(Path(self.root) / "csrc" / "cuda")] = CUDA_SOURCES
        if len(files) > 1:
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"  # no Python's ABI: ctypes loads it
        self._deepspeed_name(include)

    def _deepspeed_name(self, include: dict[str, str]) -> None:
        compat = Path(self.root) / COMPAT
        (dist_info,) = compat.glob("deepspeed-*.dist-info")
        package = [path for path in compat.glob("deepspeed/**/*") if path.suffix in (".py", ".txt")]
        owned = [*package, *(path for path in dist_info.iterdir() if path.name != "RECORD")]
        names = [*sorted(path.relative_to(compat).as_posix() for path in owned), f"{dist_info.name}/RECORD"]
        include[self._write("RECORD", "".join(f"{name},,\n" for name in names))] = f"{COMPAT}/{dist_info.name}/RECORD"
        include[self._write(PTH_NAME, COMPAT + "\n")] = PTH_NAME

    def _library(self) -> list[Path]:
        """The report and, if they could be built, the libraries."""
        built = self.folder / "built"
        try:
            report = _build(Path(self.root) / "csrc", self.folder / "cmake", built)
        except NoLibraryError as error:
            report = str(error)
            self.app.display_warning(report)
            shutil.rmtree(built, ignore_errors=True)
        built.mkdir(exist_ok=True)
        (built / REPORT).write_text(report + "\n", encoding="utf-8")
        return sorted(built.iterdir())

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, name: str, text: str) -> str:
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        return str(path)


def _compiler() -> str | None:
    """What CMake will use, or ``None``."""
    chosen = os.environ.get("CXX")
    candidates = [shlex.split(chosen)[0]] if chosen else ["c++", "g++", "clang++"]
    return next((path for name in candidates if (path := shutil.which(name))), None)


def _cmake() -> Any:
    from packaging.specifiers import SpecifierSet
    from scikit_build_core.cmake import CMake
    from scikit_build_core.errors import CMakeNotFoundError

    try:
        return CMake.default_search(version=SpecifierSet(CMAKE), env=os.environ)
    except CMakeNotFoundError:
        reason = f"no CMake {CMAKE} when ds_hf was installed: pip install cmake and reinstall ds_hf"
        raise NoLibraryError(reason) from None


def _build(source: Path, work: Path, target: Path) -> str:
    """Configure, build, install into ``target``; returns what with.

    Raises:
        NoLibraryError: if the library cannot be had, whatever the reason.
    """
    if not sys.platform.startswith("linux"):
        raise NoLibraryError(f"the C++ library is for Linux, not {sys.platform}")
    compiler = _compiler()
    if compiler is None:
        raise NoLibraryError(f"no C++ compiler when ds_hf was installed: {REINSTALL}")
    try:
        from scikit_build_core.cmake import CMaker

        cmake = _cmake()
        maker = CMaker(cmake, source_dir=source, build_dir=work, build_type="Release")
        generator = ["-GNinja"] if shutil.which("ninja") and "CMAKE_GENERATOR" not in os.environ else []
        maker.configure(cmake_args=[*generator, *shlex.split(os.environ.get("CMAKE_ARGS", ""))])
        maker.build(["--parallel", str(os.cpu_count() or 1)])
        maker.install(target)
    except NoLibraryError:
        raise
    except Exception as error:  # an install without the library is better than none
        how = f"{type(error).__name__}: {error}".splitlines()[0]
        raise NoLibraryError(
            f"the C++ library could not be built with {compiler} when ds_hf was installed ({how}; pip install -v shows "
            f"all): {REINSTALL}"
        ) from error
    return f"built with {compiler} and CMake {cmake.version}"


def _replace(folder: Path, files: list[Path]) -> None:
    """Make ``files`` all that ``folder`` holds; processes that have an old library open keep it."""
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.name not in {file.name for file in files}:
            path.unlink()
    for file in files:
        moving = folder / f".{file.name}.{os.getpid()}"
        shutil.copyfile(file, moving)
        moving.replace(folder / file.name)
