"""From the keys of a GGUF file to a config of ``transformers``. Every key is used, or known to say nothing, or refused.

Names of keys are those of gguf's ``constants.py``; what llama.cpp fixes in its code (Gemma's scales, say) is here.
"""

from __future__ import annotations

import math
from typing import Any

from gapless.errors import ConfigError, UnsupportedModelError
from gapless.model.load.files import some
from gapless.model.load.gguf_file import GgufFile

MODEL_TYPES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "gemma2": "gemma2",
    "gemma3": "gemma3_text", "phi3": "phi3",
}  # fmt: skip
"""Architectures that are read, by GGUF's name."""

_SILENT = ("general.", "split.", "quantize.", "GGUF.", "imatrix.")
"""Beginnings of keys that say where a file comes from and how it is laid out."""
_TOKENIZER = frozenset(
    {
        "model", "pre", "tokens", "token_type", "token_type_count", "scores", "merges", "added_tokens",
        "bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id", "unknown_token_id", "seperator_token_id",
        "padding_token_id", "mask_token_id", "cls_token_id", "fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id",
        "fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id", "prefix_token_id", "suffix_token_id",
        "middle_token_id", "add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix",
        "remove_extra_whitespaces", "precompiled_charsmap",
    }
)  # fmt: skip
END_TEXTS = frozenset(
    {
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>",
        "<|end_of_text|>", "<end_of_utterance>", "<turn|>",
    }
)  # fmt: skip
"""Control tokens that end a turn whatever the keys say, as llama.cpp has it."""
_CONTROL = 3


