"""The training of ``plain.py`` by ``initialize`` and a loop, and what all kinds of user's code share; run on the ranks.

Invariant: with ``forget`` before it, a combination finds in its processes what it would in those of a fresh script.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.contract.matrix import plain
from tests.contract.matrix.cells import Cell

__all__ = [
    "MICRO",
    "Numbers",
    "Part",
    "Rows",
    "by_loop",
    "config",
    "evaluating",
    "forget",
    "generating",
    "here",
    "mean_over_data",
    "models_of",
    "optimizer",
    "parallelism",
    "pipeline_of",
    "step_all",
    "traced",
    "weights_of",
]

Numbers = dict[str, Any]  # of one model: losses, norms, weights, evaluated, generated
MICRO = plain.SAMPLES


def forget() -> None:
    """What accelerate, transformers and torch's compiler remember for a whole process."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "PARALLELISM_CONFIG_"))]:
        del os.environ[name]
    if "torch._dynamo" in sys.modules:  # of a forward it makes eight graphs, over all engines, and then goes without
        torch.compiler.reset()
    gc.collect()


WAYS: dict[str, dict[str, Any]] = {
    "pieces": {"chunked_loss": True, "tiled_mlp": 2},
    "alone": {"join_blocks": False},
    "traced": {"compile": "blocks"},
    "beside": {"checkpoint": {"async": True}},
}
ALONE = {"reduce_bucket_size": 100, "stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": 1}


@contextmanager
def traced() -> Iterator[None]:
    """Engines that compile blocks take torch's own operators for them: nothing is left to a compiler of C++."""
    from ds_hf.engine.engine import CoreEngine

    compile = CoreEngine.compile
    CoreEngine.compile = lambda engine, **more: compile(engine, **{**more, "backend": "aot_eager"})  # type: ignore
    try:
        yield
    finally:
        CoreEngine.compile = compile  # type: ignore[method-assign]


# -- what all clients share ----------------------------------------------------------------------------------------


def config(cell: Cell, stage: int) -> dict[str, Any]:
    """The file of one engine."""
    content: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": cell.accumulation,
        "gradient_clipping": plain.CLIP if cell.clip else 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "ds_hf": {"hang_timeout": 60},
    }
    if cell.precision != "fp32":
        content[cell.precision] = {"enabled": True}
    if cell.precision == "fp16":
        content["fp16"] |= {"initial_scale_power": 8}
    if cell.mesh in ("tp2", "tokens2"):
        content["tensor_parallel"] = {"autotp_size": 2}
        content["ds_hf"]["tensor_sequence_parallel"] = cell.mesh == "tokens2"
    if cell.mesh == "ep2":
        content["expert_parallel"] = {"enabled": True, "autoep_size": 2}
    zero = content["zero_optimization"]
    content["ds_hf"] |= {"capture": "blocks"} if cell.way == "usual" and torch.cuda.is_available() else {}
    content["ds_hf"] |= WAYS.get(cell.way, {})
    zero |= {"alone": ALONE, "mics": {"mics_shard_size": 1} if stage == 3 else {}}.get(cell.way, {})
    if stage > 0 and cell.spares in ("states", "parameters"):
        zero["offload_optimizer"] = {"device": "cpu"}
    if stage > 0 and cell.spares == "files":
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": tempfile.gettempdir()}
    if stage == 3 and cell.spares == "parameters":
        zero["offload_param"] = {"device": "cpu"}
    if cell.mesh == "sp2" and cell.client != "trainer" and cell.client != "accelerate":
        content["sequence_parallel_size"] = 2
    return content


def here() -> torch.device:
    """This process's accelerator where there is one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def generating() -> dict[str, Any]:
    """``plain.generating()`` on this process's device."""
    return {name: v.to(here()) if isinstance(v, Tensor) else v for name, v in plain.generating().items()}


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **plain.ADAMW)


def parallelism(cell: Cell) -> dict[str, Any]:
    """``parallelism_config=`` of accelerate's classes."""
    from accelerate.utils import ParallelismConfig

    if cell.mesh != "sp2":
        return {}
    return {"parallelism_config": ParallelismConfig(sp_size=2, sp_backend="deepspeed", dp_replicate_size=cell.copies)}


