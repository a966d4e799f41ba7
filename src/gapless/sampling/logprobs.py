"""Log-probabilities of the chosen and of the most likely tokens, in plain torch.

Raw: log_softmax of the logits as the model gave them. Processed: of what the token was drawn from, that is after
everything in `gapless.sampling.process`, masked stop tokens, temperature (greedy rows: none) and filters, where a token
that was dropped has -inf. A rank is the number of tokens at least as likely. Of equally likely ones the lowest id comes
first.

Shape legend: S rows, V vocabulary.
"""

from __future__ import annotations

import torch

from gapless.batch.row_layout import Record
from gapless.request.sampling_params import MAX_LOGPROBS


def write_records(x: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor, out: torch.Tensor) -> None:
    """Fill the records of rows that ask.

    Args:
        x: float32 ``[S, V]``, logits up to a constant per row.
        tokens: int32 ``[S]``, chosen; a row with a negative one has no record.
        counts: int32 ``[S]``, `Word.NUM_LOGPROBS` of each row, 0 for rows that get no token.
        out: int32 ``[S, Record.COUNT]``, written where ``counts`` is positive: the rest means nothing.
    """
    vocab = x.shape[1]
    k = min(MAX_LOGPROBS, vocab)
    logprobs = x.log_softmax(-1)
    token = tokens.long().clamp_min(0)[:, None]
    chosen = logprobs.gather(1, token)
    rank = (logprobs >= chosen).sum(-1, dtype=torch.int32)
    top = logprobs.sort(stable=True, dim=-1, descending=True) if vocab <= 4096 else _top(logprobs, k)
    record = torch.zeros_like(out)
    record[:, Record.LOGPROB] = chosen[:, 0].contiguous().view(torch.int32)
    record[:, Record.RANK] = rank
    record[:, Record.IDS : Record.IDS + k] = top[1][:, :k].int()
    record[:, Record.LOGPROBS : Record.LOGPROBS + k] = top[0][:, :k].contiguous().view(torch.int32)
    out.copy_(torch.where(((counts > 0) & (tokens >= 0))[:, None], record, out))


def _top(logprobs: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest, equal ones in rising order of ids: all of those above the k-th, then the first of its equals."""
    least = logprobs.topk(k, -1).values[:, -1:]
    ids = torch.arange(logprobs.shape[1], device=logprobs.device).expand_as(logprobs)
    inside = torch.where(logprobs > least, ids - logprobs.shape[1], torch.where(logprobs == least, ids, 2**40))
    chosen = inside.topk(k, -1, largest=False).values.remainder(logprobs.shape[1]).sort(-1).values
    values, order = logprobs.gather(1, chosen).sort(stable=True, dim=-1, descending=True)
    return values, chosen.gather(1, order)
