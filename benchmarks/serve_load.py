"""What serving costs, and what bad clients cost. On a CPU, with a tiny model; results as JSON.

    python benchmarks/serve_load.py tokens host clients --save benchmarks/results/serve-load-cpu.json

``tokens``: processor time of the HTTP process for one token of a stream: its share of a step's message, detokenizing,
JSON, the socket.

``host``: host time per step, idle time of the device and tokens a second, for the library alone and behind the server
with as many streams open; and with the same requests, but none of them streamed. Both engines are started at once and
work by turns. So that the device takes no processor time from the host, as a GPU does not, a step of it sleeps. The
engines have cores of their own (one of two, a quarter of many), HTTP has others, and so have the clients, which only
count. On a GPU, where each engine takes its weights and 4609 blocks of cache:

    GAPLESS_BENCH_DEVICE=cuda python benchmarks/serve_load.py host --step-ms 0 --shape qwen3-0.6b --repeats 2

``clients``: thousands of open connections, readers that do not read, heads that are never finished, bodies without an
end: how long each is borne, how much memory it takes, and how long others wait meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import http.client
import json
import os
import re
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gapless.bench.environment import environment
from gapless.bench.serve_http import HttpClient
from gapless.bench.serve_load import random_asks
from gapless.bench.serve_report import result
from gapless.bench.serve_run import Target, run
from gapless.server.top.reading import Reading

TICK = 1 / os.sysconf("SC_CLK_TCK")
VOCAB = 10240
ENGINE = {
    "device": os.environ.get("GAPLESS_BENCH_DEVICE", "cpu"), "max_num_seqs": 256, "max_num_batched_tokens": 2048,
    "max_model_len": 512, "block_size": 16,
    "num_kv_blocks": 8193, "check_model": False, "enable_prefix_caching": False,
}  # fmt: skip
HOST_ENGINE = ENGINE | {"num_kv_blocks": 256 * 18 + 1}
"""Two of them share a device."""
PROMPT, NEW = 16, 256
GREEDY = {"temperature": 0, "ignore_eos": True}


# ---- a model and a server ---------------------------------------------------------------------------------------


def make_folder(path: Path, shape: str = "tiny", weights: bool = True) -> None:
    """A model with random weights, or without any, and a tokenizer whose tokens are words."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from gapless.bench.models import SHAPES, random_model

    model = random_model(shape, torch.device("cpu" if weights else "meta"), torch.float32)
    (model if weights else model.config).save_pretrained(path)
    letters = "abcdefghijklmnopqrstuvwxyz"
    places = range(3 if SHAPES[shape]["vocab_size"] <= 26**3 else 4)
    words = [
        "Ġ" + "".join(letters[i // 26**place % 26] for place in places) for i in range(SHAPES[shape]["vocab_size"])
    ]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)


def sleeping(inner: Any, seconds: float) -> Any:
    """A forward pass whose step takes at least ``seconds``, most of which is sleep."""

    if not seconds:
        return inner

    def forward(*arguments: Any) -> Any:
        end = time.perf_counter() + seconds
        found = inner(*arguments)
        time.sleep(max(end - time.perf_counter(), 0.0))
        return found

    return forward


def host_model(shape: str) -> Any:
    """Random weights, made where they are used: nothing is written to a disk."""
    import torch

    from gapless.bench.models import random_model

    device = torch.device(ENGINE["device"])
    return random_model(shape, device, torch.float32 if device.type == "cpu" else torch.bfloat16)


def engine_main(descriptor: int, step: float, shape: str) -> None:
    """The engine's process, with steps that sleep."""
    from gapless.server.engine_process import EngineServer, die_with_parent

    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    pin("engine")

    def loaded() -> None:
        server.built.model.forward = sleeping(server.built.model.forward, step)
        gc.freeze()

    server = EngineServer(socket.socket(fileno=descriptor), host_model(shape), on_loaded=loaded)
    os._exit(server.run())


def front_main(folder: str, step: float, shape: str) -> None:
    """The HTTP process."""
    import logging

    import uvloop

    from gapless.server.lifecycle import Lifecycle
    from gapless.server.logs import set_up_logging
    from gapless.server.options import ServerOptions

    def start(end: socket.socket) -> subprocess.Popen[bytes]:
        command = [sys.executable, __file__, "--engine", str(end.fileno()), str(step), shape]
        return subprocess.Popen(command, pass_fds=[end.fileno()], stdin=subprocess.DEVNULL)

    set_up_logging(logging.INFO, False)
    pin("http")
    options = ServerOptions(port=0, access_log=False)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        server = Lifecycle(folder, options, dict(HOST_ENGINE), start=start, on_loaded=gc.freeze)
        sys.exit(runner.run(server.run()))


CORES = sorted(os.sched_getaffinity(0))


def pin(role: str) -> None:
    """Keep this process on the cores of a role: two have one core for the engines, many have a quarter of them."""
    quarter = max(len(CORES) // 4, 1)
    rest = CORES[quarter:] or CORES
    chosen = {"engine": CORES[:quarter], "http": rest[:quarter], "clients": rest[quarter:] or rest}
    os.sched_setaffinity(0, chosen[role])


class Server:
    """A server in processes of its own."""

    def __init__(self, command: Sequence[str]) -> None:
        self._log = tempfile.NamedTemporaryFile("r", suffix=".log")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, *command], stderr=self._log.fileno(), stdout=subprocess.DEVNULL
        )
        end = time.monotonic() + 300
        while (match := re.search(r"listening on (http://[^\s;]+)", self.log)) is None:
            self._check(end)
        self.url = match[1]
        self.port = int(self.url.rpartition(":")[2])
        while not self._ready():
            self._check(end)

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text()

    def _check(self, end: float) -> None:
        if self.process.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"the server did not start:\n{self.log[-3000:]}")
        time.sleep(0.1)

    def _ready(self) -> bool:
        return b" 200 " in once(self.port, b"GET /ready HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")[:20]

    def cpu_seconds(self) -> tuple[float, float]:
        """Processor time of the HTTP process: its own, and the kernel's for it."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) * TICK, int(fields[12]) * TICK

    def memory_mb(self) -> float:
        """Resident memory of the HTTP process."""
        match = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{self.process.pid}/status").read_text())
        assert match is not None
        return int(match[1]) / 1024

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)
        self._log.close()


def once(port: int, request: bytes) -> bytes:
    """Send, and return all that comes."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(request)
        parts = []
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(65536):
                parts.append(part)
        return b"".join(parts)


