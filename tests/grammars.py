"""Grammars over the hash model's vocabulary, whose ids spell one character each; and an oracle without an engine."""

from __future__ import annotations

import json
import string
from functools import cache
from typing import Any

import llguidance
import numpy as np
import torch

from gapless.grammar.matcher import Grammar
from gapless.request.request import Request

CHARACTERS = '{}[]":, .-' + string.digits + string.ascii_lowercase + "ABCDEFGHIJKLM"
VOCAB, EOS = 61, 1  # id 0 is special too


class _Spelling:
    eos_token_id, bos_token_id = EOS, 0
    tokens = (b"<pad>", b"<eos>", *(c.encode() for c in CHARACTERS))
    special_token_ids = (0, 1)

    def __call__(self, text: Any) -> list[int]:
        data = text if isinstance(text, bytes) else text.encode()
        return [self.tokens.index(bytes([b])) for b in data]


@cache
def tokenizer() -> Any:
    assert len(CHARACTERS) == VOCAB - 2
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Spelling()), n_vocab=VOCAB)


def text(tokens: list[int]) -> str:
    return "".join(CHARACTERS[t - 2] for t in tokens if t > 1)


def schema(value: dict[str, Any]) -> str:
    compact: Any = {"whitespace_flexible": False}
    return str(llguidance.LLMatcher.grammar_from_json_schema(json.dumps(value), overrides=compact))


def regex(pattern: str) -> str:
    return str(llguidance.LLMatcher.grammar_from_regex(pattern))


def matcher(grammar: str) -> Any:
    made = llguidance.LLMatcher(tokenizer(), grammar, log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def constrain(request: Request, grammar: str, keep: list[int] | None = None) -> Request:
    """Give the request a grammar, as the client would."""
    mask = None
    if keep is not None:
        bits = np.zeros(64, np.bool_)
        bits[keep] = True
        mask = np.packbits(bits, bitorder="little").view(np.int32)
    request.grammar = Grammar(matcher(grammar), mask)
    return request


def allowed(grammar: str, output: list[int]) -> list[int]:
    """Ids that may follow, found by a matcher that starts anew."""
    fresh = matcher(grammar)
    assert not output or fresh.consume_tokens(output), fresh.get_error()
    bits = np.unpackbits(np.frombuffer(fresh.compute_bitmask(), np.uint8), bitorder="little")
    return np.flatnonzero(bits[:VOCAB]).tolist()


def expected(model: Any, request: Request, grammar: str) -> list[int]:
    """What a greedy request gives: each token chosen from the whole text before it."""
    out: list[int] = []
    prompt = request.prompt_token_ids.tolist()
    while len(out) < request.max_tokens:
        logits = model.logits_of(prompt + out)
        ids = torch.tensor(allowed(grammar, out))
        out.append(int(ids[logits[ids].argmax()]))
        if out[-1] in request.stop_token_ids:
            break
    return out
