"""What a worker writes for torch's agent when it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CODE = """
import sys
from ds_hf.engine.comm.failure_record import record_failures
record_failures(); record_failures()
{ending}
"""


def end(ending: str, path: Path) -> str:
    env = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(path)}
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(ending=ending)], capture_output=True, text=True, env=env, check=False
    )
    return done.stderr


def test_torch_reads_what_is_written(tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    stderr = end("raise ValueError('b\u00f6se')", tmp_path / "error")
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(tmp_path / "error"))
    message = json.loads((tmp_path / "error").read_text("utf-8"))["message"]
    assert failure.message == message
    assert failure.timestamp > 1_700_000_000
    assert message["message"] == "ValueError: b\u00f6se"
    assert message["extraInfo"]["py_callstack"].endswith("ValueError: b\u00f6se\n")
    assert stderr.count("Traceback") == 1  # and it is still printed, once


def test_a_wrong_configuration_is_told_once_without_our_own_lines(tmp_path: Path, monkeypatch: Any) -> None:
    wrong = "import ds_hf\nds_hf.load_config({'stgae': 3})"
    for rank, times in (("0", 1), ("1", 0)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        stderr = end(wrong, tmp_path / rank)
        text = json.loads((tmp_path / rank).read_text("utf-8"))["message"]["extraInfo"]["py_callstack"]
        assert "ds_hf/config" not in text
        assert "did you mean zero_optimization.stage?" in text
        assert stderr.count("did you mean") == times


@pytest.mark.parametrize("ending", ["sys.exit(3)", "raise KeyboardInterrupt", "pass"])
def test_other_ends_are_no_failures(ending: str, tmp_path: Path) -> None:
    end(ending, tmp_path / "error")
    assert not (tmp_path / "error").exists()


def test_a_forked_child_does_not_speak_for_the_worker(tmp_path: Path) -> None:
    end("import os\nif os.fork() == 0: raise ValueError('child')\nos.wait()", tmp_path / "error")
    assert not (tmp_path / "error").exists()
