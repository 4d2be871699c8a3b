"""``--include``, ``--exclude``, ``--num_nodes`` and ``--num_gpus``: which hosts and slots of the pool are used.

A filter is ``host[:slot,slot…]`` joined by ``@``; a host without slots means all of them. Order is the hostfile's.
"""

from __future__ import annotations

from collections.abc import Iterator

from ds_hf.launcher.errors import LaunchError, mistake
from ds_hf.launcher.hostfile import Pool

__all__ = ["first_nodes_and_slots", "parse_filter", "remaining", "select"]

_EXAMPLE = "write host, host:0,2 or host-a:0,2@host-b"


def parse_filter(text: str, pool: Pool, option: str = "--include") -> dict[str, set[int]]:
    """The slots that ``text`` names, by host; they are all in ``pool``.

    Raises:
        LaunchError: names the column and fix of the first mistake.
    """
    named: dict[str, set[int]] = {}
    for column, part in _split(text, "@", 1):
        host, colon, slots = part.partition(":")
        if not host:
            raise mistake(option, 1, column, text, "a host name is missing", _EXAMPLE)
        if host not in pool:
            known = ", ".join(list(pool)[:8]) + (", ..." if len(pool) > 8 else "")
            raise mistake(option, 1, column, text, f"there is no host {host[:80]!r}", f"the hosts are {known}")
        chosen = named.setdefault(host, set())
        if not colon:
            chosen.update(pool[host])
            continue
        for at, slot in _split(slots, ",", column + len(host) + 1):
            chosen.add(_slot(slot, at, text, pool[host], (option, host)))
    return named


def _slot(slot: str, column: int, text: str, known: tuple[int, ...], where: tuple[str, str]) -> int:
    option, host = where
    if not (slot.isascii() and slot.isdecimal()) or len(slot) > 9:
        raise mistake(option, 1, column, text, f"a slot number is expected here, not {slot[:40]!r}", _EXAMPLE)
    if int(slot) not in known:
        message = f"host {host} has no slot {int(slot)}"
        raise mistake(option, 1, column, text, message, f"its slots are {', '.join(map(str, known))}")
    return int(slot)


def _split(text: str, separator: str, column: int) -> Iterator[tuple[int, str]]:
    for part in text.split(separator):
        yield column, part
        column += len(part) + 1


def select(pool: Pool, include: str = "", exclude: str = "") -> Pool:
    """The part of ``pool`` that the two filters leave.

    Raises:
        LaunchError: nothing is left, or a filter is wrong.
    """
    active = remaining(pool, include, exclude)
    if exclude and not active:
        raise LaunchError(f"--exclude {exclude}: no slots are left\n  fix: exclude less")
    return active


def remaining(pool: Pool, include: str = "", exclude: str = "") -> Pool:
    """``select``, which may leave nothing; the filters exclude each other, as in DeepSpeed."""
    if include and exclude:
        raise LaunchError("--include and --exclude are both given\n  fix: give one of them")
    if include:
        named = parse_filter(include, pool, "--include")
        return {host: tuple(sorted(named[host])) for host in pool if host in named}
    if not exclude:
        return pool
    named = parse_filter(exclude, pool, "--exclude")
    left = {host: tuple(slot for slot in slots if slot not in named.get(host, ())) for host, slots in pool.items()}
    return {host: slots for host, slots in left.items() if slots}


def first_nodes_and_slots(pool: Pool, num_nodes: int = -1, num_gpus: int = -1) -> Pool:
    """The first ``num_nodes`` hosts of ``pool`` with the first ``num_gpus`` slots of each; -1 is all."""
    for option, value in (("--num_nodes", num_nodes), ("--num_gpus", num_gpus)):
        if value == 0 or value < -1:
            raise LaunchError(f"{option} is {value}\n  fix: give a number from 1, or leave it out for all")
    if num_nodes > len(pool):
        raise LaunchError(
            f"--num_nodes is {num_nodes}, and there {'is' if len(pool) == 1 else 'are'} {len(pool)}: {', '.join(pool)}"
            "\n  fix: list more hosts in the hostfile, or ask for fewer"
        )
    hosts = list(pool)[: num_nodes if num_nodes > 0 else None]
    for host in hosts:
        if num_gpus > len(pool[host]):
            raise LaunchError(
                f"--num_gpus is {num_gpus}, and host {host} has {len(pool[host])} slots"
                "\n  fix: correct slots= in the hostfile, or ask for fewer"
            )
    return {host: pool[host][: num_gpus if num_gpus > 0 else None] for host in hosts}
