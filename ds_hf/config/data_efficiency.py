"""Sections of data efficiency: what cannot be, and what ``ds-hf config explain`` says of difficulties over steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ds_hf.config.source import Draft
from ds_hf.config.types.data import cuts_length
from ds_hf.config.types.root import Config
from ds_hf.data.difficulty import CurriculumScheduler, schedule_faults
from ds_hf.data.layer_keeping import ProgressiveLayerDrop
from ds_hf.data.token_schedule import RandomLTDScheduler, token_faults

__all__ = ["check_data", "data_notes", "length_settings"]

_BASE = "/data_efficiency"
_CURRICULUM = f"{_BASE}/data_sampling/curriculum_learning"
_ORDERS = ("batch_seq_dim", "seq_batch_dim")
_FILES = ("index_to_sample_path", "index_to_metric_path")
_SHOWN = 8  # steps of a schedule


def check_data(config: Config, draft: Draft) -> None:
    """Collect what is wrong."""
    if any(draft.faulty(f"/{key}") for key in ("data_efficiency", "curriculum_learning")):
        return
    _switches(config, draft)
    _legacy(config, draft)
    _metrics(config, draft)
    _budget(config, draft)
    _random_ltd(config, draft)
    drops = config.progressive_layer_drop
    if drops.enabled and drops.theta <= 0:
        fix = "give more than 0; 0.5 is usual"
        draft.fault(
            "/progressive_layer_drop/theta", "in the end the last block would never be computed: not above 0", fix
        )
    elif drops.enabled and drops.theta == 1:
        draft.warn(
            "/progressive_layer_drop/theta", "no effect: theta 1 leaves no block out", "give less than 1, such as 0.5"
        )
    lengths = length_settings(config)
    if lengths is None:
        return
    if config.sequence_parallel_size > 1:
        message = "sequences are divided among processes before the curriculum could cut them"
        draft.fault(lengths[0], message, 'set "enabled": false in it, or remove sequence_parallel_size')


def _switches(config: Config, draft: Draft) -> None:
    """What is enabled inside of a block that is not."""
    efficiency = config.data_efficiency
    sampling, routing = efficiency.data_sampling, efficiency.data_routing
    blocks = (
        (f"{_BASE}/data_sampling", sampling.curriculum_learning.enabled, sampling.enabled, "curriculum_learning"),
        (f"{_BASE}/data_sampling", sampling.dynamic_batching.enabled, sampling.enabled, "dynamic_batching"),
        (f"{_BASE}/data_routing", routing.random_ltd.enabled, routing.enabled, "random_ltd"),
    )
    for around, inner, outer, name in blocks:
        off = _BASE if not efficiency.enabled else around if not outer else ""
        if inner and off:
            message = f"no effect: {off[1:].replace('/', '.')} is not enabled (DeepSpeed reads this switch alone)"
            draft.warn(f"{around}/{name}/enabled", message, f'add "enabled": true to {off[1:].replace("/", ".")}')


def _legacy(config: Config, draft: Draft) -> None:
    section, base = config.curriculum_learning, "/curriculum_learning"
    if not section.enabled:
        return
    if section.curriculum_type != "seqlen":
        message = f"this section has no curriculum {section.curriculum_type!r:.80}"
        fix = 'give "seqlen", or name the metric in data_efficiency.data_sampling.curriculum_learning'
        draft.fault(f"{base}/curriculum_type", message, fix)
    for fault in schedule_faults(vars(section), base):
        draft.fault(fault.pointer, fault.message, fault.fix)
    if config.data_efficiency.length_curriculum is not None:
        message = "data_efficiency has a curriculum of lengths as well"
        draft.fault(f"{base}/enabled", message, "remove curriculum_learning: it is the older of the two")


def _metrics(config: Config, draft: Draft) -> None:
    efficiency = config.data_efficiency
    section = efficiency.data_sampling.curriculum_learning
    if not (efficiency.enabled and efficiency.data_sampling.enabled and section.enabled):
        return
    base = f"{_CURRICULUM}/curriculum_metrics"
    if not section.curriculum_metrics:
        fix = 'add "curriculum_metrics": {"seqlen": {"min_difficulty": ..., "max_difficulty": ..., ...}}'
        draft.fault(base, "a curriculum needs a metric of difficulty", fix)
    for name, metric in section.curriculum_metrics.items():
        pointer = f"{base}/{name}"
        if not isinstance(metric, Mapping) or draft.faulty(pointer):
            continue
        for fault in schedule_faults(metric, pointer):
            draft.fault(fault.pointer, fault.message, fault.fix)
        files = [key for key in _FILES if metric.get(key) is not None]
        if metric.get("clustering_type") == "schedule_based" and not files:
            message = "samples are to be chosen by the values of this metric, and no file gives these values"
            fix = "add index_to_sample_path and index_to_metric_path, as DataAnalyzer writes them"
            draft.fault(f"{pointer}/{_FILES[0]}", message, fix)
        elif "index_to_metric_path" not in files and files and metric.get("difficulty_type") != "percentile":
            message = "difficulties are values, and index_to_metric_path has them"
            draft.fault(f"{pointer}/{_FILES[1]}", message, 'add it, or give "difficulty_type": "percentile"')
        elif metric.get("clustering_type") is None and not files and not cuts_length(name, dict(metric)):
            message = "a metric without files chooses no samples, and is no length"
            fix = 'add its files; or give "clustering_type": "single_cluster" for a function of your own to ask for'
            draft.fault(pointer, message, fix)
    lengths = [name for name, metric in section.curriculum_metrics.items() if cuts_length(name, metric)]
    if len(lengths) > 1:
        draft.fault(f"{base}/{lengths[1]}", f"{' and '.join(lengths)} are the same", "remove one of them")


def _budget(config: Config, draft: Draft) -> None:
    section, base = config.data_efficiency.data_sampling.dynamic_batching, f"{_BASE}/data_sampling/dynamic_batching"
    if not config.data_efficiency.batches_by_tokens:
        return
    if section.max_tokens is None or section.max_tokens < 1:
        what = "max_tokens is missing" if section.max_tokens is None else f"{section.max_tokens} is not a budget"
        draft.fault(f"{base}/max_tokens", what, "give the tokens that one process computes with at a time")
    if section.max_batch_size is not None and section.max_batch_size < section.min_batch_size:
        message = f"max_batch_size {section.max_batch_size} is below min_batch_size {section.min_batch_size}"
        draft.fault(f"{base}/max_batch_size", message, "raise it, or remove one of the two")
    if config.data_efficiency.samples_by_metrics:
        message = "metrics choose the samples of a batch, and a budget of tokens would choose them as well"
        draft.fault(f"{base}/enabled", message, "disable dynamic_batching or curriculum_learning")


def _random_ltd(config: Config, draft: Draft) -> None:
    efficiency, base = config.data_efficiency, f"{_BASE}/data_routing/random_ltd"
    section = efficiency.data_routing.random_ltd
    if not (efficiency.enabled and efficiency.data_routing.enabled and section.enabled):
        return
    if config.ds_hf.tensor_sequence_parallel:
        message = "random_ltd drops tokens of whole hidden states, and each process has a part of them"
        draft.fault("/ds_hf/tensor_sequence_parallel", message, "remove one of the two")
    layers, asked, depth = section.random_ltd_layer_id, section.random_ltd_layer_num, section.total_layer_num
    wrong = [layer for layer in layers if layer < 0 or (depth is not None and layer >= depth)]
    fix = "name blocks by their places, such as [1, 2, 3]; as a rule all but the first and the last"
    if not layers:
        draft.fault(f"{base}/random_ltd_layer_id", "no block is named that would drop tokens", fix)
    elif wrong or len(set(layers)) < len(layers):
        what = f"there is no block {wrong[0]}" if wrong else "a block is named twice"
        draft.fault(f"{base}/random_ltd_layer_id", what + (f" among {depth}" if wrong and depth else ""), fix)
    elif asked is not None and asked != len(layers):
        message = f"random_ltd_layer_num is {asked}, and random_ltd_layer_id names {len(layers)}"
        draft.fault(f"{base}/random_ltd_layer_num", message, f"give {len(layers)}, or remove it")
    for key, choices in (("model_type", ("decoder", "encoder")), ("hidden_state_order", _ORDERS)):
        value = getattr(section, key)
        if value is not None and value not in choices:
            draft.fault(f"{base}/{key}", f"{value!r:.80} is not a choice here", f"choose {' or '.join(choices)}")
    if section.layer_token_lr_schedule.enabled:
        message = "a learning rate by layer-tokens does not exist (DeepSpeed refuses it, too)"
        draft.fault(f"{base}/layer_token_lr_schedule/enabled", message, "set it to false")
    for fault in token_faults(vars(section.random_ltd_schedule), f"{base}/random_ltd_schedule"):
        draft.fault(fault.pointer, fault.message, fault.fix)
    if config.sequence_parallel_size > 1:
        message = "tokens are chosen among all of a sequence, and sequences are divided among processes"
        draft.fault(f"{base}/enabled", message, "remove random_ltd, or sequence_parallel_size")


# -- what explain says ------------------------------------------------------------------------------------------------


def length_settings(config: Config) -> tuple[str, Mapping[str, Any]] | None:
    """Pointer and settings of the curriculum that cuts sequences, if one acts."""
    if config.curriculum_learning.enabled:
        return "/curriculum_learning", vars(config.curriculum_learning)
    found = config.data_efficiency.length_curriculum
    return None if found is None else (f"{_CURRICULUM}/curriculum_metrics/{found[0]}", found[1])


def data_notes(config: Config) -> list[str]:
    """Difficulties over steps and what follows from them, a line each; none without a curriculum."""
    return [*_length_notes(config), *_metric_notes(config), *_token_notes(config), *_layer_notes(config)]


def _metric_notes(config: Config) -> Iterator[str]:
    """Of metrics that choose samples, or that a function of the script asks for."""
    efficiency = config.data_efficiency
    section = efficiency.data_sampling.curriculum_learning
    if not (efficiency.enabled and efficiency.data_sampling.enabled and section.enabled):
        return
    for name, metric in section.curriculum_metrics.items():
        if cuts_length(name, metric):
            continue
        scheduler = CurriculumScheduler(metric)
        shares = metric.get("difficulty_type") == "percentile"
        what = f"{name}, shares of {metric['max_difficulty']} of the samples" if shares else f"difficulty of {name}"
        if metric["schedule_type"] == "custom":
            yield f"{what}: by a function, see engine.set_custom_curriculum_learning_schedule"
        else:
            told = ", ".join(f"{scheduler.get_difficulty(step)} (step {step:_})" for step in _steps(metric))
            yield f"{what}, at most: {told}"


def _layer_notes(config: Config) -> Iterator[str]:
    drops = config.progressive_layer_drop
    if not drops.enabled or drops.gamma <= 0:
        return
    scheduler, told = ProgressiveLayerDrop(drops.theta, drops.gamma), []
    for step in sorted({round(part / drops.gamma) for part in range(5)}):
        scheduler.update_state(step)
        told.append(f"{scheduler.get_theta():.2f} (step {step + 1:_})")
    yield f"progressive_layer_drop, theta (with which the last block is computed): {', '.join(told)}"


def _token_notes(config: Config) -> Iterator[str]:
    efficiency = config.data_efficiency
    section = efficiency.data_routing.random_ltd
    if not (efficiency.enabled and efficiency.data_routing.enabled and section.enabled):
        return
    scheduler = RandomLTDScheduler(
        {
            "total_layer_num": section.total_layer_num or len(section.random_ltd_layer_id),
            "random_ltd_layer_num": len(section.random_ltd_layer_id),
            "random_ltd_schedule": vars(section.random_ltd_schedule),
            "global_batch_size": 1,
        }
    )
    last = section.random_ltd_schedule.schedule_config["require_steps"]
    steps = sorted({last * part // _SHOWN for part in range(_SHOWN + 1)})
    told = ", ".join(f"{scheduler.get_value(step)} (step {step + 1:_})" for step in steps)
    yield f"random_ltd, tokens kept in {len(section.random_ltd_layer_id)} blocks: {told}"
    if section.total_layer_num is not None and last <= 1_000_000:
        whole = last * section.total_layer_num * scheduler.state["max_value"]
        share = scheduler.get_total_layer_tokens(last) / whole
        yield f"its {last:_} steps have {share:.0%} of the layer-tokens that they have without"


def _length_notes(config: Config) -> list[str]:
    found = length_settings(config)
    if found is None:
        return []
    settings = found[1]
    if settings["schedule_type"] == "custom":
        return [
            "curriculum of lengths: by a function, see engine.set_custom_curriculum_learning_schedule",
            *_of_learning_rate(config),
        ]
    scheduler = CurriculumScheduler(settings)
    steps = list(_steps(settings))
    told = ", ".join(f"{scheduler.get_difficulty(step)} (step {step:_})" for step in steps)
    last, most = steps[-1], settings["max_difficulty"]
    every = max(last // 1000, 1)
    mean = [scheduler.get_difficulty(step) / most for step in range(1, last + 1, every)]
    share = sum(mean) / len(mean)
    return [
        f"curriculum of lengths, positions at most: {told}",
        f"its {last:_} steps have {share:.0%} of the tokens that they have at {most} positions",
        *_of_learning_rate(config),
    ]


def _of_learning_rate(config: Config) -> Iterator[str]:
    if config.scheduler is not None:
        yield (
            f"{config.scheduler.type} counts steps, and not tokens: while sequences are short it decays over fewer "
            "tokens than without a curriculum. Give it more steps if as many tokens are to be trained on"
        )


def _steps(settings: Mapping[str, Any]) -> Iterator[int]:
    details = settings["schedule_config"]
    if settings["schedule_type"] == "fixed_discrete":
        yield from (1, *(int(limit) + 1 for limit in details["max_step"]))
        return
    last = int(details["total_curriculum_step"])
    yield from sorted({max(1, last * part // _SHOWN) for part in range(_SHOWN + 1)})
