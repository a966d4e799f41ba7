"""What routes for developers do to the engine, on its process's side."""

from __future__ import annotations

from typing import Any

from gapless import holding
from gapless.errors import ConfigError


def perform(built: Any, action: str, argument: str) -> None:
    """Returns when it is done. From any thread but the loop's.

    Args:
        built: a `gapless.build.Built`.
        action: reset_prefix_cache, pause, resume, sleep or wake.
        argument: the mode of a pause, the level of a sleep.

    Raises:
        ConfigError: an unknown action or argument; the memory is not there.
    """
    if action == "reset_prefix_cache":
        built.engine.call(built.scheduler.reset_prefix_cache)
    elif action == "pause":
        holding.pause(built, argument)  # type: ignore[arg-type]
    elif action == "resume":
        holding.resume(built)
    elif action == "sleep":
        holding.sleep(built, int(argument) if argument in ("1", "2") else argument)  # type: ignore[arg-type]
    elif action == "wake":
        holding.wake(built)
    else:
        raise ConfigError(f"action={action!r} is not known")
