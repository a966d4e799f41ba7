"""AsyncLLM, from the outside. Rows of faults that public engines had are tests by that name."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from engines import check_idle, gated, options, tokenizer, wait_until
from gapless import (
    LLM,
    AsyncLLM,
    EngineClosedError,
    EngineDeadError,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from gapless.text.outputs import accumulate

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
TEXTS = ["hello", "the quick brown fox", "你好", "stop", "world, the lazy dog", "h"]


def run(test: Callable[[AsyncLLM], Coroutine[Any, Any, Any]], **changes: Any) -> Any:
    """``test`` in a fresh event loop with a fresh engine, which must be idle and whole afterwards."""

    async def whole() -> Any:
        async with AsyncLLM(**options(**changes)) as llm:
            result = await asyncio.wait_for(test(llm), 60)
            await asyncio.to_thread(check_idle, llm)
            return result

    return asyncio.run(whole())


async def last(llm: AsyncLLM, prompt: Any, params: SamplingParams = GREEDY, **kw: Any) -> RequestOutput:
    outputs = [output async for output in llm.generate(prompt, params, **kw)]
    assert outputs[-1].finished
    return outputs[-1]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    with LLM(**options()) as llm:
        outputs = llm.generate(TEXTS, LONG, use_tqdm=False)
    return {text: o.outputs[0].token_ids for text, o in zip(TEXTS, outputs, strict=True)}


def test_many_at_once(expected: dict[str, list[int]]) -> None:
    async def test(llm: AsyncLLM) -> None:
        outputs = await asyncio.gather(*(last(llm, text, LONG) for text in TEXTS))
        assert {o.prompt: o.outputs[0].token_ids for o in outputs} == expected

    run(test)


def test_stream_holds_everything_so_far(expected: dict[str, list[int]]) -> None:
    async def test(llm: AsyncLLM) -> None:
        seen = [o async for o in llm.generate("hello", GREEDY, "label")]
        assert [o.finished for o in seen] == [False] * (len(seen) - 1) + [True]
        assert {o.request_id for o in seen} == {"label"}
        for one, two in itertools.pairwise(seen):
            a, b = one.outputs[0], two.outputs[0]
            assert len(a.token_ids) <= len(b.token_ids)
            assert b.token_ids[: len(a.token_ids)] == a.token_ids
            assert b.text.startswith(a.text)
        assert seen[-1].outputs[0].token_ids == expected["hello"][:12]

    run(test)


def test_text_boundaries() -> None:
    """Pieces add up to the whole: no broken character between them, no text of the prompt in the first."""

    async def test(llm: AsyncLLM) -> None:
        for text in TEXTS:
            whole = await last(llm, text, LONG, mode="final")
            pieces = [o async for o in llm.generate(text, LONG, mode="delta")]
            assert "".join(o.outputs[0].text for o in pieces) == whole.outputs[0].text
            total = pieces[0]
            for piece in pieces[1:]:
                accumulate(total, piece)
            assert total.outputs[0].token_ids == whole.outputs[0].token_ids
            assert whole.outputs[0].text == tokenizer().decode(whole.outputs[0].token_ids, skip_special_tokens=True)

    run(test)


@pytest.mark.parametrize("mode", ["stream", "delta"])
def test_a_slow_consumer_loses_nothing(expected: dict[str, list[int]], mode: Any) -> None:
    async def test(llm: AsyncLLM) -> None:
        got: list[int] = []
        async for output in llm.generate("hello", LONG, mode=mode):
            new = output.outputs[0].token_ids
            got = new if mode == "stream" else got + new
            if not output.finished:
                await asyncio.to_thread(wait_until, lambda: llm._client.pending == 0, "the engine to finish")
        assert got == expected["hello"]

    run(test)


@pytest.mark.parametrize("mode", ["stream", "delta"])
def test_stop_strings_are_never_sent(mode: Any) -> None:
    async def test(llm: AsyncLLM) -> None:
        text = (await last(llm, "hello", LONG)).outputs[0].text
        stop = text[20:24]
        params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, stop=[stop, "never there"])
        pieces = [o.outputs[0] async for o in llm.generate("hello", params, mode=mode)]
        sent = pieces[-1].text if mode == "stream" else "".join(p.text for p in pieces)
        assert sent == text[: text.index(stop)]
        assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == ("stop", stop)
        assert all(text.startswith(p.text) for p in pieces if mode == "stream")

    run(test)


def test_several_samples() -> None:
    async def test(llm: AsyncLLM) -> None:
        params = SamplingParams(n=3, temperature=1, seed=4, max_tokens=10, ignore_eos=True)
        whole = await last(llm, "hello", params)
        assert len({tuple(c.token_ids) for c in whole.outputs}) == 3
        text = {0: "", 1: "", 2: ""}
        async for output in llm.generate("hello", params, mode="delta"):
            for piece in output.outputs:
                text[piece.index] += piece.text
        assert text == {c.index: c.text for c in whole.outputs}

    run(test)


def test_chat() -> None:
    async def test(llm: AsyncLLM) -> None:
        talk = [{"role": "user", "content": "hello"}]
        output = [o async for o in llm.chat(talk, GREEDY)][-1]
        assert output.prompt == "<s>user: hello\nassistant: "
        with pytest.raises(RequestError):
            await anext(llm.chat([], GREEDY))

    run(test)


def test_carry_over_by_client_id(expected: dict[str, list[int]]) -> None:
    """A request id is a label: used again at once, and by two requests together."""

    async def test(llm: AsyncLLM) -> None:
        for text in TEXTS:
            output = await last(llm, text, LONG, request_id="same")
            assert output.outputs[0].token_ids == expected[text]
        outputs = await asyncio.gather(*(last(llm, text, LONG, request_id="same") for text in TEXTS))
        assert [o.outputs[0].token_ids for o in outputs] == [expected[text] for text in TEXTS]

    run(test)


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("at", [1, 3, 4, 9])
def test_abort_in_flight(expected: dict[str, list[int]], depth: int, at: int) -> None:
    """Only that request ends, once; "hello" and three tokens fill a block of 8 when ``at`` is 3 or 4."""

    async def test(llm: AsyncLLM) -> None:
        others = [asyncio.create_task(last(llm, text, LONG)) for text in TEXTS[1:]]
        seen: list[RequestOutput] = []
        async for output in llm.generate("hello", LONG, "victim"):
            seen.append(output)
            if len(seen) == at:
                await llm.abort("victim")
        assert [o.finished for o in seen] == [False] * (len(seen) - 1) + [True]
        end = seen[-1].outputs[0]
        if end.finish_reason != "length":  # the engine may have been quicker than this consumer
            assert end.finish_reason == "abort"
            assert len(seen) <= at + 2  # what lay in the mailbox, and the last word
        assert end.token_ids == expected["hello"][: len(end.token_ids)]
        for text, other in zip(TEXTS[1:], await asyncio.gather(*others), strict=True):
            assert other.outputs[0].token_ids == expected[text]
            assert other.outputs[0].finish_reason == "length"

    run(test, pipeline_depth=depth)


def test_abort_of_an_idle_engine() -> None:
    """Cancel before the first step, then wait on the stream: it ends at once. Unknown labels are ignored."""

    async def test(llm: AsyncLLM) -> None:
        await llm.abort("nobody")
        with gated(llm) as gate:
            gate.open.clear()
            task = asyncio.create_task(last(llm, "hello", LONG, request_id="early"))
            await asyncio.to_thread(wait_until, lambda: llm._client.pending == 1, "the request")
            await llm.abort("early")
            gate.open.set()
            output = await asyncio.wait_for(task, 10)
            assert output.outputs[0].finish_reason == "abort"
            assert len(output.outputs[0].token_ids) <= 2
        await llm.abort("early")
        assert (await last(llm, "hello")).outputs[0].finish_reason == "length"

    run(test)


def test_leaving_the_loop_early_aborts() -> None:
    async def test(llm: AsyncLLM) -> None:
        with gated(llm) as gate:
            async for output in llm.generate("hello", LONG):
                if len(output.outputs[0].token_ids) >= 2:
                    gate.open.clear()
                    break
            await asyncio.sleep(0)
            gate.open.set()
            await asyncio.to_thread(check_idle, llm)
            assert gate.passed < 100

    run(test)


def test_aclose_and_cancel_abort() -> None:
    async def test(llm: AsyncLLM) -> None:
        with gated(llm) as gate:
            outputs = llm.generate("hello", LONG)
            await anext(outputs)
            gate.open.clear()
            await outputs.aclose()
            task = asyncio.create_task(last(llm, "hello", LONG, request_id="second"))
            await asyncio.to_thread(wait_until, lambda: "second" in llm._client._groups, "the second request")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            passed = gate.passed
            gate.open.set()
            await asyncio.to_thread(check_idle, llm)
            assert gate.passed <= passed + 4

    run(test)


@pytest.mark.parametrize("bad", ["", {"prompt_token_ids": []}, {"prompt_token_ids": [-1]}, 5, {"prompt": "h", "n": 1}])
def test_bad_prompts(bad: Any) -> None:
    async def test(llm: AsyncLLM) -> None:
        good = asyncio.create_task(last(llm, "hello"))
        with pytest.raises(RequestError):
            await last(llm, bad)
        with pytest.raises(RequestError, match="128"):
            await last(llm, {"prompt_token_ids": [5] * 120})
        assert (await good).outputs[0].finish_reason == "length"

    run(test)


def test_two_engines_in_one_event_loop(expected: dict[str, list[int]]) -> None:
    async def test(llm: AsyncLLM) -> None:
        async with AsyncLLM(**options(pipeline_depth=4)) as other:
            both = (last(each, text, LONG) for each in (llm, other) for text in TEXTS)
            outputs = await asyncio.gather(*both)
        assert [o.outputs[0].token_ids for o in outputs] == 2 * [expected[text] for text in TEXTS]

    run(test)


def test_one_engine_for_several_event_loops(expected: dict[str, list[int]]) -> None:
    llm = AsyncLLM(**options())
    with ThreadPoolExecutor(3) as pool:
        outputs = list(pool.map(lambda text: asyncio.run(last(llm, text, LONG)), TEXTS))
    assert [o.outputs[0].token_ids for o in outputs] == [expected[text] for text in TEXTS]
    check_idle(llm)
    llm.close()


def test_the_synchronous_one_inside_a_running_event_loop() -> None:
    async def main() -> list[int]:
        with LLM(**options()) as llm:
            return llm.generate("hello", GREEDY, use_tqdm=False)[0].outputs[0].token_ids

    assert len(asyncio.run(main())) == 12


def test_an_event_loop_that_ended_harms_nobody() -> None:
    """Its requests are dropped with it; the engine goes on."""
    llm = AsyncLLM(**options())

    async def leave() -> None:
        task = asyncio.create_task(last(llm, "hello", LONG))
        while llm._client.pending == 0:
            await asyncio.sleep(0)
        del task

    asyncio.run(leave())
    assert len(asyncio.run(last(llm, "world")).outputs[0].token_ids) == 12
    check_idle(llm)
    llm.close()


@pytest.mark.parametrize("depth", [1, 3])
def test_engine_death(depth: int) -> None:
    """An exception inside a step reaches every waiting caller with its cause; later calls are refused."""

    async def main() -> None:
        llm = AsyncLLM(**options(pipeline_depth=depth))
        with gated(llm) as gate:
            gate.open.clear()
            tasks = [asyncio.create_task(last(llm, text, LONG)) for text in TEXTS]
            await asyncio.to_thread(wait_until, lambda: llm._client.pending == len(TEXTS), "all requests")
            gate.error = ZeroDivisionError("a broken kernel")
            gate.open.set()
            results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
        for result in results:
            assert isinstance(result, EngineDeadError)
            assert isinstance(result.__cause__.__cause__, ZeroDivisionError)  # type: ignore[union-attr]
        with pytest.raises(EngineDeadError, match="a broken kernel"):
            await last(llm, "hello")
        await llm.abort("nobody")
        llm.close()

    before = set(threading.enumerate())
    asyncio.run(main())
    wait_until(lambda: set(threading.enumerate()) == before, "the threads to end")


def test_close_with_open_requests() -> None:
    async def main() -> None:
        llm = AsyncLLM(**options())
        with gated(llm) as gate:
            gate.open.clear()
            tasks = [asyncio.create_task(last(llm, text, LONG)) for text in TEXTS]
            await asyncio.to_thread(wait_until, lambda: llm._client.pending == len(TEXTS), "all requests")
            closing = asyncio.create_task(asyncio.to_thread(llm.close))
            gate.open.set()
            results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
            await closing
        assert [type(r) for r in results] == [EngineClosedError] * len(TEXTS)
        llm.close()
        with pytest.raises(EngineClosedError):
            await last(llm, "hello")

    before = set(threading.enumerate())
    asyncio.run(main())
    wait_until(lambda: set(threading.enumerate()) == before, "the threads to end")
