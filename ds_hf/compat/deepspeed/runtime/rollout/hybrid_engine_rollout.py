"""``HybridEngineRollout``: samples from the engine that trains (DeepSpeed 0.19.8).

Weights, graphs and ranks are the engine's affair (``engine.generate``). With ``continuous_batch_size`` prompts are
decoded in a bounded batch, and the next prompt begins where a response ends.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_hf.deepspeed_api.engine_generation import GenerationNames
from ds_hf.inference.static import cache_argument, cache_of
from ds_hf.inference.supported import base_model

from .base import RolloutBatch, RolloutEngine, RolloutRequest, SamplingConfig
from .continuous_batching import ContinuousBatchRequest, ContinuousBatchScheduler

__all__ = [
    "ContinuousBatchRequest",
    "ContinuousBatchScheduler",
    "HybridEngineRollout",
    "HybridEngineRolloutConfig",
    "RolloutBatch",
    "RolloutEngine",
    "RolloutRequest",
    "SamplingConfig",
]


@dataclass
class HybridEngineRolloutConfig:
    """Settings of ``HybridEngineRollout``.

    Attributes:
        use_graph_capture: kept; the engine captures wherever it can (``hybrid_engine.enable_cuda_graph``).
        enable_profiling: ``get_last_profile`` tells where the time went.
        use_shared_prefill: refused with ``continuous_batch_size``, as in DeepSpeed; else no effect.
        align_decode_fronts, enable_cache_trimming: no effect: a cache here holds no dead columns.
        continuous_cache_capacity: positions at most in a continuous batch.
    """

    use_graph_capture: bool = False
    enable_profiling: bool = False
    use_shared_prefill: bool = False
    align_decode_fronts: bool = False
    enable_cache_trimming: bool = False
    continuous_cache_capacity: int | None = None


class HybridEngineRollout(RolloutEngine):
    """Samples from ``engine``.

    Args:
        engine: of ``deepspeed.initialize``.
        tokenizer: has ``pad_token_id`` or ``eos_token_id``.
        cfg: ``HybridEngineRolloutConfig``, ``RolloutConfig`` or something with some of their fields.
    """

    name = "hybrid_engine"

    def __init__(self, engine: Any, tokenizer: Any, cfg: Any = None) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        for name, default in vars(HybridEngineRolloutConfig()).items():
            setattr(self, name, getattr(cfg, name, default) if cfg else default)
        self._last_profile: dict[str, Any] | None = None
        self._last_continuous_stats: dict[str, Any] | None = None

    use_graph_capture: bool
    enable_profiling: bool
    use_shared_prefill: bool
    align_decode_fronts: bool
    enable_cache_trimming: bool
    continuous_cache_capacity: int | None

    @torch.no_grad()
    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Sample ``n_samples_per_prompt`` responses to each prompt. Collective where weights are sharded.

        Responses are ``max_new_tokens`` wide, padded behind the first end-of-sequence token; those of a continuous
        batch are as wide as the longest.

        Raises:
            ValueError: the tokenizer has neither a padding nor an end token, or a continuous batch is asked to sample.
        """
        pad = self._pad_token()
        began = time.perf_counter()
        if sampling.continuous_batch_size is not None:
            batch = self._continuous(request, sampling, sampling.continuous_batch_size, pad)
        else:
            batch = self._together(request, sampling, pad)
        if self.enable_profiling:
            self._profile(request, sampling, batch, time.perf_counter() - began)
        return batch

    def sync_weights(self, step: int) -> None:
        """The engine's own weights are sampled from."""
        return

    def shutdown(self) -> None:
        """Give back the engine's caches and graphs."""
        if isinstance(self.engine, GenerationNames):
            self.engine.release_generation()

    def get_last_profile(self) -> dict[str, Any] | None:
        """Times (ms) and sizes of the last call, with ``enable_profiling``."""
        return self._last_profile

    def get_last_continuous_stats(self) -> dict[str, Any] | None:
        """Of the last continuous batch: steps, positions and bytes of the cache."""
        return self._last_continuous_stats

    # -- all prompts at once ----------------------------------------------------------------------------------------

    def _together(self, request: RolloutRequest, sampling: SamplingConfig, pad: int) -> RolloutBatch:
        repeats, width = sampling.n_samples_per_prompt, request.prompt_ids.shape[1]
        prompts = request.prompt_ids.repeat_interleave(repeats, dim=0)
        mask = request.prompt_attention_mask.repeat_interleave(repeats, dim=0)
        how: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0.0:
            how = {
                "do_sample": True,
                "temperature": max(sampling.temperature, 1e-8),
                "top_p": sampling.top_p,
                "top_k": max(sampling.top_k, 0),
            }
        generate = getattr(self.engine, "generate", None) or self.engine.module.generate
        ids = generate(
            prompts,
            attention_mask=mask,
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=pad,
            **how,
        )
        ids = F.pad(ids, (0, width + sampling.max_new_tokens - ids.shape[1]), value=pad)
        ids, response = self._pad_after_eos(ids, width, self.tokenizer.eos_token_id, pad)
        return _batch(ids, torch.cat([mask.long(), response], dim=1), width)

    @staticmethod
    def _pad_after_eos(
        output_ids: Tensor, response_start: int, eos_token_id: Any, pad_token_id: int
    ) -> tuple[Tensor, Tensor]:
        """Tokens with padding behind the first end of each response, and the responses' mask ``[B, R]``."""
        response = output_ids[:, response_start:]
        mask = response != pad_token_id
        if eos_token_id is None or not response.shape[1]:
            return output_ids, mask.long()
        ends = torch.as_tensor(eos_token_id, device=response.device, dtype=response.dtype).flatten()
        is_end = (response[..., None] == ends).any(dim=-1)
        ended = is_end.long().cumsum(dim=1)
        behind = (ended - is_end.long()) > 0
        output_ids = torch.cat([output_ids[:, :response_start], response.masked_fill(behind, pad_token_id)], dim=1)
        first = is_end & ~behind  # a token even where it is the padding as well
        return output_ids, ((mask | first) & ~behind).long()

    # -- a bounded batch --------------------------------------------------------------------------------------------

    def _continuous(self, request: RolloutRequest, sampling: SamplingConfig, rows: int, pad: int) -> RolloutBatch:
        self._check_continuous(request, sampling, rows)
        scheduler = ContinuousBatchScheduler(rows, sampling.max_new_tokens)
        for index in range(len(request.prompt_ids)):
            scheduler.submit(ContinuousBatchRequest(index))
        module = self.engine.module
        training = [child for child in module.modules() if child.training]
        for child in training:
            child.training = False
        try:
            with self.engine.generation() if isinstance(self.engine, GenerationNames) else nullcontext():
                if isinstance(self.engine, GenerationNames) and not self.engine.generating.weights.are_whole:
                    raise ValueError(
                        "continuous batching needs the whole weights, which do not fit (or pin_parameters is false): "
                        "ranks would have to run equally many steps; leave continuous_batch_size out"
                    )
                running = _Running(module, self.tokenizer.eos_token_id)
                responses = running.decode(scheduler, request)
        finally:
            for child in training:
                child.training = True
        self._last_continuous_stats = running.stats
        longest = max(map(len, responses))
        width = request.prompt_ids.shape[1]
        ids = request.prompt_ids.new_full((len(responses), longest), pad)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(responses):
            ids[row, : len(tokens)] = torch.tensor(tokens, dtype=ids.dtype, device=ids.device)
            mask[row, : len(tokens)] = 1
        given = request.prompt_attention_mask
        return _batch(torch.cat([request.prompt_ids, ids], 1), torch.cat([given, mask.to(given.dtype)], 1), width)

    def _check_continuous(self, request: RolloutRequest, sampling: SamplingConfig, rows: int) -> None:
        lengths = request.prompt_attention_mask.sum(dim=1).tolist()
        positions = getattr(self.engine.module.config, "max_position_embeddings", None)
        faults = {
            "continuous batching requires at least one request": not lengths,
            "max_batch_size must be positive": rows <= 0,
            "continuous batching does not support shared prompt prefill": self.use_shared_prefill,
            "max_new_tokens must be positive": sampling.max_new_tokens <= 0,
            "continuous batching currently supports greedy decoding only": sampling.temperature > 0,
            "continuous batching currently supports one sample per prompt": sampling.n_samples_per_prompt != 1,
            "continuous batching requires at least one prompt token per request": not all(lengths),
        }
        for message, present in faults.items():
            if present:
                raise ValueError(message)
        longest = int(max(lengths)) + sampling.max_new_tokens
        if positions is not None and longest > positions:
            raise ValueError("continuous batching request exceeds the model maximum position embeddings")
        if self.continuous_cache_capacity is not None and self.continuous_cache_capacity < longest:
            raise ValueError(
                f"continuous_cache_capacity is {self.continuous_cache_capacity}, and the longest prompt with its "
                f"response takes {longest} positions"
            )

    # -- beside it --------------------------------------------------------------------------------------------------

    def _pad_token(self) -> int:
        for token in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token[0] if isinstance(token, list | tuple) else token)
        raise ValueError("The tokenizer must define pad_token_id or eos_token_id")

    def _profile(self, request: RolloutRequest, sampling: SamplingConfig, batch: RolloutBatch, seconds: float) -> None:
        width = request.prompt_ids.shape[1]
        tokens = int(batch.attention_mask[:, width:].sum())
        self._last_profile = {
            "total_ms": seconds * 1e3,
            "num_generated_tokens": tokens,
            "tokens_per_second": tokens / seconds if seconds else 0.0,
            "batch_size": request.prompt_ids.shape[0],
            "num_samples_per_prompt": sampling.n_samples_per_prompt,
            "prompt_length": width,
            "response_length": batch.seq_len - width,
        }


