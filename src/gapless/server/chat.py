"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET
from starlette.requests import Request

from gapless.request.outputs import CompletionOutput, RequestOutput
from gapless.request.sampling_params import SamplingParams
from gapless.server import sse
from gapless.server.answer import Answer, AnswerForm, Pieces
from gapless.server.errors import bad_request, unsupported
from gapless.server.logprobs import LogprobWriter, prompt_logprobs
from gapless.server.parameters import sampling_params
from gapless.server.prompts import text_of
from gapless.server.protocol import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ChunkChoice,
    Delta,
    ToolCall,
    Usage,
    cached_tokens,
    usage_of,
)
from gapless.server.serving import Json, Serving, new_id, raise_if_failed
from gapless.server.structured import structure
from gapless.text.chat import EncodedPrompt


@dataclass(slots=True)
class Call:
    """What one request is answered from."""

    id: str
    model: str
    created: int
    body: ChatRequest
    prompt: EncodedPrompt
    form: AnswerForm
    writer: LogprobWriter | None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt.token_ids)

    def chunk(self, choices: list[ChunkChoice], usage: Any = UNSET) -> ChatChunk:
        """An event."""
        return ChatChunk(self.id, "chat.completion.chunk", self.created, self.model, choices, usage)


async def create(serving: Serving, request: Request) -> Any:
    """Answer one request, as one object or as a stream."""
    body = await serving.read(request, ChatRequest)
    call, params = await prepare(serving, body)
    terms = serving.terms_of(call.model, body.priority, body.cache_salt)
    if not body.stream:
        ticket = serving.submit([call.prompt], [params], "final", call.id, terms=terms)
        (output,) = await serving.final(ticket, request)
        return Json(_answer(call, output))
    ticket = serving.submit([call.prompt], [params], "delta", call.id, body.stream_interval, terms=terms)
    return sse.EventStream(_Events(call), ticket, serving.keep_alive)


