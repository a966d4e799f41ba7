"""Text in: prompts and conversations to token ids, checked before they come near a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gapless.errors import RequestError, did_you_mean
from gapless.request.prompt_embeds import PromptEmbeds

_FORMS = 'a text, {"prompt": text} or {"prompt_token_ids": [...]}'


class EncodedPrompt(NamedTuple):
    """A prompt as the engine takes it: its text, if it had one, its ids, int32 ``[prompt_len]``, and the embeddings in
    place of some of them."""

    text: str | None
    token_ids: npt.NDArray[np.int32]
    embeds: PromptEmbeds | None = None


def encode_prompt(prompt: object, tokenizer: Any, vocab_size: int) -> EncodedPrompt:
    """Encodes and checks one prompt.

    Args:
        prompt: a text, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``. The ids may be a list, a
            tuple, an integer NumPy array or an integer tensor, with one dimension.
        tokenizer: a ``transformers`` tokenizer, which adds its special tokens to a text; None if there is
            none.
        vocab_size: ids must be below it.

    Raises:
        RequestError: naming what is wrong, for ids with index and value.
    """
    if isinstance(prompt, Mapping):
        for key in prompt:
            if key not in ("prompt", "prompt_token_ids"):
                hint = did_you_mean(str(key), ["prompt", "prompt_token_ids"])
                raise RequestError(f"unknown prompt field {key!r}.{hint} A prompt is {_FORMS}")
        if len(prompt) != 1:
            raise RequestError(
                f"a prompt needs exactly one of its fields, got {sorted(prompt)}: it is {_FORMS}"
            )
        if "prompt_token_ids" in prompt:
            return EncodedPrompt(None, check_token_ids(prompt["prompt_token_ids"], vocab_size))
        prompt = prompt["prompt"]
    if not isinstance(prompt, str):
        hint = "; wrap ids as {'prompt_token_ids': ids}" if _looks_like_ids(prompt) else ""
        raise RequestError(f"a prompt of type {type(prompt).__name__} is not allowed: it is {_FORMS}{hint}")
    return EncodedPrompt(prompt, _encode_text(prompt, tokenizer, vocab_size, add_special_tokens=True))


def check_token_ids(ids: object, vocab_size: int, name: str = "prompt_token_ids") -> npt.NDArray[np.int32]:
    """Token ids as a fresh int32 array ``[len(ids)]``.

    Raises:
        RequestError: empty, not one-dimensional, or an id that is a float, a bool, negative or >=
            ``vocab_size``.
    """
    if hasattr(ids, "detach"):  # a tensor, without importing torch
        try:
            ids = ids.detach().cpu().numpy()
        except (TypeError, NotImplementedError) as error:  # a type that NumPy lacks, or no data at all
            raise RequestError(f"{name} is a tensor that holds no integers: {error}") from error
    if isinstance(ids, np.ndarray):
        if ids.ndim != 1:
            raise RequestError(f"{name} has shape {ids.shape}, not allowed: one dimension is")
        if ids.size and ids.dtype.kind not in "iu":
            raise _bad_id(name, 0, ids[:1].tolist()[0], f"an integer is (the array is {ids.dtype})")
        array = ids
    elif isinstance(ids, Sequence) and not isinstance(ids, (str, bytes)):
        # The set of types first: NumPy would turn [1, True] into integers without a word.
        for kind in set(map(type, ids)):
            if kind is bool or not issubclass(kind, (int, np.integer)):
                index = next(i for i, t in enumerate(ids) if type(t) is kind)
                raise _bad_id(name, index, ids[index], f"an integer is, this is {kind.__name__}")
        try:
            array = np.array(ids, dtype=np.int64)
        except OverflowError:
            index = next(i for i, t in enumerate(ids) if not 0 <= t < 2**63)
            raise _bad_id(name, index, ids[index], f"0 to {vocab_size - 1} are") from None
    else:
        raise RequestError(f"{name} of type {type(ids).__name__} is not allowed: a list of integers is")
    if not array.size:
        raise RequestError(f"{name} is empty: a prompt needs at least one token")
    if array.min() < 0 or array.max() >= vocab_size:
        index = int(np.flatnonzero((array < 0) | (array >= vocab_size))[0])
        raise _bad_id(name, index, int(array[index]), f"0 to {vocab_size - 1} are")
    return array.astype(np.int32)


def encode_chat(
    messages: object,
    tokenizer: Any,
    vocab_size: int,
    *,
    add_generation_prompt: bool = True,
    chat_template: str | None = None,
    **template_options: Any,
) -> EncodedPrompt:
    """Renders one conversation with the tokenizer's chat template and encodes it.

    Args:
        messages: a list of ``{"role": ..., "content": ...}``, both texts. Other fields reach the template
            as they are; ``content`` may be missing or None beside ``tool_calls``.
        tokenizer: a ``transformers`` tokenizer.
        vocab_size: ids must be below it.
        add_generation_prompt: end with the header of the assistant's turn.
        chat_template: a Jinja template instead of the tokenizer's own.
        template_options: for the template, such as ``tools``, ``continue_final_message``,
            ``enable_thinking``.

    Raises:
        RequestError: no template, a malformed message (with its index and field), or the template's own
            refusal.
    """
    conversation = check_messages(messages)
    if tokenizer is None:
        raise RequestError(
            "a conversation needs a tokenizer and there is none: give prompt_token_ids instead"
        )
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise RequestError(
            f"the tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat template: "
            "pass chat_template=, set tokenizer.chat_template, or use a text prompt "
            "(a base model knows no conversation)"
        )
    try:
        text = tokenizer.apply_chat_template(
            conversation,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            chat_template=chat_template,
            **template_options,
        )
    except Exception as error:  # a template is a program, and may fail in any way
        raise RequestError(f"the chat template refuses these messages: {error}") from error
    # The template has written the special tokens itself.
    return EncodedPrompt(text, _encode_text(text, tokenizer, vocab_size, add_special_tokens=False))


def check_messages(messages: object) -> list[dict[str, Any]]:
    """The messages of one conversation as new dicts.

    Raises:
        RequestError: naming the index and the field.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError(
            f"messages of type {type(messages).__name__} are not allowed: a list of "
            "{'role': ..., 'content': ...} is"
        )
    if not messages:
        raise RequestError("messages is empty: a conversation needs at least one message")
    checked = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(
                f"messages[{i}] is of type {type(message).__name__}: a dict with 'role' and 'content' is"
            )
        for key in message:
            if not isinstance(key, str):
                raise RequestError(f"messages[{i}] has a field {key!r}: names of fields are texts")
        role = message.get("role")
        if "role" not in message:
            raise RequestError(f"messages[{i}] has no 'role', only {sorted(message)}")
        if not isinstance(role, str) or not role:
            raise RequestError(f"messages[{i}]['role']={role!r} is not allowed: a text such as 'user' is")
        content = message.get("content")
        if content is None and message.get("tool_calls"):
            content = ""
        if content is None and "content" not in message:
            raise RequestError(f"messages[{i}] has no 'content', only {sorted(message)}")
        if not isinstance(content, str):
            raise RequestError(
                f"messages[{i}]['content'] is of type {type(content).__name__}: a text is allowed"
            )
        checked.append({**message, "content": content})
    return checked


def _encode_text(
    text: str, tokenizer: Any, vocab_size: int, *, add_special_tokens: bool
) -> npt.NDArray[np.int32]:
    if tokenizer is None:
        raise RequestError(
            "a text prompt needs a tokenizer and there is none: give {'prompt_token_ids': [...]}"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the prompt has a lone surrogate {text[error.start]!r} at index {error.start}: "
            "it is not valid Unicode"
        ) from None
    ids = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    if not ids:
        raise RequestError(f"the prompt {text!r} has no tokens: a prompt needs at least one")
    return check_token_ids(ids, vocab_size, "token ids of the text prompt")


def _looks_like_ids(value: object) -> bool:
    return hasattr(value, "dtype") or (
        isinstance(value, Sequence) and len(value) > 0 and isinstance(value[0], (int, np.integer))
    )


def _bad_id(name: str, index: int, value: object, allowed: str) -> RequestError:
    return RequestError(f"{name}[{index}]={value!r} is not allowed: {allowed}")
