"""User code that the PEFT tests share: adapters of every kind on a tiny Llama, trained by the ``Trainer``.

``fit`` is a user's script as a function; ``fit_everywhere`` runs it without DeepSpeed and at every stage, one after
another in the same processes.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoraConfig,
    PeftConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
    prepare_model_for_kbit_training,
)
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig, Trainer
from transformers.integrations import HfDeepSpeedConfig

from ds_hf.engine.zero.packed import is_packed, packed_parts
from tests.compat.common import largest_difference
from tests.compat.scripts.trainer_script import Sentences
from tests.compat.trainer_code import TOLERANCE, arguments, config, history, start_afresh

STAGES = (0, 1, 2, 3)
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


def adapter(kind: str) -> PeftConfig:
    """The configuration of an adapter, as PEFT's own documentation writes it."""
    kinds: dict[str, Any] = {
        "lora": lambda: LoraConfig(**LORA),
        "lora on all linear layers, with dropout": lambda: LoraConfig(
            **{**LORA, "target_modules": "all-linear", "lora_dropout": 0.1}
        ),
        "rslora": lambda: LoraConfig(**LORA, use_rslora=True),
        "dora": lambda: LoraConfig(**LORA, use_dora=True),
        "modules_to_save": lambda: LoraConfig(**LORA, modules_to_save=["lm_head", "embed_tokens"]),
        "target embeddings": lambda: LoraConfig(**{**LORA, "target_modules": ["embed_tokens", "q_proj"]}),
        "trainable tokens": lambda: LoraConfig(**LORA, trainable_token_indices=[3, 5]),
        "ia3": lambda: IA3Config(
            task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
        ),
        "prompt tuning": lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        "p-tuning": lambda: PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16),
        "prefix tuning": lambda: PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    }
    return kinds[kind]()  # type: ignore[no-any-return]


def make_trainer(
    model: str | Path,
    folder: str | Path,
    deepspeed: Mapping[str, Any] | None = None,
    kind: str = "lora",
    *,
    model_first: bool = False,
    input_gradients: bool = False,
    second_adapter: bool = False,
    **more: Any,
) -> Trainer:
    """A Trainer of an adapter.

    Under stage 3 the base is built under ``zero.Init``, since the arguments come first, unless ``model_first``.
    """
    start_afresh()
    base = AutoModelForCausalLM.from_pretrained(model) if model_first else None
    args = arguments(folder, deepspeed, **{"learning_rate": 1e-2, "max_grad_norm": 0.5, **more})
    base = base if model_first else AutoModelForCausalLM.from_pretrained(model)
    if input_gradients:
        base.enable_input_require_grads()
    torch.manual_seed(5)  # adapters begin with random weights
    net = get_peft_model(base, adapter(kind))
    if second_adapter:
        net.add_adapter("second", adapter("rslora"))
        net.set_adapter("default")
    return Trainer(model=net, args=args, train_dataset=Sentences(60, seed=1))


def fit(
    model: str | Path, folder: str | Path, deepspeed: Mapping[str, Any] | None = None, kind: str = "lora", **more: Any
) -> list[dict[str, float]]:
    """Train, save the adapter in ``folder`` and return what was logged."""
    trainer = make_trainer(model, folder, deepspeed, kind, **more)
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    trainer.save_model()
    return history(trainer)


def place(folder: str | Path, stage: int | None) -> Path:
    """Where the run of a stage writes."""
    return Path(folder) / ("plain" if stage is None else f"stage{stage}")


def fit_everywhere(
    model: str, folder: str, kind: str = "lora", stages: Sequence[int] = STAGES, more: Mapping[str, Any] | None = None
) -> dict[int | None, list[dict[str, float]]]:
    """What was logged without DeepSpeed, under ``None``, and at each stage."""
    logged: dict[int | None, list[dict[str, float]]] = {}
    for stage in (None, *stages):
        deepspeed = None if stage is None else config(stage, zero=NO_GATHER if stage == 3 else {})
        logged[stage] = fit(model, place(folder, stage), deepspeed, kind, **(more or {}))
        gc.collect()  # the arguments of a run keep transformers building models under zero.Init
    return logged


# What a user's file says who never heard of it: the adapter has to be whole all the same.
NO_GATHER = {"stage3_gather_16bit_weights_on_model_save": False}


