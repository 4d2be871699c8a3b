"""Adapters on a frozen Llama, on one GPU or several: the engine with and without fused adapters, PEFT in plain torch,
and Liger's kernels where they are installed.

    python benchmarks/lora.py --model 8b --micro-batch 2 --seq 4096 --rank 16 --checkpointing --json FILE
    python benchmarks/lora.py --model 1b3 --micro-batch 1 --seq 512 --engines ds_hf,ds_hf-peft,peft,peft-16
    python benchmarks/lora.py --model 8b --bits 4 --engines ds_hf,ds_hf-blocks,peft --micro-batch 2 --seq 4096
    python benchmarks/lora.py --model 8b --micro-batch 2 --seq 4096 --checkpointing --engines unsloth

All train LoRA of ``--rank`` on all linear layers of the same bf16 base, from the same seed and on the same tokens, and
take turns as in ``training.py``, whose loop and tokens these are. *ds_hf* fuses adapters (``ds_hf.fused_lora``),
*ds_hf-peft* leaves them to PEFT, *ds_hf-chunked* has its loss in chunks too, *ds_hf-captured* its blocks in CUDA
graphs, *ds_hf-stage1* and *ds_hf-stage3* are *ds_hf-chunked* at these stages, *ds_hf-liger* Liger's kernels in the
model and *ds_hf-liger-host* the inputs of checkpointed blocks in host memory, too. *peft* is plain torch as the Trainer
runs it: fp32 adapters under bf16 autocast, torch's fused AdamW; *peft-16* has bf16 adapters and no autocast; *liger* is
*peft-16* with Liger's kernels, its fused loss among them; *axolotl* has axolotl's LoRA kernels beside those of Liger.
*unsloth* is ``FastLanguageModel`` of a saved copy of the same base, under bf16 autocast as in its Trainer, its blocks'
inputs in host memory with ``--checkpointing``; *unsloth-kept* keeps these on the GPU. It changes transformers for its
whole process, so it is measured in one of its own. Both are found on ``PYTHONPATH``, and need bitsandbytes.

``--bits 4`` has the base in bitsandbytes' nf4 (``Linear4bit`` where it is installed); *ds_hf-blocks* has it in the
engine's own blocks, and needs no library, *ds_hf-liger-blocks* Liger's kernels beside them; *ds_hf-blocks-long* keeps
inputs of checkpointed blocks in host memory and computes MLPs and the loss in parts, too. ``--memory 22.5`` lets a
process have so many GiB of the GPU. TFLOP/s count four operations a parameter and token, as NeMo's table does: forward,
and the gradient of the input.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import training
from torch import Tensor, nn


def make_model(args: argparse.Namespace, dtype: torch.dtype) -> Any:
    """The base in ``dtype`` with adapters in fp32, the same values for the same seed."""
    import peft

    lora, args.lora = args.rank, 0
    checkpointing, args.checkpointing = args.checkpointing, False
    try:
        model: Any = training.make_model(args, dtype)
    finally:
        args.lora, args.checkpointing = 0, checkpointing
    model.config._attn_implementation = args.attention
    if args.bits and args.in_bits:
        to_four_bits(model)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.manual_seed(training.SEED)
    options = {"r": lora, "lora_alpha": 2 * lora, "target_modules": "all-linear", "lora_dropout": args.dropout}
    adapted: Any = peft.get_peft_model(model, peft.LoraConfig(**options))
    return adapted.train()


def to_four_bits(model: nn.Module) -> None:
    """Its linear layers but the head, in bitsandbytes' nf4."""
    import bitsandbytes as bnb  # type: ignore[import-not-found, unused-ignore]

    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear) and name != "lm_head":
                sizes = layer.in_features, layer.out_features
                with torch.device("meta"):  # numbers that are drawn for a 4096 x 14336 matrix take the CPU a while
                    found = bnb.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
                found.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
                setattr(module, name, found.to(layer.weight.device))
                layer.weight = None  # type: ignore[assignment]


