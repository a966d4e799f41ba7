"""From a request's fields to `SamplingParams`, where a server must be stricter than a library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gapless.request.sampling_params import MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams
from gapless.server.errors import bad_request, plain
from gapless.server.protocol import Sampling

MAX_STOP = 16
"""Stop strings of one request."""
MAX_STOP_CHARACTERS = 256
"""Of one stop string."""
MAX_TEMPERATURE = 2.0
MAX_ENTRIES = {
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "allowed_token_ids": 1 << 19,
    "logit_bias": MAX_LOGIT_BIAS,
    "bad_words": MAX_BAD_WORDS,
}
"""Of lists and objects of one request."""
MAX_WORD_CHARACTERS = 1024
"""Of one of ``bad_words``."""
_PLAIN = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
    "speculative",
)
"""Fields that `SamplingParams` has under the same name."""


def sampling_params(request: Sampling, max_n: int, defaults: Mapping[str, float], **others: Any) -> SamplingParams:
    """What the engine is asked for.

    Args:
        request: whose fields are checked here where a server must be stricter than a library.
        max_n: completions of one prompt.
        defaults: of the model, where the request gives nothing.
        others: parameters with names of their own, such as ``max_tokens``.

    Raises:
        ApiError, RequestError: naming the field.
    """
    if request.temperature is not None and not 0 <= request.temperature <= MAX_TEMPERATURE:
        raise bad_request(
            f"temperature={request.temperature!r} is not allowed: a number from 0 to {MAX_TEMPERATURE}", "temperature"
        )
    if request.n is not None and not 1 <= request.n <= max_n:
        raise bad_request(f"n={request.n} is not allowed: an integer from 1 to {max_n}", "n")
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stop) > MAX_STOP:
        raise bad_request(f"stop has {len(stop)} strings; at most {MAX_STOP} are allowed", "stop")
    for text in stop:
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise bad_request(
                f"stop holds {plain(text)}: each string has 1 to {MAX_STOP_CHARACTERS} characters", "stop"
            )
    for name, most in MAX_ENTRIES.items():  # before any look at the entries
        if len(getattr(request, name) or ()) > most:
            raise bad_request(f"{name} has {len(getattr(request, name))} entries; at most {most} are allowed", name)
    for word in request.bad_words or ():
        if len(word) > MAX_WORD_CHARACTERS:
            raise bad_request(
                f"bad_words holds a text of {len(word)} characters; at most {MAX_WORD_CHARACTERS} are allowed",
                "bad_words",
            )
    if request.stream_options is not None and not request.stream:
        raise bad_request("Stream options can only be defined when `stream=True`.", "stream_options")
    if request.stream_interval is not None and not 1 <= request.stream_interval <= 1024:
        raise bad_request(
            f"stream_interval={request.stream_interval} is not allowed: an integer from 1 to 1024", "stream_interval"
        )
    options: dict[str, Any] = dict(defaults)
    options |= {name: value for name in _PLAIN if (value := getattr(request, name)) is not None}
    return SamplingParams(**{**options, **{name: value for name, value in others.items() if value is not None}})
