"""Counters that are copied, and those of what crossed between host and device. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from operator import attrgetter
from typing import Any, Self


@cache
def _values(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    return attrgetter(*(field.name for field in fields(kind)))


class Counters:
    """Base of dataclasses of two fields or more; a copy costs a fifth of `dataclasses.replace`."""

    __slots__ = ()

    def copy(self) -> Self:
        """As it is now; a field that can be changed in place is shared, unless a subclass says otherwise."""
        kind: Any = type(self)
        new: Self = kind(*_values(kind)(self))
        return new


@dataclass(slots=True)
class CopyCounts(Counters):
    """Copies asked for since the device was made, and waits of the host for one of its events.

    Counted on the loop's thread only; another one that waits is not counted, see `gapless.device.base.Event`.
    """

    h2d: int = 0
    d2h: int = 0
    h2d_bytes: int = 0
    d2h_bytes: int = 0
    waits: int = 0
