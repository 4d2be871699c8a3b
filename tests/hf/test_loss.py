"""What the Trainer makes of a loss on several processes; for divided sequences see ``compat/test_trainer_sequence``."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import SequentialSampler
from transformers import (
    BertForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    T5ForConditionalGeneration,
    Trainer,
)

from ds_hf.engine.modules.own_loss import ignores_items
from ds_hf.errors import ConfigError
from ds_hf.hf import loss
from tests.compat.common import largest_difference, run_user_code
from tests.compat.scripts.trainer_script import Sentences
from tests.compat.trainer_code import config, history, make_trainer, tiny_llama


class InOrder(Trainer):
    def _get_train_sampler(self, *args: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def _balanced(folder: Path, processes: int) -> list[dict[str, float]]:
    """Every process trains the same samples, so another number of them changes nothing."""
    samples = Sentences(16, seed=1)
    data = [samples[i] for first in range(0, 16, 2) for _ in range(processes) for i in (first, first + 1)]
    experts = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**{**tiny_llama().config.to_dict(), **experts}))
    given = {"train_dataset": data, "model": model}
    made = make_trainer(
        folder, None if processes == 1 else config(2), trainer_class=InOrder, trainer_arguments=given, max_steps=2
    )
    made.train()
    return history(made)


@pytest.mark.skipif(torch.cuda.is_available(), reason="gloo processes")
def test_the_balance_of_experts_is_not_multiplied_by_the_processes(tmp_path: Path) -> None:
    (alone,) = run_user_code(_balanced, tmp_path, 1, world_size=1)
    for found in run_user_code(_balanced, tmp_path, 2):
        assert len(found) == 2
        assert largest_difference(found, alone) < 1e-5


@pytest.mark.parametrize(("steps", "balances", "refused"), [(3, True, True), (1, True, False), (3, False, False)])
def test_trl_with_experts_over_divided_sequences(
    steps: int, balances: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SFTTrainer at sp 2 with three micro-batches made 7.22 of 5.20."""
    monkeypatch.setattr(loss, "_sequence_axis", lambda trainer: SimpleNamespace(world_size=2))
    args = SimpleNamespace(gradient_accumulation_steps=steps, dataloader_drop_last=True)
    made = SimpleNamespace(args=args, aux_loss_enabled=balances, compute_loss_func=lambda *_: None, label_smoother=None)
    if not refused:
        loss.prepare_loss(made, SimpleNamespace())
        return
    with pytest.raises(ConfigError, match="balance of experts"):
        loss.prepare_loss(made, SimpleNamespace())


@pytest.mark.parametrize(
    ("kind", "ignores"),
    [(BertForSequenceClassification, True), (T5ForConditionalGeneration, True), (MixtralForCausalLM, False)],
)
def test_models_that_leave_the_items_of_a_step_unused_are_told(
    kind: type[Any], ignores: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """T5 at 2 x 4 on two processes logged 51.1 where one process without accumulation has 6.3, as without an engine."""
    sizes = {"num_layers": 1, "num_hidden_layers": 1, "hidden_size": 16, "d_model": 16, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 16}
    torch.manual_seed(0)
    model = kind(kind.config_class(vocab_size=32, intermediate_size=16, d_ff=16, decoder_start_token_id=0, **sizes))
    model.eval()
    labels = torch.ones(2, 4, dtype=torch.long) if "Classification" not in kind.__name__ else torch.ones(2).long()
    losses = [
        model(input_ids=torch.ones(2, 4, dtype=torch.long), labels=labels, num_items_in_batch=n).loss for n in (3, 6)
    ]
    assert bool(losses[0] == losses[1]) is ignores, "what transformers does"
    assert ignores_items(model) is ignores
    args = SimpleNamespace(gradient_accumulation_steps=4, average_tokens_across_devices=True)
    made = SimpleNamespace(args=args, model=model, accelerator=SimpleNamespace(unwrap_model=lambda model: model))
    with caplog.at_level("WARNING"):
        loss._tell_of_means(made, 2)
        loss._tell_of_means(made, 2)
    assert caplog.text.count("8 times as large") == int(ignores)
    model.accepts_loss_kwargs = False
    assert not ignores_items(model)
