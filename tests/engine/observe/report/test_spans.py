"""Spans: what collectives are counted as, own times that add up, which steps are recorded, files that only grow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ds_hf.engine.observe.report.files import ReportFile, rank_path, require_writable
from ds_hf.engine.observe.report.recorder import RecordedStep, Recorder, is_sampled
from ds_hf.engine.observe.report.spans import KINDS, Key, Span, kind_of, self_times
from ds_hf.errors import ConfigError


class Clock:
    """Nanoseconds that go on by what a test says."""

    def __init__(self) -> None:
        self.now = 1_000_000

    def __call__(self) -> int:
        return self.now


def recorder_of(folder: Path, clock: Clock, every: bool = True) -> tuple[Recorder, list[RecordedStep]]:
    recorder, steps = Recorder(ReportFile(folder, 0), every=every, clock=clock), []
    recorder.listeners.append(steps.append)
    return recorder, steps


@pytest.mark.parametrize(
    ("operation", "what", "axis", "kind"),
    [
        ("all-gather", "the weights of layers.0", "world", "gather"),
        ("all-to-all", "the weights of layers.0", "data", "gather"),
        ("reduce-scatter", "the gradients of layers.0", "world", "reduction"),
        ("all-to-all", "the gradients of layers.0", "world", "reduction"),
        ("all-reduce", "the gradient norm", "world", "reduction"),
        ("all-reduce", "activations of layers.0.mlp", "world", "tensor"),
        ("all-reduce", "gradients of the input of layers.0.mlp", "data x tensor", "tensor"),
        ("all-gather", "anything", "tensor", "tensor"),
        ("all-to-all", "layers.0.self_attn", "world", "sequence"),
        ("broadcast", "the order of the units", "world", "collective"),
    ],
)
def test_what_a_collective_is_counted_as(operation: str, what: str, axis: str, kind: str) -> None:
    assert kind_of(operation, what, axis) == kind
    assert kind in KINDS


def test_own_times_add_up_to_the_outermost_spans() -> None:
    spans = [Span(0, 0.0, 10.0), Span(1, 1.0, 4.0, 1), Span(2, 2.0, 1.0, 2), Span(1, 5.0, 2.0, 1), Span(3, 10.0, 1.0)]
    assert list(self_times(spans)) == [(0, 4.0), (1, 3.0), (2, 1.0), (1, 2.0), (3, 1.0)]


def test_spans_of_a_step_with_a_clock_of_our_own(tmp_path: Path) -> None:
    clock = Clock()
    recorder, steps = recorder_of(tmp_path, clock)
    forward = recorder.number(Key("compute", "forward"))
    gather = recorder.number(Key("gather", "a", "all-gather", 8, 2))
    recorder.begin(1)
    clock.now += 5_000_000  # 5 ms of the script
    turn = recorder.open(forward)
    clock.now += 2_000_000
    inner = recorder.open(gather)
    clock.now += 3_000_000
    recorder.close(inner)
    clock.now += 1_000_000
    recorder.close(turn)
    recorder.add_tokens_of(7)
    recorder.open(forward)  # the step ends inside it
    clock.now += 4_000_000
    recorder.end(1, samples=2)
    recorder.begin(2)
    recorder.close(turn)  # belongs to the step before: nothing is open here
    recorder.end(2, samples=2)

    assert steps[0].seconds == pytest.approx(0.015)
    assert (steps[0].samples, steps[0].tokens) == (2, 7)
    assert [(s.key, round(s.start, 6), round(s.seconds, 6), s.depth) for s in steps[0].spans] == [
        (2, 0.0, 0.0, 0),  # what the report itself took since the last step
        (forward, 0.005, 0.006, 0),
        (gather, 0.007, 0.003, 1),
        (forward, 0.011, 0.004, 0),
    ]
    assert [span.key for span in steps[1].spans] == [2]
    assert steps[1].tokens is None


def test_which_steps_are_sampled_follows_from_their_numbers() -> None:
    recorded = [number for number in range(1, 10_000) if is_sampled(number)]
    assert recorded[:18] == [*range(1, 17), 32, 48]
    assert recorded[-2:] == [9728, 9984]
    assert len(recorded) < 300


def test_steps_between_are_not_recorded(tmp_path: Path) -> None:
    clock = Clock()
    recorder, steps = recorder_of(tmp_path, clock, every=False)
    for number in range(1, 50):
        recorder.begin(number)
        clock.now += 1_000_000
        recorder.end(number, 1)
    assert [step.number for step in steps] == [*range(1, 17), 32, 48]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match=r'"report" names .*/file/run.*Not a directory.*give a folder'):
        require_writable(file / "run")
    assert require_writable(tmp_path / "a" / "b").is_dir()
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_process_that_is_killed_leaves_whole_lines(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom ds_hf.engine.observe.report.files import ReportFile\n"
        "file = ReportFile(Path(sys.argv[1]), 3)\n"
        "number = 0\nwhile True:\n    number += 1\n    file.add({'keys': {number: 'x' * 999}}, {'step': number})\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    path = rank_path(tmp_path, 3)
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until and not (path.exists() and path.stat().st_size > 100_000):
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    lines = path.read_text().splitlines()
    assert len(lines) >= 90
    assert [json.loads(line)["step"] for line in lines[1::2]] == list(range(1, len(lines) // 2 + 1))


def test_a_disk_that_is_full_ends_the_recording_only() -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full")
    file = ReportFile.__new__(ReportFile)
    file.path, file.fault, file._file = Path("/dev/full"), "", os.open("/dev/full", os.O_WRONLY)
    file.add({"step": 1})
    assert file.fault == "/dev/full cannot be written to any more (No space left on device)"
    file.add({"step": 2})
    os.close(file._file)


def test_tokens_that_travel_to_experts_are_a_kind() -> None:
    said = ["tokens of layers.0.mlp.experts", "gradients of tokens of layers.0.mlp.experts", "numbers of tokens of x"]
    assert {kind_of("all-to-all", each, "near (2)") for each in said} == {"experts"}
