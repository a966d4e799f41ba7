"""Incremental detokenization: the pieces add up to the whole, nothing is ever sent broken."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders
from transformers import AutoTokenizer

from gapless.text.detokenizer import (
    MAX_HELD_BYTES,
    ByteLevelDetokenizer,
    PieceDetokenizer,
    create_detokenizer,
    decode_whole,
)
from gapless.text.token_table import _ALPHABET, Recipe
from gapless.text.windowed import MAX_PENDING_TOKENS, WindowedDetokenizer
from text_tokenizers import byte_level, llama_like, slow_bytes, unigram, word_piece

FAST = [byte_level, llama_like, unigram]
Make = Callable[[], Any]


def pieces(tokenizer: Any, ids: list[int], prompt: list[int] | None = None, skip: bool = True) -> list[str]:
    d = create_detokenizer(tokenizer, prompt or [], skip_special_tokens=skip)
    return [*map(d.push, ids), d.finish()]


def whole(tokenizer: Any, ids: list[int], skip: bool = True) -> str:
    return tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def byte_ids(tokenizer: Any, data: bytes) -> list[int]:
    """One token per byte."""
    if tokenizer is byte_level():
        chars = {byte: char for char, byte in _ALPHABET.items()}
        return [tokenizer.convert_tokens_to_ids(chars[b]) for b in data]
    if tokenizer is slow_bytes():
        return [1 + b for b in data]
    return [tokenizer.convert_tokens_to_ids(f"<0x{b:02X}>") for b in data]


def test_the_fast_tokenizers_use_tables() -> None:
    assert isinstance(create_detokenizer(byte_level()), ByteLevelDetokenizer)
    assert isinstance(create_detokenizer(llama_like()), PieceDetokenizer)
    assert isinstance(create_detokenizer(unigram()), PieceDetokenizer)
    for other in (word_piece(), slow_bytes()):
        assert isinstance(create_detokenizer(other), WindowedDetokenizer)


@pytest.mark.parametrize("make", [*FAST, slow_bytes])
@given(text=st.text(max_size=30))
@settings(max_examples=40, deadline=None)
def test_text_comes_back_in_whole_characters(make: Make, text: str) -> None:
    tokenizer = make()
    ids = encode(tokenizer, text)
    got = pieces(tokenizer, ids)
    assert "".join(got) == whole(tokenizer, ids) == decode_whole(tokenizer, ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in got)


@pytest.mark.parametrize("make", FAST)
@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_ids_add_up_to_the_whole(make: Make, skip: bool, data: st.DataObject) -> None:
    """Random ids: invalid bytes, special and unknown tokens, incomplete ends; runs below the bound."""
    tokenizer = make()
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 2), max_size=MAX_HELD_BYTES - 1))
    assert "".join(pieces(tokenizer, ids, skip=skip)) == whole(tokenizer, ids, skip)


@pytest.mark.parametrize("make", FAST)
@given(data=st.binary(max_size=MAX_HELD_BYTES))
@settings(max_examples=100, deadline=None)
def test_any_bytes_add_up_to_the_whole(make: Make, data: bytes) -> None:
    ids = byte_ids(make(), data)
    assert "".join(pieces(make(), ids)) == whole(make(), ids)


@pytest.mark.parametrize("make", [*FAST, slow_bytes])
def test_a_character_is_held_until_it_is_complete(make: Make) -> None:
    tokenizer = make()
    d = create_detokenizer(tokenizer)
    got = [d.push(i) for i in byte_ids(tokenizer, "🙂".encode())]
    assert got[:3] == ["", "", ""]
    assert "".join(got) + d.finish() == "🙂"


@pytest.mark.parametrize("make", [*FAST, slow_bytes])
def test_an_incomplete_end_is_flushed_as_the_whole_has_it(make: Make) -> None:
    tokenizer = make()
    ids = byte_ids(tokenizer, "你🙂".encode()[:-1])
    assert "".join(pieces(tokenizer, ids)) == whole(tokenizer, ids)
    assert "\ufffd" in whole(tokenizer, ids)


@pytest.mark.parametrize("make", [llama_like, unigram])
def test_a_long_run_of_byte_tokens_streams(make: Make) -> None:
    """Held for a bounded number of tokens; then each character as it is complete."""
    tokenizer = make()
    got = pieces(tokenizer, byte_ids(tokenizer, ("🙂" * 20).encode()))
    assert "".join(got) == "🙂" * 20
    assert not any(got[:MAX_HELD_BYTES])
    assert got[MAX_HELD_BYTES] == "🙂" * 8
    assert [p for p in got[MAX_HELD_BYTES + 1 :] if p] == ["🙂"] * 12
    broken = byte_ids(tokenizer, ("🙂" * 9).encode() + b"\xff")
    assert "".join(pieces(tokenizer, broken)) == "🙂" * 9 + "\ufffd"


@pytest.mark.parametrize("make", [llama_like, unigram])
@pytest.mark.parametrize("count", [MAX_HELD_BYTES - 1, MAX_HELD_BYTES, MAX_HELD_BYTES + 1, MAX_HELD_BYTES + 3, 50])
def test_a_long_run_that_ends_inside_a_character_before_text(make: Make, count: int) -> None:
    """The incomplete character is told as such, before the text that follows and not never."""
    tokenizer = make()
    got = pieces(tokenizer, byte_ids(tokenizer, ("🙂" * 20).encode()[:count]) + encode(tokenizer, "hello"))
    text = "".join(got)
    assert text.endswith("hello")
    if count > MAX_HELD_BYTES:
        assert text.split("\ufffd")[0] == "🙂" * (count // 4)
        assert ("\ufffd" in text) == bool(count % 4)
    else:
        assert text == whole(tokenizer, byte_ids(tokenizer, ("🙂" * 20).encode()[:count]) + encode(tokenizer, "hello"))


@pytest.mark.parametrize("make", [*FAST, slow_bytes])
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_prompt_that_ends_inside_a_character(make: Make, cut: int) -> None:
    tokenizer = make()
    prompt = encode(tokenizer, "hello") + byte_ids(tokenizer, "🙂".encode()[:cut])
    going_on = byte_ids(tokenizer, "🙂".encode()[cut:]) + byte_ids(tokenizer, b"!a")
    got = pieces(tokenizer, going_on, prompt)
    assert "".join(got) == "🙂!a"  # the character that the output completed; no prompt, no U+FFFD
    other = byte_ids(tokenizer, b"!a")
    assert "".join(pieces(tokenizer, other, prompt)) == "!a"
    assert "".join(pieces(tokenizer, [], prompt)) == ""
    # a prompt that ends with a character changes nothing
    assert "".join(pieces(tokenizer, other, encode(tokenizer, "🙂"))) == "!a"


@pytest.mark.parametrize("make", [llama_like, unigram])
def test_prompt_inside_a_character_that_the_output_breaks(make: Make) -> None:
    tokenizer = make()
    prompt = byte_ids(tokenizer, b"a\xf0\x9f")
    assert (
        "".join(pieces(tokenizer, byte_ids(tokenizer, b"\x99A"), prompt)) == "\ufffd\ufffd"
    )  # per output byte


def test_leading_space_is_the_tokenizers() -> None:
    """The output alone, not the prompt, decides: as ``decode(output_ids)`` does."""
    for make, text in ((byte_level, " world"), (llama_like, "world"), (unigram, "world")):
        tokenizer = make()
        ids = encode(tokenizer, "hello world")
        split = next(i for i in range(len(ids)) if whole(tokenizer, ids[:i]).startswith("hello"))
        assert "".join(pieces(tokenizer, ids[split:], ids[:split])) == text == whole(tokenizer, ids[split:])


def test_special_tokens() -> None:
    for make in (*FAST, word_piece):
        tokenizer = make()
        ids = [tokenizer.bos_token_id, *encode(tokenizer, "hello"), tokenizer.eos_token_id]
        assert "</s>" not in "".join(pieces(tokenizer, ids))
        shown = "".join(pieces(tokenizer, ids, skip=False))
        assert "</s>" in shown
        assert shown == whole(tokenizer, ids, skip=False)


@given(ids=st.lists(st.integers(0, 11), max_size=20))
@settings(max_examples=60, deadline=None)
def test_windowed_word_piece(ids: list[int]) -> None:
    assert "".join(pieces(word_piece(), ids)) == whole(word_piece(), ids)


@pytest.mark.parametrize("make", FAST)
@given(text=st.text(max_size=20))
@settings(max_examples=25, deadline=None)
def test_windowed_agrees_with_the_tables(make: Make, text: str) -> None:
    tokenizer = make()
    ids = encode(tokenizer, text)
    d = WindowedDetokenizer(tokenizer, [], True)
    assert "".join([*map(d.push, ids), d.finish()]) == whole(tokenizer, ids)


@pytest.mark.parametrize(("make", "token"), [(slow_bytes, 1 + 0xFF), (byte_level, 10_000)])
def test_the_window_is_bounded(make: Make, token: int) -> None:
    """Neither invalid bytes nor tokens without text let it grow."""
    d = WindowedDetokenizer(make(), [], False)
    seen: list[int] = []
    decode = d._decode
    d._decode = lambda ids: seen.append(len(ids)) or decode(ids)  # type: ignore[method-assign, func-returns-value]
    for _ in range(200):
        d.push(token)
    assert max(seen) <= 2 * MAX_PENDING_TOKENS


@pytest.mark.parametrize("make", [*FAST, slow_bytes])
def test_cost_per_token_is_constant(make: Make) -> None:
    """The last tokens of a long output cost what the first did (generous bound: this is a shared machine)."""
    tokenizer = make()
    rng = random.Random(1)
    n = 500 if tokenizer is slow_bytes() else 20_000
    ids = [rng.randrange(3, 257) for _ in range(20 * n)] if n > 500 else [1 + 97] * (20 * n)
    d = create_detokenizer(tokenizer)
    best = []
    for part in range(20):
        start = time.thread_time()
        for i in ids[part * n : (part + 1) * n]:
            d.push(i)
        best.append(time.thread_time() - start)
    assert min(best[-6:]) < 4 * min(best[:6])


def test_unknown_shapes_have_no_recipe() -> None:
    d = decoders
    assert Recipe.of(None) is None
    for decoder in (
        d.WordPiece(),
        d.BPEDecoder(),
        d.Strip(" ", 1, 0),  # without Fuse it would act on each token
        d.Sequence([d.Fuse(), d.Strip(" ", 1, 1)]),
        d.Sequence([d.Fuse(), d.ByteFallback()]),
        d.Sequence([d.ByteFallback(), d.Replace("▁", " ")]),
    ):
        assert Recipe.of(decoder) is None
    assert Recipe.of(d.Sequence([d.ByteLevel()])) == Recipe(byte_level=True)


def test_a_table_that_disagrees_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe compares with the tokenizer itself."""
    from gapless.text import detokenizer

    tokenizer = llama_like.__wrapped__()
    monkeypatch.setattr(Recipe, "of", classmethod(lambda cls, decoder: Recipe(byte_fallback=True)))
    assert detokenizer._build_tables(tokenizer) is None


def smollm2_tokenizer() -> Any:
    """The tokenizer of a SmolLM2 folder on this machine; skips the test if there is none."""
    default = Path.home() / ".cache" / "gapless" / "SmolLM2-135M-Instruct"
    folder = Path(os.environ.get("GAPLESS_SMOLLM2", default))
    if not (folder / "tokenizer.json").exists():
        pytest.skip(f"no SmolLM2 in {folder}; GAPLESS_SMOLLM2 names another folder")
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.model
def test_smollm2() -> None:
    tokenizer = smollm2_tokenizer()
    assert isinstance(create_detokenizer(tokenizer), ByteLevelDetokenizer)
    for text in ("Hello, wörld! 你好 🙂‍↕️ ⅷ", " a  b\n\n\tc", "ﷺ🇩🇪"):
        ids = encode(tokenizer, text)
        got = pieces(tokenizer, ids)
        assert "".join(got) == whole(tokenizer, ids) == text
        assert not any("\ufffd" in p for p in got)
