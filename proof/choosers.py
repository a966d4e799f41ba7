"""Choosers: who runs next on a simulated device. Each is a function of its arguments, so a failure reproduces."""

from __future__ import annotations

import random
from collections.abc import Sequence

from proof.operations import HOST, STREAMS, Operation

PROCESSES = (HOST, *STREAMS)


class Replay:
    """Takes the recorded choices (`SimulatedDevice.choices`), then any that is left, the host first."""

    def __init__(self, choices: Sequence[str]) -> None:
        self._choices = list(choices)
        self._next = 0

    def __call__(self, options: Sequence[Operation]) -> int:
        if self._next >= len(self._choices):
            return 0
        wanted = self._choices[self._next]
        self._next += 1
        for i, option in enumerate(options):
            if option.stream == wanted:
                return i
        raise RuntimeError(
            f"choice {self._next - 1} of the replay is {wanted!r}, but only {[o.stream for o in options]} could run: "
            "the workload or the engine is not the one that was recorded"
        )


class RandomChooser:
    """Each operation that may run is as likely as any other."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def __call__(self, options: Sequence[Operation]) -> int:
        return self._rng.randrange(len(options))


class PriorityChooser:
    """Probabilistic concurrency testing (S. Burckhardt, P. Kothari, M. Musuvathi, S. Nagarakatte: "A randomized
    scheduler with probabilistic guarantees of finding bugs", ASPLOS 2010).

    Host and streams get random priorities; the highest that may run does. At ``changes`` random moments the one that
    would run falls below all others. A fault that ``changes + 1`` ordered pairs of operations bring out is found with a
    probability of at least 1 / (n * k**changes), for n threads and k operations: here n = 4 and k = ``length``.
    """

    def __init__(self, seed: int, changes: int, length: int) -> None:
        rng = random.Random(seed)
        order = list(PROCESSES)
        rng.shuffle(order)
        self._priority = {name: changes + i for i, name in enumerate(order)}
        moments = rng.sample(range(max(length, changes)), changes)
        self._falls = {moment: i for i, moment in enumerate(moments)}
        self._moment = 0

    def __call__(self, options: Sequence[Operation]) -> int:
        best = max(options, key=lambda o: self._priority[o.stream])
        fall = self._falls.get(self._moment)
        self._moment += 1
        if fall is not None:
            self._priority[best.stream] = fall
            best = max(options, key=lambda o: self._priority[o.stream])
        return list(options).index(best)


class Starve:
    """One thread of execution runs only when nothing else can; the others in order of ``PROCESSES``, or reversed."""

    def __init__(self, starved: str, *, reverse: bool = False) -> None:
        self._starved = starved
        self._reverse = reverse

    def __call__(self, options: Sequence[Operation]) -> int:
        indices = [i for i, option in enumerate(options) if option.stream != self._starved]
        if not indices:
            return 0
        return indices[-1] if self._reverse else indices[0]
