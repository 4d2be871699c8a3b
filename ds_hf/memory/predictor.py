"""``Predictor``: one model and workload, priced for any configuration and number of processes.

A timeline depends on the micro-batch, the dtype and whether units are gathered; it is recorded once for each of these
and then priced in a millisecond, so a table over stages and offload costs two recordings.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from ds_hf.config import load_config
from ds_hf.config.mesh import TOPOLOGY, Claim, mesh_shape, refuse_beside_pipelines
from ds_hf.config.optimizer_traits import ONE_BIT, Traits, traits_of
from ds_hf.config.plan import StatePlan, plan_states
from ds_hf.config.types import Config
from ds_hf.deepspeed_api.moe.layer import expert_claims
from ds_hf.engine.casting import set_buffer_dtypes
from ds_hf.engine.modules.positions import positions_of
from ds_hf.engine.modules.quantized.settings import quantize_by_settings
from ds_hf.engine.modules.tiling.models import chunks_loss
from ds_hf.engine.parallel.experts.divide import divide_experts_without_values
from ds_hf.engine.parallel.experts.separate import separate_experts
from ds_hf.engine.parallel.pipeline.division import LayerDivision
from ds_hf.engine.parallel.pipeline.schedule import in_flight
from ds_hf.engine.parallel.tensor.divide import divide_without_values
from ds_hf.engine.zero.leaf import mark_leaves
from ds_hf.engine.zero.replicas import divide_over_experts
from ds_hf.memory.divided import divided_sequences, part_of
from ds_hf.memory.models import build, example_inputs, with_length, without_values
from ds_hf.memory.prediction import Prediction, UnpredictableError, Workload
from ds_hf.memory.pricing import DEVICE_MEMORY, Costs, price
from ds_hf.memory.stages import Stage, division_of
from ds_hf.memory.timeline import SOURCE, Sharding, Timeline, between, record

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["Predictor", "largest_micro_batch", "predict"]

_ONE_AT_A_TIME = threading.RLock()  # a recording replaces functions of torch and transformers, for all threads
_LIMIT = 1 << 16  # samples; no micro-batch is larger
_STEP, _LONGEST = 256, 1 << 27  # tokens: what the longest sequence is a multiple of, and is not longer than


class Predictor:
    """Predicts for one model.

    Args:
        model: a module (it is copied without its values, and left as it is), a transformers configuration, or what
            names one: a folder, a name in the local cache, ``"llama:hidden=4096,layers=32"``.
        workload: what one process computes; default 1 x 2048 tokens.

    Raises:
        UnpredictableError: the model cannot be built or run without values.
    """

    def __init__(self, model: nn.Module | PretrainedConfig | str | Path, workload: Workload | None = None) -> None:
        self.workload = workload or Workload()
        self.streams = True  # the device has them; a CPU, on which predictions are tested, has none
        given = isinstance(model, nn.Module)
        self._model = without_values(model).train() if given else build(model, self.workload)  # type: ignore[arg-type]
        with _quiet():
            _set_checkpointing(self._model, self.workload.gradient_checkpointing)
        self._timelines: dict[Any, Timeline] = {}
        self._divisions: dict[tuple[int, int], LayerDivision] = {}

    @property
    def model(self) -> nn.Module:
        """The copy on the meta device, in the dtype in which it was given."""
        return self._model

    def predict(
        self, config: Any, *, world_size: int = 1, micro_batch: int | None = None, device_memory: int = DEVICE_MEMORY
    ) -> Prediction:
        """Bytes for a configuration.

        Args:
            config: what ``initialize`` takes (path, dict, JSON text, preset) or a ``Config``; "auto" may be left in it.
            world_size: data-parallel processes.
            micro_batch: samples; default the configuration's, else the workload's.
            device_memory: bytes of the device: what "auto" makes of ``ds_hf.offload.stream`` depends on it.

        Raises:
            ConfigError: the configuration has faults.
            UnpredictableError: the model does not run without values.

        Of a pipeline (``pipeline.stages``) the stage that takes most; ``Prediction.stages`` has all.
        """
        settings = _settings(config)
        plan = plan_states(settings)
        batch = micro_batch or _micro_batch(settings, world_size) or self.workload.micro_batch
        costs = self._costs(settings, world_size, device_memory)
        return _priced(self._recordings(settings, plan, batch), settings, plan, costs, batch)

    def predict_each(
        self, config: Any, micro_batches: Sequence[int], *, world_size: int = 1, device_memory: int = DEVICE_MEMORY
    ) -> dict[int, Prediction]:
        """Bytes for several micro-batches: the smallest and the largest are recorded, and those between interpolated.

        Raises:
            ConfigError, UnpredictableError: as ``predict``.
        """
        settings = _settings(config)
        plan, costs = plan_states(settings), self._costs(settings, world_size, device_memory)
        low, high = min(micro_batches), max(micro_batches)
        first, last = self._recordings(settings, plan, low), self._recordings(settings, plan, high)

        def at(batch: int) -> Recordings:
            return first if batch == low else _between(first, last, (batch - low) / (high - low))

        return {batch: _priced(at(batch), settings, plan, costs, batch) for batch in micro_batches}

    def largest_micro_batch(self, config: Any, *, world_size: int = 1, device_memory: int, exact: bool = True) -> int:
        """Most samples that fit ``device_memory`` bytes; 0 if not even one does.

        Memory is nearly linear in the micro-batch: it is looked for between two recordings, and then checked.

        Args:
            exact: check; otherwise the answer may be a little low.
        """
        settings = _settings(config)
        plan, costs = plan_states(settings), self._costs(settings, world_size, device_memory)

        def fits(recordings: Recordings, batch: int) -> bool:
            return _priced(recordings, settings, plan, costs, batch).device_total <= device_memory

        return _largest(lambda batch: self._recordings(settings, plan, batch), fits, _LIMIT, exact=exact)

    def longest_sequence(
        self,
        config: Any,
        *,
        world_size: int = 1,
        micro_batch: int | None = None,
        device_memory: int,
        exact: bool = True,
        multiple: int = _STEP,
    ) -> int:
        """Most tokens of a sample, in steps of ``multiple`` for each process that shares it, that fit
        ``device_memory`` bytes.

        Args:
            micro_batch: as of ``predict``.
            exact: as of ``largest_micro_batch``.

        Returns:
            0 if not even one such step fits.

        Raises:
            ConfigError, UnpredictableError: as ``predict``; or the model's batch has no tokens.
        """
        settings = _settings(config)
        plan, costs = plan_states(settings), self._costs(settings, world_size, device_memory)
        batch = micro_batch or _micro_batch(settings, world_size) or self.workload.micro_batch
        step = multiple * settings.sequence_parallel_size
        most = min(_LONGEST, positions_of(self._model) or _LONGEST) // step

        def fits(recordings: Recordings, steps: int) -> bool:
            return _priced(recordings, settings, plan, costs, batch).device_total <= device_memory

        def recorded(steps: int) -> Recordings:
            return self._recordings(settings, plan, batch, steps * step)

        return step * _largest(recorded, fits, most, exact=exact) if most else 0

    def _costs(self, settings: Config, world_size: int, device_memory: int) -> Costs:
        zero = settings.zero_optimization
        optimizer = settings.optimizer.type if settings.optimizer is not None else self.workload.optimizer
        params = dict(settings.optimizer.params) if settings.optimizer is not None else {}
        traits = traits_of(optimizer)
        one_bit = optimizer.lower() in ONE_BIT
        with_momentum = optimizer.lower() == "sgd" and params.get("momentum")
        plan = plan_states(settings)
        layers = expert_claims(self._model)
        tensor, pipe = _tensor(settings), _pipe(settings)
        experts = max([_experts(settings), *(claim.size for claim in layers)])
        if plan.inner is not None or settings.sequence_parallel_size * tensor * pipe * experts > 1:
            # refuses groups that do not divide the processes, and what does not go together with stages
            layers += [Claim("pipe", pipe, "pipeline.stages", TOPOLOGY)] if pipe > 1 else []
            mesh_shape(settings, world_size, layers)
            refuse_beside_pipelines(settings, layers)
        return Costs(
            world_size=world_size // pipe,
            moments=1 if with_momentum else traits.moments - one_bit,
            accumulation_steps=_accumulation(settings, world_size),
            whole_step=not traits.streamed,
            optimizer_place=_place(plan.shards_optimizer, zero.offload_optimizer.device),
            parameter_place=_place(plan.shards_parameters, zero.offload_param.device),
            pinned=zero.offload_optimizer.pin_memory,
            streams=self.streams,
            split_masters=plan.may_split_masters
            and traits.by_element
            and (self.streams or settings.ds_hf.split_masters is True),
            device_share=_device_share(settings) if traits.streamed else 0.0,
            streamed_share=self._streamed_share(settings, traits),
            device_memory=device_memory,
            cut_over=max(tensor, experts),
            pipe=pipe,
            one_bit=one_bit,
            chosen=0.0 if zero.zenflow is None else zero.zenflow.topk_ratio,
            chosen_on_host=zero.zenflow is not None and zero.zenflow.offload,
        )

    def _streamed_share(self, settings: Config, traits: Traits) -> float | Literal["auto"]:
        """As ``engine.offloading`` has it before the engine looks at sizes and link."""
        own = settings.ds_hf.offload
        if not traits.by_element or own.delayed or settings.zero_optimization.zenflow is not None:
            return 0.0
        if own.stream == "auto" and not (self.streams and settings.zero_optimization.offload_optimizer.pin_memory):
            return 0.0
        return own.stream

    def _recordings(self, settings: Config, plan: StatePlan, batch: int, length: int | None = None) -> Recordings:
        """A timeline for each stage of the pipeline, or one."""
        return tuple(self._timeline(settings, plan, batch, length, stage) for stage in range(_pipe(settings)))

    def _timeline(
        self, settings: Config, plan: StatePlan, batch: int, length: int | None = None, stage: int = 0
    ) -> Timeline:
        sharding = Sharding(False, joins=plan.joins_blocks)
        if plan.shards_parameters:
            zero = settings.zero_optimization
            ahead, most = zero.stage3_prefetch_bucket_size > 0, zero.stage3_max_live_parameters
            sharding = Sharding(True, plan.whole_below, plan.whole_in_all, ahead, most, plan.joins_blocks)
        own = settings.ds_hf
        sharding = dataclasses.replace(
            sharding,
            offloads=settings.activation_checkpointing.cpu_checkpointing or own.offload_activations,
            tiled_mlp=own.tiled_mlp,
            chunked_loss=chunks_loss(own.chunked_loss, self._model),
            gathers_logits=settings.tensor_parallel.vocab_parallel_lm_head is False,
            fuses_adapters=own.fused_lora and not (own.compile or own.capture),
        )
        if own.compile and own.tiled_mlp is None and settings.sequence_parallel_size == 1:  # else graphs break inside
            sharding = dataclasses.replace(sharding, compiled=True, budget=own.activation_memory_budget)
        leaf = settings.zero_optimization.leaf_module
        processes, length = settings.sequence_parallel_size, length or self.workload.seq_len
        tensor, experts = _tensor(settings), settings.expert_parallel
        cut = (_pipe(settings), settings.ds_hf.pipeline.chunks, stage)
        recomputes = cut[0] > 1 and settings.pipeline.activation_checkpoint_interval > 0
        kind = (plan.parameters.dtype, sharding, leaf, settings.data_types, own.tensor_sequence_parallel)
        few_bits = (repr(settings.weight_quantization), settings.zero_optimization.zero_quantized_nontrainable_weights)
        key = (batch, length, processes, tensor, experts, *kind, cut, recomputes, few_bits)
        if key not in self._timelines:
            workload = _of_part(self.workload, batch, length, processes)
            model = copy.deepcopy(self._model)
            if tensor > 1:
                divide_without_values(model, tensor, settings.tensor_parallel, tokens=own.tensor_sequence_parallel)
            if experts.enabled:
                divide_experts_without_values(model, experts)
            for _, separate in separate_experts(model):
                for param in separate.parameters():
                    divide_over_experts(param, separate.ep_size)
            if recomputes:
                with _quiet():
                    _set_checkpointing(model, True)
            if cut[0] > 1:
                model = Stage(model, self._division(*cut[:2]), stage)
            model = _cast(model, settings, plan)
            quantize_by_settings(settings, model, trains=True, dtype=plan.parameters.dtype)
            mark_leaves(model, leaf.classes, leaf.names, leaf.name_suffixes)
            with _ONE_AT_A_TIME, divided_sequences(model, processes):
                self._timelines[key] = _recorded(model, workload, sharding)
        return self._timelines[key]

    def _division(self, stages: int, chunks: int) -> LayerDivision:
        """The layers of each stage."""
        if (stages, chunks) not in self._divisions:
            self._divisions[stages, chunks] = division_of(self._model, stages, chunks)
        return self._divisions[stages, chunks]


Recordings = tuple[Timeline, ...]


def _priced(recordings: Recordings, settings: Config, plan: StatePlan, costs: Costs, batch: int) -> Prediction:
    """Of one process, or of one of the stage that takes most."""
    if len(recordings) == 1:
        return price(recordings[0], plan, costs, micro_batch=batch)
    chunks, found = settings.ds_hf.pipeline.chunks, []
    for stage, timeline in enumerate(recordings):
        try:
            kept = in_flight(costs.accumulation_steps, len(recordings), stage, chunks)
        except ValueError as error:
            raise UnpredictableError(f"ds_hf.pipeline.chunks is {chunks}: {error}") from error
        found.append(price(timeline, plan, dataclasses.replace(costs, in_flight=kept), micro_batch=batch))
    most = max(found, key=lambda each: each.device_total)
    return dataclasses.replace(most, stages=tuple(found))


def _between(first: Recordings, last: Recordings, share: float) -> Recordings:
    return tuple(between(one, other, share) for one, other in zip(first, last, strict=True))


def _device_share(settings: Config) -> float:
    """Of offloaded states; none with "auto", which moves to the device what turns out to fit."""
    own = settings.ds_hf.offload.ratio
    ratio = settings.zero_optimization.offload_optimizer.ratio if own is None else own
    return 0.0 if isinstance(ratio, str) else 1.0 - float(ratio)


def _settings(config: Any) -> Config:
    return config if isinstance(config, Config) else load_config(config, allow_auto=True, check_batch=False)


def _of_part(workload: Workload, batch: int, length: int, processes: int) -> Workload:
    """The part of one of ``processes`` that share sequences of ``length`` tokens."""
    part, inputs = part_of(length, processes), workload.inputs
    if inputs is not None and part != workload.seq_len:
        if not any(workload.seq_len in value.shape[1:] for value in inputs.values() if isinstance(value, torch.Tensor)):
            raise UnpredictableError(
                f"nothing in the batch has {workload.seq_len} tokens: give Workload(seq_len=...) as the inputs have it"
            )
        inputs = with_length(inputs, workload.seq_len, part)
    return dataclasses.replace(workload, micro_batch=batch, seq_len=part, inputs=inputs)


def _largest(
    recorded: Callable[[int], Recordings], fits: Callable[[Recordings, int], bool], limit: int, *, exact: bool
) -> int:
    """The largest number up to ``limit`` whose timeline fits, 0 if not even 1: looked for between two recordings."""
    if not fits(recorded(1), 1):
        return 0
    low, high = 1, min(8, limit + 1)
    while high <= limit and fits(recorded(high), high):
        low, high = high, min(high * 8, limit + 1)
    poor = 0  # guesses that left more than half: where memory does not grow linearly
    while high - low > 1:
        guess, width = (low + high) // 2, high - low
        if poor < 2 and high <= limit:
            guess = _guess(recorded(low), recorded(high), (low, high), fits)
            if not exact:
                return guess
        guess = min(max(guess, low + 1), high - 1)
        low, high = (guess, high) if fits(recorded(guess), guess) else (low, guess)
        poor = poor + 1 if 2 * (high - low) > width else 0
    return low


def _guess(
    first: Recordings, last: Recordings, bounds: tuple[int, int], fits: Callable[[Recordings, int], bool]
) -> int:
    """The largest micro-batch that fits if memory is linear between ``bounds``, of which only the lower one fits."""
    low, high = bounds
    while high - low > 1:
        middle = (low + high) // 2
        guess = _between(first, last, (middle - bounds[0]) / (bounds[1] - bounds[0]))
        low, high = (middle, high) if fits(guess, middle) else (low, middle)
    return low


def predict(
    model: nn.Module | PretrainedConfig | str | Path,
    config: Any,
    workload: Workload | None = None,
    *,
    world_size: int = 1,
) -> Prediction:
    """Bytes on device, host and disk of one process; for many configurations of one model use ``Predictor``."""
    return Predictor(model, workload).predict(config, world_size=world_size)


def largest_micro_batch(
    model: nn.Module | PretrainedConfig | str | Path,
    config: Any,
    workload: Workload | None = None,
    *,
    world_size: int = 1,
    device_memory: int,
) -> int:
    """Most samples of one micro-batch that fit ``device_memory`` bytes; 0 if not even one does."""
    predictor = Predictor(model, workload)
    return predictor.largest_micro_batch(config, world_size=world_size, device_memory=device_memory)


def _recorded(model: nn.Module, workload: Workload, sharding: Sharding) -> Timeline:
    inputs = _accepted(model, example_inputs(model, workload))
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    inputs = {key: _as(value, dtype) for key, value in inputs.items()}
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    wide = int(getattr(text, "vocab_size", 0) or 0)
    try:
        with _quiet():
            return record(model, inputs, sharding, wide=wide, keeps_outputs=workload.keeps_outputs)
    except Exception as error:  # whatever a model's forward raises when it looks at values
        reason = str(error).strip().splitlines()
        raise UnpredictableError(
            f"{type(model).__name__} does not run without values (on the meta device): "
            f"{type(error).__name__}: {reason[0] if reason else ''}"
        ) from error


def _accepted(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Without what the model's forward does not take; ``None`` values stay."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(inputs)
    names = {parameter.name for parameter in parameters}
    return {key: value for key, value in inputs.items() if key in names}


def _as(value: Any, dtype: torch.dtype) -> Any:
    """Floating inputs in the model's dtype, as the engine casts them."""
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if floating else value


