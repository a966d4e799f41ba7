"""The part of the Triton sampler that draws under top-k, top-p and min-p, without a sort.

A filter is a logit threshold. The maxima of groups of 64 logits bound it from below, so that only the
groups above this bound, few for any peaked distribution, are searched: in four parts per pass, over the
bits of the logits.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from gapless.batch.row_params import Word
from gapless.request.sampling_params import MAX_STOP_TOKEN_IDS

GROUP = tl.constexpr(64)
_TILE = tl.constexpr(64)  # groups that are searched at a time
_MIN_END, _NUM_STOP = tl.constexpr(int(Word.MIN_END)), tl.constexpr(int(Word.NUM_STOP))
_STOP_IDS, _MAX_STOP = tl.constexpr(int(Word.STOP_IDS)), tl.constexpr(MAX_STOP_TOKEN_IDS)
LOWEST = tl.constexpr(-0x7F800001)  # float_key(-inf)
_TAIL = tl.constexpr(40.0)  # exp(-40) times any vocabulary is less than 2**-24, the least that a top-p drops


@triton.jit
def weigh(x, top, temperature):
    return tl.exp((x - top) / temperature)


@triton.jit
def count_masked(row_ptr, position, MIN_TOKENS: tl.constexpr):
    """How many of the row's stop ids are masked at this position."""
    count = 0
    if MIN_TOKENS:  # noqa: SIM102
        if position < tl.load(row_ptr + _MIN_END):
            count = tl.minimum(tl.load(row_ptr + _NUM_STOP), _MAX_STOP)
    return count


@triton.jit
def mask_stop_tokens(x, ids, row_ptr, num_masked, MIN_TOKENS: tl.constexpr):
    if MIN_TOKENS:
        for i in range(num_masked):
            x = tl.where(ids == tl.load(row_ptr + _STOP_IDS + i), -float("inf"), x)
    return x


@triton.jit
def invert(weight, ids, before, target, vocab):
    """The first id whose cumulative weight exceeds ``target``, else vocab; and the last id of any weight."""
    weight = weight.to(tl.float64)
    rows = tl.sum(weight, 1)
    above = tl.cumsum(rows, 0) - rows
    hit = (weight > 0) & (before + above[:, None] + tl.cumsum(weight, 1) > target)
    first = tl.min(tl.min(tl.where(hit, ids, vocab), 1), 0)
    return first, tl.max(tl.max(tl.where(weight > 0, ids, -1), 1), 0)


