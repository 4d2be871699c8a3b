"""``python -m deepspeed.checkpoint.ds_to_universal`` and the functions of its steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.checkpoint.deepspeed_checkpoint import DeepSpeedCheckpoint
from deepspeed.checkpoint.ds_to_universal import (
    dp_index_to_str,
    extract_zero_shards,
    extract_zero_shards_stage3,
    main,
    merge_tp_slices,
    merge_zero3_slices,
    natural_keys,
    parse_arguments,
)
from deepspeed.checkpoint.universal_checkpoint import enable_universal_checkpoint
from torch import nn

from ds_hf.checkpoint.deepspeed.pickles import load_any, save_pickled
from ds_hf.checkpoint.formats import open_source
from ds_hf.errors import CheckpointError
from tests.checkpoint.deepspeed.sliced_files import write_slices
from tests.checkpoint.deepspeed.test_slices import INFO, SHAPES, check_values, split, whole_values
from tests.engine.checkpoint import workload
from tests.helpers.distributed import run_distributed

NAMES = {"master": "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def arguments(source: Path, output: Path, **more: Any) -> SimpleNamespace:
    known = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    return SimpleNamespace(input_folder=str(source), output_folder=str(output), **{**known, **more})


def test_options_are_deepspeeds() -> None:
    found = vars(parse_arguments(["--input_folder", "a", "--output_folder", "b"]))
    assert found == {
        "input_folder": "a", "output_folder": "b", "num_extract_workers": 4, "num_merge_workers": 2,
        "keep_temp_folder": False, "strict": True, "inject_missing_state": False,
    }  # fmt: skip
    more = ["--no_strict", "--keep_temp_folder", "--inject_missing_state", "--num_merge_workers", "3"]
    found = vars(parse_arguments(["--input_folder", "a", "--output_folder", "b", *more]))
    assert (found["strict"], found["keep_temp_folder"], found["inject_missing_state"]) == (False, True, True)
    assert found["num_merge_workers"] == 3


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    folder = write_slices(tmp_path / "in" / "global_step3", whole_values(), split, stage=2, data=2, info=INFO)
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(folder)]
    output = tmp_path / "out" / "global_step3_universal"
    result = subprocess.run([*command, "--output_folder", str(output)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "*** Done!"
    check_values(open_source(tmp_path / "out"))
    next(folder.glob("*01_optim_states.pt")).unlink()
    result = subprocess.run([*command, "--output_folder", str(tmp_path / "x")], capture_output=True, text=True)
    assert result.returncode == 1
    assert "the files of some ranks are missing" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "x").exists()


def _save_convert_load(folder: Path, stage: int, dtype: str) -> list[str]:
    """As DeepSpeed's users do it: all processes save, the first converts, all load, perhaps at another stage."""
    client = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.4}}
    with workload.engine_of(workload.config(stage, dtype)) as engine:
        workload.train(engine, 3)
        engine.save_checkpoint(folder, tag="tag", client_state=client)
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            main(arguments(folder / "tag", folder / "tag_universal", inject_missing_state=False))
        torch.distributed.barrier()
        expected = workload.states(engine)
    found = []
    for other in (stage, 3 - stage):
        config = workload.config(other, dtype, checkpoint={"load_universal": True})
        with workload.engine_of(config, seed=7) as engine:
            path, loaded = engine.load_checkpoint(folder, tag="tag_universal")
            assert path == str(folder / "tag_universal")
            assert loaded == client
            found += workload.differences(expected, workload.states(engine))
    return found


@pytest.mark.parametrize(("stage", "dtype"), [(1, "bf16"), (3, "fp32")])
def test_in_the_processes_that_train(tmp_path: Path, stage: int, dtype: str) -> None:
    assert run_distributed(_save_convert_load, 2, tmp_path, stage, dtype, timeout=100) == [[], []]


def test_without_information_slices_follow_one_another_if_asked(tmp_path: Path, caplog: Any) -> None:
    values = {"a.weight": whole_values()["up.weight"]}
    cut = lambda name, value, rank: value.split([3, 4])[rank]  # noqa: E731
    folder = write_slices(tmp_path / "in", values, cut)
    with pytest.raises(CheckpointError, match="has no universal_checkpoint_info"):
        main(arguments(folder, tmp_path / "out" / "u"))
    main(arguments(folder, tmp_path / "out" / "u", inject_missing_state=True))
    assert "slices are taken to follow one another" in caplog.text
    check_values(open_source(tmp_path / "out"), values)


