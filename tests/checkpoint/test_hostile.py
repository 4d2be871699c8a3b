"""A checkpoint from a stranger: nothing runs, nothing outside is written, no figure in it costs memory or time.

Each mutated checkpoint is loaded, or converted, by a process that may take 200 MB more than after a good one.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import random
import re
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

from ds_hf.checkpoint import zero_to_fp32
from ds_hf.checkpoint.dcp import write_dcp
from ds_hf.checkpoint.deepspeed.pickles import SAVE, load_any, save_pickled
from ds_hf.checkpoint.deepspeed.write import Target, write_deepspeed
from ds_hf.checkpoint.deepspeed.write_universal import write_universal
from ds_hf.checkpoint.formats import open_source
from ds_hf.checkpoint.pretrained import export_source
from ds_hf.checkpoint.standalone import standalone_script
from ds_hf.errors import CheckpointError
from tests.checkpoint.hostile import (
    COMMON,
    MEMORY,
    RANK,
    SECONDS,
    TENSORS,
    Outcome,
    Victim,
    archive,
    edit_manifest,
    flipped,
    header_of,
    limit_memory,
    mutated,
    replace_file,
    safetensors,
)
from tests.engine.checkpoint.workload import config, engine_of, train
from tests.helpers.interpreter import python
from tests.helpers.mutations import LONG, examples, exchanged, wrong_file

Mutation = Callable[[Path, random.Random], Any]  # of the checkpoint's folder


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    with engine_of(config(2, "bf16")) as engine:
        train(engine, 2)
        engine.save_checkpoint(folder, tag="tag", client_state={"epoch": 3, "seen": [1, (2, "x")]})
    return folder


@pytest.fixture(scope="module")
def victim(original: Path) -> Iterator[Victim]:
    started = Victim(original)
    yield started
    started.close()


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy to break; ``folder / "tag"`` is the checkpoint."""
    return Path(shutil.copytree(original, tmp_path / "copy"))


def try_all(victim: Victim, original: Path, tmp_path: Path, mutation: Mutation, count: int) -> list[Outcome]:
    """Load and convert ``count`` mutations; none may crash, take long or take memory."""
    found = []
    for number in range(count):
        folder = Path(shutil.copytree(original, tmp_path / str(number)))
        mutation(folder / "tag", random.Random(number))
        for what in ("load", "convert"):
            outcome = victim.ask(what, folder)
            assert outcome.kind in ("same", "different", "refused"), (number, what, outcome)
            assert outcome.seconds < SECONDS, (number, what, outcome)
            assert outcome.nbytes < MEMORY, (number, what, outcome)
            assert outcome.kind != "refused" or str(tmp_path) in outcome.message, (number, what, outcome)
            found.append(outcome)
        shutil.rmtree(folder)
    return found


# -- damage: found, or without effect -------------------------------------------------------------------------------


def _damaged(name: str) -> Mutation:
    def mutation(folder: Path, source: random.Random) -> None:
        path = folder / name
        path.write_bytes(flipped(path.read_bytes(), source))

    return mutation


def _damaged_header(folder: Path, source: random.Random) -> None:
    content = (folder / TENSORS).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    (folder / TENSORS).write_bytes(flipped(content, source, 0, end))


def _damaged_latest(folder: Path, source: random.Random) -> None:
    path = folder.parent / "latest"
    path.write_bytes(flipped(path.read_bytes(), source))


def _another_value(folder: Path, source: random.Random) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(mutated(json.loads(path.read_text()), source)))


