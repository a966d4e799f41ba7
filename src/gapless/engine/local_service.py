"""LocalService: an `EngineService` in this process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from gapless.engine.adapters import LoadedAdapters
from gapless.engine.lifetime import Lifetime
from gapless.engine.stats import EngineStats
from gapless.grammar.compiler import GrammarCompiler
from gapless.request.outputs import FinishReason
from gapless.request.request import LoraRef, Request
from gapless.request.sampling_params import SamplingParams
from gapless.scheduler.stats import SchedulerStats


class LocalService:
    """See the module.

    Args:
        life: of the engine.
        tokenizer: what grammars are about, or None.
    """

    def __init__(self, life: Lifetime, tokenizer: Any) -> None:
        built = life.built
        self.vocab_size: int = built.model.vocab_size
        self.eos_token_ids: tuple[int, ...] = tuple(built.model.eos_token_ids)
        self.longest = built.scheduler.longest
        self.embeds_width = built.embeds_width
        self.dtype: Any = getattr(built.model, "dtype", None)
        self.adapters = LoadedAdapters(built.engine, built.scheduler, built.runner, built.config.allow_missing)
        self._life, self._tokenizer = life, tokenizer
        self._engine, self._scheduler = built.engine, built.scheduler

    def raise_if_dead(self) -> None:
        """See `Engine.raise_if_dead`."""
        self._engine.raise_if_dead()

    def refuse_what_never_fits(self, prompt_len: int, max_tokens: int) -> None:
        """See `Scheduler.refuse_what_never_fits`."""
        self._scheduler.refuse_what_never_fits(prompt_len, max_tokens)

    def submit(self, requests: list[Request]) -> None:
        """See `Engine.submit`."""
        self._engine.submit(requests)

    def finish(self, request_id: int, reason: FinishReason) -> None:
        """See `Engine.finish`."""
        self._engine.finish(request_id, reason)

    def stats(self) -> tuple[EngineStats, SchedulerStats]:
        """See `Engine.counters`."""
        engine, scheduler = self._engine.counters()
        engine.messages_peak = self._life.messages.peak
        return engine, scheduler

    def locked(self, loras: Sequence[str | None]) -> AbstractContextManager[list[LoraRef | None]]:
        """See `LoadedAdapters.locked`."""
        return self.adapters.locked(loras)

    def refuse_unknown_lora(self, name: object) -> None:
        """See `LoadedAdapters.refuse_unknown`."""
        self.adapters.refuse_unknown(name)

    def compile(self, params: SamplingParams) -> None:
        """See `GrammarCompiler.compile`."""
        self._compiler().compile(params)

    def grammars(self, params: SamplingParams, stop_token_ids: tuple[int, ...], count: int) -> Sequence[Any]:
        """See `GrammarCompiler.grammars`."""
        return self._compiler().grammars(params, stop_token_ids, count)

    def _compiler(self) -> GrammarCompiler:
        """Made when the first request needs it: it has a process of its own."""
        life = self._life
        with life.compiling:
            if life.compiler is None:
                self._engine.raise_if_dead()
                life.compiler = GrammarCompiler(self._tokenizer, self.vocab_size, self.eos_token_ids)
            return life.compiler
