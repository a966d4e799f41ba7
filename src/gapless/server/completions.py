"""``POST /v1/completions``."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET
from starlette.requests import Request

from gapless.request.outputs import CompletionOutput, RequestOutput
from gapless.request.sampling_params import SamplingParams
from gapless.server import sse
from gapless.server.errors import bad_request, unsupported
from gapless.server.logprobs import LogprobWriter, prompt_logprobs
from gapless.server.parameters import sampling_params
from gapless.server.protocol import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    Usage,
    cached_tokens,
    usage_of,
)
from gapless.server.serving import Json, Serving, new_id, raise_if_failed
from gapless.server.structured import structure
from gapless.text.chat import EncodedPrompt

DEFAULT_MAX_TOKENS = 16


@dataclass(slots=True)
class _Call:
    """What one request is answered from."""

    id: str
    model: str
    created: int
    body: CompletionRequest
    prompts: list[EncodedPrompt]
    texts: list[str]  # of the prompts, where they are echoed
    n: int
    echo: bool
    empty: bool  # max_tokens=0: only the prompt is asked for
    writer: LogprobWriter | None

    @property
    def prompt_tokens(self) -> int:
        return sum(len(p.token_ids) for p in self.prompts)

    def completion(self, choices: list[CompletionChoice], usage: Any = UNSET) -> Completion:
        return Completion(self.id, "text_completion", self.created, self.model, choices, usage)


async def create(serving: Serving, request: Request) -> Any:
    """Answer one request, as one object or as a stream."""
    body = await serving.read(request, CompletionRequest)
    call, params = await _prepare(serving, body)
    terms = serving.terms_of(call.model, body.priority, body.cache_salt)
    if not body.stream:
        ticket = serving.submit(call.prompts, params, "final", call.id, terms=terms)
        outputs = await serving.final(ticket, request)
        return Json(_answer(call, outputs))
    ticket = serving.submit(call.prompts, params, "delta", call.id, body.stream_interval, terms=terms)
    return sse.EventStream(_Events(call), ticket, serving.keep_alive)


async def _prepare(serving: Serving, body: CompletionRequest) -> tuple[_Call, list[SamplingParams]]:
    model = serving.model_of(body.model)
    if body.prompt_embeds is not None:
        raise unsupported("prompt_embeds", "prompt_embeds")
    if body.suffix:
        raise unsupported("suffix", "suffix")
    n = body.n or 1
    if body.best_of not in (None, n):
        raise unsupported("best_of other than n", "best_of")
    echo, empty = bool(body.echo), body.max_tokens == 0
    if empty and not echo:
        raise bad_request("max_tokens=0 is allowed only with echo: there is nothing to answer", "max_tokens")
    asked_logprobs = body.logprobs
    if echo and asked_logprobs is not None and body.prompt_logprobs not in (None, asked_logprobs):
        raise bad_request("prompt_logprobs and logprobs differ, which echo cannot serve", "prompt_logprobs")

    def checked() -> dict[str, Any]:
        others: dict[str, Any] = {"logprobs": asked_logprobs, **structure(body)}
        if echo and asked_logprobs is not None:
            others["prompt_logprobs"] = asked_logprobs
        defaults = serving.sampling_defaults
        sampling_params(body, serving.options.max_n, defaults, max_tokens=1, min_tokens=0, **others)
        return others

    others = await serving.prompts.aside(checked)  # all checks before the work
    prompts, _ = await serving.prompts.completion(body.prompt, body.add_special_tokens is not False)
    prompts = [serving.prompts.truncated(p, body.truncate_prompt_tokens) for p in prompts]
    params = [
        sampling_params(
            body,
            serving.options.max_n, serving.sampling_defaults,
            max_tokens=serving.max_tokens(p, 1 if empty else body.max_tokens, DEFAULT_MAX_TOKENS),
            **others,
        )
        for p in prompts
    ]
    texts = [serving.prompts.text_of(p) for p in prompts] if echo else []
    writer = None
    if asked_logprobs is not None:
        writer = LogprobWriter(serving.prompts.tokenizer, asked_logprobs, bool(body.return_tokens_as_token_ids))
    created = int(time.time())
    return _Call(new_id("cmpl"), model, created, body, prompts, texts, n, echo, empty, writer), params


def _logprobs(
    call: _Call, index: int, output: RequestOutput, completion: CompletionOutput, offset: int, with_prompt: bool
) -> CompletionLogprobs | None:
    if call.writer is None:
        return None
    ids: list[int] = []
    positions: list[Any] = []
    if with_prompt:
        ids += call.prompts[index].token_ids.tolist()  # sync-ok: NumPy
        positions += output.prompt_logprobs or []
    if not call.empty:
        ids += completion.token_ids
        positions += completion.logprobs or []
    return call.writer.completion(ids, positions, offset)


def _answer(call: _Call, outputs: list[RequestOutput]) -> Completion:
    choices, generated = list[CompletionChoice](), 0
    for i, output in enumerate(outputs):
        for c in output.outputs:
            generated += len(c.token_ids)
            choices.append(_choice(call, i, output, c, None))
    cached = sum(map(cached_tokens, outputs))
    return call.completion(choices, usage_of(call.prompt_tokens, 0 if call.empty else generated, cached))


def _choice(call: _Call, i: int, output: RequestOutput, c: CompletionOutput, offset: int | None) -> CompletionChoice:
    """One of prompt ``i``'s completions, or what is new of it after tokens of ``offset`` characters; None for its
    beginning."""
    first = offset is None
    text = "" if call.empty else c.text
    if first and call.echo:
        text = call.texts[i] + text
    logprobs = _logprobs(call, i, output, c, offset or 0, first and call.echo)
    choice = CompletionChoice(c.index + i * call.n, text, logprobs, c.finish_reason, c.stop_reason)
    if call.body.return_token_ids:
        choice.token_ids = [] if call.empty else c.token_ids
        if first:
            choice.prompt_token_ids = call.prompts[i].token_ids.tolist()
    if first and call.body.prompt_logprobs is not None and output.prompt_logprobs is not None:
        choice.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
    return choice


class _Events:
    """The events of one request; see `sse.Events`."""

    def __init__(self, call: _Call) -> None:
        options = call.body.stream_options
        self._call = call
        self._usage = options is not None and bool(options.include_usage)
        self._continuous = options is not None and bool(options.continuous_usage_stats)
        self._offsets = dict[int, int]()
        self._generated = 0
        self._cached: int | None = None  # known at the end of each prompt
        special = call.writer is not None or call.empty or self._continuous or call.body.return_token_ids
        self._plain: dict[int, sse.PlainEvent] | None = None if special else {}  # of those that have begun
        self._with_prompt = dict[int, Any]()

    def take(self, outputs: dict[int, RequestOutput]) -> bytes:
        """What is new."""
        call, parts = self._call, list[bytes]()
        for i, output in outputs.items():
            if output.prompt_logprobs is not None:
                self._with_prompt[i] = output.prompt_logprobs
            output.prompt_logprobs = self._with_prompt.get(i)
            if output.finished:
                self._cached = (self._cached or 0) + cached_tokens(output)
            for c in output.outputs:
                raise_if_failed(c.finish_reason, c.stop_reason)
                event = None if c.finished else self.text(i, c.index, c.text, len(c.token_ids))
                if event is not None:
                    parts.append(event)
                    continue
                self._generated += len(c.token_ids)
                counted = self._counted() if self._continuous else UNSET
                parts.append(sse.data(call.completion([self._chunk(i, output, c)], counted)))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def text(self, prompt: int, index: int, text: str, tokens: int) -> bytes | None:
        """The event of what needs no other field."""
        if not self._plain:
            return None
        plain = self._plain.get(index + prompt * self._call.n)
        if plain is None:
            return None
        self._generated += tokens
        return plain.data(text)

    def _chunk(self, i: int, output: RequestOutput, c: CompletionOutput) -> CompletionChoice:
        call, index = self._call, c.index + i * self._call.n
        offset = self._offsets.get(index)
        if offset is None and self._plain is not None:
            self._plain[index] = sse.PlainEvent(lambda text: call.completion([CompletionChoice(index, text)]))
        choice = _choice(call, i, output, c, offset)
        # By tokens, as in an answer in one piece: their text may be held back, or be a part of a character.
        said = choice.logprobs
        self._offsets[index] = said.text_offset[-1] + len(said.tokens[-1]) if said and said.tokens else offset or 0
        return choice

    def _counted(self) -> Usage:
        return usage_of(self._call.prompt_tokens, 0 if self._call.empty else self._generated, self._cached)

    def finish(self) -> bytes:
        """Tokens, for those who ask for them."""
        return sse.data(self._call.completion([], self._counted())) if self._usage else b""
