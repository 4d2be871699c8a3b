"""``PipelineModule`` as DeepSpeed's users know it, of layers or of a model of transformers.

Of a model each stage has the model with holes: layers of other stages pass their input on. It runs the model's own
forward, so masks and rotary embeddings are the model's; between stages go hidden states, and the masks and positions
that came with the batch. Names of parameters are those of the model, so checkpoints, ``zero_to_fp32`` and exports are
as of a model without stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ds_hf.deepspeed_api.activation_checkpointing import checkpoint_function
from ds_hf.deepspeed_api.checkpoint_engine import CheckpointEngine
from ds_hf.deepspeed_api.pipeline import layer_files
from ds_hf.deepspeed_api.pipeline.transformers_files import WHERE, load, shell
from ds_hf.engine.comm.mesh import compute_device
from ds_hf.engine.parallel.pipeline.holes import (
    PLAN,
    Skip,
    Swapped,
    is_tied,
    keep_shared,
    layers_of,
    parts_of,
    tie,
    with_holes,
)
from ds_hf.engine.parallel.pipeline.module import StageModule
from ds_hf.engine.parallel.pipeline.topology import ProcessTopology
from ds_hf.engine.zero.planning import tell_common_memory
from ds_hf.engine.zero.replicas import tie_over_stages
from ds_hf.errors import ConfigError

__all__ = ["DualPipeVModule", "PipelineModule", "TransformersPipeline"]


class PipelineModule(StageModule):
    """The layers of this process's stage. See ``StageModule``, whose arguments these are; all processes make it."""

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpoint_function,
        checkpointable_layers: list[str] | None = None,
        dynamic_shape: bool = False,
        *,
        chunks: int = 1,
        sample: Any = None,
        folded: bool = False,
    ) -> None:
        super().__init__(
            layers,
            num_stages,
            topology,
            loss_fn,
            seed_layers,
            seed_fn,
            base_seed,
            partition_method,
            activation_checkpoint_interval,
            activation_checkpoint_func,
            checkpointable_layers,
            dynamic_shape,
            chunks,
            sample,
            folded,
        )

    @staticmethod
    def from_transformers(
        model_or_config: Any,
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        *,
        dtype: torch.dtype | None = None,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        chunks: int = 1,
        folded: bool = False,
    ) -> PipelineModule:
        """A decoder of transformers as a pipeline; all processes make it.

        Args:
            model_or_config: a folder or a name of the Hub, of whose files each stage reads its own layers; a
                configuration, for initial weights; or a model, of which each process keeps its part.
            loss_fn: ``loss_fn(logits, labels)``, default the model's own.
            dtype: of the weights, default their own.
            others: as for ``PipelineModule``.

        Raises:
            ConfigError: the model has no ``base_model_pp_plan`` of embedding, layers and norm, or cannot be cut.
        """
        return TransformersPipeline(
            model_or_config,
            num_stages,
            topology,
            loss_fn,
            dtype=dtype,
            partition_method=partition_method,
            activation_checkpoint_interval=activation_checkpoint_interval,
            chunks=chunks,
            folded=folded,
        )

    # -- files of single layers, see layer_files ------------------------------------------------------------------

    def ckpt_prefix(self, checkpoints_path: str, tag: str) -> str:
        """Where files of this stage lie below ``checkpoints_path``."""
        return layer_files.prefix(self, checkpoints_path, tag)

    def ckpt_layer_path(self, ckpt_dir: str, local_layer_idx: int) -> str:
        """The file of a layer of this stage."""
        return layer_files.path_of(self, ckpt_dir, local_layer_idx)

    def ckpt_layer_path_list(self, ckpt_dir: str, local_layer_idx: int) -> list[str]:
        """The files of a layer of this stage that are there, of all tensor-parallel processes."""
        return layer_files.paths_of(self, ckpt_dir, local_layer_idx)

    def save_state_dict(
        self, save_dir: str, checkpoint_engine: CheckpointEngine, exclude_frozen_params: bool = False
    ) -> None:
        """Write the weights of this stage's layers, a file each. All processes call it."""
        layer_files.save(self, save_dir, checkpoint_engine, exclude_frozen_params=exclude_frozen_params)

    def load_state_dir(self, load_dir: str, checkpoint_engine: CheckpointEngine, strict: bool = True) -> None:
        """Read the weights of this stage's layers, of files that any number of stages has written."""
        layer_files.load(self, load_dir, checkpoint_engine, strict=strict)


