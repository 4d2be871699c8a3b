"""``UlyssesSPAttentionHF``: models of transformers over divided sequences (``ulysses_sp``; arXiv 2506.13996)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import wrapt
from torch import Tensor, nn

from ds_hf.deepspeed_api.sequence import parallel_state
from ds_hf.deepspeed_api.sequence.attention import attend, replace_core
from ds_hf.deepspeed_api.sequence.checks import (
    batch_faults,
    check_called,
    check_model,
    compare_parts,
    counts_mask,
    looks_packed,
    tell_of_positions,
)
from ds_hf.deepspeed_api.sequence.division import (
    SequenceDivision,
    bind,
    division_inside,
    division_of,
    forward_begins,
    forward_ends,
    keep,
)
from ds_hf.deepspeed_api.sequence.layer import DistributedAttention
from ds_hf.deepspeed_api.sequence.masks import use_whole_lengths, use_whole_masks
from ds_hf.engine.comm.mesh import Axis, axis_of
from ds_hf.engine.parallel.sequence.heads import plan_heads
from ds_hf.engine.parallel.sequence.losses import gather_whole
from ds_hf.log import warn_once

__all__ = ["UlyssesSPAttentionHF", "divide", "divide_for_engine"]

_waiting: dict[
    str, SequenceDivision
] = {}  # kind of model -> how models of it will be divided that are still to be made


class UlyssesSPAttentionHF(nn.Module):
    """Attention over divided sequences, around a core of transformers; made by ``register_with_transformers``.

    Args:
        attn: the core, of ``transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS``.
        attn_head_count, kv_head_count: heads of the whole layer.
        process_group: the processes that share the sequence.
        global_seq_length: tokens of every sequence, unless ``seq_length_is_variable``.
        disable_in_eval: modules in evaluation call the core, with whole sequences.
        others: DeepSpeed's; shapes are taken from the tensors.

    Raises:
        ValueError: heads do not divide.
    """

    def __init__(
        self,
        attn: Callable[..., Any],
        batch_size: int,
        attn_head_count: int,
        attn_head_size: int,
        kv_head_count: int,
        num_hidden_layers: int,
        process_group: dist.ProcessGroup,
        seq_length_is_variable: bool = False,
        local_seq_length: int | None = None,
        global_seq_length: int | None = None,
        disable_in_eval: bool = False,
    ) -> None:
        super().__init__()
        self.attn, self.process_group = attn, process_group
        self.world_size, self.sp_rank = dist.get_world_size(process_group), dist.get_rank(process_group)
        self.batch_size, self.num_hidden_layers = batch_size, num_hidden_layers
        self.attn_head_count, self.attn_head_size = attn_head_count, attn_head_size
        self.global_kv_head_count = kv_head_count
        self.seq_length_is_variable, self.disable_in_eval = seq_length_is_variable, disable_in_eval
        self.local_seq_length, self.global_seq_length = local_seq_length, global_seq_length
        plan_heads(attn_head_count, kv_head_count, self.world_size)
        self.core_attn_implementation = getattr(attn, "__name__", "attention")
        length = None if seq_length_is_variable else global_seq_length
        axis = axis_of(process_group, "sequence")
        self._division = SequenceDivision(
            self.core_attn_implementation, axis, disable_in_eval, length, by_positions=True
        )

    def forward(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """``[batch, heads, tokens, dim]`` of this process -> ``[batch, tokens, heads * dim]``, and what else the core
        gives.

        Args:
            attention_mask: of the whole sequence, as the core takes it.
        """
        if self.disable_in_eval and not module.training:
            return self.attn(module, query, key, value, attention_mask, *args, **kwargs)
        tokens, whole = query.shape[2] * self.world_size, self._division.seq_length
        if whole is not None and tokens != whole:
            raise ValueError(f"the sequence has {tokens} tokens, and global_seq_length is {whole}")
        context, *others = attend(self.attn, self._division, module, query, key, value, attention_mask, *args, **kwargs)
        return context.flatten(2), *others

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str | None,
        sequence_parallel_size: int,
        micro_batch_size: int | None,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> ModuleType | None:
        """Divide the sequences of a model of transformers. All processes call it.

        Args:
            model_name_or_path: the model, or its name or folder: then every model of that kind that is made afterwards.
            core_attn_implementation: what computes attention, as the model was loaded with; ``None`` for that.
            sequence_parallel_size: processes that share a sequence.
            micro_batch_size: DeepSpeed's; it is seen from the tensors.
            seq_length: tokens of every sequence, where ``seq_length_is_variable`` is false; ``max_length``: older name.
            disable_in_eval: in evaluation every process has whole sequences.

        Returns:
            the ``mpu`` for ``initialize``; ``None`` for a size of 1.

        Raises:
            ValueError: a model or a length that cannot be divided so.
        """
        if sequence_parallel_size == 1:
            return None
        if max_length is not None:
            warn_once("max_length of register_with_transformers is the older name of seq_length")
            seq_length = max_length if seq_length is None else seq_length
        length = None if seq_length_is_variable else seq_length
        if not seq_length_is_variable and length is None:
            raise ValueError("give seq_length, or seq_length_is_variable=True")
        if length is not None and length % sequence_parallel_size:
            raise ValueError(
                f"seq_length={length} isn't divisible by sp-size={sequence_parallel_size}: pad to a multiple of it"
            )
        parallel_state.ensure_sequence_parallel(sequence_parallel_size)
        axis = axis_of(parallel_state.get_sequence_parallel_group(), "sequence")
        model = model_name_or_path if hasattr(model_name_or_path, "config") else None
        config = model.config if model is not None else _config_of(model_name_or_path)
        core = core_attn_implementation
        if model is not None:
            core = _core_of(config, core)
        assert core is not None, "core_attn_implementation is needed where the model is given by its name"
        check_model(model, config, core, sequence_parallel_size)
        _make_known(core)
        division = SequenceDivision(core, axis, disable_in_eval, length)
        if isinstance(model, nn.Module):
            divide(model, division)
        else:
            replace_core(core)
            _wait_for(config, division)
        return parallel_state


def _config_of(name: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(name)


def _core_of(config: Any, given: str | None) -> str:
    """The attention of a model that was loaded.

    Raises:
        ValueError: another is asked for.
    """
    own = getattr(config, "_attn_implementation", None)
    if given is not None and own is not None and own != given:
        raise ValueError(
            f"core_attn_implementation='{given}' does not match model config attn_implementation='{own}'. Set both to "
            "the same value: load the model with that attn_implementation, or leave core_attn_implementation out"
        )
    return given or own or "sdpa"


def _make_known(core: str) -> None:
    """Attention of a kernel from the Hub registers itself where it is first used.

    Raises:
        ValueError: there is no attention of this name.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if "/" in core:
        flash: Any = importlib.import_module("transformers.modeling_flash_attention_utils")
        flash.lazy_import_flash_attention(core)
    if core not in ALL_ATTENTION_FUNCTIONS:
        choices = ", ".join(sorted(ALL_ATTENTION_FUNCTIONS.valid_keys()))
        raise ValueError(f"{core} is not a valid attn_implementation. The choices are {choices}")


