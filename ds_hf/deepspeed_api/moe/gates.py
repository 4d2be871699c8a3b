"""Gates of DeepSpeed's layer of experts: which experts a token goes to, and with which weights.

Each expert takes no more than ``capacity`` tokens of a process; who comes too late is dropped there. What a gate
decides is ``Routes``; the functions with DeepSpeed's names give the same as its dense tensors, or as its lists.

Everything is computed in fp32, or fp64 for fp64. Random numbers are drawn from torch's own distributions in DeepSpeed's
order, so that one seed gives the same decisions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributions import Gumbel, Uniform
from torch.nn import functional as F

from ds_hf.errors import ConfigError

__all__ = ["Routes", "TopKGate", "gumbel_rsample", "multiplicative_jitter", "top1gating", "top2gating", "topkgating"]

_POLICIES = ("Jitter", "RSample")


class Routes(NamedTuple):
    """What a gate has decided for ``tokens``, of which each takes ``k`` routes.

    Attributes:
        l_aux: the loss that is smallest where all experts get equally many tokens.
        capacity: how many places each expert has for them.
        experts: int64 ``[k, tokens]``; -1 where the token is dropped.
        slots: int64 ``[k, tokens]``: its place among those of the expert; 0 where it is dropped.
        weights: ``[k, tokens]``; 0 where it is dropped.
        counts: int64 ``[experts]``: how many tokens chose each, before any is dropped.
    """

    l_aux: Tensor
    capacity: int
    experts: Tensor
    slots: Tensor
    weights: Tensor
    counts: Tensor

    def dense(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """DeepSpeed's form: the loss, weights and their places ``[tokens, experts, capacity]``, and the counts."""
        k, tokens = self.experts.shape
        weights = self.weights.new_zeros(tokens, len(self.counts), self.capacity)
        kept = self.experts >= 0
        token = torch.arange(tokens, device=kept.device).expand(k, tokens)[kept]
        places = (token, self.experts[kept], self.slots[kept])
        weights = weights.index_put(places, self.weights[kept])
        return self.l_aux, weights, weights.bool(), self.counts

    def listed(self) -> tuple[Tensor, Tensor, int, Tensor, Tensor, Tensor, Tensor]:
        """DeepSpeed's form for a dispatch of its own (``sparse_routes``)."""
        capacity = torch.tensor(self.capacity, device=self.counts.device)
        experts, slots = self.experts.to(torch.int32), self.slots.to(torch.int32)
        return self.l_aux, capacity, len(self.counts), experts, slots, self.weights, self.counts


# -- the three gates ---------------------------------------------------------------------------------------------------


def _top1(
    logits: Tensor,
    factor: float,
    least: int,
    used_token: Tensor | None,
    noisy: bool,
    drops: bool,
    use_rts: bool,
    group: Any,
) -> Routes:
    """The expert of the largest logit.

    Args:
        used_token: ``[tokens]``, 0 for those that go nowhere.
        noisy: Gumbel noise decides with the logits.
        use_rts: which tokens an expert takes is drawn, if they are too many.
    """
    gates = logits.softmax(1)
    chosen = (logits + gumbel_rsample(logits.shape, logits.device) if noisy else gates).argmax(1)
    mask = F.one_hot(chosen, gates.shape[1])
    if used_token is not None:
        mask = mask * used_token.reshape(-1, 1).to(mask)
    counts = mask.sum(0)
    capacity = _capacity(gates, factor, least) if drops else min(_fullest(counts, group), len(gates))
    l_aux = (gates.mean(0) * _share(mask, gates)).sum() * gates.shape[1]
    if drops:
        order = mask * _uniform(0.0, 1.0, mask) if use_rts else mask
        kept = order.topk(min(capacity, len(mask)), dim=0).indices
        mask = mask * torch.zeros_like(mask).scatter_(0, kept, 1)
    slots = ((mask.cumsum(0) - 1) * mask).sum(1)
    experts = torch.where(mask.any(1), chosen, -1)
    return Routes(l_aux, capacity, experts[None], slots[None], (gates * mask).sum(1)[None], counts)


