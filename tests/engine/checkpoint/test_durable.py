"""A checkpoint is whole or not there: damage is passed over, full disks are seen before, and SIGKILL loses nothing."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ds_hf.checkpoint import commit, holds
from ds_hf.checkpoint.checksum import hexadecimal, sum_of_tensor
from ds_hf.checkpoint.commit import check_space, hidden_beside
from ds_hf.checkpoint.dcp import write_dcp
from ds_hf.checkpoint.deepspeed.write_universal import write_universal
from ds_hf.checkpoint.formats import open_folder
from ds_hf.checkpoint.holds import FolderHold, boot_of, this_writer
from ds_hf.checkpoint.places import find_folder
from ds_hf.checkpoint.verify import verify
from ds_hf.engine.checkpoint import background, contents
from ds_hf.engine.checkpoint.holders import find_holders
from ds_hf.errors import CheckpointError
from ds_hf.printable import size_text
from tests.engine.checkpoint.workload import build, config, differences, engine_of, states, train
from tests.helpers.distributed import PRELOAD, RankSpec, _rank_main, free_port, run_distributed

TENSORS = "rank_00000.safetensors"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1, 2 and 3."""
    folder = tmp_path_factory.mktemp("original")
    with engine_of(config(2)) as engine:
        for step in range(3):
            train(engine, 1, step)
            engine.save_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    built = build(config(3), seed=1)
    yield built
    built.destroy()


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


# -- damage ---------------------------------------------------------------------------------------------------------


