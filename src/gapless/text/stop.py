"""Stop strings over streamed text.

The strings form an Aho-Corasick automaton (Aho and Corasick, 1975), which reads each character once, so
that the cost of a token depends on its own text only, not on what came before or on how many strings there
are. Its state is the longest end of the text that begins a stop string; exactly that much text is held
back, and nothing more.

**Which match wins.** The one that is *complete* first, as if the text arrived character by character; of
several that end at the same character, the longest. So the result does not depend on how the text was split
into tokens, and no token is generated merely to see whether an earlier start might still match: for
``["abcd", "bc"]`` the text ``abcd`` ends before ``bc``.

**min_tokens.** A match counts when the token that completes it is number ``min_tokens`` or later, counted
from 1; it may begin in earlier tokens. A match that is complete earlier is ordinary text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache


class _Automaton:
    """Node 0 is the root. ``pending[node]``: length of the longest end of the text that begins a stop string."""

    __slots__ = ("children", "fail", "match", "pending")

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.match: list[str | None] = [None]
        depth = [0]
        for string in strings:
            node = 0
            for char in string:
                child = self.children[node].get(char)
                if child is None:
                    child = len(self.children)
                    self.children[node][char] = child
                    self.children.append({})
                    self.match.append(None)
                    depth.append(depth[node] + 1)
                node = child
            self.match[node] = string
        self.fail = [0] * len(depth)
        self.pending = [0] * len(depth)
        todo = deque([0])
        while todo:  # breadth first: a node's fail link is shallower than the node
            node = todo.popleft()
            self.pending[node] = depth[node] if self.children[node] else self.pending[self.fail[node]]
            if self.match[node] is None:
                self.match[node] = self.match[self.fail[node]]
            for char, child in self.children[node].items():
                if node:
                    self.fail[child] = self.step(self.fail[node], char)
                todo.append(child)

    def step(self, node: int, char: str) -> int:
        while True:
            child = self.children[node].get(char)
            if child is not None:
                return child
            if not node:
                return 0
            node = self.fail[node]


@lru_cache(maxsize=256)
def _automaton(strings: tuple[str, ...]) -> _Automaton:
    return _Automaton(strings)


class StopMatcher:
    """Finds the first stop string in the text of one completion. For one thread.

    Args:
        strings: none of them empty, at least one.
        min_tokens: number, from 1, of the first token that may complete a match.
        include: the text keeps the match.
    """

    __slots__ = ("_automaton", "_held", "_include", "_min_tokens", "_node", "matched", "matched_at")

    def __init__(self, strings: Sequence[str], min_tokens: int = 0, *, include: bool = False) -> None:
        if not strings or not all(strings):
            raise ValueError(f"stop strings {list(strings)!r}: at least one is needed and none may be empty")
        self._automaton = _automaton(tuple(strings))
        self._min_tokens = min_tokens
        self._include = include
        self._node = 0
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
        automaton, node = self._automaton, self._node
        step, match = automaton.step, automaton.match
        may_match = num_tokens >= self._min_tokens
        for end, char in enumerate(text, 1):
            node = step(node, char)
            found = match[node]
            if found is not None and may_match:
                self.matched, self.matched_at = found, num_tokens
                text = self._held + text[:end]
                self._held = ""
                return text if self._include else text[: len(text) - len(found)]
        self._node = node
        text = self._held + text
        cut = len(text) - automaton.pending[node]
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """The text that was held back, when no more will come."""
        text, self._held = self._held, ""
        return text
