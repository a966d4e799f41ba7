"""The parity probe: the model through the engine's paged attention, against its own eager attention, at load.

Two ragged prompts of random ids run packed in one prefill, with the longer one in two chunks, then some
decode steps, over a small pool with scrambled blocks. The model's eager attention runs each prompt alone,
over all its tokens at once. A model that mixes neighbours of a packed batch, drops positions, or carries
state that the engine does not keep cannot agree. What the probe is too short to see, a window's edge,
`checks.survey` has compared already.
"""

from __future__ import annotations

import math

import torch

from gapless.attention.context import AttentionContext
from gapless.cache.spec import StateSpec
from gapless.errors import UnsupportedModelError
from gapless.model import checks
from gapless.model.adapter import ATTENTION_NAME, TransformersModel
from gapless.model.base import CausalModel

BLOCK_SIZE = 8
LENGTHS = (11, 6)
"""Tokens of the two sequences, prompt and decode steps together."""
CHUNKS = ((5, 3), (3, 0), (1, 1), (1, 1), (1, 1))
"""New tokens of each sequence in each step; 0 leaves the sequence out."""

TOLERANCE = {torch.float32: (1e-3, 2e-3), torch.float16: (2e-2, 0.5), torch.bfloat16: (0.1, 0.5)}
"""Of |difference| / |logits| (2-norms of a token's logits, their mean taken off): for the median of all
tokens and for the largest. An error of the kinds above gives 0.1 to 1.4 in most tokens. Rounding alone gives
1e-6 in fp32, 0.004 in fp16 and 0.03 in bf16 for a real model of 30 layers, as much as its own eager attention
and SDPA differ by; in single tokens more, where it makes a mixture of experts choose another expert."""


def probe_parity(model: TransformersModel, seed: int = 0, *, fast: CausalModel | None = None) -> float:
    """Compare; return the largest relative difference.

    Args:
        model: whose own attention is the truth.
        seed: of the prompts.
        fast: what runs paged, when it is not ``model`` itself but another form of it.

    Raises:
        UnsupportedModelError: it is beyond `TOLERANCE`.
    """
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(model.vocab_size, (n,), generator=generator).to(model.device) for n in LENGTHS]
    expected = _eager(model, prompts)
    differences: list[tuple[float, str]] = []
    for step, (got, ends) in enumerate(_paged(fast or model, prompts, generator)):
        for row, (s, position) in zip(got, ends, strict=True):
            where = f"sequence {s}, position {position}, step {step}"
            differences.append((_relative(row, expected[s][position]), where))
    differences.sort()
    (median, _), (worst, where) = differences[len(differences) // 2], differences[-1]
    rounding = model.dtype
    if rounding == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        rounding = torch.float16  # TF32 has as many bits
    allowed = TOLERANCE[rounding]
    if not (median <= allowed[0] and worst <= allowed[1]):
        raise UnsupportedModelError(
            f"{model.name} ({type(model.module).__name__}): its logits through paged attention differ from "
            f"its own by {median:.2g} of their size in the median and {worst:.2g} at worst ({where}); for "
            f"{str(rounding).removeprefix('torch.')} it may be {allowed[0]:.2g} and {allowed[1]:.2g}. Some "
            "part of it is computed wrongly here."
        )
    return worst


def _relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative difference of two rows of logits; infinite where one is not finite."""
    got, expected = got.double() - got.double().mean(), expected.double() - expected.double().mean()
    difference = float((got - expected).norm() / expected.norm().clamp_min(1e-12))
    return difference if math.isfinite(difference) else math.inf


def _eager(model: TransformersModel, prompts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Logits ``[length, vocab_size]`` of each sequence by the model's own attention."""
    checks.set_attention(model.module, "eager")
    try:
        with torch.no_grad():
            return [model.module(input_ids=ids[None], use_cache=False).logits[0] for ids in prompts]
    finally:
        checks.set_attention(model.module, ATTENTION_NAME)


def _paged(
    model: CausalModel, prompts: list[torch.Tensor], generator: torch.Generator
) -> list[tuple[torch.Tensor, list[tuple[int, int]]]]:
    """For each step its logits ``[S, vocab_size]`` and, for each row of them, (sequence, position)."""
    blocks = [-(-len(ids) // BLOCK_SIZE) for ids in prompts]
    scrambled = torch.randperm(sum(blocks), generator=generator) + 1  # block 0 is the null block
    tables = torch.zeros(len(prompts) + 1, max(blocks), dtype=torch.int32)
    for s, count in enumerate(blocks):
        tables[s, :count] = scrambled[sum(blocks[:s]) :][:count]
    caches = [
        # Stale contents are finite and large, as a used pool's may be.
        torch.full(
            spec.shape(len(tables)) if isinstance(spec, StateSpec) else spec.shape(sum(blocks) + 1, BLOCK_SIZE),
            50.0,
            dtype=getattr(torch, spec.dtype),
            device=model.device,
        )
        for spec in model.kv_specs
    ]
    table = torch.zeros(len(tables), max(map(len, prompts)), dtype=torch.int32, device=model.device)
    for s, tokens in enumerate(prompts):  # what is not computed yet lies there too, and may not be looked at
        table[s, : len(tokens)] = tokens
    done = [0] * len(prompts)
    results = []
    for chunk in CHUNKS:
        rows = [s for s, new in enumerate(chunk) if new]
        starts, ids = [0], list[torch.Tensor]()
        positions: list[int] = []
        for s in rows:
            positions += range(done[s], done[s] + chunk[s])
            ids.append(prompts[s][done[s] : done[s] + chunk[s]])
            done[s] += chunk[s]
            starts.append(len(positions))
        slots = [
            int(tables[s, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE
            for i, s in enumerate(rows)
            for p in positions[starts[i] : starts[i + 1]]
        ]
        context = AttentionContext(
            kv_caches=caches,
            slot_mapping=torch.tensor(slots, device=model.device),
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=model.device),
            seq_lens=torch.tensor([done[s] for s in rows], dtype=torch.int32, device=model.device),
            rows=torch.tensor(rows, dtype=torch.int32, device=model.device),
            block_tables=tables.to(model.device),
            block_size=BLOCK_SIZE,
            decode_only=len(positions) == len(rows),
            token_table=table,
        )
        logits = torch.empty(len(rows), model.vocab_size, dtype=model.dtype, device=model.device)
        model.forward(
            torch.cat(ids),
            torch.tensor(positions, device=model.device),
            context,
            torch.tensor(starts[1:], device=model.device) - 1,
            logits,
        )
        results.append((logits, [(s, done[s] - 1) for s in rows]))
    return results
