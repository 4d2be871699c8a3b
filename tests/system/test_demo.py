"""The demo's own script and file trained by two hosts together; one is cut off, and training goes on from its save."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.system.hosts import Hosts
from tests.system.launching import CUT_S, LAUNCHERS, MARKS, ROOT, START_S, Run, stopped_at_the_end

pytestmark = MARKS

EVERY = 10  # steps between saves
START_LOSS = 8.37  # ln 4096 and a little: the model knows nothing yet


@pytest.fixture
def demo(hosts: Hosts, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("host-a slots=1\nhost-b slots=1\n")

    def begin(launcher: str, *arguments: str) -> Run:
        command = ["-H", str(hostfile), "--launcher", launcher, f"{ROOT}/examples/train_lm.py", "--output_dir", "out"]
        command += ["--deepspeed", f"{ROOT}/examples/ds_config_zero2.json", *arguments]
        runs.append(Run(hosts, tmp_path / "run", *command))
        return runs[-1]

    with stopped_at_the_end() as runs:
        yield begin


def held_out(text: str) -> list[float]:
    """Held-out losses, as they were printed."""
    return [float(loss) for loss in re.findall(r"held-out loss +([\d.]+)", text)]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_demo_goes_on_after_a_host_was_cut_off(launcher: str, hosts: Hosts, demo: Callable[..., Run]) -> None:
    run = demo(launcher, "--max_steps", "2000", "--save_steps", str(EVERY), "--eval_steps", "1000")
    out = run.folder / "out"
    run.until(lambda: (out / f"checkpoint-{EVERY}" / "trainer_state.json").exists() or run.ended, START_S, "a save")
    assert not run.ended, run.text
    assert held_out(run.text) == [pytest.approx(START_LOSS, abs=0.05)]
    hosts.cut(1)
    try:
        code = run.wait(CUT_S)
        run.nothing_left(CUT_S)
    finally:
        hosts.cut(1, off=False)
    assert code not in (0, None)

    saved = max(
        int(path.name.split("-")[1]) for path in out.glob("checkpoint-*") if (path / "trainer_state.json").exists()
    )
    again = demo(launcher, "--max_steps", str(saved + EVERY), "--resume_from_checkpoint", f"out/checkpoint-{saved}")
    assert again.wait(START_S) == 0, again.text
    assert "on 2 processes" in again.text
    resumed, last = held_out(again.text)[0], held_out(again.text)[-1]
    assert last < resumed < START_LOSS - 0.5, again.text
    again.nothing_left(5)
