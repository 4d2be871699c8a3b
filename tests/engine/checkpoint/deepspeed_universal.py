"""Run by a Python that has DeepSpeed: trains a small Llama with AutoTP, saves, converts, and goes on elsewhere.

    python deepspeed_universal.py save FOLDER STAGE TENSOR WORLD      FOLDER/saved, FOLDER/saved_universal by DeepSpeed
    python deepspeed_universal.py load FOLDER STAGE TENSOR WORLD      FOLDER/ours

Prints the losses of the three steps after that, as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

STEPS = 3


def _worker(action: str, folder: str, stage: int, tensor: int) -> None:
    import deepspeed
    import deepspeed.comm.torch
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    deepspeed.comm.torch.build_shm_op = lambda: None  # it would compile
    torch.set_num_threads(1)
    torch.manual_seed(0 if action == "save" else 7)
    deepspeed.init_distributed("gloo")
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False,
        )
    )  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "checkpoint": {"load_universal": action == "load"},
        **({"tensor_parallel": {"autotp_size": tensor}} if tensor > 1 else {}),
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)

    def train(steps: int, start: int) -> list[float]:
        losses = []
        for number in range(start, start + steps):
            tokens = torch.randint(0, 24, (2, 8), generator=torch.Generator().manual_seed(number))
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        return losses

    train(STEPS, 0 if action == "save" else 50)
    if action == "save":
        client = {"epoch": 3}
        if tensor == 1:  # AutoTP writes it itself
            client["universal_checkpoint_info"] = {"universal_checkpoint_version": 0.4}
        engine.save_checkpoint(folder, tag="saved", client_state=client)
        torch.distributed.barrier()
        if int(os.environ["RANK"]) == 0:
            from deepspeed.checkpoint.ds_to_universal import main

            main(
                SimpleNamespace(
                    input_folder=f"{folder}/saved", output_folder=f"{folder}/saved_universal", num_extract_workers=1,
                    num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=False,
                )
            )  # fmt: skip
    else:
        path, client = engine.load_checkpoint(folder, tag="ours")
        assert path is not None
        assert client["epoch"] == 3
    losses = train(3, STEPS)
    if int(os.environ["RANK"]) == 0:
        Path(folder, "losses").write_text(json.dumps(losses))
    torch.distributed.barrier()


def main() -> None:
    action, folder, stage, tensor, world = sys.argv[1:6]
    processes = []
    for rank in range(int(world)):
        env = {
            **os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(20000 + os.getpid() % 20000), "RANK": str(rank), "LOCAL_RANK": str(rank),
            "WORLD_SIZE": world, "LOCAL_SIZE": world,
        }  # fmt: skip
        command = [sys.executable, __file__, "--worker", action, folder, stage, tensor]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE))
    for process in processes:
        try:
            _, errors = process.communicate(timeout=180)
        except subprocess.TimeoutExpired:
            errors = b"it took longer than three minutes"
            process.kill()
        if process.returncode:
            for other in processes:
                other.kill()
            raise SystemExit(errors.decode()[-4000:])
    print(Path(folder, "losses").read_text())


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        _worker(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    else:
        main()
