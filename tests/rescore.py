"""Re-scoring: how far below the best token each emitted token lies, by the model's own forward in ``transformers``.

Teacher-forced: the model reads a prompt with its whole output once, and its logits before each output token are
compared with that token. Two right implementations may choose differently where two tokens are nearly equal, and
everything after such a place differs; this measure does not see that, and sees every wrong token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Gaps:
    """Best logit minus the emitted token's, over all emitted tokens.

    ``best``: tokens that are the reference's own choice. ``worst``: (prompt, place in its output) of ``max``.
    """

    tokens: int
    best: int
    max: float
    mean: float
    worst: tuple[int, int]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a result file."""
        return asdict(self)

    def __str__(self) -> str:
        share = 100 * self.best / max(self.tokens, 1)
        return (
            f"{self.tokens} tokens, {share:.2f} % the reference's best, gap mean {self.mean:.5f} max {self.max:.4f} "
            f"(prompt {self.worst[0]}, token {self.worst[1]})"
        )


@torch.no_grad()
def own_noise(model: Any, wide: Any, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> float:
    """The largest gap of the reference's own choices, judged by the same model in more precision.

    At each place of the same texts: the best logit of ``wide`` minus its logit of the token that ``model`` finds best.
    """
    device, largest = next(model.parameters()).device, 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([[*prompt, *output]], device=device)
        options = {"input_ids": ids, "use_cache": False, "logits_to_keep": len(output) + 1}
        choices = model(**options).logits[0, :-1].argmax(-1, keepdim=True)
        logits = wide(**options).logits[0, :-1].float()
        largest = max(largest, float((logits.amax(-1) - logits.gather(1, choices)[:, 0]).max()))
    return largest


@torch.no_grad()
def rescore(model: Any, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> Gaps:
    """Gaps of greedy ``outputs``.

    Args:
        model: a ``transformers`` causal LM with its own attention, in the dtype that counts.
        prompts, outputs: token ids, one entry per request.
    """
    device = next(model.parameters()).device
    rows: list[torch.Tensor] = []
    where: list[tuple[int, int]] = []
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        if not output:
            continue
        ids = torch.tensor([[*prompt, *output]], device=device)
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(output) + 1).logits[0, :-1].float()
        chosen = logits.gather(1, ids[0, -len(output) :, None])[:, 0]
        rows.append((logits.amax(-1) - chosen).cpu())
        where += [(i, k) for k in range(len(output))]
    gaps = torch.cat(rows).nan_to_num(nan=float("inf"))
    worst = int(gaps.argmax())
    return Gaps(len(gaps), int((gaps == 0).sum()), float(gaps[worst]), float(gaps.mean()), where[worst])
