"""What a token costs the front end of `gapless serve`: from the engine's bytes to the client's socket, on one core.

    python benchmarks/front_end.py --tokenizer ~/.cache/gapless/SmolLM2-135M-Instruct --streams 64,256

Three processes: the real front end; an engine of which there is nothing but its messages, one a step with a token for
each stream, at a steady pace; and a client that throws away what it reads. The figure is the CPU time of the front
end's process, divided by the tokens, while all streams run: neither their first nor their last tokens count.
``tokens/chunk`` says whether it kept up: 1 is one event for each token. Small ids are drawn more often than large ones,
as in texts.

``--mode asgi`` and ``--mode write`` say what can be reached, with the same pace, client and bytes: bare uvicorn, whose
tasks send one ready chunk a step each, and bare writes to uvloop's transports. ``--mode process`` measures
`OutputProcessor` alone. ``--profile`` prints where the time goes (and is slower by it).
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import pstats
import resource
import select
import selectors
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

CHUNK = 220
"""Bytes of an event of /v1/completions."""


def engine(fd: int, vocab: int, interval: float, tokens: int) -> None:
    """The process that stands for an engine: all requests that come get a token each, every ``interval`` seconds."""
    from gapless.config import EngineConfig
    from gapless.engine.stats import EngineStats
    from gapless.request.messages import Finished, StepMessage
    from gapless.request.outputs import FinishReason
    from gapless.scheduler.stats import SchedulerStats
    from gapless.server.wire import Commands, Frames, Ready, Step, Stop, encode, to_engine

    connection = socket.socket(fileno=fd)
    frames, stats, scheduler = Frames(), EngineStats(), SchedulerStats()
    config = EngineConfig(max_num_seqs=1024)
    rng = np.random.default_rng(0)
    open_: dict[int, Any] = {}
    ready = Ready("none", asdict(config), vocab, (), 1 << 20, "none", "none")
    connection.sendall(encode(ready))
    due = time.monotonic()
    while True:
        wait = max(due - time.monotonic(), 0.0) if open_ else None
        if select.select([connection], [], [], wait)[0]:
            data = connection.recv(1 << 18)
            if not data:
                return
            for body in frames.feed(data):
                message = to_engine.decode(body)
                if isinstance(message, Stop):
                    return
                if isinstance(message, Commands):
                    for request in message.read()[0]:
                        open_[request.id] = [request, []]
                    for id, _ in message.finish:
                        open_.pop(id, None)
                    due = max(due, time.monotonic() + 0.2)  # until all have come
        if not open_ or time.monotonic() < due:
            continue
        due += interval
        ids = np.array(list(open_), np.int64)
        drawn = draw(rng, vocab, len(ids))
        finished = []
        for (request, so_far), token in zip(list(open_.values()), drawn, strict=True):
            so_far.append(token)
            if len(so_far) == tokens:
                ended = Finished(request.id, np.array(so_far, np.int32), FinishReason.LENGTH)
                finished.append(ended)
                del open_[request.id]
        stats.steps += 1
        message = StepMessage(ids, drawn, tuple(finished), time.monotonic())
        connection.sendall(encode(Step(message, stats, scheduler)))


def draw(rng: np.random.Generator, vocab: int, *shape: int) -> Any:
    """Tokens, low ids more often."""
    return (100 + (vocab - 100) * rng.random(shape) ** 4).astype(np.int32)


def client(port: int, streams: int, path: str, body: dict[str, Any]) -> None:
    """The process that asks and reads; prints how many events came."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    selector = selectors.DefaultSelector()
    events = 0
    for _ in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(head.encode() + b"\r\nConnection: close\r\n\r\n" + data)
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ)
    while selector.get_map():
        for key, _ in selector.select():
            part = key.fileobj.recv(1 << 18)  # type: ignore[union-attr]
            events += part.count(b"data: {")
            if not part:
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
    print(events)


