"""What every optimizer kernel computes, in plain torch: the fallback everywhere, and what the tests hold kernels to.

All functions update lists of tensors in place; entries of one index belong together and have equal ``numel``.

Legend
- ``params``: masters, fp32 or bf16. ``grads``: fp32, bf16 or fp16, never written.
- moments: fp32 or bf16. ``outs``: 16-bit copies of the updated params, or an empty list for none. Or int16, with bf16
  params: these are the high halves of fp32 masters and ``outs`` the low bits (``split_master.py``).
- ``steps``: 0-dim fp32, the number of the step being made (1 for the first).
- ``scale_and_skip``: ``None``, or fp32 ``[2]``: what gradients are multiplied by (unscale × clip), and a flag; where
  that is not 0, nothing is written.
- ``lr``: a number, or a 0-dim fp32 tensor on the params' device (CUDA graphs replay with another rate).
- ``seed``: ``None`` rounds bf16 params and moments to nearest; a number rounds them stochastically, so that an update
  too small for bf16 is not lost on average.

Arithmetic is in fp32 (fp64 tensors, which only this file takes, keep theirs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ds_hf.engine.ops.split_master import LOW, join, split_fp32

__all__ = [
    "adagrad_",
    "adam_",
    "clip_control",
    "lamb_",
    "lamb_apply_",
    "lamb_moments_",
    "lion_",
    "norm_control",
    "sgd_",
    "squared_norm",
    "sum_parts_",
]

Rate = float | Tensor


def adam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    outs: Sequence[Tensor],
    steps: Sequence[Tensor],
    scale_and_skip: Tensor | None,
    *,
    lr: Rate,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool = True,
    bias_correction: bool = True,
    seed: int | None = None,
) -> None:
    """Adam (Kingma and Ba 2015); ``decoupled``: AdamW (Loshchilov and Hutter 2019), else decay joins the gradient.
    Entries have one shape in all lists; dtypes as at the head of this file.

    >>> m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g * g
    >>> p = p * (1 - lr * weight_decay) - lr / c1 * m / (sqrt(v / c2) + eps)

    with ``c1 = 1 - beta1 ** step`` and ``c2 = 1 - beta2 ** step``, both 1 without ``bias_correction``.
    """
    for index, (param, grad, exp_avg, exp_avg_sq, step) in enumerate(
        zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True)
    ):
        p, m, v = _master(param, index, outs), _wide(exp_avg), _wide(exp_avg_sq)
        g = _gradient(grad, scale_and_skip, p.dtype)
        if weight_decay and not decoupled:
            g = g + weight_decay * p
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        c1, c2 = _corrections(step, beta1, beta2, bias_correction)
        if weight_decay and decoupled:
            p = p * (1 - lr * weight_decay)
        p = p - (lr / c1).to(p.dtype) * (m / ((v / c2.to(p.dtype)).sqrt() + eps))
        _write(scale_and_skip, seed, index, [(param, p), (exp_avg, m), (exp_avg_sq, v)], outs)


def lion_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    outs: Sequence[Tensor],
    scale_and_skip: Tensor | None,
    *,
    lr: Rate,
    beta1: float,
    beta2: float,
    weight_decay: float,
    seed: int | None = None,
) -> None:
    """Lion (Chen et al. 2023). Entries have one shape in all lists; dtypes as at the head of this file.

    >>> p = p * (1 - lr * weight_decay) - lr * sign(beta1 * m + (1 - beta1) * g)
    >>> m = beta2 * m + (1 - beta2) * g
    """
    for index, (param, grad, exp_avg) in enumerate(zip(params, grads, exp_avgs, strict=True)):
        p, m = _master(param, index, outs), _wide(exp_avg)
        g = _gradient(grad, scale_and_skip, p.dtype)
        p = p * (1 - lr * weight_decay) - lr * (beta1 * m + (1 - beta1) * g).sign()
        m = beta2 * m + (1 - beta2) * g
        _write(scale_and_skip, seed, index, [(param, p), (exp_avg, m)], outs)


def adagrad_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    sums: Sequence[Tensor],
    outs: Sequence[Tensor],
    steps: Sequence[Tensor],
    scale_and_skip: Tensor | None,
    *,
    lr: Rate,
    lr_decay: float,
    eps: float,
    weight_decay: float,
    seed: int | None = None,
) -> None:
    """Adagrad (Duchi et al. 2011), as ``torch.optim.Adagrad``. Shapes and dtypes as for ``adam_``.

    >>> g = g + weight_decay * p;  s = s + g * g
    >>> p = p - lr / (1 + (step - 1) * lr_decay) * g / (sqrt(s) + eps)
    """
    for index, (param, grad, total, step) in enumerate(zip(params, grads, sums, steps, strict=True)):
        p, s = _master(param, index, outs), _wide(total)
        g = _gradient(grad, scale_and_skip, p.dtype)
        if weight_decay:
            g = g + weight_decay * p
        s = s + g * g
        rate = lr / (1 + (step.to(p.device, torch.float64) - 1) * lr_decay)
        p = p - rate.to(p.dtype) * (g / (s.sqrt() + eps))
        _write(scale_and_skip, seed, index, [(param, p), (total, s)], outs)


def sgd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    outs: Sequence[Tensor],
    scale_and_skip: Tensor | None,
    *,
    lr: Rate,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    first: bool,
    seed: int | None = None,
) -> None:
    """SGD as ``torch.optim.SGD``; ``momentum_buffers`` is empty where ``momentum`` is 0. Shapes and dtypes as for
    ``adam_``.

    >>> g = g + weight_decay * p;  b = g if first else momentum * b + (1 - dampening) * g
    >>> p = p - lr * (g + momentum * b if nesterov else b)
    """
    for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
        p = _master(param, index, outs)
        g = _gradient(grad, scale_and_skip, p.dtype)
        if weight_decay:
            g = g + weight_decay * p
        written = []
        if momentum:
            buffer = momentum_buffers[index]
            b = g if first else momentum * _wide(buffer) + (1 - dampening) * g
            written.append((buffer, b))
            g = g + momentum * b if nesterov else b
        _write(scale_and_skip, seed, index, [(param, p - lr * g), *written], outs)


def lamb_moments_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    scale_and_skip: Tensor | None,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    eps_inside_sqrt: bool,
    weight_decay: float,
) -> Tensor:
    """First pass of LAMB (You et al. 2020), with DeepSpeed's ``FusedLamb`` numerics; the moments are updated.

    >>> m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g * g
    >>> u = m / (sqrt(v) + eps) + weight_decay * p        # sqrt(v + eps) where eps_inside_sqrt

    Returns:
        fp32 ``[len(params), 2]``: sums of squares of ``p`` and of ``u``. Shards of one parameter are summed over
        ranks by the caller, between the passes.
    """
    norms = []
    for index, (param, grad, exp_avg, exp_avg_sq) in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)):
        p, m, v = _wide(param), _wide(exp_avg), _wide(exp_avg_sq)
        g = _gradient(grad, scale_and_skip, p.dtype)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        update = _lamb_update(p, m, v, eps, eps_inside_sqrt, weight_decay)
        norms.append(torch.stack([p.square().sum(), update.square().sum()]))
        _write(scale_and_skip, None, index, [(exp_avg, m), (exp_avg_sq, v)], [])
    if not norms:
        return torch.zeros(0, 2, dtype=torch.float32)
    return torch.stack(norms).float()


def lamb_apply_(
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    outs: Sequence[Tensor],
    steps: Sequence[Tensor],
    norms: Tensor,
    scale_and_skip: Tensor | None,
    *,
    lr: Rate,
    beta1: float,
    beta2: float,
    eps: float,
    eps_inside_sqrt: bool,
    weight_decay: float,
    bias_correction: bool,
    min_coeff: float,
    max_coeff: float,
) -> None:
    """Second pass of LAMB: the trust ratio of each entry, from ``norms`` (fp32 ``[entries, 2]``) of ``lamb_moments_``.

    >>> ratio = clamp(norm(p) / norm(u), min_coeff, max_coeff)     # 1 where a norm is 0
    >>> p = p - lr * sqrt(1 - beta2 ** step) / (1 - beta1 ** step) * ratio * u
    """
    for index, (param, exp_avg, exp_avg_sq, step) in enumerate(zip(params, exp_avgs, exp_avg_sqs, steps, strict=True)):
        p, m, v = _wide(param), _wide(exp_avg), _wide(exp_avg_sq)
        update = _lamb_update(p, m, v, eps, eps_inside_sqrt, weight_decay)
        weight, size = norms[index].to(p.device, torch.float64).sqrt().unbind()
        ratio = (weight / size).clamp(min_coeff, max_coeff)
        ratio = torch.where((weight > 0) & (size > 0), ratio, torch.ones_like(ratio))
        c1, c2 = _corrections(step, beta1, beta2, bias_correction)
        p = p - (lr * c2.sqrt() / c1 * ratio).to(p.dtype) * update
        _write(scale_and_skip, None, index, [(param, p)], outs)


def lamb_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    outs: Sequence[Tensor],
    steps: Sequence[Tensor],
    scale_and_skip: Tensor | None,
    *,
    lr: Rate,
    beta1: float,
    beta2: float,
    eps: float,
    eps_inside_sqrt: bool,
    weight_decay: float,
    bias_correction: bool,
    min_coeff: float,
    max_coeff: float,
) -> None:
    """LAMB of whole parameters: both passes, with nothing to sum over ranks between. Shapes and dtypes as for
    ``adam_``."""
    norms = lamb_moments_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        scale_and_skip,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        eps_inside_sqrt=eps_inside_sqrt,
        weight_decay=weight_decay,
    )
    lamb_apply_(
        params,
        exp_avgs,
        exp_avg_sqs,
        outs,
        steps,
        norms,
        scale_and_skip,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        eps_inside_sqrt=eps_inside_sqrt,
        weight_decay=weight_decay,
        bias_correction=bias_correction,
        min_coeff=min_coeff,
        max_coeff=max_coeff,
    )


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of the squares of all elements, 0-dim fp32 on the tensors' device; inf or nan if any element is.

    A square too large for fp32 is inf as well.
    """
    if not tensors:
        return torch.zeros((), dtype=torch.float32)
    return torch.stack([_wide(tensor).square().sum() for tensor in tensors]).sum().float()


