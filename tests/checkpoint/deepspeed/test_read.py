"""Checkpoints that real DeepSpeed wrote (see ``make_deepspeed_fixtures.py``): read, continued, and written back."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

import ds_hf
from ds_hf.checkpoint.convert import write_own
from ds_hf.checkpoint.deepspeed.pickles import load_pickled, save_pickled
from ds_hf.checkpoint.deepspeed.read import read_deepspeed
from ds_hf.checkpoint.deepspeed.write import Target, write_deepspeed
from ds_hf.checkpoint.formats import open_source
from ds_hf.checkpoint.source import CheckpointKind, Source
from ds_hf.errors import CheckpointError
from tests.checkpoint.deepspeed.deepspeed_workload import (
    CASES,
    STEPS_AFTER,
    STEPS_BEFORE,
    TinyModel,
    case_name,
    config,
    groups,
    train,
)
from tests.engine.checkpoint import workload
from tests.helpers.archives import unpack
from tests.helpers.distributed import run_distributed
from tests.helpers.moe_layer import Net, fill

ARCHIVE = Path(__file__).parent / "data/deepspeed.tar.xz"
SHARDED = [case for case in CASES if case[0] > 0]
NUMEL = 11 * 6 + 7 * 6 + 7 + 6 * 7 + 6 + 2 * 6  # of what trains


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("deepspeed")
    unpack(ARCHIVE, root)
    return root


@pytest.fixture(scope="module")
def losses(written: Path) -> dict[str, list[float]]:
    """Of DeepSpeed's own steps after it saved."""
    content = json.loads((written / "expected.json").read_text())
    assert content["deepspeed"] == "0.19.8"
    found: dict[str, list[float]] = content["losses"]
    return found


def _continue(calls: list[tuple[Path, int, str]]) -> list[Any]:
    """Losses, client state, counters and scale after loading each folder into an engine that has trained already."""
    found = []
    for folder, stage, dtype in calls:
        torch.manual_seed(7)
        model = TinyModel()
        engine = ds_hf.initialize(model=model, model_parameters=groups(model), config=config(stage, dtype))[0]
        train(engine, 1, 50)
        path, client = engine.load_checkpoint(folder)
        assert path == str(folder / "global_step3")
        counters = (engine.global_steps, engine.global_samples, engine.skipped_steps)
        scale, step = engine.loss_scale(), {float(s["step"]) for s in engine.optimizer.state.values()}
        found.append((train(engine, STEPS_AFTER, STEPS_BEFORE), client, counters, scale, step))
        engine.destroy()
    return found


