"""What compression costs and gives: size, held-out loss and time of a small Llama, by method.

    python benchmarks/compression.py --json FILE

A Llama of 1.1 M parameters learns the source code of Python's standard library byte by byte. From there each row trains
as long with its own section, is cleaned or converted, saved, and loaded by plain transformers, which gives its loss on
files that were held out and the time of a forward, in turns with the first row's model (*x time*, below 1 is faster).
*bytes* is what lies on the disk. *rounded* rows train without a section and are rounded when they are written, *qat*
rows train with ``ds_hf.qat`` for the same files; *torchao's qat* trains in plain torch with torchao's ``QATConfig``.
*llm-compressor's* rows round the first row's model, without data or by GPTQ with sequences of the training text, with
``--llm-compressor PYTHON``: an interpreter that has it, since it wants an older transformers.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

LENGTH, BATCH, SEED = 128, 8, 5
MODULES = {"attention": ["self_attn"], "mlp": ["mlp"]}


def texts() -> tuple[Tensor, Tensor]:
    """Bytes of the standard library: to learn from, and held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts: list[list[bytes]] = [[], []]
    for number, file in enumerate(files):
        parts[number % 10 == 0].append(file.read_bytes())
    train, held_out = (torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8).long() for part in parts)
    return train, held_out


def batch(text: Tensor, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(SEED + step)
    starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=generator)
    return torch.stack([text[start : start + LENGTH] for start in starts.tolist()])


def fresh() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=256,
            max_position_embeddings=512,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def trained(model: nn.Module, text: Tensor, first: int, steps: int, lr: float, **section: Any) -> Any:
    """The engine after so many steps."""
    import ds_hf

    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": lr}},
        **section,
    }
    engine, *_ = ds_hf.initialize(model=model.train(), config=config)
    for step in range(steps):
        for group in engine.optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 20) * max(0.1, 1 - step / steps)
        ids = batch(text, first + step)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    return engine


def group(params: dict[str, Any], modules: list[str], related: list[list[str]] | None = None) -> dict[str, Any]:
    return {"params": params, "modules": modules, **({"related_modules": related} if related else {})}


def method(shared: dict[str, Any], **groups: Any) -> dict[str, Any]:
    return {"shared_parameters": {"enabled": True, "schedule_offset": 1, **shared}, "different_groups": groups}


