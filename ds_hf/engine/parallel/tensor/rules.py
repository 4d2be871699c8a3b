"""Where the rules of a division come from: ``partition_config`` before ``preset_model`` before Hugging Face's plan.

Rules are read, never guessed from names: a model without any gets a fault that shows a ``partition_config`` to start
from. A ``Rule`` says of one module, or of one parameter, which style it has; nothing is changed here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ds_hf.config.patterns import may_take_long
from ds_hf.config.types.parallel import TensorParallelSection, TPPartitionSection
from ds_hf.engine.parallel.tensor.presets import preset_specs
from ds_hf.engine.parallel.tensor.styles import STYLES
from ds_hf.engine.zero.buffer import logical_shape
from ds_hf.errors import Fault

__all__ = ["POINTER", "Rule", "Rules", "find_rules", "sizes_of_shape", "suggestion"]

POINTER = "/tensor_parallel"
_CONFIG = f"{POINTER}/partition_config"


@dataclass(frozen=True)
class Rule:
    """How one module or parameter is divided.

    Attributes:
        style: of ``STYLES``.
        said: the entry that says so, for messages.
        shape: DeepSpeed's ``shape`` of a fused weight, with ...
        dim: ... the dimension of it that is divided; ``None`` for the style's own.
    """

    style: str
    said: str
    shape: tuple[Any, ...] | None = None
    dim: int | None = None


@dataclass
class Rules:
    """Rules by name.

    Attributes:
        source: where they come from.
        local_attributes: the layers' own code counts heads and widths from attributes, which become those that are
            here; code that a Hugging Face plan is for does not.
        modules, params: by path.
    """

    source: str = ""
    local_attributes: bool = False
    modules: dict[str, Rule] = field(default_factory=dict)
    params: dict[str, Rule] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.modules or self.params)


def find_rules(model: nn.Module, section: TensorParallelSection, faults: list[Fault]) -> Rules:
    """The rules for ``model`` from the strongest source; an empty ``Rules`` means that there is none.

    What is wrong with them is added to ``faults``.
    """
    partition = section.partition_config
    if partition is None and section.preset_model is None:
        return _hugging_face(model, faults)
    specs = [*_specs(partition)] if partition is not None else []
    source = "tensor_parallel.partition_config"
    if section.preset_model is not None and (partition is None or partition.use_default_specs):
        specs += preset_specs(section.preset_model, getattr(model, "config", None))
        source = source if partition is not None else f'tensor_parallel.preset_model "{section.preset_model}"'
    rules = _by_specs(model, specs, partition or TPPartitionSection(), faults)
    rules.source = source
    if not rules and not any(spec.get("partition_type") == "skip" for spec in specs):
        faults.append(
            Fault(
                _CONFIG if partition is not None else f"{POINTER}/preset_model",
                f"no layer of {type(model).__name__} matches a rule of {source}",
                f"its layers are {_shown(_linears(model))}",
            )
        )
    return rules


def sizes_of_shape(rule: Rule, shape: Sequence[int], dim: int) -> tuple[int, ...]:
    """What lies along dimension ``dim`` of a fused weight, one after another.

    DeepSpeed's ``shape``: at ``partition_dim`` the number of equal sub-matrices, their sizes, or -1 for one; other
    entries are dimensions of a view, of which those before divide the cut dimension further.

    Raises:
        ValueError: it does not fit a weight of this shape.
    """
    assert rule.shape is not None
    lists = [index for index, each in enumerate(rule.shape) if isinstance(each, tuple)]
    at = rule.dim if rule.dim is not None else lists[0] if lists else 0
    if not 0 <= at < len(rule.shape):
        raise ValueError(f"it has no dimension {at}")
    before = [each for each in rule.shape[:at] if each != -1]
    if any(not isinstance(each, int) or each < 1 for each in before):
        raise ValueError("only the divided dimension may be a list")
    # Entries before it are outer dimensions of a view of the cut dimension, as the experts of stacked matrices are.
    outer = math.prod(before) if dim == 0 and len(rule.shape) > len(shape) else 1
    length, rest = divmod(shape[dim], outer)
    if rest:
        raise ValueError(f"{shape[dim]} is not a multiple of {outer}")
    entry = rule.shape[at]
    if isinstance(entry, tuple):
        if not entry or sum(entry) != length or any(not isinstance(n, int) or n < 1 for n in entry):
            raise ValueError(f"its parts are {sum(entry)} together, and there are {length}")
        return tuple(entry) * outer
    if entry == -1:
        return (length,) * outer
    count = int(entry)
    if count < 1 or length % count:
        raise ValueError(f"{length} is not a multiple of {count}")
    return (length // count,) * (count * outer)


# -- partition_config and presets ----------------------------------------------------------------------------------


def _specs(partition: TPPartitionSection) -> Iterator[Mapping[str, Any]]:
    for index, spec in enumerate(partition.layer_specs):
        yield {**spec, "said": f"layer_specs/{index}"}


def _by_specs(
    model: nn.Module, specs: Sequence[Mapping[str, Any]], partition: TPPartitionSection, faults: list[Fault]
) -> Rules:
    """The first spec that matches ``<module>.weight`` counts, as in DeepSpeed."""
    rules = Rules(local_attributes=True)
    names = [f"{name}.weight" for name, _ in model.named_modules()]
    patterns = [(spec, list(_compiled(spec, names, faults))) for spec in specs]
    kind = str(getattr(getattr(model, "config", None), "model_type", "")).lower()
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        layer = _without_adapter(name, module)
        if weight is None or layer is None:
            continue
        found = next((s for s, ps in patterns if _holds_for(s, kind) and any(_matches(p, layer) for p in ps)), None)
        if found is None:
            if partition.strict_mode and isinstance(module, nn.Linear):
                faults.append(Fault(_CONFIG, f"No matching spec for {layer}.weight (strict_mode)", "add a rule for it"))
            continue
        rule = _rule_of(found, module, layer, partition)
        if rule is not None and (STYLES[rule.style].cuts == "" or len(logical_shape(weight)) >= 2):
            rules.modules[layer] = rule
    return rules


def _without_adapter(name: str, module: nn.Module) -> str | None:
    """The layer that a rule speaks of: PEFT puts the layer itself under ``base_layer``, and its own beside it."""
    parts = name.split(".")
    if any(part.startswith("lora_") for part in parts):
        return None
    return ".".join(parts[:-1]) if parts[-1] == "base_layer" else name


def _compiled(spec: Mapping[str, Any], names: list[str], faults: list[Fault]) -> Iterator[re.Pattern[str]]:
    place = f"{_CONFIG}/{spec.get('said', 'layer_specs')}/patterns"
    for pattern in spec.get("patterns", ()):
        try:
            compiled = re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            faults.append(Fault(place, f"{pattern!r:.80} is not a regular expression: {error}"))
            continue
        if may_take_long(pattern, names):
            message = f"matching {pattern!r:.80} with a name may take for ever: it repeats a group, or too much else"
            faults.append(Fault(place, message, r"write a simpler one, such as .*\.layers\.\d+\.mlp\.up_proj"))
            continue
        yield compiled


def _matches(pattern: re.Pattern[str], layer: str) -> bool:
    plain = re.sub(r"^base_model\.model\.", "", layer)
    return any(pattern.match(name) for each in {layer, plain} for name in (f"{each}.weight", each))


def _holds_for(spec: Mapping[str, Any], kind: str) -> bool:
    kinds = spec.get("model_types")
    return not kinds or kind in [str(each).lower() for each in kinds]


def _rule_of(spec: Mapping[str, Any], module: nn.Module, layer: str, partition: TPPartitionSection) -> Rule | None:
    said, how = spec.get("said", ""), spec.get("partition_type", "column")
    shape = spec.get("shape")
    if how == "skip":
        partial = spec.get("grad_allreduce")
        return Rule(str(spec.get("style") or ("replicated_with_grad_allreduce" if partial else "replicate")), said)
    if isinstance(module, nn.Embedding):
        dim = spec.get("partition_dim")
        dim = partition.embedding_partition_dim if dim is None else dim
        return Rule("embedding_rowwise" if dim == 0 else "embedding_colwise", said)
    head = layer.rpartition(".")[2] in partition.lm_head_patterns
    style = {"column": "colwise", "row": "rowwise_split_input" if head else "rowwise"}[how]
    if how == "column" and spec.get("gather_output"):
        style = "colwise_gather_output"
    return Rule(style, said, None if shape is None else _tuples(shape), spec.get("partition_dim"))


def _tuples(shape: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(tuple(each) if isinstance(each, list | tuple) else each for each in shape)


# -- Hugging Face's plan -------------------------------------------------------------------------------------------


def _hugging_face(model: nn.Module, faults: list[Fault]) -> Rules:
    """Entries of ``config.base_model_tp_plan``, of the class's and of the instance's ``_tp_plan``; later ones win.

    Looked for in the model and the models inside it (under a wrapper, an adapter), the outermost that has one; last
    in a ``config`` that something else than a model of transformers has.
    """
    names = {
        "module": [name for name, _ in model.named_modules()],
        "param": [n for n, _ in model.named_parameters(remove_duplicate=False)],
    }
    for planned in (True, False):
        rules = Rules("the model's tp_plan")
        done: list[str] = []
        for owner, module in model.named_modules():
            if any(not outer or owner == outer or owner.startswith(f"{outer}.") for outer in done):
                continue
            plan = _plan_of(module, planned)
            prefix = (
                rf"(?:{re.escape(getattr(module, 'base_model_prefix', '') or '-')}\.)?" if planned else r"(?:.*\.)?"
            )
            before = (re.escape(f"{owner}.") if owner else "") + prefix
            if sum([_add(rules, before, key, style, names, faults) for key, style in plan.items()]):
                done.append(owner)
        if rules or faults:
            return rules
    return Rules()


def _add(
    rules: Rules, before: str, key: str, style: Any, names: Mapping[str, Sequence[str]], faults: list[Fault]
) -> bool:
    """Add the rules of one entry; whether it speaks of anything that is there."""
    pattern = re.compile(before + re.escape(key).replace(r"\*", ".*" if key.startswith("*") else "[^.]+"))
    matched = {kind: [name for name in found if pattern.fullmatch(name)] for kind, found in names.items()}
    if not any(matched.values()):
        return False
    if str(style) not in STYLES:
        faults.append(_unknown_style((matched["module"] or matched["param"])[0], key, style))
        return True
    rule = Rule(str(style), f"{key}: {style}")
    rules.modules.update(dict.fromkeys(matched["module"], rule))
    rules.params.update(dict.fromkeys(matched["param"], rule))
    return True


def _plan_of(module: nn.Module, planned: bool) -> dict[str, str]:
    """Of a model that has a plan; else of one that has only a configuration with one."""
    own, declared = vars(module).get("_tp_plan"), getattr(type(module), "_tp_plan", None)
    base = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
    if planned != (isinstance(own, dict) or isinstance(declared, dict)):
        return {}
    found: dict[str, str] = {}
    for plan in (base, declared, own):
        found.update(plan if isinstance(plan, dict) else {})
    return found


def _unknown_style(where: str, key: str, style: Any) -> Fault:
    return Fault(
        POINTER,
        f'the model\'s tp_plan gives {where} the style "{style}" ({key!r}), which ds_hf does not have: the plan is '
        "refused as a whole, for half a pair of layers would compute something else",
        f"give tensor_parallel.partition_config, or a plan of {', '.join(STYLES)}",
    )


# -- a model without rules -----------------------------------------------------------------------------------------

_COLUMN = re.compile(
    r"(q|k|v|qkv|query|key|value|query_key_value|gate|up|gate_up|fc1|w1|w3|wi|c_fc|dense_h_to_4h)(_proj)?"
)
_ROW = re.compile(r"(o|out|down|fc2|w2|wo|c_proj|dense_4h_to_h)(_proj)?")


def suggestion(model: nn.Module) -> str:
    """A ``partition_config`` to start from: every linear layer, those with well-known names as they usually are."""
    lines = []
    for name in _linears(model):
        leaf = name.rpartition(".")[2]
        how = "column" if _COLUMN.fullmatch(leaf) else "row" if _ROW.fullmatch(leaf) else "skip"
        pattern = re.escape(f"{name}.weight" if name else "weight").replace(r"\*", r"\d+")
        lines.append(json.dumps({"patterns": [f"^{pattern}$"], "partition_type": how}))
    specs = ",\n             ".join(lines)
    return f'"partition_config": {{"use_default_specs": false, "layer_specs": [\n             {specs}]}}'


def _linears(model: nn.Module) -> list[str]:
    """Names of the linear layers, those of repeated blocks once, with ``*`` for the number."""
    found = [
        re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name)
        for name, module in model.named_modules()
        if (weight := module._parameters.get("weight")) is not None
        and len(logical_shape(weight)) == 2
        and not isinstance(module, nn.Embedding)
    ]
    return list(dict.fromkeys(found))


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"{', '.join(names[:8])}{more}"
