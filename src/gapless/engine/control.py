"""Control: what holds an engine between two steps. Pause, sleep, and work that must be alone with the device.

Touched by the loop's thread only, at the request of other threads. Three things hold back new steps: an action that
waits for the steps in flight to end, a pause, and a sleep. While held, the loop receives messages as ever, so requests
queue, aborts take effect, and closing works.

    pause "keep"     holds at once; running requests keep their rows and their cache
    pause "abort"    ends every request, then holds
    pause "finish"   holds requests that come from now on, and everything once those before them have ended

Sleeping and pausing are independent: `wake` leaves a pause as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal, Protocol

from gapless.scheduler.scheduler import Scheduler

PauseMode = Literal["keep", "abort", "finish"]
PAUSE_MODES: tuple[PauseMode, ...] = ("keep", "abort", "finish")


class Sleeper(Protocol):
    """Gives memory back and takes it again; see `gapless.runner.base.StepRunner`."""

    def sleep(self, level: int) -> None: ...
    def wake(self) -> None: ...


class Control:
    """See the module."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.paused = False
        self.level = 0  # of the sleep; 0 is awake
        self._scheduler = scheduler
        self._alone: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._finishing: list[Future[None]] = []

    @property
    def stopped(self) -> bool:
        """No new step may be planned."""
        return self.paused or self.level > 0 or bool(self._alone)

    def turn(self) -> bool:
        """What waits for no step to be in flight, which is now. False if there is nothing."""
        if not self._alone and not (self._finishing and not self._scheduler.has_requests):
            return False
        if self._finishing and not self._scheduler.has_requests:
            self._pause_now()
        alone, self._alone = self._alone, []
        for action, done in alone:
            try:
                done.set_result(action())
            except BaseException as error:
                done.set_exception(error)
        return True

    def alone(self, action: Callable[[], Any], done: Future[Any]) -> None:
        """Run ``action`` once no step is in flight; ``done`` gets its result. Steps go on afterwards, unless held."""
        self._alone.append((action, done))

    def pause(self, mode: PauseMode, done: Future[None]) -> None:
        """``done`` when no step is in flight and none will come."""
        if mode == "finish" and not self.paused:
            self._scheduler.admission_closed = True
            self._finishing.append(done)
            return
        if mode == "abort":
            self._scheduler.abort_all()
        self.alone(self._pause_now, done)

    def _pause_now(self) -> None:
        self.paused = True
        finishing, self._finishing = self._finishing, []
        for done in finishing:
            done.set_result(None)

    def resume(self) -> None:
        """End a pause, and the wait for one."""
        self._pause_now()
        self.paused = False
        self._scheduler.release_parked()

    def sleep(self, level: int, sleeper: Sleeper, done: Future[None]) -> None:
        """``done`` when the memory is free."""

        def rest() -> None:
            if level <= self.level:
                return
            self._scheduler.reset_prefix_cache()
            self._scheduler.preempt_all()
            sleeper.sleep(level)
            self.level = level

        self.alone(rest, done)

    def wake(self, sleeper: Sleeper) -> None:
        """Take the memory again. On an error the engine sleeps on."""
        if self.level:
            sleeper.wake()
            self.level = 0

    def close(self, error: BaseException) -> None:
        """The loop has ended: whoever waits gets ``error``."""
        for done in (*(done for _, done in self._alone), *self._finishing):
            done.set_exception(error)
        self._alone, self._finishing = [], []
