"""Slices of parameters in a manifest: any of them is read out of files that were cut in any other way."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ds_hf.checkpoint import tensors as reading
from ds_hf.checkpoint.boxes import boxes, cover_fault
from ds_hf.checkpoint.cuts import Cut
from ds_hf.checkpoint.format import FORMAT, MANIFEST, SLICED_VERSION, SavedCut
from ds_hf.checkpoint.manifest import Manifest, read_manifest
from ds_hf.checkpoint.standalone import standalone_script
from ds_hf.checkpoint.tensors import TensorFiles
from ds_hf.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from ds_hf.errors import CheckpointError
from tests.checkpoint.hostile import mutated

Cuts = list[SavedCut | None]


def taken(whole: Tensor, cut: SavedCut | None) -> Tensor:
    """The slice, by index and not by box."""
    if cut is None:
        return whole.reshape(-1)
    indices = [index for first, count in cut.ranges for index in range(first, first + count)]
    return whole.index_select(cut.dim, torch.tensor(indices)).reshape(-1)


def random_cuts(source: random.Random, shape: tuple[int, ...], most: int = 3) -> Cuts:
    """Slices that tile a parameter of ``shape``, of several ranges each."""
    dim = source.randrange(len(shape))
    slices = source.randint(1, min(most, shape[dim]))
    ends = sorted(source.sample(range(1, shape[dim]), min(shape[dim] - 1, slices * source.randint(1, 3) - 1)))
    ranges = [(low, high - low) for low, high in zip([0, *ends], [*ends, shape[dim]], strict=True)]
    source.shuffle(ranges)
    return [SavedCut(dim, tuple(ranges[index::slices])) for index in range(slices) if ranges[index::slices]]


def write(folder: Path, whole: dict[str, Tensor], slices: dict[str, Cuts], parts: int = 1, **changes: Any) -> Path:
    """A checkpoint of fp32 masters: one file a slice, of which ``parts`` fragments lie apart from one another."""
    folder.mkdir(parents=True, exist_ok=True)
    table = list(dict.fromkeys(cut for each in slices.values() for cut in each if cut is not None))
    files: dict[str, dict[str, Tensor]] = {}
    entries: dict[str, Any] = {}
    for name, value in whole.items():
        rows = []
        for number, cut in enumerate(slices[name]):
            flat = taken(value, cut)
            for part, piece in enumerate(flat.tensor_split(parts)):
                file, key = f"rank_{number * parts + part:05d}.safetensors", f"{name}.master"
                files.setdefault(file, {})[key] = torch.cat([torch.full((5,), torch.nan), piece])
                start = sum(each.numel() for each in flat.tensor_split(parts)[:part])
                if piece.numel():
                    rows.append([file, start, 5, piece.numel(), *([] if cut is None else [table.index(cut)])])
        states = {"master": f"{name}.master"}
        entries[name] = {"shape": list(value.shape), "trainable": True, "states": states, "fragments": rows}
    for file, tensors in files.items():
        save_file(tensors, folder / file)
    content = {
        "format": FORMAT,
        "version": SLICED_VERSION,
        "world_size": 1,
        "files": {file: (folder / file).stat().st_size for file in files},
        "parameters": entries,
        "buffers": {},
        "excluded": [],
        "tied": {},
        "cuts": [[cut.dim, [list(pair) for pair in cut.ranges]] for cut in table],
        **changes,
    }
    (folder / MANIFEST).write_text(json.dumps(content))
    return folder


def opened(folder: Path) -> tuple[Manifest, TensorFiles]:
    manifest, files = read_manifest(folder), TensorFiles(folder)
    manifest.check_files()
    manifest.check_tensors(files)
    return manifest, files


@pytest.mark.parametrize("seed", range(40))
def test_every_stretch_of_every_slice(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = random.Random(seed)
    monkeypatch.setattr(reading, "_READ_AT_ONCE", source.choice([3, 17, 2**24]))
    shape = tuple(source.randint(2, 7) for _ in range(source.randint(1, 4)))
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    folder = write(tmp_path, {"w": whole}, {"w": random_cuts(source, shape)}, parts=source.randint(1, 3))
    manifest, files = opened(folder)
    saved = manifest.parameters["w"]
    assert torch.equal(files.value(saved), whole)
    for _ in range(12):
        cut = source.choice([None, *random_cuts(source, shape)])
        wanted = taken(whole, cut)
        start, stop = sorted(source.sample(range(wanted.numel() + 1), 2))
        found = torch.full((stop - start,), -1.0)
        files.fill(found, saved, "master", start, cut)
        assert torch.equal(found, wanted[start:stop])


def test_a_slice_is_what_the_engine_cuts() -> None:
    whole = torch.arange(48.0).reshape(8, 6)
    for cut in (Cut(0, ((2, 2), (6, 1)), whole.shape), Cut(1, ((4, 2), (0, 1)), whole.shape)):
        assert torch.equal(taken(whole, SavedCut(cut.dim, cut.ranges)), cut.take(whole).reshape(-1))


def test_boxes_are_few() -> None:
    """Rows of a slice are one box and not as many as there are rows."""
    found = list(boxes((4096, 256), SavedCut(1, ((64, 64),)), 0, 4096 * 64))
    assert [box.ranges for box in found] == [((0, 4096), (64, 128), (0, 1))]
    cut = SavedCut(1, ((0, 3), (8, 3)))
    found = list(boxes((5, 16, 2), cut, 7, 5 * 6 * 2 - 1))
    assert len(found) <= 10
    assert sum((d - c) * (b - a) * (f - e) for (a, b), (c, d), (e, f) in (box.ranges for box in found)) == 60 - 8


def test_row_cut_to_column_cut_at_a_real_size(tmp_path: Path) -> None:
    """65,536 x 256, four row slices in two files each, read as four column slices: 64 MB with strided copies."""
    whole = torch.randn(65536, 256, generator=torch.Generator().manual_seed(0))
    rows: Cuts = [SavedCut(0, ((first, 16384),)) for first in range(0, 65536, 16384)]
    manifest, files = opened(write(tmp_path, {"w": whole}, {"w": rows}, parts=2))
    began = time.thread_time()
    for first in range(0, 256, 64):
        found = torch.empty(65536 * 64)
        files.fill(found, manifest.parameters["w"], "master", 0, SavedCut(1, ((first, 64),)))
        assert torch.equal(found.view(65536, 64), whole[:, first : first + 64])
    assert time.thread_time() - began < 5  # a loop over rows in Python takes longer than this on any machine


def test_the_script_alone_gives_whole_tensors(tmp_path: Path) -> None:
    whole = {"a": torch.randn(8, 6), "b": torch.randn(5), "c": torch.randn(6, 4, 2)}
    cuts: dict[str, Cuts] = {
        "a": [SavedCut(1, ((0, 2),)), SavedCut(1, ((2, 4),))],
        "b": [None],
        "c": [SavedCut(0, ((0, 1), (3, 1))), SavedCut(0, ((1, 2), (4, 2)))],
    }
    folder = write(tmp_path / "saved", whole, cuts, parts=2)
    script = folder / "zero_to_fp32.py"
    script.write_text(standalone_script())
    block = "import sys; sys.modules['ds_hf'] = None; import runpy; sys.argv = sys.argv[1:]; "
    command = [sys.executable, "-I", "-c", block + "runpy.run_path(sys.argv[0], run_name='__main__')"]
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # it would import ds_hf
    arguments = [*command, script, folder, tmp_path / "w.bin"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "w.bin", weights_only=True)
    assert all(torch.equal(found[name], value) for name, value in whole.items())
    assert found.keys() == whole.keys()


BAD: dict[str, tuple[Cuts, str]] = {
    "gap": ([SavedCut(0, ((0, 2),)), SavedCut(0, ((3, 1),))], "hold index 2 of dimension 0 of its shape [4, 3] not at"),
    "end": ([SavedCut(0, ((0, 2),))], "hold 2 indices of dimension 0 of its shape [4, 3]"),
    "twice": ([SavedCut(0, ((0, 3),)), SavedCut(0, ((2, 2),))], "hold index 2 of dimension 0"),
    "beyond": ([SavedCut(0, ((0, 4),)), SavedCut(0, ((4, 2),))], "hold 6 indices of dimension 0"),
    "two dims": ([SavedCut(0, ((0, 2),)), SavedCut(1, ((0, 2),))], "not parts of one dimension"),
    "no such dim": ([SavedCut(2, ((0, 4),))], "not parts of one dimension"),
    "whole too": ([None, SavedCut(0, ((0, 4),))], "not parts of one dimension"),
}


@pytest.mark.parametrize("case", BAD)
def test_slices_that_do_not_tile_a_parameter(case: str, tmp_path: Path) -> None:
    cuts, message = BAD[case]
    folder = write(tmp_path, {"w": torch.arange(36.0).reshape(6, 6)}, {"w": [None]})
    content = json.loads((folder / "manifest.json").read_text())
    entry = content["parameters"]["w"]
    entry["shape"] = [4, 3]
    content["cuts"] = [[cut.dim, [list(pair) for pair in cut.ranges]] for cut in cuts if cut is not None]
    entry["fragments"], offset = [], 0
    for cut in cuts:
        numel = 12 if cut is None or cut.dim > 1 else cut.numel((4, 3))
        number = [] if cut is None else [[each for each in cuts if each is not None].index(cut)]
        entry["fragments"].append(["rank_00000.safetensors", 0, offset, numel, *number])
        offset += numel
    (folder / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="the fragments of w ") as failure:
        read_manifest(folder)
    assert message in str(failure.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("cuts", None, "cuts should be of type list"),
        ("cuts", [[0]], "a cut is not"),
        ("cuts", [[0, [[1]]]], "a range of a cut is not"),
        ("cuts", [[-1, [[0, 6]]]], "dim of a cut is negative"),
        ("cuts", [[0, [[0, -6]]]], "range of a cut is negative"),
        ("cuts", [], "has cut 0, which is not among its cuts"),
        ("version", 1, "has cut 0, which is not among its cuts"),
        ("version", 4, "it has version 4; this ds_hf reads 1 to 3: update ds_hf"),
        ("version", True, "it has version True"),
    ],
)
def test_a_manifest_that_makes_no_sense(key: str, value: Any, message: str, tmp_path: Path) -> None:
    cuts: Cuts = [SavedCut(0, ((0, 6),))]
    with pytest.raises(CheckpointError) as failure:
        read_manifest(write(tmp_path, {"w": torch.zeros(6, 6)}, {"w": cuts}, **{key: value}))
    assert message in str(failure.value)


def test_many_ranges_take_no_longer_than_their_number(tmp_path: Path) -> None:
    """A stranger's manifest may have slices of single indices, and a fragment for each."""
    even, odd = (SavedCut(0, tuple((index, 1) for index in range(start, 40000, 2))) for start in (0, 1))
    whole = torch.arange(40000.0)
    folder = write(tmp_path, {"w": whole}, {"w": [even, odd]}, parts=500)
    began = time.thread_time()
    state = get_fp32_state_dict_from_zero_checkpoint(folder)
    assert torch.equal(state["w"], whole)
    assert time.thread_time() - began < 20


def test_a_manifest_changed_anywhere_is_refused_or_read(tmp_path: Path) -> None:
    """No other exception, however the table of cuts and the fragments were changed."""
    source = random.Random(5)
    whole = {"a": torch.randn(6, 4), "b": torch.randn(5), "c": torch.randn(4, 2, 3)}
    folder = write(tmp_path, whole, {name: random_cuts(source, tuple(t.shape)) for name, t in whole.items()}, parts=2)
    content = json.loads((folder / "manifest.json").read_text())
    refused = 0
    for _ in range(400):
        (folder / "manifest.json").write_text(json.dumps(mutated(content, source)))
        try:
            manifest, files = opened(folder)
            for saved in manifest.parameters.values():
                files.value(saved)
        except CheckpointError:
            refused += 1
    assert refused > 200


def test_no_fragments_at_all() -> None:
    assert cover_fault((0, 4), []) == ""
    assert cover_fault((2,), []) == "have 0 elements, its shape [2] has 2"
