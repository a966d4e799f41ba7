"""What routes for developers do to the engine, on its process's side."""

from __future__ import annotations

from typing import Any

from gapless.control import PAUSE_MODES
from gapless.errors import ConfigError


class _Sleeper:
    """See `gapless.control.Sleeper`."""

    def __init__(self, built: Any) -> None:
        self._built = built

    def sleep(self, level: int) -> None:
        from gapless.pipeline.sleeping import put_to_sleep

        put_to_sleep(self._built.runner, self._built.weights if level == 2 else None)

    def wake(self) -> None:
        from gapless.pipeline.sleeping import wake

        wake(self._built.runner, self._built.weights)


def perform(built: Any, action: str, argument: str) -> None:
    """Returns when it is done. From any thread but the loop's.

    Args:
        built: a `gapless.build.Built`.
        action: reset_prefix_cache, pause, resume, sleep or wake.
        argument: the mode of a pause, the level of a sleep.

    Raises:
        ConfigError: an unknown action or argument; the memory is not there.
    """
    engine = built.engine
    if action == "reset_prefix_cache":
        engine.call(built.scheduler.reset_prefix_cache)
    elif action == "pause":
        if argument not in PAUSE_MODES:
            raise ConfigError(f"mode={argument!r} is not allowed: one of {', '.join(PAUSE_MODES)}")
        engine.ask(lambda done: engine.control.pause(argument, done))
    elif action == "resume":
        engine.call(engine.control.resume)
    elif action == "sleep":
        if argument not in ("1", "2"):
            raise ConfigError(f"level={argument!r} is not allowed: 1 (cache and graphs) or 2 (the weights too)")
        level, weights = int(argument), built.weights
        if level == 2 and (weights is None or not weights.owned):
            raise ConfigError("level=2 is not allowed: these weights are not the engine's own; use level=1")
        engine.ask(lambda done: engine.control.sleep(level, _Sleeper(built), done))
    elif action == "wake":
        engine.call(lambda: engine.control.wake(_Sleeper(built)))
    else:
        raise ConfigError(f"action={action!r} is not known")
