"""How the processes of a launch are divided: over samples (data), tokens of a sample (sequence) and layers (tensor);
and the experts of a layer, which processes divide that read different samples.

Sequences and layers are divided inside hosts alone, where links are fast, and only as the model allows it: its plan of
tensor parallelism is tried out on the meta device. The more processes share a sample, the fewer read different ones,
so micro-batch x accumulation grows with it where the global batch stays.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from ds_hf.config.load import examine
from ds_hf.config.mesh import TOPOLOGY, Claim
from ds_hf.errors import ConfigError, DsHfError
from ds_hf.log import logger

__all__ = [
    "EXPERTS",
    "HPZ",
    "MICS",
    "PIPE",
    "SEQUENCE",
    "TENSOR",
    "TOKENS",
    "AxisSizes",
    "MeshDivision",
    "division_of",
    "model_class",
    "sizes_of",
]

SEQUENCE, TENSOR = "sequence_parallel_size", "tensor_parallel.autotp_size"
TOKENS = "ds_hf.tensor_sequence_parallel"
PIPE = "pipeline.stages"
EXPERTS = "expert_parallel.autoep_size"  # 0: as transformers computes them
MICS, HPZ = "zero_optimization.mics_shard_size", "zero_optimization.zero_hpz_partition_size"


@dataclass(frozen=True)
class MeshDivision:
    """Processes along each dimension.

    Attributes:
        data: read different samples. sequence: share the tokens of each. tensor: share its layers.
        pipe: have a stretch of the layers each.
    """

    data: int = 1
    sequence: int = 1
    tensor: int = 1
    pipe: int = 1

    @property
    def shared(self) -> int:
        """Processes that work on one sample."""
        return self.sequence * self.tensor * self.pipe

    @property
    def claims(self) -> list[Claim]:
        """What the script says of it beside the file."""
        return [Claim("pipe", self.pipe, PIPE, TOPOLOGY)] if self.pipe > 1 else []

    def of(self, setting: Mapping[str, Any]) -> MeshDivision:
        """The same processes in a setting."""
        sequence, tensor = setting.get(SEQUENCE, self.sequence), setting.get(TENSOR, self.tensor)
        pipe = setting.get(PIPE, self.pipe)
        return MeshDivision(self.data * self.shared // (sequence * tensor * pipe), sequence, tensor, pipe)


def division_of(facts: Mapping[str, Any]) -> MeshDivision:
    """That of a launch, by its event "facts"; older journals know of data parallelism alone."""
    data = facts.get("data") or facts.get("world_size") or 1
    sequence, tensor, pipe = (int(facts.get(name) or 1) for name in ("sequence", "tensor", "pipe"))
    return MeshDivision(int(data), sequence, tensor, pipe)


@dataclass(frozen=True)
class AxisSizes:
    """Values of the axes, the one that divides nothing first. Experts are there where the model has some.

    Attributes:
        why_not: for each axis that cannot vary, the reason. on_host: processes on one host.
    """

    values: dict[str, tuple[int, ...]] = field(default_factory=dict)
    why_not: dict[str, str] = field(default_factory=dict)
    on_host: int = 1


def sizes_of(events: Mapping[str, Any], tree: Mapping[str, Any]) -> AxisSizes:
    """Sizes that processes, model and batch of the user's own launch allow.

    Args:
        events: of that launch: "facts" and, where it came so far, "survey".
        tree: the user's configuration.
    """
    facts, survey = events.get("facts") or {}, events.get("survey") or {}
    own, processes = division_of(facts), int(facts.get("processes") or facts.get("world_size") or 1)
    on_host = int(facts.get("on_host") or 1)
    if "pipe" in facts:
        return _stages(facts, tree, own, processes, on_host)
    fitting = tuple(n for n in range(2, on_host + 1) if on_host % n == 0)
    others = _experts(facts, tree, (1, *(n for n in fitting if own.data * own.sequence % n == 0)))
    others |= _groups(tuple(n for n in fitting if n < own.data and own.data % n == 0))
    if not fitting or own.data * own.shared != processes:
        reason = "there is one process a host" if not fitting else "the script divides the model itself"
        return AxisSizes(others, dict.fromkeys((SEQUENCE, TENSOR), reason))
    if tree.get("data_parallel_size") is not None:
        return AxisSizes(others, dict.fromkeys((SEQUENCE, TENSOR), "data_parallel_size is given in the file"))
    try:
        model = _without_values(facts)
    except DsHfError as error:
        return AxisSizes(others, dict.fromkeys((SEQUENCE, TENSOR), str(error)))
    values, why_not = dict(others), {}
    for name, own_size, allows in ((TENSOR, own.tensor, _cuts), (SEQUENCE, own.sequence, _shares)):
        if own_size > 1 and not _given(tree, name):
            why_not[name] = "given by the script"
            continue
        faults = {n: allows(model, n, tree, facts, survey) for n in fitting}
        values[name] = (1, *(n for n, fault in faults.items() if not fault))
        if len(values[name]) == 1:
            why_not[name] = next(iter(faults.values()))
    largest = max(own.tensor, *values.get(TENSOR, (1,)))
    if largest > 1 and (reason := _keeps_tokens(model, largest, tree)):  # the last that is asked of the model
        why_not[TOKENS] = reason
    return AxisSizes(values, why_not, on_host)


def _stages(
    facts: Mapping[str, Any], tree: Mapping[str, Any], own: MeshDivision, processes: int, on_host: int
) -> AxisSizes:
    """Stages over which the layers and the processes divide, of a pipeline."""
    why_not = dict.fromkeys((SEQUENCE, TENSOR), "the model is divided into stages")
    chunks = ((tree.get("ds_hf") or {}).get("pipeline") or {}).get("chunks") or 1
    counts = [n for n in range(1, processes + 1) if processes % (n * own.sequence * own.tensor) == 0]
    values, faults = [], []
    try:
        from ds_hf.memory.stages import division_of as layers_over

        model = _without_values(facts)
        for count in counts:
            try:
                layers_over(model, count, int(chunks))
                values.append(count)
            except DsHfError as error:
                faults.append(str(error))
    except DsHfError as error:
        faults.append(str(error))
    if len(values) < 2:
        why_not[PIPE] = faults[0] if faults else f"{processes} processes divide in no other way"
    return AxisSizes({PIPE: tuple(values) or (own.pipe,)}, why_not, on_host)


def _experts(facts: Mapping[str, Any], tree: Mapping[str, Any], sizes: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Those of ``sizes`` over which the model's experts divide, after 0; nothing where it has none."""
    from ds_hf.engine.parallel.experts.plan import plan_experts

    try:
        model = _without_values(facts)
    except DsHfError:
        return {}
    found = [0]
    for size in sizes:
        asked = {**(tree.get("expert_parallel") or {}), "enabled": True, "autoep_size": size}
        with suppress(ConfigError):
            section = examine({"expert_parallel": asked}, world=None, allow_auto=True).expert_parallel
            plan_experts(model, section, size)
            found.append(size)
    return {EXPERTS: tuple(found)} if len(found) > 1 else {}


