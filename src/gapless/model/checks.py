"""What the engine would compute wrongly is found here, and refused by name, before a request can meet it.

Two looks at a loaded model; `gapless.model.config_checks` comes before them, and `gapless.model.probe` after.
1. `check_modules`: the module tree: parts that mix tokens and are not attention.
2. `survey`: one forward of a few tokens with a recording attention function. It tells for each layer what its
   attention is called with, and which mask the model asks ``transformers`` for. The mask is a function of
   (query position, key position): it is evaluated on a grid around every edge that matters, and must be what
   our attention computes, causal or a causal window.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gapless.attention.context import AttentionParams
from gapless.cache.spec import COMPUTE_DTYPES, KVSpec
from gapless.errors import UnsupportedModelError
from gapless.model.config_checks import longest_context

logger = logging.getLogger("gapless")

MIXERS = re.compile(
    "Mamba|DeltaNet|LinearAttention|ShortConv|Lightning|Recurrent|R[Ww][Kk][Vv]|SSM|xLSTM|Indexer"
)
"""Class names of parts that carry state from token to token outside of attention."""

SURVEY_NAME = "gapless_survey"
HARMLESS = frozenset(
    {"dropout", "is_causal", "position_ids", "use_cache", "output_attentions", "position_embeddings"}
)
"""Keyword arguments that change nothing here: no dropout, causal by definition, positions known."""


def check_modules(model: PreTrainedModel, known: Iterable[nn.Module] = ()) -> None:
    """Refuse parts that mix tokens and are not attention: a convolution would mix packed neighbours.

    Args:
        model: the module tree.
        known: parts of it that this package runs itself (see `gapless.model.hybrid`).

    Raises:
        UnsupportedModelError: naming the module and its class.
    """
    inside = {id(module) for part in known for module in part.modules()}
    for name, module in model.named_modules():
        if id(module) in inside:
            continue
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.RNNBase) or MIXERS.search(type(module).__name__):
            raise UnsupportedModelError(
                f"{type(model).__name__}: {name} ({type(module).__name__}) carries state from "
                "token to token outside of attention, which is not supported"
            )


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Let every layer of ``model`` call the attention function registered under ``name``.

    Raises:
        UnsupportedModelError: the model does not go through ``AttentionInterface``.
    """
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise UnsupportedModelError(
            f"{type(model).__name__}: its attention cannot be replaced (no AttentionInterface)"
        )


def fix_longrope(model: PreTrainedModel, max_model_len: int | None) -> int:
    """Fix the factors of RoPE "longrope" and return the longest context.

    ``transformers`` chooses between short and long factors by the longest row of each batch, so that a row
    would change its neighbours, and its own earlier keys. Here the choice is made once: the short ones if
    ``max_model_len`` is None or within the original context, which is then the limit; else the long ones.
    ``model`` must be a private copy; its buffer is replaced, not written.
    """
    limit = longest_context(model.config)
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if kinds == "longrope":
            original = int(model.config.rope_parameters["original_max_position_embeddings"])
            long = max_model_len is not None and max_model_len > original
            buffer: torch.Tensor = module.inv_freq
            frequencies, module.attention_scaling = ROPE_INIT_FUNCTIONS["longrope"](
                model.config, buffer.device, seq_len=original + 1 if long else original
            )
            module.register_buffer("inv_freq", frequencies, persistent=False)
            module.rope_type = "default"  # nothing recomputes it any more
            limit = limit if long else min(limit, original)
            if long:
                logger.warning(
                    "%s: RoPE 'longrope' runs with its long factors for every prompt, as max_model_len=%d asks; "
                    "transformers takes the short ones up to %d tokens. For its answers to those set max_model_len=%d",
                    type(model).__name__, max_model_len, original, original,
                )  # fmt: skip
        elif isinstance(kinds, dict) and "longrope" in kinds.values():
            raise UnsupportedModelError(
                f"{type(model).__name__}: RoPE type 'longrope' in some layers only is not supported"
            )
    return limit


@dataclass(frozen=True, slots=True)
class SurveyedLayer:
    """One attention layer as the model calls it, in order of the calls."""

    module: nn.Module
    kv_spec: KVSpec
    params: AttentionParams


@dataclass(frozen=True, slots=True)
class Survey:
    """Result of `survey`. ``vocab_size`` is the width of the logits."""

    layers: tuple[SurveyedLayer, ...]
    vocab_size: int


