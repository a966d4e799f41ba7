"""What a committed step has brought, and all that the loop has to tell of its requests until it is told.

Touched by the loop's thread only.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gapless.batch.row_layout import I32, Bools
from gapless.batch.row_table import RowTable
from gapless.request.messages import Finished, PromptRecords, StepMessage

I64 = npt.NDArray[np.int64]
NO_IDS = np.zeros(0, np.int64)
NO_TOKENS = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a step has brought to the rows that still live.

    Attributes:
        rows: int32 ``[n]``, those that drew.
        last: int32 ``[n]``, the token that each of them ends with now, a -1 included.
        bad, stopped: bool ``[n]``: that token is -1, or a stop token.
        of, tokens: int32 ``[m]``: the new tokens, -1 aside, and the row of each, in order.
        records: int32 ``[m, Record.COUNT]`` beside the tokens, or None.
        overrun: tokens that came for rows that had ended.
    """

    rows: I32
    last: I32
    bad: Bools
    stopped: Bools
    of: I32
    tokens: I32
    records: I32 | None
    overrun: int


class MessageBuilder:
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
        self._ids, self._tokens = NO_IDS, NO_TOKENS
        self._records: I32 | None = None

    def publish(self, drawn: Drawn) -> None:
        """The new tokens of those rows that stream."""
        streaming = self._rows.streaming[drawn.of]
        of = drawn.records[streaming] if drawn.records is not None else None
        self.stream(self._rows.ids[drawn.of[streaming]], drawn.tokens[streaming], of)

    def stream(self, ids: I64, tokens: I32, records: I32 | None) -> None:
        """The step's tokens ``[n]`` for the requests with these ``ids [n]``, which stream."""
        self._ids, self._tokens, self._records = ids, tokens, records

    def take(self, version: int) -> StepMessage | None:
        """All of it, and the version of the weights; None when there is nothing to tell."""
        if not len(self._ids) and not self.finished and self.prompts is None:
            return None
        message = StepMessage(
            self._ids,
            self._tokens,
            tuple(self.finished),
            time.monotonic(),
            self._records,
            self.prompts,
            version,
            tuple(self.waits),
            tuple(self.prefills),
        )
        self.waits, self.prefills, self.finished = [], [], []
        self._ids, self._tokens, self._records, self.prompts = NO_IDS, NO_TOKENS, None, None
        return message
