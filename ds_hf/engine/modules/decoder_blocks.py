"""The list of a model's blocks, of which some drop tokens, or are left out of a step."""

from __future__ import annotations

from torch import nn

from ds_hf.errors import ConfigError

__all__ = ["find_blocks"]


def find_blocks(model: nn.Module, pointer: str, count: int | None = None, kind: type | None = None) -> list[nn.Module]:
    """The blocks of ``model``, in order: its longest list of modules of one parent, or those of a class.

    Args:
        pointer: of the key that asks, for the sentence.
        count: how many there are, if the configuration says so.
        kind: their class, where a script names it.

    Raises:
        ConfigError: there is no such list, or there are several.
    """
    if kind is not None:
        found = [module for module in model.modules() if isinstance(module, kind)]
        lists = {kind.__name__: found} if found else {}
    else:
        lists = {
            name: list(module)
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList | nn.Sequential)
            and len(module) > 1
            and all(any(b.children()) for b in module)
        }
    sizes = {name: len(blocks) for name, blocks in lists.items()}
    if count is not None:
        lists = {name: blocks for name, blocks in lists.items() if len(blocks) == count}
    longest = max(map(len, lists.values()), default=0)
    best = [name for name, blocks in lists.items() if len(blocks) == longest]
    if len(best) == 1:
        return lists[best[0]]
    there = ", ".join(f"{name} ({size})" for name, size in sizes.items()) or "none"
    asked = "" if count is None else f" of {count} blocks"
    raise ConfigError(
        f"{type(model).__name__} has {'several lists' if best else 'no list'}{asked} to choose from: there "
        f"are {there}. Give total_layer_num as one of them has it",
        pointer,
    )