@dataclass(frozen=True, slots=True)
class _Call:
    module: nn.Module
    query: torch.Size
    key: torch.Size
    value: torch.Size
    dtype: torch.dtype
    mask: torch.Tensor | None
    scaling: float | None
    options: dict[str, Any]


def survey(model: PreTrainedModel, max_position: int, others: int = 0) -> Survey:
    """Run a few tokens with a recording attention function; check every call and every mask.

    ``model`` must be a private copy. It is left with the recording function set. ``others`` of its layers are run by
    parts of this package and let the survey by.

    Raises:
        UnsupportedModelError: naming the layer and what is wrong with it.
    """
    set_attention(model, SURVEY_NAME)
    kind, calls = type(model).__name__, list[_Call]()
    device = next(model.parameters()).device
    ids = torch.zeros(1, 4, dtype=torch.long, device=device)
    try:
        with torch.no_grad():
            output = model(
                input_ids=ids,
                position_ids=torch.arange(4, device=device)[None],
                attention_mask=None,
                use_cache=False,
                logits_to_keep=torch.tensor([3], device=device),
                gapless_step=calls,
            )
    except (TypeError, KeyError, AttributeError) as error:
        raise UnsupportedModelError(f"{kind}: cannot be called with packed tokens: {error}") from error
    if output.logits.shape[:2] != (1, 1):
        raise UnsupportedModelError(f"{kind}: does not take logits_to_keep as a tensor of token indices")
    _check_count(model, calls, others)
    layers = tuple(_checked(kind, model.config, call, max_position) for call in calls)
    return Survey(layers, int(output.logits.shape[-1]))


def _check_count(model: PreTrainedModel, calls: list[_Call], others: int = 0) -> None:
    """Each other decoder layer calls attention exactly once, each call from a module of its own."""
    kind, expected = type(model).__name__, getattr(model.config, "num_hidden_layers", 0) - others
    seen = {id(call.module) for call in calls}
    if len(seen) < len(calls):
        raise UnsupportedModelError(
            f"{kind}: an attention layer runs more than once per token, which is not supported"
        )
    if len(calls) != expected:
        without = sorted(
            {
                type(layer).__name__
                for layer in getattr(model.base_model, "layers", ())
                if not any(id(module) in seen for module in layer.modules())
            }
        )
        hint = f"; without any: {', '.join(without)}" if without else ""
        raise UnsupportedModelError(f"{kind}: {len(calls)} attention calls in {expected} layers{hint}")


def _checked(kind: str, config: PreTrainedConfig, call: _Call, max_position: int) -> SurveyedLayer:
    where = f"{kind}, layer {getattr(call.module, 'layer_idx', '?')} ({type(call.module).__name__})"
    options = {
        k: v for k, v in call.options.items() if v is not None and v is not False and k not in HARMLESS
    }
    window, softcap, sinks = (options.pop(name, None) for name in ("sliding_window", "softcap", "s_aux"))
    if options:
        raise UnsupportedModelError(
            f"{where}: attention is called with {_names(options)}, which is not supported"
        )
    heads, kv_heads, size = call.query[1], call.key[1], call.query[3]
    if call.key[3] != call.value[3] or call.key[3] != size:
        raise UnsupportedModelError(
            f"{where}: head sizes of key ({call.key[3]}) and value ({call.value[3]}) must be equal"
        )
    if heads % kv_heads or call.key[2] != call.query[2]:
        raise UnsupportedModelError(f"{where}: {heads} query heads do not share {kv_heads} key heads evenly")
    dtype = str(call.dtype).removeprefix("torch.")
    if dtype not in COMPUTE_DTYPES:
        raise UnsupportedModelError(f"{where}: dtype {dtype} is not supported, only {_names(COMPUTE_DTYPES)}")
    window = _window_of_mask(where, config, call.mask, window, max_position)
    scale = size**-0.5 if call.scaling is None else float(call.scaling)
    params = AttentionParams(scale, window, None if softcap is None else float(softcap), sinks)
    return SurveyedLayer(call.module, KVSpec(kv_heads, size, size, dtype, window), params)


