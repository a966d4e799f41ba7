"""Outbox: what the loop has to tell about its requests, until it is told. Touched by the loop's thread only."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from gapless.batch.row_layout import I32
from gapless.batch.row_table import RowTable
from gapless.request.messages import Finished, PromptRecords, StepMessage

I64 = npt.NDArray[np.int64]
NO_IDS = np.zeros(0, np.int64)
NO_TOKENS = np.zeros(0, np.int32)


class Outbox:
    """See the module.

    Attributes:
        finished: requests that have ended.
        waits, prefills: of requests that have started: the seconds that they waited, and the tokens of their prompts
            that no prefix held.
        prompts: log-probabilities of prompts.
    """

    def __init__(self, rows: RowTable) -> None:
        self._rows = rows
        self.finished: list[Finished] = []
        self.waits: list[float] = []
        self.prefills: list[int] = []
        self.prompts: PromptRecords | None = None
        self._stream_ids, self._stream_tokens = NO_IDS, NO_TOKENS
        self._stream_records: I32 | None = None

    def tell(self, rows: I32, drawn: I32, records: I32 | None) -> None:
        """The tokens ``[n]`` that a step has brought to ``rows [n]``, with their records ``[n, Record.COUNT]``."""
        streaming = self._rows.streaming[rows]
        of = records[streaming] if records is not None else None
        self.stream(self._rows.ids[rows[streaming]], drawn[streaming], of)

    def stream(self, ids: I64, tokens: I32, records: I32 | None) -> None:
        """The step's tokens ``[n]`` for the requests with these ``ids [n]``, which stream."""
        self._stream_ids, self._stream_tokens, self._stream_records = ids, tokens, records

    def message(self, version: int) -> StepMessage | None:
        """All of it, and the version of the weights; None when there is nothing to tell."""
        if not len(self._stream_ids) and not self.finished and self.prompts is None:
            return None
        message = StepMessage(
            self._stream_ids,
            self._stream_tokens,
            tuple(self.finished),
            time.monotonic(),
            self._stream_records,
            self.prompts,
            version,
            tuple(self.waits),
            tuple(self.prefills),
        )
        self.waits, self.prefills = [], []
        self._stream_ids, self._stream_tokens, self._stream_records, self.prompts = NO_IDS, NO_TOKENS, None, None
        self.finished = []
        return message
