"""From the tensors of a GGUF file to those of a ``transformers`` model: names, and what llama.cpp's converter "
"changed."""

from __future__ import annotations

import re
from typing import Any

import torch

from gapless.errors import ConfigError
from gapless.model.load.files import some
from gapless.model.load.gguf_file import GgufFile

_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_OTHER: dict[str, dict[str, str]] = {
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "qwen3moe": {"ffn_gate_inp": "mlp.gate"},
}
_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight")
_IN_CONFIG = frozenset({"rope_freqs.weight"})


def tensors_of(file: GgufFile, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The model's tensors by its own names, in fp32.

    Raises:
        ConfigError: tensors that are not known, or of a form that cannot be read.
    """
    names = _LAYER | _OTHER.get(file.architecture, {})
    made: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[str, torch.Tensor]] = {}
    unknown = []
    for name, stored in file.tensors.items():
        if name in _IN_CONFIG:
            continue
        if file.architecture == "qwen3moe" and (match := _EXPERTS.fullmatch(name)):
            experts.setdefault(f"model.layers.{match[1]}.mlp.experts", {})[match[2]] = _values(file, name, stored)
        elif (target := _target(name, names)) is None:
            unknown.append(name)
        else:
            made[target] = _changed(file.architecture, name, _values(file, name, stored), config)
    if unknown:
        raise ConfigError(
            f"model={str(file.path)!r}: {len(unknown)} tensors are not known to the architecture "
            f"{file.architecture!r}: {some(unknown)}. Give the Hugging Face folder of the model"
        )
    for target, parts in experts.items():
        if {"gate", "up"} <= parts.keys():
            made[f"{target}.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
        if "down" in parts:
            made[f"{target}.down_proj"] = parts["down"]
    return made


def _target(name: str, names: dict[str, str]) -> str | None:
    stem, _, end = name.rpartition(".")
    if end not in ("weight", "bias"):
        return None
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.{end}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match is None or match[2] not in names:
        return None
    return f"model.layers.{match[1]}.{names[match[2]]}.{end}"


def _values(file: GgufFile, name: str, stored: tuple[Any, Any]) -> torch.Tensor:
    import gguf

    try:
        return torch.from_numpy(gguf.dequantize(*stored).copy()).to(torch.float32)
    except (NotImplementedError, ValueError) as error:
        where = f"model={str(file.path)!r}: tensor {name} of type {stored[1]!r}"
        raise ConfigError(f"{where} cannot be read: {error}") from error


def _changed(architecture: str, name: str, values: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    if architecture == "llama" and (match := re.search(r"\.attn_([qk])\.", name)):  # RoPE's halves lie interleaved
        heads = config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
        pairs = values.reshape(heads, -1, 2, *values.shape[1:])
        return pairs.transpose(1, 2).reshape(values.shape)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return values - 1  # it is stored as what a norm multiplies by
    return values