def flip(path: Path, place: int = -40) -> None:
    """One bit, in the data of a tensor."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_a_whole_checkpoint_has_no_faults(original: Path) -> None:
    seen: list[tuple[int, int]] = []
    assert verify(original, progress=lambda done, total: seen.append((done, total))) == []
    assert len(seen) >= 3
    assert verify(original / "global_step1") == verify(original, tag="global_step2") == []


@pytest.mark.parametrize("name", [TENSORS, "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"])
def test_every_flipped_bit_is_found(folder: Path, name: str) -> None:
    path = folder / "global_step3" / name
    content = path.read_bytes()
    source = random.Random(5)
    for _ in range(40):
        place = source.randrange(len(content))
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << source.randrange(8)]) + content[place + 1 :])
        (fault,) = verify(folder)[:1]
        assert str(path) in fault
    path.write_bytes(content)
    assert verify(folder) == []


def test_digests_find_what_checksums_cannot(folder: Path) -> None:
    """A file that was exchanged together with its checksum."""
    manifest = folder / "global_step3/manifest.json"
    older = json.loads((folder / "global_step2/manifest.json").read_text())
    shutil.copy(folder / "global_step2" / TENSORS, folder / "global_step3" / TENSORS)
    content = json.loads(manifest.read_text())
    content.pop("checksum", None)  # of the manifest itself
    content["checksums"][TENSORS] = older["checksums"][TENSORS]
    manifest.write_text(json.dumps(content))
    faults = verify(folder)
    assert len(faults) > 20
    assert "embedding.weight (master) does not have the digest" in faults[0]
    with engine_of(config(2)) as engine, pytest.raises(CheckpointError, match="what was restored is not what was"):
        engine.load_checkpoint(folder, tag="global_step3")


def test_verify_tells_of_all_files(folder: Path) -> None:
    place = folder / "global_step3"
    (place / TENSORS).unlink()
    (place / "mp_rank_00_model_states.pt").write_bytes(b"")
    faults = verify(folder)
    assert len(faults) == 2
    assert any("is missing" in fault for fault in faults)
    assert any("has 0 bytes where" in fault for fault in faults)
    assert "holds no checkpoint" in verify(folder / "nothing")[0]


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda place: (place / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda place: _truncate(place / TENSORS), "the checkpoint is damaged"),
        (lambda place: shutil.rmtree(place), "global_step3, which does not exist"),
        (lambda place: (place / TENSORS).write_bytes(bytes((place / TENSORS).stat().st_size)), "cannot be read"),
    ],
)
def test_the_newest_whole_one_is_taken(
    engine: Any, folder: Path, damage: Any, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage(folder / "global_step3")
    with caplog.at_level(logging.WARNING, "ds_hf"):
        loaded, _ = engine.load_checkpoint(folder)
    assert loaded == str(folder / "global_step2")
    assert engine.global_steps == 2
    (text,) = [record.getMessage() for record in caplog.records if "is not loaded" in record.getMessage()]
    assert fault in text
    assert "global_step3" in text
    _truncate(folder / "global_step2" / TENSORS)
    assert engine.load_checkpoint(folder)[0] == str(folder / "global_step1")
    _truncate(folder / "global_step1" / TENSORS)
    with pytest.raises(CheckpointError, match=fault):
        engine.load_checkpoint(folder)


def test_one_asked_for_by_name_is_taken_or_nothing(engine: Any, folder: Path) -> None:
    _truncate(folder / "global_step3" / TENSORS)
    with pytest.raises(CheckpointError, match=r"global_step3.* the checkpoint is damaged"):
        engine.load_checkpoint(folder, tag="global_step3")


@pytest.mark.parametrize("verify", ["digest", "full"])
@pytest.mark.parametrize("name", [TENSORS, "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"])
def test_a_flipped_byte_is_found_before_anything_is_changed(
    folder: Path, caplog: pytest.LogCaptureFixture, name: str, verify: str
) -> None:
    """It names the file, and where no checkpoint was asked for by name the newest whole one is taken."""
    flip(folder / "global_step3" / name)
    with engine_of(config(2, ds_hf={"checkpoint": {"verify": verify}})) as engine:
        before = states(engine)
        for asked in ({"load_dir": folder, "tag": "global_step3"}, {"load_dir": folder / "global_step3"}):
            with pytest.raises(CheckpointError, match=f"global_step3/{name} does not have the checksum"):
                engine.load_checkpoint(**asked)
            assert differences(before, states(engine)) == []
        with caplog.at_level(logging.WARNING, "ds_hf"):
            assert engine.load_checkpoint(folder)[0] == str(folder / "global_step2")
        assert f"{name} does not have the checksum" in caplog.text
        assert engine.global_steps == 2
        before = states(engine)
        flip(folder / "global_step2" / name)
        flip(folder / "global_step1" / name)
        with pytest.raises(CheckpointError, match=f"global_step3/{name} does not have the checksum"):
            engine.load_checkpoint(folder)
        assert differences(before, states(engine)) == []


def _passed_over(folder: Path) -> tuple[str | None, str]:
    with engine_of(config(2)) as engine:
        for step in (1, 2):
            train(engine, 1, step)
            engine.save_checkpoint(folder)
        if engine.axis.rank == 0:
            flip(folder / "global_step2" / "rank_00001.safetensors")
        dist.barrier()
        try:
            engine.load_checkpoint(folder, tag="global_step2")
            said = ""
        except CheckpointError as error:
            said = str(error)
        return engine.load_checkpoint(folder)[0], said


def test_a_flipped_byte_of_one_rank_is_known_to_all(tmp_path: Path) -> None:
    for loaded, said in run_distributed(_passed_over, 2, tmp_path, timeout=60):
        assert loaded == str(tmp_path / "global_step1")
        assert "global_step2/rank_00001.safetensors does not have the checksum" in said


# -- room -----------------------------------------------------------------------------------------------------------

Usage = namedtuple("Usage", "total used free")


def test_a_full_disk_is_seen_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(config(2)) as engine:
        train(engine, 1)
        engine.save_checkpoint(tmp_path, tag="same", client_state={"which": 1})
        size = (tmp_path / "same" / TENSORS).stat().st_size
        asked: list[Path] = []

        def little(path: Path) -> Usage:
            asked.append(path)
            return Usage(10**9, 10**9 - size, size)

        with monkeypatch.context() as patch:
            patch.setattr(commit.shutil, "disk_usage", little)
            with pytest.raises(CheckpointError) as caught:
                engine.save_checkpoint(tmp_path, tag="same", client_state={"which": 2})
        text = str(caught.value)
        assert str(tmp_path) in text
        assert f"{size_text(size)} free" in text
        assert re.search(r"needs \S+ \S+, \S+ \S+ more", text)
        assert asked == [tmp_path]
        assert engine.load_checkpoint(tmp_path)[1] == {"which": 1}
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_need_is_what_is_written(tmp_path: Path) -> None:
    """Known from shapes, before a byte is written."""
    with engine_of(config(2)) as engine:
        train(engine, 1)
        part = contents.gather_part(engine, find_holders(engine), {}, False)
        report = contents.write_part(tmp_path, part)
    header = int.from_bytes((tmp_path / TENSORS).read_bytes()[:8], "little") + 8
    assert sum(report.files.values()) == part.nbytes + header
    assert {name: (tmp_path / name).stat().st_size for name in report.files} == report.files


def test_file_systems_that_do_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit.shutil, "disk_usage", lambda path: Usage(0, 0, 0))
    check_space(tmp_path / "not/there", 10**15)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"not/there has .* GB free and the checkpoint needs 1000\.00 TB"):
        check_space(tmp_path / "not/there", 10**15)
    monkeypatch.setattr(commit.shutil, "disk_usage", lambda path: Usage(10**9, 10**9 - 10**6, 10**6))
    with pytest.raises(CheckpointError, match=r"has 1\.00 MB free and the checkpoint needs 1\.00 MB, 16 B more"):
        check_space(tmp_path, 10**6 + 16)


# -- leftovers ------------------------------------------------------------------------------------------------------


def _ended_process() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_leftovers_go_and_what_others_write_stays(tmp_path: Path) -> None:
    dead, (host, mine, number) = _ended_process(), this_writer().split("-")
    boot, alive, elsewhere = boot_of(), os.getppid(), f"not_{host}"
    names = {
        f".a.saving-{host}-{dead}-0123456789ab": False,
        f".b.saving-{host}-{alive}-0123456789ab": True,  # another run of this machine
        f".c.saving-{elsewhere}-1-0123456789ab": True,  # another machine, just written to
        f".d.saving-{elsewhere}-1-0123456789ab": False,  # another machine, long ago
        ".e.saving-0123456789ab": True,  # of an earlier version: perhaps alive
        ".new.saving-0123456789ab": False,  # of this very tag
        f".f.saving-{host}-{mine}-{number}": False,  # the number of the process is this one's today: nothing holds it
        f".g.saving-{host}-{alive}-{number}": False,
        f".h.saving-{host}-{dead}-{number}": True,  # held: of another process namespace
        f".i.saving-{host}-{mine}-{'f' * 16}_0123456789ab": True,  # another machine of the same name
        f".j.saving-{host}-{mine}-{'f' * 16}_0123456789ab": False,
        f".k.old-{host}-{dead}-{number}": True,
        f".{'l'}.held": False,
        f".{'latest'}.{dead}.new": False,
        f".{'latest'}.{alive}.new": True,
        ".hidden": True,
    }
    for name in names:
        (tmp_path / name).mkdir()
    os.utime(tmp_path / f".d.saving-{elsewhere}-1-0123456789ab", (1, 1))
    os.utime(tmp_path / f".j.saving-{host}-{mine}-{'f' * 16}_0123456789ab", (1, 1))
    held = [FolderHold(tmp_path / name) for name in names if name[:3] in (".h.", ".k.")]
    with engine_of(config(2)) as engine:
        engine.save_checkpoint(tmp_path, tag="new")
    assert {name: (tmp_path / name).exists() for name in names} == names
    assert boot == number[:16]
    for hold in held:
        hold.close()


def test_locks_that_a_file_system_does_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the start of the process tells."""

    def refused(*args: Any) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(holds.fcntl, "flock", refused)
    host, mine, number = this_writer().split("-")
    living, gone = tmp_path / f".t.saving-{host}-{mine}-{number}", tmp_path / f".u.saving-{host}-{mine}-{number}"
    for path in (living, gone):
        path.mkdir()
    os.utime(gone, (1e9, 1e9))  # before this process began
    commit.remove_leftovers(tmp_path, tmp_path / "t")
    assert (living.exists(), gone.exists()) == (True, False)