async def measure(arguments: argparse.Namespace, streams: int, profile: cProfile.Profile | None) -> dict[str, Any]:
    """One row of the table."""
    from gapless.server.lifecycle import Lifecycle
    from gapless.server.options import ServerOptions
    from gapless.text.detokenizer import decode_whole

    interval = arguments.interval_us * streams / 1e6

    def start(end: socket.socket) -> subprocess.Popen[bytes]:
        own = [sys.executable, __file__, "--engine", str(end.fileno()), "--vocab", str(arguments.vocab)]
        own += ["--tokens", str(arguments.tokens), "--interval", str(interval)]
        return subprocess.Popen(own, pass_fds=[end.fileno()])

    port: list[int] = []
    options = ServerOptions(port=0, log_level="warning", access_log=False, served_model_name="none")
    options = ServerOptions(**{**asdict(options), "tokenizer": arguments.tokenizer})
    server = Lifecycle("none", options, {}, None, start, lambda bound: port.append(bound.getsockname()[1]), gc.freeze)
    running = asyncio.create_task(server.run())
    while server.serving.opened is None:
        await asyncio.sleep(0.05)
        if running.done():
            raise SystemExit(running.result())
    if arguments.path == "/v1/chat/completions":
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
    else:
        body = {"prompt": "Hello"}
    body |= {"stream": True, "max_tokens": arguments.tokens, "ignore_eos": True}
    decode_whole(server.serving.prompts.tokenizer, range(arguments.vocab))  # a server that has run has seen all tokens
    window = Window(arguments.tokens, profile)
    front_end = server.serving.front_end
    front_end._on_step = lambda step: window.step(step.engine.steps)
    events = await ask(arguments, streams, port[0], body)
    server.stop()
    await running
    return window.row(streams, arguments) | {
        "tokens_per_chunk": round(streams * arguments.tokens / max(events - streams * ("chat" in arguments.path), 1), 2)
    }


async def ask(arguments: argparse.Namespace, streams: int, port: int, body: dict[str, Any]) -> int:
    """Run the client; how many events came."""
    own = [sys.executable, __file__, "--client", str(port), "--path", arguments.path, "--body", json.dumps(body)]
    asking = await asyncio.create_subprocess_exec(*own, "--streams", str(streams), stdout=subprocess.PIPE)
    out, _ = await asking.communicate()
    return int(out)


