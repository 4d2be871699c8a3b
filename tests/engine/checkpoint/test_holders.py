"""Slices of live engines: saved, checked, loaded into any other slices, put together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import ds_hf
from ds_hf.checkpoint.convert import write_own
from ds_hf.checkpoint.cuts import Cut
from ds_hf.checkpoint.dcp import write_dcp
from ds_hf.checkpoint.deepspeed.write import Target, write_deepspeed
from ds_hf.checkpoint.formats import open_source
from ds_hf.checkpoint.inspect import inspect
from ds_hf.checkpoint.manifest import read_manifest
from ds_hf.checkpoint.pretrained import export_source
from ds_hf.checkpoint.verify import verify
from ds_hf.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from ds_hf.engine.checkpoint.consolidate import consolidated_state_dict
from ds_hf.engine.zero.cut import set_cut
from ds_hf.errors import CheckpointError
from tests.engine.checkpoint.workload import config
from tests.helpers.distributed import run_distributed
from tests.helpers.megatron import Mpu

WHOLE = {"up": (24, 8), "down": (8, 24), "packed": (16, 8), "odd": (6, 3), "norm": (8,)}


def cuts_of(kind: str, rank: int, size: int) -> dict[str, Cut]:
    def even(name: str, dim: int, stride: int = 1) -> Cut:
        shape = torch.Size(WHOLE[name])
        part = shape[dim] // size // stride
        return Cut(dim, tuple(((piece * size + rank) * part, part) for piece in range(stride)), shape)

    if kind == "rows":
        return {"up": even("up", 0), "down": even("down", 1), "packed": even("packed", 0, 2), "odd": even("odd", 0)}
    if kind == "columns":
        return {"up": even("up", 1), "down": even("down", 0), "packed": even("packed", 1), "odd": even("odd", 0)}
    return {}


class Parts(nn.Module):
    """Slices of parameters whose values say where they are."""

    def __init__(self, kind: str, *, fill: bool) -> None:
        super().__init__()
        cuts = cuts_of(kind, dist.get_rank(), dist.get_world_size())
        for number, (name, shape) in enumerate(WHOLE.items()):
            whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape) / 64 + number
            local = whole if name not in cuts else cuts[name].take(whole)
            param = nn.Parameter(local.clone() if fill else torch.zeros_like(local))
            if name in cuts:
                set_cut(param, cuts[name])
            self.register_parameter(name, param)
        self.register_buffer("count", torch.arange(3.0) if fill else torch.zeros(3))
        self.register_buffer("first", torch.tensor(dist.get_rank()))  # each process's own

    def forward(self) -> Tensor:
        return sum(param.square().sum() for param in self.parameters())  # type: ignore[return-value]


def whole_values() -> dict[str, Tensor]:
    return {
        name: torch.arange(float(torch.Size(shape).numel())).reshape(shape) / 64 + number
        for number, (name, shape) in enumerate(WHOLE.items())
    }


def engine_on(kind: str, stage: int, *, fill: bool, **more: Any) -> Any:
    model = Parts(kind, fill=fill)
    content = config(stage, gradient_clipping=0.0, **more)
    mpu = Mpu(2) if dist.get_world_size() > 1 else None
    return ds_hf.initialize(model=model, model_parameters=list(model.parameters()), config=content, mpu=mpu)[0]


def trained_and_saved(folder: Path, kind: str, stage: int, **more: Any) -> dict[str, Tensor] | None:
    """One step, whose update is the same function of each element, and a checkpoint; the whole weights."""
    engine = engine_on(kind, stage, fill=True, **more)
    engine.backward(engine())
    engine.step()
    engine.save_checkpoint(folder, "a")
    engine.wait_for_checkpoint()
    state = consolidated_state_dict(engine)
    engine.destroy()
    return state


def loaded_and_saved(source: Path, folder: Path, kind: str, stage: int) -> dict[str, Tensor] | None:
    engine = engine_on(kind, stage, fill=False)
    engine.load_checkpoint(source)
    engine.save_checkpoint(folder, "b")
    state = consolidated_state_dict(engine)
    assert engine.module.first == dist.get_rank()
    engine.destroy()
    return state


def on_all(calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
    return [function(*arguments, **more) for function, arguments, more in calls]


def digests(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_manifest(folder).extra["digest"]["tensors"]
    return found


def test_any_slices_become_any_others(tmp_path: Path) -> None:
    saves = [(trained_and_saved, (tmp_path / kind, kind, stage), {}) for kind, stage in (("rows", 0), ("columns", 3))]
    saves.append((trained_and_saved, (tmp_path / "async", "rows", 1), {"ds_hf": {"checkpoint": {"async": True}}}))
    pairs = [("rows", "columns", 2), ("columns", "rows", 1), ("rows", "rows", 3)]
    loads = [(loaded_and_saved, (tmp_path / s, tmp_path / f"{s}-{t}", t, stage), {}) for s, t, stage in pairs]
    ranks = run_distributed(on_all, 2, [*saves, *loads], timeout=40)
    expected = run_distributed(trained_and_saved, 1, tmp_path / "alone", "whole", 0)[0]
    assert expected is not None
    assert ranks[1] == [None] * 6
    for found in ranks[0]:
        assert found.keys() == expected.keys() - {"first"}
        assert all(torch.equal(value, expected[name]) for name, value in found.items())
    alone = digests(tmp_path / "alone/a")
    assert read_manifest(tmp_path / "alone/a").extra["version"] == 1
    for name in ("rows/a", "columns/a", "async/a", "rows-columns/b", "columns-rows/b", "rows-rows/b"):
        folder = tmp_path / name
        assert verify(folder) == []
        manifest = read_manifest(folder)
        assert manifest.extra["version"] == 2
        assert {n: p.shape for n, p in manifest.parameters.items()} == WHOLE
        assert manifest.excluded == {"first"}
        assert manifest.extra["digest"]["without"] == ["odd"]  # 36 bytes a slice
        assert digests(folder) == {n: value for n, value in alone.items() if n not in ("odd", "first")}
        state = get_fp32_state_dict_from_zero_checkpoint(folder)
        assert state.keys() == ranks[0][0].keys()
        assert all(torch.equal(value, expected[n]) for n, value in state.items())
    check_conversions(tmp_path / "rows", tmp_path)
    back = run_distributed(loaded_and_saved, 1, tmp_path / "columns", tmp_path / "back", "whole", 3)[0]
    assert back is not None
    assert all(torch.equal(back[name], value) for name, value in expected.items())
    assert digests(tmp_path / "back/b") == alone


def check_conversions(saved: Path, root: Path) -> None:
    """Every format that is written of slices has the same whole states."""
    before = open_source(saved)
    write_deepspeed(before, root / "deepspeed", Target(2, 3), "a")
    write_dcp(before, root / "dcp")
    write_own(before, root / "own", "a")
    export_source(before, root / "pretrained")
    assert inspect(before).elements == sum(torch.Size(shape).numel() for shape in WHOLE.values())
    for kind in ("deepspeed", "dcp", "own"):
        after = open_source(root / kind)
        assert after.manifest.extra.get("version", 1) == 1
        for name, shape in WHOLE.items():
            one, other = before.manifest.parameters[name], after.manifest.parameters[name]
            assert one.shape == other.shape == shape
            assert {"master", "exp_avg", "exp_avg_sq"} <= {*one.states} & {*other.states}
            for state in one.states:
                assert torch.equal(before.state(one, state), after.state(other, state)), (kind, name, state)
    pretrained = load_file(root / "pretrained/model.safetensors")
    assert all(torch.equal(pretrained[n], before.files.value(p)) for n, p in before.manifest.parameters.items())


def failures(folder: Path) -> dict[str, str]:
    """What is refused, each over a whole checkpoint of the same tag."""
    found = {}
    engine = engine_on("rows", 1, fill=True)
    engine.save_checkpoint(folder, "a")
    cut = engine.module.down._ds_cut
    for case, other in {
        "twice": Cut(1, ((0, 12),), cut.whole),
        "nowhere": Cut(1, ((cut.ranges[0][0], 11),), cut.whole),
        "shapes": Cut(1, cut.ranges, (8 + dist.get_rank(), 24)),
        "dims": cut if dist.get_rank() else Cut(0, ((0, 4),), cut.whole),
    }.items():
        set_cut(engine.module.down, other)
        found[case] = refusal(engine, folder)
    set_cut(engine.module.down, cut)
    norm = engine.module.norm
    with torch.no_grad():
        norm.data.add_(dist.get_rank())
    found["forgotten mark"] = refusal(engine, folder)
    engine.destroy()
    return found


def refusal(engine: Any, folder: Path) -> str:
    texts = []
    for write in (lambda: engine.save_checkpoint(folder, "a"), lambda: consolidated_state_dict(engine)):
        with pytest.raises(CheckpointError) as failure:
            write()
        texts.append(str(failure.value))
    assert texts[0].removeprefix(f"saving {folder / 'a'}") == texts[1].removeprefix("gathering whole weights")
    return texts[0]


def test_what_is_not_the_whole_model_is_refused_and_the_old_one_stays(tmp_path: Path) -> None:
    ranks = run_distributed(failures, 2, tmp_path, timeout=30)
    assert ranks[0] == ranks[1]
    found = ranks[0]
    assert "parts of down that the processes have hold 12 indices of dimension 1 of its shape [8, 24]" in found["twice"]
    assert "index 11 of dimension 1 of its shape [8, 24] not at all" in found["nowhere"]
    assert "the whole of down has shape [9, 24] on process 1 and [8, 24] on another" in found["shapes"]
    assert "not parts of one dimension" in found["dims"]
    assert "norm differ over the model-parallel group and are not marked" in found["forgotten mark"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "latest", "zero_to_fp32.py"]
    assert verify(tmp_path, "a") == []


class Marked(nn.Module):
    """A part of something that no dimension is named for."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Parameter(torch.full((4, 6), 1.0 + dist.get_rank()))
        self.part.tensor_model_parallel = True  # type: ignore[attr-defined]

    def forward(self) -> Tensor:
        return self.part.square().sum()


