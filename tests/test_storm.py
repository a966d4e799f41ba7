"""Small storms of cancellations, and the races that they brought to light; benchmarks/storm.py is the large one."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from engines import OPTIONS, wait_until
from gapless import AsyncLLM, SamplingParams
from models import tiny
from test_speed_benchmarks import script

LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
COUNT, ROUNDS = 200, 3


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory and open files from /proc")
@pytest.mark.parametrize("kind", ["threads", "tasks"])
def test_nothing_stays_after_a_storm(kind: str) -> None:
    storm = script("storm")
    before = set(threading.enumerate())
    run = storm.storm_of_threads if kind == "threads" else storm.storm_of_tasks
    rounds = run(tiny("llama", num_hidden_layers=2), COUNT, ROUNDS, 1, device="cpu")
    assert not storm.grown(rounds)
    ended = sum(one.counts["cancelled"] + one.counts["abort without tokens"] for one in rounds)
    assert ended > COUNT
    assert sum(one.counts["abort with tokens"] for one in rounds) > 0
    wait_until(lambda: set(threading.enumerate()) == before, "the threads to end")


def test_an_abort_that_meets_the_submission_is_not_lost() -> None:
    """Another thread aborts a label while its request is on the way to the loop."""

    async def whole() -> Any:
        async with AsyncLLM(tiny("llama"), **OPTIONS) as llm:
            client = llm._client
            submit = client._engine.submit

            def met(requests: Any) -> None:
                thread = threading.Thread(target=client.abort, args=("label",))
                thread.start()
                thread.join(0.1)
                submit(requests)
                threads.append(thread)

            client._engine.submit = met  # type: ignore[method-assign]
            outputs = [o async for o in llm.generate({"prompt_token_ids": [5, 6]}, LONG, "label", mode="final")]
            threads[0].join(10)
            return outputs

    threads: list[threading.Thread] = []
    (output,) = asyncio.run(asyncio.wait_for(whole(), 60))
    assert output.outputs[0].finish_reason == "abort"
