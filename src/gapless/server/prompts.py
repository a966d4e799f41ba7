"""Prompts and conversations of requests to token ids, off the event loop's thread.

Two threads encode, each with a copy of the tokenizer of its own, because one tokenizer serves one thread at a time: a
fast lane for prompts of ordinary length, and a slow lane, so that a prompt of megabytes does not hold up the others.

A tokenizer that has begun cannot be interrupted. So its time is bounded by its input: a text longer than any that could
fit the model's context is refused unread, the slow lane has a bounded queue, and the fast lane's texts are short.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from gapless.errors import ConfigError, RequestError
from gapless.server.errors import ApiError, bad_request, clip, of_request_error, too_long, unavailable, unsupported
from gapless.server.limits import SMALL_BODY, body_size
from gapless.server.protocol import MAX_MESSAGES, MAX_TOOLS, ChatRequest, Message, TokenizeRequest, Tool
from gapless.server.tool_prompt import with_tools
from gapless.text.chat import EncodedPrompt, check_token_ids, encode_chat

T = TypeVar("T")

SLOW_CHARACTERS = 1 << 16
"""A longer prompt takes the slow lane."""
MAX_SLOW = 16
"""Requests in the slow lane; more are told to come again."""
MAX_DETOKENIZE = 1 << 17
"""Ids that are made text for one request, or as many as fit the context."""
TEMPLATE_OPTIONS = (
    "enable_thinking",
    "thinking",
    "add_generation_prompt",
    "continue_final_message",
    "reasoning_effort",
)
"""What ``chat_template_kwargs`` may hold."""


class Prompts:
    """Encodes what requests bring.

    Args:
        tokenizer: None serves ids only.
        vocab_size: of the model.
        longest: tokens of a prompt and its output.
        max_prompts: of one request.
        template: of chats, in the place of the tokenizer's own.
    """

    def __init__(
        self, tokenizer: Any, vocab_size: int, longest: int, max_prompts: int, template: str | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template or str(getattr(tokenizer, "chat_template", None) or "")
        self.template_has_tools = re.search(r"\btools\b", self.template) is not None
        self._template = template
        self.vocab_size = vocab_size
        self.longest = longest
        self._max_prompts = max_prompts
        self._lanes = [ThreadPoolExecutor(1, f"gapless-text-{i}") for i in range(2)]
        self._tokenizers = [copy.deepcopy(tokenizer) for _ in range(2)]
        self._longest_token = _longest_token(tokenizer)
        self._slow = 0

    def close(self) -> None:
        """End the threads."""
        for lane in self._lanes:
            lane.shutdown(wait=False, cancel_futures=True)

    async def run(self, action: Callable[[Any], T], characters: int) -> T:
        """``action`` with a tokenizer, on the lane for this many characters.

        Raises:
            ApiError: the text is longer than any prompt that fits, or ``action`` raised a `RequestError`.
        """
        if self.tokenizer is None:
            raise bad_request("This server has no tokenizer: give prompts as token ids.", "prompt")
        if characters > self.longest * self._longest_token:  # it cannot fit, whatever its tokens are
            raise too_long(-(-characters // self._longest_token), None, self.longest, at_least=True)
        i = int(max(characters, body_size.get()) > SLOW_CHARACTERS)
        return await self._on_lane(i, action, self._tokenizers[i])

    async def aside(self, action: Callable[[], T], size: int | None = None) -> T:
        """``action`` on the slow lane if the request's body, or what it reads, is large; else at once.

        Args:
            size: of what it reads, in bytes or values that cost as much; None for the body's.
        """
        if (body_size.get() if size is None else size) <= SMALL_BODY:
            return action()
        return await self._on_lane(1, action)

    async def _on_lane(self, i: int, action: Callable[..., T], *arguments: Any) -> T:
        if i and self._slow >= MAX_SLOW:
            raise unavailable(f"{self._slow} large requests wait to be read already.")
        context = contextvars.copy_context()
        self._slow += i
        try:
            return await asyncio.get_running_loop().run_in_executor(self._lanes[i], context.run, action, *arguments)
        except RequestError as error:
            raise of_request_error(error) from error
        finally:
            self._slow -= i

    # ---- prompts --------------------------------------------------------------------------------------------------

    async def completion(
        self, prompt: str | list[Any] | None, add_special_tokens: bool = True
    ) -> tuple[list[EncodedPrompt], bool]:
        """The prompts of a completion request, and whether they came as a list.

        Raises:
            ApiError: empty, of mixed kinds, too many, or an id that the vocabulary does not have.
        """
        if prompt is None:
            raise bad_request(
                "prompt is missing: a text, a list of texts, a list of token ids, or a list of such", "prompt"
            )
        if isinstance(prompt, str):
            return await self._texts([prompt], add_special_tokens), False
        if not prompt:
            raise bad_request("prompt is empty", "prompt")
        if type(prompt[0]) is int and len(prompt) >= self.longest:  # before any look at millions of entries
            raise too_long(len(prompt), None, self.longest)
        if type(prompt[0]) is not int and len(prompt) > self._max_prompts:
            raise bad_request(f"prompt has {len(prompt)} entries; at most {self._max_prompts} are allowed", "prompt")
        kinds = await self.aside(lambda: set(map(type, prompt)))
        if kinds == {int}:
            return [await self.aside(lambda: self._ids(prompt))], False
        if kinds == {str}:
            return await self._texts(prompt, add_special_tokens), True
        if kinds == {list}:
            return await self.aside(lambda: [self._ids(ids) for ids in prompt]), True
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise bad_request(f"prompt holds {names}: its entries are all texts, all ids, or all lists of ids", "prompt")

    def _ids(self, ids: list[Any]) -> EncodedPrompt:
        if len(ids) >= self.longest:
            raise too_long(len(ids), None, self.longest)
        try:
            return EncodedPrompt(None, check_token_ids(ids, self.vocab_size, "prompt"))
        except RequestError as error:
            raise of_request_error(error) from error

    async def _texts(self, texts: list[str], add_special_tokens: bool) -> list[EncodedPrompt]:
        for text in texts:
            if not text:
                raise bad_request("prompt is empty: a text of at least one character, or token ids", "prompt")
        longest = max(map(len, texts))

        def encode(tokenizer: Any) -> list[EncodedPrompt]:
            return [
                EncodedPrompt(text, self._encode(tokenizer, text, add_special_tokens=add_special_tokens))
                for text in texts
            ]

        return await self.run(encode, max(longest, sum(map(len, texts)) // 16))

    def _encode(self, tokenizer: Any, text: str, *, add_special_tokens: bool) -> Any:
        ids = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        if not ids:
            raise RequestError("prompt has no tokens: a prompt needs at least one")
        return check_token_ids(ids, self.vocab_size, "prompt")

    # ---- conversations --------------------------------------------------------------------------------------------

    async def chat(self, request: ChatRequest | TokenizeRequest) -> EncodedPrompt:
        """A conversation through the chat template.

        Raises:
            ApiError: naming the message and the field.
        """
        if request.chat_template is not None:
            raise bad_request(
                "chat_template is not allowed: templates come with the model, not with requests", "chat_template"
            )
        options = template_options(request)

        def encode(tokenizer: Any) -> EncodedPrompt:
            messages = conversation(request.messages)
            tools = tool_definitions(request.tools)
            self._refuse_what_never_fits(messages, tools)
            if tools is not None and getattr(request, "tool_choice", None) != "none":
                if self.template_has_tools:
                    options["tools"] = tools
                else:
                    messages = with_tools(messages, tools)
            return encode_chat(messages, tokenizer, self.vocab_size, chat_template=self._template, **options)

        return await self.run(encode, 0)

    def _refuse_what_never_fits(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> None:
        """Raise `ApiError` for texts that no tokens could hold."""
        most = self.longest * self._longest_token
        characters = sum(len(m["content"]) for m in messages)
        if characters > most:
            raise too_long(-(-characters // self._longest_token), None, self.longest, at_least=True)
        called = [c["function"]["arguments"] for m in messages for c in m.get("tool_calls", ())]
        for name, value in (("tools", tools), ("messages", called)):
            size = len(msgspec.json.encode(value)) if value else 0
            if size > most:
                what = "tools" if name == "tools" else "arguments of earlier calls in messages"
                raise bad_request(f"{what} of {size} bytes: at most {most} can fit", name, "context_length_exceeded")

    async def tokenize(self, request: TokenizeRequest) -> tuple[list[int], list[str] | None]:
        """Ids of a prompt or a conversation, which may be longer than the model's context; and the tokens' names."""
        if (request.prompt is None) == (request.messages is None):
            raise bad_request("give either prompt or messages", "prompt")
        if request.messages is not None:
            ids = (await self.chat(request)).token_ids.tolist()
        else:
            text, special = request.prompt or "", request.add_special_tokens is not False

            def encode(tokenizer: Any) -> list[int]:
                return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

            ids = await self.run(encode, len(text))
        names = None
        if request.return_token_strs:
            names = await self.run(lambda tokenizer: list(tokenizer.convert_ids_to_tokens(ids)), len(ids))
        return ids, names

    async def detokenize(self, tokens: list[int]) -> str:
        """The text of ids, special tokens included."""
        if not tokens:
            return ""
        most = max(self.longest, MAX_DETOKENIZE)
        if len(tokens) > most:
            raise bad_request(f"tokens has {len(tokens)} entries; at most {most} are allowed", "tokens")
        try:
            checked = await self.aside(lambda: check_token_ids(tokens, self.vocab_size, "tokens"))
        except RequestError as error:
            raise of_request_error(error) from error
        return await self.run(lambda tokenizer: str(tokenizer.decode(checked.tolist())), len(tokens))

    def text_of(self, prompt: EncodedPrompt) -> str:
        """The prompt's text, decoded if it came as ids."""
        if prompt.text is not None:
            return prompt.text
        if self.tokenizer is None:
            return ""
        text: str = self.tokenizer.decode(prompt.token_ids.tolist(), clean_up_tokenization_spaces=False)
        return text

    def truncated(self, prompt: EncodedPrompt, keep: int | None) -> EncodedPrompt:
        """The last ``keep`` tokens: only for those who ask for it. -1 keeps what fits."""
        if keep is None:
            return prompt
        if keep == -1:
            keep = self.longest - 1
        if keep < 1:
            raise bad_request(
                f"truncate_prompt_tokens={keep} is not allowed: an integer >= 1, or -1 for what fits",
                "truncate_prompt_tokens",
            )
        if len(prompt.token_ids) <= keep:
            return prompt
        return EncodedPrompt(None, np.ascontiguousarray(prompt.token_ids[-keep:]))


