"""DeepSpeed's checkpoints of tensor-parallel ranks: whole parameters out of slices, by what the files say of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_hf.checkpoint.convert import write_own
from ds_hf.checkpoint.deepspeed.pickles import load_pickled, save_pickled
from ds_hf.checkpoint.deepspeed.read import read_deepspeed
from ds_hf.checkpoint.deepspeed.slices import RULES_FILE, SliceRules
from ds_hf.checkpoint.format import SavedCut
from ds_hf.checkpoint.formats import open_source
from ds_hf.checkpoint.inspect import faults_of
from ds_hf.checkpoint.pretrained import export_source
from ds_hf.checkpoint.source import CheckpointKind, Source
from ds_hf.checkpoint.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
)
from ds_hf.errors import CheckpointError
from tests.checkpoint.deepspeed.sliced_files import values_of, write_slices
from tests.checkpoint.deepspeed.test_read import _places, _replace

VOCABULARY, PADDED = 10, 12
STATES = ("master", "exp_avg", "exp_avg_sq")

# name: whole shape and how two tensor-parallel ranks hold it
SHAPES = {
    "embed.weight": (VOCABULARY, 4),  # rows, padded
    "qkv.weight": (4 + 2 + 2, 4),  # three packed matrices, of the keys rank 0 has both rows
    "experts.weight": (2 * 3 * 2, 4),  # two experts of a gate and an up of three rows, described as [2, 6, 4]
    "gate_up.weight": (6, 4),  # two packed matrices
    "o.weight": (4, 6),  # columns
    "norm.weight": (5,),  # the same on both
    "router.weight": (3, 4),  # averaged
    "up.weight": (7, 4),  # rows, uneven
    "odd.weight": (4, 4),  # of each rank two blocks that are no ranges of one dimension
}

INFO: dict[str, Any] = {
    "universal_checkpoint_version": 0.4,
    "tp_replicated_parameter_patterns": [r"^norm\.weight$"],
    "parameter_to_average_patterns": [r"router\..*"],
    "parameter_with_row_parallelism_patterns": [r".*\bo\.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [r"gate_up"],
    "vocabulary_parameter_patterns": [r"embed\.weight"],
    "original_vocab_size": VOCABULARY,
    "parameter_with_sub_params": [
        {"patterns": [r"^qkv\.weight$"], "shape": [[4, 2, 2], -1], "partition_dim": 0},
        {"patterns": [r"experts"], "shape": [2, [3, 3], 4], "partition_dim": 1},
    ],
    "sub_param_shard_widths": {r"^qkv\.weight$": [[2, 2], [2, 0], [1, 1]], "experts": [[2, 1], [1, 2]]},
    "affine_map": {
        "version": 1,
        "params": {
            r"^odd\.weight$": {
                "logical_shape": [4, 4],
                "ranks": {
                    rank: {
                        "shard_shape": [2, 4],
                        "pieces": [  # the left of two rows, and the right of the two others
                            {"shape": [2, 2], "source": [8 * rank, [4, 1]], "dest": [0, [4, 1]], "locations": [rank]},
                            {
                                "shape": [2, 2],
                                "source": [8 * (1 - rank) + 2, [4, 1]],
                                "dest": [2, [4, 1]],
                                "locations": [rank],
                            },
                        ],
                    }
                    for rank in (0, 1)
                },
            }
        },
    },
}


def split(name: str, value: Tensor, rank: int) -> Tensor:
    if name == "norm.weight":
        return value.clone()
    if name == "router.weight":  # whose mean is the value
        return value + (0.5 if rank else -0.5)
    if name == "embed.weight":
        return torch.cat([value, torch.full((PADDED - VOCABULARY, 4), 9.0)]).chunk(2)[rank]
    if name == "qkv.weight":
        return value[[[0, 1, 4, 5, 6], [2, 3, 7]][rank]]
    if name == "experts.weight":
        kept = [[0, 1, 3], [2, 4, 5]][rank]
        return value.view(2, 6, 4)[:, kept].reshape(-1, 4)
    if name == "gate_up.weight":
        return torch.cat([part.split([1, 2])[rank] for part in value.chunk(2)])
    if name == "o.weight":
        return value.split([2, 4], 1)[rank]
    if name == "up.weight":
        return value.split([3, 4])[rank]
    left, right = (value[:2], value[2:]) if rank == 0 else (value[2:], value[:2])
    return torch.cat([left[:, :2], right[:, 2:]], 1)


def whole_values() -> dict[str, dict[str, Tensor]]:
    """Sixteenths, so that the mean of a value half above and half below is exact."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: {state: torch.randint(-999, 999, shape, generator=generator) / 16 for state in STATES}
        for name, shape in SHAPES.items()
    }


