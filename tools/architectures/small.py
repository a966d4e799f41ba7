"""A tiny random model of any architecture that ``transformers`` can load as a causal language model.

A config class is asked for its defaults, and every field of a known meaning is made small. So an architecture that is
new needs nothing here, as long as it calls its fields as others do.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MOST_PARAMETERS = 20_000_000
LAYERS = 4
SMALL: dict[str, Any] = {
    # sizes
    "vocab_size": 199, "hidden_size": 64, "d_model": 64, "n_embd": 64, "word_embed_proj_dim": 64,
    "intermediate_size": 96, "ffn_dim": 96, "ffn_hidden_size": 96, "n_inner": 96, "head_dim": 16, "rotary_dim": 8,
    "num_hidden_layers": LAYERS, "n_layer": LAYERS, "n_layers": LAYERS, "num_layers": LAYERS,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "n_positions": 256, "max_seq_len": 256, "n_ctx": 256, "seq_length": 256,
    "vocab_size_per_layer_input": 199, "hidden_size_per_layer_input": 16, "laurel_rank": 8, "embedding_size": 64,
    # latent attention
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "qk_head_dim": 24, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 8,
    # experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_k": 2, "moe_intermediate_size": 32, "n_shared_experts": 1, "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    # states
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 8, "mamba_n_groups": 1, "state_size": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    # numbers
    "sliding_window": 10, "attention_window_size": 10, "initializer_range": 0.2, "query_pre_attn_scalar": 16,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip
PARTICULAR: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2},
    "gemma2": {"attn_logit_softcapping": 3.0},
    "qwen3_moe": {"decoder_sparse_step": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "routed_scaling_factor": 1.0},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]], "window_size": 10},
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {  # an indexer that leaves blocks out, n-grams in two layers
        "layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2), "hc_count": 2, "hc_lowrank": 8,
        "ple_layer_ids": [1, 3], "ple_embed_dim": 64, "ngram_vocab_size_base": 100, "heads_per_ngram": 2,
        "indexer_n_heads": 6, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 9,
        "indexer_compress_ratio": 3, "eos_token_id": 1,
    },
}
"""What is worth a test beside the defaults, and what has no default that works."""


class NotSmall(Exception):
    """No small model of this architecture can be made; the message says why."""


def known_types() -> list[str]:
    """Every ``model_type`` that `AutoModelForCausalLM` knows."""
    return sorted(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING)


def class_name(model_type: str) -> str:
    """Name of the type's class; the type itself if there is none."""
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, model_type))


def default_config(model_type: str) -> PreTrainedConfig:
    """The config with its own defaults."""
    try:
        config: PreTrainedConfig = CONFIG_MAPPING[model_type]()
    except Exception as error:
        raise NotSmall(f"no default config: {told(error)}") from error
    return config


def small_config(model_type: str) -> PreTrainedConfig:
    """A config of a tiny model that still has every kind of layer."""
    default = default_config(model_type)
    options = {name: value for name, value in SMALL.items() if _is_set(default, name)}
    if "qk_rope_head_dim" in options:
        options["head_dim"] = options["qk_rope_head_dim"]  # latent attention rotates this part alone
        options["num_key_value_heads"] = options["num_attention_heads"]
        size = options["qk_nope_head_dim"] + options["qk_rope_head_dim"]
        if default.qk_nope_head_dim + default.qk_rope_head_dim == default.v_head_dim:  # else they stay different
            options["v_head_dim"] = size
    options.update(PARTICULAR.get(model_type, {}))
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
    try:
        config: PreTrainedConfig = CONFIG_MAPPING[model_type](**options)
        if kinds and set(kinds) - set(getattr(config, "layer_types", None) or ()):
            config = CONFIG_MAPPING[model_type](**options, layer_types=(kinds * LAYERS)[:LAYERS])
    except Exception as error:
        raise NotSmall(f"no small config: {told(error)}") from error
    return config


def _is_set(config: PreTrainedConfig, name: str) -> bool:
    """Whether the config has a value there that may be another. A field that differs by layer has not."""
    own = getattr(type(config), name, None)
    try:
        value = getattr(config, name, None)
    except Exception:  # whatever a config's own code raises
        return False
    return value is not None and not (isinstance(own, property) and own.fset is None)


def small_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A random model in fp32 with eager attention; what starts as zeros or ones and matters is random as well.

    Raises:
        NotSmall: it is large all the same, or cannot be made.
    """
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        if size > MOST_PARAMETERS:
            raise NotSmall(f"still {size / 1e6:.0f} million parameters")
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
    except NotSmall:
        raise
    except Exception as error:
        raise NotSmall(f"cannot be made: {told(error)}") from error
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "sinks" in name or "ple.conv1d" in name:
                parameter.normal_(std=0.5)
    return model.eval()


def told(error: Exception) -> str:
    """The error in one short line."""
    lines = str(error).replace("`", "'").strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:100]}" if lines else type(error).__name__