def _cast(model: nn.Module, settings: Config, plan: StatePlan) -> nn.Module:
    """The model as the engine trains it."""
    if plan.parameters.dtype is not None:
        target = getattr(torch, plan.parameters.dtype)
        for param in model.parameters():
            if param.is_floating_point():
                setattr(param, SOURCE, param.element_size())
                param.data = param.data.to(target)
        set_buffer_dtypes(model, settings.data_types, target)
    return model


def _set_checkpointing(model: nn.Module, wanted: bool | None) -> None:
    if wanted is None:
        return
    verb = "enable" if wanted else "disable"
    # the first name is that of transformers from 5.18 on
    for name in (f"activation_checkpointing_{verb}", f"gradient_checkpointing_{verb}"):
        if hasattr(model, name):
            getattr(model, name)()
            return
    if wanted:
        raise UnpredictableError(f"{type(model).__name__} has no gradient_checkpointing_enable()")


def _tensor(settings: Config) -> int:
    """Processes that share each layer."""
    section = settings.tensor_parallel
    return max(section.autotp_size, section.tp.tp_size, 1)


def _experts(settings: Config) -> int:
    """Processes that divide the experts of a layer."""
    return settings.expert_parallel.autoep_size if settings.expert_parallel.enabled else 1


def _pipe(settings: Config) -> int:
    """Stages of a pipeline."""
    stages = settings.pipeline.stages
    return stages if isinstance(stages, int) else 1


