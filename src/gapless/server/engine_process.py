"""The engine's process: the engine, a thread that reads commands, and the main thread, which writes what steps bring.

The loop's thread puts each step's message and counters into a queue, as in `gapless.engine.client`, and goes on. The
main thread encodes them and writes them with one call; a front end that is slow to read makes this thread wait, never
the loop. Nothing here knows about text.

Started as ``python -m gapless.server.engine_process FD`` with one end of a socket pair. Ends with the front end: at
the end of the stream, or, should the interpreter be stuck, by a signal of the kernel (`die_with_parent`).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from gapless.config import EngineConfig
from gapless.engine.watched_queue import WatchedQueue
from gapless.errors import AdapterError, ConfigError, EngineClosedError, EngineDeadError, UnsupportedModelError
from gapless.request.messages import StepMessage
from gapless.server.actions import perform
from gapless.server.estimates import ModelSizes
from gapless.server.grammars import Grammars
from gapless.server.logs import set_up_logging
from gapless.server.wire import (
    Act,
    Acted,
    Commands,
    Died,
    Frames,
    Ready,
    Refused,
    Setup,
    Step,
    Stop,
    ToEngine,
    ToFrontEnd,
    encode,
    to_engine,
)

logger = logging.getLogger("gapless.server")

CLOSE_SECONDS = 3.0
"""How long the steps in flight may take once the front end is gone."""
READ_BYTES = 1 << 18
EXIT_OK, EXIT_DIED, EXIT_USAGE, EXIT_ORPHAN = 0, 1, 2, 3


def die_with_parent() -> None:
    """Have the kernel end this process `signal.SIGQUIT` = 3 seconds after its parent, whatever Python is doing.

    The end of the socket comes first and says why. This is for an interpreter that is stuck in a native call: the C
    function ``alarm`` itself handles the parent's death signal, so that its argument, the number of the signal, is the
    delay. Linux only; elsewhere the end of the socket must do.
    """
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None, use_errno=True)
        libc.signal.restype = ctypes.c_void_p
        libc.signal(int(signal.SIGQUIT), ctypes.cast(libc.alarm, ctypes.c_void_p))
        libc.prctl(1, int(signal.SIGQUIT), 0, 0, 0)  # 1: PR_SET_PDEATHSIG


class EngineServer:
    """One engine behind one socket.

    Args:
        connection: the engine's end; owned from now on.
        model, tokenizer: instead of those that `Setup` names; for tests.
        on_orphan: called on the reading thread when the front end is gone.
        on_setup: called with what the front end asks for, before the model is loaded.
        on_loaded: called before the engine starts.
    """

    def __init__(
        self,
        connection: socket.socket,
        model: Any = None,
        tokenizer: Any = None,
        on_orphan: Callable[[], None] | None = None,
        on_setup: Callable[[Setup], object] = lambda setup: None,
        on_loaded: Callable[[], object] = lambda: None,
    ) -> None:
        self._connection = connection
        self._model = model
        self._tokenizer = tokenizer
        self._on_orphan = on_orphan
        self._on_setup = on_setup
        self._on_loaded = on_loaded
        self._setup: queue.SimpleQueue[Setup | None] = queue.SimpleQueue()
        self._messages: WatchedQueue[Step | Refused | Acted | Died | None] = WatchedQueue("messages to the front end")
        self._stopping = False
        self.built: Any = None
        self._grammars: Grammars | None = None

    def run(self) -> int:
        """Load, serve, and return the process's exit code."""
        threading.Thread(target=self._read, name="gapless-commands", daemon=True).start()
        setup = self._setup.get()
        if setup is None:
            return EXIT_ORPHAN
        self._on_setup(setup)
        try:
            self._open(setup)
        except (AdapterError, ConfigError, UnsupportedModelError, ImportError, OSError) as error:
            self._send(Died(str(error), usage=True))
            return EXIT_USAGE
        except Exception as error:
            logger.exception("the engine could not start")
            self._send(Died(f"the engine could not start: {error!r}"))
            return EXIT_DIED
        return self._write(setup.heartbeat)

    def _open(self, setup: Setup) -> None:
        from gapless.engine.adapters import LoadedAdapters
        from gapless.engine.build import build
        from gapless.model.load.sampling_defaults import sampling_defaults

        config = EngineConfig.from_dict(setup.options)
        source = setup.model if self._model is None else self._model
        self.built = built = build(source, config, self._publish, self._on_death)
        model = built.model

        def load_tokenizer() -> Any:
            from gapless.engine.client import find_tokenizer

            return find_tokenizer(setup.tokenizer or setup.model, self._tokenizer or "auto")

        self._grammars = Grammars(
            built.engine,
            lambda id, message: self._messages.put(Refused(id, message)),
            load_tokenizer,
            model.vocab_size,
            tuple(model.eos_token_ids),
        )
        self._on_loaded()
        built.engine.start()
        adapters = LoadedAdapters(built.engine, built.scheduler, built.runner, built.config.allow_missing)
        for name, path in setup.adapters.items():
            adapters.load(name, path)
        with adapters.locked(list(setup.adapters)) as refs:
            loaded = [ref for ref in refs if ref is not None]
        ready = Ready(
            model_name=model.name,
            options=asdict(built.config),
            vocab_size=model.vocab_size,
            eos_token_ids=tuple(model.eos_token_ids),
            longest=built.scheduler.longest,
            device=str(model.device),
            dtype=str(model.dtype).removeprefix("torch."),
            adapters=loaded,
            sizes=ModelSizes.of(model, built.layout.windows),
            sampling_defaults=sampling_defaults(source) if config.generation_config else {},
        )
        self._send(ready)

    # ---- from the front end ---------------------------------------------------------------------------------------

    def _read(self) -> None:
        frames = Frames()
        try:
            while data := self._connection.recv(READ_BYTES):
                for body in frames.feed(data):
                    self._take(to_engine.decode(body))
        except (EngineClosedError, EngineDeadError):  # the main thread says why
            return
        except OSError as error:
            logger.error("the front end cannot be read: %s", error)
        except Exception as error:
            logger.exception("a message of the front end is wrong")
            self._messages.put(Died(f"a message of the front end is wrong: {error}"))
            return
        else:
            if self._stopping:
                return
            logger.error("the front end is gone; the engine ends")
        if self._on_orphan is not None:
            self._on_orphan()
        self._setup.put(None)
        self._messages.put(None)

    def _take(self, message: ToEngine) -> None:
        if isinstance(message, Setup):
            self._setup.put(message)
            return
        engine = self.built.engine
        assert self._grammars is not None
        if isinstance(message, Commands):
            requests, refused = message.read()
            for one in refused:
                self._messages.put(one)
            plain = [r for r in requests if r.params.structured_outputs is None]
            if plain:
                engine.submit(plain)
            if len(plain) < len(requests):
                for request in requests:
                    if request.params.structured_outputs is not None:
                        self._grammars.take(request)
            for id, reason in message.finish:
                if not self._grammars.finish(id, reason):
                    engine.finish(id, reason)
        elif isinstance(message, Act):  # it may wait for requests to end, which this thread must not
            threading.Thread(target=self._act, args=(message,), name="gapless-act", daemon=True).start()
        elif isinstance(message, Stop):
            self._stopping = True
            self._messages.put(None)

    def _act(self, message: Act) -> None:
        try:
            perform(self.built, message.action, message.argument)
        except (ConfigError, EngineClosedError, EngineDeadError) as error:
            self._messages.put(Acted(message.number, str(error)))
        except Exception as error:
            logger.exception("%s failed", message.action)
            self._messages.put(Acted(message.number, repr(error)))
        else:
            self._messages.put(Acted(message.number))

    # ---- to the front end -----------------------------------------------------------------------------------------

    def _publish(self, message: StepMessage) -> None:
        """On the loop's thread, whose counters are copied here."""
        self._messages.put(self._step(message))

    def _step(self, message: StepMessage | None) -> Step:
        engine, scheduler = self.built.engine.counters()
        engine.messages_peak = self._messages.peak
        engine.grammars_peak = 0 if self._grammars is None else self._grammars.peak
        return Step(message, engine, scheduler)

    def _on_death(self, error: BaseException) -> None:
        logger.error("the engine stopped after an error", exc_info=error)
        self._messages.put(Died(f"the engine stopped after an error: {error!r}"))

    def _write(self, heartbeat: float) -> int:
        """Send what steps bring until the end; a step's message is encoded once and written once."""
        engine = self.built.engine
        try:
            while True:
                try:
                    message = self._messages.get(timeout=heartbeat)
                except queue.Empty:
                    self._send(self._step(None))
                    continue
                if message is None:
                    engine.close()
                    return EXIT_OK
                self._send(message)
                if isinstance(message, Died):
                    return EXIT_DIED
        except OSError as error:
            logger.error("the front end cannot be written to: %s", error)
            engine.close()
            return EXIT_ORPHAN
        finally:
            if self._grammars is not None:
                self._grammars.close()

    def _send(self, message: ToFrontEnd) -> None:
        self._connection.sendall(encode(message))


def main(arguments: list[str]) -> int:
    """Run the engine's process."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the front end is told, and tells the engine when to end
    orphaned = False

    def on_orphan() -> None:
        nonlocal orphaned
        orphaned = True
        faulthandler.dump_traceback_later(CLOSE_SECONDS, exit=True)

    set_up_logging(logging.INFO, False)
    connection = socket.socket(fileno=int(arguments[0]))
    code = EngineServer(
        connection,
        on_orphan=on_orphan,
        on_setup=lambda setup: set_up_logging(setup.log_level, setup.log_json),
        on_loaded=gc.freeze,  # what is loaded stays: collections need not look at it again
    ).run()
    return EXIT_ORPHAN if orphaned else code


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    logging.shutdown()
    sys.stderr.flush()
    os._exit(exit_code)  # no thread of torch is waited for