def wrote(folder: Path, **more: Any) -> Path:
    return write_slices(folder, whole_values(), split, **{"info": INFO, **more})


def check_values(source: Source, wanted: dict[str, dict[str, Tensor]] | None = None) -> None:
    found = values_of(source)
    for name, states in (wanted or whole_values()).items():
        assert set(found[name]) == set(states)
        for state, value in states.items():
            assert torch.equal(found[name][state], value), (name, state)


@pytest.mark.parametrize("data", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_slices_become_whole(tmp_path: Path, stage: int, data: int) -> None:
    source = open_source(wrote(tmp_path / "global_step3", stage=stage, data=data, client={"epoch": 3}))
    source.check()
    assert (source.kind, source.stage, source.manifest.world_size) == (CheckpointKind.DEEPSPEED, stage, 2 * data)
    check_values(source)
    assert {name: saved.shape for name, saved in source.manifest.parameters.items()} == SHAPES
    assert all(saved.scalars == {"step": ["float32", 3.0]} for saved in source.manifest.parameters.values())
    assert source.common["client_state"] == {"epoch": 3, "universal_checkpoint_info": INFO}  # as DeepSpeed gives it
    assert source.manifest.extra["groups"] == [list(SHAPES)]
    assert source.manifest.extra["counters"] == {
        "global_steps": 3, "global_samples": 6, "skipped_steps": 0, "micro_steps": 3,
    }  # fmt: skip


def test_everything_that_reads_checkpoints_reads_them(tmp_path: Path) -> None:
    """Slices of an engine, conversion to our format, weights as a state dict and as files, verification."""
    folder = wrote(tmp_path / "x" / "global_step3", stage=2, data=2)
    values, source = whole_values(), open_source(folder.parent)
    saved = source.manifest.parameters["qkv.weight"]
    cut = SavedCut(0, ((1, 4), (7, 1)))
    taken = source.files.value(saved, cut=cut)
    assert torch.equal(taken, values["qkv.weight"]["master"][[1, 2, 3, 4, 7]])
    assert faults_of(folder.parent) == []
    write_own(source, tmp_path / "own")
    again = open_source(tmp_path / "own")
    assert again.kind is CheckpointKind.DS_HF
    check_values(again)
    weights = get_fp32_state_dict_from_zero_checkpoint(folder.parent)
    assert all(torch.equal(weights[name], states["master"]) for name, states in values.items())
    convert_zero_checkpoint_to_fp32_state_dict(folder.parent, tmp_path / "weights.bin")
    loaded = torch.load(tmp_path / "weights.bin", weights_only=True)
    assert all(torch.equal(loaded[name], states["master"]) for name, states in values.items())
    export_source(source, tmp_path / "hf")
    exported = open_source(tmp_path / "hf")
    assert {w.name: w.dtype for w in exported.weights()} == dict.fromkeys(SHAPES, torch.bfloat16)


def test_frozen_parameters_and_buffers(tmp_path: Path) -> None:
    """Slices as any other; a buffer that each rank has built for itself is left out."""
    frozen = {"base.weight": {"weight": torch.randn(6, 4)}}
    info = {**INFO, "tp_replicated_parameter_patterns": [r"^norm\.weight$"]}
    model = {"module": {"steps": torch.tensor(3)}, "buffer_names": ["steps", "begin"]}
    cut = lambda name, value, rank: value.chunk(2)[rank] if name == "base.weight" else split(name, value, rank)  # noqa: E731
    for stage in (1, 2, 3):
        folder = tmp_path / str(stage) / "global_step3"
        write_slices(folder, whole_values(), cut, stage=stage, data=2, info=info, frozen=frozen, model=model)
        for path in folder.glob("*model_states.pt"):
            content = load_pickled(path)
            content["module"] = {
                **content["module"],
                "steps": torch.tensor(3),
                "begin": torch.tensor("_01_" in path.name),
            }
            path.unlink()
            save_pickled(path, content)
        source = open_source(folder)
        source.check()
        assert not source.manifest.parameters["base.weight"].trainable
        check_values(source, {**whole_values(), "base.weight": frozen["base.weight"]})
        assert list(source.manifest.buffers) == ["steps"]
        assert source.manifest.excluded == {"begin"}


def test_the_rules_can_lie_beside_the_files(tmp_path: Path) -> None:
    folder = wrote(tmp_path / "global_step3", info=None)
    with pytest.raises(CheckpointError, match=rf"saved by 2 tensor-parallel ranks.*Put a file {RULES_FILE}"):
        read_deepspeed(folder)
    (folder / RULES_FILE).write_text(json.dumps(INFO))
    source = read_deepspeed(folder)
    check_values(source)
    (folder / RULES_FILE).write_text("{")
    with pytest.raises(CheckpointError, match=f"{RULES_FILE} cannot be read"):
        read_deepspeed(folder)


def test_older_rules_count_equal_parts(tmp_path: Path) -> None:
    """Before version 0.4 shapes may give the number of packed matrices, which divide evenly."""
    values = {"qkv.weight": {state: torch.randn(12, 4) for state in STATES}}
    info = {
        "universal_checkpoint_version": 0.2,
        "parameter_with_sub_params": [{"patterns": ["qkv"], "shape": [3, -1], "partition_dim": 0}],
    }
    cut = lambda name, value, rank: torch.cat([part.chunk(2)[rank] for part in value.chunk(3)])  # noqa: E731
    source = read_deepspeed(write_slices(tmp_path / "x", values, cut, info=info))
    check_values(source, values)


# -- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "lost", "message"),
    [
        (1, "mp_rank_01_model_states.pt", "models of 1 model-parallel ranks, and optimizer states of 2"),
        (1, "mp_rank_00_model_states.pt", r"present are those of ranks \[1\]"),
        (1, "*mp_rank_01_*.pt", r"2 model-parallel ranks wrote it \(tensor 2, pipeline 1\), but there are models of 1"),
        (2, "zero_pp_rank_1_mp_rank_01_optim_states.pt", "2 of model-parallel rank 0, 1 of model-parallel rank 1"),
        (3, "zero_pp_rank_0_mp_rank_01_*", r"present are those of ranks \[1\] of model-parallel rank 1"),
    ],
)
def test_files_of_a_rank_are_missing(tmp_path: Path, stage: int, lost: str, message: str) -> None:
    folder = wrote(tmp_path / "x", stage=stage, data=2)
    paths = list(folder.glob(lost))
    assert paths
    for path in paths:
        path.unlink()
    with pytest.raises(CheckpointError, match=message):
        read_deepspeed(folder)