class Window:
    """The CPU time of this process between two steps."""

    def __init__(self, tokens: int, profile: cProfile.Profile | None) -> None:
        self._first, self._last = max(tokens // 10, 1), tokens - max(tokens // 10, 1)
        self._profile = profile
        self._at: list[tuple[float, float, float]] = []

    def step(self, number: int) -> None:
        """Call it after each."""
        if number in (self._first, self._last):
            used = resource.getrusage(resource.RUSAGE_SELF)
            self._at.append((used.ru_utime, used.ru_stime, time.monotonic()))
            if self._profile is not None:
                (self._profile.enable if number == self._first else self._profile.disable)()

    def row(self, streams: int, arguments: argparse.Namespace) -> dict[str, Any]:
        """Of the table."""
        user, system, seconds = (b - a for a, b in zip(*self._at, strict=True))
        tokens = streams * (self._last - self._first)
        return {
            "mode": arguments.mode,
            "streams": streams,
            "path": arguments.path,
            "us_per_token": round((user + system) / tokens * 1e6, 2),
            "user_us": round(user / tokens * 1e6, 2),
            "system_us": round(system / tokens * 1e6, 2),
            "core_share": round((user + system) / seconds, 2),
        }


async def floor(arguments: argparse.Namespace, streams: int, profile: cProfile.Profile | None) -> dict[str, Any]:
    """Chunks of the usual size, without anything that makes them."""
    chunk = b"data: " + b"x" * (CHUNK - 8) + b"\n\n"
    window, interval = Window(arguments.tokens, profile), arguments.interval_us * streams / 1e6
    loop = asyncio.get_running_loop()
    transports: list[asyncio.Transport] = []
    steps: list[asyncio.Future[None]] = [loop.create_future() for _ in range(arguments.tokens + 1)]
    open_ = 0

    class Bare(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            nonlocal open_
            transports.append(transport)  # type: ignore[arg-type]
            open_ += 1

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal open_
        open_ += 1
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for step in steps[:-1]:
            await step
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    import uvicorn

    listening = socket.create_server(("127.0.0.1", 0), backlog=2048)
    port = listening.getsockname()[1]
    bare = arguments.mode == "write"
    if bare:
        await loop.create_server(Bare, sock=listening)
    else:
        config = uvicorn.Config(app, http="httptools", lifespan="off", log_level="warning", access_log=False)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve([listening]))
    asking = asyncio.create_task(ask(arguments, streams, port, {}))
    while open_ < streams:
        await asyncio.sleep(0.01)
    framed = b"%x\r\n%b\r\n" % (len(chunk), chunk)
    due = time.monotonic()
    for number, step in enumerate(steps):
        if bare:
            for transport in transports:
                transport.write(framed)
        else:
            step.set_result(None)
        window.step(number)
        due += interval
        await asyncio.sleep(max(due - time.monotonic(), 0.0))
    for transport in transports:
        transport.close()
    await asking
    if not bare:
        server.should_exit = True
        await serving
    return window.row(streams, arguments)


def process_only(arguments: argparse.Namespace, streams: int) -> dict[str, Any]:
    """`OutputProcessor` in mode "delta", and nothing around it."""
    from gapless.engine.client import find_tokenizer
    from gapless.request.messages import StepMessage
    from gapless.request.sampling_params import SamplingParams
    from gapless.text.outputs import OutputProcessor, RequestGroup

    tokenizer = find_tokenizer(arguments.tokenizer, arguments.tokenizer)
    outputs = OutputProcessor(lambda id: None)
    params = SamplingParams(max_tokens=arguments.tokens)
    prompt = np.array([5], np.int32)
    for i in range(streams):
        ignore = lambda output: None  # noqa: E731
        outputs.add(RequestGroup(str(i), None, prompt, params, [i], ignore, tokenizer=tokenizer, mode="delta"))
    ids = np.arange(streams, dtype=np.int64)
    rng = np.random.default_rng(0)
    drawn = draw(rng, arguments.vocab, arguments.tokens, streams)
    start = time.process_time()
    for tokens in drawn:
        outputs.process(StepMessage(ids, tokens, (), 0.0))
    seconds = time.process_time() - start
    return {"streams": streams, "us_per_token": round(seconds / drawn.size * 1e6, 2)}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default=str(Path("~/.cache/gapless/SmolLM2-135M-Instruct").expanduser()))
    parser.add_argument("--streams", default="64,256")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--interval-us", type=float, default=150.0, help="pace of the engine, for each token")
    parser.add_argument("--path", default="/v1/completions")
    parser.add_argument("--mode", choices=("server", "asgi", "write", "process"), default="server")
    parser.add_argument("--profile", type=int, default=0, metavar="LINES")
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--interval", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--body", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine is not None:
        engine(arguments.engine, arguments.vocab, arguments.interval, arguments.tokens)
        return
    if arguments.client is not None:
        client(arguments.client, int(arguments.streams), arguments.path, json.loads(arguments.body))
        return
    try:
        import uvloop

        factory: Any = uvloop.new_event_loop
    except ImportError:
        factory = asyncio.new_event_loop
    for streams in map(int, arguments.streams.split(",")):
        profile = cProfile.Profile(time.thread_time) if arguments.profile else None
        if arguments.mode == "process":
            print(json.dumps(process_only(arguments, streams)))
            continue
        with asyncio.Runner(loop_factory=factory) as runner:
            work = measure if arguments.mode == "server" else floor
            print(json.dumps(runner.run(work(arguments, streams, profile))), flush=True)
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(arguments.profile)


if __name__ == "__main__":
    main()
