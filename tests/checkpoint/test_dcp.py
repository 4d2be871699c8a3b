"""torch.distributed.checkpoint: what we write torch reads, what torch writes we read, and nothing runs code."""

from __future__ import annotations

import enum
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import ds_hf
from ds_hf.checkpoint.convert import write_own
from ds_hf.checkpoint.dcp import read_dcp, write_dcp
from ds_hf.checkpoint.formats import open_source
from ds_hf.checkpoint.source import Source
from ds_hf.errors import CheckpointError
from tests.checkpoint.deepspeed.deepspeed_workload import VOCABULARY, TinyModel, config, groups, train
from tests.engine.checkpoint.workload import differences, states
from tests.helpers.distributed import run_distributed

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch: no process group, deprecations of its own


def _save(folder: Path, stage: int) -> Any:
    torch.manual_seed(0)
    model = TinyModel()
    engine = ds_hf.initialize(model=model, model_parameters=groups(model), config=config(stage, "fp32"))[0]
    train(engine, 3)
    engine.save_checkpoint(folder, client_state={"epoch": 3, "best": torch.arange(3)})
    expected = states(engine)
    return expected, train(engine, 4, 3)


def _resume(folder: Path, stage: int) -> Any:
    torch.manual_seed(7)
    model = TinyModel()
    engine = ds_hf.initialize(model=model, model_parameters=groups(model), config=config(stage, "fp32"))[0]
    train(engine, 1, 50)
    _, client = engine.load_checkpoint(folder)
    return states(engine), train(engine, 4, 3), client


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, list[float]]:
    """A checkpoint of two ranks at stage 3, its states, and the losses after it."""
    folder = tmp_path_factory.mktemp("dcp") / "saved"
    expected, losses = run_distributed(_save, 2, folder, 3, timeout=60)[0]
    write_dcp(open_source(folder), folder.parent / "dcp")
    return folder, expected, losses


def _all_states(source: Source) -> dict[tuple[str, str], torch.Tensor]:
    saved = source.manifest.parameters
    return {(name, state): source.state(saved[name], state) for name in saved for state in saved[name].states}


def test_there_and_back(saved: Any, tmp_path: Path) -> None:
    folder, expected, losses = saved
    write_own(open_source(folder.parent / "dcp"), tmp_path / "back")
    for place in (tmp_path / "back", folder.parent / "dcp"):
        found, again, client = run_distributed(_resume, 2, place, 2, timeout=60)[0]
        assert differences(expected, found) == []
        assert again == pytest.approx(losses, abs=1e-6)
        assert client["epoch"] == 3
        assert client["best"].tolist() == [0, 1, 2]


