"""Whole fp32 weights out of a checkpoint: the functions, and the script as a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model

from ds_hf.checkpoint.aside import publish_weights, weights_aside
from ds_hf.checkpoint.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    convert_zero_checkpoint_to_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
    main,
    to_torch_tensor,
)
from ds_hf.errors import CheckpointError
from tests.checkpoint.hostile import killed_at
from tests.engine.checkpoint.workload import Model, config, engine_of, on_both, states, train
from tests.helpers.distributed import run_distributed
from tests.helpers.interpreter import python

NAMES = set(Model().state_dict())


def _trained(folder: Path, stage: int, dtype: str) -> dict[str, Any]:
    with engine_of(config(stage, dtype)) as engine:
        train(engine, 2)
        engine.save_checkpoint(folder)
        return states(engine)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, dict[str, Any]]]:
    """By stage: a bf16 checkpoint of two processes and the states it was made from."""
    root = tmp_path_factory.mktemp("stages")
    calls = [(_trained, (root / str(stage), stage, "bf16")) for stage in range(4)]
    found = run_distributed(on_both, 2, calls, timeout=60)[0]
    return {stage: (root / str(stage), found[stage]) for stage in range(4)}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_masters_and_buffers_of_every_stage(checkpoints: Any, stage: int) -> None:
    folder, expected = checkpoints[stage]
    found = get_fp32_state_dict_from_zero_checkpoint(folder)
    assert set(found) == NAMES
    assert found["head.weight"] is found["embedding.weight"]
    for name, value in found.items():
        wanted = expected.get(f"{name}/master", expected.get(name, value)).to(value.dtype)
        assert torch.equal(value, wanted), name
    assert {value.dtype for value in found.values()} == {torch.float32, torch.int64}
    assert found["embedding.weight"].shape == (11, 6)
    assert found["scale"].shape == ()
    assert not torch.equal(found["embedding.weight"], found["embedding.weight"].bfloat16().float())


def test_tag_folder_latest_and_lazy(checkpoints: Any) -> None:
    folder, _ = checkpoints[3]
    whole = get_fp32_state_dict_from_zero_checkpoint(folder, tag="global_step2")
    inside = get_fp32_state_dict_from_zero_checkpoint(folder / "global_step2")
    lazy = get_fp32_state_dict_from_zero_checkpoint(folder, lazy_mode=True)
    for name, value in whole.items():
        assert torch.equal(inside[name], value)
        assert lazy[name].shape == value.shape
        assert torch.equal(lazy[name].contiguous(), value)
    trained = get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True)
    assert NAMES - set(trained) == {"frozen"}


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path)


@pytest.mark.parametrize("stage", [2, 3])
def test_load_into_an_engine_s_model(tmp_path: Path, stage: int) -> None:
    """HF's tests give it the model that the Trainer trained, sharded or not; it keeps its dtypes, as with DeepSpeed."""
    with engine_of(config(stage, "bf16")) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path)
        expected = states(engine)
        model = engine.module
    assert load_state_dict_from_zero_checkpoint(model, tmp_path) is model
    assert model.head.weight is model.embedding.weight
    for name, param in model.named_parameters():
        assert param.dtype is torch.bfloat16
        assert torch.equal(param.float(), expected[name].float())
    mixed = Model()
    mixed.head.weight = mixed.embedding.weight = torch.nn.Parameter(mixed.embedding.weight.half())
    other = load_state_dict_from_zero_checkpoint(mixed, tmp_path)
    dtypes = {name: param.dtype for name, param in other.named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype is not torch.float32} == {"embedding.weight"}
    for name, param in other.named_parameters():
        master = expected.get(f"{name}/master", expected[name])
        assert torch.equal(param, master.to(param.dtype))
    assert other.head.weight is other.embedding.weight


def test_load_into_another_shape(checkpoints: Any) -> None:
    model = Model()
    model.scale = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(CheckpointError, match=r"scale has shape \(3,\) in the model"):
        load_state_dict_from_zero_checkpoint(model, checkpoints[1][0])


