"""Forward and backward of attention over a pattern, against dense causal attention by sdpa, in turns.

    python benchmarks/sparse_attention.py --tokens 32768 --json sparse.json
    python benchmarks/sparse_attention.py --cpu --tokens 512 --heads 2 --rounds 2

For each pattern: the median over the rounds (of a few calls in a row each, as layers of a model are), the speed-up, the
density (the share of the causal scores that the pattern keeps) and what of 1 / density the speed-up is. On a GPU dense
attention is flash attention; the CPU masks and computes all scores, so there the script shows that it runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ds_hf.config.types import SparseAttentionSection
from ds_hf.engine.modules.sparse.attention import attention
from ds_hf.engine.modules.sparse.block_layout import BlockLayout
from ds_hf.engine.modules.sparse.choice import Patterns

ENOUGH = 0.5  # of 1 / density

# By name, the section of a file. Windows and global blocks of about a thousand tokens, as papers have them.
SECTIONS: dict[str, dict[str, Any]] = {
    "fixed, block 128": {"mode": "fixed", "block": 128, "num_local_blocks": 16},
    "fixed, block 64": {"mode": "fixed", "block": 64, "num_local_blocks": 32, "num_global_blocks": 2},
    "bigbird, block 128": {"mode": "bigbird", "block": 128, "num_random_blocks": 3, "num_sliding_window_blocks": 9},
    "bslongformer, block 128": {"mode": "bslongformer", "block": 128, "num_sliding_window_blocks": 17},
    "local, block 16": {"mode": "local_sliding_window", "block": 16, "num_sliding_window_blocks": 129},
}


def main() -> None:
    args = parse()
    torch.manual_seed(0)
    device, dtype = ("cpu", torch.float32) if args.cpu else ("cuda", torch.bfloat16)
    shapes = [(1, heads, args.tokens, args.head_dim) for heads in (args.heads, args.kv_heads, args.kv_heads)]
    given = [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes]
    layouts = {
        name: Patterns(SparseAttentionSection(**{"attention": "unidirectional", **section}), args.heads).layout(
            args.tokens, 0
        )
        for name, section in SECTIONS.items()
    }
    ways: dict[str, Callable[..., Tensor]] = {"dense": dense}
    ways.update({name: over(layout) for name, layout in layouts.items()})
    times: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(-args.warmup, args.rounds):
        for name, way in ways.items():
            spent = seconds(way, given, args)
            if round_ >= 0:
                times[name].append(spent)
    rows = [row(name, times[name], times["dense"], density(layouts[name], args.tokens)) for name in layouts]
    report(args, rows, statistics.median(times["dense"]))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, help="default: as many as heads")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--in-a-row", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--cpu", action="store_true", help="fp32 on the CPU")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.kv_heads = args.kv_heads or args.heads
    return args


def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1])


def over(layout: BlockLayout) -> Callable[..., Tensor]:
    """Each pattern is compiled for itself: torch gives up on a function that it compiled too often."""
    return lambda query, key, value: attention(query, key, value, layout, causal=True)


def seconds(way: Callable[..., Tensor], given: list[Tensor], args: argparse.Namespace) -> float:
    def wait() -> None:
        if not args.cpu:
            torch.cuda.synchronize()

    outward = given[0].detach()
    wait()
    began = time.perf_counter()
    for _ in range(args.in_a_row):
        torch.autograd.grad(way(*given), given, outward)
    wait()
    return (time.perf_counter() - began) / args.in_a_row


def density(layout: BlockLayout, tokens: int) -> float:
    """Causal scores in the pattern, of all causal scores, by counting those of each cell."""
    kept, block = 0, layout.block
    cells = layout.cells[0]
    for row in range(cells.shape[0]):
        size = min(block, tokens - row * block)
        kept += int(cells[row, :row].sum()) * size * block + int(cells[row, row]) * size * (size + 1) // 2
    return kept / (tokens * (tokens + 1) // 2)


def row(name: str, spent: list[float], dense_spent: list[float], share: float) -> dict[str, Any]:
    took, whole = statistics.median(spent), statistics.median(dense_spent)
    speed_up = whole / took
    return {
        "pattern": name,
        "milliseconds": 1e3 * took,
        "speed_up": speed_up,
        "density": share,
        "of_1/density": speed_up * share,
        "enough": speed_up * share >= ENOUGH,
    }


def report(args: argparse.Namespace, rows: list[dict[str, Any]], whole: float) -> None:
    where = "CPU" if args.cpu else torch.cuda.get_device_name()
    print(f"{where}, torch {torch.__version__}: {args.tokens} tokens, {args.heads} heads of {args.head_dim}")
    print(f"dense causal sdpa, forward and backward: {1e3 * whole:.2f} ms")
    for entry in rows:
        print(
            "{pattern:<24} {milliseconds:9.2f} ms   {speed_up:6.2f} x   density {density:.4f}   "
            "{of_1/density:.2f} of 1/density".format(**entry)
        )
    if args.json:
        about = {"device": where, "torch": torch.__version__, "date": time.strftime("%F"), "arguments": sys.argv[1:]}
        args.json.write_text(json.dumps({**about, "dense_milliseconds": 1e3 * whole, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