def _groups(sizes: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Of processes inside a host among which states, or copies of parameters, are divided; after all of them."""
    return {MICS: (-1, *sizes), HPZ: (1, *sizes)} if sizes else {}


def _given(tree: Mapping[str, Any], name: str) -> bool:
    value: Any = tree
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value is not None


def model_class(facts: Mapping[str, Any]) -> tuple[Any, Any]:
    """The script's model as transformers has it: its class, and the configuration it was made of.

    Raises:
        UnpredictableError: it is not one of transformers.
    """
    import transformers  # for searches that come so far

    from ds_hf.memory import UnpredictableError

    model = facts.get("model")
    kind = getattr(transformers, model["class"], None) if model else None
    if model is None or kind is None:
        raise UnpredictableError("the model is not one that transformers builds")
    config = kind.config_class.from_dict(model["config"])
    config.architectures = [model["class"]]
    return kind, config


def _without_values(facts: Mapping[str, Any]) -> Any:
    """The script's model on the meta device."""
    from ds_hf.memory import Workload
    from ds_hf.memory.models import build

    _, config = model_class(facts)
    return build(config, Workload(attention=facts["model"]["attention"]))


def _cuts(model: Any, size: int, tree: Mapping[str, Any], facts: Mapping[str, Any], survey: Mapping[str, Any]) -> str:
    """Why the layers of ``model`` do not divide over ``size`` processes; empty where they do."""
    from ds_hf.engine.parallel.tensor.plan import plan_division

    section = tree.get("tensor_parallel")
    asked = {**(section if isinstance(section, Mapping) else {}), "autotp_size": size}
    try:
        with _quiet():
            plan_division(model, examine({"tensor_parallel": asked}, world=None, allow_auto=True).tensor_parallel, size)
    except ConfigError as error:
        return error.faults[0].message
    return ""


def _keeps_tokens(model: Any, size: int, tree: Mapping[str, Any]) -> str:
    """Why tokens are not divided between the cut layers of ``model``, which is left cut; empty where they can be."""
    from ds_hf.engine.parallel.tensor.divide import divide_without_values

    asked = {**(tree.get("tensor_parallel") or {}), "autotp_size": size}
    section = examine({"tensor_parallel": asked}, world=None, allow_auto=True).tensor_parallel
    try:
        with _quiet():
            divide_without_values(model, size, section, tokens=True)
    except ConfigError as error:
        return error.faults[0].message if error.faults else str(error)
    return ""


def _shares(model: Any, size: int, tree: Mapping[str, Any], facts: Mapping[str, Any], survey: Mapping[str, Any]) -> str:
    """Why ``size`` processes cannot share a sample; empty where they can."""
    from ds_hf.engine.parallel.sequence.heads import plan_heads

    text = model.config.get_text_config()
    if facts["model"]["attention"] in (None, "eager"):
        return "eager attention does not divide sequences: use sdpa or flash attention"
    heads = getattr(text, "num_attention_heads", 1)
    try:
        plan_heads(heads, getattr(text, "num_key_value_heads", None) or heads, size)
    except ValueError as error:
        return str(error)
    shape = (survey.get("inputs") or {}).get("input_ids", [[]])[0]
    if len(shape) != 2:
        return "the batch has no input_ids of [samples, tokens]"
    tokens = shape[1] * division_of(facts).sequence
    return "" if tokens % size == 0 else f"sequences of {tokens} tokens do not divide over {size} processes"


@contextmanager
def _quiet() -> Iterator[None]:
    """What is said about cutting a model is said where it is cut; other threads go on to speak meanwhile."""
    here = threading.get_ident()

    def passes(record: logging.LogRecord) -> bool:
        return record.thread != here or record.levelno >= logging.ERROR

    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)
