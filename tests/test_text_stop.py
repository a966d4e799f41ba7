"""Stop strings against a search of the whole text, however it is split."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.text.stop import StopMatcher


def expected(pieces: list[str], stops: list[str], min_tokens: int) -> tuple[str, str, int] | None:
    """(text, stop string, token number) by brute force: the match that ends first, the longest of those."""
    text = "".join(pieces)
    best: tuple[int, int, str, int] | None = None
    for stop in stops:
        for start in range(len(text)):
            if not text.startswith(stop, start):
                continue
            end = start + len(stop)
            token = next(i for i in range(1, len(pieces) + 1) if len("".join(pieces[:i])) >= end)
            if token >= min_tokens:
                best = min(best, (end, start, stop, token)) if best else (end, start, stop, token)
    return best and (text[: best[1]], best[2], best[3])


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)
PIECES = st.lists(st.text("abc", max_size=4), max_size=12)


@given(PIECES, STOPS, st.integers(0, 6))
@settings(max_examples=600, deadline=None)
def test_against_a_search_of_the_whole_text(pieces: list[str], stops: list[str], min_tokens: int) -> None:
    matcher = StopMatcher(stops, min_tokens)
    want = expected(pieces, stops, min_tokens)
    sent = ""
    for number, piece in enumerate(pieces, 1):
        sent += matcher.push(piece, number)
        if want is not None:
            assert want[0].startswith(sent)  # nothing of the stop string is ever sent
        if matcher.matched is not None:
            break
    if want is None:
        assert matcher.matched is None
        assert sent + matcher.finish() == "".join(pieces)
    else:
        assert (sent, matcher.matched, matcher.matched_at) == want
        assert matcher.finish() == matcher.push("more", number + 1) == ""


@given(PIECES, STOPS)
@settings(max_examples=300, deadline=None)
def test_only_what_may_still_match_is_held(pieces: list[str], stops: list[str]) -> None:
    """What is held is the longest end of the text that begins a stop string, no more and no less."""
    matcher, text, sent = StopMatcher(stops), "", ""
    for number, piece in enumerate(pieces, 1):
        text += piece
        sent += matcher.push(piece, number)
        if matcher.matched is not None:
            return
        ends = [stop[:k] for stop in stops for k in range(1, len(stop)) if text.endswith(stop[:k])]
        assert text[len(sent) :] == max(ends, key=len, default="")


def test_examples() -> None:
    m = StopMatcher(["<end>"])
    assert [m.push(p, i) for i, p in enumerate(["a<e", "nx", "<en", "d>b"], 1)] == ["a", "<enx", "", ""]
    assert (m.matched, m.matched_at) == ("<end>", 4)
    inside = StopMatcher(["b"])
    assert inside.push("abc", 1) == "a"
    never = StopMatcher(["abcd"])
    assert [never.push(c, i) for i, c in enumerate("abc", 1)] == ["", "", ""]
    assert never.finish() == "abc"


def test_which_match_wins() -> None:
    by_characters, at_once = StopMatcher(["abcd", "bc"]), StopMatcher(["abcd", "bc"])
    assert "".join(by_characters.push(c, i) for i, c in enumerate("xabcd", 1)) == "xa"
    assert at_once.push("xabcd", 1) == "xa"
    assert by_characters.matched == at_once.matched == "bc"
    tie = StopMatcher(["cd", "abcd", "d"])
    assert tie.push("xabcd", 1) == "x"
    assert tie.matched == "abcd"


def test_min_tokens_counts_the_completing_token() -> None:
    m = StopMatcher(["ab"], min_tokens=3)
    assert [m.push(t, i) for i, t in enumerate(["ab", "a", "b"], 1)] == ["ab", "", ""]
    assert (m.matched, m.matched_at) == ("ab", 3)


@pytest.mark.parametrize("stops", [[], ["a", ""]])
def test_refused(stops: list[str]) -> None:
    with pytest.raises(ValueError, match="stop strings"):
        StopMatcher(stops)


def test_cost_per_token_is_constant() -> None:
    """Text that always nearly matches, so that 200 characters are held all the time."""
    m = StopMatcher(["a" * 200 + "b"])
    best = []
    for _ in range(12):
        start = time.thread_time()
        for i in range(5000):
            m.push("aaa", i)
        best.append(time.thread_time() - start)
    assert min(best[-4:]) < 3 * min(best[:4])
