"""``MoE``: DeepSpeed's layer of experts that lie on several processes, and ``MOELayer`` inside it."""

from __future__ import annotations

from torch import Tensor, nn

from ds_hf.config.mesh import Claim
from ds_hf.deepspeed_api import groups
from ds_hf.deepspeed_api.moe.gates import TopKGate
from ds_hf.engine.parallel.experts.separate import SeparateExperts, separate_experts
from ds_hf.errors import ConfigError
from ds_hf.log import warn_once

__all__ = ["MOELayer", "MoE", "expert_claims", "expert_sizes"]


class MOELayer(nn.Module):
    """A gate and experts.

    A token travels once to each process that has one of its experts, and only tokens that are not dropped do, however
    many places there are; so processes may have different numbers of tokens.

    Args:
        gate: a ``TopKGate``, or a module of its kind: ``gate(tokens, used_token, True)`` gives ``Routes.listed``.
        experts: of this process.
        others: are those of ``experts``.

    Attributes:
        l_aux, exp_counts: of the last forward: the balancing loss, and how many tokens chose each expert.
    """

    def __init__(
        self,
        gate: nn.Module,
        experts: SeparateExperts,
        ep_group_name: str,
        ep_size: int,
        num_local_experts: int,
        use_tutel: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(experts, SeparateExperts) or (experts.ep_size, experts.num_local_experts) != (
            ep_size,
            num_local_experts,
        ):
            raise ConfigError(
                f"experts is to be deepspeed.moe.experts.Experts(expert, {num_local_experts}, {ep_group_name!r}) for "
                f"{num_local_experts} experts on each of {ep_size} processes",
                "MOELayer(...)",
            )
        self.gate, self.experts = gate, experts
        self.ep_size, self.ep_group_name, self.num_local_experts = ep_size, ep_group_name, num_local_experts
        self.l_aux: Tensor | None = None
        self.exp_counts: Tensor | None = None
        self.use_tutel = False
        if use_tutel:
            warn_once("use_tutel has no effect: tokens are dispatched without tutel")

    def forward(self, hidden: Tensor, used_token: Tensor | None = None) -> Tensor:
        """What the experts of each token give, weighted: of the shape of ``hidden``, ``[..., width]``."""
        tokens = hidden.reshape(-1, hidden.shape[-1])
        self.l_aux, _, _, experts, _, weights, self.exp_counts = self.gate(tokens, used_token, True)
        result: Tensor = self.experts(tokens, experts.T, weights.T)
        return result.reshape(hidden.shape)


class MoE(nn.Module):
    """DeepSpeed's layer of experts, of which each of ``ep_size`` processes holds ``num_experts / ep_size``.

    ``deepspeed.initialize`` divides the processes: neighbours have the experts of a layer among them, and those that
    hold the same ones average their gradients. Layers may have different ``ep_size``. Every ZeRO stage trains them.

    Args:
        hidden_size: width of tokens.
        expert: what each expert is made as a copy of: maps tokens ``[..., hidden_size]`` to the same shape.
        num_experts: of the layer, on all processes.
        use_residual: ``expert`` itself computes every token too, and a layer weighs both.
        use_tutel: has no effect.
        enable_expert_tensor_parallelism: refused.
        others: see ``TopKGate``.

    Raises:
        ConfigError: ``ep_size`` does not divide ``num_experts``, there are fewer than ``k``, ``expert`` has no
            parameters, or a policy that does not exist.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        _check(expert, num_experts, ep_size, enable_expert_tensor_parallelism)
        self.use_residual = use_residual
        self.enable_expert_tensor_parallelism = False
        self.ep_size, self.expert_group_name = ep_size, f"ep_size_{ep_size}"
        self.num_experts, self.num_local_experts = num_experts, num_experts // ep_size
        gate = TopKGate(
            hidden_size,
            num_experts,
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            noisy_gate_policy,
            drop_tokens,
            use_rts,
            None,
            top2_2nd_expert_sampling,
        )
        experts = SeparateExperts(expert, self.num_local_experts, self.expert_group_name)
        self.deepspeed_moe = MOELayer(
            gate, experts, self.expert_group_name, ep_size, self.num_local_experts, use_tutel=use_tutel
        )
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Make the layer's groups of processes, where no ``initialize`` does. Collective."""
        groups._create_expert_and_data_parallel(self.ep_size, use_data_before_expert_parallel_)
        self.deepspeed_moe.experts.place(groups.current_mesh())

    def forward(
        self, hidden_states: Tensor, used_token: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """``(output, l_aux, exp_counts)``: what the experts give, of the shape of ``hidden_states``, the balancing loss
        and how many tokens chose each expert.

        Args:
            used_token: one number a token, 0 for those that no expert shall see, where ``k`` is 1.
        """
        output = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            other = self.mlp(hidden_states)
            other = other[0] if isinstance(other, tuple) else other
            shares = self.coefficient(hidden_states).softmax(-1)
            output = output * shares[..., :1] + other * shares[..., 1:]
        return output, self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts


def _check(expert: nn.Module, num_experts: int, ep_size: int, divides_each: bool) -> None:
    where = "MoE(...)"
    if divides_each:
        raise ConfigError(
            "enable_expert_tensor_parallelism divides each expert over processes as well, which is not supported: "
            "leave it out; a larger ep_size leaves fewer experts on each process",
            where,
        )
    if ep_size < 1 or num_experts < 1 or num_experts % ep_size:
        raise ConfigError(f"{num_experts} experts cannot be divided over ep_size {ep_size} processes equally", where)
    if not isinstance(expert, nn.Module) or not any(True for _ in expert.parameters()):
        raise ConfigError(f"expert is a {type(expert).__name__} without parameters: nothing in it would learn", where)


# -- for ``initialize`` ------------------------------------------------------------------------------------------------


def expert_sizes(model: nn.Module) -> list[int]:
    """Over how many processes the layers of the model divide their experts, ascending."""
    return sorted({experts.ep_size for _, experts in separate_experts(model)})


def expert_claims(model: nn.Module) -> list[Claim]:
    """What the layers say about the mesh.

    Raises:
        ConfigError: a parameter is marked as an expert's and is in no such layer: processes would average it.
    """
    inside = {id(param) for _, experts in separate_experts(model) for param in experts.parameters()}
    for name, param in model.named_parameters():
        if not getattr(param, "allreduce", True) and id(param) not in inside:
            raise ConfigError(
                f"{name} is marked as an expert of some processes (allreduce = False), and it is in no "
                "deepspeed.moe.layer.MoE or deepspeed.moe.experts.Experts, which alone keep it apart",
                "initialize(model=...)",
            )
    largest = max(expert_sizes(model), default=1)
    return [Claim("expert", largest, "MoE(ep_size=...)", "deepspeed.moe.layer.MoE")] if largest > 1 else []