async def prepare(serving: Serving, body: ChatRequest) -> tuple[Call, SamplingParams]:
    """Everything before the engine: checks, the template, the parameters."""
    model = serving.model_of(body.model)
    for name in ("functions", "function_call"):
        if getattr(body, name) is not None:
            raise unsupported(f"{name}, which tools replace,", name)
    if body.echo:
        raise unsupported("echo in a conversation", "echo")
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs is allowed only with logprobs=true", "top_logprobs")
    form = AnswerForm.of(serving, body)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens

    def checked() -> dict[str, Any]:
        others = structure(body)
        if form.needs_special_tokens and body.skip_special_tokens is None:
            others["skip_special_tokens"] = False  # the form's marks are special tokens
        others["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
        defaults = serving.sampling_defaults
        sampling_params(body, serving.options.max_n, defaults, max_tokens=1, min_tokens=0, **others)
        return others

    others = await serving.prompts.aside(checked)  # all checks before the work
    if asked is not None and asked < 1:
        raise bad_request(f"max_tokens={asked} is not allowed: an integer >= 1", "max_tokens")
    whole = await serving.prompts.chat(body)
    prompt = serving.prompts.truncated(whole, body.truncate_prompt_tokens)
    most = serving.max_tokens(prompt, asked, None)
    params = sampling_params(body, serving.options.max_n, serving.sampling_defaults, max_tokens=most, **others)
    continued = ""
    options = body.chat_template_kwargs or {}
    if body.messages and (body.continue_final_message or options.get("continue_final_message")):
        continued = text_of(body.messages[-1])
    form = form.for_prompt(whole.text or "", continued)  # its end, which cutting the head off leaves as it is
    writer = None
    if body.logprobs:
        as_ids = bool(body.return_tokens_as_token_ids)
        writer = LogprobWriter(serving.prompts.tokenizer, body.top_logprobs or 0, as_ids)
    created = int(time.time())
    return Call(new_id("chatcmpl"), model, created, body, prompt, form, writer), params


def _logprobs(call: Call, c: CompletionOutput) -> ChatLogprobs | None:
    return None if call.writer is None else call.writer.chat(c.token_ids, c.logprobs or [])


def _reason(call: Call, c: CompletionOutput, called: bool) -> str | None:
    """A call that the client itself has named is no decision of the model's."""
    return "tool_calls" if called and c.finish_reason == "stop" and not call.form.forced else c.finish_reason


def _answer(call: Call, output: RequestOutput) -> ChatCompletion:
    choices, generated = list[ChatChoice](), 0
    for c in output.outputs:
        generated += len(c.token_ids)
        answer = Answer(call.form)
        pieces = answer.push(c.text, last=True)
        message = ChatMessage(content=pieces.content or (None if pieces.calls else ""))
        if pieces.reasoning:
            message.reasoning = message.reasoning_content = pieces.reasoning
        if pieces.calls:
            message.tool_calls = pieces.calls
        choice = ChatChoice(c.index, message, _logprobs(call, c), _reason(call, c, bool(pieces.calls)), c.stop_reason)
        if call.body.return_token_ids:
            choice.token_ids = c.token_ids
        choices.append(choice)
    usage = usage_of(call.prompt_tokens, generated, cached_tokens(output))
    completion = ChatCompletion(call.id, "chat.completion", call.created, call.model, choices, usage)
    if call.body.return_token_ids:
        completion.prompt_token_ids = call.prompt.token_ids.tolist()
    if call.body.prompt_logprobs is not None and output.prompt_logprobs is not None:
        completion.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
    return completion


class _Events:
    """The events of one request; see `sse.Events`."""

    def __init__(self, call: Call) -> None:
        options = call.body.stream_options
        self._call = call
        self._usage = options is not None and bool(options.include_usage)
        self._continuous = options is not None and bool(options.continuous_usage_stats)
        self._answers = dict[int, Answer]()
        self._generated = 0
        self._cached: int | None = None  # known at the end
        self._of_prompt = False
        self._special = call.writer is not None or self._continuous or bool(call.body.return_token_ids)
        self._content = dict[int, sse.PlainEvent]()  # of those that have begun

    def take(self, outputs: dict[int, RequestOutput]) -> bytes:
        """What is new."""
        call, parts = self._call, list[bytes]()
        for output in outputs.values():
            if output.finished:
                self._cached = cached_tokens(output)
            for c in output.outputs:
                raise_if_failed(c.finish_reason, c.stop_reason)
                event = None if c.finished else self.text(0, c.index, c.text, len(c.token_ids))
                if event is not None:
                    parts.append(event)
                    continue
                self._generated += len(c.token_ids)
                chunks = list[ChunkChoice]()
                answer = self._answers.get(c.index)
                if answer is None:
                    answer = self._begin(c.index)
                    chunks.append(ChunkChoice(c.index, Delta(role="assistant", content="")))
                pieces = answer.push(c.text, last=c.finished)
                chunks += _chunks(call, c, answer, pieces)
                counted = self._counted() if self._continuous else UNSET
                events = [call.chunk([chunk], counted) for chunk in chunks]
                self._add_prompt(events[0], output)
                parts += map(sse.data, events)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _add_prompt(self, event: ChatChunk, output: RequestOutput) -> None:
        """What was asked for of the prompt, once."""
        if self._of_prompt:
            return
        self._of_prompt = True
        if self._call.body.return_token_ids:
            event.prompt_token_ids = self._call.prompt.token_ids.tolist()
        if self._call.body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            event.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)

    def _begin(self, index: int) -> Answer:
        answer = self._answers[index] = Answer(self._call.form)
        if not self._special:
            chunk = self._call.chunk
            self._content[index] = sse.PlainEvent(lambda text: chunk([ChunkChoice(index, Delta(content=text))]))
        return answer

    def text(self, prompt: int, index: int, text: str, tokens: int) -> bytes | None:
        """The events of what needs no other field."""
        content = self._content.get(index)
        if content is None:
            return None
        self._generated += tokens
        answer = self._answers[index]
        if answer.is_plain:
            return content.data(text)
        pieces = answer.push(text, last=False)
        if pieces.calls:
            deltas = _deltas(answer, pieces)
            return b"".join(sse.data(self._call.chunk([ChunkChoice(index, delta)])) for delta in deltas)
        found = b""
        if pieces.reasoning:
            delta = Delta(reasoning=pieces.reasoning, reasoning_content=pieces.reasoning)
            found = sse.data(self._call.chunk([ChunkChoice(index, delta)]))
        if pieces.content or not found:
            found += content.data(pieces.content)
        return found

    def _counted(self) -> Usage:
        return usage_of(self._call.prompt_tokens, self._generated, self._cached)

    def finish(self) -> bytes:
        """Tokens, for those who ask for them."""
        return sse.data(self._call.chunk([], self._counted())) if self._usage else b""


def _deltas(answer: Answer, pieces: Pieces) -> list[Delta]:
    """What is new of one answer: mostly one."""
    deltas = list[Delta]()
    if pieces.reasoning:
        deltas.append(Delta(reasoning=pieces.reasoning, reasoning_content=pieces.reasoning))
    if pieces.content or not (pieces.reasoning or pieces.calls):  # a token without text is a token, too
        deltas.append(Delta(content=pieces.content))
    for number, found in enumerate(pieces.calls, answer.calls - len(pieces.calls)):
        deltas.append(Delta(tool_calls=[ToolCall(found.function, found.id, index=number)]))
    return deltas


def _chunks(call: Call, c: CompletionOutput, answer: Answer, pieces: Pieces) -> list[ChunkChoice]:
    """The same with the other fields of an output."""
    chunks = [ChunkChoice(c.index, delta) for delta in _deltas(answer, pieces)]
    chunks[0].logprobs = _logprobs(call, c)
    if call.body.return_token_ids:
        chunks[0].token_ids = c.token_ids
    if c.finished:
        if chunks[-1].delta.tool_calls:  # clients look for the end of a call in a chunk after it
            chunks.append(ChunkChoice(c.index, Delta()))
        chunks[-1].finish_reason = _reason(call, c, answer.calls > 0)
        chunks[-1].stop_reason = c.stop_reason
    return chunks
