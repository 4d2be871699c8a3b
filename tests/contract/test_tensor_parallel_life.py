"""What a cut model goes through beside plain steps: checkpoints at other meshes and stages, exports, adapters, compiled
blocks, generation, LAMB, gradient checkpointing, loading at stage 3; and bad input, refused by name."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hf import initialize
from ds_hf.checkpoint.deepspeed.write_universal import write_universal
from ds_hf.checkpoint.formats import open_source
from ds_hf.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from ds_hf.engine.modules import compiling
from ds_hf.engine.optim.lamb import FusedLamb
from ds_hf.engine.parallel.tensor import hosts, plan
from ds_hf.engine.zero.buffer import home_of
from ds_hf.engine.zero.cut import cut_of
from ds_hf.errors import ConfigError, DsHfError
from ds_hf.inference.layers import FAMILIES
from tests.contract.test_parity import ADAMW
from tests.contract.test_tensor_parallel import config
from tests.helpers.distributed import run_distributed
from tests.helpers.parity import full_weights
from tests.helpers.tensor import PARTITION, batches_of, build, loss_of, tensor_section, whole

GATHERS = {"stage3_gather_16bit_weights_on_model_save": True}


def engine_of(kind: str, tensor: int, stage: int, model: nn.Module | None = None, **more: Any) -> Any:
    settings = config(kind, tensor, stage, **more)
    settings["zero_optimization"].update(GATHERS)
    return initialize(model=build(kind) if model is None else model, config=settings)[0]


def steps(engine: Any, batches: Tensor) -> list[float]:
    """Losses, meaned over all processes."""
    losses = []
    for micro in batches[:, 0]:
        loss = loss_of(engine, micro[engine.mesh.sample_rank])
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    mean = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).tolist()  # type: ignore[no-any-return]


# -- checkpoints ---------------------------------------------------------------------------------------------------

# (tensor, stage) of four processes; every one is loaded by every other. Four samples a step, whatever the mesh.
MESHES = ((1, 2), (2, 1), (2, 3), (4, 0))


def batches_for(tensor: int, count: int) -> Tensor:
    """The same samples in each step for every mesh of four processes: [steps, 1, data, samples, tokens]."""
    data = 4 // tensor
    return batches_of(count, 1, 4).flatten(2, 3).view(count, 1, data, 8 // data, -1)


def mesh_engine(kind: str, tensor: int, stage: int) -> Any:
    settings = config(kind, tensor, stage)
    settings["train_micro_batch_size_per_gpu"] = 2 * tensor
    settings["zero_optimization"].update(GATHERS)
    if tensor == 1:
        del settings["tensor_parallel"]
    return initialize(model=build(kind), config=settings)[0]


def save_at(folder: str, kind: str, tensor: int, stage: int) -> tuple[list[float], dict[str, Tensor]]:
    engine = mesh_engine(kind, tensor, stage)
    batches = batches_for(tensor, 4)
    steps(engine, batches[:2])
    engine.save_checkpoint(folder)
    weights = engine._zero3_consolidated_16bit_state_dict()
    if kind == "llama":
        engine.export_pretrained(f"{folder}/exported")
    later = steps(engine, batches[2:])
    engine.destroy()
    return later, weights


def load_at(folder: str, kind: str, tensor: int, stage: int) -> list[float]:
    engine = mesh_engine(kind, tensor, stage)
    engine.load_checkpoint(folder)
    later = steps(engine, batches_for(tensor, 4)[2:])
    engine.destroy()
    return later


def save_and_load(folder: str, kind: str, saved: Any, loaded: list[Any]) -> Any:
    later, weights = save_at(folder, kind, *saved)
    return later, weights, {mesh: load_at(folder, kind, *mesh) for mesh in loaded}


def check_saved(folder: Path, kind: str, saved: tuple[int, int], loaded: list[tuple[int, int]]) -> None:
    ranks = run_distributed(save_and_load, 4, str(folder), kind, saved, loaded, timeout=200)
    later, weights, found = ranks[0]
    for mesh, losses in found.items():
        assert losses == pytest.approx(later, rel=1e-6), mesh
        if mesh == saved:
            assert losses == later
    fp32 = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    shapes = {name: param.shape for name, param in build(kind).named_parameters()}
    assert {name: value.shape for name, value in weights.items()} == shapes
    for name, value in weights.items():
        assert torch.equal(fp32[name], value), name
    if kind == "llama":
        from transformers import LlamaForCausalLM

        exported = LlamaForCausalLM.from_pretrained(folder / "exported")
        for name, value in exported.named_parameters():
            assert torch.equal(value, weights[name]), name


def test_saved_cut_and_loaded_otherwise(tmp_path: Path) -> None:
    check_saved(tmp_path, "fused", (2, 3), [(2, 3), (4, 1)])


def test_keys_that_neighbours_share_are_saved_as_any_others(tmp_path: Path) -> None:
    check_saved(tmp_path, "few", (4, 3), [(2, 1)])


@pytest.mark.slow
@pytest.mark.parametrize("saved", MESHES)
@pytest.mark.parametrize("kind", ["llama", "fused", "few"])
def test_every_mesh_loads_what_any_other_saved(kind: str, saved: tuple[int, int], tmp_path: Path) -> None:
    check_saved(tmp_path, kind, saved, list(MESHES))


# -- ways of training ----------------------------------------------------------------------------------------------


def plain(model: nn.Module, optimizer: Any = None, count: int = 3) -> list[float]:
    rule = (optimizer or (lambda params: torch.optim.AdamW(params, **ADAMW)))(
        [param for param in model.parameters() if param.requires_grad]
    )
    losses = []
    for micro in batches_of(count, 1, 1)[:, 0, 0]:
        loss = loss_of(model, micro)
        rule.zero_grad()
        loss.backward()
        rule.step()
        losses.append(float(loss.detach()))
    return losses


def with_lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    targets = ["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj", "lm_head"]
    adapter = LoraConfig(r=4, target_modules=targets, init_lora_weights=False, modules_to_save=["v_proj"])
    model: nn.Module = get_peft_model(build("llama", num_key_value_heads=1), adapter)  # type: ignore[arg-type]
    return model


V_PROJ = "base_model.model.model.layers.0.self_attn.v_proj.weight"  # as PEFT calls it in files


def lora(stage: int) -> tuple[list[float], list[float], Any, float]:
    """Losses, shapes of what is saved, and how far logits of the merged model are from one process's."""
    from peft import get_peft_model_state_dict

    reference = with_lora()
    expected = plain(reference)
    engine = engine_of("llama", 2, stage, with_lora())
    found = steps(engine, batches_of(3, 1, 1))
    saved = engine._consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    far = 0.0
    if dist.get_rank() == 0:
        with pytest.raises(DsHfError, match=r"the part of .*q_proj.lora_B.default.weight that this process has"):
            get_peft_model_state_dict(engine.module)
        assert tuple(get_peft_model_state_dict(engine.module, saved)[V_PROJ].shape) == (4, 32)
    if stage < 3:
        prompt = batches_of(1, 1, 1)[0, 0, 0]
        merged = [model.merge_and_unload()(input_ids=prompt).logits for model in (reference, engine.module)]  # type: ignore[operator]
        far = float((merged[0] - merged[1]).detach().abs().max())
    return expected, found, saved and {name: tuple(value.shape) for name, value in saved.items()}, far


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_lora_on_cut_layers(stage: int) -> None:
    for rank, (expected, found, saved, far) in enumerate(run_distributed(lora, 2, stage, timeout=90)):
        assert found == pytest.approx(expected, rel=1e-5)
        assert far < 1e-4
        if rank == 0:
            shapes = {name: tuple(p.shape) for name, p in with_lora().named_parameters() if p.requires_grad}
            assert saved == shapes


