"""LoraMemory: where the adapters lie on the device, and how another one gets there while steps are in flight.

    any thread, one at a time   waits `loaded`; writes the adapter into ``staging``           (`stage`)
    the loop, between steps     enqueues the copy staging -> slot on the compute stream,
                                and records `loaded` behind it; never waits                   (`load`)
    compute                     copies; later steps may name the slot

The compute stream alone writes the buffer, as all state that outlives a step. So no event is needed between an adapter
and the steps that read it: those launched before are ordered before the copy, those launched after it behind it. Nor
is a slot that some request still runs with ever chosen; that is for the caller to see to.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gapless.device.base import Access, Device
from gapless.lora.bank import AdapterBank, LoraWeights


class LoraMemory:
    """Buffer ``[L, W]`` of ``bank`` on ``device``, pinned memory of one slot, and the event between its uses."""

    def __init__(self, device: Device, bank: AdapterBank) -> None:
        size = torch.empty((), dtype=bank.dtype).element_size()
        self._device = device
        self.bank = bank
        self.buffer = device.device_buffer(bank.shape, bank.dtype, "adapters")
        self._staging = device.host_buffer(bank.words * size, "adapters.staging").view(bank.dtype)
        self._loaded = device.event()
        bank.bind(self.buffer)

    def stage(self, adapter: Mapping[str, LoraWeights]) -> None:
        """Write an adapter that `AdapterBank.check` took to the pinned memory. Blocks until the last one has left it;
        for the thread of whoever loads it, not for the loop's."""
        self._loaded.synchronize(counted=False)  # sync-ok: off the step path, on the caller's thread
        with self._device.host_access(Access(writes=(self._staging,)), "stage"):
            self.bank.pack(adapter, self._staging)

    def load(self, slot: int) -> None:
        """Enqueue the copy to ``slot``. On the loop's thread, between two steps."""
        place, staging = self.buffer[slot], self._staging

        def copy() -> None:
            place.copy_(staging, non_blocking=True)

        self._device.launch(copy, Access((staging,), (place,)), "load adapter")
        self._loaded.record(self._device.compute)

    def close(self) -> None:
        """Let go of the memory."""
        self.bank.unbind()
        del self.buffer, self._staging
