"""Random layer-token drop: named blocks of an unmodified model compute with some of the tokens.

Before such a block its hidden states, masks, positions and rotary embeddings are those of the kept tokens; after it
their rows go back among the others. Which are kept follows from the seed, the step, the call, the block and what this
process reads: so processes that share samples agree, a block that is computed again in backward keeps the same, and
nothing is lost when a run resumes.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_hf.config.types import Config
from ds_hf.data.layer_tokens import draw, put, select, take
from ds_hf.data.token_schedule import RandomLTDScheduler
from ds_hf.engine.accumulation import BatchSizes
from ds_hf.engine.comm.mesh import Mesh
from ds_hf.engine.events import Events, Observer
from ds_hf.engine.modules.decoder_blocks import Calls, find_blocks
from ds_hf.engine.zero.hooks import Hook
from ds_hf.engine.zero.unit import in_backward
from ds_hf.errors import ConfigError, DsHfError
from ds_hf.log import log_once, warn_once

__all__ = ["DropEngine", "TokenDrop", "attach"]

_POINTER = "/data_efficiency/data_routing/random_ltd"


class DropEngine(Protocol):
    """The engine as this sees it."""

    module: nn.Module
    settings: Config
    mesh: Mesh
    batch: BatchSizes
    events: Events
    kept: dict[str, Any]
    monitor: Any
    global_steps: int
    global_samples: int


class TokenDrop(Observer):
    """Drops tokens in some blocks of ``engine``'s model.

    Attributes:
        scheduler: how many are kept, and how many layer-tokens there were by DeepSpeed's formula.
        saved, total: layer-tokens that were dropped in this process, and that there would have been without.
    """

    def __init__(self, engine: DropEngine, kind: type | None = None) -> None:
        self.engine = engine
        section = engine.settings.data_efficiency.data_routing.random_ltd
        found = find_blocks(engine.module, _POINTER, section.total_layer_num, kind)
        self.scheduler = RandomLTDScheduler(
            {
                "total_layer_num": len(found),
                "random_ltd_layer_num": len(section.random_ltd_layer_id),
                "random_ltd_schedule": vars(section.random_ltd_schedule),
                "global_batch_size": engine.batch.train,
            }
        )
        self.dim = 0 if section.hidden_state_order == "seq_batch_dim" else 1
        self.mask = section.model_mask_name
        self.saved = self.total = 0
        self._seed = engine.settings.data_efficiency.seed
        self._open: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._calls = Calls(engine, self._begin)
        self._handles: list[RemovableHandle] = []
        self.blocks: list[nn.Module] = []
        self.name_blocks(found)

    def name_blocks(self, blocks: list[nn.Module]) -> None:
        """These are the model's blocks; the configuration says which of them drop tokens."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        section = self.engine.settings.data_efficiency.data_routing.random_ltd
        if max(section.random_ltd_layer_id) >= len(blocks):
            raise ConfigError(
                f"random_ltd_layer_id names block {max(section.random_ltd_layer_id)}, and "
                f"{type(self.engine.module).__name__} has {len(blocks)}, counted from 0",
                _POINTER,
            )
        self.blocks = [blocks[index] for index in section.random_ltd_layer_id]
        self._check_attention()
        for index, block in zip(section.random_ltd_layer_id, self.blocks, strict=True):
            self._handles.append(block.register_forward_pre_hook(Hook(_Before(self, index)), with_kwargs=True))
            self._handles.append(block.register_forward_hook(Hook(_After(self, index)), with_kwargs=True))

    def _check_attention(self) -> None:
        config = getattr(self.engine.module, "config", None)
        if getattr(config, "output_router_logits", False):
            raise ConfigError(
                "the balance of experts counts all tokens of each layer (output_router_logits), and random_ltd drops "
                "some: set output_router_logits to false, or remove random_ltd",
                _POINTER,
            )

    # -- hooks ----------------------------------------------------------------------------------------------------

    def _begin(self, new: bool) -> None:
        """The model is called, for the first time in a step if that is ``new``."""
        if new:
            self.scheduler.update_seq(self._calls.step)
        self._open.clear()

    def before(self, index: int, block: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Of a block's arguments, what belongs to the kept tokens; ``None`` where all are kept."""
        hidden = args[0] if args else kwargs.get("hidden_states")
        again, call = in_backward(), self._calls.of(block, hidden)
        if not call:
            return None
        assert isinstance(hidden, Tensor)
        positions, batch = hidden.shape[self.dim], hidden.shape[1 - self.dim]
        if not again:
            self._check_order(hidden, kwargs)
            self.total += positions * batch
        keep = self.scheduler.get_current_seq()
        most = self.scheduler.state["max_value"]
        if positions > most and not again:
            warn_once(
                f"random_ltd ends at {most} tokens (max_value), and a batch has {positions} positions: its blocks "
                f"never have all of such a batch. Set max_value to {positions}, or to the longest length that there is",
                about="random_ltd that always drops",
            )
        if keep >= positions:
            self._open.setdefault(index, []).append((hidden, hidden))
            if self._calls.step == 0 and not again:
                warn_once(
                    f"random_ltd begins at {keep} tokens, and the first batch has {positions} positions: it drops none "
                    "of such batches. Lower min_value, or remove random_ltd",
                    about="random_ltd that drops nothing",
                )
            return None
        if not again:
            self.saved += (positions - keep) * batch
        place = f"{self._seed} {self._calls.step} {call} {index} {self.engine.mesh.sample_rank}"
        places = draw(batch, positions, keep, zlib.crc32(place.encode()), hidden.device)
        self._open.setdefault(index, []).append((hidden, places))
        self._check_packed(block, kwargs, batch)
        rows = take(hidden, places, self.dim)
        kwargs = {name: select(name, value, places, positions, self.mask) for name, value in kwargs.items()}
        if "position_embeddings" in kwargs and kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = None  # flash attention takes gaps in them for the ends of documents
        if not args:
            return (), {**kwargs, "hidden_states": rows}
        names = list(_parameters(block))[: len(args)]
        others = [
            select(name, value, places, positions, self.mask) for name, value in zip(names[1:], args[1:], strict=True)
        ]
        return (rows, *others), kwargs

    def after(self, index: int, output: Any) -> Any:
        """A block's output with the rows of all tokens."""
        if not self._open.get(index):
            return None
        hidden, places = self._open[index].pop()
        if places is hidden:
            return None
        if isinstance(output, Tensor):
            return put(hidden, output, places, self.dim)
        if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
            return type(output)([put(hidden, output[0], places, self.dim), *output[1:]])
        raise DsHfError(
            f"random_ltd: a block gave a {type(output).__name__}, and hidden states, or a tuple that begins with them, "
            "are what rows can be put back into. Leave this block out of random_ltd_layer_id"
        )

    def _check_order(self, hidden: Tensor, kwargs: Mapping[str, Any]) -> None:
        """By the places of tokens, where a block is given them."""
        places, rotary = kwargs.get("position_ids"), kwargs.get("position_embeddings")
        found = rotary[0] if isinstance(rotary, tuple | list) and rotary else None
        there = places.shape[-1] if isinstance(places, Tensor) else found.shape[-2] if isinstance(found, Tensor) else 0
        if there == hidden.shape[1 - self.dim] != hidden.shape[self.dim]:
            order = ("seq_batch_dim", "batch_seq_dim")
            raise DsHfError(
                f"random_ltd: a block is given hidden states {tuple(hidden.shape)} and places of {there} tokens, which "
                f"hidden_state_order {order[self.dim]} does not fit: set it to {order[1 - self.dim]}"
            )

    def _check_packed(self, block: nn.Module, kwargs: Mapping[str, Any], batch: int) -> None:
        if self.saved and self._checked:
            return
        self._checked = True
        implementation = str(getattr(getattr(self.engine.module, "config", None), "_attn_implementation", ""))
        if "flash" not in implementation:
            return
        window = next((m.sliding_window for m in block.modules() if getattr(m, "sliding_window", None)), None)
        if window is not None:
            raise DsHfError(
                f"random_ltd and windows of {window} positions in {implementation}: among kept tokens a window reaches "
                'further than in the text. Load the model with attn_implementation="sdpa", whose masks are right'
            )
        places = kwargs.get("position_ids")
        if isinstance(places, Tensor) and bool((places[..., 1:] < places[..., :-1]).any()):
            raise DsHfError(
                f"random_ltd and packed documents in {implementation}: where a document begins is not known among kept "
                'tokens. Load the model with attn_implementation="sdpa", or give each document a row of its own'
            )

    _checked = False

    # -- life -----------------------------------------------------------------------------------------------------

    def after_step(self, engine: Any) -> None:
        """Tell monitors."""
        if self.engine.monitor.writes:
            x = self.engine.global_samples
            events = [("tokens_kept", float(self.scheduler.get_current_seq()), x)]
            events.append(("layer_tokens", float(self.scheduler.state["consumed_layer_tokens"]), x))
            self.engine.monitor.write_events([(f"Train/Samples/{name}", *rest) for name, *rest in events])

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return {**self.scheduler.state_dict(), "saved": self.saved, "total": self.total}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next step goes on from there."""
        state = dict(state)
        self.saved, self.total = state.pop("saved", 0), state.pop("total", 0)
        self.scheduler.load_state_dict(state)
        self._calls.step = -1

    def close(self) -> None:
        self._calls.close()
        for handle in self._handles:
            handle.remove()
        if self.total:
            log_once(f"random_ltd: {self.saved:_} of {self.total:_} layer-tokens of the named blocks were dropped")


class _Before:
    def __init__(self, drop: TokenDrop, index: int) -> None:
        self.drop, self.index = drop, index

    def __call__(self, block: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return self.drop.before(self.index, block, args, kwargs)


class _After(_Before):
    def __call__(self, block: nn.Module, args: Any, kwargs: dict[str, Any], output: Any = None) -> Any:
        return self.drop.after(self.index, output)


def _parameters(block: nn.Module) -> Mapping[str, Any]:
    return inspect.signature(block.forward).parameters


def attach(engine: DropEngine) -> None:
    """Drop tokens from now on, if the configuration says so.

    Raises:
        ConfigError: of this model, or on this mesh, it cannot be done.
    """
    efficiency = engine.settings.data_efficiency
    if not (efficiency.data_routing.enabled and efficiency.data_routing.random_ltd.enabled):
        return
    if engine.mesh.shape.sequence > 1 or engine.mesh.shape.pipe > 1:
        what = "stages of a pipeline" if engine.mesh.shape.pipe > 1 else "parts of sequences"
        raise ConfigError(
            f"random_ltd chooses among all tokens of a sequence, in blocks of a whole model, and the processes have "
            f"{what}: remove random_ltd, or the division",
            _POINTER,
        )
    drop = TokenDrop(engine)
    engine.kept["random_ltd"] = drop
    engine.events.add(drop)
    engine.events.step_hooks.append(drop.after_step)