# Adapters that look at all of an embedding or an output layer: the layer stays whole.
OF_WHOLE_LAYERS: dict[str, dict[str, Any]] = {
    "embedding": {"target_modules": ["embed_tokens", "q_proj", "lm_head"]},
    "DoRA of the output layer": {"target_modules": ["lm_head"], "use_dora": True},
    "rows of the embedding": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5, 7, 20, 21]},
}


def with_whole_layers(kind: str) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapter = LoraConfig(r=4, init_lora_weights=False, **OF_WHOLE_LAYERS[kind])
    model: nn.Module = get_peft_model(build("llama"), adapter)  # type: ignore[arg-type]
    return model


def adapters_of_whole_layers(stage: int) -> dict[str, tuple[list[float], list[float], list[str]]]:
    """By kind: losses of one process, of two, and what is said."""
    found = {}
    for kind in OF_WHOLE_LAYERS:
        with mock.patch.object(plan, "warn_once") as said:
            engine = engine_of("llama", 2, stage, with_whole_layers(kind))
        losses = steps(engine, batches_of(3, 1, 1))
        engine.destroy()
        found[kind] = plain(with_whole_layers(kind)), losses, [call.args[0] for call in said.call_args_list]
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_adapters_of_whole_layers(stage: int) -> None:
    for found in run_distributed(adapters_of_whole_layers, 2, stage, timeout=90):
        for expected, losses, _ in found.values():
            assert losses == pytest.approx(expected, rel=1e-5)
            assert losses[0] != losses[-1]
        (embedding,), (head,), (rows,) = (said for *_, said in found.values())
        assert "embed_tokens has an adapter (Embedding: lora_embedding_A, lora_embedding_B)" in embedding
        assert "lm_head has an adapter (Linear: lora_magnitude_vector, default) that looks at all of it" in head
        assert "some rows of base_model.model.model.embed_tokens are trained by themselves" in rows


