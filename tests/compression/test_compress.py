"""``init_compression`` and ``initialize``: which layers, what is refused with which words, scores in optimizers."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

from ds_hf import initialize
from ds_hf.compression import compression_scheduler, init_compression
from ds_hf.compression.compress import prepare_model
from ds_hf.compression.compressed import Compressed
from ds_hf.compression.schedule import schedule_of
from ds_hf.config import load_config
from ds_hf.config.types.root import MeshShape
from ds_hf.errors import ConfigError
from tests.compression.common import Net, batches, config, logged, method, net, run
from tests.helpers.interpreter import python

ROWS = {"row_pruning": method({"dense_ratio": 0.5}, ["fc1"], [["fc2"]])}
SCORES = {"row_pruning": method({"dense_ratio": 0.5}, ["fc1"], method="topk", schedule_offset=0)}


def test_layers_stay_what_they_are() -> None:
    model = net()
    before = dict(model.named_parameters())
    file = config({"weight_quantization": method({"target_bits": 8}, ["*"]), **ROWS})
    assert init_compression(model, file) is model
    assert dict(model.named_parameters()) == before
    assert isinstance(model.fc1, nn.Linear)
    assert isinstance(model.emb, nn.Embedding)
    kinds = {name: type(module).__name__ for name, module in model.named_children()}
    assert kinds == {
        "emb": "Embedding_Compress",
        "fc1": "LinearLayer_Compress",
        "fc2": "LinearLayer_Compress",
        "head": "LinearLayer_Compress",
    }
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert schedule_of(again).model is again  # type: ignore[union-attr]
    assert torch.equal(again(batches(1)[0, 0]), model(batches(1)[0, 0]))


def test_a_file_alone_compresses_as_the_call_does() -> None:
    curves = []
    for called in (True, False):
        model, file = net(), config(ROWS)
        if called:
            init_compression(model, file)
        engine = initialize(model=model, config=file)[0]
        curves.append(run(engine, batches(1)))
        assert engine.kept["compression"].schedule.training_steps == 6
        assert model.fc1.row_pruning_mask.sum() == 8
        engine.destroy()
    assert curves[0] == curves[1]


@pytest.mark.parametrize("given", ["optimizer", "groups", "parameters", "names", "nothing"])
def test_scores_train_however_the_optimizer_is_given(given: str) -> None:
    model, file = net(), config(SCORES)
    arguments: dict[str, Any] = {}
    if given == "optimizer":
        decay = [{"params": list(model.fc1.parameters())}, {"params": [model.head.bias], "weight_decay": 0.0}]
        arguments["optimizer"] = torch.optim.AdamW(decay, lr=1e-2)
        del file["optimizer"]
    elif given == "groups":
        arguments["model_parameters"] = [{"params": list(model.parameters()), "weight_decay": 0.0}]
    elif given == "parameters":
        arguments["model_parameters"] = model.parameters()
    elif given == "names":
        arguments["model_parameters"] = list(model.named_parameters())
    engine = initialize(model=model, config=file, **arguments)[0]
    scores = model.fc1.row_mask_scores
    before = scores.detach().clone()
    run(engine, batches(1, steps=3))
    assert not torch.equal(scores.detach(), before)


def test_scores_begin_the_same_everywhere() -> None:
    first, second = net(), net()
    for model in (first, second):
        init_compression(model, config(SCORES))
        torch.manual_seed(int(torch.randint(0, 99, ())))
    assert torch.equal(first.fc1.row_mask_scores, second.fc1.row_mask_scores)


GROUP = "/compression_training/{}/different_groups/one/"


@pytest.mark.parametrize(
    ("section", "pointer", "words"),
    [
        ({"row_pruning": method({}, ["fc9"])}, GROUP.format("row_pruning") + "modules/0", "no module's name"),
        ({"row_pruning": method({}, ["emb"])}, GROUP.format("row_pruning") + "modules/0", "finds Embedding"),
        ({"channel_pruning": method({}, ["fc1"])}, GROUP.format("channel_pruning") + "modules/0", "finds Linear"),
        (
            {"weight_quantization": method({"target_bits": 8}, ["fc"], quantize_groups=7)},
            "/compression_training/weight_quantization/shared_parameters/quantize_groups",
            "128 weights, which 7 groups",
        ),
        (
            {"sparse_pruning": method({}, ["fc1"], block_pattern="1:3")},
            "/compression_training/sparse_pruning/shared_parameters/block_pattern",
            "8 inputs, which 3",
        ),
        (
            {"head_pruning": method({}, ["fc2"], num_heads=3)},
            "/compression_training/head_pruning/shared_parameters/num_heads",
            "16 values, which 3 heads",
        ),
        (
            {"row_pruning": method({}, ["fc1"], [["fc"]])},
            GROUP.format("row_pruning") + "related_modules/0/0",
            "finds 2 modules for 1",
        ),
        (
            {
                "row_pruning": method({}, ["fc1"]),
                "head_pruning": method({}, ["fc2"], [["fc1"]], num_heads=4, method="l1"),
            },
            "/compression_training/head_pruning/different_groups/one",
            "fc1 would lose rows",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_said_before_training(section: dict[str, Any], pointer: str, words: str) -> None:
    for start in (init_compression, lambda model, file: initialize(model=model, config=file)):
        model = net()
        with pytest.raises(ConfigError) as caught:
            start(model, config(section))  # type: ignore[operator]
        faults = [fault for fault in caught.value.faults if fault.pointer == pointer]
        assert faults, caught.value
        assert words in faults[0].message
        assert faults[0].fix
        assert not any(isinstance(module, Compressed) for module in model.modules())


def test_related_modules_have_to_read_what_is_pruned() -> None:
    model = nn.ModuleDict({"one": nn.Linear(8, 6), "two": nn.Linear(5, 4)})
    with pytest.raises(ConfigError, match="one has 6 outputs, and two neither reads nor makes"):
        init_compression(model, config({"row_pruning": method({}, ["one"], [["two"]])}))


def test_what_cannot_shrink_is_refused() -> None:
    square = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("gate", "up", "down")})
    with pytest.raises(ConfigError, match="up is 8 x 8: whether it follows gate"):
        init_compression(square, config({"row_pruning": method({}, ["gate"], [["up", "down"]])}))
    tied = nn.ModuleDict({"emb": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False), "next": nn.Linear(8, 3)})
    tied["head"].weight = tied["emb"].weight  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="head shares its weight"):
        init_compression(tied, config({"row_pruning": method({}, ["head"], [["next"]])}))
    init_compression(tied, config({"row_pruning": method({}, ["head"])}))


def test_a_layer_in_two_groups_is_refused() -> None:
    section = {"row_pruning": method({}, ["fc1"])}
    section["row_pruning"]["different_groups"]["two"] = {"params": {}, "modules": ["fc"]}
    with pytest.raises(ConfigError, match="fc1 is in the group 'one'"):
        init_compression(net(), config(section))


def test_excluded_modules_are_left_alone() -> None:
    section = {"sparse_pruning": method({}, ["*"], excluded_modules=["head", "emb"])}
    model = init_compression(net(), config(section))
    assert [name for name, module in model.named_modules() if isinstance(module, Compressed)] == ["fc1", "fc2"]


def test_an_exclusion_that_finds_nothing_is_refused() -> None:
    section = {"sparse_pruning": method({}, ["*"], excluded_modules=["heads"])}
    with pytest.raises(ConfigError, match="'heads' is in no module's name") as caught:
        init_compression(net(), config(section))
    assert caught.value.faults[0].pointer.endswith("excluded_modules/0")


def test_keys_and_values_that_queries_share_are_counted() -> None:
    attention = nn.Module()
    attention.head_dim = 4  # type: ignore[assignment]
    for name, rows in (("q", 32), ("k", 8)):
        setattr(attention, name, nn.Linear(32, rows))
    attention.o = nn.Linear(32, 32)
    model = nn.ModuleDict({"attention": attention})
    heads = method({}, [r"\.o$"], [[r"\.q$", r"\.k$"]], num_heads=8)
    with pytest.raises(ConfigError, match="k has 8 outputs, which are no 8 heads of 4") as caught:
        init_compression(model, config({"head_pruning": heads}))
    assert "give 2" in caught.value.faults[0].fix
    heads["shared_parameters"]["num_heads"] = 2
    init_compression(model, config({"head_pruning": heads}))


def test_calls_that_contradict_each_other_are_refused() -> None:
    model = init_compression(net(), config(ROWS))
    with pytest.raises(ConfigError, match="before"):
        init_compression(model, config(ROWS))
    with pytest.raises(ConfigError, match="another section"):
        initialize(model=model, config=config(SCORES))
    with pytest.raises(ConfigError, match="mpu"):
        init_compression(net(), config(ROWS), mpu=object())


def test_layers_of_a_teacher_need_the_call() -> None:
    reduction = {"enabled": True, "module_name_prefix": "layers", "teacher_layer": [0]}
    with pytest.raises(ConfigError, match="no teacher") as caught:
        initialize(model=net(), config=config({"layer_reduction": reduction}))
    assert "teacher_model" in caught.value.faults[0].fix
    with pytest.raises(ConfigError, match="needs the teacher"):
        init_compression(net(), config({"layer_reduction": reduction}))


@pytest.mark.parametrize("shape", [MeshShape(tensor=2), MeshShape(pipe=2), MeshShape(expert=2)])
def test_layers_that_processes_divide_are_refused(shape: MeshShape) -> None:
    settings = replace(load_config(config(ROWS), world_size=1), mesh=shape)
    model = net()
    with pytest.raises(ConfigError, match="ZeRO's stages 0 to 3 alone"):
        prepare_model(settings, model, None, None)
    assert schedule_of(model) is None


def test_heads_that_cannot_be_loaded_are_told_before_training() -> None:
    model = BertModel(BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=4, vocab_size=8))
    names = [["self.query", "self.key", "self.value"]]
    section = {"head_pruning": method({}, ["attention.output.dense"], names, num_heads=4)}
    with logged() as lines:
        init_compression(model, config(section))
    assert any("heads of BertModel have hidden_size" in line for line in lines)


def test_mixture_of_quantization_compresses_all_layers() -> None:
    file = config({})
    del file["compression_training"]
    file["quantize_training"] = {
        "enabled": True,
        "quantize_bits": {"start_bits": 8, "target_bits": 6},
        "quantize_schedule": {"quantize_period": 1, "schedule_offset": 1},
    }
    engine = initialize(model=net(), config=file)[0]
    bits = []
    for step in batches(1):
        run(engine, step[None])
        bits.append({layer.weight_bits for layer in engine.module.children()})
    assert bits == [{8}, {7}, {6}, {6}, {6}, {6}]
    weight = engine.module.fc1.compressed()[0].detach()
    assert weight.unique().numel() <= 64


class ReadsWeights(Net):
    """One layer is called, of the other the weight is read."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.linear(self.emb(x), self.fc1.weight)
        return nn.functional.cross_entropy(self.head(self.fc2(hidden)), x)


