"""Which models have layers that keep something else, and their replacement in a private copy."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from gapless.model.hybrid import lfm2, qwen4_exp
from gapless.model.hybrid.layer import HybridLayer, Operations

HYBRID_LAYER_TYPES: dict[str, frozenset[str]] = {
    "lfm2": frozenset({"conv"}),
    "lfm2_moe": frozenset({"conv"}),
    "qwen4_exp_text": frozenset({"linear_attention", "indexed_attention", "qwen_sparse_attention"}),
}
"""By ``model_type`` of the config: layer types that are run by parts of this package. `replace_layers` knows them."""


def replace_layers(model: PreTrainedModel, *, max_model_len: int, num_drafts: int = 0) -> list[HybridLayer]:
    """Let the layers of a private copy that need it run packed; in the order of the layers. Empty for other models.

    Args:
        model: is changed.
        max_model_len: longest context that will be asked for.
        num_drafts: most tokens of a step that may be taken back.

    Raises:
        UnsupportedModelError: a layer does not have the parts that it should have.
    """
    kind = getattr(model.config, "model_type", None)
    if kind not in HYBRID_LAYER_TYPES:
        return []
    operations = Operations(next(model.parameters()).device)
    base: Any = model.base_model
    replaced: list[HybridLayer] = []
    for i, layer in enumerate(base.layers):
        where = f"{type(model).__name__}: layers.{i}"
        if kind == "qwen4_exp_text":
            new: HybridLayer | None = qwen4_exp.hybrid(
                layer, where, model, operations, max_model_len=max_model_len, num_drafts=num_drafts
            )
        else:
            new = lfm2.hybrid(layer, where, model, operations)
        if new is not None:
            new.install()
            replaced.append(new)
    return replaced