# -- models that are still to be made ---------------------------------------------------------------------------------


def _wait_for(config: Any, division: SequenceDivision) -> None:
    """Divide every model of this kind when it has been made."""
    from transformers import PreTrainedModel

    if not _waiting:
        wrapt.wrap_function_wrapper(PreTrainedModel, "post_init", _made)
    _waiting[config.model_type] = division


def _made(wrapped: Callable[..., Any], model: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    waiting = _waiting.get(getattr(model.config, "model_type", ""))
    if waiting is not None and parallel_state.is_initialized():
        core = _core_of(model.config, None)
        if core == waiting.core:  # a reference model with another attention is left alone
            divide(model, SequenceDivision(core, waiting.axis, waiting.disable_in_eval, waiting.seq_length))
    return result


# -- binding ----------------------------------------------------------------------------------------------------------


def divide(model: nn.Module, division: SequenceDivision) -> None:
    """Have the model of transformers compute as ``division`` says, from its next forward on."""
    from transformers import PreTrainedModel
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask

    masks = ALL_MASK_ATTENTION_FUNCTIONS
    division.by_positions = division.core not in masks or masks[division.core] is flash_attention_mask
    division.counts_mask = counts_mask(model)
    replace_core(division.core)
    use_whole_masks(model)
    bind(model, division)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):  # any of them may be called, and make masks
            division.hooks.append(module.register_forward_pre_hook(forward_begins))
            division.hooks.append(module.register_forward_hook(forward_ends, always_call=True))
    division.hooks += use_whole_lengths(model)
    division.hooks.append(model.register_forward_pre_hook(_before, with_kwargs=True))
    division.hooks.append(model.register_forward_hook(_after))
    division.hooks.append(model.register_forward_hook(_parts_end, always_call=True))


