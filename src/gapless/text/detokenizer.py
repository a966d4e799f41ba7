"""Token ids to text, one token at a time, at a constant cost per token.

**Contract.** The concatenated pieces of one detokenizer equal ::

    tokenizer.decode(output_ids, skip_special_tokens=..., clean_up_tokenization_spaces=False)

for the output's ids *alone*. So a SentencePiece-style tokenizer that drops the leading space of a text
drops it here too, and no prompt text can appear. What differs from that line, and why:

* A prompt may end inside a UTF-8 character. Its unfinished bytes (at most 3) are put before the output, if
  and only if the output's first byte goes on with that character, which then is the first of the text. No
  U+FFFD appears.
* A run of byte tokens (``<0xE4>``) is held until it ends, because one ill-formed byte makes the tokenizer
  write a U+FFFD for *every* byte of the run. After `MAX_HELD_BYTES` the finished characters are released,
  so that a long run of emoji still streams; only an ill-formed byte later in that run then gives a
  different text, and a better one.
* `WindowedDetokenizer`, which serves tokenizers of unknown make, is exact for well-formed text only.

A character is never sent in part: bytes wait until it is complete, and `finish` writes an incomplete one as
U+FFFD.

Why not ``tokenizers.decoders.DecodeStream``: it decodes a window twice per token, its window grows while
skipped special tokens or invalid bytes arrive (quadratic), it raises on a prefix that a later byte changes,
it has no flush, and when primed with a prompt that ends inside a character its first piece repeats the
prompt. Here a token's bytes are looked up once and cached, so that the tokenizer's Rust object, which another
thread may hold to encode, is asked only about tokens that were never seen before.

One detokenizer belongs to one completion and one thread. The cached tables are shared, and safe to share.
"""

from __future__ import annotations

import codecs
import logging
import random
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from gapless.text.token_table import Recipe, TokenTable
from gapless.text.windowed import WindowedDetokenizer

logger = logging.getLogger(__name__)

MAX_HELD_BYTES = 32
"""Byte tokens of one run that are held back at most."""

_BROKEN = "\ufffd"
_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """The text of one completion, in pieces."""

    def push(self, token_id: int, /) -> str:
        """The text that this token completes; empty while a character or a byte run is unfinished."""

    def finish(self) -> str:
        """What was still held, after the last token. An incomplete character becomes U+FFFD."""


def create_detokenizer(
    tokenizer: Any, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
) -> Detokenizer:
    """A detokenizer for one completion of this prompt.

    Args:
        tokenizer: a ``transformers`` tokenizer, fast or slow.
        prompt_token_ids: only the last few are looked at, for an unfinished character.
        skip_special_tokens: leave special tokens out.
    """
    table = _table(tokenizer, skip_special_tokens)
    tail = [int(t) for t in prompt_token_ids[-4:]]
    if table is None:
        return WindowedDetokenizer(tokenizer, tail, skip_special_tokens)
    if table.recipe.byte_level:
        return ByteLevelDetokenizer(table, tail)
    return PieceDetokenizer(table, tail)


def decode_whole(
    tokenizer: Any,
    token_ids: Iterable[int],
    prompt_token_ids: Sequence[int] = (),
    *,
    skip_special_tokens: bool = True,
) -> str:
    """All pieces at once: the same text as the stream of the same ids."""
    ids = list(token_ids)
    if (
        _table(tokenizer, skip_special_tokens) is None
    ):  # decoding in pieces is slow here; well-formed text agrees
        text: str = tokenizer.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        if _BROKEN not in text:
            return text
    detokenizer = create_detokenizer(tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens)
    pieces = list(map(detokenizer.push, ids))
    return "".join(pieces) + detokenizer.finish()


def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """What one token adds to the text, special tokens included; part of a character where it is no whole one."""
    table = _table(tokenizer, False)
    if table is None:
        text: str = tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        return text.encode("utf-8", "replace")
    value = table[token_id]
    if isinstance(value, int):
        return bytes((value,))
    return value.encode() if isinstance(value, str) else value or b""


def _unfinished(table: TokenTable, prompt_tail: Sequence[int]) -> bytes:
    """The bytes, at most 3, of a character that the prompt's last tokens begin and do not complete."""
    data = b""
    for token_id in reversed(prompt_tail):
        value = table[token_id]
        if value is None or isinstance(value, str) or table.is_special(token_id):
            break
        data = (bytes((value,)) if isinstance(value, int) else value) + data
        if len(data) >= 4:
            break
    decoder = _utf8("replace")
    decoder.decode(data)
    return decoder.getstate()[0]


def _continues(tail: bytes, first: int) -> bool:
    """Whether ``first`` can be the next byte of the character that ``tail`` begins."""
    try:
        _utf8("strict").decode(tail + bytes((first,)))
    except UnicodeDecodeError:
        return False
    return True


class ByteLevelDetokenizer:
    """Byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM2): whole characters are looked up, other bytes decoded.

    ``_inside``: the text so far, or the prompt (its bytes are ``_tail``), ends inside a character.
    """

    __slots__ = ("_decoder", "_inside", "_table", "_tail")

    def __init__(self, table: TokenTable, prompt_tail: Sequence[int] = ()) -> None:
        self._table = table
        self._decoder = _utf8("replace")
        self._tail = _unfinished(table, prompt_tail)
        self._inside = bool(self._tail)

    def push(self, token_id: int, /) -> str:
        """See `Detokenizer`."""
        value: str | bytes | None = self._table[token_id]
        if not value:
            return ""
        if isinstance(value, str):
            if not self._inside:
                return value
            value = value.encode()
        if self._tail:
            if _continues(self._tail, value[0]):
                value = self._tail + value
            self._tail = b""
        text = self._decoder.decode(value)
        self._inside = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        """See `Detokenizer`."""
        return self._decoder.decode(b"", True)


