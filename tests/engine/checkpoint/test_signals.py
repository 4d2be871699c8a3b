"""A signal to one process: all save at the same step, the files are whole, and training goes on from them."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from ds_hf.checkpoint.verify import verify
from ds_hf.engine.checkpoint.signals import AgreedEnd
from ds_hf.engine.comm.mesh import Axis
from ds_hf.errors import DsHfError
from tests.engine.checkpoint.workload import build, config, differences, engine_of, states, train
from tests.helpers.distributed import run_distributed


def interrupted(folder: str, stage: int, background: bool, steps: int, signum: int | None) -> Any:
    """Losses of a loop that ends upon a signal, or after ``steps``; the last rank gets it in its third step."""
    rank = int(os.environ["RANK"])
    engine = build(config(stage, ds_hf={"checkpoint": {"async": background}}, gradient_accumulation_steps=2))
    engine.load_checkpoint(folder) if Path(folder, "latest").exists() else None
    ended = engine.checkpoint_on_signal(folder)
    begun = engine.global_steps
    losses = []
    while not ended and engine.global_steps < steps:
        if signum is not None and engine.global_steps == 2 and rank == 1:
            os.kill(os.getpid(), signum)
        losses += train(engine, 1, engine.micro_steps)
        ended = engine.checkpoint_on_signal(folder, client_state=lambda: {"at": engine.global_steps})
    found = states(engine)
    engine.destroy()
    return begun, losses, ended, found, signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("stage", "background", "signum"),
    [(2, False, signal.SIGTERM), (3, True, signal.SIGUSR1), (0, True, signal.SIGTERM)],
)
def test_one_process_is_asked(stage: int, background: bool, signum: int, tmp_path: Path) -> None:
    plain = run_distributed(interrupted, 2, str(tmp_path / "plain"), stage, background, 5, None)
    first = run_distributed(interrupted, 2, str(tmp_path / "cut"), stage, background, 5, signum)
    assert all(rank[2] and rank[4] for rank in first)
    assert [path.name for path in (tmp_path / "cut").glob("global_step*")] == ["global_step3"]
    assert verify(tmp_path / "cut" / "global_step3") == []
    second = run_distributed(interrupted, 2, str(tmp_path / "cut"), stage, background, 5, None)
    for whole, before, after in zip(plain, first, second, strict=True):
        assert (whole[0], before[0], after[0]) == (0, 0, 3)
        assert before[1] + after[1] == whole[1]
        assert differences(whole[3], after[3]) == []


def test_signals_that_are_none_and_other_threads() -> None:
    with engine_of(config(1)) as engine:
        with pytest.raises(DsHfError, match=r"no signals \['SIGNONE'\]"):
            engine.checkpoint_on_signal("out", signals=["SIGNONE"])
        raised: list[Exception] = []

        def elsewhere() -> None:
            try:
                engine.checkpoint_on_signal("out")
            except DsHfError as error:
                raised.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert "main thread" in str(raised[0])


def test_nothing_between_the_micro_batches_of_a_step(tmp_path: Path) -> None:
    with engine_of(config(1, gradient_accumulation_steps=2)) as engine:
        assert not engine.checkpoint_on_signal(tmp_path)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # twice is once
        train(engine, 1)
        if engine.global_steps == 0:
            assert not engine.checkpoint_on_signal(tmp_path)
            train(engine, 1, 1)
        assert engine.checkpoint_on_signal(tmp_path, tag="last")
        assert engine.checkpoint_on_signal(tmp_path)
        assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["last"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_period_is_too_short(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    end = AgreedEnd(Axis(None, 0, 1), 10.0)
    end._longest = 4.0
    with caplog.at_level(logging.WARNING, "ds_hf"):
        end.forewarn(5.0)
        assert caplog.text == ""
        end.forewarn(5.0, patience=3.0)
        assert "a step takes 4.0 s, saving took 5.0 s, and ds_hf.checkpoint.grace is 10 s" in caplog.text
        assert "have the signal sent 18 s before the end" in caplog.text
        caplog.clear()
        end.told(Path("out/global_step3"), 11.0, "SIGTERM")
        assert "SIGTERM: the checkpoint out/global_step3 is whole, 11.0 s after the signal, and" in caplog.text
        caplog.clear()
        end.told(Path("out/global_step3"), 9.0, "SIGTERM")
        assert caplog.messages == ["SIGTERM: the checkpoint out/global_step3 is whole, 9.0 s after the signal"]


def test_the_agent_has_its_own_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    axis = Axis(None, 0, 1)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert AgreedEnd(axis, None).grace is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    assert (AgreedEnd(axis, None).grace, AgreedEnd(axis, 12.0).grace, AgreedEnd(axis, 120.0).grace) == (30, 12, 30)
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "100")
    assert AgreedEnd(axis, 120.0).grace == 100
