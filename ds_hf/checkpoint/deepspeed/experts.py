"""Whose experts DeepSpeed's files hold: those of its own layer, and those that its AutoEP took from a model.

Of its own layer a process has modules that it numbers from 0. AutoEP keeps three stacked weights of a block, of each a
process's part, where a model of transformers has two, and calls the router and the shared experts its own way. ZeRO
divides both over the processes that hold the same ones: the partitions of a group are of ``partition_count`` of them.

Here experts get their numbers in the layer, and AutoEP's names and weights become those of the model.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ds_hf.checkpoint.deepspeed.layout import count_of
from ds_hf.checkpoint.deepspeed.slices import INFO, SlicePlace
from ds_hf.checkpoint.deepspeed.whole import ExpertTensor, Found, Local, TensorsInRow, Written
from ds_hf.checkpoint.format import SavedCut, SavedFragment
from ds_hf.dtypes import name_of

__all__ = ["AUTOEP", "ExpertFiles", "StackedLayer", "with_experts"]

AUTOEP = "ds_autoep_layers"
_OWN = re.compile(r"(.*\.deepspeed_experts)\.(\d{1,9})\.(.+)")
_WEIGHTS = ("w1", "w2", "w3")  # gate, down and up


@dataclass(frozen=True)
class StackedLayer:
    """A layer of AutoEP.

    Attributes:
        block: name of the block; prefix: what its experts are called in the files.
        count: how many experts there are.
        owned: of each process of those that divide them, its experts.
    """

    block: str
    prefix: str
    count: int
    owned: tuple[tuple[int, ...], ...]


class ExpertFiles:
    """What the files ``*_model_states.pt`` say of experts.

    Args:
        state: content of the first one.

    Raises:
        ValueError: it contradicts itself.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        entries = state.get(AUTOEP) or ()
        if not isinstance(entries, list | tuple):
            raise ValueError(f"{AUTOEP} is a {type(entries).__name__}")
        layers = [_stacked_layer(entry) for entry in entries]
        self.stacked = {layer.prefix: layer for layer in layers}
        if len(self.stacked) < len(layers):
            raise ValueError(f"{AUTOEP} has two layers of one name")
        settings = state.get("ds_config")
        config: Mapping[str, Any] = settings if isinstance(settings, Mapping) else {}
        self.data_first = bool(config.get("use_data_before_expert_parallelism", False))
        section = config.get("expert_parallel")
        self._names = _Names(section if isinstance(section, Mapping) else {}, layers, state)
        kinds = Counter(
            v.dtype for v in (state.get("module") or {}).values() if isinstance(v, Tensor) and v.is_floating_point()
        )
        self._usual = name_of(kinds.most_common(1)[0][0]) if kinds else None
        # Without these numbers DeepSpeed has not divided experts, and what is called so was put together, as by us.
        self.own = bool(state.get("num_experts"))
        self._parts: dict[tuple[str, str], Local] = {}
        self._local: dict[str, set[int]] = {}  # of DeepSpeed's own layers, what a process numbers
        shapes = state.get("param_shapes") or ()
        for name in (str(name) for group in shapes if isinstance(group, Mapping) for name in group):
            if (own := _OWN.fullmatch(name)) is not None:
                self._local.setdefault(own[1], set()).add(int(own[2]))

    def is_expert(self, name: str) -> bool:
        """Whether a parameter of the files is one of experts."""
        return (self.own and _OWN.fullmatch(name) is not None) or self.is_stacked(name)

    def is_stacked(self, name: str) -> bool:
        """Whether it is one of AutoEP's weights."""
        return self._stacked(name) is not None

    def rename(self, state: dict[str, Any]) -> None:
        """Give what AutoEP calls its own way the model's names, in the content of a file; experts aside."""
        if not self.stacked:
            return
        of = self._names.of
        if isinstance(state.get("module"), Mapping):  # stacked weights lie elsewhere, too
            state["module"] = {name: v for name, v in state["module"].items() if not self.is_stacked(str(name))}
        for key in ("module", "frozen_param_shapes", "frozen_param_fragments"):
            if isinstance(state.get(key), Mapping):
                state[key] = {new: value for name, value in state[key].items() if (new := of(str(name))) is not None}
        if isinstance(state.get("param_shapes"), list):
            state["param_shapes"] = [
                {of(str(name)) or name: shape for name, shape in each.items()} for each in state["param_shapes"]
            ]
        if isinstance(state.get("buffer_names"), list):
            state["buffer_names"] = [new for name in state["buffer_names"] if (new := of(str(name))) is not None]
        state.pop(INFO, None)  # what AutoEP says itself, in its own names

    def model_name(self, name: str) -> str | None:
        """What the model calls what the files call ``name``, experts aside; ``None`` for a second name of a router."""
        return self._names.of(name)

    def in_model(self, name: str) -> list[str]:
        """The parameter of the model that has what the files call ``name``."""
        stacked = self._stacked(name)
        return [self._names.weight(*stacked)] if stacked is not None else [self._names.of(name) or name]

    def addresses(self, held: Mapping[str, Any]) -> dict[str, Any]:
        """``param_slice_mappings`` of one group, by the model's names."""
        return {self._names.of(str(name)) or name: address for name, address in held.items()}

    def _stacked(self, name: str) -> tuple[StackedLayer, str] | None:
        prefix, _, weight = name.rpartition(".")
        layer = self.stacked.get(prefix)
        return (layer, weight) if layer is not None and weight in _WEIGHTS else None

    def processes(self, ranks: int, names: Iterable[str], partitions: Any) -> list[list[int]]:
        """Of ``ranks`` processes those that have the same experts, by number among those that divide them.

        Args:
            names: parameters of a group of experts.
            partitions: how many the files say that the group has; AutoEP says itself who divides a layer.
        """
        sizes = {len(found[0].owned) for name in names if (found := self._stacked(name)) is not None}
        if len(sizes) > 1:
            raise ValueError(f"experts of one group are divided over {sorted(sizes)} processes")
        size = sizes.pop() if sizes else ranks // max(count_of(partitions), 1)
        if size < 1 or ranks % size:
            raise ValueError(f"{ranks} processes wrote it, and experts are divided over {size}")
        each = ranks // size
        if self.data_first:
            return [list(range(part * each, (part + 1) * each)) for part in range(size)]
        return [list(range(part, ranks, size)) for part in range(size)]

    def check_processes(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Where each process says which experts it has (stage 3), that is where they are looked for."""
        for rank, state in enumerate(states):
            for entry in state.get(AUTOEP) or ():
                layer = self.stacked.get(str(entry.get("expert_key_prefix")))
                if layer is None or "ep_rank" not in entry:
                    raise ValueError(f"{AUTOEP} of process {rank} is not that of process 0")
                held = self.processes(len(states), [f"{layer.prefix}.w1"], 1)
                if rank not in held[count_of(entry["ep_rank"]) % len(held)]:
                    raise ValueError(f"process {rank} has the experts of place {entry['ep_rank']} in {layer.prefix}")

    def check_universal(self, state: Mapping[str, Any]) -> None:
        """DeepSpeed's converter takes experts of its own layers for those of one process, and joins what is not one."""
        counts, here = state.get("num_experts"), [len(numbers) for numbers in self._local.values()]
        if here and isinstance(counts, list) and counts != here:
            raise ValueError(
                f"its layers have {counts} experts, and it has {here}: ds_to_universal cannot convert experts of "
                "deepspeed.moe.layer.MoE that processes divide. Load the folder that it was made of, which needs no "
                "conversion"
            )

    def place(self, found: Found, held: Sequence[Mapping[str, Local]]) -> dict[str, list[str]]:
        """Put parameters of one group of experts into ``found``: ``held`` has what each process has of those that
        divide them, by the names there. What AutoEP stacks waits for ``finish``.

        Returns:
            by the names there their names in the model.
        """
        names: dict[str, list[str]] = {}
        for name in held[0]:
            if any(name not in other for other in held):
                raise ValueError(f"not all processes have {name}")
            stacked = self._stacked(name)
            if stacked is not None:
                self._parts[stacked[0].prefix, stacked[1]] = _put_together(name, stacked[0], [h[name] for h in held])
                names[name] = [self._names.weight(*stacked)]
                continue
            layer, index, rest = _own_name(name)
            number = len(self._local.get(layer) or {_own_name(each)[1] for each in held[0] if each.startswith(layer)})
            for process, locals_ in enumerate(held):
                whole = f"{layer}.{process * number + index}.{rest}"
                found.add(whole, [locals_[name]], None, trainable=True)
                names.setdefault(name, []).append(whole)
        return names

    def give(self, name: str, whole: Local) -> None:
        """A weight of AutoEP's of all experts of a layer, which was put together before."""
        stacked = self._stacked(name)
        if stacked is None or whole.shape[:1] != (stacked[0].count,):
            raise ValueError(f"{name} has shape {list(whole.shape)}, and is to be of all experts of a layer")
        self._parts[stacked[0].prefix, stacked[1]] = whole

    def finish(self, found: Found, tensors: Mapping[tuple[str, str], Sequence[ExpertTensor]]) -> None:
        """Put the weights of AutoEP's layers into ``found`` as the model has them.

        Args:
            tensors: by prefix and weight what the files of experts have, all there is of what does not train.
        """
        for prefix, layer in self.stacked.items():
            parts, trains = [], []
            for key in _WEIGHTS:
                part, saved = self._parts.get((prefix, key)), tensors.get((prefix, key), ())
                if saved and sorted(each.expert for each in saved) != list(range(layer.count)):
                    raise ValueError(f"the files of experts do not have {prefix}.{key} of all {layer.count} experts")
                if part is None and not saved:
                    raise ValueError(f"nothing holds {prefix}.{key}")
                trains.append(part is not None and "weight" not in part.states)
                parts.append(part or _of_files(found, f"{prefix}.{key}", saved))
            self._add(found, layer, parts, trains)
            for key, part in zip(_WEIGHTS, parts, strict=True):
                self._written(found, layer, key, part, tensors.get((prefix, key), ()))

    def _add(self, found: Found, layer: StackedLayer, parts: Sequence[Local], trains: Sequence[bool]) -> None:
        gate, down, up = parts
        names = [self._names.weight(layer, key) for key in _WEIGHTS]
        found.add(names[1], [down], None, trainable=trains[1])
        if names[0] != names[2]:
            found.add(names[0], [gate], None, trainable=trains[0])
            found.add(names[2], [up], None, trainable=trains[2])
            return
        if trains[0] != trains[2] or gate.shape != up.shape:
            raise ValueError(f"{layer.prefix}.w1 and w3 are halves of {names[0]}, and differ in shape or training")
        gate, up = _beside(found, names[0], gate, up)
        whole = (gate.shape[0], 2 * gate.shape[1], *gate.shape[2:])
        kept = (math.prod(gate.shape), math.prod(up.shape))
        place = SlicePlace(whole, (_half(gate, "w1"), _half(gate, "w3")), kept, {"cat_dim": 0})
        found.add(names[0], [gate, up], place, trainable=trains[0])

    def _written(self, found: Found, layer: StackedLayer, key: str, part: Local, saved: Sequence[ExpertTensor]) -> None:
        name, each = self._names.weight(layer, key), math.prod(part.shape[1:])
        if self._usual is not None:  # where no file of an expert tells
            found.dtypes.setdefault(name, self._usual)
        halves = key != "w2" and self._names.weight(layer, "w1") == self._names.weight(layer, "w3")
        for tensor in saved:
            found.dtypes[name] = name_of(tensor.value.dtype)
            if found.parameters[name].value_state == "master":
                cut = _half(part, key) if halves else None
                found.written.append(Written(name, tensor.expert * each, cut, tensor))

    def stacked_part(self, name: str) -> tuple[tuple[str, str], int] | None:
        """Of a tensor in the file of one expert of AutoEP: prefix and weight, and which expert."""
        base, _, number = name.rpartition(".")
        found = self._stacked(base)
        return ((found[0].prefix, found[1]), int(number)) if found is not None and number.isdecimal() else None


def _half(gate: Local, key: str) -> SavedCut:
    """Gates are the first rows of each expert, ups the others."""
    rows = gate.shape[1]
    return SavedCut(1, ((0 if key == "w1" else rows, rows),))


def _beside(found: Found, name: str, gate: Local, up: Local) -> tuple[Local, Local]:
    """Both under the same keys, where they lie in different tensors of a file: those are seen one after the other."""
    if gate.states == up.states:
        return gate, up
    if set(gate.states) != set(up.states) or gate.scalars != up.scalars:
        raise ValueError(f"the halves of {name} have different states")
    keys, shifts = {state: f"{name}.{state}" for state in gate.states}, dict[str, int]()
    of_gate, of_up = ({row.file for row in part.rows} for part in (gate, up))
    for file in of_gate | of_up:
        both = file in of_gate and file in of_up
        sizes = (found.tensors[file, key].numel() for key in gate.states.values()) if both else ()
        shifts[file] = max(sizes, default=0)
        for state, key in keys.items():
            own = gate if file in of_gate else up
            value = found.tensors[file, own.states[state]]
            if both:
                value = TensorsInRow([(0, value), (shifts[file], found.tensors[file, up.states[state]])])
            found.tensors[file, key] = value
    moved = [replace(row, offset=row.offset + shifts[row.file]) for row in up.rows]
    return replace(gate, states=keys), replace(up, states=keys, rows=moved)


def _of_files(found: Found, name: str, saved: Sequence[ExpertTensor]) -> Local:
    """A stacked weight that does not train, of the files of its experts."""
    key, first = f"module.{name}", saved[0].value
    rows = []
    for tensor in sorted(saved, key=lambda tensor: tensor.expert):
        if tensor.value.shape != first.shape or tensor.value.dtype != first.dtype:
            raise ValueError(f"{tensor.name} in {tensor.file} is not like {saved[0].name} in {saved[0].file}")
        found.tensors[tensor.file, key] = tensor.value
        rows.append(SavedFragment(tensor.file, tensor.expert * first.numel(), 0, first.numel()))
    return Local((len(saved), *first.shape), {"weight": key}, rows)


def with_experts(
    options: Sequence[dict[str, Any]], names: Sequence[list[str]]
) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """Parameter groups as a script made them: AutoEP takes experts out of each into one of the same options."""
    said = ("name", "moe", "params")
    plain = [{key: value for key, value in group.items() if key not in said} for group in options]
    kept = [index for index, group in enumerate(options) if not group.get("moe")]
    if not kept:
        return list(options), list(names)
    joined = {index: list(names[index]) for index in kept}
    for index, group in enumerate(options):
        if group.get("moe"):
            joined[next((i for i in kept if plain[i] == plain[index]), kept[0])] += names[index]
    return [options[index] for index in kept], [list(dict.fromkeys(joined[index])) for index in kept]


def _own_name(name: str) -> tuple[str, int, str]:
    match = _OWN.fullmatch(name)
    if match is None:
        raise ValueError(f"{name} lies among parameters of experts and is none")
    return match[1], int(match[2]), match[3]


def _put_together(name: str, layer: StackedLayer, held: Sequence[Local]) -> Local:
    """A stacked weight of all experts, of what each process has."""
    if len(held) != len(layer.owned):
        raise ValueError(f"{name} lies on {len(held)} processes, and {AUTOEP} says {len(layer.owned)}")
    first, rows = held[0], list[SavedFragment]()
    each = math.prod(first.shape[1:])
    for local, owned in zip(held, layer.owned, strict=True):
        if local.shape[0] != len(owned) or local.shape[1:] != first.shape[1:]:
            raise ValueError(f"{name} has shape {list(local.shape)} where {len(owned)} experts are said to be")
        if local.scalars != first.scalars or set(local.states) != set(first.states):
            raise ValueError(f"{name} was saved after different numbers of steps on different processes")
        rows += _numbered(local.rows, owned, each)
    return Local((layer.count, *first.shape[1:]), first.states, rows, first.scalars)


def _numbered(rows: Sequence[SavedFragment], owned: Sequence[int], each: int) -> list[SavedFragment]:
    """Rows that count in the experts of one process, as they count in all of them."""
    found = list[SavedFragment]()
    for row in rows:
        done = 0
        while done < row.numel:
            index, into = divmod(row.start + done, each)
            numel = min(each - into, row.numel - done)
            start, last = owned[index] * each + into, found[-1] if found else None
            if last is not None and last.file == row.file and last.start + last.numel == start and done:
                found[-1] = SavedFragment(row.file, last.start, last.offset, last.numel + numel)
            else:
                found.append(SavedFragment(row.file, start, row.offset + done, numel))
            done += numel
    return found


def _stacked_layer(entry: Any) -> StackedLayer:
    """One entry of the files' own list, checked."""
    if not isinstance(entry, Mapping):
        raise ValueError(f"{AUTOEP} holds a {type(entry).__name__}")
    lacking = [key for key in ("module_path", "expert_key_prefix", "num_experts", "ep_size") if key not in entry]
    if lacking:
        raise ValueError(f"an entry of {AUTOEP} has no {lacking[0]}")
    prefix, block = str(entry["expert_key_prefix"]), str(entry["module_path"])
    count, size = count_of(entry["num_experts"]), count_of(entry["ep_size"])
    if not count or not size or prefix != (f"{block}.experts" if block else "experts"):
        raise ValueError(f"{AUTOEP} says of {prefix!r:.200} in {block!r:.200}: {count} experts on {size} processes")
    placement = entry.get("expert_placement")
    if placement is None:
        if count % size:
            raise ValueError(f"{AUTOEP} says of {prefix}: {count} experts on {size} processes")
        each = count // size
        owned = [tuple(range(part * each, (part + 1) * each)) for part in range(size)]
    else:
        of_rank = {count_of(rank["rank"]): tuple(map(count_of, rank["experts"])) for rank in placement["ranks"]}
        owned = [of_rank.get(part, ()) for part in range(size)]
    if sorted(expert for part in owned for expert in part) != list(range(count)):
        raise ValueError(f"{AUTOEP} does not say of {prefix} where each of {count} experts lies")
    return StackedLayer(block, prefix, count, tuple(owned))


class _Names:
    """AutoEP's names of a block's parts, and the model's: transformers', or what the section of the file says."""

    def __init__(self, section: Mapping[str, Any], layers: Sequence[StackedLayer], state: Mapping[str, Any]) -> None:
        def said(key: str, usual: str) -> str:
            value = section.get(key)
            return value if isinstance(value, str) and value else usual

        names = [str(name) for name in state.get("module") or ()]
        gated = any(".shared_experts_gate." in name for name in names)
        shared = "shared_expert" if gated else "shared_experts"  # Qwen's have a gate
        self._experts = said("expert_pattern", "experts")
        self._weights = {"w1": said("expert_w1", "gate_up_proj"), "w2": said("expert_w2", "down_proj")}
        self._weights["w3"] = said("expert_w3", self._weights["w1"])
        self._blocks = {layer.block for layer in layers}
        self._parts = {
            "router.gate": said("router_pattern", "gate"),
            "router": said("router_pattern", "gate"),
            "shared_experts": said("shared_experts_pattern", shared),
            "shared_experts_gate": said("shared_experts_gate_pattern", "shared_expert_gate"),
        }

    def weight(self, layer: StackedLayer, weight: str) -> str:
        base = f"{layer.block}.{self._experts}" if layer.block else self._experts
        return f"{base}.{self._weights[weight]}"

    def of(self, name: str) -> str | None:
        """The model's name of what is called ``name`` in the files; ``None`` for a second name of the router."""
        for block in self._blocks:
            before = f"{block}." if block else ""
            if not name.startswith(before):
                continue
            rest = name.removeprefix(before)
            if rest.startswith(f"{self._parts['router']}.gate."):
                return None
            for part, known in self._parts.items():
                if rest.startswith(f"{part}."):
                    return f"{before}{known}.{rest.removeprefix(f'{part}.')}"
        return name
