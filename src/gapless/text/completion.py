"""A registered request and the growing text and ids of its completions.

Only the output thread touches a `Completion`. Tokens [0, ``count``) were received; ``token_ids`` holds all
of them, in delta mode those not handed over yet, and ``parts`` the text of those, short of what is held
back because it may be part of a character or of a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gapless.batch.row_layout import I32
from gapless.errors import RequestError
from gapless.request.messages import Finished
from gapless.request.outputs import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput
from gapless.request.sampling_params import SamplingParams
from gapless.text.detokenizer import Detokenizer, create_detokenizer, decode_whole
from gapless.text.logprobs import LogprobReader
from gapless.text.stop import StopMatcher

OutputMode = Literal["final", "stream", "delta"]
TakeText = Callable[[int, str, int], bool]
"""Takes a completion's index, its new text and the number of its new tokens, or returns False."""


def _ignore(error: BaseException) -> None:
    """The default `RequestGroup.on_error`."""


class Completion:
    """One of the ``n`` sequences of a group."""

    __slots__ = (
        "count",
        "detokenizer",
        "group",
        "id",
        "index",
        "logprobs",
        "matcher",
        "parts",
        "reader",
        "reason",
        "stop_reason",
        "token_ids",
    )

    def __init__(self, group: RequestGroup, index: int, id: int) -> None:
        self.group = group
        self.index = index
        self.id = id
        self.count = 0
        self.token_ids: list[int] = []
        self.parts: list[str] = []
        self.reason: str | None = None
        self.stop_reason: int | str | None = None
        stop, params = group.params.stop_strings, group.params
        include = params.include_stop_str_in_output
        self.matcher = StopMatcher(stop, params.min_tokens, include=include) if stop else None
        self.reader = None if params.logprobs is None else LogprobReader(group.tokenizer, params.logprobs)
        self.logprobs: list[dict[int, Logprob]] | None = None if self.reader is None else []
        self.detokenizer: Detokenizer | None = None
        if group.tokenizer is not None and group.needs_tokens:
            self.detokenizer = create_detokenizer(
                group.tokenizer, group.prompt_tail, skip_special_tokens=params.skip_special_tokens
            )

    def append(self, token: int, record: I32 | None = None, *, has_text: bool = True) -> None:
        """Takes the next token and its log-probabilities; sets ``reason`` if it completes a stop string."""
        self.token_ids.append(token)
        self.count += 1
        if self.reader is not None and self.logprobs is not None:
            if record is None:
                raise RuntimeError(f"token {self.count} of completion {self.id} came without its log-probabilities")
            self.logprobs.append(self.reader.read(token, record))
        if has_text and self.detokenizer is not None:
            text = self.detokenizer.push(token)
            if self.matcher is not None:
                self._add_text(text, self.count)
            elif text:
                self.parts.append(text)

    def finish(self, end: Finished) -> None:
        """Takes the engine's final word, unless a stop string comes before it."""
        stopped = end.stop_token is not None and not self.group.params.include_stop_str_in_output
        rest = end.token_ids[self.count :].tolist()  # those that were not streamed
        if self.detokenizer is None and self.reader is None:  # nothing but ids; this thread holds up the loop's
            self.token_ids += rest
            self.count += len(rest)
            rest = []
        for token in rest:
            self.append(token, has_text=not (stopped and self.count + 1 == len(end.token_ids)))
            if self.reason is not None:
                return
        params = self.group.params
        if self.detokenizer is not None:
            # A character or byte run that ends only now may complete a stop string: it ends before the stop
            # token.
            self._add_text(self.detokenizer.finish(), self.count - stopped)
            if self.reason is not None:
                if stopped:
                    self._take_back()
                return
            if self.matcher is not None:
                self.parts.append(self.matcher.finish())
        elif self.group.tokenizer is not None:
            self.parts.append(
                decode_whole(
                    self.group.tokenizer,
                    self.token_ids[: self.count - stopped],
                    self.group.prompt_tail,
                    skip_special_tokens=params.skip_special_tokens,
                )
            )
        self.reason = end.reason.value
        if end.reason is FinishReason.ERROR:
            self.stop_reason = end.error
        elif end.stop_token in params.stop_token_ids:
            self.stop_reason = end.stop_token

    def _take_back(self) -> None:
        token = self.token_ids.pop()
        self.count -= 1
        if self.reader is not None and self.logprobs is not None:
            self.reader.take_back(token, self.logprobs.pop())

    def _add_text(self, text: str, num_tokens: int) -> None:
        if self.matcher is not None:
            text = self.matcher.push(text, num_tokens)
            if self.matcher.matched is not None:
                self.reason, self.stop_reason = FinishReason.STOP.value, self.matcher.matched
        if text:
            self.parts.append(text)

    def hand_text(self, take: TakeText) -> bool:
        """Offer what is new as text alone; whether it was taken. Only in delta mode and without log-probabilities."""
        parts = self.parts
        text = parts[0] if len(parts) == 1 else "".join(parts)
        if not take(self.index, text, len(self.token_ids)):
            return False
        parts.clear()
        self.token_ids.clear()
        return True

    def output(self) -> CompletionOutput:
        """What to hand over now: everything so far, or in delta mode what is new."""
        text = "".join(self.parts)
        ids, logprobs = self.token_ids, self.logprobs
        if self.group.mode == "delta":
            self.parts, self.token_ids, self.logprobs = [], [], None if logprobs is None else []
        else:
            self.parts = [text]
            if self.reason is None:
                ids, logprobs = ids.copy(), None if logprobs is None else logprobs.copy()
        total = None if self.reader is None else self.reader.cumulative
        return CompletionOutput(self.index, text, ids, self.reason, self.stop_reason, logprobs, total)


