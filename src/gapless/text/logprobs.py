"""Records of a step (arrays) to `Logprob` objects, on the output thread."""

from __future__ import annotations

from typing import Any

from gapless.batch.row_layout import I32, Record
from gapless.request.outputs import Logprob


class LogprobReader:
    """Turns the records of one completion into what vLLM's users know; keeps the sum over the chosen tokens.

    Args:
        tokenizer: gives the texts of single tokens; None leaves them out.
        count: most likely tokens that were asked for.
    """

    __slots__ = ("_count", "_texts", "_tokenizer", "cumulative")

    def __init__(self, tokenizer: Any, count: int) -> None:
        self._tokenizer = tokenizer
        self._count = count
        self._texts: dict[int, str] = {}
        self.cumulative = 0.0

    def read(self, token: int, record: I32) -> dict[int, Logprob]:
        """The chosen token first, then the most likely ones, by id; the chosen one is not named twice."""
        floats = record.view("<f4")
        chosen = float(floats[Record.LOGPROB])
        self.cumulative += chosen
        found = {token: Logprob(chosen, int(record[Record.RANK]), self._text(token))}
        ids = record[Record.IDS : Record.IDS + self._count].tolist()
        values = floats[Record.LOGPROBS : Record.LOGPROBS + self._count].tolist()
        for rank, (id, value) in enumerate(zip(ids, values, strict=True), 1):
            if id != token:
                found[id] = Logprob(value, rank, self._text(id))
        return found

    def take_back(self, token: int, last: dict[int, Logprob]) -> None:
        """The latest token does not count after all."""
        self.cumulative -= last[token].logprob

    def _text(self, token: int) -> str | None:
        if self._tokenizer is None:
            return None
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._tokenizer.decode([token], clean_up_tokenization_spaces=False)
        return text