def marked(folder: Path) -> tuple[list[float], list[int]]:
    content = config(2)
    del content["scheduler"]
    found = []
    for fill in (True, False):
        model, mpu = Marked(), Mpu(2)
        engine = ds_hf.initialize(model=model, model_parameters=list(model.parameters()), config=content, mpu=mpu)[0]
        if fill:
            engine.save_checkpoint(folder, "a")
        else:
            engine.backward(engine())
            engine.step()
            engine.load_checkpoint(folder, "a")
        found.append(float(engine.module.part.mean()))
        engine.destroy()
    return found, list(get_fp32_state_dict_from_zero_checkpoint(folder, "a")["part"].shape)


def test_parts_whose_place_nothing_says_are_kept_side_by_side(tmp_path: Path) -> None:
    assert run_distributed(marked, 2, tmp_path, timeout=30) == [([1.0, 1.0], [2, 4, 6]), ([2.0, 2.0], [2, 4, 6])]


def factored(folder: Path) -> tuple[bool, str]:
    """States that fit the piece they were made for: loaded with the same slices, refused with others."""
    content = config(1, gradient_clipping=0.0)
    del content["optimizer"], content["scheduler"]

    def made(kind: str) -> Any:
        model = Parts(kind, fill=True)
        optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
        return ds_hf.initialize(model=model, optimizer=optimizer, config=content, mpu=Mpu(2))[0]

    def states(engine: Any) -> list[dict[str, Any]]:
        return [engine.optimizer.state[p] for g in engine.optimizer.param_groups for p in g["params"]]

    engine, again, other = made("rows"), made("rows"), made("columns")
    engine.backward(engine())
    engine.step()
    engine.save_checkpoint(folder, "a")
    again.load_checkpoint(folder, "a")
    pairs = zip(states(engine), states(again), strict=True)
    same = all(torch.equal(a[key], b[key]) for a, b in pairs for key in a)
    assert any("row_var" in state for state in states(engine))
    with pytest.raises(CheckpointError) as failure:
        other.load_checkpoint(folder, "a")
    return same, str(failure.value)


def test_states_of_pieces_need_the_same_slices(tmp_path: Path) -> None:
    for same, message in run_distributed(factored, 2, tmp_path, timeout=30):
        assert same
        assert "keeps state for" in message
        assert "saved for other pieces" in message


def flipped(folder: Path) -> str:
    engine = engine_on("rows", 3, fill=True)
    engine.save_checkpoint(folder, "a")
    if dist.get_rank() == 0:
        path = folder / "a/rank_00001.safetensors"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)
    dist.barrier()
    with pytest.raises(CheckpointError) as failure:
        engine.load_checkpoint(folder, "a")
    engine.destroy()
    return str(failure.value)


def test_a_flipped_bit_in_a_slice_is_found(tmp_path: Path) -> None:
    for message in run_distributed(flipped, 2, tmp_path, timeout=30):
        assert "rank_00001.safetensors does not have the checksum" in message
    assert any("does not have the digest" in fault for fault in verify(tmp_path, "a"))
