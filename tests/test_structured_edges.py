"""Forms at the edges of what tokens and doubles can say: each is followed exactly, or refused with the true reason."""

from __future__ import annotations

import json
import random
from typing import Any

import llguidance
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from gapless.errors import RequestError
from gapless.grammar.compiler import GrammarCompiler
from gapless.grammar.forms import drops_a_space
from gapless.grammar.tokenizer_spec import by_id
from gapless.request.sampling_params import SamplingParams
from gapless.request.structured import StructuredOutputsParams

END = 1


def byte_level() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<s>", "</s>", "<tool_call>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["one two three true false \n\n"] * 9, trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def metaspace() -> PreTrainedTokenizerFast:
    pieces = ["<s>", "</s>", "<unk>", "\u2581", "\u2581yes", "\u2581no", *"yesno", "\u2581\u2581"]
    pieces = list(dict.fromkeys(pieces))
    backend = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>", "<unk>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def plain() -> Any:
    tokenizer = byte_level()
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [END])
    yield tokenizer, compiler
    compiler.close()


def params(**form: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(**form))


def walk(made: Any, seed: int, most: int = 200, **form: Any) -> tuple[str, bool]:
    """A random output that the masks allow, and whether an end was drawn."""
    tokenizer, compiler = made
    rng = random.Random(seed)
    (grammar,) = compiler.grammars(params(**form), (END,), 1)
    words, out = -(-len(tokenizer) // 32), list[int]()
    while len(out) < most:
        mask = np.frombuffer(grammar.matcher.compute_bitmask(), np.int32)[:words].copy()
        end = grammar.restrict(mask)
        if end is not None:
            return tokenizer.decode(out, skip_special_tokens=True), True
        ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        token = rng.choice(ids)
        if token == END:
            return tokenizer.decode(out, skip_special_tokens=True), True
        out.append(token)
        assert grammar.follow(np.array(out, np.int32)) is None
    return tokenizer.decode(out, skip_special_tokens=True), False


TEXTS = [
    "<b>x</b>", "<s>x</s>", "x<s>y", "</s>", "<tool_call>{}</tool_call>", "<think>no</think>", "a\x7fb", "\u2028",
    "\x85\x9f",
    "\\\"/\n\t",
]  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_text_that_spells_a_special_token_comes_whole(plain: Any, seed: int) -> None:
    for text in TEXTS:
        assert walk(plain, seed, choice=[text]) == (text, True)
        got, ended = walk(plain, seed, json={"const": text}, disable_any_whitespace=True)
        assert (json.loads(got), ended) == (text, True)
    assert walk(plain, seed, choice=TEXTS)[0] in TEXTS
    got, ended = walk(plain, seed, regex="(a|b)</s>")
    assert got in ("a</s>", "b</s>")
    assert ended


def test_a_grammar_can_still_mean_a_special_token(plain: Any) -> None:
    tokenizer, compiler = plain
    ids = {"<tool_call>": 2, "<s>": 0}
    lark = 'start: <tool_call> "<s>" /<s>/ // <s>\n'
    assert by_id(lark, ids) == 'start: <[2]> "<s>" /<s>/ // <s>\n'
    (grammar,) = compiler.grammars(params(grammar='start: <tool_call> "<s>"'), (END,), 1)
    mask = np.frombuffer(grammar.matcher.compute_bitmask(), np.uint8)
    assert np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist() == [2]
    assert grammar.follow(np.array([2], np.int32)) is None
    assert grammar.follow(np.array([2, *(tokenizer.convert_tokens_to_ids(c) for c in "<s>")], np.int32)) is None


def test_an_end_is_drawn_only_where_the_grammar_may_end() -> None:
    """Also if the end is an ordinary token that text spells."""
    tokenizer = byte_level()
    x = tokenizer.convert_tokens_to_ids("x")
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [x])
    for seed in range(4):
        (grammar,) = compiler.grammars(params(regex="[xy]{3}z"), (x,), 1)
        mask = np.frombuffer(grammar.matcher.compute_bitmask(), np.int32).copy()
        grammar.restrict(mask)
        assert not mask[x >> 5] >> (x & 31) & 1, seed
    compiler.close()


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False},
        {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    ],
)
def test_whitespace_ends(plain: Any, schema: dict[str, Any]) -> None:
    tokenizer, compiler = plain
    newline = tokenizer.convert_tokens_to_ids("\u010a")
    lark = f"start: %json {json.dumps(schema)}"
    for form in ({"json": schema}, {"json": json.dumps(schema)}, {"grammar": lark}):
        (grammar,) = compiler.grammars(params(**form), (END,), 1)
        run, most, out = 0, 0, list[int]()
        while not grammar.matcher.is_stopped() and len(out) < 100:
            mask = grammar.matcher.compute_bitmask()
            ids = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()
            token = newline if newline in ids else ids[-1] if END not in ids else END
            run = run + 1 if token == newline else 0
            most = max(most, run)
            out.append(token)
            grammar.matcher.consume_token(token)
        assert most == 2, form
        assert len(out) < 100