def base_parameters(args: argparse.Namespace) -> int:
    """How many the base has."""
    hidden, intermediate, layers, heads, kv_heads, vocabulary = training.MODELS[args.model]
    attention = 2 * hidden * hidden + 2 * hidden * hidden * kv_heads // heads
    return layers * (attention + 3 * hidden * intermediate) + 2 * vocabulary * hidden


# -- engines ------------------------------------------------------------------------------------------------------


class DsHf(training.Contender):
    """This project's engine, adapters fused."""

    own: ClassVar[dict[str, Any]] = {}
    blocks: ClassVar[bool] = False
    sections: ClassVar[dict[str, Any]] = {}

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        import ds_hf

        args.in_bits = not self.blocks
        model = make_model(args, torch.bfloat16)
        self.prepare(model)
        config = {
            **training.engine_config(args),
            "optimizer": {"type": "AdamW", "params": training.adam_parameters()},
            "ds_hf": {**self.own, **({"compile": "blocks"} if args.compile else {})},
            **self.sections,
        }
        if self.blocks:
            bits = {"num_bits": args.bits or 4}
            config["weight_quantization"] = {"post_init_quant": {"self_attn": bits, "mlp": bits}}
        self.engine, *_ = ds_hf.initialize(
            model=model, model_parameters=training.parameter_groups(model), config=config
        )

    def prepare(self, model: Any) -> None:
        """Change the model before the engine takes it."""

    def step(self, batches: list[Tensor]) -> Tensor:
        return training.deepspeed_step(self.engine, batches)

    def finish(self) -> None:
        self.engine._finish_update()

    def free(self) -> None:
        self.engine.destroy()
        super().free()


class Peft(training.Contender):
    """PEFT in plain torch, as the Trainer runs it."""

    autocast: ClassVar[bool] = True

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        args.in_bits = True
        self.model = make_model(args, torch.bfloat16)
        if not self.autocast:
            for param in self.model.parameters():
                if param.requires_grad:
                    param.data = param.data.bfloat16()
        self.prepare()
        if args.compile:
            training.compile_blocks(self.model.base_model.model)
        self.trained = [param for param in self.model.parameters() if param.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, fused=True, **training.adam_parameters())

    def prepare(self) -> None:
        """Change the model before it is compiled."""

    def step(self, batches: list[Tensor]) -> Tensor:
        losses = []
        for ids in batches:
            with torch.autocast(self.args.device.split(":")[0], torch.bfloat16, enabled=self.autocast):
                loss = self.model(input_ids=ids, labels=ids).loss
            (loss / len(batches)).backward()
            losses.append(loss.detach())
        if dist.get_world_size() > 1:
            for param in self.trained:
                dist.all_reduce(param.grad)
                param.grad.div_(dist.get_world_size())  # type: ignore[union-attr]
        if self.args.clip:
            torch.nn.utils.clip_grad_norm_(self.trained, self.args.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).mean()


class Peft16(Peft):
    """The same with adapters in bf16."""

    autocast = False


class WithLiger:
    """Liger's kernels in the model of a contender, which are taken back."""

    def use_liger(self, model: Any) -> None:
        from liger_kernel.transformers import (  # type: ignore[import-not-found, unused-ignore]
            apply_liger_kernel_to_llama,
        )
        from transformers.models.llama import modeling_llama

        self.before = dict(vars(modeling_llama))
        apply_liger_kernel_to_llama(model=model)

    def without_liger(self) -> None:
        from transformers.models.llama import modeling_llama

        vars(modeling_llama).update(self.before)


class Liger(Peft16, WithLiger):
    """PEFT with bf16 adapters, and Liger's kernels."""

    def prepare(self) -> None:
        self.use_liger(self.model.base_model.model)

    def free(self) -> None:
        self.without_liger()
        super().free()


