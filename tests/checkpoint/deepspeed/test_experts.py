"""Experts in folders that real DeepSpeed wrote (``deepspeed_experts.py``): its own layers, and AutoEP."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ds_hf
from ds_hf.checkpoint.convert import write_own
from ds_hf.checkpoint.deepspeed.autoep import as_autoep
from ds_hf.checkpoint.deepspeed.pickles import load_pickled, save_pickled
from ds_hf.checkpoint.deepspeed.write import Target, write_deepspeed
from ds_hf.checkpoint.deepspeed.write_universal import write_universal
from ds_hf.checkpoint.formats import open_source
from ds_hf.checkpoint.pretrained import export_source
from ds_hf.checkpoint.source import Source
from ds_hf.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from ds_hf.errors import CheckpointError
from tests.checkpoint.deepspeed.deepspeed_experts import CASES, model_of
from tests.helpers.archives import unpack
from tests.helpers.distributed import run_distributed
from tests.helpers.experts import section
from tests.helpers.logs import Lines

ARCHIVE = Path(__file__).parent / "data/experts.tar.xz"
FOLDERS = [*(f"{case}/saved" for case in CASES), "autoep-stage3/universal"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("experts")
    unpack(ARCHIVE, root)
    return root


def expected(folder: Path) -> dict[tuple[str, str], Tensor]:
    """What DeepSpeed's processes held, whole."""
    found: dict[tuple[str, str], Tensor] = torch.load(folder.parent / "expected.pt")
    return found


def check(source: Source, wanted: dict[tuple[str, str], Tensor]) -> None:
    """Each value and moment is there, to the bit, and nothing else."""
    source.check()
    assert set(source.manifest.parameters) == {name for name, _ in wanted}
    for (name, state), value in wanted.items():
        saved = source.manifest.parameters[name]
        assert saved.shape == value.shape
        assert torch.equal(source.state(saved, state).view(value.shape), value), (name, state)


@pytest.mark.parametrize("folder", FOLDERS)
def test_values_and_moments_are_deepspeeds(written: Path, folder: str) -> None:
    source = open_source(written / folder)
    check(source, expected(written / folder))
    assert source.common["client_state"] == {"epoch": 3}
    groups = [len(group) for group in source.manifest.extra["groups"]]
    assert groups == ([9, 24] if folder.startswith("own") else [len(source.manifest.parameters)])
    dtypes = {entry["dtype"] for entry in source.manifest.extra["parameters"].values()}
    assert dtypes == {"bfloat16" if CASES[folder.split("/")[0]][4] == "bf16" else "float32"}


def continued(folder: str, kind: str, size: int, stage: int, out: str) -> int:
    """Load into a model with other values at another division and stage, and save."""
    torch.set_num_threads(1)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
        **({"expert_parallel": section(size)} if kind != "own" else {}),
    }
    engine, *_ = ds_hf.initialize(model=model_of(kind, size), config=config)
    path, client = engine.load_checkpoint(folder)
    assert path is not None
    assert client["epoch"] == 3
    steps: int = engine.global_steps
    engine.save_checkpoint(out, "again")
    tokens = torch.arange(16).view(2, 8) % 12
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    engine.destroy()
    return steps


@pytest.mark.parametrize(
    ("folder", "size", "stage"),
    [
        ("own-stage1/saved", 2, 3),
        ("own-stage0/saved", 1, 1),
        ("autoep-stage2/saved", 2, 3),
        ("autoep-stage3/saved", 1, 2),
        ("autoep-stage3/universal", 2, 1),
    ],
)
def test_an_engine_goes_on_at_another_division(
    written: Path, tmp_path: Path, folder: str, size: int, stage: int
) -> None:
    kind = CASES[folder.split("/")[0]][0]
    args = (str(written / folder), kind, size, stage, str(tmp_path))
    assert run_distributed(continued, 2, *args, timeout=60) == [3, 3]
    check(open_source(tmp_path / "again"), expected(written / folder))


def test_what_autoep_has_no_preset_for_is_not_written_so(written: Path) -> None:
    with pytest.raises(CheckpointError, match="has no experts that AutoEP knows"):
        as_autoep(open_source(written / "own-stage1/saved"))


@pytest.mark.parametrize("case", ["own-stage1", "autoep-stage3"])
def test_other_formats_have_the_same(written: Path, tmp_path: Path, case: str) -> None:
    """Ours, universal, DeepSpeed's without divided experts, the hub's, and fp32 in one dict."""
    folder = written / case / "saved"
    source, wanted = open_source(folder), expected(folder)
    check(open_source(write_own(source, tmp_path / "own")), wanted)
    check(open_source(write_universal(source, tmp_path / "universal")), wanted)
    for stage in (2, 3):
        check(open_source(write_deepspeed(source, tmp_path / f"deepspeed{stage}", Target(stage, 2))), wanted)
    state = get_fp32_state_dict_from_zero_checkpoint(str(folder.parent), "saved")
    assert all(torch.equal(state[name], value) for (name, kind), value in wanted.items() if kind == "master")
    if case.startswith("own"):
        return
    check(open_source(write_universal(as_autoep(source), tmp_path / "autoep")), wanted)
    model = model_of("qwen3_moe")
    model.config.save_pretrained(tmp_path / "config")
    export_source(source, tmp_path / "hf", model_folder=tmp_path / "config")
    loaded = type(model).from_pretrained(tmp_path / "hf")
    for name, param in loaded.named_parameters():
        assert torch.equal(param.float(), wanted[name, "master"].bfloat16().float())


