"""What save_checkpoint puts on disk, and that it puts all of it there or nothing."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_hf.checkpoint import commit
from ds_hf.checkpoint.reports import complete
from ds_hf.engine.checkpoint import contents
from ds_hf.errors import CheckpointError, CheckpointPlaceError
from ds_hf.log import forget_said
from tests.engine.checkpoint.workload import Model, build, config, differences, engine_of, states, train
from tests.helpers.distributed import run_distributed


@pytest.fixture
def engine() -> Iterator[Any]:
    with engine_of(config(2)) as built:
        train(built, 2)
        yield built


def _visible(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_files_and_names(engine: Any, tmp_path: Path) -> None:
    assert engine.save_checkpoint(tmp_path) is True
    assert _visible(tmp_path) == [
        "global_step2",
        "global_step2/manifest.json",
        "global_step2/mp_rank_00_model_states.pt",
        "global_step2/rank_00000.safetensors",
        "global_step2/zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "global_step2/zero_to_fp32.py",
        "latest",
        "zero_to_fp32.py",
    ]
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert os.access(tmp_path / "zero_to_fp32.py", os.X_OK)
    assert os.access(tmp_path / "global_step2/zero_to_fp32.py", os.X_OK)
    common = torch.load(tmp_path / "global_step2/mp_rank_00_model_states.pt", weights_only=True)
    assert common["global_steps"] == 2
    assert common["dp_world_size"] == 1


def _save_at(folder: Path, stage: int, dtype: str) -> None:
    with engine_of(config(stage, dtype)) as engine:
        engine.save_checkpoint(folder)


@pytest.mark.parametrize(
    ("stage", "dtype", "expected"),
    [
        (1, "fp32", ["mp_rank_00_model_states.pt", *(f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in (0, 1))]),
        (
            3,
            "bf16",
            [
                *(f"bf16_zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in (0, 1)),
                *(f"zero_pp_rank_{r}_mp_rank_00_model_states.pt" for r in (0, 1)),
            ],
        ),
    ],
)
def test_names_that_tools_look_for(tmp_path: Path, stage: int, dtype: str, expected: list[str]) -> None:
    run_distributed(_save_at, 2, tmp_path, stage, dtype)
    assert sorted(path.name for path in tmp_path.glob("global_step0/*.pt")) == expected
    for path in tmp_path.glob("global_step0/*.pt"):
        assert torch.load(path, weights_only=True)["global_steps"] == 0


def test_manifest_tells_shapes_fragments_ties_and_groups(engine: Any, tmp_path: Path) -> None:
    engine.save_checkpoint(tmp_path, tag="here")
    manifest = json.loads((tmp_path / "here/manifest.json").read_text())
    parameters = manifest["parameters"]
    assert set(parameters) == {name for name, _ in engine.module.named_parameters()}
    linear = parameters["blocks.1.linear.weight"]
    assert linear["shape"] == [6, 6]
    assert linear["trainable"] is True
    assert set(linear["states"]) == {"master", "exp_avg", "exp_avg_sq"}
    assert sum(numel for _, _, _, numel in linear["fragments"]) == 36
    assert linear["scalars"] == {"step": ["float32", 2.0]}
    assert set(parameters["frozen"]["states"]) == {"weight"}
    assert manifest["tied"] == {"head.weight": "embedding.weight"}
    assert set(manifest["buffers"]) == {f"blocks.{i}.{name}" for i in (0, 1) for name in ("mean", "calls")}
    decayed, plain = manifest["groups"]
    assert sorted(decayed) == sorted(n for n, p in engine.module.named_parameters() if p.dim() > 1)
    assert "frozen" not in plain
    assert manifest["world_size"] == 1
    for name, nbytes in manifest["files"].items():
        assert (tmp_path / "here" / name).stat().st_size == nbytes


def test_16_bit_values_are_not_stored_beside_their_masters(tmp_path: Path) -> None:
    with engine_of(config(2, "bf16")) as engine:
        train(engine, 1)
        engine.save_checkpoint(tmp_path)
    parameters = json.loads((tmp_path / "global_step1/manifest.json").read_text())["parameters"]
    assert set(parameters["embedding.weight"]["states"]) == {"master", "exp_avg", "exp_avg_sq"}
    assert parameters["embedding.weight"]["dtype"] == "bfloat16"


def test_frozen_parameters_can_be_left_out(engine: Any, tmp_path: Path) -> None:
    engine.save_checkpoint(tmp_path / "all")
    engine.save_checkpoint(tmp_path / "some", exclude_frozen_parameters=True)
    manifest = json.loads((tmp_path / "some/global_step2/manifest.json").read_text())
    assert manifest["excluded"] == ["frozen"]
    assert "frozen" not in manifest["parameters"]
    tensors = "global_step2/rank_00000.safetensors"
    assert (tmp_path / "some" / tensors).stat().st_size < (tmp_path / "all" / tensors).stat().st_size - 11 * 4
    before = states(engine)
    engine.load_checkpoint(tmp_path / "some")
    assert differences(before, states(engine)) == []


def test_save_latest_can_be_left_to_the_caller(engine: Any, tmp_path: Path) -> None:
    engine.save_checkpoint(tmp_path, tag="a")
    engine.save_checkpoint(tmp_path, tag="b", save_latest=False)
    assert (tmp_path / "latest").read_text() == "a"


WRONG_TAGS = {
    "it leads out": ["../elsewhere", "/tmp/elsewhere", "a/../../b"],
    "it is empty": [""],
    "it is the folder itself": ["."],
    "it has a backslash": ["a\\b"],
    "it has a tab, line break, direction mark": ["a\nb", "a\tb", "\ta", "a\0b", "a\u202eb", "\x1b[2J", "a\u00a0b"],
    "it has spaces at an end": [" a", "a ", "a /b", " "],
    "is the name of a file": [
        "latest", "Latest", "run/latest", "manifest.json", "a/manifest.json", "zero_to_fp32.py",
        "rank_00000.safetensors", "mp_rank_00_model_states.pt", "model.safetensors",
        "model.safetensors.index.json", ".metadata",
    ],
    "is what an unfinished save is called": [".a.saving-0123456789ab", "a/.b.old-host-12-01234ab", ".latest.12.new"],
    "it is too long": ["x" * 300],
}  # fmt: skip


@pytest.mark.parametrize(("reason", "tags"), WRONG_TAGS.items())
def test_tags_that_would_be_lost_or_do_harm(engine: Any, tmp_path: Path, reason: str, tags: list[str]) -> None:
    for tag in tags:
        with pytest.raises(CheckpointPlaceError, match=f"cannot be the tag of a checkpoint: .*{reason}") as caught:
            engine.save_checkpoint(tmp_path / "inner", tag=tag)
        assert str(caught.value).isprintable()
    assert list(tmp_path.iterdir()) == []


def test_tags_that_deepspeed_takes(engine: Any, tmp_path: Path) -> None:
    tags = [
        5,
        0.25,
        True,
        "epoch1/step2",
        "epoch=1-step=10.5",
        "a b",
        "x//y/",
        ".hidden",
        "..a",
        "größe",
        "final.pt",
        "v1.0",
    ]
    for tag in tags:
        engine.save_checkpoint(tmp_path, tag=tag)
        folder = engine.load_checkpoint(tmp_path)[0]
        assert folder == str(tmp_path / str(tag))
        assert engine.load_checkpoint(tmp_path, tag=tag)[0] == folder
    assert (tmp_path / "5/manifest.json").is_file()
    for tag in tags:  # none took another's place
        assert engine.load_checkpoint(tmp_path, tag=tag)[0] is not None


def test_what_is_not_of_the_checkpoint_stays(engine: Any, tmp_path: Path) -> None:
    """DeepSpeed writes into a folder that is there; here it is replaced, but not what it held besides."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/notes.txt").write_text("mine")
    engine.save_checkpoint(tmp_path, tag="run/best", client_state={"which": 1})
    engine.save_checkpoint(tmp_path, tag="run", client_state={"which": 2})
    engine.save_checkpoint(tmp_path, tag="run", client_state={"which": 3})
    assert (tmp_path / "run/notes.txt").read_text() == "mine"
    assert engine.load_checkpoint(tmp_path, tag="run/best")[1] == {"which": 1}
    assert engine.load_checkpoint(tmp_path)[1] == {"which": 3}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointPlaceError, match="file is a file: give another tag"):
        engine.save_checkpoint(tmp_path, tag="file")
    assert (tmp_path / "file").read_text() == "mine"