class Axolotl(Liger):
    """PEFT with bf16 adapters, axolotl's LoRA kernels in attention and MLPs, and Liger's in the rest."""

    def prepare(self) -> None:
        import axolotl.utils  # type: ignore[import-not-found, unused-ignore]
        from transformers.models.llama.modeling_llama import LlamaAttention

        name = "axolotl.utils.callbacks"  # it imports all that reports runs; one file beside it is needed
        package = types.ModuleType(name)
        package.__path__ = [f"{axolotl.utils.__path__[0]}/callbacks"]
        sys.modules.setdefault(name, package)
        from axolotl.monkeypatch import lora_kernels  # type: ignore[import-not-found, unused-ignore]
        from axolotl.utils.dict import DictDefault  # type: ignore[import-not-found, unused-ignore]

        super().prepare()
        self.attention, self.forward = LlamaAttention, LlamaAttention.forward
        with tempfile.TemporaryDirectory() as folder:
            self.model.config.save_pretrained(folder)
            keys = {f"lora_{part}_kernel": True for part in ("qkv", "o", "mlp")}
            keys = DictDefault({"base_model": folder, **keys})
            lora_kernels.patch_self_attn_lora(keys)
            lora_kernels.apply_lora_kernel_patches(self.model, keys)

    def free(self) -> None:
        self.attention.forward = self.forward
        del self.attention._original_forward  # else the next one would not be changed
        super().free()


