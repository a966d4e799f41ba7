"""What each token of a fast tokenizer adds to the text, read from its decoder's description.

Only decoders whose steps are all known here get a table; `gapless.text.windowed` serves the others by
decoding. Tables are filled on first use. Threads may share one: an entry is computed from constant data,
twice at worst.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Recipe:
    """A ``tokenizers`` decoder as plain steps. Only decoders of these exact shapes have one.

    Attributes:
        byte_level: tokens spell bytes with GPT-2's 256 printable characters; nothing else is set then.
        replace: (old, new) applied to each token, before byte tokens are recognised.
        byte_fallback: ``<0xE4>`` is a byte.
        metaspace: a character that stands for a space, None if the decoder has no such step.
        metaspace_first: that character is dropped, not replaced, in the first chunk.
        strip: this many of the character ``strip_char`` are cut off the start of the text.
    """

    byte_level: bool = False
    replace: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    metaspace: str | None = None
    metaspace_first: bool = False
    strip: int = 0
    strip_char: str = " "

    @classmethod
    def of(cls, decoder: Any) -> Recipe | None:
        """The recipe of ``Tokenizer.decoder``, None for any shape not known to the letter."""
        if decoder is None:
            return None
        spec = json.loads(decoder.__getstate__())
        steps: list[dict[str, Any]] = spec["decoders"] if spec["type"] == "Sequence" else [spec]
        kinds = [s["type"] for s in steps]
        if kinds == ["ByteLevel"]:
            return cls(byte_level=True)
        # Each step at most once and in this order, except Replace, which may repeat.
        match = re.fullmatch(
            r"((?:R )*)(B )?(M )?(F (S )?)?", "".join(_LETTER.get(k, "?") + " " for k in kinds)
        )
        if match is None:
            return None
        found = {s["type"]: s for s in steps}
        replace = []
        for s in steps:
            if s["type"] == "Replace":
                if "String" not in s["pattern"]:
                    return None
                replace.append((s["pattern"]["String"], s["content"]))
        strip = found.get("Strip", {"start": 0, "stop": 0, "content": " "})
        meta = found.get("Metaspace")
        if strip["stop"]:
            return None
        return cls(
            replace=tuple(replace),
            byte_fallback="ByteFallback" in found,
            metaspace=meta["replacement"] if meta else None,
            metaspace_first=meta is not None and meta["prepend_scheme"] != "never",
            strip=strip["start"],
            strip_char=strip["content"],
        )


_LETTER = {"Replace": "R", "ByteFallback": "B", "Metaspace": "M", "Fuse": "F", "Strip": "S"}


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte, inverted: Latin-1 where it prints, else 256, 257, ..."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(b): b for b in printable}
    others = [b for b in range(256) if b not in printable]
    return alphabet | {chr(256 + i): b for i, b in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


class TokenTable(dict[int, Any]):
    """Token id -> its contribution, filled on first use.

    ``str`` where it is whole characters; else ``bytes`` if the tokenizer is byte-level, ``int`` for a byte
    token. A skipped or unknown token contributes None, which, unlike an empty string, does not end a run of
    byte tokens.
    """

    def __init__(self, backend: Any, recipe: Recipe, skip_special_tokens: bool) -> None:
        super().__init__()
        self.recipe = recipe
        self._id_to_token = backend.id_to_token
        added = backend.get_added_tokens_decoder().values()
        self.special = frozenset(t.content for t in added if t.special)
        self._skipped = self.special if skip_special_tokens else frozenset()

    def __missing__(self, token_id: int) -> Any:
        token: str | None = self._id_to_token(token_id)
        value = None if token is None or token in self._skipped else self._contribution(token)
        self[token_id] = value
        return value

    def _contribution(self, token: str) -> Any:
        recipe = self.recipe
        if recipe.byte_level:
            try:
                data = bytes(map(_ALPHABET.__getitem__, token))
            except KeyError:  # an added token is written as it is
                return token
            try:
                return data.decode()
            except UnicodeDecodeError:
                return data
        for old, new in recipe.replace:
            token = token.replace(old, new)
        if recipe.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return int(match[1], 16)
        return token

    def is_special(self, token_id: int) -> bool:
        """True for a special token, skipped or not."""
        return self._id_to_token(token_id) in self.special
