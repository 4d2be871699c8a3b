"""The CUDA kernels compile for every combination of dtypes, and spill no registers; and how compiling works.

No GPU is needed: NVRTC where it is installed, else nvcc.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_hf.engine.ops import cuda, cuda_build, cuda_lamb, cuda_launch
from tests.helpers import cubin

ARCHS = ["sm_80", "sm_90", "sm_100"]
F32, BF16, F16, NONE, LOW = range(5)
MOMENTS = {"Adam": 2, "Lion": 1, "Adagrad": 1, "Sgd": 1}
TUNINGS = cuda_launch.Tunings()
LAMB = ["lamb.cu", "lamb_fused.cu", "lamb_stream.cu"]
USUAL = (F32, BF16, F32, BF16)  # param, grad, moments, out

needs_compiler = pytest.mark.skipif(cubin.compiler() is None, reason="neither NVRTC nor nvcc is here")


def update(rule: str, param: int, grad: int, moment: int, out: int, stochastic: bool = False) -> str:
    dtypes = (param, grad, out, *[moment] * MOMENTS[rule])
    own = (("DS_RULE", rule), ("DS_STOCHASTIC", int(stochastic)), ("DS_AFTER", int(not stochastic)))
    return cuda_build.program_text("update.cu", cuda_launch.macros_of(TUNINGS.update, own, dtypes))


def lamb(source: str, arch: str, param: int, grad: int, moment: int, out: int) -> str:
    dtypes = (param, grad, out, moment, moment)
    tunings = cuda_launch.tunings_of(int(arch.removeprefix("sm_")) // 10)
    macros = {
        "lamb.cu": cuda_launch.macros_of(tunings.lamb, (), dtypes),
        "lamb_fused.cu": cuda_lamb._fused_macros(tunings.lamb_fused, dtypes),
        "lamb_stream.cu": cuda_lamb._stream_macros(tunings.lamb_stream, dtypes),
    }
    return cuda_build.program_text(source, macros[source])


def norm(dtype: int) -> str:
    return cuda_build.program_text("norm.cu", cuda._norm_macros(TUNINGS.norm, dtype))


def total(parts: int, out: int, before: int) -> str:
    tuning = cuda._norm_tuning(TUNINGS.sum, parts)
    return cuda_build.program_text("sum.cu", cuda._sum_macros(tuning, parts, out, before))


def check(programs: list[str], arch: str, local_nbytes: int = 8) -> None:
    """All compile, and no thread needs more local memory, which is what registers are spilled to; eight bytes are what
    the slow path of a division keeps where it meets a denormal."""
    with ThreadPoolExecutor(2) as pool:
        for code in pool.map(lambda text: cubin.compiled(text, arch), programs):
            frames = cubin.frame_nbytes(code)
            assert frames
            assert max(frames.values()) <= local_nbytes, frames


def some(dtypes: Iterable[tuple[Any, ...]], arch: str) -> list[tuple[Any, ...]]:
    """Every combination for one architecture; for others every fifth, which have each dtype in each place."""
    return list(dtypes)[:: 1 if arch == "sm_90" else 5]


@needs_compiler
@pytest.mark.parametrize("arch", ARCHS)
def test_main_kernels(arch: str) -> None:
    split = update("Adam", BF16, BF16, F32, LOW)
    check([update("Adam", *USUAL), split, norm(BF16), total(BF16, BF16, NONE), lamb("lamb.cu", arch, *USUAL)], arch)


@needs_compiler
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("source", ["lamb_fused.cu", "lamb_stream.cu"])
def test_lamb_of_one_launch_spills_nothing(source: str, arch: str) -> None:
    check([lamb(source, arch, *USUAL)], arch, local_nbytes=0)


@needs_compiler
def test_other_kernels() -> None:
    programs = [update(rule, F32, F32, F32, BF16) for rule in ("Lion", "Adagrad", "Sgd")]
    programs += [update("Adam", BF16, F16, BF16, NONE, True), update("Adam", BF16, F32, F32, F16, True)]
    check([*programs, norm(F32), norm(F16), total(F32, F32, F32), total(F16, F32, F16)], "sm_90")


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("rule", MOMENTS)
def test_every_update(rule: str, arch: str) -> None:
    dtypes = product((F32, BF16), (F32, BF16, F16), (F32, BF16), (F32, BF16, F16, NONE), (False, True))
    check([update(rule, *combination) for combination in some(dtypes, arch)], arch, local_nbytes=32)


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("source", LAMB)
def test_every_lamb(source: str, arch: str) -> None:
    dtypes = product((F32, BF16), (F32, BF16, F16), (F32, BF16), (F32, BF16, F16, NONE))
    check([lamb(source, arch, *combination) for combination in some(dtypes, arch)], arch, local_nbytes=32)


def test_program_has_no_includes() -> None:
    text = update("Adam", F32, F32, F32, NONE)
    assert "#include" not in text
    assert text.count("struct Table {") == 1


@pytest.mark.parametrize("capacity", [60, 500])
def test_table_fits_in_parameters(capacity: int) -> None:
    nbytes = cuda_launch.ctypes.sizeof(cuda_launch.table_type(capacity))
    assert nbytes == 128 + 64 * capacity
    assert nbytes <= (4096 - 32 if capacity == 60 else 32764)


@pytest.fixture
def compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Texts compiled so far, by a compiler that returns them; the cache is ``tmp_path``."""
    texts: list[str] = []

    def compile_cubin(text: str, arch: str) -> bytes:
        texts.append(text)
        return f"{text} for {arch}".encode()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cuda_build, "compile_cubin", compile_cubin)
    monkeypatch.setattr(cuda_build, "compiler_version", lambda: "13.0")
    return texts


