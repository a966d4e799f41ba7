"""What a request's parameters say about single tokens, against the model's vocabulary."""

from __future__ import annotations

from typing import Any

from gapless.errors import RequestError
from gapless.request.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, SamplingParams


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Refuse ids that the model does not have.

    Raises:
        RequestError: naming the parameter and the id.
    """
    named = {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": params.logit_bias or (),
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words": [t for word in params.bad_words if not isinstance(word, str) for t in word],
    }
    for name, ids in named.items():
        for token in ids:
            if token >= vocab_size:
                raise RequestError(f"{name} holds {token}; the model's vocabulary has the ids 0 to {vocab_size - 1}")
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and count > vocab_size:
            raise RequestError(f"{name}={count} is more than the vocabulary of {vocab_size} tokens")


def bad_word_ids(params: SamplingParams, tokenizer: Any, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """``bad_words`` as token ids: a string without and, where that is one other first token, with a leading space.

    As vLLM's ``SamplingParams.update_from_tokenizer``.

    Raises:
        RequestError: a string without a tokenizer, or too many of them.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        if not isinstance(word, str):
            found[tuple(word)] = None
            continue
        if tokenizer is None:
            raise RequestError(f"bad_words holds {word!r}, which needs a tokenizer, and there is none: give token ids")
        texts = (word.lstrip(), " " + word.lstrip())
        try:
            bare, spaced = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        except (TypeError, ValueError) as error:  # half a surrogate pair, say
            raise RequestError(f"bad_words holds {word!r}, which the tokenizer refuses: {error}") from error
        if not bare or max(bare) >= vocab_size:
            raise RequestError(f"bad_words holds {word!r}, of which the tokenizer makes the ids {list(bare)}")
        found[bare] = None
        if spaced and spaced[0] != bare[0] and len(spaced) == len(bare):
            found[spaced] = None
    total = sum(map(len, found))
    if len(found) > MAX_BAD_WORDS or total > MAX_BAD_WORD_TOKENS:
        raise RequestError(
            f"bad_words makes {len(found)} sequences of {total} tokens together; at most {MAX_BAD_WORDS} of "
            f"{MAX_BAD_WORD_TOKENS} are allowed"
        )
    return tuple(found)