def mean_over_data(cell: Cell, values: list[float]) -> list[float]:
    """Over the processes that read different samples."""
    total = torch.tensor(values, dtype=torch.float64, device=here())
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()  # type: ignore[no-any-return]


def weights_of(cell: Cell, engine: Any, folder: Path) -> dict[str, Any]:
    """Whole weights at the end, those of a pipeline's layers here; of 16 bits their masters too, from a checkpoint."""
    from ds_hf.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    named = engine.module.named_parameters() if cell.mesh == "pp2" else engine.named_weights(torch.float32)
    inside = "base_model.model." if cell.mesh == "pp2" and cell.model == "lora" else ""  # what PEFT put around it
    found: dict[str, Any] = {"weights": {inside + name: value.detach().float().cpu().clone() for name, value in named}}
    if cell.precision != "fp32":
        engine.save_checkpoint(folder)
        engine.wait_for_checkpoint()
        masters = get_fp32_state_dict_from_zero_checkpoint(folder)
        found["masters"] = {inside + name: value for name, value in masters.items()}
    return found


@contextmanager
def evaluating(model: Any) -> Any:
    model.eval()
    with torch.no_grad():
        yield
    model.train()


class Rows(torch.utils.data.Dataset[Any]):
    """Samples in the order in which processes take them, batch after batch.

    Args:
        batches: ids and labels ``[..., process, sample, position]``.
        sharing: processes that share sequences: each takes a batch, and together they compute one after the other.
    """

    def __init__(self, *batches: Tensor, sharing: int = 1) -> None:
        self.ids, self.labels = (
            each.reshape(-1, sharing, *each.shape[-3:]).transpose(1, 2).reshape(-1, plain.LENGTH) for each in batches
        )

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        places = torch.arange(plain.LENGTH)
        return {"input_ids": self.ids[index], "labels": self.labels[index], "position_ids": places}


