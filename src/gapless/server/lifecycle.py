"""The life of a server: bind, start the engine's process, load, serve, drain, end.

The port is bound before anything is loaded, so that it cannot be lost meanwhile, and answers 503 until the engine is
warm. The engine's process is a child that ends with this one. If it ends first, open requests get an error, and this
process ends with code 1. SIGTERM and SIGINT drain: new requests get 503, running ones have ``shutdown_timeout``
seconds, and what is left then ends with an error event and ``[DONE]``. A second signal does not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import uvicorn

from gapless.config import EngineConfig
from gapless.engine.client import find_tokenizer
from gapless.errors import ConfigError
from gapless.server import errors
from gapless.server.app import make_app
from gapless.server.engine_process import EXIT_OK
from gapless.server.frontend import FrontEnd
from gapless.server.http_guard import guarded
from gapless.server.keys import VARIABLE, read_keys
from gapless.server.limits import raise_file_limit
from gapless.server.listening import BACKLOG, allowed_hosts, bind, inode, is_local, tls
from gapless.server.logs import set_up_logging
from gapless.server.options import ServerOptions
from gapless.server.prompts import Prompts, read_template
from gapless.server.remote import Connection
from gapless.server.serving import Serving, State
from gapless.server.ticket import Ticket
from gapless.server.wire import Acted, Died, Ready, Refused, Setup, Step, ToFrontEnd

T = TypeVar("T")
logger = logging.getLogger("gapless.server")

EXIT_SECONDS = 4.0
"""How long the engine's process may take to end before it is killed."""
LAST_WORDS_SECONDS = 1.0
"""How long answers that say that the server ends may take to be sent."""


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: this module has the only ones."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


async def _in_daemon(action: Callable[..., T], *arguments: Any) -> T:
    """Run ``action`` in a thread that nobody waits for if the server ends meanwhile: imports and loading take long."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            found = action(*arguments), None
        except BaseException as error:
            found = None, error  # type: ignore[assignment]
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, *found)

    threading.Thread(target=run, name="gapless-load", daemon=True).start()
    return await done


def start_engine_process(end: socket.socket) -> subprocess.Popen[bytes]:
    """A fresh interpreter: nothing of this one's threads or event loop is inherited."""
    command = [sys.executable, "-m", "gapless.server.engine_process", str(end.fileno())]
    return subprocess.Popen(command, pass_fds=[end.fileno()], stdin=subprocess.DEVNULL)


