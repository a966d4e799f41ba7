"""EngineService: what a client asks of an engine, in this process or in another."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from gapless.engine.stats import EngineStats
from gapless.request.outputs import FinishReason
from gapless.request.request import LoraRef, Request
from gapless.request.sampling_params import SamplingParams
from gapless.scheduler.stats import SchedulerStats


class EngineService(Protocol):
    """See the module. Requests come checked: by `refuse_what_never_fits` and what the attributes say.

    Attributes:
        vocab_size, eos_token_ids: of the model.
        longest: tokens, prompt and output, of the longest request that can be served.
        embeds_width, dtype: of the embeddings that prompts may bring; 0 if they cannot.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    longest: int
    embeds_width: int
    dtype: Any

    def raise_if_dead(self) -> None:
        """Raise `EngineDeadError` or `EngineClosedError` when no more work is taken."""
        ...

    def refuse_what_never_fits(self, prompt_len: int, max_tokens: int) -> None:
        """Raise `RequestError` for a request that no empty engine could finish."""
        ...

    def submit(self, requests: list[Request]) -> None:
        """Take requests, all in one turn of the loop."""
        ...

    def finish(self, request_id: int, reason: FinishReason) -> None:
        """End a request; ignored when it has ended already."""
        ...

    def stats(self) -> tuple[EngineStats, SchedulerStats]:
        """Copies of the counters."""
        ...

    # ---- adapters

    def locked(self, loras: Sequence[str | None]) -> AbstractContextManager[list[LoraRef | None]]:
        """The adapters of these names; requests with them are to be submitted before the block ends."""
        ...

    def refuse_unknown_lora(self, name: object) -> None:
        """Raise `RequestError` for a name that is not loaded; within `locked`."""
        ...

    # ---- structured output

    def compile(self, params: SamplingParams) -> None:
        """Make sure that `grammars` need not wait. May take seconds.

        Raises:
            RequestError: naming the field and what is wrong with it.
        """
        ...

    def grammars(self, params: SamplingParams, stop_token_ids: tuple[int, ...], count: int) -> Sequence[Any]:
        """What goes with ``count`` requests as their grammars; None for one that is compiled elsewhere."""
        ...
