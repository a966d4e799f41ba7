"""Command-line options made from a dataclass: names, types, defaults, and help texts from its docstring.

A field that is added to the dataclass is an option of every command at once. Only what the user gave is
handed on, so the dataclass stays the one place for defaults and checks.
"""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, get_type_hints

from gapless.config import parse_size
from gapless.request.structured import StructuredOutputsParams
from gapless.speculative_config import SpeculativeConfig

SPELLING = {("EngineConfig", "seed"): "engine-seed", ("SamplingParams", "speculative"): "drafts"}
"""Options that are not spelt like their field, because another dataclass has a field of that name."""


def _parsed(parse: Callable[[str], Any], allowed: str) -> Callable[[str], Any]:
    """``parse`` for argparse: a bad value is told what is allowed, and no name of a function."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except (ValueError, TypeError):
            raise argparse.ArgumentTypeError(f"{text!r} is not allowed: {allowed}") from None

    return parsed


def _or_none(parse: Callable[[str], Any], allowed: str) -> Callable[[str], Any]:
    return _parsed(lambda text: None if text.lower() == "none" else parse(text), f"{allowed}, or none")


def _integers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _biases(text: str) -> dict[int, float]:
    pairs = [word.split(":") for word in text.split(",")]
    return {int(id): float(bias) for id, bias in pairs}


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(text)
    return value


_INTEGER, _NUMBER, _LIST = "an integer", "a number", "integers with commas, such as 1,2"
_SIZE = "a size in bytes, or such as 2G or 512M"
_KINDS: dict[Any, dict[str, Any]] = {
    bool: {"action": argparse.BooleanOptionalAction},
    bool | None: {"action": argparse.BooleanOptionalAction},
    int: {"type": _parsed(int, _INTEGER), "metavar": "N"},
    float: {"type": _parsed(float, _NUMBER), "metavar": "X"},
    str: {"metavar": "NAME"},
    int | None: {"type": _or_none(int, _INTEGER), "metavar": "N"},
    float | None: {"type": _or_none(float, _NUMBER), "metavar": "X"},
    str | None: {"metavar": "NAME"},
    str | Sequence[str]: {"action": "append", "metavar": "TEXT"},
    Sequence[int]: {"type": _parsed(_integers, _LIST), "metavar": "N,N"},
    Sequence[int] | None: {"type": _or_none(_integers, _LIST), "metavar": "N,N"},
    SpeculativeConfig | None: {"type": _or_none(str, "a method"), "metavar": "METHOD,NAME=VALUE"},
    Mapping[int, float] | None: {
        "type": _or_none(_biases, "token ids with their biases, such as 5:-100,7:2.5"),
        "metavar": "N:X,N:X",
    },
    Sequence[str | Sequence[int]]: {"action": "append", "metavar": "TEXT"},
    StructuredOutputsParams | Mapping[str, Any] | None: {
        "type": _or_none(_object, 'a JSON object, such as {"regex": "[0-9]+"}'),
        "metavar": "JSON",
    },
}
_SIZES = {
    int: {"type": _parsed(parse_size, _SIZE), "metavar": "SIZE"},
    int | None: {"type": _or_none(parse_size, _SIZE), "metavar": "SIZE"},
}
"""For fields whose names end in ``bytes``."""
_REPEATED = "; may be given several times"
_NOTES = {str | Sequence[str]: _REPEATED, Sequence[str | Sequence[int]]: _REPEATED}
LEFT_OUT = {("SamplingParams", "output_kind"), ("EngineConfig", "max_prompt_embeds")}
"""Fields without an option: the commands decide by themselves whether to stream, and take prompts of texts and ids."""


def option_name(cls: type, field: str) -> str:
    """``--max-tokens`` for ``max_tokens``."""
    return "--" + SPELLING.get((cls.__name__, field), field.replace("_", "-"))


def add_options(parser: argparse.ArgumentParser, cls: type, title: str) -> None:
    """One option per field of the dataclass ``cls``, in a group of their own.

    Raises:
        TypeError: a field's type is not in the table of this module.
    """
    group = parser.add_argument_group(title)
    types, texts = get_type_hints(cls), attribute_docs(cls)
    for field in fields(cls):
        if (cls.__name__, field.name) in LEFT_OUT:
            continue
        kind = types[field.name]
        how = (_SIZES if field.name.endswith("_bytes") else _KINDS).get(kind)
        if how is None:
            raise TypeError(f"{cls.__name__}.{field.name}: no command-line form of {kind} is known")
        text = f"{texts.get(field.name, '')}{_NOTES.get(kind, '')} (default: {_default(field)})"
        group.add_argument(
            option_name(cls, field.name),
            dest=f"{cls.__name__}.{field.name}",
            default=argparse.SUPPRESS,
            help=text.replace("%", "%%"),
            **how,
        )


def given(arguments: argparse.Namespace, cls: type) -> dict[str, Any]:
    """What the user gave of ``cls``, by field."""
    prefix = f"{cls.__name__}."
    values: Mapping[str, Any] = vars(arguments)
    return {name.removeprefix(prefix): v for name, v in values.items() if name.startswith(prefix)}


def attribute_docs(cls: type) -> dict[str, str]:
    """The texts of the ``Attributes:`` section of a docstring, by name."""
    texts: dict[str, str] = {}
    names: list[str] = []
    _, _, section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")
    for line in section.splitlines():
        if not line.startswith("    "):
            break
        if line[4] != " ":
            head, _, text = line.strip().partition(": ")
            names = head.split(", ")
            texts.update(dict.fromkeys(names, text.strip()))
        else:
            texts.update({name: f"{texts[name]} {line.strip()}" for name in names})
    return {name: text.replace("``", "").removesuffix(".") for name, text in texts.items()}


def _default(field: Field[Any]) -> str:
    if field.default is MISSING or field.default in ((), None):
        return "none"
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    return str(field.default)
