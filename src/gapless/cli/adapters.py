"""``--lora NAME=PATH``: which adapters a command loads, and which of them a prompt runs with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from gapless.cli.parser import UsageError
from gapless.config import EngineConfig
from gapless.errors import AdapterError, did_you_mean
from gapless.lora.config import read_config


def parse_adapters(values: Iterable[str]) -> dict[str, str]:
    """Folders by name, in the order given; what can be wrong without a model is refused.

    Raises:
        UsageError: no ``NAME=PATH``, a name twice, or a folder that cannot be served.
    """
    adapters: dict[str, str] = {}
    for value in values:
        name, equals, path = value.partition("=")
        if not (name and equals and path):
            raise UsageError(f"--lora {value!r}: NAME=PATH is needed, such as french=./french-adapter")
        if name in adapters:
            raise UsageError(f"--lora {value!r}: the name {name!r} is given twice")
        adapters[name] = path
        try:
            read_config(path)
        except AdapterError as error:
            raise UsageError(f"--lora {name}: {error}") from error
    return adapters


def config_for(adapters: dict[str, str], config: EngineConfig, given: dict[str, Any]) -> EngineConfig:
    """Room for these adapters, where the options that were ``given`` do not say how much."""
    if not adapters:
        return config
    least: dict[str, Any] = {
        "enable_lora": True,
        "max_loras": len(adapters),
        "max_lora_rank": max(read_config(path).largest_rank for path in adapters.values()),
    }
    for name, value in least.items():
        had = given.get(name)
        if had is not None and had < value:
            raise UsageError(f"--lora: {len(adapters)} adapters need {name}={value}, but {had} is given")
    return dataclasses.replace(config, **{name: value for name, value in least.items() if given.get(name) is None})


def adapter_of(names: Sequence[str], record: dict[str, Any]) -> str | None:
    """What the ``lora`` of a line asks for; without one, the command's only adapter, if it has one.

    Raises:
        UsageError: the name is unknown, or it is not clear which of several is meant.
    """
    if "lora" not in record:
        if len(names) > 1:
            raise UsageError(
                f"which of the adapters {', '.join(names)}? With several, each prompt is a line of a .jsonl file with "
                'the key "lora": a name, or null for the model alone'
            )
        return names[0] if names else None
    name = record["lora"]
    if name is not None and name not in names:
        hint = did_you_mean(str(name), names)
        loaded = ", ".join(names) or "none; give them with --lora NAME=PATH"
        raise UsageError(f"lora={name!r}: no such adapter.{hint} Loaded: {loaded}")
    return None if name is None else str(name)
