"""``POST /v1/responses``: OpenAI's newer form of a conversation, by way of the older one.

A request becomes a `ChatRequest`; the answer's reasoning, text and calls become items of output. Nothing is stored, so
that what refers to an earlier response is refused.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request

from gapless.request.outputs import CompletionOutput, RequestOutput
from gapless.server import chat, sse
from gapless.server.answer import Answer, Pieces
from gapless.server.errors import ApiError, bad_request, clip, unsupported
from gapless.server.protocol import (
    ChatRequest,
    ContentPart,
    FunctionCall,
    FunctionDefinition,
    Message,
    NamedFunction,
    NamedTool,
    Tool,
    ToolCall,
    cached_tokens,
)
from gapless.server.responses_protocol import (
    IncompleteDetails,
    InputDetails,
    InputItem,
    InputPart,
    OutputDetails,
    OutputItem,
    OutputText,
    ReasoningText,
    ResponseError,
    ResponseObject,
    ResponsesRequest,
    ResponseTool,
    ResponseUsage,
)
from gapless.server.serving import Json, Serving, new_id, raise_if_failed

LOGPROBS = "message.output_text.logprobs"


async def create(serving: Serving, request: Request) -> Any:
    """Answer one request, as one object or as a stream."""
    body = await serving.read(request, ResponsesRequest)
    call, params = await chat.prepare(serving, to_chat(body))
    writer = _Writer(body, call)
    terms = serving.terms_of(call.model)
    if not body.stream:
        ticket = serving.submit([call.prompt], [params], "final", writer.response.id, terms=terms)
        (output,) = await serving.final(ticket, request)
        (completion,) = output.outputs
        writer.cached = cached_tokens(output)
        for _ in writer.take(completion):
            pass
        return Json(writer.response)
    ticket = serving.submit([call.prompt], [params], "delta", writer.response.id, terms=terms)
    return sse.EventStream(_Events(writer), ticket, serving.keep_alive, done=b"", error_event=writer.failed)


# ---- requests -------------------------------------------------------------------------------------------------------


def to_chat(body: ResponsesRequest) -> ChatRequest:
    """The same request in the older form.

    Raises:
        ApiError: it asks for what cannot be served, naming the field.
    """
    for name in ("previous_response_id", "conversation", "prompt"):
        if getattr(body, name) is not None:
            raise unsupported(f"{name}, which needs stored responses,", name)
    if body.background:
        raise unsupported("background", "background")
    if body.truncation not in (None, "disabled"):
        raise unsupported(f"truncation={clip(body.truncation or '')!r}", "truncation")
    logprobs = LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
    request = ChatRequest(
        model=body.model,
        messages=_messages(body),
        max_completion_tokens=body.max_output_tokens,
        tools=None if body.tools is None else [_tool(i, tool) for i, tool in enumerate(body.tools)],
        tool_choice=_tool_choice(body.tool_choice),
        response_format=_format(body),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        logprobs=logprobs or None,
        top_logprobs=body.top_logprobs if logprobs else None,
        stream=body.stream,
    )
    for name in (
        "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "ignore_eos", "stop",
        "chat_template_kwargs",
    ):  # fmt: skip
        setattr(request, name, getattr(body, name))
    return request


def _messages(body: ResponsesRequest) -> list[Message]:
    messages = list[Message]()
    if body.instructions:
        messages.append(Message("system", body.instructions))
    if isinstance(body.input, str):
        if not body.input:
            raise bad_request("input is empty", "input")
        return [*messages, Message("user", body.input)]
    if not body.input:
        raise bad_request("input is missing: a text, or a list of items", "input")
    thought: str | None = None
    for i, item in enumerate(body.input):
        kind = item.type or ("message" if item.role is not None else "")
        if kind == "message":
            message = _message(i, item)
            if message.role == "assistant":
                message.reasoning_content, thought = thought, None
            messages.append(message)
        elif kind == "function_call":
            called = _called(i, item)
            if messages and messages[-1].role == "assistant" and thought is None:
                messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), called]
            else:
                messages.append(Message("assistant", None, tool_calls=[called], reasoning_content=thought))
                thought = None
        elif kind == "function_call_output":
            if item.call_id is None or item.output is None:
                raise bad_request(f"input[{i}] needs call_id and output", f"input[{i}]")
            messages.append(Message("tool", _parts(item.output), tool_call_id=item.call_id))
        elif kind == "reasoning":
            parts = item.content if isinstance(item.content, list) else item.summary or []
            thought = "".join(part.text or "" for part in parts) or None
        else:
            raise unsupported(f"input[{i}]: an item of type {clip(kind)!r}", f"input[{i}]")
    return messages


def _message(i: int, item: InputItem) -> Message:
    roles = ("system", "developer", "user", "assistant")
    if item.role not in roles:
        raise bad_request(f"input[{i}].role is not allowed: one of {', '.join(roles)}", f"input[{i}].role")
    if item.content is None:
        raise bad_request(f"input[{i}].content is missing", f"input[{i}].content")
    return Message(item.role, _parts(item.content))  # type: ignore[arg-type]


def _parts(content: str | list[InputPart]) -> str | list[ContentPart]:
    return content if isinstance(content, str) else [ContentPart(part.type, part.text) for part in content]


def _called(i: int, item: InputItem) -> ToolCall:
    if item.name is None or item.call_id is None:
        raise bad_request(f"input[{i}] needs name and call_id", f"input[{i}]")
    return ToolCall(FunctionCall(item.name, item.arguments or "{}"), item.call_id)


def _tool(i: int, tool: ResponseTool) -> Tool:
    if tool.type != "function":
        raise unsupported(f"tools[{i}].type={clip(tool.type)!r}", f"tools[{i}].type")
    definition = FunctionDefinition(tool.name or "", tool.description, tool.parameters, tool.strict)
    return Tool("function", definition)


def _tool_choice(choice: str | dict[str, Any] | None) -> Any:
    if choice is None or choice in ("none", "auto", "required"):
        return choice
    if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("name"), str):
        return NamedTool(NamedFunction(choice["name"]))
    raise bad_request("tool_choice is not allowed: none, auto, required or a function", "tool_choice")


def _format(body: ResponsesRequest) -> dict[str, Any] | None:
    found = None if body.text is None else body.text.format
    if found is None or found.get("type") != "json_schema":
        return found
    return {"type": "json_schema", "json_schema": {name: v for name, v in found.items() if name != "type"}}


# ---- answers --------------------------------------------------------------------------------------------------------


class _Writer:
    """Turns what comes of one answer into items of output, and into events of a stream."""

    def __init__(self, body: ResponsesRequest, call: chat.Call) -> None:
        self._call = call
        self._answer = Answer(call.form)
        self._number = -1
        self.cached = 0
        self._tokens = 0
        self._thought_tokens = 0
        self._current: OutputItem | None = None
        self._text: list[str] = []
        self._logprobs: list[Any] = []
        self.response = ResponseObject(
            id=new_id("resp"),
            created_at=int(time.time()),
            model=call.model,
            status="in_progress",
            output=[],
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning=body.reasoning,
            temperature=1.0 if body.temperature is None else body.temperature,
            tool_choice="auto" if body.tool_choice is None else body.tool_choice,
            tools=body.tools or [],
            top_p=1.0 if body.top_p is None else body.top_p,
            user=body.user,
        )
        if body.text is not None and body.text.format is not None:
            self.response.text = {"format": body.text.format}

    def event(self, type: str, **fields: Any) -> bytes:
        """One event, with its name and its number."""
        self._number += 1
        return b"event: " + type.encode() + b"\n" + sse.data({"type": type, "sequence_number": self._number, **fields})

    def begin(self) -> bytes:
        """The events before the first token."""
        response = self.response
        return self.event("response.created", response=response) + self.event("response.in_progress", response=response)

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that went wrong."""
        self.response.status = "failed"
        self.response.error = ResponseError("server_error", error.body.error.message)
        return self.event("response.failed", response=self.response)

    def take(self, completion: CompletionOutput) -> Iterator[bytes]:
        """What a piece of the answer adds; with the last piece, the end."""
        raise_if_failed(completion.finish_reason, completion.stop_reason)
        self._tokens += len(completion.token_ids)
        last = completion.finished
        pieces = self._answer.push(completion.text, last=last)
        if pieces.reasoning and not pieces.content:
            self._thought_tokens += len(completion.token_ids)
        logprobs: list[Any] = []
        if self._call.writer is not None:
            logprobs = self._call.writer.chat(completion.token_ids, completion.logprobs or []).content
        yield from self._pieces(pieces, logprobs)
        if last:
            yield from self._end(completion)

    def _pieces(self, pieces: Pieces, logprobs: list[Any]) -> Iterator[bytes]:
        if pieces.reasoning:
            yield from self._open("reasoning")
            yield self._delta("response.reasoning_text.delta", pieces.reasoning)
        nothing = not (pieces.reasoning or pieces.calls) and self._is_open("message")
        if pieces.content or nothing:
            yield from self._open("message")
            self._logprobs += logprobs
            yield self._delta("response.output_text.delta", pieces.content, logprobs=logprobs)
        for called in pieces.calls:
            yield from self._close()
            yield from self._call_item(called)

    def _is_open(self, kind: str) -> bool:
        return self._current is not None and self._current.type == kind

    @property
    def _at(self) -> dict[str, Any]:
        assert self._current is not None
        return {"item_id": self._current.id, "output_index": len(self.response.output) - 1}

    def _delta(self, type: str, text: str, **fields: Any) -> bytes:
        self._text.append(text)
        return self.event(type, **self._at, content_index=0, delta=text, **fields)

    def _open(self, kind: Any) -> Iterator[bytes]:
        """Begin an item, unless it is the current one."""
        if self._is_open(kind):
            return
        yield from self._close()
        message = kind == "message"
        item = OutputItem(id=new_id("msg" if message else "rs"), type=kind, status="in_progress", content=[])
        if message:
            item.role = "assistant"
        else:
            item.summary = []
        self._current = item
        self._text, self._logprobs = [], []
        self.response.output.append(item)
        yield self.event("response.output_item.added", output_index=self._at["output_index"], item=item)
        part = OutputText(text="") if message else ReasoningText(text="")
        yield self.event("response.content_part.added", **self._at, content_index=0, part=part)

    def _close(self, status: Any = "completed") -> Iterator[bytes]:
        """End the current item, if there is one."""
        item = self._current
        if item is None:
            return
        text = "".join(self._text)
        if item.type == "message":
            part: Any = OutputText(text=text, logprobs=self._logprobs)
            yield self.event(
                "response.output_text.done", **self._at, content_index=0, text=text, logprobs=self._logprobs
            )
        else:
            part = ReasoningText(text=text)
            yield self.event("response.reasoning_text.done", **self._at, content_index=0, text=text)
        yield self.event("response.content_part.done", **self._at, content_index=0, part=part)
        item.content, item.status = [part], status
        yield self.event("response.output_item.done", output_index=self._at["output_index"], item=item)
        self._current = None

    def _call_item(self, called: ToolCall) -> Iterator[bytes]:
        item = OutputItem(
            id=new_id("fc"),
            type="function_call",
            status="in_progress",
            call_id=called.id or "",
            name=called.function.name,
            arguments="",
        )
        self.response.output.append(item)
        at = {"item_id": item.id, "output_index": len(self.response.output) - 1}
        arguments = str(called.function.arguments)
        yield self.event("response.output_item.added", output_index=at["output_index"], item=item)
        yield self.event("response.function_call_arguments.delta", **at, delta=arguments)
        yield self.event("response.function_call_arguments.done", **at, arguments=arguments, name=item.name)
        item.arguments, item.status = arguments, "completed"
        yield self.event("response.output_item.done", output_index=at["output_index"], item=item)

    def _end(self, completion: CompletionOutput) -> Iterator[bytes]:
        cut = completion.finish_reason == "length"
        if not self.response.output:
            yield from self._open("message")
        yield from self._close("incomplete" if cut else "completed")
        read, written = self._call.prompt_tokens, self._tokens
        self.response.usage = ResponseUsage(
            read, written, read + written, InputDetails(self.cached), OutputDetails(self._thought_tokens)
        )
        self.response.status = "incomplete" if cut else "completed"
        if cut:
            self.response.incomplete_details = IncompleteDetails("max_output_tokens")
        yield self.event(f"response.{self.response.status}", response=self.response)


class _Events:
    """The events of one request; see `sse.Events`."""

    def __init__(self, writer: _Writer) -> None:
        self._writer = writer
        self._begun = False

    def take(self, outputs: dict[int, RequestOutput]) -> bytes:
        """What is new."""
        parts = list[bytes]()
        if not self._begun:
            self._begun = True
            parts.append(self._writer.begin())
        for output in outputs.values():
            self._writer.cached = cached_tokens(output)
            for c in output.outputs:
                parts += self._writer.take(c)
        return b"".join(parts)

    def text(self, prompt: int, index: int, text: str, tokens: int) -> bytes | None:
        """None of them has the text alone."""
        return None

    def finish(self) -> bytes:
        """Nothing: the last event came with the last token."""
        return b""