class DualPipeVModule(PipelineModule):
    """A ``PipelineModule`` of two chunks a stage that is folded in the middle and runs in the order of DualPipeV.

    Stage ``s`` has part ``s`` of the model and part ``2 * num_stages - 1 - s``: the first stage reads the data and
    computes the loss, and layers that are tied over the ends of the model are one module there. A step has at least
    ``2 * num_stages`` micro-batches. Of a model of transformers: ``from_transformers(..., chunks=2, folded=True)``.

    Args:
        layers, others: as of ``PipelineModule``; ``num_stages`` is the number of processes of a pipeline.
    """

    def __init__(self, layers: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(layers, *args, **{**kwargs, "chunks": 2, "folded": True})


class TransformersPipeline(PipelineModule):
    """The stage of a model of transformers. Layers: the embedding, each block, the norm, the head.

    Inputs of the first stage are ``input_ids``, or ``(input_ids, attention_mask)``, or these and ``position_ids``, each
    ``[batch, length]``; items of the data may be dictionaries with such keys and ``labels``, and inputs
    such dictionaries.

    Attributes:
        config: the model's.

    Raises:
        ConfigError: the model has no plan of this form, has a loss of what is in all layers, or computes with hidden
            states outside of its layers.
    """

    _model: Any
    _base: Any
    _head: str | None
    _folder: Path | str | None
    _dtype: torch.dtype | None
    _ends: list[int]  # stages that hold the embedding, where the head is tied to it

    def __init__(
        self,
        model_or_config: Any,
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        *,
        dtype: torch.dtype | None = None,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        chunks: int = 1,
        folded: bool = False,
    ) -> None:
        model, folder = shell(model_or_config)
        tell_common_memory(model)  # what two stages have cannot be told by either
        base, head = parts_of(model)
        if getattr(model.config.get_text_config(), "output_router_logits", False):
            raise ConfigError(
                f"{type(model).__name__} has output_router_logits: the balance of experts is a loss of all layers' "
                "routers, and each stage has some of them. Set it to false, or train without a pipeline",
                WHERE,
            )
        self.__dict__.update(_model=model, _base=base, _head=head, _folder=folder, _dtype=dtype)
        self.config, self.generation_config = model.config, getattr(model, "generation_config", None)
        super().__init__(
            layers_of(model),
            num_stages,
            topology,
            loss_fn or self._loss,
            partition_method=partition_method,
            activation_checkpoint_interval=activation_checkpoint_interval,
            chunks=chunks,
            folded=folded,
        )

    @property
    def whole(self) -> Any:
        """The model of transformers that this is a stage of, with the layers that are here."""
        return self._model

    def _held_together(self) -> list[Tensor]:
        tied = self._head is not None and is_tied(self._model, self._head)
        return [self._base.embed_tokens.weight] if tied else []

    # -- building -------------------------------------------------------------------------------------------------

    def _build(self, *, synchronize: bool = True) -> None:
        """Make this stage's part of the model, with its weights."""
        model, base, head = self._model, self._base, self._head
        self.layer_ids = [index for start, stop in self._bounds for index in range(start, stop)]
        blocks, here = list(base.layers), set(self.layer_ids)
        norm, count = base.norm, len(blocks)
        tied = head is not None and is_tied(model, head)
        ends = {self.stage_owner(0), self.stage_owner(count + 2)} if tied else set()
        embeds = 0 in here or self.stage_id in ends
        made: list[nn.Module] = [child for name, child in base.named_children() if name not in PLAN]
        made += [base.embed_tokens] if embeds else []
        made += [block for index, block in enumerate(blocks, 1) if index in here]
        made += [norm] if count + 1 in here else []
        if head is not None and count + 2 in here:
            made.append(getattr(model, head))
        elif head is not None:
            setattr(model, head, Skip())
        self._holes = [with_holes(blocks, norm, range(*bounds)) for bounds in self._bounds]
        base.layers, base.norm = with_holes(blocks, norm, here)
        if not embeds:
            base.embed_tokens = Skip()
        elif 0 not in here and head is not None:
            keep_shared(base.embed_tokens, getattr(model, head))
        for name, child in model.named_children():
            self.add_module(name, child)
        self._no_split_modules = sorted(getattr(model, "_no_split_modules", None) or ())
        self._fill(made, ties=tied and count + 2 in here)
        self.forward_funcs = made
        self.fwd_map = {}
        if self._dtype is not None:
            self.to(self._dtype)
        self.to(compute_device())
        self._check_passes_on()
        self.__dict__["_ends"] = sorted(ends)
        self.tied_comms = self._index_tied_modules()
        self.is_checkpointable_results = []
        self.set_checkpoint_interval(self.activation_checkpoint_interval)

    def _index_tied_modules(self) -> dict[str, dict[str, Any]]:
        """There are none by key; what the head shares with the embedding is known to the mesh."""
        if len(self._ends) > 1 and self._grid.mesh.spanning(self._ends, "data", "sequence") is not None:
            tie_over_stages(self._base.embed_tokens.weight, "the tied embedding", self._ends)
        return {}

    def _fill(self, made: list[nn.Module], *, ties: bool) -> None:
        """Give values to what is on the meta device: initial ones, then those of the files.

        Args:
            ties: the head's weight is the embedding's.
        """
        for module in made:
            if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
                module.to_empty(device=compute_device())
                for each in module.modules():
                    self._model._init_weights(each)
        if ties and self._head is not None:
            tie(self._base.embed_tokens, getattr(self._model, self._head))
        if self._folder is not None:
            load(self, self._folder, self._model.base_model_prefix)

    @torch.no_grad()
    def _check_passes_on(self) -> None:
        """Without layers the model has to give what it was given: else each stage would do something of its own."""
        blocks = nn.ModuleList(Skip(block) for block in self._base.layers)
        param = next(self._base.parameters(), None)
        size = self.config.get_text_config().hidden_size
        dtype = torch.float32 if param is None else param.dtype
        hidden = torch.linspace(-1, 1, 2 * size, device=compute_device()).view(1, 2, size).to(dtype)
        try:
            with self._as(blocks, Skip()):
                found = self._run_base(None, hidden, ())
        except (ValueError, TypeError, IndexError, RuntimeError) as error:  # what unpacking a tensor raises
            raise ConfigError(
                f"layers of {type(self._base).__name__} hand on more than hidden states ({error}), and these alone go "
                "from stage to stage: write its layers as LayerSpecs",
                WHERE,
            ) from error
        if found.shape != hidden.shape or not torch.equal(found, hidden):
            raise ConfigError(
                f"{type(self._base).__name__} computes with hidden states outside of its layers (a factor, as in "
                "Granite), which every stage would do again: write its layers as LayerSpecs",
                WHERE,
            )

    # -- forward --------------------------------------------------------------------------------------------------

    def _as(self, blocks: nn.ModuleList, norm: nn.Module) -> Swapped:
        return Swapped(self._base, blocks, norm)

    def forward(self, forward_input: Any) -> Any:
        """The present chunk. Of the last stage the logits, ``[batch, length, vocabulary]``."""
        value, *rest = forward_input if isinstance(forward_input, tuple) else (forward_input,)
        start, stop = self._bounds[self.chunk]
        ids, hidden = (value, None) if start == 0 else (None, value)
        with self._as(*self._holes[self.chunk]):
            if stop == self._num_layers and self._head is not None:
                return self._model(**self._arguments(ids, hidden, rest)).logits
            output = self._run_base(ids, hidden, rest)
        return (output, *rest) if rest and stop < self._num_layers else output

    def _run_base(self, ids: Tensor | None, hidden: Tensor | None, rest: Any) -> Tensor:
        found: Tensor = self._base(**self._arguments(ids, hidden, rest)).last_hidden_state
        return found

    def _arguments(self, ids: Tensor | None, hidden: Tensor | None, rest: Any) -> dict[str, Any]:
        if len(rest) > 2:
            raise ConfigError("inputs are input_ids, attention_mask and position_ids, no more", WHERE)
        given = dict(zip(("attention_mask", "position_ids"), rest, strict=False))
        return {"input_ids": ids, "inputs_embeds": hidden, "use_cache": False, **given}

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The model's own: mean over the labels that are not -100."""
        size = self.config.get_text_config().vocab_size
        loss: Tensor = self._model.loss_function(logits=logits, labels=labels, vocab_size=size)
        return loss

    def pair_of(self, item: Any) -> Any:
        """Inputs and labels of an item of the data; it or its inputs may be a dictionary with names of transformers."""
        if isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], Mapping):
            item = {**item[0], "labels": item[1]}
        if not isinstance(item, Mapping):
            return item
        inputs = [item[name] for name in ("input_ids", "attention_mask", "position_ids") if item.get(name) is not None]
        if "position_ids" in item and len(inputs) == 2:
            inputs.insert(1, torch.ones_like(item["input_ids"]))
        return (tuple(inputs) if len(inputs) > 1 else inputs[0]), item.get("labels", item["input_ids"])

    # -- the rest -------------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> TransformersPipeline:
        """As of every module."""
        super().train(mode)
        self._model.training = mode
        return self

    def set_checkpoint_interval(self, interval: int) -> None:
        """Recompute each block in backward (whatever number above 0); 0: none."""
        if interval < 0:
            raise ValueError(f"the interval is at least 0, not {interval}")
        self.activation_checkpoint_interval = interval
        if interval and not self._model.supports_gradient_checkpointing:
            raise ConfigError(f"{type(self._model).__name__} cannot recompute its blocks", WHERE)
        for block in self._base.layers if interval or hasattr(self, "_recomputes") else ():
            if hasattr(block, "gradient_checkpointing"):
                block.gradient_checkpointing = interval > 0
                block._gradient_checkpointing_func = self.activation_checkpoint_func
        self._recomputes = interval > 0

    def repartition(self, chunks: int) -> bool:
        """Not of weights that are loaded already: give ``from_transformers`` the chunks."""
        raise ConfigError(
            f"ds_hf.pipeline.chunks is {chunks}, and the model was made with {self.chunks}: "
            f"PipelineModule.from_transformers(..., chunks={chunks})",
            "/ds_hf/pipeline/chunks",
        )
