"""Each method at stages 0 to 3 on two processes, against plain torch on one, which has its own formulas here."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hf import initialize
from ds_hf.compression import init_compression
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.engine.zero.init import Init
from tests.compression.common import LR, STEPS, batches, config, method, net, run
from tests.helpers.distributed import run_distributed

OFFSET = 2
# Of a method: the section's name and content.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "4 bits": ("weight_quantization", method({"target_bits": 4}, ["fc", "emb"], quantize_groups=8)),
    "4 bits, asymmetric": (
        "weight_quantization",
        method({"target_bits": 4}, ["fc"], quantize_groups=4, quantization_type="asymmetric"),
    ),
    "ternary": ("weight_quantization", method({"target_bits": 2}, ["fc"], quantize_groups=8)),
    "binary": ("weight_quantization", method({"target_bits": 1}, ["fc"])),
    "8 to 6 bits": (
        "weight_quantization",
        method({"start_bits": 8, "target_bits": 6, "quantization_period": 1}, ["fc"]),
    ),
    "mixed": (
        "weight_quantization",
        method({"target_bits": 4}, ["fc"], fp16_mixed_quantize={"enabled": True, "quantize_change_ratio": 0.25}),
    ),
    "dynamic": ("activation_quantization", method({"bits": 4}, ["fc"])),
    "static": ("activation_quantization", method({"bits": 4}, ["fc"], range_calibration="static")),
    "l1": ("sparse_pruning", method({"dense_ratio": 0.25}, ["fc", "emb"])),
    "l1, step by step": (
        "sparse_pruning",
        method({"dense_ratio": 0.25}, ["fc"], schedule_offset=1, schedule_offset_end=5, schedule_offset_stride=2),
    ),
    "2:4": ("sparse_pruning", method({}, ["fc"], block_pattern="2:4")),
    "topk": ("sparse_pruning", method({"dense_ratio": 0.5}, ["fc"], method="topk")),
    "rows": ("row_pruning", method({"dense_ratio": 0.5}, ["fc1"], [["fc2"]])),
    "rows, topk": ("row_pruning", method({"dense_ratio": 0.5}, ["fc1"], method="topk")),
    "heads": ("head_pruning", method({"dense_ratio": 0.5}, ["fc2"], [["fc1"]], method="l1", num_heads=4)),
    "heads, topk": ("head_pruning", method({"dense_ratio": 0.5}, ["fc2"], method="topk", num_heads=4)),
}


def straight(weight: Tensor, values: Tensor) -> Tensor:
    return weight + (values - weight).detach()


def symmetric(weight: Tensor, bits: int, groups: int) -> Tensor:
    flat = weight.detach().reshape(groups, -1)
    scale = flat.abs().max(dim=1, keepdim=True).values / 2 ** (bits - 1)
    return (flat / scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).mul(scale).view(weight.shape)


def asymmetric(weight: Tensor, bits: int, groups: int) -> Tensor:
    flat = weight.detach().reshape(groups, -1)
    least, most = flat.min(dim=1, keepdim=True).values, flat.max(dim=1, keepdim=True).values
    scale = (most - least) / 2**bits
    zero = (least / scale).round() * scale
    return (((flat - zero) / scale).round().clamp(0, 2**bits - 1) * scale + zero).view(weight.shape)


def ternary(weight: Tensor, groups: int) -> Tensor:
    flat = weight.detach().reshape(groups, -1)
    kept = flat.abs() > 0.7 * flat.abs().mean(dim=1, keepdim=True)
    mean = torch.stack([row[mask].abs().mean() for row, mask in zip(flat, kept, strict=True)])
    return (flat.sign() * kept * mean[:, None]).view(weight.shape)


def smallest_out(values: Tensor, kept: int) -> Tensor:
    mask = torch.ones_like(values).flatten()
    mask[values.flatten().argsort()[: values.numel() - kept]] = 0
    return mask.view(values.shape)


class Reference:
    """One process of plain torch."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.model = net()
        self.scores: dict[str, nn.Parameter] = {}
        prepared = init_compression(net(), config({METHODS[name][0]: METHODS[name][1]}))
        for key, param in prepared.named_parameters():
            if key.endswith("scores"):
                self.scores[key] = nn.Parameter(param.detach().clone())
        self.masks: dict[str, Tensor] = {}
        self.ranges: dict[str, tuple[Tensor, Tensor]] = {}
        self.seen: dict[str, list[Tensor]] = {}
        trained = [*self.model.parameters(), *self.scores.values()]
        self.optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.01)

    def weights(self, step: int) -> dict[str, Tensor]:
        own = dict(self.model.named_parameters())
        if step < (1 if self.name == "l1, step by step" else OFFSET):
            return own
        both = ("fc1.weight", "fc2.weight")
        new: dict[str, Tensor] = {}
        bits = {"8 to 6 bits": {2: 8, 3: 7, 4: 6, 5: 6}.get(step, 6), "4 bits": 4, "mixed": 4}.get(self.name)
        if bits is not None:
            groups = 8 if self.name == "4 bits" else 1
            for key in (*both, *(["emb.weight"] if self.name == "4 bits" else [])):
                values = symmetric(own[key], bits, groups)
                if self.name == "mixed":
                    values = values + (own[key] - values) * max(0.0, 1 - 0.25 * (step - OFFSET))
                new[key] = straight(own[key], values)
        elif self.name == "4 bits, asymmetric":
            new = {key: straight(own[key], asymmetric(own[key], 4, 4)) for key in both}
        elif self.name == "ternary":
            new = {key: straight(own[key], ternary(own[key], 8)) for key in both}
        elif self.name == "binary":
            new = {key: straight(own[key], own[key].sign() * own[key].abs().mean()) for key in both}
        elif self.name in ("l1", "l1, step by step", "2:4"):
            new = self.pruned(own, step)
        elif self.scores:
            new = self.learned(own)
        elif self.name == "rows":
            mask = self.masks.setdefault("rows", smallest_out(own["fc1.weight"].detach().abs().sum(dim=1), 8))
            new = {"fc1.weight": own["fc1.weight"] * mask[:, None], "fc1.bias": own["fc1.bias"] * mask}
        elif self.name == "heads":
            sums = own["fc2.weight"].detach().abs().view(8, 4, 4).sum(dim=(0, 2))
            mask = self.masks.setdefault("heads", smallest_out(sums, 2))
            new = {"fc2.weight": own["fc2.weight"] * mask.repeat_interleave(4)}
        return {**own, **new}

    def pruned(self, own: dict[str, Tensor], step: int) -> dict[str, Tensor]:
        for key in ("fc1.weight", "fc2.weight", *(["emb.weight"] if self.name == "l1" else [])):
            size = own[key].detach().abs()
            if self.name == "l1":
                self.masks.setdefault(key, smallest_out(size, size.numel() // 4))
            elif self.name == "2:4":
                rows = [smallest_out(four, 2) for four in size.view(-1, 4)]
                self.masks.setdefault(key, torch.stack(rows).view(size.shape))
            else:  # at steps 1, 3 and 5: none, then 1 - (1 - 2/4)^3 of the way, all of it
                way = {1: 0.0, 2: 0.0, 3: 0.875, 4: 0.875, 5: 1.0}[step]
                kept = -int(-(1 - 0.75 * way) * size.numel() // 1)
                before = self.masks.get(key, torch.ones_like(size))
                if step in (1, 3, 5):
                    self.masks[key] = smallest_out(size * before, kept)
        return {key: own[key] * mask for key, mask in self.masks.items()}

    def learned(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for key, scores in self.scores.items():
            name = key.partition(".")[0]
            mask = straight(scores, smallest_out(scores.detach(), scores.numel() // 2))
            weight = own[f"{name}.weight"]
            if self.name == "topk":
                found[f"{name}.weight"] = weight * mask
            elif self.name == "rows, topk":
                found = {"fc1.weight": weight * mask.view(-1, 1), "fc1.bias": own["fc1.bias"] * mask.view(-1)}
            else:
                found["fc2.weight"] = (weight.view(8, 4, 4) * mask.view(1, 4, 1)).view(8, 16)
        return found

    def input(self, name: str, step: int) -> Callable[..., Any]:
        def change(module: nn.Module, args: tuple[Tensor]) -> Tensor | None:
            x = args[0]
            if step < OFFSET:
                return None
            if self.name == "dynamic":
                return straight(x, symmetric(x, 4, x.shape[0]))
            self.seen.setdefault(name, []).append(x.detach())
            if name not in self.ranges:
                return None
            low, high = self.ranges[name]
            scale = torch.maximum(low.abs(), high) / 8
            return straight(x, (x.detach() / scale).round().clamp(-8, 7) * scale)

        return change

    def train(self) -> list[float]:
        losses = []
        for index, step in enumerate(batches(2)):
            handles = [
                module.register_forward_pre_hook(self.input(name, index))
                for name, module in self.model.named_children()
                if name.startswith("fc") and self.name in ("dynamic", "static")
            ]
            weights = self.weights(index)
            each = [torch.func.functional_call(self.model, weights, (ids,)) for ids in step]
            self.optimizer.zero_grad()
            (sum(each) / 2).backward()  # type: ignore[union-attr]
            self.optimizer.step()
            losses.append(sum(loss.item() for loss in each) / 2)
            for handle in handles:
                handle.remove()
            for name, seen in self.seen.items():
                if seen:
                    low, high = torch.stack([x.min() for x in seen]).min(), torch.stack([x.max() for x in seen]).max()
                    old = self.ranges.get(name, (low, high))
                    self.ranges[name] = (old[0] * 0.95 + low * 0.05, old[1] * 0.95 + high * 0.05)
                seen.clear()
        return losses


@cache
def reference(name: str) -> tuple[list[float], dict[str, Tensor]]:
    own = Reference(name)
    return own.train(), {key: param.detach() for key, param in own.model.named_parameters()}


def trained(stage: int) -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    found = {}
    for name, (key, section) in METHODS.items():
        model, file = net(), config({key: section}, stage)
        init_compression(model, file)
        engine = initialize(model=model, config=file)[0]
        losses = torch.tensor(run(engine, batches(2), dist.get_rank()))
        dist.all_reduce(losses)
        with GatheredParameters(model.parameters()):
            weights = {
                key: param.detach().clone() for key, param in model.named_parameters() if not key.endswith("scores")
            }
        engine.destroy()
        found[name] = ((losses / 2).tolist(), weights)
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_method_trains_as_plain_torch(stage: int) -> None:
    for result in run_distributed(trained, 2, stage, timeout=120):
        assert set(result) == set(METHODS)
        for name, (losses, weights) in result.items():
            expected, kept = reference(name)
            assert losses == pytest.approx(expected, rel=2e-5), name
            assert len(losses) == STEPS
            for key, weight in weights.items():
                torch.testing.assert_close(weight, kept[key], rtol=2e-5, atol=2e-5, msg=f"{name}: {key}")


def otherwise(stage: int, sharded: bool) -> list[list[float]]:
    """Curves with rounding by chance, and with a model that was sharded as it was made."""
    found = []
    for name in ("l1", "rows, topk", "heads", "chance"):
        key, section = METHODS["4 bits" if name == "chance" else name]
        if name == "chance":
            section = {**section, "shared_parameters": {**section["shared_parameters"], "rounding": "stochastic"}}
        file = config({key: section}, stage)
        if sharded:
            with Init(config_dict_or_path=file):
                model = net()
        else:
            model = net()
        init_compression(model, file)
        engine = initialize(model=model, config=file)[0]
        losses = torch.tensor(run(engine, batches(2), dist.get_rank()))
        dist.all_reduce(losses)
        engine.destroy()
        found.append((losses / 2).tolist())
    return found


def test_sharded_models_and_chance() -> None:
    plain = run_distributed(otherwise, 2, 0, False)[0]
    sharded = run_distributed(otherwise, 2, 3, True)
    for other in sharded:
        for name, curve, expected in zip(("l1", "rows, topk", "heads"), other, plain, strict=False):
            assert curve == pytest.approx(expected, rel=2e-5), name
            assert curve == pytest.approx(reference(name)[0], rel=2e-5), name
        assert other[3] == pytest.approx(plain[3], rel=2e-5)
    assert plain[3][OFFSET + 1 :] != pytest.approx(reference("4 bits")[0][OFFSET + 1 :], rel=1e-4)


@pytest.mark.parametrize(("stage", "kept"), [(0, True), (2, True), (3, False)])
def test_where_weights_are_released_nothing_of_them_is_kept_for_backward(stage: int, kept: bool) -> None:
    section = {
        "weight_quantization": method({"target_bits": 4}, ["fc"], schedule_offset=0),
        "sparse_pruning": method({"dense_ratio": 0.5}, ["fc"], schedule_offset=0),
    }
    model = net()
    engine = initialize(model=model, config=config(section, stage))[0]
    own = {id(param) for param in model.parameters()}
    found: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        if id(tensor) not in own and tensor._base is None:
            found.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = engine(batches(1)[0, 0].to(engine.device))
    assert bool({(16, 8), (8, 16)} & set(found)) is kept
    engine.backward(loss)
    engine.step()


def test_methods_change_the_training() -> None:
    """The reference is none that leaves the weights alone."""
    curves = {name: tuple(round(loss, 5) for loss in reference(name)[0]) for name in METHODS}
    assert len(set(curves.values())) == len(METHODS)
    starts = {curve[:1] for curve in curves.values()}
    assert len(starts) == 1
