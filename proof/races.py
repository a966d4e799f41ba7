"""RaceDetector: vector clocks over the host and the three streams of a simulated device.

Definitions, after L. Lamport, "Time, clocks, and the ordering of events in a distributed system" (1978), and the vector
clocks of C. Fidge and F. Mattern (1988). Operation a *happens before* operation b if one of these chains leads from a
to b:

    program   a comes before b on the same stream, or on the host
    enqueue   b was put on its stream by the host after a, which is the host's
    event     a lies before the record of an event, and b after a wait that binds to that record: of a stream
              (`Event.wait`) or of the host (`Event.synchronize`)

A *race* is a pair of operations that touch a common byte, one of them writing, with no such chain between them. The
order of the host's calls decides which edges there are, not the order in which the device happens to run: one run
without a race, of any schedule, shows that all schedules of the same calls do the same (any two of them differ in the
order of operations that commute; A. Mazurkiewicz, "Trace theory", 1987). And without a race the host reads the same
values in all of them, so it makes the same calls.

The device needs no access to be kept that a later one of the same stream covers, byte for byte and at least as strong:
whatever races with the older also races with the newer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from proof.operations import HOST, STREAMS, Observer, Operation, Record, Region

PLACES = {name: i for i, name in enumerate((HOST, *STREAMS))}
"""Component of each thread of execution in a vector clock."""
ZERO = (0,) * len(PLACES)

Clock = tuple[int, ...]


def join(a: Clock, b: Clock) -> Clock:
    """The least clock that is not before either."""
    return tuple(map(max, a, b))


def before(first: Operation, second: Operation) -> bool:
    """``first`` happens before ``second``; both were seen by a `RaceDetector`."""
    place = PLACES[first.stream]
    return bool(first.stamp[place] <= second.stamp[place])


@dataclass(frozen=True, slots=True)
class Race:
    """Two operations that no event orders; ``second`` was enqueued later."""

    first: Operation
    second: Operation
    region: Region

    @property
    def missing(self) -> str:
        """The edge that would order them."""
        a, b = self.first, self.second
        if b.stream == HOST:
            return f"the host waits for an event recorded on {a.stream} after {a}, before {b}"
        if a.stream == HOST:
            return f"{b} is enqueued after {a}"
        return f"an event recorded on {a.stream} after {a}, for which {b.stream} waits before {b}"

    def __str__(self) -> str:
        verbs = ["writes" if self._writes(o) else "reads" for o in (self.first, self.second)]
        return (
            f"race on {self.region}: {self.first} {verbs[0]} it, {self.second} {verbs[1]} it, and nothing orders them. "
            f"Missing: {self.missing}"
        )

    def _writes(self, operation: Operation) -> bool:
        r = self.region
        return any(q.write and q.buffer == r.buffer and q.lo < r.hi and r.lo < q.hi for q in operation.regions)


@dataclass(slots=True)
class RaceDetector(Observer):
    """Give it to a `SimulatedDevice`; ``races`` grows as the host enqueues. One pair is reported once."""

    races: list[Race] = field(default_factory=list)
    operations: int = 0
    checked: dict[str, int] = field(default_factory=dict)  # accesses seen, by buffer
    _clocks: dict[str, Clock] = field(default_factory=lambda: dict.fromkeys(PLACES, ZERO))
    _accesses: dict[str, dict[str, list[tuple[Region, Operation]]]] = field(default_factory=dict)
    _reported: set[tuple[str, str, str, str, str]] = field(default_factory=set)

    def enqueued(self, operation: Operation) -> None:
        stream = operation.stream
        self._clocks[stream] = join(self._clocks[stream], self._clocks[HOST])
        self._happen(operation)

    def hosted(self, operation: Operation) -> None:
        self._happen(operation)

    def recorded(self, record: Record, stream: str) -> None:
        record.stamp = join(self._clocks[stream], self._clocks[HOST])

    def waited(self, record: Record, stream: str) -> None:
        self._clocks[stream] = join(self._clocks[stream], record.stamp)

    def synchronized(self, record: Record) -> None:
        self._clocks[HOST] = join(self._clocks[HOST], record.stamp)

    def _happen(self, operation: Operation) -> None:
        place = PLACES[operation.stream]
        clock = list(self._clocks[operation.stream])
        clock[place] += 1
        operation.stamp = self._clocks[operation.stream] = tuple(clock)
        self.operations += 1
        for region in operation.regions:
            self.checked[region.buffer] = self.checked.get(region.buffer, 0) + 1
            by_stream = self._accesses.setdefault(region.buffer, {})
            for stream, accesses in by_stream.items():
                if stream != operation.stream:
                    for other, earlier in accesses:
                        if other.conflicts(region) and not before(earlier, operation):
                            self._report(earlier, operation, region)
            own = by_stream.get(operation.stream, [])
            by_stream[operation.stream] = [a for a in own if not _covers(region, a[0])] + [(region, operation)]

    def _report(self, first: Operation, second: Operation, region: Region) -> None:
        kind = (first.stream, first.name, second.stream, second.name, region.buffer)
        if kind not in self._reported:
            self._reported.add(kind)
            self.races.append(Race(first, second, region))


def _covers(new: Region, old: Region) -> bool:
    return new.lo <= old.lo and old.hi <= new.hi and (new.write or not old.write)
