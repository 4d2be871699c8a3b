"""When one process runs out of memory, all of them hear of it: alone it would leave the others waiting for ever.

Inside ``shared_out_of_memory`` every collective of the mesh, on whatever axis, begins with one bit of all processes,
over gloo, so that no device waits for the host. A process that failed gives its bit in place of the collective it will
not reach; the others meet it there, and raise. It costs a small message a collective, so it is for those who asked to
have batch sizes tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ds_hf.engine.comm.mesh import Axis, Mesh, host_group

__all__ = ["PeerOutOfMemory", "shared_out_of_memory"]


class PeerOutOfMemory(RuntimeError):
    """Another process ran out of memory. The words " out of memory." are those that accelerate looks for."""


class _Agreement:
    """The bit of each process; the group is made once for each axis."""

    def __init__(self, axis: Axis) -> None:
        self.group = host_group(axis)

    def check(self) -> None:
        """All is well here. Collective.

        Raises:
            PeerOutOfMemory: elsewhere it is not.
        """
        if self.share(failed=False):
            raise PeerOutOfMemory("another process ran out of memory.")

    def share(self, *, failed: bool) -> bool:
        """Whether any process failed. Collective."""
        bit = torch.tensor([failed], dtype=torch.int32)
        dist.all_reduce(bit, op=dist.ReduceOp.MAX, group=self.group)
        return bool(bit)


@contextmanager
def shared_out_of_memory(mesh: Mesh, is_out_of_memory: Callable[[Exception], bool]) -> Iterator[None]:
    """Out of memory inside, on any process, is out of memory on all. All ranks enter and leave together.

    Args:
        is_out_of_memory: which exceptions count.
    """
    world = mesh.world
    if world.world_size == 1:
        yield
        return
    if world.log.agreement is None:
        world.log.agreement = _Agreement(world)
    agreement, logs = world.log.agreement, [axis.log for axis in mesh.axes]
    for log in logs:
        log.before = agreement.check
    try:
        yield
        agreement.check()
    except PeerOutOfMemory:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            agreement.share(failed=True)
        raise
    finally:
        for log in logs:
            log.before = None
