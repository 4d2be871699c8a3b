"""Further settings in the same processes: what they say is what processes of their own would have said."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_hf import initialize
from ds_hf.engine.observe.probes.trial import driver, further
from ds_hf.engine.observe.probes.trial.further import Given, changed
from ds_hf.errors import ConfigError
from ds_hf.measure.protocol import TRIAL_ENV, TrialRequest, further_file
from tests.engine.observe.probes.trial.test_driver import Net, train
from tests.helpers.distributed import run_distributed

SETTINGS: dict[str, dict[str, Any]] = {
    "1": {"zero_optimization": {"stage": 1}},
    "compiled": {"zero_optimization": {"stage": 2}, "ds_hf": {"compile": "blocks"}},
    "3": {"zero_optimization": {"stage": 3}},
    "2": {"zero_optimization": {"stage": 2}},
}


class Ended(BaseException):
    """In the place of the end of the process."""


def asked(folder: Path, names: list[str], own: str, dtype: str, natural: int = 0) -> None:
    """Write the requests of ``measured``, and the files that they name: once, and before any process reads them.

    Args:
        natural: own steps of the script that the first trial times.
    """
    all_alike = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, dtype: {"enabled": True}}
    for number, name in enumerate(names):
        config = folder / f"{name}.json"
        tree = {**all_alike, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, **SETTINGS[name]}
        if own != "file":
            del tree["optimizer"]
        config.write_text(json.dumps(tree))
        first = folder / "request.json"
        TrialRequest(
            f"{folder}/{name}.jsonl", points=((4, 2), (2, 4)), steps=2, config=str(config),
            further=int(number < len(names) - 1), natural_steps=0 if number else natural,
        ).write(further_file(first, number) if number else first)  # fmt: skip


def trial(
    folder: Path, names: list[str], own: str, dtype: str, natural: int = 0, trained: int = 99, processes: int = 2
) -> None:
    """A trial of the first setting, with the others as further requests, on ``processes``."""
    asked(folder, names, own, dtype, natural)
    run_distributed(measured, processes, str(folder), names[0], own, natural, trained)


def measured(folder: str, name: str, own: str, natural: int, trained: int) -> None:
    """One process of a trial; ``name``: its first setting; ``own``: who makes the optimizer.

    Args:
        natural: own steps of the script that the first trial times. trained: micro-steps that the script makes.
    """

    def ended(code: int) -> None:
        raise Ended

    further.leave = driver.leave = ended  # type: ignore[assignment]
    real = torch.compile  # without the compile times of inductor, which the engine asks for by name
    torch.compile = lambda *args, **options: real(*args, **{**options, "backend": "eager"})
    os.environ[TRIAL_ENV] = f"{folder}/request.json"
    torch.manual_seed(1)
    model = Net()
    groups: Any = [{"params": [p], "lr": 1e-2} for p in model.parameters()]
    optimizer = {
        "file": None,
        "torch": torch.optim.AdamW,
        "function": lambda p: torch.optim.AdamW(p, lr=1e-2),
        "scheduled": torch.optim.RMSprop,  # the engine calls its step, which the scheduler replaces
    }[own]
    given = {"optimizer": optimizer(groups) if own in ("torch", "scheduled") else optimizer}  # type: ignore[misc]
    if own == "scheduled":
        given["lr_scheduler"] = torch.optim.lr_scheduler.LambdaLR(given["optimizer"], lambda step: 1 / (step + 1))
    if own in ("file", "function"):
        given["model_parameters"] = iter(groups)
    # the Trainer gives a dict that it has filled in
    engine = initialize(model=model, config=json.loads(Path(folder, f"{name}.json").read_text()), **given)[0]
    if natural and trained < 99:
        train(engine, trained)
        engine.events.interceptor._ended_early(None)  # as the end of the process does
        return
    with pytest.raises(Ended):
        train(engine, trained)


def said(folder: Path, name: str) -> tuple[list[tuple[Any, ...]], dict[str, Any]]:
    """Peaks of the points that were measured, and the facts."""
    events = list(map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines()))
    points = [(e["micro"], e["accumulation"], e["outcome"], e["peak"]) for e in events if e["event"] == "point"]
    assert events[-1]["event"] == "done"
    return sorted(set(points)), {k: v for k, v in events[0].items() if k not in ("time", "memory")}


@pytest.mark.parametrize(
    ("own", "dtype", "names"),
    [
        ("file", "bf16", list(SETTINGS)),
        ("torch", "torch_autocast", ["1", "3", "2"]),
        ("function", "bf16", ["2", "1"]),
        ("scheduled", "bf16", ["1", "2"]),
    ],
)
def test_as_processes_of_their_own_would_say(tmp_path: Path, own: str, dtype: str, names: list[str]) -> None:
    together = tmp_path / "together"
    together.mkdir()
    trial(together, names, own, dtype)
    for name in names[1:]:
        alone = tmp_path / name
        alone.mkdir()
        trial(alone, [name], own, dtype)
        (points, facts), (expected, of_its_own) = said(together, name), said(alone, name)
        assert facts == of_its_own
        assert [point[:3] for point in points] == [point[:3] for point in expected]
        for (*_, peak), (*_, least) in zip(points, expected, strict=True):
            assert peak == pytest.approx(least, rel=0.01)


def test_after_own_steps_of_the_script(tmp_path: Path) -> None:
    """The user's file: its processes stay, too, and wait in the forward after the last step that was timed."""
    trial(tmp_path, ["1", "2"], "torch", "bf16", natural=2)
    alone = tmp_path / "alone"
    alone.mkdir()
    trial(alone, ["2"], "torch", "bf16")
    (points, facts), (expected, of_its_own) = said(tmp_path, "2"), said(alone, "2")
    assert facts == of_its_own
    for (*size, peak), (*same, least) in zip(points, expected, strict=True):
        assert size == same
        assert peak == pytest.approx(least, rel=0.01)
    first = list(map(json.loads, (tmp_path / "1.jsonl").read_text().splitlines()))
    assert len([each for each in first if each["event"] == "step" and each["kind"] == "natural"]) == 2
    assert first[-1]["stays"]
    assert not json.loads((tmp_path / "2.jsonl").read_text().splitlines()[-1])["stays"]


