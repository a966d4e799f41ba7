"""SlotLayout: where everything of a step lies in a slot, for one pair of padded sizes.

A slot is one contiguous region of 32-bit words, so that a step is one copy. Fixed parts come first, the changes of the
arena last, and only the used prefix is copied. All offsets follow from the padded sizes (T tokens, S sequences), which
a graph has in its key; true sizes stand in the header and are read on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from gapless.batch.plan import StepPlan

HEADER_WORDS = 16
NUM_TOKENS, NUM_SEQS, NUM_UPDATES = 0, 1, 2  # words of the header
ALIGN = 4  # words; every part starts on 16 bytes


def _up(words: int) -> int:
    return -(-words // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Offsets in 32-bit words. ``carry`` holds bytes."""

    num_tokens: int
    num_seqs: int
    rows: int
    starts: int
    query_start_loc: int
    flags: int
    input_ids: int
    carry: int
    updates: int


@lru_cache(maxsize=4096)
def slot_layout(num_tokens: int, num_seqs: int) -> SlotLayout:
    """Layout for T = ``num_tokens`` and S = ``num_seqs``, both padded."""
    rows = HEADER_WORDS
    starts = rows + _up(num_seqs)
    query_start_loc = starts + _up(num_seqs)
    flags = query_start_loc + _up(num_seqs + 1)
    input_ids = flags + _up(num_seqs)
    carry = input_ids + _up(num_tokens)
    updates = carry + _up(-(-num_tokens // 4))
    return SlotLayout(num_tokens, num_seqs, rows, starts, query_start_loc, flags, input_ids, carry, updates)


def slot_words(num_tokens: int, num_seqs: int, max_updates: int) -> int:
    """Words of a slot that can hold any step up to these sizes."""
    return slot_layout(num_tokens, num_seqs).updates + _up(2 * max_updates)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Typed views of a slot's device twin for one layout. See `StepPlan` for their meaning."""

    header: torch.Tensor  # int32 [HEADER_WORDS]
    rows: torch.Tensor  # int32 [S]
    starts: torch.Tensor  # int32 [S]
    query_start_loc: torch.Tensor  # int32 [S + 1]
    flags: torch.Tensor  # int32 [S]: 1 the sequence draws a token, 2 it scores the prompt's next one; in a step with
    # drafts 4 the device knows where it starts, 8 it has drafts
    input_ids: torch.Tensor  # int32 [T]
    carry: torch.Tensor  # uint8 [T]
    updates: torch.Tensor  # int32 [U, 2], U is what the slot can hold at most


def step_inputs(words: torch.Tensor, layout: SlotLayout) -> StepInputs:
    """Cut ``words`` (int32, a slot's device twin) into the parts of ``layout``."""
    s, t = layout.num_seqs, layout.num_tokens
    rest = words[layout.updates :]
    return StepInputs(
        header=words[:HEADER_WORDS],
        rows=words[layout.rows : layout.rows + s],
        starts=words[layout.starts : layout.starts + s],
        query_start_loc=words[layout.query_start_loc : layout.query_start_loc + s + 1],
        flags=words[layout.flags : layout.flags + s],
        input_ids=words[layout.input_ids : layout.input_ids + t],
        carry=words[layout.carry : layout.updates].view(torch.uint8)[:t],
        updates=rest[: len(rest) // 2 * 2].view(-1, 2),
    )


def used_words(plan: StepPlan, layout: SlotLayout) -> int:
    """Words of the slot that the step's copy must bring."""
    return layout.updates + 2 * len(plan.updates)
