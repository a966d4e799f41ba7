"""Incremental detokenization with nothing but ``decode``: for slow tokenizers and decoders of unknown make.

Each token costs two decodes of at most 2 * `MAX_PENDING_TOKENS` tokens. Exact for well-formed text; invalid
bytes become U+FFFD, possibly another number of them than decoding the whole gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MAX_PENDING_TOKENS = 8
"""Tokens that `WindowedDetokenizer` holds back at most."""

_BROKEN = "\ufffd"


class WindowedDetokenizer:
    """Any tokenizer: decodes the tokens of the last piece with and without the new ones.

    ``_window[:_start]`` was sent as ``_sent`` and gives the context (is this the first word?);
    ``_window[_start:]`` is pending, at most `MAX_PENDING_TOKENS`.
    """

    def __init__(self, tokenizer: Any, prompt_tail: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._skipped = frozenset(tokenizer.all_special_ids) if skip_special_tokens else frozenset()
        text = self._decode(prompt_tail) if prompt_tail else ""
        self._window = list(prompt_tail) if text.endswith(_BROKEN) else []
        self._start = len(self._window)
        self._sent = text if self._window else ""

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def push(self, token_id: int, /) -> str:
        """See `Detokenizer`."""
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        full = len(self._window) - self._start >= MAX_PENDING_TOKENS
        if text.endswith(_BROKEN) and not full:
            return ""
        piece = self._new(text)
        if piece or full:
            self._window = self._window[self._start :]
            self._start = len(self._window)
            self._sent = self._decode(self._window)
        return piece

    def finish(self) -> str:
        """See `Detokenizer`."""
        piece = self._new(self._decode(self._window)) if len(self._window) > self._start else ""
        self._start = len(self._window)
        return piece

    def _new(self, text: str) -> str:
        if text.startswith(self._sent):
            return text[len(self._sent) :]
        return text[len(self._sent.rstrip(_BROKEN)) :]  # the output completed the prompt's last character
