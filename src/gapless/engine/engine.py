"""The engine: the loop, and the thread that runs it.

The loop is `Engine._loop`. Depth 1 is the synchronous engine; any other depth is the same loop with more steps in
flight. Its thread is the only one that touches scheduler and runner. Other threads talk to it through an inbox; it
talks to them through ``publish``, which it calls at most once per step and which must not block.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from gapless.batch.plan import StepPlan
from gapless.engine.control import Control
from gapless.engine.stats import EngineStats
from gapless.engine.watched_queue import WatchedQueue
from gapless.errors import EngineClosedError, EngineDeadError
from gapless.request.messages import StepMessage
from gapless.request.outputs import FinishReason
from gapless.request.request import Request
from gapless.runner.base import StepResult, StepRunner
from gapless.scheduler.scheduler import Scheduler
from gapless.scheduler.stats import SchedulerStats

T = TypeVar("T")
PATIENCE = 0.5
"""Seconds that `Engine.counters` waits for the loop."""
Observer = Callable[[str, float, float], None]
"""Is told of each phase as it ends, on the loop's thread: its name, or ``idle``; start and end by ``perf_counter``."""



class Engine:
    """See the module.

    Args:
        scheduler, runner: owned by the engine's thread from `start` on.
        depth: steps in flight.
        publish: takes each step's message, on the loop's thread.
        on_death: called once, with the error, if the loop ends by an exception.
        check: test the scheduler's integrity after every step.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        depth: int,
        publish: Callable[[StepMessage], None],
        on_death: Callable[[BaseException], None],
        *,
        check: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.control = Control(scheduler)
        self.stats = EngineStats(copies=runner.copies)
        self._runner = runner
        self._depth = depth
        self._publish_to = publish
        self._on_death = on_death
        self._check = check
        self._inbox: WatchedQueue[Callable[[], None]] = WatchedQueue("calls for the engine's loop")
        self._running = True
        self._starved = True  # the next step to be launched follows a time without requests
        self._mark = time.perf_counter()
        self.observer: Observer | None = None
        self._error: BaseException | None = None
        self._process = os.getpid()
        self._gate = threading.Lock()  # between the last word of the loop and new work
        self._thread = threading.Thread(target=self._run, name="gapless-loop", daemon=True)

    # ---- the loop -------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        in_flight: deque[tuple[Any, bool]] = deque()
        self._mark = time.perf_counter()
        while self._running:
            while len(in_flight) < self._depth and (plan := self._schedule()) is not None:
                in_flight.append(self._launch(plan))  # enqueues on h2d, compute, d2h; never blocks
            if self.scheduler.awaits_masks and len(in_flight) == 1:  # so every token before it is known
                self._mask(in_flight[0][0])
                continue
            result = self._wait(*in_flight.popleft()) if in_flight else None  # the host waits for the device here only
            self._receive(block=result is None)  # after the wait, so that an abort beats the outputs
            if result is not None:
                self._commit(result)
            self._publish()

    # ---- its phases -----------------------------------------------------------------------------------------------

    def _lap(self, phase: str) -> None:
        """What passed since the last lap was this phase."""
        now = time.perf_counter()
        self.stats.host[phase] += now - self._mark
        if self.observer is not None:
            self.observer(phase, self._mark, now)
        self._mark = now

    def _schedule(self) -> StepPlan | None:
        plan = None if self.control.stopped else self.scheduler.schedule()
        self._lap("schedule")
        return plan

    def _launch(self, plan: StepPlan) -> tuple[Any, bool]:
        starved, self._starved = self._starved, False
        step = self._runner.launch(plan)
        self.stats.in_flight += 1
        self._lap("launch")
        return step, starved

    def _mask(self, step: Any) -> None:
        """The second half of a launch whose step has rows with grammars."""
        with self._runner.masks(step) as lent:
            lent.rows = self.scheduler.fill_masks(lent.masks)
        self._runner.sample(step)
        self._lap("mask")

    def _wait(self, step: Any, starved: bool) -> StepResult:
        result = self._runner.wait(step)
        self._lap("wait")
        stats = self.stats
        stats.steps += 1
        stats.in_flight -= 1
        stats.busy += result.busy_ms * 1e-3
        if result.plan.has_prompts:
            stats.busy_prompts += result.busy_ms * 1e-3
        stats.idle_masks += result.mask_wait_ms * 1e-3
        stats.held_steps += result.plan.constrained is not None
        if starved:
            stats.idle_no_work += result.idle_ms * 1e-3
        else:
            stats.idle_host += result.idle_ms * 1e-3
        return result

    def _receive(self, block: bool) -> None:
        if block and not self.control.turn():
            if self.scheduler.has_requests and not self.control.stopped:
                raise RuntimeError("requests are waiting, no step is in flight, and the scheduler has no plan")
            self._starved = True
            self._inbox.get()()
            start, self._mark = self._mark, time.perf_counter()
            if self.observer is not None:
                self.observer("idle", start, self._mark)
        while not self._inbox.empty():
            self._inbox.get()()
        self._lap("receive")

    def _commit(self, result: StepResult) -> None:
        self.scheduler.commit(result.plan, result.tokens, result.records)
        if self._check:
            self.scheduler.check()
        self._lap("commit")

    def _publish(self) -> None:
        message = self.scheduler.message()
        if message is not None:
            self._publish_to(message)
        self._lap("publish")

    # ---- the thread -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the loop's thread."""
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._runner.thread_context():
                self._loop()
        except BaseException as error:
            with self._gate:
                self._error = error
            self._on_death(error)
        finally:
            with self._gate:
                self._running = False
            while not self._inbox.empty():  # nobody waits for an answer for ever
                with contextlib.suppress(BaseException):  # the scheduler may be in the middle of what failed
                    self._inbox.get()()
            self.control.close(self._end())
            # After an error closing may fail for the same reason; the callers have been given the first one.
            with contextlib.nullcontext() if self._error is None else contextlib.suppress(Exception):
                self._runner.close()

    def close(self) -> None:
        """Stop after the steps that are in flight; threads and memory come back. Safe to call twice.

        Requests that have not ended get no more tokens.
        """
        if self._thread.ident is None:
            self._runner.close()
            self._running = False
            return
        self._inbox.put(self._stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _stop(self) -> None:
        self._running = False

    @property
    def error(self) -> BaseException | None:
        """What ended the loop, if an exception did."""
        return self._error

    # ---- for other threads ----------------------------------------------------------------------------------------

    def raise_if_dead(self) -> None:
        """Raise `EngineDeadError` or `EngineClosedError` when no more work is taken."""
        if os.getpid() != self._process:
            raise EngineClosedError(
                f"the engine runs in process {self._process}; a process forked from it has none of its threads and "
                "cannot use it. Make the engine after the fork"
            )
        if self._error is not None or not self._running:
            raise self._end()

    def _end(self) -> EngineClosedError | EngineDeadError:
        """The error that says why no more work is taken."""
        if self._error is not None:
            error = EngineDeadError(f"the engine stopped after an error: {self._error!r}")
            error.__cause__ = self._error
            return error
        return EngineClosedError("the engine is closed")

    def submit(self, requests: list[Request]) -> None:
        """Hand over requests, all in one turn of the loop."""

        def add() -> None:
            for request in requests:
                self.scheduler.add(request)

        self._put(add)

    def finish(self, request_id: int, reason: FinishReason) -> None:
        """End a request at the loop's next turn; ignored when it has ended already."""
        with contextlib.suppress(EngineDeadError, EngineClosedError):
            self._put(lambda: self.scheduler.finish(request_id, reason))

    def fail(self, error: BaseException) -> None:
        """End the loop as if it had met ``error`` itself; ignored when it has ended already."""

        def die() -> None:
            raise error

        with contextlib.suppress(EngineDeadError, EngineClosedError):
            self._put(die)

    def call(self, action: Callable[[], T]) -> T:
        """Run ``action`` on the loop's thread between two steps and return what it returns."""

        def start(done: Future[T]) -> None:
            done.set_result(action())

        return self.ask(start)

    def ask(self, start: Callable[[Future[T]], object]) -> T:
        """Run ``start`` on the loop's thread; return what the future that it is given comes to hold.

        May be called from any thread but the loop's.

        Raises:
            EngineDeadError, EngineClosedError: the engine has ended, or ends meanwhile.
        """
        done: Future[T] = Future()

        def run() -> None:
            try:
                self.raise_if_dead()
                start(done)
            except BaseException as error:
                done.set_exception(error)

        self._put(run)
        return done.result()

    def counters(self, patience: float = PATIENCE) -> tuple[EngineStats, SchedulerStats]:
        """Copies of all counters, made by the loop's thread between two steps.

        A loop that has ended, or does not answer within ``patience`` seconds because a step hangs or takes long, is
        not waited for: then the caller copies, and counts that belong together may be of two moments.
        """
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            done: Future[tuple[EngineStats, SchedulerStats]] = Future()
            with contextlib.suppress(EngineDeadError, EngineClosedError, TimeoutError):
                self._put(lambda: done.set_result(self._copied()))
                return done.result(patience)
        return self._copied()

    def _copied(self) -> tuple[EngineStats, SchedulerStats]:
        stats = self.stats.copy()
        stats.inbox_peak = self._inbox.peak
        return stats, self.scheduler.snapshot()

    def alone(self, action: Callable[[], T]) -> T:
        """Run ``action`` on the loop's thread while no step is in flight; return what it returns."""
        return self.ask(lambda done: self.control.alone(action, done))

    def _put(self, message: Callable[[], None]) -> None:
        with self._gate:
            self.raise_if_dead()
            self._inbox.put(message)