DAMAGES: dict[str, Mutation] = {
    "manifest": _damaged("manifest.json"),
    "a value in the manifest": _another_value,
    "tensors": _damaged(TENSORS),
    "header of tensors": _damaged_header,
    "what is common": _damaged(COMMON),
    "what a rank keeps": _damaged(RANK),
    "latest": _damaged_latest,
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_found_or_without_effect(victim: Victim, original: Path, tmp_path: Path, what: str) -> None:
    outcomes = try_all(victim, original, tmp_path, DAMAGES[what], 12)
    wrong = [outcome for outcome in outcomes if outcome.kind == "different"]
    assert wrong == []
    assert sum(outcome.kind == "refused" for outcome in outcomes) >= 8


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_found_or_without_effect_at_length(victim: Victim, original: Path, tmp_path: Path, what: str) -> None:
    outcomes = try_all(victim, original, tmp_path, DAMAGES[what], 500)
    assert [outcome for outcome in outcomes if outcome.kind == "different"] == []


# -- lies: no harm --------------------------------------------------------------------------------------------------


def _lying_manifest(folder: Path, source: random.Random) -> None:
    edit_manifest(folder, lambda content: mutated(content, source))


def _lying_header(folder: Path, source: random.Random) -> None:
    header, data = header_of((folder / TENSORS).read_bytes())
    replace_file(folder, TENSORS, safetensors(mutated(header, source), data))


def _lying_pickle(name: str) -> Mutation:
    def mutation(folder: Path, source: random.Random) -> None:
        content = archive((folder / name).read_bytes(), lambda record: flipped(record, source))
        replace_file(folder, name, content)

    return mutation


LIES: dict[str, Mutation] = {
    "manifest": _lying_manifest,
    "header of tensors": _lying_header,
    "pickle of what is common": _lying_pickle(COMMON),
    "pickle of what a rank keeps": _lying_pickle(RANK),
}


@pytest.mark.parametrize("what", LIES)
def test_lies_do_no_harm(victim: Victim, original: Path, tmp_path: Path, what: str) -> None:
    outcomes = try_all(victim, original, tmp_path, LIES[what], 12)
    assert sum(outcome.kind == "refused" for outcome in outcomes) >= 5


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", LIES)
def test_lies_do_no_harm_at_length(victim: Victim, original: Path, tmp_path: Path, what: str) -> None:
    outcomes = try_all(victim, original, tmp_path, LIES[what], 1000)
    assert sum(outcome.kind == "refused" for outcome in outcomes) >= 400


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["deepspeed 2", "deepspeed 3", "dcp"])
def test_other_formats_do_no_harm(victim: Victim, original: Path, tmp_path: Path, kind: str) -> None:
    """Files of DeepSpeed and torch.distributed.checkpoint, which are pickled throughout."""
    made = tmp_path / "made"
    if kind == "dcp":
        write_dcp(open_source(original), made)
    else:
        write_deepspeed(open_source(original), made, Target(int(kind[-1]), 2))
    files = [path.relative_to(made) for path in made.rglob("*") if path.is_file() and path.suffix != ".py"]
    assert len(files) >= 2
    refused = 0
    for number in range(300):
        source = random.Random(number)
        folder = Path(shutil.copytree(made, tmp_path / str(number)))
        path = folder / source.choice(files)
        content = path.read_bytes()
        if content[:4] == b"PK\3\4" and number % 2:
            path.write_bytes(archive(content, lambda record, source=source: flipped(record, source)))
        else:
            path.write_bytes(flipped(content, source))
        outcome = victim.ask("load", folder)
        assert outcome.kind in ("same", "different", "refused"), (number, path, outcome)
        assert outcome.seconds < SECONDS, (number, path, outcome)
        assert outcome.nbytes < MEMORY, (number, path, outcome)
        refused += outcome.kind == "refused"
        shutil.rmtree(folder)
    assert refused > 100


def _deep(folder: Path) -> None:
    (folder / "manifest.json").write_text("[" * 10**6 + "]" * 10**6)


def _deep_value(folder: Path) -> None:
    text = json.dumps({**json.loads((folder / "manifest.json").read_text()), "checksums": "HERE"})
    (folder / "manifest.json").write_text(text.replace('"HERE"', '{"a":' * 10**5 + "1" + "}" * 10**5))


def _huge_manifest(folder: Path) -> None:
    with (folder / "manifest.json").open("w") as file:
        file.truncate(10**12)  # no bytes on disk


