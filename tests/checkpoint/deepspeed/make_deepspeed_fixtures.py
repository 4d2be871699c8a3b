#!/usr/bin/env python
"""Writes tests/checkpoint/deepspeed/data/deepspeed.tar.xz with real DeepSpeed; run it in DeepSpeed's own environment.

    DS_ACCELERATOR=cpu PYTHON_WITH_DEEPSPEED make_deepspeed_fixtures.py [OUTPUT.tar.xz]

For every case of ``deepspeed_workload.CASES``: train, save a checkpoint, note the losses of the steps after it, in
processes of their own over gloo. The archive has a folder a case, and ``expected.json`` with losses and versions.
With ``--resume FOLDER STAGE DTYPE WORLD`` it loads FOLDER instead, trains on and prints the losses as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))


def _worker(action: str, folder: str, stage: int, dtype: str) -> None:
    import deepspeed
    import torch
    from deepspeed_workload import STEPS_AFTER, STEPS_BEFORE, TinyModel, config, groups, train

    torch.set_num_threads(1)
    torch.manual_seed(0 if action == "save" else 7)
    deepspeed.init_distributed("gloo")
    # It refuses fp16 on CPUs, which torch can do well enough for a file.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    model = TinyModel()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups(model), config=config(stage, dtype))
    if action == "save":
        train(engine, STEPS_BEFORE)
        engine.save_checkpoint(folder, client_state={"epoch": 3, "note": "kept"})
    else:
        train(engine, 1, 50)
        path, client = engine.load_checkpoint(folder)
        assert path is not None
        assert client["epoch"] == 3, client.keys()
    losses = train(engine, STEPS_AFTER, STEPS_BEFORE)
    if int(os.environ["RANK"]) == 0:
        Path(f"{folder}.losses").write_text(json.dumps(losses))
    torch.distributed.barrier()


def run(action: str, folder: Path, stage: int, dtype: str, world_size: int) -> list[float]:
    """Losses after saving into, or loading from, ``folder``."""
    port = str(20000 + os.getpid() % 20000)
    processes = []
    for rank in range(world_size):
        env = {
            **os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
            "LOCAL_SIZE": str(world_size),
        }  # fmt: skip
        command = [sys.executable, __file__, "--worker", action, str(folder), str(stage), dtype]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE))
    for process in processes:
        _, errors = process.communicate(timeout=180)
        if process.returncode:
            for other in processes:
                other.kill()
            raise SystemExit(errors.decode()[-4000:])
    noted = Path(f"{folder}.losses")
    losses: list[float] = json.loads(noted.read_text())
    noted.unlink()
    return losses


def main() -> None:
    from importlib.metadata import version

    from deepspeed_workload import CASES, case_name

    output = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "data/deepspeed.tar.xz"
    with tempfile.TemporaryDirectory() as root:
        expected: dict[str, object] = {"deepspeed": version("deepspeed"), "torch": version("torch"), "losses": {}}
        for stage, dtype, world_size in CASES:
            name = case_name(stage, dtype, world_size)
            expected["losses"][name] = run("save", Path(root) / name, stage, dtype, world_size)  # type: ignore[index]
            for script in Path(root, name).glob("zero_to_*.py"):
                script.unlink()  # large, and not ours
            print(name, expected["losses"][name], flush=True)  # type: ignore[index]
        Path(root, "expected.json").write_text(json.dumps(expected, indent=1))
        output.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(output, "w:xz", preset=9) as archive:
            for path in sorted(Path(root).iterdir()):
                archive.add(path, path.name)
    print(f"{output}: {output.stat().st_size} bytes")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        _worker(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
    elif sys.argv[1:2] == ["--resume"]:
        print(json.dumps(run("load", Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))))
    else:
        main()
