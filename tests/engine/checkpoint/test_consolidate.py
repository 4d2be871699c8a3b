"""Whole weights of a live engine, and clones that keep ties and drop what views drag along."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model

from ds_hf.engine.checkpoint.consolidate import clone_tensors_for_torch_save
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.errors import CheckpointError
from ds_hf.log import forget_said
from tests.engine.checkpoint.workload import Model, config, engine_of, on_both, states, train
from tests.helpers.distributed import run_distributed

NAMES = list(Model().state_dict())


def _consolidated(folder: Path, stage: int) -> tuple[Any, dict[str, Any], bool]:
    with engine_of(config(stage, "bf16")) as engine:
        train(engine, 2)
        expected = states(engine)
        found = engine._zero3_consolidated_16bit_state_dict()
        tied = found is not None and found["head.weight"] is found["embedding.weight"]
        assert engine.save_16bit_model(folder) is True
        assert engine.save_16bit_model(folder, "other.safetensors", exclude_frozen_parameters=True) is True
        released = not engine.plan.shards_parameters or engine.module.scale.ds_status != 1
        again = train(engine, 1, 2)  # it left a working engine
        assert again[0] > 0
        return found, expected, tied and released


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("consolidated")
    calls = [(_consolidated, (root / str(stage), stage)) for stage in (1, 3)]
    first, second = run_distributed(on_both, 2, calls, timeout=60)
    return {stage: (root / str(stage), first[i], second[i]) for i, stage in enumerate((1, 3))}


@pytest.mark.parametrize("stage", [1, 3])
def test_rank_0_has_everything_and_others_nothing(runs: Any, stage: int) -> None:
    _, (found, expected, fine), (other, _, _) = runs[stage]
    assert other is None
    assert fine
    assert list(found) == NAMES
    for name, value in found.items():
        assert value.device.type == "cpu"
        if not name.endswith("calls"):
            assert value.dtype is (torch.float32 if name.endswith("mean") else torch.bfloat16)  # a buffer, as loaded
        assert torch.equal(value.float(), expected.get(name, value).float())


class Around(torch.nn.Module):
    """A layer and what is learned beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.beside = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.beside(x)


