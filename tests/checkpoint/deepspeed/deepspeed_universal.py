"""Run by a Python that has DeepSpeed: trains a small Llama or Mixtral with AutoTP, saves, converts, goes on elsewhere.

    python deepspeed_universal.py save FOLDER STAGE TENSOR WORLD MODEL     FOLDER/saved, saved_universal by DeepSpeed
    python deepspeed_universal.py load FOLDER STAGE TENSOR WORLD MODEL     FOLDER/ours

Prints the losses of the three steps after that, as JSON. Processes meet in a file, and what they say goes to files: no
port may be taken, and none waits for a pipe to be read. There is no time limit but that of the test; they end with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

STEPS = 3


SIZES = {
    "vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.0}
# DeepSpeed refuses Hugging Face's plan of Mixtral, and leaves experts whole
ATTENTION = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*self_attn\.[qkv]_proj\.weight$"], "partition_type": "column"},
        {"patterns": [r".*self_attn\.o_proj\.weight$"], "partition_type": "row"},
    ],
}


def tokens_of(step: int) -> Any:
    """The batch of a step."""
    import torch

    return torch.randint(0, 24, (2, 8), generator=torch.Generator().manual_seed(step))


def model_of(kind: str) -> Any:
    """``"llama"`` or ``"mixtral"``."""
    import transformers

    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    config = transformers.MixtralConfig(**SIZES, **EXPERTS)
    config._experts_implementation = "eager"
    return transformers.MixtralForCausalLM(config)


def _worker(action: str, folder: str, stage: int, tensor: int, kind: str) -> None:
    import deepspeed
    import deepspeed.comm.torch
    import torch

    deepspeed.comm.torch.build_shm_op = lambda: None  # it would compile
    torch.set_num_threads(1)
    torch.manual_seed(0 if action == "save" else 7)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting = f"file://{folder}/meeting_{action}"
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, init_method=meeting, rank=rank, world_size=world)
    model = model_of(kind)
    section = {"autotp_size": tensor, **({} if kind == "llama" else {"partition_config": ATTENTION})}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "checkpoint": {"load_universal": action == "load"},
        **({"tensor_parallel": section} if tensor > 1 else {}),
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)

    def train(steps: int, start: int) -> list[float]:
        losses = []
        for number in range(start, start + steps):
            tokens = tokens_of(number)
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
    action, folder, stage, tensor, world, kind = sys.argv[1:7]
    parent, processes = os.getppid(), []
    for rank in range(int(world)):
        env = {
            **os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank),
            "WORLD_SIZE": world, "LOCAL_SIZE": world,
        }  # fmt: skip
        command = [sys.executable, __file__, "--worker", action, folder, stage, tensor, kind]
        with open(_said(folder, rank), "wb") as said:
            processes.append(subprocess.Popen(command, env=env, stdout=said, stderr=said))
    codes: list[int | None] = [None]
    while None in codes and not any(codes) and os.getppid() == parent:
        time.sleep(0.2)
        codes = [process.poll() for process in processes]
    for process in processes:
        process.kill()
    for rank, code in enumerate(codes):
        if code:
            raise SystemExit(
                f"rank {rank} ended with {code}: {_said(folder, rank).read_text(errors='replace')[-4000:]}"
            )
    print(Path(folder, "losses").read_text())


def _said(folder: str, rank: int) -> Path:
    return Path(folder, f"said_by_{rank}")


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        _worker(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
    else:
        main()