def _window_of_mask(
    where: str, config: PreTrainedConfig, mask: torch.Tensor | None, window: Any, max_position: int
) -> int | None:
    """The window with which our attention equals the mask that the model asked for; None for plain causal.

    The mask is what counts. The ``sliding_window`` that a layer passes along only says what to try first.
    """
    function = getattr(mask, "gapless_mask_function", None)
    if function is None:
        raise UnsupportedModelError(
            f"{where}: builds its attention mask itself, so that it cannot be checked"
        )
    candidates = [
        w for w in (window, getattr(config, "sliding_window", None)) if isinstance(w, int) and w > 0
    ]
    found = ""
    for candidate in dict.fromkeys([*candidates, None]):
        found = _first_difference(function, candidate, [*candidates, *_chunks(config)], max_position)
        if not found:
            # A window that no context can leave is none; its layers can share the others' block table.
            return None if candidate is None or candidate >= max_position else candidate
    raise UnsupportedModelError(f"{where}: its attention mask is neither causal nor a causal window: {found}")


def _first_difference(
    function: Callable[..., Any], window: int | None, edges: list[int], max_position: int
) -> str:
    """Where ``function(batch, head, query, key)`` differs from ours on a grid; empty if nowhere."""
    around = sorted({0, 1, 2, 3, max_position - 1} | {e + d for e in edges for d in (-1, 0, 1)})
    queries = [q for q in around if 0 <= q < max_position]
    steps = sorted({0, 1, 2, 3} | {1 << n for n in range(1, 24)} | {e + d for e in edges for d in (-1, 0, 1)})
    keys = sorted(
        {q - s for q in queries for s in steps if q >= s}
        | {q + s for q in queries for s in (1, 2, 16)}
        | {0, 1}
    )
    q, k = torch.tensor(queries)[None, None, :, None], torch.tensor(keys)[None, None, None, :]
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.long)
    try:
        asked = torch.as_tensor(function(zero, zero, q, k)).expand(1, 1, len(queries), len(keys))
    except (IndexError, RuntimeError, TypeError) as error:
        return f"it depends on more than the two positions ({error})"
    ours = (k <= q) & (k > q - (max_position + max(keys) if window is None else window))
    wrong = (asked != ours).nonzero()  # sync-ok: at load
    if len(wrong) == 0:
        return ""
    _, _, i, j = wrong[0].tolist()  # sync-ok: at load
    sees, ought = bool(asked[0, 0, i, j]), bool(ours[0, 0, i, j])
    return f"query {queries[i]} sees key {keys[j]}: {sees}, with window {window}: {ought}"


def _survey_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    gapless_step: list[_Call] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Records its call in the list that the private keyword argument brings; the result is zeros."""
    if gapless_step is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} does not hand keyword arguments to its attention function"
        )
    gapless_step.append(
        _Call(module, query.shape, key.shape, value.shape, key.dtype, attention_mask, scaling, options)
    )
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


def _survey_mask(
    batch_size: int, *args: Any, mask_function: Callable[..., Any], device: Any = None, **options: Any
) -> torch.Tensor:
    """Stands for a mask and carries the function that the model asked for, to the layers that get it."""
    mask = torch.zeros(batch_size, 1, 1, 1, dtype=torch.bool, device=device)
    mask.gapless_mask_function = mask_function  # type: ignore[attr-defined]
    return mask


AttentionInterface.register(SURVEY_NAME, _survey_attention)
AttentionMaskInterface.register(SURVEY_NAME, _survey_mask)


def _chunks(config: PreTrainedConfig) -> list[int]:
    size = getattr(config, "attention_chunk_size", None)
    return [int(size)] if isinstance(size, int | float) and size and math.isfinite(size) else []


def _names(values: Any) -> str:
    return ", ".join(sorted(map(str, values)))


def refuse_ids_beside_embeddings(module: PreTrainedModel, name: str, *, restore: str) -> None:
    """Run the model's own attention over ids, and over their embeddings alone: both must give the same logits. And over
    embeddings that are no id's: some models look up ids by them.

    Args:
        module: a private copy.
        name: for the message.
        restore: the attention that it has afterwards.

    Raises:
        UnsupportedModelError: they do not, or the model cannot do without ids.
    """
    table = module.get_input_embeddings()
    ids = torch.arange(8, device=table.weight.device)[None] % len(table.weight)
    set_attention(module, "eager")
    try:
        with torch.no_grad():
            expected = module(input_ids=ids, use_cache=False).logits
            got = module(inputs_embeds=table(ids), use_cache=False).logits
            module(inputs_embeds=1.5 * table(ids), use_cache=False)
        reason = "" if torch.equal(got, expected) else "its logits are others without ids"
    except Exception as error:  # whatever the model's code makes of it
        reason = f"it fails without ids ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
    finally:
        set_attention(module, restore)
    if reason:
        raise UnsupportedModelError(f"{name} ({type(module).__name__}) cannot take embeddings for ids: {reason}")
