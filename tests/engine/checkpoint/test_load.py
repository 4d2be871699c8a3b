"""What load_checkpoint takes, what it refuses, and what it leaves alone."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_hf
from ds_hf.checkpoint import tensors
from ds_hf.checkpoint.deepspeed.write import Target, write_deepspeed
from ds_hf.checkpoint.formats import open_source
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.errors import CheckpointError
from tests.engine.checkpoint.workload import Model, config, differences, engine_of, states, train
from tests.helpers.distributed import run_distributed


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three steps; tests must not change it."""
    folder = tmp_path_factory.mktemp("saved")
    with engine_of(config(2)) as engine:
        train(engine, 3)
        engine.save_checkpoint(folder, client_state={"epoch": 4, "seen": [1, (2, 3)], "weights": torch.arange(3.0)})
    return folder


@pytest.fixture
def warnings() -> Any:
    """Messages of the ds_hf logger."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ds_hf")
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


def test_path_and_client_state_come_back(saved: Path) -> None:
    with engine_of(config(3), seed=3) as engine:
        path, client_state = engine.load_checkpoint(saved)
        assert engine.load_checkpoint(saved / "global_step3")[0] == path
    assert path == str(saved / "global_step3")
    assert client_state["epoch"] == 4
    assert client_state["seen"] == [1, (2, 3)]
    assert client_state["weights"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("tag", [None, "global_step99"])
def test_nothing_to_load_is_a_warning(tmp_path: Path, warnings: list[str], tag: str | None) -> None:
    with engine_of(config(2)) as engine:
        before = states(engine)
        assert engine.load_checkpoint(tmp_path / "none", tag) == (None, {})
        assert differences(before, states(engine)) == []
    assert any("no checkpoint loaded" in text and "none" in text for text in warnings)


def test_latest_that_names_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("global_step5")
    with engine_of(config(2)) as engine, pytest.raises(CheckpointError, match="global_step5, which does not exist"):
        engine.load_checkpoint(tmp_path)


@pytest.mark.parametrize("tag", ["../x", "/etc"])
def test_latest_cannot_lead_elsewhere(tmp_path: Path, tag: str) -> None:
    (tmp_path / "latest").write_text(tag)
    with engine_of(config(2)) as engine, pytest.raises(CheckpointError, match="it leads out of the folder"):
        engine.load_checkpoint(tmp_path)


@pytest.mark.parametrize("stage", [1, 3])
def test_training_goes_on_after_a_load_in_inference_mode(saved: Path, stage: int) -> None:
    losses = []
    for inference in (False, True):
        with engine_of(config(stage), seed=3) as engine:
            with torch.inference_mode(inference):
                engine.load_checkpoint(saved)
            losses.append(train(engine, 3, 2))
    assert losses[0] == losses[1]


def test_dropout_goes_on_where_it_was(tmp_path: Path) -> None:
    with engine_of(config(2), Model(dropout=0.3)) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path)
        expected = train(engine, 3, 2)
    with engine_of(config(2), Model(dropout=0.3), seed=9) as engine:
        engine.load_checkpoint(tmp_path)
        assert train(engine, 3, 2) == expected


def test_used_engine_goes_back(saved: Path) -> None:
    """load_best_model_at_end: gradients under way and gathered units belong to the weights that go."""
    with engine_of(config(3), seed=1) as fresh:
        fresh.load_checkpoint(saved)
        expected, losses = states(fresh), train(fresh, 2, 3)
    with engine_of(config(3)) as engine:
        train(engine, 5)
        engine.backward(engine(torch.zeros(2, 5, dtype=torch.long)))  # and no step
        with GatheredParameters(list(engine.module.parameters())):
            engine.load_checkpoint(saved)
        assert differences(expected, states(engine)) == []
        assert train(engine, 2, 3) == losses


def test_checkpoint_before_the_first_step_forgets_moments(tmp_path: Path) -> None:
    with engine_of(config(2)) as engine:
        engine.save_checkpoint(tmp_path)
        expected = train(engine, 3)
        engine.load_checkpoint(tmp_path)
        assert train(engine, 3) == expected


def test_accumulation_under_way_begins_anew(tmp_path: Path) -> None:
    with engine_of(config(2, gradient_accumulation_steps=2)) as engine:
        train(engine, 3)  # one step and a half
        engine.save_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path)
        assert engine.global_steps == 1
        assert engine.micro_steps == 2
        assert not engine.is_gradient_accumulation_boundary()


def test_weights_only(saved: Path) -> None:
    with engine_of(config(2)) as full, engine_of(config(2), seed=5) as engine:
        full.load_checkpoint(saved)
        train(engine, 2, 70)
        before = states(engine)
        path, client_state = engine.load_checkpoint(saved, load_module_only=True)
        after, expected = states(engine), states(full)
    assert path is not None
    assert client_state["epoch"] == 4
    for key in expected:
        if key.endswith(("exp_avg", "exp_avg_sq")) or key in ("counters", "groups", "steps", "scheduler"):
            assert differences({key: before[key]}, {key: after[key]}) == []
        else:
            assert differences({key: expected[key]}, {key: after[key]}) == []


def test_scheduler_can_be_left_alone(saved: Path) -> None:
    with engine_of(config(2)) as engine:
        train(engine, 1)
        before = engine.lr_scheduler.state_dict()
        engine.load_checkpoint(saved, load_lr_scheduler_states=False)
        assert engine.lr_scheduler.state_dict() == before
        engine.load_checkpoint(saved)
        assert engine.lr_scheduler.state_dict() != before


def test_optimizer_states_can_be_left_alone(saved: Path) -> None:
    with engine_of(config(2)) as engine:
        engine.load_checkpoint(saved, load_optimizer_states=False)
        assert not engine.optimizer.moments()
        assert engine.global_steps == 3


def test_options_of_groups_go_into_the_live_dictionaries(tmp_path: Path) -> None:
    with engine_of(config(2)) as engine:
        group = engine.optimizer.param_groups[1]
        group["lr"], group["betas"] = 0.123, (0.5, 0.75)
        engine.save_checkpoint(tmp_path)
        group["lr"], group["betas"] = 0.5, (0.1, 0.1)
        engine.load_checkpoint(tmp_path)
        assert engine.optimizer.param_groups[1] is group
        assert (group["lr"], group["betas"], group["weight_decay"]) == (0.123, (0.5, 0.75), 0.0)


def test_other_number_of_groups_is_refused(saved: Path) -> None:
    with (
        engine_of(config(2), model_parameters=None) as engine,
        pytest.raises(CheckpointError, match=r"1 parameter groups, .* has 2"),
    ):
        engine.load_checkpoint(saved)


def test_names_that_differ_are_listed(saved: Path, warnings: list[str]) -> None:
    model = Model(tied=True)
    model.extra = nn.Parameter(torch.full((2,), 3.0))
    del model.blocks[1]
    with engine_of(config(2), model) as engine:
        before = states(engine)
        with pytest.raises(CheckpointError, match="missing in the checkpoint: extra; not in the model: ") as info:
            engine.load_checkpoint(saved)
        assert "blocks.1.calls" in str(info.value)
        assert differences(before, states(engine)) == []
        engine.load_checkpoint(saved, load_module_strict=False)
        assert engine.module.extra.tolist() == [3.0, 3.0]
        assert engine.module.blocks[0].calls.item() == 3
        train(engine, 1)
    assert any("missing in the checkpoint: extra" in text for text in warnings)


@pytest.mark.parametrize("strict", [True, False])
def test_shapes_that_differ_are_always_refused(saved: Path, strict: bool) -> None:
    model = Model()
    model.scale = nn.Parameter(torch.ones(2))
    with engine_of(config(2), model) as engine:
        before = states(engine)
        with pytest.raises(CheckpointError, match=r"scale: \[2\] in the model, \[\] in the checkpoint"):
            engine.load_checkpoint(saved, load_module_strict=strict)
        assert differences(before, states(engine)) == []


def test_tied_checkpoint_into_untied_model_and_back(saved: Path, tmp_path: Path) -> None:
    with engine_of(config(2), Model(tied=False)) as engine:
        engine.load_checkpoint(saved)
        model = engine.module
        assert torch.equal(model.head.weight, model.embedding.weight)
        assert model.head.weight is not model.embedding.weight
        engine.save_checkpoint(tmp_path)
        expected = model.embedding.weight.detach().clone()
    with engine_of(config(2), seed=8) as engine:
        engine.load_checkpoint(tmp_path)
        assert torch.equal(engine.module.head.weight, expected)


@pytest.mark.parametrize("stage", [0, 3])
def test_two_parameters_do_not_become_one(tmp_path: Path, warnings: list[str], stage: int) -> None:
    """The head that had trained by itself went unnoticed where the model that loads ties it."""
    with engine_of(config(stage), Model(tied=False)) as engine:
        train(engine, 1)
        engine.save_checkpoint(tmp_path)
        embedding = states(engine)["embedding.weight"]
    with engine_of(config(stage), seed=8) as engine:
        before = states(engine)
        with pytest.raises(CheckpointError, match=r"head\.weight are one parameter in it, and two"):
            engine.load_checkpoint(tmp_path)
        assert differences(before, states(engine)) == []
        engine.load_checkpoint(tmp_path, load_module_strict=False)
        assert torch.equal(states(engine)["embedding.weight"], embedding)
    assert any("those of embedding.weight are loaded" in text for text in warnings)


def test_custom_load_function(saved: Path) -> None:
    def doubled(src: dict[str, Tensor], dst: nn.Module) -> None:
        dst.load_state_dict({name: value * 2 for name, value in src.items()})

    with engine_of(config(3)) as plain, engine_of(config(3), seed=2) as engine:
        plain.load_checkpoint(saved)
        engine.load_checkpoint(saved, custom_load_fn=doubled)
        expected, found = states(plain), states(engine)
    assert torch.equal(found["embedding.weight"], expected["embedding.weight"] * 2)
    assert torch.equal(found["embedding.weight/master"], expected["embedding.weight/master"] * 2)
    assert torch.equal(found["embedding.weight/exp_avg"], expected["embedding.weight/exp_avg"])


@pytest.mark.parametrize("stage", [0, 3])
def test_engine_without_optimizer(saved: Path, tmp_path: Path, stage: int) -> None:
    content = {key: value for key, value in config(stage).items() if key not in ("optimizer", "scheduler")}
    with engine_of(config(2)) as trained, engine_of(content, seed=4) as engine:
        trained.load_checkpoint(saved)
        assert engine.optimizer is None
        engine.load_checkpoint(saved)
        tokens = torch.arange(10).view(2, 5)
        assert engine.eval()(tokens).item() == trained.eval()(tokens).item()
        engine.save_checkpoint(tmp_path)
        with pytest.raises(CheckpointError, match="saved without an optimizer"):
            trained.load_checkpoint(tmp_path)
        trained.load_checkpoint(tmp_path, load_optimizer_states=False)


def test_deepspeeds_files_without_those_of_the_optimizer(saved: Path, tmp_path: Path) -> None:
    """Whether there were any does not show: both are said, and what is advised works."""
    folder = write_deepspeed(open_source(saved), tmp_path, Target(2, 2), "tag")
    for path in folder.glob("*_optim_states.pt"):
        path.unlink()
    with engine_of(config(2), seed=4) as engine, engine_of(config(2)) as wanted:
        with pytest.raises(CheckpointError, match=r"which lie in \*_optim_states\.pt: copy these too, or"):
            engine.load_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path, load_optimizer_states=False)
        wanted.load_checkpoint(saved)
        assert torch.equal(states(engine)["embedding.weight"], states(wanted)["embedding.weight"])


def _rank_1_cannot_read(folder: Path) -> str:
    with engine_of(config(2)) as engine:
        engine.save_checkpoint(folder)
        if engine.axis.rank == 1:

            def fails(*_: Any, **__: Any) -> None:
                raise OSError(5, "Input/output error")

            tensors.TensorFiles.fill = fails  # type: ignore[method-assign]  # this process is the test's alone
        try:
            engine.load_checkpoint(folder)
        except CheckpointError as error:
            return str(error)
        return "loaded"


def test_one_rank_that_cannot_read_fails_all(tmp_path: Path) -> None:
    first, second = run_distributed(_rank_1_cannot_read, 2, tmp_path, timeout=40)
    assert "failed on rank 1: OSError: [Errno 5] Input/output error" in first
    assert "Input/output error" in second


def _asked_differently(folder: Path) -> list[str]:
    with engine_of(config(1)) as engine:
        train(engine, 1)
        engine.save_checkpoint(folder, "a")
        said = []
        for more in ({"load_optimizer_states": bool(engine.axis.rank)}, {"tag": "ab"[engine.axis.rank]}):
            with pytest.raises(CheckpointError) as caught:
                engine.load_checkpoint(folder, **more)
            said.append(str(caught.value))
        return said


def test_ranks_that_ask_for_different_things_are_told(tmp_path: Path) -> None:
    for states_, tag in run_distributed(_asked_differently, 2, tmp_path):
        assert "load_optimizer_states=False on rank 0 and True on rank 1" in states_
        assert "tag='a' on rank 0 and 'b' on rank 1" in tag


def test_extra_state_of_modules(tmp_path: Path) -> None:
    class Counting(Model):
        count = 0

        def get_extra_state(self) -> dict[str, int]:
            return {"count": self.count}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    with engine_of(config(2), Counting()) as engine:
        engine.module.count = 12
        engine.save_checkpoint(tmp_path)
        engine.module.count = 0
        engine.load_checkpoint(tmp_path)
        assert engine.module.count == 12


def _with_optimizer(kind: str, stage: int, *, frozen: bool = False) -> Any:
    torch.manual_seed(0)
    model = Model()
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer: torch.optim.Optimizer
    if kind == "adafactor":
        optimizer = torch.optim.Adafactor(params, lr=1e-2)
    elif kind == "adagrad":
        model.scale = nn.Parameter(torch.tensor([1.25]))
        params = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.5)
    elif kind == "nadam":
        optimizer = torch.optim.NAdam(params, lr=1e-2)
    else:
        optimizer = torch.optim.SGD(params, lr=1e-2, momentum=0.9)
    model.blocks.requires_grad_(not frozen)
    content = {key: value for key, value in config(stage).items() if key not in ("optimizer", "scheduler")}
    return ds_hf.initialize(model=model, config=content, optimizer=optimizer)[0]


@pytest.mark.parametrize("kind", ["adafactor", "adagrad", "nadam", "sgd"])
def test_other_optimizers_resume_exactly(tmp_path: Path, kind: str) -> None:
    first = _with_optimizer(kind, 2)
    first.save_checkpoint(tmp_path / "begin")
    losses = train(first, 2)
    first.save_checkpoint(tmp_path / "middle")
    expected = train(first, 3, 2)
    first.destroy()
    second = _with_optimizer(kind, 3)
    train(second, 1, 80)
    second.load_checkpoint(tmp_path / "middle")
    assert train(second, 3, 2) == expected
    second.load_checkpoint(tmp_path / "begin")
    assert train(second, 2) == losses
    second.destroy()


def _adafactor_at(folder: Path, stage: int, saves: bool) -> tuple[str, list[float]]:
    engine = _with_optimizer("adafactor", stage)
    if saves:
        train(engine, 2)
        engine.save_checkpoint(folder)
    else:
        try:
            engine.load_checkpoint(folder)
        except CheckpointError as error:
            return str(error), []
    return "", train(engine, 2, 2)


@pytest.mark.parametrize("kind", ["adagrad", "nadam", "sgd"])
def test_parameters_without_states_do_not_bind_the_others(tmp_path: Path, kind: str) -> None:
    """Saved between unfreezing and the first step of what was unfrozen, and cut otherwise where it is loaded."""
    run_distributed(_unfrozen_at, 2, tmp_path, kind, 2, True)
    (expected,) = run_distributed(_unfrozen_at, 1, tmp_path, kind, 2, True)
    for world, stage in ((1, 3), (2, 0)):
        found = run_distributed(_unfrozen_at, world, tmp_path, kind, stage, False)
        assert all(each == pytest.approx(expected, rel=1e-6) for each in found)


def _unfrozen_at(folder: Path, kind: str, stage: int, saves: bool) -> list[float]:
    engine = _with_optimizer(kind, stage, frozen=saves)
    if not saves:
        engine.load_checkpoint(folder)
        return train(engine, 3, 2)
    train(engine, 2)
    engine.module.blocks.requires_grad_(True)
    if engine.mesh.world.world_size > 1:
        engine.save_checkpoint(folder)
    return train(engine, 3, 2)


def test_states_that_cannot_be_cut(tmp_path: Path) -> None:
    """Adafactor's factored moments: exact where the pieces are the same, an error where they are not."""
    replicated, sharded = tmp_path / "replicated", tmp_path / "sharded"
    _, expected = run_distributed(_adafactor_at, 2, replicated, 0, True)[0]
    assert run_distributed(_adafactor_at, 2, replicated, 0, False)[0] == ("", expected)
    run_distributed(_adafactor_at, 2, sharded, 2, True)
    message, _ = run_distributed(_adafactor_at, 1, sharded, 2, False)[0]
    assert "Adafactor keeps state for" in message
    assert "cannot be divided again" in message
