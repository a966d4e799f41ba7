"""Tickets in, steps of the engine out of another process to them; and what is known of that engine's state.

One thread, that of the event loop, does all of this: bytes of the socket become step messages, `OutputProcessor` makes
texts of them, and tickets write them to the clients or hand them to the tasks of their HTTP requests. Nothing crosses a
thread for a token.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from gapless.errors import EngineDeadError
from gapless.request.sampling_params import SamplingParams
from gapless.server import errors
from gapless.server.remote import Connection, RemoteClient
from gapless.server.ticket import PLAIN, Terms, Ticket
from gapless.server.wire import Act, Acted, Ready, Step, Stop
from gapless.text.chat import EncodedPrompt
from gapless.text.outputs import OutputMode


class FrontEnd:
    """Tickets in, step messages to outputs, and what is known of the engine's state.

    Args:
        max_queued_requests, max_queued_tokens, buffer_tokens: see `ServerOptions`.
        on_step: called with each step, after its outputs were handed on.
        on_closed: called with each ticket that ends.
    """

    def __init__(
        self,
        connection: Connection,
        ready: Ready,
        tokenizer: Any,
        *,
        max_queued_requests: int,
        max_queued_tokens: int | None,
        buffer_tokens: int,
        on_step: Callable[[Step], None] = lambda step: None,
        on_closed: Callable[[Ticket], None] = lambda ticket: None,
    ) -> None:
        self.client = RemoteClient(connection, ready, tokenizer)
        self.ready = ready
        self.tickets: set[Ticket] = set()
        self.rejected: dict[str, int] = {"max_num_queued_reqs": 0, "max_num_queued_tokens": 0}
        self._connection = connection
        self._max_queued_requests = max_queued_requests
        self._max_queued_tokens = max_queued_tokens
        self._buffer_tokens = buffer_tokens
        self._on_step = on_step
        self._on_closed = on_closed
        self._due: list[Ticket] = []
        self.sequences = 0  # that were taken and have not ended
        self.paused = False
        self.sleep_level = 0
        self._acts: dict[int, asyncio.Future[None]] = {}
        self._act_numbers = itertools.count()
        self._steps = -1
        self.progressed = time.monotonic()

    def submit(
        self,
        prompts: Sequence[EncodedPrompt],
        params: Sequence[SamplingParams],
        mode: OutputMode,
        label: str,
        interval: int = 1,
        terms: Terms = PLAIN,
    ) -> Ticket:
        """Hand prompts to the engine, all or none.

        Raises:
            ApiError: 503, there is no room in the queue.
            RequestError: one of them cannot be served.
            EngineDeadError: the engine is gone.
        """
        sequences = sum(p.n for p in params)
        tokens = sum(len(p.token_ids) for p in prompts)
        self._admit(sequences, tokens)
        ticket = Ticket(sequences, tokens, self._buffer_tokens * sequences, interval, self._close, self._due)
        ticket.lora = terms.lora
        ticket.groups = self.client.submit(
            [
                ticket.submission(i, prompt, own, mode, label, terms)
                for i, (prompt, own) in enumerate(zip(prompts, params, strict=True))
            ]
        )
        if not self.tickets:
            self.progressed = time.monotonic()
        self.tickets.add(ticket)
        self.sequences += sequences
        return ticket

    def _admit(self, sequences: int, tokens: int) -> None:
        running = self.client.config.max_num_seqs
        room = running + self._max_queued_requests
        if sequences > room:
            raise errors.bad_request(
                f"the request asks for {sequences} completions at once; this server takes at most {room}", "n"
            )
        if self.sequences + sequences > room:
            self.rejected["max_num_queued_reqs"] += 1
            raise errors.unavailable(f"The queue is full: {self._max_queued_requests} requests wait already.")
        if self._max_queued_tokens is not None:
            waiting = sum(t.prompt_tokens for t in self.tickets if not t.started)
            if waiting and waiting + tokens > self._max_queued_tokens:
                self.rejected["max_num_queued_tokens"] += 1
                raise errors.unavailable(f"The queue is full: prompts of {waiting} tokens wait already.")

    def _close(self, ticket: Ticket) -> None:
        if ticket in self.tickets:
            self.tickets.remove(ticket)
            self.sequences -= ticket.sequences
        if not ticket.done:
            for group in ticket.groups:
                self.client.abort_group(group)
        self._on_closed(ticket)

    def take(self, step: Step) -> None:
        """A message of the engine."""
        if step.engine.steps != self._steps:
            self._steps = step.engine.steps
            self.progressed = time.monotonic()
        self.client.take(step)
        for ticket in self._due:
            ticket.pump()
        self._due.clear()
        self._on_step(step)

    def fail(self, reason: str) -> None:
        """The engine is gone."""
        self.client.fail(EngineDeadError(reason))
        for done in self._acts.values():
            if not done.done():
                done.set_exception(errors.engine_failed(f"The engine has stopped: {reason}"))

    async def act(self, action: str, argument: str = "") -> None:
        """Have the engine do what `gapless.server.actions.perform` says.

        Raises:
            ApiError: it cannot, or has ended.
        """
        if self.client.engine.error is not None:
            raise errors.engine_failed(f"The engine has stopped: {self.client.engine.error}")
        number = next(self._act_numbers)
        done = self._acts[number] = asyncio.get_running_loop().create_future()
        self._connection.send(Act(number, action, argument))
        try:
            await done
        finally:
            del self._acts[number]
        if action in ("pause", "resume"):
            self.paused = action == "pause"
        elif action in ("sleep", "wake"):
            self.sleep_level = max(self.sleep_level, int(argument)) if action == "sleep" else 0
        self.progressed = time.monotonic()

    def acted(self, message: Acted) -> None:
        """The engine's answer to `act`."""
        done = self._acts.get(message.number)
        if done is None or done.done():
            return
        if message.error is None:
            done.set_result(None)
        else:
            done.set_exception(errors.bad_request(message.error))

    def stalled(self) -> float:
        """Seconds without progress of an engine that has work, or without any word of its process."""
        now = time.monotonic()
        silent = now - self._connection.heard
        held = self.paused or self.sleep_level > 0
        engine, _ = self.client.stats()
        working = engine.in_flight or (self.sequences and not held)
        return max(silent, now - self.progressed if working else 0.0)

    def cut_slow_readers(self, seconds: float) -> None:
        """End the requests whose clients have taken nothing for so long; call it now and then."""
        limit = time.monotonic() - seconds
        for ticket in list(self.tickets):
            if ticket.sending_since is not None and ticket.sending_since < limit:
                ticket.cut("slow reader")

    def end_old(self, seconds: float) -> None:
        """End the requests that have taken so long; call it now and then."""
        limit = time.monotonic() - seconds
        for ticket in list(self.tickets):
            if ticket.since < limit:
                ticket.end_reason = ticket.end_reason or "time limit"
                ticket.fail(errors.time_is_up(seconds))

    def stop(self) -> None:
        """Ask the engine's process to end."""
        self.client.close()
        self._connection.send(Stop())