def test_one_safetensors_file(checkpoints: Any, tmp_path: Path) -> None:
    folder, _ = checkpoints[2]
    convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path, safe_serialization=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    content = load_file(tmp_path / "model.safetensors")
    assert NAMES - set(content) == {"head.weight"}  # safetensors holds no tensor twice
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embedding.weight"}
    model = Model()
    load_model(model, str(tmp_path / "model.safetensors"))
    whole = get_fp32_state_dict_from_zero_checkpoint(folder)
    assert all(torch.equal(value, whole[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("safe", [True, False])
def test_shards_and_their_index(checkpoints: Any, tmp_path: Path, safe: bool) -> None:
    folder, _ = checkpoints[2]
    convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path, max_shard_size="300B", safe_serialization=safe)
    stem, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    index = json.loads((tmp_path / f"{stem}.{suffix}.index.json").read_text())
    shards = sorted(tmp_path.glob(f"{stem}-*.{suffix}"))
    assert len(shards) > 2
    assert shards[0].name == f"{stem}-00001-of-{len(shards):05d}.{suffix}"
    whole = get_fp32_state_dict_from_zero_checkpoint(folder)
    unique = {id(value): value for value in whole.values()}.values()
    assert index["metadata"]["total_size"] == sum(value.numel() * value.element_size() for value in unique)
    assert set(index["weight_map"]) == (NAMES - {"head.weight"} if safe else NAMES)
    for name, file in index["weight_map"].items():
        path = tmp_path / file
        content = load_file(path) if safe else torch.load(path, weights_only=True)
        assert torch.equal(content[name], whole[name])


def test_weights_in_another_dtype(checkpoints: Any, tmp_path: Path) -> None:
    folder, _ = checkpoints[3]
    whole = get_fp32_state_dict_from_zero_checkpoint(folder)
    half = {name: value.bfloat16() if value.is_floating_point() else value for name, value in whole.items()}
    convert_zero_checkpoint_to_state_dict(folder, tmp_path / "a", dtype="bf16")
    assert main([str(folder), str(tmp_path / "b.bin"), "--dtype", "bfloat16"]) == 0
    for path in (tmp_path / "a/pytorch_model.bin", tmp_path / "b.bin"):
        content = torch.load(path, weights_only=True)
        assert set(content) == NAMES
        assert all(torch.equal(content[name], half[name]) for name in NAMES)
        assert content["head.weight"].data_ptr() == content["embedding.weight"].data_ptr()
    one = sum(value.numel() * value.element_size() for value in {id(v): v for v in whole.values()}.values()) // 2 + 64
    convert_zero_checkpoint_to_state_dict(folder, tmp_path / "c", torch.float16, max_shard_size=one)
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["pytorch_model.bin"]  # two bytes each are counted
    with pytest.raises(ValueError, match="'int8' is not a dtype of weights"):
        convert_zero_checkpoint_to_state_dict(folder, tmp_path, dtype="int8")


def test_lazy_states_become_tensors(checkpoints: Any) -> None:
    folder, _ = checkpoints[2]
    whole = get_fp32_state_dict_from_zero_checkpoint(folder)
    lazy = get_fp32_state_dict_from_zero_checkpoint(folder, lazy_mode=True)
    made = to_torch_tensor(lazy)
    assert all(torch.equal(made[name], whole[name]) for name in NAMES)
    assert made["head.weight"] is made["embedding.weight"]
    empty = to_torch_tensor(lazy, return_empty_tensor=True, dtype="fp16")
    assert {name: value.shape for name, value in empty.items()} == {name: value.shape for name, value in whole.items()}
    assert empty["head.weight"].dtype is torch.float16


def test_sizes_that_are_none(checkpoints: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'many' is not a size"):
        convert_zero_checkpoint_to_fp32_state_dict(checkpoints[2][0], tmp_path, max_shard_size="many")


def _run(script: Path, *arguments: object, alone: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the script; ``alone``: with no way to import ds_hf."""
    assert script.read_text().startswith("#!/usr/bin/env python\n")
    command = [str(script), *map(str, arguments)]
    if not alone:
        return python(*command)
    block = (
        "import runpy, sys; sys.modules['ds_hf'] = None; sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # an installed ds_hf would be loaded by torch itself
    return subprocess.run([sys.executable, "-c", block, *command], capture_output=True, text=True, check=False, env=env)


def test_script_needs_only_torch_and_safetensors(checkpoints: Any, tmp_path: Path) -> None:
    folder, _ = checkpoints[3]
    done = _run(folder / "zero_to_fp32.py", folder, tmp_path / "out", alone=True)
    assert done.returncode == 0, done.stderr
    whole = get_fp32_state_dict_from_zero_checkpoint(folder)
    content = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(value, whole[name]) for name, value in content.items())


def test_script_writes_one_file_where_asked(checkpoints: Any, tmp_path: Path) -> None:
    folder, _ = checkpoints[1]
    done = _run(folder / "global_step2/zero_to_fp32.py", folder, tmp_path / "out.bin")
    assert done.returncode == 0, done.stderr
    content = torch.load(tmp_path / "out.bin", weights_only=True)
    assert set(content) == NAMES
    assert content["head.weight"].data_ptr() == content["embedding.weight"].data_ptr()


def test_script_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), str(tmp_path / "out")]) == 1
    assert (
        capsys.readouterr().err
        == f"zero_to_fp32: {tmp_path} holds no checkpoint: neither manifest.json nor a file 'latest'\n"
    )
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        main([str(tmp_path), str(tmp_path / "out"), "--debug"])


# -- new weights over older ones, killed anywhere -------------------------------------------------------------------


def _write_weights(folder: Path, value: int, shards: int, suffix: str) -> None:
    stem = "model" if suffix == ".safetensors" else "pytorch_model"
    with weights_aside(folder) as aside:
        names = [f"{stem}-{n:05d}-of-{shards:05d}{suffix}" for n in range(1, shards + 1)]
        names = names if shards > 1 else [f"{stem}{suffix}"]
        for name in names:
            (aside / name).write_text(str(value))
        index = {"weight_map": {f"w{n}": name for n, name in enumerate(names)}} if shards > 1 else None
        publish_weights(aside, folder, names, index)


def _as_transformers_reads(folder: Path) -> set[str]:
    """The values of all files that are read: the first entry that is there, in its order."""
    for name in (
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    ):
        if (folder / name).is_file():
            named = json.loads((folder / name).read_text())["weight_map"].values() if name.endswith("json") else [name]
            return {(folder / each).read_text() for each in named}
    return set()


KINDS = [(1, ".safetensors"), (3, ".safetensors"), (1, ".bin"), (3, ".bin")]


PAIRS = [(old, new) for old in KINDS for new in KINDS]
QUICK = [(KINDS[1], KINDS[1]), (KINDS[0], KINDS[1]), (KINDS[1], KINDS[2])]


@pytest.mark.parametrize(
    ("old", "new"), [*QUICK, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS if pair not in QUICK)]
)
def test_a_kill_leaves_the_older_weights_or_the_new(old: Any, new: Any, tmp_path: Path) -> None:
    """Also after an earlier kill at the worst place, and the next writer leaves nothing but its own."""
    _write_weights(tmp_path / "old", 1, *old)
    seen, point = [], 1
    while True:
        folder = Path(shutil.copytree(tmp_path / "old", tmp_path / f"killed at {point}"))
        killed = killed_at(point, lambda folder=folder: _write_weights(folder, 2, *new))  # type: ignore[misc]
        seen.append(_as_transformers_reads(folder))
        killed_at(point, lambda folder=folder: _write_weights(folder, 3, *new))  # type: ignore[misc]
        assert _as_transformers_reads(folder) in (seen[-1], {"3"})
        _write_weights(folder, 4, *new)
        assert _as_transformers_reads(folder) == {"4"}
        _write_weights(tmp_path / "wanted", 4, *new)
        assert sorted(os.listdir(folder)) == sorted(os.listdir(tmp_path / "wanted"))
        if not killed:
            break
        point += 1
    assert seen[0] == {"1"}
    assert seen[-1] == {"2"}
    assert seen == sorted(seen, key=str)
    assert point > 6


def test_one_file_by_its_name_wins_over_what_is_read_first(tmp_path: Path) -> None:
    """And nothing else is removed."""
    _write_weights(tmp_path, 1, 3, ".safetensors")
    others = ["model.pt", "pytorch_model.bin.index.json", "config.json"]
    for name in others:
        (tmp_path / name).touch()
    with weights_aside(tmp_path) as aside:
        (aside / "pytorch_model.bin").write_text("2")
        with pytest.warns(UserWarning, match=r"model.safetensors.index.json is older"):
            publish_weights(aside, tmp_path, ["pytorch_model.bin"], sole=False)
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "pytorch_model.bin"])


def test_two_writers_leave_each_other_alone(tmp_path: Path) -> None:
    with weights_aside(tmp_path) as first, weights_aside(tmp_path) as second:
        assert first.is_dir()
        assert second.is_dir()
    assert not list(tmp_path.iterdir())
