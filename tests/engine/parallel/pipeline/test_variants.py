"""Pipelines with other precisions, optimizers, offload, chunks and layers that their author has divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hf import initialize
from ds_hf.deepspeed_api.pipeline import PipelineModule
from ds_hf.engine.parallel.pipeline.specs import LayerSpec, TiedLayerSpec
from ds_hf.engine.parallel.pipeline.topology import PipeModelDataParallelTopology, ProcessTopology
from ds_hf.errors import ConfigError
from tests.engine.parallel.pipeline.models import (
    SEED,
    WIDTH,
    Embedding,
    batches,
    cross_entropy,
    pairs,
    pipeline,
    project,
    specs,
)
from tests.helpers.distributed import run_distributed

MICRO = 4
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}


def run(
    stages: int, more: dict[str, Any], steps: int = 3, pipelines: int = 1, micro: int = MICRO, **options: Any
) -> dict[str, Any]:
    """Losses, norms and weights; the micro-batches of a step are shared out over the pipelines."""
    settings = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": micro // pipelines, **more}
    settings.setdefault("optimizer", ADAMW)
    module = pipeline(options.pop("tied", True), stages, **options)
    engine, *_ = initialize(model=module, config=settings)
    losses, norms = [], []
    for tokens in batches(steps, micro):
        shared = tokens.view(-1, pipelines, *tokens.shape[2:])
        losses.append(float(engine.train_batch(pairs(shared, engine.mesh.sample_rank))))
        norms.append(engine.get_global_grad_norm())
    evaluated = [
        float(engine.eval_batch(pairs(tokens.repeat(1, pipelines, 1, 1)), num_micro_batches=count))
        for count, tokens in ((3, batches(1, micro)[0]), (micro, batches(1, micro)[0]))
    ]
    found = {name: param.detach().float().cpu().clone() for name, param in module.named_parameters()}
    state = {"losses": losses, "norms": norms, "weights": found, "skipped": engine.skipped_steps, "eval": evaluated}
    state["scale"] = engine.loss_scale()
    engine.destroy()
    return state


VARIANTS: dict[str, dict[str, Any]] = {
    "lamb": {"optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}, "zero_optimization": {"stage": 1}},
    "bf16": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    "fp16": {
        "fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1},  # overflows first
        "zero_optimization": {"stage": 2},
        "gradient_clipping": 0.3,
    },
    "offload": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(VARIANTS))
def test_two_stages_are_one(name: str) -> None:
    steps = 10 if name == "fp16" else 4
    alone = run_distributed(run, 2, 1, VARIANTS[name], steps, 2)[0]
    for one in run_distributed(run, 4, 2, VARIANTS[name], steps, 2, timeout=90):
        assert one["losses"] == pytest.approx(alone["losses"], rel=1e-2 if name != "lamb" else 1e-5)
        assert (one["skipped"], one["scale"]) == (alone["skipped"], alone["scale"])
        if name == "fp16":
            assert 0 < one["skipped"] < 10
        for key, value in one["weights"].items():
            error = float((value - alone["weights"][key]).norm() / alone["weights"][key].norm())
            # biases begin at 0: what Adam made of them in few steps is made of rounded gradients alone
            assert error < (1e-5 if name == "lamb" else 3e-2 if name == "fp16" else 1e-2), key


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_chunks_from_the_file_are_one_process_to_the_bit(processes: int) -> None:
    """The tied embedding is on both ends; 8 layers on 2 or 4 stages with 2 chunks each."""
    alone = run_distributed(run, 1, 1, {}, depth=6)[0]
    chunks = {"ds_hf": {"pipeline": {"chunks": 2}}}
    for one in run_distributed(run, processes, processes, chunks, depth=6, timeout=90):
        assert one["losses"] == pytest.approx(alone["losses"], rel=1e-6)
        for key, value in one["weights"].items():
            assert float((value - alone["weights"][key]).norm() / alone["weights"][key].norm()) < 1e-6, key
    assert {"tied_modules.embed.weight", "1.norm.weight", "6.norm.weight"} <= set(alone["weights"])


def set_before_it_is_divided() -> dict[str, Any]:
    """Losses and what trains, of chunks of the file and of chunks from the start; and what is refused."""
    found: dict[str, Any] = {}
    chunks = {"ds_hf": {"pipeline": {"chunks": 2}}}
    for name, options in {"file": {}, "start": {"chunks": 2}}.items():
        module = pipeline(True, 2, depth=6, **options).double()
        for key, param in module.named_parameters():
            param.requires_grad_(not key.startswith(("2.", "3.", "4.", "5.")))
        settings = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": MICRO,
            "optimizer": ADAMW,
            **chunks,
        }
        engine, *_ = initialize(model=module, config=settings)
        losses = [float(engine.train_batch(pairs(tokens))) for tokens in batches(2, MICRO)]
        found[name] = losses, {key: (param.dtype, param.requires_grad) for key, param in module.named_parameters()}
        engine.destroy()
    changed = pipeline(True, 2, depth=6)
    for block in changed.layer_modules().values():
        block.adapter = nn.Linear(2, 2)
    for name, asked in {
        "adapters": {"model": changed},
        "some": {"model": (some := pipeline(True, 2, depth=6)), "model_parameters": [*some.parameters()][1:]},
    }.items():
        with pytest.raises(ConfigError) as error:
            initialize(config=settings, **asked)
        found[name] = str(error.value)
    return found


def test_layers_that_change_stages_stay_as_they_were_set() -> None:
    for one in run_distributed(set_before_it_is_divided, 2, timeout=90):
        assert one["file"] == one["start"]
        assert not all(trains for _, trains in one["file"][1].values())
        assert "have been changed since the model was made" in one["adapters"]
        assert "make the model as PipelineModule(..., chunks=2) first" in one["some"]


@pytest.mark.parametrize(
    ("stages", "pipelines", "more"),
    [
        (2, 1, {}),
        pytest.param(4, 1, {"zero_optimization": {"stage": 1}}, marks=pytest.mark.slow),
        pytest.param(2, 2, {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.3}, marks=pytest.mark.slow),
        pytest.param(2, 1, {"pipeline": {"activation_checkpoint_interval": 1}}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_a_folded_pipeline_is_one_process(stages: int, pipelines: int, more: dict[str, Any], tied: bool) -> None:
    """DualPipeV: the first stage has both ends of the model, so a tied embedding is one module there."""
    alone = run_distributed(run, 1, 1, more, micro=8, depth=6, tied=tied)[0]
    options = {"micro": 8, "depth": 6, "tied": tied, "chunks": 2, "folded": True}
    found = run_distributed(run, stages * pipelines, stages, more, 3, pipelines, timeout=90, **options)
    names = [set(one["weights"]) for one in found]
    for one in found:
        assert one["losses"] == pytest.approx(alone["losses"], rel=1e-6)
        assert one["eval"] == pytest.approx(alone["eval"], rel=1e-6)
        assert one["norms"] == pytest.approx(alone["norms"], rel=1e-5)
        for key, value in one["weights"].items():
            assert float((value - alone["weights"][key]).norm() / alone["weights"][key].norm()) < 1e-6, key
    ends = {"tied_modules.embed.weight"} if tied else {"0.weight", "7.weight"}
    assert [ends <= each for each in names] == [rank < pipelines for rank in range(stages * pipelines)]
    assert set.union(*names) == set(alone["weights"])


def dual_pipe_v_by_its_name() -> dict[str, Any]:
    from deepspeed.pipe import DualPipeVModule

    module = DualPipeVModule(specs(True, 6), num_stages=2, loss_fn=cross_entropy, partition_method="uniform")
    owners = [module.stage_owner(layer) for layer in range(8)]
    with pytest.raises(ConfigError) as few:
        initialize(model=module, config={"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3})
    with pytest.raises(ConfigError) as many:
        pipeline(True, 2, depth=6, chunks=3, folded=True)
    return {"owners": owners, "told": [str(few.value), str(many.value)], "layers": module.layer_ids}


def test_dual_pipe_v_by_its_name_and_what_it_refuses() -> None:
    first, last = run_distributed(dual_pipe_v_by_its_name, 2)
    assert first["owners"] == last["owners"] == [0, 0, 1, 1, 1, 1, 0, 0]
    assert (first["layers"], last["layers"]) == ([0, 1, 6, 7], [2, 3, 4, 5])
    assert "DualPipeV needs gradient_accumulation_steps >= 2 * 2, got 3" in first["told"][0]
    assert "has 2 chunks a stage, not 3" in last["told"][1]


@pytest.mark.slow
@pytest.mark.parametrize("interval", [1, 2])
def test_recomputed_layers_give_the_same(interval: int) -> None:
    plain = run_distributed(run, 2, 2, {})
    again = run_distributed(run, 2, 2, {"pipeline": {"activation_checkpoint_interval": interval}})
    for one, other in zip(plain, again, strict=True):
        assert one["losses"] == other["losses"]
        assert all(torch.equal(value, other["weights"][name]) for name, value in one["weights"].items())


# -- layers that are divided already -------------------------------------------------------------------------------


class _Sum(torch.autograd.Function):
    """Sums over the model-parallel processes in forward, passes gradients on."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        value = value.clone()
        dist.all_reduce(value, group=group)
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Copy(torch.autograd.Function):
    """Passes values on, sums gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class DividedMlp(nn.Module):
    """Half of a residual MLP on each of two model-parallel processes, or all of it."""

    parts, part, group = 1, 0, None

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        up, down = torch.randn(4 * WIDTH, WIDTH) * 0.2, torch.randn(WIDTH, 4 * WIDTH) * 0.2
        self.up = nn.Parameter(up.chunk(self.parts, 0)[self.part].clone())
        self.down = nn.Parameter(down.chunk(self.parts, 1)[self.part].clone())
        for param, dim in ((self.up, 0), (self.down, 1)):
            if self.parts > 1:
                param.tensor_model_parallel, param.partition_dim = True, dim  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.norm(hidden)
        if self.parts > 1:
            inner = _Copy.apply(inner, self.group)
        out = torch.relu(inner @ self.up.t()) @ self.down.t()
        return hidden + (_Sum.apply(out, self.group) if self.parts > 1 else out)


def three_dimensions(pipe: int, model: int, data: int, stage: int, reverse: bool = False) -> dict[str, Any]:
    names = ["data", "pipe", "model"]
    topology = PipeModelDataParallelTopology(pipe, model, data)
    if reverse:
        topology = ProcessTopology(names, [data, pipe, model])
    from ds_hf.engine.parallel.pipeline.grid import PipelineParallelGrid

    grid = PipelineParallelGrid(topology)
    DividedMlp.parts, DividedMlp.part = model, grid.get_slice_parallel_rank()
    DividedMlp.group = grid.get_slice_parallel_group()
    layers = [
        TiedLayerSpec("embed", Embedding),
        *[LayerSpec(DividedMlp) for _ in range(4)],
        TiedLayerSpec("embed", Embedding, forward_fn=project),
    ]
    module = PipelineModule(
        layers, topology=topology, loss_fn=cross_entropy, seed_layers=True, base_seed=SEED, partition_method="uniform"
    )
    module.seed_layers = False
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO // data,
        "optimizer": ADAMW,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = initialize(model=module, config=settings)
    losses, norms = [], []
    for tokens in batches(4, MICRO):
        shared = tokens.view(-1, data, *tokens.shape[2:])
        losses.append(float(engine.train_batch(pairs(shared, engine.mesh.sample_rank))))
        norms.append(engine.get_global_grad_norm())
    whole = engine._zero3_consolidated_16bit_state_dict()
    engine.destroy()
    return {"losses": losses, "norms": norms, "whole": whole}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipe", "model", "data", "stage", "reverse"),
    [(2, 2, 1, 0, False), (2, 2, 1, 1, False), (2, 2, 2, 1, False), (2, 2, 2, 0, False), (2, 1, 2, 2, True)],
)
def test_pipe_data_and_model_together(pipe: int, model: int, data: int, stage: int, reverse: bool) -> None:
    alone = run_distributed(three_dimensions, 1, 1, 1, 1, 0)[0]
    found = run_distributed(three_dimensions, pipe * model * data, pipe, model, data, stage, reverse, timeout=150)
    for one in found:
        assert one["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert one["norms"] == pytest.approx(alone["norms"], rel=1e-5)
    assert set(found[0]["whole"]) == set(alone["whole"])
    for name, value in alone["whole"].items():
        assert float((found[0]["whole"][name] - value).norm() / value.norm()) < 2e-6, name


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


RULES = [
    {"patterns": [r".*\.up\.weight$"], "partition_type": "column"},
    {"patterns": [r".*\.down\.weight$"], "partition_type": "row"},
]


def cut_by_the_engine(pipe: int, tensor: int, data: int, stage: int, told: bool = True) -> dict[str, Any]:
    layers = [
        TiedLayerSpec("embed", Embedding),
        *[LayerSpec(Mlp) for _ in range(4)],
        TiedLayerSpec("embed", Embedding, forward_fn=project),
    ]
    module = PipelineModule(
        layers,
        num_stages=pipe,
        topology=PipeModelDataParallelTopology(pipe, tensor, data) if told else None,
        loss_fn=cross_entropy,
        seed_layers=True,
        base_seed=SEED,
        partition_method="uniform",
    )
    module.seed_layers = False
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO // data,
        "optimizer": ADAMW,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
    }
    if tensor > 1:
        section = {"use_default_specs": False, "layer_specs": RULES}
        settings["tensor_parallel"] = {"autotp_size": tensor, "partition_config": section}
    engine, *_ = initialize(model=module, config=settings)
    losses, norms = [], []
    for tokens in batches(4, MICRO):
        shared = tokens.view(-1, data, *tokens.shape[2:])
        losses.append(float(engine.train_batch(pairs(shared, engine.mesh.sample_rank))))
        norms.append(engine.get_global_grad_norm())
    cut = sum(param.numel() for param in module.parameters())
    whole = engine._zero3_consolidated_16bit_state_dict()
    engine.destroy()
    return {"losses": losses, "norms": norms, "whole": whole, "numel": cut}


@pytest.mark.parametrize(
    ("data", "stage", "told"),
    [
        (1, 1, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, 0, True), (1, 1, True), (2, 1, True), (2, 1, False))
        ),
    ],
)
def test_layers_of_stages_that_the_engine_cuts(data: int, stage: int, told: bool) -> None:
    """``told``: by a topology; else the file alone says that processes of a stage share its layers."""
    alone = run_distributed(cut_by_the_engine, 1, 1, 1, 1, 0)[0]
    found = run_distributed(cut_by_the_engine, 4 * data, 2, 2, data, stage, told, timeout=150)
    for one in found:
        assert one["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert one["norms"] == pytest.approx(alone["norms"], rel=1e-5)
        assert one["numel"] < 0.4 * alone["numel"]
    for name, value in alone["whole"].items():
        assert float((found[0]["whole"][name] - value).norm() / value.norm()) < 2e-6, name