def test_a_script_that_is_over_by_then_does_not_stay(tmp_path: Path) -> None:
    trial(tmp_path, ["1", "2"], "torch", "bf16", natural=2, trained=6, processes=1)
    events = list(map(json.loads, (tmp_path / "1.jsonl").read_text().splitlines()))
    assert len([each for each in events if each["event"] == "step" and each["kind"] == "natural"]) == 2
    assert events[-1]["event"] == "done"
    assert not events[-1].get("stays")


def test_what_a_program_filled_in_stays() -> None:
    old = {"a": "auto", "zero": {"stage": 1, "size": "auto", "offload": {"device": "cpu"}}, "bf16": {"enabled": "auto"}}
    new = {"a": "auto", "zero": {"stage": 2, "size": "auto"}, "bf16": {"enabled": "auto"}, "own": {"compile": "blocks"}}
    given = {"a": 3, "zero": {"stage": 1, "size": 50, "offload": {"device": "cpu"}}, "bf16": {"enabled": True}, "b": 1}
    found = changed(given, old, new)
    assert found == {"a": 3, "zero": {"stage": 2, "size": 50}, "bf16": {"enabled": True}, "b": 1, "own": new["own"]}
    assert given["zero"]["stage"] == 1
    for own in (3, None):  # the script's, whatever the file says
        with pytest.raises(ConfigError, match="the script itself gives stage a value"):
            changed({**given, "zero": {**given["zero"], "stage": own}}, old, new)
    with pytest.raises(ConfigError, match="compile"):
        changed({**given, "own": {"compile": True}}, old, new)
    assert changed(given, new, new) == given


def test_an_optimizer_is_as_it_was() -> None:
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.AdamW([{"params": params[:1], "lr": 0.1}, {"params": params[1:]}], lr=0.2)
    given = Given(
        {"optimizer": optimizer, "model_parameters": None, "claims": (), "lr_scheduler": 1, "training_data": 2}
    )
    optimizer.param_groups[0]["params"] = []
    optimizer.state[params[0]] = {"step": 1}
    for _ in range(2):
        again = given.again()
        fresh = again["optimizer"]
        assert fresh is optimizer  # what a scheduler has put in the place of its step calls this one
        assert [group["lr"] for group in fresh.param_groups] == [0.1, 0.2]
        assert [group["params"] for group in fresh.param_groups] == [params[:1], params[1:]]
        assert not fresh.state
        fresh.state[params[0]] = {"step": 2}
        fresh.param_groups[0]["lr"] = 0.0
        assert (again["lr_scheduler"], again["training_data"], again["claims"]) == (None, None, ())
        fresh.param_groups.clear()


def test_states_of_the_constructor_come_back() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adagrad([param], initial_accumulator_value=0.5)
    given = Given({"optimizer": optimizer, "model_parameters": None})
    for _ in range(2):
        optimizer.state[param]["sum"].add_(1)
        optimizer.state.clear()  # an engine takes them over
        given.again()
        assert optimizer.state[param]["sum"].tolist() == [0.5, 0.5]
        assert float(optimizer.state[param]["step"]) == 0


def test_parameters_that_can_be_read_once() -> None:
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    groups = ({"params": each, "lr": 0.1} for each in (iter(params[:2]), params[2]))
    given = Given({"optimizer": None, "model_parameters": groups})
    for made in (given.arguments, given.again(), given.again()):
        first, second = made["model_parameters"]
        assert first["params"] == params[:2]
        assert second["params"] is params[2]
        first["params"].clear()


def partly_trained(folder: str) -> None:
    os.environ[TRIAL_ENV] = f"{folder}/request.json"
    TrialRequest(f"{folder}/events.jsonl").write(Path(os.environ[TRIAL_ENV]))
    config = {"train_batch_size": 4, "optimizer": {"type": "AdamW"}}
    engine = initialize(model=Net(), config=config)[0]
    engine.module.drop.eval()
    made = further._remade(engine, config)
    assert [name for name, module in made.module.named_modules() if not module.training] == ["drop"]


def test_parts_that_do_not_train_stay_so(tmp_path: Path) -> None:
    run_distributed(partly_trained, 1, str(tmp_path))