@contextlib.contextmanager
def serving(command: Sequence[str]) -> Iterator[Server]:
    """A server that ends with the block."""
    server = Server(command)
    try:
        yield server
    finally:
        server.close()


def plain(folder: str, *options: str) -> list[str]:
    """The command of the ordinary server."""
    engine = [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items() if not isinstance(value, bool)]
    off = [f"--no-{name.replace('_', '-')}" for name, value in ENGINE.items() if value is False]
    return ["-m", "gapless", "serve", folder, "--port=0", "--no-access-log", *engine, *off, *options]


def streams(url: str, count: int, new: int) -> dict[str, Any]:
    """So many streams at once, all to their end."""

    async def whole() -> dict[str, Any]:
        client = HttpClient(url, {}, timeout=600)
        target = Target("/v1/completions", False, await model_of(client), GREEDY)
        asks = random_asks(count, PROMPT, new, vocab=VOCAB)
        records, seconds = await run(client, target, asks, [0.0] * count, None, "load")
        await client.close()
        return result(records, seconds)

    import uvloop

    return uvloop.run(whole())


async def model_of(client: HttpClient) -> str:
    return str(json.loads((await client.get("/v1/models")).body)["data"][0]["id"])


# ---- tokens -----------------------------------------------------------------------------------------------------