def lamb() -> tuple[list[float], dict[int, list[float]]]:
    rule = functools.partial(FusedLamb, lr=1e-2)
    given = {"type": "Lamb", "params": {"lr": 1e-2}}
    found = {stage: steps(engine_of("llama", 2, stage, optimizer=given), batches_of(3, 1, 1)) for stage in (0, 1, 3)}
    return plain(build("llama"), rule), found


@pytest.mark.slow
def test_lamb_takes_norms_of_whole_parameters() -> None:
    for expected, found in run_distributed(lamb, 2, timeout=90):
        for losses in found.values():
            assert losses == pytest.approx(expected, rel=1e-5)


def compiled() -> tuple[list[float], list[float], Any, list[str]]:
    """Losses, and graphs and breaks; and what is said where each block has a graph of its own for its cache."""
    engine = engine_of("llama", 2, 1, build("llama", use_cache=False), ds_hf={"compile": "blocks"})
    found = steps(engine, batches_of(3, 1, 1))
    report = engine.compile_report()
    engine.destroy()
    messages: list[str] = []
    compiling.logger.warning = lambda text, *args: messages.append(text % args)  # type: ignore[method-assign, assignment]
    for use_cache in (True, False):
        torch._dynamo.reset()
        other = engine_of("llama", 2, 1, build("llama", use_cache=use_cache))
        other.compile(backend="eager")
        steps(other, batches_of(2, 1, 1))
        other.destroy()
    return plain(build("llama")), found, (report.graphs, report.breaks), messages


@pytest.mark.slow
def test_compiled_blocks_share_one_graph() -> None:
    for rank, (expected, found, (graphs, breaks), said) in enumerate(run_distributed(compiled, 2, timeout=150)):
        assert found == pytest.approx(expected, rel=1e-5)
        assert (graphs, breaks) == (1, {})  # of three blocks, as of a model that is not cut
        about = [text for text in said if "graphs for" in text]
        assert len(about) == (rank == 0)
        assert all("3 graphs for 3 alike blocks" in text and "use_cache = False" in text for text in about)


def experts_by_universal(folder: str) -> dict[str, list[float]]:
    """Losses of the steps after a save: of the run itself, and of others that load what was made of it."""
    engine = engine_of("mixtral", 2, 1)
    assert cut_of(engine.module.model.layers[0].mlp.experts.gate_up_proj) is not None
    steps(engine, batches_of(4, 1, 1)[:2])
    engine.save_checkpoint(folder, tag="saved")
    found = {"saved": steps(engine, batches_of(4, 1, 1)[2:])}
    engine.destroy()
    if dist.get_rank() == 0:
        write_universal(open_source(Path(folder, "saved")), Path(folder, "universal"))
    dist.barrier()
    for tensor, stage in ((2, 3), (1, 2)):
        settings = config("mixtral", tensor, stage, checkpoint={"load_universal": True})
        batches = batches_of(4, 1, 1)[2:]
        if tensor == 1:  # each of two processes has one of the two samples
            del settings["tensor_parallel"]
            settings["train_micro_batch_size_per_gpu"] = 1
            batches = batches.transpose(2, 3)
        engine = initialize(model=build("mixtral"), config=settings)[0]
        engine.load_checkpoint(folder, tag="universal")
        found[f"tensor {tensor}"] = steps(engine, batches)
        engine.destroy()
    return found


