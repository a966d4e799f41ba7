"""Python state that a forward reads, in a model object that an engine was made from: followed, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from engines import OPTIONS
from gapless import LLM, SamplingParams, WeightError
from gapless.model.weights import Weights
from models import tiny

PROMPT = list(range(5, 14))
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@pytest.fixture
def adapted() -> Iterator[tuple[Any, Any, LLM]]:
    """PEFT's wrapper, the decoder in it, and an engine made from that."""
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    peft = get_peft_model(tiny("llama"), config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    model = peft.base_model.model
    with LLM(model, **OPTIONS) as llm:
        yield peft, model, llm


def want(model: Any) -> list[int]:
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, min_new_tokens=10, do_sample=False
        )
    return out[0, len(PROMPT) :].tolist()  # type: ignore[no-any-return]


def got(llm: LLM) -> list[int]:
    return list(llm.generate({"prompt_token_ids": PROMPT}, GREEDY, use_tqdm=False)[0].outputs[0].token_ids)


def test_peft_is_followed_through_merging_and_disabling(adapted: tuple[Any, Any, LLM]) -> None:
    peft, model, llm = adapted
    steps: list[Callable[[], Any]] = [
        lambda: None,
        peft.merge_adapter,
        peft.unmerge_adapter,
        peft.base_model.disable_adapter_layers,
        peft.base_model.enable_adapter_layers,
        lambda: [layer.scaling.update(default=0.7) for layer in peft.modules() if hasattr(layer, "lora_A")],
        model.train,
        model.eval,
    ]
    seen = set()
    for step in steps:
        step()
        model.eval()
        llm.update_weights()
        expected = want(model)
        assert got(llm) == expected
        seen.add(tuple(expected))
    assert len(seen) >= 3


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a module was replaced": (
        lambda m: setattr(m.model.layers[0], "mlp", nn.Identity()), "layers.0.mlp.*",
    ),
    "an epsilon": (lambda m: setattr(m.model.norm, "variance_epsilon", 0.1), "'model.norm' had variance_epsilon=.*0.1"),
    "attention's scale": (lambda m: setattr(m.model.layers[1].self_attn, "scaling", 2.0), "scaling=.*2.0"),
    "a forward": (lambda m: setattr(m.model.norm, "forward", lambda x: x), "'model.norm' has another forward"),
    "an unsaved buffer": (lambda m: m.model.rotary_emb.inv_freq.mul_(2), "buffer 'model.rotary_emb.inv_freq'"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_read_once_is_refused_by_name(change: str) -> None:
    model = copy.deepcopy(tiny("llama"))
    with LLM(model, **OPTIONS) as llm:
        assert llm.update_weights() == 1
        do, words = CHANGES[change]
        do(model)
        with pytest.raises(WeightError, match=words):
            llm.update_weights()
        assert llm.weight_version == 1


def test_where_steps_were_captured_flags_are_refused_until_they_are_as_before(adapted: tuple[Any, Any, LLM]) -> None:
    peft, model, _ = adapted
    weights = Weights(copy.deepcopy(model), model)
    peft.base_model.disable_adapter_layers()
    with pytest.raises(WeightError, match=r"_disable_adapters=False .* now True.* enforce_eager=True .*new engine"):
        weights.prepare(follow=False)
    peft.base_model.enable_adapter_layers()
    assert not weights.prepare(follow=False).flags
