"""Whether samples count by themselves: what a search may divide otherwise, and what it may not."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from ds_hf import initialize
from ds_hf.deepspeed_api.pipeline import PipelineModule
from ds_hf.engine.observe.probes.trial.alone import takes_statistics, why_not_alone
from ds_hf.engine.observe.probes.trial.batches import Batch
from ds_hf.engine.observe.probes.trial.driver import attach
from ds_hf.engine.observe.probes.trial.memory import memory_meter
from ds_hf.engine.observe.probes.trial.replay import Replay
from ds_hf.measure.protocol import TrialRequest, read_events
from tests.helpers.distributed import run_distributed

WIDTH = 8


class Mean(nn.Module):
    """A mean over samples, behind dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.body(x).square().mean()}


class Sum(Mean):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.body(x).square().sum()}


class Contrastive(Mean):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": cross_entropy(self.body(x) @ x.T, torch.arange(len(x)))}


class Noisy(Mean):
    """Draws in evaluation, too, as an autoencoder does: two losses of one sample differ, which tells nothing."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().forward(x + torch.randn_like(x))


class TrainsOnly(Mean):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) if self.training else x


class Normed(Mean):
    def __init__(self) -> None:
        super().__init__()
        self.body.append(nn.BatchNorm1d(WIDTH))


class Frozen(Normed):
    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.body[-1].eval()
        return self


def make_engine(model: nn.Module, stage: int = 1) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }  # fmt: skip
    return initialize(model=model, config=config)[0]


def surveyed(model: nn.Module, batch: dict[str, Any], folder: str, stage: int = 1) -> list[dict[str, Any]]:
    engine = make_engine(model, stage)
    file = f"{folder}/events.jsonl"
    attach(engine, TrialRequest(events=file, finish=False, steps=2, points=((2, 1),), survey=True, natural_steps=0))
    engine.backward(engine(**batch)["loss"])
    engine.step()
    if engine.axis.rank:
        return []
    return [event for event, _ in read_events(Path(file))]


def why(events: list[dict[str, Any]]) -> str | None:
    return next((event["why"] for event in events if event["event"] == "together"), None)


def of_each() -> dict[str, Any]:
    found = {}
    for number, kind in enumerate((Mean, Sum, Contrastive, Noisy, TrainsOnly, Normed, Frozen)):
        torch.manual_seed(number)
        engine = make_engine(kind().train())
        training = [each.training for each in engine.module.modules()]
        batch = Batch((), {"x": torch.randn(2, WIDTH)}, 2)
        replay = Replay(engine, batch, TrialRequest("unused"), memory_meter(engine, None), lambda *_, **__: None)
        with replay.prepared():
            found[kind.__name__] = takes_statistics(engine.module) or why_not_alone(replay)
        assert [each.training for each in engine.module.modules()] == training
    return found


def test_losses_of_samples_that_count_together() -> None:
    (found,) = run_distributed(of_each, 1)
    together = "its samples count together (a contrastive loss, or a sum)"
    assert found == {
        "Mean": None, "Sum": together, "Contrastive": together, "Noisy": None, "TrainsOnly": None,
        "Normed": "batch norm takes its statistics from each micro-batch", "Frozen": None,
    }  # fmt: skip


def one_sample(folder: str) -> list[list[str]]:
    events = surveyed(Normed(), {"x": torch.randn(2, WIDTH)}, folder)
    return [[event["event"], event.get("text", "")] for event in events]


def test_a_model_that_takes_no_single_sample_is_timed_as_it_is(tmp_path: Path) -> None:
    """It ended the script, which trains."""
    (found,) = run_distributed(one_sample, 1, str(tmp_path))
    note = [text for event, text in found if event == "note"][-1]
    assert note.startswith("the model does not take one sample (ValueError: Expected more than 1 value per channel")
    assert [event for event, _ in found if event in ("together", "point")] == ["together"]


def clip() -> tuple[nn.Module, dict[str, Any]]:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    text = CLIPTextConfig(vocab_size=32, max_position_embeddings=8, eos_token_id=2, **small).to_dict()
    vision = CLIPVisionConfig(image_size=8, patch_size=4, **small).to_dict()
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))
    ids = torch.randint(3, 32, (2, 8))
    return model, {"input_ids": ids, "pixel_values": torch.randn(2, 3, 8, 8), "return_loss": True}


def llama() -> tuple[nn.Module, dict[str, Any]]:
    """As the Trainer calls it: the loss is a sum, divided by the items of the whole step."""
    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=2)  # fmt: skip
    ids = torch.randint(3, 32, (2, 8))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids, "num_items_in_batch": torch.tensor(64)}


def mixture() -> tuple[nn.Module, dict[str, Any]]:
    """Over 64 items of a step is the sum over tokens; the balance of its experts is over each micro-batch."""
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=1, head_dim=8,
        num_attention_heads=2, num_key_value_heads=2, num_experts=2, num_experts_per_tok=1, output_router_logits=True,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config), llama()[1]


def of_transformers(folder: str) -> list[Any]:
    torch.manual_seed(0)
    found = []
    for make in (clip, llama, mixture):
        (place := Path(folder) / make.__name__).mkdir(exist_ok=True)
        model, batch = make()
        found.append(why(surveyed(model, batch, str(place), stage=3)))
    return found


def test_models_of_transformers_divided_over_two_processes(tmp_path: Path) -> None:
    found = run_distributed(of_transformers, 2, str(tmp_path))[0]
    assert found[:2] == ["its samples count together (a contrastive loss, or a sum)", None]
    assert (found[2] or "").startswith("a part of its loss (the balance of experts) is not divided")


def with_another_loss(folder: str) -> list[str | None]:
    """Losses with which scripts go backward: the model's, scaled; another one beside it; another one."""
    found = []
    losses = (
        lambda out: out["loss"].float().mean() * 2 / 3,
        lambda out: out["loss"] + cross_entropy(out["y"] @ out["y"].T, torch.arange(2)),
        lambda out: cross_entropy(out["y"] @ out["y"].T, torch.arange(2)),
    )
    for number, loss_of in enumerate(losses):
        (place := Path(folder) / str(number)).mkdir()
        engine, file = make_engine(WithOutputs()), str(place / "events.jsonl")
        attach(engine, TrialRequest(file, finish=False, steps=2, points=((2, 1),), survey=True, natural_steps=1))
        for _ in range(2):
            engine.backward(loss_of(engine(torch.randn(2, WIDTH))))
            engine.step()
        found.append(why([event for event, _ in read_events(Path(file))]))
    return found


