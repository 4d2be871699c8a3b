"""Mixtures of experts: ds_hf with whole and with divided experts, DeepSpeed, FSDP2, and what the products alone take.

    torchrun --nproc-per-node 2 benchmarks/experts.py --model qwen3 --layers 6 --stage 3 --micro-batch 2 --seq 2048 \\
        --engines ds_hf,ds_hf+ep,fsdp2,transformers-ep,deepspeed-leaf,floor --deepspeed-path FOLDER --json FILE
    python benchmarks/experts.py --part products --model qwen3

The engines take turns as in ``training.py``, whose loop, tokens and figures these are; the models have the shapes of
Qwen3-30B-A3B, OLMoE-1B-7B and gpt-oss-20b, cut in depth to what fits. *ds_hf+ep* divides experts over all processes,
*ds_hf+local* over none and computes them as divided ones are (``autoep_size`` 1), *ds_hf* leaves them to transformers;
*ds_hf+ep-stay* is *ds_hf+ep* with rows that stay where they are, so what it is faster by is the exchange that waits;
*deepspeed-leaf* is its stage 3 with the blocks of experts as leaf modules, which is what people use today,
*deepspeed-autoep* its own division of experts, at stage 2, for its stage 3 refuses it, *transformers-ep* transformers'
own division beside its FSDP2. *floor* is forward and backward of the bf16 model alone. ``--lora R`` trains adapters of
rank R on attention and on the experts' stacked weights, which *ds_hf* leaves to PEFT; with ``--base-bits 4`` those of
*+local* and *+ep* rest in 4 bits.

``--part products``: on one GPU, forward and backward of one layer's experts as the model has them and as
``exchange.py`` leaves them to each process, against the grouped products alone (six of them); *grouped_in* each of
these, what the device spends in grouped products.
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

import torch
import torch.distributed as dist
import training
from torch import nn

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"kind": "qwen3_moe", "hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8,
             "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
             "vocab_size": 512},
    "qwen3": {"kind": "qwen3_moe", "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128,
              "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
              "vocab_size": 151936},
    "olmoe": {"kind": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_experts": 64,
              "num_experts_per_tok": 8, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 50304},
    "gpt_oss": {"kind": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32,
                "num_experts_per_tok": 4, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
                "vocab_size": 201088},
}  # fmt: skip


def make_model(args: argparse.Namespace, dtype: torch.dtype) -> nn.Module:
    """The model, on this process's device, with the same values for the same seed."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    shape = dict(SHAPES[args.model])
    more = {"num_hidden_layers": args.layers, "max_position_embeddings": max(args.seq, 128), "use_cache": False}
    config = CONFIG_MAPPING[shape.pop("kind")](**shape, **more)
    attention = "eager" if args.model == "gpt_oss" else "sdpa"
    torch.manual_seed(training.SEED)
    before = torch.get_default_dtype()
    if args.divided and dtype == torch.float32:
        model: nn.Module = divided(args, config, attention)
    else:
        torch.set_default_dtype(dtype)
        try:
            with torch.device(args.device):
                model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        finally:
            torch.set_default_dtype(before)
    if args.lora:
        model = adapted(model, args.lora)
    if args.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    return model.train()


