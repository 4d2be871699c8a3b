"""Generation: ds_hf's ``init_inference`` against transformers and DeepSpeed, in milliseconds a token.

    python benchmarks/generation.py --model 1b3 --engines ds_hf,graph,static,eager --json FILE
    python benchmarks/generation.py --model 7b --engines ds_hf,int8,int4,blocks8,blocks4 --json FILE
    python benchmarks/generation.py --model 13b --place host --engines bf16,int8,int4,accelerate --batch 32 --json FILE
    python benchmarks/generation.py --model small  # all but the last two, on a CPU
    python benchmarks/generation.py --check        # tiny, on the CPU: every way gives the tokens of the eager one

Weights are random and the same for all, in bf16 (fp32 on a CPU). A token's time is that of ``--new`` tokens less that
of one, divided by what is between: the prompt does not count. *floor* is the bytes of the weights over what memory
(``--place device``) or the link (``--place host``) moves a second, measured here by plain copies; ``weights_gb`` and
the floor are of the weights in 16 bits, ``held_gb`` is what the engine keeps. 8 and 4 bits compute in bf16 everywhere.

=========== ==================================================================================================
ds_hf       init_inference(replace_with_kernel_inject): static cache, step compiled and captured
graph       init_inference(enable_cuda_graph): the same without the compiler
static      transformers' generate, cache_implementation="static" with its compiled step
eager       transformers' generate
int8, int4  ds_hf as above with weights of 8 and 4 bits: torchao's where it is installed and there is a GPU
blocks8, 4  the same with ds_hf's blocks everywhere
deepspeed   the real one's init_inference (``--deepspeed-path``: a folder with it)
bf16, ...   with ``--place host``, and bf16 always: ds_hf with the weights in host memory, in 16, 8 and 4 bits
accelerate  accelerate's cpu_offload, weights in bf16
=========== ==================================================================================================
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "layers": 2, "heads": 4, "vocab": 128},
    "small": {"hidden_size": 512, "intermediate_size": 1376, "layers": 8, "heads": 8, "vocab": 8192},
    "1b3": {"hidden_size": 2048, "intermediate_size": 5504, "layers": 24, "heads": 16, "vocab": 32000},
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "layers": 32, "heads": 32, "vocab": 32000},
    "13b": {"hidden_size": 5120, "intermediate_size": 13824, "layers": 40, "heads": 40, "vocab": 32000},
}
CUDA = torch.cuda.is_available()
BITS = {"int8": 8, "int4": 4, "blocks8": 8, "blocks4": 4}
HOST = {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}}


def make_model(shape: str, device: str, dtype: torch.dtype = torch.bfloat16 if CUDA else torch.float32) -> Any:
    """A Llama of that shape with random weights, filled from one stretch of numbers: billions are there in seconds."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["heads"],
        vocab_size=sizes["vocab"],
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(dtype).to_empty(device=device)
    numbers = torch.randn((1 << 22) + 7, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(device)
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            flat = param.data.view(-1)
            if param.dim() == 1:
                flat.fill_(1)
                continue
            for start in range(0, flat.numel(), numbers.numel()):
                part = flat[start : start + numbers.numel()]
                part.copy_(numbers.roll(index)[: part.numel()])
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)  # its table has no values yet
    return model.eval()


def floor_ms(args: argparse.Namespace, nbytes: int) -> float | None:
    """Milliseconds in which the weights are read once, from memory or over the link."""
    if not CUDA:
        return None
    return nbytes / _copied_a_second(args.place == "host") * 1000


def _copied_a_second(host: bool) -> float:
    """Bytes a second that a copy moves from host memory, or reads and writes in the GPU's."""
    size = 1 << 30
    above = torch.empty(size, dtype=torch.uint8, device="cuda")
    source = torch.empty(size, dtype=torch.uint8, pin_memory=host, device="cpu" if host else "cuda")
    best = min(_timed(lambda: above.copy_(source, non_blocking=True)) for _ in range(5))
    torch.cuda.empty_cache()
    return (size if host else 2 * size) / best


def _timed(call: Callable[[], Any]) -> float:
    if CUDA:
        torch.cuda.synchronize()
    begun = time.perf_counter()
    call()
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def contender(name: str, args: argparse.Namespace, model: Any) -> Callable[..., Any]:
    """``generate`` of one way to decode with ``model``, which may become another in place."""
    dtype = "bf16" if CUDA else "fp32"
    if name == "eager":
        return model.generate  # type: ignore[no-any-return]
    if name == "static":
        return lambda **kw: model.generate(**kw, cache_implementation="static")
    if name == "deepspeed":
        return _deepspeed(args, model)
    if name == "accelerate":
        from accelerate import cpu_offload

        return cpu_offload(model, execution_device=torch.device("cuda" if CUDA else "cpu")).generate  # type: ignore[no-any-return]
    from ds_hf import init_inference

    length = args.prompt + args.new
    if name == "bf16" or args.place == "host":
        form = {"dtype": name if name in BITS else dtype, "zero": HOST}
        return init_inference(model, **form, max_out_tokens=length).generate
    if name in BITS:
        form = {"dtype": f"int{BITS[name]}", "replace_with_kernel_inject": True}
        if name.startswith("blocks"):  # options that torchao does not know
            form["quant"] = {"weight": {"quantized_initialization": {"num_bits": BITS[name], "group_size": 64}}}
        return init_inference(model, **form, max_out_tokens=length).generate
    key = "replace_with_kernel_inject" if name == "ds_hf" else "enable_cuda_graph"
    return init_inference(model, dtype=dtype, max_out_tokens=length, **{key: True}).generate


