"""Drafts through the public API: texts, ids and log-probabilities are those of an engine without drafts."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

import gapless
from engines import check_idle, model, options, tokenizer
from gapless import ConfigError, RequestError, SamplingParams, SpeculativeConfig
from models import tiny

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "min_ngram": 1, "min_accepted": 0}
PROMPTS = ["abc abc abc abc", "x = 1\ny = 2\nx = 1\ny =", "the end", "0 1 0 1 0 1"]
CASES: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 40},
    {"temperature": 0, "max_tokens": 1},
    {"temperature": 0, "max_tokens": 2, "logprobs": 3},
    {"temperature": 0, "max_tokens": 30, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 0.3, "seed": 5, "max_tokens": 30, "n": 3, "logprobs": 1},
    {"temperature": 1.0, "seed": 6, "top_k": 4, "top_p": 0.9, "max_tokens": 30},
    {"temperature": 0, "max_tokens": 30, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "presence_penalty": 0.1},
    {"temperature": 0, "max_tokens": 30, "min_tokens": 9, "stop_token_ids": list(range(40, 70))},
    {"temperature": 0, "max_tokens": 30, "bad_words": ["e", [65, 66]], "logit_bias": {70: 2.0}},
]


def run(llm: gapless.LLM, cases: list[dict[str, Any]], prompts: list[str] = PROMPTS) -> list[Any]:
    """Everything that a user sees, of all prompts and cases in one batch."""
    params = [SamplingParams(**case) for case in cases for _ in prompts]
    results = llm.generate(prompts * len(cases), params, use_tqdm=False)
    return [
        (c.text, c.token_ids, c.finish_reason, c.stop_reason, rounded(c.logprobs), rounded(r.prompt_logprobs))
        for r in results
        for c in r.outputs
    ]


def rounded(logprobs: Any) -> Any:
    return logprobs and [
        d and {i: (round(p.logprob, 3), p.rank, p.decoded_token) for i, p in d.items()} for d in logprobs
    ]


def truth(cases: list[dict[str, Any]], prompts: list[str] = PROMPTS) -> list[Any]:
    with gapless.LLM(**options(pipeline_depth=1)) as llm:
        return run(llm, cases, prompts)


@pytest.mark.parametrize("depth", [1, 3])
def test_ngram_drafts_change_nothing_that_a_user_sees(depth: int) -> None:
    with gapless.LLM(**options(pipeline_depth=depth, speculative=NGRAM)) as llm:
        made = run(llm, CASES)
        check_idle(llm)
        _, stats = llm.stats()
    assert made == truth(CASES)
    assert stats.drafts is not None
    assert stats.drafts.accepted[0] > 0


def test_a_stop_string_inside_an_accepted_run_ends_text_ids_and_log_probabilities() -> None:
    plain = truth([{"temperature": 0, "max_tokens": 40}])
    stops = [sorted({text[i : i + 2] for i in range(4, len(text) - 1, 5)})[:3] or ["zz"] for text, *_ in plain]
    cases = [{"temperature": 0, "max_tokens": 40, "stop": stop, "logprobs": 1} for stop in stops]
    same_model = {"method": "draft_model", "model": model(), "num_speculative_tokens": 5}
    with gapless.LLM(**options(pipeline_depth=2, speculative=same_model)) as llm:
        assert run(llm, cases) == truth(cases)
        check_idle(llm)


def test_a_stream_gets_every_token_of_a_run_once() -> None:
    """Several tokens come in one step: pieces add up, log-probabilities with them, and a stop string is never sent."""
    same_model = {"method": "draft_model", "model": model(), "num_speculative_tokens": 4}
    case = {"temperature": 0, "max_tokens": 40, "logprobs": 1, "ignore_eos": True}
    ((text, ids, *_),) = truth([case], ["hello"])
    stop = text[len(text) // 2 :][:3]
    ((cut, cut_ids, *_),) = truth([{**case, "stop": stop}], ["hello"])

    async def pieces(llm: gapless.AsyncLLM, **more: Any) -> list[Any]:
        return [o.outputs[0] async for o in llm.generate("hello", SamplingParams(**case, **more), mode="delta")]

    async def whole() -> None:
        llm = gapless.AsyncLLM(**options(pipeline_depth=2, speculative=same_model))
        try:
            got = await pieces(llm)
            assert "".join(p.text for p in got) == text
            assert [i for p in got for i in p.token_ids] == ids
            assert [next(iter(d)) for p in got for d in p.logprobs or ()] == ids
            assert max(len(p.token_ids) for p in got) > 1
            got = await pieces(llm, stop=stop)
            assert ("".join(p.text for p in got), [i for p in got for i in p.token_ids]) == (cut, cut_ids)
        finally:
            llm.close()

    asyncio.run(whole())


@pytest.mark.parametrize(("depth", "perfect"), [(1, False), (3, True), (4, False)])
def test_a_draft_model_changes_nothing_and_its_equal_is_mostly_right(depth: int, perfect: bool) -> None:
    cases = [CASES[0], *CASES[4:7]]
    other = tiny("qwen3", 3, vocab_size=len(tokenizer()), num_hidden_layers=1)
    draft = model() if perfect else other
    config = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3, "min_accepted": 0}
    prompts = ["abc", "a longer prompt, of two chunks " * 3]
    with gapless.LLM(**options(pipeline_depth=depth, speculative=config)) as llm:
        assert run(llm, cases, prompts) == truth(cases, prompts)
        _, stats = llm.stats()
        check_idle(llm)
    assert stats.drafts is not None
    proposed, accepted = sum(stats.drafts.proposed), sum(stats.drafts.accepted)
    assert 0 < accepted <= proposed
    if perfect:  # penalties, of which drafts know nothing, cost a few
        assert accepted > 0.6 * proposed


def test_a_perfect_draft_model_in_a_fresh_engine_is_never_wrong() -> None:
    """Prompts in chunks, all drafts accepted: the draft model's cache has no hole."""
    config = {"method": "draft_model", "model": model(), "num_speculative_tokens": 4}
    with gapless.LLM(**options(pipeline_depth=3, speculative=config, max_num_batched_tokens=20)) as llm:
        for _ in range(2):  # the second time the prefix cache hits
            run(llm, [{"temperature": 0, "max_tokens": 31, "ignore_eos": True}], ["a prompt of many tokens. " * 2, "b"])
        _, stats = llm.stats()
    assert stats.drafts is not None
    assert stats.drafts.accepted == stats.drafts.proposed
    assert stats.prefix_hit_tokens > 0