class _Keys:
    """The keys of the file's architecture; remembers which were asked for."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self._left = {key for key in file.values if key.startswith(f"{file.architecture}.")}

    def get(self, name: str, default: Any = None) -> Any:
        key = f"{self.file.architecture}.{name}"
        self._left.discard(key)
        value = self.file.values.get(key, default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise UnsupportedModelError(f"{_where(self.file)}: {key} differs between layers: not supported")
            value = value[0]
        return value

    def need(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise ConfigError(f"{_where(self.file)}: the key {self.file.architecture}.{name} is missing")
        return value

    def must_be(self, name: str, *allowed: Any) -> None:
        value = self.get(name)
        if value is not None and value not in allowed:
            raise UnsupportedModelError(
                f"{_where(self.file)}: {self.file.architecture}.{name}={value!r} is not supported, only "
                f"{' or '.join(map(repr, allowed))}"
            )

    def refuse_rest(self) -> None:
        known = {f"tokenizer.ggml.{name}" for name in _TOKENIZER}
        others = {
            key
            for key in self.file.values
            if not key.startswith((*_SILENT, f"{self.file.architecture}.", "tokenizer.chat_template"))
            and key not in known | {"tokenizer.chat_templates", "tokenizer.huggingface.json"}
        }
        if left := self._left | others:
            raise UnsupportedModelError(
                f"{_where(self.file)}: {len(left)} keys are not known here, and would change what is computed: "
                f"{some(sorted(left))}. Give the Hugging Face folder of the model"
            )


def config_of(file: GgufFile) -> dict[str, Any]:
    """The fields of a config, ``model_type`` among them.

    Raises:
        UnsupportedModelError: an architecture or a key that is not read; the message names it.
        ConfigError: a key is missing.
    """
    if file.architecture not in MODEL_TYPES:
        raise UnsupportedModelError(
            f"{_where(file)}: GGUF files of architecture {file.architecture!r} are not read, only "
            f"{', '.join(sorted(MODEL_TYPES))}. Give the Hugging Face folder of the model"
        )
    keys, kind = _Keys(file), MODEL_TYPES[file.architecture]
    heads, width = keys.need("attention.head_count"), keys.need("embedding_length")
    rotary = keys.get("rope.dimension_count")
    head_dim = keys.get("attention.key_length") or (width // heads if kind != "llama" else rotary or width // heads)
    keys.must_be("attention.value_length", head_dim)
    keys.must_be("attention.causal", True)
    tokens = file.values.get("tokenizer.ggml.tokens") or []
    config: dict[str, Any] = {
        "model_type": kind,
        "max_position_embeddings": keys.need("context_length"),
        "hidden_size": width,
        "num_hidden_layers": keys.need("block_count"),
        "intermediate_size": keys.need("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.need("attention.layer_norm_rms_epsilon"),
        "vocab_size": keys.get("vocab_size") or len(tokens) or _rows(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope(keys, kind, head_dim, rotary),
        "bos_token_id": file.values.get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": file.values.get("tokenizer.ggml.padding_token_id"),
        "eos_token_id": ends_of(file) or None,
    }
    if kind == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    config |= _window(keys, config)
    if kind.startswith("gemma"):
        config |= _gemma(keys, config)
    if kind == "qwen3_moe":
        config |= {
            "num_experts": keys.need("expert_count"),
            "num_experts_per_tok": keys.need("expert_used_count"),
            "moe_intermediate_size": keys.need("expert_feed_forward_length"),
            "norm_topk_prob": True,  # fixed in llama.cpp
        }
        keys.must_be("expert_shared_count", 0)
        keys.must_be("expert_weights_scale", 1.0)
    keys.refuse_rest()
    return config


def ends_of(file: GgufFile) -> list[int]:
    """Ids that end an answer: of text, turn and message; and control tokens that llama.cpp knows by their text."""
    named = [file.values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, types = file.values.get("tokenizer.ggml.tokens") or [], file.values.get("tokenizer.ggml.token_type") or []
    pairs = enumerate(zip(tokens, types, strict=False))
    known = [i for i, (text, kind) in pairs if kind == _CONTROL and text in END_TEXTS]
    return list(dict.fromkeys(int(id) for id in (*named, *known) if id is not None))


def _rope(keys: _Keys, kind: str, head_dim: int, rotary: int | None) -> dict[str, Any]:
    """Rotary embedding: plain, linear, YaRN, or with a factor for each frequency in a tensor."""
    base = float(keys.get("rope.freq_base", 10000.0))
    partial = {} if rotary in (None, head_dim) else {"partial_rotary_factor": rotary / head_dim}
    if partial and kind != "phi3":
        raise UnsupportedModelError(
            f"{_where(keys.file)}: rope.dimension_count={rotary} of {head_dim} is not supported"
        )
    scaling = keys.get("rope.scaling.type", "none")
    factor = keys.get("rope.scaling.factor")
    original = keys.get("rope.scaling.original_context_length")
    keys.get("rope.scaling.finetuned")  # says how the model was trained, not how it is computed
    keys.must_be("rope.scaling.attn_factor", 1.0)
    keys.must_be("rope.scaling.yarn_ext_factor", 1.0, -1.0)
    keys.must_be("rope.scaling.yarn_attn_factor", 1.0)
    fast, slow = keys.get("rope.scaling.yarn_beta_fast"), keys.get("rope.scaling.yarn_beta_slow")
    long = sorted(name for name in keys.file.tensors if name.startswith("rope_factors_"))
    if long or scaling not in ("none", "linear", "yarn") or (scaling != "none" and not factor):
        what = long or [f"rope.scaling.type={scaling!r} with factor {factor}"]
        raise UnsupportedModelError(
            f"{_where(keys.file)}: {', '.join(what)} cannot be read; give the Hugging Face folder"
        )
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": base, **partial}
    if "rope_freqs.weight" in keys.file.tensors:
        if scaling != "none":
            raise UnsupportedModelError(f"{_where(keys.file)}: rope_freqs.weight beside rope.scaling.type={scaling!r}")
        factors = [float(value) for value in keys.file.tensors["rope_freqs.weight"][0].reshape(-1)]
        if len(factors) != (rotary or head_dim) // 2 or not all(math.isfinite(f) and f > 0 for f in factors):
            raise ConfigError(
                f"{_where(keys.file)}: rope_freqs.weight holds {len(factors)} values, not one per frequency"
            )
        # "longrope" divides each frequency by its own factor; with the same ones for short and long it is just that.
        rope |= {
            "rope_type": "longrope", "short_factor": factors, "long_factor": factors, "factor": 1.0,
            "attention_factor": 1.0, "original_max_position_embeddings": int(keys.need("context_length")),
        }  # fmt: skip
    elif scaling == "linear":
        rope |= {"rope_type": "linear", "factor": float(factor)}
    elif scaling == "yarn":
        length = original or int(keys.need("context_length") / factor)
        rope |= {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": int(length)}
        rope |= {} if fast is None else {"beta_fast": float(fast)}
        rope |= {} if slow is None else {"beta_slow": float(slow)}
    if kind != "gemma3_text":
        return rope
    return {
        "full_attention": rope,
        "sliding_attention": {"rope_type": "default", "rope_theta": float(keys.get("rope.freq_base_swa", 10000.0))},
    }


def _window(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    window, kind = keys.get("attention.sliding_window"), config["model_type"]
    if not window:
        return {}
    if kind == "llama":
        return {"model_type": "mistral", "sliding_window": window}
    if kind in ("phi3", "gemma2", "gemma3_text"):
        return {"sliding_window": window}
    raise UnsupportedModelError(
        f"{_where(keys.file)}: attention.sliding_window={window} is not supported with {keys.file.architecture}"
    )


def _gemma(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Gemma's soft caps, and its scale of attention, which llama.cpp knows by the number of layers."""
    largest = config["num_hidden_layers"] == {"gemma2": 46, "gemma3_text": 62}[config["model_type"]]
    per_head = config["hidden_size"] // config["num_attention_heads"]
    keys.must_be("attention.sliding_window_pattern", {"gemma2": 2, "gemma3_text": 6}[config["model_type"]])
    second = config["model_type"] == "gemma2"
    return {
        "query_pre_attn_scalar": per_head if largest else config["head_dim"],
        "attn_logit_softcapping": keys.get("attn_logit_softcapping", 50.0 if second else None),
        "final_logit_softcapping": keys.get("final_logit_softcapping", 30.0 if second else None),
    }


def _rows(file: GgufFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise ConfigError(f"{_where(file)}: tensor token_embd.weight is missing")
    return int(file.tensors["token_embd.weight"][0].shape[0])


def _where(file: GgufFile) -> str:
    return f"model={str(file.path)!r}"
