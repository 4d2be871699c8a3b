"""Numbers of a flops profile as text, and its pages, with DeepSpeed's names for what they tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

__all__ = [
    "ModuleProfile",
    "StepTimes",
    "aggregated",
    "detailed",
    "duration_to_string",
    "flops_to_string",
    "macs_to_string",
    "number_to_string",
    "params_to_string",
    "totals",
]

_UNITS = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """``1500`` as ``"1.5 K"``, or in the given unit."""
    if units is None:
        units = next((unit for unit, size in _UNITS.items() if abs(num) >= size), "u" if num else "")
    return f"{round(num / _UNITS.get(units, 1.0), precision):g} {units}"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """With the unit FLOPS."""
    return f"{number_to_string(flops, units and units.removesuffix('FLOPS'), precision)}FLOPS"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """With the unit MACs."""
    return f"{number_to_string(macs, units and units.removesuffix('MACs'), precision)}MACs"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """``7000000`` as ``"7 M"``."""
    return number_to_string(params_num, units and units.replace("B", "G"), precision).replace("G", "B")


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """With the unit s."""
    return f"{number_to_string(duration, units and units.removesuffix('s'), precision)}s"


# -- the pages ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModuleProfile:
    """Of one module, with everything inside it: parameters, multiply-accumulates, operations, seconds of forward."""

    params: int = 0
    macs: int = 0
    flops: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class StepTimes:
    """What else an engine knows of the step: seconds of a micro-batch's backward, of the update, and of both with
    forward; samples of a micro-batch; processes in all, that read different samples, and that share a model.

    Attributes:
        recompute: forwards that backward repeats (``recompute_fwd_factor``).
    """

    backward: float
    step: float
    micro_batch: int
    world_size: int = 1
    data_parallel: int = 1
    model_parallel: int = 1
    recompute: float = 0.0


def totals(model: ModuleProfile, times: StepTimes | None) -> list[str]:
    """Of the whole model. A backward counts as two forwards, and those that it repeats."""
    rows: dict[str, str] = {}
    shared = times.model_parallel if times is not None else 1
    if times is not None:
        rows |= {
            "world size": str(times.world_size),
            "data parallel size": str(times.data_parallel),
            "model parallel size": str(shared),
            "batch size per GPU": str(times.micro_batch),
        }
    rows |= {
        "params per GPU": params_to_string(model.params),
        "params of model = params per GPU * mp_size": params_to_string(model.params * shared),
        "fwd MACs per GPU": macs_to_string(model.macs),
        "fwd flops per GPU": number_to_string(model.flops),
        "fwd flops of model = fwd flops per GPU * mp_size": number_to_string(model.flops * shared),
        "fwd latency": duration_to_string(model.seconds),
        "fwd FLOPS per GPU = fwd flops per GPU / fwd latency": flops_to_string(_over(model.flops, model.seconds)),
    }
    if times is not None:
        back = 2 + times.recompute
        whole = model.seconds + times.backward + times.step
        rows |= {
            "bwd latency": duration_to_string(times.backward),
            f"bwd FLOPS per GPU = {back} * fwd flops per GPU / bwd latency": flops_to_string(
                _over(back * model.flops, times.backward)
            ),
            f"fwd+bwd FLOPS per GPU = {back + 1} * fwd flops per GPU / (fwd+bwd latency)": flops_to_string(
                _over((back + 1) * model.flops, model.seconds + times.backward)
            ),
            "step latency": duration_to_string(times.step),
            "iter latency": duration_to_string(whole),
            f"FLOPS per GPU = {back + 1} * fwd flops per GPU / iter latency": flops_to_string(
                _over((back + 1) * model.flops, whole)
            ),
            "samples/second": f"{_over(times.micro_batch * times.data_parallel, whole):.2f}",
        }
    width = max(map(len, rows)) + 2
    return [f"  {name + ':':<{width}}{value}" for name, value in rows.items()]


def _over(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


def aggregated(modules: Mapping[str, ModuleProfile], kinds: Mapping[str, str], depth: int, top: int) -> list[str]:
    """For each depth the kinds of modules that have most parameters, multiply-accumulates and seconds.

    Args:
        modules: by path, "" the model. kinds: the class of each.
        depth: of the modules; -1: the innermost. top: how many of each.
    """
    lines = ["top modules in terms of params, MACs or fwd latency at different model depths:"]
    by_depth: dict[int, dict[str, list[ModuleProfile]]] = {}
    for path, found in modules.items():
        by_depth.setdefault(path.count(".") + bool(path), {}).setdefault(kinds[path], []).append(found)
    for level in sorted(by_depth):
        if depth >= 0 and level > depth:
            break
        lines.append(f"depth {level}:")
        sums = {kind: _sum(each) for kind, each in by_depth[level].items()}
        for name, show in _COLUMNS.items():
            key = {"params": "params", "MACs": "macs", "fwd latency": "seconds"}[name]
            ranked = sorted(sums.items(), key=lambda item: -getattr(item[1], key))[:top]
            told = ", ".join(f"{kind}: {show(getattr(found, key))}" for kind, found in ranked)
            lines.append(f"    {name:<12}- {told}")
    return lines


_COLUMNS = {"params": params_to_string, "MACs": macs_to_string, "fwd latency": duration_to_string}


def _sum(found: Sequence[ModuleProfile]) -> ModuleProfile:
    return ModuleProfile(
        sum(each.params for each in found),
        sum(each.macs for each in found),
        sum(each.flops for each in found),
        sum(each.seconds for each in found),
    )


def detailed(modules: Mapping[str, ModuleProfile], kinds: Mapping[str, str], depth: int) -> Iterator[str]:
    """Each module with its share of the model: params, MACs, seconds; and its operations and operations a second."""
    whole = modules[""]
    for path, found in modules.items():
        level = path.count(".") + bool(path)
        if depth >= 0 and level > depth:
            continue
        shares = (
            f"{params_to_string(found.params).strip()} = {_share(found.params, whole.params)} Params",
            f"{macs_to_string(found.macs)} = {_share(found.macs, whole.macs)} MACs",
            f"{duration_to_string(found.seconds)} = {_share(found.seconds, whole.seconds)} latency",
            flops_to_string(_over(found.flops, found.seconds)),
        )
        name = path.rpartition(".")[2] or kinds[""]
        count = number_to_string(found.flops).strip()
        yield f"  {'  ' * level}{name}: {count} flops ({kinds[path]}, {', '.join(shares)})"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.2%}" if whole else "0%"
