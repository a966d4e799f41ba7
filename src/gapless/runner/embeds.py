"""EmbedMemory: the table of embeddings that stand for tokens of prompts, and how rows of it are written.

    loop's thread   writes them, with their numbers, into the slot's pinned region      only after the slot's last d2h
    h2d             copies the region; records `uploaded`
    compute         waits `uploaded`; region -> table, in front of the step's forward

Only steps in which a request with embeddings starts have this second copy, as those with masks have one. The forwards
read the table where an input id is negative: id ``-1 - r`` is row r.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from gapless.batch.plan import EmbedUpload
from gapless.device.base import Access, Device, Event


@dataclass(frozen=True, slots=True)
class _Region:
    """Of one slot: row numbers int64 ``[E]``, then embeddings ``[E, bytes]``; pinned, its device twin, the event."""

    host: torch.Tensor
    device: torch.Tensor
    uploaded: Event


class EmbedMemory:
    """Table ``[count, width]`` of ``dtype``, and a region for each of ``depth`` slots."""

    def __init__(self, device: Device, count: int, width: int, dtype: torch.dtype, depth: int) -> None:
        self._device = device
        self._numbers = 8 * count  # bytes of the row numbers
        self._bytes = width * dtype.itemsize
        self.table = device.device_buffer((count, width), dtype, "prompt_embeds")
        size = self._numbers + count * self._bytes
        self._regions = [
            _Region(
                device.host_buffer(size, f"slot{i}.embeds_host"),
                device.device_buffer((size,), torch.uint8, f"slot{i}.embeds"),
                device.event(),
            )
            for i in range(depth)
        ]
        self._write(self._regions[0].device, 1)  # so that no step is the first to load the kernel: zeros to row 0
        device.synchronize()

    def upload(self, rows: EmbedUpload, slot: int) -> None:
        """Enqueue the writing of ``rows``, before the forward of the step that has the slot. Never waits."""
        device, region, count = self._device, self._regions[slot], len(rows.rows)
        used = self._numbers + count * self._bytes
        with device.host_access(Access(writes=(region.host,)), "embeds"):
            words = region.host.numpy()
            words[: 8 * count].view(np.int64)[:] = rows.rows
            words[self._numbers : used].reshape(count, self._bytes)[:] = rows.data
        device.copy_h2d(region.device[:used], region.host[:used], "embeds")
        region.uploaded.record(device.h2d)
        region.uploaded.wait(device.compute)
        self._write(region.device, count)

    def _write(self, region: torch.Tensor, count: int) -> None:
        numbers = region[: 8 * count].view(torch.int64)
        data = region[self._numbers : self._numbers + count * self._bytes].view(self.table.dtype)

        def write() -> None:
            self.table.index_copy_(0, numbers, data.view(count, -1))

        self._device.launch(write, Access((region,), (self.table,)), "embeds")
