"""Tensor parallelism: ds_hf against DeepSpeed's AutoTP and transformers' plan over DTensors.

    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py --part step --model 1b3 --micro-batch 4 --seq 2048 \\
        --engines ds_hf,deepspeed,transformers,half --deepspeed-path /folder/with/deepspeed --json FILE
    python benchmarks/tensor_parallel.py --part host --json FILE

*step*: all processes share each layer. Engines take turns as in ``training.py``, with the same model, samples and bf16;
ds_hf and DeepSpeed keep fp32 masters (ZeRO stage 1), transformers has bf16 parameters and torch's fused AdamW, which is
less work. *gathered* is ds_hf with the logits of all words on every process, *chunked* with ``ds_hf.chunked_loss``.
With ``--tied`` the output layer has the embedding's weight: ds_hf leaves both whole, and *divided* is ds_hf with
``vocab_parallel_lm_head``; *tokens* is ds_hf with ``ds_hf.tensor_sequence_parallel``. *waiting* and *tokens-waiting*
have compiled blocks that exchange each thing by itself, and run nothing beside it. *half* is ds_hf without tensor
parallelism and half the micro-batch on each process: its step divided by that of ds_hf is the scaling efficiency.

*host*: microseconds of the processor for forward and backward of one cut linear layer beyond those of a whole one, a
column and a row layer in turn, in one process: collectives do nothing (torch's "fake" backend), so what is left is
what Python and torch do around them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
import training
from torch import Tensor, nn

training.MODELS["words"] = (256, 688, 4, 8, 8, 32000)  # for CPUs: most of its time is the head's and the loss's


def shared(args: argparse.Namespace) -> dict[str, Any]:
    """The configuration of ds_hf and DeepSpeed."""
    return {**training.engine_config(args), "tensor_parallel": {"autotp_size": dist.get_world_size()}}


def make_tied(args: argparse.Namespace, dtype: torch.dtype) -> nn.Module:
    """``training.make_model`` with one weight for both ends."""
    model: Any = make_untied(args, dtype)
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    return model  # type: ignore[no-any-return]


make_untied = training.make_model


class DsHf(training.DsHf):
    """This project's engine, all processes on each layer."""

    section: ClassVar[dict[str, Any]] = {}

    def __init__(self, args: argparse.Namespace) -> None:
        training.Contender.__init__(self, args)
        import ds_hf

        model = training.make_model(args, torch.float32)
        config = {
            **shared(args),
            "optimizer": {"type": "AdamW", "params": training.adam_parameters()},
            "ds_hf": {**self.own, **({"compile": "blocks"} if args.compile else {})},
        }
        config["tensor_parallel"] |= self.section
        self.engine, *_ = ds_hf.initialize(model=model, config=config)


class Gathered(DsHf):
    """The same with whole logits on every process."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        from ds_hf.engine.modules.tiling.models import PartialLoss

        for handle in self.engine.hooks.handles:
            if isinstance(handle, PartialLoss):
                handle.remove()


class Chunked(DsHf):
    """The same with the loss in chunks."""

    own: ClassVar[dict[str, Any]] = {"chunked_loss": True}


class Divided(DsHf):
    """The same with both ends divided by the vocabulary, tied or not."""

    section: ClassVar[dict[str, Any]] = {"vocab_parallel_lm_head": True}


class DividedTokens(DsHf):
    """The same with the tokens divided between cut layers."""

    own: ClassVar[dict[str, Any]] = {"tensor_sequence_parallel": True}


def waiting(ours: type[DsHf]) -> type[DsHf]:
    """``ours`` whose compiled blocks wait for each exchange, and run nothing beside it."""

    class Waiting(ours):  # type: ignore[misc, valid-type]
        def __init__(self, args: argparse.Namespace) -> None:
            from ds_hf.engine.modules.overlap import PATCHES

            with mock.patch.dict(PATCHES, clear=True):
                super().__init__(args)

    return Waiting


class DeepSpeed(training.Contender):
    """AutoTP of the real one, by the model's plan."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        import deepspeed

        if "+ds.hf" in deepspeed.__version__:
            raise RuntimeError("the name deepspeed is served by ds_hf: give --deepspeed-path")
        model = training.make_model(args, torch.float32)
        config = {**shared(args), "zero_allow_untested_optimizer": True}
        optimizer = torch.optim.AdamW(model.parameters(), **training.adam_parameters(), fused=args.device != "cpu")
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(self, batches: list[Tensor]) -> Tensor:
        return training.deepspeed_step(self.engine, batches)


class Transformers(training.Contender):
    """``DistributedConfig(tp_size)``: the same plan, DTensor parameters."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.model = training.make_model(args, torch.bfloat16)
        divide_into_dtensors(self.model, args.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **training.adam_parameters())

    def step(self, batches: list[Tensor]) -> Tensor:
        losses = []
        for ids in batches:
            loss = self.model(input_ids=ids, labels=ids).loss
            (loss / len(batches)).backward()
            losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).mean()


def divide_into_dtensors(model: Any, device: str) -> None:
    """As ``from_pretrained(distributed_config=DistributedConfig(tp_size=...))`` leaves a model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    mesh = init_device_mesh(device.partition(":")[0], (dist.get_world_size(),), mesh_dim_names=("tp",))
    dims = {"colwise": 0, "colwise_rep": 0, "colwise_gather_output": 0, "rowwise": 1, "embedding_rowwise": 0}
    for pattern, style in model.tp_plan.items():
        for name, module in model.named_modules():
            plain = ".".join("*" if part.isdigit() else part for part in name.split("."))
            if plain != pattern:
                continue
            module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(dims[style])]))
            ALL_PARALLEL_STYLES[style].install_forward(module, mesh)
    for name, param in model.named_parameters():  # foreach and fused steps take no mixture
        if type(param) is nn.Parameter:
            from torch.distributed.tensor import DTensor, Replicate

            owner, _, key = name.rpartition(".")
            whole = DTensor.from_local(param.detach(), mesh, [Replicate()])
            holder = model.get_submodule(owner)
            holder._parameters[key] = nn.Parameter(whole)
            holder.register_forward_pre_hook(_in_dtensors(mesh))
            holder.register_forward_hook(lambda module, args, output: output.to_local())


