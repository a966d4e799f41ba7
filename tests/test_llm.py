"""LLM, from the outside. Rows of faults that public engines had are tests by that name."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from engines import EOS, check_idle, gated, model, options, tokenizer, wait_until
from gapless import (
    LLM,
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    RequestError,
    SamplingParams,
)
from gapless.llm import _Collector

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TEXTS = ["hello", "the quick brown fox", "你好", "stop", "world, the lazy dog jumps over", "h"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**options()) as llm:
        yield llm
        check_idle(llm)


def ids(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def run(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[list[int]]:
    return [ids(o) for o in llm.generate(prompts, params, use_tqdm=False)]


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=20 - 3 * i, ignore_eos=True) for i in range(len(TEXTS))
    ]
    outputs = llm.generate(TEXTS, params, use_tqdm=False)
    assert [o.prompt for o in outputs] == TEXTS
    assert [len(ids(o)) for o in outputs] == [20 - 3 * i for i in range(len(TEXTS))]
    for text, param, output in zip(TEXTS, params, outputs, strict=True):
        assert output.finished
        assert output.prompt_token_ids == tokenizer()(text)["input_ids"]
        assert output.outputs[0].finish_reason == "length"
        assert output.outputs[0].text == tokenizer().decode(ids(output), skip_special_tokens=True)
        assert run(llm, text, param) == [ids(output)]


def test_equals_transformers(llm: LLM) -> None:
    for text, got in zip(TEXTS, run(llm, TEXTS), strict=True):
        prompt = torch.tensor([tokenizer()(text)["input_ids"]])
        want = model().generate(prompt, do_sample=False, max_new_tokens=12, min_new_tokens=12)
        assert len(got) == 12
        if EOS not in got:  # transformers masks the end while min_new_tokens holds, ignore_eos does not
            assert got == want[0, prompt.shape[1] :].tolist()


def test_a_prompt_is_text_or_ids(llm: LLM) -> None:
    encoded = tokenizer()("hello")["input_ids"]
    outputs = llm.generate(
        ["hello", {"prompt": "hello"}, {"prompt_token_ids": encoded}], GREEDY, use_tqdm=False
    )
    assert len({tuple(ids(o)) for o in outputs}) == 1
    assert [o.prompt for o in outputs] == ["hello", "hello", None]
    assert run(llm, {"prompt_token_ids": torch.tensor(encoded)}) == [ids(outputs[0])]


def test_chat(llm: LLM) -> None:
    talk = [{"role": "user", "content": "hello"}]
    (one,) = llm.chat(talk, GREEDY, use_tqdm=False)
    many = llm.chat([talk, [*talk, {"role": "assistant", "content": "world"}, *talk]], GREEDY, use_tqdm=False)
    assert one.prompt == "<s>user: hello\nassistant: "
    assert one.prompt_token_ids[0] == 0
    assert ids(many[0]) == ids(one)
    assert many[1].prompt != one.prompt
    (plain,) = llm.chat(talk, GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert plain.prompt == "<s>user: hello\n"
    with pytest.raises(RequestError, match="prompt 1: messages is empty"):
        llm.chat([talk, []], GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match=r"max_tokens=9 would go to the chat template: give SamplingParams"):
        llm.chat(talk, max_tokens=9, use_tqdm=False)


def test_no_prompts(llm: LLM) -> None:
    assert llm.generate([], use_tqdm=False) == []
    assert llm.generate([], []) == []


def test_defaults(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    (output,) = llm.generate(["hello"])
    assert 1 <= len(ids(output)) <= 16
    assert "1/1" in capsys.readouterr().err
    metrics = output.metrics
    assert metrics is not None
    assert metrics.first_token_time is not None
    assert metrics.finished_time is not None
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time


def test_first_batch() -> None:
    """Idle for a while; then n > 1 at once."""
    with LLM(**options()) as llm:
        threading.Event().wait(0.2)
        params = SamplingParams(n=3, temperature=1.0, max_tokens=8, ignore_eos=True, seed=3)
        (output,) = llm.generate("hello", params, use_tqdm=False)
        assert [c.index for c in output.outputs] == [0, 1, 2]
        assert len({tuple(c.token_ids) for c in output.outputs}) == 3
        check_idle(llm)


def test_empty_or_one_token_prompt(llm: LLM) -> None:
    with pytest.raises(RequestError, match="prompt 1: prompt_token_ids is empty"):
        llm.generate(["hello", {"prompt_token_ids": []}], GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="no tokens"):
        llm.generate("", GREEDY, use_tqdm=False)
    (output,) = llm.generate({"prompt_token_ids": [5]}, SamplingParams(n=2, max_tokens=4), use_tqdm=False)
    assert len(output.outputs) == 2


@pytest.mark.parametrize(
    ("length", "max_tokens", "numbers"), [(129, 1, ["129", "128"]), (100, 29, ["100", "29", "128"])]
)
def test_too_large_for_max_model_len(llm: LLM, length: int, max_tokens: int, numbers: list[str]) -> None:
    big = {"prompt_token_ids": [5] * length}
    with pytest.raises(RequestError) as caught:
        llm.generate(["hello", big], SamplingParams(max_tokens=max_tokens), use_tqdm=False)
    assert all(number in str(caught.value) for number in numbers), str(caught.value)
    assert str(caught.value).startswith("prompt 1: ")
    assert len(run(llm, "hello")[0]) == 12


def test_too_large_for_the_cache() -> None:
    with LLM(**options(num_kv_blocks=5)) as llm:  # 4 blocks of 8 tokens
        assert len(run(llm, {"prompt_token_ids": [5] * 20})[0]) == 12
        with pytest.raises(RequestError, match="34 tokens need 5 blocks of 8; the KV cache has 4"):
            run(llm, {"prompt_token_ids": [5] * 22})
        fill = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        assert len(run(llm, {"prompt_token_ids": [5] * 20}, fill)[0]) == 12
        check_idle(llm)


@pytest.mark.parametrize("bad", [-1, 10**6, 2**40, 1.0, True, "a", None])
def test_bad_token_ids(llm: LLM, bad: Any) -> None:
    with pytest.raises(RequestError, match=r"prompt_token_ids\[1\]"):
        llm.generate({"prompt_token_ids": [5, bad]}, GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    "bad",
    [
        5,
        None,
        ["hello"],
        [1, 2],
        {"prompt": 3},
        {"promt": "x"},
        {},
        b"hello",
        {"prompt": "a", "x": 1},
        "\ud800",
    ],
)
def test_bad_prompts(llm: LLM, bad: Any) -> None:
    """One bad prompt: nothing of the call is started."""
    before = llm.stats()[0].steps
    with pytest.raises(RequestError):
        llm.generate(["hello", bad], GREEDY, use_tqdm=False)
    assert llm._client.pending == 0
    assert llm.stats()[0].steps == before


def test_parameters_one_or_one_each(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 prompts but 1"):
        llm.generate(["a", "b"], [GREEDY], use_tqdm=False)
    with pytest.raises(RequestError, match="sampling_params"):
        llm.generate(["a"], {"temperature": 0}, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="sampling_params"):
        llm.generate(["a"], ["greedy"], use_tqdm=False)  # type: ignore[list-item]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_is_told_that_it_has_no_engine(llm: LLM) -> None:
    child = os.fork()
    if not child:  # nothing of pytest may go on here
        try:
            llm.generate(["a"], GREEDY, use_tqdm=False)
        except EngineClosedError as error:
            os._exit(0 if "Make the engine after the fork" in str(error) else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_bad_options() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'max_num_seqs'"):
        LLM(**options(max_num_seq=3))
    with pytest.raises(ConfigError, match="pipeline_depth=0"):
        LLM(**options(pipeline_depth=0))
    with pytest.raises(ConfigError, match="pipeline_depth=65 is not allowed: at most 64"):
        LLM(**options(pipeline_depth=65))
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes=1000000 and num_kv_blocks=20"):
        LLM(**options(num_kv_blocks=20, kv_cache_memory_bytes=1_000_000))
    with pytest.raises(ConfigError, match="10000"):
        LLM(**options(max_model_len=10000))


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_max_tokens_edge(depth: int, count: int) -> None:
    """Exactly that many tokens, and no step beyond."""
    with LLM(**options(pipeline_depth=depth)) as llm:
        (tokens,) = run(llm, "hello", SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
        assert len(tokens) == count
        assert llm.stats()[0].steps == count


def test_max_tokens_none_fills_the_context(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    assert len(run(llm, {"prompt_token_ids": [5] * 20}, params)[0]) == 128 - 20


def test_min_tokens(llm: LLM) -> None:
    """All ends are masked until then."""
    (free,) = run(llm, "hello", GREEDY)
    ends = tuple(dict.fromkeys(free[:4]))
    params = SamplingParams(temperature=0, max_tokens=12, min_tokens=6, stop_token_ids=ends)
    (tokens,) = run(llm, "hello", params)
    assert len(tokens) >= 6
    assert not {*ends, EOS} & set(tokens[:6])


def test_stop_strings(llm: LLM) -> None:
    (free,) = llm.generate("hello", GREEDY, use_tqdm=False)
    text = free.outputs[0].text
    stop = text[4:6]
    (output,) = llm.generate(
        "hello", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=stop)
    )
    got = output.outputs[0]
    assert (got.finish_reason, got.stop_reason) == ("stop", stop)
    assert got.text == text[: text.index(stop)]
    assert got.token_ids == ids(free)[: len(got.token_ids)]
    assert len(got.token_ids) < 12
    check_idle(llm)


def test_stop_token_ids_and_end_of_sequence(llm: LLM) -> None:
    (free,) = run(llm, "hello")
    (output,) = llm.generate(
        "hello",
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[free[3]]),
        use_tqdm=False,
    )
    assert ids(output) == free[: free.index(free[3]) + 1]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", free[3])
    with pytest.raises(RequestError, match="stop_token_ids"):
        llm.generate("hello", SamplingParams(stop_token_ids=[10**6]), use_tqdm=False)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("listed", [False, True])
def test_a_stop_token_as_the_last_allowed_one(llm: LLM, listed: bool, include: bool) -> None:
    """It ends the request both ways; the token counts, and not the length."""
    (free,) = run(llm, "hello")
    count = next(n for n in range(4, 12) if free[n - 1] not in free[: n - 1])
    params = SamplingParams(
        temperature=0, max_tokens=count, ignore_eos=True, stop_token_ids=[free[count - 1]] if listed else [],
        include_stop_str_in_output=include,
    )  # fmt: skip
    (output,) = llm.generate("hello", params, use_tqdm=False)
    (got,) = output.outputs
    assert got.token_ids == free[:count]
    shown = free[:count] if include or not listed else free[: count - 1]
    assert got.text == tokenizer().decode(shown, skip_special_tokens=True)
    assert (got.finish_reason, got.stop_reason) == (("stop", free[count - 1]) if listed else ("length", None))


def test_sampling_extremes_hold_per_row(llm: LLM) -> None:
    base = {"max_tokens": 12, "ignore_eos": True}
    greedy = run(llm, "hello")[0]
    same = [
        SamplingParams(temperature=0, **base),
        SamplingParams(temperature=1, top_k=1, seed=5, **base),
        SamplingParams(temperature=1, top_p=1e-6, seed=5, **base),
        SamplingParams(temperature=1, min_p=1.0, seed=5, **base),
    ]
    free = [
        SamplingParams(temperature=1, seed=5, **base),
        SamplingParams(temperature=1, top_k=10**6, top_p=1, min_p=0, seed=5, **base),
        SamplingParams(temperature=1.0, top_k=-1, seed=5, **base),
    ]
    got = run(llm, ["hello"] * 7, [*same, *free])
    assert got[:4] == [greedy] * 4
    assert got[4] == got[5] == got[6] != greedy


@pytest.mark.parametrize("name", ["repetition_penalti", "logit_biass", "use_beam_search"])
def test_ignored_parameters(name: str) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams.from_dict({name: 1})
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: 1})


@pytest.mark.parametrize(
    "bad", [{"stop": 5}, {"stop": [5]}, {"stop_token_ids": 5}, {"stop_token_ids": ["5"]}]
)
def test_parameters_of_a_wrong_type(bad: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(bad))):
        SamplingParams.from_dict(bad)


def test_seeds_alone_and_in_a_busy_batch(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=16, ignore_eos=True)
    (alone,) = run(llm, "the quick", params)
    others = [SamplingParams(temperature=0.8, seed=i, max_tokens=5 + i, ignore_eos=True) for i in range(9)]
    busy = run(llm, ["hello"] * 5 + ["the quick"] + ["fox " * 9] * 4, [*others[:5], params, *others[5:]])
    assert busy[5] == alone
    assert run(llm, "the quick", SamplingParams(temperature=1.0, seed=12, max_tokens=16)) != [alone]


def test_the_engine_seed_decides_for_requests_without_one() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)

    def texts(seed: int) -> list[list[int]]:
        with LLM(**options(seed=seed)) as llm:
            return run(llm, ["hello", "hello"], params)

    first = texts(1)
    assert first[0] != first[1]
    assert texts(1) == first
    assert texts(2) != first


def test_exact_block_multiples(llm: LLM) -> None:
    prompt = {"prompt_token_ids": list(range(5, 21))}  # two blocks of 8
    first = run(llm, prompt)
    assert run(llm, prompt) == first


def test_duplicate_prompts_in_one_batch(llm: LLM) -> None:
    prompt = {"prompt_token_ids": list(range(30, 60))}
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 12, 12)]
    short, one, two = run(llm, [prompt] * 3, params)
    assert one == two
    assert one[:2] == short
    assert run(llm, prompt) == [one]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_preemption_in_flight(llm: LLM, depth: int) -> None:
    """32 requests on 16 blocks of 8 tokens."""
    prompts = [{"prompt_token_ids": [5 + i, *range(9, 9 + i % 11)]} for i in range(32)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(**options(num_kv_blocks=17, pipeline_depth=depth, enable_prefix_caching=False)) as small:
        got = small.generate(prompts, params, use_tqdm=False)
        assert sum(o.metrics.num_preemptions for o in got if o.metrics) > 0
        check_idle(small)
    assert [ids(o) for o in got] == run(llm, prompts, params)


def test_several_callers_at_once(llm: LLM) -> None:
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda text: run(llm, text)[0], TEXTS))
    assert got == run(llm, TEXTS)


def test_two_engines_in_two_threads() -> None:
    def work(depth: int) -> list[list[int]]:
        with LLM(**options(pipeline_depth=depth)) as llm:
            return run(llm, TEXTS)

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(work, (1, 3))
    assert one == two


def test_interrupted_call_aborts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: Any) -> None:
        raise KeyboardInterrupt

    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    with gated(llm) as gate:
        gate.open.clear()
        with monkeypatch.context() as patch:
            patch.setattr(_Collector, "wait", interrupt)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(["hello", "world"], params, use_tqdm=False)
        gate.open.set()
        check_idle(llm)
        assert gate.passed < 100
    assert len(run(llm, "hello")[0]) == 12


def test_close_returns_threads() -> None:
    before = set(threading.enumerate())
    llm = LLM(**options())
    assert len(run(llm, "hello")[0]) == 12
    assert set(threading.enumerate()) > before
    llm.close()
    assert set(threading.enumerate()) == before
    llm.close()
    for call in (
        lambda: run(llm, "hello"),
        llm.reset_prefix_cache,
        lambda: llm.chat([{"role": "user", "content": "a"}]),
    ):
        with pytest.raises(EngineClosedError):
            call()


def test_close_with_open_requests() -> None:
    llm = LLM(**options())
    with gated(llm) as gate, ThreadPoolExecutor(2) as pool:
        gate.open.clear()
        calls = [pool.submit(run, llm, text) for text in ("hello", "world")]
        wait_until(lambda: llm._client.pending == 2, "both requests")
        closing = threading.Thread(target=llm.close)
        closing.start()
        gate.open.set()
        for call in calls:
            with pytest.raises(EngineClosedError):
                call.result(timeout=30)
        closing.join(30)
        assert not closing.is_alive()


@pytest.mark.parametrize("depth", [1, 3])
def test_engine_death(depth: int) -> None:
    """An exception inside a step reaches every caller with its cause; then it refuses; close works."""
    before = set(threading.enumerate())
    llm = LLM(**options(pipeline_depth=depth))
    with gated(llm) as gate, ThreadPoolExecutor(3) as pool:
        gate.open.clear()
        calls = [pool.submit(run, llm, text) for text in ("hello", "world", "fox")]
        wait_until(lambda: llm._client.pending == 3, "three requests")
        gate.error = ZeroDivisionError("a broken kernel")
        gate.open.set()
        for call in calls:
            with pytest.raises(EngineDeadError, match="a broken kernel") as caught:
                call.result(timeout=30)
            assert "a broken kernel" in causes(caught.value)
    with pytest.raises(EngineDeadError, match="a broken kernel") as refused:
        run(llm, "hello")
    assert "ZeroDivisionError" in causes(refused.value)
    with pytest.raises(EngineDeadError):
        llm.reset_prefix_cache()
    llm.close()
    llm.close()
    wait_until(lambda: set(threading.enumerate()) == before, "the threads to end")


def causes(error: BaseException | None) -> str:
    texts = []
    while error is not None:
        texts.append(repr(error))
        error = error.__cause__
    return " <- ".join(texts[1:])


def test_reset_prefix_cache_after_a_weight_change() -> None:
    import copy

    own = copy.deepcopy(model())
    prompt = {"prompt_token_ids": list(range(5, 45))}
    with LLM(**options(model=own)) as llm:
        before = run(llm, prompt)
        with torch.no_grad():
            own.model.layers[0].mlp.down_proj.weight.mul_(-3)
        llm.reset_prefix_cache()
        after = run(llm, prompt)
    assert after != before
    with LLM(**options(model=own)) as fresh:
        assert run(fresh, prompt) == after
