"""SpeculativeConfig: whether and how an engine drafts tokens ahead of the model. Checked once, frozen; no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from gapless.errors import ConfigError, did_you_mean

METHODS = ("ngram", "draft_model")
MAX_DRAFTS = 8
"""Most drafts of a step: with the token before them they are the query tokens of one tile of the decode kernel."""
MAX_NGRAM = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are made, and when a request stops asking for them.

    A row that drafts is judged after every ``patience`` of its committed steps: if they accepted fewer than
    ``min_accepted`` drafts each, it goes on without drafts. With ``ngram`` it tries again after ``pause`` tokens, for a
    quarter of ``patience``, and each trial that fails doubles its next pause. With ``draft_model`` it does not: the
    draft model's cache has a hole by then.

    Attributes:
        method: ``ngram`` continues the request's own tokens where their latest ones occurred before; ``draft_model``
            runs a second, smaller model.
        num_speculative_tokens: drafts of a step, from 1 to 8.
        model: of ``draft_model``: a folder, a name, or a ``transformers`` model, with the vocabulary of the target.
        min_ngram, max_ngram: of ``ngram``: how many of the latest tokens must occur again, and how many are looked at.
        min_accepted: accepted drafts per step under which a row stops to draft; 0 never stops.
        patience: steps of a row after which it is judged.
        pause: tokens without drafts after a first failure.
    """

    method: str = "ngram"
    num_speculative_tokens: int = 4
    model: Any = None
    min_ngram: int = 2
    max_ngram: int = 4
    min_accepted: float = 0.5
    patience: int = 8
    pause: int = 64

    @property
    def reads_prompt(self) -> bool:
        """Drafts are looked up in the row's tokens on the device, which must have those of a prefix hit too."""
        return self.method == "ngram"

    def __post_init__(self) -> None:
        def check(name: str, ok: bool, allowed: str) -> None:
            if not ok:
                raise ConfigError(f"speculative.{name}={getattr(self, name)!r} is not allowed: {allowed}")

        def integer(name: str, low: int, high: int) -> None:
            value = getattr(self, name)
            ok = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
            check(name, ok, f"an integer from {low} to {high}")

        check("method", self.method in METHODS, f"one of {', '.join(METHODS)}")
        integer("num_speculative_tokens", 1, MAX_DRAFTS)
        integer("max_ngram", 1, MAX_NGRAM)
        integer("min_ngram", 1, self.max_ngram)
        share = self.min_accepted
        number = isinstance(share, (int, float)) and not isinstance(share, bool)
        most = self.num_speculative_tokens
        check("min_accepted", number and 0 <= share <= most, f"a number from 0 to num_speculative_tokens, {most}")
        integer("patience", 1, 2**20)
        integer("pause", 1, 2**20)
        if self.method == "draft_model":
            check("model", self.model is not None, "method draft_model needs a folder, a name or a model")
        else:
            check("model", self.model is None, f"method {self.method} has no model; did you mean method=draft_model?")

    @classmethod
    def of(cls, value: SpeculativeConfig | Mapping[str, Any] | str | None) -> SpeculativeConfig | None:
        """From what a user may give: this class, plain data, or a text as `from_text` reads it.

        Raises:
            ConfigError: an unknown name (with the nearest known one), or a value out of range.
        """
        if value is None or isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls.from_text(value)
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"speculative={value!r} is not allowed: a SpeculativeConfig, a mapping of its fields, a text such as "
                "'ngram', or None"
            )
        known = [f.name for f in fields(cls)]
        for name in value:
            if name not in known:
                hint = did_you_mean(str(name), known)
                raise ConfigError(f"unknown option speculative.{name!s}.{hint} Known: {', '.join(known)}")
        return cls(**value)

    @classmethod
    def from_text(cls, text: str) -> SpeculativeConfig:
        """``ngram``, ``ngram,num_speculative_tokens=4``, ``draft_model,model=FOLDER``, or a JSON object.

        Raises:
            ConfigError: as `of`.
        """
        options: dict[str, Any] = {}
        if text.lstrip().startswith("{"):
            try:
                options = json.loads(text)
            except json.JSONDecodeError as error:
                raise ConfigError(f"speculative={text!r} is not a JSON object: {error}") from error
        else:
            for i, word in enumerate(text.split(",")):
                name, separator, value = word.strip().partition("=")
                if not separator and i == 0:
                    name, value = "method", name
                elif not separator:
                    raise ConfigError(f"speculative={text!r}: {word!r} is not of the form name=value")
                options[name] = _plain(name, value)
        config = cls.of(options)
        assert config is not None
        return config


def _plain(name: str, value: str) -> Any:
    if name in ("method", "model"):
        return value
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value
