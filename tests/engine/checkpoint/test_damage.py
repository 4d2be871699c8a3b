"""Damaged, incomplete and lying checkpoints: always a CheckpointError that names the file, and nothing is changed."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_hf.checkpoint.manifest import read_manifest
from ds_hf.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from ds_hf.errors import CheckpointError
from tests.engine.checkpoint.workload import Model, build, config, differences, engine_of, states, train

TENSORS = "rank_00000.safetensors"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    with engine_of(config(2, "bf16")) as engine:
        train(engine, 1)
        engine.save_checkpoint(folder, tag="tag")
    return folder


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    built = build(config(3, "bf16"), seed=1)
    yield built
    built.destroy()


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy to break; ``folder / "tag"`` is the checkpoint."""
    return Path(shutil.copytree(original, tmp_path / "copy"))


def _refused(engine: Any, folder: Path, match: str) -> None:
    before = states(engine)
    with pytest.raises(CheckpointError, match=match):
        engine.load_checkpoint(folder)
    assert differences(before, states(engine)) == []
    with pytest.raises(CheckpointError, match=match):
        get_fp32_state_dict_from_zero_checkpoint(folder)


def _edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "tag/manifest.json"
    content = json.loads(path.read_text())
    content.pop("checksum", None)  # what a liar leaves out
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("name", ["manifest.json", TENSORS])
def test_missing_file(engine: Any, folder: Path, name: str) -> None:
    (folder / "tag" / name).unlink()
    _refused(engine, folder, f"{name} is missing")


@pytest.mark.parametrize(
    "name", [TENSORS, "mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"]
)
def test_truncated_file(engine: Any, folder: Path, name: str) -> None:
    path = folder / "tag" / name
    path.write_bytes(path.read_bytes()[:-7])
    _refused(engine, folder, f"{name} has .* bytes where .* the checkpoint is damaged")


def test_truncated_manifest(engine: Any, folder: Path) -> None:
    path = folder / "tag/manifest.json"
    path.write_text(path.read_text()[:-100])
    _refused(engine, folder, r"manifest.json cannot be read")


def test_garbage_of_the_right_size(engine: Any, folder: Path) -> None:
    path = folder / "tag" / TENSORS
    path.write_bytes(bytes(random.Random(0).randbytes(path.stat().st_size)))
    _refused(engine, folder, f"{TENSORS} cannot be read")


def test_pickles_are_not_trusted(engine: Any, folder: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    path = folder / "tag/mp_rank_00_model_states.pt"
    torch.save({"client_state": Evil()}, path)
    _edit(folder, lambda m: (m["files"].update({path.name: path.stat().st_size}), m.pop("checksums")))
    with pytest.raises(CheckpointError, match=r"model_states\.pt cannot be read"):
        engine.load_checkpoint(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m: m.update(format="something else"), "does not say format"),
        (lambda m: m.update(version=99), "version 99"),
        (lambda m: m.pop("parameters"), "parameters should be of type dict"),
        (lambda m: m["files"].update({"../../secret": 3}), "not a plain file name"),
        (lambda m: m["files"].update({"/etc/passwd": 3}), "not a plain file name"),
        (lambda m: m["files"].update({TENSORS: -3}), "is negative"),
        (
            lambda m: m["parameters"]["scale"]["fragments"][0].__setitem__(0, "other.safetensors"),
            "not one of its files",
        ),
        (lambda m: m["parameters"]["scale"]["fragments"][0].__setitem__(1, 1), "do not follow one another"),
        (lambda m: m["parameters"]["scale"]["fragments"][0].__setitem__(2, -1), "negative"),
        (lambda m: m["parameters"]["scale"]["fragments"][0].__setitem__(2, 10**6), "the manifest expects 1000001"),
        (lambda m: m["parameters"]["scale"]["fragments"][0].__setitem__(2, 10**30), "larger than any file"),
        (lambda m: m["parameters"]["scale"]["fragments"][0].__setitem__(2, True), "should be of type int"),
        (lambda m: m["parameters"]["scale"].update(fragments=[]), "have 0 elements, its shape"),
        (lambda m: m["parameters"]["frozen"].update(shape=[10**12]), "its shape"),
        (lambda m: m["parameters"]["frozen"].update(shape=[-11]), "negative"),
        (
            lambda m: m["parameters"]["frozen"].update(shape=[10**12], fragments=[[TENSORS, 0, 0, 10**12]]),
            "larger than all files together",
        ),
        (lambda m: m["parameters"]["scale"]["states"].update(master="not there"), "not there"),
        (lambda m: m["parameters"]["scale"]["states"].update(master=3), "should be of type str"),
        (lambda m: m["parameters"]["scale"].update(states={}), "neither master nor weight"),
        (lambda m: m["buffers"]["blocks.0.mean"].update(file="../x"), "not one of its files"),
        (lambda m: m["buffers"]["blocks.0.mean"].update(shape=[7]), "buffer blocks.0.mean has shape"),
        (lambda m: m["tied"].update({"head.weight": "nowhere"}), "tied to 'nowhere'"),
        (lambda m: m["tied"].update({"head.weight": []}), "should be of type str"),
    ],
)
def test_lying_manifest(engine: Any, folder: Path, change: Callable[[dict[str, Any]], Any], match: str) -> None:
    _edit(folder, change)
    _refused(engine, folder, match)


