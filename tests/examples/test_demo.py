"""``make demo``: it trains with the file that the search wrote, or with the user's own where that was kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TUNED = "demo_output/autotuning/ds_config.tuned.json"
COMMAND = f"torchrun --standalone --nproc-per-node=2 examples/train_lm.py --deepspeed {TUNED}\n"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The module, in an empty folder, without what it prepares."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "demo", raising=False)
    import demo as module  # type: ignore[import-not-found]

    monkeypatch.setattr(module, "prepare", lambda: None)
    return module


def played(demo: Any, monkeypatch: pytest.MonkeyPatch, found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Run the demo with a search that finds ``found``; what it started."""
    started: list[tuple[str, ...]] = []

    def run(module: str, *words: str) -> None:
        started.append((module, *words))
        last = demo.MODEL / f"checkpoint-{demo.MORE_STEPS}"
        for folder in (demo.SEARCH, last):
            folder.mkdir(parents=True, exist_ok=True)
        (demo.SEARCH / "ds_config.tuned.reasons.json").write_text(json.dumps(found))
        (demo.SEARCH / "ds_config.tuned.json").write_text('{"train_batch_size": 16}')
        (demo.SEARCH / "command.txt").write_text(COMMAND)
        log = [{"eval_loss": 7.5}, {"loss": 6.0}, {"eval_loss": 5.25}]
        (last / "trainer_state.json").write_text(json.dumps({"log_history": log}))

    monkeypatch.setattr(demo, "run", run)
    demo.main()
    return started


def found_by_the_search(**more: Any) -> dict[str, Any]:
    """What the demo reads of the search's result; by default a gain of nothing that is certain and confirmed."""
    sure = {"gain_interval": [1.0, 1.0], "gain_is_certain": True, "confirmed": True, "why_not_confirmed": ""}
    speeds = {"own": 10.0, "value": 10.0, "gain": 1.0, "own_seconds": 2.0, "confirmed_seconds": None}
    return {"kept_yours": False, "warnings": [], **speeds, **sure, **more}


def test_a_gain_is_trained_with_and_shown(demo: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    found = found_by_the_search(value=16.0, gain=1.6, gain_interval=[1.5, 1.7], confirmed_seconds=1.6)
    search, train, again = played(demo, monkeypatch, found)
    assert search[:2] == ("ds_hf.cli", "autotune")
    assert train == ("torch.distributed.run", *COMMAND.split()[1:])
    assert again[: len(train)] == train
    assert again[-1] == f"demo_output/model/checkpoint-{demo.STEPS}"
    printed = capsys.readouterr().out
    assert "your file       1,280 tokens/s" in printed
    assert "tuned file      2,048 tokens/s: 1.60 x, at the same" in printed
    assert "1,024 and 1,280 tokens/s" in printed  # 16 samples of 128 tokens in 2.0 and in 1.6 s
    assert "7.50 before training, 5.25 after" in printed
    assert "demo_output/autotuning/report.html" in printed


def test_without_a_gain_the_users_file_is_trained_with(demo: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    found = found_by_the_search(kept_yours=True, warnings=["The machine was not idle."])
    _, train, again = played(demo, monkeypatch, found)
    assert train[-1] == again[len(train) - 1] == "examples/ds_config_zero3.json"
    printed = capsys.readouterr().out
    assert "nothing was significantly faster: it was kept" in printed
    assert "tuned file" not in printed
    assert "The machine was not idle." in printed


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"gain_is_certain": False}, "tokens/s: 1.2 to 2.1 x, at"),
        ({"confirmed": False, "why_not_confirmed": "the budget ended"}, "NOT confirmed (the budget ended), at"),
    ],
)
def test_no_figure_where_none_is_sure(
    demo: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, more: dict[str, Any], said: str
) -> None:
    found = found_by_the_search(value=16.0, gain=1.6, gain_interval=[1.2, 2.1], **more)
    played(demo, monkeypatch, found)
    printed = capsys.readouterr().out
    assert said in printed
    assert "1.60 x" not in printed


def test_what_fails_ends_it(demo: Any) -> None:
    with pytest.raises(SystemExit) as error:
        demo.run("ds_hf.cli", "no-such-command")
    assert error.value.code == 2
