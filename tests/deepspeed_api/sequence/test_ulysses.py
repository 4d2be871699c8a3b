"""``UlyssesSPAttentionHF`` as DeepSpeed's tutorial uses it, what it refuses, and models that it leaves alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from deepspeed.utils import groups
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForCausalLM,
    BloomConfig,
    BloomModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaModel,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_hf import initialize
from ds_hf.deepspeed_api.sequence.division import division_of, release
from ds_hf.errors import DsHfError
from tests.helpers.distributed import run_distributed

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_implementation": "sdpa",
}
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "sequence_parallel_size": 2,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
    "gradient_clipping": 0.0,
}
IDS = torch.tensor([[1, 10, 12, 10, 2, 2], [1, 20, 22, 20, 2, 3]])


def model(**more: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **more}))


def collate(rows: list[Tensor]) -> dict[str, Tensor]:
    ids = torch.stack(rows)
    return {"input_ids": ids, "position_ids": torch.arange(6).expand(len(rows), -1), "labels": ids.clone()}


def tutorial(folder: str) -> tuple[list[float], list[float]]:
    """Losses of the loop in DeepSpeed's tutorial, and of one process on the same samples."""
    reference, expected = model(), []
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    for row in IDS:
        loss = reference(**collate([row])).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=folder,
        core_attn_implementation="sdpa",
        sequence_parallel_size=2,
        micro_batch_size=1,
        seq_length=6,
        seq_length_is_variable=True,
    )
    assert mpu is not None
    net = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    engine, *_ = initialize(config=CONFIG, model=net, model_parameters=net.parameters(), mpu=mpu)
    sp_group, sp_rank = groups._get_sequence_parallel_group(), groups._get_sequence_parallel_rank()
    size = groups._get_sequence_parallel_world_size()
    assert (size, sp_rank, groups._get_data_parallel_world_size()) == (2, dist.get_rank(), 1)
    assert mpu.get_sequence_parallel_world_size() == parallel_state_sp.get_sequence_parallel_world_size() == 2
    rows = DataLoader(IDS[dist.get_rank() :: 2], batch_size=1, collate_fn=collate)  # type: ignore[arg-type]
    batches = UlyssesSPDataLoaderAdapter(
        rows, sp_rank=sp_rank, sp_group=sp_group, sp_world_size=size, device=engine.device
    )
    found = []
    for batch in batches:
        labels = batch["shift_labels"]
        logits = engine(**batch).logits
        loss = net.loss_function(logits=logits, labels=None, shift_labels=labels, vocab_size=64)
        losses = torch.distributed.nn.functional.all_gather(loss, group=sp_group)
        tokens = torch.distributed.nn.functional.all_gather((labels != -100).sum(), group=sp_group)
        total = sum(each * count for each, count in zip(losses, tokens, strict=True)) / max(sum(tokens), 1)
        engine.backward(total)
        engine.step()
        found.append(float(total.detach()))
    return found, expected


def test_the_loop_of_deepspeeds_tutorial(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    for found, expected in run_distributed(tutorial, 2, str(tmp_path)):
        assert found == pytest.approx(expected, rel=1e-6)


def first_batches() -> list[str]:
    net, rank = model(), dist.get_rank()
    engine, *_ = initialize(config=CONFIG, model=net, model_parameters=net.parameters())
    ids, part = IDS[:1].repeat(2, 1), slice(3 * rank, 3 * rank + 3)
    labels = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]
    alike = {"input_ids": ids[:, part], "shift_labels": labels[:, part]}
    masked = {**alike, "attention_mask": torch.ones(2, 3, dtype=torch.int64)}
    other = {**alike, "input_ids": ids[:, part] + rank, "shift_labels": labels[:, part]}
    batches: list[dict[str, Any]] = [
        other,  # the second part is of another sequence
        {**alike, "shift_labels": labels[:, part] * 0 + 7},  # labels that are no next tokens say nothing
        {"input_ids": ids[:, : 3 + rank]},
        masked if rank else alike,
        alike,
    ]
    said = []
    for batch in batches:
        division = division_of(net)
        assert division is not None
        division.checked = False
        try:
            engine(**batch)
            said.append("")
        except DsHfError as error:
            said.append(str(error))
    return said