def test_layers_that_are_not_called_are_told() -> None:
    engine = initialize(model=ReadsWeights(), config=config({"sparse_pruning": method({}, ["fc"])}))[0]
    with logged() as lines:
        run(engine, batches(1, steps=2))
    (line,) = [line for line in lines if "not called" in line]
    assert "fc1 (1 layers)" in line
    assert len(engine.module.fc1._forward_pre_hooks) == len(engine.module.head._forward_pre_hooks)


def test_torchs_kernel_for_evaluation_gives_way() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    section = {"sparse_pruning": method({"dense_ratio": 0.1}, ["linear"], schedule_offset=0)}
    schedule = compression_scheduler(init_compression(model, config(section)), section)
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), model.train()(x))
    assert schedule.chosen["layers.0.linear1 sparse"] == 0.1


def test_the_module_is_there_when_it_is_asked_for() -> None:
    code = "import deepspeed, sys; assert 'ds_hf.compression' not in sys.modules; print(deepspeed.compression.compress)"
    assert "compat/deepspeed/compression/compress.py" in python("-c", code).stdout


def test_a_scheduler_needs_a_model_that_is_prepared() -> None:
    with pytest.raises(ConfigError, match="not given"):
        compression_scheduler(net(), ROWS)


def test_a_model_without_the_section_is_left_alone() -> None:
    file = config({})
    engine = initialize(model=net(), config=file)[0]
    assert "compression" not in engine.kept
    assert not any(isinstance(module, Compressed) for module in engine.module.modules())
