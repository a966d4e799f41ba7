"""Many prompts through an engine: read in a window, written as they end.

A thread reads, encodes and submits, at most a window ahead of what is written, so that memory does not grow with the
number of prompts and a slow reader of results slows the reading down. The calling thread writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import queue
import sys
import threading
import time
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

from gapless.cli.output import Writer
from gapless.cli.parser import UsageError
from gapless.cli.prompts import FIRST, Job
from gapless.cli.resume import Done
from gapless.engine.progress import INTERVAL, Pace
from gapless.errors import EngineClosedError, EngineDeadError, RequestError
from gapless.request.outputs import RequestOutput

if TYPE_CHECKING:
    from gapless.engine.client import EngineClient, Submission

logger = logging.getLogger("gapless")

SAID_EVERY = 15.0
"""Seconds between two lines about the progress where no bar can be shown."""
AHEAD = 4096
"""Least number of prompts between the one that is read and the oldest result of ``--ordered`` that is missing."""


class Feeder:
    """Reads jobs and submits them. What comes back is in `inbox`: (job, output, error), or the exception that ended it.

    Args:
        window: jobs that may be read and not yet `written`.
        done: whose results are there already.
        seeds: each job's seed follows from its index, so that it is the same after a resume.
    """

    def __init__(self, client: EngineClient, jobs: Iterator[Job], window: int, done: Done, *, seeds: bool) -> None:
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._client = client
        self._jobs = jobs
        self._window = window
        self._room = threading.Semaphore(window)
        self._done = done
        self._seeds = seeds
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="gapless-jobs", daemon=True)
        self._thread.start()

    def written(self, count: int) -> None:
        """So many more may be read."""
        if count:
            self._room.release(count)

    def stop(self) -> None:
        """Read no more."""
        self._stopped = True
        self._room.release()
        self._thread.join(1.0)  # it may hang in a read

    def _run(self) -> None:
        read = 0
        try:
            first = list(itertools.islice(self._jobs, min(FIRST, self._window)))
            for _ in first:
                self._room.acquire()
            read += len(first)
            self._feed_together(first)
            for job in self._jobs:
                self._room.acquire()
                if self._stopped:
                    return
                read += 1
                self._feed(job)
            self.inbox.put(read)
        except EngineClosedError:
            pass
        except BaseException as error:
            self.inbox.put(error)

    def _feed_together(self, jobs: list[Job]) -> None:
        """What is wrong with one of the first jobs is said before anything is computed."""
        new = [job for job in jobs if job not in self._done]
        for job in jobs:
            if job in self._done:
                self.inbox.put((job, None, None))
        wrong = [job for job in new if job.error is not None]  # beyond the lines that were checked before
        fit = [job for job in new if job.error is None]
        submissions = []
        for job in fit:
            with _named(job):
                submissions.append(self._submission(job))
        try:
            self._client.submit(submissions)
        except RequestError as error:
            raise RequestError(f"{fit[error.prompt_index or 0].where}: {error.args[0]}") from error
        for job in wrong:
            self.inbox.put((job, None, job.error))

    def _feed(self, job: Job) -> None:
        """From then on a wrong line has an error as its result, and the others go on."""
        if job in self._done:
            self.inbox.put((job, None, None))
        elif job.error is not None:
            self.inbox.put((job, None, job.error))
        else:
            try:
                self._client.submit([self._submission(job)])
            except RequestError as error:
                self.inbox.put((job, None, str(error)))

    def _submission(self, job: Job) -> Submission:
        client, inbox = self._client, self.inbox
        prompt = client.encode(job.prompt) if job.messages is None else client.encode_chat(job.messages)
        params = job.params
        if self._seeds and params.seed is None:
            params = dataclasses.replace(params, seed=client.derived_seed(job.index))

        def take(output: RequestOutput) -> None:
            inbox.put((job, output, None))

        return make_submission(prompt, params, take, inbox.put, "final", job.lora)


@contextlib.contextmanager
def _named(job: Job) -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        raise RequestError(f"{job.where}: {error}") from error


def make_submission(prompt: Any, params: Any, take: Any, fail: Any, mode: Any, lora: str | None) -> Submission:
    """Late, for the client's module is not imported before there is a model to load."""
    from gapless.engine.client import Submission

    return Submission(prompt, params, take, fail, mode, lora=lora)


