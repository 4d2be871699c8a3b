"""The site in a browser: no page is wider than its window, breaks a word, cuts something off or complains."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.helpers.browser import PICTURES, VIEWS, chromium, needs_chromium

ROOT = Path(__file__).parents[1]
PICTURED = {"", "how-to/nan/", "api/", "compatibility/", "configuration/", "configuration/zero_optimization/",
            "configuration/compression_training/", "performance/", "measurements/", "design/zero/"}  # fmt: skip


class _Handler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """A page that is closed before all of it has come is no error."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str]]]:
    """The address of the built site, and its pages."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    pages = sorted(path.parent.relative_to(folder).as_posix() + "/" for path in folder.rglob("index.html"))
    with _Server(("127.0.0.1", 0), partial(_Handler, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", ["" if page == "./" else page for page in pages]
        server.shutdown()


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_pages_can_be_read(site: tuple[str, list[str]], width: int, scheme: str) -> None:
    address, pages = site
    assert set(pages) > PICTURED
    PICTURES.mkdir(parents=True, exist_ok=True)
    found = []
    with chromium() as browser:
        for page in pages if scheme == "light" else sorted(PICTURED):  # what differs in the dark are colours
            name = page.strip("/").replace("/", "-") or "home"
            picture = PICTURES / f"site-{name}-{width}-{scheme}.png" if page in PICTURED else None
            found += [f"{page}: {fault}" for fault in browser.look(address + page, width, scheme, picture)]
    assert not found, "\n".join(found)