class Lifecycle:
    """One server.

    Args:
        options, config: of the server and of the engine.
        engine_options: what the user gave of the latter.
        model: folder, name or file.
        adapters: LoRA adapters to load, folders by name.
        start: starts the engine's process with its end of the socket pair.
        on_bound: called with the socket, before the engine is loaded.
        on_loaded: called before the first request is taken.
    """

    def __init__(
        self,
        model: str,
        options: ServerOptions,
        engine_options: dict[str, Any],
        adapters: dict[str, str] | None = None,
        start: Callable[[socket.socket], subprocess.Popen[bytes]] = start_engine_process,
        on_bound: Callable[[socket.socket], None] = lambda bound: None,
        on_loaded: Callable[[], object] = lambda: None,
    ) -> None:
        EngineConfig.from_dict(engine_options)
        self.options = options
        self.serving = Serving(options, model)
        self._model = model
        self._engine_options = engine_options
        self._adapters = adapters or {}
        for name in self._adapters:
            if name in self.serving.names:
                raise ConfigError(f"--lora {name}: this is the name of the model; give one of them another name")
        self._start = start
        self._on_bound = on_bound
        self._on_loaded = on_loaded
        self._keys = read_keys(options.api_key_file, given=options.api_key)
        self._tls = tls(options)
        self._template = read_template(options.chat_template)
        self._socket_file: tuple[int, int] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._server: _Server | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._end = asyncio.Event()
        self._signals = 0
        self._code = EXIT_OK
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self) -> int:
        """Serve until a signal or the engine's end; returns the exit code."""
        options = self.options
        bound = bind(options)
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError, RuntimeError):  # not the main thread
                loop.add_signal_handler(number, self.stop)
        if options.uds is not None:
            self._socket_file = inode(options.uds)
        self._on_bound(bound)
        self._warn(bound)
        self._server = self._uvicorn(bound)
        serving = asyncio.create_task(self._server.serve(sockets=[bound]))
        try:
            await self._start_engine()
            self._spawn(self._load())
            self._spawn(self._watch())
            ended = asyncio.create_task(self._end.wait())
            await asyncio.wait((ended, serving), return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
        finally:
            await self._shut_down(serving)
        return self._code

    def _uvicorn(self, bound: socket.socket) -> _Server:
        options = self.options
        connections = raise_file_limit(options.max_connections)
        if connections < options.max_connections:
            logger.warning("at most %d connections: the limit of open files allows no more", connections)
        return _Server(
            uvicorn.Config(
                make_app(self.serving, self._keys, allowed_hosts(options)),
                http=guarded(connections, options.header_timeout, options.body_timeout),
                ws="none",
                lifespan="off",
                ssl_context_factory=None if self._tls is None else lambda config, default: self._tls,  # type: ignore
                loop="none",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=options.keep_alive_timeout,
                timeout_graceful_shutdown=int(LAST_WORDS_SECONDS),
            )
        )

    def _warn(self, bound: socket.socket) -> None:
        options = self.options
        where = options.uds or ("http" if self._tls is None else "https") + "://{}:{}".format(*bound.getsockname()[:2])
        logger.info("listening on %s; loading %s", where, self._model)
        if not is_local(options) and not self._keys:
            logger.warning(
                "%s is open to everybody who can reach it: no API key is asked for. Set %s or --api-key-file",
                where,
                VARIABLE,
            )

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- the engine -----------------------------------------------------------------------------------------------

    async def _start_engine(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = self._start(theirs)
        self._connection = await Connection.open(ours, self._take, self._lost)
        self._connection.send(
            Setup(
                self._model,
                self._engine_options,
                self.options.tokenizer,
                logging.getLogger("gapless").level,
                self.options.log_format == "json",
                self._adapters,
                min(1.0, self.options.hang_timeout / 4),
            )
        )

    async def _load(self) -> None:
        """When the engine is warm, open the doors."""
        assert self._ready is not None
        try:
            tokenizer = asyncio.create_task(self._load_tokenizer())
            tokenizer.add_done_callback(lambda task: task.cancelled() or task.exception())  # the engine's reason counts
            ready = await self._ready
            await self._open(ready, await tokenizer)
        except Exception as error:
            if not isinstance(error, ConfigError):
                logger.exception("the server could not start")
            self._fail(str(error))

    async def _load_tokenizer(self) -> Any:
        """Meanwhile, but for a file that the engine's process converts first."""
        assert self._ready is not None
        if self.options.skip_tokenizer:
            return None
        source = self.options.tokenizer or self._model
        if source.endswith(".gguf"):
            await asyncio.wait((self._ready,))
        tokenizer = await _in_daemon(find_tokenizer, source, "auto")
        if tokenizer is None:
            raise ConfigError(f"{source} has no tokenizer: give one with --tokenizer, or use --skip-tokenizer")
        return tokenizer

    async def _open(self, ready: Ready, tokenizer: Any) -> None:
        options, connection = self.options, self._connection
        assert connection is not None
        prompts = await _in_daemon(
            Prompts, tokenizer, ready.vocab_size, ready.longest, options.max_prompts, self._template
        )
        front_end = FrontEnd(
            connection,
            ready,
            tokenizer,
            max_queued_requests=options.max_queued_requests,
            max_queued_tokens=options.max_queued_tokens,
            buffer_tokens=options.stream_buffer_tokens,
            on_step=self.serving.metrics.step,
            on_closed=self._closed,
        )
        self.serving.metrics.front_end = front_end
        self._on_loaded()
        if self.serving.state is State.LOADING:
            self.serving.open(front_end, prompts)
            logger.info("ready: %s on %s, %s", ready.model_name, ready.device, ready.dtype)

    def _closed(self, ticket: Ticket) -> None:
        self.serving.metrics.finished(ticket)
        if not ticket.done:
            logger.info("a request was ended before its time: %s", ticket.end_reason or "an error")

    def _take(self, message: ToFrontEnd) -> None:
        front_end = self.serving.opened
        if isinstance(message, Ready):
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(message)
        elif isinstance(message, Died):
            self._fail(message.reason, 2 if message.usage else 1)
        elif front_end is None:
            return  # signs of life while the rest is loaded
        elif isinstance(message, Step):
            front_end.take(message)
        elif isinstance(message, Refused):
            front_end.client.refuse(message)
        elif isinstance(message, Acted):
            front_end.acted(message)

    def _lost(self, reason: str) -> None:
        """The connection is gone. Expected once the server ends."""
        if self.serving.state is not State.FAILED and not self._end.is_set():
            code = None
            if self._process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = self._process.wait(0.2)
            how = "" if code is None else f" by signal {-code}" if code < 0 else f" with code {code}"
            self._fail(reason + how)

    def _fail(self, reason: str, code: int = 1) -> None:
        """The engine is gone: tell everybody, and end."""
        if self.serving.state is State.FAILED:
            return
        logger.error("the server ends: %s", reason)
        self.serving.state, self.serving.reason = State.FAILED, errors.sanitize(reason)
        self._code = code
        if self.serving.opened is not None:
            self.serving.opened.fail(reason)
        self._end.set()

    async def _watch(self) -> None:
        """Once a second: slow clients, and requests without end."""
        while True:
            await asyncio.sleep(1.0)
            if self.serving.opened is not None:
                self.serving.opened.cut_slow_readers(self.options.write_timeout)
                if self.options.max_request_seconds:
                    self.serving.opened.end_old(self.options.max_request_seconds)

    # ---- the end --------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Drain and end; the second call does not wait."""
        self._signals += 1
        if self._signals > 1 or self.serving.opened is None:
            logger.info("ending at once")
            self._end.set()
        elif self.serving.state is State.READY:
            self.serving.state = State.DRAINING
            self._spawn(self._drain())

    async def _drain(self) -> None:
        front_end, seconds = self.serving.front_end, self.options.shutdown_timeout
        logger.info("draining: %d requests have %g seconds to end", len(front_end.tickets), seconds)
        end = time.monotonic() + seconds
        while front_end.tickets and time.monotonic() < end:
            await asyncio.sleep(0.02)
        self._end.set()

    async def _shut_down(self, serving: asyncio.Task[None]) -> None:
        front_end = self.serving.opened
        if self.serving.state is not State.FAILED:
            self.serving.state = State.DRAINING
        if front_end is not None and front_end.tickets:
            logger.info("%d requests are ended", len(front_end.tickets))
            for ticket in list(front_end.tickets):
                ticket.end_reason = ticket.end_reason or "shutdown"
                ticket.fail(errors.draining())
        until = time.monotonic() + LAST_WORDS_SECONDS
        while front_end is not None and front_end.tickets and time.monotonic() < until:
            await asyncio.sleep(0.01)
        if front_end is not None:
            front_end.stop()
        elif self._process is not None:
            self._process.kill()  # still loading
        for task in list(self._tasks):
            task.cancel()
        if self._server is not None:
            self._server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        await asyncio.to_thread(self._reap)
        if self._connection is not None:
            self._connection.close()
        if self.serving.opened is not None:
            self.serving.prompts.close()
        if self.options.uds is not None and inode(self.options.uds) == self._socket_file:
            with contextlib.suppress(OSError):
                os.unlink(self.options.uds)
        logger.info("ended with code %d", self._code)

    def _reap(self) -> None:
        if self._process is None:
            return
        try:
            self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            logger.warning("the engine's process did not end and is killed")
            self._process.kill()
            self._process.wait()


def serve(
    model: str, options: ServerOptions, engine_options: dict[str, Any], adapters: dict[str, str] | None = None
) -> int:
    """Run a server in this thread until it ends; returns the exit code.

    Raises:
        ConfigError: an option is wrong, or the address cannot be had.
    """
    set_up_logging(getattr(logging, options.log_level.upper()), options.log_format == "json")
    factory: Callable[[], asyncio.AbstractEventLoop]
    try:
        import uvloop

        factory = uvloop.new_event_loop
    except ImportError:
        factory = asyncio.new_event_loop
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            # What is loaded stays: collections need not look at it again.
            return runner.run(Lifecycle(model, options, engine_options, adapters, on_loaded=gc.freeze).run())
    finally:
        gc.unfreeze()
