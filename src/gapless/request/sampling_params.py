"""SamplingParams: how the tokens of a request are chosen and when it ends. Plain data, importable in a few
milliseconds.

Names are those that vLLM's users know. Every parameter is honoured or refused, never ignored.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from gapless.errors import RequestError, did_you_mean
from gapless.request import checks
from gapless.request.checks import check_integer, check_number, refuse
from gapless.request.structured import StructuredOutputsParams, structured_outputs

MAX_STOP_TOKEN_IDS = 32
"""Ends by token that one request may have, end-of-sequence ids included (they are masked on the device)."""

MAX_LOGIT_BIAS = 1024
"""Ids that ``logit_bias`` of one request may name."""

MAX_BAD_WORDS = 128
"""Sequences of tokens that ``bad_words`` of one request may make."""

MAX_BAD_WORD_TOKENS = 1024
"""Tokens of all these sequences together."""

MAX_N = 10_000
"""Completions of one prompt."""

MAX_LOGPROBS = 20
"""Most likely tokens whose log-probabilities may be asked for, beside the chosen one."""


class RequestOutputKind(enum.StrEnum):
    """What the outputs of a request hold."""

    CUMULATIVE = "cumulative"  # each holds everything so far
    DELTA = "delta"  # each holds what is new
    FINAL_ONLY = "final"  # there is one, at the end


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
        include_stop_str_in_output: the text keeps the stop string, or the text of the stop token, that ended it.
        presence_penalty: subtracted from the logit of each token that was generated before, in [-2, 2].
        frequency_penalty: the same, times how often it was generated, in [-2, 2].
        repetition_penalty: positive logits of tokens of the prompt and of generated ones are divided by it, others
            multiplied; 1 does nothing.
        logit_bias: added to the logits of these ids, each from -100 to 100.
        allowed_token_ids: only these can be chosen. None: all.
        bad_words: strings, or lists of token ids, that are not generated: the last token of each is masked where the
            generated tokens end with those before it. A string counts with and without a leading space.
        logprobs: log-probabilities of the chosen token and of this many most likely ones, at most 20. None: none.
        prompt_logprobs: the same for the tokens of the prompt. It is computed a bounded number of tokens per step, and
            reads no prefix cache.
        structured_outputs: the form that the output has: a JSON schema, a regular expression, a choice or a grammar. An
            output that ends by ``max_tokens`` or a stop string may be incomplete.
        speculative: whether drafts are made for it; its tokens are the same either way. True is refused where the
            engine has no `SpeculativeConfig`. None: they are, if it has one.
        output_kind: what each output of `AsyncLLM` holds: cumulative, delta or final. `LLM` gives the final one.
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
    include_stop_str_in_output: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str | Sequence[int]] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    speculative: bool | None = None
    output_kind: str = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        set_plain = functools.partial(object.__setattr__, self)

        def integer(name: str, low: int, allowed: str, high: int | None = None) -> None:
            set_plain(name, check_integer(name, getattr(self, name), low, allowed, high))

        def number(name: str, low: float, high: float, allowed: str) -> None:
            set_plain(name, check_number(name, getattr(self, name), low, high, allowed))

        integer("n", 1, f"an integer from 1 to {MAX_N}", MAX_N)
        number("temperature", 0.0, 1e4, "a number from 0 (greedy) to 10000")
        integer("top_k", -1, "an integer >= 1, or 0 or -1 for no limit")
        number("top_p", 1e-12, 1.0, "a number in (0, 1]")
        number("min_p", 0.0, 1.0, "a number in [0, 1]")
        if self.seed is not None:
            integer("seed", -(2**63), "an integer of 64 bits, or None", 2**64 - 1)
        if self.max_tokens is not None:
            integer("max_tokens", 1, "an integer >= 1, or None for as many as fit")
        integer("min_tokens", 0, "an integer >= 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise refuse("min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}")
        set_plain("stop", checks.strings("stop", self.stop))
        set_plain("stop_token_ids", checks.token_ids("stop_token_ids", self.stop_token_ids))
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise refuse(name, getattr(self, name), "True or False")
        for name in ("presence_penalty", "frequency_penalty"):
            number(name, -2.0, 2.0, "a number from -2 to 2")
        allowed = "a number > 0, at most 1000; 1 for no penalty"
        number("repetition_penalty", 1e-3, 1e3, allowed)
        set_plain("logit_bias", checks.logit_bias(self.logit_bias, MAX_LOGIT_BIAS))
        if self.allowed_token_ids is not None:
            ids = checks.token_ids("allowed_token_ids", self.allowed_token_ids, may_be_empty=False)
            set_plain("allowed_token_ids", ids)
        set_plain("bad_words", checks.bad_words(() if self.bad_words is None else self.bad_words))
        allowed = f"an integer from 0 to {MAX_LOGPROBS}, or None"
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                integer(name, 0, allowed, MAX_LOGPROBS)
        set_plain("structured_outputs", structured_outputs(self.structured_outputs))
        if self.speculative is not None and not isinstance(self.speculative, bool):
            raise refuse("speculative", self.speculative, "True, False or None")
        kinds = [kind.value for kind in RequestOutputKind]
        if self.output_kind not in kinds:
            raise refuse("output_kind", self.output_kind, f"one of {', '.join(kinds)}")
        set_plain("output_kind", RequestOutputKind(self.output_kind))

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> SamplingParams:
        """Parameters from plain data.

        Raises:
            RequestError: an unknown name (with the nearest known one) or a value out of range.
        """
        known = [f.name for f in fields(cls)]
        if not isinstance(options, Mapping):
            raise RequestError(f"sampling parameters are a mapping from names to values, not {options!r}")
        for name in map(str, options):
            if name not in known:
                raise RequestError(
                    f"unknown sampling parameter {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}"
                )
        return cls(**options)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple, whatever form it was given in."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
