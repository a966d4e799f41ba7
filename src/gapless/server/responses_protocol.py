"""Types of ``/v1/responses``: requests, the response object, and the events of a stream."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

# ---- requests ------------------------------------------------------------------------------------------------------


class InputPart(msgspec.Struct):
    """A part of an input message."""

    type: str
    text: str | None = None


class InputItem(msgspec.Struct):
    """An item of ``input``: a message, a call that the model made, or what the call gave."""

    type: str | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None


class ResponseTool(msgspec.Struct):
    """An entry of ``tools``: here the function's fields lie beside its type."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Reasoning(msgspec.Struct):
    """``reasoning``."""

    effort: str | None = None
    summary: str | None = None


class TextOptions(msgspec.Struct):
    """``text``."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """``POST /v1/responses``. Nothing is stored: a conversation is sent as a whole."""

    input: str | list[InputItem] | None = None
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    truncation: str | None = None
    user: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    NO_EFFECT: ClassVar[frozenset[str]] = frozenset(("store", "stream_options", "user"))
    """Fields that are known and change nothing here."""


# ---- the response ---------------------------------------------------------------------------------------------------


class OutputText(msgspec.Struct, kw_only=True):
    """Text of an answer."""

    text: str
    type: Literal["output_text"] = "output_text"
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(msgspec.Struct, kw_only=True):
    """Text of what the model thought."""

    text: str
    type: Literal["reasoning_text"] = "reasoning_text"


class OutputItem(msgspec.Struct, kw_only=True):
    """A message, thoughts, or a call; which fields there are depends on ``type``."""

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] | UnsetType = UNSET
    content: list[Any] | UnsetType = UNSET
    summary: list[Any] | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class InputDetails(msgspec.Struct):
    """Of what is read."""

    cached_tokens: int = 0


class OutputDetails(msgspec.Struct):
    """Of what is written."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """Tokens."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputDetails
    output_tokens_details: OutputDetails


class ResponseError(msgspec.Struct):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens", "content_filter"]


class ResponseObject(msgspec.Struct, kw_only=True):
    """The response."""

    id: str
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    output: list[OutputItem]
    object: Literal["response"] = "response"
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: Reasoning | None = None
    store: bool = False
    temperature: float | None = None
    text: dict[str, Any] = msgspec.field(default_factory=lambda: {"format": {"type": "text"}})
    tool_choice: Any = "auto"
    tools: list[ResponseTool] = []
    top_p: float | None = None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
