"""Tiny random models for tests: seconds to none to build, and with logits that differ enough for greedy
tests.

``tiny_llama()`` and the like return a ``transformers`` causal LM in fp32 on the CPU. Keyword arguments
override the config. The seed fixes the weights. ``tiny("llama", ...)`` takes the kind as a string; `KINDS`
lists them.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers import models as hf_models

VOCAB_SIZE = 199
BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,  # far above a real model's, or random logits would be nearly equal
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": 1,
}
MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
FOUR_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": 12}),
}
MORE_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"sliding_window": 10}),
    "granite": ("Granite", {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 2.0}),
    "gemma2": ("Gemma2", {"sliding_window": 10, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3Text", {"sliding_window": 10, "query_pre_attn_scalar": 8}),
    "phi3": ("Phi3", {"sliding_window": 14}),
    "gpt_oss": ("GptOss", {"sliding_window": 10, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "decoder_sparse_step": 1, **MOE}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
LFM2: dict[str, Any] = {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}
HYBRID_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("Lfm2", LFM2),
    "lfm2_moe": ("Lfm2Moe", {**LFM2, **MOE, "num_experts": 4, "num_dense_layers": 1}),
    "qwen4_exp": (
        "Qwen4ExpText",
        {
            **MOE,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 6,
            "num_experts": 4,
            "shared_expert_intermediate_size": 24,
            "hc_count": 2,
            "hc_lowrank": 6,
            "ple_layer_ids": [1, 4],
            "ple_embed_dim": 32,
            "ngram_size": 3,
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 50,
            "make_ngram_vocab_size_divisible_by": 8,
            "split_ngram_parts": 1,
            "indexer_n_heads": 6,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 9,
            "indexer_compress_ratio": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}
KINDS = {**FOUR_KINDS, **MORE_KINDS, **HYBRID_KINDS}


def tiny_config(name: str, **overrides: Any) -> Any:
    """Config of class ``{name}Config`` with the tiny base, e.g. ``tiny_config("Llama")``."""
    config_class = getattr(hf_models, f"{name}Config")
    return config_class(**{**BASE, **overrides})


def tiny_of_config(config: Any, seed: int = 0) -> PreTrainedModel:
    """A random model of any config, eager attention, eval mode; what is set to one value at first random as well."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("bias", "sinks", "ple.conv1d", "ple.norm")):
                parameter.normal_(std=0.5)
    model.generation_config.eos_token_id = config.eos_token_id
    return model.eval()


def tiny(kind: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model of a kind in `KINDS`."""
    name, options = KINDS[kind]
    return tiny_of_config(tiny_config(name, **{**options, **overrides}), seed)


def tiny_llama(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """3 layers, 6 query and 2 KV heads of 8."""
    return tiny("llama", seed, **overrides)
