"""The command ``ds-hf generate``: a model continues prompts; how fast, in how much memory, and what was chosen.

Exit codes: 0 fine, 1 the model or the configuration is wrong, 2 wrong usage.
Torch is imported when the command runs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ds_hf.errors import DsHfError
from ds_hf.log import complain
from ds_hf.printable import printable

if TYPE_CHECKING:
    from ds_hf.memory.inference import Need

__all__ = ["generate_command"]

Model = Annotated[str, typer.Argument(help="Folder or cached name of a model.", show_default=False)]
Prompt = Annotated[list[str], typer.Option("--prompt", "-p", help="Text to continue; several times for a batch.")]
New = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Tokens to add.")]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", help="fp32, bf16, fp16, int8 or int4; by default bf16 on a GPU, fp32 on a CPU."),
]
Offload = Annotated[
    bool | None,
    typer.Option("--offload/--no-offload", help="Weights in host memory; by default where they do not fit the GPU."),
]
ConfigFile = Annotated[
    str | None, typer.Option("--config", help="JSON file of init_inference; overrides what is chosen.")
]
Checkpoint = Annotated[str | None, typer.Option("--checkpoint", help="Weights to read in place of the model's.")]
Sample = Annotated[bool, typer.Option("--sample", help="Draw tokens; else the best is taken.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.01, help="With --sample.")]
TopP = Annotated[float, typer.Option("--top-p", min=0.01, max=1.0, help="With --sample.")]
Seed = Annotated[int, typer.Option("--seed", help="With --sample.")]
Graphs = Annotated[bool, typer.Option("--graphs/--no-graphs", help="Capture decoding steps in CUDA graphs.")]
Compile = Annotated[bool, typer.Option("--compile/--no-compile", help="Compile decoding steps (minutes, once).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass
class _Plan:
    """What was chosen, with the reasons."""

    config: dict[str, Any]
    reasons: list[str]


def generate_command(
    model: Model,
    prompt: Prompt,
    max_new_tokens: New = 64,
    dtype: Dtype = None,
    offload: Offload = None,
    config: ConfigFile = None,
    checkpoint: Checkpoint = None,
    sample: Sample = False,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    graphs: Graphs = True,
    compile_steps: Compile = True,
    as_json: AsJson = False,
) -> None:
    """Continue prompts with a model: tokens a second, memory, what was chosen and why.

    Started on several processes (deepspeed, torchrun) they share each layer.
    """
    drawn = {"do_sample": True, "temperature": temperature, "top_p": top_p} if sample else {"do_sample": False}
    try:
        tokenizer, loaded = _load(model, dtype, empty=checkpoint is not None)
        inputs = _tokens(tokenizer, prompt)
        length = inputs["input_ids"].shape[1]
        plan = _plan(loaded, len(prompt), length, max_new_tokens, dtype, offload, graphs, compile_steps)
        if config is not None:
            plan.config |= _read(config)
            plan.reasons.append(f"{config} says the rest")
        if checkpoint is not None:
            plan.config["checkpoint"] = checkpoint
        found = _run(loaded, plan, inputs, max_new_tokens, drawn, seed)
    except (DsHfError, ValueError, OSError, NotImplementedError) as error:
        complain(error)
        raise typer.Exit(1) from None
    if int(os.environ.get("RANK", "0")):
        return
    both = loaded.config.is_encoder_decoder
    texts = tokenizer.batch_decode(found.pop("tokens")[:, 0 if both else length :], skip_special_tokens=True)
    found |= {"prompts": prompt, "texts": texts, "chosen": plan.config, "why": plan.reasons}
    if as_json:
        print(json.dumps(found, indent=2, default=str))
    else:
        _print(found)


def _load(name: str, dtype: str | None, *, empty: bool) -> tuple[Any, Any]:
    """Tokenizer and model; the model without values where a checkpoint has them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    from ds_hf.engine.comm.mesh import compute_device
    from ds_hf.inference.config import DTYPES

    try:
        settings = AutoConfig.from_pretrained(name)
    except Exception as error:  # transformers and huggingface_hub have classes of their own for a wrong folder
        reason = str(error).strip().splitlines()[0]
        hint = "give a folder with a config.json, or a name in the local cache"
        raise ValueError(f"cannot find the model {name!r}: {reason}\n  {hint}") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        hint = "save one beside the model: tokenizer.save_pretrained(folder)"
        raise ValueError(f"cannot load a tokenizer of {name!r}: {reason}\n  {hint}") from error
    kind = AutoModelForSeq2SeqLM if settings.is_encoder_decoder else AutoModelForCausalLM
    own = DTYPES.get(dtype or ("bf16" if compute_device().type == "cuda" else "fp32"), torch.bfloat16)
    if empty:
        with torch.device("meta"):
            return tokenizer, kind.from_config(settings, dtype=own)  # type: ignore[no-untyped-call]
    return tokenizer, kind.from_pretrained(name, dtype=own)


