"""A row's sampling parameters: the place, the value and the cost of each, in one file.

    place    `Word`, which the kernels read as ``params[row, Word.X]``
    value    `param_words`, from the request; the scheduler sends it once, when the request starts
    cost     `row_features`: what the sampler must be able to do for it, and so which graph of it is replayed

A further parameter is a word, its value, and a feature if it costs something. What rarer parameters need beyond a few
words has sections of its own, see `gapless.batch.row_layout.RowLayout` and `gapless.batch.row_updates`. No torch.
"""

from __future__ import annotations

import enum
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from gapless.request.request import Request
from gapless.request.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_STOP_TOKEN_IDS

BAD_WORDS_WIDTH = MAX_BAD_WORDS + 1 + MAX_BAD_WORD_TOKENS
"""Words of one row's bad words: offsets, then tokens."""


class Word(enum.IntEnum):
    """Places of one row's sampling parameters, in 32-bit words. F: the word holds a float's bits."""

    TEMPERATURE = 0  # F, 0 is greedy
    TOP_K = 1  # 0 keeps all
    TOP_P = 2  # F
    MIN_P = 3  # F
    SEED_LOW = 4
    SEED_HIGH = 5
    MIN_END = 6  # the first position that a stop token may take
    NUM_STOP = 7
    PROMPT_LEN = 8
    PRESENCE = 9  # F
    FREQUENCY = 10  # F
    REPETITION = 11  # F
    NUM_BIAS = 12  # entries of the row's `RowLayout.bias_at`
    NUM_BAD_WORDS = 13  # entries of the row's `RowLayout.bad_words_at`
    ALLOWED_ONLY = 14  # 1: only what `RowLayout.allowed_at` marks
    PROCESS = 15  # 1: any of the seven words before this one asks for something
    NUM_LOGPROBS = 16  # 0: none; k + 1: of the chosen token and the k most likely ones
    NUM_PROMPT_LOGPROBS = 17  # the same for tokens of the prompt
    LORA = 18  # slot of the row's adapter, 0 for none; read by the forward half
    LIMIT = 19  # the first position that no token may take
    LENGTH = 20  # tokens that exist; written by steps with drafts (see `StepPlan.width`), and true after one
    NUM_DRAFTS = 21  # drafts at the positions from the row's length on; written by the proposer
    STOP_IDS = 22  # MAX_STOP_TOKEN_IDS words
    COUNT = 22 + MAX_STOP_TOKEN_IDS


def param_words(request: Request) -> npt.NDArray[np.int32]:
    """Values of the words, up to the last stop token."""
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


class Feature(enum.IntFlag):
    """What the sample half of a step must be able to do. See `COMBINATIONS` for what is captured."""

    GREEDY = 0
    SAMPLE = 1  # at least one row draws
    FILTER = 2  # at least one row has top-k, top-p or min-p
    MIN_TOKENS = 4  # at least one row masks its stop tokens
    PROCESS = 8  # at least one row has penalties, a bias, bad words or allowed ids
    LOGPROBS = 16  # at least one row wants log-probabilities


_ALL_DRAWS = Feature.SAMPLE | Feature.FILTER | Feature.MIN_TOKENS

COMBINATIONS = (
    *(
        draw | mask
        for draw in (Feature.GREEDY, Feature.SAMPLE, Feature.SAMPLE | Feature.FILTER)
        for mask in (Feature.GREEDY, Feature.MIN_TOKENS)
    ),
    _ALL_DRAWS | Feature.LOGPROBS,
    _ALL_DRAWS | Feature.LOGPROBS | Feature.PROCESS,
)
"""Sets of features that have a graph, from the cheapest to the one that can do everything. Each further one costs a
capture per width and slot, so that the rarer features come with everything that a batch may also need; rows that do
not ask for them skip their work."""


@lru_cache(maxsize=64)
def covering(features: Feature) -> Feature:
    """The cheapest of `COMBINATIONS` that can do what ``features`` name."""
    return next(c for c in COMBINATIONS if c & features == features)


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