def saved_adapter(folder: str | Path) -> dict[str, Tensor]:
    """Tensors of the adapter file in ``folder``."""
    return load_file(Path(folder) / "adapter_model.safetensors")


def assert_as_without_deepspeed(logged: Mapping[int | None, list[dict[str, float]]], folder: Path) -> None:
    """Every stage logged the numbers of the run without DeepSpeed and saved the same adapter, whole."""
    plain, adapter = logged[None], saved_adapter(place(folder, None))
    assert plain[-1]["loss"] != plain[0]["loss"]
    assert adapter
    for stage, ours in logged.items():
        assert largest_difference(ours, plain) <= TOLERANCE, f"stage {stage}: {ours} instead of {plain}"
        saved = saved_adapter(place(folder, stage))
        if stage == 3:  # transformers saves what trains there; PEFT adds the frozen embedding beside its adapter else
            adapter = {name: value for name, value in adapter.items() if not name.endswith("base_layer.weight")}
        assert {name: value.shape for name, value in saved.items()} == {n: v.shape for n, v in adapter.items()}
        assert {value.dtype for value in saved.values()} == {value.dtype for value in adapter.values()}
        worst = max(float((saved[name] - value).abs().max()) for name, value in adapter.items())
        assert worst <= 10 * TOLERANCE, f"stage {stage}: a saved tensor is {worst} off"


def load_adapter(model: str | Path, folder: str | Path) -> PeftModel:
    """The base with a saved adapter on it, in one process and without DeepSpeed."""
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(folder))


def fit_and_resume(model: str, folder: str, stages: Sequence[int] = STAGES) -> dict[int, Any]:
    """At each stage: what a run of four steps logged, and what its second half logged when resumed."""
    logged: dict[int, Any] = {}
    for stage in stages:
        section = config(stage, zero=NO_GATHER if stage == 3 else {})
        more: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
        whole = fit(model, place(folder, stage), section, **more)
        gc.collect()
        checkpoint = place(folder, stage) / "checkpoint-2"
        again = Path(folder) / f"again{stage}"
        resumed = fit(model, again, section, **more, resume_from_checkpoint=str(checkpoint))
        logged[stage] = (whole, resumed)
        gc.collect()
    return logged


def merge_live(model: str, folder: str, stage: int = 3) -> dict[str, Tensor]:
    """Train; merge the adapter into the gathered weights and take it out again, as TRL does to hand weights to vLLM;
    save the adapter; then merge for good. The merged weights."""
    trainer = make_trainer(model, folder, config(stage))
    trainer.train()
    net = trainer.model
    with deepspeed.zero.GatheredParameters(list(net.parameters())):
        net.merge_adapter()
        net.unmerge_adapter()
    trainer.save_model()
    with deepspeed.zero.GatheredParameters(list(net.parameters())):
        merged = net.merge_and_unload()
        return {name: value.detach().cpu().clone() for name, value in merged.state_dict().items()}


def mixed_dtypes(model: str, stage: int | None, *, fused: bool = True) -> list[float]:
    """A bf16 base with the fp32 adapters that PEFT makes, in a loop of accelerate; the losses of every process."""
    start_afresh()
    torch.manual_seed(0)
    if stage is None:
        handlers = [InitProcessGroupKwargs(backend="nccl" if torch.cuda.is_available() else "gloo")]
        accelerator = Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=handlers)
    else:
        section = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
        own = {"ds_hf": {"fused_lora": fused}}
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config={**section, **own}))
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    torch.manual_seed(5)
    net = get_peft_model(base, adapter("lora"))
    assert {p.dtype for p in net.parameters() if p.requires_grad} == {torch.float32}
    data = Sentences(8 * int(os.environ["WORLD_SIZE"]), seed=1)
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False))
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    net, optimizer = accelerator.prepare(net, optimizer)
    losses = []
    for batch in loader:
        loss = net(**{key: value.to(accelerator.device) for key, value in batch.items()}).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert {p.dtype for p in net.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in net.parameters()} == {torch.float32, torch.bfloat16}
    return losses


def mixed_dtypes_everywhere(model: str, fused: bool) -> dict[int | None, list[float]]:
    """Losses without DeepSpeed, under ``None``, and at each stage."""
    return {stage: mixed_dtypes(model, stage, fused=fused) for stage in (None, *STAGES)}