def test_unused_patterns(tmp_path: Path) -> None:
    info = {**INFO, "tp_replicated_parameter_patterns": [r"^norm\.weight$", "misspelt"]}
    folder = write_slices(tmp_path / "in", whole_values(), split, info=info)
    with pytest.raises(CheckpointError, match="misspelt"):
        main(arguments(folder, tmp_path / "u"))
    main(arguments(folder, tmp_path / "u", strict=False))
    with pytest.raises(ValueError, match="num_merge_workers is 0"):
        main(arguments(folder, tmp_path / "v", num_merge_workers=0))


@pytest.mark.parametrize("stage", [1, 3])
def test_fragments_are_kept_and_merge_to_the_same(tmp_path: Path, stage: int) -> None:
    """What the functions of DeepSpeed's two steps give is what the conversion gives."""
    folder = write_slices(tmp_path / "in", whole_values(), split, stage=stage, data=2, info=INFO)
    output = tmp_path / "u"
    main(arguments(folder, output, keep_temp_folder=True, num_extract_workers=2))
    check_values(open_source(output))
    kept = sorted(path.name for path in (output / "tmp" / "up.weight" / "1").glob("exp_avg.*"))
    assert kept
    assert set(kept) <= {"exp_avg.00", "exp_avg.01"}
    for name, shape in SHAPES.items():
        shapes = [split(name, torch.empty(shape), rank).shape for rank in (0, 1)]
        unused = merge_tp_slices(INFO, str(tmp_path / "merged"), str(output / "tmp"), 2, (name, shapes))
        assert (r"^norm\.weight$" in unused) is (name != "norm.weight")
        for state in NAMES.values():
            ours = load_any(output / "zero" / name / f"{state}.pt")
            merged = load_any(tmp_path / "merged" / name / f"{state}.pt")
            assert torch.equal(ours.pop("param"), merged.pop("param"))
            assert ours.pop("ds_hf_file")["as"] == f"{name}/{state}"  # which DeepSpeed's functions do not write
            assert ours == merged
    assert (tmp_path / "merged" / "up.weight" / "step.pt").exists() is (stage == 1)