def divided(args: argparse.Namespace, config: Any, attention: str) -> nn.Module:
    """The model, each layer divided as soon as it is made: in 16 bits, with values of its own on each process."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    args.held = HfDeepSpeedConfig(training.engine_config(args))  # transformers asks for it while it lives
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.bfloat16)
    return model


def adapted(model: nn.Module, rank: int) -> nn.Module:
    """With PEFT's LoRA of attention and of the experts' stacked weights."""
    from peft import LoraConfig, get_peft_model

    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = LoraConfig(r=rank, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], target_parameters=experts)
    found: nn.Module = get_peft_model(model, lora, autocast_adapter_dtype=False)  # type: ignore[arg-type]
    found.enable_input_require_grads()  # type: ignore[operator]
    return found


def with_config(base: type[training.Contender], **more: Any) -> type[training.Contender]:
    """``base`` with other keys of the file, which may be functions of the arguments."""

    class Other(base):  # type: ignore[misc, valid-type]
        def __init__(self, args: argparse.Namespace) -> None:
            plain = training.engine_config

            def changed(given: argparse.Namespace) -> dict[str, Any]:
                config = plain(given)
                for key, value in more.items():
                    value = value(given) if callable(value) else value
                    config[key] = {**config[key], **value} if key in config else value
                return config

            training.engine_config = changed
            try:
                super().__init__(args)
            finally:
                training.engine_config = plain

    return Other


class DeepSpeedLeaf(training.DeepSpeed):
    """DeepSpeed's stage 3 with blocks of experts as leaf modules."""

    def __init__(self, args: argparse.Namespace) -> None:
        made = training.make_model

        def marked(given: argparse.Namespace, dtype: torch.dtype) -> nn.Module:
            from deepspeed.utils import set_z3_leaf_modules

            model = made(given, dtype)
            blocks = {type(module) for module in model.modules() if hasattr(module, "experts")}
            set_z3_leaf_modules(model, list(blocks))
            return model

        training.make_model = marked
        try:
            super().__init__(args)
        finally:
            training.make_model = made