def test_cache_keeps_kernels_by_what_they_depend_on(compilations: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda_build.cubin("a", "sm_90") == cuda_build.cubin("a", "sm_90") == b"a for sm_90"
    assert compilations == ["a"]
    assert cuda_build.cubin("a", "sm_80") == b"a for sm_80"
    cuda_build.cubin("b", "sm_90")
    monkeypatch.setattr(cuda_build, "compiler_version", lambda: "13.1")
    cuda_build.cubin("a", "sm_90")
    assert compilations == ["a", "a", "b", "a"]
    assert len(list(cuda_build.cache_folder().iterdir())) == 4  # and no temporary files


@pytest.mark.parametrize("damage", [b"", b"short", b"\0" * 100])
def test_damaged_cache_is_replaced(compilations: list[str], damage: bytes) -> None:
    cuda_build.cubin("a", "sm_90")
    (file,) = cuda_build.cache_folder().iterdir()
    file.write_bytes(damage)
    assert cuda_build.cubin("a", "sm_90") == cuda_build.cubin("a", "sm_90") == b"a for sm_90"
    assert len(compilations) == 2


def test_cache_that_cannot_be_written(compilations: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cuda_build.cubin("a", "sm_90") == cuda_build.cubin("a", "sm_90") == b"a for sm_90"
    assert len(compilations) == 2


@pytest.fixture
def _nothing_remembered() -> Iterator[None]:
    caches = (cuda._has_cuda, cuda._failure)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.usefixtures("_nothing_remembered")
@pytest.mark.parametrize("place", ["file", "cubin", "ds_hf", "root", "above"])
def test_what_others_could_have_written_is_not_taken(
    compilations: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    root = tmp_path / "above" / "root"
    root.mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(root))
    cuda_build.cubin("text", "sm_90")
    cuda_build.cubin("text", "sm_90")
    assert len(compilations) == 1
    (file,) = cuda_build.cache_folder().iterdir()
    before = file.read_bytes()
    assert file.stat().st_mode & 0o077 == 0
    shared = {"file": file, "cubin": file.parent, "ds_hf": file.parents[1], "root": root, "above": root.parent}[place]
    for mode in (0o775, 0o707, 0o777):
        shared.chmod(mode)
        compilations.clear()
        cuda_build.cubin("text", "sm_90")
        assert len(compilations) == 1
        if place == "file":
            assert file.stat().st_mode & 0o022 == 0  # made anew
        else:
            assert file.read_bytes() == before
    shared.chmod(0o1777 if place in ("root", "above") else 0o755)
    compilations.clear()
    cuda_build.cubin("text", "sm_90")
    assert not compilations


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
@pytest.mark.parametrize("place", ["file", "cubin"])
def test_what_others_own_is_not_taken(
    compilations: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cuda_build.cubin("text", "sm_90")
    (file,) = cuda_build.cache_folder().iterdir()
    os.chown(file if place == "file" else file.parent, 65534, 65534)
    cuda_build.cubin("text", "sm_90")
    assert len(compilations) == 2
    assert "chmod" not in cuda_build._fault_of(file.parent)  # which only the other user could


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.torch.cuda, "is_available", lambda: False)
    assert cuda.available() == "no CUDA device"
    cuda._has_cuda.cache_clear()
    monkeypatch.setattr(cuda.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda_build, "missing", lambda: "cuda-core is not installed")
    assert cuda.available() == "cuda-core is not installed"


@pytest.mark.usefixtures("_nothing_remembered")
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("6: NVRTC_ERROR, log:\n\nprogram(3): error: what is this\n  code\n", "NVRTC failed: program(3): error: what"),
        ("the CUDA driver answered X", "kernels do not load: the CUDA driver answered X"),
        ("", "kernels do not load: RuntimeError"),
    ],
)
def test_kernels_that_do_not_load(monkeypatch: pytest.MonkeyPatch, text: str, reason: str) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(cuda.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda_build, "missing", lambda: None)
    monkeypatch.setattr(cuda_launch, "gpu", lambda _: SimpleNamespace(kernel=fails, tunings=TUNINGS))
    got = cuda.available()
    assert got is not None
    assert got.startswith(reason)
    assert "\n" not in got


def test_unsupported() -> None:
    assert cuda.unsupported("adam_", cuda.torch.float32, cuda.torch.bfloat16) is None
    assert "float64" in (cuda.unsupported("adam_", cuda.torch.float64) or "")