def _batch(ids: Tensor, mask: Tensor, start: int) -> RolloutBatch:
    return RolloutBatch(ids, mask, torch.full((len(ids),), start, dtype=torch.long, device=ids.device))


class _Running:
    """The rows that are decoded: their caches, aligned at the right, and what they said."""

    def __init__(self, module: Any, eos: Any) -> None:
        self.module = module
        self.ends = set() if eos is None else set(torch.as_tensor(eos).flatten().tolist())
        self.cache: list[tuple[Tensor, Tensor]] = []  # of each layer, [rows, heads, positions, width]
        self.mask: Tensor | None = None  # [rows, positions]
        self.last: Tensor | None = None  # [rows, 1], the tokens that are read next
        self.stats: dict[str, Any] = {"decode_steps": 0, "peak_cache_length": 0, "cache_memory_bytes": 0}

    def decode(self, scheduler: ContinuousBatchScheduler, request: RolloutRequest) -> list[list[int]]:
        """The response to each prompt."""
        responses: list[list[int]] = [[] for _ in range(len(request.prompt_ids))]
        update = scheduler.schedule()
        while update.active:
            self._keep(update.keep_slots)
            if update.keep_slots:
                self._step()
            for each in update.admitted:
                index = int(each.request_id)  # type: ignore[call-overload]
                valid = request.prompt_attention_mask[index].bool()
                self._admit(request.prompt_ids[index][valid][None])
            assert self.last is not None
            finished = []
            for key, token in zip(update.active_ids, self.last[:, 0].tolist(), strict=True):
                responses[int(key)].append(token)  # type: ignore[call-overload]
                if token in self.ends:
                    finished.append(key)
            update = scheduler.advance(finished)
        return responses

    def _keep(self, slots: tuple[int, ...]) -> None:
        if self.mask is None or self.last is None or len(slots) == len(self.mask):
            return
        if not slots:
            self.cache, self.mask, self.last = [], None, None
            return
        rows = torch.tensor(slots, device=self.mask.device)
        self.mask, self.last = self.mask[rows], self.last[rows]
        used = int(self.mask.sum(dim=1).max())  # columns that no row needs any more go
        self.mask = self.mask[:, -used:]
        self.cache = [(keys[rows][:, :, -used:], values[rows][:, :, -used:]) for keys, values in self.cache]

    def _step(self) -> None:
        assert self.mask is not None
        assert self.last is not None
        positions = self.mask.sum(dim=1, keepdim=True)
        self.mask = F.pad(self.mask, (0, 1), value=1)
        self.last = self._forward(self.last, self.mask, positions, self.cache)
        self.stats["decode_steps"] += 1
        self._note()

    def _admit(self, prompt: Tensor) -> None:
        """Read a prompt ``[1, n]``, and put its row behind the others."""
        cache, mask, last = self.cache, self.mask, self.last
        own = torch.ones_like(prompt)
        token = self._forward(prompt, own, torch.arange(prompt.shape[1], device=prompt.device)[None], [])
        if mask is None or last is None:
            self.mask, self.last = own, token
        else:
            positions = max(mask.shape[1], own.shape[1])
            self.cache = [
                (
                    torch.cat([_left(a, positions), _left(b, positions)]),
                    torch.cat([_left(c, positions), _left(d, positions)]),
                )
                for (a, c), (b, d) in zip(cache, self.cache, strict=True)
            ]
            left = [F.pad(each, (positions - each.shape[1], 0)) for each in (mask, own)]
            self.mask, self.last = torch.cat(left), torch.cat([last, token])
        self._note()

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The likeliest next tokens ``[rows, 1]``; the caches are then those behind ``ids``."""
        from transformers import DynamicCache

        filled = DynamicCache()
        for layer, (keys, values) in enumerate(cache):
            filled.update(keys, values, layer)
        out = self.module(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **{cache_argument(base_model(self.module)): filled},
        )
        self.cache = [(layer.keys, layer.values) for layer in cache_of(out).layers]
        return out.logits[:, -1].argmax(dim=-1, keepdim=True)  # type: ignore[no-any-return]

    def _note(self) -> None:
        assert self.mask is not None
        stats, held = self.stats, sum(keys.nbytes + values.nbytes for keys, values in self.cache)
        stats["peak_cache_length"] = max(stats["peak_cache_length"], self.mask.shape[1])
        stats["cache_memory_bytes"] = max(stats["cache_memory_bytes"], held)


def _left(cache: Tensor, positions: int) -> Tensor:
    """``[rows, heads, n, width]`` with empty positions before it."""
    return F.pad(cache, (0, 0, positions - cache.shape[2], 0))
