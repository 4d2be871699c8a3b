"""Code blocks of our Markdown pages, for tests that run what the pages show, and the words of our reports."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str = "") -> list[str]:
    """The fenced blocks of ``page`` in ``language``; "" are the plain ones, which hold commands."""
    return [text for name, text in _BLOCK.findall(page.read_text("utf-8")) if name == language]


def without_breaks(html: str) -> str:
    """A report without the places where its words may break."""
    return re.sub(r'<span class="word">(.*?)</span>', r"\1", re.sub(r"<wbr[^>]*>", "", html))


def commands(page: Path) -> list[str]:
    """Every command of the plain blocks, without its comment; a trailing backslash joins two lines."""
    lines = "\n".join(blocks(page)).replace("\\\n", " ").splitlines()
    bare = [re.sub(r"\s+#.*$", "", line).strip() for line in lines]
    return [" ".join(line.split()) for line in bare if line and not line.startswith("#")]