@pytest.mark.slow
def test_cut_experts_in_a_universal_checkpoint(tmp_path: Path) -> None:
    for found in run_distributed(experts_by_universal, 2, str(tmp_path), timeout=90):
        assert found["tensor 2"] == pytest.approx(found["saved"], rel=1e-6)
        assert found["tensor 1"] == pytest.approx(found["saved"], rel=1e-5)


def other_ways(folder: str) -> dict[str, bool]:
    """Generation, copies, checkpointing of activations, loading at stage 3, a second engine; both processes compute one
    head of keys."""
    from transformers import LlamaForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    found, one = {}, functools.partial(build, "llama", num_key_value_heads=1)
    reference = one().eval()
    prompt = batches_of(1, 1, 1)[0, 0, 0][:, :4]
    settings: dict[str, Any] = {"max_new_tokens": 5, "pad_token_id": 3}
    expected = reference.generate(prompt, do_sample=False, **settings)
    torch.manual_seed(1)
    sampled = reference.generate(prompt, do_sample=True, **settings)
    engine = engine_of("llama", 2, 3, one())
    engine.eval()
    found["generate"] = torch.equal(engine.module.generate(prompt, do_sample=False, **settings), expected)
    torch.manual_seed(1)
    found["sample"] = torch.equal(engine.module.generate(prompt, do_sample=True, **settings), sampled)
    engine.destroy()
    again = engine_of("llama", 2, 1, engine.module)
    copied = copy.deepcopy(again.module)
    logits = again.module(input_ids=prompt).logits
    found["copy"] = torch.equal(copied(input_ids=prompt).logits, logits)
    found["again"] = torch.allclose(logits, reference(input_ids=prompt).logits, atol=1e-5)
    losses = plain(one())
    model = one()
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    model.train()
    trained = steps(engine_of("llama", 2, 3, model), batches_of(3, 1, 1))
    found["checkpointing"] = trained == pytest.approx(losses, rel=1e-5)
    if dist.get_rank() == 0:
        one().save_pretrained(folder)  # type: ignore[operator]
    dist.barrier()
    settings = config("llama", 2, 3)
    kept = HfDeepSpeedConfig(settings)
    loaded = LlamaForCausalLM.from_pretrained(folder)
    sharded = all(home_of(param) is not None and param.numel() == 0 for param in loaded.parameters())
    found["loaded"] = steps(engine_of("llama", 2, 3, loaded), batches_of(3, 1, 1)) == pytest.approx(losses, rel=1e-5)
    return {**found, "sharded": sharded, "kept": kept is not None}


def test_generation_copies_checkpointing_and_loading(tmp_path: Path) -> None:
    for found in run_distributed(other_ways, 2, str(tmp_path / "model"), timeout=120):
        assert all(found.values()), found


def whole_weights() -> dict[str, bool]:
    """Whole weights, and parts, into engines that divide layers or experts: they train on as plain torch does."""
    from tests.helpers.experts import build as experts
    from tests.helpers.experts import section

    found = {}
    trained, parts = build("llama"), build("llama")
    for param in (*trained.parameters(), *parts.parameters()):
        param.data.mul_(1.1)
    engine = engine_of("llama", 2, 3)
    engine.load_module_state_dict(trained.state_dict())
    losses = plain(trained)
    found["layers"] = steps(engine, batches_of(3, 1, 1)) == pytest.approx(losses, rel=1e-5)
    half = engine_of("llama", 2, 0, parts)
    engine = engine_of("llama", 2, 1)
    engine.load_module_state_dict(half.module_state_dict())
    found["parts"] = steps(engine, batches_of(3, 1, 1)) == pytest.approx(losses, rel=1e-5)
    divided, mixture = experts("mixtral"), experts("mixtral")
    for param in mixture.parameters():
        param.data.mul_(1.1)
    engine = initialize(model=divided, config=config("mixtral", 1, 2, expert_parallel=section(2)))[0]
    engine.load_module_state_dict(mixture.state_dict())
    wanted = dict(mixture.named_parameters())
    cut = [name for name, param in divided.named_parameters() if cut_of(param) is not None]
    found["experts"] = bool(cut) and all(torch.equal(value, wanted[name]) for name, value in engine.named_weights())
    return found