def _in_dtensors(mesh: Any) -> Any:
    from torch.distributed.tensor import DTensor, Replicate

    return lambda module, args: (DTensor.from_local(args[0], mesh, [Replicate()], run_check=False), *args[1:])


class Half(training.DsHf):
    """Data parallelism of as many processes, each with half the samples."""

    def step(self, batches: list[Tensor]) -> Tensor:
        size, rank = dist.get_world_size(), dist.get_rank()
        return super().step([batch.chunk(size)[rank] for batch in batches])


def install() -> None:
    """Let ``training.ENGINES`` have these engines, which share their layers, and all processes the same data."""
    training.ENGINES |= {
        "ds_hf": DsHf,
        "gathered": Gathered,
        "chunked": Chunked,
        "divided": Divided,
        "tokens": DividedTokens,
        "waiting": waiting(DsHf),
        "tokens-waiting": waiting(DividedTokens),
        "deepspeed": DeepSpeed,
        "transformers": Transformers,
        "half": Half,
    }
    training.tokens = tokens


def run_steps(args: argparse.Namespace) -> list[dict[str, Any]]:
    if args.tied:
        training.make_model = make_tied
    records = training.measure(args)
    steps = {row["name"]: row["step_ms"] for row in records if "step_ms" in row}
    for row in records:
        if row["name"] in steps and "ds_hf" in steps:
            row["of_ds_hf"] = round(row["step_ms"] / steps["ds_hf"], 3)
    return records


def tokens(args: argparse.Namespace, step: int) -> list[Tensor]:
    """Micro-batches of a step, the same on all processes."""
    generator = torch.Generator().manual_seed(training.SEED + step)
    shape = (args.accumulation, args.micro_batch, args.seq)
    ids = torch.randint(0, min(training.MODELS[args.model][5], 1000), shape, generator=generator)
    return list(ids.to(args.device).unbind())


# -- the host's work ----------------------------------------------------------------------------------------------


def run_host(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Microseconds of a layer and pass."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    torch.set_num_threads(1)
    pairs = {"whole": whole_pair(), "ds_hf": cut_pair(), "DTensor": dtensor_pair()}
    x = torch.randn(1, 2, 16, requires_grad=True)
    times: dict[str, list[float]] = {name: [] for name in pairs}
    for turn in range(args.rounds + 1):
        for name, pair in pairs.items():
            start = time.perf_counter()
            for _ in range(args.passes):
                pair(x).sum().backward()
            if turn:  # the first is for warming up
                times[name].append((time.perf_counter() - start) / args.passes / 2 * 1e6)
    found = {name: statistics.median(values) for name, values in times.items()}
    return [
        {"name": name, "us": round(value, 2), "beyond_whole_us": round(value - found["whole"], 2)}
        for name, value in found.items()
    ]


def whole_pair() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))


def cut_pair() -> nn.Module:
    from ds_hf.engine.comm.mesh import Axis
    from ds_hf.engine.parallel.tensor.functions import Place
    from ds_hf.engine.parallel.tensor.styles import STYLES, swap_class

    pair, axis, copied = whole_pair(), Axis(None, 0, 2), [None]
    for index, style, dim in ((0, "colwise", 0), (1, "rowwise", 1)):
        layer, base = pair[index], STYLES[style].module
        layer.weight.data = layer.weight.data.chunk(2, dim)[0].clone()
        assert base is not None
        swap_class(layer, base, Place(axis, str(index), copied))
    return pair


def dtensor_pair() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))
    return parallelize_module(whole_pair(), mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--part", choices=("step", "host"), default="step")
    parser.add_argument("--passes", type=int, default=300)
    parser.add_argument("--tied", action="store_true")
    own, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    install()
    args = training.parse()
    args.passes, args.tied = own.passes, own.tied
    if own.part == "host":
        args.rounds = max(args.rounds, 9)
        records = run_host(args)
        print(f"torch {torch.__version__}, one process: microseconds of a layer, forward and backward")
        for row in records:
            print(f"{row['name']:<10} {row['us']:8.1f}   beyond a whole one {row['beyond_whole_us']:8.1f}")
    else:
        args.stage = 1
        training.connect(args)
        records = run_steps(args)
        if dist.get_rank() == 0:
            print(f"{dist.get_world_size()} processes, torch {torch.__version__}: {' '.join(sys.argv[1:])}")
            training.show(records, args)
    if args.json and (own.part == "host" or dist.get_rank() == 0):
        about = {"part": own.part, "torch": torch.__version__, "date": time.strftime("%F"), "arguments": rest}
        Path(args.json).write_text(json.dumps({**about, "records": records}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
