"""Generation by an engine that trains, under DeepSpeed's names (its hybrid engine) and a few of our own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, overload

import torch
from torch import Tensor

from ds_hf.engine.checkpoint.merging import in_buckets
from ds_hf.engine.checkpoint.weights import named_weights
from ds_hf.engine.engine import CoreEngine
from ds_hf.engine.modules.generation import Generation, generation_for

__all__ = ["GenerationNames"]


class GenerationNames(CoreEngine):
    """A part of ``Engine``."""

    @cached_property
    def generating(self) -> Generation:
        """What surrounds calls of ``generate``. It decodes with a static cache and captured graphs on a GPU, unless the
        configuration forbids it; on the CPU, which has no graphs, where it asks for them."""
        section, made = self.settings.hybrid_engine, generation_for(self)
        told = section.enabled and self.settings.is_given("/hybrid_engine/enable_cuda_graph")
        if section.enable_cuda_graph if told else self.device.type == "cuda":
            from ds_hf.inference.decode import Decoder  # with models of transformers, which not every engine has

            made.make_decoder = Decoder
        return made

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """``module.generate``, in evaluation mode, with whole weights and LoRA merged for the call; arguments and
        result are those of transformers.

        Training goes on as if there had been no call, to the bit: gradients, modes of modules, torch's random states
        (sampling has a stream of its own) and what ZeRO learnt of the model are as before. All ranks of a sharded
        model call it; each stops when its own sequences have ended, if the weights fit.

        Raises:
            DsHfError: the model has no ``generate``, its weights are in host memory (``offload_states``), or the call
                is longer than ``hybrid_engine.max_out_tokens``.
        """
        return self.generating.run(args, kwargs)

    @contextmanager
    def generation(self, keep: bool = False) -> Iterator[Any]:
        """Many calls of ``generate``, of the engine's or the model's, on one gather. Collective; steps may be made
        inside.

        Args:
            keep: the memory of the whole weights (at stage 3, beside their shards) stays with the engine afterwards.
                They come to the same addresses in the next such block, so captured graphs serve again.
                ``release_generation`` gives it back.

        Yields:
            the engine.
        """
        with self.generating.session(keep):
            yield self

    @overload
    def named_weights(
        self, dtype: torch.dtype | None = ..., *, merged: bool = ..., bucket_bytes: None = ...
    ) -> Iterator[tuple[str, Tensor]]: ...
    @overload
    def named_weights(
        self, dtype: torch.dtype | None = ..., *, merged: bool = ..., bucket_bytes: int
    ) -> Iterator[list[tuple[str, Tensor]]]: ...
    def named_weights(
        self, dtype: torch.dtype | None = None, *, merged: bool = False, bucket_bytes: int | None = None
    ) -> Iterator[Any]:
        """Whole weights on every rank, unit by unit, under the model's names, tied ones under each of theirs: to load
        into vLLM or another engine. Collective: all ranks run through it, to the end.

        One gather a unit, and one more for what tensor parallelism has cut. A tensor is valid as long as it is held;
        below stage 3 it is the parameter's own memory, which the next step changes.

        Args:
            dtype: of floating-point weights; default what each has in the model.
            merged: under the names that the model has without PEFT, adapters that are active added to their weights
                (in ``dtype``), the others left out. The model itself stays as it is.
            bucket_bytes: lists of pairs in place of single ones, each list of at most so many bytes (or of one tensor
                that is larger) and of memory of its own.

        Raises:
            DsHfError: the weights are in host memory (``offload_states``).
            CheckpointError: ``merged``, and an adapter cannot be a part of its weight.
        """
        self._require_weights()
        self._finish_update()
        if bucket_bytes is not None and bucket_bytes < 1:
            raise ValueError(f"bucket_bytes is {bucket_bytes}: give the bytes that a list may have")
        weights = named_weights(self, dtype, merged=merged)
        return weights if bucket_bytes is None else in_buckets(weights, bucket_bytes)

    def release_generation(self) -> None:
        """Give back what generation keeps between calls: caches, graphs, memory of whole weights."""
        self.generating.release()

    def fuse_lora_weight(self) -> None:
        """Merge LoRA into the weights until ``unfuse_lora_weight``; do not train meanwhile. Collective at stage 3."""
        self.generating.fuse()

    def unfuse_lora_weight(self) -> None:
        """The weights as they were, to the bit."""
        self.generating.unfuse()
