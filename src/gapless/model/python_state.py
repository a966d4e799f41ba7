"""PythonState: what a forward reads besides tensors, in a caller's model that an engine was made from.

Modules that are neither PyTorch's nor ``transformers``' (PEFT's layers are such) keep flags: adapters that are merged,
disabled or chosen. A private copy of them runs, so that their plain values can be followed. What an engine has read
once when it was made, or cannot see, is refused by name when it has changed since.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from gapless.errors import WeightError

Follow = tuple[nn.Module, str, Any]
"""A module that runs, an attribute, and what it becomes."""
_LIBRARIES = ("torch", "transformers")
_TRAINING = {"training", "gradient_checkpointing"}
"""Of no meaning to a model that runs in eval mode."""
_AGAIN = "Make a new engine from the model as it is now"


class PythonState:
    """See the module.

    Args:
        source: the caller's model, as it is now.
        running: the private copy of it that runs.
    """

    def __init__(self, source: nn.Module, running: nn.Module) -> None:
        self._source, self._running = weakref.ref(source), dict(running.named_modules())
        self._kinds = {name: type(module) for name, module in source.named_modules()}
        self._values = {name: dict(_plain(module)) for name, module in source.named_modules()}
        self._forwards = {name: vars(module).get("forward") for name, module in source.named_modules() if name}
        self._buffers = {name: buffer.detach().clone() for name, buffer in _unsaved(source)}

    def changes(self, *, follow: bool) -> list[Follow]:
        """What must change before the source's tensors mean the same in the copy.

        Args:
            follow: the copy itself runs in every step; otherwise its Python was run once.

        Raises:
            WeightError: something has changed that cannot be followed; naming it.
        """
        source = self._source()
        if source is None:
            return []
        now = dict(source.named_modules())
        for name in (*self._kinds, *now):
            before, after = self._kinds.get(name), type(now[name]) if name in now else None
            if before is not after:
                words = [kind.__name__ if kind else "nothing" for kind in (before, after)]
                raise WeightError(
                    f"your model's {name!r} was {words[0]} when the engine was made and is {words[1]}. {_AGAIN}"
                )
        for name, forward in self._forwards.items():
            if vars(now[name]).get("forward") is not forward:
                raise WeightError(f"your model's {name!r} has another forward than when the engine was made. {_AGAIN}")
        for name, buffer in _unsaved(source):
            saved = self._buffers.get(name)
            if saved is None or saved.shape != buffer.shape or not torch.equal(saved.to(buffer.device), buffer):
                raise WeightError(f"your model's buffer {name!r} has changed since the engine was made. {_AGAIN}")
        return [change for name, module in now.items() for change in self._of(name, module, follow)]

    def _of(self, name: str, module: nn.Module, follow: bool) -> Iterator[Follow]:
        foreign, ours = _foreign(module), self._running.get(name)
        runs = follow and foreign and type(ours) is type(module)
        before = dict(_plain(ours)) if runs and ours is not None else self._values[name]
        after = dict(_plain(module))
        for key in sorted({*before, *after}):
            if key in before and key in after and before[key] == after[key]:
                continue
            if runs and ours is not None and key in after:
                yield ours, key, after[key]
                continue
            was, now = (values.get(key, "nothing") for values in (before, after))
            hint = (
                " (with enforce_eager=True the engine follows it where it runs the model's own modules)"
                if foreign
                else ""
            )
            raise WeightError(
                f"your model's {name!r} had {key}={was!r} when the engine was made, and now {now!r}, which "
                f"this engine does not read again{hint}. Set it back, or make a new engine from the model as it is now"
            )


def _foreign(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] not in _LIBRARIES


def _plain(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attributes that are numbers, texts, flags, or collections of them; copies."""
    for name, value in vars(module).items():
        if not name.startswith(("_gapless", "_is_hf")) and name not in _TRAINING and _is_plain(value):
            yield name, _copied(value)


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return type(value) is dict and all(_is_plain(k) and _is_plain(v) for k, v in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _copied(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_copied(v) for v in value]
    return set(value) if isinstance(value, set) else value


def _unsaved(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that are in no state dict."""
    for prefix, inner in module.named_modules():
        for name in inner._non_persistent_buffers_set:
            if (buffer := inner._buffers.get(name)) is not None:
                yield f"{prefix}.{name}".removeprefix("."), buffer