def received(item: Any) -> Any:
    """What came from an inbox, unless it is what ended the engine or the reading."""
    if isinstance(item, (RequestError, UsageError, KeyboardInterrupt)):
        raise item
    if isinstance(item, BaseException):
        raise EngineDeadError(f"the engine stopped after an error: {item!r}") from item
    return item


def run_jobs(
    client: EngineClient,
    jobs: Iterator[Job],
    writer: Writer,
    done: Done,
    *,
    total: int | None,
    ordered: bool,
    seeds: bool,
    beside: IO[str],
) -> int:
    """Answer all jobs. Returns how many have no answer, because their lines are wrong; the first is logged.

    Args:
        total: how many jobs there are, if that is known.
        ordered, seeds: see `Writer` and `Feeder`.
        beside: where results go: a bar leaves it alone.
    """
    window = 2 * client.config.max_num_seqs + 64
    feeder = Feeder(client, jobs, max(window, AHEAD) if ordered else window, done, seeds=seeds)
    progress = Progress(client, total, beside)
    waited_for: int | None = None
    ended = refused = 0
    try:
        while waited_for is None or ended < waited_for:
            try:
                item = received(feeder.inbox.get(timeout=INTERVAL))
            except queue.Empty:
                progress.show()
                continue
            if isinstance(item, int):
                waited_for = item
                continue
            job, output, error = item
            ended += 1
            if output is None and error is None:
                feeder.written(writer.skip(job.index))
                progress.skipped += 1
                continue
            with progress.paused():
                feeder.written(writer.put(job, output, error))
            if error is not None:
                refused += 1
                if refused == 1:
                    logger.warning("%s: %s", job.where, error)
            progress.count(output)
    finally:
        feeder.stop()
        progress.close()
    progress.summary()
    if refused:
        logger.warning("%d of %d prompts were refused; their results hold the error", refused, ended)
    return refused


class Progress:
    """A bar on a terminal, a line now and then elsewhere: share done, tokens a second, time left."""

    def __init__(self, client: EngineClient, total: int | None, beside: IO[str]) -> None:
        from tqdm import tqdm

        self._client = client
        self._total = total
        self._beside = beside
        self._pace = Pace(client.stats)
        self._start = self._said = time.perf_counter()
        self._tokens = self._answers = self.skipped = 0
        off = not sys.stderr.isatty() or logger.level > logging.INFO
        self._bar = tqdm(total=total, desc="requests", disable=off, dynamic_ncols=True)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The bar does not stand in the way of what is written."""
        with self._bar.external_write_mode(file=self._beside, nolock=False):
            yield

    def count(self, output: RequestOutput | None) -> None:
        """One more has ended."""
        self._answers += 1
        if output is not None:
            self._tokens += sum(len(completion.token_ids) for completion in output.outputs)
        self.show()

    def show(self) -> None:
        """If it is time to."""
        now = time.perf_counter()
        if self._bar.disable:
            if now - self._said > SAID_EVERY:
                self._said = now
                logger.info("%s", self._line(now))
        elif now - self._said > INTERVAL:
            self._said = now
            self._bar.n = self._answers + self.skipped
            self._bar.initial = self.skipped  # what was there before says nothing about the pace
            self._bar.set_postfix_str(str(self._pace), refresh=False)
            self._bar.refresh()

    def _line(self, now: float) -> str:
        done = self._answers + self.skipped
        if not self._total:
            return f"{done} prompts done, {self._pace}"
        left = (now - self._start) / max(self._answers, 1) * max(self._total - done, 0)
        rest = f", {duration(left)} left" if self._answers else ""
        return f"{done} of {self._total} prompts done ({100 * done / self._total:.1f} %), {self._pace}{rest}"

    def close(self) -> None:
        """Take the bar away."""
        if not self._bar.disable:
            self._bar.n = self._answers + self.skipped
        self._bar.close()

    def summary(self) -> None:
        """One line for the log."""
        seconds = time.perf_counter() - self._start
        there = f" ({self.skipped} were there already)" if self.skipped else ""
        logger.info(
            "%d prompts, %d new tokens in %.2f s: %.1f tokens/s%s",
            self._answers, self._tokens, seconds, self._tokens / seconds, there,
        )  # fmt: skip
        if (drafts := self._client.stats()[1].drafts) is not None:
            logger.info("drafts: %s", drafts)


def duration(seconds: float) -> str:
    """``45 s``, ``12 min``, ``3.5 h``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
