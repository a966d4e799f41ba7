"""Pause, resume, sleep and wake of a built engine, from any thread but its loop's. Each returns when it is done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.engine.control import PAUSE_MODES, PauseMode
from gapless.errors import ConfigError

if TYPE_CHECKING:
    from gapless.engine.assemble import Built


def pause(built: Built, mode: PauseMode) -> None:
    """See `LLM.pause`.

    Raises:
        ConfigError: an unknown mode.
    """
    if mode not in PAUSE_MODES:
        raise ConfigError(f"mode={mode!r} is not allowed: one of {', '.join(PAUSE_MODES)}")
    built.engine.ask(lambda done: built.engine.control.pause(mode, done))


def resume(built: Built) -> None:
    """See `LLM.resume`."""
    built.engine.call(built.engine.control.resume)


def sleep(built: Built, level: int) -> None:
    """See `LLM.sleep`.

    Raises:
        ConfigError: an unknown level, or weights that are not the engine's own.
    """
    if isinstance(level, bool) or level not in (1, 2):
        raise ConfigError(f"level={level!r} is not allowed: 1 (cache and graphs) or 2 (the weights too)")
    built.engine.raise_if_dead()
    if level == 2 and not built.runner.owns_weights:
        raise ConfigError("level=2 is not allowed: the model is yours, so move its weights yourself; or use level=1")
    built.engine.ask(lambda done: built.engine.control.sleep(level, built.runner, done))


def wake(built: Built) -> None:
    """See `LLM.wake`.

    Raises:
        ConfigError: the memory is not there; the engine sleeps on.
    """
    built.engine.call(lambda: built.engine.control.wake(built.runner))
