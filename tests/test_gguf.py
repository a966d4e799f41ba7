"""GGUF files of small models, written as llama.cpp's converter writes them, against the models that were written."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from gapless.errors import ConfigError, UnsupportedModelError
from gapless.model.load.gguf_config import ends_of
from gapless.model.load.gguf_file import GgufFile
from gapless.model.load.loading import load_model
from models import VOCAB_SIZE, tiny

gguf = pytest.importorskip("gguf")
CPU = torch.device("cpu")
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
    "input_layernorm": "attn_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
TOKENS = ["<s>", "</s>", "w", "1", "w1", "<|eot_id|>", *(f"w{i}" for i in range(6, VOCAB_SIZE))]
LENGTH = 512


def llama3_factors() -> list[float]:
    """Of Llama 3.1's rule with factor 8, from its paper's bands 1 and 4 around 64 positions, for a head of 8."""
    factors = []
    for i in range(0, 8, 2):
        wave = 2 * math.pi * 10000.0 ** (i / 8)
        smooth = min(max((64 / wave - 1) / 3, 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / 8 + smooth))
    return factors


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GAPLESS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


def write(
    path: Path,
    model: PreTrainedModel,
    architecture: str,
    keys: dict[str, Any] | None = None,
    *,
    drop: tuple[str, ...] = (),
    extra: dict[str, torch.Tensor] | None = None,
    part: tuple[int, int] | None = None,
) -> Path:
    """Write ``model``; ``keys`` are added to the usual ones, those that are None taken away."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    values: dict[str, Any] = {
        "context_length": LENGTH, "embedding_length": 48, "block_count": 3, "feed_forward_length": 80,
        "attention.head_count": 6, "attention.head_count_kv": 2, "rope.freq_base": 10000.0,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "attention.key_length": 8, "attention.value_length": 8,
        "rope.dimension_count": 8,
    }  # fmt: skip
    for name, value in (values | (keys or {})).items():
        key = name if name.startswith(("tokenizer.", "general.", "other.")) else f"{architecture}.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 1, 1, 1, 3, *[1] * (VOCAB_SIZE - 6)])
    writer.add_token_merges(["w 1"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    own = model.state_dict()
    tensors = {_name(name, architecture): _stored(name, own[name], architecture) for name in own}
    if config.tie_word_embeddings:
        tensors.pop("output.weight", None)
    tensors |= extra or {}
    names = [name for name in tensors if name not in drop]
    if part is not None:
        number, count = part
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(names))
        names = names[number::count]
    for name in names:
        writer.add_tensor(name, tensors[name].contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _name(name: str, architecture: str) -> str:
    if "post_attention_layernorm" in name:
        theirs = "post_attention_norm" if architecture.startswith("gemma") else "ffn_norm"
        name = name.replace("post_attention_layernorm", theirs)
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def _stored(name: str, tensor: torch.Tensor, architecture: str) -> torch.Tensor:
    if architecture == "llama" and ("q_proj" in name or "k_proj" in name):  # RoPE's halves lie interleaved there
        return tensor.view(-1, 2, 4, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    if architecture.startswith("gemma") and "norm" in name:
        return tensor + 1
    return tensor


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}, "max_position_embeddings": LENGTH}


PLAIN: dict[str, Any] = {"tie_word_embeddings": False}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=128)
SCALED = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}
FREQS = {"rope_freqs.weight": torch.tensor(llama3_factors())}
GEMMA: dict[str, Any] = {"sliding_window": 10, "query_pre_attn_scalar": 8}
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], dict[str, torch.Tensor]]] = {
    "llama": ("llama", "llama", PLAIN, {}, {}),
    "tied": ("llama", "llama", {"tie_word_embeddings": True}, {}, {}),
    "llama 3.1": ("llama", "llama", PLAIN | rope("llama3", factor=8.0, **BANDS), {}, FREQS),
    "linear": (
        "llama", "llama", PLAIN | rope("linear", factor=4.0),
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {},
    ),
    "mistral": ("mistral", "llama", PLAIN | {"sliding_window": 12}, {"attention.sliding_window": 12}, {}),
    "qwen2": ("qwen2", "qwen2", PLAIN, {}, {}),
    "qwen2, yarn": ("qwen2", "qwen2", PLAIN | YARN, SCALED, {}),
    "qwen3": ("qwen3", "qwen3", PLAIN | {"head_dim": 16}, {
        "attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": None,
    }, {}),
    "gemma2": ("gemma2", "gemma2", GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}, {
        "attention.sliding_window": 10, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0,
    }, {}),
    "gemma3": ("gemma3", "gemma3", GEMMA, {"attention.sliding_window": 10, "rope.freq_base": 1e6}, {}),
    "phi3": ("phi3", "phi3", PLAIN | {"sliding_window": 14}, {"attention.sliding_window": 14}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_file_is_the_model_that_was_written(tmp_path: Path, case: str) -> None:
    kind, architecture, options, keys, extra = CASES[case]
    model = tiny(kind, **options)
    path = write(tmp_path / "m.gguf", model, architecture, keys, extra=extra)
    loaded = load_model(path, device=CPU).model
    ids = torch.arange(3, 163)[None] % VOCAB_SIZE
    with torch.no_grad():
        from transformers import AutoModelForCausalLM

        (folder,) = (tmp_path / "cache" / "gguf").iterdir()
        got = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")(ids).logits
        want = model(ids).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert loaded.eos_token_ids == (1, 5)  # the end of a turn too


def test_tokenizer_template_and_ends(tmp_path: Path, cache: Path) -> None:
    model = tiny("llama", **PLAIN)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    keys = {"tokenizer.chat_template": template, "tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 8}
    loaded = load_model(write(tmp_path / "m.gguf", model, "llama", keys), device=CPU)
    assert loaded.model.eos_token_ids == (1, 7, 8, 5)
    assert AutoTokenizer.from_pretrained(next(cache.iterdir())).chat_template == template
    assert ends_of(GgufFile(Path(), "llama", {}, {})) == []


def refused(path: Path, *says: str) -> None:
    with pytest.raises((ConfigError, UnsupportedModelError)) as caught:
        load_model(path, device=CPU)
    for text in says:
        assert text in str(caught.value)
    assert not path.parent.joinpath("cache", "gguf").exists() or not any((path.parent / "cache" / "gguf").iterdir())


def test_tensors_that_are_missing_or_unknown(tmp_path: Path) -> None:
    model, path = tiny("llama", **PLAIN), tmp_path / "m.gguf"
    hole = write(path, model, "llama", drop=("blk.1.ffn_up.weight",))
    refused(hole, "1 tensor missing", "model.layers.1.mlp.up_proj")
    refused(write(path, model, "llama", {"block_count": 4}), "9 tensors missing")
    refused(write(path, model, "llama", {"block_count": 2}), "9 tensors not known")
    refused(write(path, model, "llama", {"feed_forward_length": 96}), "9 tensors of another shape")
    refused(write(path, model, "llama", extra={"blk.0.attn_sinks.weight": torch.ones(6)}), "blk.0.attn_sinks.weight")
    refused(write(path, model, "qwen2", {}), "missing", "q_proj.bias")
    refused(write(path, model, "llama", drop=("token_embd.weight",)), "model.embed_tokens.weight")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.clamp_kqv", 8.0),
        ("logit_scale", 0.5),
        ("expert_count", 4),
        ("something.new", 1),
        ("rope.scaling.yarn_log_multiplier", 0.1),
        ("tokenizer.ggml.something_new", 1),
        ("other.key", 1),
    ],
)
def test_keys_that_are_not_known(tmp_path: Path, key: str, value: Any) -> None:
    refused(write(tmp_path / "m.gguf", tiny("llama", **PLAIN), "llama", {key: value}), "1 keys are not known", key)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"attention.value_length": 4}, "attention.value_length=4"),
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "rope.scaling.type='longrope'"),
        ({"rope.scaling.type": "yarn"}, "factor None"),
        ({"attention.causal": False}, "attention.causal=False"),
        ({"attention.head_count_kv": [2, 1, 2]}, "differs between layers"),
        ({"context_length": None}, "context_length is missing"),
        ({"general.type": "adapter"}, "general.type='adapter'"),
    ],
)
def test_values_that_are_not_read(tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    refused(write(tmp_path / "m.gguf", tiny("llama", **PLAIN), "llama", keys), says)


def test_architectures_that_are_not_read(tmp_path: Path) -> None:
    refused(write(tmp_path / "m.gguf", tiny("llama", **PLAIN), "granite"), "architecture 'granite' are not read")
    refused(write(tmp_path / "m.gguf", tiny("qwen2"), "qwen2", {"attention.sliding_window": 9}), "sliding_window=9")


def test_a_model_in_several_files(tmp_path: Path) -> None:
    model = tiny("llama", **PLAIN)
    paths = [write(tmp_path / f"m-0000{n + 1}-of-00002.gguf", model, "llama", part=(n, 2)) for n in (0, 1)]
    assert load_model(paths[0], device=CPU).model.vocab_size == VOCAB_SIZE
    other = tmp_path / "other"
    other.mkdir()
    paths[0].rename(other / paths[0].name)
    refused(other / paths[0].name, "1 of its 2 files are missing", paths[1].name)
    (other / paths[0].name).rename(other / "one.gguf")
    refused(other / "one.gguf", "one of 2, but its name")


def test_broken_files(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", tiny("llama", **PLAIN), "llama")
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    refused(path, "is cut: it ends before tensor")
    for broken in (b"", b"GGUF", b"nonsense" * 9, data[:200], data[:40] + b"\xff" * 60 + data[100:]):
        path.write_bytes(broken)
        refused(path, "m.gguf", "cannot be read as GGUF")