@pytest.mark.parametrize("stage", [1, 3])
def test_what_was_taken_out_of_the_model_is_not_saved(
    stage: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As by merge_and_unload of PEFT."""
    forget_said()
    with engine_of(config(stage), torch.nn.Sequential(Around(), torch.nn.Linear(4, 4))) as engine:
        engine.module[0] = engine.module[0].base
        with GatheredParameters(engine.module.parameters()):
            expected = {name: value.clone() for name, value in engine.module.state_dict().items()}
        assert engine.save_16bit_model(tmp_path) is True
        engine.export_pretrained(tmp_path / "export")
        engine.save_checkpoint(tmp_path)
        engine.module[0].merged_adapters = ["default"]
        engine.save_checkpoint(tmp_path)
    for told in ("0.base.weight is 0.weight in the model by now", "merged into the weights of 0 and 0 other layers"):
        assert caplog.text.count(told) == 1, caplog.text
    exported = load_file(tmp_path / "export" / "model.safetensors")
    for content in (torch.load(tmp_path / "pytorch_model.bin"), exported):
        assert set(content) == set(expected) == {"0.weight", "0.bias", "1.weight", "1.bias"}
        assert all(torch.equal(content[name], value) for name, value in expected.items())


@pytest.mark.parametrize("stage", [1, 3])
def test_what_has_another_name_beside_its_own_by_now_keeps_it(stage: int, tmp_path: Path) -> None:
    with engine_of(config(stage), torch.nn.Sequential(torch.nn.Linear(4, 4))) as engine:
        engine.module.register_parameter("alias", engine.module[0].weight)  # the first name that torch gives
        engine.save_16bit_model(tmp_path)
        engine.export_pretrained(tmp_path / "export")
    assert set(load_file(tmp_path / "export" / "model.safetensors")) == {"0.weight", "0.bias"}
    content = torch.load(tmp_path / "pytorch_model.bin")
    assert content.keys() == {"0.weight", "0.bias", "alias"}
    assert torch.equal(content["alias"], content["0.weight"])


@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_called_otherwise_by_now_is_saved(stage: int, tmp_path: Path) -> None:
    """As by get_peft_model around the module of an engine."""
    with engine_of(config(stage), torch.nn.Sequential(torch.nn.Linear(4, 4))) as engine:
        engine.module[0] = torch.nn.Sequential(engine.module[0])
        with GatheredParameters(engine.module.parameters()):
            expected = {name: value.clone() for name, value in engine.module.state_dict().items()}
        engine.save_16bit_model(tmp_path)
        engine.export_pretrained(tmp_path / "export")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    for content in (torch.load(tmp_path / "pytorch_model.bin"), exported):
        assert set(content) == set(expected) == {"0.0.weight", "0.0.bias"}
        assert all(torch.equal(content[name], value) for name, value in expected.items())


def _another_weight(model: torch.nn.Sequential) -> None:
    model[0].weight = torch.nn.Parameter(torch.full((4, 4), 7.0))


def _a_buffer(model: torch.nn.Sequential) -> None:
    del model[0].weight
    model[0].register_buffer("weight", torch.full((4, 4), 7.0))


def _places_changed(model: torch.nn.Sequential) -> None:
    model[0], model[1] = model[1], model[0]


def _tied(model: torch.nn.Sequential) -> None:
    model[1].weight = model[0].weight


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("change", [_another_weight, _a_buffer, _places_changed, _tied])
def test_a_name_means_what_the_model_has_under_it_now(stage: int, change: Any, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with engine_of(config(stage), model) as engine:
        change(model)
        with GatheredParameters(model.parameters()):
            expected = {name: value.clone() for name, value in model.state_dict().items()}
        assert engine.save_16bit_model(tmp_path) is True
        engine.export_pretrained(tmp_path / "export")
        named = [(name, value.clone()) for name, value in engine.named_weights()]
        with pytest.raises(CheckpointError, match=r"weight is another tensor in the model .* build another engine"):
            engine.save_checkpoint(tmp_path / "checkpoint")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    if change is _tied:  # from_pretrained ties them again
        exported["1.weight"] = exported["0.weight"]
    assert len(named) == len(expected)
    assert not any((tmp_path / "checkpoint").glob("global*"))
    for content in (torch.load(tmp_path / "pytorch_model.bin"), exported, dict(named)):
        assert set(content) == set(expected)
        assert all(torch.equal(content[name], value) for name, value in expected.items())


def test_what_was_resized_is_written_and_not_saved_to_go_on_from(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with engine_of(config(1), model) as engine:
        model[0].weight.data = torch.full((6, 4), 7.0)
        engine.export_pretrained(tmp_path)
        with pytest.raises(CheckpointError, match=r"0.weight was \[4, 4\] in initialize\(\) and is \[6, 4\] now"):
            engine.save_checkpoint(tmp_path / "checkpoint")
    assert torch.equal(load_file(tmp_path / "model.safetensors")["0.weight"], torch.full((6, 4), 7.0))


@pytest.mark.parametrize("stage", [1, 3])
def test_saved_models_load(runs: Any, stage: int) -> None:
    folder, (found, _, _), _ = runs[stage]
    content = torch.load(folder / "pytorch_model.bin", weights_only=True)
    assert list(content) == NAMES
    assert content["head.weight"].data_ptr() == content["embedding.weight"].data_ptr()
    assert all(torch.equal(content[name], found[name]) for name in NAMES)
    stored = load_file(folder / "other.safetensors")
    assert set(NAMES) - set(stored) == {"head.weight", "frozen"}
    missing, unexpected = load_model(Model().bfloat16(), str(folder / "other.safetensors"), strict=False)
    assert (set(missing), list(unexpected)) == ({"frozen"}, [])
    assert sorted(path.name for path in folder.iterdir()) == ["other.safetensors", "pytorch_model.bin"]


def test_gathering_has_to_be_allowed_for_a_save(tmp_path: Path) -> None:
    """Who asks for the weights themselves gets them, as in DeepSpeed: OpenRLHF does."""
    with engine_of(config(3, zero_optimization={"stage": 3})) as engine:
        assert engine.save_16bit_model(tmp_path) is False
        assert list(tmp_path.iterdir()) == []
        assert set(engine._consolidated_16bit_state_dict()) == set(NAMES)
    with engine_of(config(2, zero_optimization={"stage": 2})) as engine:
        assert engine.save_16bit_model(tmp_path) is True


def test_frozen_parameters_can_be_left_out() -> None:
    with engine_of(config(3)) as engine:
        found = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    assert set(NAMES) - set(found) == {"frozen"}


def test_clones_keep_ties() -> None:
    base = torch.arange(6.0)
    state = {"a": base, "b": base, "view": base.view(6), "rows": base.view(2, 3), "other": base.clone()}
    cloned = clone_tensors_for_torch_save(state)
    assert cloned["a"] is cloned["b"] is cloned["view"]
    assert cloned["a"] is not base
    assert cloned["other"] is not cloned["a"]
    assert torch.equal(cloned["rows"], base.view(2, 3))


def test_clones_do_not_drag_their_base_along(tmp_path: Path) -> None:
    base = torch.zeros(100_000)
    cloned = clone_tensors_for_torch_save({"slice": base[10:20], "step": base[::1000], "wide": base[:1].expand(50)})
    assert [value.untyped_storage().nbytes() for value in cloned.values()] == [40, 400, 200]
    torch.save(cloned, tmp_path / "file")
    assert (tmp_path / "file").stat().st_size < 10_000


def test_clones_of_nested_things() -> None:
    Point = namedtuple("Point", "x y")
    module = torch.nn.Linear(2, 2)
    item = [1, "text", (torch.ones(2), {"deep": torch.ones(1, requires_grad=True)}), Point(torch.ones(3), None)]
    number, text, (first, nested), point = clone_tensors_for_torch_save(item)
    assert (number, text) == (1, "text")
    assert first.tolist() == [1.0, 1.0]
    assert nested["deep"].requires_grad is False
    assert isinstance(point, Point)
    assert point.x.tolist() == [1.0] * 3
    state = clone_tensors_for_torch_save(module.state_dict())
    assert isinstance(state, OrderedDict)
    assert state._metadata == module.state_dict()._metadata
    assert state["weight"].data_ptr() != module.weight.data_ptr()
    empty = clone_tensors_for_torch_save([torch.empty(0), torch.empty(0, 3)])
    assert [tuple(value.shape) for value in empty] == [(0,), (0, 3)]
