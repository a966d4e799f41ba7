"""What the loop's thread tells the output thread: one message per step, arrays instead of objects."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gapless.request.outputs import FinishReason


@dataclass(frozen=True, slots=True)
class Finished:
    """The one final word on a request.

    Attributes:
        id: `Request.id`.
        token_ids: every new token, int32, a copy that the receiver owns; a prefix of what was asked for after an abort.
        stop_token: the id from ``stop_token_ids`` or the end-of-sequence id that ended it, else None.
        error: what went wrong when the reason is ERROR.
        first_token_time: ``time.monotonic()`` when the first new token was committed; None without one.
        weight_versions: of the first and of the last step whose work it holds.
        cached_tokens: of the prompt, that a prefix held when the request started first.
    """

    id: int
    token_ids: npt.NDArray[np.int32]
    reason: FinishReason
    stop_token: int | None = None
    error: str | None = None
    num_preemptions: int = 0
    first_token_time: float | None = None
    weight_versions: tuple[int, int] = (0, 0)
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PromptRecords:
    """Log-probabilities of tokens of prompts.

    Attributes:
        ids: int64 ``[m]``, `Request.id`.
        positions: int32 ``[m]`` of the tokens. After a preemption none comes twice.
        records: int32 ``[m, Record.COUNT]``.
    """

    ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int32]
    records: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepMessage:
    """What one step brought.

    Attributes:
        ids, tokens: int64 and int32 ``[n]``: the new tokens of *streaming* requests, at most one per request. A
            request's last token is here too, before its entry in ``finished``.
        finished: requests that ended in this step.
        time: ``time.monotonic()`` when the step was committed.
        records: int32 ``[n, Record.COUNT]``, log-probabilities beside ``ids``, in steps in which some row asks for
            them; what stands there for other rows means nothing.
        prompts: what the step brought for prompts; comes before the request's first token.
        weight_version: of the weights that the step read.
        waits: seconds that requests had waited when their first step was planned, for each that has started since the
            message before.
        prefills: of the same requests, tokens of the prompt that no prefix held.
    """

    ids: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int32]
    finished: tuple[Finished, ...]
    time: float
    records: npt.NDArray[np.int32] | None = None
    prompts: PromptRecords | None = None
    weight_version: int = 0
    waits: tuple[float, ...] = ()
    prefills: tuple[int, ...] = ()
