"""Section ``compression_training``: what cannot be, as far as a file alone tells; and DeepSpeed's older
``quantize_training`` as its weight quantization. What a model decides is checked by ``ds_hf.compression``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ds_hf.config.schema import escape, load_schema
from ds_hf.config.source import Draft
from ds_hf.config.types.compression import (
    ActivationQuantizationSection,
    HeadPruningSection,
    LayerReductionSection,
    QuantizedWeightsSection,
    Section,
    SparsePruningSection,
    pattern_of,
    ratio_of,
)
from ds_hf.config.types.root import Config

__all__ = ["bits_reached", "check_compression", "compression_notes", "from_moq"]

_BASE = "/compression_training"
_MOQ = "quantize_training"


# -- the older section -------------------------------------------------------------------------------------------------


_KNOWN: dict[str, tuple[str, ...]] = {  # keys, and those inside of them
    **dict.fromkeys(("enabled", "quantize_verbose", "quantizer_kernel", "quantize_type", "quantize_groups"), ()),
    "quantize_algo": ("q_type", "rounding"),
    "quantize_bits": ("start_bits", "target_bits"),
    "quantize_schedule": ("quantize_period", "schedule_offset"),
    "fp16_mixed_quantize": ("enabled", "quantize_change_ratio"),
    "eigenvalue": (),
}


def from_moq(given: dict[str, Any], draft: Draft) -> dict[str, Any] | None:
    """``quantize_training`` as the section ``weight_quantization``, with faults for what that cannot say; ``None``
    where it is switched off. The values are checked where they go."""
    if given.get("enabled") is not True:
        return None
    for key, value in given.items():
        inside = _KNOWN.get(key)
        if inside is None:
            draft.fault(f"/{_MOQ}/{escape(key)}", f'unknown key "{key[:60]}" in {_MOQ}', f"known: {', '.join(_KNOWN)}")
        elif inside and not isinstance(value, dict):
            draft.fault(f"/{_MOQ}/{key}", f"{value!r:.60} is no object", f"give {', '.join(inside)}")
        elif inside and (wrong := [name for name in value if name not in inside]):
            pointer = f"/{_MOQ}/{key}/{escape(wrong[0])}"
            draft.fault(pointer, f'unknown key "{wrong[0][:60]}" in {_MOQ}.{key}', f"known: {', '.join(inside)}")
    curvature = given.get("eigenvalue")
    if curvature is True or (isinstance(curvature, dict) and curvature.get("enabled") is True):
        node = load_schema()["properties"]["eigenvalue"]
        draft.fault(f"/{_MOQ}/eigenvalue", f"it is not supported by ds_hf: {node['x-reason']}", node["x-fix"])
    if draft.faulty(f"/{_MOQ}"):
        return None
    bits, when = given.get("quantize_bits", {}), given.get("quantize_schedule", {})
    algorithm = given.get("quantize_algo", {})
    shared = {
        "enabled": True,
        "schedule_offset": when.get("schedule_offset", 100),
        "quantize_groups": given.get("quantize_groups", 1),
        "quantize_verbose": given.get("quantize_verbose", False),
        "quantization_type": algorithm.get("q_type", given.get("quantize_type", "symmetric")),
        "rounding": algorithm.get("rounding", "nearest"),
        "fp16_mixed_quantize": given.get("fp16_mixed_quantize", {}),
    }
    params = {
        "start_bits": bits.get("start_bits", 16),
        "target_bits": bits.get("target_bits", 8),
        "quantization_period": when.get("quantize_period", 100),
    }
    return {"shared_parameters": shared, "different_groups": {_MOQ: {"params": params, "modules": ["*"]}}}


# -- rules -------------------------------------------------------------------------------------------------------------


def check_compression(config: Config, draft: Draft) -> None:
    """Collect what is wrong."""
    section = config.compression_training
    if draft.faulty(_BASE) or not section.acts:
        return
    if config.ds_hf.fp8 and config.ds_hf.fp8.enabled:
        message = "products in fp8 read the weights themselves, which compression replaces"
        draft.fault(f"{_BASE}", message, "remove ds_hf.fp8, or the block")
    if config.ds_hf.qat and config.ds_hf.qat.enabled:
        message = "ds_hf.qat rounds the layers whose weights compression replaces"
        draft.fault(f"{_BASE}", message, "remove ds_hf.qat, or the block")
    if config.tensor_parallel.autotp_size > 1:
        message = "layers are divided among processes, and masks and scales are of whole weights"
        draft.fault(f"{_BASE}", message, "remove tensor_parallel: ZeRO's stages 1 to 3 divide the memory instead")
    if section.layer_reduction.enabled:
        _reduction(section.layer_reduction, draft)
    for name, method in section.methods():
        _method(name, method, config, draft)


def _reduction(section: LayerReductionSection, draft: Draft) -> None:
    base = f"{_BASE}/layer_reduction"
    layers = section.teacher_layer
    if section.module_name_prefix is None:
        draft.fault(
            f"{base}/module_name_prefix",
            "it is missing, and says where the layers are",
            'add it, such as "model.layers"',
        )
    if not layers:
        draft.fault(f"{base}/teacher_layer", "no layer of the teacher is named", "name one for each of the student's")
    elif min(layers) < 0:
        draft.fault(f"{base}/teacher_layer", f"layers are counted from 0: {min(layers)} is none", "count from 0")
    if section.keep_number_layer is not None and layers and section.keep_number_layer != len(layers):
        message = f"keep_number_layer is {section.keep_number_layer}, and teacher_layer names {len(layers)}"
        draft.fault(f"{base}/keep_number_layer", message, f"give {len(layers)}, or remove it")


def _method(name: str, section: Section, config: Config, draft: Draft) -> None:
    base = f"{_BASE}/{name}"
    groups = section.different_groups
    if not groups:
        fix = f'add "different_groups": {{"all": {{"params": {{{_example(section)}}}, "modules": ["*"]}}}}'
        draft.fault(f"{base}/different_groups", "it is enabled, and no group says what of", fix)
    for key, group in groups.items():
        pointer = f"{base}/different_groups/{escape(key)}"
        _scopes(group, pointer, draft)
        if isinstance(section, QuantizedWeightsSection):
            _bits(section, group.get("params", {}), f"{pointer}/params", draft)
        elif isinstance(section, ActivationQuantizationSection):
            if group.get("params", {}).get("bits") is None:
                draft.fault(f"{pointer}/params/bits", "bits are missing", 'add "bits": 8')
        else:
            _ratio(section, group, f"{pointer}/params/dense_ratio", draft)
    if isinstance(section, SparsePruningSection):
        _sparse(section, f"{base}/shared_parameters", draft)
    if isinstance(section, HeadPruningSection) and section.shared_parameters.num_heads is None:
        fix = "add the number of heads of a layer; of keys and values where queries share them"
        draft.fault(f"{base}/shared_parameters/num_heads", "heads cannot be told apart without their number", fix)
    _end(section, config, f"{base}/shared_parameters", draft)


def _example(section: Section) -> str:
    if isinstance(section, QuantizedWeightsSection):
        return '"start_bits": 8, "target_bits": 8'
    return '"bits": 8' if isinstance(section, ActivationQuantizationSection) else '"dense_ratio": 0.5'


def _scopes(group: dict[str, Any], pointer: str, draft: Draft) -> None:
    modules, related = group.get("modules", ["*"]), group.get("related_modules")
    if not modules:
        draft.fault(f"{pointer}/modules", "it names no modules", 'give "*" for all')
    for index, pattern in enumerate(modules):
        _pattern(pattern, f"{pointer}/modules/{index}", draft)
    if related is None:
        return
    nested = all(isinstance(each, list) and all(isinstance(one, str) for one in each) for each in related)
    if not nested:
        draft.fault(f"{pointer}/related_modules", "it is no list of lists of patterns", 'give [["a.name", "another"]]')
    elif len(related) != len(modules):
        message = f"modules has {len(modules)} patterns, and related_modules {len(related)} lists"
        draft.fault(f"{pointer}/related_modules", message, "give one list for each pattern of modules")
    else:
        for index, each in enumerate(related):
            for place, pattern in enumerate(each):
                _pattern(pattern, f"{pointer}/related_modules/{index}/{place}", draft)


def _pattern(pattern: str, pointer: str, draft: Draft) -> None:
    if pattern == "*":
        return
    try:
        re.compile(pattern)
    except re.error as error:
        draft.fault(pointer, f"{pattern!r:.80} is no pattern: {error}", "write it as Python's re reads it")


def _bits(section: QuantizedWeightsSection, params: dict[str, Any], pointer: str, draft: Draft) -> None:
    last, start = params.get("target_bits"), params.get("start_bits")
    if last is None:
        draft.fault(f"{pointer}/target_bits", "the bits are missing", 'add "target_bits": 8')
        return
    if start is not None and start < last:
        message = f"start_bits {start} is below target_bits {last}, and bits become fewer"
        draft.fault(f"{pointer}/start_bits", message, f"give {last} or more")
    if last < 3 and section.shared_parameters.quantization_type == "asymmetric":
        message = f"{last} bit{'s have' if last > 1 else ' has'} values around zero alone"
        draft.fault(f"{pointer}/target_bits", message, 'give 3 or more, or "quantization_type": "symmetric"')
    if last < 3 and section.shared_parameters.rounding == "stochastic":
        message = f"with {last} bit{'s' if last > 1 else ''} nothing is rounded"
        draft.fault(f"{pointer}/target_bits", message, 'give 3 or more, or "rounding": "nearest"')


def _ratio(section: Section, group: dict[str, Any], pointer: str, draft: Draft) -> None:
    if isinstance(section, SparsePruningSection) and (pattern := pattern_of(section)) is not None:
        given = group.get("params", {}).get("dense_ratio")
        if given is not None and pattern[1] and given != pattern[0] / pattern[1]:
            message = f"dense_ratio is {given}, and {pattern[0]}:{pattern[1]} keeps {pattern[0] / pattern[1]}"
            draft.fault(pointer, message, "remove one of the two")
        return
    ratio = ratio_of(section, group)
    if ratio == 0:
        draft.fault(pointer, "nothing would be kept", "give the share that is kept, such as 0.5")
    elif ratio == 1:
        draft.warn(pointer, "no effect: all is kept", "give the share that is kept, such as 0.5")


def _sparse(section: SparsePruningSection, base: str, draft: Draft) -> None:
    shared = section.shared_parameters
    for index, pattern in enumerate(shared.excluded_modules):
        _pattern(pattern, f"{base}/excluded_modules/{index}", draft)
    end = shared.schedule_offset_end
    if end is not None and end < shared.schedule_offset:
        message = f"it ends at step {end}, before it begins at {shared.schedule_offset}"
        draft.fault(f"{base}/schedule_offset_end", message, f"give {shared.schedule_offset} or more, or remove it")
    if end is not None and end > shared.schedule_offset and shared.method == "topk":
        message = "scores are learned, and do not come step by step"
        draft.fault(f"{base}/schedule_offset_end", message, 'remove it, or choose "method": "l1"')
    if shared.block_pattern is None:
        return
    numbers = pattern_of(section)
    if numbers is None or not 0 < numbers[0] < numbers[1]:
        message = f"{shared.block_pattern!r:.80} is no pattern N:M with N below M"
        draft.fault(f"{base}/block_pattern", message, 'give "2:4", or remove it')
    elif shared.method == "topk":
        message = "a pattern is chosen among neighbours by magnitude, and scores are of a whole layer"
        draft.fault(f"{base}/block_pattern", message, 'remove it, or choose "method": "l1"')
    elif end is not None and end > shared.schedule_offset:
        message = "a pattern has no steps on its way"
        draft.fault(f"{base}/schedule_offset_end", message, "remove it, or block_pattern")


def _end(section: Section, config: Config, base: str, draft: Draft) -> None:
    """A schedule that begins, or ends, when the training is over, where the file says how long that is."""
    last = _training_steps(config)
    if last is None:
        return
    offset = section.shared_parameters.schedule_offset
    if offset >= last:
        message = f"it begins after {offset} steps, and the schedule of the learning rate ends after {last}"
        draft.fault(f"{base}/schedule_offset", message, f"give less than {last}, or a longer training")
        return
    if isinstance(section, SparsePruningSection):
        end = section.shared_parameters.schedule_offset_end
        if end is not None and end >= last:
            message = f"it ends after {end} steps, and the schedule of the learning rate after {last}"
            draft.fault(f"{base}/schedule_offset_end", message, f"give less than {last}, or a longer training")
    if isinstance(section, QuantizedWeightsSection):
        for key, group in section.different_groups.items():
            params = group.get("params", {})
            reached = offset + bits_reached(params)
            if params.get("target_bits") is not None and reached >= last:
                message = (
                    f"{params['target_bits']} bits are reached after {reached} steps, and the schedule of the learning "
                    f"rate ends after {last}"
                )
                pointer = f"{_BASE}/weight_quantization/different_groups/{escape(key)}/params/quantization_period"
                draft.fault(pointer, message, "give a shorter period, or fewer bits to start with")


def bits_reached(params: dict[str, Any]) -> int:
    """Steps from the first quantized one until the target's bits: a period, twice that, four times that in all."""
    last = params.get("target_bits") or 0
    drops, period = (params.get("start_bits") or last) - last, params.get("quantization_period", 1)
    return period * 2 ** (drops - 1) if drops > 0 and period > 0 else 0