def _one_rank_is_wrong(folder: Path) -> list[str]:
    found = []
    with engine_of(config(2)) as engine:
        first = engine.axis.rank == 0
        for place, tag in ((folder if first else "", "good"), (folder, "latest" if first else "good")):
            with pytest.raises(CheckpointPlaceError) as caught:
                engine.save_checkpoint(place, tag=tag)
            found.append(str(caught.value))
        for call in (engine.save_checkpoint, engine.load_checkpoint, engine.export_pretrained, engine.save_16bit_model):
            with pytest.raises(CheckpointError, match="_dir has a NUL character"):
                call("here\0there")
        with pytest.raises(CheckpointError, match="load_dir is empty"):
            engine.load_checkpoint("" if first else folder)
        with pytest.raises(CheckpointError, match="save_dir is empty"):
            engine.save_16bit_model(folder if first else "")
    return found


def test_every_rank_refuses_the_same(tmp_path: Path) -> None:
    first, second = run_distributed(_one_rank_is_wrong, 2, tmp_path)
    assert first == second
    assert "save_dir is empty" in first[0]
    assert "'latest' is the name of a file" in first[1]
    assert list(tmp_path.iterdir()) == []


class _Anything:
    pass


@pytest.mark.parametrize(
    ("state", "where", "kept"),
    [
        ({"fine": 1, "bad": _Anything()}, "client_state['bad'] is not saved", {"fine": 1}),
        ({"outer": [1, {"in": _Anything()}]}, "client_state['outer'][1]['in'] is not saved", {"outer": [1, {}]}),
        ({"function": _visible, 1: 2}, "client_state['function'] is not saved", {1: 2}),
        ({_Anything(): 1, "a": 2}, "the key <", {"a": 2}),
        (_Anything(), "client_state is not saved", {}),
        ([1, 2], "", [1, 2]),
    ],
)
def test_client_state_that_would_not_load_is_left_out(
    engine: Any, tmp_path: Path, state: Any, where: str, kept: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """And told; the run goes on."""
    forget_said()
    engine.save_checkpoint(tmp_path, client_state=state)
    assert where in caplog.text
    assert engine.load_checkpoint(tmp_path)[1] == kept


@pytest.mark.parametrize("what", ["class", "moments", "step"])
def test_ranks_with_different_optimizers_save_nothing(
    engine: Any, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one rank reports of an optimizer that is not that of the other."""

    def two(description: Any, reports: Any) -> Any:
        other = copy.deepcopy(reports[0])
        if what == "class":
            other.optimizer = "SGD"
        for entry in other.parameters.values():
            if what == "moments":
                entry["states"].pop("exp_avg_sq", None)
            elif what == "step":
                entry["scalars"] = {}
        return complete(description, [reports[0], other])

    engine.save_checkpoint(tmp_path, tag="good")
    monkeypatch.setattr(commit, "complete", two)
    wanted = "rank 1 has " if what == "class" else "the optimizer of rank 1 keeps"
    with pytest.raises(CheckpointError, match=wanted):
        engine.save_checkpoint(tmp_path, tag="bad")
    assert (tmp_path / "latest").read_text() == "good"
    assert not (tmp_path / "bad").exists()


def test_overwriting_replaces_all_of_it(engine: Any, tmp_path: Path) -> None:
    engine.save_checkpoint(tmp_path, tag="same", client_state={"which": 1})
    (tmp_path / "same/stray.txt").write_text("a user's")
    (tmp_path / "same/rank_00005.safetensors").write_text("of another run")
    train(engine, 1, 20)
    engine.save_checkpoint(tmp_path, tag="same", client_state={"which": 2})
    assert (tmp_path / "same/stray.txt").exists()
    assert not (tmp_path / "same/rank_00005.safetensors").exists()
    assert engine.load_checkpoint(tmp_path)[1] == {"which": 2}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("module", "function"),
    [
        (contents, "write_tensor_file"),
        (contents, "write_bytes"),
        (commit, "complete"),
        (commit, "sync"),
        (commit, "write_text"),
    ],
)
def test_failure_leaves_the_former_checkpoint(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, function: str
) -> None:
    engine.save_checkpoint(tmp_path, tag="same")
    before, files = states(engine), _visible(tmp_path)
    train(engine, 1, 30)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, function, full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            engine.save_checkpoint(tmp_path, tag="same")
    assert _visible(tmp_path) == files
    engine.load_checkpoint(tmp_path)
    assert differences(before, states(engine)) == []


def test_failing_rename_puts_the_former_back(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.save_checkpoint(tmp_path, tag="same", client_state={"which": 1})
    rename = os.rename

    def fails_for_the_new(source: Any, target: Any) -> None:
        if ".saving-" in str(source):
            raise OSError(5, "Input/output error")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fails_for_the_new)
        with pytest.raises(CheckpointError, match="Input/output error"):
            engine.save_checkpoint(tmp_path, tag="same", client_state={"which": 2})
    assert engine.load_checkpoint(tmp_path)[1] == {"which": 1}


def test_death_between_the_two_renames_loses_nothing(engine: Any, tmp_path: Path) -> None:
    engine.save_checkpoint(tmp_path, tag="same", client_state={"which": 1})
    (tmp_path / "same").rename(tmp_path / ".same.old-0123456789ab")
    assert engine.load_checkpoint(tmp_path)[1] == {"which": 1}
    engine.save_checkpoint(tmp_path, tag="same", client_state={"which": 2})
    assert engine.load_checkpoint(tmp_path)[1] == {"which": 2}


def test_leftovers_of_killed_processes_are_removed(engine: Any, tmp_path: Path) -> None:
    (tmp_path / ".same.saving-abc").mkdir()
    (tmp_path / ".same.saving-abc/rank_00000.safetensors").write_text("half")
    engine.save_checkpoint(tmp_path, tag="same")
    assert not (tmp_path / ".same.saving-abc").exists()


def _one_rank_fails(folder: Path) -> tuple[str, list[str], bool]:
    engine = build(config(2))
    train(engine, 1)
    engine.save_checkpoint(folder, tag="good")
    before = states(engine)
    train(engine, 1, 1)
    rank = engine.axis.rank
    original = contents.write_tensor_file

    def failing(*arguments: Any) -> Any:
        if rank == 1:
            raise OSError(28, "No space left on device")
        return original(*arguments)

    contents.write_tensor_file = failing  # type: ignore[assignment]  # this process belongs to the test alone
    try:
        engine.save_checkpoint(folder, tag="good")
        message = "no error"
    except CheckpointError as error:
        message = str(error)
    contents.write_tensor_file = original
    engine.load_checkpoint(folder)
    return message, _visible(folder), differences(before, states(engine)) == []


def test_one_failing_rank_fails_all_and_nobody_hangs(tmp_path: Path) -> None:
    (first, files, first_same), (second, _, second_same) = run_distributed(_one_rank_fails, 2, tmp_path, timeout=40)
    assert "failed on rank 1" in first
    assert "No space left" in first
    assert "No space left" in second
    assert first_same
    assert second_same
    assert not any(part.startswith(".") for path in files for part in path.split("/"))


def _different_tags(folder: Path, mode: str) -> tuple[str, list[str]]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_hf").addHandler(handler)
    engine = build(config(1, checkpoint={"tag_validation": mode}))
    try:
        engine.save_checkpoint(folder, tag=f"rank{engine.axis.rank}")
        return "saved", [text for text in records if "tags" in text]
    except CheckpointError as error:
        return str(error), []


def _different_folders(folder: Path) -> tuple[list[str], str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_hf").addHandler(handler)
    engine = build(config(1))
    engine.save_checkpoint(folder / f"run.12.00.0{engine.axis.rank}", tag="step")
    dist.barrier()
    found, _ = engine.load_checkpoint(folder / "run.12.00.00")
    return [text for text in records if "as rank 0 does" in text], str(found)


def test_ranks_that_name_the_folder_differently_save_in_that_of_the_first(tmp_path: Path) -> None:
    """DeepSpeedExamples' HelloDeepSpeed has the second in the name, and each rank takes its own."""
    (first, place), (second, _) = run_distributed(_different_folders, 2, tmp_path)
    assert place == str(tmp_path / "run.12.00.00" / "step")
    assert not first
    assert len(second) == 1
    assert "run.12.00.01" in second[0]
    assert [path.name for path in tmp_path.iterdir()] == ["run.12.00.00"]


@pytest.mark.parametrize("mode", ["Warn", "Ignore", "Fail"])
def test_tag_validation(tmp_path: Path, mode: str) -> None:
    (first, warnings), (second, _) = run_distributed(_different_tags, 2, tmp_path, mode)
    if mode == "Fail":
        assert "different tags: ['rank0', 'rank1']" in first
        assert "different tags" in second
        assert _visible(tmp_path) == []
    else:
        assert first == second == "saved"
        assert len(warnings) == (mode == "Warn")
        assert (tmp_path / "latest").read_text() == "rank0"
        assert not (tmp_path / "rank1").exists()


def test_values_that_no_unit_holds_are_saved(tmp_path: Path) -> None:
    """Integer parameters (quantized weights) lie outside of the flat buffers where parameters are replicated."""
    model = Model()
    model.codes = torch.nn.Parameter(torch.arange(5, dtype=torch.uint8), requires_grad=False)
    with engine_of(config(2), model) as engine:
        engine.save_checkpoint(tmp_path)
        model.codes.data.zero_()
        engine.load_checkpoint(tmp_path)
        assert model.codes.tolist() == [0, 1, 2, 3, 4]


def test_gradients_of_a_step_that_is_under_way_are_told_to_be_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And a run that loads it makes that step of all its micro-batches: weights as if they had come once."""
    content = {**config(2), "gradient_accumulation_steps": 3}
    with engine_of(content) as engine:
        train(engine, 4)
        assert "amid a step" not in caplog.text
        engine.save_checkpoint(tmp_path)
        assert "amid a step, of which 1 of 3 micro-batches were done" in caplog.text
        train(engine, 1, 4)
        engine.save_checkpoint(tmp_path)
        assert caplog.text.count("amid a step") == 1
        train(engine, 1, 5)
        expected = states(engine)
    with engine_of(content, seed=5) as engine:
        engine.load_checkpoint(tmp_path)
        train(engine, 3, 3)
        found = differences(states(engine), expected)
        assert [name for name in found if not name.endswith((".mean", ".calls"))] == []  # buffers saw two samples twice
