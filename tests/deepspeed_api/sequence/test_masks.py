"""Masks of divided sequences: logits are those of the undivided model, whatever the mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hf.deepspeed_api.sequence import masks
from ds_hf.deepspeed_api.sequence.division import SequenceDivision, release
from ds_hf.deepspeed_api.sequence.ulysses import divide
from ds_hf.engine.comm.mesh import axis_of
from ds_hf.engine.parallel.sequence.losses import gather_whole
from tests.helpers.distributed import run_distributed

TOKENS, BATCH = 24, 2
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}


def model(kind: str, **more: Any) -> nn.Module:
    import transformers

    name = "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config"
    config = getattr(transformers, name)(**{**SIZES, **more}, attn_implementation="sdpa")
    torch.manual_seed(0)
    made: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    return made


def tokens() -> Tensor:
    return torch.randint(0, 64, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))


def padded(left: bool) -> dict[str, Tensor]:
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    mask[0, :7] = 0
    mask[1, :15] = 0
    return {"input_ids": tokens(), "attention_mask": mask if left else mask.flip(1)}


def packed() -> dict[str, Tensor]:
    first = torch.tensor([*range(5), *range(11), *range(8)])
    second = torch.tensor([*range(17), *range(7)])
    return {"input_ids": tokens(), "position_ids": torch.stack((first, second))}


def plain() -> dict[str, Tensor]:
    return {"input_ids": tokens()}


GEMMA = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8}
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, **FACTORS}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
CASES = {
    "frequencies by the length": ("Llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 8}, plain()),
    "factors by the length": (
        "Phi3",
        {"rope_parameters": LONG, "original_max_position_embeddings": 16, "pad_token_id": 0, "eos_token_id": 2},
        plain(),
    ),
    "plain": ("Llama", {}, plain()),
    "left": ("Llama", {}, padded(left=True)),
    "right": ("Llama", {}, padded(left=False)),
    "packed": ("Llama", {}, packed()),
    "window": ("Mistral", {"sliding_window": 4}, plain()),
    "window, packed": ("Mistral", {"sliding_window": 4}, packed()),
    "window, left": ("Mistral", {"sliding_window": 4}, padded(left=True)),
    "two kinds of layers, packed": ("Gemma3", GEMMA, packed()),
    "two kinds of layers, left": ("Gemma3", GEMMA, padded(left=True)),
    "one key head": ("Qwen3", {"num_key_value_heads": 1, "head_dim": 16}, packed()),
    "cache": ("Llama", {"use_cache": True}, padded(left=True)),
}


@torch.no_grad()
def difference(name: str) -> float:
    """Of this process's logits from the undivided model's; both in fp32."""
    kind, more, batch = CASES[name]
    net = model(kind, **more)
    undivided: Any = type(net)
    undivided = undivided(net.config)  # of the very same configuration
    undivided.load_state_dict(net.state_dict())
    whole = undivided(**batch).logits
    axis = axis_of(None, "sequence")
    divide(net, SequenceDivision("sdpa", axis))
    length = TOKENS // axis.world_size
    part = slice(axis.rank * length, (axis.rank + 1) * length)
    logits = net(**{key: value[:, part] for key, value in batch.items()}).logits
    gathered = gather_whole(logits, axis, 1, "logits")
    assert torch.equal(undivided(**batch).logits, whole)
    shown = batch.get("attention_mask", torch.ones(BATCH, TOKENS)) > 0  # what padding attends to is nobody's
    release(net)
    again = net(**batch).logits
    assert torch.equal(again, whole)  # as before
    return float((gathered - whole)[shown].abs().max() / whole.abs().max())


def differences(names: list[str]) -> dict[str, float]:
    return {name: difference(name) for name in names}


def test_logits_are_those_of_the_undivided_model() -> None:
    for found in run_distributed(differences, 2, list(CASES), timeout=90):
        assert set(found) == set(CASES)
        assert max(found.values()) < 1e-5, found


@pytest.mark.slow
def test_four_processes_share_a_sequence() -> None:
    for found in run_distributed(differences, 4, list(CASES), timeout=120):
        assert max(found.values()) < 1e-5, found


def in_evaluation() -> tuple[float, int]:
    net = model("Llama").eval()
    whole = net(**packed()).logits
    division = SequenceDivision("sdpa", axis_of(None, "sequence"), disable_in_eval=True)
    divide(net, division)
    with torch.no_grad():
        return float((net(**packed()).logits - whole).abs().max()), division.calls


def test_evaluation_takes_whole_sequences_where_it_is_asked_to() -> None:
    assert run_distributed(in_evaluation, 2) == [(0.0, 0)] * 2


@torch.no_grad()
def parts_in_evaluation() -> tuple[float, str]:
    """Parts that a loader of accelerate gives in evaluation: the difference from whole ones; and without their sign."""
    net = model("Llama").eval()
    whole = net(**plain()).logits
    axis = axis_of(None, "sequence")
    division = SequenceDivision("sdpa", axis, disable_in_eval=True)
    divide(net, division)
    length = TOKENS // axis.world_size
    part = slice(axis.rank * length, (axis.rank + 1) * length)
    places = torch.arange(TOKENS).expand(BATCH, -1)
    batch = {"input_ids": tokens()[:, part], "position_ids": places[:, part]}
    found = net(**batch, shift_labels=tokens()[:, part]).logits
    said = ""
    try:
        net(**batch)
    except ValueError as error:
        said = str(error)
    assert float((net(**plain()).logits - whole).abs().max()) == 0.0  # whole ones again
    return float((found - whole[:, part]).abs().max()), said


def test_evaluation_takes_parts_that_say_so() -> None:
    first, second = run_distributed(parts_in_evaluation, 2)
    assert max(first[0], second[0]) < 1e-5
    assert first[1] == ""
    assert "begin at 12: it is a part of one. Give shift_labels" in second[1]


def faults() -> list[str]:
    """What is said about forwards that cannot be divided."""
    axis = axis_of(None, "sequence")
    net = model("Llama")
    divide(net, SequenceDivision("sdpa", axis, seq_length=TOKENS))
    half = TOKENS // 2
    ids = tokens()[:, axis.rank * half : (axis.rank + 1) * half]
    whole_mask = torch.ones(BATCH, 1, half, half, dtype=torch.bool).tril()
    cases: list[dict[str, Any]] = [
        {"input_ids": ids[:, :5]},
        {"input_ids": ids, "labels": ids},
        {"input_ids": ids, "attention_mask": whole_mask},
        {"input_ids": ids, "cu_seq_lens_q": torch.tensor([0, 5, TOKENS])},
        {"input_ids": ids, "attention_mask": torch.arange(half).expand(BATCH, -1)},
    ]
    said = []
    for case in cases:
        with pytest.raises(ValueError) as caught:
            net(**case)
        said.append(str(caught.value))
    opt = model("OPT", ffn_dim=48, word_embed_proj_dim=32)  # numbers the tokens that are shown
    divide(opt, SequenceDivision("sdpa", axis))
    part = slice(axis.rank * half, (axis.rank + 1) * half)
    shown = padded(left=True)["attention_mask"]
    counted = (shown.cumsum(-1) - 1).clamp(min=0)[:, part]
    opt(input_ids=ids, attention_mask=shown[:, part], position_ids=counted)
    with pytest.raises(ValueError) as caught:
        opt(input_ids=ids, attention_mask=shown[:, part])
    said.append(str(caught.value))
    dist.barrier()
    return said


def test_forwards_that_cannot_be_divided() -> None:
    for length, labels, mask, lengths, documents, positions in run_distributed(faults, 2):
        assert "10 tokens in a sequence, and seq_length is 24" in length
        assert "labels without shift_labels" in labels
        assert "attention_mask has shape [2, 1, 12, 12], and this process has 12 of 24 tokens" in mask
        assert "packed documents (cu_seq_lens_q) without position_ids" in lengths
        assert "packed documents (attention_mask) without position_ids" in documents
        assert "give position_ids that begin at 0 with the first token" in positions


def flash(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **given: Any) -> Any:
    """As flash attention of transformers computes: packed documents by ``position_ids``, padding by a mask of 2
    dimensions, windows by a number."""
    tokens = query.shape[2]
    index = torch.arange(tokens)
    seen = (index[:, None] >= index)[None].expand(len(query), -1, -1)
    if (window := given.get("sliding_window")) is not None:
        seen = seen & (index[:, None] - index < window)
    if mask is not None:
        assert mask.shape == (len(query), tokens)
        seen = seen & mask[:, None].bool()
    elif len(query) == 1:
        positions = given["position_ids"]
        assert positions.shape == (1, tokens)
        document = (positions == 0).cumsum(-1)
        seen = seen & (document[:, :, None] == document[:, None])
    seen = seen | torch.eye(tokens, dtype=torch.bool)  # padding attends to itself
    key, value = (each.repeat_interleave(module.num_key_value_groups, 1) for each in (key, value))  # type: ignore[arg-type]
    context = nn.functional.scaled_dot_product_attention(query, key, value, seen[:, None])
    return context.transpose(1, 2), None


@torch.no_grad()
def flash_differences(names: list[str]) -> list[float]:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register("positions_for_tests", flash)
    AttentionMaskInterface.register("positions_for_tests", flash_attention_mask)
    found, axis = [], axis_of(None, "sequence")
    for name in names:
        kind, more, given = CASES[name]
        batch = {key: value[:1] for key, value in given.items()} if "packed" in name else given
        net = model(kind, **more)
        net.set_attn_implementation("positions_for_tests")  # type: ignore[operator]
        positions = batch.get("position_ids", torch.arange(TOKENS).expand(len(batch["input_ids"]), -1))
        batch = {**batch, "position_ids": positions}
        whole = net(**batch).logits
        divide(net, SequenceDivision("positions_for_tests", axis))
        length = TOKENS // axis.world_size
        part = slice(axis.rank * length, (axis.rank + 1) * length)
        logits = net(**{key: value[:, part] for key, value in batch.items()}).logits
        shown = batch.get("attention_mask", torch.ones(len(whole), TOKENS))[:, part] > 0
        found.append(float((logits - whole[:, part])[shown].abs().max() / whole.abs().max()))
    return found


def test_cores_that_make_no_masks_get_positions_of_the_whole() -> None:
    names = ["plain", "left", "packed", "window, packed", "one key head"]
    for found in run_distributed(flash_differences, 2, names):
        assert max(found) < 1e-5, dict(zip(names, found, strict=True))


def flash_gradients(packs: bool) -> float:
    """Under the name that a model loaded for flash attention has, which needs its package to be set otherwise."""
    from transformers import AttentionInterface

    AttentionInterface.register("flash_attention_2", flash)
    axis = axis_of(None, "sequence")
    batch = {key: value[:1] for key, value in (packed() if packs else plain()).items()}
    batch = {"position_ids": torch.arange(TOKENS)[None], **batch}
    net = model("Qwen3")
    net.config._attn_implementation = "flash_attention_2"  # type: ignore[union-attr]
    whole = net(**batch).logits
    whole.square().mean().backward()
    expected = {name: param.grad for name, param in net.named_parameters()}
    net.zero_grad()
    divide(net, SequenceDivision("flash_attention_2", axis))
    length = TOKENS // axis.world_size
    part = slice(axis.rank * length, (axis.rank + 1) * length)
    (net(**{key: value[:, part] for key, value in batch.items()}).logits.square().sum() / whole.numel()).backward()
    apart = []
    for name, param in net.named_parameters():
        assert param.grad is not None
        dist.all_reduce(param.grad)
        apart.append(float((param.grad - expected[name]).abs().max() / expected[name].abs().max()))  # type: ignore[operator, union-attr]
    return max(apart)


@pytest.mark.slow
@pytest.mark.parametrize("packs", [False, True])
def test_gradients_through_flash_attention(packs: bool) -> None:
    assert max(run_distributed(flash_gradients, 2, packs)) < 1e-5


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_by_the_name_of_another_release_is_seen(name: str) -> None:
    """Code that comes with a model is of the release that it was written for."""
    from transformers import DynamicCache, LlamaConfig, masking_utils

    config = LlamaConfig(**SIZES, attn_implementation="sdpa")
    filled = DynamicCache()
    filled.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), 0)
    make = masks._whole(masking_utils.create_causal_mask)
    embeds, shown = torch.zeros(1, 1, 32), torch.tensor([[0, 1, 1, 1]])
    mask = make(config=config, inputs_embeds=embeds, attention_mask=shown, **{name: filled})
    assert mask.flatten().tolist() == [False, True, True, True]
