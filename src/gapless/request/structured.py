"""What a request may ask of the form of its output: a JSON schema, a regular expression, a choice, a grammar.

Checked here by size and shape alone, in time that grows with the text and no faster. Whether it can be compiled is
found out by `gapless.grammar.compiler`, in a process that can be killed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from gapless.errors import RequestError, did_you_mean
from gapless.request.checks import refuse
from gapless.request.schema_numbers import exact

MAX_BYTES = 256 * 1024
"""Of a schema, a grammar, or all choices together."""
MAX_DEPTH = 64
"""Of the objects and arrays within each other that a JSON schema has."""
MAX_ENUM = 10_000
"""Values of all ``enum`` lists of a schema together, and choices."""
MAX_REGEX = 16 * 1024
"""Bytes of one regular expression, also of a ``pattern`` in a schema."""

_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_FIELD = "structured_outputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form of a request's output. Exactly one of the first five is given.

    Attributes:
        json: a JSON schema, as a mapping or as text; kept as text. Keywords that the compiler cannot follow
            are refused; words that JSON Schema does not have say nothing, as the standard has it.
        regex: the whole output matches it. The syntax is that of Rust's ``regex`` crate.
        choice: the output is one of these strings.
        grammar: in the dialect of Lark that ``llguidance`` documents.
        json_object: True: any JSON object.
        disable_any_whitespace: JSON without any whitespace between its tokens. Otherwise there are at most two
            characters of it at a place.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        if self.json_object not in (None, True, False):
            raise refuse(f"{_FIELD}.json_object", self.json_object, "True, False or None")
        given = [name for name in _KINDS if getattr(self, name) is not None and getattr(self, name) is not False]
        if len(given) != 1:
            raise RequestError(
                f"{_FIELD} needs exactly one of {', '.join(_KINDS)}; given: {', '.join(given) or 'none'}"
            )
        if not isinstance(self.disable_any_whitespace, bool):
            raise refuse(f"{_FIELD}.disable_any_whitespace", self.disable_any_whitespace, "True or False")
        if self.disable_any_whitespace and given[0] not in ("json", "json_object"):
            raise RequestError(f"{_FIELD}.disable_any_whitespace goes with json or json_object, not with {given[0]}")
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        if self.regex is not None:
            _text("regex", self.regex, MAX_REGEX)
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if self.grammar is not None:
            _text("grammar", self.grammar, MAX_BYTES)

    @property
    def kind(self) -> str:
        """Which of the five it is."""
        return next(name for name in _KINDS if getattr(self, name) not in (None, False))


def structured_outputs(value: Any) -> StructuredOutputsParams | None:
    """The parameter in its one form; plain data names the fields of `StructuredOutputsParams`."""
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, Mapping):
        raise refuse(_FIELD, value, "a StructuredOutputsParams, a mapping of its fields, or None")
    known = [f.name for f in fields(StructuredOutputsParams)]
    for name in map(str, value):
        if name not in known:
            raise RequestError(f"{_FIELD} has no {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}")
    return StructuredOutputsParams(**value)


def _text(name: str, value: object, limit: int) -> str:
    if not isinstance(value, str) or not value:
        raise refuse(f"{_FIELD}.{name}", value if not isinstance(value, str) else "", "a string that is not empty")
    return _sized(name, value, limit)


def _sized(name: str, text: str, limit: int) -> str:
    try:
        size = len(text.encode()) if len(text) <= limit else len(text)
    except UnicodeEncodeError:
        raise RequestError(f"{_FIELD}.{name} holds half a surrogate pair, which no text has") from None
    if size > limit:
        raise RequestError(f"{_FIELD}.{name} has {size} bytes; at most {limit} are allowed")
    return text


def _choices(value: Any) -> tuple[str, ...]:
    allowed = f"a list of 1 to {MAX_ENUM} strings, none of them empty"
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise refuse(f"{_FIELD}.choice", value, allowed)
    if not 0 < len(value) <= MAX_ENUM:
        raise RequestError(f"{_FIELD}.choice has {len(value)} entries; allowed is {allowed}")
    for i, text in enumerate(value):
        if not isinstance(text, str) or not text:
            raise refuse(f"{_FIELD}.choice[{i}]", text, allowed)
    _sized("choice", "\n".join(value), MAX_BYTES)
    return tuple(value)


def _schema(value: Any) -> str:
    """The schema as compact text, in the order of its keys, which is the order of the properties in the output."""
    allowed = "a JSON schema: an object, as a mapping or as text"
    if isinstance(value, str):
        _sized("json", value, MAX_BYTES)
        try:
            value = json.loads(value, parse_constant=_no_constant)
        except RecursionError:
            raise _too_deep() from None
        except ValueError as error:
            raise RequestError(f"{_FIELD}.json is no JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise refuse(f"{_FIELD}.json", value if isinstance(value, (int, float)) else type(value).__name__, allowed)
    _check_tree(value)
    value = exact(value, f"{_FIELD}.json")
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain)
    except (TypeError, ValueError) as error:
        raise RequestError(f"{_FIELD}.json cannot be written as JSON: {error}") from error
    return _sized("json", text, MAX_BYTES)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not allowed")


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not allowed in a schema")


def _too_deep() -> RequestError:
    return RequestError(f"{_FIELD}.json nests objects and arrays deeper than {MAX_DEPTH} levels, which is the limit")


def _check_tree(schema: Mapping[str, Any]) -> None:
    """Depth and counts, without recursion: a mapping may even hold itself, and then is too deep."""
    enums, nodes = 0, 0
    todo: list[tuple[Any, int]] = [(schema, 1)]
    while todo:
        node, depth = todo.pop()
        if depth > MAX_DEPTH:
            raise _too_deep()
        nodes += len(node)
        if nodes > MAX_BYTES:  # each would be a byte at least
            raise RequestError(f"{_FIELD}.json has more than {MAX_BYTES} bytes, which is the limit")
        if isinstance(node, Mapping):
            enum, pattern = node.get("enum"), node.get("pattern")
            enums += len(enum) if isinstance(enum, (list, tuple)) else 0
            if isinstance(pattern, str):
                _sized("json's pattern", pattern, MAX_REGEX)
        children = node.values() if isinstance(node, Mapping) else node
        todo += [(child, depth + 1) for child in children if isinstance(child, (Mapping, list, tuple))]
    if enums > MAX_ENUM:
        raise RequestError(f"{_FIELD}.json has {enums} enum values in all; at most {MAX_ENUM} are allowed")