def read_template(file: str | None) -> str | None:
    """A chat template of the operator's.

    Raises:
        ConfigError: it cannot be read, or is no template.
    """
    if file is None:
        return None
    try:
        text = Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template={file!r} cannot be read: {error}") from error
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        _compile_jinja_template(text)
    except TemplateSyntaxError as error:
        raise ConfigError(f"chat_template={file!r}, line {error.lineno}: {error.message}") from error
    return text


def _longest_token(tokenizer: Any) -> int:
    """Characters that one token can stand for; a bound, not an average."""
    if tokenizer is None:
        return 1
    return max(map(len, tokenizer.get_vocab()), default=1)


def conversation(messages: list[Message] | None) -> list[dict[str, Any]]:
    """Messages as chat templates read them.

    Raises:
        ApiError: no messages, too many, or content that is not text.
    """
    if not messages:
        raise bad_request("messages is empty: a conversation needs at least one message", "messages")
    if len(messages) > MAX_MESSAGES:
        raise bad_request(f"messages has {len(messages)} entries; at most {MAX_MESSAGES} are allowed", "messages")
    return [_message(i, message) for i, message in enumerate(messages)]


def _message(i: int, message: Message) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": _content(i, message)}
    for name in ("name", "tool_call_id"):
        if getattr(message, name) is not None:
            plain[name] = getattr(message, name)
    reasoning = message.reasoning_content if message.reasoning is None else message.reasoning
    if reasoning is not None:
        plain["reasoning_content"] = reasoning
    if len(message.tool_calls or ()) > MAX_TOOLS:
        raise bad_request(
            f"messages[{i}].tool_calls has {len(message.tool_calls or ())} entries; at most {MAX_TOOLS} are allowed",
            f"messages[{i}].tool_calls",
        )
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return plain