def test_whole_weights_are_loaded_into_divided_layers() -> None:
    for found in run_distributed(whole_weights, 2):
        assert all(found.values()), found


def of_alibi(stage: int) -> dict[str, bool]:
    """Bloom's generation, of a prompt with padding: the bias of all heads is made anew for each length."""
    reference, prompt = build("Bloom").eval(), batches_of(1, 1, 1)[0, 0, 0][:, :4]
    mask = torch.ones_like(prompt)
    mask[1, 0] = 0
    settings: dict[str, Any] = {"max_new_tokens": 6, "pad_token_id": 3, "do_sample": False, "attention_mask": mask}
    expected = reference.generate(prompt, **settings)
    beams = reference.generate(prompt, num_beams=2, **settings)
    engine = engine_of("Bloom", 2, stage)
    steps(engine, batches_of(1, 1, 1) * 0 + 5)  # a step of training between
    trained = engine.generate(prompt, **settings)
    with torch.no_grad():
        weights = whole(full_weights(engine.module), engine.module, engine.mesh.axis("tensor"))
        reference.load_state_dict(weights, strict=False)
    found = {"trained": torch.equal(trained, reference.generate(prompt, **settings))}
    engine.destroy()
    again = engine_of("Bloom", 2, stage)
    again.eval()
    found["module"] = torch.equal(again.module.generate(prompt, **settings), expected)
    found["beams"] = torch.equal(again.module.generate(prompt, num_beams=2, **settings), beams)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_generation_with_alibi(stage: int) -> None:
    for found in run_distributed(of_alibi, 2, stage, timeout=60):
        assert all(found.values()), found


def dropout() -> tuple[Tensor, Tensor]:
    """Of two processes that begin with other random states: what dropout outside of cut layers lets through."""
    torch.manual_seed(100 + dist.get_rank())
    model = build("llama", attention_dropout=0.0)
    model.model.layers[0].mlp.register_forward_hook(  # type: ignore[union-attr, index]
        lambda module, args, output: nn.functional.dropout(output, 0.5, module.training)
    )
    engine = engine_of("llama", 2, 1, model)
    micro = batches_of(1, 1, 1)[0, 0, 0]
    logits = engine(input_ids=micro).logits
    engine.backward(logits.square().mean())
    engine.step()
    uncut = {name: p for name, p in full_weights(engine.module).items() if "norm" in name}
    return logits.detach(), torch.cat([value.flatten() for value in uncut.values()])


def test_dropout_draws_the_same_outside_of_cut_layers() -> None:
    (logits, norms), (other, others) = run_distributed(dropout, 2)
    assert torch.equal(logits, other)
    assert torch.equal(norms, others)


def with_a_whole_head(stage: int, sizes: dict[str, Any]) -> tuple[list[float], list[float], bool]:
    model = build("llama", **sizes)
    expected = plain(build("llama", **sizes))
    engine = engine_of("llama", 2, stage, model)
    uncut = cut_of(engine.module.lm_head.weight) is None and cut_of(engine.module.model.layers[0].mlp.up_proj.weight)
    return expected, steps(engine, batches_of(3, 1, 1)), bool(uncut)


@pytest.mark.parametrize(("stage", "sizes"), [(1, {"tie_word_embeddings": True}), (3, {"vocab_size": 67})])
def test_tied_embeddings_and_odd_vocabularies_stay_whole(stage: int, sizes: dict[str, Any]) -> None:
    for expected, found, uncut in run_distributed(with_a_whole_head, 2, stage, sizes):
        assert found == pytest.approx(expected, rel=1e-5)
        assert uncut


# -- bad input -----------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"up_proj": nn.Linear(8, 8), "odd": nn.Linear(8, 8)}) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer["odd"](layer["up_proj"](x))  # type: ignore[index, operator]
        return x


