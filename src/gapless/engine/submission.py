"""A prompt with its parameters, and the requests that it becomes: one for each completion, checked.

On the caller's thread, so that a bad one is an exception at the call and never comes near the loop.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gapless.config import EngineConfig
from gapless.engine.service import EngineService
from gapless.errors import RequestError
from gapless.request.outputs import RequestOutput
from gapless.request.request import LoraRef, Request, cache_key, check_priority
from gapless.request.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from gapless.text.chat import EncodedPrompt
from gapless.text.completion import TakeText
from gapless.text.outputs import OutputMode
from gapless.text.vocabulary import bad_word_ids, check_vocabulary

_SEED_MASK = 2**64 - 1
_SEED_STEP = 0x9E3779B97F4A7C15  # the golden ratio in 64 bits: far from any small seed


@dataclass(frozen=True, slots=True)
class Submission:
    """One prompt, ready to go."""

    prompt: EncodedPrompt
    params: SamplingParams
    on_output: Callable[[RequestOutput], None]
    on_error: Callable[[BaseException], None]
    mode: OutputMode = "final"
    request_id: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    lora: str | None = None  # name of a loaded adapter
    on_text: TakeText | None = None  # see `RequestGroup`


class RequestMaker:
    """See the module.

    Args:
        service: who will run them.
        config: of the engine.
        tokenizer: or None.
    """

    def __init__(self, service: EngineService, config: EngineConfig, tokenizer: Any) -> None:
        self._service, self._config, self._tokenizer = service, config, tokenizer
        self._ids = itertools.count()

    def make(self, submission: Submission, lora: LoraRef | None) -> list[Request]:
        """One request for each completion.

        Raises:
            RequestError: naming the field and what is wrong with it.
        """
        service = self._service
        params, ids, embeds = submission.params, submission.prompt.token_ids, submission.prompt.embeds
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params of type {type(params).__name__} is not allowed: a SamplingParams is")
        if submission.request_id is not None and not isinstance(submission.request_id, str):
            raise RequestError(f"request_id={submission.request_id!r} is not allowed: a string, or None")
        if params.speculative and self._config.speculative is None:
            raise RequestError(
                "speculative=True is not allowed: this engine makes no drafts. Leave it out, or make the engine with "
                "speculative='ngram' or another SpeculativeConfig"
            )
        if embeds is not None:
            if params.prompt_logprobs is not None:
                raise RequestError(
                    f"prompt_logprobs={params.prompt_logprobs} is not allowed for a prompt with prompt_embeds: its "
                    "tokens have no ids. Leave it out"
                )
            ids = embeds.over(ids)
        max_tokens = params.max_tokens
        if max_tokens is None:
            max_tokens = max(service.longest - len(ids), 1)
            if params.min_tokens > max_tokens:
                raise RequestError(f"min_tokens={params.min_tokens} is more than the {max_tokens} that still fit")
        service.refuse_what_never_fits(len(ids), max_tokens)
        check_vocabulary(params, service.vocab_size)
        bad_words = bad_word_ids(params, self._tokenizer, service.vocab_size)
        stops = dict.fromkeys(params.stop_token_ids)
        if not params.ignore_eos:
            stops.update(dict.fromkeys(service.eos_token_ids))
        if len(stops) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                f"{len(stops)} ids would end this request, the model's own included; at most {MAX_STOP_TOKEN_IDS} can"
            )
        priority = check_priority(submission.priority)
        key = cache_key(submission.cache_salt, 0 if lora is None else lora.id)
        grammars: list[Any] = [None] * params.n
        if params.structured_outputs is not None:
            grammars = list(service.grammars(params, tuple(stops), params.n))
        numbers = [next(self._ids) for _ in range(params.n)]
        base = self.derived_seed(numbers[0]) if params.seed is None else params.seed
        return [
            Request(
                id=number,
                prompt_token_ids=ids,
                params=params,
                max_tokens=max_tokens,
                stop_token_ids=tuple(stops),
                seed=(base + i * _SEED_STEP) & _SEED_MASK,
                streaming=False,
                arrival=time.monotonic(),
                bad_words=bad_words,
                prompt_logprobs=None if i else params.prompt_logprobs,
                priority=priority,
                cache_key=key,
                grammar=grammars[i],
                lora=lora,
                embeds=embeds,
            )
            for i, number in enumerate(numbers)
        ]

    def derived_seed(self, number: int) -> int:
        """The seed of request ``number`` of this engine if it brings none."""
        digest = hashlib.blake2b(f"{self._config.seed}:{number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")