def clip_control(squares: Sequence[Tensor], *, scale: float, max_norm: float, checked: bool) -> Tensor:
    """What the rules take as ``scale_and_skip``, and the norm, from its square.

    Clips as ``torch.nn.utils.clip_grad_norm_``: by ``max_norm / (norm + 1e-6)`` where that is below 1. By 0 where the
    norm is nan, as where it is infinite: one bad gradient does not make all parameters nan.

    Args:
        squares: 0-dim fp32, to be added up, of gradients that carry ``scale``.
        scale: the loss scale.
        max_norm: 0 for no clipping.
        checked: a norm that is not finite forbids the step.

    Returns:
        fp32 ``[3]``: what gradients are multiplied by, 1 where the step is forbidden, and the norm with the scale.
    """
    norm, unscale = torch.stack([square.reshape(()) for square in squares]).sum().sqrt(), 1.0 / scale
    if max_norm > 0:
        factor = (max_norm / (norm * unscale + 1e-6)).clamp(max=1.0).nan_to_num(0.0) * unscale
    else:
        factor = torch.full_like(norm, unscale)
    forbidden = torch.isfinite(norm).logical_not_().to(norm.dtype) if checked else torch.zeros_like(norm)
    return torch.stack([factor, forbidden, norm])


def norm_control(tensors: Sequence[Tensor], *, scale: float, max_norm: float, checked: bool) -> Tensor:
    """``clip_control`` of ``squared_norm(tensors)``, of any shapes and dtypes: fp32 ``[3]``."""
    return clip_control([squared_norm(tensors)], scale=scale, max_norm=max_norm, checked=checked)