class Unsloth(Peft):
    """Unsloth's model and adapters, in the Trainer's autocast; checkpointed inputs of blocks in host memory."""

    checkpointing: ClassVar[Any] = "unsloth"

    def __init__(self, args: argparse.Namespace) -> None:
        training.Contender.__init__(self, args)
        from unsloth import FastLanguageModel  # type: ignore[import-not-found, unused-ignore]

        given = {"max_seq_length": args.seq, "dtype": torch.bfloat16, "load_in_4bit": bool(args.bits)}
        with tempfile.TemporaryDirectory() as folder:
            self.save_base(folder)
            model, _ = FastLanguageModel.from_pretrained(folder, **given)
        self.model = FastLanguageModel.get_peft_model(
            model,
            r=args.rank,
            lora_alpha=2 * args.rank,
            lora_dropout=args.dropout,
            target_modules=[f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")],
            use_gradient_checkpointing=self.checkpointing if args.checkpointing else False,
            random_state=training.SEED,
        ).train()
        self.trained = [param for param in self.model.parameters() if param.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, fused=True, **training.adam_parameters())

    def save_base(self, folder: str) -> None:
        """The base of the others, with a tokenizer that Unsloth asks for, in ``folder``."""
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from transformers import PreTrainedTokenizerFast

        lora, checkpointing, self.args.lora, self.args.checkpointing = 0, self.args.checkpointing, 0, False
        base: Any = training.make_model(self.args, torch.bfloat16)
        self.args.lora, self.args.checkpointing = lora, checkpointing
        base.save_pretrained(folder)
        special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
        words = [*(f"t{at}" for at in range(base.config.vocab_size - len(special))), *special.values()]
        found = Tokenizer(WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
        PreTrainedTokenizerFast(tokenizer_object=found, **special).save_pretrained(folder)


class UnslothKept(Unsloth):
    """The same with checkpointed inputs of blocks on the GPU."""

    checkpointing = True


class DsHfLiger(DsHf, WithLiger):
    """The engine with a model that has Liger's kernels."""

    def prepare(self, model: Any) -> None:
        self.use_liger(model.base_model.model)

    def free(self) -> None:
        self.without_liger()
        super().free()


class DsHfLigerHost(DsHfLiger):
    """The same with inputs of checkpointed blocks in host memory."""

    sections: ClassVar[dict[str, Any]] = {"activation_checkpointing": {"cpu_checkpointing": True}}


class DsHfLigerBlocks(DsHfLiger):
    """Liger's kernels over a base in the engine's own blocks."""

    blocks = True


def variant(name: str, blocks: bool = False, **own: Any) -> type[DsHf]:
    """The engine with other keys."""
    return type(name, (DsHf,), {"own": own, "blocks": blocks})


ENGINES: dict[str, type[training.Contender]] = {
    "ds_hf": DsHf,
    "ds_hf-peft": variant("DsHfPeft", fused_lora=False),
    "ds_hf-chunked": variant("DsHfChunked", chunked_loss=True),
    "ds_hf-captured": variant("DsHfCaptured", capture="blocks"),
    "ds_hf-liger": DsHfLiger,
    "ds_hf-liger-host": DsHfLigerHost,
    "ds_hf-liger-blocks": DsHfLigerBlocks,
    "ds_hf-blocks": variant("DsHfBlocks", blocks=True),
    "ds_hf-blocks-long": type(
        "DsHfBlocksLong",
        (DsHf,),
        {
            "own": {"chunked_loss": True, "tiled_mlp": "auto"},
            "blocks": True,
            "sections": {"activation_checkpointing": {"cpu_checkpointing": True}},
        },
    ),
    "ds_hf-blocks-peft": variant("DsHfBlocksPeft", blocks=True, fused_lora=False),
    **{
        f"ds_hf-stage{stage}": type(
            f"DsHfStage{stage}",
            (DsHf,),
            {"own": {"chunked_loss": True}, "sections": {"zero_optimization": {"stage": stage}}},
        )
        for stage in (1, 3)
    },
    "peft": Peft,
    "peft-16": Peft16,
    "liger": Liger,
    "axolotl": Axolotl,
    "unsloth": Unsloth,
    "unsloth-kept": UnslothKept,
}


def show(records: list[dict[str, Any]]) -> None:
    """The table for a person."""
    print(f"{'':<18} {'step ms':>9} {'tokens/s':>10} {'TFLOP/s':>8} {'peak GiB':>9} {'first loss':>10} {'last':>8}")
    for row in records:
        if "step_ms" not in row:
            print(f"{row['name']:<18} failed: {row['error']}")
            continue
        print(
            f"{row['name']:<18} {row['step_ms']:>9.1f} {row['tokens_per_s']:>10.0f} {row['tflops']:>8.1f} "
            f"{row['peak_gib']:>9.2f} {row['losses'][0]:>10.4f} {row['losses'][-1]:>8.4f}"
        )


def parse() -> argparse.Namespace:
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--rank", type=int, default=16)
    own.add_argument("--dropout", type=float, default=0.0)
    own.add_argument("--bits", type=int, choices=(4,), help="of the base")
    own.add_argument("--memory", type=float, help="GiB of the GPU that may be used")
    own.add_argument("--attention", default="sdpa", help="transformers' name: sdpa, flash_attention_2, ...")
    given, rest = own.parse_known_args()
    if {"-h", "--help"} & set(rest):
        own.print_help()
    training.ENGINES = ENGINES
    asked = sys.argv
    sys.argv = [asked[0], *rest]
    if not any(each.startswith("--engines") for each in rest):
        sys.argv.append("--engines=ds_hf,ds_hf-peft,peft,peft-16,liger")
    if not any(each.startswith("--stage") for each in rest):
        sys.argv.append("--stage=0")
    try:
        args = training.parse()
    finally:
        sys.argv = asked
    for name, value in vars(given).items():
        setattr(args, name, value)
    alone = {name.startswith("unsloth") for name in args.engines.split(",")}
    if True in alone:
        if False in alone:
            raise SystemExit("Unsloth changes transformers for its whole process: measure it in a command of its own")
        import unsloth  # type: ignore[import-not-found, unused-ignore]  # noqa: F401 - before transformers
    return args


def main() -> None:
    args = parse()
    training.connect(args)
    if args.memory:
        whole = torch.cuda.get_device_properties().total_memory
        torch.cuda.set_per_process_memory_fraction(args.memory * 2**30 / whole)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    world = dist.get_world_size()
    about = {"machine": f"{world} x {where}", "torch": torch.__version__, "date": time.strftime("%F")}

    def finished(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for row in records:
            if "tokens_per_s" in row:
                row["tflops"] = round(4 * base_parameters(args) * row["tokens_per_s"] / world / 1e12, 2)
        return records

    def write(records: list[dict[str, Any]]) -> None:
        if args.json and dist.get_rank() == 0:
            found = {**about, "arguments": sys.argv[1:], "records": finished(records)}
            Path(args.json).write_text(json.dumps(found, indent=1) + "\n")

    records = finished(training.measure(args, write))
    if dist.get_rank() == 0:
        print(f"{about['machine']}, torch {torch.__version__}: {' '.join(sys.argv[1:])}")
        show(records)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
