"""Random layer-token drop: numbers are those of a plain model whose blocks are called by hand with the kept tokens."""

from __future__ import annotations

import logging
import zlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.data_pipeline.data_routing.basic_layer import RandomLayerTokenDrop
from deepspeed.runtime.data_pipeline.data_routing.helper import convert_to_random_ltd, save_without_random_ltd
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from ds_hf import initialize
from ds_hf.data.layer_tokens import draw
from ds_hf.errors import ConfigError, DsHfError
from tests.compat.common import run_user_code
from tests.compat.trainer_code import config as trainer_config
from tests.compat.trainer_code import fit, tiny_llama
from tests.helpers.distributed import run_distributed
from tests.helpers.logs import Lines

LENGTH, LAYERS, WHICH = 12, 4, [1, 2]
KEPT = [6, 8, 10, 12, 12, 12]  # in steps from 0


def section(**changes: Any) -> dict[str, Any]:
    schedule = {
        "min_value": 6,
        "max_value": LENGTH,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 3, "seq_per_step": 2},
    }
    inner = {
        "enabled": True,
        "total_layer_num": LAYERS,
        "random_ltd_layer_num": 2,
        "random_ltd_layer_id": WHICH,
        "model_mask_name": "attention_mask",
        "model_type": "decoder",
        "hidden_state_order": "batch_seq_dim",
        "random_ltd_schedule": schedule,
        **changes,
    }
    return {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": inner}}}


def settings(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        **section(),
        **more,
    }


def model() -> Any:
    return tiny_llama(num_hidden_layers=LAYERS).train()


def batch(step: int, rank: int) -> dict[str, Tensor]:
    tokens = torch.randint(1, 128, (2, LENGTH), generator=torch.Generator().manual_seed(10 * step + rank))
    mask = torch.ones_like(tokens)
    mask[0, 9:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def loss_by_hand(plain: Any, step: int, rank: int) -> Tensor:
    """Blocks are called one after another: the named ones with rows, positions and masks that are written out here."""
    given, base = batch(step, rank), plain.model
    hidden = base.embed_tokens(given["input_ids"])
    everyone = torch.arange(LENGTH).expand(2, LENGTH)
    for index, block in enumerate(base.layers):
        places = everyone
        if index in WHICH and KEPT[step] < LENGTH:
            seed = zlib.crc32(f"1234 {step} 1 {index} {rank}".encode())
            places = draw(2, LENGTH, KEPT[step], seed, hidden.device)
        seen = torch.gather(given["attention_mask"], 1, places).bool()
        mask = (places[:, None, :, None] >= places[:, None, None, :]) & seen[:, None, None, :]
        rows = torch.stack([hidden[sample, places[sample]] for sample in range(2)])
        rotary = base.rotary_emb(rows, position_ids=places)
        out = block(rows, attention_mask=mask, position_embeddings=rotary)
        parts = []
        for sample in range(2):
            whole = hidden[sample].clone()
            whole[places[sample]] = out[sample]
            parts.append(whole)
        hidden = torch.stack(parts)
    logits = plain.lm_head(base.norm(hidden))
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), given["labels"][:, 1:].flatten())


