"""Random adapters that PEFT itself makes and saves, and what PEFT generates with them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERYTHING = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Kind:
    """An adapter to make. ``size`` scales its random weights."""

    targets: Sequence[str] | str = tuple(EVERYTHING)
    rank: int = 4
    alpha: float = 8
    seed: int = 0
    size: float = 0.3
    options: dict[str, Any] = field(default_factory=dict)


A = Kind(rank=4, seed=1)
B = Kind(
    ("q_proj", "v_proj", "down_proj"), rank=8, alpha=6, seed=2,
    options={"rank_pattern": {"down_proj": 3}, "alpha_pattern": {"layers.1.self_attn.q_proj": 11}},
)  # fmt: skip
C = Kind(("o_proj", "up_proj"), rank=2, alpha=3, seed=3, size=0.5, options={"use_rslora": True})
KINDS = {"a": A, "b": B, "c": C}


def save(model: PreTrainedModel, kind: Kind, folder: Path) -> Path:
    """Make the adapter on a copy of ``model`` and let PEFT save it."""
    targets = kind.targets if isinstance(kind.targets, str) else list(kind.targets)
    config = LoraConfig(
        r=kind.rank, lora_alpha=kind.alpha, target_modules=targets, task_type="CAUSAL_LM", **kind.options
    )
    adapted = get_peft_model(copy.deepcopy(model), config)
    generator = torch.Generator().manual_seed(kind.seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter.copy_(kind.size * torch.randn(parameter.shape, generator=generator))
    adapted.save_pretrained(folder)
    return folder


class Oracle:
    """Greedy tokens by ``transformers`` and PEFT, one prompt at a time."""

    def __init__(self, model: PreTrainedModel, folders: dict[str, Path]) -> None:
        self._base = model
        self._adapted = {
            name: PeftModel.from_pretrained(copy.deepcopy(model), folder).eval() for name, folder in folders.items()
        }

    def logits(self, name: str | None, ids: list[int]) -> torch.Tensor:
        """``[len(ids), vocab_size]``."""
        model = self._base if name is None else self._adapted[name]
        with torch.no_grad():
            logits: torch.Tensor = model(input_ids=torch.tensor([ids])).logits[0]
        return logits

    def generate(self, name: str | None, prompt: list[int], steps: int) -> list[int]:
        """``steps`` tokens, whatever they are."""
        model = self._base if name is None else self._adapted[name]
        result = model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=steps,
            min_new_tokens=steps,
            eos_token_id=-1,
            pad_token_id=0,
        )
        tokens: list[int] = result[0, len(prompt) :].tolist()
        return tokens
