"""Chromium for tests of pages: a picture at each width, light and dark, and what a reader would stumble over.

The machine's own Chromium, driven by Playwright, neither of which is a dependency: `make test-slow` installs both. The
pictures are in ``build/pictures``.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.patience import patient

__all__ = ["VIEWS", "Chromium", "chromium", "faults_of", "needs_chromium"]

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(
    PROGRAM is None or find_spec("playwright") is None, reason="no Chromium, or no playwright: make test-slow gets both"
)
VIEWS = [(width, scheme) for width in (420, 1400) for scheme in ("light", "dark")]  # pixels, of CSS
PICTURES = Path(__file__).parents[2] / "build" / "pictures"
OFFLINE = ["--disable-gpu", "--disable-quic", "--disable-sync", "--disable-component-update"]

# A word is letters and digits: keys may give way between their parts, at dots and underscores.
LOOK = r"""() => {
  const faults = [], range = document.createRange(), root = document.documentElement;
  const words = element => element.textContent.trim().replace(/\s+/g, ' ').slice(0, 80);
  const told = (what, element) => faults.push(`${what}: ${words(element)}`);
  const shown = element => element.checkVisibility({opacityProperty: true, visibilityProperty: true})
    && element.getBoundingClientRect().right > 0;  // a drawer waits at the left
  if (root.scrollWidth > root.clientWidth)
    faults.push(`the page is ${root.scrollWidth} wide, the window ${root.clientWidth}`);
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = texts.nextNode(); text; text = texts.nextNode()) {
    const parent = text.parentElement;
    if (parent.closest('svg, script, style') || !shown(parent)) continue;
    for (const word of text.data.matchAll(/[\p{L}\p{N}]{2,}/gu)) {
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      const lines = new Set([...range.getClientRects()].filter(box => box.width).map(box => Math.round(box.top)));
      if (lines.size > 1) told(`"${word[0]}" is broken`, parent);
    }
  }
  for (const element of document.body.querySelectorAll('*')) {
    const style = getComputedStyle(element);
    if (['hidden', 'clip'].includes(style.overflowX) && style.textOverflow !== 'ellipsis' && shown(element)
        && element.clientWidth > 1 && element.scrollWidth > element.clientWidth + 1) told('cut off', element);
  }
  for (const chart of document.querySelectorAll('svg.chart')) {
    const box = chart.getBoundingClientRect();
    if (chart.querySelectorAll('rect, path, circle').length < 3 || box.width < 100 || box.height < 40)
      told(`a chart of ${box.width} x ${box.height} with nothing in it`, chart);
  }
  return faults;
}"""


class Chromium:
    """A browser that runs; ``chromium`` starts one."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser

    def look(self, address: str, width: int, scheme: str, picture: Path | None = None) -> list[str]:
        """Open a page and return its faults: words broken inside, what is wider than the window or cut off, charts
        with nothing in them, and messages in the console.

        Args:
            address: ``file://`` or ``http://localhost``.
            width: of the window, in CSS pixels. scheme: "light" or "dark", what the reader's system prefers.
            picture: where the whole page goes, as PNG.
        """
        page = self._browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        try:
            page.set_default_timeout(patient(30) * 1000)
            said: list[str] = []
            page.on("console", lambda message: said.append(f"console: {message.text}"))
            page.on("pageerror", lambda error: said.append(f"error: {error}"))
            page.goto(address)
            faults = said + page.evaluate(LOOK)
            if picture is not None:
                page.screenshot(path=picture, full_page=True)
            return faults
        finally:
            page.close()


@contextmanager
def chromium() -> Iterator[Chromium]:
    """A Chromium without a window, which ends with the context."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=PROGRAM, args=OFFLINE, timeout=patient(30) * 1000)
        try:
            yield Chromium(browser)
        finally:
            browser.close()


def faults_of(page: Path, name: str) -> list[str]:
    """The faults of a file in every view; the pictures are called ``name``."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    found = []
    with chromium() as browser:
        for width, scheme in VIEWS:
            picture = PICTURES / f"{name}-{width}-{scheme}.png"
            found += [f"{width} {scheme}: {fault}" for fault in browser.look(page.as_uri(), width, scheme, picture)]
    return found
