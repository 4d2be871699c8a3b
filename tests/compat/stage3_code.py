"""User code that the stage-3 tests share: small models of many families on disk, loaded under ``zero.Init``, compared.

Functions here run on every rank. Plain references are computed by each rank for itself, without DeepSpeed, on the
batches of all ranks: what data parallelism promises.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SPEECH: dict[str, Any] = {
    **SMALL,
    "conv_dim": (16, 16),
    "conv_kernel": (3, 3),
    "conv_stride": (2, 2),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 32,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
    "apply_spec_augment": False,
    "squeeze_factor": 1,
    "ctc_loss_reduction": "mean",
}
LLAMA: dict[str, Any] = {**SMALL, "num_key_value_heads": 2, "vocab_size": 128}
WITHOUT_TOKENS = {"bos_token_id": None, "eos_token_id": None}
VISION = {**SMALL, "image_size": 16, "patch_size": 8}
# name: configuration class, model class, settings
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": False}),
    "llama-tied": ("LlamaConfig", "LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True}),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            **WITHOUT_TOKENS,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "vocab_size": 128,
            "n_positions": 64,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": 128,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
    ),
    "bert": ("BertConfig", "BertForMaskedLM", {**SMALL, **QUIET, "vocab_size": 128}),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 64,
            "vocab_size": 128,
            "max_position_embeddings": 64,
            "sinusoidal_pos_embds": True,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 1}),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {
            **LLAMA,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**LLAMA, "moe_intermediate_size": 32, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "switch": (
        "SwitchTransformersConfig",
        "SwitchTransformersForConditionalGeneration",
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "num_heads": 4,
            "num_experts": 4,
            "expert_capacity": 64,
            "vocab_size": 128,
            "dropout_rate": 0.0,
            "router_jitter_noise": 0.0,
            "decoder_start_token_id": 0,
        },
    ),
    "vit": ("ViTConfig", "ViTForImageClassification", {**VISION, **QUIET}),
    "resnet": (
        "ResNetConfig",
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    ),
    "clip": (
        "CLIPConfig",
        "CLIPModel",
        {"text_config": {**SMALL, "vocab_size": 128}, "vision_config": VISION, "projection_dim": 16},
    ),
    "wav2vec2": ("Wav2Vec2Config", "Wav2Vec2ForCTC", SPEECH),
    "hubert": ("HubertConfig", "HubertForCTC", SPEECH),
    "sew": ("SEWConfig", "SEWForCTC", SPEECH),
    "whisper": (
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "vocab_size": 128,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 16,
            "pad_token_id": 1,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "begin_suppress_tokens": None,
            "dropout": 0.0,
        },
    ),
}


def classes(family: str) -> tuple[Any, Any, dict[str, Any]]:
    """Configuration class, model class, settings."""
    import transformers

    config, model, settings = FAMILIES[family]
    return getattr(transformers, config), getattr(transformers, model), settings


def save_family(family: str, folder: Path) -> Path:
    """A model of the family in several files, the same on every call."""
    config, model, settings = classes(family)
    torch.manual_seed(1)
    model(config(**settings)).save_pretrained(folder / family, max_shard_size="20KB")
    return folder / family


def config(**more: Any) -> dict[str, Any]:
    """A stage-3 configuration."""
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    whole = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0}
    return {**whole, "zero_optimization": {**zero, **more.pop("zero", {})}, **more}


@contextmanager
def under_stage3(**more: Any) -> Iterator[dict[str, Any]]:
    """What a script without the Trainer does: keep an ``HfDeepSpeedConfig`` alive while models are loaded."""
    from transformers.integrations import HfDeepSpeedConfig

    settings = config(**more)
    alive = HfDeepSpeedConfig(copy.deepcopy(settings))
    yield settings
    del alive


def whole(model: nn.Module) -> dict[str, Tensor]:
    """All values of a model, gathered, on the CPU."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        state = model.state_dict()
    return {name: value.cpu() for name, value in state.items()}


def different(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Names whose values are not equal to the bit."""
    names = sorted(ours.keys() ^ theirs.keys())
    for name in ours.keys() & theirs.keys():
        a, b = ours[name], theirs[name].cpu()
        if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(a, b):
            names.append(name)
    return names


def rank() -> int:
    """This process."""
    return torch.distributed.get_rank()


def world() -> int:
    """Number of processes."""
    return torch.distributed.get_world_size()


Batch = dict[str, Tensor]


def tokens(seed: int, vocab: int = 128, length: int = 12, rows: int = 2) -> Batch:
    """Rows of tokens to be predicted."""
    drawn = torch.randint(3, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": drawn, "labels": drawn.clone()}


def batch_of(family: str, seed: int) -> Batch:
    """A batch that the family's model makes a loss of."""
    generator = torch.Generator().manual_seed(seed)
    if family in ("vit", "resnet"):
        side = 16 if family == "vit" else 32
        images = torch.randn(2, 3, side, side, generator=generator)
        return {"pixel_values": images, "labels": torch.randint(0, 2, (2,), generator=generator)}
    if family in ("wav2vec2", "hubert", "sew"):
        sound = torch.randn(2, 400, generator=generator)
        return {"input_values": sound, "labels": torch.randint(1, 32, (2, 5), generator=generator)}
    if family == "whisper":
        sound = torch.randn(2, 8, 32, generator=generator)
        return {"input_features": sound, "labels": torch.randint(3, 128, (2, 6), generator=generator)}
    if family == "clip":
        images = torch.randn(2, 3, 16, 16, generator=generator)
        drawn = torch.randint(3, 128, (2, 6), generator=generator)
        return {"pixel_values": images, "input_ids": drawn, "return_loss": True}  # type: ignore[dict-item]
    return tokens(seed)


def on(device: Any, batch: Batch) -> Batch:
    """The batch on a device."""
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Plain gradient descent: errors stay as small as they are."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)


def train_plain(
    model: nn.Module, batches: Sequence[Sequence[Batch]], loss_of: Callable[[nn.Module, Batch], Tensor]
) -> list[list[float]]:
    """Losses of each rank's batch at each step when the gradients of all ranks' batches are averaged."""
    optimizer = sgd(model.train())
    losses = []
    for step in batches:
        row = []
        for batch in step:
            loss = loss_of(model, batch)
            (loss / len(step)).backward()
            row.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(row)
    return losses


def hf_loss(model: nn.Module, batch: Batch) -> Tensor:
    """What every transformers model says its loss is."""
    loss: Tensor = model(**batch).loss
    return loss


def initialize(model: nn.Module, settings: dict[str, Any]) -> Any:
    """The engine of a script that brings its own optimizer."""
    import deepspeed

    settings = {**settings, "zero_allow_untested_optimizer": True}
    return deepspeed.initialize(model=model, optimizer=sgd(model), config_params=settings)[0]


def train_engine(
    engine: Any, batches: Sequence[Sequence[Batch]], loss_of: Callable[[nn.Module, Batch], Tensor]
) -> list[float]:
    """Losses of this rank's batches."""
    losses = []
    engine.train()
    for step in batches:
        loss = loss_of(engine, on(engine.device, step[rank()]))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def largest(ours: Sequence[float], plain: Sequence[Sequence[float]]) -> float:
    """Largest relative difference of this rank's losses from the plain ones."""
    assert len(ours) == len(plain) > 0
    return max(abs(a - row[rank()]) / abs(row[rank()]) for a, row in zip(ours, plain, strict=True))
