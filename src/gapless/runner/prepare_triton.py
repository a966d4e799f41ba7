"""The start of a step as two Triton kernels; see `gapless.runner.prepare`, whose results these equal.

All true sizes are read on the device, so that a graph holds the launches for any step of its padded sizes.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from gapless.batch.arena import Arena
from gapless.batch.row_layout import NULL_BLOCK, RowLayout
from gapless.batch.slot_layout import NUM_SEQS, NUM_TOKENS, NUM_UPDATES, StepInputs
from gapless.runner.prepare import StepIndices

_NUM_SEQS = tl.constexpr(NUM_SEQS)
_NUM_TOKENS = tl.constexpr(NUM_TOKENS)
_NUM_UPDATES = tl.constexpr(NUM_UPDATES)
_NULL_BLOCK = tl.constexpr(NULL_BLOCK)
_MAX_PROGRAMS = 128


@triton.jit
def _apply_updates_kernel(header_ptr, updates_ptr, arena_ptr, BLOCK: tl.constexpr):
    count = tl.load(header_ptr + _NUM_UPDATES)
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < count
        word = tl.load(updates_ptr + 2 * i, mask=inside, other=0).to(tl.int64)
        value = tl.load(updates_ptr + 2 * i + 1, mask=inside, other=0)
        tl.store(arena_ptr + word, value, mask=inside)


@triton.jit(do_not_specialize=["T", "S", "token_programs"])
def _prepare_kernel(
    header_ptr,
    rows_ptr,
    starts_ptr,
    query_start_loc_ptr,
    input_ids_ptr,
    carry_ptr,
    token_table_ptr,
    block_tables_ptr,
    ids_out_ptr,
    positions_ptr,
    slots_ptr,
    seq_lens_ptr,
    logits_index_ptr,
    sample_positions_ptr,
    T,
    S,
    token_programs,
    max_model_len,
    max_blocks,
    table_words,
    slots_stride,
    GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,  # enough to halve [0, S) down to one
    BLOCK: tl.constexpr,
):
    """The first ``token_programs`` programs take BLOCK tokens each, the others BLOCK sequences each."""
    pid = tl.program_id(0)
    if pid < token_programs:
        t = pid * BLOCK + tl.arange(0, BLOCK)
        real = t < tl.load(header_ptr + _NUM_TOKENS)
        carry = tl.load(carry_ptr + t, mask=real, other=0) != 0
        ids = tl.load(input_ids_ptr + t, mask=real, other=0).to(tl.int64)
        # The last sequence that starts at or before t.
        low = tl.zeros([BLOCK], dtype=tl.int32)
        high = tl.zeros([BLOCK], dtype=tl.int32) + tl.load(header_ptr + _NUM_SEQS)
        for _ in range(SEARCH_STEPS):
            middle = (low + high) // 2
            begins = tl.load(query_start_loc_ptr + middle, mask=real, other=0)
            narrow = high - low > 1
            low = tl.where(narrow & (begins <= t), middle, low)
            high = tl.where(narrow & (begins > t), middle, high)
        row = tl.load(rows_ptr + low, mask=real, other=0).to(tl.int64)
        begins = tl.load(query_start_loc_ptr + low, mask=real, other=0)
        position = tl.load(starts_ptr + low, mask=real, other=0).to(tl.int64) + t - begins
        position = tl.where(real, position, 0)
        inside = real & (position < max_model_len)
        place = token_table_ptr + row * max_model_len + position
        ids = tl.where(carry, tl.load(place, mask=inside & carry, other=0).to(tl.int64), ids)
        tl.store(place, ids.to(tl.int32), mask=inside & (carry == 0))
        offset = tl.where(inside, position, t) % BLOCK_SIZE
        exists = t < T
        entry = block_tables_ptr + row * max_blocks + position // BLOCK_SIZE
        for group in tl.static_range(GROUPS):
            block = tl.load(entry + group * table_words, mask=inside, other=_NULL_BLOCK).to(tl.int64)
            tl.store(slots_ptr + group * slots_stride + t, block * BLOCK_SIZE + offset, mask=exists)
        tl.store(ids_out_ptr + t, ids, mask=exists)
        tl.store(positions_ptr + t, position, mask=exists)
    else:
        s = (pid - token_programs) * BLOCK + tl.arange(0, BLOCK)
        exists = s < S
        begins = tl.load(query_start_loc_ptr + s, mask=exists, other=0)
        ends = tl.load(query_start_loc_ptr + s + 1, mask=exists, other=0)
        length = tl.load(starts_ptr + s, mask=exists, other=0) + ends - begins
        tl.store(seq_lens_ptr + s, length, mask=exists)
        tl.store(logits_index_ptr + s, tl.where(ends > begins, ends - 1, 0).to(tl.int64), mask=exists)
        tl.store(sample_positions_ptr + s, length.to(tl.int64), mask=exists)


def apply_updates(step: StepInputs, arena: Arena) -> None:
    """``arena[word] = value`` for the step's changes. A word that is named twice gets either value."""
    block = 512
    programs = min(_MAX_PROGRAMS, max(1, triton.cdiv(step.updates.shape[0], block)))
    _apply_updates_kernel[(programs,)](step.header, step.updates, arena.words, BLOCK=block, num_warps=4)


def prepare(step: StepInputs, arena: Arena, layout: RowLayout, out: StepIndices) -> None:
    """See `gapless.runner.prepare.prepare`. A position that no row has (a bug elsewhere) touches no row."""
    apply_updates(step, arena)
    tokens, seqs = step.input_ids.shape[0], step.rows.shape[0]
    block = min(128, max(32, triton.next_power_of_2(tokens)))
    token_programs = triton.cdiv(tokens, block)
    _prepare_kernel[(token_programs + triton.cdiv(seqs, block),)](
        step.header,
        step.rows,
        step.starts,
        step.query_start_loc,
        step.input_ids,
        step.carry,
        arena.token_table,
        arena.block_tables,
        out.input_ids,
        out.positions,
        out.slot_mapping,
        out.seq_lens,
        out.logits_index,
        out.sample_positions,
        tokens,
        seqs,
        token_programs,
        layout.max_model_len,
        layout.max_blocks,
        layout.table_words,
        out.slot_mapping.stride(0),
        GROUPS=layout.num_groups,
        BLOCK_SIZE=layout.block_size,
        SEARCH_STEPS=max(1, seqs.bit_length()),
        BLOCK=block,
        num_warps=block // 32,
    )