def test_a_conversion_removes_what_a_killed_one_left(tmp_path: Path, original: Path) -> None:
    left = tmp_path / f".out.saving-{this_writer()}"
    left.mkdir()
    for kind in ("universal", "dcp"):
        write = {"universal": write_universal, "dcp": write_dcp}[kind]
        write(open_folder(find_folder(original)), tmp_path / kind)
    assert not left.exists()


def test_what_a_killed_overwrite_left_aside_gets_its_name_back(tmp_path: Path) -> None:
    dead = _ended_process()
    with engine_of(config(2)) as engine:
        engine.save_checkpoint(tmp_path, tag="one", client_state={"which": 1})
        (tmp_path / "one").rename(tmp_path / f".one.old-{this_writer().split('-')[0]}-{dead}-0123456789ab")
        assert engine.load_checkpoint(tmp_path)[1] == {"which": 1}
        engine.save_checkpoint(tmp_path, tag="two", client_state={"which": 2}, save_latest=False)
        assert sorted(path.name for path in tmp_path.glob("*one*")) == ["one"]
        assert engine.load_checkpoint(tmp_path)[1] == {"which": 1}


def test_names_of_hidden_folders() -> None:
    path = hidden_beside(Path("/x/global_step5"), "saving")
    match = commit._HIDDEN.fullmatch(path.name)
    assert match is not None
    assert (match["tag"], match["kind"], match["pid"]) == ("global_step5", "saving", str(os.getpid()))
    assert match["host"] == socket.gethostname().replace("-", "_").replace(".", "_")


