"""The rule by which a row stops to draft, against the rule in plain Python."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gapless.batch.plan import SeqFlag, StepPlan
from gapless.batch.row_layout import RowLayout
from gapless.batch.row_params import Feature
from gapless.batch.row_table import RowTable
from gapless.cache.block_tables import BlockTables
from gapless.scheduler.drafting import LONGEST_PAUSE, Drafting
from gapless.speculative_config import SpeculativeConfig
from proof.harness import make_request

WIDTH = 4


def step(rows: np.ndarray) -> StepPlan:
    """All rows draft in it."""
    count = len(rows)
    return StepPlan(
        0, rows, np.zeros(count, np.int32), np.full(count, WIDTH, np.int32),
        np.full(count, SeqFlag.DRAWS | SeqFlag.DRAFTS, np.int32),
        np.zeros(count * WIDTH, np.int32), np.zeros(count * WIDTH, np.bool_), np.zeros((0, 2), np.int32),
        Feature.GREEDY, query_width=WIDTH, max_query_len=WIDTH,
    )  # fmt: skip


class Rule:
    """Of one row: judged after ``patience`` steps, and after a quarter of them where it tries again."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self.config = config
        self.resume_at = self.stopped = 0
        self.accepted: list[int] = []
        self.patience, self.pause = config.patience, config.pause

    def take(self, accepted: int, total: int) -> None:
        """A step has had so many drafts accepted, and the row has ``total`` tokens by then."""
        self.accepted.append(accepted)
        if len(self.accepted) < self.patience:
            return
        if sum(self.accepted) < self.config.min_accepted * len(self.accepted):
            self.stopped += 1
            self.resume_at = total + self.pause if self.config.method == "ngram" else 10**9
            self.pause = min(2 * self.pause, LONGEST_PAUSE)
            self.patience = (self.config.patience + 3) // 4
        else:
            self.patience, self.pause = self.config.patience, self.config.pause
        self.accepted = []


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
@pytest.mark.parametrize("seed", range(6))
def test_who_drafts_follows_the_rule(seed: int, method: str) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    config = SpeculativeConfig(
        method=method, model=None if method == "ngram" else object(), num_speculative_tokens=WIDTH - 1,
        min_accepted=rng.choice([0.5, 1.0]), patience=rng.randint(1, 9), pause=rng.choice([1, 5, 1500]),
    )  # fmt: skip
    table = RowTable(RowLayout(3, 60_000, 16, 64))
    drafting = Drafting(config, BlockTables(table, 9))
    requests = [make_request(i, [2, 3, 4], 59_000) for i in range(3)]
    rows = np.array([table.assign(request) for request in requests], np.int32)
    for row, request in zip(rows.tolist(), requests, strict=True):
        drafting.assign(row, request)
    rules = {row: Rule(config) for row in rows.tolist()}
    luck = [rng.choice([0.0, 0.2, 0.5]) for _ in rows]
    for i in range(600):
        if i % 100 == 0:
            luck = [rng.choice([0.0, 0.2, 0.5]) for _ in rows]
        chosen = drafting.wanted(rows, 1000, prompts=False)
        assert chosen.tolist() == [table.total[row] >= rules[row].resume_at for row in rows.tolist()]
        accepted = np.array([sum(rng.random() < p for _ in range(WIDTH - 1)) for p in luck], np.int32)[chosen]
        own = rows[chosen]
        table.total[own] += 1 + accepted
        drafting._judge(step(own), np.arange(len(own)), np.full(len(own), WIDTH - 1, np.int32), accepted)
        for row, count in zip(own.tolist(), accepted.tolist(), strict=True):
            rules[row].take(count, int(table.total[row]))
        table.total[rows[~chosen]] += rng.choice([1, 40])
    assert drafting.stats.stopped == sum(rule.stopped for rule in rules.values()) > 0
