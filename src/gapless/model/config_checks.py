"""What a configuration alone shows: what would be computed wrongly, models that write no text, the longest context.

Looked at before weights are read, so that a refusal costs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig

from gapless.errors import UnsupportedModelError
from gapless.model.hybrid.replace import HYBRID_LAYER_TYPES

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
ROPE_TYPES = frozenset({"default", "linear", "yarn", "llama3", "proportional", "longrope"})
UNBOUNDED = 1 << 20
"""Longest context of a model whose config names no limit."""

_NO_TEXT = (
    (r"SequenceClassification|TokenClassification|MultipleChoice|ImageClassification", "a classifier"),
    (r"QuestionAnswering", "a model that marks answers in a text"),
    (r"Reward|ValueHead|ProcessReward", "a reward model"),
    (r"MaskedLM|NextSentence|PreTraining$", "a model that fills gaps"),
    (r"Eagle|Medusa", "a head that drafts for another model"),
    (r"(?<!LMHead)Model$", "a model without the head that chooses tokens, as those for embeddings are"),
)
"""Ends of class names in ``architectures``, and what such a model is."""


def check_config(config: PreTrainedConfig) -> None:
    """Refuse what the configuration shows.

    Raises:
        UnsupportedModelError: naming the part.
    """
    kind = config.model_type or type(config).__name__
    _check_purpose(kind, config)
    _check_quantization(kind, config)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{kind}: encoder-decoder models are not supported, only decoders")
    for part in ("vision_config", "audio_config", "text_config"):
        if getattr(config, part, None) is not None:
            raise UnsupportedModelError(
                f"{kind}: has a {part}; only models of text alone are supported, load the text part"
            )
    if getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", None):
        raise UnsupportedModelError(f"{kind}: attends in both directions; only causal attention is supported")
    allowed = LAYER_TYPES | HYBRID_LAYER_TYPES.get(str(config.model_type), frozenset())
    odd = sorted({str(t) for t in getattr(config, "layer_types", None) or ()} - allowed)
    if odd:
        raise UnsupportedModelError(
            f"{kind}: layers of type {', '.join(odd)} are not supported, only {names(allowed)}"
        )
    for rope in _rope_parameters(config):
        rope_type = rope.get("rope_type", "default")
        if rope_type == "dynamic":
            raise UnsupportedModelError(
                f"{kind}: RoPE type 'dynamic' scales by the longest row of a batch, so that rows would "
                "change each other; set rope_parameters to 'yarn' or 'linear' with a fixed factor"
            )
        if rope_type not in ROPE_TYPES:
            raise UnsupportedModelError(
                f"{kind}: RoPE type {rope_type!r} is not supported, only {names(ROPE_TYPES)}"
            )


def _check_purpose(kind: str, config: PreTrainedConfig) -> None:
    """A model that was saved for something else loads without an error, and its answers are noise."""
    for name in getattr(config, "architectures", None) or ():
        for pattern, what in _NO_TEXT:
            if re.search(pattern, str(name)):
                raise UnsupportedModelError(
                    f"{kind}: {name} is {what}; only models that generate text (...ForCausalLM) are supported"
                )


def _check_quantization(kind: str, config: PreTrainedConfig) -> None:
    options = getattr(config, "quantization_config", None) or getattr(config, "compression_config", None)
    if options:
        plain = options if isinstance(options, dict) else options.to_dict()
        method = plain.get("quant_method") or plain.get("quant_algo") or "an unnamed method"
        raise UnsupportedModelError(
            f"{kind}: its weights are quantized with {getattr(method, 'value', method)}, which is not supported; give "
            "the folder of the unquantized model, or a GGUF file"
        )


def longest_context(config: PreTrainedConfig) -> int:
    """Tokens that a model was made for: what its config says, or what the scaling of its rotary embedding makes of it.

    A YaRN or llama3 factor stretches the original length, and a linear one ``max_position_embeddings``, which the
    documentation of ``transformers`` asks not to change along. Scalings of some layers only stretch nothing.
    """
    stated = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if not stated:
        return UNBOUNDED
    limit, parameters = int(stated), getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict) or any(isinstance(value, dict) for value in parameters.values()):
        return limit
    factor, original = parameters.get("factor"), parameters.get("original_max_position_embeddings")
    if not isinstance(factor, int | float):
        return limit
    if parameters.get("rope_type") not in ("yarn", "llama3", "linear"):
        return limit
    return max(limit, int(factor * (original or limit)))


def _rope_parameters(config: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """A config's RoPE parameters: one dictionary, or one for each layer type."""
    parameters = getattr(config, "rope_parameters", None)
    if isinstance(parameters, dict):
        if any(isinstance(value, dict) for value in parameters.values()):
            yield from (value for value in parameters.values() if isinstance(value, dict))
        else:
            yield parameters


def names(values: Any) -> str:
    """Sorted, for a message."""
    return ", ".join(sorted(map(str, values)))