def test_first_batches_that_are_no_parts_of_the_same_sequences() -> None:
    for apart, other_labels, sizes, entries, alike in run_distributed(first_batches, 2):
        assert "ranks 0 and 1" in apart
        assert "sequence 0" in apart
        assert "is 10, and the next token on the other is 11" in apart
        assert "(2, 3) and (2, 4) tokens" in sizes
        assert "attention_mask of their batches are not alike" in entries
        assert (other_labels, alike) == ("", "")


def registered(**more: Any) -> Any:
    arguments: dict[str, Any] = {
        "core_attn_implementation": "sdpa",
        "sequence_parallel_size": 2,
        "micro_batch_size": 1,
        **more,
    }
    return UlyssesSPAttentionHF.register_with_transformers(**arguments)


class Wrapper:
    """Has a configuration, as PEFT's models have, and is no model of transformers."""

    def __init__(self, config: Any) -> None:
        self.config = config


def refusals() -> dict[str, str]:
    eager = Wrapper(model(attn_implementation="eager").config)
    small: Any = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    roberta = RobertaModel(RobertaConfig(vocab_size=8, attn_implementation="sdpa", **small))
    bart = BartForCausalLM(
        BartConfig(vocab_size=8, d_model=8, decoder_layers=1, decoder_attention_heads=2, attn_implementation="sdpa")
    )
    bloom = BloomModel(BloomConfig(vocab_size=8, hidden_size=8, n_layer=1, n_head=2, attn_implementation="eager"))
    llama4 = Llama4TextConfig(vocab_size=8, no_rope_layers=[0], attn_implementation="sdpa", **small)
    cases: dict[str, dict[str, Any]] = {
        "positions": {"model_name_or_path": roberta},
        "no positions": {"model_name_or_path": bart},
        "no interface": {"model_name_or_path": bloom, "core_attn_implementation": "eager"},
        "own positions": {"model_name_or_path": Llama4ForCausalLM(llama4)},
        "mismatch": {"model_name_or_path": Wrapper(model().config), "core_attn_implementation": "flash_attention_2"},
        "eager": {"model_name_or_path": eager, "core_attn_implementation": "eager"},
        "heads": {"model_name_or_path": model(num_attention_heads=1, num_key_value_heads=1)},
        "length": {"model_name_or_path": model(), "seq_length": 7, "seq_length_is_variable": False},
        "no length": {"model_name_or_path": model(), "seq_length_is_variable": False},
    }
    said = {}
    for name, case in cases.items():
        with pytest.raises(ValueError) as caught:
            registered(**case)
        said[name] = str(caught.value)
    with pytest.raises(RuntimeError) as other:
        registered(model_name_or_path=model(), sequence_parallel_size=1 + dist.get_world_size())
    said["size"] = str(other.value)
    return said


def test_what_is_refused_before_training() -> None:
    for said in run_distributed(refusals, 2):
        assert "core_attn_implementation='flash_attention_2' does not match model config attn_impl" in said["mismatch"]
        assert "Load the model with attn_implementation='sdpa'" in said["eager"]
        assert "Attention head count 1 is not divisible by SP size 2" in said["heads"]
        assert "seq_length=7 isn't divisible by sp-size=2" in said["length"]
        assert "give seq_length, or seq_length_is_variable=True" in said["no length"]
        assert "RobertaModel counts its position_ids from the tokens" in said["positions"]
        assert "no layer of BloomModel takes its attention from transformers" in said["no interface"]
        assert "BartForCausalLM takes no position_ids, so each part" in said["no positions"]
        assert "Llama4TextAttention counts tokens by itself" in said["own positions"]
        assert "sequences are divided over 2 processes here, and are asked to be over 3" in said["size"]


