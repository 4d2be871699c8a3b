"""PEFT's methods that read the weights they adapt, made around a model that ``from_pretrained`` has sharded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations import HfDeepSpeedConfig

import ds_hf
from ds_hf.engine.zero.access import safe_get_full_fp32_param
from ds_hf.engine.zero.at_rest import Released
from ds_hf.errors import DsHfError
from tests.helpers.distributed import run_distributed
from tests.helpers.parity import base_config, full_weights

TARGETS = ["q_proj", "down_proj"]
SHAPE = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings=True,
)  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "LoHa": {"r": 2},  # takes the shape of the weight
    "Delora": {"r": 2},  # its norms
    "OSF": {},  # its singular vectors
    "Frod": {},  # all of them, before any adapter is there
    "LNTuning": {"target_modules": ["input_layernorm"]},  # copies them
    "AdaLora": {"target_r": 2, "init_r": 4, "total_step": 50, "tinit": 1, "tfinal": 1},  # reads its own in the forward
}
LORA: dict[str, dict[str, Any]] = {
    "copied head": {"modules_to_save": ["lm_head"], "ensure_weight_tying": True},  # takes the shape of the copy
    "tokens": {"trainable_token_indices": [1, 5]},  # copies rows
    "eva": {"init_lora_weights": "eva", "eva_config": peft.EvaConfig(rho=1.0)},  # runs the model
    "loaded": {"modules_to_save": ["lm_head"]},  # from a file, into copies
}


def adapted(model: LlamaForCausalLM, method: str, saved: Path) -> Any:
    torch.manual_seed(5)
    if method == "loaded":
        return peft.PeftModel.from_pretrained(model, saved, is_trainable=True).train()
    kind, given = ("Lora", {"r": 2, **LORA[method]}) if method in LORA else (method, METHODS[method])
    config = getattr(peft, f"{kind}Config")(**{"task_type": "CAUSAL_LM", "target_modules": TARGETS, **given})
    found = peft.get_peft_model(model, config).train()
    if method == "eva":
        samples = [{"input_ids": tokens(step, 9), "attention_mask": torch.ones(2, 8)} for step in range(3)]
        peft.initialize_lora_eva_weights(found, samples, show_progress_bar=False)
    return found


def tokens(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(10 * step + rank))


def train_both(folder: str, methods: list[str], saved: str) -> dict[str, tuple[float, float]]:
    """The largest difference of the losses and of the weights from PEFT's alone, after two steps, by method."""
    found = {}
    rank, world = dist.get_rank(), dist.get_world_size()
    rate = {"type": "SGD", "params": {"lr": 0.1}}
    settings = base_config(3, optimizer=rate, gradient_clipping=0.0)
    for method in methods:
        plain = adapted(LlamaForCausalLM.from_pretrained(folder), method, Path(saved))
        optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
        losses = []
        for step in range(2):
            for each in range(world):
                loss = plain(input_ids=tokens(step, each), labels=tokens(step, each)).loss
                (loss / world).backward()
                losses += [loss.item()] if each == rank else []
            optimizer.step()
            optimizer.zero_grad()

        alive = HfDeepSpeedConfig({**settings, "train_micro_batch_size_per_gpu": 2, "train_batch_size": 2 * world})
        model = adapted(LlamaForCausalLM.from_pretrained(folder), method, Path(saved))
        resting = {type(param) for param in model.parameters() if not param.numel()}
        assert resting, "from_pretrained has sharded it"
        assert all(issubclass(kind, Released) for kind in resting), resting
        engine = ds_hf.initialize(model=model, config=settings)[0]
        far = []
        for step in range(2):
            loss = engine(input_ids=tokens(step, rank), labels=tokens(step, rank)).loss
            engine.backward(loss)
            engine.step()
            far.append(abs(loss.item() - losses[step]))
        if method == "loaded":  # and another one beside the engine
            for each in (plain, model):
                each.load_adapter(saved, "later")
                each.set_adapter("later")
            far.append((engine(tokens(9, 0)).logits - plain(tokens(9, 0)).logits).abs().max().item())
        weights, wanted = full_weights(model), plain.state_dict()
        assert weights.keys() <= wanted.keys()
        found[method] = max(far), max((weights[n].float() - wanted[n].float()).abs().max().item() for n in weights)
        engine.destroy()
        del alive
    return found


def test_methods_that_read_weights_at_stage_3(tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = LlamaForCausalLM(SHAPE)
    model.save_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=TARGETS, **LORA["loaded"])
    adapter = peft.get_peft_model(model, lora)
    for param in adapter.parameters():
        param.data += 0.01 * param.requires_grad
    adapter.save_pretrained(tmp_path / "adapter")
    methods = [method for method in METHODS if hasattr(peft, f"{method}Config")]
    assert "LoHa" in methods
    folders = str(tmp_path / "base"), str(tmp_path / "adapter")
    for found in run_distributed(train_both, 2, folders[0], [*methods, *LORA], folders[1]):
        for method, (loss, weights) in found.items():
            assert loss == pytest.approx(0, abs=2e-6), method
            assert weights == pytest.approx(0, abs=2e-6), method


def adapters_that_come_late(saved: str) -> list[str]:
    """What is said where processes divide the layers by then."""
    model = peft.PeftModel.from_pretrained(LlamaForCausalLM(SHAPE), saved, is_trainable=True)
    settings = {**base_config(2), "tensor_parallel": {"autotp_size": 2}}
    engine = ds_hf.initialize(model=model, config=settings)[0]
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=TARGETS)
    told = []
    for late in (
        lambda: model.load_adapter(saved, "default"),
        lambda: model.load_adapter(saved, "later"),
        lambda: model.add_adapter("new", lora),
    ):
        with pytest.raises(DsHfError) as caught:
            late()
        told.append(str(caught.value))
    engine.destroy()
    return told


