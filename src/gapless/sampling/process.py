"""Logits as a request wants them changed, in plain torch and NumPy: the definition of truth, and what the CPU uses.

In the order of vLLM's sampler (``vllm/v1/sample/sampler.py``), with x the logits in float32, prompt and output the
tokens [0, prompt_len) and [prompt_len, position) of the row in the token table, the token in flight among them:

    allowed_token_ids    x[i] = -inf for all other i
    bad_words            x[w[-1]] = -inf for each sequence w whose w[:-1] the output ends with
    logit_bias           x[i] += bias[i]
    repetition_penalty   x[i] = x[i] / r if x[i] > 0 else x[i] * r, for i in prompt or output (Keskar et al., 2019)
    frequency_penalty    x[i] -= f * count of i in output
    presence_penalty     x[i] -= p for i in output (both as OpenAI's API defines them)

A NaN stays one, or a mask would hide that the row is broken.

Shape legend: S rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from gapless.batch.arena import arena_views
from gapless.batch.plan import SeqFlag
from gapless.batch.row_layout import I32, RowLayout
from gapless.batch.row_params import BAD_WORDS_WIDTH, Word
from gapless.request.sampling_params import MAX_BAD_WORDS, MAX_LOGIT_BIAS


def process(
    logits: torch.Tensor,
    arena: torch.Tensor,
    layout: RowLayout,
    rows: torch.Tensor,
    positions: torch.Tensor,
    sample_flags: torch.Tensor,
) -> torch.Tensor:
    """float32 ``[S, V]``; for the arguments see `gapless.sampling.reference.sample_and_store`. Runs on a CPU only."""
    x = logits.to(torch.float32, copy=True)
    words: I32 = arena.numpy()
    params: I32 = arena_views(arena, layout).params.numpy()
    flagged = zip(rows.tolist(), positions.tolist(), sample_flags.tolist(), strict=True)  # sync-ok: on a CPU only
    for s, (row, position, flag) in enumerate(flagged):
        if int(flag) & SeqFlag.DRAWS and params[row, Word.PROCESS] and position <= layout.max_model_len:
            table = words[row * layout.max_model_len :][:position]
            x[s] = torch.where(x[s].isnan(), x[s], _process_row(x[s], words, layout, row, params[row], table))
    return x


def _process_row(
    x: torch.Tensor, words: I32, layout: RowLayout, row: int, params: I32, table: I32
) -> torch.Tensor:
    floats, vocab = params.view(np.float32), len(x)
    output = table[params[Word.PROMPT_LEN] :]
    if params[Word.ALLOWED_ONLY]:
        mask = words[layout.allowed_at + row * layout.mask_words :][: layout.mask_words]
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab]
        x = x.masked_fill(torch.from_numpy(bits == 0), -torch.inf)
    for word in _bad_words(words, layout, row, int(params[Word.NUM_BAD_WORDS])):
        before = word[:-1]
        if len(before) <= len(output) and np.array_equal(before, output[len(output) - len(before) :]):
            x[int(word[-1])] = -torch.inf
    n, at = int(params[Word.NUM_BIAS]), layout.bias_at + row * 2 * MAX_LOGIT_BIAS
    if n:
        ids, bias = (torch.from_numpy(words[first : first + n]) for first in (at, at + MAX_LOGIT_BIAS))
        x[ids.long()] += bias.view(torch.float32)
    if floats[Word.REPETITION] != 1:
        seen = torch.from_numpy(np.bincount(table[table >= 0], minlength=vocab)[:vocab] > 0)
        penalty = float(floats[Word.REPETITION])
        x = torch.where(seen, torch.where(x > 0, x / penalty, x * penalty), x)
    if floats[Word.FREQUENCY] or floats[Word.PRESENCE]:
        count = torch.from_numpy(np.bincount(output, minlength=vocab)[:vocab])
        x = x - float(floats[Word.FREQUENCY]) * count.float() - float(floats[Word.PRESENCE]) * (count > 0)
    return x


def _bad_words(words: I32, layout: RowLayout, row: int, count: int) -> list[I32]:
    at = layout.bad_words_at + row * BAD_WORDS_WIDTH
    ends, tokens = words[at : at + count + 1], words[at + MAX_BAD_WORDS + 1 :]
    return [tokens[ends[i] : ends[i + 1]] for i in range(count)]
