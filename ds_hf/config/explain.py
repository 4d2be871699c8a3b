"""What ``ds-hf config explain`` shows: each effective value, where it came from, and what is worth knowing about it.

Rows are data; the command line renders them. A row is quiet when it is a default, unless that of DeepSpeed has changed,
so that the short view can leave it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from ds_hf.config.optimizer_traits import ONE_BIT
from ds_hf.config.plan import StatePlan, StateSpec, plan_states
from ds_hf.config.schema import Node, Path, dotted, load_schema, pointer_of, walk_for
from ds_hf.config.types.root import Config, Origin, OriginKind
from ds_hf.config.wire_seconds import ONE_BIT_NBYTES, full_nbytes

__all__ = ["EffectiveValue", "auto_keys", "missing_packages", "rows", "summary", "wire_notes"]


@dataclass(frozen=True)
class EffectiveValue:
    """One effective value."""

    key: str
    value: Any
    origin: Origin
    note: str
    quiet: bool


def rows(config: Config) -> list[EffectiveValue]:
    """All effective values in the order of the schema."""
    nodes = {pointer_of(path): (path, node) for path, node in walk_for(config.resolved)}
    warned = _without_effect(config)
    found = []
    for pointer, origin in config.provenance.items():
        path, node = nodes[pointer]
        value = _value(config.resolved, path, node)
        status = _status(path)
        default = origin.kind is OriginKind.DEFAULT
        quiet = default and (status != "implemented" or _switched_off(config, path) or "x-changed" not in node)
        note = _note(node, value, origin, status) or warned.get(pointer, "")
        found.append(EffectiveValue(dotted(path), value, origin, note, quiet))
    return found


def _without_effect(config: Config) -> dict[str, str]:
    """By pointer, why a value that was given has no effect; of a block, at each value in it."""
    blocks = [warning for warning in config.warnings if warning.message.startswith("no effect: ")]
    return {
        pointer: warning.message
        for warning in blocks
        for pointer, origin in config.provenance.items()
        if origin.kind is not OriginKind.DEFAULT and f"{pointer}/".startswith(f"{warning.pointer}/")
    }


def auto_keys(config: Config) -> list[str]:
    """Keys that are still "auto", for the Trainer to fill."""
    return [pointer[1:].replace("/", ".") for pointer, o in config.provenance.items() if o.kind is OriginKind.AUTO]


# section -> (module that it needs, package that has it), as ``engine.observe.monitor`` asks for them
MONITORS = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "comet": ("comet_ml", "comet_ml>=3.41.0"),
}


def missing_packages(config: Config) -> list[tuple[str, str]]:
    """(place, what is wrong and the fix), of monitors that are on and whose package is not installed here."""
    return [
        (
            f"{section}.enabled",
            f"it needs the package {package.split('>')[0]}, which is not installed here, so no training starts "
            f"-> pip install '{package}', or set {section}.enabled to false",
        )
        for section, (module, package) in MONITORS.items()
        if getattr(config, section).enabled and find_spec(module) is None
    ]


def summary(config: Config) -> str:
    """The configuration in one line."""
    autos = set(auto_keys(config))
    zero = config.zero_optimization
    parts = [f"ZeRO stage {zero.stage}", _precision(config, autos)]
    micro, steps = config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    if config.train_batch_size and micro and steps:
        world = config.train_batch_size // (micro * steps)
        parts.append(f"batch {config.train_batch_size} = {micro} x {steps} x {world}")
    if config.optimizer is not None:
        parts.append(config.optimizer.type)
    if config.scheduler is not None:
        parts.append(config.scheduler.type)
    if "gradient_clipping" not in autos:
        parts.append(f"clip {config.gradient_clipping:g}" if config.gradient_clipping else "no clipping")
    plan = plan_states(config)
    for name, row in (("optimizer", plan.optimizer), ("parameters", plan.parameters)):
        if row.device != "device":
            parts.append(f"{name} on {row.device}")
    travels = [f"{name} in {row.bits} bits" for name, row in _packed(plan) if row.bits]
    if travels:
        parts.append(f"{' and '.join(travels)} between processes")
    if plan.inner is not None:
        copied = "parameters once more" if plan.optimizer.over == "replicas" else "states"
        parts.append(f"{copied} divided over groups of {plan.inner}")
    return ", ".join(parts)


def wire_notes(config: Config) -> list[str]:
    """What settings that send fewer bits save and cost, a line each; none without such settings."""
    plan, notes = plan_states(config), []
    full = full_nbytes(config)
    scale = 4 / plan.block
    for name, row in _packed(plan):
        if row.bits:
            sent = row.bits / 8 + scale
            notes.append(
                f"{name} travel in {row.bits} bits: {sent:.2f} bytes an element instead of {full} ({full / sent:.1f} "
                f"times fewer), rounded to a {2**row.bits - 2}th of the range of each {plan.block}"
            )
    if plan.loco is not None and plan.gradients.bits:
        notes.append("zeropp_loco_param takes 2 bytes an element of the gradients on each process")
    name = config.optimizer.type if config.optimizer is not None else ""
    if name.lower() in ONE_BIT:
        notes.append(
            f"{name}: after the warm-up a momentum takes 0.13 bytes an element each way, and not the {full} of a "
            f"gradient ({full / ONE_BIT_NBYTES:.0f} times fewer), and 4 bytes a parameter more for what rounding loses"
        )
    if notes:
        notes.append("this is for slow links between hosts: on one host with NVLink nothing is gained")
    return notes


def _packed(plan: StatePlan) -> tuple[tuple[str, StateSpec], ...]:
    return ("gradients", plan.gradients), ("parameters", plan.parameters)


def _precision(config: Config, autos: set[str]) -> str:
    if config.bf16.enabled or config.fp16.enabled:
        kept = "bf16" if config.bf16.enabled else "fp16"
    else:
        kept = "precision from the Trainer" if autos & {"bf16.enabled", "fp16.enabled"} else "fp32"
    section = config.torch_autocast
    return f"{kept} under autocast to {section.dtype or 'bf16'}" if section.enabled else kept


def _value(tree: dict[str, Any], path: Path, node: Node) -> Any:
    value: Any = tree
    for key in path:
        if not isinstance(value, dict) or key not in value:
            return node.get("default")
        value = value[key]
    return value


def _switched_off(config: Config, path: Path) -> bool:
    """Whether ``path`` is a detail of a block that is off."""
    section: Any = config
    for key in path[:-1]:
        section = getattr(section, key, None)
    switch = getattr(section, "enabled", None) is False or getattr(section, "device", None) == "none"
    return switch and path[-1] not in ("enabled", "device")


def _status(path: Path) -> str:
    """The status of the key or of the block that speaks for it."""
    node: Node = load_schema()
    for key in path:
        node = node.get("properties", {}).get(key, {})
        status: str = node.get("x-status", "implemented")
        if status != "implemented":
            return status
    return "implemented"


def _note(node: Node, value: Any, origin: Origin, status: str) -> str:
    notes = [f"written as {origin.detail}"] if origin.kind is OriginKind.USER and origin.detail else []
    fills = node.get("x-auto")
    if origin.kind is OriginKind.AUTO and isinstance(fills, dict) and "formula" in fills:
        notes.append(f"= {fills['formula']}")
    changed = node.get("x-changed")
    if changed and origin.kind is OriginKind.DEFAULT:
        was = str(changed["was"]).lower() if isinstance(changed["was"], (bool, str)) else f"{changed['was']:g}"
        notes.append(f"was {was} in DeepSpeed before {changed['since']}")
    if status == "no-effect" and origin.kind is not OriginKind.DEFAULT and "x-reason" in node:
        notes.append(f"no effect: {node['x-reason']}")
    return "; ".join(notes)
