"""Exhaustive exploration of what a simulated device may do with one workload. Two searches, with different premises:

`explore_states` executes every transition between states that any schedule can reach. A state is what has run on each
stream, every byte of memory, and all that the host has read; two schedules that meet in a state go on alike, so one of
them is followed (explicit-state search with a hash table, as in G. Holzmann's SPIN). It believes nothing that an
`Access` declares, and it counts the schedules that it covers: the paths through the graph of states.

`explore_races` runs one schedule for each class of schedules that differ only in the order of operations without a
common region: dynamic partial-order reduction (C. Flanagan, P. Godefroid, POPL 2005) with sleep sets (P. Godefroid,
1996). Without a race there is one class. It is for faulty pipelines, of which it finds the effect of every race.

Both are stateless in the sense of VeriSoft: a run cannot be undone, so each starts from the beginning with a prefix of
choices.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from proof.operations import HOST, Operation, conflict
from proof.races import Race, RaceDetector, before
from proof.simulated import SimulatedDevice

Run = Callable[[SimulatedDevice], Hashable]
"""Executes the workload on a fresh device and returns what is to be the same in every schedule."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A run that raised instead of returning."""

    error: str


@dataclass(slots=True)
class Exploration:
    """What a search found.

    Attributes:
        outcomes: each result that occurred, with the choices of one run that gave it.
        interleavings: schedules that are covered; for `explore_races`, classes of them.
        executions: runs, cut ones included.
        states, transitions: of `explore_states`.
        races: by the detector, in any run.
        complete: False when the limit ended the search.
    """

    outcomes: dict[Hashable, list[str]] = field(default_factory=dict)
    interleavings: int = 0
    executions: int = 0
    states: int = 0
    transitions: int = 0
    races: list[Race] = field(default_factory=list)
    complete: bool = True

    def __str__(self) -> str:
        size = f"{self.states} states, {self.transitions} transitions, " if self.states else ""
        return (
            f"{self.interleavings} interleavings ({size}{self.executions} runs{'' if self.complete else ', cut off'}), "
            f"{len(self.outcomes)} outcome{'s' * (len(self.outcomes) != 1)}, {len(self.races)} races"
        )


class _Cut(BaseException):
    """This run leads nowhere new."""


def _execute(run: Run, device: SimulatedDevice) -> Hashable:
    """The outcome of one run; None if it was cut."""
    try:
        return run(device)
    except _Cut:
        return None
    except Exception as error:
        cause = error.__cause__ or error
        return Failure(f"{type(cause).__name__}: {cause}")


# ---- all states ----------------------------------------------------------------------------------------------------

_State = tuple[tuple[int, ...], int, int]


class _Graph:
    """States, and for each the state that every choice leads to."""

    def __init__(self) -> None:
        self.edges: dict[Hashable, dict[str, Hashable]] = {}
        self.todo: list[tuple[list[str], Hashable]] = []

    def paths(self, start: Hashable) -> int:
        """Ways from ``start`` to any end."""
        counts: dict[Hashable, int] = {}
        stack = [start]
        while stack:
            state = stack[-1]
            nexts = self.edges.get(state)
            if nexts is None:
                counts[state] = 1
            elif missing := [n for n in nexts.values() if n not in counts]:
                stack.extend(missing)
                continue
            else:
                counts[state] = sum(counts[n] for n in nexts.values())
            stack.pop()
        return counts[start]


class _Walk:
    """The chooser of one run: follows a prefix, then opens new states until it meets a known one."""

    def __init__(self, graph: _Graph, prefix: list[str], came_from: Hashable) -> None:
        self.graph = graph
        self.prefix = prefix
        self.state: Hashable = came_from
        self.choice = prefix[-1] if prefix else ""
        self.device: SimulatedDevice | None = None
        self._position = 0
        self._done = dict.fromkeys((HOST, "h2d", "compute", "d2h"), 0)
        self._read = 0

    def __call__(self, options: Sequence[Operation]) -> int:
        device = self.device
        assert device is not None
        if self._position < len(self.prefix):
            wanted = self.prefix[self._position]
            chosen = next(o for o in options if o.stream == wanted)
        else:
            state = (tuple(self._done.values()), device.fingerprint(), self._read)
            self._arrive(state)
            if state in self.graph.edges:
                raise _Cut
            self.graph.edges[state] = {}
            so_far = list(device.choices)
            for option in options[1:]:
                self.graph.todo.append(([*so_far, option.stream], state))
            chosen = options[0]
            self.state, self.choice = state, chosen.stream
        self._position += 1
        self._done[chosen.stream] += 1
        if chosen.stream == HOST:
            self._read = hash((self._read, *(device.content(r) for r in chosen.regions if not r.write)))
        return options.index(chosen)

    def _arrive(self, state: Hashable) -> None:
        if self.choice:
            self.graph.edges[self.state][self.choice] = state

    def end(self, outcome: Hashable) -> None:
        self._arrive(("end", outcome))


