"""Inputs and endings that once harmed more than themselves."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from engines import OPTIONS
from gapless import LLM, AsyncLLM, ConfigError, RequestError, SamplingParams
from models import tiny

PROMPT = {"prompt_token_ids": [5, 6, 7]}
GREEDY = {"temperature": 0, "max_tokens": 4}


@pytest.fixture(scope="module")
def llm():
    with LLM(tiny("llama"), **OPTIONS) as made:
        yield made


@pytest.fixture(scope="module")
def truth(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, SamplingParams(**GREEDY), use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 2**31},
        {"top_k": 2**70, "temperature": 1.0, "seed": np.int64(5)},
        {"seed": np.int16(3)},
        {"seed": np.uint64(2**64 - 1)},
        {"max_tokens": np.int8(4)},
        {"max_tokens": np.uint8(4), "min_tokens": np.int8(1)},
        {"temperature": np.float32(0)},
    ],
    ids=str,
)
def test_any_kind_of_number_is_honoured(llm: LLM, truth: list[int], params: dict[str, Any]) -> None:
    (output,) = llm.generate(PROMPT, SamplingParams(**{**GREEDY, **params}), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4
    if params.get("temperature") != 1.0:
        assert output.outputs[0].token_ids == truth


@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": None, "min_tokens": 2**31},
        {"max_tokens": None, "min_tokens": 1000},
        {"max_tokens": np.int64(2**63 - 1)},
        {"max_tokens": 2**80},
        {"temperature": 10**400},
        {"logit_bias": {3: 10**400}},
        {"n": 10**9},
    ],
    ids=str,
)
def test_a_number_that_cannot_be_served_is_refused_alone(llm: LLM, truth: list[int], params: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        llm.generate(PROMPT, SamplingParams(**{**GREEDY, **params}), use_tqdm=False)
    assert llm.generate(PROMPT, SamplingParams(**GREEDY), use_tqdm=False)[0].outputs[0].token_ids == truth


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate(None),
        lambda llm: llm.generate(5),
        lambda llm: llm.chat(None),
        lambda llm: llm.chat({"role": "user", "content": "x"}),
        lambda llm: llm.generate({"prompt_token_ids": np.array([5, 6], dtype=object)}),
        lambda llm: llm.generate({"prompt_token_ids": torch.zeros(3, dtype=torch.int64, device="meta")}),
        lambda llm: SamplingParams.from_dict({5: 1}),
        lambda llm: SamplingParams.from_dict(None),
        lambda llm: LLM(5),
        lambda llm: LLM(torch.nn.Linear(2, 2)),
        lambda llm: LLM(tiny("llama"), tokenizer="no/such/folder/here", **OPTIONS),
    ],
)
def test_a_wrong_kind_of_input_is_a_value_error(llm: LLM, call: Any) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        call(llm)


def test_a_read_only_mapping_is_one_prompt(llm: LLM, truth: list[int]) -> None:
    (output,) = llm.generate(MappingProxyType(PROMPT), SamplingParams(**GREEDY), use_tqdm=False)
    assert output.outputs[0].token_ids == truth


def test_parameters_and_labels_of_a_wrong_kind_leave_nothing_open() -> None:
    async def ask(llm: AsyncLLM, *arguments: Any) -> None:
        async for _ in llm.generate(PROMPT, *arguments):
            pass

    async def run() -> None:
        async with AsyncLLM(tiny("llama"), **OPTIONS) as llm:
            for arguments in ([{"max_tokens": 2}], [{}], [None, ["x"]], [None, 5]):
                with pytest.raises(RequestError):
                    await ask(llm, *arguments)
            assert llm._client.pending == 0

    asyncio.run(run())


def test_a_label_ends_only_the_request_that_was_given_it() -> None:
    async def run() -> None:
        async with AsyncLLM(tiny("llama"), **OPTIONS) as llm:
            params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
            async for _ in llm.generate(PROMPT, params):
                break
            automatic = [i async for i in llm.generate(PROMPT, SamplingParams(max_tokens=1))][-1].request_id
            assert not automatic.isdigit()

            async def last(label: str | None) -> Any:
                return [o async for o in llm.generate(PROMPT, params, label, mode="final")][-1]

            number = str(next(llm._client._maker._ids) + 1)
            tasks = [asyncio.create_task(last(None)), asyncio.create_task(last(number))]
            await asyncio.sleep(0.02)
            await llm.abort(number)
            unlabelled, labelled = await asyncio.gather(*tasks)
            assert unlabelled.outputs[0].finish_reason == "length"
            assert labelled.outputs[0].finish_reason in ("abort", "length")

    asyncio.run(run())


def test_a_failed_start_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    for option in ({"num_kv_blocks": 2**40}, {"max_num_batched_tokens": 2**40}):
        with pytest.raises(ConfigError, match=next(iter(option))):
            LLM(tiny("llama"), **{**OPTIONS, **option})
    assert set(threading.enumerate()) == before


def test_rows_that_run_during_a_reset_are_not_found_afterwards() -> None:
    """What they computed is of the old weights."""
    model = tiny("llama")
    prompt = list(range(5, 30))
    with LLM(model, **OPTIONS) as llm:
        scheduler = llm._client._scheduler
        collected: list[Any] = []

        def work() -> None:
            params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
            collected.extend(llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False))

        thread = threading.Thread(target=work)
        thread.start()
        while not scheduler.stats.generated_tokens:
            pass
        llm.reset_prefix_cache()
        thread.join()
        assert len(collected[0].outputs[0].token_ids) == 60
        assert scheduler.pool.num_published == 0
        before = scheduler.stats.prefix_hit_tokens
        llm.generate({"prompt_token_ids": prompt}, SamplingParams(**GREEDY), use_tqdm=False)
        assert scheduler.stats.prefix_hit_tokens == before
        llm.generate({"prompt_token_ids": prompt}, SamplingParams(**GREEDY), use_tqdm=False)
        assert scheduler.stats.prefix_hit_tokens > before


def test_a_program_that_forgets_close_ends_with_its_own_exit_code() -> None:
    code = (
        "import sys, threading, time; sys.path.insert(0, 'tests')\n"
        "from models import tiny; from engines import OPTIONS; from gapless import LLM, SamplingParams\n"
        "llm = LLM(tiny('llama'), **OPTIONS)\n"
        "ask = lambda: llm.generate([{'prompt_token_ids': [5]}] * 8, SamplingParams(max_tokens=60), use_tqdm=False)\n"
        "threading.Thread(target=ask, daemon=True).start()\n"
        "time.sleep(0.05)\n"
        "sys.exit(7)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 7, done.stderr[-2000:]
    assert "terminate" not in done.stderr
