"""What would be computed wrongly is refused by name, and the parity probe finds what no name gives away."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gapless.attention import reference
from gapless.errors import UnsupportedModelError
from gapless.model import adapter, checks
from gapless.model.adapter import TransformersModel
from gapless.model.config_checks import check_config
from gapless.model.probe import probe_parity
from models import tiny, tiny_config, tiny_of_config


def refuse(config: Any, match: str) -> None:
    with pytest.raises(UnsupportedModelError, match=match):
        check_config(config)


def test_refused_by_config() -> None:
    conv = tiny_config("Llama")
    conv.layer_types = ["conv", "full_attention", "conv"]  # known of LFM2 only
    refuse(conv, "conv")
    refuse(tiny_config("Llama4Text"), "chunked_attention")
    refuse(tiny_config("Qwen3Next"), "linear_attention")
    refuse(tiny_config("Mamba"), "mamba|linear_attention")
    refuse(tiny_config("T5", num_heads=6, d_kv=8), "encoder-decoder")
    refuse(tiny_config("Gemma3Text", use_bidirectional_attention=True), "both directions")
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    refuse(tiny_config("Llama", rope_parameters=rope), "RoPE type 'dynamic'")


def test_layer_types_are_an_allow_list() -> None:
    config = tiny_config("Qwen2")
    config.layer_types = ["full_attention", "something_new", "full_attention"]
    refuse(config, "something_new")


def test_rope_type_is_an_allow_list_also_per_layer_type() -> None:
    config = tiny_config("Gemma3Text")
    config.rope_parameters = {
        "full_attention": {"rope_type": "default"},
        "sliding_attention": {"rope_type": "spiral"},
    }
    refuse(config, "spiral")


def test_convolution_is_refused_by_module_even_if_the_config_hides_it() -> None:
    model = tiny("lfm2")
    model.config.layer_types = ["full_attention"] * 3
    model.config.model_type = "llama"
    with pytest.raises(UnsupportedModelError, match="ShortConv"):
        TransformersModel(model)


def test_probe_finds_a_convolution_that_no_name_gives_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two checks switched off: the third still refuses, by counting; and the probe, by numbers."""
    model = tiny("lfm2")
    model.config.model_type = "llama"
    monkeypatch.setattr(adapter, "check_config", lambda config: None)
    monkeypatch.setattr(checks, "check_modules", lambda model, known: None)
    with pytest.raises(UnsupportedModelError, match=r"1 attention calls in 3 layers; without any: \w*Layer"):
        TransformersModel(model)
    monkeypatch.setattr(checks, "_check_count", lambda model, calls, others: None)
    with pytest.raises(UnsupportedModelError, match="differ from its own by"):
        probe_parity(TransformersModel(model))