# -- SIGKILL --------------------------------------------------------------------------------------------------------
#
# Lives follow one another in one folder. Each loads what is there, trains and saves as fast as it can until it is
# killed. A line of the trace says what the weights of a step are: the same in every life, also after loading.

KINDS = ("new", "same", "slow", "async")


def _live(folder: Path, kind: str, seed: int, last: bool) -> None:
    """One life of one rank."""
    engine = build(config(2, ds_hf={"checkpoint": {"async": kind == "async"}}))
    rank = engine.axis.rank
    source = random.Random(seed * 2 + rank)
    _slow_down(kind, rank, source)
    loaded, state = engine.load_checkpoint(folder)
    step = engine.global_steps
    assert (loaded is None) == (step == 0)
    assert state.get("step", 0) == step
    trace = (folder / f"trace{rank}").open("a", buffering=1)
    trace.write(f"loaded {step} {_weights(engine)}\n")
    for _ in range(1 if last else 10**6):
        train(engine, 1, step)
        step = engine.global_steps
        trace.write(f"saving {step} {_weights(engine)}\n")
        overwrites = kind == "same" or (kind != "new" and step % 2 == 0)
        tag = "same" if overwrites else f"global_step{step}"
        engine.save_checkpoint(folder, tag=tag, client_state={"step": step})
        if kind == "async":
            train(engine, 1, step)
            step = engine.global_steps
            engine.wait_for_checkpoint()
            trace.write(f"saved {step - 1} -\n")
        else:
            trace.write(f"saved {step} -\n")
        for old in sorted(folder.glob("global_step*"), key=lambda p: int(p.name[11:]))[:-3] if rank == 0 else ():
            shutil.rmtree(old)
    engine.destroy()


def _slow_down(kind: str, rank: int, source: random.Random) -> None:
    """One rank slower than the other, at random."""
    for module in (contents, background):
        write = module.write_part

        def slowly(place: Path, part: Any, write: Any = write) -> Any:
            time.sleep(source.random() * 0.03 if kind != "slow" or rank == 1 else 0.0)
            return write(place, part)

        module.write_part = slowly  # type: ignore[assignment]  # this process belongs to the test alone


def _weights(engine: Any) -> str:
    return ",".join(hexadecimal(sum_of_tensor(master)) for master in engine.optimizer.masters.values())


class _Life:
    """Two ranks, forked from the server of ``run_distributed``."""

    def __init__(self, folder: Path, kind: str, seed: int, last: bool) -> None:
        context: Any = multiprocessing.get_context("forkserver")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        context.set_forkserver_preload(PRELOAD)
        payload = pickle.dumps((_live, (folder, kind, seed, last), {}))
        port = free_port()
        self.output = [folder / f"output{rank}" for rank in (0, 1)]
        self.ranks, self.pipes = [], []
        for rank in (0, 1):
            spec = RankSpec(rank, 2, port, "gloo", 600.0, str(self.output[rank]), {}, list(sys.path))
            ours, theirs = context.Pipe(duplex=True)
            process = context.Process(target=_rank_main, args=(spec, payload, theirs))
            process.start()
            theirs.close()
            self.ranks.append(process)
            self.pipes.append(ours)

    def text(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in self.output if path.exists())

    def kill(self, ranks: list[int]) -> None:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.ranks[rank].pid, signal.SIGKILL)

    def end(self) -> list[Any]:
        """The exit code of each rank, 0 for one that reported its end: it waits for the other to report, too."""
        codes = []
        for process, pipe in zip(self.ranks, self.pipes, strict=True):
            kind = "late"
            with contextlib.suppress(EOFError, OSError):
                kind = pickle.loads(pipe.recv_bytes())[1] if pipe.poll(600) else kind
            if kind != "ok":
                process.join(600)
            codes.append(0 if kind == "ok" else process.exitcode)
        self.kill([0, 1])
        for process, pipe in zip(self.ranks, self.pipes, strict=True):
            process.join(600)
            pipe.close()
        return codes


