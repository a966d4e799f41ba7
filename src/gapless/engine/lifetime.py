"""Lifetime: what a client has started, and how it ends: by `close`, with its last reference, or with the interpreter.

The threads hold the parts below and never the client, so that a client nobody refers to is collected, in the middle of
requests too. The garbage collector may do so on any thread and under any lock: a thread of its own closes, which is
waited for, but neither for ever nor by a thread of an engine, that it may have to wait for itself.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

from gapless.engine.engine import Engine
from gapless.engine.watched_queue import WatchedQueue
from gapless.errors import EngineClosedError
from gapless.request.messages import StepMessage
from gapless.text.outputs import OutputProcessor

if TYPE_CHECKING:
    from gapless.engine.assemble import Built
    from gapless.grammar.compiler import GrammarCompiler

logger = logging.getLogger("gapless")

JOIN_SECONDS = 1.0
"""How long `Lifetime.close` waits for one message of the output thread, which runs callbacks."""
FORGOTTEN_SECONDS = 10.0
"""How long whoever drops the last reference waits for the close at most."""
THREADS = "gapless-"
"""How the names of an engine's threads begin."""

_open: set[Lifetime] = set()
"""Closed at the interpreter's exit: a thread that still runs torch then would abort the process."""


@atexit.register
def _close_all() -> None:
    for lifetime in list(_open):
        lifetime.close()


class Lifetime:
    """See the module.

    Args:
        built: owned from now on.
        messages: what the engine publishes; None ends the output thread.
        outputs: what they become.
    """

    def __init__(
        self, built: Built, messages: WatchedQueue[StepMessage | None], outputs: OutputProcessor
    ) -> None:
        self.built = built
        self.compiler: GrammarCompiler | None = None
        self.compiling = threading.Lock()
        self.closed = False
        self._engine: Engine = built.engine
        self.messages, self._outputs = messages, outputs
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._thread = threading.Thread(
            target=_process, args=(messages, outputs, built.engine), name=f"{THREADS}output", daemon=True
        )

    def start(self, client: Any) -> None:
        """Start the threads, which end with ``client``."""
        weakref.finalize(client, self._forgotten).atexit = False  # `_close_all` comes at the right time
        _open.add(self)
        self._thread.start()
        self._engine.start()

    def close(self) -> None:
        """Stop the loop; open requests fail with `EngineClosedError`; threads and memory come back. Safe to call
        twice."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
        _open.discard(self)
        if os.getpid() != self._process:  # forked: threads and memory are the parent's
            return
        self._engine.close()
        with self.compiling:
            if self.compiler is not None:
                self.compiler.close()
        self.messages.put(None)
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            left = -1
            while self._thread.is_alive() and self.messages.qsize() != left:  # it still makes progress
                left = self.messages.qsize()
                self._thread.join(JOIN_SECONDS)
            if self._thread.is_alive():
                logger.warning("a callback has not returned for %s s; closing without it", JOIN_SECONDS)
        self._outputs.fail(EngineClosedError("the engine was closed before this request ended"))
        self.built.model = None  # the weights go when nobody else holds them

    def _forgotten(self) -> None:
        if self.closed:
            return
        closer = threading.Thread(target=self.close, name=f"{THREADS}close", daemon=True)
        with contextlib.suppress(RuntimeError):  # the interpreter is ending, and `_close_all` was here
            closer.start()
            if not threading.current_thread().name.startswith(THREADS):
                closer.join(FORGOTTEN_SECONDS)


def _process(messages: WatchedQueue[StepMessage | None], outputs: OutputProcessor, engine: Engine) -> None:
    """The output thread."""
    try:
        while (message := messages.get()) is not None:
            outputs.process(message)
    except BaseException as error:  # nobody may wait for a thread that is gone
        logger.exception("the output thread ended")
        outputs.fail(error)
        engine.fail(error)
