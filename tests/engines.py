"""A tiny engine with a tokenizer for the tests of the public API, and ways to hold, break and watch it."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from models import tiny
from text_tokenizers import byte_level

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{{ '' if tools }}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
    "block_size": 8,
    "num_kv_blocks": 129,
    "check_model": False,
}
EOS = 1


@cache
def tokenizer() -> Any:
    """Byte-level BPE with a chat template."""
    own = copy.deepcopy(byte_level())
    own.chat_template = TEMPLATE
    return own


@cache
def model() -> Any:
    """A random Llama over the tokenizer's vocabulary."""
    return tiny("llama", vocab_size=len(tokenizer()), num_hidden_layers=2)


def options(**changes: Any) -> dict[str, Any]:
    """Arguments of `LLM` and `AsyncLLM`."""
    return {"model": model(), "tokenizer": tokenizer(), **OPTIONS, **changes}


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Fail unless ``condition`` comes true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"still waiting: {what}"
        time.sleep(0.005)


def check_idle(llm: Any) -> None:
    """Every request has ended and every block, row and label has come back."""
    client = llm._client
    wait_until(lambda: client.pending == 0, "the last outputs")
    scheduler = client._scheduler
    wait_until(lambda: not scheduler.has_requests, "the scheduler's requests")
    wait_until(lambda: scheduler.pool.available == scheduler.pool.capacity, "the blocks")
    wait_until(lambda: scheduler.rows.num_free == len(scheduler.rows.requests), "the rows")
    client._engine.call(scheduler.check)
    assert not client._groups


class Gate:
    """Stands before each forward pass of an engine's model, on the device's thread."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner = inner
        self.passed = 0
        self.open = threading.Event()
        self.open.set()
        self.error: BaseException | None = None

    def __call__(self, *arguments: Any) -> Any:
        assert self.open.wait(60)
        self.passed += 1
        if self.error is not None:
            raise self.error
        return self.inner(*arguments)


@contextmanager
def gated(llm: Any) -> Iterator[Gate]:
    """Hold or break the steps of an engine."""
    inner = llm._client.model
    gate = Gate(inner.forward)
    inner.forward = gate
    try:
        yield gate
    finally:
        gate.open.set()
        del inner.forward