def _lines(folder: Path) -> list[list[list[str]]]:
    """The trace of each rank; a line that was cut short by the end is left out."""
    paths = [folder / f"trace{rank}" for rank in (0, 1)]
    texts = [path.read_text() if path.exists() else "" for path in paths]
    return [[line.split() for line in text[: text.rfind("\n") + 1].splitlines()] for text in texts]


def _count(folder: Path) -> int:
    return sum(line[0] == "saving" for line in _lines(folder)[0])


def _check(folder: Path) -> int:
    """No life loaded less than was saved before it, and every step has the same weights in all lives."""
    losses = 0
    for lines in _lines(folder):
        weights: dict[str, str] = {}
        durable = begun = 0
        for what, step, value in lines:
            if what == "loaded":
                assert durable <= int(step) <= begun, lines
                losses += int(step) < begun
            durable = max(durable, int(step)) if what == "saved" else durable
            begun = max(begun, int(step)) if what == "saving" else begun
            if value != "-" and int(step):
                assert weights.setdefault(step, value) == value, (step, lines)
    return losses


def _lives(folder: Path, kinds: tuple[str, ...], count: int, seed: int, least: int = 0) -> int:
    """How many of ``count`` lives were killed while a save was under way; up to three times as many live until that is
    ``least``, for how long a save takes is the machine's affair."""
    source = random.Random(seed)
    amid = number = 0
    while number < count or (amid < least and number < 3 * count):
        before = _count(folder)
        life = _Life(folder, kinds[number % len(kinds)], seed + number, last=False)
        deadline = time.monotonic() + 600
        while _count(folder) < before + 2:  # one is done then, and another has begun
            assert time.monotonic() < deadline, life.text()
            assert all(process.is_alive() for process in life.ranks), life.text()
            time.sleep(0.002)
        time.sleep(source.random() * 0.08)  # a save takes some 30 ms
        ranks = source.choice([[0, 1], [1, 0]])
        life.kill(ranks[:1])
        time.sleep(source.choice([0.0, 0.0, 0.02]))
        life.kill(ranks)
        codes = life.end()
        assert codes[ranks[0]] == -signal.SIGKILL, life.text()
        assert codes[ranks[1]] in (-signal.SIGKILL, 1), life.text()  # 1: it saw first that the other is gone
        amid += any(".saving-" in path.name or ".old-" in path.name for path in folder.iterdir())
        assert verify(folder) == []
        number += 1
    life = _Life(folder, kinds[0], seed + number, last=True)
    assert life.end() == [0, 0], life.text()
    _check(folder)
    loads = [int(step) for what, step, _ in _lines(folder)[0] if what == "loaded"]
    assert len(loads) == number + 1
    assert loads[-1] >= number  # each life brought at least one step
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
    return amid


def test_killed_while_saving(tmp_path: Path) -> None:
    _lives(tmp_path, KINDS, 10, seed=11)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_killed_while_saving_at_length(tmp_path: Path, kind: str) -> None:
    assert _lives(tmp_path, (kind,), 25, seed=100, least=5) >= 5


def test_the_trace_is_looked_at(tmp_path: Path) -> None:
    """The checks of the killed runs can fail."""
    fine = "loaded 0 a\nsaving 1 b\nsaved 1 -\nsaving 2 c\nloaded 1 b\nsaving 2 c\n"
    for text in (fine, fine.replace("loaded 1 b", "loaded 0 a"), fine.replace("loaded 1 b", "loaded 1 x")):
        (tmp_path / "trace0").write_text(text)
        if text == fine:
            assert _check(tmp_path) == 1
        else:
            with pytest.raises(AssertionError):
                _check(tmp_path)