class Transformers(training.Contender):
    """transformers' own expert parallelism (5.23) beside its FSDP2, with autocast, clipping and groups of parameters by
    mesh as in its Trainer."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        from transformers.distributed import DistributedConfig

        world = dist.get_world_size()
        if not hasattr(DistributedConfig, "efsdp_size"):
            raise RuntimeError("not measured: this release of transformers divides no experts beside FSDP2")
        whole: Any = make_model(args, torch.float32)
        weights = {name: value.cpu() for name, value in whole.state_dict().items()}
        config, kind = whole.config, type(whole)
        del whole
        division = DistributedConfig(fsdp_size=world, ep_size=args.ep or world)
        options = {"attn_implementation": config._attn_implementation, "dtype": torch.float32}
        self.model: Any = kind.from_pretrained(  # type: ignore[attr-defined]
            None, config=config, state_dict=weights, distributed_config=division, **options
        )
        self.model.train()
        if args.checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        by_mesh: dict[Any, list[nn.Parameter]] = {}
        for param in self.model.parameters():
            by_mesh.setdefault(getattr(param, "device_mesh", None), []).append(param)
        self.groups = list(by_mesh.values())
        groups = [{"params": params} for params in self.groups]
        self.optimizer = torch.optim.AdamW(groups, fused=True, **training.adam_parameters())

    def step(self, batches: list[torch.Tensor]) -> torch.Tensor:
        losses = []
        for ids in batches:
            with torch.autocast(self.args.device, torch.bfloat16):
                loss = self.model(input_ids=ids, labels=ids).loss
            (loss / len(batches)).backward()
            losses.append(loss.detach())
        if self.args.clip:
            norms = [self._norm(params) for params in self.groups]
            total = torch.linalg.vector_norm(torch.stack(norms))
            for params in self.groups:
                torch.nn.utils.clip_grads_with_norm_(params, self.args.clip, total)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).mean()

    @staticmethod
    def _norm(params: list[nn.Parameter]) -> torch.Tensor:
        norm: Any = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # type: ignore[no-any-return]


def experts_section(args: argparse.Namespace) -> dict[str, Any]:
    return {"enabled": True, "autoep_size": args.ep or dist.get_world_size()}


def few_bits(args: argparse.Namespace) -> dict[str, Any]:
    return {"post_init_quant": {"experts": {"num_bits": args.base_bits}}} if args.base_bits else {}


DIVIDED = with_config(training.DsHf, expert_parallel=experts_section, weight_quantization=few_bits)


class Stay(DIVIDED):  # type: ignore[misc, valid-type]
    """The same products of as many rows, which come from no other process; the choices of experts are exchanged."""

    def __init__(self, args: argparse.Namespace) -> None:
        from ds_hf.engine.parallel.experts import dispatch

        def stay(x: torch.Tensor, axis: Any, received: list[int], sent: list[int], what: str) -> torch.Tensor:
            if x.shape[1] < self.width:
                return self.before(x, axis, received, sent, what)
            missing = sum(received) - len(x)
            return torch.cat([x, x[:missing]]) if missing > 0 else x[: sum(received)]

        self.module, self.before, self.width = dispatch, dispatch.exchange, SHAPES[args.model]["hidden_size"]
        dispatch.exchange = stay  # type: ignore[attr-defined]
        super().__init__(args)

    def free(self) -> None:
        self.module.exchange = self.before
        super().free()


LOCAL = {"expert_parallel": {"enabled": True, "autoep_size": 1}, "weight_quantization": few_bits}
ENGINES: dict[str, type[training.Contender]] = {
    "ds_hf": training.DsHf,
    "ds_hf+local": with_config(training.DsHf, **LOCAL),
    "ds_hf+ep": DIVIDED,
    "ds_hf+ep-stay": Stay,
    **{
        f"ds_hf+ep{size}": with_config(training.DsHf, expert_parallel={"enabled": True, "autoep_size": size})
        for size in (2, 4, 8)
    },
    "ds_hf2": with_config(training.DsHf, zero_optimization={"stage": 2}),
    "ds_hf2+local": with_config(training.DsHf, **LOCAL, zero_optimization={"stage": 2}),
    "ds_hf2+ep": with_config(training.DsHf, expert_parallel=experts_section, zero_optimization={"stage": 2}),
    "deepspeed-leaf": DeepSpeedLeaf,
    "deepspeed2": with_config(training.DeepSpeed, zero_optimization={"stage": 2}),
    "deepspeed-autoep": with_config(
        training.DeepSpeed, expert_parallel=experts_section, zero_optimization={"stage": 2}
    ),
    "fsdp2": training.Fsdp2,
    "transformers-ep": Transformers,
    "floor": training.Floor,
}


# -- the products alone ------------------------------------------------------------------------------------------------


def milliseconds(function: Callable[[], Any], device: str, repeats: int = 20) -> float:
    """Median of one call."""
    for _ in range(3):
        function()
    found = []
    for _ in range(repeats):
        if device != "cpu":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if device != "cpu":
            torch.cuda.synchronize()
        found.append((time.perf_counter() - start) * 1e3)
    return statistics.median(found)


def profiled(function: Callable[[], Any], device: str) -> str:
    """Where the time of the device goes."""
    with torch.profiler.profile() as profile:
        function()
    key = "self_cpu_time_total" if device == "cpu" else "self_device_time_total"
    return str(profile.key_averages().table(sort_by=key, row_limit=14, max_name_column_width=60))


def grouped(function: Callable[[], Any], device: str) -> float:
    """Milliseconds of the device in grouped products alone, of one call; the median of five."""
    found = []
    for _ in range(5):
        with torch.profiler.profile() as profile:
            function()
            if device != "cpu":
                torch.cuda.synchronize()
        name = "self_cpu_time_total" if device == "cpu" else "self_device_time_total"
        found.append(sum(getattr(each, name) for each in profile.key_averages() if "grouped_mm" in each.key) / 1e3)
    return statistics.median(found)


def products(args: argparse.Namespace) -> dict[str, Any]:
    """One layer's experts."""
    from ds_hf.engine.ops.routes import group
    from ds_hf.engine.parallel.experts.compute import compute_routes
    from ds_hf.engine.parallel.experts.exchange import add_up, pick, take

    dtype = torch.bfloat16
    args.layers = 1
    model = make_model(args, dtype)
    module = next(each for name, each in model.named_modules() if name.endswith("experts"))
    down: Any = module.down_proj  # type: ignore[union-attr]
    up: Any = module.gate_up_proj  # type: ignore[union-attr]
    count, top = down.shape[0], SHAPES[args.model]["num_experts_per_tok"]
    tokens, width = args.micro_batch * args.seq, SHAPES[args.model]["hidden_size"]
    generator = torch.Generator(args.device).manual_seed(1)
    x = torch.randn(tokens, width, dtype=dtype, device=args.device, generator=generator, requires_grad=True)
    chosen = torch.rand(tokens, count, device=args.device, generator=generator).argsort(1)[:, :top]
    weights = torch.rand(tokens, top, device=args.device, generator=generator).softmax(-1).to(dtype).requires_grad_()
    seed = torch.randn_like(x)

    def model_own() -> None:
        module(x, chosen, weights).backward(seed)
        x.grad = weights.grad = up.grad = down.grad = None

    def routed() -> None:
        routes = group(chosen, count)
        scale = pick(weights, routes, top)[:, None]
        found = compute_routes(module, module, take(x, routes), routes.group, scale, routes.ends)
        add_up(found, routes).backward(seed)
        x.grad = weights.grad = up.grad = down.grad = None

    transposed = bool(getattr(module, "is_transposed", False))
    first, second = (up, down) if transposed else (up.mT, down.mT)
    offsets = torch.bincount(chosen.flatten(), minlength=count).cumsum(0).int()
    rows = torch.randn(tokens * top, width, dtype=dtype, device=args.device, generator=generator, requires_grad=True)
    inner = torch.randn(tokens * top, second.shape[1], dtype=dtype, device=args.device, requires_grad=True)
    multiply = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm

    def alone() -> None:
        one, two = multiply(rows, first, offs=offsets), multiply(inner, second, offs=offsets)
        torch.autograd.backward([one, two], [torch.ones_like(one), torch.ones_like(two)])
        rows.grad = inner.grad = up.grad = down.grad = None

    ways = {"model": model_own, "routes": routed, "products": alone}
    found = {name: milliseconds(each, args.device) for name, each in ways.items()}
    found |= {f"grouped_in_{name}": grouped(each, args.device) for name, each in ways.items()}
    if args.profile:
        for each in (model_own, routed):
            print(each.__name__, profiled(each, args.device))
    flops = 6 * tokens * top * (first.shape[1] * first.shape[2] + second.shape[1] * second.shape[2])
    return {**found, "tflops": flops / found["products"] / 1e9, "tokens": tokens}