def refusals() -> dict[str, str]:
    def refused(kind: str, model: nn.Module | None = None, tensor: int = 4, **more: Any) -> str:
        section = {**tensor_section("llama", tensor), **more.pop("section", {})}
        settings = {**config("llama", tensor, 1), "tensor_parallel": section, **more}
        try:
            initialize(model=build(kind) if model is None else model, config=settings)
        except ConfigError as error:
            return " ".join(str(error).split())
        return ""

    unknown = build("llama")
    unknown._tp_plan = {"model.layers.*.mlp.up_proj": "diagonal"}  # type: ignore[assignment]
    patched = build("llama")
    patched.model.layers[1].mlp.up_proj.forward = lambda x: x  # type: ignore[union-attr, index]
    before = build("llama")
    initialize(model=before, config=config("llama", 4, 1))[0].destroy()
    muon = {"type": "Muon", "params": {"lr": 1e-3}}
    wrong = [{"patterns": [".*qkv.weight"], "partition_type": "column", "shape": [[30, 16, 16], -1]}]
    return {
        "heads": refused("llama", build("llama", num_attention_heads=2, num_key_value_heads=2)),
        "keys": refused("llama", build("llama", hidden_size=48, num_attention_heads=12, num_key_value_heads=6)),
        "mlp": refused("llama", build("llama", intermediate_size=50)),
        "vocabulary": refused("llama", build("llama", vocab_size=66), section={"vocab_parallel_lm_head": True}),
        "rules": refused("", Plain()),
        "style": refused("", unknown),
        "forward": refused("", patched),
        "muon": refused("llama", tensor=2, optimizer=muon),
        "adafactor": refused("llama", tensor=2, optimizer={"type": "Adafactor", "params": {"lr": 1e-3}}),
        "shape": refused("fused", section={"partition_config": {**PARTITION, "layer_specs": wrong}}),
        "pattern": refused("fused", section={"partition_config": {"layer_specs": [{"patterns": ["("]}]}}),
        "endless": refused("fused", section={"partition_config": {"layer_specs": [{"patterns": ["(a+)+$"]}]}}),
        "unmatched": refused("fused", section={"partition_config": {"layer_specs": [{"patterns": ["nothing"]}]}}),
        "strict": refused("fused", section={"partition_config": {**PARTITION, "strict_mode": True}}),
        "sizes": refused("llama", tensor=3),
        "cut before, fewer": refused("llama", before, tensor=2),
        "cut before, whole": refused("llama", before, tensor=1),
    }


def test_bad_input_is_refused_by_name() -> None:
    for found in run_distributed(refusals, 4, timeout=90):
        assert "num_attention_heads" in found["heads"]
        assert "use a tensor-parallel size of 2" in found["heads"]
        assert "attention of 6 heads (num_key_value_heads), which 4 does not divide" in found["keys"]
        assert "model.layers.0.mlp.gate_proj (weight (50, 32)) are 50, which 4 does not divide" in found["mlp"]
        assert "66, which 4 does not divide" in found["vocabulary"]  # of the embedding or the head, as the plan has it
        assert "pad_to_multiple_of=4" in found["vocabulary"]
        assert "Plain has no tp_plan" in found["rules"]
        assert (
            '{"patterns": ["^layers\\\\.\\\\d+\\\\.up_proj\\\\.weight$"], "partition_type": "column"}' in found["rules"]
        )
        assert 'gives model.layers.0.mlp.up_proj the style "diagonal"' in found["style"]
        assert "refused as a whole" in found["style"]
        assert "the forward of model.layers.1.mlp.up_proj, a Linear, was replaced" in found["forward"]
        assert "MuonWithAuxAdam looks at whole parameters, of which the tensor-parallel processes" in found["muon"]
        assert "Adafactor looks at whole parameters" in found["adafactor"]
        assert "/tensor_parallel/partition_config/layer_specs/0/shape" in found["shape"]
        assert "its parts are 62 together, and there are 64" in found["shape"]
        assert "is not a regular expression" in found["pattern"]
        assert "may take for ever" in found["endless"]
        assert "no layer of Fused matches a rule" in found["unmatched"]
        assert found["strict"] == ""  # every linear layer has a rule
        assert "tensor-parallel 3 (tensor_parallel.autotp_size) does not divide the 4 processes" in found["sizes"]
        assert "cut over 4 processes by an engine before, and now it is to be 2" in found["cut before, fewer"]
        assert "were cut over 4 processes by an engine before, and now no layer is to be" in found["cut before, whole"]