def others() -> float:
    """A model that was not registered computes as before, beside one that was; and the name is DeepSpeed's."""
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    left, divided = model(), model()
    ids = IDS[:, : 3 + dist.get_rank()]  # which no exchange would get through
    expected = left(input_ids=ids).logits
    mpu = registered(model_name_or_path=divided)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not before
    assert division_of(divided.model.layers[0].self_attn) is not None
    assert registered(model_name_or_path=divided, sequence_parallel_size=1) is None
    assert mpu.get_sequence_data_parallel_world_size() == 2
    return float((left(input_ids=ids).logits - expected).abs().max())


def test_other_models_are_left_alone() -> None:
    assert run_distributed(others, 2) == [0.0, 0.0]


def sharing() -> float:
    """Two models that share an activation, a rotary embedding and an attention layer: both have the masks of packed
    documents, the first one too when the second has been divided, and when that is over."""
    first, second = model(), model()
    second.model.rotary_emb, second.model.layers[0] = first.model.rotary_emb, first.model.layers[0]
    second.model.layers[1].mlp.act_fn = first.model.layers[1].mlp.act_fn
    nn.init.normal_(second.lm_head.weight, std=0.02)
    plain = copy.deepcopy((first, second))
    for each in (first, second):
        registered(model_name_or_path=each, disable_in_eval=True)
    ids, positions = IDS[:1].repeat(1, 2)[:, :8], torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    half, worst = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4), 0.0
    for divided in ((0, 1), (0,)):
        for which in divided:
            for training in (True, False):
                mine, theirs = (first, second)[which].train(training), plain[which].train(training)
                part = half if training else slice(None)
                found = mine(input_ids=ids[:, part], position_ids=positions[:, part]).logits
                expected = theirs(input_ids=ids, position_ids=positions).logits[:, part]
                worst = max(worst, float((found - expected).abs().max()))
        release(second)
    return worst


def test_models_that_share_modules() -> None:
    assert max(run_distributed(sharing, 2)) < 1e-6


def by_hand() -> float:
    """The module itself, around a core: DeepSpeed's shapes."""
    core = ALL_ATTENTION_FUNCTIONS["sdpa"]
    layer = model().model.layers[0].self_attn
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, h, 8, 8, generator=generator) for h in (4, 2, 2))
    expected, _ = core(layer, query, key, value, None)
    attention = UlyssesSPAttentionHF(
        attn=core,
        batch_size=1,
        attn_head_count=4,
        attn_head_size=8,
        kv_head_count=2,
        num_hidden_layers=2,
        process_group=dist.group.WORLD,
        seq_length_is_variable=True,
    )
    half = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    parts = [each[:, :, half] for each in (query, key, value)]
    positions = torch.arange(8)[None, half]
    got, _ = attention(layer, *parts, None, position_ids=positions)
    assert got.shape == (1, 4, 32)
    assert layer.num_key_value_groups == 2  # as it was
    return float((got - expected[:, half].flatten(2)).abs().max())


def test_the_module_by_hand() -> None:
    assert max(run_distributed(by_hand, 2)) < 1e-6


class Unreached(nn.Module):
    """Attention that is not transformers'."""

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return hidden_states, None


def unreached() -> str:
    net = model()
    net.model.layers[1].self_attn = Unreached()
    engine, *_ = initialize(model=net, config=CONFIG)
    with pytest.raises(ValueError) as caught:
        engine(input_ids=IDS[:, :3])
    return str(caught.value)


def test_layers_that_would_see_a_part_alone() -> None:
    for text in run_distributed(unreached, 2):
        assert "only 1 of 2 layers of LlamaForCausalLM called attention 'sdpa' of transformers" in text
