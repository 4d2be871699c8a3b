"""The life of a transformers model at stage 3: loaded under ``zero.Init``, changed, trained, saved, loaded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compat import stage3_code as code
from tests.compat.common import WORLD, run_user_code

STAGE3 = "Stage 3 models"
TOLERANCE = 2e-5
FAMILIES = tuple(code.FAMILIES)
QUICK = ("llama-tied", "t5", "mixtral", "switch", "wav2vec2", "whisper")  # trained in every run of the tests
OTHERS = tuple(family for family in FAMILIES if family not in QUICK)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def saved(folder: Path, families: tuple[str, ...]) -> Path:
    """The folder with a model of each family, in several files."""
    for family in families:
        if not (folder / family).exists():
            path = code.save_family(family, folder)
            assert family == "resnet" or len(list(path.glob("*.safetensors"))) > 1
    return folder


# -- loading --------------------------------------------------------------------------------------------------------


def load_all(folder: Path, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """Every family loaded under stage 3 and without."""
    found = {}
    for family in FAMILIES:
        model_class = code.classes(family)[1]
        plain = model_class.from_pretrained(folder / family, dtype=dtype)
        more = {"bf16": {"enabled": True}} if dtype == torch.bfloat16 else {}
        with code.under_stage3(**more):
            model = model_class.from_pretrained(folder / family, dtype=dtype)
        buffers = {id(p._ds_home.buffer): p._ds_home.buffer for p in model.parameters()}
        found[family] = {
            "different": code.different(code.whole(model), plain.state_dict()),
            "not persistent": code.different(dict(_on_cpu(model)), dict(_on_cpu(plain))),
            "held": sum(buffer.nbytes for buffer in buffers.values()),
            "bytes": sum(p.numel() * p.element_size() for p in plain.parameters()),
            "ties": ties(model) == ties(plain),
        }
    return found


def _on_cpu(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, buffer.cpu()) for name, buffer in model.named_buffers()]


def ties(model: torch.nn.Module) -> set[tuple[str, ...]]:
    """Names that mean one parameter."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return {tuple(same) for same in names.values() if len(same) > 1}


@pytest.mark.slow
@pytest.mark.feature(STAGE3, "`from_pretrained` under `zero.Init`: every weight and buffer to the bit", pain="P14 P15")
@pytest.mark.feature(STAGE3, "each rank holds its shard", pain="P15")
def test_loaded_weights_equal_those_of_plain_from_pretrained_and_are_sharded(folder: Path) -> None:
    for found in run_user_code(load_all, saved(folder, FAMILIES), torch.float32):
        assert set(found) == set(FAMILIES)
        for family, facts in found.items():
            assert facts["different"] == facts["not persistent"] == [], family
            assert facts["ties"], family
            weight_norm = 8000 if family in ("wav2vec2", "hubert", "sew") else 0  # whole until initialize()
            padding = 200 * 64  # bytes: every parameter alone is padded to 16 elements a rank
            assert facts["held"] <= facts["bytes"] / WORLD + weight_norm + padding, family


@pytest.mark.slow
@pytest.mark.feature(STAGE3, "`from_pretrained(dtype=torch.bfloat16)`", pain="P15")
def test_loaded_bf16_weights_equal_those_of_plain_from_pretrained(folder: Path) -> None:
    for found in run_user_code(load_all, saved(folder, FAMILIES), torch.bfloat16):
        for family in FAMILIES:
            assert found[family]["different"] == found[family]["not persistent"] == [], family


# -- training -------------------------------------------------------------------------------------------------------


def train_all(folder: Path, families: tuple[str, ...]) -> dict[str, float]:
    """Each family trained at stage 3 and without DeepSpeed, other data on each rank."""
    worst = {}
    for family in families:
        model_class = code.classes(family)[1]
        ranks = [1] * code.world() if family == "resnet" else list(range(code.world()))  # batch norm sees its rank only
        batches = [[code.batch_of(family, 10 * step + r) for r in ranks] for step in range(3)]
        plain = model_class.from_pretrained(folder / family)
        reference = code.train_plain(plain, batches, code.hf_loss)
        with code.under_stage3() as settings:
            model = model_class.from_pretrained(folder / family)
            engine = code.initialize(model, settings)
            losses = code.train_engine(engine, batches, code.hf_loss)
        worst[family] = code.largest(losses, reference)
        assert reference[0] != reference[-1]
        engine.destroy()
    return worst


def train_first(folder: Path, families: tuple[str, ...]) -> dict[str, float]:
    """Make the process group, as any script's first call does, and train."""
    import deepspeed

    deepspeed.init_distributed()
    if code.rank() == 0:
        saved(folder, families)
    torch.distributed.barrier()
    return train_all(folder, families)


@pytest.mark.feature(STAGE3, "every family trains as without DeepSpeed", pain="P13 P14 P16")
@pytest.mark.parametrize("families", [QUICK, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["some", "others"])
def test_every_family_trains_as_without_deepspeed(folder: Path, families: tuple[str, ...]) -> None:
    for worst in run_user_code(train_first, folder, families):
        assert set(worst) == set(families)
        assert {family: error for family, error in worst.items() if not error < TOLERANCE} == {}
