"""Shapes: how the sizes of a step are padded. A CPU runs exact sizes; a GPU runs captured graphs of a few sizes."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from gapless.batch.plan import StepPlan


@dataclass(frozen=True, slots=True)
class Shapes:
    """Buckets of padded sizes; none means exact sizes.

    Attributes:
        capture: steps are captured as graphs, one for each slot and key.
        seq_buckets: sizes S of steps in which each sequence has one token (T = S).
        token_buckets: sizes T of all other steps; their S is the largest of ``seq_buckets``.

    A step with drafts and no prompt has room for K drafts of each sequence, or of an eighth of them; see
    `StepPlan.query_width`.
    """

    capture: bool = False
    seq_buckets: tuple[int, ...] = ()
    token_buckets: tuple[int, ...] = ()

    def pad(self, plan: StepPlan) -> tuple[int, int]:
        """Padded (T, S) of a step."""
        t, s = plan.num_tokens, plan.num_seqs
        if not self.seq_buckets:
            return t, s
        if plan.decode_only:
            s = self.seq_buckets[bisect.bisect_left(self.seq_buckets, s)]
            return s, s
        if plan.max_query_len is not None:
            s = self.seq_buckets[bisect.bisect_left(self.seq_buckets, s)]
            return next(size for size in self.draft_tokens(s, plan.query_width) if size >= t), s
        return self.token_buckets[bisect.bisect_left(self.token_buckets, t)], self.seq_buckets[-1]

    @staticmethod
    def draft_tokens(num_seqs: int, query_width: int) -> tuple[int, ...]:
        """The sizes T of steps with drafts and no prompt, for S = ``num_seqs``, from the smallest."""
        drafting = (num_seqs // 8, num_seqs) if num_seqs >= 16 else (num_seqs,)
        return tuple(num_seqs + (query_width - 1) * count for count in drafting)

    def largest(self, max_num_tokens: int, max_num_seqs: int, query_width: int = 1) -> tuple[int, int]:
        """The largest (T, S) that `pad` can give."""
        if not self.seq_buckets:
            return max_num_tokens, max_num_seqs
        return max(self.token_buckets[-1], self.seq_buckets[-1] * query_width), self.seq_buckets[-1]


EXACT = Shapes()


def graph_shapes(max_num_seqs: int, max_num_tokens: int, *, capture: bool = True) -> Shapes:
    """Buckets for a GPU: fine where decode batches live, a third apart for mixed steps."""
    seqs = [s for s in (1, 2, 4, 8, *range(16, 257, 16), *range(288, 8193, 32)) if s < max_num_seqs]
    tokens = [t for k in range(5, 18) for t in (2**k, 3 * 2 ** (k - 1)) if t < max_num_tokens]
    return Shapes(capture, (*seqs, max_num_seqs), (*tokens, max_num_tokens))