@pytest.mark.parametrize(("kind", "depth"), [("mistral", 3), ("gemma2", 2)])
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_windows_keep_what_rejected_drafts_still_see(kind: str, depth: int, method: str) -> None:
    """Blocks leave the window by the lower bound; pools are so small that rows are preempted with drafts in flight."""
    vocab = len(tokenizer())
    target = tiny(kind, vocab_size=vocab, num_hidden_layers=2)
    config = {**NGRAM, "method": method, "num_speculative_tokens": 4}
    if method == "draft_model":
        config["model"] = tiny("mistral", 5, vocab_size=vocab, num_hidden_layers=1)
    case = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
    with gapless.LLM(**options(model=target, pipeline_depth=1)) as llm:
        expected = run(llm, [case])
    small = options(model=target, pipeline_depth=depth, speculative=config, num_kv_blocks=24)
    with gapless.LLM(**small) as llm:
        assert run(llm, [case]) == expected
        check_idle(llm)


def test_sleep_gives_a_draft_model_s_cache_back() -> None:
    case = {"temperature": 0, "max_tokens": 20}
    config = {"method": "draft_model", "model": model(), "num_speculative_tokens": 3}
    with gapless.LLM(**options(speculative=config)) as llm:
        first = run(llm, [case])
        llm.sleep()
        llm.wake()
        assert run(llm, [case]) == first


def test_max_tokens_of_none_is_what_fits() -> None:
    with gapless.LLM(**options(speculative=NGRAM, max_model_len=40)) as llm:
        output = llm.generate("abc", SamplingParams(max_tokens=None, temperature=0, ignore_eos=True), use_tqdm=False)
    assert len(output[0].prompt_token_ids) + len(output[0].outputs[0].token_ids) == 40


def test_prefix_hits_bring_their_tokens_to_the_lookup() -> None:
    prompt = "one two three four. " * 4
    with gapless.LLM(**options(speculative=NGRAM)) as llm:
        first = run(llm, [CASES[0]], [prompt])
        before = llm.stats()[1].prefix_hit_tokens
        assert run(llm, [CASES[0]], [prompt]) == first
        assert llm.stats()[1].prefix_hit_tokens > before