def explore_states(run: Run, *, limit: int = 100_000) -> Exploration:
    """Every schedule of ``run``, by all transitions between all states."""
    found, graph = Exploration(), _Graph()
    graph.todo.append(([], None))
    root: Hashable = None
    while graph.todo:
        if found.executions == limit:
            found.complete = False
            break
        prefix, came_from = graph.todo.pop()
        walk, detector = _Walk(graph, prefix, came_from), RaceDetector()
        device = walk.device = SimulatedDevice(walk, detector)
        outcome = _execute(run, device)
        found.executions += 1
        _merge(found.races, detector.races)
        if outcome is not None:
            walk.end(outcome)
            found.outcomes.setdefault(outcome, list(device.choices))
        root = root or next(iter(graph.edges), None)
    found.states = len(graph.edges)
    found.transitions = sum(map(len, graph.edges.values()))
    if found.complete:
        found.interleavings = graph.paths(root)
    return found


# ---- partial orders ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Node:
    """A point of choice on the current path."""

    options: dict[str, Operation]
    chosen: str
    sleep: dict[str, Operation]
    done: set[str] = field(default_factory=set)
    backtrack: set[str] = field(default_factory=set)

    def asleep_after(self) -> dict[str, Operation]:
        """Choices that the node behind this one need not try: they were tried here, and commute with the chosen."""
        chosen = self.options[self.chosen]
        tried = {**self.sleep, **{name: self.options[name] for name in self.done if name != self.chosen}}
        return {name: o for name, o in tried.items() if name != self.chosen and conflict(o, chosen) is None}


class _Path:
    """The chooser of one run of `explore_races`."""

    def __init__(self, nodes: list[_Node]) -> None:
        self.nodes = nodes
        self.fixed = len(nodes)
        self.executed: list[Operation] = []

    def __call__(self, options: Sequence[Operation]) -> int:
        names = {o.stream: o for o in options}
        position = len(self.executed)
        if position < self.fixed:
            node = self.nodes[position]
            node.options = names  # the same operations, of this run
        else:
            sleep = self.nodes[-1].asleep_after() if self.nodes else {}
            awake = [name for name in names if name not in sleep]
            if not awake:
                raise _Cut
            node = _Node(names, awake[0], sleep)
            node.done.add(awake[0])
            node.backtrack.add(awake[0])
            self.nodes.append(node)
        chosen = names[node.chosen]
        self.executed.append(chosen)
        return options.index(chosen)

    def add_backtracks(self) -> None:
        """Where two operations race, the other order must be tried too: from just before the first of them."""
        for j, later in enumerate(self.executed):
            for i in range(j):
                earlier, node = self.executed[i], self.nodes[i]
                if earlier.stream == later.stream or before(earlier, later) or before(later, earlier):
                    continue
                if conflict(earlier, later) is not None:
                    node.backtrack.update([later.stream] if later.stream in node.options else node.options)


def explore_races(run: Run, *, limit: int = 100_000) -> Exploration:
    """One schedule of ``run`` for each class of equivalent ones."""
    found, nodes = Exploration(), list[_Node]()
    while True:
        if found.executions == limit:
            found.complete = False
            break
        path, detector = _Path(nodes), RaceDetector()
        device = SimulatedDevice(path, detector)
        outcome = _execute(run, device)
        found.executions += 1
        if outcome is not None:
            found.interleavings += 1
            found.outcomes.setdefault(outcome, list(device.choices))
        if detector.races:
            _merge(found.races, detector.races)
            path.add_backtracks()
        while nodes and not (nodes[-1].backtrack - nodes[-1].done - set(nodes[-1].sleep)):
            nodes.pop()
        if not nodes:
            break
        last = nodes[-1]
        last.chosen = min(last.backtrack - last.done - set(last.sleep))
        last.done.add(last.chosen)
    return found


def _merge(races: list[Race], new: list[Race]) -> None:
    known: set[Any] = {_kind(race) for race in races}
    races.extend(race for race in new if _kind(race) not in known)


def _kind(race: Race) -> tuple[str, str, str, str, str]:
    return (race.first.stream, race.first.name, race.second.stream, race.second.name, race.region.buffer)
