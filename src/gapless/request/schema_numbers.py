"""Parts of a JSON schema that its compiler would round or refuse though they can be followed, made exact; or refused.

The compiler reads numbers as doubles, so that an integer beyond 2**53 may become its neighbour. What stays exact
passes: bounds that a double holds, and the ends of 64-bit integers. Others are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from gapless.errors import RequestError

EXACT = 2**53
"""Up to here a double holds every integer."""
LARGEST = 2**63 - 1
"""The largest integer that can be written under a bound; the smallest is `SMALLEST`."""
SMALLEST = -(2**63) + 1024
"""The next double above -2**63: the 1024 integers below it are never written."""
ANNOTATIONS = frozenset({"path", "file-path", "directory-path", "binary", "password", "multi-line"})
"""Formats of pydantic that say how a text is shown or taken, and nothing about it."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = (
    "items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "contains",
    "propertyNames", "not", "if", "then", "else", "contentSchema",
)  # fmt: skip


def exact(schema: Any, field: str) -> Any:
    """A schema that allows the same, of numbers that a double holds. Its depth is limited already.

    Args:
        schema: of plain JSON.
        field: what the messages call it.

    Raises:
        RequestError: a number of it cannot be kept exactly.
    """
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    for key in _MAPS:
        if isinstance(inner := made.get(key), Mapping):
            made[key] = {name: exact(child, field) for name, child in inner.items()}
    for key in _LISTS:
        if isinstance(inner := made.get(key), (list, tuple)):
            made[key] = [exact(child, field) for child in inner]
    for key in _SINGLE:
        if isinstance(inner := made.get(key), Mapping):
            made[key] = exact(inner, field)
    for key in ("enum", "const"):
        for number in _numbers(made.get(key)):
            if abs(number) > EXACT:
                raise _refused(field, key, number)
    if isinstance(made.get("format"), str) and made["format"] in ANNOTATIONS:
        del made["format"]
    _bounds(made, field)
    return made


def _bounds(schema: dict[str, Any], field: str) -> None:
    """Bounds of a schema, in place."""
    integer = schema.get("type") == "integer"
    for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
        bound = schema.get(key)
        if isinstance(bound, bool) or not isinstance(bound, (int, float)) or abs(bound) <= EXACT:
            continue
        if key.startswith("exclusive") and integer and isinstance(bound, int):
            del schema[key]  # the compiler does not leave out a bound that large
            key, bound = (("minimum", bound + 1) if key.endswith("Minimum") else ("maximum", bound - 1))
            schema[key] = bound = _tighter(key, bound, schema.get(key))
        if key == "maximum" and integer and bound >= LARGEST:
            del schema[key]
            schema["exclusiveMaximum"] = LARGEST + 1
        elif key == "minimum" and integer and -(2**63) <= bound <= SMALLEST:
            schema[key] = SMALLEST
        elif key not in ("minimum", "maximum") or abs(bound) >= 2**63 or int(float(bound)) != bound:
            raise _refused(field, key, bound)


def _tighter(key: str, bound: int, other: Any) -> int:
    if isinstance(other, bool) or not isinstance(other, (int, float)):
        return bound
    return max(bound, math.ceil(other)) if key == "minimum" else min(bound, math.floor(other))


def _numbers(value: Any) -> Iterator[int | float]:
    if isinstance(value, Mapping):
        for child in value.values():
            yield from _numbers(child)
    elif isinstance(value, (list, tuple)):
        for child in value:
            yield from _numbers(child)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value


def _refused(field: str, key: str, number: float) -> RequestError:
    return RequestError(
        f"{field}: {key} holds {number!r}, which the compiler of grammars cannot keep exactly: numbers there go to "
        "2**53 (bounds also to those that a double holds, and to the ends of 64-bit integers). Write it as a string"
    )
