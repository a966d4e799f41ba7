"""The tables of docs/verification.md, made by running what they tell.

    python tests/verification_tables.py --write

The tests compare them with the document.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from proof.choosers import RandomChooser
from proof.explore import Failure, explore_races, explore_states
from proof.mutations import FAULTS, Fault, applied
from proof.simulated import SimulatedDevice
from proof.simulated_runs import Workload, agrees, outcome_key, random_workload, run_on, runs
from proof.small_workloads import WORKLOADS

DOCUMENT = Path(__file__).parent.parent / "docs" / "verification.md"
RUNS = 12
"""Runs of one search for the effect of a race."""


@dataclass(frozen=True)
class Catch:
    """How a fault was caught: on which workload and depth, by a race, by an outcome that is not the right one."""

    workload: str
    depth: int
    race: str = ""
    outcome: str = ""

    @property
    def by(self) -> str:
        return " and ".join(["detector"] * bool(self.race) + ["checker"] * bool(self.outcome))

    @property
    def how(self) -> str:
        return "; ".join(filter(None, (self.race, self.outcome)))


@cache
def right(name: str, depth: int) -> object:
    """The outcome of a small workload without a fault."""
    (workload,) = (w for w in WORKLOADS if w.name == name)
    return outcome_key(run_on(SimulatedDevice(), workload, depth))


def _wrong(outcome: object) -> str:
    if isinstance(outcome, Failure):
        return f"error: {outcome.error.partition(',')[0].partition(chr(10))[0][:70]}"
    return "other tokens"


def _small(fault: Fault, workload: Workload, depth: int) -> Catch | None:
    expected = right(workload.name, depth)
    with applied(fault) as kernels:
        found = explore_races(runs(workload.but(kernels=kernels) if kernels else workload, depth), limit=RUNS)
    wrong = [o for o in found.outcomes if o != expected]
    if not wrong and not found.races:
        return None
    race = found.races[0] if found.races else None
    text = ""
    if race is not None:
        pair = [f"{o.name} ({o.stream})" for o in (race.first, race.second)]
        text = f"{' and '.join(pair)} on {race.region.buffer}"
    best = next((o for o in wrong if not isinstance(o, Failure)), wrong[0] if wrong else None)
    return Catch(workload.name, depth, text, _wrong(best) if wrong else "")


def _random(fault: Fault, seed: int, depth: int) -> Catch | None:
    workload = random_workload(seed)
    with applied(fault) as kernels:
        try:
            faulty = workload.but(kernels=kernels) if kernels else workload
            outcome = run_on(SimulatedDevice(RandomChooser(seed)), faulty, depth)
            wrong = "" if agrees(workload, outcome) else "other tokens"
        except Exception as error:
            cause = error.__cause__ or error
            wrong = _wrong(Failure(f"{type(cause).__name__}: {cause}"))
    return Catch(workload.name, depth, outcome=wrong) if wrong else None


def catch(fault: Fault, *, seeds: int = 600) -> Catch | None:
    """Small workloads at depth 2, 1, 3, 4; then random ones, those first that are known to show it."""
    best = None
    for workload in WORKLOADS:
        for depth in (2, 1, 3, 4):
            found = _small(fault, workload, depth)
            if found is not None and (found.race or found.outcome == "other tokens"):
                return found
            best = best or found
    if best is not None:
        return best
    for seed in [*fault.seeds, *range(seeds)]:
        for depth in (4, 2):
            found = _random(fault, seed, depth)
            if found is not None:
                return found
    return None


def fault_row(fault: Fault) -> str:
    found = None if fault.harmless else catch(fault)
    where = "" if found is None else f"{found.workload}, depth {found.depth}"
    how = f"harmless: {fault.harmless}" if fault.harmless else found.how if found else "NOT CAUGHT"
    return f"| {fault.name} | {fault.rule} | {found.by if found else 'nothing'} | {where} | {how} |"


def fault_table() -> list[str]:
    return ["| fault | rule | caught by | on | how |", "|---|---|---|---|---|", *map(fault_row, FAULTS)]


def interleaving_row(workload: Workload, depth: int) -> str:
    found = explore_states(runs(workload, depth))
    classes = explore_races(runs(workload, depth))
    outcome = run_on(SimulatedDevice(), workload, depth)
    return (
        f"| {workload.name} | {depth} | {outcome.steps} | {found.interleavings:,} | {found.states} | "
        f"{found.transitions} | {found.executions} | {len(found.outcomes)} | {len(found.races)} | "
        f"{classes.interleavings} |"
    )


def interleaving_table() -> list[str]:
    head = "| workload | depth | steps | interleavings | states | transitions | runs | outcomes | races | classes |"
    rows = [interleaving_row(w, d) for w in WORKLOADS for d in (2, 3) if not (w.shapes.capture and d == 3)]
    return [head, "|---|" + "---:|" * 9, *rows]


TABLES = {"faults": fault_table, "interleavings": interleaving_table}


def in_document(name: str) -> list[str]:
    """The rows between the document's two marks."""
    text = DOCUMENT.read_text(encoding="utf-8")
    return text.partition(f"<!-- {name} -->\n")[2].partition(f"\n<!-- end of {name} -->")[0].splitlines()


def write() -> None:
    """Bring the document's tables up to date."""
    text = DOCUMENT.read_text(encoding="utf-8")
    for name, make in TABLES.items():
        before, _, rest = text.partition(f"<!-- {name} -->\n")
        _, mark, after = rest.partition(f"\n<!-- end of {name} -->")
        text = f"{before}<!-- {name} -->\n" + "\n".join(make()) + mark + after
    DOCUMENT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    write()
