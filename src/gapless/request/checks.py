"""Checks of single sampling parameters: each returns the value in its one plain form, or refuses it by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gapless.errors import RequestError


def refuse(name: str, value: object, allowed: str) -> RequestError:
    """The error for a value that is not allowed."""
    return RequestError(f"{name}={value!r} is not allowed: {allowed}")


def check_number(name: str, value: object, low: float, high: float, allowed: str) -> float:
    """A number in [low, high], as a float; no bool, no NaN."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise refuse(name, value, allowed)
    if not low <= value <= high:  # also true of NaN
        raise refuse(name, value, allowed)
    return float(value)


def check_integer(name: str, value: object, low: int, allowed: str, high: int | None = None) -> int:
    """An integer in [low, high], as Python's own: NumPy's wrap around in sums; no bool."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise refuse(name, value, allowed)
    plain = int(value)
    if plain < low or (high is not None and plain > high):
        raise refuse(name, value, allowed)
    return plain


def check_items(name: str, value: Any, allowed: str) -> Sequence[Any]:
    """A sequence of anything."""
    if not isinstance(value, Sequence):
        raise refuse(name, value, allowed)
    return value


def strings(name: str, value: Any) -> tuple[str, ...]:
    """One string or several, none of them empty."""
    allowed = "a string or a list of strings, none of them empty"
    several = (value,) if isinstance(value, str) else check_items(name, value, allowed)
    for s in several:
        if not isinstance(s, str) or not s:
            raise refuse(name, value, allowed)
    return tuple(several)


def token_ids(name: str, value: Any, *, may_be_empty: bool = True, at_most: int | None = None) -> tuple[int, ...]:
    """Ids that are not negative; whether the vocabulary has them is for the engine to check."""
    allowed = f"a list of {'' if may_be_empty else 'at least one of '}token ids, each an integer >= 0"
    if isinstance(value, (str, bytes)):
        raise refuse(name, value, allowed)
    for t in check_items(name, value, allowed):
        check_integer(name, t, 0, allowed)
    if not value and not may_be_empty:
        raise refuse(name, value, allowed)
    if at_most is not None and len(value) > at_most:
        raise RequestError(f"{name} has {len(value)} ids; at most {at_most} are allowed")
    return tuple(int(t) for t in value)


def logit_bias(value: Any, at_most: int) -> dict[int, float] | None:
    """``{id: bias}`` in rising order of ids; OpenAI's JSON spells the ids as strings. None if empty."""
    allowed = "a mapping from token ids, each an integer >= 0, to numbers from -100 to 100"
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise refuse("logit_bias", value, allowed)
    if len(value) > at_most:
        raise RequestError(f"logit_bias has {len(value)} ids; at most {at_most} are allowed")
    plain: dict[int, float] = {}
    for key, bias in value.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
        token = check_integer("logit_bias", token, 0, allowed)
        if token in plain:
            raise RequestError(f"logit_bias names the id {token} twice")
        plain[token] = check_number("logit_bias", bias, -100.0, 100.0, allowed)
    return dict(sorted(plain.items())) or None


def bad_words(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """Strings, or lists of token ids; none of them empty."""
    allowed = "a list whose entries are strings, or lists of token ids, none of them empty"
    if isinstance(value, str):
        raise refuse("bad_words", value, allowed)
    plain: list[str | tuple[int, ...]] = []
    for word in check_items("bad_words", value, allowed):
        if isinstance(word, str):
            if not word.strip():
                raise refuse("bad_words", value, allowed)
            plain.append(word)
        else:
            plain.append(token_ids("bad_words", word, may_be_empty=False))
    return tuple(plain)