def test_requests_may_opt_out_beside_others() -> None:
    case = {"temperature": 0, "max_tokens": 20}
    with gapless.LLM(**options(speculative=NGRAM)) as llm:
        assert run(llm, [case, {**case, "speculative": False}]) == truth([case, case])
        before = llm.stats()[1].drafts
        assert before is not None
        steps = before.steps
        run(llm, [{**case, "speculative": False}])
        assert before.steps == steps


@pytest.mark.parametrize("depth", [1, 3])
def test_rows_with_a_grammar_stand_beside_rows_with_drafts(depth: int) -> None:
    pytest.importorskip("llguidance")
    cases = [
        {"temperature": 0, "max_tokens": 25},
        {"temperature": 0, "max_tokens": 25, "structured_outputs": {"regex": "(ab|cd)+[0-9]{3}"}},
    ]
    with gapless.LLM(**options(pipeline_depth=depth, speculative=NGRAM)) as llm:
        assert run(llm, cases) == truth(cases)
        check_idle(llm)
        _, stats = llm.stats()
    assert stats.drafts is not None
    assert stats.drafts.steps > 0


# ---- options ---------------------------------------------------------------------------------------------------------


def test_every_form_of_the_option_is_the_same() -> None:
    wanted = SpeculativeConfig(num_speculative_tokens=3, min_accepted=0.5)
    for given in (
        wanted,
        {"method": "ngram", "num_speculative_tokens": 3, "min_accepted": 0.5},
        "ngram,num_speculative_tokens=3,min_accepted=0.5",
        json.dumps({"num_speculative_tokens": 3, "min_accepted": 0.5}),
    ):
        assert gapless.EngineConfig(speculative=given).speculative == wanted  # type: ignore[arg-type]
    assert gapless.EngineConfig().num_drafts == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("medusa", ["speculative.method='medusa'", "ngram, draft_model"]),
        ({"num_speculative_tokens": 9}, ["num_speculative_tokens=9", "from 1 to 8"]),
        ({"num_speculative_token": 3}, ["num_speculative_token.", "num_speculative_tokens"]),
        ({"min_ngram": 5}, ["min_ngram=5", "from 1 to 4"]),
        ({"min_accepted": 5}, ["min_accepted=5", "from 0 to num_speculative_tokens, 4"]),
        ({"method": "draft_model"}, ["speculative.model=None", "a folder"]),
        ({"model": "x"}, ["speculative.model='x'", "method=draft_model"]),
        ("ngram,3", ["'3' is not of the form name=value"]),
        ("{1", ["not a JSON object"]),
        (3, ["speculative=3", "SpeculativeConfig"]),
        (True, ["speculative=True", "a mapping of its fields", "'ngram'"]),
        (False, ["speculative=False", "None"]),
    ],
)
def test_a_bad_option_names_itself_and_the_way_out(given: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        gapless.EngineConfig(speculative=given)
    for word in words:
        assert word in str(caught.value)


def test_a_draft_model_of_another_vocabulary_is_refused() -> None:
    config = {"method": "draft_model", "model": tiny("llama", vocab_size=50)}
    with pytest.raises(ConfigError, match="vocabulary of 50 tokens"):
        gapless.LLM(**options(speculative=config))


def test_a_bad_opt_out_is_refused() -> None:
    with pytest.raises(RequestError, match="speculative=1"):
        SamplingParams(speculative=1)  # type: ignore[arg-type]


def test_a_request_for_drafts_is_refused_where_there_are_none() -> None:
    wanted = SamplingParams(max_tokens=2, speculative=True)
    told = r"speculative=True is not allowed.*no drafts.*SpeculativeConfig"
    with gapless.LLM(**options()) as llm, pytest.raises(RequestError, match=told):
        llm.generate({"prompt_token_ids": [3]}, wanted, use_tqdm=False)
    with gapless.LLM(**options(speculative=NGRAM)) as llm:
        llm.generate({"prompt_token_ids": [3]}, wanted, use_tqdm=False)


def test_no_token_is_promised_that_has_no_place() -> None:
    """Longest requests: drafts lie beyond their end, in the table and in the cache."""
    case = {"temperature": 0, "max_tokens": 118, "ignore_eos": True}
    prompts = ["abcabcabca"]
    with gapless.LLM(**options(speculative={**NGRAM, "num_speculative_tokens": 8}, num_kv_blocks=18)) as llm:
        made = run(llm, [case], prompts)
        with pytest.raises(RequestError, match="max_model_len is 128"):
            llm.generate(prompts, SamplingParams(max_tokens=119), use_tqdm=False)
    assert made == truth([case], prompts)
    assert len(made[0][1]) == 118
