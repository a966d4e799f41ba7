"""Structured output through the public API: what comes out parses, what is refused is refused at once and alone."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from engines import check_idle, options, tokenizer
from gapless import LLM, AsyncLLM, RequestError, SamplingParams, StructuredOutputsParams
from gapless.grammar import compiler
from gapless.grammar.compiler import GrammarCompiler, grammar_text
from gapless.request.structured import MAX_BYTES
from text_tokenizers import llama_like

SMOLLM = Path.home() / ".cache" / "gapless" / "SmolLM2-135M-Instruct"
SECONDS = 5.0


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**options(max_model_len=256, num_kv_blocks=257, max_num_batched_tokens=256)) as made:
        yield made


def ask(llm: LLM, form: list[dict[str, Any]], **params: Any) -> list[Any]:
    """One completion for each form, all in one batch."""
    given = {"temperature": 1.0, "max_tokens": 150, "seed": 3, **params}
    asked = [SamplingParams(structured_outputs=one, **given) for one in form]
    return [o.outputs[0] for o in llm.generate(["hello world"] * len(asked), asked, use_tqdm=False)]


def bounded(**more: Any) -> dict[str, Any]:
    return {"type": "string", "pattern": "^[a-z]{0,6}$", **more}


SCHEMAS: list[dict[str, Any]] = [
    {"type": "integer", "minimum": -5, "maximum": 1200},
    {"type": "boolean"},
    {"enum": ["red", 'a "quoted" word', 7, None, True]},
    {"const": {"a": [1, 2]}},
    bounded(),
    {"type": "string", "format": "date"},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "null"}, {"type": "boolean"}], "items": False, "minItems": 2},
    {"anyOf": [{"type": "null"}, {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}]},
    {
        "type": "object",
        "properties": {"name": bounded(), "on": {"type": "boolean"}, "kind": {"enum": ["x", "y"]}},
        "required": ["name", "kind"],
        "additionalProperties": False,
    },
    {
        "$defs": {"leaf": {"type": "object", "properties": {"v": {"enum": [1, 2]}}, "required": ["v"],
                           "additionalProperties": False}},
        "type": "object",
        "properties": {"left": {"$ref": "#/$defs/leaf"}, "right": {"$ref": "#/$defs/leaf"}},
        "required": ["left", "right"],
        "additionalProperties": False,
    },
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 0},
]  # fmt: skip
REGEXES = [r"[0-9]{3}-[a-z]+(x|yz)", r"(ab)*", r"https?://[a-z.]{3,8}/", r"(你好|🙂)+!", r"a\nb|\t"]
CHOICES = [["yes", "no"], ['"', "\\", "new\nline", "{}"], ["é🙂", "\u0001", "</s>"]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_outputs_of_a_random_model_parse(llm: LLM, temperature: float) -> None:
    compact = [{"json": s, "disable_any_whitespace": True} for s in SCHEMAS]
    forms = [*compact, *({"regex": r} for r in REGEXES), *({"choice": c} for c in CHOICES)]
    complete = 0
    for form, output in zip(forms, ask(llm, forms, temperature=temperature, ignore_eos=False), strict=True):
        assert output.finish_reason in ("stop", "length"), (form, output)
        if output.finish_reason == "length":  # an endless repetition; a longer one would go on
            assert "regex" in form
            continue
        complete += 1
        if "json" in form:
            jsonschema.validate(json.loads(output.text), form["json"])
        elif "regex" in form:
            assert re.fullmatch(form["regex"], output.text)
        else:
            assert output.text in form["choice"]
    assert complete >= len(forms) - 3
    check_idle(llm)


def test_plain_rows_beside_them_are_unchanged(llm: LLM) -> None:
    plain = SamplingParams(temperature=0.9, seed=5, max_tokens=30, ignore_eos=True)
    alone = llm.generate(["stop the world"], plain, use_tqdm=False)[0].outputs[0].token_ids
    held_before = llm.stats()[0].held_steps
    llm.generate(["stop the world"], plain, use_tqdm=False)
    assert llm.stats()[0].held_steps == held_before
    forms = [SamplingParams(structured_outputs={"json": s}, seed=1, max_tokens=40) for s in SCHEMAS[:5]]
    mixed = llm.generate(["stop the world"] * 6, [*forms[:2], plain, *forms[2:]], use_tqdm=False)
    assert mixed[2].outputs[0].token_ids == alone
    assert llm.stats()[0].held_steps > held_before


def test_n_completions_stop_strings_and_log_probabilities(llm: LLM) -> None:
    params = SamplingParams(
        structured_outputs={"regex": "[a-z]{4}-[0-9]{30}"}, n=4, seed=2, stop="-", logprobs=3, max_tokens=60,
        include_stop_str_in_output=True, presence_penalty=0.3, logit_bias={5: 2.0},
    )  # fmt: skip
    (output,) = llm.generate(["hello"], params, use_tqdm=False)
    texts = [c.text for c in output.outputs]
    assert all(re.fullmatch("[a-z]{4}-", text) for text in texts)
    assert len(set(texts)) > 1
    assert all(len(c.logprobs or ()) == len(c.token_ids) for c in output.outputs)


def test_it_intersects_with_allowed_token_ids_and_bad_words(llm: LLM) -> None:
    ids = tokenizer().encode("abc123</s>", add_special_tokens=False)
    form, end = {"regex": "[a-z]{3}[0-9]{2}"}, tokenizer().eos_token_id
    (output,) = ask(llm, [form], allowed_token_ids=[*ids, end])
    assert re.fullmatch("[abc]{3}[123]{2}", output.text)
    (output,) = ask(llm, [form], bad_words=[[t] for t in tokenizer().encode("123456789", add_special_tokens=False)])
    assert output.text.endswith("00")
    (output,) = ask(llm, [form], allowed_token_ids=tokenizer().encode("ab", add_special_tokens=False))
    assert output.finish_reason == "error"
    (output,) = ask(llm, [form], ignore_eos=True)
    assert output.finish_reason == "stop"
    assert re.fullmatch("[a-z]{3}[0-9]{2}", output.text)


def test_equal_requests_find_their_prefix_and_seeds_decide(llm: LLM) -> None:
    params = SamplingParams(structured_outputs={"regex": "[a-z]{12}"}, seed=8, max_tokens=20)
    prompt = "hello world, the quick brown fox jumps over the lazy dog"
    first = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
    hits = llm.stats()[1].prefix_hit_tokens
    assert llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids == first
    assert llm.stats()[1].prefix_hit_tokens > hits


def test_the_asynchronous_interface_streams_it() -> None:
    async def main() -> None:
        async with AsyncLLM(**options()) as llm:
            params = SamplingParams(structured_outputs={"regex": "[0-9]{5}"}, seed=1, max_tokens=20)
            text = ""
            async for output in llm.generate("hello", params, mode="delta"):
                text += output.outputs[0].text
            assert re.fullmatch("[0-9]{5}", text)
            bad = SamplingParams(structured_outputs={"regex": "(?=a)b"})
            with pytest.raises(RequestError, match="look-around"):
                await anext(aiter(llm.generate("hello", bad)))
            async for _ in llm.generate("hello", params, mode="delta"):
                break  # leaves early

    asyncio.run(main())


# ---- refusals --------------------------------------------------------------------------------------------------------


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


ROUND: dict[str, Any] = {"type": "object"}
ROUND["properties"] = {"again": ROUND}
SHARED: dict[str, Any] = {}
for _ in range(30):
    SHARED = {"anyOf": [SHARED, SHARED]}
WRONG: list[tuple[Any, str]] = [
    ({}, "exactly one of"),
    ({"regex": "a", "choice": ["a"]}, "given: regex, choice"),
    ({"json_object": False}, "given: none"),
    ({"schema": {}}, "has no 'schema'"),
    ({"regexp": "a"}, "Did you mean 'regex'"),
    (3, "structured_outputs=3"),
    ({"json": "{"}, "json is no JSON"),
    ({"json": "[1]"}, "a JSON schema"),
    ({"json": '{"const": NaN}'}, "NaN"),
    ({"json": {"const": {1, 2}}}, "cannot be written as JSON"),
    ({"json": {"description": "x" * MAX_BYTES}}, "at most 262144"),
    ({"json": nested(70)}, "deeper than 64"),
    ({"json": '{"items":' * 100_000}, "bytes|deeper|no JSON"),
    ({"json": ROUND}, "deeper than 64"),
    ({"json": SHARED}, "bytes"),
    ({"json": {"enum": list(range(10_001))}}, "10001 enum values"),
    ({"json": {"pattern": "a" * 20_000}}, "at most 16384"),
    ({"regex": "a" * 20_000}, "at most 16384"),
    ({"regex": ""}, "not empty"),
    ({"regex": "\ud800"}, "surrogate"),
    ({"choice": []}, "0 entries"),
    ({"choice": "yes"}, "a list"),
    ({"choice": ["a", ""]}, r"choice\[1\]"),
    ({"json_object": 1.5}, "json_object"),
    ({"regex": "a", "disable_any_whitespace": True}, "goes with json"),
]


@pytest.mark.parametrize(("value", "message"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_a_wrong_form_is_refused_by_name(value: Any, message: str) -> None:
    start = time.process_time()
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(structured_outputs=value)
    assert "structured_outputs" in str(caught.value)
    assert len(str(caught.value)) < 500
    assert time.process_time() - start < SECONDS


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"regex": "(a{1000}){1000}"}, "regex is not allowed"),
    ({"regex": "x{100}(a{1000}){1000}"}, "regex is not allowed"),
    ({"regex": "(" * 16_000}, "regex is not allowed"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"regex": "(a"}, "unclosed group"),
    ({"json": {"$ref": "#"}}, "no text satisfies it"),
    ({"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}, "no text"),
    ({"json": {"$ref": "#/nowhere"}}, "json is not allowed"),
    ({"json": {"$ref": "https://example.com/schema"}}, "json is not allowed"),
    ({"json": {"type": "array", "uniqueItems": True}}, "Unimplemented"),
    ({"json": {"type": "string", "format": "nonsense"}}, "nonsense"),
    ({"json": {"type": "object", "required": ["a"], "properties": {"a": False}}}, "json is not allowed"),
    ({"json": {"allOf": [{"pattern": f"^(a|b)*{x}(a|b){{{n}}}$", "type": "string"}
                         for n, x in zip(range(9, 21), "ababababababab", strict=False)]}}, "json is not allowed"),
    ({"grammar": 'start: a\na: a "x"'}, "no text satisfies it"),
    ({"grammar": "start: " + "(" * 200_000}, "grammar is not allowed"),
    ({"grammar": "nonsense"}, "grammar is not allowed"),
]  # fmt: skip


def test_a_hostile_grammar_is_refused_in_time_and_harms_nobody(llm: LLM) -> None:
    canary = SamplingParams(structured_outputs={"choice": ["red", "green"]}, seed=1, max_tokens=12)
    want = llm.generate(["hello"], canary, use_tqdm=False)[0].outputs[0].text
    for form, message in HOSTILE:
        start = time.monotonic()
        with pytest.raises(RequestError, match=message) as caught:
            ask(llm, [form])
        assert time.monotonic() - start < SECONDS, form
        assert str(caught.value).startswith("structured_outputs."), caught.value
        assert len(str(caught.value)) < 500
    assert llm.generate(["hello"], canary, use_tqdm=False)[0].outputs[0].text == want
    check_idle(llm)


def test_of_several_prompts_the_bad_one_is_named_and_none_starts(llm: LLM) -> None:
    before = llm.stats()[1].requests_finished
    with pytest.raises(RequestError, match=r"prompt 1: structured_outputs\.regex"):
        ask(llm, [{"regex": "a"}, {"regex": "(a"}])
    assert llm.stats()[1].requests_finished == before


def test_a_worker_that_hangs_or_dies_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    made = GrammarCompiler(tokenizer(), len(tokenizer()), [1])
    try:
        process = made._worker._process
        good = SamplingParams(structured_outputs={"regex": "a+"})
        made.compile(good)
        process.kill()
        with pytest.raises(RequestError, match=r"ended|memory"):
            made.compile(SamplingParams(structured_outputs={"regex": "b+"}))
        made.compile(good)  # remembered
        made.compile(SamplingParams(structured_outputs={"regex": "c+"}))
        assert made._worker._process is not process
        second = made._worker._process
        monkeypatch.setattr(compiler, "CHECK_SECONDS", 0.0)
        with pytest.raises(RequestError, match="takes more than"):
            made.compile(SamplingParams(structured_outputs={"regex": "d+"}))
        assert second.poll() is not None
    finally:
        made.close()
    assert made._worker._process.poll() is not None


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    made = GrammarCompiler(tokenizer(), len(tokenizer()), [1])
    monkeypatch.setattr(compiler, "CACHE_BYTES", 3 * compiler._cost("x" * 60))
    try:
        for i in range(6):
            made.compile(SamplingParams(structured_outputs={"regex": f"[a-z]{{{i + 1}}}"}))
        assert 1 <= len(made._known) <= 3
        assert made._cost == sum(map(compiler._cost, made._known))
    finally:
        made.close()


def test_without_the_package_or_a_tokenizer_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="needs a fast tokenizer, and there is none"):
        GrammarCompiler(None, 100, [1])
    monkeypatch.setattr(compiler, "available", lambda: False)
    with pytest.raises(RequestError, match=r"pip install 'gapless\[structured\]'"):
        GrammarCompiler(tokenizer(), len(tokenizer()), [1])


def test_the_parameter_has_one_form() -> None:
    as_text = SamplingParams(structured_outputs={"json": '{"type": "null"}'})
    assert as_text == SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "null"}))
    assert hash(as_text) == hash(SamplingParams(structured_outputs={"json": {"type": "null"}}))
    plain = SamplingParams.from_dict({"structured_outputs": {"json_object": True}}).structured_outputs
    assert isinstance(plain, StructuredOutputsParams)
    assert plain.kind == "json_object"
    keeps_order = StructuredOutputsParams(json={"properties": {"z": {}, "a": {}}})
    assert keeps_order.json == '{"properties":{"z":{},"a":{}}}'
    assert "red" in grammar_text(StructuredOutputsParams(choice=["red"]))


def test_a_tokenizer_with_byte_fallback() -> None:
    from models import tiny

    own = llama_like()
    changes = {"model": tiny("llama", vocab_size=len(own), num_hidden_layers=1), "tokenizer": own}
    with LLM(**options(max_num_seqs=16, **changes)) as llm:
        forms: list[dict[str, Any]] = [{"json": s, "disable_any_whitespace": True} for s in SCHEMAS]
        forms += [{"regex": "[a-z]{2}( [a-z]{2}){3}"}, {"choice": ["hello world", "stop"]}]
        for form, output in zip(forms, ask(llm, forms, max_tokens=100), strict=True):
            assert output.finish_reason == "stop", output
            if "json" in form:
                jsonschema.validate(json.loads(output.text), form["json"])
            else:
                assert re.fullmatch(form.get("regex", "hello world|stop"), output.text)


@pytest.mark.model
@pytest.mark.skipif(not SMOLLM.exists(), reason="needs the small real model")
def test_the_small_real_models_tokenizer() -> None:
    from transformers import AutoTokenizer

    from models import tiny

    real = AutoTokenizer.from_pretrained(SMOLLM)
    random_model = tiny("llama", vocab_size=len(real) + 7, num_hidden_layers=1)  # ids that no token has
    changes = {"model": random_model, "tokenizer": real, "max_num_seqs": 16, "num_kv_blocks": 257}
    with LLM(**options(**changes)) as llm:
        forms = [{"json": s, "disable_any_whitespace": True} for s in SCHEMAS]
        forms += [
            {"regex": "[0-9]{3}-[a-z]{4}"},
            {"choice": CHOICES[1]},
            {"choice": [f"number {i}" for i in range(10_000)]},
        ]
        for form, output in zip(forms, ask(llm, forms, max_tokens=50), strict=True):
            assert output.finish_reason == "stop", output
            if "json" in form:
                jsonschema.validate(json.loads(output.text), form["json"])
            else:
                assert re.fullmatch(form["regex"], output.text) if "regex" in form else output.text in form["choice"]