def main() -> None:
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--layers", type=int, default=2)
    own.add_argument("--ep", type=int, default=0, help="processes that divide experts, 0 for all")
    own.add_argument(
        "--divided", action="store_true", help="divide layers as they are made (zero.Init; ds_hf, stage 3)"
    )
    own.add_argument("--lora", type=int, default=0, help="rank of adapters, of attention and experts; 0 for none")
    own.add_argument("--base-bits", type=int, choices=(4, 8), help="with --lora: of the experts under the adapters")
    own.add_argument("--part", choices=("steps", "products"), default="steps")
    own.add_argument("--profile", action="store_true", help="with --part products: the kernels")
    given, rest = own.parse_known_args()
    training.make_model, training.ENGINES = make_model, ENGINES
    training.MODELS = {name: (0, 0, 0, 0, 0, shape["vocab_size"]) for name, shape in SHAPES.items()}
    sys.argv = [sys.argv[0], *rest]
    parse, asked = training.parse, [*sys.argv[1:], f"--layers={given.layers}", f"--ep={given.ep}"]
    asked += [f"--lora={given.lora}", f"--base-bits={given.base_bits}"] if given.lora else []
    if "--model" not in rest:
        sys.argv += ["--model", "tiny"]

    def parsed() -> argparse.Namespace:
        args = parse()
        for name, value in vars(given).items():
            setattr(args, name, value)
        return args

    training.parse = parsed
    if given.part == "steps":
        training.main()
        return
    args = parsed()
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    found = products(args)
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, {args.model}: " + ", ".join(f"{k} {v:.3g}" for k, v in found.items()))
    if args.json:
        about = {"machine": f"1 x {where}", "torch": torch.__version__, "date": time.strftime("%F"), "arguments": asked}
        Path(args.json).write_text(json.dumps({**about, "records": [found]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
