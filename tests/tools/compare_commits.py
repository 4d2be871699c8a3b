"""Whether two commits train to the same bits: losses, norms and weights of real optimizers on two processes.

    python tests/tools/compare_commits.py 88fbf40 [HEAD]

``tests/contract/test_collectives_recorded.py`` keeps what is exact on every machine. AdamW and its like are not: their
numbers depend on the processor's instructions. So both commits are run here, one after the other, each in a worktree of
its own, and what comes out is compared to the bit. The C++ library is that of this checkout.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIBRARY = "ds_hf/engine/ops/_lib"
WORLD, STEPS = 2, 4
CPU = {"device": "cpu"}


def cells() -> dict[str, dict[str, Any]]:
    found = {}
    for stage, dtype, accumulation in product((0, 1, 2, 3), ("fp32", "bf16", "fp16"), (1, 3)):
        found[f"AdamW, stage {stage}, {dtype}, accumulation {accumulation}"] = cell(stage, dtype, accumulation)
    for stage, name in product((1, 3), ("Adam", "Lamb", "Lion", "Adagrad", "Muon")):
        found[f"{name}, stage {stage}"] = cell(stage, "bf16", 1, name)
    for stage in (1, 2, 3):
        offload = {"offload_optimizer": CPU} | ({"offload_param": CPU} if stage == 3 else {})
        found[f"AdamW, stage {stage}, on the CPU"] = cell(stage, "bf16", 3, zero=offload)
    return found


def cell(
    stage: int, dtype: str, accumulation: int, optimizer: str = "AdamW", zero: dict[str, Any] | None = None
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.5,
        "optimizer": {"type": optimizer, "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, **(zero or {})},
    }
    return found if dtype == "fp32" else {**found, dtype: {"enabled": True}}


def rank_main() -> None:
    """One process of the commit that ``PYTHONPATH`` names; rank 0 prints its results."""
    import torch
    import torch.distributed as dist

    from ds_hf import initialize
    from ds_hf.engine.zero.gather import GatheredParameters
    from tests.helpers.models import TinyLM

    dist.init_process_group("gloo")
    results = {}
    for name, config in cells().items():
        torch.manual_seed(1)
        model = TinyLM(depth=9)
        engine, *_ = initialize(model=model, config=config)
        generator = torch.Generator().manual_seed(7)
        numbers = []
        for _ in range(STEPS * config["gradient_accumulation_steps"]):
            tokens = torch.randint(0, 48, (WORLD, 2, 12), generator=generator)[dist.get_rank()]
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
            numbers += [loss.item(), float(engine.get_global_grad_norm() or 0.0)]
        digest = hashlib.sha256()
        with GatheredParameters(list(model.parameters())):
            for value in model.parameters():
                digest.update(value.detach().float().numpy().tobytes())
        engine.destroy()
        results[name] = [numbers, digest.hexdigest()]
    if dist.get_rank() == 0:
        print(json.dumps(results))
    dist.destroy_process_group()


@contextmanager
def checked_out(commit: str, folder: Path) -> Iterator[Path]:
    """A worktree of ``commit`` in ``folder``, with this checkout's library."""
    subprocess.run(["git", "worktree", "add", "-q", "--detach", folder, commit], cwd=ROOT, check=True)
    try:
        if (ROOT / LIBRARY).is_dir():
            shutil.copytree(ROOT / LIBRARY, folder / LIBRARY, dirs_exist_ok=True)
        yield folder
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=ROOT, check=True)


def run(commit: str, folder: Path) -> dict[str, Any]:
    """The results of ``commit``."""
    with checked_out(commit, folder):
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = str(sock.getsockname()[1])
        common = {**os.environ, "PYTHONPATH": f"{folder}:{folder}/ds_hf/compat", "OMP_NUM_THREADS": "1"}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(WORLD)}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank"],
                cwd=folder,
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(WORLD)
        ]
        outputs = [rank.communicate(timeout=900)[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise SystemExit(f"{commit} failed")
        found: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
        return found


def main() -> None:
    first, second = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "HEAD"
    with tempfile.TemporaryDirectory() as folder:
        before, after = run(first, Path(folder, "first")), run(second, Path(folder, "second"))
    different = [name for name in before if before[name] != after[name]]
    for name in different:
        print(f"different: {name}")
    print(f"{len(before) - len(different)} of {len(before)} settings end in the same bits at {first} and {second}")
    sys.exit(bool(different))


if __name__ == "__main__":
    rank_main() if sys.argv[1] == "--rank" else main()
