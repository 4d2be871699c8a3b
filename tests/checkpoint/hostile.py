"""Mutations of a valid checkpoint, and a process with little memory that loads what became of it.

``Victim`` starts the process once; it answers each folder with what happened, and how long and how much memory it took.
A mutation is *damage* where the checkpoint's own sums are as they were, and a *lie* where whoever made it left the
checksum of the manifest out and corrected sizes: damage must be found, a lie must do no harm.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import multiprocessing
import os
import random
import resource
import signal
import struct
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.helpers.distributed import PRELOAD

MEMORY = 200 * 2**20
SECONDS = 5.0
TENSORS = "rank_00000.safetensors"
COMMON = "mp_rank_00_model_states.pt"
RANK = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
ODD = [
    None, True, -1, 0, 1, 7, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**18, 10**40, 0.5, 1e308, float("nan"),
    float("inf"), "", "x", "../x", "/etc/passwd", "\0", "\x1b[2J", "a" * 5000, [], {}, [[]], {"a": {}},
]  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What a load or a conversion came to: "same", "different", "refused" or another exception's name."""

    kind: str
    message: str
    seconds: float
    nbytes: int


# -- mutations ------------------------------------------------------------------------------------------------------


def mutated(content: Any, source: random.Random) -> Any:
    """A copy of JSON content with one value somewhere replaced, removed, doubled or moved."""
    content = copy.deepcopy(content)
    node, parent, key = content, None, None
    while isinstance(node, dict | list) and node and (parent is None or source.random() < 0.85):
        parent, key = node, source.choice(list(node) if isinstance(node, dict) else range(len(node)))
        node = parent[key]
    assert parent is not None
    kind = source.randrange(5)
    if kind == 0:
        del parent[key]
    elif kind == 1 or (kind == 4 and not isinstance(parent, dict)):
        parent[key] = source.choice(ODD)
    elif kind == 2 and isinstance(node, int):
        parent[key] = node + source.choice([-1, 1, 2**31, 2**63])
    elif kind == 4:
        parent[source.choice(["x", "../x", "\n", *list(parent)])] = node
    else:
        parent[key] = [node, node]
    return content


def flipped(content: bytes, source: random.Random, low: int = 0, high: int | None = None) -> bytes:
    """One byte changed, a stretch removed or put in, or the end cut off."""
    high = len(content) if high is None else high
    place = source.randrange(low, high)
    kind = source.randrange(6)
    if kind < 3:
        return content[:place] + bytes([content[place] ^ (1 << source.randrange(8))]) + content[place + 1 :]
    if kind == 3:
        return content[:place]
    if kind == 4:
        return content[:place] + source.randbytes(source.randrange(1, 9)) + content[place:]
    return content[:place] + source.randbytes(8) + content[place + 8 :]


def header_of(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def safetensors(header: Any, data: bytes, length: int | None = None) -> bytes:
    """A safetensors file, which may lie about the length of its header."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def archive(content: bytes, change: Callable[[bytes], bytes], **options: Any) -> bytes:
    """An archive of ``torch.save`` with another pickle in it, and true sums over that."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(made, "w", **options) as new:
        for info in old.infolist():
            record = old.read(info)
            new.writestr(info.filename, change(record) if info.filename.endswith("/data.pkl") else record)
    return made.getvalue()


def edit_manifest(folder: Path, change: Callable[[Any], Any]) -> None:
    """Lie: change the manifest and leave its checksum out."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    content.pop("checksum", None)
    path.write_text(json.dumps(change(content)))


def replace_file(folder: Path, name: str, content: bytes) -> None:
    """Lie: put another file in and let the manifest have its size, and no sum of it."""
    (folder / name).write_bytes(content)

    def change(manifest: Any) -> Any:
        manifest["files"][name] = len(content)
        manifest.get("checksums", {}).pop(name, None)
        return manifest

    edit_manifest(folder, change)


# -- the process ----------------------------------------------------------------------------------------------------


class Victim:
    """A process that loads or converts checkpoints and may take ``MEMORY`` more than it has after a good one.

    It is forked from the server of ranks, which has imported torch.
    """

    def __init__(self, original: Path) -> None:
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._pipe, theirs = context.Pipe(duplex=True)
        self.process = context.Process(target=_serve, args=(original, list(sys.path), theirs))
        self.process.start()
        theirs.close()
        assert self._answer()["ready"]

    def _answer(self) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = self._pipe.recv()
        except EOFError:
            self.process.join(200)
            raise AssertionError(f"the process died with status {self.process.exitcode}") from None
        return answer

    def ask(self, what: str, folder: Path) -> Outcome:
        """``what`` is "load" or "convert"."""
        self._pipe.send([what, folder])
        return Outcome(**self._answer())

    def close(self) -> None:
        self._pipe.close()
        self.process.join(200)


def limit_memory(nbytes: int) -> None:
    """Allow this process ``nbytes`` of addresses more than it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + nbytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _serve(original: Path, path: list[str], pipe: Connection) -> None:
    """Answer questions until the other end of ``pipe`` is closed."""
    sys.path[:] = path
    import logging
    import shutil
    import tempfile

    import torch
    from safetensors.torch import load_file

    from ds_hf.checkpoint.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
    from ds_hf.errors import CheckpointError
    from tests.engine.checkpoint.workload import build, config, differences, states

    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    engine = build(config(3, "bf16"), seed=1)

    def load(folder: Path) -> dict[str, Any]:
        _, client_state = engine.load_checkpoint(folder)
        try:
            found = states(engine)
        except KeyError as error:  # a moment has another name now
            return {"states": str(error)}
        return {**found, "client state": client_state, "rng": torch.get_rng_state()}

    def convert(folder: Path) -> dict[str, Any]:
        made = Path(tempfile.mkdtemp(prefix="converted_"))
        try:
            convert_zero_checkpoint_to_fp32_state_dict(folder, made / "model.safetensors")
            return dict(load_file(made / "model.safetensors"))
        finally:
            shutil.rmtree(made)

    actions = {"load": load, "convert": convert}
    expected = {name: action(original) for name, action in actions.items()}
    limit_memory(MEMORY)
    pipe.send({"ready": True})
    while True:
        try:
            name, folder = pipe.recv()
        except EOFError:
            return
        before, start = _resident(), time.process_time()  # other work does not count
        message = ""
        try:
            found = differences(expected[name], actions[name](folder))
            kind, message = ("different", ", ".join(found)) if found else ("same", "")
        except CheckpointError as error:
            kind, message = "refused", str(error)
        except BaseException as error:
            kind, message = type(error).__name__, str(error)
        seconds, nbytes = time.process_time() - start, _resident() - before
        pipe.send({"kind": kind, "message": message[:2000], "seconds": seconds, "nbytes": nbytes})


def killed_at(point: int, write: Callable[[], None]) -> bool:
    """Run it in a process that is killed before a change of its folder; whether it came so far."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def hook(event: str, args: Any) -> None:
            nonlocal count
            if event in ("os.rename", "os.remove", "os.link", "os.rmdir", "os.mkdir") or (
                event == "open" and args[2] & os.O_CREAT
            ):
                count += 1
                if count == point:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        with contextlib.suppress(BaseException):
            write()
            os._exit(0)
        os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0