def accepts(schema: dict[str, Any], text: str) -> bool:
    from gapless.grammar.forms import grammar_text

    tokenizer = llguidance.LLTokenizer(json.dumps(json.loads(byte_level().backend_tokenizer.to_str())), eos_token=[END])
    form = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    matcher = llguidance.LLMatcher(tokenizer, grammar_text(form))
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.tokenize_bytes(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_numbers_at_the_edge_of_doubles() -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    for low, high in ((-(2**63), 2**63 - 1), (0, 2**63 - 1), (-(2**60), 2**60), (-(2**53), 2**53), (0, 2**64 - 1)):
        schema = {"type": "integer", "minimum": low, "maximum": high}
        near = [b + d for b in (low, high, 0) for d in (-1, 0, 1)] + [rng.randint(2 * low, 2 * high) for _ in range(5)]
        for value in near:
            ok = accepts(schema, str(value))
            if not low <= value <= high:
                assert not ok, (seed, schema, value)
            elif -(2**63) + 1024 <= value < 2**63:
                assert ok, (seed, schema, value)
    assert not accepts({"type": "integer", "exclusiveMaximum": 2**63}, str(2**63))
    assert accepts({"type": "integer", "exclusiveMinimum": -(2**62) - 1}, str(-(2**62)))


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [1, 2**53 + 1]},
        {"const": -(2**53) - 1},
        {"const": {"deep": [2**64]}},
        {"type": "integer", "minimum": 2**53 + 1},
        {"type": "integer", "maximum": 10**25, "minimum": 10**24},
        {"type": "integer", "exclusiveMaximum": 2**60},
        {"type": "number", "exclusiveMinimum": 2.0**60},
        {"type": "integer", "multipleOf": 2**60},
        {"properties": {"id": {"anyOf": [{"type": "null"}, {"const": 2**60}]}}},
        {"$defs": {"a": {"items": {"enum": [2**60]}}}},
    ],
)
def test_numbers_that_would_be_rounded_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="cannot keep exactly"):
        StructuredOutputsParams(json=schema)


def test_names_of_properties_are_no_keywords() -> None:
    schema = {"properties": {"const": {"type": "integer"}, "enum": {"default": 2**60}, "format": {"type": "string"}}}
    assert json.loads(str(StructuredOutputsParams(json=schema).json)) == schema


def test_types_of_pydantic(plain: Any) -> None:
    for kind in ("path", "file-path", "directory-path", "binary", "password"):
        schema = {"type": "string", "format": kind, "maxLength": 3, "writeOnly": True, "title": "T"}
        got, ended = walk(plain, 0, json=schema, disable_any_whitespace=True)
        assert isinstance(json.loads(got), str)
        assert ended
    with pytest.raises(RequestError, match="uniqueItems"):
        walk(plain, 0, json={"type": "array", "items": {"type": "integer"}, "uniqueItems": True})


def test_a_tokenizer_larger_than_the_logits() -> None:
    tokenizer = byte_level()
    size = tokenizer.convert_tokens_to_ids("<think>")  # the last one has no logit
    assert size == len(tokenizer) - 1
    for fewer in (0, 5):  # merges too
        made = tokenizer, GrammarCompiler(tokenizer, size - fewer, [END])
        assert walk(made, 1, choice=["<think>one two</think>"]) == ("<think>one two</think>", True)
        made[1].close()


def test_a_space_in_front_on_tokenizers_that_drop_one(plain: Any) -> None:
    tokenizer = metaspace()
    assert drops_a_space(tokenizer)
    assert not drops_a_space(plain[0])
    made = tokenizer, GrammarCompiler(tokenizer, len(tokenizer), [END])
    for seed in range(6):
        assert walk(made, seed, choice=[" yes"]) == (" yes", True)
        assert walk(made, seed, choice=["yes"]) == ("yes", True)
        assert walk(made, seed, regex=" (yes|no)")[0] in (" yes", " no")
        assert walk(made, seed, regex=" ?(yes|no)")[0] in (" yes", " no", "yes", "no")
        assert walk(made, seed, regex="yes|no")[0] in ("yes", "no")
    made[1].close()
