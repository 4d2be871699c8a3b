"""What a user wrote goes with what transformers makes of it."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

from ds_hf.config.written import AsWritten, as_written
from ds_hf.hf.source import plain_config


def test_a_copy_knows_what_was_written_and_a_pickle_is_a_plain_dict(tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    file.write_text('{"train_batch_size": "auto", "zero_optimization": {"stage": 2, "cpu_offload": true}}')
    kept = copy.deepcopy(plain_config(plain_config(str(file))))
    kept["train_batch_size"] = 8
    assert isinstance(kept, AsWritten)
    written = {"train_batch_size": "auto", "zero_optimization": {"stage": 2, "cpu_offload": True}}
    assert as_written(kept, "config dict") == (written, str(file))
    assert type(pickle.loads(pickle.dumps(kept))) is dict
    assert as_written({"a": 1}, "config dict") == ({"a": 1}, "")
    assert as_written({"a": 1}, str(file)) == (written, str(file))