class WithOutputs(Mean):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.body(x)
        return {"loss": y.square().mean(), "y": y}


def test_a_script_that_trains_with_another_loss_than_its_models(tmp_path: Path) -> None:
    """Sizes are replayed with the model's: a contrastive loss beside it was divided otherwise without a word."""
    (found,) = run_distributed(with_another_loss, 1, str(tmp_path))
    another = "the script trains with a loss that is not the model's, of which nothing is known"
    assert found == [None, another, another]


def nce(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(out @ labels.T, torch.arange(len(out)))


class Nce(nn.Module):
    def forward(self, out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nce(out, labels)


class GivesLoss(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def of_pipelines(folder: str) -> list[str | None]:
    """Losses of a pipeline: a mean, a sum, contrastive ones, one of the last layer; and one of batch norm."""
    found, linear = [], lambda: nn.Linear(WIDTH, WIDTH)
    stages = dist.get_world_size()
    for number, (layers, loss) in enumerate(
        (
            ([linear(), linear()], mse_loss),
            ([linear(), linear()], partial(mse_loss, reduction="sum")),
            ([linear(), linear()], nce),
            ([linear(), linear()], Nce()),
            ([linear(), linear(), GivesLoss()], None),
            ([linear(), nn.BatchNorm1d(WIDTH)], mse_loss),
        )
    ):
        (place := Path(folder) / str(number)).mkdir(exist_ok=True)
        module = PipelineModule(layers, num_stages=stages, loss_fn=loss)
        engine, file = make_engine(module), str(place / "events.jsonl")
        attach(engine, TrialRequest(file, finish=False, steps=2, points=((2, 1),), survey=True, natural_steps=1))
        for _ in range(2):
            engine.train_batch(iter([(torch.randn(2, WIDTH), torch.randn(2, WIDTH))]))
        assert module.loss_fn is loss
        found.append(why([event for event, _ in read_events(Path(file))]) if not dist.get_rank() else None)
        engine.destroy()
    return found


def test_losses_of_pipelines_whose_samples_count_together(tmp_path: Path) -> None:
    """They were taken for means over samples, whatever the loss_fn."""
    found = run_distributed(of_pipelines, 2, str(tmp_path))[0]
    together = "its samples count together (a contrastive loss, or a sum)"
    assert found == [
        None, together, together, together,
        "the last layer of the pipeline gives the loss, of which nothing is known",
        "batch norm takes its statistics from each micro-batch",
    ]  # fmt: skip
