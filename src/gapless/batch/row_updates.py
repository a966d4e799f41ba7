"""What a new request brings to its row on the device, besides tokens and blocks, as changes of the arena.

All of it is written once, in the step that starts the request; `RowLayout.request_words` bounds it, and a step's
updates have room for several such requests. Pure functions; no torch.
"""

from __future__ import annotations

import numpy as np

from gapless.batch.row_layout import I32, RowLayout
from gapless.batch.row_params import BAD_WORDS_WIDTH, Word, param_words
from gapless.request.request import Request
from gapless.request.sampling_params import MAX_BAD_WORDS, MAX_LOGIT_BIAS, SamplingParams


def request_updates(request: Request, layout: RowLayout, row: int) -> I32:
    """Changes ``[n, 2]`` that bring everything that ``request`` asks of the sampler to its row."""
    params = request.params
    parts = [changes(layout.params_at + row * int(Word.COUNT), param_words(request))]
    if params.logit_bias:
        at = layout.bias_at + row * 2 * MAX_LOGIT_BIAS
        parts.append(changes(at, np.array(list(params.logit_bias), np.int32)))
        biases = np.array(list(params.logit_bias.values()), np.float32)
        parts.append(changes(at + MAX_LOGIT_BIAS, biases.view(np.int32)))
    if request.bad_words:
        at = layout.bad_words_at + row * BAD_WORDS_WIDTH
        ends = np.cumsum([0, *map(len, request.bad_words)])
        parts.append(changes(at, ends.astype(np.int32)))
        parts.append(changes(at + MAX_BAD_WORDS + 1, np.concatenate(request.bad_words).astype(np.int32)))
    if params.allowed_token_ids is not None and request.grammar is None:  # its masks come step by step, with these
        parts.append(changes(layout.allowed_at + row * layout.mask_words, allowed_mask(params, layout)))
    return np.concatenate(parts)


def allowed_mask(params: SamplingParams, layout: RowLayout) -> I32:
    """``allowed_token_ids`` as bits ``[mask_words]``; see `RowLayout`."""
    bits = np.zeros(32 * layout.mask_words, np.bool_)
    bits[list(params.allowed_token_ids or ())] = True
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32).view(np.int32)


def changes(first: int, words: I32) -> I32:
    """Changes ``[n, 2]`` that put ``words [n]`` into the arena from the word ``first`` on."""
    found = np.empty((len(words), 2), np.int32)
    found[:, 0] = np.arange(first, first + len(words))
    found[:, 1] = words
    return found
