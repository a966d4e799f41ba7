"""EngineClient: what `LLM` and `AsyncLLM` share: an engine in this process, its output side, and their control.

Threads: the loop's thread puts one message per step into a queue; the output thread takes it, detokenizes, and calls
back.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapless.config import EngineConfig
from gapless.engine import pause
from gapless.engine.control import PauseMode
from gapless.engine.lifetime import Lifetime
from gapless.engine.request_client import RequestClient
from gapless.engine.submission import Submission
from gapless.engine.watched_queue import WatchedQueue
from gapless.errors import ConfigError
from gapless.request.messages import StepMessage

if TYPE_CHECKING:
    from gapless.engine.adapters import LoadedAdapters
    from gapless.engine.assemble import Progress
    from gapless.model.weights import Named
    from gapless.runner.keys import Key

__all__ = ["EngineClient", "Submission", "find_tokenizer"]


def _capture_bar(keys: list[Key]) -> Any:
    from tqdm.auto import tqdm

    return tqdm(keys, desc="graphs", disable=None, leave=False)  # None: only on a terminal


def find_tokenizer(model: Any, tokenizer: Any) -> Any:
    """The tokenizer that is meant: an object as it is, a folder or name loaded, ``"auto"`` the model's own."""
    if tokenizer is not None and not isinstance(tokenizer, (str, Path)):
        return tokenizer
    from gapless.model.load.loading import check_source, load_tokenizer

    if tokenizer == "auto":
        if isinstance(model, (str, Path)):
            check_source(model)  # first, or the tokenizer would be blamed for a config that cannot be read
            return load_tokenizer(model)
        with contextlib.suppress(ConfigError):  # where an object came from may be gone
            return load_tokenizer(getattr(getattr(model, "config", None), "_name_or_path", None) or None)
        return None
    found = load_tokenizer(tokenizer)
    if found is None and tokenizer is not None:
        raise ConfigError(f"tokenizer={str(tokenizer)!r}: there is no tokenizer of that folder or name")
    return found


def _sampling_defaults(model: Any, config: EngineConfig) -> dict[str, float]:
    if not config.generation_config:
        return {}
    from gapless.model.load.sampling_defaults import sampling_defaults

    return sampling_defaults(model)


class EngineClient(RequestClient):
    """See the module.

    Args:
        model: see `gapless.engine.build.build`.
        config: of the engine.
        tokenizer: a ``transformers`` tokenizer; ``"auto"`` finds the model's own; None for none.
        progress: shows the captures at start; by default a bar, on a terminal.
    """

    def __init__(
        self, model: Any, config: EngineConfig, tokenizer: Any = "auto", progress: Progress | None = None
    ) -> None:
        from gapless.engine.build import build  # late, as what follows: reading options needs no torch

        super().__init__(find_tokenizer(model, tokenizer))
        messages: WatchedQueue[StepMessage | None] = WatchedQueue("messages to the output thread")
        built = build(model, config, messages.put, self._outputs.fail, progress=progress or _capture_bar)
        self._built, self._engine, self._scheduler = built, built.engine, built.scheduler
        self.model: Any = built.model
        self._life = Lifetime(built, messages, self._outputs)
        try:
            from gapless.engine.local_service import LocalService

            service = LocalService(self._life, self.tokenizer)
            self.adapters: LoadedAdapters = service.adapters
            self._serve(service, built.config, _sampling_defaults(model, config))
            self._life.start(self)
        except BaseException:
            self._life.close()
            raise

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; see `LLM.reset_prefix_cache`."""
        self._engine.call(self._scheduler.reset_prefix_cache)

    def prepare_weights(self, weights: Named | None) -> Any:
        """Check new weights, on the thread whose CUDA streams they were made on; see `LLM.update_weights`."""
        self._engine.raise_if_dead()
        return self._built.runner.prepare_weights(weights)

    def update_weights(self, update: Any, *, recompute: bool) -> int:
        """Put checked weights in place; see `LLM.update_weights`. From any thread."""
        if not isinstance(recompute, bool):
            raise ConfigError(f"recompute={recompute!r} is not allowed: True or False")

        def change() -> int:
            self._built.runner.update_weights(update)
            return self._scheduler.new_weights(recompute=recompute)

        return self._engine.alone(change)

    @property
    def weight_version(self) -> int:
        """How often the weights were updated."""
        return self._scheduler.versions.now

    @property
    def is_paused(self) -> bool:
        """Whether `pause` holds it."""
        return self._engine.control.paused

    @property
    def is_sleeping(self) -> bool:
        """Whether its memory is given back."""
        return self._engine.control.level > 0

    def pause(self, mode: PauseMode) -> None:
        """See `LLM.pause`. From any thread."""
        pause.pause(self._built, mode)

    def resume(self) -> None:
        """See `LLM.resume`. From any thread."""
        pause.resume(self._built)

    def sleep(self, level: int) -> None:
        """See `LLM.sleep`. From any thread."""
        pause.sleep(self._built, level)

    def wake(self) -> None:
        """See `LLM.wake`. From any thread."""
        pause.wake(self._built)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._life.closed

    def close(self) -> None:
        """Stop the loop; open requests fail with `EngineClosedError`; threads and memory come back."""
        self._life.close()
        self.model = None