def _training_steps(config: Config) -> int | None:
    given = config.scheduler.params if config.scheduler is not None else {}
    steps = given.get("total_num_steps")
    return steps if isinstance(steps, int) and not isinstance(steps, bool) and steps > 0 else None


# -- what explain says -------------------------------------------------------------------------------------------------


def compression_notes(config: Config) -> Iterator[str]:
    """When each method begins and where it ends, a line a group; none without compression."""
    section = config.compression_training
    if section.layer_reduction.enabled:
        layers = ", ".join(map(str, section.layer_reduction.teacher_layer))
        yield f"layer_reduction: the student's layers begin as the teacher's {layers}; init_compression() copies them"
    for name, method in section.methods():
        offset = method.shared_parameters.schedule_offset
        for key, group in method.different_groups.items():
            yield f"{name}, {key}: {_told(method, group)} from step {offset + 1:_} on"


def _told(section: Section, group: dict[str, Any]) -> str:
    params = group.get("params", {})
    if isinstance(section, QuantizedWeightsSection):
        last = params["target_bits"]
        start = params.get("start_bits") or last
        reached = section.shared_parameters.schedule_offset + bits_reached(params)
        more = "" if start == last else f" ({last} at step {reached + 1:_})"
        return f"{start if more and bits_reached(params) else last} bits{more}"
    if isinstance(section, ActivationQuantizationSection):
        return f"{params['bits']} bits, {section.shared_parameters.range_calibration}"
    return f"{ratio_of(section, group):.0%} kept by {section.shared_parameters.method}"
