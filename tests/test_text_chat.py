"""Prompts and conversations: what is accepted, what is refused and in which words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gapless.errors import RequestError
from gapless.text.chat import check_token_ids, encode_chat, encode_prompt
from text_tokenizers import byte_level

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no bad role') }}{% endif %}"
    "<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"
    "{% if mood is defined %}{{ mood }}{% endif %}"
)


@pytest.fixture
def tokenizer() -> Any:
    return byte_level.__wrapped__()


def test_forms_of_a_prompt(tokenizer: Any) -> None:
    text, ids, _ = encode_prompt("hello", tokenizer, len(tokenizer))
    assert text == "hello"
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == "hello"
    assert np.array_equal(encode_prompt({"prompt": "hello"}, tokenizer, len(tokenizer)).token_ids, ids)
    given = encode_prompt({"prompt_token_ids": [1, 2, 3]}, None, 4)
    assert given.text is None
    assert given.token_ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "ids",
    [
        (1, 2),
        np.array([1, 2]),
        np.array([1, 2], np.uint8),
        torch.tensor([1, 2]),
        [np.int64(1), np.int32(2)],
        range(1, 3),
    ],
)
def test_integer_sequences(ids: Any) -> None:
    got = check_token_ids(ids, 3)
    assert got.dtype == np.int32
    assert got.tolist() == [1, 2]
    assert not np.shares_memory(got, ids) if isinstance(ids, np.ndarray) else True


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "prompt_token_ids is empty"),
        (np.zeros(0), "prompt_token_ids is empty"),
        ([1, -1], r"prompt_token_ids\[1\]=-1 .* 0 to 9 are"),
        ([1, 2, 10], r"prompt_token_ids\[2\]=10 .* 0 to 9 are"),
        ([0, 2**80], r"prompt_token_ids\[1\]=1208925819614629174706176"),
        ([1, 2.0], r"prompt_token_ids\[1\]=2.0 .* float"),
        ([1, True], r"prompt_token_ids\[1\]=True .* bool"),
        ([1, None], r"prompt_token_ids\[1\]=None"),
        ([1, "2"], r"prompt_token_ids\[1\]='2'"),
        ([[1, 2]], r"prompt_token_ids\[0\]=\[1, 2\] .* list"),
        (np.array([1.0, 2.0]), r"prompt_token_ids\[0\]=1.0 .* float64"),
        (np.array([True]), r"prompt_token_ids\[0\]=True .* bool"),
        (np.array([[1]]), r"shape \(1, 1\)"),
        (np.array([2**64 - 1], np.uint64), r"prompt_token_ids\[0\]=18446744073709551615"),
        (torch.tensor([1.5]), r"prompt_token_ids\[0\]=1.5 .* float32"),
        (torch.tensor([1.5], dtype=torch.bfloat16), "tensor"),
        (torch.tensor([False]), r"prompt_token_ids\[0\]=False"),
        (torch.tensor(3), r"shape \(\)"),
        ("12", "type str"),
        ({1, 2}, "type set"),
        (7, "type int"),
    ],
)
def test_refused_ids(ids: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        encode_prompt({"prompt_token_ids": ids}, None, 10)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "no tokens"),
        (3, "type int"),
        (None, "type NoneType"),
        (b"x", "type bytes"),
        ([1, 2], "wrap ids as"),
        ({}, "exactly one"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "exactly one"),
        ({"prompts": "a"}, "Did you mean 'prompt'"),
        ({"prompt": 5}, "type int"),
        ("a\ud800", "lone surrogate .* index 1"),
    ],
)
def test_refused_prompts(tokenizer: Any, prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        encode_prompt(prompt, tokenizer, len(tokenizer))


def test_text_without_or_beyond_the_tokenizer(tokenizer: Any) -> None:
    with pytest.raises(RequestError, match="needs a tokenizer"):
        encode_prompt("a", None, 10)
    with pytest.raises(RequestError, match=r"token ids of the text prompt\[0\]=.* 0 to 4 are"):
        encode_prompt("a", tokenizer, 5)


def test_chat(tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATE
    messages = [{"role": "user", "content": "hello"}]
    text, ids, _ = encode_chat(messages, tokenizer, len(tokenizer))
    assert text == "<s>user:hello</s><s>assistant:"
    assert tokenizer.decode(ids) == text
    assert ids.tolist().count(tokenizer.bos_token_id) == 2
    ended = encode_chat(messages, tokenizer, len(tokenizer), add_generation_prompt=False, mood="!")
    assert ended.text == "<s>user:hello</s>!"
    other = encode_chat(messages, tokenizer, len(tokenizer), chat_template="{{ messages[0].content }}")
    assert other.text == "hello"
    calls = [*messages, {"role": "assistant", "tool_calls": [{"name": "f"}]}]
    assert encode_chat(calls, tokenizer, len(tokenizer)).text == text.replace(
        "<s>assistant:", "<s>assistant:</s><s>assistant:"
    )
    assert "content" not in calls[1]  # the caller's data is not touched


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "messages of type str"),
        ({"role": "user", "content": "a"}, "messages of type dict"),
        ([], "messages is empty"),
        (["hello"], r"messages\[0\] is of type str"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], r"messages\[1\] has no 'role'"),
        ([{"role": 1, "content": "b"}], r"messages\[0\]\['role'\]=1"),
        ([{"role": "", "content": "b"}], r"messages\[0\]\['role'\]=''"),
        ([{"role": "user"}], r"messages\[0\] has no 'content'"),
        ([{"role": "user", "content": None}], r"messages\[0\]\['content'\] is of type NoneType"),
        ([{"role": "user", "content": ["a"]}], r"messages\[0\]\['content'\] is of type list"),
        ([{"role": "user", "content": "a", 1: 2}], r"messages\[0\] has a field 1"),
        ([{"role": "bad", "content": "a"}], "no bad role"),
    ],
)
def test_refused_messages(tokenizer: Any, messages: Any, message: str) -> None:
    tokenizer.chat_template = TEMPLATE
    with pytest.raises(RequestError, match=message):
        encode_chat(messages, tokenizer, len(tokenizer))


def test_no_template(tokenizer: Any) -> None:
    with pytest.raises(RequestError, match="no chat template: pass chat_template="):
        encode_chat([{"role": "user", "content": "a"}], tokenizer, len(tokenizer))
    with pytest.raises(RequestError, match="needs a tokenizer"):
        encode_chat([{"role": "user", "content": "a"}], None, 10)