def _top2(logits: Tensor, factor: float, least: int, drops: bool, samples: bool, group: Any) -> Routes:
    """The expert of the largest logit, and of the others the largest, of logits with Gumbel noise if it ``samples``.

    An expert takes those that chose it first, and then those that chose it as their second.
    """
    gates = logits.softmax(1)
    first = gates.argmax(1)
    others = logits + gumbel_rsample(logits.shape, logits.device) if samples else logits
    second = others.scatter(1, first[:, None], float("-inf")).argmax(1)
    chosen = torch.stack([first, second])
    masks = F.one_hot(chosen, gates.shape[1])
    counts = masks.sum((0, 1))
    slots = (masks.flatten(0, 1).cumsum(0) - 1).view_as(masks).gather(2, chosen[..., None])[..., 0]
    l_aux = (gates.mean(0) * _share(masks[0], gates)).mean() * gates.shape[1] ** 2
    capacity = _capacity(gates, factor * 2, least) if drops else _fullest(counts, group)
    return _balanced(l_aux, capacity, chosen, slots, gates, slots < capacity, counts)


def _topk(logits: Tensor, k: int, factor: float, least: int, drops: bool, policy: str, group: Any) -> Routes:
    """The ``k`` experts of the largest logits. An expert takes the tokens of which it has the largest probabilities
    (policy ``"probs"``), or those that come first (``"position"``)."""
    if policy not in ("probs", "position"):
        raise ValueError(f"drop_policy is {policy!r}; it is 'probs' or 'position'")
    gates = logits.softmax(1)
    top, chosen = gates.topk(k, dim=1)
    mask = torch.zeros_like(gates, dtype=torch.bool).scatter_(1, chosen, True)
    counts = mask.sum(0)
    l_aux = (gates.mean(0) * _share(mask, gates)).mean() * gates.shape[1] ** 2 / k
    capacity = _capacity(gates, factor * k, least) if drops else _fullest(counts, group)
    if drops and policy == "probs":
        wanted = torch.zeros_like(gates).scatter(1, chosen, top)
        best = wanted.topk(min(capacity, len(gates)), dim=0, sorted=False).indices
        mask = mask & torch.zeros_like(mask).scatter_(0, best, True)
    slots = (mask.cumsum(0) - 1).gather(1, chosen).T
    kept = mask.gather(1, chosen).T
    return _balanced(l_aux, capacity, chosen.T, slots, gates, kept & (slots < capacity), counts)


def _balanced(
    l_aux: Tensor, capacity: int, chosen: Tensor, slots: Tensor, gates: Tensor, kept: Tensor, counts: Tensor
) -> Routes:
    """Routes whose weights add up to 1 for each token, over those that are ``kept``."""
    weights = gates.T.gather(0, chosen) * kept
    weights = weights / weights.sum(0).clamp(min=torch.finfo(weights.dtype).eps)
    return Routes(l_aux, capacity, torch.where(kept, chosen, -1), slots * kept, weights, counts)


def _share(mask: Tensor, gates: Tensor) -> Tensor:
    return mask.to(gates.dtype).mean(0)


def _capacity(gates: Tensor, factor: float, least: int) -> int:
    tokens, experts = gates.shape
    return max(int(np.ceil(np.float32(tokens / experts) * np.float32(factor))), int(least))  # as torch rounds it


def _fullest(counts: Tensor, group: Any) -> int:
    """How many tokens the fullest expert has, of all processes of ``group``."""
    most = counts.max()
    if most.is_meta:
        return 1 << 30
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(most, dist.ReduceOp.MAX, group)
    return int(most)


# -- random numbers ----------------------------------------------------------------------------------------------------


def _range(low: float, high: float, device: Any) -> tuple[Tensor, Tensor]:
    return torch.tensor(low, device=device), torch.tensor(high, device=device)


def _uniform(low: float, high: float, like: Tensor) -> Tensor:
    drawn: Tensor = Uniform(*_range(low, high, like.device), validate_args=False).rsample(like.shape)
    return drawn


def gumbel_rsample(shape: Any, device: torch.device) -> Tensor:
    """Gumbel noise of ``shape``: the largest of logits with it is drawn by their softmax."""
    noise: Tensor = Gumbel(*_range(0.0, 1.0, device), validate_args=False).rsample(shape)
    return noise


def multiplicative_jitter(x: Tensor, device: torch.device, epsilon: float = 1e-2) -> Tensor:
    """``x``, each element times a number between ``1 - epsilon`` and ``1 + epsilon``."""
    if epsilon == 0:
        return x
    return x * _uniform(1.0 - epsilon, 1.0 + epsilon, x)


# -- with DeepSpeed's names --------------------------------------------------------------------------------------------


