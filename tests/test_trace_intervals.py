"""Interval arithmetic against sets of integers."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gapless.trace.intervals import Intervals, Nested

pairs = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda p: (float(p[0]), float(p[0] + p[1]))))
window = st.tuples(st.integers(0, 30), st.integers(1, 25)).map(lambda p: (float(p[0]), float(p[0] + p[1])))


def points(many: list[tuple[float, float]]) -> set[int]:
    return {x for a, b in many for x in range(int(a), int(b))}


def disjoint(intervals: Intervals) -> bool:
    flat = [x for pair in intervals.pairs() for x in pair]
    return all(a < b for a, b in itertools.pairwise(flat))


@given(pairs)
def test_union(many: list[tuple[float, float]]) -> None:
    union = Intervals.of(many).union()
    assert points(union.pairs()) == points(many)
    assert disjoint(union)
    assert union.total == len(points(many))


@given(pairs, window)
def test_cut_and_gaps_share_the_window(many: list[tuple[float, float]], inside: tuple[float, float]) -> None:
    union = Intervals.of(many).union()
    cut, gaps = union.cut(*inside), union.gaps(*inside)
    assert points(cut.pairs()) == points(many) & points([inside])
    assert points(gaps.pairs()) == points([inside]) - points(many)
    assert cut.total + gaps.total == inside[1] - inside[0]


@given(pairs, pairs)
def test_minus(many: list[tuple[float, float]], other: list[tuple[float, float]]) -> None:
    rest = Intervals.of(many).union().minus(Intervals.of(other).union())
    assert points(rest.pairs()) == points(many) - points(other)
    assert disjoint(rest)


@st.composite
def calls(draw: st.DrawFn, low: int = 0, high: int = 60, depth: int = 3) -> list[tuple[float, float]]:
    """Properly nested spans, as a thread's calls are."""
    out: list[tuple[float, float]] = []
    at = low
    while at < high - 1 and depth and draw(st.booleans()):
        a = draw(st.integers(at, high - 1))
        b = draw(st.integers(a + 1, high))
        out += [(float(a), float(b)), *draw(calls(a, b, depth - 1))]
        at = b
    return out


@given(calls(), window)
def test_innermost(made: list[tuple[float, float]], inside: tuple[float, float]) -> None:
    made = sorted(set(made), key=lambda p: (p[0], -p[1]))
    nested = Nested(np.array([a for a, _ in made]), np.array([b for _, b in made]))
    for time in range(61):
        around = [i for i, (a, b) in enumerate(made) if a <= time < b]
        assert nested.at(time) == (around[-1] if around else -1)
    pieces = nested.pieces(*inside)
    assert pieces[0][0] == inside[0]
    assert pieces[-1][1] == inside[1]
    assert all(p[1] == q[0] for p, q in itertools.pairwise(pieces))
    for a, b, row in pieces:
        assert all(nested.at(t) == row for t in range(int(a), int(b)))