def _content(i: int, message: Message) -> str:
    content = message.content
    if content is None:
        if message.role == "assistant":
            return ""
        raise bad_request(f"messages[{i}].content is missing", f"messages[{i}].content")
    if isinstance(content, str):
        return content
    if len(content) > MAX_MESSAGES:
        raise bad_request(
            f"messages[{i}].content has {len(content)} parts; at most {MAX_MESSAGES} are allowed",
            f"messages[{i}].content",
        )
    for j, part in enumerate(content):
        where = f"messages[{i}].content[{j}]"
        if part.type not in ("text", "input_text", "output_text", "refusal"):
            raise unsupported(f"{where}: content of type {clip(part.type)!r}", where)
        if part.text is None:
            raise bad_request(f"{where}.text is missing", where)
    return "".join(part.text or "" for part in content)


def text_of(message: Message) -> str:
    """The text of a message that has been checked."""
    content = message.content
    return content or "" if not isinstance(content, list) else "".join(part.text or "" for part in content)


def _arguments(arguments: str | dict[str, Any]) -> Any:
    """Templates write the arguments as JSON themselves, so that they get the object."""
    if isinstance(arguments, dict):
        return arguments
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def tool_definitions(tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    """Tools as chat templates read them.

    Raises:
        ApiError: too many, without a name, or two with the same one.
    """
    if not tools:
        return None
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"tools has {len(tools)} entries; at most {MAX_TOOLS} are allowed", "tools")
    names = [tool.function.name for tool in tools]
    for i, name in enumerate(names):
        if not name or len(name) > 256:
            raise bad_request(f"tools[{i}].function.name={clip(name)!r} is not allowed: 1 to 256 characters", "tools")
        if name in names[:i]:
            raise bad_request(f"tools[{i}].function.name={clip(name)!r} is there twice", "tools")
    definitions: list[dict[str, Any]] = msgspec.to_builtins(tools)
    for definition in definitions:
        definition["function"].setdefault("description", "")
        definition["function"].setdefault("parameters", {"type": "object", "properties": {}})
    return definitions


def template_options(request: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """Options for the chat template that a request may choose.

    Raises:
        ApiError: one that it may not.
    """
    options: dict[str, Any] = {}
    for name, value in (request.chat_template_kwargs or {}).items():
        if name not in TEMPLATE_OPTIONS:
            raise bad_request(
                f"chat_template_kwargs holds {clip(name)!r}; allowed: {', '.join(TEMPLATE_OPTIONS)}",
                "chat_template_kwargs",
            )
        if value is not None and not isinstance(value, (bool, str)):
            raise bad_request(
                f"chat_template_kwargs.{name} is not allowed: true, false or a text", "chat_template_kwargs"
            )
        options[name] = value
    for name in ("add_generation_prompt", "continue_final_message", "reasoning_effort"):
        value = getattr(request, name)
        if value is not None:
            options[name] = value
    for name in ("add_generation_prompt", "continue_final_message"):
        if name in options and not isinstance(options[name], bool):
            raise bad_request(f"{name} is not allowed: true or false", name)
    if options.get("continue_final_message"):
        if options.get("add_generation_prompt"):
            raise bad_request(
                "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
            )
        options["add_generation_prompt"] = False
    return options


__all__ = ["ApiError", "Prompts", "conversation", "template_options", "tool_definitions"]