def save_and_load_state(model: str, folder: str, stage: int) -> list[list[float]]:
    """Losses of steps 2 and 3, and the same after a strict ``load_state`` into a model with other adapter weights."""
    section = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    losses: list[list[float]] = []
    for turn in range(2):
        start_afresh()
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=section))
        torch.manual_seed(5 + turn)
        net = get_peft_model(AutoModelForCausalLM.from_pretrained(model), adapter("lora"))
        optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
        net, optimizer = accelerator.prepare(net, optimizer)
        if turn == 1:
            accelerator.load_state(folder)
        batch = {k: v.unsqueeze(0).to(accelerator.device) for k, v in Sentences(1, seed=1)[0].items()}
        losses.append([])
        for step in range(2 * turn, 4):
            loss = net(**batch).loss
            accelerator.backward(loss)
            if step >= 2:
                losses[-1].append(loss.item())
            if step == 1:
                accelerator.save_state(folder, exclude_frozen_parameters=True)
    return losses


def quantization(kind: str) -> Any:
    """What a user gives ``from_pretrained`` to load the base quantized."""
    if kind == "torchao int8":
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    if kind == "bitsandbytes 8 bits":
        return BitsAndBytesConfig(load_in_8bit=True)
    storage = torch.bfloat16 if kind.endswith("bf16 storage") else torch.uint8
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_quant_storage=storage,
    )


def fit_quantized(model: str, folder: str, kind: str) -> dict[int | None, Any]:
    """QLoRA: what was logged, without DeepSpeed and at each stage, and the base's bytes on this process at rest."""
    found: dict[int | None, Any] = {}
    for stage in (None, *STAGES):
        if stage is None and kind.startswith("torchao"):
            continue  # DistributedDataParallel does not take these tensors
        args = arguments(place(folder, stage), None if stage is None else config(stage), learning_rate=1e-2)
        base = AutoModelForCausalLM.from_pretrained(model, quantization_config=quantization(kind))
        net = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
        torch.manual_seed(5)
        trainer = Trainer(model=get_peft_model(net, adapter("lora")), args=args, train_dataset=Sentences(60, seed=1))
        trainer.train()
        trainer.save_model()
        parts = [part for param in net.parameters() if is_packed(param) for _, part in packed_parts(param)]
        found[stage] = (history(trainer), sum(part.untyped_storage().nbytes() for part in parts))
        gc.collect()
    return found


def adalora(model: str, stage: int | None) -> list[float]:
    """AdaLoRA in a loop of one's own: the budget shrinks by importance, which needs whole gradients. The losses."""
    start_afresh()
    section = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
    }
    known = None if stage is None else HfDeepSpeedConfig(section)  # alive as long as PEFT should know of DeepSpeed
    base = AutoModelForCausalLM.from_pretrained(model)
    torch.manual_seed(5)
    settings = AdaLoraConfig(
        task_type="CAUSAL_LM",
        target_modules=["q_proj", "v_proj"],
        init_r=4,
        target_r=2,
        tinit=1,
        tfinal=2,
        deltaT=1,
        total_step=8,
    )
    net = get_peft_model(base, settings)
    trained = [param for param in net.parameters() if param.requires_grad]
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    data = Sentences(8 * world, seed=1)
    losses = []
    if known is None:  # one process sees all of the batch
        device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
        net.to(device)
        optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)
        for step in range(8):
            rows = [data[step * world + index] for index in range(world)]
            every = [net(**{key: value.unsqueeze(0).to(device) for key, value in row.items()}).loss for row in rows]
            torch.stack(every).mean().backward()
            net.base_model.update_and_allocate(step)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(every[rank].item())
        return losses
    engine, *_ = deepspeed.initialize(model=net, config=section)
    for step in range(8):
        row = data[step * world + rank]
        loss = engine(**{key: value.unsqueeze(0).to(engine.device) for key, value in row.items()}).loss
        engine.backward(loss)
        net.base_model.update_and_allocate(step)
        engine.step()
        losses.append(loss.item())
    return losses


def adalora_everywhere(model: str, stages: Sequence[int]) -> dict[int | None, list[float]]:
    """Losses without DeepSpeed, under ``None``, and at each stage."""
    return {stage: adalora(model, stage) for stage in (None, *stages)}
