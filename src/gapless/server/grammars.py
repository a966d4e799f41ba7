"""Requests with a form of output wait here for their grammars, in the engine's process.

Compiling takes up to seconds, so that it has a thread of its own; requests without a form pass by. What is said about
a waiting request meanwhile is kept until the engine has it, so that its end comes after its beginning.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from gapless.engine.engine import Engine
from gapless.engine.watched_queue import WatchedQueue
from gapless.errors import EngineClosedError, EngineDeadError, RequestError
from gapless.grammar.compiler import GrammarCompiler
from gapless.request.outputs import FinishReason
from gapless.request.request import Request

logger = logging.getLogger("gapless.server")


class Grammars:
    """See the module.

    Args:
        engine: gets the requests.
        refuse: called with a request's id and what is wrong with its form.
        load_tokenizer: called once, before the first grammar.
        vocab_size, eos_token_ids: of the model.
    """

    def __init__(
        self,
        engine: Engine,
        refuse: Callable[[int, str], None],
        load_tokenizer: Callable[[], Any],
        vocab_size: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        self._engine = engine
        self._refuse = refuse
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._queue: WatchedQueue[Request | None] = WatchedQueue("requests for the compiler of grammars")
        self._lock = threading.Lock()
        self._waiting: dict[int, FinishReason | None] = {}  # by id: why it is to end once the engine has it
        self._compiler: GrammarCompiler | None = None
        self._thread: threading.Thread | None = None

    @property
    def peak(self) -> int:
        """Most requests that have waited at once."""
        return self._queue.peak

    def take(self, request: Request) -> None:
        """Submit a request once its grammar is ready."""
        with self._lock:
            self._waiting[request.id] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gapless-grammars", daemon=True)
                self._thread.start()
        self._queue.put(request)

    def finish(self, request_id: int, reason: FinishReason) -> bool:
        """Remember to end a request that waits; False for one that does not."""
        with self._lock:
            if request_id not in self._waiting:
                return False
            self._waiting[request_id] = reason
            return True

    def close(self) -> None:
        """End the thread and the compiler's process."""
        self._queue.put(None)
        if self._compiler is not None:
            self._compiler.close()

    def _run(self) -> None:
        while (request := self._queue.get()) is not None:
            try:
                if self._waiting[request.id] is None:  # else nobody waits for it, and any grammar will do
                    request.grammar = self._grammar(request)
            except EngineClosedError:
                return
            except Exception as error:
                known = isinstance(error, RequestError)
                if not known:
                    logger.exception("a grammar could not be made")
                with self._lock:
                    del self._waiting[request.id]
                self._refuse(request.id, str(error) if known else "structured_outputs: the grammar could not be made")
                continue
            try:
                self._submit(request)
            except (EngineClosedError, EngineDeadError):
                return

    def _grammar(self, request: Request) -> Any:
        if self._compiler is None:
            self._compiler = GrammarCompiler(self._load_tokenizer(), self._vocab_size, self._eos_token_ids)
        return self._compiler.grammars(request.params, request.stop_token_ids, 1)[0]

    def _submit(self, request: Request) -> None:
        with self._lock:
            reason = self._waiting.pop(request.id)
            self._engine.submit([request])
            if reason is not None:
                self._engine.finish(request.id, reason)
