"""Hooks on what the Trainer makes of a model's loss: numbers are those of one process, on any mesh.

The Trainer divides the sum of a step's losses by the items (tokens with a label) of the whole step. Two of its roads
go wrong where an engine trains:

- *Divided sequences*: transformers leaves ``compute_loss`` early, and with it go the items of the step, label smoothing
  and ``compute_loss_func``. Here all of them take the plain road, over the parts: with the items of the step each part
  gives a sum, and the mean over the parts of ``sum / (items / parts)`` is the loss; without them each micro-batch is a
  mean over its tokens. A function of the user's gets the outputs and labels of whole sequences.
- *Several processes*: the Trainer multiplies the finished loss by their number, so whatever the model added to the sum
  (the balance of experts) is multiplied as well. Here the items are divided by it instead.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from ds_hf.engine.modules.own_loss import ignores_items
from ds_hf.errors import ConfigError
from ds_hf.hf.autoload import wrap
from ds_hf.log import warn_once

if TYPE_CHECKING:
    from ds_hf.deepspeed_api.engine import Engine
    from ds_hf.engine.comm.mesh import Axis

__all__ = ["Args", "Kwargs", "Wrapped", "engine_of", "prepare_loss", "with_values", "wrap_loss"]

Wrapped = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_IGNORED = -100
_NAMES = ("model", "inputs", "return_outputs", "num_items_in_batch")


def wrap_loss(module: ModuleType) -> None:
    """Part of the hook of ``transformers.trainer``."""
    hooks = {
        "__init__": _ask_the_model,
        "get_batch_samples": _count_step,
        "_get_num_items_in_batch": _count_batch,
        "compute_loss": _compute_loss,
        "prediction_step": _prediction_step,
    }
    for name, hook in hooks.items():
        wrap(module, f"Trainer.{name}", hook)


def engine_of(trainer: Any) -> Engine | None:
    """The engine that trains now."""
    engine = getattr(trainer, "deepspeed", None)
    if engine is None:
        return None
    from ds_hf.deepspeed_api.engine import Engine

    return engine if isinstance(engine, Engine) else None


@contextmanager
def with_values(target: Any, **values: Any) -> Iterator[None]:
    """Attributes of ``target`` have these values inside."""
    before = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)


def _shares_sequences(trainer: Any) -> bool:
    """Whether transformers divides sequences with DeepSpeed here."""
    sizes = getattr(trainer.accelerator, "parallelism_config", None)
    return sizes is not None and getattr(sizes, "sp_size", 1) > 1 and sizes.sp_backend == "deepspeed"


def _ask_the_model(wrapped: Wrapped, trainer: Any, args: Args, kwargs: Kwargs) -> None:
    """Whether the model divides by the items of a step, which transformers denies of every model whose sequences are
    divided."""
    wrapped(*args, **kwargs)
    if not _shares_sequences(trainer) or trainer.model_accepts_loss_kwargs:
        return
    model = _bare_model(trainer)
    kinds = (param.kind for param in inspect.signature(model.forward).parameters.values())
    accepts = getattr(model, "accepts_loss_kwargs", None)
    trainer.model_accepts_loss_kwargs = inspect.Parameter.VAR_KEYWORD in kinds if accepts is None else accepts


def _bare_model(trainer: Any) -> Any:
    model = trainer.accelerator.unwrap_model(trainer.model)
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def _shifts_smoothed(trainer: Any) -> bool:
    """Whether label smoothing takes the labels of the next token, which the Trainer tells by the model's name."""
    if trainer.label_smoother is None:
        return True
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return type(_bare_model(trainer)).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def prepare_loss(trainer: Any, loader: Any) -> None:
    """Before the first step: what cannot be computed over parts of sequences.

    Args:
        loader: of the training batches; it keeps the labels for a function of the user's.

    Raises:
        ConfigError: the loss would be another one.
    """
    axis = _sequence_axis(trainer)
    if axis is None:
        return
    _scale_noise(trainer, axis.world_size)
    _tell_of_repeated_batches(trainer, axis.world_size)
    if getattr(trainer, "aux_loss_enabled", False) and trainer.args.gradient_accumulation_steps > 1:
        raise ConfigError(
            f"{type(trainer).__name__} (TRL) divides the balance of experts by the accumulation steps, and leaves that "
            "out where sequences are divided: the balance would weigh as many times too much. Accumulate over one "
            "micro-batch, give router_aux_loss_coef=0.0, or take no sequence-parallel size",
            "sequence_parallel_size",
        )
    loader.keeps_labels = not (
        trainer.compute_loss_func is None
        and _shifts_smoothed(trainer)
        and getattr(trainer, "_loss_shifts_labels", True)
    )
    if trainer.compute_loss_func is not None:
        warn_once(
            "compute_loss_func is given the outputs of whole sequences: each process gathers all logits of its "
            "micro-batch, which divided sequences save otherwise"
        )
        return
    model = _bare_model(trainer)
    name, kind = type(model).__name__, getattr(model, "loss_type", None)
    if trainer.label_smoother is not None:
        return
    if kind is not None and not getattr(trainer, "_loss_shifts_labels", True):
        raise ConfigError(
            f"the loss of {name} ({kind}) takes the label at each token, and labels of divided sequences are those of "
            "the next token: give the Trainer a compute_loss_func, which gets whole sequences, or take no "
            "sequence-parallel size",
            "sequence_parallel_size",
        )
    try:
        text = inspect.getsource(model.forward)
    except (OSError, TypeError):
        return
    if any(word in text for word in ("CrossEntropyLoss", "cross_entropy")) and not any(
        word in text for word in ("shift_labels", "loss_function")
    ):
        raise ConfigError(
            f"{name}.forward computes its loss itself and takes no shift_labels: it would shift labels inside each "
            "part of a sequence. Have it call self.loss_function(..., **kwargs), or give the Trainer a "
            "compute_loss_func, which gets whole sequences",
            "sequence_parallel_size",
        )


