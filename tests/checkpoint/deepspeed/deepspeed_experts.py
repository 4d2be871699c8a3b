#!/usr/bin/env python
"""Writes tests/checkpoint/deepspeed/data/experts.tar.xz with real DeepSpeed; run it by a Python that has DeepSpeed.

    DS_ACCELERATOR=cpu PYTHON_WITH_DEEPSPEED deepspeed_experts.py OUTPUT.tar.xz

For every case a model with experts is trained for three steps over gloo and saved: with DeepSpeed's own layers, or by
AutoEP, one of whose folders DeepSpeed's converter makes universal, too. Beside them lies
``expected.pt``: the whole fp32 values and moments of each parameter, as DeepSpeed's own functions gave them to the
processes, by the names that they have in a model that is not divided.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CASES = {  # kind, stage, processes that divide experts, all processes, dtype
    "own-stage0": ("own", 0, 2, 2, "fp32"),
    "own-stage1": ("own", 1, 2, 4, "fp32"),
    "autoep-stage0": ("mixtral", 0, 2, 2, "fp32"),
    "autoep-stage2": ("mixtral", 2, 2, 2, "bf16"),
    "autoep-stage3": ("qwen3_moe", 3, 2, 4, "bf16"),
}
STATES = ("master", "exp_avg", "exp_avg_sq")
_SIZES = {
    "vocab_size": 12, "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 16, "tie_word_embeddings": False, "num_experts_per_tok": 2,
}  # fmt: skip


def model_of(kind: str, ep_size: int = 1) -> Any:
    """The model of a case; ``ep_size`` counts for DeepSpeed's own layers, which are made in parts."""
    import transformers
    from torch import nn

    if kind != "own":
        name = {"mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe"}[kind]
        more: dict[str, Any] = (
            {"num_local_experts": 4, "router_jitter_noise": 0.0}
            if kind == "mixtral"
            else {"num_experts": 4, "moe_intermediate_size": 6, "head_dim": 2, "decoder_sparse_step": 1}
        )
        config = getattr(transformers, f"{name}Config")(**_SIZES, **more)
        config._experts_implementation = "eager"
        return getattr(transformers, f"{name}ForCausalLM")(config)
    from deepspeed.moe.layer import MoE

    class Block(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            expert = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))
            self.before = nn.Linear(4, 4)
            self.moe = MoE(4, expert, num_experts=number, ep_size=ep_size, k=1, capacity_factor=8.0, use_rts=False)

        def forward(self, x: Any) -> Any:
            return x + self.moe(self.before(x))[0]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(12, 4)
            self.blocks = nn.ModuleList([Block(4), Block(2)])
            self.out = nn.Linear(4, 12)

        def forward(self, input_ids: Any, labels: Any) -> Any:
            hidden = self.embedding(input_ids)
            for block in self.blocks:
                hidden = block(hidden)
            loss = nn.functional.cross_entropy(self.out(hidden).flatten(0, 1), labels.flatten())
            return SimpleNamespace(loss=loss)

    return Net()


def _worker(case: str, folder: str) -> None:
    import deepspeed
    import deepspeed.comm.torch
    import torch
    from deepspeed.module_inject.auto_ep_presets import base
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]  # it would compile
    base._install_instance_transformers_output_recorders = lambda *_, **__: True  # not of today's transformers
    kind, stage, size, world, dtype = CASES[case]
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    meeting = f"file://{folder}/meeting"
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, init_method=meeting, rank=rank, world_size=world)
    model = model_of(kind, size)
    params: list[Any] = list(model.parameters())
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        **({dtype: {"enabled": True}} if dtype != "fp32" else {}),
    }
    if kind == "own":
        params = split_params_into_different_moe_groups_for_optimizer([{"params": params, "name": "all"}])
    else:
        section = {"enabled": True, "autoep_size": size, "preset_model": kind, "use_grouped_mm": False}
        config["expert_parallel"] = section
    engine, *_ = deepspeed.initialize(model=model, model_parameters=params, config=config)
    for step in range(3):
        tokens = torch.randint(0, 12, (2, 8), generator=torch.Generator().manual_seed(10 * step + rank))
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    engine.save_checkpoint(folder, tag="saved", client_state={"epoch": 3})
    torch.save(_held(engine, stage), f"{folder}/held_{rank}.pt")
    torch.distributed.barrier()
    if rank == 0 and stage == 3:
        from deepspeed.checkpoint.ds_to_universal import main

        main(
            SimpleNamespace(
                input_folder=f"{folder}/saved", output_folder=f"{folder}/universal", num_extract_workers=1,
                num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=False,
            )
        )  # fmt: skip
    torch.distributed.barrier()


