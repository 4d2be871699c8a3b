"""Blocks in files, a few of them in memory: who is visited comes in, and the one not visited for longest goes out.

Invariants
- A block is either in a slot, where its tensors point, or at rest, where its file has its bytes.
- A slot whose block was visited for writing is dirty until the block is written; it is written before it is given up.
- After a fault nothing goes on: some blocks may be a step ahead of others, so that a checkpoint written now would be a
  mixture. Every later call fails and says why, and the last checkpoint stays what it was.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ds_hf.engine.offload.aio import Aio, FileRequest
from ds_hf.engine.offload.blocks import Block
from ds_hf.engine.offload.folder import SwapFolder
from ds_hf.engine.offload.link import DONE, Arrival
from ds_hf.engine.offload.memory import host_empty
from ds_hf.errors import OffloadError

__all__ = ["SwapPool"]


class _Slot:
    """Memory for one block."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.block: Block | None = None
        self.request: FileRequest | None = None
        self.dirty = False
        self.visited = 0  # when
        self.readers: Arrival = DONE  # a copy to the device that still reads the memory


class SwapPool:
    """Slots over the files of one folder, which is removed with the pool.

    Args:
        slots: blocks in memory at a time, at least 2.
        pinned: see ``host_empty``.
    """

    def __init__(self, folder: SwapFolder, aio: Aio, slots: int, *, pinned: bool) -> None:
        # In this order: what dies first when the pool does must not be the memory that requests still use.
        self._folder, self._aio, self._pinned = folder, aio, pinned
        self._most, self._slots = max(slots, 2), list[_Slot]()  # made as they are used
        self._paths: dict[Block, Path] = {}
        self._removed = 0  # blocks
        self._clock = 0
        self._fault: OffloadError | None = None

    def add(self, block: Block) -> None:
        """Take over a block, whose values are tensors of their own now."""
        number = len(self._paths) + self._removed
        self._paths[block] = self._folder.path / f"{number:05d}_{_file_name(block.name)}"
        slot = self._free_slot()
        slot.block, slot.dirty = block, True
        self._lay_out(slot, block)
        self._touch(slot)
        self.flush(block)

    def visit(self, block: Block, *, write: bool, fresh: bool = False) -> None:
        """Bring the block in; it stays until as many others were visited as there are slots.

        Args:
            write: it is going to be changed.
            fresh: all of it is: its values are not read.
        """
        slot = self._find(block) or self._load(block, read=not fresh)
        self._wait(slot)
        if block.memory is None:
            block.attach(slot.memory[: block.nbytes_at_rest])
        slot.dirty |= write
        self._touch(slot)

    def prefetch(self, block: Block) -> None:
        """Begin to bring the block in, unless that takes the place of the one visited last."""
        if self._find(block) is None and self._most > 1:
            self._load(block, read=True)

    def flush(self, block: Block) -> None:
        """Begin to write the block if it was changed. To change it again, visit it again."""
        slot = self._find(block)
        if slot is None or not slot.dirty:
            return
        self._wait(slot)
        if not block.in_memory:  # an update, or a checkpoint, has made moments
            self._lay_out(slot, block)
        slot.dirty = False
        slot.request = self._aio.write(self._paths[block], slot.memory[: block.nbytes])

    def remove(self, block: Block) -> None:
        """The block is not wanted any more, nor is its file."""
        slot = self._find(block)
        if slot is not None:
            self._wait(slot)
            slot.readers.on_host()
            slot.readers, slot.block, slot.dirty = DONE, None, False
        self._removed += 1
        self._paths.pop(block).unlink(missing_ok=True)

    def guard(self, block: Block, reader: Arrival) -> None:
        """A copy to the device reads the block: its memory is not given up before the copy is over."""
        slot = self._find(block)
        assert slot is not None
        slot.readers = reader

    def in_memory(self, block: Block) -> bool:
        """Whether a visit would not read."""
        return self._find(block) is not None

    def close(self) -> None:
        """Wait for the disk, remove the files, and give the memory back."""
        for slot in self._slots:
            if slot.request is not None:
                _wait_quietly(slot.request)
            slot.readers.on_host()
        self._most, self._slots = 0, []
        self._paths.clear()
        self._aio.close()
        self._folder.close()

    # -- slots ----------------------------------------------------------------------------------------------------

    def _find(self, block: Block) -> _Slot | None:
        if self._fault is not None:
            raise OffloadError(
                f"offloaded states were lost: {self._fault}. Training cannot go on; start again from the last "
                "checkpoint"
            ) from self._fault
        return next((slot for slot in self._slots if slot.block is block), None)

    def _touch(self, slot: _Slot) -> None:
        self._clock += 1
        slot.visited = self._clock

    def _load(self, block: Block, *, read: bool) -> _Slot:
        slot = self._free_slot()
        nbytes = block.nbytes_at_rest
        self._reserve(slot, nbytes)
        slot.block = block
        if read:
            slot.request = self._aio.read(self._paths[block], slot.memory[:nbytes])
        self._touch(slot)
        return slot

    def _free_slot(self) -> _Slot:
        slot = next((slot for slot in self._slots if slot.block is None), None)
        if slot is None and len(self._slots) < self._most:
            slot = _Slot()
            self._slots.append(slot)
        slot = slot or min(self._slots, key=lambda s: s.visited)
        if slot.block is not None:
            self.flush(slot.block)
            self._wait(slot)
            slot.readers.on_host()
            slot.readers = DONE
            slot.block.attach(None)
            slot.block = None
        return slot

    def _wait(self, slot: _Slot) -> None:
        if slot.request is None:
            return
        request, slot.request = slot.request, None
        try:
            request.wait()
        except OffloadError as error:
            self._fault = error
            raise

    def _reserve(self, slot: _Slot, nbytes: int) -> None:
        if slot.memory.numel() < nbytes:
            slot.memory = torch.empty(0, dtype=torch.uint8)  # the old memory first
            slot.memory = host_empty(nbytes, torch.uint8, pinned=self._pinned)

    def _lay_out(self, slot: _Slot, block: Block) -> None:
        """All planes of the block into the slot, which may have to grow."""
        nbytes = block.nbytes
        if slot.memory.numel() < nbytes:
            memory = host_empty(nbytes, torch.uint8, pinned=self._pinned)
            block.adopt(memory)
            slot.memory = memory
        else:
            block.adopt(slot.memory[:nbytes])


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in name)[-80:] + ".bin"


def _wait_quietly(request: FileRequest) -> None:
    try:
        request.wait()
    except OffloadError:
        return