def sum_parts_(
    out: Tensor,
    mine: Sequence[Tensor],
    before: Tensor | None,
    rows: Tensor,
    *,
    cuts: Sequence[int],
    place: int,
    factor: float,
) -> None:
    """Sums over ranks of which one is here and the others have sent their parts, in the order of the ranks; all flat,
    sums in fp32.

    Each cut is a stretch that is written: ``out = before + factor * sum``.

    Args:
        out: flat.
        mine: this rank's parts.
        before: flat, as long as ``out``, which it may be; ``None`` for zeros.
        rows: ``[ranks - 1, numel]``, contiguous: the part of rank ``p`` is in row ``p - place - 1``, modulo the number
            of ranks.
        cuts: five numbers each: which of ``mine``, where the stretch begins there, in ``out`` and in each row, and its
            length.
        place: which rank this one is.
    """
    ranks = len(rows) + 1
    for index, begin, to, at, length in zip(*[iter(cuts)] * 5, strict=True):
        own = mine[index].view(-1)[begin : begin + length]
        total = _wide(torch.zeros_like(own))
        for rank in range(ranks):
            total += _wide(own if rank == place else rows[(rank - place - 1) % ranks, at : at + length])
        total *= factor
        if before is not None:
            total += _wide(before[to : to + length])
        out[to : to + length] = total