def _plain_run(folder: Path) -> list[float]:
    """Load with torch alone into a plain model and optimizer, and train on as the engine did."""
    torch.manual_seed(7)
    model = TinyModel()
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2, weight_decay=0.1)
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    optimizer.step()  # so that there is state to load into
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    for entry in state["optimizer"]["param_groups"]:
        entry.pop("decoupled_weight_decay", None)
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    set_model_state_dict(model, state["model"], options=StateDictOptions(strict=True))
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    losses = []
    for number in range(3, 5):
        tokens = torch.randint(0, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(1000 + number))
        optimizer.zero_grad()
        loss = model(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_torch_alone_continues(saved: Any) -> None:
    """Two steps: the learning rate of the second is a schedule's, which plain torch has not here."""
    folder, _, losses = saved
    assert _plain_run(folder.parent / "dcp") == pytest.approx(losses[:2], abs=1e-6)


def test_torch_turns_it_into_one_file(saved: Any, tmp_path: Path) -> None:
    folder, expected, _ = saved
    dcp_to_torch_save(folder.parent / "dcp", tmp_path / "one.pt")
    content = torch.load(tmp_path / "one.pt", weights_only=True)
    assert set(content) == {"model", "optimizer", "ds_hf"}
    assert set(content["model"]) == set(TinyModel().state_dict())
    for name in ("embedding.weight", "first.bias"):
        assert torch.equal(content["model"][name], expected[f"{name}/master"])
        assert torch.equal(content["optimizer"]["state"][name]["exp_avg_sq"], expected[f"{name}/exp_avg_sq"])
        assert float(content["optimizer"]["state"][name]["step"]) == 3.0
    assert torch.equal(content["model"]["head.weight"], content["model"]["embedding.weight"])
    assert [group["weight_decay"] for group in content["optimizer"]["param_groups"]] == [0.1, 0.0]


def test_what_torch_saved_is_read(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TinyModel()
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
    for _ in range(2):
        model(torch.arange(5)[None]).backward()
        optimizer.step()
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    source = open_source(tmp_path / "theirs")
    source.check()
    found = source.manifest.parameters["first.weight"]
    assert set(found.states) == {"master", "exp_avg", "exp_avg_sq"}
    assert found.scalars == {"step": ["float32", 2.0]}
    assert torch.equal(source.state(found, "exp_avg"), optimizer.state[model.first.weight]["exp_avg"].flatten())
    assert torch.equal(source.files.value(found), model.first.weight.detach())
    assert source.manifest.extra["groups"][1] == ["first.bias", "second.bias", "norm.weight", "norm.bias"]
    assert source.common["param_groups"][1]["weight_decay"] == 0.0
    write_own(source, tmp_path / "ours")
    again = _all_states(open_source(tmp_path / "ours"))
    assert all(torch.equal(value, again[key]) for key, value in _all_states(source).items())


def test_weights_alone_are_read(tmp_path: Path) -> None:
    model = TinyModel().bfloat16()
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "flat", no_dist=True)
    source = open_source(tmp_path / "flat")
    found = {weight.name: weight for weight in source.weights()}
    assert set(found) == set(model.state_dict())
    assert found["second.weight"].dtype is torch.bfloat16
    assert torch.equal(found["second.weight"].read(), model.second.weight.detach())


class _OldPickler(pickle.Pickler):
    """Writes members of enums as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, obj: Any) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, enum.Enum) else NotImplemented


def test_metadata_of_an_older_python_is_read(tmp_path: Path) -> None:
    model = TinyModel()
    dcp.save(model.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    metadata, stream = pickle.loads((tmp_path / ".metadata").read_bytes()), io.BytesIO()
    _OldPickler(stream).dump(metadata)
    assert b"getattr" in stream.getvalue()
    (tmp_path / ".metadata").write_bytes(stream.getvalue())
    found = {weight.name: weight.read() for weight in open_source(tmp_path).weights()}
    assert torch.equal(found["second.weight"], model.second.weight.detach())


def test_no_attribute_of_anything_else_is_taken(tmp_path: Path) -> None:
    dcp.save(TinyModel().state_dict(), checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    metadata.planner_data = _Attribute()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read.*getattr of something else than an enum"):
        read_dcp(tmp_path)


class _Attribute:
    def __reduce__(self) -> Any:
        return (getattr, (torch.Size, "__init__"))


def test_dtype_and_progress(saved: Any, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    write_dcp(
        open_source(saved[0]), tmp_path / "half", dtype=torch.bfloat16, report=lambda *figures: seen.append(figures)
    )
    assert seen[-1][0] == seen[-1][1] == len(seen)
    model = TinyModel().bfloat16()
    dcp.load({"model": model.state_dict()}, checkpoint_id=tmp_path / "half", no_dist=True)
    assert torch.equal(model.first.bias.detach(), saved[1]["first.bias/master"].bfloat16())
    with pytest.raises(CheckpointError, match="exists"):
        write_dcp(open_source(saved[0]), tmp_path / "half")


# -- strangers ------------------------------------------------------------------------------------------------------


def _copy(saved: Any, target: Path) -> Path:
    target.mkdir()
    for path in (saved[0].parent / "dcp").iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


class _Evil:
    def __reduce__(self) -> Any:
        return (exec, ("import pathlib; pathlib.Path('/tmp/ds_hf_was_here').touch()",))


def test_a_stranger_runs_nothing(saved: Any, tmp_path: Path) -> None:
    folder = _copy(saved, tmp_path / "evil")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = _Evil()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read.*exec.*not allowed"):
        read_dcp(folder)
    evil = {"model": TinyModel().state_dict(), "optim": {"param_groups": _Evil()}}
    dcp.save(evil, checkpoint_id=tmp_path / "theirs", no_dist=True)
    with pytest.raises(CheckpointError, match=r"param_groups cannot be read: .*GLOBAL exec"):
        read_dcp(tmp_path / "theirs")
    assert not Path("/tmp/ds_hf_was_here").exists()


def test_files_stay_inside_the_folder(saved: Any, tmp_path: Path) -> None:
    folder = _copy(saved, tmp_path / "outside")
    content = (folder / ".metadata").read_bytes()
    metadata = pickle.loads(content)
    for info in metadata.storage_data.values():
        info.relative_path = "../../etc/passwd"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="not a file inside the folder"):
        read_dcp(folder)


def test_sizes_are_not_believed(saved: Any, tmp_path: Path) -> None:
    folder = _copy(saved, tmp_path / "large")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.first.weight"].size = torch.Size([10**6, 10**6])
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="it is incomplete"):
        read_dcp(folder)


def test_a_damaged_file_is_named(saved: Any, tmp_path: Path) -> None:
    folder = _copy(saved, tmp_path / "short")
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] + bytes(path.stat().st_size // 2))
    with pytest.raises(CheckpointError, match="short"):
        print([weight.read() for weight in read_dcp(folder).weights()])


# -- strangers ------------------------------------------------------------------------------------------------------


def _nested(levels: int = 60) -> Any:
    value: Any = (1,)
    for _ in range(levels):
        value = (value, value)
    return value


class _Call:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (_nested(), "objects when its references are followed"),
        (_Call(bytearray, 2**31), "it asks for memory that it does not fill"),
        ((torch.zeros(1).expand(10**9),), "which is far larger than the file"),
    ],
)
def test_small_items_that_take_everything(tmp_path: Path, value: Any, message: str) -> None:
    state = {"model": {"a": torch.ones(3)}, "optimizer": {"state": {}, "param_groups": [{"lr": 1.0, "x": value}]}}
    dcp.save(state, checkpoint_id=tmp_path / "x", no_dist=True)
    with pytest.raises(CheckpointError, match=message):
        open_source(tmp_path / "x")


@pytest.mark.timeout(60)
def test_metadata_that_takes_everything(tmp_path: Path) -> None:
    dcp.save({"model": {"a": torch.ones(3)}}, checkpoint_id=tmp_path / "x", no_dist=True)
    path = tmp_path / "x/.metadata"
    metadata = pickle.loads(path.read_bytes())
    kept = path.read_bytes()
    for change, message in (
        (lambda m: setattr(m, "planner_data", _nested()), "objects when its references are followed"),
        (lambda m: m.state_dict_metadata["model.a"].chunks.append(m.state_dict_metadata["model.a"].chunks[0]), "parts"),
        (lambda m: m.state_dict_metadata["model.a"].chunks.clear(), "the parts of model.a are not the whole of it"),
        (lambda m: setattr(next(iter(m.storage_data.values())), "length", 10**9), "more than its files"),
        (lambda m: setattr(next(iter(m.storage_data.values())), "transform_descriptors", ["zstd"]), "transformed"),
    ):
        metadata = pickle.loads(kept)
        change(metadata)
        path.write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointError, match=message):
            open_source(tmp_path / "x")


def test_a_damaged_value_is_not_loaded(tmp_path: Path) -> None:
    """The checksums that torch writes with each item are compared."""
    dcp.save({"model": {"weight": torch.arange(64.0)}}, checkpoint_id=tmp_path, no_dist=True)
    file = tmp_path / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[content.index(torch.arange(64.0).numpy().tobytes()) + 2] ^= 1
    file.write_bytes(content)
    (weight,) = read_dcp(tmp_path).weights()
    with pytest.raises(CheckpointError, match=r"model.weight cannot be read: its record .* is damaged"):
        weight.read()


def _without_metadata(folder: Path) -> str:
    (folder / "__0_0.distcp").touch()
    engine = ds_hf.initialize(model=TinyModel(), config=config(1, "fp32"))[0]
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(folder)
    return str(caught.value)


def test_tensors_without_metadata_are_refused_at_a_load(tmp_path: Path) -> None:
    assert f"{tmp_path / '.metadata'} is missing" in run_distributed(_without_metadata, 1, tmp_path, timeout=60)[0]
