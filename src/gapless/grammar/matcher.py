"""A request's place in its grammar, and the masks of what may come next.

The place is a function of the tokens that the request has generated and that are committed, and of nothing else: it
knows no step, no preemption and no depth. Masks of several rows are computed in one call, by several threads, and
straight into memory that is copied to the device. The GIL is released meanwhile.

Shape legend: n rows, W words of a mask over the vocabulary (bit i % 32 of word i // 32: id i may be chosen).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from gapless.request.outputs import FinishReason

I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class End:
    """A request ends here, because nothing may follow."""

    reason: FinishReason
    error: str | None = None


class Grammar:
    """One completion's place. Touched by the loop's thread only, once its request is submitted.

    Args:
        matcher: an ``LLMatcher`` of its own, at the start.
        keep: int32 ``[W]``: the request's own mask, for ``allowed_token_ids`` and for end-of-sequence ids that do not
            end this request. None: everything.
        ends: ids that end the request. They may be drawn only where the grammar may end, also where text spells them.
    """

    __slots__ = ("_consumed", "_ends", "keep", "matcher")

    def __init__(self, matcher: Any, keep: I32 | None = None, ends: tuple[int, ...] = ()) -> None:
        self._ends = ends
        self.matcher = matcher
        self.keep = keep
        self._consumed = 0

    def follow(self, output: I32) -> End | None:
        """Go on to the end of ``output``, all tokens that the request has generated."""
        new = output[self._consumed :].tolist()
        self._consumed = len(output)
        return None if not new or self.matcher.consume_tokens(new) else self._error()

    def restrict(self, mask: I32) -> End | None:
        """Put the request's own mask over ``mask [W]``, which `fill_masks` has filled."""
        if self.matcher.is_error():
            return self._error()
        held = [end for end in self._ends if mask[end >> 5] >> (end & 31) & 1]
        if held and not self.matcher.is_accepting():
            for end in held:
                mask[end >> 5] &= np.int32(~(1 << (end & 31)) if end & 31 < 31 else 0x7FFFFFFF)
            if not mask.any():
                return End(FinishReason.ERROR, "structured_outputs: only an end of the output spells what must follow")
        if self.keep is None:
            return None
        mask &= self.keep
        if mask.any():
            return None
        if self.matcher.is_accepting():
            return End(FinishReason.STOP)
        return End(FinishReason.ERROR, "the tokens that its grammar allows here are not in allowed_token_ids")

    def _error(self) -> End:
        return End(FinishReason.ERROR, f"structured_outputs: {brief(self.matcher.get_error())}")


@cache
def _executor() -> Any:
    import llguidance

    return llguidance.LLExecutor()


def fill_masks(grammars: list[Grammar], outputs: list[I32], masks: I32) -> list[End | None]:
    """Write what may follow each of ``outputs`` into ``masks [n, W]``; where a request ends, its mask allows all.

    Args:
        grammars: of n different requests.
        outputs: what each has generated so far.
        masks: contiguous.

    Returns:
        Ends, in the order of the grammars.
    """
    ends = [grammar.follow(output) for grammar, output in zip(grammars, outputs, strict=True)]
    live = [i for i, end in enumerate(ends) if end is None]
    row_bytes = 4 * masks.shape[1]
    if len(live) == 1:
        grammars[live[0]].matcher.unsafe_compute_mask_ptr(masks.ctypes.data + live[0] * row_bytes, row_bytes)
    elif live:
        jobs = [(grammars[i].matcher, i) for i in live]
        _executor().unsafe_compute_mask_ptr(jobs, masks.ctypes.data, row_bytes, len(masks))
    for i in live:
        ends[i] = grammars[i].restrict(masks[i])
    for i, end in enumerate(ends):
        if end is not None:
            masks[i] = -1
    return ends


def brief(text: str) -> str:
    """An error of the library, short enough for a message."""
    line = " ".join(text.replace("<non-verbose/>", "").split())
    if line.startswith("NoExtension"):
        return "no text satisfies it"
    line = re.sub(r" 1 \| .*", "", line.rsplit("error: ", 1)[-1])  # without an excerpt of what the caller has himself
    return line if len(line) <= 300 else f"{line[:300]} ..."
