"""What ``ds-hf memory`` was asked about: a script, a model or a description becomes a predictor and a configuration."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ds_hf.config import load_config
from ds_hf.engine.modules.positions import positions_of
from ds_hf.memory.adapters import LoraRequest, add_lora, load_in
from ds_hf.memory.models import build, with_length
from ds_hf.memory.prediction import UnpredictableError, Workload
from ds_hf.memory.predictor import Predictor
from ds_hf.memory.script import Learned, rehearse

__all__ = ["Request", "Subject"]

DEFAULT_LENGTH = 2048
_DEFAULT_CONFIG: dict[str, Any] = {"bf16": {"enabled": True}}


@dataclass(frozen=True)
class Request:
    """What the user gave beside the target; ``None``: not given.

    Attributes:
        config: file or preset.
        micro_batch, seq_len, checkpointing, attention: of the workload.
        sequence_parallel, tensor_parallel, expert_parallel, pipeline_stages, offload_activations, tiles,
        activation_budget: put into the
            configuration, whatever it says.
        load_weights: for scripts, see ``rehearse``.
        lora, base_bits: adapters, and a base in 4 or 8 bits, of a model that is named.
    """

    config: str | None = None
    micro_batch: int | None = None
    seq_len: int | None = None
    checkpointing: bool | None = None
    attention: str | None = None
    load_weights: bool = False
    sequence_parallel: int | None = None
    offload_activations: bool = False
    tensor_parallel: int | None = None
    expert_parallel: int | None = None
    tiles: bool = False
    activation_budget: float | None = None
    pipeline_stages: int | None = None
    lora: LoraRequest | None = None
    base_bits: int | None = None

    @property
    def recomputes(self) -> bool | None:
        """Gradient checkpointing: activations in host memory are the inputs of checkpointed blocks."""
        return True if self.checkpointing is None and self.offload_activations else self.checkpointing

    def put_into(self, config: dict[str, Any]) -> None:
        """What was asked for beside the configuration."""
        if self.sequence_parallel is not None:
            config["sequence_parallel_size"] = self.sequence_parallel
        if self.expert_parallel is not None:
            divided = {"enabled": True, "autoep_size": self.expert_parallel}
            config["expert_parallel"] = {**(config.get("expert_parallel") or {}), **divided}
        if self.tensor_parallel is not None:
            config["tensor_parallel"] = {**(config.get("tensor_parallel") or {}), "autotp_size": self.tensor_parallel}
        if self.pipeline_stages is not None:
            config["pipeline"] = {**(config.get("pipeline") or {}), "stages": self.pipeline_stages}
        if self.offload_activations:
            section = config.get("activation_checkpointing")
            config["activation_checkpointing"] = {**(section or {}), "cpu_checkpointing": True}
        if self.tiles:
            own = config.get("ds_hf") or {}
            config["ds_hf"] = {**own, "chunked_loss": True, "tiled_mlp": own.get("tiled_mlp") or "auto"}
        if self.activation_budget is not None:
            own = config.get("ds_hf") or {}
            config["ds_hf"] = {**own, "compile": "blocks", "activation_memory_budget": self.activation_budget}


@dataclass(frozen=True)
class Subject:
    """Attributes:
    predictor: of the model.
    config: DeepSpeed's configuration as a dict.
    given: whether the user or the script gave it. request: what was asked for.
    notes: what was taken for granted.
    """

    predictor: Predictor
    config: dict[str, Any]
    given: bool
    notes: list[str] = field(default_factory=list)
    request: Request = field(default_factory=Request)

    @classmethod
    def of(cls, target: str, arguments: Sequence[str], request: Request) -> Subject:
        """``target`` is a script where it ends in ``.py``, else it names a model.

        Raises:
            UnpredictableError, ConfigError: nothing can be said; the text says why.
        """
        if target.endswith(".py"):
            return _of_script(Path(target), arguments, request)
        if arguments:
            raise UnpredictableError(
                f"{' '.join(arguments)}: only scripts take arguments, and {target} is not a script"
            )
        config, notes = _configuration(request.config)
        request.put_into(config)
        notes += _of_stages(config)
        workload = Workload(
            micro_batch=request.micro_batch or 1,
            seq_len=request.seq_len or DEFAULT_LENGTH,
            gradient_checkpointing=request.recomputes,
            attention=request.attention,
        )
        predictor = Predictor(_model_of(target, request, workload), workload)
        usual = getattr(getattr(predictor.model, "config", None), "max_position_embeddings", None)
        limit = positions_of(predictor.model) or usual
        if request.seq_len is None and isinstance(limit, int) and 0 < limit < DEFAULT_LENGTH:
            predictor.workload = replace(workload, seq_len=limit)
        return cls(predictor, config, request.config is not None, notes, request)


def _of_script(script: Path, arguments: Sequence[str], request: Request) -> Subject:
    if not script.is_file():
        raise UnpredictableError(f"{script} {'is no file' if os.path.lexists(script) else 'does not exist'}")
    if request.lora is not None or request.base_bits is not None:
        raise UnpredictableError("--lora and --load-in are for models; a script says itself what it trains and loads")
    if request.attention is not None:
        raise UnpredictableError("--attention is for models; a script says itself how it attends")
    learned = rehearse(script, arguments, load_weights=request.load_weights)
    config, notes = _configuration(request.config or learned.config)
    request.put_into(config)
    notes += _of_stages(config)
    predictor = Predictor(learned.model, _workload(script, learned, request, notes))
    return Subject(predictor, config, True, notes, request)


def _model_of(target: str, request: Request, workload: Workload) -> Any:
    """The name itself, or the model with what it is to have."""
    if request.lora is None and request.base_bits is None:
        return target
    if request.lora is None:
        raise UnpredictableError(
            f"weights of {request.base_bits} bits do not train: add --lora r=16, or give --inference without --load-in"
        )
    model = build(target, workload)
    if request.base_bits is not None:
        model = load_in(model, request.base_bits)
    return add_lora(model, request.lora)


def _workload(script: Path, learned: Learned, request: Request, notes: list[str]) -> Workload:
    inputs, shape = learned.inputs, learned.shape
    if not inputs:
        if request.seq_len is None:
            raise UnpredictableError(
                f"{script} stopped before its first batch: {learned.stopped}\n  give --seq-len, and --micro-batch"
            )
        notes.append(f"the script stopped before its first batch: {learned.stopped}")
    elif request.seq_len is not None:
        if shape is None:
            raise UnpredictableError(f"{script}: --seq-len, but its batches have no input_ids of [samples, tokens]")
        inputs = with_length(inputs, shape[1], request.seq_len)
    elif shape is not None:
        notes.append(f"sequences of {shape[1]} tokens, as in the script's first batch; --seq-len for other ones")
    samples = shape[0] if shape else next((len(v) for v in inputs.values() if isinstance(v, Tensor) and v.dim()), 1)
    return Workload(
        micro_batch=request.micro_batch or samples,
        seq_len=request.seq_len or (shape[1] if shape else DEFAULT_LENGTH),
        gradient_checkpointing=request.recomputes,
        optimizer=learned.optimizer or "AdamW",
        inputs=inputs or None,
    )


def _of_stages(config: dict[str, Any]) -> list[str]:
    stages = (config.get("pipeline") or {}).get("stages")
    batch = [config.get(name) for name in ("train_batch_size", "gradient_accumulation_steps")]
    if not isinstance(stages, int) or stages < 2 or any(isinstance(size, int) for size in batch):
        return []
    return [
        f"no gradient_accumulation_steps: taken for 1 micro-batch a step, so {stages} stages never have several in "
        "flight; give a configuration"
    ]


def _configuration(source: Any) -> tuple[dict[str, Any], list[str]]:
    """As a dict, with "auto" of bf16 decided."""
    if source is None:
        return copy.deepcopy(_DEFAULT_CONFIG), ["no configuration given: bf16 with AdamW"]
    config = copy.deepcopy(load_config(source, allow_auto=True, check_batch=False).resolved)
    notes = []
    for name, value in (("bf16", True), ("fp16", False)):
        block = config.get(name)
        if isinstance(block, dict) and block.get("enabled") == "auto":
            block["enabled"] = value and not _is_on(config.get("fp16"))
            notes.append(f'{name}.enabled is "auto": taken as {str(block["enabled"]).lower()}')
    return config, notes


def _is_on(block: Any) -> bool:
    return isinstance(block, dict) and block.get("enabled") is True
