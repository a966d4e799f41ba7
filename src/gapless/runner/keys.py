"""Key: everything that a captured graph bakes in, and all keys that a step can ask for."""

from __future__ import annotations

from typing import NamedTuple

from gapless.batch.row_params import COMBINATIONS, Feature
from gapless.runner.shapes import Shapes

DRAWS = Feature.SAMPLE | Feature.FILTER


class Key(NamedTuple):
    """Everything that a captured graph bakes in, but for the slot. Sizes are padded; a sample's T is its logits.

    ``part`` is ``forward`` or ``sample``, in steps with drafts also ``draft``, and in steps with grammars ``mask``.
    ``query_width`` and ``max_query_len`` are as in the plan.
    """

    part: str
    num_tokens: int
    num_seqs: int
    decode_only: bool
    features: Feature = Feature.GREEDY
    lora: bool = False  # of a forward: some row has an adapter
    query_width: int = 1
    max_query_len: int | None = None


MASK = Key("mask", 0, 0, False)
"""Of the kernel that writes masks: how many there are is read on the device."""


def graph_keys(shapes: Shapes, *, masks: bool, lora: bool, query_width: int, drafts_draw: bool) -> list[Key]:
    """Everything that a step can ask for: forwards by shape, samples by number of logits and features. Largest first,
    so that later captures find their memory in the pool.

    Args:
        shapes: with buckets.
        masks: steps may await some.
        lora: rows may have adapters.
        query_width: of steps with drafts; 1 if there are none.
        drafts_draw: drafts depend on whether rows draw.
    """
    widest = shapes.seq_buckets[-1]
    forwards = [Key("forward", t, widest, False) for t in shapes.token_buckets]
    forwards += [Key("forward", s, s, True) for s in shapes.seq_buckets]
    if lora:  # before those without, because they need more memory
        forwards = [key._replace(lora=True) for key in forwards] + forwards
    samples = [Key("sample", s, s, False, f) for s in shapes.seq_buckets for f in COMBINATIONS]
    keys = forwards + samples + ([MASK] if masks else [])
    if query_width > 1:
        keys += _draft_keys(shapes, query_width, lora, drafts_draw)
    return sorted(keys, key=lambda key: -key.num_tokens)


def _draft_keys(shapes: Shapes, query_width: int, lora: bool, drafts_draw: bool) -> list[Key]:
    """Those of steps with drafts: without a prompt by S and how many draft; with one by T."""
    widest = shapes.seq_buckets[-1]
    bounded = [(t, s, query_width) for s in shapes.seq_buckets for t in shapes.draft_tokens(s, query_width)]
    mixed = [(t, widest, None) for t in shapes.token_buckets]
    logits = [*bounded, (widest * query_width, widest, None)]
    draws = (Feature.GREEDY, DRAWS) if drafts_draw else (Feature.GREEDY,)
    keys = []
    for part, sizes, features in (
        ("draft", bounded + mixed, draws),
        ("forward", bounded + mixed, (Feature.GREEDY,)),
        ("sample", logits, COMBINATIONS),
    ):
        loras = (True, False) if part == "forward" and lora else (False,)
        keys += [
            Key(part, t, s, False, f, with_lora, query_width, most)
            for with_lora in loras
            for t, s, most in sizes
            for f in features
        ]
    return keys
