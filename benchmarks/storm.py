"""A storm of cancellations: every request is ended by its user, at a random moment, and nothing of it may stay.

    python benchmarks/storm.py                            # 4 rounds of 10,000 requests through each interface
    python benchmarks/storm.py --requests 500 --rounds 3 --seed 7
    python benchmarks/storm.py --model MODEL --device cuda

Through `LLM`'s half, several threads submit and others cancel: a request that has not started, one in the middle of
its answer, one that is over. Through `AsyncLLM`, tasks are cancelled before and after their first step, labels are
aborted, consumers leave their loop. After each round every counter must be zero, every block and row back, no thread
or task left, and a fresh request must get the tokens that it got before the storm. Over the rounds neither bytes of
tensors nor threads nor open files may become more, and resident memory must stay within a bound. Exit code 0: all held.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import platform
import queue
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gapless import LLM, AsyncLLM, RequestOutput, SamplingParams
from gapless.engine.client import EngineClient, Submission

SUBMITTERS, CANCELLERS = 4, 3
AT_ONCE = {"threads": 32, "tasks": 300}
"""Requests that are open at once. With 32 about half of them run; with 300 nearly all wait."""
MOST_GROWTH = 24 * 2**20
"""Bytes of resident memory by which the last round may lie above the first: what an allocator keeps."""
SHAPE: dict[str, Any] = {
    "max_model_len": 128, "block_size": 8, "max_num_seqs": 16, "max_num_batched_tokens": 64, "num_kv_blocks": 48,
    "pipeline_depth": 3, "check_model": False,
}  # fmt: skip
CANARY = [7, 11, 13, 17, 19, 23, 29, 31, 37]
CANARY_PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@dataclass
class Round:
    """What one storm did, and what was there after it."""

    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    resident: int = 0
    tensor_bytes: int = 0
    threads: int = 0
    files: int = 0


def random_prompt(rng: random.Random, vocab: int) -> dict[str, Any]:
    length = rng.choice([1, 8, 16, rng.randint(1, 60)])
    return {"prompt_token_ids": [rng.randrange(2, vocab) for _ in range(length)]}


def random_params(rng: random.Random) -> SamplingParams:
    """Long enough that hardly any ends by itself before it is cancelled, but for some that are short."""
    return SamplingParams(
        n=rng.choice([1, 1, 1, 2]),
        temperature=rng.choice([0, 0.8]),
        max_tokens=rng.choice([1, 3, 60]),
        logprobs=rng.choice([None, None, 1]),
        ignore_eos=True,
    )


def how_it_ended(output: RequestOutput) -> str:
    """The finish reason of all completions, and whether an abort found tokens."""
    reasons = {str(completion.finish_reason) for completion in output.outputs}
    if "abort" not in reasons:
        return "/".join(sorted(reasons))
    return "abort with tokens" if any(completion.token_ids for completion in output.outputs) else "abort without tokens"


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"still waiting: {what}")
        time.sleep(0.005)


def must_be_empty(client: EngineClient) -> None:
    """Raise unless nothing of any request is left."""
    wait_for(lambda: client.pending == 0, "last outputs")
    scheduler = client._scheduler

    def left() -> dict[str, int]:
        scheduler.check()
        stats = scheduler.snapshot()
        return {
            "running": stats.running,
            "waiting": stats.waiting,
            "blocks": stats.blocks_used,
            "rows": len(scheduler.rows.requests) - scheduler.rows.num_free,
            "ids": len(scheduler.states.row_of),
            "labels": len(client._groups),
            "completions": len(client._outputs._completions),
        }

    wait_for(lambda: not any(client._engine.call(left).values()), f"what is left: {client._engine.call(left)}")


def look(found: Round) -> None:
    gc.collect()
    found.resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    # By storage: pairs of views that a slot keeps for each length that it was asked for become more for a while.
    tensors = (o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter))
    storages = {s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in tensors)}
    found.tensor_bytes = sum(storages.values())
    found.threads = threading.active_count()
    found.files = len(os.listdir("/proc/self/fd"))


# ---- threads --------------------------------------------------------------------------------------------------------


class ThreadStorm:
    """Threads that submit, threads that cancel."""

    def __init__(self, llm: LLM, count: int, seed: int) -> None:
        self.client = llm._client
        self.count, self.seed = count, seed
        self.vocab = self.client.service.vocab_size
        self.due: queue.PriorityQueue[tuple[float, int, Callable[[], None] | None]] = queue.PriorityQueue()
        self.places = threading.Semaphore(AT_ONCE["threads"])
        self.lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.errors: list[BaseException] = []

    def end(self, how: str) -> None:
        with self.lock:
            self.counts[how] += 1
        self.places.release()

    def submit(self, worker: int) -> None:
        rng = random.Random(f"{self.seed}:{worker}")
        try:
            for i in range(worker, self.count, SUBMITTERS):
                self.places.acquire()
                self.one(rng, i)
        except BaseException as error:
            self.errors.append(error)

    def one(self, rng: random.Random, number: int) -> None:
        label = f"{self.seed}-{number}" if rng.random() < 0.3 else None

        def output(output: Any) -> None:
            if output.finished:
                self.end(how_it_ended(output))

        def failed(error: BaseException) -> None:
            self.errors.append(error)
            self.end("failed")

        submission = Submission(
            self.client.encode(random_prompt(rng, self.vocab)),
            random_params(rng),
            output,
            failed,
            rng.choice(["final", "stream", "delta"]),
            label,
            rng.choice([0, 0, 1]),
        )
        moment = time.monotonic() + rng.choice([0.0, 0.0, rng.random() * 0.05, rng.random() * 0.5])
        if label is not None and rng.random() < 0.3:  # a cancel that meets the submission itself
            self.due.put((0.0, number, lambda: self.client.abort(label)))
        (group,) = self.client.submit([submission])
        if label is None:
            self.due.put((moment, number, lambda: self.client.abort_group(group)))
        else:
            self.due.put((moment, number, lambda: self.client.abort(label)))

    def cancel(self) -> None:
        while True:
            moment, _, cancel = self.due.get()
            if cancel is None:
                return
            time.sleep(max(0.0, min(moment - time.monotonic(), 0.5)))
            try:
                cancel()
            except BaseException as error:
                self.errors.append(error)

    def run(self) -> Round:
        found, start = Round(), time.monotonic()
        cancellers = [threading.Thread(target=self.cancel) for _ in range(CANCELLERS)]
        submitters = [threading.Thread(target=self.submit, args=(i,)) for i in range(SUBMITTERS)]
        for thread in (*cancellers, *submitters):
            thread.start()
        for thread in submitters:
            thread.join()
        for i in range(CANCELLERS):
            self.due.put((float("inf"), i - CANCELLERS, None))
        for thread in cancellers:
            thread.join()
        must_be_empty(self.client)
        found.seconds, found.counts = time.monotonic() - start, self.counts
        if self.errors:
            raise RuntimeError(f"{len(self.errors)} errors, the first: {self.errors[0]!r}") from self.errors[0]
        if self.counts.total() != self.count:
            raise RuntimeError(f"{self.counts.total()} ends of {self.count} requests")
        return found


# ---- tasks ----------------------------------------------------------------------------------------------------------


class TaskStorm:
    """Tasks of one event loop that are cancelled, aborted by label, or leave."""

    def __init__(self, llm: AsyncLLM, count: int, seed: int) -> None:
        self.llm, self.count, self.seed = llm, count, seed
        self.vocab = llm._client.service.vocab_size
        self.counts: Counter[str] = Counter()

    async def consume(self, prompt: Any, params: SamplingParams, label: str, mode: Any, leave: int | None) -> None:
        last: RequestOutput | None = None
        pieces = 0
        async with contextlib.aclosing(self.llm.generate(prompt, params, label, mode=mode)) as outputs:
            async for output in outputs:
                last, pieces = output, pieces + 1
                if leave is not None and pieces > leave:
                    self.counts["left"] += 1
                    return
        if last is None or not last.finished:
            raise RuntimeError("a stream ended without its last output")
        self.counts[how_it_ended(last)] += 1

    async def one(self, number: int, places: asyncio.Semaphore) -> None:
        rng = random.Random(f"{self.seed}:{number}")
        label = f"{self.seed}-{number}"
        prompt, params = random_prompt(rng, self.vocab), random_params(rng)
        mode = rng.choice(["final", "stream", "delta"])
        end = rng.choice(["at once", "cancel", "cancel", "abort", "abort at once", "leave"])
        async with places:
            leave = rng.randint(0, 5) if end == "leave" else None
            task = asyncio.create_task(self.consume(prompt, params, label, mode, leave))
            if end == "abort at once":
                await asyncio.sleep(0)
                await self.llm.abort(label)
            elif end in ("cancel", "abort"):
                await asyncio.sleep(rng.choice([0, rng.random() * 0.05, rng.random() * 0.5]))
                if end == "abort":
                    await self.llm.abort(label)
                else:
                    task.cancel()
            elif end == "at once":  # before its first step, or in it
                if rng.random() < 0.5:
                    await asyncio.sleep(0)
                task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                self.counts["cancelled"] += 1

    async def run(self) -> Round:
        found, start = Round(), time.monotonic()
        places = asyncio.Semaphore(AT_ONCE["tasks"])
        await asyncio.gather(*(self.one(i, places) for i in range(self.count)))
        await asyncio.to_thread(must_be_empty, self.llm._client)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            raise RuntimeError(f"{len(others)} tasks are left, such as {others.pop()}")
        found.seconds, found.counts = time.monotonic() - start, self.counts
        if self.counts.total() != self.count:
            raise RuntimeError(f"{self.counts.total()} ends of {self.count} requests")
        return found


# ---- rounds ---------------------------------------------------------------------------------------------------------


def storm_of_threads(model: Any, count: int, rounds: int, seed: int, **options: Any) -> list[Round]:
    """Raises on the first thing that is left or wrong."""
    found = []
    with LLM(model, **{**SHAPE, **options}) as llm:

        def canary() -> list[int]:
            (output,) = llm.generate({"prompt_token_ids": CANARY}, CANARY_PARAMS, use_tqdm=False)
            return output.outputs[0].token_ids

        truth = canary()
        for i in range(rounds):
            one = ThreadStorm(llm, count, seed + i).run()
            look(one)
            found.append(one)
            if canary() != truth:
                raise RuntimeError("a request after the storm has other tokens than before")
    return found


def storm_of_tasks(model: Any, count: int, rounds: int, seed: int, **options: Any) -> list[Round]:
    """Raises on the first thing that is left or wrong."""

    async def canary(llm: AsyncLLM) -> list[int]:
        outputs = [o async for o in llm.generate({"prompt_token_ids": CANARY}, CANARY_PARAMS, mode="final")]
        return list(outputs[-1].outputs[0].token_ids)

    async def whole() -> list[Round]:
        found = []
        async with AsyncLLM(model, **{**SHAPE, **options}) as llm:
            truth = await canary(llm)
            for i in range(rounds):
                one = await TaskStorm(llm, count, seed + i).run()
                look(one)
                found.append(one)
                if await canary(llm) != truth:
                    raise RuntimeError("a request after the storm has other tokens than before")
        return found

    return asyncio.run(whole())


def grown(rounds: list[Round]) -> list[str]:
    """What became more from the first round to the last."""
    first, last = rounds[0], rounds[-1]
    said = [
        f"{name}: {getattr(first, name)} after the first round, {getattr(last, name)} after the last"
        for name in ("tensor_bytes", "threads", "files")
        if getattr(last, name) > getattr(first, name)
    ]
    if last.resident - first.resident > MOST_GROWTH:
        said.append(f"resident memory grew by {(last.resident - first.resident) / 2**20:.1f} MiB")
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="in a round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", help="folder or name (default: a tiny random Llama)")
    parser.add_argument("--json", help="write the report there")
    arguments = parser.parse_args()
    from soak import tiny_model

    model: Any = arguments.model or tiny_model()
    errors: list[str] = []
    report: dict[str, Any] = {}
    before = set(threading.enumerate())
    for name, storm in (("threads", storm_of_threads), ("tasks", storm_of_tasks)):
        try:
            rounds = storm(model, arguments.requests, arguments.rounds, arguments.seed, device=arguments.device)
        except Exception as error:
            errors.append(f"{name}: {error!r}")
            continue
        errors += [f"{name}: {what}" for what in grown(rounds)]
        report[name] = [
            {
                "seconds": round(one.seconds, 1),
                "ends": dict(one.counts),
                "resident_mib": round(one.resident / 2**20, 1),
                "tensor_bytes": one.tensor_bytes,
                "threads": one.threads,
                "files": one.files,
            }
            for one in rounds
        ]
    with contextlib.suppress(RuntimeError):
        wait_for(lambda: set(threading.enumerate()) <= before, "threads", 5)
    left = [t.name for t in set(threading.enumerate()) - before]
    if left:
        errors.append(f"threads left behind: {left}")
    report = {
        "ok": not errors,
        "errors": errors,
        "requests": arguments.requests,
        "seed": arguments.seed,
        "model": arguments.model or "tiny random Llama",
        "device": arguments.device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **report,
    }
    text = json.dumps(report, indent=2)
    print(text)
    if arguments.json:
        Path(arguments.json).write_text(text + "\n", encoding="utf-8")
    return 0 if not errors else 1


if __name__ == "__main__":
    sys.exit(main())