def test_steps_of_their_own(tmp_path: Path) -> None:
    """Called one by one, for one tensor-parallel rank."""
    values = {name: whole_values()[name] for name in ("up.weight", "norm.weight")}
    whole = lambda name, value, rank: value.clone()  # noqa: E731
    one = write_slices(tmp_path / "one", values, whole, tensor=1, data=2, stage=2)
    opened = DeepSpeedCheckpoint(str(one))
    for rank in range(2):
        extract_zero_shards(str(tmp_path / "tmp"), opened, (0, 0, rank))
    merge_tp_slices({}, str(tmp_path / "zero"), str(tmp_path / "tmp"), 1, ("up.weight", torch.Size((7, 4))))
    content = load_any(tmp_path / "zero" / "up.weight" / "exp_avg.pt")
    assert content["cat_dim"] == 0
    assert torch.equal(content["param"], values["up.weight"]["exp_avg"])
    assert load_any(tmp_path / "zero" / "up.weight" / "step.pt") == 3
    three = write_slices(tmp_path / "three", values, whole, tensor=1, data=2, stage=3)
    files = [[str(three / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt") for rank in range(2)]]
    shapes = [[{name: torch.Size(SHAPES[name]) for name in values}]]
    for rank in range(2):
        extract_zero_shards_stage3(files, shapes, 2, str(tmp_path / "tmp3"), (0, rank), {"norm.weight"})
    assert [path.name for path in (tmp_path / "tmp3").iterdir()] == ["up.weight"]
    merge_zero3_slices(2, str(tmp_path / "zero3"), str(tmp_path / "tmp3"), "up.weight")
    assert torch.equal(load_any(tmp_path / "zero3" / "up.weight" / "fp32.pt"), values["up.weight"]["master"].flatten())


def test_fragments_that_do_not_belong_together(tmp_path: Path) -> None:
    for rank, step in enumerate((3, 4)):
        folder = tmp_path / "tmp" / "w" / str(rank)
        folder.mkdir(parents=True)
        save_pickled(folder / "step.00", step)
        save_pickled(folder / "fp32.00", torch.ones(4 + rank))
    with pytest.raises(CheckpointError, match=r"rank 1 has 5 elements of w \(fp32\)"):
        merge_tp_slices({}, str(tmp_path / "zero"), str(tmp_path / "tmp"), 2, ("w", [(2, 2), (2, 2)]))
    save_pickled(tmp_path / "tmp" / "w" / "1" / "fp32.00", torch.ones(4))
    with pytest.raises(CheckpointError, match="are of different saves"):
        merge_tp_slices({}, str(tmp_path / "zero"), str(tmp_path / "tmp"), 2, ("w", [(2, 2), (2, 2)]))


def test_small_things() -> None:
    assert [dp_index_to_str(rank) for rank in (0, 7, 123)] == ["00", "07", "123"]
    assert sorted(["r10", "r9", "q"], key=natural_keys) == ["q", "r9", "r10"]


# -- parts of whole tensors -----------------------------------------------------------------------------------------


class Mapping:
    """DeepSpeed's mapping of a parameter to its fragment: elements ``start`` to ``start + numel`` of the slice."""

    def __init__(self, start: int, numel: int) -> None:
        self.lp_fragment_address = SimpleNamespace(start=start, numel=numel)
        self.fragment = torch.zeros(numel)
        self.optim_fragment: dict[str, torch.Tensor] = {}

    def get_hp_fragment(self) -> torch.Tensor:
        return self.fragment


@pytest.mark.parametrize(
    "name", ["embed.weight", "gate_up.weight", "qkv.weight", "o.weight", "norm.weight", "up.weight"]
)
def test_a_rank_takes_its_part(tmp_path: Path, name: str) -> None:
    """The slice by which the whole was put together, padded again where a vocabulary is."""
    info = {
        **INFO,
        "parameter_with_sub_params": [{"patterns": [r"^qkv\.weight$"], "shape": [[4, 2, 2], 4], "partition_dim": 0}],
        "sub_param_shard_widths": {r"^qkv\.weight$": [[2, 2], [1, 1], [1, 1]]},
    }
    qkv = [[0, 1, 4, 6], [2, 3, 5, 7]]
    halves = {"qkv.weight": lambda v, r: v[qkv[r]], "o.weight": lambda v, r: v.chunk(2, 1)[r]}
    halves["gate_up.weight"] = lambda v, r: torch.cat([part.chunk(2)[r] for part in torch.cat([v, v[:2]]).chunk(2)])
    halves["up.weight"] = lambda v, r: torch.cat([v, v[:1]]).chunk(2)[r]
    cut = lambda n, v, r: halves[n](v, r) if n in halves else split(n, v, r)  # noqa: E731
    values = {name: whole_values()[name]}
    folder = write_slices(tmp_path / "in", values, cut, info=info)
    main(arguments(folder, tmp_path / "u", strict=False))
    for rank in (0, 1):
        expected = {state: cut(name, value, rank) for state, value in values[name].items()}
        if name == "embed.weight":  # the rows that pad it are zeros
            expected = {state: value.masked_fill(value == 9.0, 0.0) for state, value in expected.items()}
        param = nn.Parameter(torch.zeros_like(expected["master"]))
        param._hp_mapping = Mapping(3, param.numel() - 4)  # type: ignore[attr-defined]
        enable_universal_checkpoint([param])
        step = param.load_hp_checkpoint_state(str(tmp_path / "u" / "zero" / name), rank, 2)  # type: ignore[attr-defined]
        assert step == 3
        found = {"master": param._hp_mapping.fragment, **param._hp_mapping.optim_fragment}  # type: ignore[attr-defined]
        for state, value in expected.items():
            assert torch.equal(found[state], value.flatten()[3:-1]), (state, rank)
    wrong = nn.Parameter(torch.zeros(3))
    wrong._hp_mapping = Mapping(0, 3)  # type: ignore[attr-defined]
    enable_universal_checkpoint([wrong])
    with pytest.raises(AssertionError, match=r"tensor slice numel 3|Vocab tensor padded size 6"):
        wrong.load_hp_checkpoint_state(str(tmp_path / "u" / "zero" / name), 0, 2)  # type: ignore[attr-defined]
