"""Files that documents, comments and messages name exist: moving one changes what speaks of it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXTS = ("ds_hf/**/*.py", "benchmarks/*.py", "benchmarks/*.sh", "csrc/**/*.*", "docs/**/*.md", "*.md", "Makefile")
SOURCES = (".py", ".md", ".sh", ".cu", ".cuh", ".cpp", ".h")
ENDS = "|".join(map(re.escape, SOURCES))
NAMED = re.compile(rf"(?<![\w/.*-])(?:[\w.-]+/)+[\w-]+(?:{ENDS})\b")
HISTORY = "CHANGELOG.md"  # names what was there


def folders_of(files: set[str]) -> set[str]:
    """Names of the folders that are this repository's own: a path that begins with another one is another's."""
    own = {path.split("/", i + 1)[i] for path in files for i in range(path.count("/"))}
    return own - {path.name for path in (ROOT / "ds_hf/compat/deepspeed").rglob("*") if path.is_dir()} - {"hf"}


def test_named_files_exist() -> None:
    files = {
        path.relative_to(ROOT).as_posix()
        for room in ("ds_hf", "benchmarks", "csrc", "docs", "tests", "examples", "schemas")
        for path in (ROOT / room).rglob("*")
        if path.suffix in SOURCES
    }
    own, missing, seen = folders_of(files), [], 0
    for text in sorted({path for pattern in TEXTS for path in ROOT.glob(pattern) if path.is_file()}):
        if text.name == HISTORY or "_lib" in text.parts:
            continue
        for number, line in enumerate(text.read_text("utf-8", errors="replace").splitlines(), 1):
            for name in NAMED.findall(line):
                if name.split("/")[0] in own:
                    seen += 1
                    if name not in files and not any(path.endswith("/" + name) for path in files):
                        missing.append(f"{text.relative_to(ROOT)}:{number}: {name}")
    assert seen > 100, "the pattern finds what is named"
    assert not missing, "\n".join(missing)


def test_paths_in_the_table_of_changes_lead_somewhere() -> None:
    """They are of the repository or of ``ds_hf/engine``, as the page says, and of nothing else."""
    page = (ROOT / "docs/design/changing.md").read_text("utf-8")
    named = {name for name in re.findall(r"`([\w.]+(?:/[\w.…]+)+|\w+\.py)`", page) if not name.startswith("test_")}
    assert len(named) > 60
    roots = (ROOT, ROOT / "ds_hf" / "engine")
    assert not [name for name in named if not any((root / name.removesuffix("/…")).exists() for root in roots)]


def test_rooms_name_their_chapter() -> None:
    """A package of ``ds_hf`` or ``ds_hf/engine`` says in its docstring which chapter of the design is about it."""
    folders = [*ROOT.glob("ds_hf/*/__init__.py"), *ROOT.glob("ds_hf/engine/*/__init__.py")]
    named = {
        path: re.findall(r"docs/design/(\w+)\.md", ast.get_docstring(ast.parse(path.read_text())) or "")
        for path in folders
    }
    assert not [str(path) for path, chapters in named.items() if len(chapters) != 1]
    chapters = {path.stem: path.read_text().count("\n") for path in ROOT.glob("docs/design/*.md")}
    assert {chapter for each in named.values() for chapter in each} == chapters.keys() - {"index", "changing"}
    assert not {name: lines for name, lines in chapters.items() if lines > 150}, "a chapter has at most 150 lines"