def top1gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,
    use_rts: bool = True,
    ep_group: Any = None,
    sparse_routes: bool = False,
    use_tutel: bool = False,
) -> Any:
    """``Routes.dense`` of one expert a token, or ``Routes.listed`` (``sparse_routes``)."""
    noisy = noisy_gate_policy == "RSample"
    least = int(min_capacity)
    routes = _top1(logits, float(capacity_factor), least, used_token, noisy, drop_tokens, use_rts, ep_group)
    return routes.listed() if sparse_routes else routes.dense()


def top2gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: Any = None,
    top2_2nd_expert_sampling: bool = True,
    sparse_routes: bool = False,
) -> Any:
    """The same of two experts a token. Noise for the second is drawn in evaluation too, as in DeepSpeed."""
    least = int(min_capacity)
    routes = _top2(logits, float(capacity_factor), least, drop_tokens, top2_2nd_expert_sampling, ep_group)
    return routes.listed() if sparse_routes else routes.dense()


def topkgating(
    logits: Tensor,
    k: int,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: Any = None,
    drop_policy: str = "probs",
    sparse_routes: bool = False,
) -> Any:
    """The same of ``k`` experts a token.

    Raises:
        ValueError: there is no such ``drop_policy``.
    """
    routes = _topk(logits, k, float(capacity_factor), int(min_capacity), drop_tokens, drop_policy, ep_group)
    return routes.listed() if sparse_routes else routes.dense()


class TopKGate(nn.Module):
    """A linear layer from tokens to experts, and the gate that decides by what it gives.

    Args:
        model_dim: width of tokens.
        k: experts a token.
        capacity_factor, eval_capacity_factor: how many more places an expert has than its equal share, in training
            and in evaluation ...
        min_capacity: ... and how many at least.
        noisy_gate_policy: in training, ``"Jitter"`` multiplies tokens by numbers near 1, and ``"RSample"`` adds Gumbel
            noise to the logits that decide where ``k`` is 1.
        drop_tokens: experts take no more than that; else all.
        use_rts: where ``k`` is 1, which tokens are dropped is drawn.
        ep_group: processes that agree on the places of the dense form where nothing is dropped.
        top2_2nd_expert_sampling: where ``k`` is 2, the second expert is drawn.
    """

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: Any = None,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        if not 1 <= k <= num_experts:
            raise ConfigError(f"k is {k}, and the layer has {num_experts} experts: a token takes k of them", "MoE(...)")
        if noisy_gate_policy not in (None, "None", *_POLICIES):
            known = ", ".join(map(repr, _POLICIES))
            raise ConfigError(f"noisy_gate_policy is {noisy_gate_policy!r}; it is {known} or None", "MoE(...)")
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.ep_group = ep_group
        self.k = k
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.min_capacity = min_capacity
        self.noisy_gate_policy = noisy_gate_policy
        self.drop_tokens, self.use_rts = drop_tokens, use_rts
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling

    def _set_ep_group(self, ep_group: Any) -> None:
        self.ep_group = ep_group

    def forward(
        self,
        input: Tensor,
        used_token: Tensor | None = None,
        sparse_routes: bool = False,
        use_tutel: bool = False,
    ) -> Any:
        """``Routes.dense`` for tokens ``[tokens, model_dim]``, or ``Routes.listed`` (``sparse_routes``)."""
        routes = self.routes(input, used_token)
        return routes.listed() if sparse_routes else routes.dense()

    def routes(self, tokens: Tensor, used_token: Tensor | None = None) -> Routes:
        """What the gate decides for ``tokens``, ``[tokens, model_dim]``."""
        exact = torch.promote_types(tokens.dtype, torch.float32)
        with torch.autocast("cpu" if tokens.is_meta else tokens.device.type, enabled=False):
            x = tokens.to(exact)
            if self.noisy_gate_policy == "Jitter" and self.training:
                x = multiplicative_jitter(x, x.device)
            logits = F.linear(x, self.wg.weight.to(exact))
            factor = self.capacity_factor if self.training else self.eval_capacity_factor
            least, drops, group = self.min_capacity, self.drop_tokens, self.ep_group
            if self.k == 1:
                noisy = self.noisy_gate_policy == "RSample" and self.training
                return _top1(logits, factor, least, used_token, noisy, drops, self.use_rts, group)
            if self.k == 2:
                return _top2(logits, factor, least, drops, self.top2_2nd_expert_sampling, group)
            return _topk(logits, self.k, factor, least, drops, "probs", group)
