"""DeepSpeed's pickled files, read and written without it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ds_hf.engine.checkpoint.deepspeed_pickle import DynamicScaler, StaticScaler, ZeroStage, load_pickled, save_pickled


def test_threads_may_load_at_once(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    save_pickled(path, {"stage": ZeroStage(2), "static": StaticScaler(cur_scale=4.0), "dynamic": DynamicScaler()})
    before = torch.serialization.get_safe_globals()
    with ThreadPoolExecutor(8) as threads:
        for loaded in threads.map(load_pickled, [path] * 400):
            assert (loaded["stage"], loaded["static"].cur_scale) == (2, 4.0)
    assert torch.serialization.get_safe_globals() == before