def tokens(folder: str, repeats: int) -> list[dict[str, Any]]:
    """Microseconds of the HTTP process for one more token, and for a request: from runs of two lengths."""
    rows = []
    short, long = 96, 480
    with serving(plain(folder)) as server:
        streams(server.url, 16, 32)
        for count in (1, 16, 64, 256):
            for _ in range(repeats):
                used = []
                for new in (short, long):
                    rounds = max(16 // count, 1)  # the kernel counts in hundredths of a second
                    before = server.cpu_seconds()
                    for _ in range(rounds):
                        found = streams(server.url, count, new)
                        assert found["failed"] == 0, found["errors"][:3]
                    after = server.cpu_seconds()
                    used.append([1e6 * (b - a) / rounds / count for a, b in zip(before, after, strict=True)])
                user, system = ((b - a) / (long - short) for a, b in zip(*used, strict=True))
                row = {
                    "streams": count,
                    "cpu_us_per_token": user + system,
                    "kernel_us_per_token": system,
                    "cpu_us_per_request": sum(used[0]) - short * (user + system),
                    "tokens_per_s": found["output_throughput"],
                }
                rows.append(row)
                print(row, flush=True)
    return rows


# ---- host -------------------------------------------------------------------------------------------------------


def host(folder: str, step: float, repeats: int, shape: str) -> list[dict[str, Any]]:
    """The library alone, the server with streams, the server without, by turns."""
    rows: list[dict[str, Any]] = []

    def show(row: dict[str, Any]) -> None:
        rows.append(row)
        print(row, flush=True)

    inherited = [folder, str(step), shape]
    library = subprocess.Popen(
        [sys.executable, __file__, "--library", *inherited],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
    )  # fmt: skip
    assert library.stdin is not None
    assert library.stdout is not None
    try:
        with serving([__file__, "--front", *inherited]) as server:
            if library.stdout.readline().strip() != "ready":
                raise SystemExit("the library did not start")
            pin("clients")
            read_streams(server.port, 4)
            reading = asyncio.run(read_counters(server))
            for _ in range(repeats):
                for count in (64, 256):
                    print(count, file=library.stdin)
                    show(json.loads(library.stdout.readline()))
                    for streamed in (0, count):
                        wall = (read_streams if streamed else read_at_once)(server.port, count)
                        before, reading = reading, asyncio.run(read_counters(server))
                        change = {name: reading[name] - before[name] for name in reading}
                        show(figures("server", count, streamed, wall, change))
    finally:
        library.stdin.close()
        library.wait(60)
    summary(rows)
    return rows


def summary(rows: Sequence[dict[str, Any]]) -> None:
    """Medians, and tokens a second against the library's."""
    print(f"{'':22}{'host ms/step':>14}{'ms/step':>9}{'idle %':>8}{'tokens/s':>10}{'of library':>12}")
    alone: dict[int, float] = {}
    for kind in dict.fromkeys((r["where"], r["requests"], r["open_streams"]) for r in rows):
        own = [r for r in rows if (r["where"], r["requests"], r["open_streams"]) == kind]
        names = ("host_ms_per_step", "step_ms", "idle_host_percent", "tokens_per_s")
        work, step, idle, rate = (statistics.median(r[name] for r in own) for name in names)
        where, requests, streamed = kind
        what = f"library, {requests}" if where == "library" else f"server, {requests}, {streamed} streams"
        if where == "library":
            alone[requests] = rate
        print(f"{what:22}{work:14.3f}{step:9.3f}{idle:8.2f}{rate:10.0f}{100 * rate / alone[requests]:11.1f}%")


def figures(kind: str, count: int, streamed: int, wall: float, now: dict[str, float]) -> dict[str, Any]:
    """One row."""
    steps = now["steps"]
    return {
        "where": kind,
        "requests": count,
        "open_streams": streamed,
        "tokens_per_s": count * NEW / wall,
        "host_ms_per_step": 1e3 * now["host"] / steps,
        "step_ms": 1e3 * (now["busy"] + now["idle_host"]) / steps,
        "idle_host_percent": 100 * now["idle_host"] / (now["busy"] + now["idle_host"]),
    }


async def read_counters(server: Server) -> dict[str, float]:
    """The engine's counters, which come to the HTTP process with its steps, and once a second."""
    client = HttpClient(server.url, {}, timeout=60)
    await asyncio.sleep(1.2)
    reading = Reading.of(0.0, (await client.get("/metrics")).body.decode())
    await client.close()
    stages = reading.by("step_host_seconds_total", "stage")
    return {
        "steps": reading.value("steps_total") or 0.0,
        "busy": reading.value("gpu_busy_seconds_total") or 0.0,
        "idle_host": reading.by("gpu_idle_seconds_total", "cause").get("host", 0.0),
        "host": sum(value for stage, value in stages.items() if stage != "wait"),
    }


def request(prompt: Any, **options: Any) -> bytes:
    """Of /v1/completions."""
    body = json.dumps({"prompt": prompt, "max_tokens": NEW, **GREEDY, **options}).encode()
    return HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def read_at_once(port: int, count: int) -> float:
    """Seconds of one request for all."""
    asks = random_asks(count, PROMPT, NEW, vocab=VOCAB)
    start = time.perf_counter()
    answer = once(port, request([ask.prompt for ask in asks]))
    assert b" 200 " in answer[:20], answer[:300]
    assert answer.count(b'"finish_reason":"length"') == count
    return time.perf_counter() - start


def read_streams(port: int, count: int) -> float:
    """Seconds of so many streams, read by several processes that do nothing else."""
    readers = max(len(os.sched_getaffinity(0)) // 2, 1)
    asks = random_asks(count, PROMPT, NEW, vocab=VOCAB)
    processes = []
    for i in range(readers):
        process = subprocess.Popen(
            [sys.executable, "-c", READER, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdin is not None
        assert process.stdout is not None
        requests = [request(ask.prompt, stream=True).hex() for ask in asks[i::readers]]
        process.stdin.write(json.dumps(requests).encode() + b"\n")
        process.stdin.flush()
        process.stdout.readline()  # it is connected
        processes.append(process)
    start = time.perf_counter()
    for process in processes:
        process.stdin.write(b"go\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
    ended = sum(int(process.stdout.read()) for process in processes)  # type: ignore[union-attr]
    wall = time.perf_counter() - start
    for process in processes:
        process.communicate()
    assert ended == count, f"{ended} of {count} streams came to their end"
    return wall


READER = """
import json, selectors, socket, sys
requests = [bytes.fromhex(text) for text in json.loads(sys.stdin.readline())]
selector, tails, ended = selectors.DefaultSelector(), {}, 0
connections = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in requests]
print("connected", flush=True)
sys.stdin.readline()
for connection, data in zip(connections, requests):
    connection.sendall(data)
    selector.register(connection, selectors.EVENT_READ)
    tails[connection] = b""
while tails:
    for key, _ in selector.select():
        part = key.fileobj.recv(1 << 18)
        tails[key.fileobj] = (tails[key.fileobj] + part)[-1000:]
        if not part:
            selector.unregister(key.fileobj)
            ended += b'"finish_reason":"length"' in tails.pop(key.fileobj)
print(ended)
"""
"""A program that reads streams: without anything to import, and cheaper for each event than any client."""


def counters(stats: Any) -> dict[str, float]:
    """Those that `figures` takes, of the engine itself."""
    return {"steps": stats.steps, "busy": stats.busy, "idle_host": stats.idle_host, "host": stats.host_work}


def library_main(folder: str, step: float, shape: str) -> None:
    """The same requests without a server: a line of input is their number."""
    pin("engine")
    from gapless import LLM, SamplingParams

    with LLM(host_model(shape), tokenizer=folder, **HOST_ENGINE) as llm:
        model = llm._client.model
        model.forward = sleeping(model.forward, step)
        params = SamplingParams(max_tokens=NEW, **GREEDY)
        prompts = [{"prompt_token_ids": ask.prompt} for ask in random_asks(256, PROMPT, NEW, vocab=VOCAB)]
        llm.generate(prompts[:4], params, use_tqdm=False)
        gc.freeze()
        print("ready", flush=True)
        for count in map(int, sys.stdin):
            before, start = counters(llm.stats()[0]), time.perf_counter()
            llm.generate(prompts[:count], params, use_tqdm=False)
            wall = time.perf_counter() - start
            after = counters(llm.stats()[0])
            change = {name: after[name] - before[name] for name in after}
            print(json.dumps(figures("library", count, 0, wall, change)), flush=True)


# ---- clients ----------------------------------------------------------------------------------------------------

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
SECONDS = 4
"""Time limits of the server, so that the benchmark need not wait for the usual ones."""


class Meanwhile:
    """A good request again and again, and the server's memory, while something else goes on; in a thread of its own."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._ended = threading.Event()
        self.latencies: list[float] = []
        self.memory: list[float] = []
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=60)
        while not self._ended.wait(0.05):
            start = time.perf_counter()
            connection.request("GET", "/version")
            assert connection.getresponse().read()
            self.latencies.append(time.perf_counter() - start)
            self.memory.append(self._server.memory_mb())
        connection.close()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


def scenario(server: Server, name: str, work: Any) -> dict[str, Any]:
    """Run ``work`` and say what it did to the server."""
    before, meanwhile = server.memory_mb(), Meanwhile(server)
    start = time.perf_counter()
    try:
        found = asyncio.run(work)
        seconds = time.perf_counter() - start
    finally:
        meanwhile.end()
    time.sleep(1.0)
    row = {
        "scenario": name, **found, "seconds": seconds, "memory_mb_before": before,
        "memory_mb_most": max(meanwhile.memory), "memory_mb_after": server.memory_mb(),
        "others_ms_median": 1e3 * sorted(meanwhile.latencies)[len(meanwhile.latencies) // 2],
        "others_ms_worst": 1e3 * max(meanwhile.latencies),
    }  # fmt: skip
    print(row, flush=True)
    return row


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    """What comes until the server closes."""
    out = b""
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(65536):
            out += part[: 4096 - len(out)] if len(out) < 4096 else b""
    return out


async def many_connections(port: int, count: int) -> dict[str, Any]:
    """Open them all; each asks once and stays. Some more must be refused."""
    writers, answers, gate = [], {200: 0, 503: 0}, asyncio.Semaphore(200)

    async def one() -> None:
        async with gate:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=4096)
            writers.append(writer)
            writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            status = int((await reader.readuntil(b"\r\n")).split()[1])
            answers[status] = answers.get(status, 0) + 1

    try:
        await asyncio.gather(*(one() for _ in range(count)))
        opened = len(writers)
        await asyncio.gather(*(one() for _ in range(200)))
        return {"connections": opened, "answers": {str(k): v for k, v in answers.items()}}
    finally:
        for writer in writers:
            writer.transport.abort()


async def half_heads(port: int, count: int) -> dict[str, Any]:
    """Heads that never end."""

    async def one() -> tuple[float, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        start = time.perf_counter()
        writer.write(HEAD + b"x-a: ")
        answer = await until_closed(reader)
        writer.close()
        return time.perf_counter() - start, answer

    ends = await asyncio.gather(*(one() for _ in range(count)))
    return {
        "connections": count,
        "limit_s": SECONDS,
        "slowest_close_s": max(seconds for seconds, _ in ends),
        "answered_408": sum(b" 408 " in answer[:20] for _, answer in ends),
    }


async def endless_bodies(port: int, count: int, pause: float) -> dict[str, Any]:
    """Chunked bodies without an end: as fast as they can be sent, or a byte now and then."""
    piece = b"10000\r\n" + b" " * 65536 + b"\r\n" if not pause else b"1\r\n \r\n"

    async def one() -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        closed, sent = asyncio.create_task(until_closed(reader)), 0
        with contextlib.suppress(ConnectionError):
            while not closed.done():
                writer.write(piece)
                sent += len(piece)
                await asyncio.wait_for(asyncio.shield(asyncio.create_task(writer.drain())), 60)
                await asyncio.sleep(pause)
        writer.transport.abort()
        return sent, await closed

    ends = await asyncio.gather(*(one() for _ in range(count)))
    statuses = sorted({answer.split(b" ")[1].decode() for _, answer in ends if b" " in answer})
    return {"connections": count, "most_sent_mb": max(sent for sent, _ in ends) / 2**20, "statuses": statuses}


async def slow_readers(url: str, port: int, count: int) -> dict[str, Any]:
    """Streams that are asked for and never read, too long for the kernel's buffers: until the server has ended them."""
    body = json.dumps({"prompt": [1] * PROMPT, "max_tokens": 480, "n": 64, "stream": True, "ignore_eos": True}).encode()
    client, loop = HttpClient(url, {}), asyncio.get_running_loop()

    async def aborted() -> float:
        reading = Reading.of(0.0, (await client.get("/metrics")).body.decode())
        return reading.value("request_success_total", finished_reason="abort") or 0.0

    connections = []
    before, start = await aborted(), time.perf_counter()
    for _ in range(count):
        connections.append(socket.socket())
        connections[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connections[-1].setblocking(False)
        await loop.sock_connect(connections[-1], ("127.0.0.1", port))
        await loop.sock_sendall(connections[-1], HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
    await asyncio.sleep(0.5)
    while json.loads((await client.get("/load")).body)["server_load"]:
        assert time.perf_counter() - start < 300, "streams that nobody reads are not ended"
        await asyncio.sleep(0.1)
    seconds = time.perf_counter() - start
    found = {
        "connections": count, "limit_s": SECONDS, "all_ended_s": seconds, "completions": 64 * count,
        "aborted": await aborted() - before,
    }  # fmt: skip
    await client.close()
    for connection in connections:
        connection.close()
    return found


def clients(folder: str, count: int) -> list[dict[str, Any]]:
    """All scenarios, one after the other, and good requests at the end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(count, hard - 500)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, count + 500), hard))
    limits = [f"--{name}-timeout={SECONDS}" for name in ("header", "body", "write")]
    with serving(plain(folder, *limits, f"--max-connections={count + 50}")) as server:
        streams(server.url, 16, 32)

        port = server.port
        rows = [
            scenario(server, "many connections", many_connections(port, count)),
            scenario(server, "half-sent heads", half_heads(port, 500)),
            scenario(server, "slow bodies", endless_bodies(port, 100, 0.5)),
            scenario(server, "endless bodies", endless_bodies(port, 4, 0.0)),
            scenario(server, "streams that nobody reads", slow_readers(server.url, port, 4)),
        ]
        found = streams(server.url, 64, 32)
        assert found["failed"] == 0, found["errors"][:3]
        rows.append({"scenario": "64 good streams afterwards", "completed": found["completed"]})
        print(rows[-1], flush=True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return rows


# ---- the command ------------------------------------------------------------------------------------------------


def main() -> None:
    """Run the parts that are named."""
    if sys.argv[1:2] == ["--engine"]:
        return engine_main(int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
    if sys.argv[1:2] == ["--front"]:
        return front_main(sys.argv[2], float(sys.argv[3]), sys.argv[4])
    if sys.argv[1:2] == ["--library"]:
        return library_main(sys.argv[2], float(sys.argv[3]), sys.argv[4])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=[], metavar="PART", help="of tokens, host, clients (default: all)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=40.0, help="of the device of `host` (default: 40)")
    parser.add_argument("--shape", default="tiny", help="of the model of `host`: tiny, qwen3-0.6b, llama-8b")
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    parts = arguments.parts or ["tokens", "host", "clients"]
    if not set(parts) <= {"tokens", "host", "clients"}:
        parser.error("parts are tokens, host, clients")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    figures_of: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="gapless-load-") as folder:
        if set(parts) & {"tokens", "clients"}:
            make_folder(Path(folder))
        if "tokens" in parts:
            figures_of["tokens"] = tokens(folder, arguments.repeats)
        if "clients" in parts:
            figures_of["clients"] = clients(folder, arguments.connections)
        if "host" in parts:  # last: it pins this process
            start = time.monotonic()
            make_folder(Path(folder), arguments.shape, weights=False)
            figures_of["host"] = host(folder, arguments.step_ms / 1e3, arguments.repeats, arguments.shape)
            print(f"{time.monotonic() - start:.0f} s in all")
    if arguments.save:
        text = json.dumps({"environment": environment(), "figures": figures_of}, indent=1)
        arguments.save.write_text(text + "\n", encoding="utf-8")
    return None


if __name__ == "__main__":
    main()