def _swollen_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"a": [' + "[]," * (3 * 10**6) + "1]}")


def _doubled_key(folder: Path) -> None:
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    content.pop("checksum", None)
    path.write_text('{"world_size": 7, ' + json.dumps(content)[1:])


def _many_figures(folder: Path) -> None:
    def change(manifest: Any) -> Any:
        manifest["parameters"]["frozen"]["shape"] = [2**62] * 10**4
        return manifest

    edit_manifest(folder, change)


def _shared(folder: Path) -> None:
    def change(manifest: Any) -> Any:
        manifest["parameters"]["again"] = dict(manifest["parameters"]["embedding.weight"])
        return manifest

    edit_manifest(folder, change)


def _shared_buffers(folder: Path) -> None:
    def change(manifest: Any) -> Any:
        for number in range(1000):
            manifest["buffers"][f"b{number}"] = dict(manifest["buffers"]["blocks.0.mean"])
        return manifest

    edit_manifest(folder, change)


def _terminal(folder: Path) -> None:
    def change(manifest: Any) -> Any:
        manifest["parameters"]["\x1b[2J"] = manifest["parameters"].pop("scale")
        return manifest

    edit_manifest(folder, change)


def _long_header(folder: Path) -> None:
    header, data = header_of((folder / TENSORS).read_bytes())
    replace_file(folder, TENSORS, safetensors(header, data, 2**62))


def _sparse_header(folder: Path) -> None:
    path = folder / TENSORS
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 10**12))
        file.truncate(10**12 + 8)
    edit_manifest(folder, lambda m: {**m, "files": {**m["files"], TENSORS: 10**12 + 8}})


def _deep_header(folder: Path) -> None:
    replace_file(folder, TENSORS, struct.pack("<Q", 2 * 10**6) + b"[" * 10**6 + b"]" * 10**6)


def _shape_overflows(folder: Path) -> None:
    header, data = header_of((folder / TENSORS).read_bytes())
    first = next(key for key in header if len(header[key].get("shape", ())) == 1)
    header[first]["shape"] = [2**32, 2**32, header[first]["shape"][0]]
    replace_file(folder, TENSORS, safetensors(header, data))


def _overlapping_tensors(folder: Path) -> None:
    header, data = header_of((folder / TENSORS).read_bytes())
    keys = [key for key in header if key != "__metadata__"]
    header[keys[1]]["data_offsets"] = header[keys[0]]["data_offsets"]
    replace_file(folder, TENSORS, safetensors(header, data))


def _doubled_tensor(folder: Path) -> None:
    header, data = header_of((folder / TENSORS).read_bytes())
    text = json.dumps(header)
    first = next(key for key in header if key != "__metadata__")
    other = json.dumps({first: {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 4 * 10**9]}})
    text = text[:-1] + ", " + other[1:]
    replace_file(folder, TENSORS, struct.pack("<Q", len(text)) + text.encode() + data)


