"""A report of two processes in two network namespaces names the slow link between them, with its rate."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks.slow_link import Hosts, missing
from ds_hf.profile.analysis import analyse
from ds_hf.profile.load import read_run
from ds_hf.profile.verdict import judge
from tests.engine.observe.report.common import make_engine, train
from tests.helpers.models import TinyLM

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.timeout(120),
]
ROOT = Path(__file__).parents[2]
RATE = 100  # Mbit/s


def work(folder: Path) -> None:
    dist.init_process_group("gloo")
    engine = make_engine(3, folder, TinyLM(width=256, depth=3))
    train(engine, 6)
    engine.destroy()
    dist.destroy_process_group()


def test_the_link_is_named_with_its_rate(tmp_path: Path) -> None:
    with Hosts() as hosts:
        hosts.limit(RATE)
        started = []
        for rank, (name, link) in enumerate(zip(hosts.names, hosts.links, strict=True)):
            environ = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            environ |= {"MASTER_ADDR": "10.251.0.1", "MASTER_PORT": "29778", "GLOO_SOCKET_IFNAME": link}
            words = ["ip", "netns", "exec", name, sys.executable, "-m", __name__, str(tmp_path)]
            started.append(subprocess.Popen(words, env={**os.environ, **environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT))
        try:
            assert [process.wait() for process in started] == [0, 0]
        finally:
            for process in started:
                process.kill()
                process.wait()
    analysis = analyse(read_run(tmp_path))
    verdict = judge(analysis)
    slow = [finding for finding in verdict.findings if finding.kind in ("gather", "reduction")]
    assert verdict.findings[0] in slow
    assert sum(finding.share for finding in slow) > 0.5
    gathers = analysis.traffic["gather"]
    assert gathers.moving * 1e3 >= 0.5 * gathers.nbytes * 8 / RATE / 1e3, "half of the bytes cross the link"
    assert gathers.rate is not None
    assert 0.4 * RATE / 8e3 < gathers.rate / 1e9 < 4 * RATE / 8e3
    assert "are exposed for" in slow[0].text
    assert " ms, " in slow[0].text
    assert verdict.changes


if __name__ == "__main__":
    work(Path(sys.argv[1]))