def _master(param: Tensor, index: int, outs: Sequence[Tensor]) -> Tensor:
    """What the rule updates: the param, or what it is the high half of."""
    return join(param, outs[index].view_as(param)) if splits_masters(outs) else _wide(param)


def splits_masters(outs: Sequence[Tensor]) -> bool:
    """Whether ``outs``, of any shape, are the low bits of masters: int16."""
    return bool(outs) and outs[0].dtype is LOW


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def _gradient(grad: Tensor, scale_and_skip: Tensor | None, dtype: torch.dtype) -> Tensor:
    grad = grad.to(dtype)
    return grad if scale_and_skip is None else grad * scale_and_skip[0].to(dtype)


def _corrections(step: Tensor, beta1: float, beta2: float, wanted: bool) -> tuple[Tensor, Tensor]:
    """``1 - beta ** step`` in fp64: in fp32 the first steps of large betas would lose digits."""
    step = step.double()
    if not wanted:
        return torch.ones_like(step), torch.ones_like(step)
    return 1 - beta1**step, 1 - beta2**step


def _lamb_update(p: Tensor, m: Tensor, v: Tensor, eps: float, inside: bool, weight_decay: float) -> Tensor:
    return m / ((v + eps).sqrt() if inside else v.sqrt() + eps) + weight_decay * p


def _write(
    scale_and_skip: Tensor | None,
    seed: int | None,
    index: int,
    results: Sequence[tuple[Tensor, Tensor]],
    outs: Sequence[Tensor],
) -> None:
    """Store each ``(target, value)``, and the first, which is the param, in ``outs[index]`` too, or what it lacks."""
    rounded = [
        (target, _rounding(seed, index, place)(value, target.dtype)) for place, (target, value) in enumerate(results)
    ]
    if splits_masters(outs):
        high, low = split_fp32(results[0][1])
        rounded[0] = (rounded[0][0], high)
        rounded.append((outs[index], low))
    elif outs:
        rounded.append((outs[index], rounded[0][1].to(outs[index].dtype)))
    for target, value in rounded:
        value = value.view_as(target)
        if scale_and_skip is not None:  # no host synchronisation: the flag is read on the device
            value = torch.where(scale_and_skip[1] != 0, target, value)
        target.copy_(value)


def _rounding(seed: int | None, index: int, place: int) -> Callable[[Tensor, torch.dtype], Tensor]:
    if seed is None:
        return lambda value, dtype: value.to(dtype)

    def stochastic(value: Tensor, dtype: torch.dtype) -> Tensor:
        if dtype is not torch.bfloat16:
            return value.to(dtype)
        generator = torch.Generator(value.device).manual_seed(hash((seed, index, place)) & (2**63 - 1))
        noise = torch.randint(0, 1 << 16, value.shape, generator=generator, device=value.device, dtype=torch.int32)
        bits = value.float().contiguous().view(torch.int32)
        # bf16 is the upper half of fp32: carrying a random lower half into it rounds up in proportion
        cut = (bits + noise) & -65536
        return torch.where(value.isfinite(), cut.view(torch.float32), value).to(torch.bfloat16)

    return stochastic