@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "gemma2"])
def test_probe_finds_wrong_attention(kind: str) -> None:
    """A backend that forgets one thing at a time."""
    model = tiny(kind)

    def forgets_the_past(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
        reference.attend(q, k, v, *rest)
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)

    def forgets_constants(*arguments: Any) -> torch.Tensor:
        *front, params, scales = arguments
        return reference.attend(*front, reference.AttentionParams(params.scale * 1.1), scales)

    for backend in (forgets_the_past, forgets_constants):
        with pytest.raises(UnsupportedModelError, match=f"{type(model).__name__}.*differ"):
            probe_parity(TransformersModel(model, attention=backend))
    assert probe_parity(TransformersModel(model)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_probe_passes_in_half_precision(dtype: torch.dtype) -> None:
    for kind in ("llama", "qwen3", "gemma2", "lfm2", "qwen4_exp"):
        assert probe_parity(TransformersModel(tiny(kind, initializer_range=0.1).to(dtype))) < 5e-2


def causal(batch: Any, head: Any, q: Any, k: Any) -> Any:
    return k <= q


def window(size: int) -> Any:
    return lambda batch, head, q, k: (k <= q) & (k > q - size)


@pytest.mark.parametrize("max_position", [40, 32768])
def test_mask_functions(max_position: int) -> None:
    def differs(function: Any, size: int | None, *edges: int) -> str:
        return checks._first_difference(function, size, list(edges), max_position)

    assert differs(causal, None) == ""
    assert differs(window(16), 16, 16) == ""
    for wrong in (
        causal,
        window(15),
        window(17),
        lambda b, h, q, k: (k <= q) & ((k > q - 16) | (k < 2)),  # the first tokens always
        lambda b, h, q, k: (k <= q) & (q // 16 == k // 16),  # chunks
    ):
        assert "sees key" in differs(wrong, 16, 16)
    for wrong in (
        window(16),  # found without knowing its size
        lambda b, h, q, k: (k <= q) | (k < 3),  # a prefix in both directions
        lambda b, h, q, k: (k <= q) & (q // 16 == k // 16),
        lambda b, h, q, k: k < q + 2,
    ):
        assert "sees key" in differs(wrong, None)
    lookup = torch.zeros(4, dtype=torch.long)
    assert "depends on" in differs(lambda b, h, q, k: lookup[q] == lookup[k], None)


def test_mask_that_the_model_changes_is_refused() -> None:
    """A model class that asks for something else than its layers say."""
    model = tiny("llama")
    calls: list[Any] = []

    def prefix(config: Any, **kwargs: Any) -> Any:
        calls.append(config)
        return original(config=config, or_mask_function=lambda b, h, q, k: k < 3, **kwargs)

    module = __import__(type(model).__module__, fromlist=["create_causal_mask"])
    original = module.create_causal_mask
    try:
        module.create_causal_mask = prefix
        with pytest.raises(
            UnsupportedModelError, match="neither causal nor a causal window: query 0 sees key 1: True"
        ):
            TransformersModel(model)
    finally:
        module.create_causal_mask = original
    assert calls


def test_unknown_attention_option_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    attention = type(model.model.layers[0].self_attn)  # type: ignore[union-attr,operator]
    forward = attention.forward
    monkeypatch.setattr(
        attention, "forward", lambda self, *a, **k: forward(self, *a, **{**k, "alibi": torch.ones(6)})
    )
    with pytest.raises(UnsupportedModelError, match=r"LlamaAttention.*alibi"):
        TransformersModel(model)


def test_layer_used_twice_is_refused() -> None:
    model = tiny("llama")
    model.model.layers[2] = model.model.layers[1]  # type: ignore[union-attr,index,operator]
    with pytest.raises(UnsupportedModelError, match="more than once"):
        TransformersModel(model)


def test_model_without_attention_interface_is_refused() -> None:
    config = tiny_config("Bloom", n_head=6, n_layer=3)
    with pytest.raises(UnsupportedModelError, match="Bloom"):
        TransformersModel(tiny_of_config(config))


def test_a_hybrid_layer_of_another_build_is_refused() -> None:
    def refuse_changed(kind: str, match: str, change: Any) -> None:
        model = tiny(kind)
        change(model.base_model.layers[0])
        with pytest.raises(UnsupportedModelError, match=match):
            TransformersModel(model)

    def dilate(conv: Any) -> None:
        conv.dilation = (2,)

    refuse_changed("lfm2", r"layers\.0\.conv \(Lfm2ShortConv\).*gate", lambda x: x.conv.add_module("gate", nn.GELU()))
    refuse_changed("lfm2", r"layers\.0\.conv\.conv is not a depthwise", lambda x: dilate(x.conv.conv))
    refuse_changed("qwen4_exp", r"layers\.0\.ple .*other", lambda x: x.ple.add_module("other", nn.GELU()))
    refuse_changed("qwen4_exp", r"layers\.0\.linear_attn\.conv1d", lambda x: dilate(x.linear_attn.conv1d))
    with pytest.raises(UnsupportedModelError, match="activation 'gelu'"):
        TransformersModel(tiny("qwen4_exp", hidden_act="gelu", output_gate_type="silu"))


def test_probe_finds_a_part_that_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """One mechanism after the other computed as if there were no past."""
    from gapless.model.hybrid import qwen4_exp
    from gapless.model.parts import delta_net, short_conv

    def no_past(x: torch.Tensor, *rest: Any, silu: bool = False, **options: Any) -> torch.Tensor:
        out = x * rest[5][:, -1]
        return torch.nn.functional.silu(out) if silu else out

    def no_state(*arguments: Any) -> torch.Tensor:
        arguments[5].zero_()
        return rule(*arguments)

    def no_context(table: torch.Tensor, *rest: Any) -> torch.Tensor:
        return ids(torch.zeros_like(table), *rest)

    rule, ids = delta_net.gated_delta_rule, qwen4_exp.ngram_ids
    faults = [
        ("lfm2", short_conv, "short_conv", no_past),
        ("qwen4_exp", short_conv, "short_conv", no_past),
        ("qwen4_exp", delta_net, "gated_delta_rule", no_state),
        ("qwen4_exp", qwen4_exp, "ngram_ids", no_context),
    ]
    for kind, module, name, fault in faults:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, fault)
            with pytest.raises(UnsupportedModelError, match="differ from its own by"):
                probe_parity(TransformersModel(tiny(kind)))
        assert probe_parity(TransformersModel(tiny(kind))) < 1e-4


def test_recurrent_module_is_refused() -> None:
    model = tiny("llama")
    model.model.memory = nn.GRU(4, 4)  # type: ignore[union-attr]
    with pytest.raises(UnsupportedModelError, match=r"model\.memory \(GRU\)"):
        TransformersModel(model)