def _micro_batch(settings: Config, world_size: int) -> int | None:
    """Of the batch triple, as far as it is given."""
    world_size //= settings.sequence_parallel_size * _tensor(settings) * _pipe(settings)
    micro = settings.train_micro_batch_size_per_gpu
    if micro is not None:
        return int(micro)
    if settings.train_batch_size is None:
        return None
    return max(1, int(settings.train_batch_size) // (int(settings.gradient_accumulation_steps or 1) * world_size))


def _accumulation(settings: Config, world_size: int) -> int:
    world_size //= settings.sequence_parallel_size * _tensor(settings) * _pipe(settings)
    if settings.gradient_accumulation_steps is not None:
        return int(settings.gradient_accumulation_steps)
    if settings.train_batch_size is None or settings.train_micro_batch_size_per_gpu is None:
        return 1
    return max(1, int(settings.train_batch_size) // (int(settings.train_micro_batch_size_per_gpu) * world_size))


def _place(sharded: bool, device: str | None) -> str:
    """Where a row of states rests; what is not sharded is not offloaded."""
    return device if sharded and device in ("cpu", "nvme") else "device"


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what transformers says about deprecated names and caches: nothing is trained here."""
    from transformers.utils import logging as verbosity

    before = verbosity.get_verbosity()
    verbosity.set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        verbosity.set_verbosity(before)