def _scale_noise(trainer: Any, parts: int) -> None:
    """NEFTune divides its noise by the square root of a sequence's length, and sees that of a part."""
    if getattr(trainer, "neftune_noise_alpha", None) is not None:
        for module in _bare_model(trainer).modules():
            if "neftune_noise_alpha" in vars(module):
                module.neftune_noise_alpha = trainer.neftune_noise_alpha / math.sqrt(parts)


def _tell_of_repeated_batches(trainer: Any, parts: int) -> None:
    """accelerate deals batches out to all processes, and fills up so that each has as many."""
    args, engine = trainer.args, engine_of(trainer)
    if engine is None:
        return
    data = int(engine.mesh.shape.data)
    if isinstance(trainer.train_dataset, IterableDataset):
        together = parts * data * args.per_device_train_batch_size
        warn_once(
            f"streamed data: if a pass ends amid the {together} samples that {parts * data} processes take together, "
            "accelerate divides those that are left into smaller batches, or repeats the first ones, so that the last "
            f"steps are others than without divided sequences. Give a stream of a multiple of {together} samples, or a "
            "max_steps before its end; dataloader_drop_last has no effect on streams"
        )
        return
    if args.dataloader_drop_last or not hasattr(trainer.train_dataset, "__len__"):
        return
    batches = -(-len(trainer.train_dataset) // args.per_device_train_batch_size)
    repeated = -batches % (parts * data) - -batches % data
    if repeated > 0:
        warn_once(
            f"an epoch has {batches} batches, which {parts * data} processes do not share evenly: accelerate repeats "
            f"its first batches, {repeated} more than without divided sequences. Give dataloader_drop_last=True, or a "
            f"data set of a multiple of {parts * data * args.per_device_train_batch_size} samples"
        )


def _sequence_axis(trainer: Any) -> Axis | None:
    engine = engine_of(trainer)
    return None if engine is None or engine.mesh.shape.sequence == 1 else engine.mesh.axis("sequence")


# -- items ------------------------------------------------------------------------------------------------------------


def _count_step(wrapped: Wrapped, trainer: Any, args: Args, kwargs: Kwargs) -> Any:
    """The items of a step's micro-batches as the model will see them, and of all parts. Collective where sequences are
    divided."""
    engine = engine_of(trainer)
    if engine is not None and "curriculum" in engine.kept:
        args, kwargs = _of_cut_batches(engine, args, kwargs)
    batches, items = wrapped(*args, **kwargs)
    axis = _sequence_axis(trainer)
    if axis is None or not batches:
        return batches, items
    if not (trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None):
        return batches, None
    counts = [_labels_of(trainer, batch) for batch in batches]
    if any(labels is None for labels in counts):
        return batches, None
    from ds_hf.engine.comm.collectives import all_reduce_sum

    assert engine is not None
    own = torch.stack([(labels != _IGNORED).sum() for labels in counts]).sum().to(engine.device)
    among = engine.axis if trainer.args.average_tokens_across_devices else axis
    return batches, all_reduce_sum(own, among, "number of items of a step")


def _of_cut_batches(engine: Engine, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """The arguments of ``get_batch_samples``, whose iterator gives batches that a curriculum has cut."""
    given = dict(zip(("epoch_iterator", "num_batches", "device"), args, strict=False)) | kwargs
    given["epoch_iterator"] = map(engine.cut_to_curriculum, given["epoch_iterator"])
    return (), given


def _labels_of(trainer: Any, batch: Any) -> Any:
    """What counts: as the Trainer sees it in a process with whole sequences, where a model without ``loss_type``
    (GPT-2) has the first label of each sample among its items."""
    if getattr(trainer, "_loss_shifts_labels", True) or "labels" not in batch:
        return batch.get("shift_labels")
    return batch["labels"]


def _count_batch(wrapped: Wrapped, trainer: Any, args: Args, kwargs: Kwargs) -> Any:
    """In evaluation processes of a sequence have whole sequences of their own: a batch is a mean over its items, with
    ``average_tokens_across_devices`` over those of as many batches as data parallelism alone would weigh together.

    The Trainer divides by the number of processes that share layers or sequences, as if all had the same batch and had
    been summed over, and before 5.18 without a remainder.
    """
    given = dict(zip(("batch_samples", "device"), args, strict=False)) | kwargs
    engine = engine_of(trainer)
    if not _shares_sequences(trainer):
        if engine is not None and engine.mesh.shape.tensor > 1 and not trainer.args.average_tokens_across_devices:
            given["batch_samples"] = list(given["batch_samples"]) * _divisor(wrapped, trainer)
        return wrapped(**given)
    data = 1 if engine is None or trainer.model.training else int(engine.mesh.shape.data)
    together = data > 1 and trainer.args.average_tokens_across_devices
    if trainer.compute_loss_func is None and not together:
        return None
    sizes = trainer.accelerator.parallelism_config
    tensor = sizes.tp_size or 1
    given["batch_samples"] = list(given["batch_samples"]) * (sizes.sp_size * tensor * (sizes.cp_size or 1))
    with with_values(trainer.args, average_tokens_across_devices=False):
        items = wrapped(**given)
    if items is None or not together:
        return items
    # Neighbours read the batches that data parallelism alone would have dealt out to as many processes; of the last
    # ones only the samples count that the data set has.
    own, size = _own_samples(trainer) or (1, 1)
    counted = torch.tensor([[float(items) * (own > 0), own / size]], dtype=torch.float64, device=trainer.args.device)
    every = trainer.accelerator.gather(counted).view(-1, data * tensor, 2)
    tokens, filled = every[trainer.accelerator.process_index // (data * tensor)].sum(0) / tensor
    return (tokens * (own / size) / filled).float() if own > 0 else items


def _divisor(wrapped: Wrapped, trainer: Any) -> int:
    """What transformers divides items by: before 5.18 the processes that accelerate was told of, and no others."""
    code = getattr(inspect.unwrap(wrapped), "__code__", None)
    if code is None or "get_tp_size" in code.co_names:
        return int(trainer.get_tp_size())
    sizes = getattr(trainer.accelerator, "parallelism_config", None)
    return 1 if sizes is None else int(sizes.non_data_parallel_size)


def _prediction_step(wrapped: Wrapped, trainer: Any, args: Args, kwargs: Kwargs) -> Any:
    """accelerate fills the last batches of an evaluation up with the first samples, and cuts the answers for those off
    again; in the loss of a batch, which is a mean, they are counted. So they are left out where sequences are divided,
    or lose their labels where other answers are gathered, and the loss is that of one process."""
    given = dict(zip(("model", "inputs", "prediction_loss_only", "ignore_keys"), args, strict=False)) | kwargs
    engine = engine_of(trainer)
    if engine is not None and engine.mesh.shape.sequence > 1:
        given["inputs"] = _without_repeated(trainer, given["inputs"], cuts=bool(given["prediction_loss_only"]))
    return wrapped(**given)


def _own_samples(trainer: Any) -> tuple[int, int] | None:
    """Of a last batch that was filled up: how many of its samples are this process's, 0 at least, and its size."""
    state, processes = trainer.accelerator.gradient_state, trainer.accelerator.num_processes
    if not (state.end_of_dataloader and state.remainder > 0):
        return None
    readers = processes // trainer.get_tp_size()
    # One process that reads for all (dispatch_batches) has no such size, and fills up no further than to equal parts.
    size = (getattr(state.active_dataloader, "total_batch_size", None) or state.remainder + readers - 1) // readers
    place = trainer.accelerator.process_index * readers // processes
    return min(max(state.remainder - place * size, 0), size), size


def _without_repeated(trainer: Any, inputs: Any, *, cuts: bool) -> Any:
    """``inputs`` without the samples that fill the last batch up, or their labels, unless it has no others."""
    names = [name for name in trainer.label_names if isinstance(inputs.get(name), Tensor) and inputs[name].ndim]
    own, size = _own_samples(trainer) or (0, 0)
    if not names or not 0 < own < size == inputs[names[0]].shape[0]:
        return inputs
    inputs = dict(inputs)
    if cuts:
        rows = {name for name, value in inputs.items() if isinstance(value, Tensor) and value.shape[:1] == (size,)}
        return {name: value[:own] if name in rows else value for name, value in inputs.items()}
    for name in names:
        if not inputs[name].is_floating_point():
            inputs[name] = inputs[name].clone()
            inputs[name][own:] = _IGNORED
    return inputs


# -- the loss ---------------------------------------------------------------------------------------------------------


def _compute_loss(wrapped: Wrapped, trainer: Any, args: Args, kwargs: Kwargs) -> Any:
    engine = engine_of(trainer)
    given = dict(zip(_NAMES, args, strict=False)) | kwargs
    if engine is None:
        return wrapped(*args, **kwargs)
    if engine.mesh.shape.sequence > 1 and trainer.model.training:
        return _loss_of_parts(trainer, engine, **given)
    if engine.mesh.shape.sequence > 1:  # whole sequences, whose items are counted as they have to be
        with with_values(trainer.args, average_tokens_across_devices=False):
            return wrapped(**given)
    items, processes = given.get("num_items_in_batch"), engine.axis.world_size
    own = trainer.compute_loss_func is not None or trainer.label_smoother is not None
    if not own and items is not None and trainer.model.training and trainer.model_accepts_loss_kwargs:
        _tell_of_means(trainer, processes)
    if own or processes == 1 or not (trainer.args.average_tokens_across_devices and trainer.model_accepts_loss_kwargs):
        return wrapped(*args, **kwargs)
    if items is None or not _adds_to_the_sum(_bare_model(trainer)):
        return wrapped(*args, **kwargs)  # to the bit what the Trainer makes of it without an engine
    given["num_items_in_batch"] = items / processes
    with with_values(trainer.args, average_tokens_across_devices=False):
        return wrapped(**given)


def _tell_of_means(trainer: Any, processes: int) -> None:
    """Once: the model computes a mean, which the Trainer takes for a part of the step's sum."""
    if "_ds_told_of_means" in vars(trainer):
        return
    trainer._ds_told_of_means = True
    model, steps = _bare_model(trainer), trainer.args.gradient_accumulation_steps
    factor = steps * (processes if trainer.args.average_tokens_across_devices else 1)
    if factor > 1 and ignores_items(model):
        warn_once(
            f"{type(model).__name__}'s loss is a mean over each micro-batch, which transformers' Trainer takes for a "
            f"part of one over the whole step: losses and gradients are {factor} times as large as those of the same "
            "step on one process without accumulation, with DeepSpeed and without it. With model.accepts_loss_kwargs = "
            "False, before the Trainer is made, the Trainer divides them"
        )


def _adds_to_the_sum(model: Any) -> bool:
    """Whether the model adds the balance of experts to the sum over tokens."""
    own = getattr(model, "config", None)
    return any("aux_loss" in name for part in (own, getattr(own, "text_config", None)) for name in vars(part or object))


def _loss_of_parts(
    trainer: Any,
    engine: Engine,
    model: Any,
    inputs: dict[str, Any],
    return_outputs: bool = False,
    num_items_in_batch: Any = None,
) -> Any:
    """``compute_loss`` over the parts of sequences: the loss of the whole, the same on all of its processes."""
    axis, inputs = engine.mesh.axis("sequence"), dict(inputs)
    copies = engine.mesh.shape.data if trainer.args.average_tokens_across_devices else 1  # of what is averaged
    if trainer.compute_loss_func is not None:
        loss, outputs = _by_function(trainer, model, inputs, axis, num_items_in_batch)
        loss = loss * copies if num_items_in_batch is not None else loss
        return (loss, outputs) if return_outputs else loss
    labels = inputs.get("shift_labels")
    if not isinstance(labels, Tensor):
        raise ValueError(
            "a batch of divided sequences has no labels, which the loss of each part is weighed by: have the collator "
            "give labels, or the Trainer a compute_loss_func"
        )
    share = None if num_items_in_batch is None else num_items_in_batch / (axis.world_size * copies)
    if trainer.label_smoother is not None:
        labels = labels if _shifts_smoothed(trainer) else inputs["labels"]
        loss, outputs = _smoothed(trainer.label_smoother, model, inputs, labels, share)
    else:
        inputs.setdefault("labels", labels)  # without them the model computes no loss
        if share is not None and trainer.model_accepts_loss_kwargs:
            inputs["num_items_in_batch"] = share
        outputs = model(**inputs)
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
    from ds_hf.engine.parallel.sequence.losses import gather, mean_over_tokens

    counted = (labels != _IGNORED).sum()
    loss = mean_over_tokens(loss, counted, axis) if share is None else gather(loss.reshape(1), axis).mean()
    return (loss, outputs) if return_outputs else loss


def _smoothed(smoother: Any, model: Any, inputs: dict[str, Any], labels: Tensor, share: Any) -> tuple[Tensor, Any]:
    """Label smoothing of one part, whose ``labels`` are shifted already if they should be."""
    outputs = model(**{name: value for name, value in inputs.items() if name not in ("labels", "shift_labels")})
    counts = {} if share is None else {"num_items_in_batch": share}
    return smoother(outputs, labels, **counts), outputs


def _by_function(trainer: Any, model: Any, inputs: dict[str, Any], axis: Axis, items: Any) -> tuple[Tensor, Any]:
    """A function of the user's may look at neighbours: it gets whole sequences."""
    from ds_hf.engine.parallel.sequence.losses import gather, gather_whole

    labels = inputs.pop("labels", None)
    inputs.pop("shift_labels", None)
    tokens = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
    outputs = model(**inputs)

    def whole(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(whole(each) for each in value)
        if not isinstance(value, Tensor) or value.shape[:2] != tokens.shape[:2]:
            return value
        if value.is_floating_point():
            return gather(value, axis, dim=1, what="outputs")
        return gather_whole(value, axis, 1, "outputs")

    if isinstance(outputs, dict):
        outputs = type(outputs)(**{name: whole(value) for name, value in outputs.items()})
    else:
        outputs = whole(outputs)
    labels = gather_whole(labels, axis, 1, "labels") if isinstance(labels, Tensor) else labels
    return trainer.compute_loss_func(outputs, labels, num_items_in_batch=items), outputs