@dataclass(slots=True, eq=False)
class RequestGroup:
    """One request of a user: a prompt and its ``n`` completions.

    Attributes:
        request_id: the user's label, only handed back; it need not be unique.
        ids: `gapless.request.request.Request.id` of each completion, ``params.n`` of them.
        tokenizer: None leaves ``text`` empty; stop strings are refused then.
        mode: "final", one output at the end. "stream", an output per step message, each with all text and
            ids so far: cumulative means that each is copied, O(length) per token. "delta", an output per
            step message with the completions that got something, new text and ids only: constant per token.
        on_output: called on the output thread. If it raises, the request is ended and `on_error` gets the
            exception.
        on_error: called once, on the thread that found the error, if the request cannot be finished.
        on_text: in mode "delta", offered the new text of a completion that has not ended; what it takes does not come
            as an output. Making the objects of an output costs more than the text. Never called if there are
            log-probabilities. If it raises, the request is ended.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: npt.NDArray[np.int32]
    params: SamplingParams
    ids: Sequence[int]
    on_output: Callable[[RequestOutput], None]
    on_error: Callable[[BaseException], None] = _ignore
    tokenizer: Any = None
    arrival_time: float = 0.0
    mode: OutputMode = "final"
    on_text: TakeText | None = None
    # State, owned by OutputProcessor.
    completions: list[Completion] = field(default_factory=list, init=False, repr=False)
    prompt_list: list[int] | None = field(default=None, init=False, repr=False)
    metrics: RequestMetrics = field(init=False, repr=False)
    silent: bool = field(default=False, init=False, repr=False)
    weight_version: int = field(default=-1, init=False, repr=False)  # -1: nothing has come yet
    first_weight_version: int = field(default=-1, init=False, repr=False)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = field(default=None, init=False, repr=False)
    prompt_reader: LogprobReader | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.mode not in ("final", "stream", "delta"):
            raise RequestError(f"mode={self.mode!r} is not allowed: 'final', 'stream' or 'delta'")
        if len(self.ids) != self.params.n:
            raise ValueError(f"{len(self.ids)} ids for n={self.params.n} completions")
        if self.params.stop_strings and self.tokenizer is None:
            raise RequestError(
                f"stop={list(self.params.stop_strings)!r} needs a tokenizer and there is none: "
                "give the engine one, or use stop_token_ids"
            )
        if self.mode != "delta" or self.params.logprobs is not None or self.params.prompt_logprobs is not None:
            self.on_text = None
        self.metrics = RequestMetrics(self.arrival_time)
        if self.params.prompt_logprobs is not None:
            self.prompt_reader = LogprobReader(self.tokenizer, self.params.prompt_logprobs)
            self.prompt_logprobs = [None]

    def saw_weights(self, first: int, last: int) -> None:
        """Work of these versions of the weights, and of those between, is in the completions."""
        self.weight_version = max(self.weight_version, last)
        known = self.first_weight_version >= 0
        self.first_weight_version = min(self.first_weight_version, first) if known else first

    def add_prompt_record(self, position: int, record: I32) -> None:
        """Takes the log-probabilities of a token of the prompt; they come in order."""
        if self.prompt_reader is None or self.prompt_logprobs is None or position != len(self.prompt_logprobs):
            raise RuntimeError(f"request {self.request_id!r}: no log-probabilities are due for position {position}")
        self.prompt_logprobs.append(self.prompt_reader.read(int(self.prompt_token_ids[position]), record))

    def take_prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """What an output says of the prompt: all of it, or nothing yet. In delta mode it is said once."""
        found = self.prompt_logprobs
        if found is None or len(found) < len(self.prompt_token_ids):
            return None
        if self.mode == "delta":
            self.prompt_logprobs = None
        return found

    @property
    def prompt_tail(self) -> list[int]:
        """The last tokens of the prompt: all that a detokenizer looks at."""
        tail: list[int] = self.prompt_token_ids[-4:].tolist()
        return tail

    @property
    def needs_tokens(self) -> bool:
        """What `gapless.request.request.Request.streaming` must be: whether each token is needed as it comes."""
        return self.mode != "final" or bool(self.params.stop_strings) or self.params.logprobs is not None
