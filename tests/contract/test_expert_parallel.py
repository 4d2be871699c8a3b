"""Experts divided over processes, through the engine: against one process with plain torch, at all stages; and what
is saved by one division of processes and loaded by another.

In fp64 weights after three steps of AdamW agree to 1e-6 and norms, which are fp32 numbers, to 1e-6. Checkpoints agree
to the bit. ``test_families.py`` compares single gradients, to 1e-12.
"""

from __future__ import annotations

import functools
import logging
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_hf
from ds_hf.checkpoint.deepspeed.autoep import as_autoep
from ds_hf.checkpoint.deepspeed.write_universal import write_universal
from ds_hf.checkpoint.formats import open_folder
from ds_hf.config import load_config
from ds_hf.engine.checkpoint.consolidate import consolidated_state_dict
from ds_hf.engine.comm.mesh import axis_of
from ds_hf.engine.parallel.experts.plan import plan_experts
from ds_hf.engine.parallel.sequence.losses import mean_over_tokens
from ds_hf.engine.zero.access import safe_get_full_grad
from ds_hf.engine.zero.cut import cut_of
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.errors import ConfigError
from tests.contract import test_sequence_parity as sequence_parity
from tests.contract.test_parity import ADAMW, CLIP
from tests.helpers.compiled import with_quick_backend
from tests.helpers.distributed import run_distributed
from tests.helpers.experts import batches_of, build, loss_of, reference_run, section
from tests.helpers.logs import Lines

STEPS = 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = {**ADAMW, "eps": 1e-5}  # gradients of rows that no token has used are rounding, and AdamW divides by them


def config(size: int, stage: int, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": EPS},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
        "expert_parallel": section(size),
        **more,
    }


def run(engine: Any, accumulation: int = 1, steps: int = STEPS, first: int = 0) -> dict[str, Any]:
    losses, norms = [], []
    rank, world = engine.mesh.sample_rank, engine.mesh.shape.data
    for batches in batches_of(first + steps, accumulation, world)[first:]:
        for micro in range(accumulation):
            loss = loss_of(engine, batches[micro * world + rank].to(engine.device))
            losses.append(float(loss))
            engine.backward(loss)
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return {"losses": losses, "norms": norms}


def train(kind: str, size: int, stage: int, accumulation: int, steps: int = STEPS, **more: Any) -> dict[str, Any]:
    model = build(kind).double()
    engine, *_ = ds_hf.initialize(model=model, config=config(size, stage, accumulation, **more))
    found = run(engine, accumulation, steps)
    cut = [name for name, param in model.named_parameters() if cut_of(param) is not None]
    weights = {name: value.cpu() for name, value in engine.named_weights()}
    found |= {"cut": cut, "weights": weights, "whole": consolidated_state_dict(engine)}
    engine.destroy()
    return found


def train_cells(kind: str, size: int, cells: list[tuple[int, int]]) -> dict[Any, Any]:
    torch.set_num_threads(1)
    return {cell: train(kind, size, *cell) for cell in cells}


@functools.cache
def reference(kind: str, accumulation: int, data: int) -> dict[str, Any]:
    return reference_run(kind, batches_of(STEPS, accumulation, data), torch.float64, CLIP, DEVICE, **EPS)