def rows(steps: int) -> dict[str, dict[str, Any]]:
    """Sections of ``compression_training``."""
    pruned = method({"method": "l1"}, mlp=group({"dense_ratio": 0.5}, ["gate_proj"], [["up_proj", "down_proj"]]))
    heads = method(
        {"method": "topk", "num_heads": 4},
        all=group({"dense_ratio": 0.5}, ["o_proj"], [["q_proj", "k_proj", "v_proj"]]),
    )
    kernels = method({"method": "l1", "block_pattern": "2:4"}, all=group({"dense_ratio": 0.5}, ["self_attn", "mlp"]))
    half = method(
        {"method": "l1", "schedule_offset_end": steps // 2, "schedule_offset_stride": 5},
        all=group({"dense_ratio": 0.5}, ["self_attn", "mlp"]),
    )
    inputs = method({"range_calibration": "dynamic"}, all=group({"bits": 8}, ["self_attn", "mlp"]))

    def bits(count: int) -> dict[str, Any]:
        shared = {"quantize_groups": 16, "quantization_type": "symmetric"}
        params = {"start_bits": count, "target_bits": count, "quantization_period": 1}
        return method(shared, all=group(params, ["self_attn", "mlp"]))

    return {
        "weight_quantization, 8 bits": {"weight_quantization": bits(8)},
        "weight_quantization, 4 bits": {"weight_quantization": bits(4)},
        "weight_quantization, 1 bit": {"weight_quantization": bits(1)},
        "activation_quantization, 8 bits": {"activation_quantization": inputs},
        "sparse_pruning, half": {"sparse_pruning": half},
        "sparse_pruning, 2:4": {"sparse_pruning": kernels},
        "row_pruning, half of the MLPs": {"row_pruning": pruned},
        "head_pruning, half": {"head_pruning": heads},
        "rows and heads": {"row_pruning": pruned, "head_pruning": heads},
        "rows and 8 bits": {"row_pruning": pruned, "weight_quantization": bits(8)},
        "2:4 and 4 bits": {"sparse_pruning": kernels, "weight_quantization": bits(4)},
    }


def loss_of(model: Any, text: Tensor) -> float:
    with torch.no_grad():
        losses = [model(input_ids=ids, labels=ids).loss.item() for ids in (batch(text, 10**6 + n) for n in range(16))]
    return statistics.fmean(losses)


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


def weighed(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def ratio(first: Any, model: Any, turns: int = 9) -> float:
    """Time of a forward over that of ``first``, in turns."""
    ids = torch.randint(256, (16, 256), generator=torch.Generator().manual_seed(1))
    found = []
    with torch.no_grad():
        for _ in range(turns):
            times = []
            for each in (first, model):
                begun = time.perf_counter()
                each(input_ids=ids)
                times.append(time.perf_counter() - begun)
            found.append(times[1] / times[0])
    return statistics.median(found[1:])


def converted(source: Path, target: Path, count: int, size: int) -> None:
    command = [sys.executable, "-m", "ds_hf", "checkpoint", "convert", str(source), str(target), "--to", "hf"]
    subprocess.run([*command, "--bits", str(count), "--group-size", str(size)], check=True, stdout=subprocess.DEVNULL)


def by_llm_compressor(python: Path, source: Path, target: Path, bits: int, size: int, how: str) -> None:
    script = Path(__file__).with_name("compression_peer.py")
    apart = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": ""}
    command = [str(python), str(script), str(source), str(target), str(bits), str(size), how]
    done = subprocess.run(command, env=apart, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")


def by_torchao(model: nn.Module, text: Tensor, first: int, steps: int, lr: float) -> nn.Module:
    """Plain torch: its QATConfig for weights of 4 bits in groups of 32, and its values at the end."""
    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    weights = IntxFakeQuantizeConfig(torch.int4, group_size=32, is_symmetric=True)

    def inside(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and name != "lm_head"

    quantize_(model, QATConfig(weight_config=weights, step="prepare"), filter_fn=inside)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=lr)
    for step in range(steps):
        for each in optimizer.param_groups:
            each["lr"] = lr * min(1.0, (step + 1) / 20) * max(0.1, 1 - step / steps)
        ids = batch(text, first + step)
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-steps", type=int, default=600)
    parser.add_argument("--steps", type=int, default=150, help="of each row, from the base")
    parser.add_argument("--lr", type=float, default=3e-3, help="of the base; rows have a third of it")
    parser.add_argument("--llm-compressor", type=Path, metavar="PYTHON", help="an interpreter that has it")
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from ds_hf.compression import redundancy_clean

    train, held_out = texts()
    base = fresh()
    trained(base, train, 0, args.base_steps, args.lr).destroy()
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)

        def add(what: str, folder: Path) -> None:
            model = loaded(folder)
            row = {"name": what, "bytes": weighed(folder), "loss": round(loss_of(model, held_out), 4)}
            row["x time"] = round(ratio(first or model, model), 3)
            records.append(row)
            megabytes = row["bytes"] / 1e6
            print(f"{what:<50} {megabytes:6.2f} MB  loss {row['loss']:.4f}  time x {row['x time']:.2f}", flush=True)
            if args.json:
                machine = f"CPU, {os.cpu_count()} cores, torch {torch.__version__}"
                about = {"machine": machine, "arguments": sys.argv[1:]}
                args.json.write_text(json.dumps({**about, "records": records}, indent=1) + "\n")

        first: Any = None
        rest = (args.base_steps, args.steps, args.lr / 3)
        engine = trained(copy.deepcopy(base), train, *rest)
        engine.destroy()
        engine.module.save_pretrained(root / "plain")
        add("trained on, no section", root / "plain")
        first = loaded(root / "plain")
        torch.save(torch.cat([batch(train, 10**5 + n) for n in range(16)]), root / "plain" / "calibration.pt")
        for count, size in ((8, 32), (4, 32), (4, 128)):
            kind, sized = f"{count} bits in groups of {size}", {"weights": count, "group_size": size}
            converted(root / "plain", root / f"rounded {kind}", count, size)
            add(f"rounded, {kind}", root / f"rounded {kind}")
            engine = trained(copy.deepcopy(base), train, *rest, ds_hf={"qat": sized})
            engine.destroy()
            engine.module.save_pretrained(root / f"whole {kind}")
            converted(root / f"whole {kind}", root / f"qat {kind}", count, size)
            add(f"qat, {kind}", root / f"qat {kind}")
            for how, word in (("rtn", "rounded"), ("gptq", "GPTQ")) if args.llm_compressor else ():
                by_llm_compressor(args.llm_compressor, root / "plain", root / f"{how} {kind}", count, size, how)
                add(f"llm-compressor, {word}, {kind}", root / f"{how} {kind}")
        model = by_torchao(copy.deepcopy(base), train, *rest)
        records.append({"name": "torchao's qat, 4 bits in groups of 32", "loss": round(loss_of(model, held_out), 4)})
        print(records[-1], flush=True)
        for what, section in rows(args.steps).items():
            if args.only in what:
                engine = trained(copy.deepcopy(base), train, *rest, compression_training=section)
                file = {"train_micro_batch_size_per_gpu": BATCH, "compression_training": section}
                folder = root / what.replace(" ", "-").replace(":", "of")
                redundancy_clean(engine, file).save_pretrained(folder)
                add(what, folder)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