@pytest.mark.parametrize("kind", ["model", "optim"])
@pytest.mark.parametrize("stage", [1, 3])
def test_files_of_different_saves(tmp_path: Path, stage: int, kind: str) -> None:
    folder, later = wrote(tmp_path / "x", stage=stage, data=2), wrote(tmp_path / "y", stage=stage, data=2, step=4)
    for path in later.glob(f"*mp_rank_01_{kind}_states.pt"):
        (folder / path.name).write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError, match="the files are of different saves"):
        read_deepspeed(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tp_replicated_parameter_patterns": ["norm", "up"]}, r"up\.weight.*different shapes of it"),
        ({"parameter_with_row_parallelism_patterns": []}, r"o\.weight .*differ in more than dimension 0"),
        ({"parameter_with_row_parallelism_patterns": ["o", "norm"]}, None),  # norm is asked for among others first
        ({"parameter_with_row_parallelism_patterns": ["up", ".*o.weight"]}, r"up\.weight .*more than dimension 1"),
        ({"parameter_with_2_sub_params_cat_dim_0": ["gate_up", "up"]}, r"up\.weight .*odd number of rows"),
        ({"sub_param_shard_widths": {}}, r"qkv\.weight .*does not have the widths"),
        ({"sub_param_shard_widths": {r"^qkv\.weight$": [[2, 2], [1, 1], [1, 1]]}}, r"rank 0 holds 20 elements"),
        ({"tp_replicated_parameter_patterns": ["no", "norm"]}, "more than one pattern of a list matches norm"),
        ({"tp_replicated_parameter_patterns": ["("]}, "is not a pattern"),
        ({"tp_replicated_parameter_patterns": ["(n+)+x"]}, "may take very long"),
        ({"tp_replicated_parameter_patterns": ["n?" * 30]}, "may take very long"),
        ({"tp_replicated_parameter_patterns": "norm"}, "has a str where a list is expected"),
        ({"original_vocab_size": "x"}, r"embed\.weight .*where a number is expected"),
        ({"autotp_unsupported_parameter_patterns": {"qkv": "shared QK"}}, "DeepSpeed says .*qkv.*shared QK"),
        ({"affine_map": {"version": 2, "params": {}}}, "affine_map .*has version 2"),
    ],
)
def test_rules_that_do_not_fit(tmp_path: Path, change: dict[str, Any], message: str | None) -> None:
    folder = wrote(tmp_path / "x", info={**INFO, **change})
    if message is None:
        check_values(read_deepspeed(folder))
        return
    with pytest.raises(CheckpointError, match=message):
        read_deepspeed(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": [8, [4, 1]]}, "lack 4 of its 16 elements"),
        ({"source": [16, [4, 1]]}, "reaches beyond the parameter"),
        ({"shape": [2, 1]}, "are not the 8 of its slice"),
        ({"scale": 0.5}, "load_optimizer_states=False"),
        ({"scale": 0.0}, "impossible scale"),
    ],
)
def test_a_geometry_that_does_not_cover(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    info = json.loads(json.dumps(INFO))
    piece = info["affine_map"]["params"][r"^odd\.weight$"]["ranks"]["0"]["pieces"][0]
    piece.update(change)
    with pytest.raises(CheckpointError, match=rf"odd\.weight.*{message}"):
        read_deepspeed(wrote(tmp_path / "x", info=info)).check()


def test_key_heads_that_ranks_share_have_to_be_the_same(tmp_path: Path) -> None:
    """Fewer key heads than ranks: both hold the rows. The first is taken, and compared with the other."""
    rows = [{"shape": [2, 4], "source": [0, [4, 1]], "dest": [0, [4, 1]], "locations": [0, 1]}]
    entry = {"logical_shape": [2, 4], "ranks": {r: {"shard_shape": [2, 4], "pieces": rows} for r in ("0", "1")}}
    info = {"affine_map": {"version": 1, "params": {"k": entry}}}
    values = {"k": {state: torch.randn(2, 4) for state in STATES}}
    source = read_deepspeed(write_slices(tmp_path / "x", values, lambda name, value, rank: value.clone(), info=info))
    source.check()
    check_values(source, values)
    apart = write_slices(tmp_path / "y", values, lambda name, value, rank: value + rank, info=info)
    with pytest.raises(CheckpointError, match=r"k \(master\) differs by 1 on tensor-parallel ranks 0 and 1"):
        read_deepspeed(apart).check()


def test_what_is_to_be_the_same_but_for_rounding(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = {"norm.weight": {state: torch.ones(5) for state in STATES}}
    info = {"tp_replicated_parameter_patterns": [".*"]}
    source = read_deepspeed(
        write_slices(tmp_path / "x", values, lambda name, value, rank: value * (1 + 1e-6 * rank), info=info)
    )
    source.check()
    assert "that of rank 0 is taken" in caplog.text
    check_values(source, values)


@pytest.mark.parametrize("stage", [1, 3])
def test_nothing_in_the_files_is_believed(tmp_path: Path, stage: int) -> None:
    """Whatever one entry says: an error that names the folder, or a checkpoint whose tensors can all be read."""
    folder = wrote(tmp_path / "x", stage=stage)
    refused = accepted = 0
    for path in sorted(folder.glob("*.pt")):
        content, whole = path.read_bytes(), load_pickled(path)
        places = [place for place in _places(whole) if "ds_config" not in place and "param_groups" not in place]
        for number, place in list(enumerate(places))[:: 7 if "model" in path.name else 2]:
            junk = (None, -1, 10**30, "x", [], {}, [[]], torch.ones(2, 2), torch.zeros(1).expand(10**9))[number % 9]
            changed = load_pickled(path)
            _replace(changed, place, junk)
            path.unlink()
            save_pickled(path, changed)
            fault = None
            try:
                source = read_deepspeed(folder)
                source.check()
                assert sum(v.numel() for of in values_of(source).values() for v in of.values()) < 10**6
            except CheckpointError as error:
                fault = str(error)
            assert fault is None or str(folder) in fault, fault
            refused, accepted = refused + (fault is not None), accepted + (fault is None)
            path.unlink()
            path.write_bytes(content)
    assert refused > 20
    assert accepted > 10


def test_patterns_that_are_names_are_looked_up(tmp_path: Path) -> None:
    """AutoTP writes one for each parameter: trying all on all would take minutes."""
    names = [f"model.layers.{number}.norm.weight" for number in range(3000)]
    info = {"tp_replicated_parameter_patterns": [f"^{name}$".replace(".", r"\.") for name in names]}
    rules = SliceRules(info, tmp_path, 2)
    assert all(rules.place(name, [(4,), (4,)]).same for name in names)
    assert rules.unused() == []
