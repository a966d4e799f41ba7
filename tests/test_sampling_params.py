"""What `SamplingParams` takes and refuses, and what its parameters do through `LLM`, `AsyncLLM` and the output side."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engines import check_idle, model, options, tokenizer
from gapless import LLM, AsyncLLM, Logprob, RequestError, RequestOutputKind, SamplingParams
from gapless.batch.row_layout import Record
from gapless.batch.row_params import COMBINATIONS, Feature, covering
from gapless.cli.options import given
from gapless.errors import ConfigError
from gapless.text.stop import StopMatcher
from gapless.text.vocabulary import bad_word_ids
from test_cli import parse
from test_text_outputs import Client, Side, end, letters, message

PROMPT = {"prompt_token_ids": [5, 6, 7, 8]}


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"presence_penalty": 2.1}, ["presence_penalty=2.1", "-2 to 2"]),
        ({"presence_penalty": math.nan}, ["presence_penalty=nan"]),
        ({"frequency_penalty": -3}, ["frequency_penalty=-3", "-2 to 2"]),
        ({"frequency_penalty": True}, ["frequency_penalty=True"]),
        ({"repetition_penalty": 0}, ["repetition_penalty=0", "> 0"]),
        ({"repetition_penalty": -1.5}, ["repetition_penalty=-1.5"]),
        ({"repetition_penalty": "1"}, ["repetition_penalty='1'"]),
        ({"logit_bias": {1: 101}}, ["logit_bias=101", "-100 to 100"]),
        ({"logit_bias": {-1: 0}}, ["logit_bias=-1"]),
        ({"logit_bias": {"a": 0}}, ["logit_bias='a'"]),
        ({"logit_bias": [1]}, ["logit_bias=[1]", "mapping"]),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, ["1025", "1024"]),
        ({"logit_bias": {"3": 1, 3: 2}}, ["twice"]),
        ({"allowed_token_ids": []}, ["allowed_token_ids=[]", "at least one"]),
        ({"allowed_token_ids": [1.5]}, ["allowed_token_ids=1.5"]),
        ({"bad_words": ["a", ""]}, ["bad_words"]),
        ({"bad_words": "abc"}, ["bad_words='abc'"]),
        ({"bad_words": [[]]}, ["bad_words=[]"]),
        ({"bad_words": [3]}, ["bad_words=3"]),
        ({"logprobs": 21}, ["logprobs=21", "0 to 20"]),
        ({"logprobs": -1}, ["logprobs=-1"]),
        ({"prompt_logprobs": 21}, ["prompt_logprobs=21", "0 to 20"]),
        ({"include_stop_str_in_output": 1}, ["include_stop_str_in_output=1"]),
        ({"output_kind": "all"}, ["output_kind='all'", "cumulative, delta, final"]),
    ],
)
def test_bad_values_are_refused(params: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**params)
    assert all(word in str(caught.value) for word in words), caught.value


def test_values_take_their_plain_form() -> None:
    params = SamplingParams(logit_bias={"7": 1, 3: -2.5}, bad_words=["a", [1, 2]], output_kind="delta")
    assert params.logit_bias == {3: -2.5, 7: 1.0}
    assert list(params.logit_bias) == [3, 7]
    assert params.bad_words == ("a", (1, 2))
    assert params.output_kind is RequestOutputKind.DELTA
    assert SamplingParams(logit_bias={}) == SamplingParams()
    assert len({params, SamplingParams()}) == 2


def test_every_set_of_features_is_covered_by_one_that_is_captured() -> None:
    for bits in range(32):
        features = Feature(bits)
        if not features & Feature.FILTER or features & Feature.SAMPLE:
            assert covering(features) & features == features
    assert covering(Feature.GREEDY) is COMBINATIONS[0]
    assert not covering(Feature.SAMPLE | Feature.FILTER | Feature.MIN_TOKENS) & (Feature.PROCESS | Feature.LOGPROBS)
    assert not covering(Feature.LOGPROBS) & Feature.PROCESS


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**options()) as llm:
        yield llm


def run(llm: LLM, **params: Any) -> Any:
    sampling = SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **params})
    return llm.generate([PROMPT], sampling, use_tqdm=False)[0].outputs[0]


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"logit_bias": {10**6: 1}}, ["logit_bias holds 1000000"]),
        ({"allowed_token_ids": [3, 10**6]}, ["allowed_token_ids holds 1000000"]),
        ({"bad_words": [[3, 10**6]]}, ["bad_words holds 1000000"]),
        ({"bad_words": [[i] for i in range(129)]}, ["129", "128"]),
        ({"bad_words": [[1] * 600, [2] * 600]}, ["1200", "1024"]),
    ],
)
def test_what_the_model_does_not_have_is_refused(llm: LLM, params: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        run(llm, **params)
    assert all(word in str(caught.value) for word in words), caught.value
    check_idle(llm)


def test_parameters_change_what_is_generated(llm: LLM) -> None:
    base = run(llm).token_ids
    assert run(llm).token_ids == base
    first = base[0]
    for params in (
        {"presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"repetition_penalty": 2.5},
        {"logit_bias": {first: -100}},
        {"logit_bias": {first: 100}},
        {"allowed_token_ids": [first + 1, first + 2]},
        {"bad_words": [base[:2]]},
    ):
        assert run(llm, **params).token_ids != base, params
    assert first not in run(llm, bad_words=[[first]]).token_ids
    assert run(llm, bad_words=[base[3:5]]).token_ids[:4] == base[:4]
    check_idle(llm)


def test_bad_words_as_text(llm: LLM) -> None:
    plain = run(llm, max_tokens=30)
    single = [t for t in plain.token_ids if tokenizer().encode(tokenizer().decode([t]).strip()) == [t]]
    word = tokenizer().decode(single[:1])
    assert single[0] not in run(llm, max_tokens=30, bad_words=[word]).token_ids
    with pytest.raises(RequestError, match="needs a tokenizer"):
        bad_word_ids(SamplingParams(bad_words=["x"]), None, 100)


def test_logprobs(llm: LLM) -> None:
    plain = run(llm)
    assert plain.logprobs is None
    assert plain.cumulative_logprob is None
    out = run(llm, logprobs=3)
    assert out.token_ids == plain.token_ids
    assert len(out.logprobs) == len(out.token_ids)
    for token, entry in zip(out.token_ids, out.logprobs, strict=True):
        assert next(iter(entry)) == token
        assert isinstance(entry[token], Logprob)
        assert (len(entry), entry[token].rank) == (3, 1)
        assert [e.rank for e in entry.values()] == [1, 2, 3]
        assert [e.logprob for e in entry.values()] == sorted((e.logprob for e in entry.values()), reverse=True)
        assert entry[token].decoded_token == tokenizer().decode([token])
    total = sum(e[t].logprob for t, e in zip(out.token_ids, out.logprobs, strict=True))
    assert out.cumulative_logprob == pytest.approx(total)
    drawn = run(llm, logprobs=0, temperature=3.0, seed=4)
    assert all(list(entry) == [t] for t, entry in zip(drawn.token_ids, drawn.logprobs, strict=True))
    assert any(entry[t].rank > 1 for t, entry in zip(drawn.token_ids, drawn.logprobs, strict=True))


def test_logprobs_mode() -> None:
    with pytest.raises(ConfigError, match="raw_logprobs, processed_logprobs"):
        LLM(**options(logprobs_mode="raw"))
    with LLM(**options(logprobs_mode="processed_logprobs")) as llm:
        (entry,) = run(llm, logprobs=4, max_tokens=1, temperature=1.0, top_k=1, seed=1).logprobs
        values = [e.logprob for e in entry.values()]
        assert values[0] == pytest.approx(0.0, abs=1e-6)
        assert values[1:] == [-math.inf] * 3


def test_n_samples_with_logprobs_and_stop_strings_agree(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=20, logprobs=1, stop=["e", "a"], ignore_eos=True)
    for c in llm.generate([PROMPT], params, use_tqdm=False)[0].outputs:
        assert len(c.logprobs) == len(c.token_ids)
        assert all(t in entry for t, entry in zip(c.token_ids, c.logprobs, strict=True))
        total = sum(entry[t].logprob for t, entry in zip(c.token_ids, c.logprobs, strict=True))
        assert c.cumulative_logprob == pytest.approx(total)
    check_idle(llm)


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_output_kind(kind: RequestOutputKind, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1, output_kind=kind)
    expected = llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0]
    assert len(expected.token_ids) == 12

    async def collect() -> list[Any]:
        async with AsyncLLM(**options()) as engine:
            return [output.outputs[0] async for output in engine.generate(PROMPT, params)]

    outputs = asyncio.run(collect())
    if kind is RequestOutputKind.DELTA:
        assert [t for o in outputs for t in o.token_ids] == expected.token_ids
        assert "".join(o.text for o in outputs) == expected.text
        assert [e for o in outputs for e in o.logprobs] == expected.logprobs
    else:
        assert (outputs[-1].token_ids, outputs[-1].text) == (expected.token_ids, expected.text)
        assert outputs[-1].logprobs == expected.logprobs
        assert all(len(o.logprobs) == len(o.token_ids) for o in outputs)
    assert outputs[-1].cumulative_logprob == pytest.approx(expected.cumulative_logprob)
    if kind is RequestOutputKind.FINAL_ONLY:
        assert len(outputs) == 1


def test_prompt_logprobs_are_those_of_the_model(llm: LLM) -> None:
    """A prompt that is longer than a step's budget and than its sequences, after an equal one has filled the cache."""
    ids = [3 + (7 * i) % 90 for i in range(70)]
    prompt = {"prompt_token_ids": ids}
    plain = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    params = replace(plain, prompt_logprobs=3, n=2)
    before, output, short = llm.generate([prompt, prompt, PROMPT], [plain, params, params], use_tqdm=False)
    assert before.prompt_logprobs is None
    assert [c.token_ids for c in output.outputs] == [before.outputs[0].token_ids] * 2
    assert short.prompt_logprobs is not None
    assert len(short.prompt_logprobs) == 4
    found = output.prompt_logprobs
    assert found is not None
    assert (len(found), found[0]) == (70, None)
    with torch.no_grad():
        expected = model()(torch.tensor([ids])).logits[0].log_softmax(-1)
    for i, entry in enumerate(found[1:], 1):
        assert entry is not None
        top = expected[i - 1].topk(3)
        assert next(iter(entry)) == ids[i]
        assert {t for t, e in entry.items() if e.rank is not None and e.rank <= 3} == set(top.indices.tolist())
        for token, logprob in entry.items():
            assert logprob.logprob == pytest.approx(float(expected[i - 1, token]), abs=1e-3)
    check_idle(llm)


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_prompt_logprobs_are_told_when_complete(kind: RequestOutputKind) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, prompt_logprobs=0, output_kind=kind)

    async def collect() -> list[Any]:
        async with AsyncLLM(**options()) as engine:
            return [output.prompt_logprobs async for output in engine.generate(PROMPT, params)]

    found = asyncio.run(collect())
    assert [len(f) for f in found if f is not None] == [4] * (1 if kind is RequestOutputKind.DELTA else len(found))