@pytest.mark.parametrize("moved", ["to the end", "behind a space", "value"])
def test_the_checksum_of_a_manifest_counts_wherever_it_stands(engine: Any, folder: Path, moved: str) -> None:
    path = folder / "tag/manifest.json"
    original = path.read_text()

    def written(content: dict[str, Any]) -> None:
        if moved == "to the end":
            content["checksum"] = content.pop("checksum")
        elif moved == "value":
            content["checksum"] = [content["checksum"]]
        path.write_text((" " if moved == "behind a space" else "") + json.dumps(content))

    content = json.loads(original)
    written(content)
    if moved != "value":
        engine.load_checkpoint(folder)
        content["counters"]["global_steps"] += 1
        written(content)
    _refused(engine, folder, r"manifest\.json cannot be read: it is not what was written")


@pytest.mark.parametrize(
    "step", ["x", None, True, -1, ["float32", "x"], ["float32", float("nan")], ["bool", True], {"a": 1}, 2**63]
)
def test_a_step_that_is_none(engine: Any, folder: Path, step: Any) -> None:
    _edit(folder, lambda m: m["parameters"]["scale"]["scalars"].update(step=step))
    before = states(engine)
    with pytest.raises(CheckpointError, match=r"manifest\.json: (step|scalars) of scale is not what was saved"):
        engine.load_checkpoint(folder)
    assert differences(before, states(engine)) == []


def test_a_step_that_is_a_plain_number(tmp_path: Path) -> None:
    """torch's optimizers count in tensors, and an integer would fail them at the next step."""

    def change(manifest: dict[str, Any]) -> None:
        manifest.pop("digest")
        for parameter in manifest["parameters"].values():
            if "step" in parameter.get("scalars", {}):
                parameter["scalars"]["step"] = 3

    content, model = config(2), Model()
    del content["optimizer"]
    with engine_of(content, model, optimizer=torch.optim.NAdam(model.parameters())) as engine:
        train(engine, 1)
        engine.save_checkpoint(tmp_path, tag="tag")
        _edit(tmp_path, change)
        engine.load_checkpoint(tmp_path)
        train(engine, 1)
        assert {float(state["step"]) for state in engine.optimizer.state.values()} == {4.0}


def test_a_stray_option_goes_with_the_next_load(engine: Any, folder: Path, original: Path) -> None:
    path = folder / "tag/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    content = torch.load(path, weights_only=True)
    content["param_groups"][0]["stray"] = 7
    torch.save(content, path)
    _edit(folder, lambda m: (m["files"].update({path.name: path.stat().st_size}), m["checksums"].pop(path.name)))
    engine.load_checkpoint(original)
    options = [set(group) for group in engine.optimizer.param_groups]
    engine.load_checkpoint(folder)
    assert engine.optimizer.param_groups[0]["stray"] == 7
    engine.load_checkpoint(original)
    assert [set(group) for group in engine.optimizer.param_groups] == options


def _mutations(content: Any, source: random.Random) -> Any:
    """One value somewhere in ``content`` replaced, removed or doubled."""
    node, parent, key = content, None, None
    while isinstance(node, dict | list) and node and (parent is None or source.random() < 0.85):
        parent, key = node, source.choice(list(node) if isinstance(node, dict) else range(len(node)))
        node = parent[key]
    assert parent is not None
    kind = source.randrange(3)
    if kind == 0:
        del parent[key]
    elif kind == 1:
        parent[key] = source.choice([None, -1, 10**18, "x", "../x", [], {}, [[]], True, 0.5, "\0", float("nan")])
    elif isinstance(node, int):
        parent[key] = node + source.choice([-1, 1, 2**31, 2**63])
    else:
        parent[key] = [node, node]
    return content


def test_mutated_manifests_never_crash(engine: Any, folder: Path) -> None:
    """A load either works or is a CheckpointError, whatever one value of the manifest became."""
    path = folder / "tag/manifest.json"
    content = json.loads(path.read_text())
    content.pop("checksum", None)
    source = random.Random(20260)
    refused = 0
    for _ in range(150):
        path.write_text(json.dumps(_mutations(copy.deepcopy(content), source)))
        try:
            read_manifest(folder / "tag")
            engine.load_checkpoint(folder)
        except CheckpointError:
            refused += 1
    assert 75 < refused < 150
    path.write_text(json.dumps(content))
    engine.load_checkpoint(folder)


def test_mutated_tensor_headers_never_crash(engine: Any, folder: Path) -> None:
    path = folder / "tag" / TENSORS
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    source = random.Random(7)
    messages = []
    for _ in range(100):
        mutated = bytearray(content)
        mutated[source.randrange(8 + length)] = source.randrange(256)
        path.write_bytes(mutated)
        try:
            engine.load_checkpoint(folder)
        except CheckpointError as error:
            messages.append(str(error))
    assert len(messages) > 60
    assert all(TENSORS in message for message in messages)
