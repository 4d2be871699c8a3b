"""``--deepspeed auto``, when the Trainer has model and data: with which kernels blocks compute, captured or compiled.

Liger's kernels are taken where they are installed, but where blocks are captured, whose gain is larger. Capturing and
compiling take their time at the start and save some of each step. What a run computes and the rate of its GPU tell by
and large how long it is, and whether the host keeps the GPU busy: a block that computes for less time than the host
needs for its launches is captured, where all batches have one shape, or sequences may be padded to a few and the run is
not over before that has been recorded; others are compiled in a run that is long enough.
Both are asked of models without experts of which transformers says that they compile in one piece.
"""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec
from typing import Any

import torch

from ds_hf.engine.comm import process_group
from ds_hf.engine.modules.compiling import computes_with_liger
from ds_hf.engine.observe.model_flops import ModelFlops, matrix_rate
from ds_hf.hf.accelerate_state import has_accelerator
from ds_hf.hf.auto import say, shared_by, sixteen_bits
from ds_hf.hf.auto_activations import Lengths, lengths_of, over_ranks, settle_activations

__all__ = ["blocks_pay", "settle_computation"]

NO_LOSSES = {"cross_entropy": False, "fused_linear_cross_entropy": False}

REACHED = 0.35  # of the data sheet's rate by 1.35 B in eager blocks on an H100 (docs/measurements.md)
LAUNCHES = 2e-3  # seconds; the host takes 2 to 5 ms for forward and backward of a block of transformers
SHAPES = 8  # to which sequences of many lengths are padded
RECORDED = 3 * 60  # seconds of launches to be saved: tracing and recording eight shapes takes 25 s, with adapters 70
LONG = 20 * 60  # seconds of a run: compiled blocks save some 30 % of it, and take one or two minutes once


def settle_computation(trainer: Any, steps: int) -> None:
    """Choose, write what was chosen into configuration, arguments and model, and say it on one rank. Collective.

    Args:
        steps: of the optimizer, in the whole run.
    """
    lengths, reason = lengths_of(trainer.train_dataset)
    found = _way(trainer, steps, lengths)
    captured = found is not None and found[0] == "capture"
    if not captured and over_ranks(_take_kernels(trainer), process_group.ReduceOp.MAX):
        found = None  # what compiling would gain they give without it, also where one host has none
    kept = settle_activations(trainer, lengths, reason)
    if captured and not kept:
        _take_kernels(trainer)
    if found is None or (captured and not kept):
        return
    way, why = found
    own = trainer.args.deepspeed_plugin.hf_ds_config.config.setdefault("ds_hf", {})
    own[way] = "blocks"
    if way == "capture" and lengths is not None and lengths.least < lengths.most:
        multiple = own.setdefault("capture_pad_to_multiple_of", 8 * -(-lengths.most // (8 * SHAPES)))
        why += f"; around each, sequences are padded to multiples of {multiple}"
    say(f"{why} (--torch_compile false or TORCH_COMPILE_DISABLE=1 keeps them as they are)")


def _way(trainer: Any, steps: int, lengths: Lengths | None) -> tuple[str, str] | None:
    """What ``blocks_pay`` says of this run, if blocks may be changed. Collective."""
    arguments = trainer.args
    if (
        lengths is None
        or not steps
        or not has_accelerator()
        or not over_ranks(_may(trainer), process_group.ReduceOp.MIN)
    ):
        return None
    model, dtype = trainer.model, getattr(torch, sixteen_bits(arguments))
    micro, times = arguments.per_device_train_batch_size, steps * arguments.gradient_accumulation_steps
    each = ModelFlops.of(model).of_step(micro * lengths.mean, micro) / (REACHED * matrix_rate(arguments.device, dtype))
    shared = shared_by(arguments)
    together = shared.layers * shared.sequences  # blocks of several processes are not captured
    keeps = not arguments.gradient_checkpointing and together == 1
    same = keeps and lengths.least == lengths.most
    each = over_ranks(round(1e9 * each / together), process_group.ReduceOp.MAX) / 1e9  # of a rate that was measured
    return blocks_pay(
        each,
        times,
        _layers(model),
        same=bool(over_ranks(same, process_group.ReduceOp.MIN)),
        pads=bool(over_ranks(keeps and _looks_back(model), process_group.ReduceOp.MIN)),
    )


def _take_kernels(trainer: Any) -> bool:
    """Liger's norms, rotations and activations where they are installed, unless the command line speaks of them.

    Its losses are left out because they return no logits, which label smoothing and many scripts read. The loss of
    ``ds_hf.chunked_loss`` computes logits when a script reads them.
    """
    arguments, model = trainer.args, trainer.model
    if computes_with_liger(model):
        return True
    named = any(word.lstrip("-").replace("-", "_").startswith("use_liger_kernel") for word in sys.argv[1:])
    if named or arguments.use_liger_kernel or not torch.cuda.is_available() or find_spec("liger_kernel") is None:
        return False
    from transformers.integrations.liger import apply_liger_kernel

    kernels = {**NO_LOSSES, **(getattr(arguments, "liger_kernel_config", None) or {})}
    apply_liger_kernel(model, kernels)  # type: ignore[no-untyped-call]
    taken = computes_with_liger(model)
    if taken:
        say("Liger's kernels are taken (--use_liger_kernel false keeps the model's)")
    return taken


def blocks_pay(seconds: float, times: int, layers: int, *, same: bool, pads: bool) -> tuple[str, str] | None:
    """The key of ``ds_hf`` that makes blocks faster, and why; ``None`` where none is worth its start.

    Args:
        seconds: that the GPU takes for a micro-batch, forward and backward.
        times: how many micro-batches there are in the run.
        layers: how many blocks.
        same: all micro-batches have one shape, and blocks keep what their backward needs.
        pads: they do that, and their sequences may be padded.
    """
    block = seconds / max(layers, 1)
    saved = (LAUNCHES - block) * layers * times
    if saved > 0 and (same or (pads and saved > RECORDED)):
        return (
            "capture",
            f"blocks are captured in CUDA graphs: the GPU computes one in {1e3 * block:.2g} ms, and is not kept busy",
        )
    if seconds * times > LONG:
        return (
            "compile",
            f"blocks are compiled, in a run of about {seconds * times / 3600:.1f} hours: the first step takes longer",
        )
    return None


def _may(trainer: Any) -> bool:
    """Whether blocks can be compiled on this process, and nothing else was asked for."""
    arguments, model = trainer.args, trainer.model
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    named = any(word.lstrip("-").replace("-", "_").startswith("torch_compile") for word in sys.argv[1:])
    off = any(os.environ.get(name) == "1" for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"))
    if named or off or arguments.torch_compile or computes_with_liger(model):
        return False
    experts = any(name.endswith("experts") for name, _ in model.named_modules())  # what they compute depends on tokens
    return getattr(model, "_can_compile_fullgraph", False) is True and not experts and _has_compiler()


def _looks_back(model: Any) -> bool:
    """Whether positions see earlier ones alone, by what all attention of ``model`` says of itself."""
    said = [bool(part.is_causal) for part in model.modules() if hasattr(part, "is_causal")]
    return bool(said) and all(said)


def _has_compiler() -> bool:
    """Whether inductor finds what it compiles with: Triton, and a compiler of C for its launchers."""
    from torch.utils._triton import has_triton

    return has_triton() and any(shutil.which(name) for name in (os.environ.get("CC") or "cc", "gcc", "clang"))


def _layers(model: Any) -> int:
    config = getattr(model, "config", None)
    return int(getattr(getattr(config, "text_config", config), "num_hidden_layers", 1) or 1)