def by_hand() -> list[float]:
    plain = model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    losses = []
    for step in range(6):
        loss = torch.stack([loss_by_hand(plain, step, rank) for rank in range(2)]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(engine: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = engine(**batch(step, dist.get_rank())).loss
        engine.backward(loss)
        engine.step()
        found = loss.detach().clone()
        dist.all_reduce(found)
        losses.append(found.item() / 2)
    return losses


def stages(folder: str, compiled: int | None) -> dict[int, Any]:
    found = {}
    for stage in (0, 1, 2, 3) if compiled is None else (compiled,):
        lives, losses = ((0, 2), (2, 6)), []
        for life, (first, last) in enumerate(lives):
            net = model()
            if stage % 2:
                net.gradient_checkpointing_enable({"use_reentrant": stage == 3})
            engine, *_ = initialize(model=net, config=settings(stage))
            if life:
                engine.load_checkpoint(folder, tag=f"stage{stage}")
            if compiled is not None:
                engine.compile(backend="aot_eager")
            losses += train(engine, first, last)
            if not life:
                engine.save_checkpoint(folder, tag=f"stage{stage}")
            drop = engine.kept["random_ltd"]
            counts = drop.saved, drop.total, engine.random_ltd_scheduler.state["consumed_layer_tokens"]
            engine.destroy()
        found[stage] = losses, counts
    return found


@pytest.mark.parametrize("compiled", [None, pytest.param(3, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_two_processes_at_every_stage_resumed_in_the_middle(tmp_path: Path, compiled: int | None) -> None:
    wanted = by_hand()
    for found in run_distributed(stages, 2, str(tmp_path), compiled, timeout=90):
        for losses, (saved, total, consumed) in found.values():
            assert losses == pytest.approx(wanted, abs=3e-5)
            assert saved == 2 * 2 * sum(LENGTH - keep for keep in KEPT)
            assert total == 2 * 2 * 6 * LENGTH
            assert consumed == sum(4 * (2 * keep + 2 * LENGTH) for keep in KEPT)


def one_process() -> dict[str, Any]:
    found: dict[str, Any] = {}
    engine, *_ = initialize(model=model(), config=settings(0))
    assert convert_to_random_ltd(engine, LlamaDecoderLayer) is engine
    found["names"] = sorted(save_without_random_ltd(engine)) == sorted(model().state_dict())
    first, second = engine(**batch(0, 0)).loss, engine(**batch(0, 1)).loss  # two calls before their backwards
    engine.backward((first + second) / 2)
    engine.step()
    with torch.no_grad():
        engine.eval()
        found["evaluation"] = engine(**batch(1, 0)).loss.item() == engine.module(**batch(1, 0)).loss.item()
        engine.train()
    for name, more in (("packed", {"seq_idx": torch.zeros(2, LENGTH)}), ("none", {})):
        hook = (
            engine.kept["random_ltd"]
            .blocks[0]
            .register_forward_pre_hook(
                lambda block, args, kwargs, more=more: (args, {**kwargs, **more}), with_kwargs=True, prepend=True
            )
        )
        with pytest.raises(DsHfError) if more else nullcontext() as caught:
            engine(**batch(1, 0))
        hook.remove()
        found[name] = str(caught.value) if more else ""
    engine.destroy()
    less = section()
    less["data_efficiency"]["data_routing"]["random_ltd"]["random_ltd_schedule"]["max_value"] = 10
    engine, *_ = initialize(model=model(), config={**settings(0), **less})
    logging.getLogger("ds_hf").addHandler(lines := Lines(logging.WARNING))
    for _ in range(2):
        engine(**batch(0, 0))
    found["less"] = lines.texts
    engine.destroy()
    for name, changes in (
        ("range", {"random_ltd_layer_id": [1, 9], "total_layer_num": None}),
        ("depth", {"total_layer_num": 7}),
    ):
        with pytest.raises(ConfigError) as wrong:
            initialize(model=model(), config={**settings(0), **section(**changes)})
        found[name] = str(wrong.value)
    engine, *_ = initialize(model=model(), config={**settings(0), **section(hidden_state_order="seq_batch_dim")})
    with pytest.raises(DsHfError) as wrong:
        engine(**batch(0, 0))
    found["order"] = str(wrong.value)
    return found


def test_names_calls_and_models_that_do_not_fit() -> None:
    (found,) = run_distributed(one_process, 1, timeout=60)
    assert found["names"]
    assert found["evaluation"]
    assert "does not know how to take the kept tokens' part of seq_idx (2, 12)" in found["packed"]
    (less,) = found["less"]
    assert "ends at 10 tokens (max_value), and a batch has 12 positions" in less
    assert "names block 9, and LlamaForCausalLM has 4" in found["range"]
    assert "hidden states (2, 12, 32) and places of 12 tokens" in found["order"]
    assert "set it to batch_seq_dim" in found["order"]
    assert "LlamaForCausalLM has no list of 7 blocks to choose from: there are model.layers (4)" in found["depth"]


def trainer(folder: str) -> Any:
    more = {"gradient_checkpointing": True, "gradient_accumulation_steps": 2}
    given = section(total_layer_num=None, random_ltd_layer_id=[1], random_ltd_layer_num=1)
    return {stage: fit(folder, trainer_config(stage, **given), **more) for stage in (0, 3)}


def test_the_trainer_gives_the_same_numbers_at_every_stage(tmp_path: Path) -> None:
    for found in run_user_code(trainer, str(tmp_path)):
        assert [row["loss"] for row in found[0] if "loss" in row] == pytest.approx(
            [row["loss"] for row in found[3] if "loss" in row], abs=1e-5
        )


def test_a_wrapped_layer_drops_by_itself() -> None:
    class Doubles(nn.Module):
        def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor]:
            assert attention_mask is None or attention_mask.shape[-1] == hidden.shape[1]
            return (hidden * 2,)

    layer = RandomLayerTokenDrop(Doubles())
    hidden = torch.ones(2, LENGTH, 3)
    assert layer(hidden)[0].sum() == 2 * hidden.sum()
    from deepspeed.runtime.data_pipeline.data_routing.scheduler import RandomLTDScheduler

    config = {**section()["data_efficiency"]["data_routing"]["random_ltd"], "global_batch_size": 2}
    layer.init_config(config, RandomLTDScheduler(config), 0)
    assert layer(hidden, attention_mask=torch.ones(2, LENGTH))[0].sum() == hidden.sum() + 2 * 6 * 3
    assert layer.eval()(hidden)[0].sum() == 2 * hidden.sum()