@pytest.fixture(scope="module")
def continued(written: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Each checkpoint continued where it was saved, at another world size and stage, and converted before."""
    converted = tmp_path_factory.mktemp("converted")
    runs: dict[int, list[tuple[str, str, Path, int, str]]] = {1: [], 2: []}
    for stage, dtype, world_size in SHARDED:
        name = case_name(stage, dtype, world_size)
        write_own(open_source(written / name), converted / name)
        runs[world_size].append((name, "as saved", written / name, stage, dtype))
        runs[3 - world_size].append((name, "elsewhere", written / name, stage % 3 + 1, dtype))
        runs[1].append((name, "converted", converted / name, 0, dtype))
    found: dict[str, dict[str, Any]] = {}
    for world_size, rows in runs.items():
        results = run_distributed(_continue, world_size, [row[2:] for row in rows], timeout=100)[0]
        for (name, kind, *_), result in zip(rows, results, strict=True):
            found.setdefault(name, {})[kind] = result
    return found


@pytest.mark.parametrize("kind", ["as saved", "elsewhere", "converted"])
@pytest.mark.parametrize("case", SHARDED, ids=lambda case: case_name(*case))
def test_training_continues_as_deepspeed_did(
    case: tuple[int, str, int], kind: str, continued: dict[str, dict[str, Any]], losses: dict[str, list[float]]
) -> None:
    _, dtype, world_size = case
    name = case_name(*case)
    found, client, counters, scale, step = continued[name][kind]
    tolerance = 1e-5 if dtype.startswith("fp32") else 5e-3
    assert found == pytest.approx(losses[name], abs=tolerance)
    assert client == {"epoch": 3, "note": "kept"}
    assert counters == (STEPS_BEFORE, 2 * STEPS_BEFORE * world_size, 0)
    assert scale == (1024.0 if dtype == "fp16" else 1.0)  # 2**9, doubled once in three steps
    assert step == {3.0}


def test_the_losses_tell_a_wrong_import(written: Path, losses: dict[str, list[float]]) -> None:
    """Without moments and step they are elsewhere by far more than the tolerance."""
    torch.manual_seed(7)
    model = TinyModel()
    engine = ds_hf.initialize(model=model, model_parameters=groups(model), config=config(1, "fp32"))[0]
    engine.load_checkpoint(written / "stage1-fp32-world1", load_optimizer_states=False)
    found = train(engine, STEPS_AFTER, STEPS_BEFORE)
    engine.destroy()
    assert found[0] == pytest.approx(losses["stage1-fp32-world1"][0], abs=1e-5)
    assert abs(found[-1] - losses["stage1-fp32-world1"][-1]) > 1e-3


def _states(source: Source) -> dict[tuple[str, str], torch.Tensor]:
    saved = source.manifest.parameters
    return {(name, state): source.state(saved[name], state) for name in saved for state in saved[name].states}


def test_all_layouts_hold_the_same_numbers(written: Path) -> None:
    sources = [open_source(written / case_name(*case)) for case in SHARDED if case[1].startswith("fp32")]
    assert len(sources) == 7
    first = _states(sources[0])
    assert sum(value.numel() for value in first.values()) == 3 * NUMEL + 11
    for source in sources:
        source.check()
        assert source.kind is CheckpointKind.DEEPSPEED
        assert source.manifest.tied == {"head.weight": "embedding.weight"}
        assert list(source.manifest.buffers) == ["calls"]
        assert not source.manifest.parameters["frozen"].trainable
        found = _states(source)
        assert found.keys() == first.keys()
        assert all(torch.allclose(found[key], first[key], rtol=0, atol=2e-8) for key in first)
        assert source.manifest.extra["groups"] == [
            ["embedding.weight", "first.weight", "second.weight"],
            ["first.bias", "second.bias", "norm.weight", "norm.bias"],
        ]


def test_without_zero_weights_alone_are_read(written: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = open_source(written / "stage0-fp32-world1")
    assert "its moments have no names" in caplog.text
    assert source.manifest.tied == {"head.weight": "embedding.weight"}
    reference = open_source(written / "stage1-fp32-world1")
    for weight in reference.weights():
        assert torch.equal(weight.read(), {w.name: w for w in source.weights()}[weight.name].read())
    model = TinyModel()
    engine = ds_hf.initialize(model=model, model_parameters=groups(model), config=config(0, "fp32"))[0]
    with pytest.raises(CheckpointError, match="load_optimizer_states=False"):
        engine.load_checkpoint(written / "stage0-fp32-world1")
    assert engine.load_checkpoint(written / "stage0-fp32-world1", load_optimizer_states=False)[0]
    assert float(engine.module.calls) == STEPS_BEFORE
    engine.destroy()


# -- back to DeepSpeed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "world_size"), [(1, 1), (1, 3), (2, 2), (3, 1), (3, 2), (3, 4)])
def test_written_for_deepspeed_and_read_again(written: Path, tmp_path: Path, stage: int, world_size: int) -> None:
    source = open_source(written / "stage2-fp16-world2")
    folder = write_deepspeed(source, tmp_path, Target(stage, world_size, sub_group_size=20))
    again = open_source(tmp_path)
    assert again.folder == folder
    assert (again.stage, again.manifest.world_size) == (stage, world_size)
    before, after = _states(source), _states(again)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert again.common == {
        **source.common,
        "param_groups": [{**group, "bias_correction": True} for group in source.common["param_groups"]],
    }
    assert again.manifest.extra["counters"] == source.manifest.extra["counters"]
    assert again.manifest.extra["groups"] == source.manifest.extra["groups"]


@pytest.mark.parametrize("case", [(1, "fp32", 2), (2, "fp16", 2), (3, "fp32", 2), (3, "bf16", 2)])
def test_what_is_written_is_what_deepspeed_wrote(written: Path, tmp_path: Path, case: tuple[int, str, int]) -> None:
    """The same files, keys, types and tensors, but for what only its configuration tells."""
    stage, _, world_size = case
    theirs = written / case_name(*case) / "global_step3"
    ours = write_deepspeed(open_source(theirs), tmp_path, Target(stage, world_size))
    assert sorted(path.name for path in ours.iterdir()) == sorted(path.name for path in theirs.iterdir())
    for path in ours.iterdir():
        wanted = torch.serialization.get_unsafe_globals_in_checkpoint(theirs / path.name)
        assert set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) == set(wanted)
        missing, different = _compare(load_pickled(theirs / path.name), load_pickled(path))
        assert missing <= {"optimizer_state_dict.clip_grad"}
        # The step is a number here, which its own optimizers want. What DeepSpeed pads parts of parameters with at
        # stage 3 is chance; that the parts themselves are right is shown by reading them, above.
        padded = ("frozen_param_fragments.frozen", "fp32_flat_groups.1") if stage == 3 else ()
        assert all(key.endswith((".step", *padded)) for key in different), different


def _compare(theirs: Any, ours: Any, path: str = "") -> tuple[set[str], set[str]]:
    """Paths that only they have, and paths whose values differ."""
    missing: set[str] = set()
    different: set[str] = set()
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key, value in theirs.items():
            inner = f"{path}.{key}".strip(".")
            if "ds_config" in inner:
                continue
            if key not in ours:
                missing.add(inner)
                continue
            more = _compare(value, ours[key], inner)
            missing, different = missing | more[0], different | more[1]
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        for index, (left, right) in enumerate(zip(theirs, ours, strict=True)):
            more = _compare(left, right, f"{path}.{index}")
            missing, different = missing | more[0], different | more[1]
    elif isinstance(theirs, torch.Tensor) and isinstance(ours, torch.Tensor):
        if theirs.dtype != ours.dtype or not torch.equal(theirs, ours):
            different.add(path)
    elif hasattr(theirs, "__dict__") and type(theirs) is type(ours) and vars(theirs):
        return _compare(vars(theirs), vars(ours), path)
    elif type(theirs) is not type(ours) or theirs != ours:
        different.add(path)
    return missing, different


def _train_and_save(folder: Path, stage: int, dtype: str) -> list[float]:
    torch.manual_seed(0)
    model = TinyModel()
    engine = ds_hf.initialize(model=model, model_parameters=groups(model), config=config(stage, dtype))[0]
    train(engine, STEPS_BEFORE)
    engine.save_checkpoint(folder, client_state={"epoch": 3})
    return train(engine, STEPS_AFTER, STEPS_BEFORE)


@pytest.mark.slow
@pytest.mark.skipif(
    "DS_HF_DEEPSPEED_PYTHON" not in os.environ, reason="DS_HF_DEEPSPEED_PYTHON names no Python with DeepSpeed"
)
@pytest.mark.parametrize(
    ("stage", "dtype", "world_size"),
    [(1, "fp32", 2), (2, "fp32", 1), (3, "fp32", 2), (3, "fp32-sub-groups", 2), (2, "bf16", 2), (2, "fp16", 2)],
)
def test_real_deepspeed_continues_our_training(tmp_path: Path, stage: int, dtype: str, world_size: int) -> None:
    losses = run_distributed(_train_and_save, 2, tmp_path / "own", 4 - stage, dtype, timeout=60)[0]
    size = config(stage, dtype)["zero_optimization"].get("sub_group_size", 10**9)
    write_deepspeed(open_source(tmp_path / "own"), tmp_path / "theirs", Target(stage, world_size, size))
    script = Path(__file__).with_name("make_deepspeed_fixtures.py")
    command = [os.environ["DS_HF_DEEPSPEED_PYTHON"], str(script), "--resume", str(tmp_path / "theirs")]
    result = subprocess.run(
        [*command, str(stage), dtype, str(world_size)],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found == pytest.approx(losses, abs=1e-5 if dtype.startswith("fp32") else 5e-3)


@pytest.mark.parametrize("stage", [1, 3])
def test_our_own_comes_back_from_deepspeeds_files(tmp_path: Path, stage: int) -> None:
    """With a parameter of one number, whose moments we keep among the scalars."""
    with workload.engine_of(workload.config(2, "fp16")) as engine:
        workload.train(engine, 3)
        engine.save_checkpoint(tmp_path / "own")
        expected, losses = workload.states(engine), workload.train(engine, 3, 3)
    write_deepspeed(open_source(tmp_path / "own"), tmp_path / "theirs", Target(stage, 3))
    with workload.engine_of(workload.config(1, "fp16"), seed=7) as engine:
        workload.train(engine, 1, 50)
        engine.load_checkpoint(tmp_path / "theirs")
        assert workload.differences(expected, workload.states(engine)) == []
        assert workload.train(engine, 3, 3) == losses


def test_parameters_keep_the_order_of_the_users_groups(tmp_path: Path) -> None:
    """By which DeepSpeed knows them; ours are stored by unit."""
    model = TinyModel()
    chosen = [[model.second.weight, model.embedding.weight, model.norm.bias], [model.first.weight, model.first.bias]]
    engine = ds_hf.initialize(
        model=model, model_parameters=[{"params": params} for params in chosen], config=config(2, "fp32")
    )[0]
    train(engine, 1)
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    assert open_source(tmp_path).manifest.extra["groups"] == [
        ["second.weight", "embedding.weight", "norm.bias"],
        ["first.weight", "first.bias"],
    ]


def test_deepspeed_needs_optimizer_states(written: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no optimizer states"):
        write_deepspeed(open_source(written / "stage0-fp32-world1"), tmp_path / "out", Target(1, 1))
    assert not (tmp_path / "out").exists()


# -- damage and strangers -------------------------------------------------------------------------------------------


def _copy(written: Path, tmp_path: Path, name: str) -> Path:
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in (written / name / "global_step3").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


class _Evil:
    def __reduce__(self) -> Any:
        return (exec, ("import pathlib; pathlib.Path('/tmp/ds_hf_was_here').touch()",))


def test_a_stranger_runs_nothing(written: Path, tmp_path: Path) -> None:
    folder = _copy(written, tmp_path, "stage2-fp32-world2")
    path = folder / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(path, weights_only=True), "note": _Evil()}, path)
    with pytest.raises(CheckpointError, match=r"mp_rank_00_model_states.pt.*exec"):
        read_deepspeed(folder)
    assert not Path("/tmp/ds_hf_was_here").exists()


def test_objects_of_the_user_are_named(written: Path, tmp_path: Path) -> None:
    folder = _copy(written, tmp_path, "stage2-fp32-world2")
    path = folder / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(path, weights_only=True), "note": Path("here")}, path)
    with pytest.raises(CheckpointError, match=r"PosixPath.*client_state"):
        read_deepspeed(folder)


@pytest.mark.parametrize("name", ["stage2-fp32-world2", "stage3-fp32-world2"])
def test_files_of_a_rank_are_missing(written: Path, tmp_path: Path, name: str) -> None:
    folder = _copy(written, tmp_path, name)
    (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="2 ranks wrote it, but there are optimizer states of 1"):
        read_deepspeed(folder)
    (folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt").rename(folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    with pytest.raises(CheckpointError, match="files of some ranks are missing"):
        read_deepspeed(folder)


def test_truncated_files_are_named(written: Path, tmp_path: Path) -> None:
    folder = _copy(written, tmp_path, "stage1-fp32-world2")
    path = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=path.name):
        read_deepspeed(folder)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_flat_tensor_that_is_too_short(written: Path, tmp_path: Path, stage: int) -> None:
    folder = _copy(written, tmp_path, f"stage{stage}-fp32-world2")
    path = folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    content = load_pickled(path)
    state = content["optimizer_state_dict"]
    flat = state["single_partition_of_fp32_groups" if stage == 1 else "fp32_flat_groups"]
    flat[0] = flat[0][:-1].clone()
    path.unlink()
    save_pickled(path, content)
    with pytest.raises(CheckpointError, match=rf"{path.name}.*elements are expected"):
        read_deepspeed(folder).check()


def _places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything in nested containers and records."""
    inner: Any = ()
    if isinstance(content, dict):
        inner = content.items()
    elif isinstance(content, list):
        inner = enumerate(content)
    elif hasattr(content, "__dict__") and not isinstance(content, torch.Tensor):
        inner = vars(content).items()
    return [path] * bool(path) + [place for key, value in inner for place in _places(value, (*path, key))]


def _replace(content: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        content = content[key] if isinstance(content, dict | list) else vars(content)[key]
    holder = content if isinstance(content, dict | list) else vars(content)
    holder[path[-1]] = value


def _fault(folder: Path) -> str | None:
    """Why it is not read; otherwise all of it is."""
    try:
        source = read_deepspeed(folder)
        source.check()
        assert sum(value.numel() for value in _states(source).values()) < 10**6
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", ["stage1-fp16-world2", "stage3-fp32-world2"])
def test_nothing_in_the_files_is_believed(written: Path, tmp_path: Path, name: str) -> None:
    """Whatever one entry says: an error that names the place, or a checkpoint whose tensors can all be read."""
    folder = _copy(written, tmp_path, name)
    refused = accepted = 0
    for path in sorted(folder.glob("*rank_0*.pt")):
        content, whole = path.read_bytes(), load_pickled(path)
        places = [place for place in _places(whole) if "ds_config" not in place and "param_groups" not in place]
        for number, place in list(enumerate(places))[::2]:
            junk = (None, -1, 10**30, "x", [], {}, [[]], torch.ones(2, 2), torch.zeros(1).expand(10**9))[number % 9]
            changed = load_pickled(path)
            _replace(changed, place, junk)
            path.unlink()
            save_pickled(path, changed)
            fault = _fault(folder)
            assert fault is None or str(folder) in fault
            refused, accepted = refused + (fault is not None), accepted + (fault is None)
            path.unlink()
            path.write_bytes(content)
    assert refused > 20
    assert accepted > 10


@pytest.mark.parametrize("kind", ["optim_states", "model_states"])
def test_files_of_two_ranks_that_were_exchanged(written: Path, tmp_path: Path, kind: str) -> None:
    folder = Path(shutil.copytree(written / "stage3-fp32-world2/global_step3", tmp_path / "x"))
    first, second = (folder / f"zero_pp_rank_{rank}_mp_rank_00_{kind}.pt" for rank in (0, 1))
    first.rename(folder / "kept")
    second.rename(first)
    (folder / "kept").rename(second)
    with pytest.raises(CheckpointError, match=rf"zero_pp_rank_0_mp_rank_00_{kind}\.pt was written as zero_pp_rank_1_"):
        read_deepspeed(folder)


@pytest.mark.parametrize("case", ["stage3-fp32-world2", "stage3-fp32-sub-groups-world2", "stage3-bf16-world2"])
def test_content_of_another_rank_under_a_name_of_its_own(written: Path, tmp_path: Path, case: str) -> None:
    """Saved again by somebody, so that the archive says nothing."""
    folder = Path(shutil.copytree(written / case / "global_step3", tmp_path / "x"))
    first, second = sorted(folder.glob("*optim_states.pt"))
    (folder / "moved").mkdir()
    save_pickled(folder / "moved" / second.name, load_pickled(first))
    os.replace(folder / "moved" / second.name, second)
    with pytest.raises(CheckpointError, match=f"{second.name} holds the same as {first.name}: one was copied over"):
        read_deepspeed(folder)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", ["lr_scheduler", "epoch", "module"])
def test_small_values_that_take_everything(written: Path, tmp_path: Path, what: str) -> None:
    value: Any = [1]
    for _ in range(60):
        value = [value, value]
    folder = Path(shutil.copytree(written / "stage2-fp32-world2/global_step3", tmp_path / "x"))
    path = folder / "mp_rank_00_model_states.pt"
    content = load_pickled(path)
    if what == "module":
        content["module"]["more"] = torch.zeros(1).expand(9 * 10**8)
    else:
        content[what] = {"base_lrs": value}
    path.unlink()
    save_pickled(path, content)
    assert path.stat().st_size < 50_000
    with pytest.raises(
        CheckpointError, match=r"mp_rank_00_model_states\.pt cannot be read: it (holds more|stands for)"
    ):
        read_deepspeed(folder)


# -- experts in files of their own -------------------------------------------------------------------------------------


def write_experts(folder: Path) -> dict[str, torch.Tensor]:
    """A folder as DeepSpeed writes it of ``Net`` at ``ep_size`` 2; the weights."""
    model = Net((1, 1, 1))
    fill(model)
    state, layers = model.state_dict(), [f"blocks.{layer}.moe.deepspeed_moe.experts" for layer in range(3)]
    rest = {name: value for name, value in state.items() if ".experts." not in name}
    folder.mkdir()
    ranks = {"dp_world_size": 2, "mp_world_size": 1, "num_experts": [4, 4, 8], "global_steps": 3, "global_samples": 12}
    torch.save({"module": rest, "optimizer": None, **ranks}, folder / "mp_rank_00_model_states.pt")
    for layer, prefix in enumerate(layers):
        for expert in range(ranks["num_experts"][layer]):  # type: ignore[index]
            own = {name: v for name, v in state.items() if name.startswith(f"{prefix}.deepspeed_experts.{expert}.")}
            torch.save(own, folder / f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt")
    for rank in range(2):
        torch.save({"optimizer": {}}, folder / f"expp_rank_{rank}_mp_rank_00_optim_states.pt")
    return state


def load_experts(folder: str) -> dict[str, torch.Tensor]:
    model = Net((2, 1, 2))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 2},
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    with pytest.raises(CheckpointError, match="load it with load_optimizer_states=False"):
        engine.load_checkpoint(folder, "step")
    assert engine.load_checkpoint(folder, "step", load_optimizer_states=False)[0]
    assert engine.global_steps == 3
    return {name: param.detach().clone() for name, param in engine.module.named_parameters()}


def test_experts_in_files_of_their_own_are_read(tmp_path: Path) -> None:
    state = write_experts(tmp_path / "step")
    found = run_distributed(load_experts, 2, str(tmp_path))
    assert set().union(*found) == set(state)
    assert all(torch.equal(state[name], value) for each in found for name, value in each.items())
    gone = tmp_path / "step" / "layer_1_expert_2_mp_rank_00_model_states.pt"
    gone.rename(tmp_path / "aside.pt")
    with pytest.raises(CheckpointError, match=r"present are those of ranks \[0, 1, 3\] of experts of layer 1"):
        read_deepspeed(tmp_path / "step")
    (tmp_path / "aside.pt").rename(tmp_path / "step" / "expert_2_mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="of an older kind"):
        read_deepspeed(tmp_path / "step")
