"""What crossed between host and device. No torch, as the engine's counters hold it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CopyCounts:
    """Copies asked for since the device was made, and waits of the host for one of its events.

    Counted on the loop's thread only; another one that waits is not counted, see `gapless.device.base.Event`.
    """

    h2d: int = 0
    d2h: int = 0
    h2d_bytes: int = 0
    d2h_bytes: int = 0
    waits: int = 0