@pytest.mark.parametrize("mode", ["delta", "stream", "final"])
def test_include_stop_string(mode: str) -> None:
    client = Client(mode=mode, stop=["cd"], include_stop_str_in_output=True)
    side = Side(client)
    for token in letters("abcde"):
        side.processor.process(message([(1, token)]))
    assert client.result == ("abcd", letters("abcd"), "stop", "cd")


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("mode", ["delta", "stream", "final"])
def test_include_the_text_of_a_stop_token(mode: str, include: bool) -> None:
    ids = letters("abx")
    client = Client(mode=mode, stop_token_ids=[ids[-1]], include_stop_str_in_output=include)
    side = Side(client)
    streamed = ids if client.group.needs_tokens else []
    for token in streamed[:-1]:
        side.processor.process(message([(1, token)]))
    side.processor.process(message([(1, ids[-1])] if streamed else [], [end(1, ids, "stop", stop_token=ids[-1])]))
    assert client.result == ("abx" if include else "ab", ids, "stop", ids[-1])


def test_the_matcher_keeps_what_it_is_told_to() -> None:
    matcher = StopMatcher(["bc"], include=True)
    assert [matcher.push(c, i) for i, c in enumerate("abcd", 1)] == ["a", "", "bc", ""]
    assert matcher.matched == "bc"


