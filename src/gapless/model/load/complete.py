"""Whether a checkpoint is the model that its config describes: what ``transformers`` only reports is refused here.

A tensor that is missing would be drawn at random, one that nothing takes says that the config is another model's, and
one of another shape is both.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from transformers import PreTrainedModel

from gapless.errors import ConfigError
from gapless.model.load.files import some

logger = logging.getLogger("gapless")

REDUNDANT = re.compile(r"(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached)|rope\.freqs|position_ids)$")
"""Buffers of old checkpoints, which follow from the config."""
ROLES = re.compile(
    r"(^|\.)("
    r"vision_(tower|model|encoder|embed_tokens|proj)|visual|image_newline|audio_(tower|encoder|model)|speech_encoder|"
    r"(multi_modal|multimodal|mm|vision|audio)_projector|embed_(vision|audio)|connector|talker|code2wav|"
    r"mtp|mtp_layers|nextn|medusa_heads?|eagle|v_head|value_head|reward_head|score|classifier"
    r")\."
)
"""Heads and towers beside the language model, by the name of their module."""


def check_complete(found: dict[str, Any], model: str, allow_missing: Sequence[str] = ()) -> None:
    """Refuse a checkpoint that is not the model's.

    Args:
        found: the loading information of ``from_pretrained``.
        model: what the messages call it.
        allow_missing: names, or patterns with ``*``, of tensors that may be missing. They are then initialised as
            ``transformers`` does for training.

    Raises:
        ConfigError: naming tensors and how many there are.
    """
    missing, unexpected = sorted(found["missing_keys"]), sorted(found["unexpected_keys"])
    allowed = [name for name in missing if matches(name, allow_missing)]
    missing = [name for name in missing if name not in allowed]
    unexpected = [name for name in unexpected if not REDUNDANT.search(name)]
    beside = [name for name in unexpected if ROLES.search(name)]
    unexpected = [name for name in unexpected if name not in beside]
    wrong = [
        f"{name} is {_shape(theirs)} there and {_shape(ours)} in the model"
        for name, theirs, ours in sorted(found["mismatched_keys"])
    ]
    problems = []
    if missing:
        problems.append(f"{_tensors(missing)} missing: {some(missing)}")
    if unexpected:
        problems.append(f"{_tensors(unexpected)} not known to the model: {some(unexpected)}")
    if wrong:
        problems.append(f"{_tensors(wrong)} of another shape: {some(wrong)}")
    problems += [str(error) for error in found.get("error_msgs", ())]
    if problems:
        hint = " Name tensors that may be missing with allow_missing." if missing else ""
        raise ConfigError(
            f"model={model!r}: its weights are not those that its config describes: {'; '.join(problems)}. The files "
            f"are not whole, or the config is another model's.{hint}"
        )
    if allowed:
        logger.warning("%s: %s missing and drawn at random: %s", model, _tensors(allowed), some(allowed))
    if beside:
        parts = sorted({match[2] for name in beside if (match := ROLES.search(name))})
        logger.info("%s: not used: %s (%d tensors)", model, ", ".join(parts), len(beside))


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of ``patterns`` is the name, or matches it."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def check_finite(model: PreTrainedModel, name: str, skip: Iterable[torch.Tensor] = ()) -> None:
    """Refuse weights that are NaN or infinite, with which every answer would be noise.

    Args:
        model: on its device; one pass over its memory, one copy to the host.
        name: what the message calls it.
        skip: parameters that are not looked at.

    Raises:
        ConfigError: naming the tensors.
    """
    left = {id(tensor) for tensor in skip}
    named = [
        (key, tensor)
        for key, tensor in model.named_parameters()
        if tensor.is_floating_point() and tensor.numel() and tensor.itemsize > 1 and id(tensor) not in left
    ]
    if not named:
        return
    with torch.no_grad():  # the ends of the range are NaN if any value is
        ends = torch.stack([torch.stack(torch.aminmax(tensor)).float() for _, tensor in named])
        fine = ends.isfinite().all(1).tolist()  # sync-ok: at load
    broken = [key for (key, _), ok in zip(named, fine, strict=True) if not ok]
    if broken:
        raise ConfigError(
            f"model={name!r}: {_tensors(broken)} with NaN or infinite values: {some(broken)}. Fetch the file again; if "
            "it is whole, the model was saved after its training had diverged, or in a dtype too small for it"
        )


def _tensors(names: list[str]) -> str:
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}"


def _shape(size: Iterable[int]) -> str:
    return " x ".join(map(str, size)) or "a number"