def _pipe(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


def _link(name: str, target: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return change


def _folder_for_file(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "nested a million deep": (_deep, "manifest.json cannot be read"),
    "nested value": (_deep_value, "manifest.json"),
    "a manifest of a terabyte": (_huge_manifest, "manifest.json cannot be read: .*bytes where at most"),
    "many small values": (_swollen_manifest, "manifest.json cannot be read: .*bytes where at most"),
    "key twice": (_doubled_key, "manifest.json cannot be read: a key appears twice"),
    "shape of ten thousand dims": (_many_figures, "manifest.json: shape of frozen is impossible"),
    "two parameters of the same bytes": (_shared, "manifest.json: .* overlap in tensor"),
    "many buffers of the same bytes": (_shared_buffers, "manifest.json: .* overlap in tensor"),
    "a name for the terminal": (_terminal, r"manifest.json: '\\x1b\[2J' cannot be a name"),
    "header longer than the file": (_long_header, f"{TENSORS} cannot be read"),
    "header of a terabyte": (_sparse_header, f"{TENSORS} cannot be read"),
    "header nested a million deep": (_deep_header, f"{TENSORS} cannot be read"),
    "shape that overflows": (_shape_overflows, f"{TENSORS} cannot be read"),
    "tensors that overlap": (_overlapping_tensors, f"{TENSORS} cannot be read"),
    "tensor twice": (_doubled_tensor, TENSORS),
    "manifest is a pipe": (_pipe("manifest.json"), "manifest.json"),
    "tensors are a pipe": (_pipe(TENSORS), TENSORS),
    "manifest is a folder": (_folder_for_file("manifest.json"), "manifest.json"),
    "tensors are a folder": (_folder_for_file(TENSORS), TENSORS),
    "manifest links to zeros": (_link("manifest.json", "/dev/zero"), "manifest.json"),
    "tensors link to zeros": (_link(TENSORS, "/dev/zero"), TENSORS),
    "tensors link to themselves": (_link(TENSORS, TENSORS), TENSORS),
    "tensors link to nothing": (_link(TENSORS, "nowhere"), TENSORS),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(victim: Victim, folder: Path, what: str) -> None:
    change, message = REFUSED[what]
    change(folder / "tag")
    for action in ("load", "convert"):
        outcome = victim.ask(action, folder)
        assert outcome.kind == "refused", (action, outcome)
        assert re.search(message, outcome.message), (action, outcome)
        assert outcome.seconds < SECONDS
        assert outcome.nbytes < MEMORY


def test_links_into_a_cache_are_read(victim: Victim, folder: Path, tmp_path: Path) -> None:
    """Downloads of the Hub are folders of links to its cache."""
    for path in list((folder / "tag").iterdir()):
        shutil.move(path, tmp_path / f"blob-{path.name}")
        path.symlink_to(f"../../blob-{path.name}")
    assert [victim.ask(what, folder).kind for what in ("load", "convert")] == ["same", "same"]


# -- the script, and what it writes ---------------------------------------------------------------------------------


def _script(folder: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """Our own copy of the script, run alone with little memory."""
    script = out.with_name("script.py")
    script.write_text(standalone_script())
    command = [sys.executable, "-I", os.fspath(script), os.fspath(folder), os.fspath(out)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_script_says_what_is_wrong(folder: Path, tmp_path: Path) -> None:
    path = folder / "tag" / TENSORS
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)
    done = _script(folder, tmp_path / "out")
    assert done.returncode == 1
    assert done.stderr.startswith(f"zero_to_fp32: {path} does not have the checksum that was written")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out/model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", REFUSED)
def test_the_script_refuses_all_that_is_refused(folder: Path, tmp_path: Path, what: str) -> None:
    REFUSED[what][0](folder / "tag")
    done = _script(folder, tmp_path / "out")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("zero_to_fp32: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_output_never_follows_a_link(folder: Path, tmp_path: Path, name: str) -> None:
    """A stranger's folder has a link where the weights are likely to be written."""
    precious = tmp_path / "precious"
    precious.write_text("as it was")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).symlink_to(precious)
    assert zero_to_fp32.main([str(folder), str(tmp_path / "out"), *(["--bin"] if name.endswith("bin") else [])]) == 0
    assert precious.read_text() == "as it was"
    assert not (tmp_path / "out" / name).is_symlink()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for place in (folder / "fp32", folder / "tag" / "fp32"):
        place.symlink_to(elsewhere)
        assert zero_to_fp32.main([str(folder), str(place)]) == 1
        assert zero_to_fp32.main([str(folder), str(place / "weights.bin")]) == 1
    assert list(elsewhere.iterdir()) == []


def test_nothing_beside_a_checkpoint_changes(victim: Victim, folder: Path) -> None:
    def seen() -> dict[str, Any]:
        found = {str(path): path.lstat() for path in folder.rglob("*")}
        return {name: (s.st_mode, s.st_size, s.st_mtime_ns) for name, s in found.items() if stat.S_ISREG(s.st_mode)}

    before = seen()
    assert len(before) >= 6
    assert [victim.ask(what, folder).kind for what in ("load", "convert")] == ["same", "same"]
    assert seen() == before


def test_the_limit_holds() -> None:
    """The measurements above would mean nothing if the limit did not work."""
    code = f"from tests.checkpoint.hostile import limit_memory; limit_memory({MEMORY}); bytearray(10**9)"
    assert "MemoryError" in python("-c", code).stderr
    assert limit_memory is not None


# -- one thing wrong with one file, of each format ------------------------------------------------------------------


FORMATS = ("ours", "universal", "dcp", "deepspeed2", "deepspeed3", "single", "shards")
UNSUMMED = ("single", "shards")  # of transformers: nothing tells a changed value, as ``checkpoint verify`` says


@pytest.fixture(scope="module")
def formats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint in each format that has folders."""
    root = tmp_path_factory.mktemp("formats")
    with engine_of(config(2)) as engine:
        train(engine, 1)
        engine.save_checkpoint(root, tag="ours")
    write_universal(open_source(root / "ours"), root / "universal")
    write_dcp(open_source(root / "ours"), root / "dcp")
    for stage in (2, 3):
        write_deepspeed(open_source(root / "ours"), root / f"deepspeed{stage}", Target(stage, 2, 10**9), "tag")
    for name, limit in (("single", None), ("shards", 400)):
        export_source(open_source(root / "ours"), root / name, max_shard_size=limit)
        (root / name / "config.json").write_text('{"model_type": "llama"}')
    return {name: root / name for name in FORMATS}


def _values(folder: Path) -> dict[str, torch.Tensor]:
    source = open_source(folder)
    source.check()
    source.manifest.check_sums()
    states = source.manifest.parameters.items()
    return {f"{name}.{state}": source.state(saved, state) for name, saved in states for state in saved.states}


def _is_right_or_refused(folder: Path, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Path(shutil.copytree(folder, Path(name) / folder.name))
        files = sorted(path for path in place.rglob("*") if path.is_file() and path.name != "zero_to_fp32.py")
        spoil = wrong_file if data.draw(st.integers(0, 3)) else partial(exchanged, files=files)
        done = data.draw(spoil(data.draw(st.sampled_from(files))))
        note(done)
        with contextlib.suppress(CheckpointError):
            found, wanted = _values(place), _values(folder)
            unseen = ".safetensors: bytes" in done and folder.name in UNSUMMED
            assert unseen or all(torch.equal(value, wanted[key]) for key, value in found.items() if key in wanted)


@pytest.mark.parametrize("kind", FORMATS)
@given(data=st.data())
@examples(15)
def test_a_spoilt_checkpoint_is_right_or_refused(formats: dict[str, Path], kind: str, data: st.DataObject) -> None:
    _is_right_or_refused(formats[kind], data)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
@given(data=st.data())
@examples(LONG)
def test_spoilt_checkpoints_are_right_or_refused(formats: dict[str, Path], kind: str, data: st.DataObject) -> None:
    _is_right_or_refused(formats[kind], data)


def _taken_from(folder: Path, other: Path) -> list[Path]:
    """Files of ``folder`` that are taken when those of ``other`` are in their place."""
    taken = []
    for path in sorted(path for path in folder.rglob("*.pt") if path.is_file()):
        own = path.read_bytes()
        path.write_bytes((other / path.relative_to(folder)).read_bytes())
        with contextlib.suppress(CheckpointError):
            _values(folder)
            taken.append(path)
        path.write_bytes(own)
    return taken


@pytest.mark.parametrize("kind", ["universal", "deepspeed2", "deepspeed3"])
def test_a_file_of_another_save_is_refused(
    formats: dict[str, Path], tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Shapes, sizes and the files' own checksums fit: the same checkpoint was written twice."""
    folder, other = Path(shutil.copytree(formats[kind], tmp_path / "copy")), tmp_path / "other"
    if kind == "universal":
        write_universal(open_source(formats["ours"]), other)
    else:
        write_deepspeed(open_source(formats["ours"]), other, Target(int(kind[-1]), 2, 10**9), "tag")
    # steps are the same; what the stage 3 of DeepSpeed reads, and a second copy of buffers, ds_hf does not
    unread = ("step.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt") if kind == "universal" else ()
    taken = [path for path in _taken_from(folder, other) if path.name not in unread]
    assert all(kind == "universal" and not path.with_name("exp_avg.pt").exists() for path in taken)
    if kind == "universal":
        step = next(folder.glob("zero/*/step.pt"))
        save_pickled(step, torch.tensor(7.0))
        with pytest.raises(CheckpointError, match=r"step\.pt is of another save than the files beside it"):
            _values(folder)
        return
    for path in folder.rglob("*.pt"):  # as DeepSpeed writes them, whose files do not say it
        content = copy.deepcopy(load_any(path))
        del content[SAVE]
        save_pickled(path, {**content, "global_steps": 5} if "model_states" in path.name else content)
    with caplog.at_level(logging.WARNING, "ds_hf"):
        _values(folder)
    assert "was saved after 5 updates of the weights, and the optimizer's states after 1" in caplog.text
