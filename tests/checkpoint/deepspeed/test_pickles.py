"""DeepSpeed's pickled files, read and written without it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_hf.checkpoint.deepspeed import pickles
from ds_hf.checkpoint.deepspeed.pickles import (
    DynamicScaler,
    StaticScaler,
    ZeroStage,
    load_any,
    load_pickled,
    save_pickled,
)
from ds_hf.errors import CheckpointError
from ds_hf.log import forget_said


def test_threads_may_load_at_once(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    save_pickled(path, {"stage": ZeroStage(2), "static": StaticScaler(cur_scale=4.0), "dynamic": DynamicScaler()})
    before = set(torch.serialization.get_safe_globals())
    with ThreadPoolExecutor(8) as threads:
        for loaded in threads.map(load_pickled, [path] * 400):
            assert (loaded["stage"], loaded["static"].cur_scale) == (2, 4.0)
    assert set(torch.serialization.get_safe_globals()) == before


class _Taken:
    """What Python 3.11.0 to 3.11.3 write for a member of an enum."""

    def __init__(self, *args: object) -> None:
        self.args = args

    def __reduce__(self) -> Any:
        return getattr, self.args


def test_stages_that_an_older_python_wrote(tmp_path: Path) -> None:
    save_pickled(tmp_path / "file.pt", {"stage": _Taken(ZeroStage, "weights")})
    assert load_pickled(tmp_path / "file.pt") == {"stage": 3}


@pytest.mark.parametrize("args", [(ZeroStage, "__class__"), (DynamicScaler, "get"), ([], "append")])
def test_other_attributes_are_not_taken(tmp_path: Path, args: tuple[Any, str]) -> None:
    save_pickled(tmp_path / "file.pt", {"stage": _Taken(*args)})
    with pytest.raises(CheckpointError, match=r"which is not admitted|not loaded from a checkpoint"):
        load_pickled(tmp_path / "file.pt")


def test_checksums_that_are_not_compared_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    forget_said()
    load_any(tmp_path / "a.pt")
    assert not caplog.messages
    monkeypatch.setattr(pickles, "READ_WHOLE", 10)
    for _ in range(2):
        load_any(tmp_path / "a.pt")
    assert [message.count("without comparing the checksums") for message in caplog.messages] == [1]
