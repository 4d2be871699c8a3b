"""From what the optimizer wrote to the parameters everywhere.

Sharded parameters are gathered when they are needed. Replicated ones are gathered at once, beside what comes next:
whoever uses them waits (``landing``). Small buffers share a launch.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_hf.engine.dist import collectives
from ds_hf.engine.zero.buffer import FlatBuffer

__all__ = ["publish"]

# Of a launch: the first is short, for the next forward waits for it; each later one is twice as long as that before it,
# up to a millisecond of NVLink.
_FIRST_NBYTES, _LAST_NBYTES = 32 << 20, 256 << 20


def publish(buffers: Sequence[FlatBuffer], *, whole: bool) -> None:
    """Make what was written to ``owned`` the parameters' values on all ranks. Collective.

    Args:
        whole: every rank wrote everything.

    Raises:
        DsHfError: parameters are no longer where their buffer keeps them.
    """
    together: list[FlatBuffer] = []
    nbytes, enough = 0, _FIRST_NBYTES
    for buffer in buffers:
        if buffer.sharded:
            buffer.refresh()
            continue
        buffer.check_views()
        if whole:
            continue
        if together and buffer.axis != together[0].axis:
            _gather(together)
            together, nbytes = [], 0
        together.append(buffer)
        nbytes += buffer.full.nbytes
        if nbytes >= enough:
            _gather(together)
            together, nbytes, enough = [], 0, min(2 * enough, _LAST_NBYTES)
    if together:
        _gather(together)


def _gather(buffers: Sequence[FlatBuffer]) -> None:
    lane, axis = buffers[0].lane, buffers[0].axis
    with lane:
        copied = [buffer for buffer in buffers if buffer.region is not None]
        for buffer in copied:
            buffer.fill()
        if copied and copied[0].peers is not None:
            copied[0].peers.meet()  # users may write to parameters once they have landed
        rest = [buffer for buffer in buffers if buffer.region is None]
        fulls, shards = [b.full for b in rest], [b.shard for b in rest]
        collectives.all_gather_each(fulls, shards, axis, [b.weights_label for b in rest])
    arrival = lane.event() if axis.world_size > 1 else None
    put_off = [buffer.take_off(arrival) for buffer in buffers]
    if not all(put_off):
        lane.join()