def divide_for_engine(model: nn.Module, axis: Axis) -> None:
    """The same for a model that an engine was made for, unless it was registered before, or divides itself.

    Raises:
        ValueError: it cannot be divided.
    """
    division = division_of(model)
    if division is not None:
        division.axis = axis  # the same processes, in the engine's log
        return
    config = getattr(model, "config", None)
    if not hasattr(config, "_attn_implementation"):
        return  # not of transformers
    if any(isinstance(module, DistributedAttention) for module in model.modules()):
        return
    inside = division_inside(model)
    core = _core_of(config, None)
    check_model(model, config, core, axis.world_size)
    _make_known(core)
    known = (False, None) if inside is None else (inside.disable_in_eval, inside.seq_length)  # a wrapper came around it
    divide(model, SequenceDivision(core, axis, *known))


def _before(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positions and mask of the whole sequence, in one gather, kept with those of this process's part."""
    division = division_of(model)
    if division is None or division.model is None or division.model() is not model:
        return args, kwargs
    if not division.active:
        division.parts = _gives_parts(args, kwargs, division)
    if not division.active:
        return args, kwargs
    division.calls = 0
    tokens = _tokens(args, kwargs)
    if tokens is None:
        return args, kwargs
    if not division.checked:
        compare_parts(kwargs, tokens, division.axis)
    if kwargs.get("position_ids") is None:
        kwargs = {**kwargs, "position_ids": _positions(kwargs, tokens, division)}
    positions, length = kwargs["position_ids"], tokens.shape[1]
    mask = kwargs.get("attention_mask")
    gathered = [positions.long()]
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape == tokens.shape[:2]:
        gathered.append(mask.to(gathered[0].device, torch.int64))
    rows = [each.reshape(-1, length) for each in gathered]
    whole = gather_whole(torch.cat(rows), division.axis, 1, "positions and mask of the parts of a sequence")
    wholes = torch.split(whole, [len(each) for each in rows])
    keep(positions, wholes[0].view(*positions.shape[:-1], -1).to(positions.dtype))
    if len(gathered) > 1:
        assert isinstance(mask, Tensor)
        keep(mask, wholes[1].to(mask.dtype))
    if not division.checked:
        tell_of_positions(wholes[0], division.axis.world_size)
    if fault := batch_faults(kwargs, wholes[0], wholes[1] if len(gathered) > 1 else None, length, division):
        raise ValueError(fault)
    return args, kwargs


def _after(model: nn.Module, args: Any, output: Any) -> None:
    division = division_of(model)
    if division is not None and division.active and not division.checked:
        check_called(division, model)
        division.checked = True


def _parts_end(model: nn.Module, args: Any, output: Any) -> None:
    division = division_of(model)
    if division is not None:
        division.parts = False


def _gives_parts(args: tuple[Any, ...], kwargs: dict[str, Any], division: SequenceDivision) -> bool:
    """Whether a call in evaluation, for which sequences are whole, has parts all the same.

    accelerate asks for whole sequences, and divides the batches of every loader that is prepared with the model, those
    to evaluate on, too. Such batches have ``shift_labels``, on all processes, which those of whole sequences have not.

    Raises:
        ValueError: a part without them, on the processes that see it by its positions.
    """
    if kwargs.get("shift_labels") is not None:
        return True
    tokens, positions = _tokens(args, kwargs), kwargs.get("position_ids")
    if tokens is None or not isinstance(positions, Tensor) or kwargs.get("past_key_values") is not None:
        return False
    length, rank = tokens.shape[1], division.axis.rank
    if length > 1 and rank > 0 and bool((positions[..., 0] == rank * length).all()):
        raise ValueError(
            f"in evaluation every process has whole sequences (disable_in_eval, which accelerate sets), and the "
            f"position_ids of this batch begin at {rank * length}: it is a part of one. Give shift_labels with the "
            "parts, or prepare the loader for evaluation by itself, which leaves its batches whole"
        )
    return False


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """``[batch, tokens, ...]`` of this process."""
    for given in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1]):
        if isinstance(given, Tensor) and given.ndim >= 2:
            return given
    return None


def _positions(batch: dict[str, Any], tokens: Tensor, division: SequenceDivision) -> Tensor:
    """Where the tokens of this part are in the sequence.

    Raises:
        ValueError: documents are packed, whose positions cannot be told.
    """
    if sign := looks_packed(batch):
        raise ValueError(
            f"packed documents ({sign}) without position_ids: Ulysses SP requires `position_ids` that begin anew with "
            "every document; have the collator give them (DataCollatorWithFlattening does)"
        )
    length = tokens.shape[1]
    first = division.axis.rank * length
    return torch.arange(first, first + length, device=tokens.device).expand(tokens.shape[0], -1)