def _held(engine: Any, stage: int) -> dict[str, list[Any]]:
    """Values and moments of what this process holds, by its names. Collective."""
    import torch
    import torch.distributed as dist
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {}
    for name, param in engine.module.named_parameters():
        if stage == 0:
            state = engine.optimizer.state[param]
            found[name] = [param.detach(), state["exp_avg"], state["exp_avg_sq"]]
        elif stage == 3:
            moments = [safe_get_full_optimizer_state(param, key) for key in STATES[1:]]
            found[name] = [safe_get_full_fp32_param(param), *moments]
        else:  # of experts the function has no moments there
            found[name] = []
            for key in STATES:
                whole = param.new_zeros(param.numel(), dtype=torch.float32)
                if (mapping := param._hp_mapping) is not None:
                    place, held = mapping.lp_fragment_address, mapping.hp_fragment
                    flat = next(
                        each
                        for each in engine.optimizer.single_partition_of_fp32_groups
                        if each.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()
                    )
                    kept = flat.detach() if key == "master" else engine.optimizer.optimizer.state[flat][key]
                    first = mapping.hp_fragment_address.start
                    whole[place.start : place.start + place.numel] = kept[first : first + place.numel]
                dist.all_reduce(whole, group=param._dp_group)
                found[name].append(whole.view(param.shape))
    return {name: [value.clone() for value in values] for name, values in found.items()}


def _expected(folder: Path, case: str) -> dict[tuple[str, str], Any]:
    """By parameter and state, of a model that is not divided: neighbours divide experts."""
    import torch

    size = CASES[case][2]
    held = [torch.load(folder / f"held_{rank}.pt") for rank in range(size)]
    found: dict[tuple[str, str], Any] = {}
    for name in held[0]:
        for index, state in enumerate(STATES):
            values = [each[name][index] for each in held]
            before, own, after = name.partition(".deepspeed_experts.")
            if own:
                number, _, rest = after.partition(".")
                count = len({n.split(own)[1].split(".")[0] for n in held[0] if n.startswith(before + own)})
                for rank, value in enumerate(values):
                    found[f"{before}{own}{rank * count + int(number)}.{rest}", state] = value
            elif name.endswith(".experts.w2"):
                found[name.replace(".w2", ".down_proj"), state] = torch.cat(values)
            elif name.endswith(".experts.w1"):
                ups = torch.cat([each[name.replace(".w1", ".w3")][index] for each in held])
                found[name.replace(".w1", ".gate_up_proj"), state] = torch.cat([torch.cat(values), ups], 1)
            elif not name.endswith(".experts.w3"):
                found[name.replace(".router.gate.", ".gate."), state] = values[0]
    return found


def _write(case: str, folder: Path) -> None:
    import torch

    folder.mkdir()
    processes, world = [], CASES[case][3]
    for rank in range(world):
        env = {
            **os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world), "LOCAL_SIZE": str(world),
        }  # fmt: skip
        with (folder / f"said_{rank}").open("wb") as said:
            command = [sys.executable, __file__, "--worker", case, str(folder)]
            processes.append(subprocess.Popen(command, env=env, stdout=said, stderr=said))
    while any(process.poll() is None for process in processes) and not any(process.poll() for process in processes):
        time.sleep(0.2)
    for rank, process in enumerate(processes):
        process.kill()
        if process.wait():
            raise SystemExit(f"{case}, rank {rank}: {(folder / f'said_{rank}').read_text(errors='replace')[-3000:]}")
    torch.save(_expected(folder, case), folder / "expected.pt")


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch, tarfile.open(sys.argv[1], "w:xz") as archive:
        for case in CASES:
            _write(case, Path(scratch, case))
            for name in ("saved", "universal", "expected.pt"):
                if Path(scratch, case, name).exists():
                    archive.add(Path(scratch, case, name), f"{case}/{name}")
            print(case, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        _worker(sys.argv[2], sys.argv[3])
    else:
        main()