def _tokens(tokenizer: Any, prompts: list[str]) -> dict[str, Any]:
    from ds_hf.engine.comm.mesh import compute_device

    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    tokens = tokenizer(prompts, return_tensors="pt", padding=len(prompts) > 1)
    return {key: tokens[key].to(compute_device()) for key in ("input_ids", "attention_mask") if key in tokens}


def _plan(
    model: Any,
    batch: int,
    prompt: int,
    new: int,
    dtype: str | None,
    offload: bool | None,
    graphs: bool,
    compile_steps: bool,
) -> _Plan:
    import torch

    from ds_hf.inference.supported import unsupported_model
    from ds_hf.memory.inference import predict_inference
    from ds_hf.memory.models import without_values

    gpu = torch.cuda.is_available()
    chosen = dtype or ("bf16" if gpu else "fp32")
    reasons = [
        f"dtype {chosen}" + ("" if dtype else ": a GPU is fastest in 16 bits" if gpu else ": a CPU is fastest in it")
    ]
    config: dict[str, Any] = {"dtype": chosen, "max_out_tokens": max(prompt + new, 1)}
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        config["tensor_parallel"] = {"tp_size": world}
        reasons.append(f"layers divided over the {world} processes that were started")
    if offload is None and gpu and world == 1:
        free = torch.cuda.mem_get_info()[0]
        need: Need = predict_inference(without_values(model), chosen, batch=batch, prompt=prompt, new=new)
        offload = need.device_peak > free
        what = "rest in host memory" if offload else "on the GPU"
        reasons.append(f"weights {what}: it takes {_gib(need.device_peak)} GiB and {_gib(free)} are free")
    if offload:
        config["zero"] = {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": gpu}}
        reasons.append("no graphs: weights come block by block")
        return _Plan(config, reasons)
    why = unsupported_model(model)
    if why is not None:
        reasons.append(f"transformers decodes: {why}")
    elif gpu and graphs:
        config["replace_with_kernel_inject" if compile_steps else "enable_cuda_graph"] = True
        reasons.append("static cache, steps captured in a CUDA graph" + (", compiled" if compile_steps else ""))
    else:
        config["replace_with_kernel_inject"] = not gpu
        reasons.append("static cache" if not gpu else "transformers decodes: graphs are off")
    return _Plan(config, reasons)


def _read(path: str) -> dict[str, Any]:
    from ds_hf.config.source import read_source

    return read_source(Path(path)).tree


def _run(model: Any, plan: _Plan, inputs: dict[str, Any], new: int, drawn: dict[str, Any], seed: int) -> dict[str, Any]:
    """Generate twice: the first call compiles and captures, the second is timed."""
    import torch

    from ds_hf import init_inference

    engine = init_inference(model, plan.config)
    for key, value in inputs.items():
        inputs[key] = value.to(engine.device)

    def timed(tokens: int) -> tuple[float, Any]:
        torch.manual_seed(seed)
        begun = time.perf_counter()
        out = engine.generate(**inputs, **drawn, max_new_tokens=tokens)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - begun, out

    first, _ = timed(new)
    one, _ = timed(1)
    whole, out = timed(new)
    made = out.shape[1] - (1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1])
    decoder = engine.decoder
    if decoder is not None and decoder.last.why:
        plan.reasons.append(f"transformers decodes: {decoder.last.why}")
    rate = len(out) * (made - 1) / max(whole - one, 1e-9) if made > 1 else len(out) / one
    found = {
        "tokens": out,
        "new_tokens": made,
        "tokens_per_second": round(rate, 2),
        "first_token_s": round(one, 4),
        "first_call_s": round(first, 3),
        "weights_bytes": _held(engine),
        "peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
    }
    engine.destroy()
    return found


def _held(engine: Any) -> int:
    """Bytes of the weights that this process keeps."""
    if engine.zero_engine is not None:
        buffers = {id(b): b for unit in engine.zero_engine.units for b in unit.buffers}
        return sum(b.shard.numel() * b.shard.element_size() for b in buffers.values())
    return sum(p.numel() * p.element_size() for p in engine.module.parameters())


def _print(found: dict[str, Any]) -> None:
    for prompt, text in zip(found["prompts"], found["texts"], strict=True):
        print(printable(f"{prompt}{text}"))
        print()
    peak = "" if found["peak_bytes"] is None else f", {_gib(found['peak_bytes'])} GiB of the GPU at the peak"
    print(
        f"{found['tokens_per_second']} tokens/s, first token after {found['first_token_s'] * 1000:.0f} ms, weights "
        f"{_gib(found['weights_bytes'])} GiB{peak}"
    )
    for reason in found["why"]:
        print(printable(f"  {reason}"))
    sys.stdout.flush()


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.2f}"