class PieceDetokenizer:
    """SentencePiece-like: tokens are text, bytes are tokens of their own.

    ``_run`` is None outside a run of byte tokens. A run is *open* (held) while it is well-formed, *broken*
    once it cannot be (a U+FFFD per byte, at once), *long* when it was open for `MAX_HELD_BYTES` (``_long``
    decodes it).
    """

    __slots__ = ("_broken", "_check", "_first", "_long", "_run", "_strip", "_table", "_tail")

    def __init__(self, table: TokenTable, prompt_tail: Sequence[int] = ()) -> None:
        self._table = table
        self._tail = _unfinished(table, prompt_tail)
        self._run: bytearray | None = None
        self._check = _utf8("strict")
        self._broken = False
        self._long: codecs.IncrementalDecoder | None = None
        self._first = table.recipe.metaspace_first
        self._strip = table.recipe.strip

    def push(self, token_id: int, /) -> str:
        """See `Detokenizer`."""
        value: str | int | None = self._table[token_id]
        if value is None:
            return ""
        if isinstance(value, int):
            return self._push_byte(value)
        self._tail = b""
        text = self._end_run() + self._chunk(value) if self._run is not None else self._chunk(value)
        return self._cut(text) if self._strip else text

    def finish(self) -> str:
        """See `Detokenizer`."""
        return self._cut(self._end_run())

    def _push_byte(self, byte: int) -> str:
        if self._run is None:
            self._check.reset()
            self._run, self._broken, self._long = bytearray(), False, None
            if self._tail and _continues(self._tail, byte):
                self._run += self._tail
                self._check.decode(self._tail)
            else:
                self._tail = b""
        if self._broken:
            return _BROKEN
        data = bytes((byte,))
        if self._long is not None:
            return self._chunk(self._long.decode(data))
        self._run += data
        try:
            self._check.decode(data)
        except UnicodeDecodeError:
            self._broken = True
            return self._cut(self._broken_run())
        if len(self._run) <= MAX_HELD_BYTES:
            return ""
        self._long = _utf8("replace")
        return self._cut(self._chunk(self._long.decode(bytes(self._run))))

    def _broken_run(self) -> str:
        assert self._run is not None
        count = len(self._run) - len(self._tail)  # the prompt's own bytes are not the output's
        self._tail = b""
        return self._chunk(_BROKEN * count)

    def _end_run(self) -> str:
        """Ends a run of byte tokens, if one is on; returns what of it was not sent."""
        if self._run is None or self._broken:
            text = ""
        elif self._long is not None:
            text = self._long.decode(b"", True)
        else:
            try:
                text = self._chunk(self._run.decode())
            except UnicodeDecodeError:
                text = self._broken_run()
        self._run, self._tail = None, b""
        return text

    def _chunk(self, text: str) -> str:
        recipe = self._table.recipe
        if recipe.metaspace is None:
            return text
        text = text.replace(recipe.metaspace, "" if self._first else " ")
        self._first = False
        return text

    def _cut(self, text: str) -> str:
        """Cuts up to ``strip`` characters off the start of the whole text; past it, nothing."""
        char = self._table.recipe.strip_char
        while self._strip and text:
            if not text.startswith(char):
                self._strip = 0
                break
            text, self._strip = text[len(char) :], self._strip - 1
        return text


# One entry per tokenizer: the tables for skip_special_tokens False and True, or None if it has no recipe.
_tables: weakref.WeakKeyDictionary[Any, tuple[TokenTable, TokenTable] | None] = weakref.WeakKeyDictionary()
_tables_lock = threading.Lock()


def _table(tokenizer: Any, skip_special_tokens: bool) -> TokenTable | None:
    with _tables_lock:
        if tokenizer not in _tables:
            _tables[tokenizer] = _build_tables(tokenizer)
        tables = _tables[tokenizer]
    return tables and tables[skip_special_tokens]


def _build_tables(tokenizer: Any) -> tuple[TokenTable, TokenTable] | None:
    from transformers import PreTrainedTokenizerFast

    cls = type(tokenizer)
    if getattr(cls, "_decode", None) is not PreTrainedTokenizerFast._decode:
        return None
    backend = tokenizer.backend_tokenizer
    recipe = Recipe.of(backend.decoder)
    if recipe is None:
        return None
    tables = TokenTable(backend, recipe, False), TokenTable(backend, recipe, True)
    if not _agrees(tokenizer, backend, tables):
        logger.warning(
            "%s decodes differently from its description %s; using the slower windowed detokenizer",
            cls.__name__,
            recipe,
        )
        return None
    return tables


def _agrees(tokenizer: Any, backend: Any, tables: tuple[TokenTable, TokenTable]) -> bool:
    """Whether the tables and the tokenizer give the same text for some random ids: a few milliseconds."""
    rng = random.Random(0)
    size = len(tokenizer)
    byte_ids = [i for b in range(256) if (i := backend.token_to_id(f"<0x{b:02X}>")) is not None]
    make = ByteLevelDetokenizer if tables[0].recipe.byte_level else PieceDetokenizer
    for skip in (False, True):
        for _ in range(8):
            ids = [rng.randrange(size) for _ in range(24)]
            if byte_ids:
                ids[8:8] = rng.choices(byte_ids, k=6)
            detokenizer = make(tables[skip])
            text = "".join([*map(detokenizer.push, ids), detokenizer.finish()])
            if text != tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False):
                return False
    return True