def test_an_adapter_for_layers_that_processes_divide_comes_before_the_engine(tmp_path: Path) -> None:
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=TARGETS)
    peft.get_peft_model(LlamaForCausalLM(SHAPE), lora).save_pretrained(tmp_path)
    for same, other, new in run_distributed(adapters_that_come_late, 2, str(tmp_path)):
        assert "load the adapter 'default' before initialize()" in same
        assert "the adapter 'later' came to model.layers.0.self_attn.q_proj, which processes divide" in other
        assert "the adapter 'new' came to" in new


def resized(seed: int, stage: int, rows: int = 40) -> Any:
    """Adapters on a base whose frozen embedding and head the script has resized, with rows that ``seed`` draws."""
    torch.manual_seed(2)
    model = LlamaForCausalLM(SHAPE)
    torch.manual_seed(seed)
    model.resize_token_embeddings(rows, mean_resizing=False)
    torch.manual_seed(5)
    net = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=TARGETS))
    return ds_hf.initialize(model=net, config=base_config(stage))[0]


def resume_with_other_rows(folder: str, stages: tuple[int, int]) -> tuple[bool, bool, list[str]]:
    """Whether the whole weights, and the model that resumed, have the rows that were trained on; of a base that kept
    its size, the names of frozen weights that are gathered."""
    first = resized(9, stages[0])
    first.save_checkpoint(folder, exclude_frozen_parameters=True)
    gathered = first._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    name = "base_model.model.model.embed_tokens.weight"
    wanted = full_weights(first.module)[name]
    whole = gathered is None or (
        torch.equal(gathered[name], wanted) and torch.equal(gathered["base_model.model.lm_head.weight"], wanted)
    )
    again = resized(77, stages[1])
    assert not torch.equal(full_weights(again.module)[name], wanted)
    again.load_checkpoint(folder)
    same = torch.equal(full_weights(again.module)[name], wanted)
    kept = resized(9, stages[0], SHAPE.vocab_size)._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    return whole, same, [name for name in kept or () if "lora_" not in name and "embed" in name]


@pytest.mark.parametrize("stages", [(3, 0), (2, 3)])
def test_rows_of_a_resized_embedding_are_saved_with_adapters(stages: tuple[int, int], tmp_path: Path) -> None:
    for whole, same, kept in run_distributed(resume_with_other_rows, 2, str(tmp_path), stages):
        assert whole
        assert same
        assert not kept


def allocate(stage: int, bf16: bool) -> tuple[float, bool, int, str]:
    """The largest difference of weights from PEFT's alone, whether the same ranks are left, how many masters are 0, and
    what is said where the gradients are gone."""
    rank, world = dist.get_rank(), dist.get_world_size()
    settings = {"init_r": 4, "target_r": 2, "tinit": 1, "tfinal": 1, "deltaT": 1, "total_step": 4}
    lora = peft.AdaLoraConfig(task_type="CAUSAL_LM", target_modules=TARGETS, **settings)

    def adapters() -> Any:
        torch.manual_seed(2)
        return peft.get_peft_model(LlamaForCausalLM(SHAPE), copy.deepcopy(lora)).train()

    plain, model = adapters(), adapters()
    optimizer = torch.optim.SGD([param for param in plain.parameters() if param.requires_grad], lr=0.1)
    more = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **({"bf16": {"enabled": True}} if bf16 else {})}
    settings_of_engine = base_config(stage, **more)
    alive = HfDeepSpeedConfig({**settings_of_engine, "train_batch_size": world})
    engine = ds_hf.initialize(model=model, config=settings_of_engine)[0]
    for step in range(4):
        for each in range(world):
            (plain(input_ids=tokens(step, each), labels=tokens(step, each)).loss / world).backward()
        engine.backward(engine(input_ids=tokens(step, rank), labels=tokens(step, rank)).loss)
        for net in (plain, model):
            net.base_model.update_and_allocate(step)
        if step == 3:  # the last of them writes, and no step comes after it
            break
        optimizer.step()
        optimizer.zero_grad()
        engine.step()
    trained = {name: param for name, param in model.named_parameters() if "lora_E" in name}
    masters = [safe_get_full_fp32_param(param) for param in trained.values()]
    zeros = sum(int((master == 0).sum()) for master in masters if master is not None)
    weights, wanted = full_weights(model), dict(plain.named_parameters())
    worst = max((weights[name].float() - param.detach()).abs().max().item() for name, param in wanted.items())
    kept = model.peft_config["default"].rank_pattern == plain.peft_config["default"].rank_pattern
    engine.step()
    engine.backward(engine(input_ids=tokens(4, rank), labels=tokens(4, rank)).loss)
    engine.step()
    with pytest.raises(DsHfError) as caught:
        model.base_model.update_and_allocate(1)
    engine.destroy()
    del alive
    return worst, kept, zeros, str(caught.value)


@pytest.mark.parametrize(("stage", "bf16"), [(3, False), (2, True)])
def test_adalora_allocates_where_weights_are_divided_or_rounded(stage: int, bf16: bool) -> None:
    for worst, kept, zeros, told in run_distributed(allocate, 2, stage, bf16):
        assert worst == pytest.approx(0, abs=0.05 if bf16 else 2e-6)
        assert bf16 or kept
        assert zeros >= 8, "half of four ranks of four layers"
        assert "before engine.step()" in told
