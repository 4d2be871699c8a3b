"""What fewer bytes are in seconds, on the links that ``ds-hf doctor`` measured: for ``ds-hf config explain``."""

from __future__ import annotations

from ds_hf.config.optimizer_traits import ONE_BIT
from ds_hf.config.plan import plan_states
from ds_hf.config.types.root import Config
from ds_hf.measure.links import MeasuredLinks

__all__ = ["ONE_BIT_NBYTES", "full_nbytes", "wire_seconds"]

ONE_BIT_NBYTES = 1 / 8 + 4 / 4096  # an element, each way
_PARAMETERS = 1e9
_MEASURE = "torchrun --nnodes HOSTS --nproc-per-node N ... -m ds_hf.cli doctor"


def full_nbytes(config: Config) -> int:
    """Bytes an element of what travels without such settings."""
    return 4 if plan_states(config).parameters.dtype is None else 2


def wire_seconds(config: Config, links: MeasuredLinks) -> str:
    """What the settings save and cost in a step of a billion parameters whose links are ``links``, in a sentence."""
    speed = links.between or links.neighbours
    if not speed:
        return f"ds-hf doctor has measured no link here: start it on the hosts of a run, {_MEASURE}"
    processes = links.processes or 2
    saved = cost = 0.0
    for trips, nbytes in _trips(config):
        saved += trips * nbytes * _PARAMETERS * (processes - 1) / processes / speed
        cost += trips * _PARAMETERS / links.packed if links.packed else 0.0
    where = f"on the link that ds-hf doctor measured ({links}; {links.day})"
    if not links.packed:
        return (
            f"{where} a step of 1 B parameters waits {saved:.2g} s less for bytes; for what packing costs, and for the "
            f"link between hosts: {_MEASURE}"
        )
    total = saved - cost
    verdict = f"{total:.2g} s are gained" if total > 0 else f"{-total:.2g} s are lost"
    return f"{where} a step of 1 B parameters waits {saved:.2g} s less for bytes and packs for {cost:.2g} s: {verdict}"


def _trips(config: Config) -> list[tuple[int, float]]:
    """How often in a step each element travels, and the bytes less."""
    plan, full = plan_states(config), full_nbytes(config)
    micro_batches = config.gradient_accumulation_steps or 1
    found = []
    if plan.gradients.bits:
        times = micro_batches if plan.reduces_every_micro_batch else 1
        found.append((times, full - plan.gradients.bits / 8 - 4 / plan.block))
    if plan.parameters.bits:
        found.append((2 * micro_batches, full - plan.parameters.bits / 8 - 4 / plan.block))
    if config.optimizer is not None and config.optimizer.type.lower() in ONE_BIT:
        found.append((2, full - ONE_BIT_NBYTES))  # an all-reduce goes two ways
    return found