@triton.jit
def float_key(x):
    """Floats as int32 in the same order; both zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _quarter(low, high, f1, f2, f3, target):
    """The part of [low, high) in which a falling function, known at three points, crosses ``target``."""
    step = high - low
    m1, m2, m3 = low + step // 4, low + step // 2, low + 3 * step // 4
    new_low = tl.where(f3 >= target, m3, tl.where(f2 >= target, m2, tl.where(f1 >= target, m1, low)))
    new_high = tl.where(f3 >= target, high, tl.where(f2 >= target, m3, tl.where(f1 >= target, m2, m1)))
    return new_low, new_high


@triton.jit
def _search_groups(key, value, low, high, target):
    """The largest t in [low, high) such that the values of all keys >= t add up to ``target``, or low."""
    while high - low > 1:
        step = high - low
        f1 = tl.sum(tl.where(key >= (low + step // 4).to(tl.int32), value, 0.0), 0)
        f2 = tl.sum(tl.where(key >= (low + step // 2).to(tl.int32), value, 0.0), 0)
        f3 = tl.sum(tl.where(key >= (low + 3 * step // 4).to(tl.int32), value, 0.0), 0)
        low, high = _quarter(low, high, f1, f2, f3, target)
    return low


@triton.jit
def _tile(logits_ptr, list_ptr, i, num_listed, vocab, row_ptr, num_masked, MIN_TOKENS: tl.constexpr):
    """Ids and logits of the listed groups i, i + 1, ... as [_TILE, GROUP]; -inf where there is none."""
    place = i + tl.arange(0, _TILE)
    group = tl.load(list_ptr + place, mask=place < num_listed, other=0)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = (place < num_listed)[:, None] & (ids < vocab)
    x = tl.load(logits_ptr + ids, mask=inside, other=-float("inf")).to(tl.float32)
    return ids, mask_stop_tokens(x, ids, row_ptr, num_masked, MIN_TOKENS)


@triton.jit
def _search_list(
    logits_ptr,
    list_ptr,
    num_listed,
    vocab,
    row_ptr,
    num_masked,
    top,
    temperature,
    low,
    high,
    target,
    SHIFT: tl.constexpr,
    WEIGHTS: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
):
    """Like `_search_groups`, over all logits of the listed groups; each counts 1, or its weight."""
    while high - low > 1:
        step = high - low
        f1 = tl.zeros([_TILE], dtype=tl.float64)
        f2 = tl.zeros([_TILE], dtype=tl.float64)
        f3 = tl.zeros([_TILE], dtype=tl.float64)
        for i in range(0, num_listed, _TILE):
            _, x = _tile(logits_ptr, list_ptr, i, num_listed, vocab, row_ptr, num_masked, MIN_TOKENS)
            key = float_key(x) >> SHIFT
            value = weigh(x, top, temperature) if WEIGHTS else tl.where(x == x, 1.0, 0.0)
            f1 += tl.sum(tl.where(key >= (low + step // 4).to(tl.int32), value, 0.0), 1).to(tl.float64)
            f2 += tl.sum(tl.where(key >= (low + step // 2).to(tl.int32), value, 0.0), 1).to(tl.float64)
            f3 += tl.sum(tl.where(key >= (low + 3 * step // 4).to(tl.int32), value, 0.0), 1).to(tl.float64)
        low, high = _quarter(low, high, tl.sum(f1, 0), tl.sum(f2, 0), tl.sum(f3, 0), target)
    return low


@triton.jit
def _kept(x, top, temperature, low, min_p, SHIFT: tl.constexpr):
    weight = weigh(x, top, temperature)
    return tl.where(((float_key(x) >> SHIFT) >= low.to(tl.int32)) & (weight >= min_p), weight, 0.0)


@triton.jit
def _total(
    logits_ptr,
    list_ptr,
    num_listed,
    vocab,
    row_ptr,
    num_masked,
    top,
    temperature,
    low,
    min_p,
    SHIFT: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
):
    """The weight of all kept tokens of the listed groups."""
    total = tl.zeros([_TILE], dtype=tl.float64)
    for i in range(0, num_listed, _TILE):
        _, x = _tile(logits_ptr, list_ptr, i, num_listed, vocab, row_ptr, num_masked, MIN_TOKENS)
        total += tl.sum(_kept(x, top, temperature, low, min_p, SHIFT), 1).to(tl.float64)
    return tl.sum(total, 0)


@triton.jit
def draw_filtered(
    logits_ptr,
    group_max_ptr,
    list_ptr,
    vocab,
    row_ptr,
    num_masked,
    top,
    temperature,
    total,
    u,
    top_k,
    top_p,
    min_p,
    NG: tl.constexpr,
    NG_BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
):
    """The token, and the least key that the filters kept."""
    by_k = (top_k > 0) & (top_k < vocab)
    by_p = top_p < 1.0
    group = tl.arange(0, NG_BLOCK)
    group_max = tl.load(group_max_ptr + group, mask=group < NG, other=-float("inf"))
    group_key = float_key(group_max) >> SHIFT
    high = (float_key(top) >> SHIFT).to(tl.int64) + 1
    lowest = high * 0 + (LOWEST >> SHIFT)

    # A bound from below, met by the group maxima alone: k of them, or enough of their weight.
    if by_k:
        low = _search_groups(group_key, tl.where(group < NG, 1.0, 0.0), lowest, high, top_k.to(tl.float32))
    elif by_p:
        low = (float_key(top - _TAIL * temperature) >> SHIFT).to(tl.int64)
        enough = (top_p * total * 1.00001).to(tl.float32)
        low = _search_groups(group_key, weigh(group_max, top, temperature), low, high, enough)
    else:
        low = (float_key(top + (tl.log(min_p) * 1.001 - 0.001) * temperature) >> SHIFT).to(tl.int64) - 1
    listed = (group < NG) & (group_key >= low)
    num_listed = tl.sum(listed.to(tl.int32), 0)
    tl.store(list_ptr + tl.cumsum(listed.to(tl.int32), 0) - 1, group, mask=listed)
    tl.debug_barrier()

    if by_k:
        low = _search_list(
            logits_ptr,
            list_ptr,
            num_listed,
            vocab,
            row_ptr,
            num_masked,
            top,
            temperature,
            low,
            high,
            top_k.to(tl.float64),
            SHIFT,
            False,
            MIN_TOKENS,
        )
        total = _total(
            logits_ptr,
            list_ptr,
            num_listed,
            vocab,
            row_ptr,
            num_masked,
            top,
            temperature,
            low,
            0.0,
            SHIFT,
            MIN_TOKENS,
        )
    if by_p:
        low = _search_list(
            logits_ptr,
            list_ptr,
            num_listed,
            vocab,
            row_ptr,
            num_masked,
            top,
            temperature,
            low,
            high,
            top_p.to(tl.float64) * total,
            SHIFT,
            True,
            MIN_TOKENS,
        )
    total = _total(
        logits_ptr,
        list_ptr,
        num_listed,
        vocab,
        row_ptr,
        num_masked,
        top,
        temperature,
        low,
        min_p,
        SHIFT,
        MIN_TOKENS,
    )
    target = u * total
    before = total * 0.0
    token, last = vocab, 0
    for i in range(0, num_listed, _TILE):
        ids, x = _tile(logits_ptr, list_ptr, i, num_listed, vocab, row_ptr, num_masked, MIN_TOKENS)
        weight = _kept(x, top, temperature, low, min_p, SHIFT)
        here = tl.sum(tl.sum(weight, 1).to(tl.float64), 0)
        if (here > 0) & (token == vocab):
            found, positive = invert(weight, ids, before, target, vocab)
            token = tl.where(before + here > target, found, token)
            last = tl.maximum(last, positive)
        before += here
    return tl.where(token < vocab, token, last), low.to(tl.int32)
