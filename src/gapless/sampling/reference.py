"""Sampling in plain torch: the definition of truth, and what the CPU uses.

Every filter keeps the tokens at or above some logit, so the three of them are one threshold per row; a
token is then drawn by inverting the cumulative weights in the order of the vocabulary. Nothing here waits
for a device.

Shape legend: S rows, V vocabulary.
"""

from __future__ import annotations

import torch

from gapless.batch.arena import arena_views
from gapless.batch.plan import SeqFlag
from gapless.batch.row_layout import RowLayout
from gapless.batch.row_params import Feature, Word
from gapless.request.sampling_params import MAX_STOP_TOKEN_IDS
from gapless.sampling.logprobs import write_records
from gapless.sampling.philox import Purpose, uniform
from gapless.sampling.process import process

MIN_TEMPERATURE = 1e-20
"""Positive temperatures below it are raised to it: dividing by a denormal number is not portable."""

_CHUNK = 256
_CANDIDATES = 256
_NEGATIVE_INFINITY = float("-inf")


def sample(
    logits: torch.Tensor, params_words: torch.Tensor, positions: torch.Tensor, features: Feature
) -> torch.Tensor:
    """Choose one token per row.

    Args:
        logits: ``[S, V]``, any float dtype.
        params_words: int32 ``[S, Word.COUNT]``, each row's sampling parameters.
        positions: int64 ``[S]``, the position that the new token will take.
        features: what the rows need; a parameter whose feature is not set is not looked at.

    Returns:
        int32 ``[S]``: a token of positive probability, or -1 for a row with a NaN or without finite maximum.
    """
    return choose(logits, params_words, positions, features)[0]


