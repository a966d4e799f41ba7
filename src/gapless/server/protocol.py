"""Types of requests and responses, as clients of OpenAI's interface send and expect them.

Requests: an unknown field is ignored, null is a field's default, a number in a string is refused. Fields beyond
OpenAI's own are named as in vLLM. Responses: the structs are encoded as they are; what is `UNSET` is left out.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gapless.request.outputs import RequestOutput

MAX_TOOLS = 128
MAX_MESSAGES = 8192

# ---- what requests share -------------------------------------------------------------------------------------------


class StreamOptions(msgspec.Struct):
    """``stream_options``."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampling(msgspec.Struct, kw_only=True):
    """Fields that choose tokens and end completions; None is the default of `SamplingParams`."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    speculative: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    NO_EFFECT: ClassVar[frozenset[str]] = frozenset(("user",))
    """Fields that are known and change nothing here."""


class Usage(msgspec.Struct):
    """Tokens of a request."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: dict[str, int] | None = None


def usage_of(prompt_tokens: int, completion_tokens: int, cached: int | None = None) -> Usage:
    """With the sum. ``cached``: tokens of prompts that the prefix cache held, once that is known."""
    details = None if cached is None else {"cached_tokens": cached}
    return Usage(prompt_tokens, prompt_tokens + completion_tokens, completion_tokens, details)


def cached_tokens(output: RequestOutput) -> int:
    """Tokens of a prompt that the prefix cache held."""
    return 0 if output.metrics is None else output.metrics.cached_tokens or 0


# ---- /v1/completions -----------------------------------------------------------------------------------------------


class CompletionRequest(Sampling, kw_only=True):
    """``POST /v1/completions``. ``prompt`` is a text, a list of texts, a list of ids, or a list of lists of ids."""

    prompt: str | list[Any] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None
    prompt_embeds: Any = None


class CompletionLogprobs(msgspec.Struct):
    """``logprobs`` of a completion: four lists with an entry for each token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct):
    """One completion, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[Any] | UnsetType = UNSET


class Completion(msgspec.Struct):
    """The answer, and each chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET


# ---- /v1/chat/completions ------------------------------------------------------------------------------------------


class FunctionCall(msgspec.Struct):
    """A call of a function: its name, and its arguments as JSON in a text."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(msgspec.Struct):
    """An entry of ``tool_calls``."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | UnsetType = UNSET


class ContentPart(msgspec.Struct):
    """A part of a message's content; only text can be served."""

    type: str
    text: str | None = None


class Message(msgspec.Struct):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class FunctionDefinition(msgspec.Struct, omit_defaults=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    """An entry of ``tools``."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(msgspec.Struct):
    """Which function."""

    name: str


class NamedTool(msgspec.Struct):
    """``tool_choice`` as an object."""

    function: NamedFunction
    type: Literal["function"] = "function"


class ChatRequest(Sampling, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[Message] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    echo: bool | None = None
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    functions: Any = None
    function_call: Any = None


class TopLogprob(msgspec.Struct):
    """One of the most likely tokens."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct):
    """A token of an answer."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """``logprobs`` of an answer."""

    content: list[TokenLogprob]


class ChatMessage(msgspec.Struct, kw_only=True):
    """An answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET  # its older name
    tool_calls: list[ToolCall] | UnsetType = UNSET
    refusal: None = None


class ChatChoice(msgspec.Struct):
    """One of the ``n`` answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    """The answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[Any] | UnsetType = UNSET


class Delta(msgspec.Struct):
    """What is new of an answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    """What is new of one of the ``n`` answers."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    """An event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[Any] | UnsetType = UNSET


# ---- models, tokens, the rest --------------------------------------------------------------------------------------


class ModelCard(msgspec.Struct):
    """A model that can be named."""

    id: str
    created: int
    root: str
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "gapless"
    parent: str | None = None
    permission: list[Any] = []


class ModelList(msgspec.Struct):
    """``GET /v1/models``."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """``POST /tokenize``: a prompt, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(msgspec.Struct):
    """``POST /tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct):
    """``POST /detokenize``."""

    tokens: list[int]
    model: str | None = None


class DetokenizeResponse(msgspec.Struct):
    """``POST /detokenize``."""

    prompt: str


class Health(msgspec.Struct):
    """``GET /health`` and ``/ready``."""

    status: Literal["ok", "starting", "draining", "unhealthy"]
    last_step_age_s: float | None = None
    inflight_steps: int = 0
    reason: str | None = None


class Paused(msgspec.Struct):
    """``GET /is_paused``."""

    is_paused: bool


class Sleeping(msgspec.Struct):
    """``GET /is_sleeping``."""

    is_sleeping: bool


class Version(msgspec.Struct):
    """``GET /version``."""

    version: str


class Load(msgspec.Struct):
    """``GET /load``."""

    server_load: int
