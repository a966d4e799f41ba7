"""Random traffic for a long time: nothing may grow, nothing may hang, and no token may be wrong.

    python benchmarks/soak.py                       # 30 minutes, a tiny random model
    python benchmarks/soak.py --seconds 60 --seed 7
    python benchmarks/soak.py --model MODEL --device cuda

Clients send prompts of random lengths and parameters to one engine with a pool that is far too small for all of them,
leave early, abort, cancel, and send requests that must be refused. Among them are canaries: fixed greedy prompts whose
tokens were computed before, by an engine of depth 1 with room for everything. Now and then the clients pause, and when
the engine is idle every block and row must have come back. Then resident memory, threads and open files are read as
well; the last quarter of these samples must not lie above the second. Exit code 0: all held.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import statistics
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from gapless import LLM, AsyncLLM, RequestError, SamplingParams

CANARIES = 8
CANARY_TOKENS = 24
CLIENTS = 24
IDLE_EVERY = 4.0
"""Seconds between two pauses of the clients."""
MOST_GROWTH = 24 * 2**20
"""Bytes of resident memory by which the last quarter may lie above the second: what an allocator keeps."""


def tiny_model() -> Any:
    """A random Llama in fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=199, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, initializer_range=0.25, bos_token_id=0,
        eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


class Soak:
    """The clients of one engine and what they saw."""

    def __init__(self, llm: AsyncLLM, vocab: int, canaries: list[list[int]], truth: list[list[int]], seed: int) -> None:
        self.llm = llm
        self.vocab = vocab
        self.canaries, self.truth = canaries, truth
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self.samples: list[tuple[float, int, int, int]] = []  # seconds, resident bytes, threads, open files
        self.gate = asyncio.Event()
        self.busy = 0
        self.over = False

    async def client(self) -> None:
        while not self.over:
            await self.gate.wait()
            self.busy += 1
            try:
                await self.one()
            except Exception as error:
                self.errors.append(repr(error))
                self.over = True
            finally:
                self.busy -= 1

    async def one(self) -> None:
        rng, kind = self.rng, self.rng.random()
        if kind < 0.2:
            i = rng.randrange(CANARIES)
            params = SamplingParams(temperature=0, max_tokens=CANARY_TOKENS, ignore_eos=True)
            got = await self.collect(self.canaries[i], params, "final")
            self.counts["canaries"] += 1
            if got != self.truth[i]:
                self.errors.append(f"canary {i}: {got} instead of {self.truth[i]}")
        elif kind < 0.25:
            with contextlib.suppress(RequestError):
                await self.collect([self.vocab + 5], SamplingParams(), "final")
                self.errors.append("a token outside of the vocabulary was taken")
            self.counts["refused"] += 1
        else:
            prompt = self.canaries[rng.randrange(CANARIES)][: rng.randint(0, 30)]
            prompt = prompt + [rng.randrange(2, self.vocab) for _ in range(rng.randint(1, 40))]
            params = SamplingParams(
                n=rng.choice([1, 1, 1, 3]),
                temperature=rng.choice([0, 0.7, 1.2]),
                top_k=rng.choice([0, 5]),
                top_p=rng.choice([1.0, 0.9]),
                max_tokens=rng.randint(1, 40),
                seed=rng.randrange(2**32),
            )
            await self.random_end(prompt, params, rng)

    async def random_end(self, prompt: list[int], params: SamplingParams, rng: random.Random) -> None:
        end, mode = rng.random(), rng.choice(["stream", "delta", "final"])
        if end < 0.15:  # cancelled
            task = asyncio.create_task(self.collect(prompt, params, mode))
            await asyncio.sleep(rng.random() * 0.05)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            self.counts["cancelled"] += 1
        elif end < 0.3:  # aborted by its label
            label = f"label {self.counts['labels']}"
            self.counts["labels"] += 1
            task = asyncio.create_task(self.collect(prompt, params, mode, label))
            await asyncio.sleep(rng.random() * 0.05)
            await self.llm.abort(label)
            await task
            self.counts["aborted"] += 1
        elif end < 0.45:  # the consumer leaves
            outputs = self.llm.generate({"prompt_token_ids": prompt}, params, mode="stream")
            async for _ in outputs:
                if rng.random() < 0.3:
                    break
            await outputs.aclose()
            self.counts["left"] += 1
        else:
            await self.collect(prompt, params, mode)
            self.counts["finished"] += 1

    async def collect(
        self, prompt: list[int], params: SamplingParams, mode: Any, label: str | None = None
    ) -> list[int]:
        """Token ids of the first completion in the last output."""
        last, finals = None, 0
        async for output in self.llm.generate({"prompt_token_ids": prompt}, params, label, mode=mode):
            last, finals = output, finals + output.finished
        if finals != 1 or last is None:
            raise RuntimeError(f"{finals} final outputs")
        return list(last.outputs[0].token_ids) if last.outputs else []

    async def drain(self) -> None:
        """Let everything end; then nothing may be left."""
        self.gate.clear()
        end = time.monotonic() + 60
        while self.busy or self.llm._client.pending:
            if time.monotonic() > end:
                raise RuntimeError(f"{self.busy} clients and {self.llm._client.pending} requests do not end")
            await asyncio.sleep(0.02)
        client = self.llm._client
        scheduler = client._scheduler

        def idle() -> bool:
            if scheduler.has_requests:
                return False
            scheduler.check()
            return scheduler.pool.available == scheduler.pool.capacity and scheduler.rows.num_free == len(
                scheduler.rows.requests
            )

        while not await asyncio.to_thread(client._engine.call, idle):
            if time.monotonic() > end:
                raise RuntimeError("blocks or rows are left behind")
            await asyncio.sleep(0.02)
        if client._groups or client._outputs._completions:
            raise RuntimeError("the output side keeps requests that have ended")
        self.counts["idle checks"] += 1

    def sample(self, start: float) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        resident = pages * os.sysconf("SC_PAGE_SIZE")
        self.samples.append(
            (time.monotonic() - start, resident, threading.active_count(), len(os.listdir("/proc/self/fd")))
        )

    async def run(self, seconds: float) -> None:
        clients = [asyncio.create_task(self.client()) for _ in range(CLIENTS)]
        start = now = time.monotonic()
        drained = start
        self.gate.set()
        try:
            while now - start < seconds and not self.over and not self.errors:
                await asyncio.sleep(1.0)
                now = time.monotonic()
                if now - drained > IDLE_EVERY:
                    await asyncio.wait_for(self.drain(), 90)
                    self.sample(start)
                    self.gate.set()
                    drained = time.monotonic()
            await asyncio.wait_for(self.drain(), 90)
            self.sample(start)
        except Exception as error:
            self.errors.append(repr(error))
        self.over = True
        self.gate.set()
        done, late = await asyncio.wait(clients, timeout=60)
        if late:
            self.errors.append(f"{len(late)} of {len(done) + len(late)} clients did not end")

    def growth(self) -> dict[str, float]:
        """Medians of the last quarter of the samples less those of the second."""
        quarter = len(self.samples) // 4
        early, late = self.samples[quarter : 2 * quarter] or self.samples[:1], self.samples[-max(quarter, 1) :]
        names = ("resident", "threads", "files")
        return {
            name: statistics.median(s[i] for s in late) - statistics.median(s[i] for s in early)
            for i, name in enumerate(names, 1)
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", help="folder or name (default: a tiny random Llama)")
    parser.add_argument("--json", help="write the report there")
    arguments = parser.parse_args()

    model: Any = arguments.model or tiny_model()
    rng = random.Random(1)
    shape = {"device": arguments.device, "max_model_len": 128, "block_size": 8, "max_num_batched_tokens": 48}
    with LLM(model, max_num_seqs=8, pipeline_depth=1, num_kv_blocks=8 * 16 + 1, **shape) as calm:
        vocab = calm._client.model.vocab_size
        canaries = [[rng.randrange(2, vocab) for _ in range(rng.randint(10, 40))] for _ in range(CANARIES)]
        params = SamplingParams(temperature=0, max_tokens=CANARY_TOKENS, ignore_eos=True)
        prompts = [{"prompt_token_ids": c} for c in canaries]
        truth = [o.outputs[0].token_ids for o in calm.generate(prompts, params, use_tqdm=False)]

    llm = AsyncLLM(model, max_num_seqs=8, pipeline_depth=arguments.depth, num_kv_blocks=22, **shape)
    soak = Soak(llm, vocab, canaries, truth, arguments.seed)
    start = time.monotonic()
    asyncio.run(soak.run(arguments.seconds))
    seconds = time.monotonic() - start
    engine, scheduler = llm.stats()
    begin = time.monotonic()
    llm.close()
    if time.monotonic() - begin > 10:
        soak.errors.append("close took more than 10 s")
    left = [t.name for t in threading.enumerate() if t.name.startswith("gapless")]
    if left:
        soak.errors.append(f"threads left behind: {left}")
    growth = soak.growth()
    if growth["resident"] > MOST_GROWTH:
        soak.errors.append(f"resident memory grew by {growth['resident'] / 2**20:.1f} MiB")
    for name in ("threads", "files"):
        if growth[name] > 0:
            soak.errors.append(f"{name} grew by {growth[name]:.0f}")
    report = {
        "ok": not soak.errors,
        "errors": soak.errors[:20],
        "seconds": round(seconds, 1),
        "seed": arguments.seed,
        "depth": arguments.depth,
        "model": arguments.model or "tiny random Llama",
        "device": arguments.device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "requests": dict(soak.counts),
        "steps": engine.steps,
        "tokens": scheduler.generated_tokens,
        "preemptions": scheduler.preemptions,
        "overrun_tokens": scheduler.overrun_tokens,
        "prefix_hit_tokens": scheduler.prefix_hit_tokens,
        "growth": growth,
        "samples": len(soak.samples),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if arguments.json:
        Path(arguments.json).write_text(text + "\n", encoding="utf-8")
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