def models_that_share() -> dict[str, Any]:
    """Of a second engine's model, which has the first one's embedding: losses, and the rows of a layer of its own."""
    found: dict[str, Any] = {}
    for shared in ("module", "weight"):
        first, second = build("llama"), build("llama")
        embedding = first.model.embed_tokens.requires_grad_(False)  # type: ignore[union-attr]
        if shared == "module":
            second.model.embed_tokens = embedding
        else:
            second.model.embed_tokens.weight = embedding.weight  # type: ignore[union-attr]
        found[f"{shared}, one process"] = plain(copy.deepcopy(second))
        engines = [engine_of("llama", 2, 1, model) for model in (first, second)]
        found[shared] = steps(engines[1], batches_of(3, 1, 1))
        found["rows"] = second.model.layers[0].self_attn.q_proj.weight.shape[0]  # type: ignore[union-attr, index]
        for engine in engines:
            engine.destroy()
    tied = build("llama")
    tied.lm_head.weight = tied.model.embed_tokens.weight = embedding.weight  # type: ignore[union-attr]
    try:
        engine_of("llama", 2, 1, tied)
    except ConfigError as error:
        found["tied"] = str(error)
    return found


def test_layers_that_a_second_engine_shares_stay_cut_and_its_own_are_cut() -> None:
    for found in run_distributed(models_that_share, 2, timeout=60):
        for shared in ("module", "weight"):
            assert found[shared] == pytest.approx(found[f"{shared}, one process"], rel=1e-5)
        assert found["rows"] == 16
        if "model.embed_tokens" in build("llama").tp_plan:  # else it is whole, as before transformers 5.20
            assert "embed_tokens.weight is shared with a model whose layers an engine has cut" in found["tied"]
        else:
            assert "tied" not in found


def t5(stage: int) -> tuple[list[float], list[float], float, float]:
    """Losses, and how far weights and the bias of positions end from those of one process."""
    import transformers

    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    torch.manual_seed(0)
    model: Any = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=3)
    )
    reference = copy.deepcopy(model)
    expected = plain(reference)
    section = {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": FAMILIES["t5"]}}
    settings = {**config("llama", 2, stage), "tensor_parallel": section}
    engine = initialize(model=model, config=settings)[0]
    found = steps(engine, batches_of(3, 1, 1))
    weights = {name: value.clone() for name, value in engine.named_weights()}
    right = {name: param.detach() for name, param in reference.named_parameters()}
    far = {name: float((weights[name] - value).norm() / value.norm()) for name, value in right.items()}
    assert cut_of(model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight) is not None
    engine.destroy()
    return found, expected, max(far.values()), max(value for name, value in far.items() if "relative" in name)


@pytest.mark.parametrize("stage", [0, 3])
def test_biases_of_relative_positions_are_cut_by_heads(stage: int) -> None:
    for found, expected, weights, biases in run_distributed(t5, 2, stage, timeout=40):
        assert found == pytest.approx(expected, rel=1e-5)
        assert weights < 1e-4
        assert biases < 1e-5


def across_hosts() -> list[str]:
    messages: list[str] = []
    hosts.warn_once = messages.append  # type: ignore[assignment]
    for name in ("one", f"host{dist.get_rank()}"):
        hosts.platform.node = lambda name=name: name  # type: ignore[assignment]
        engine_of("llama", 2, 1).destroy()
    return messages


def test_layers_shared_across_hosts_are_said_to_be_slow() -> None:
    for (message,) in run_distributed(across_hosts, 2):
        assert "ranks 0 to 1 share layers and are on 2 hosts (host0, host1)" in message
        assert "GB/s as measured now" in message


def other_batches() -> list[str]:
    said = []
    for shift in (1, 0):
        engine = engine_of("llama", 2, 1)
        micro = batches_of(1, 1, 1)[0, 0, 0] + shift * dist.get_rank() % 3
        try:
            engine(input_ids=micro % 64)
            said.append("")
        except AssertionError as error:  # as in DeepSpeed
            said.append(f"{error} | {error.__notes__[0]}")  # type: ignore[attr-defined]
        engine.destroy()
    return said


def test_different_samples_on_ranks_that_share_layers() -> None:
    for different, same in run_distributed(other_batches, 2):
        assert different.startswith("Data inconsistency within the TP group. Please check the Dataloader")
        assert "ranks 0 to 1 share layers and were given different input_ids, (2, 10)" in different
        assert "sampler rank = rank // 2, num_replicas = 1" in different
        assert same == ""
