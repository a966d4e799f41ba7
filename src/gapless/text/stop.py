"""Stop strings over streamed text.

Of the text, exactly that much is held back that may still become a stop string: the longest end that begins one. So a
token costs a search in its own text and in what is held, however much came before.

**Which match wins.** The one that is *complete* first, as if the text arrived character by character; of
several that end at the same character, the longest. So the result does not depend on how the text was split
into tokens, and no token is generated merely to see whether an earlier start might still match: for
``["abcd", "bc"]`` the text ``abcd`` ends before ``bc``.

**min_tokens.** A match counts when the token that completes it is number ``min_tokens`` or later, counted
from 1; it may begin in earlier tokens. A match that is complete earlier is ordinary text.
"""

from __future__ import annotations

from collections.abc import Sequence


def _first_match(text: str, strings: Sequence[str], known: int) -> tuple[int, int] | None:
    """End and start of the match that is complete first, behind the ``known`` characters that were searched before."""
    best = None
    for string in strings:
        start = text.find(string, max(known - len(string) + 1, 0))
        if start >= 0:
            found = (start + len(string), start)
            best = min(best, found) if best else found
    return best


def _pending(text: str, string: str) -> int:
    """Length of the longest end of the text that begins the string, and is shorter."""
    start = max(len(text) - len(string) + 1, 0)
    while (start := text.find(string[0], start)) >= 0:
        if string.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0


class StopMatcher:
    """Finds the first stop string in the text of one completion. For one thread.

    Args:
        strings: none of them empty, at least one.
        min_tokens: number, from 1, of the first token that may complete a match.
        include: the text keeps the match.
    """

    __slots__ = ("_firsts", "_held", "_include", "_min_tokens", "_strings", "matched", "matched_at")

    def __init__(self, strings: Sequence[str], min_tokens: int = 0, *, include: bool = False) -> None:
        if not strings or not all(strings):
            raise ValueError(f"stop strings {list(strings)!r}: at least one is needed and none may be empty")
        self._strings = tuple(strings)
        self._firsts = frozenset(string[0] for string in strings)
        self._min_tokens = min_tokens
        self._include = include
        self._held = ""
        self.matched: str | None = None
        self.matched_at: int | None = None
        """Number, from 1, of the token that completed ``matched``: the ids end with it."""

    def push(self, text: str, num_tokens: int) -> str:
        """Takes the text of token number ``num_tokens`` and returns what may be sent.

        After a match, ``matched`` is set, the returned text ends where the match begins (or with it, if it is
        included), and no later text is returned.
        """
        if self.matched is not None or not text:
            return ""
        if not self._held and self._firsts.isdisjoint(text):  # nothing can begin here, as nearly always
            return text
        known, text = len(self._held), self._held + text
        match = _first_match(text, self._strings, known) if num_tokens >= self._min_tokens else None
        if match is not None:
            end, start = match
            self.matched, self.matched_at, self._held = text[start:end], num_tokens, ""
            return text[: end if self._include else start]
        cut = len(text) - max(_pending(text, string) for string in self._strings)
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """The text that was held back, when no more will come."""
        text, self._held = self._held, ""
        return text