def _deepspeed(args: argparse.Namespace, model: Any) -> Callable[..., Any]:
    import deepspeed

    if "+ds.hf" in deepspeed.__version__:
        raise RuntimeError("the name deepspeed is served by ds_hf: give --deepspeed-path")
    engine = deepspeed.init_inference(model, dtype=model.dtype, replace_with_kernel_inject=False)
    return engine.module.generate  # type: ignore[no-any-return]


def held(model: Any) -> int:
    """Bytes of the parameters, those of numbers and scales where torchao's tensors wrap them."""
    from ds_hf.engine.zero.packed import packed_parts

    parts = (part for param in model.parameters() for _, part in packed_parts(param))
    return sum(part.numel() * part.element_size() for part in parts)


def tokens_of_values(args: argparse.Namespace, model: Any, inputs: Any, settings: Any) -> Any:
    """What transformers says with the values that the numbers of ``model`` stand for."""
    plain = make_model(args.model, "cpu", torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    return plain.generate(**inputs, **settings)


def _tokens_of_eager(args: argparse.Namespace, model: Any, inputs: Any, settings: Any) -> Any:
    plain = make_model(args.model, "cuda" if CUDA else "cpu")
    return plain.generate(**inputs, **settings)


def measure(name: str, args: argparse.Namespace, model: Any) -> dict[str, Any]:
    """One row."""
    generate = contender(name, args, model)
    device = "cuda" if CUDA else "cpu"
    tokens = torch.randint(
        3, model.config.vocab_size, (args.batch, args.prompt), generator=torch.Generator().manual_seed(1)
    )
    inputs = {"input_ids": tokens.to(device), "attention_mask": torch.ones_like(tokens).to(device)}
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def run(new: int) -> Any:
        return generate(**inputs, **settings, max_new_tokens=new, min_new_tokens=None)

    def differs() -> bool:
        """Whether the tokens are not those of transformers with the same values."""
        eight = {**settings, "max_new_tokens": 8}
        expected = tokens_of_values if name in BITS else _tokens_of_eager
        return not torch.equal(run(8), expected(args, model, inputs, eight))

    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    first = _timed(lambda: run(args.new))  # compiles, captures, learns the order of the weights
    run(args.new)
    times = []
    for _ in range(args.rounds):
        whole, one = _timed(lambda: run(args.new)), _timed(lambda: run(1))
        times.append((whole - one) / (args.new - 1) * 1000)
    return {
        "engine": name,
        "ms_a_token": round(min(times), 4),
        "first_call_s": round(first, 2),
        "held_gb": None if name == "bf16" or args.place == "host" else round(held(model) / 1e9, 6),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if CUDA else None,
        "differs": bool(args.check and differs()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", choices=SHAPES, default="1b3")
    parser.add_argument("--engines", default="ds_hf,graph,static,eager")
    parser.add_argument("--place", choices=("device", "host"), default="device")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--deepspeed-path", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.deepspeed_path is not None:
        sys.path.insert(0, str(args.deepspeed_path))
    if args.check:
        args.model, args.prompt, args.new, args.rounds, args.batch = "tiny", 8, 12, 1, 2
        args.engines = "eager,ds_hf,graph,static,int8,int4,blocks8,blocks4,bf16"
    model = make_model(args.model, "cuda" if CUDA and args.place == "device" else "cpu")
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    floor = floor_ms(args, nbytes)
    about = {"model": args.model, "place": args.place, "batch": args.batch, "prompt": args.prompt, "new": args.new}
    about |= {"weights_gb": round(nbytes / 1e9, 3), "floor_ms": None if floor is None else round(floor, 4)}
    about |= {"device": torch.cuda.get_device_name() if CUDA else "cpu", "torch": torch.__version__}
    rows = []
    names = args.engines.split(",")
    for index, name in enumerate(names):
        changes = args.place == "host" or name in BITS or name == "bf16"
        own = copy.deepcopy(model) if changes and index < len(names) - 1 else model
        rows.append({**about, **measure(name, args, own)})
        if floor is not None:
            rows[-1]["over_floor"] = round(rows[-1]["ms_a_token"] / floor, 3)
        print(json.dumps(rows[-1]), flush=True)
        del own
        if CUDA:
            torch.cuda.empty_cache()
    if args.check:
        differing = [row["engine"] for row in rows if row["differs"]]
        told = f"other tokens: {', '.join(differing)}"
        print(told if differing else "tokens are those of transformers with the same values")
        sys.exit(bool(differing))
    if args.json is not None:
        with args.json.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
