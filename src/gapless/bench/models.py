"""Models of real shapes with random weights: they run as fast as real ones and need no download."""

from __future__ import annotations

from typing import Any

import torch

from gapless.bench.workloads import Workload
from gapless.device.memory import require
from gapless.errors import ConfigError, did_you_mean

SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {  # Llama-3.1-8B
        "kind": "Llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
        "max_position_embeddings": 131072, "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "kind": "Qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "tie_word_embeddings": True,
    },
    "llama-1b": {  # Llama-3.2-1B
        "kind": "Llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
        "max_position_embeddings": 131072, "tie_word_embeddings": True,
    },
    "qwen3-4b": {
        "kind": "Qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        "kind": "Qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
        "max_position_embeddings": 32768, "tie_word_embeddings": False,
    },
    "gemma3-4b": {  # the text part
        "kind": "Gemma3", "config": "Gemma3TextConfig", "hidden_size": 2560, "intermediate_size": 10240,
        "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "vocab_size": 262208, "sliding_window": 1024, "max_position_embeddings": 131072,
    },
    "gemma2-2b": {
        "kind": "Gemma2", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 256000,
        "sliding_window": 4096, "max_position_embeddings": 8192,
    },
    "phi4-mini": {
        "kind": "Phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
        "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 200064, "partial_rotary_factor": 0.75,
        "max_position_embeddings": 4096, "tie_word_embeddings": True,
    },
    "olmo2-7b": {
        "kind": "Olmo2", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 100352,
        "max_position_embeddings": 4096, "tie_word_embeddings": False,
    },
    "glm4-9b": {
        "kind": "Glm4", "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 151552,
        "max_position_embeddings": 32768, "tie_word_embeddings": False,
    },
    "nemo-12b": {  # Mistral-Nemo-12B
        "kind": "Mistral", "hidden_size": 5120, "intermediate_size": 14336, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
        "max_position_embeddings": 131072, "sliding_window": None, "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {  # in bfloat16
        "kind": "GptOss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
        "num_experts_per_tok": 4, "sliding_window": 128, "vocab_size": 201088, "max_position_embeddings": 131072,
    },
    "qwen3-30b-a3b-24": {  # 24 of the 48 layers of Qwen3-30B-A3B
        "kind": "Qwen3Moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 151936,
        "max_position_embeddings": 40960, "tie_word_embeddings": False,
    },
    "tiny": {
        "kind": "Llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 10240,
        "max_position_embeddings": 8192, "tie_word_embeddings": False,
    },
}  # fmt: skip


def random_model(shape: str, device: torch.device, dtype: torch.dtype, seed: int = 0, **changes: Any) -> Any:
    """A ``transformers`` model of a named shape with random weights, made on its device.

    Raises:
        ConfigError: there is no shape of that name.
    """
    if shape not in SHAPES:
        raise ConfigError(f"unknown shape {shape!r}.{did_you_mean(shape, SHAPES)} Known: {', '.join(SHAPES)}")
    import transformers

    options = {**SHAPES[shape], **changes}
    kind = options.pop("kind")
    made = getattr(transformers, options.pop("config", f"{kind}Config"))
    config = made(**options, eos_token_id=None, bos_token_id=None, pad_token_id=None)
    refuse_too_large(shape, config, kind, device, dtype)
    torch.manual_seed(seed)
    with device:
        model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)


def refuse_too_large(shape: str, config: Any, kind: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise `ConfigError` if a shape's weights are larger than the memory that is available."""
    import transformers

    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, dtype=dtype)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    known = ", ".join(SHAPES)
    require(device, size, f"shape={shape!r} in {str(dtype).removeprefix('torch.')}", f"Take a smaller one of {known}")


def load_once(name: str, device: torch.device, dtype: str) -> Any:
    """A ``transformers`` model of a folder or a name, to be shared by engines at several depths and by peers."""
    from transformers import AutoModelForCausalLM

    if name == "smollm2":
        from gapless.model.load.smollm2 import get_smollm2

        name = str(get_smollm2())
    if dtype == "auto":
        dtype = "auto" if device.type == "cuda" else "float32"
    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval().requires_grad_(False)


def step_bytes(model: Any, batch: int, context: float) -> float:
    """Bytes that one decode step must read: weights but for the embedding table, and keys and values that are seen.

    Of a mixture of experts those that somebody chose, were all choices alike and independent.
    """
    config = model.config
    weights = 0.0
    for parameter in {id(p): p for p in model.parameters()}.values():
        share = 1.0
        if parameter.dim() == 3:  # experts, stacked
            count = len(parameter)
            chosen = getattr(config, "num_experts_per_tok", count)
            share = 1 - (1 - chosen / count) ** batch
        weights += share * parameter.numel() * parameter.element_size()
    if not config.tie_word_embeddings:
        table = model.get_input_embeddings().weight
        weights -= table.numel() * table.element_size()
    size = next(iter(model.parameters())).element_size()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    seen = sum(min(context, window) if window and kind == "sliding_attention" else context for kind in kinds)
    return float(weights + batch * seen * 2 * config.num_key_value_heads * head_dim * size)


def floor_ms(model: Any, load: Workload, bandwidth: float | None) -> float | None:
    """Least milliseconds of a decode step at the mean context, if reading memory is the limit."""
    if not load.uniform or bandwidth is None:
        return None
    return 1e3 * step_bytes(model, load.batch, load.prompt_lens[0] + load.output_lens[0] / 2) / bandwidth
