"""What a user asks for and what comes back. Plain data; no torch; importable in a few milliseconds.

Names are those that vLLM's users know. Every parameter is honoured or refused, never ignored.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from gapless.errors import RequestError, did_you_mean

MAX_STOP_TOKEN_IDS = 32
"""Ends by token that one request may have, end-of-sequence ids included (they are masked on the device)."""


class FinishReason(enum.Enum):
    """Why a request ended. ``value`` is the string that users see."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


def _refuse(name: str, value: object, allowed: str) -> RequestError:
    return RequestError(f"{name}={value!r} is not allowed: {allowed}")


def _number(name: str, value: object, low: float, high: float, allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _refuse(name, value, allowed)
    if math.isnan(value) or not low <= value <= high:
        raise _refuse(name, value, allowed)


def _integer(name: str, value: object, low: int, allowed: str, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise _refuse(name, value, allowed)
    if value < low or (high is not None and value > high):
        raise _refuse(name, value, allowed)


def _items(name: str, value: Any, allowed: str) -> Sequence[Any]:
    if not isinstance(value, Sequence):
        raise _refuse(name, value, allowed)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Attributes:
        n: completions of the same prompt.
        temperature: 0 takes the most likely token; logits are divided by it otherwise.
        top_k: keep the k most likely tokens (ties with the k-th are kept); 0 or -1 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches it, in (0, 1].
        min_p: drop tokens less likely than ``min_p`` times the most likely one, in [0, 1].
        seed: with the token's position the only source of randomness. None: derived from the engine's seed.
        max_tokens: upper bound of new tokens. None: as many as fit ``max_model_len``.
        min_tokens: before that many new tokens no end-of-sequence or stop token can be drawn, no stop string matches.
        stop: strings that end the text; they are cut off it.
        stop_token_ids: ids that end the request, besides the model's end-of-sequence ids.
        ignore_eos: the model's own end-of-sequence ids do not end the request.
        skip_special_tokens: leave special tokens out of the text.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, "an integer >= 1")
        _number("temperature", self.temperature, 0.0, 1e4, "a number from 0 (greedy) to 10000")
        _integer("top_k", self.top_k, -1, "an integer >= 1, or 0 or -1 for no limit")
        _number("top_p", self.top_p, 1e-12, 1.0, "a number in (0, 1]")
        _number("min_p", self.min_p, 0.0, 1.0, "a number in [0, 1]")
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), "an integer of 64 bits, or None", 2**64 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, "an integer >= 1, or None for as many as fit")
        _integer("min_tokens", self.min_tokens, 0, "an integer >= 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refuse("min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        allowed = "a string or a list of strings, none of them empty"
        for s in _items("stop", stop, allowed):
            if not isinstance(s, str) or not s:
                raise _refuse("stop", self.stop, allowed)
        object.__setattr__(self, "stop", tuple(stop))
        allowed = "a list of token ids, each an integer >= 0"
        for t in _items("stop_token_ids", self.stop_token_ids, allowed):
            _integer("stop_token_ids", t, 0, allowed)
        object.__setattr__(self, "stop_token_ids", tuple(int(t) for t in self.stop_token_ids))
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _refuse(name, getattr(self, name), "True or False")

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> SamplingParams:
        """Parameters from plain data.

        Raises:
            RequestError: an unknown name (with the nearest known one) or a value out of range.
        """
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise RequestError(
                    f"unknown sampling parameter {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}"
                )
        return cls(**options)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple, whatever form it was given in."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


@dataclass(slots=True)
class Request:
    """One sequence to generate, as the engine sees it. ``n`` completions are ``n`` of these.

    Attributes:
        id: unique in the engine for ever; given by the engine, never by a client.
        prompt_token_ids: int32 ``[prompt_len]``, at least one.
        max_tokens: the bound that admission settled on; prompt and new tokens fit ``max_model_len``.
        stop_token_ids: every id that ends the request, the model's own included unless they are ignored.
        seed: 64 bits.
        streaming: the output side wants each token, not the finished sequence only.
        block_hashes: the scheduler's memory of the hash chain of its full blocks.
    """

    id: int
    prompt_token_ids: npt.NDArray[np.int32]
    params: SamplingParams
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int
    streaming: bool
    arrival: float = 0.0
    block_hashes: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request in seconds of ``time.monotonic()``; None until it happened."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class CompletionOutput:
    """One completion. ``stop_reason`` is the stop string or token id that ended it, None for the model's own end."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        """True once the completion has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """What a request has produced so far, or in all when ``finished``."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics | None = None