def farthest(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    distances = ((found[name].to(value) - value).norm() / value.norm() for name, value in wanted.items())
    return max(map(float, distances))


def check(kind: str, world: int, size: int, cells: list[tuple[int, int]]) -> None:
    ranks = run_distributed(train_cells, world, kind, size, cells, timeout=200)
    for stage, accumulation in cells:
        wanted = reference(kind, accumulation, world)
        for rank, cells_of in enumerate(ranks):
            one = cells_of[stage, accumulation]
            assert one["cut"]
            assert one["losses"][:accumulation] == pytest.approx(wanted["losses"][rank : world * accumulation : world])
            assert one["norms"] == pytest.approx(wanted["norms"], rel=1e-6)
            assert farthest(one["weights"], wanted["weights"]) < 1e-6
            assert rank or farthest(one["whole"], wanted["weights"]) < 1e-6


def test_stages_train_as_one_process() -> None:
    check("mixtral", 2, 2, [(0, 1), (1, 2), (2, 1), (3, 2)])


def test_experts_are_held_by_several_groups() -> None:
    check("gpt_oss", 4, 2, [(0, 1), (2, 2), (3, 1)])


@pytest.mark.slow
@pytest.mark.parametrize(("world", "size"), [(2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "deepseek_v3", "qwen3_next"])
def test_the_matrix(kind: str, world: int, size: int) -> None:
    check(kind, world, size, [*product((0, 1, 2, 3), (1, 3))])


def by_muon(size: int, stage: int) -> dict[str, Tensor]:
    """Of four batches a step, each process's share."""
    torch.set_num_threads(1)
    settings = config(
        max(size, 1), stage, 4 // dist.get_world_size(), optimizer={"type": "Muon", "params": {"lr": 1e-2}}
    )
    settings["expert_parallel"] |= {"enabled": size > 0}
    engine, *_ = ds_hf.initialize(model=build("mixtral"), config=settings)
    run(engine, 4 // dist.get_world_size(), steps=2)
    return {name: value.cpu().double() for name, value in engine.named_weights()}


@pytest.mark.parametrize(("world", "stage"), [(2, 0), (2, 3), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_muon_takes_each_expert_by_itself(world: int, stage: int) -> None:
    (wanted,) = run_distributed(by_muon, 1, 0, 1, timeout=60)
    for found in run_distributed(by_muon, world, 2, stage, timeout=100):
        assert farthest(found, wanted) < 1e-5


# -- 16 bits, experts without tokens, adapters -------------------------------------------------------------------------


def narrow(dtype: str, stage: int, size: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    more = {dtype: {"enabled": True, **({"initial_scale_power": 4} if dtype == "fp16" else {})}}
    engine, *_ = ds_hf.initialize(model=build("qwen3_moe", experts="grouped_mm"), config=config(size, stage, 1, **more))
    found = run(engine, steps=4)
    poisoned = engine.global_steps
    if dtype == "fp16":  # one process's loss is infinite: no process makes the step
        loss = loss_of(engine, batches_of(1, 1, 2)[0][0].to(engine.device))
        engine.backward(loss * (float("inf") if dist.get_rank() else 1.0))
        engine.step()
        found["skipped"] = engine.skipped_steps
    assert engine.global_steps == poisoned + (dtype == "fp16")
    engine.destroy()
    return found


@pytest.mark.parametrize(("dtype", "stage"), [("bf16", 3), ("fp16", 1)])
def test_16_bits_and_grouped_products(dtype: str, stage: int) -> None:
    wanted, found = (run_distributed(narrow, 2, dtype, stage, size, timeout=100) for size in (1, 2))
    for alone, divided in zip(wanted, found, strict=True):
        assert divided["losses"] == pytest.approx(alone["losses"], rel=0.02)
        assert divided["norms"] == pytest.approx(alone["norms"], rel=0.05)
        assert divided.get("skipped", 1) == 1


def compiled(size: int, compile: Any, quick: bool = False) -> list[float]:
    torch.set_num_threads(1)
    model = build("qwen3_moe", experts="grouped_mm")
    engine, *_ = ds_hf.initialize(model=model, config=config(size, 2, ds_hf={"compile": compile}))
    losses = run(with_quick_backend(engine) if quick else engine)["losses"]
    engine.destroy()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(("size", "quick"), [(1, True), (2, False)])
@pytest.mark.minutes(4)
def test_compiled_blocks(size: int, quick: bool) -> None:
    eager = run_distributed(compiled, 2, size, False, timeout=200)
    blocks = run_distributed(compiled, 2, size, "blocks", quick, timeout=200)
    for one, other in zip(eager, blocks, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def compiled_in_16_bits(kind: str, compile: Any, lora: bool, quick: bool) -> tuple[float, dict[str, Tensor], Any]:
    """All experts on each process, by grouped products, which graphs know in bf16 alone: loss and gradients."""
    torch.set_num_threads(1)
    model: Any = build(kind, experts="grouped_mm", intermediate_size=32, moe_intermediate_size=32)
    model.config.use_cache = False
    torch.manual_seed(0)
    if lora:
        from peft import LoraConfig, get_peft_model

        targets = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
        model = get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj"], target_parameters=targets))
    more = {"bf16": {"enabled": True}, "ds_hf": {"compile": compile}}
    engine, *_ = ds_hf.initialize(model=model, config=config(1, 3, **more))
    engine = with_quick_backend(engine) if quick and compile else engine
    loss = loss_of(engine, batches_of(1, 1, 2)[0][dist.get_rank()].to(engine.device))
    engine.backward(loss)
    grads = {name: safe_get_full_grad(param) for name, param in model.named_parameters() if param.requires_grad}
    report = engine.compiler.report()
    engine.destroy()
    kept = {name: grad.double().cpu() for name, grad in grads.items() if grad is not None}
    return float(loss.detach()), kept, (report.graphs, report.breaks)


def check_compiled_in_16_bits(kind: str, lora: bool, quick: bool) -> None:
    eager, blocks = (
        run_distributed(compiled_in_16_bits, 2, kind, how, lora, quick, timeout=200) for how in (False, "blocks")
    )
    for (loss, grads, _), (other, compiled, (graphs, breaks)) in zip(eager, blocks, strict=True):
        assert other == pytest.approx(loss, rel=0.01)
        total = torch.stack([grad.norm() for grad in grads.values()]).norm()
        for name, grad in grads.items():
            assert (compiled[name] - grad).norm() < 0.1 * grad.norm() + 0.01 * total, name
        assert lora or (graphs <= 2 and breaks == {})  # two kinds of gpt-oss's attention; PEFT breaks graphs


@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        ("gpt_oss", False),
        pytest.param("qwen3_moe", False, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", True, marks=pytest.mark.slow),
    ],
)
def test_compiled_grouped_products(kind: str, lora: bool) -> None:
    check_compiled_in_16_bits(kind, lora, quick=True)


def graphs_of(size: int) -> list[int]:
    """Of models of two and four layers, without and with sampled counts of tokens; 0: without the section."""
    found = []
    torch.set_num_threads(1)
    for layers in (2, 4):
        torch._dynamo.reset()
        model: Any = build("qwen3_moe", experts="grouped_mm", num_hidden_layers=layers)
        model.config.use_cache = False
        content = config(size or 1, 2, ds_hf={"compile": "blocks"})
        content["expert_parallel"] |= {"enabled": size > 0}
        engine, *_ = ds_hf.initialize(model=model, config=content)
        run(with_quick_backend(engine))
        found.append(engine.compiler.report().graphs)
        engine.destroy()
    return found


@pytest.mark.parametrize("size", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_alike_blocks_share_their_graphs(size: int) -> None:
    """However many there are: torch compiles eight and leaves the rest eager."""
    for two, four in run_distributed(graphs_of, 2, size, timeout=200):
        assert two == four


def lopsided(stage: int) -> dict[str, Any]:
    """All tokens choose the first process's experts."""
    torch.set_num_threads(1)
    model = build("mixtral").double()
    for module in model.modules():
        if hasattr(module, "experts"):
            module.gate.register_forward_hook(
                lambda _, __, out: (out[0], out[1], torch.arange(2, device=out[2].device).expand_as(out[2]))
            )
    engine, *_ = ds_hf.initialize(model=model, config=config(2, stage))
    return {**run(engine), "state": {name: value.cpu().clone() for name, value in engine.named_weights()}}


@pytest.mark.parametrize("stage", [1, 3])
def test_experts_without_a_token_keep_their_values(stage: int) -> None:
    before = dict(build("mixtral").double().named_parameters())
    for found in run_distributed(lopsided, 2, stage, timeout=100):
        for name, value in found["state"].items():
            if ".experts." in name:
                decayed = before[name] * (1 - EPS["lr"] * EPS["weight_decay"]) ** STEPS
                torch.testing.assert_close(value[2:], decayed[2:].detach(), rtol=1e-9, atol=0)
                assert not torch.equal(value[:2], before[name][:2])


def left_out(stage: int) -> list[dict[str, Tensor]]:
    """The second block is left out of most steps, with its experts."""
    torch.set_num_threads(1)
    section = {"enabled": True, "theta": 0.1, "gamma": 5.0}
    return [train("mixtral", size, stage, 1, 5, progressive_layer_drop=section)["weights"] for size in (1, 2)]


@pytest.mark.parametrize("stage", [0, 3])
def test_experts_of_blocks_that_are_left_out_decay_as_the_blocks_do(stage: int) -> None:
    for whole, divided in run_distributed(left_out, 2, stage, timeout=100):
        assert farthest(divided, whole) < 1e-6


def adapters(stage: int, folder: str) -> dict[str, Any]:
    """LoRA of attention on frozen experts; saved, and loaded again."""
    from peft import LoraConfig, get_peft_model

    torch.set_num_threads(1)

    def made() -> Any:
        torch.manual_seed(3)
        adapted = get_peft_model(build("qwen3_moe").double(), LoraConfig(target_modules=["q_proj", "v_proj"]))
        params = [param for param in adapted.parameters() if param.requires_grad]
        for param in params:
            nn.init.normal_(param, std=0.1)
        return ds_hf.initialize(model=adapted.double(), model_parameters=params, config=config(2, stage))[0]

    engine = made()
    found = run(engine, steps=2)
    engine.save_checkpoint(folder, "saved")
    found["next"] = run(engine, steps=1, first=2)["losses"]
    engine.destroy()
    again = made()
    again.load_checkpoint(folder, "saved")
    found["resumed"] = run(again, steps=1, first=2)["losses"]
    found["weights"] = {name: value.cpu() for name, value in again.named_weights()}
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_adapters_on_frozen_experts_are_saved_and_loaded(stage: int, tmp_path: Path) -> None:
    frozen = dict(build("qwen3_moe").double().named_parameters())
    for found in run_distributed(adapters, 2, stage, str(tmp_path), timeout=100):
        assert found["resumed"] == found["next"]
        weights = {name.removeprefix("base_model.model."): value for name, value in found["weights"].items()}
        for name in (name for name in frozen if ".experts." in name):
            assert torch.equal(weights[name], frozen[name])


def repeated() -> Any:
    """Four layers of adapters on the weights of two (PEFT's ``layer_replication``)."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(target_modules=["q_proj", "o_proj"], layer_replication=[[0, 2], [0, 2]])
    model = get_peft_model(build("mixtral").double(), settings).double()
    torch.manual_seed(3)
    for param in model.parameters():
        if param.requires_grad:
            nn.init.normal_(param, std=0.1)
    return model


def train_repeated(more: dict[str, Any], stage: int) -> tuple[int, dict[str, Any]]:
    torch.set_num_threads(1)
    settings = {name: value for name, value in config(2, stage).items() if name != "expert_parallel"}
    engine, *_ = ds_hf.initialize(model=repeated(), config={**settings, **more})
    found = run(engine)
    return engine.mesh.sample_rank, found | {"weights": dict(engine.named_weights())}


@pytest.mark.parametrize(
    ("more", "stage", "data"),
    [({"expert_parallel": section(2)}, 3, 2), ({"tensor_parallel": {"autotp_size": 2}}, 1, 1)],
)
def test_layers_that_repeat_others_weights(more: dict[str, Any], stage: int, data: int) -> None:
    wanted = reference_run("", batches_of(STEPS, 1, data), torch.float64, CLIP, DEVICE, repeated, **EPS)
    for rank, found in run_distributed(train_repeated, 2, more, stage, timeout=100):
        assert found["losses"] == pytest.approx(wanted["losses"][rank::data])
        assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-6)
        assert farthest(found["weights"], wanted["weights"]) < 1e-6


def sequences_too(stage: int, size: int) -> float:
    """Two processes share each sequence, and all of them the experts: how far weights end from one process's."""
    from deepspeed.utils import groups

    torch.set_num_threads(1)
    samples = dist.get_world_size() // 2
    net, alone = build("mixtral").double(), build("mixtral").double()
    settings = sequence_parity.config(stage, expert_parallel=section(size))
    engine, *_ = ds_hf.initialize(model=net, mesh_param=(samples, 2), config=settings)
    axis = axis_of(groups._get_sequence_parallel_group())
    half = sequence_parity.TOKENS // 2
    mine = slice(axis.rank * half, (axis.rank + 1) * half)
    for ids, labels in zip(*sequence_parity.data(samples), strict=True):
        here = engine.mesh.sample_rank
        x, y = ids[here][:, mine], sequence_parity.shifted(labels[here])[:, mine].contiguous()
        loss = engine(input_ids=x, labels=y, shift_labels=y).loss
        engine.backward(mean_over_tokens(loss, (y != -100).sum(), axis))
        engine.step()
        alone.zero_grad()
        for sample, wanted in zip(ids, labels, strict=True):
            (alone(input_ids=sample, labels=wanted).loss / samples).backward()
        with torch.no_grad():
            for param in alone.parameters():
                param -= 0 if param.grad is None else param.grad
    far = farthest(dict(engine.named_weights()), dict(alone.named_parameters()))
    engine.destroy()
    return far


@pytest.mark.parametrize(("world", "size", "stage"), [(2, 2, 3), pytest.param(4, 4, 1, marks=pytest.mark.slow)])
def test_beside_divided_sequences(world: int, size: int, stage: int) -> None:
    assert max(run_distributed(sequences_too, world, stage, size, timeout=100)) < 1e-6  # losses are fp32


def write_parts(stage: int) -> list[tuple[Tensor, Tensor]]:
    """Each process writes into its experts, of which another is the modifier by name."""
    engine, *_ = ds_hf.initialize(model=build("mixtral"), config=config(2, stage))
    params = [(name, p) for name, p in engine.module.named_parameters() if name.endswith("experts.down_proj")]
    for _, param in params:
        with torch.no_grad(), GatheredParameters([param], modifier_rank=0):
            param.fill_(dist.get_rank() + 1.0)
    kept, masters = dict(engine.named_weights()), consolidated_state_dict(engine) or {}
    engine.destroy()
    return [(kept[name], masters.get(name, kept[name])) for name, _ in params]


@pytest.mark.parametrize("stage", [1, 3])
def test_each_process_writes_its_experts(stage: int) -> None:
    wanted = torch.tensor([1.0, 1.0, 2.0, 2.0])[:, None, None]
    for found in run_distributed(write_parts, 2, stage, timeout=60):
        assert all(torch.equal(value, wanted.expand_as(value)) for pair in found for value in pair)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def parts_told() -> list[str]:
    """What is said when a script takes the state of the bare model, and when the engine writes the whole."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_hf").addHandler(handler)
    engine, *_ = ds_hf.initialize(model=build("mixtral"), config=config(2, 1))
    consolidated_state_dict(engine)
    assert not [each for each in said if "state_dict()" in each]
    engine.module.state_dict()
    return [each for each in said if "state_dict()" in each]


def test_a_state_dict_of_parts_is_told() -> None:
    first, second = run_distributed(parts_told, 2, timeout=60)
    assert len(first) == 1
    assert "2 of 4" in first[0]
    assert second == []


def saved(folder: str, size: int, stage: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    engine, *_ = ds_hf.initialize(model=build("mixtral"), config=config(size, stage))
    run(engine, steps=2)
    engine.save_checkpoint(folder, "saved")
    whole = consolidated_state_dict(engine)
    engine.destroy()
    return {"whole": whole}


def loaded(folder: str, size: int, stage: int, tag: str = "saved") -> dict[str, Any]:
    """What is loaded, and what it saves again."""
    torch.set_num_threads(1)
    model = build("mixtral")
    for param in model.parameters():
        nn.init.zeros_(param)
    engine, *_ = ds_hf.initialize(model=model, config=config(size, stage))
    engine.load_checkpoint(folder, tag)
    whole = consolidated_state_dict(engine)
    engine.save_checkpoint(folder, f"again-{size}-{stage}-{dist.get_world_size()}")
    engine.destroy()
    return {"whole": whole}


def states_of(folder: Path, tag: str) -> dict[tuple[str, str], Tensor]:
    """Everything that an optimizer keeps, whole."""
    source = open_folder(folder / tag)
    named = [(name, param, state) for name, param in source.manifest.parameters.items() for state in param.states]
    return {(name, state): source.state(param, state) for name, param, state in named}


@pytest.mark.parametrize(
    ("source", "meshes"),
    [((2, 2, 3), [(1, 1, 3), (2, 1, 2), (4, 4, 1)]), ((4, 2, 1), [(2, 2, 0), (4, 2, 3)])],
)
def test_any_division_loads_what_any_other_saved(
    source: tuple[int, int, int], meshes: list[tuple[int, int, int]], tmp_path: Path
) -> None:
    """A file's parts do not know who reads them: each mesh reads from one of the sources."""
    world, size, stage = source
    first = run_distributed(saved, world, str(tmp_path), size, stage, timeout=100)[0]["whole"]
    for world, size, stage in meshes:
        found = run_distributed(loaded, world, str(tmp_path), size, stage, timeout=100)[0]["whole"]
        assert all(torch.equal(found[name], value) for name, value in first.items())
    tags = ["saved", *(f"again-{size}-{stage}-{world}" for world, size, stage in meshes)]
    wanted, *others = (states_of(tmp_path, tag) for tag in tags)
    assert any(".experts." in name and state == "exp_avg" for name, state in wanted)
    for found in others:
        assert all(torch.equal(found[key], value) for key, value in wanted.items())


@pytest.mark.parametrize(("world", "size", "stage", "autoep"), [(2, 2, 3, False), (2, 1, 0, True)])
def test_a_universal_folder_of_divided_experts_is_loaded(
    world: int, size: int, stage: int, autoep: bool, tmp_path: Path
) -> None:
    run_distributed(saved, 2, str(tmp_path), 2, 1, timeout=100)
    source = open_folder(tmp_path / "saved")
    write_universal(as_autoep(source) if autoep else source, tmp_path / "universal")
    run_distributed(loaded, world, str(tmp_path), size, stage, "universal", timeout=100)
    wanted, found = (states_of(tmp_path, tag) for tag in ("saved", f"again-{size}-{stage}-{world}"))
    assert set(wanted) <= set(found)
    assert all(torch.equal(found[key], value) for key, value in wanted.items())


# -- what cannot be ----------------------------------------------------------------------------------------------------


def refused(kind: str, more: dict[str, Any]) -> str:
    from tests.helpers.models import TinyLM

    model = TinyLM() if kind == "dense" else build(kind, num_local_experts=3) if kind == "odd" else build("mixtral")
    if kind == "buffer":
        model.model.layers[0].mlp.experts.register_buffer("temperatures", torch.ones(4))
    with pytest.raises(ConfigError) as error:
        ds_hf.initialize(model=model, config={**config(2, 1), **more})
    return str(error.value)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("dense", {}, "moe_layer_pattern"),
    ("buffer", {}, "temperatures is a buffer"),
    ("mixtral", {"expert_parallel": section(3)}, "does not divide"),
    ("mixtral", {"expert_parallel": section(2, preset_model="deepseek_v3")}, "the model is mixtral"),
    ("mixtral", {"expert_parallel": section(2, top_k=1)}, "has 2"),
    ("mixtral", {"expert_parallel": section(2, comm_backend="deepep")}, "DeepEP"),
    ("mixtral", {"expert_parallel": section(2, load_balance_coeff=0.001)}, "router_aux_loss_coef"),
    ("mixtral", {"expert_parallel": section(2, expert_tensor_parallel_size=2)}, "divided further"),
    ("mixtral", {"expert_parallel": section(2, moe_layer_pattern=r".*\.mlp", expert_w1="w")}, "no parameter 'w'"),
    ("mixtral", {"expert_parallel": section(2, moe_layer_pattern="(")}, "not a regular expression"),
    ("mixtral", {"tensor_parallel": {"autotp_size": 2}}, "experts are divided over 2"),
    ("mixtral", {"tensor_parallel": {"autotp_size": 2}, "expert_parallel": section(1)}, "tp_plan divides the experts"),
]


def all_refused() -> list[str]:
    return [refused(kind, more) for kind, more, _ in REFUSED]


def test_what_cannot_be_divided_is_refused_before_training() -> None:
    for texts in run_distributed(all_refused, 2, timeout=60):
        for text, (kind, more, said) in zip(texts, REFUSED, strict=True):
            assert said in text, (kind, more)


def test_keys_that_change_nothing_are_told() -> None:
    logging.getLogger("ds_hf").addHandler(lines := Lines())
    keys = section(1, route_norm=False, expert_pattern="parts", score_func="sigmoid", combine_impl="legacy_bmm")
    settings = load_config({"train_batch_size": 1, "expert_parallel": keys}, world_size=1)
    plan_experts(build("mixtral"), settings.expert_parallel, 1)
    logging.getLogger("ds_hf").removeHandler(lines)
    for key in ("route_norm", "expert_pattern", "score_func", "combine_impl"):
        assert any(key in text for text in lines.texts)


# -- generation ----------------------------------------------------------------------------------------------------


def generate(stage: int) -> Any:
    engine, *_ = ds_hf.initialize(model=build("mixtral"), config=config(2, stage))
    ids = torch.arange(3, 3 + 4 * (1 + dist.get_rank())).view(1 + dist.get_rank(), 4).to(engine.device)
    how = {"max_new_tokens": 3 + 4 * dist.get_rank(), "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = engine.module.generate(input_ids=ids, **how), engine.generate(input_ids=ids, **how)
    engine.destroy()
    model = build("mixtral").to(ids.device).eval()
    return [each.tolist() for each in found], model.generate(input_ids=ids, **how).tolist()


@pytest.mark.parametrize("stage", [1, 3])
def test_processes_generate_different_numbers_of_tokens(stage: int) -> None:
    for found, wanted in run_distributed(generate, 2, stage):
        assert found == [wanted, wanted]


# -- one engine after another ------------------------------------------------------------------------------------------


def train_twice(pairs: list[tuple[int, int]]) -> list[list[float]]:
    """The norms of two engines after each other, the second of which may have another section, of the same model."""
    found = []
    for pair in pairs:
        model, norms = build("mixtral").double(), list[float]()
        for first, size in enumerate(pair):
            settings = config(max(size, 1), 1)
            settings["expert_parallel"] |= {"enabled": size > 0}
            engine, *_ = ds_hf.initialize(model=model, config=settings)
            norms += run(engine, steps=1, first=first)["norms"]
            engine.destroy()
        found.append(norms)
    return found


def test_an_engine_goes_on_with_what_another_divided() -> None:
    """Experts that are in parts stay so, also without the key; those that were kept whole may be divided."""
    for found in run_distributed(train_twice, 2, [(0, 0), (2, 0), (1, 1), (1, 2)]):
        assert all(norms == pytest.approx(found[0], rel=1e-6) for norms in found[1:])


class Headed(nn.Module):
    """A head of its own on a model that others may have too."""

    def __init__(self, base: nn.Module, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base, self.head = base, nn.Linear(96, 96).double()

    def forward(self, **inputs: Any) -> Tensor:
        found: Tensor = self.head(self.base(**inputs).logits)
        return found


def pair_of_models(shared: bool) -> tuple[Headed, Headed]:
    base = build("mixtral").double()
    return Headed(base, 1), Headed(base if shared else build("qwen3_moe").double(), 2)


def losses_of_pair(first: Any, second: Any, ids: Tensor) -> list[Tensor]:
    """Of both together, and of the first beside what the second says without gradients, each between two forwards."""
    one, other = (model(input_ids=ids, use_cache=False) for model in (first, second))
    with torch.no_grad():
        wanted = second(input_ids=ids, use_cache=False)
    again = first(input_ids=ids.flip(1), use_cache=False)
    return [(one - other).pow(2).mean() + other.pow(2).mean(), (again - wanted).pow(2).mean()]


def two_engines(stages: tuple[int, int], sizes: tuple[int, int], shared: bool) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    pair = pair_of_models(shared)
    if shared:
        pair[0].base.requires_grad_(False)
    engines = []
    for model, stage, size in zip(pair, stages, sizes, strict=True):
        settings = config(max(size, 1), stage, gradient_clipping=0.0)
        settings["expert_parallel"] |= {"enabled": size > 0}
        engines.append(ds_hf.initialize(model=model, config=settings)[0])
    for batches in batches_of(STEPS, 1, dist.get_world_size()):
        sum(losses_of_pair(*engines, batches[dist.get_rank()].to(engines[0].device))).backward()
        for engine in engines:
            engine.step()
    return {f"{i}.{name}": value.cpu() for i, engine in enumerate(engines) for name, value in engine.named_weights()}


@pytest.mark.parametrize(
    ("stages", "sizes", "shared"), [((3, 3), (2, 2), False), ((0, 2), (2, 0), False), ((3, 1), (1, 2), True)]
)
def test_two_engines_in_one_loss(stages: tuple[int, int], sizes: tuple[int, int], shared: bool) -> None:
    pair = pair_of_models(shared)
    if shared:
        pair[0].base.requires_grad_(False)
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], **EPS) for m in pair]
    for batches in batches_of(STEPS, 1, 2):
        (sum(sum(losses_of_pair(*pair, ids)) for ids in batches) / 2).backward()  # type: ignore[union-attr]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    wanted = {f"{i}.{n}": p.detach() for i, model in enumerate(pair) for n, p in model.named_parameters()}
    for found in run_distributed(two_engines, 2, stages, sizes, shared, timeout=100):
        assert farthest(found, wanted) < 1e-9


def divided_under_another() -> str:
    first, second = pair_of_models(shared=True)
    ds_hf.initialize(model=first, config=config(1, 1))
    with pytest.raises(ConfigError) as error:
        ds_hf.initialize(model=second, model_parameters=list(second.head.parameters()), config=config(2, 1))
    return str(error.value)


def test_what_another_engine_trains_whole_is_not_divided() -> None:
    for said in run_distributed(divided_under_another, 2, timeout=60):
        assert "experts.gate_up_proj was divided over processes for this engine, and another engine" in said
