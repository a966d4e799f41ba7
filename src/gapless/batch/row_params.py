"""What a new request brings to its row on the device, besides tokens and blocks, as changes of the arena.

All of it is written once, in the step that starts the request; `RowLayout.request_words` bounds it, and a step's
updates have room for several such requests. Pure functions; no torch.
"""

from __future__ import annotations

import numpy as np

from gapless.batch.plan import Feature
from gapless.batch.row_layout import BAD_WORDS_WIDTH, I32, RowLayout, Word
from gapless.request.request import Request
from gapless.request.sampling_params import MAX_BAD_WORDS, MAX_LOGIT_BIAS, SamplingParams


def processes(request: Request) -> bool:
    """Whether its logits are changed before a token is chosen."""
    p = request.params
    penalties = p.presence_penalty != 0 or p.frequency_penalty != 0 or p.repetition_penalty != 1
    return bool(penalties or p.logit_bias or request.bad_words or restricts(request))


def restricts(request: Request) -> bool:
    """Whether a mask over the vocabulary says which tokens can be chosen."""
    return request.params.allowed_token_ids is not None or request.grammar is not None


def needs_prompt_on_device(request: Request) -> bool:
    """Whether the sampler reads its prompt in the token table, so that a prefix hit must bring the tokens along."""
    return request.params.repetition_penalty != 1


def row_features(request: Request) -> Feature:
    """What the sampler must be able to do for this request, MIN_TOKENS left to the step."""
    params, features = request.params, Feature.GREEDY
    if params.temperature > 0:
        features |= Feature.SAMPLE
        if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
            features |= Feature.FILTER
    if processes(request):
        features |= Feature.PROCESS
    if params.logprobs is not None:
        features |= Feature.LOGPROBS
    return features


def request_updates(request: Request, layout: RowLayout, row: int) -> I32:
    """Changes ``[n, 2]`` that bring everything that ``request`` asks of the sampler to its row."""
    params = request.params
    parts = [changes(layout.params_at + row * int(Word.COUNT), _param_words(request))]
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


def _param_words(request: Request) -> I32:
    params, stops = request.params, request.stop_token_ids
    words = np.zeros(int(Word.STOP_IDS) + len(stops), np.int32)
    floats = words.view(np.float32)
    floats[Word.TEMPERATURE] = params.temperature
    words[Word.TOP_K] = min(max(params.top_k, 0), np.iinfo(np.int32).max)  # beyond any vocabulary: no limit
    floats[Word.TOP_P] = params.top_p
    floats[Word.MIN_P] = params.min_p
    words[Word.SEED_LOW : Word.SEED_HIGH + 1] = np.array([request.seed], np.uint64).view(np.int32)
    words[Word.PROMPT_LEN] = len(request.prompt_token_ids)
    words[Word.MIN_END] = words[Word.PROMPT_LEN] + params.min_tokens
    floats[Word.PRESENCE] = params.presence_penalty
    floats[Word.FREQUENCY] = params.frequency_penalty
    floats[Word.REPETITION] = params.repetition_penalty
    words[Word.NUM_BIAS] = len(params.logit_bias or ())
    words[Word.NUM_BAD_WORDS] = len(request.bad_words)
    words[Word.ALLOWED_ONLY] = restricts(request)
    words[Word.PROCESS] = processes(request)
    words[Word.NUM_LOGPROBS] = 0 if params.logprobs is None else params.logprobs + 1
    words[Word.NUM_PROMPT_LOGPROBS] = 0 if request.prompt_logprobs is None else request.prompt_logprobs + 1
    words[Word.LORA] = 0 if request.lora is None else request.lora.slot
    words[Word.NUM_STOP] = len(stops)
    words[Word.LIMIT] = words[Word.PROMPT_LEN] + request.max_tokens
    words[Word.STOP_IDS :] = stops
    return words
