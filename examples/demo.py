"""Many chat prompts at once through the asynchronous loop.

    python examples/demo.py [--model MODEL] [--prompts FILE] [--max-tokens N] [--depth N]

The small model is fetched on the first call. Everything here is public API: take it as a start.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

from gapless import AsyncLLM, RequestOutput, SamplingParams

TERMINAL = sys.stdout.isatty()


async def answer(
    llm: AsyncLLM, index: int, prompt: str, params: SamplingParams, tokens: dict[int, int]
) -> str:
    """One conversation; ``tokens`` tells the others how far it is."""
    tokens[index] = 0
    text = ""
    output: RequestOutput
    async for output in llm.chat([{"role": "user", "content": prompt}], params, mode="delta"):
        for piece in output.outputs:
            text += piece.text
            tokens[index] += len(piece.token_ids)
            if piece.finish_reason == "length":
                text += f" [... cut at --max-tokens {params.max_tokens}]"
    say(f"[{index + 1}] done, {tokens[index]} tokens\n")
    return text


async def tokens_per_second_alone(llm: AsyncLLM, prompts: list[str], max_tokens: int) -> float:
    """The same work one by one, on a few prompts, whose beginnings are not taken from the cache."""
    count, start = 0, time.perf_counter()
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=min(max_tokens, 40))
        message = [{"role": "user", "content": prompt}]
        async for output in llm.chat(message, params, mode="delta", cache_salt=f"alone {i}"):
            count += sum(len(piece.token_ids) for piece in output.outputs)
    return count / (time.perf_counter() - start)


async def show_progress(tokens: dict[int, int], tasks: list[asyncio.Task[str]]) -> None:
    """A line while the answers grow: which prompts are running, how many tokens there are."""
    while True:
        await asyncio.sleep(0.2 if TERMINAL else 1.0)
        running = [str(i + 1) for i, task in enumerate(tasks) if not task.done()]
        say(f"{sum(tokens.values()):5d} tokens, running: {' '.join(running)}" + ("" if TERMINAL else "\n"))


def say(line: str) -> None:
    """Print over the line of progress, which a terminal keeps in place."""
    print(f"\r\033[K{line}" if TERMINAL else line, end="", flush=True)


async def main() -> None:
    """Load, answer all, report."""
    parser = argparse.ArgumentParser(description="Answer the prompts of a file, all at once.")
    parser.add_argument(
        "--model", help="a folder, a name or a .gguf file (default: a small one, fetched once)"
    )
    parser.add_argument(
        "--prompts", type=Path, default=Path(__file__).parent / "prompts.txt", help="one a line"
    )
    parser.add_argument("--max-tokens", type=int, default=400, help="longest answer; most end before")
    parser.add_argument("--depth", type=int, default=2, help="steps in flight; 1 is synchronous")
    options = parser.parse_args()

    prompts = [line for line in options.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens)
    if options.model is None:
        from gapless.model.load.smollm2 import get_smollm2

        options.model = get_smollm2()

    begin = time.perf_counter()
    print(f"loading {options.model} ...", flush=True)
    async with AsyncLLM(
        options.model, pipeline_depth=options.depth, max_num_seqs=16, max_model_len=1024
    ) as llm:
        ready = time.perf_counter()
        print(f"ready after {ready - begin:.1f} s: {len(prompts)} prompts, pipeline depth {options.depth}")
        tokens: dict[int, int] = {}
        tasks = [asyncio.create_task(answer(llm, i, p, params, tokens)) for i, p in enumerate(prompts)]
        progress = asyncio.create_task(show_progress(tokens, tasks))
        texts = await asyncio.gather(*tasks)
        seconds = time.perf_counter() - ready
        progress.cancel()
        say("")
        engine, _ = llm.stats()
        steps, busy, work = engine.steps, engine.busy, engine.host_work
        hidden, idle = engine.host_hidden, engine.idle_host
        alone = await tokens_per_second_alone(llm, prompts[:2], options.max_tokens)

    for prompt, text in zip(prompts, texts, strict=True):
        print(f"\n=== {prompt}\n{text.strip()}")
    per_step = 1000 / steps
    total = sum(tokens.values())
    print(f"\n{len(prompts)} answers, {total} tokens in {seconds:.2f} s: {total / seconds:.1f} tokens/s")
    print(
        f"{steps} steps; ms per step: device {busy * per_step:.2f}, host {work * per_step:.2f}, of which "
        f"{hidden * per_step:.2f} were hidden behind the device; the device waited {idle * per_step:.2f} for the host"
    )
    print(
        f"all at once {total / seconds:.1f} tokens/s, one by one {alone:.1f}: "
        f"batching made it {total / seconds / alone:.1f} times as fast"
    )


if __name__ == "__main__":
    asyncio.run(main())