def record(token: int, logprob: float) -> Any:
    words = np.zeros(Record.COUNT, np.int32)
    words.view(np.float32)[Record.LOGPROB] = logprob
    words[Record.RANK], words[Record.IDS] = 2, token + 1
    return words


@pytest.mark.parametrize("mode", ["delta", "stream", "final"])
def test_logprobs_are_as_many_as_ids(mode: str) -> None:
    """Tokens in flight behind a stop string leave no log-probability."""
    client = Client(mode=mode, stop=["c"], logprobs=1)
    side = Side(client)
    for i, token in enumerate(letters("abcd")):
        records = np.stack([record(token, -float(i + 1))])
        side.processor.process(replace(message([(1, token)]), records=records))
    (c,) = client.total.outputs
    assert c.token_ids == letters("abc")
    assert [e[t].logprob for t, e in zip(c.token_ids, c.logprobs or [], strict=True)] == [-1.0, -2.0, -3.0]
    assert [list(e)[1] for e in c.logprobs or []] == [t + 1 for t in c.token_ids]
    assert c.cumulative_logprob == -6.0


def test_command_line_forms() -> None:
    arguments = parse(
        *("--logit-bias", "3:1.5,7:-100", "--allowed-token-ids", "1,2", "--bad-words", "a", "--bad-words", "b c"),
        *("--logprobs", "2", "--presence-penalty", "0.5", "--include-stop-str-in-output", "hi"),
    )
    assert SamplingParams.from_dict(given(arguments, SamplingParams)) == SamplingParams(
        logit_bias={3: 1.5, 7: -100.0},
        allowed_token_ids=(1, 2),
        bad_words=("a", "b c"),
        logprobs=2,
        presence_penalty=0.5,
        include_stop_str_in_output=True,
    )
    with pytest.raises(Exception, match="output-kind"):
        parse("--output-kind", "delta", "hi")
