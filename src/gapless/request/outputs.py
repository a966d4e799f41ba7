"""What comes back to the user. Plain data."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class FinishReason(enum.Enum):
    """Why a request ended. ``value`` is the string that users see."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request in seconds of ``time.monotonic()``; None until it happened.

    ``cached_tokens``: of the prompt, that the prefix cache held for each of its completions; known at their end.
    """

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    cached_tokens: int | None = None


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token at one position.

    Attributes:
        rank: how many tokens of the vocabulary are at least as likely; 1 is the most likely one.
        decoded_token: the token's text; None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One completion.

    Attributes:
        stop_reason: the stop string or token id that ended it, None for the model's own end.
        logprobs: for each of ``token_ids``, by token id: the chosen token first, then the most likely ones.
        cumulative_logprob: sum over all chosen tokens so far.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None

    @property
    def finished(self) -> bool:
        """True once the completion has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """What a request has produced so far, or in all when ``finished``.

    ``prompt_logprobs`` has an entry per token of the prompt, None for the first one; it is None until it is complete,
    and with output kind delta in all outputs but one.

    ``weight_version`` says which weights drew the newest token, ``first_weight_version`` which ones the oldest work
    that it rests on came from; see `LLM.update_weights`. With several completions they span all of them.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    weight_version: int = 0
    first_weight_version: int = 0
