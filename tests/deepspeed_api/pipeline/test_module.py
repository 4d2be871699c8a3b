"""Models of transformers as pipelines, against the same models whole."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_hf import initialize
from ds_hf.deepspeed_api.pipeline import PipelineModule
from ds_hf.engine.parallel.pipeline.topology import PipeModelDataParallelTopology
from ds_hf.engine.parallel.tensor.gathered import GatherReplacedLayerParams
from ds_hf.errors import ConfigError
from tests.helpers import experts
from tests.helpers.distributed import run_distributed

MICRO = 4
FOLDED = {"chunks": 2, "folded": True, "partition_method": "uniform"}


def model_of(kind: str, tied: bool) -> Any:
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "vocab_size": 64, "tie_word_embeddings": tied, "head_dim": 8}
    sizes |= {"num_key_value_heads": 2} if kind == "Qwen2" else {}  # which two tensor-parallel processes divide
    config = getattr(transformers, f"{kind}Config")(**sizes)
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(config).train()


def data(steps: int = 3) -> list[list[dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for step in range(steps):
        items = []
        for _ in range(MICRO):
            ids = torch.randint(0, 64, (2, 8 + step), generator=generator)
            mask = torch.ones_like(ids)
            mask[1, : 3 + step] = 0  # padding on the left
            items.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
        found.append(items)
    return found


def whole(kind: str, tied: bool) -> dict[str, Any]:
    model = model_of(kind, tied)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for items in data():
        total = []
        for item in items:
            loss = model(**item, use_cache=False).loss
            (loss / MICRO).backward()
            total.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(torch.stack(total).mean()))
    return {"losses": losses, "weights": {name: p.detach() for name, p in model.named_parameters()}}


def train(kind: str, tied: bool, stages: int, folder: str, how: str, **options: Any) -> dict[str, Any]:
    given: Any = model_of(kind, tied) if how == "model" else folder
    module = PipelineModule.from_transformers(given, stages, **options)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 1},
    }
    engine, *_ = initialize(model=module, optimizer=lambda params: torch.optim.SGD(params, lr=0.5), config=settings)
    first, *later = data()
    paired = [({key: item[key] for key in ("attention_mask", "input_ids")}, item["labels"]) for item in first]
    losses = [float(engine.train_batch(iter(items))) for items in (paired, *later)]
    found = {name: param.detach().clone() for name, param in module.named_parameters()}
    numel = sum(param.numel() for param in module.parameters())
    engine.export_pretrained(f"{folder}-out")
    engine.save_checkpoint(f"{folder}-saved")
    engine.destroy()
    dist.barrier()
    return {"losses": losses, "weights": found, "numel": numel}


@pytest.mark.parametrize(
    ("kind", "tied", "stages", "how", "options"),
    [
        ("Llama", True, 2, "folder", {}),
        pytest.param("Qwen3", False, 4, "model", {}, marks=pytest.mark.slow),
        pytest.param("Mistral", True, 4, "folder", {"activation_checkpoint_interval": 1}, marks=pytest.mark.slow),
        pytest.param("Llama", True, 2, "folder", {"chunks": 2, "partition_method": "uniform"}, marks=pytest.mark.slow),
        pytest.param(*("Llama", True, 2, "folder"), FOLDED, marks=pytest.mark.slow),
        pytest.param(*("Qwen3", False, 2, "model"), FOLDED, marks=pytest.mark.slow),
    ],
)
def test_a_model_trains_as_the_whole(
    kind: str, tied: bool, stages: int, how: str, options: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    model_of(kind, tied).save_pretrained(folder)
    wanted = whole(kind, tied)
    ranks = run_distributed(train, stages, kind, tied, stages, str(folder), how, timeout=120, **options)
    everything = sum(value.numel() for value in wanted["weights"].values())
    for one in ranks:
        assert one["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
        assert one["numel"] < everything
        for name, value in one["weights"].items():
            assert float((value - wanted["weights"][name]).norm() / wanted["weights"][name].norm()) < 1e-5, name
    assert {name for one in ranks for name in one["weights"]} == set(wanted["weights"])
    from transformers import AutoModelForCausalLM

    from ds_hf.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    exported = AutoModelForCausalLM.from_pretrained(f"{folder}-out")
    saved = get_fp32_state_dict_from_zero_checkpoint(f"{folder}-saved")
    for name, param in exported.named_parameters():
        assert torch.allclose(param, wanted["weights"][name], atol=1e-5), name
        assert torch.equal(param, saved[name]), name


def in_three_dimensions(kind: str, tied: bool, told: bool) -> dict[str, Any]:
    sizes: dict[str, Any] = {"topology": PipeModelDataParallelTopology(2, 2, 1)} if told else {"num_stages": 2}
    module = PipelineModule.from_transformers(model_of(kind, tied), **sizes)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {"autotp_size": 2},
    }
    engine, *_ = initialize(model=module, optimizer=lambda params: torch.optim.SGD(params, lr=0.5), config=settings)
    losses = [float(engine.train_batch(iter(items))) for items in data()]
    with GatherReplacedLayerParams([*module.parameters()]):
        weights = {name: param.detach().clone() for name, param in module.named_parameters()}
    return {"losses": losses, "weights": weights}


@pytest.mark.slow
@pytest.mark.parametrize(("tied", "told"), [(False, True), (True, True), (True, False)])
def test_stages_are_divided_by_the_plan_of_the_model(tied: bool, told: bool) -> None:
    """The plan names the embedding and the head, which one stage each has; tied ones stay whole on both. Without a
    topology the file says that processes of a stage share it."""
    sized = functools.partial(in_three_dimensions, "Qwen2", tied, told)
    wanted = whole("Qwen2", tied)
    for one in run_distributed(sized, 4, timeout=150):
        assert one["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
        for name, value in one["weights"].items():
            assert float((value - wanted["weights"][name]).norm() / wanted["weights"][name].norm()) < 1e-5, name


def refusals() -> list[str]:
    import transformers

    small = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 16}
    small |= {"intermediate_size": 8, "num_key_value_heads": 1}
    found = []
    for given in (
        transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=16),
        transformers.GraniteConfig(**small, embedding_multiplier=2.0),
        transformers.MixtralConfig(**small, num_local_experts=2, output_router_logits=True),
        experts.build("glm_moe_dsa"),
        torch.nn.Linear(2, 2),
    ):
        try:
            PipelineModule.from_transformers(given, 1)
        except ConfigError as error:
            found.append(str(error))
    return found


def refusals_of_two_stages() -> list[str]:
    from peft import LoraConfig, get_peft_model

    twice = model_of("Llama", True)
    twice.model.layers[3] = twice.model.layers[0]
    adapted = get_peft_model(model_of("Llama", False), LoraConfig(r=2, target_modules=["q_proj"]))
    found = []
    for given in (twice, adapted):
        with pytest.raises(ConfigError) as caught:
            PipelineModule.from_transformers(given, 2)
        found.append(str(caught.value))
    return found


def test_blocks_of_several_stages_that_are_one_and_adapters_around_a_model() -> None:
    for shared, adapted in run_distributed(refusals_of_two_stages, 2):
        assert "layers 1 and 4 (LlamaDecoderLayer) share the parameter self_attn.q_proj.weight" in shared
        assert "not PeftModel: give model.get_base_model()" in adapted


def test_models_that_cannot_be_cut_are_refused_by_name() -> None:
    plan, scaled, balance, shared, other = run_distributed(refusals, 1)[0]
    assert "GPT2LMHeadModel: it has no base_model_pp_plan" in plan
    assert "GraniteModel computes with hidden states outside of its layers" in scaled
    assert "MixtralForCausalLM has output_router_logits" in balance  # an IndexError of transformers in the first batch
    assert "layers of GlmMoeDsaModel hand on more than hidden states" in shared  # which tokens are attended to
    assert "give a model, a configuration, or a folder of transformers, not Linear" in other


ADAPTED: dict[str, dict[str, Any]] = {
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "both": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "copied": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
}


def adapted_model(kind: str) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(4)
    config = LoraConfig(r=2, init_lora_weights="modules_to_save" in ADAPTED[kind], **ADAPTED[kind])
    return get_peft_model(model_of("Llama", True), config).get_base_model()


def adapted_stages(kinds: list[str]) -> dict[str, dict[str, Any]]:
    """Losses of each kind, and the weights that a process has."""
    found = {}
    for kind in kinds:
        module = PipelineModule.from_transformers(adapted_model(kind), 2)
        optimizer = torch.optim.SGD([param for param in module.parameters() if param.requires_grad], lr=0.1)
        config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": MICRO, "gradient_clipping": 0.0}
        engine, *_ = initialize(model=module, config=config, optimizer=optimizer)
        losses = [float(engine.train_batch(iter([module.pair_of(item) for item in items]))) for items in data()]
        found[kind] = {"losses": losses, **{name: param.detach().clone() for name, param in module.named_parameters()}}
    return found


def test_adapters_of_tied_ends_train_as_in_the_whole() -> None:
    """The last stage has the embedding for its weight alone: an adapter of it there stayed as it was in the beginning;
    one of the head was a KeyError."""
    ranks = run_distributed(adapted_stages, 2, list(ADAPTED), timeout=60)
    for kind in ADAPTED:
        model = adapted_model(kind)
        optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
        for step, items in enumerate(data()):
            loss = sum(model(**item, use_cache=False).loss for item in items) / MICRO
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            for found in ranks:
                assert found[kind]["losses"][step] == pytest.approx(loss.item(), rel=1e-5)
        wanted = dict(model.named_parameters())
        assert wanted.keys() == {name for found in ranks for name in found[kind]} - {"losses"}
        for found in ranks:
            for name, value in found[kind].items():
                if name != "losses":
                    torch.testing.assert_close(value, wanted[name].detach(), rtol=1e-4, atol=1e-6)


class Stack(PipelineModule):
    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers  # before torch's own __init__, as plain values may be
        super().__init__(layers=[torch.nn.Linear(4, 4) for _ in range(num_layers)], num_stages=1)


def _stack() -> tuple[int, int]:
    stack = Stack(3)
    return stack.num_layers, len(stack.forward_funcs)


def test_subclasses_may_have_a_number_of_layers_of_their_own() -> None:
    assert run_distributed(_stack, 1, timeout=30) == [(3, 3)]