def choose(
    logits: torch.Tensor, params_words: torch.Tensor, positions: torch.Tensor, features: Feature
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `sample`; also float32 ``[S, V]``, the logarithm of what was drawn from, up to a constant per row."""
    x = logits.float()
    invalid = None
    if features & Feature.MIN_TOKENS:
        invalid = x.amax(-1).isnan()  # the mask below must not hide a NaN
        x = _mask_stop_tokens(x, params_words, positions)
    top, token = x.max(-1)
    invalid = ~top.isfinite() if invalid is None else invalid | ~top.isfinite()
    if features & Feature.SAMPLE:
        temperature = _floats(params_words, Word.TEMPERATURE)
        scaled = (x - top[:, None]).div_(temperature.clamp_min(MIN_TEMPERATURE)[:, None])
        weights = torch.exp(scaled)
        if features & Feature.FILTER:
            weights = _filter(x, weights, top, params_words)
        u = uniform(
            params_words[:, Word.SEED_LOW], params_words[:, Word.SEED_HIGH], positions, Purpose.SAMPLE
        )
        token = torch.where(temperature > 0, draw(weights, u), token)
        if features & Feature.LOGPROBS:
            if features & Feature.FILTER:  # in other rows a weight of 0 is merely too small for a float
                dropped = (weights == 0) & _filtered(params_words, x.shape[1])[:, None]
                scaled = scaled.masked_fill(dropped, _NEGATIVE_INFINITY)
            x = torch.where((temperature > 0)[:, None], scaled, x)
    return torch.where(invalid, -1, token).int(), x


def sample_and_store(
    logits: torch.Tensor,
    arena: torch.Tensor,
    layout: RowLayout,
    rows: torch.Tensor,
    positions: torch.Tensor,
    sample_flags: torch.Tensor,
    features: Feature,
    out_tokens: torch.Tensor,
    out_records: torch.Tensor | None = None,
    *,
    processed_logprobs: bool = False,
) -> None:
    """The end of a step: choose tokens and write them into the output and into the token table.

    Args:
        logits: ``[S, V]``.
        arena: int32 ``[layout.num_words]``.
        layout: where the rows' words lie.
        rows: int32 ``[S]``, row of each sequence.
        positions: int64 ``[S]``, the position that the new token will take.
        sample_flags: ``[S]``, integer or bool, see `SeqFlag`; a sequence that does not draw gets no token. The record
            of one that scores is of the token which the table holds at ``positions``, always of the raw logits.
        features: what the rows need.
        out_tokens: int32 ``[S]``, written: the token, -1 for an invalid row, 0 where there is none.
        out_records: int32 ``[S, Record.COUNT]``, written for rows that ask, if the features name log-probabilities.
        processed_logprobs: of which logits, see `gapless.sampling.logprobs`.
    """
    index = rows.long()
    params = arena_views(arena, layout).params.index_select(0, index)
    flags = (sample_flags & SeqFlag.DRAWS) != 0
    x = logits
    if features & Feature.PROCESS:
        x = process(logits, arena, layout, rows, positions, sample_flags)
    token, drawn_from = choose(x, params, positions, features)
    if features & Feature.LOGPROBS and out_records is not None:
        scores = (sample_flags & SeqFlag.SCORES) != 0
        given = arena[(index * layout.max_model_len + positions).clamp(0, layout.block_tables_at - 1)]
        counts = torch.where(flags, params[:, Word.NUM_LOGPROBS], 0)
        counts = torch.where(scores, params[:, Word.NUM_PROMPT_LOGPROBS], counts)
        of = logits.float()
        if processed_logprobs:
            of = torch.where(scores[:, None], of, drawn_from)
        write_records(of, torch.where(scores, given, token), counts, out_records)
    out_tokens.copy_(torch.where(flags, token, 0))
    stored = flags & (token >= 0) & (positions >= 0) & (positions < layout.max_model_len)
    place = index * layout.max_model_len + positions
    place = torch.where(stored, place, layout.null_row * layout.max_model_len)
    arena.index_put_((place,), torch.where(stored, token, 0))


def draw(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Invert the cumulative weights, first over chunks of the vocabulary and then within one.

    Args:
        weights: float32 ``[S, V]``, not negative, at least one of each row positive.
        u: float64 ``[S]`` in [0, 1).

    Returns:
        int64 ``[S]``: the first token whose cumulative weight exceeds ``u`` times the sum; it has a weight.
    """
    vocab = weights.shape[1]
    whole = vocab // _CHUNK
    sums = weights[:, : whole * _CHUNK].view(-1, whole, _CHUNK).sum(-1) if whole else weights[:, :0]
    if vocab % _CHUNK:
        sums = torch.cat((sums, weights[:, whole * _CHUNK :].sum(-1, keepdim=True)), 1)
    cumulative = sums.double().cumsum(-1)
    target = u * cumulative[:, -1]
    chunk = (cumulative <= target[:, None]).sum(-1).clamp_max_(sums.shape[1] - 1)
    before = (cumulative - sums).gather(1, chunk[:, None])
    ids = chunk[:, None] * _CHUNK + torch.arange(_CHUNK, device=weights.device)
    inside = weights.gather(1, ids.clamp_max(vocab - 1)).double().masked_fill_(ids >= vocab, 0.0)
    positive = inside > 0
    hit = positive & (before + inside.cumsum(-1) > target[:, None])
    # Rounding may leave no hit in the chunk: its last positive token then.
    last = torch.where(positive, ids, 0).amax(-1)
    first = torch.where(hit, ids, vocab).amin(-1)
    return torch.where(first < vocab, first, last)


def _floats(params_words: torch.Tensor, word: Word) -> torch.Tensor:
    return params_words[:, word].contiguous().view(torch.float32)


def _mask_stop_tokens(x: torch.Tensor, params_words: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    ids = params_words[:, Word.STOP_IDS : Word.COUNT].long()
    place = torch.arange(MAX_STOP_TOKEN_IDS, device=x.device)
    masked = (place < params_words[:, Word.NUM_STOP, None]) & (ids >= 0) & (ids < x.shape[1])
    masked &= (positions < params_words[:, Word.MIN_END])[:, None]
    value = torch.where(masked, _NEGATIVE_INFINITY, -_NEGATIVE_INFINITY)  # the minimum with inf is no change
    return x.scatter_reduce(1, torch.where(masked, ids, 0), value, "amin")


def _filtered(params_words: torch.Tensor, vocab: int) -> torch.Tensor:
    """Bool ``[S]``: rows that have a filter."""
    by_p = (_floats(params_words, Word.TOP_P) < 1) | (_floats(params_words, Word.MIN_P) > 0)
    top_k = params_words[:, Word.TOP_K]
    return by_p | ((top_k > 0) & (top_k < vocab))


def _filter(
    x: torch.Tensor, weights: torch.Tensor, top: torch.Tensor, params_words: torch.Tensor
) -> torch.Tensor:
    """The weights with those of dropped tokens set to 0."""
    vocab = x.shape[1]
    top_k, top_p = params_words[:, Word.TOP_K], _floats(params_words, Word.TOP_P).double()
    top_k = torch.where((top_k > 0) & (top_k < vocab), top_k, 0)  # 0: not asked for
    if not _on_cpu(x):
        weights = _keep_by_bisection(x, weights, top, top_k, top_p)
    elif bool(((top_k > 0) | (top_p < 1)).any()):
        few = x.topk(min(vocab, _CANDIDATES), -1)
        kept, settled = _keep_by_candidates(x, weights, few.values, few.indices, top_k, top_p)
        if not settled:
            every = x.sort(-1, descending=True)
            kept, _ = _keep_by_candidates(x, weights, every.values, every.indices, top_k, top_p)
        weights = kept
    return torch.where(weights >= _floats(params_words, Word.MIN_P)[:, None], weights, 0.0)


def _on_cpu(x: torch.Tensor) -> bool:
    """There, looking at a value waits for nothing, and most rows need only their largest logits."""
    return x.device.type == "cpu"


def _keep(
    x: torch.Tensor, weights: torch.Tensor, asked: torch.Tensor, threshold: torch.Tensor
) -> torch.Tensor:
    threshold = torch.where(asked, threshold, _NEGATIVE_INFINITY)
    return torch.where(x >= threshold[:, None], weights, 0.0)


def _keep_by_candidates(
    x: torch.Tensor,
    weights: torch.Tensor,
    values: torch.Tensor,
    ids: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> tuple[torch.Tensor, bool]:
    """Top-k and top-p from the largest logits of each row, in falling order; and whether they were enough."""
    last = values.shape[1] - 1
    threshold = values.gather(1, (top_k.long() - 1).clamp(0, last)[:, None])[:, 0]
    kept = _keep(x, weights, top_k > 0, threshold)
    target = top_p * kept.sum(-1, dtype=torch.float64)
    place = (kept.gather(1, ids).cumsum(-1, dtype=torch.float64) < target[:, None]).sum(-1)
    settled = (top_k <= last + 1) & ((top_p >= 1) | (place <= last))
    threshold = values.gather(1, place.clamp_max(last)[:, None])[:, 0]
    return _keep(x, kept, top_p < 1, threshold), bool(settled.all())


def _keep_by_bisection(
    x: torch.Tensor, weights: torch.Tensor, top: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Top-k and top-p by operations that depend on no value."""
    threshold = _threshold(x, torch.ones_like(x), top_k.double(), top)
    kept = _keep(x, weights, top_k > 0, threshold)
    target = top_p * kept.sum(-1, dtype=torch.float64)
    return _keep(x, kept, top_p < 1, _threshold(x, kept, target, top))


def _threshold(
    x: torch.Tensor, weights: torch.Tensor, target: torch.Tensor, top: torch.Tensor
) -> torch.Tensor:
    """The largest t such that the weights of all x >= t reach ``target``: bisection over float bits.

    The integers that order like floats have 32 bits, so 32 halvings are exact.
    """
    low = _key(torch.full_like(top, _NEGATIVE_INFINITY))
    high = _key(top) + 1
    for _ in range(32):
        middle = (low + high) >> 1
        sums = torch.where(x >= _value(middle)[:, None], weights, 0.0).sum(-1, dtype=torch.float64)
        reached = sums >= target
        low, high = torch.where(reached, middle, low), torch.where(reached, high, middle)
    return _value(low)


def _key(x: torch.Tensor) -> torch.Tensor:
    """Floats as int64 in the same order."""
    bits = x.contiguous().view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()


def _value(key: torch.Tensor) -> torch.Tensor:
    bits = key.int()
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32)