# -- what is missing, or contradicts itself ------------------------------------------------------------------------


def changed(path: Path, change: Any) -> None:
    content = load_pickled(path)
    change(content)
    path.unlink()
    save_pickled(path, content)


def layers_of(content: dict[str, Any]) -> Any:
    return content["ds_autoep_layers"][0]


@pytest.mark.parametrize(
    ("case", "file", "change", "said"),
    [
        ("autoep-stage2", "layer_1_expert_2_mp_rank_00_model_states.pt", None, r"experts of layer 1"),
        ("own-stage1", "layer_0_expert_3_mp_rank_00_model_states.pt", None, r"have \[4, 2\] experts, and there are"),
        (
            "own-stage1",
            "zero_pp_rank_1_mp_rank_00_optim_states.pt",
            None,
            "optimizer states of 3|files of some ranks are missing",
        ),
        ("autoep-stage3", "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt", None, "files of some ranks are missing"),
        (
            "autoep-stage2",
            "mp_rank_00_model_states.pt",
            lambda content: layers_of(content).update(ep_size=3),
            r"divided over \[2, 3\] processes",
        ),
        (
            "autoep-stage2",
            "mp_rank_00_model_states.pt",
            lambda content: content["ds_autoep_layers"].pop(),
            "parameters of experts and others lie in one flat tensor",
        ),
        (
            "autoep-stage3",
            "zero_pp_rank_1_mp_rank_00_model_states.pt",
            lambda content: layers_of(content).update(ep_rank=0),
            "process 1 has the experts of place 0",
        ),
        (
            "own-stage1",
            "layer_0_expert_1_mp_rank_00_model_states.pt",
            lambda content: [value.add_(1) for value in content.values()],
            r"expert_1_mp_rank_00_model_states.pt is not what the optimizer's files have",
        ),
        (
            "own-stage1",
            "mp_rank_00_model_states.pt",
            lambda content: content["ds_config"].update(use_data_before_expert_parallelism=True),
            "the ranks hold 48 elements of blocks.0.moe",
        ),
    ],
)
def test_what_is_missing_or_contradicts_is_told(
    written: Path, tmp_path: Path, case: str, file: str, change: Any, said: str
) -> None:
    folder = Path(shutil.copytree(written / case / "saved", tmp_path / "saved"))
    if change is None:
        (folder / file).unlink()
    else:
        changed(folder / file, change)
    with pytest.raises(CheckpointError, match=said):
        open_source(folder).check()


@pytest.mark.parametrize("case", ["own-stage0", "own-stage1"])
def test_files_of_all_experts_are_missing(written: Path, tmp_path: Path, case: str) -> None:
    folder = Path(shutil.copytree(written / case / "saved", tmp_path / "saved"))
    for file in folder.glob("layer_*"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"have \[4, 2\] experts, and there are files of \[\]"):
        open_source(folder).check()


def test_experts_of_own_layers_that_the_converter_joined_are_refused(written: Path, tmp_path: Path) -> None:
    """It skips them, so that the first expert of each process has one folder: files as it leaves them."""
    source = written / "own-stage1/saved"
    content = load_pickled(source / "mp_rank_00_model_states.pt")
    folder = tmp_path / "universal"
    for name in (name for shapes in content["param_shapes"] for name in shapes):
        (folder / "zero" / name).mkdir(parents=True)
        torch.save({"param": torch.zeros(4)}, folder / "zero" / name / "fp32.pt")
    torch.save({"param_groups": []}, folder / "zero/optimizer_state.pt")
    shutil.copy(source / "mp_rank_00_model_states.pt", folder)
    with pytest.raises(CheckpointError, match=r"have \[4, 2\] experts, and it has \[2, 1\].*needs no conversion"):
        open_source(folder)


def test_moments_without_names_are_left_out_where_shapes_do_not_tell(written: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(written / "own-stage0/saved", tmp_path / "saved"))

    def reverse(content: dict[str, Any]) -> None:
        content["optimizer"]["param_groups"][0]["params"].reverse()

    for rank in range(2):
        changed(folder / f"expp_rank_{rank}_mp_rank_00_optim_states.pt", reverse)
    logging.getLogger("ds_hf").addHandler(lines := Lines())
    source = open_source(folder)
    logging.getLogger("ds_hf").removeHandler(lines)
    assert any("moments are left out" in text for text in lines.texts)
    assert not any(saved.moments for saved in source.manifest.parameters.values())
    wanted = expected(written / "own-stage0/saved")
    for name, saved in source.manifest.parameters.items():
        assert torch.equal(source.state(saved, "weight").view(saved.shape), wanted[name, "master"])
