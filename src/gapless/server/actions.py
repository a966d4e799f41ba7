"""What routes for developers do to the engine, on its process's side."""

from __future__ import annotations

from typing import Any

from gapless.engine import pause
from gapless.errors import ConfigError


def perform(built: Any, action: str, argument: str) -> None:
    """Returns when it is done. From any thread but the loop's.

    Args:
        built: a `gapless.engine.assemble.Built`.
        action: reset_prefix_cache, pause, resume, sleep or wake.
        argument: the mode of a pause, the level of a sleep.

    Raises:
        ConfigError: an unknown action or argument; the memory is not there.
    """
    if action == "reset_prefix_cache":
        built.engine.call(built.scheduler.reset_prefix_cache)
    elif action == "pause":
        pause.pause(built, argument)  # type: ignore[arg-type]
    elif action == "resume":
        pause.resume(built)
    elif action == "sleep":
        pause.sleep(built, int(argument) if argument in ("1", "2") else argument)  # type: ignore[arg-type]
    elif action == "wake":
        pause.wake(built)
    else:
        raise ConfigError(f"action={action!r} is not known")
