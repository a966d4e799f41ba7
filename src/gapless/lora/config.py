"""What an adapter's ``adapter_config.json`` asks for: taken, or refused by name, before a weight is read. No torch.

The format is that of PEFT. What is not known here and is set is refused, never ignored: another kind of adapter would
give other tokens and no error.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gapless.errors import AdapterError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_HARMLESS = frozenset(
    {
        # how it was trained, or where from
        "arrow_config", "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
        "inference_mode", "loftq_config", "lora_dropout", "lora_ga_config", "peft_version", "revision", "task_type",
        # how another engine keeps or computes it, and what matters only together with a key that is refused
        "fan_in_fan_out", "megatron_config", "megatron_core", "qalora_group_size", "runtime_config",
        # looked at below
        "alpha_pattern", "bias", "exclude_modules", "layers_pattern", "layers_to_transform", "target_modules",
        "init_lora_weights", "lora_alpha", "peft_type", "r", "rank_pattern", "use_rslora",
    }
)  # fmt: skip
_REASONS = {
    "use_dora": "DoRA rescales the columns of the base weights; only plain LoRA can be served",
    "lora_bias": "biases of an adapter cannot be served; train with lora_bias=False",
    "modules_to_save": "whole modules cannot be replaced for one request; train with target_modules alone",
    "trainable_token_indices": "embeddings cannot be replaced for one request",
    "target_parameters": "only linear layers can have an adapter, not single parameters",
    "layer_replication": "layers that run twice cannot be served",
    "alora_invocation_tokens": "an activated LoRA begins in the middle of a prompt; only plain LoRA can be served",
}
_INITIAL = (True, False, None, "gaussian", "orthogonal", "eva")
"""Ways to begin training that leave the base weights as they are. Others (PiSSA, OLoRA, CorDA, LoftQ) change them."""


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Ranks and scalings of an adapter.

    Attributes:
        rank, alpha: where no pattern says otherwise.
        rank_pattern, alpha_pattern: by a regular expression on the end of a module's name, the first that matches.
        rslora: scale by ``alpha / sqrt(rank)`` (Kalajdzievski, "A Rank Stabilization Scaling Factor for Fine-Tuning
            with LoRA", 2023) instead of ``alpha / rank``.
        targets, excluded: ends of the names of modules that it was trained on, or not; a text is a regular expression.
        layers: numbers of the layers that it was trained on; None: all.
    """

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    rslora: bool = False
    targets: str | tuple[str, ...] = ()
    excluded: str | tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None

    @property
    def largest_rank(self) -> int:
        """Over all modules."""
        return max(self.rank, *self.rank_pattern.values(), 1)

    def rank_of(self, module: str) -> int:
        """Of the module with this full name."""
        return int(_by_pattern(self.rank_pattern, module, self.rank))

    def scaling_of(self, module: str) -> float:
        """By which the module's low-rank product is multiplied."""
        rank, alpha = self.rank_of(module), float(_by_pattern(self.alpha_pattern, module, self.alpha))
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank

    def lacks(self, modules: Iterable[str], held: Container[str]) -> list[str]:
        """Those of ``modules`` that it was trained on, by what it says, and that are not in ``held``."""
        return [name for name in modules if name not in held and self._was_trained_on(name)]

    def _was_trained_on(self, module: str) -> bool:
        if self.layers is not None and not any(int(n) in self.layers for n in re.findall(r"\.(\d+)\.", module)):
            return False
        return _named(self.targets, module) and not _named(self.excluded, module)


def read_config(path: str | Path) -> LoraConfig:
    """The configuration in an adapter's folder.

    Raises:
        AdapterError: there is none, or it asks for what cannot be served; the message names the key.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise AdapterError(f"adapter {str(path)!r}: there is no such folder")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise AdapterError(
                f"adapter {str(path)!r}: the folder has no {name}; give a folder that PEFT's save_pretrained wrote, "
                "with weights as safetensors"
            )
    try:
        options = json.loads((folder / CONFIG_FILE).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise AdapterError(f"adapter {str(path)!r}: {CONFIG_FILE} cannot be read: {error}") from error
    if not isinstance(options, dict):
        raise AdapterError(f"adapter {str(path)!r}: {CONFIG_FILE} holds no object")
    try:
        return parse_config(options)
    except AdapterError as error:
        raise AdapterError(f"adapter {str(path)!r}: {error}") from None


def parse_config(options: Mapping[str, Any]) -> LoraConfig:
    """Check the options of an ``adapter_config.json``.

    Raises:
        AdapterError: naming the key and what is allowed.
    """
    kind = options.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"peft_type={kind!r} is not allowed: only LORA can be served")
    if options.get("bias", "none") != "none":
        raise AdapterError(f"bias={options['bias']!r} is not allowed: biases cannot be served; train with bias='none'")
    initial = options.get("init_lora_weights", True)
    if initial not in _INITIAL:
        raise AdapterError(
            f"init_lora_weights={initial!r} is not allowed: it changes the base weights; convert the adapter with "
            "PEFT's path_initial_model_for_weight_conversion"
        )
    for name, value in options.items():
        if name not in _HARMLESS and value:
            reason = _REASONS.get(name, "this option is not known here")
            raise AdapterError(f"{name}={value!r} is not allowed: {reason}")
    rslora = options.get("use_rslora") or False
    if not isinstance(rslora, bool):
        raise AdapterError(f"use_rslora={rslora!r} is not allowed: true or false")
    return LoraConfig(
        rank=_rank("r", options.get("r")),
        alpha=_number("lora_alpha", options.get("lora_alpha")),
        rank_pattern={k: _rank(f"rank_pattern[{k!r}]", v) for k, v in _pattern("rank_pattern", options).items()},
        alpha_pattern={k: _number(f"alpha_pattern[{k!r}]", v) for k, v in _pattern("alpha_pattern", options).items()},
        rslora=rslora,
        targets=_modules("target_modules", options),
        excluded=_modules("exclude_modules", options),
        layers=_layers(options.get("layers_to_transform")),
    )


def _named(modules: str | tuple[str, ...], name: str) -> bool:
    """PEFT's rule. "all-linear" names nothing: which layers it means depends on the base model's class."""
    if isinstance(modules, str):
        return modules != "all-linear" and re.fullmatch(modules, name) is not None
    return any(name == module or name.endswith(f".{module}") for module in modules)


def _modules(name: str, options: Mapping[str, Any]) -> str | tuple[str, ...]:
    value = options.get(name) or ()
    if isinstance(value, str):
        _pattern(name, {name: {value: None}})
        return value
    if not isinstance(value, (list, tuple)) or not all(isinstance(module, str) for module in value):
        raise AdapterError(f"{name}={value!r} is not allowed: a list of names, or a regular expression")
    return tuple(value)


def _layers(value: Any) -> tuple[int, ...] | None:
    several = [value] if isinstance(value, int) else value
    if several is not None and (not isinstance(several, list) or not all(isinstance(n, int) for n in several)):
        raise AdapterError(f"layers_to_transform={value!r} is not allowed: a list of integers, or null")
    return None if several is None else tuple(several)


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):  # PEFT's rule
            return value
    return default


def _pattern(name: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    patterns = options.get(name) or {}
    if not isinstance(patterns, Mapping):
        raise AdapterError(f"{name}={patterns!r} is not allowed: an object from patterns to numbers")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise AdapterError(f"{name}: {pattern!r} is no regular expression: {error}") from error
    return patterns


def _rank(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise AdapterError(f"{name}={value!r} is not allowed: an integer >= 1")
    return value


def _number(name: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise AdapterError(f"{name}={value!r} is not allowed: a number")
    return float(value)