class Part:
    """An engine of a loop of one's own, and what it computes of this process's part of a batch."""

    def __init__(self, cell: Cell, engine: Any) -> None:
        self.cell, self.engine = cell, engine
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.evaluated: float | None = None
        self.generated: Tensor | None = None

    def loss(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Of micro-batches ``[process, sample, position]``; the mean over the tokens of this process's samples."""
        from ds_hf.engine.parallel.sequence.losses import mean_over_tokens

        ids, labels = ids.to(here()), labels.to(here())
        if self.cell.mesh != "sp2":
            rank = self.engine.mesh.sample_rank
            return plain.loss_of(self.engine, ids[rank], labels[rank])
        axis = self.engine.mesh.axis("sequence")
        length = plain.LENGTH // axis.world_size
        mine = slice(axis.rank * length, (axis.rank + 1) * length)
        rank = self.engine.mesh.sample_rank
        x, y = ids[rank][:, mine], plain.shifted(labels[rank])[:, mine].contiguous()
        places = torch.arange(plain.LENGTH, device=x.device)[mine].expand(len(x), -1)
        loss = self.engine(input_ids=x, labels=y, shift_labels=y, position_ids=places).loss
        return mean_over_tokens(loss, (y != -100).sum(), axis)

    def backward(self, loss: Tensor) -> None:
        if self.cell.client != "raw":
            self.engine.backward(loss)
        elif self.cell.precision == "fp16":
            self.engine.scale(loss).backward()
        else:
            loss.backward()

    def evaluate(self) -> None:
        with evaluating(self.engine):
            found = [float(self.loss(x, y)) for x, y in zip(*plain.held_out(self.cell.data), strict=True)]
        self.evaluated = sum(mean_over_data(self.cell, found)) / len(found)

    def generate(self) -> None:
        model = self.engine.module if self.cell.client == "raw" else self.engine
        self.generated = model.generate(**generating())

    def numbers(self, folder: Path) -> Numbers:
        return {
            "losses": self.losses,
            "norms": self.norms,
            "evaluated": self.evaluated,
            "generated": self.generated,
            **weights_of(self.cell, self.engine, folder),
        }


def step_all(parts: list[Part], ids: Tensor, labels: Tensor) -> None:
    """One optimizer step of every engine, each on the same micro-batches ``[micro, process, sample, position]``."""
    losses: list[list[float]] = [[] for _ in parts]
    for x, y in zip(ids, labels, strict=True):
        for part, found in zip(parts, losses, strict=True):
            loss = part.loss(x, y)
            found.append(float(loss.detach()))
            part.backward(loss)
        for part in parts:
            part.engine.step()
    for part, found in zip(parts, losses, strict=True):
        part.losses.append(sum(mean_over_data(part.cell, found)) / len(found))
        part.norms.append(float(part.engine.get_global_grad_norm()))


class Pipe(Part):
    """The same of a pipeline, which takes whole steps; its weights are those of the layers that are here."""

    def items(self, ids: Tensor, labels: Tensor) -> Any:
        rank = self.engine.mesh.sample_rank
        pairs = zip(ids.to(here()), labels.to(here()), strict=True)
        return iter([{"input_ids": x[rank], "labels": y[rank]} for x, y in pairs])

    def step(self, ids: Tensor, labels: Tensor) -> None:
        self.losses.append(float(self.engine.train_batch(self.items(ids, labels))))
        self.norms.append(float(self.engine.get_global_grad_norm()))

    def evaluate(self) -> None:
        ids, labels = plain.held_out(self.cell.data)
        self.evaluated = float(self.engine.eval_batch(self.items(ids, labels), num_micro_batches=len(ids)))


def models_of(cell: Cell) -> list[Any]:
    """The models of a combination, whose blocks are computed again in backward where it says so."""
    models = plain.build(cell.model)
    for model in models if cell.spares in ("activations", "reentrant") else ():
        again = {"use_reentrant": cell.spares == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=again)
        model.enable_input_require_grads()
    return models


def pipeline_of(cell: Cell, model: Any) -> Any:
    """A model as a pipeline of two stages where the mesh asks for it; of PEFT's models what is inside them."""
    from ds_hf.deepspeed_api.pipeline import PipelineModule

    if cell.mesh != "pp2":
        return model
    return PipelineModule.from_transformers(model.get_base_model() if cell.model == "lora" else model, 2)


# -- a loop of one's own ---------------------------------------------------------------------------------------------


def by_loop(cell: Cell, folder: Path) -> list[Numbers]:
    """``initialize`` and a loop: ``engine.backward(loss)``, ``loss.backward()``, or ``train_batch`` of a pipeline."""
    parts = started(cell, resumed=False)
    for step, (ids, labels) in enumerate(zip(*plain.data(cell.data, cell.accumulation), strict=True)):
        if step == plain.MIDDLE:
            parts = amid(cell, parts, folder)
        if isinstance(parts[0], Pipe):
            for part in parts:
                part.step(ids, labels)
        else:
            step_all(parts, ids, labels)
    found = [part.numbers(folder / f"last{index}") for index, part in enumerate(parts)]
    for part in parts:
        part.engine.destroy()
    return found


def started(cell: Cell, resumed: bool) -> list[Any]:
    """An engine of each model."""
    from ds_hf import initialize

    made = []
    for whole, stage in zip(models_of(cell), cell.stages(resumed), strict=False):
        model, settings = pipeline_of(cell, whole), config(cell, stage)
        engine, *_ = initialize(model=model, optimizer=optimizer, model_parameters=plain.groups(model), config=settings)
        made.append((Pipe if cell.mesh == "pp2" and cell.client == "engine" else Part)(cell, engine))
    return made


def amid(cell: Cell, parts: list[Any], folder: Path) -> list[Any]:
    """What happens after half of the steps; the engines that go on."""
    if cell.event == "resume":
        for index, part in enumerate(parts):
            part.engine.save_checkpoint(folder / str(index))
        for part in parts:
            part.engine.destroy()
        before, parts = parts, started(cell, resumed=True)
        for index, (part, old) in enumerate(zip(parts, before, strict=True)):
            part.engine.load_checkpoint(folder / str(index))
            part.losses, part.norms = old.losses, old.norms
    for part in parts:
        if cell.event == "evaluate":
            part.evaluate()
        elif cell.event == "generate":
            part.generate()
        plain.unfreeze(part.engine.module)
    return parts
