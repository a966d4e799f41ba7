"""All interleavings of small workloads, and thousands of random ones of larger: the tokens are those of depth 1.

GAPLESS_SEEDS=100000 runs that many random workloads instead of `SEEDS`, GAPLESS_FIRST_SEED=5000 begins there.
"""

from __future__ import annotations

import os
from collections.abc import Hashable

import pytest
import torch

from gapless.device.base import Access
from gapless.runner.kernels import reference_kernels
from proof.choosers import PriorityChooser, RandomChooser, Replay, Starve
from proof.explore import Failure, explore_races, explore_states
from proof.operations import HOST, STREAMS, Chooser, in_order
from proof.races import RaceDetector
from proof.simulated import SimulatedDevice
from proof.simulated_runs import Workload, agrees, random_workload, run_on, runs
from proof.small_workloads import BY_NAME, WORKLOADS
from proof.verification_tables import in_document

SEEDS = int(os.environ.get("GAPLESS_SEEDS", "800"))
FIRST_SEED = int(os.environ.get("GAPLESS_FIRST_SEED", "0"))
CHUNKS = 20
NO_ORACLE = ("sampling", "log-probabilities, penalties", "a row fails")


# ---- the searches themselves -----------------------------------------------------------------------------------------


def toy(operations: dict[str, int], edges: list[tuple[str, int, str, int]], *, shared: bool) -> object:
    """A program whose streams append to a list: all of them to one buffer, or each to its own."""

    def run(device: SimulatedDevice) -> Hashable:
        order: list[str] = []
        trace = device.device_buffer((1,), torch.int64, "trace")
        own = {name: device.device_buffer((1,), torch.int64, name) for name in operations}
        streams = {s.name: s for s in device._streams}
        events = {}
        for name, count in operations.items():
            for i in range(count):
                for a, at, b, before in edges:
                    if (b, before) == (name, i):
                        events[a, at].wait(streams[b])
                touched = trace if shared else own[name]

                def work(name: str = name, touched: torch.Tensor = touched) -> None:
                    order.append(name)
                    touched.mul_(7).add_(sorted(operations).index(name) + 1)

                device._put(streams[name], work, device.regions(Access((touched,), (touched,))), name)
                events[name, i] = device.event()
                events[name, i].record(streams[name])
        device.synchronize()
        return trace.item() if shared else tuple(t.item() for t in own.values())

    return run


@pytest.mark.parametrize(
    ("operations", "edges", "ways"),
    [
        ({"h2d": 2, "compute": 2}, [], 6),
        ({"h2d": 2, "compute": 2, "d2h": 2}, [], 90),
        ({"h2d": 3, "compute": 3}, [("h2d", 0, "compute", 0)], 10),
        ({"h2d": 1, "compute": 1, "d2h": 1}, [("h2d", 0, "compute", 0), ("compute", 0, "d2h", 0)], 1),
    ],
)
def test_both_searches_count_all_ways(operations: dict[str, int], edges: list[object], ways: int) -> None:
    """In ``shared`` mode no two operations commute: each way is a class and an outcome of its own."""
    shared = explore_states(toy(operations, edges, shared=True))  # type: ignore[arg-type]
    assert (shared.interleavings, len(shared.outcomes)) == (ways, ways)
    classes = explore_races(toy(operations, edges, shared=True))  # type: ignore[arg-type]
    assert (classes.interleavings, len(classes.outcomes)) == (ways, ways)
    assert set(classes.outcomes) == set(shared.outcomes)
    assert bool(classes.races) == (ways > 1)
    alone = explore_states(toy(operations, edges, shared=False))  # type: ignore[arg-type]
    assert (alone.interleavings, len(alone.outcomes), alone.races) == (ways, 1, [])
    assert alone.executions <= ways
    one = explore_races(toy(operations, edges, shared=False))  # type: ignore[arg-type]
    assert (one.interleavings, one.executions) == (1, 1)


def test_the_choices_of_an_outcome_replay_it() -> None:
    run = toy({"h2d": 2, "compute": 2}, [], shared=True)
    for outcome, choices in explore_races(run).outcomes.items():  # type: ignore[arg-type]
        assert run(SimulatedDevice(Replay(choices))) == outcome  # type: ignore[operator]


def test_a_search_that_is_cut_off_says_so() -> None:
    for search in (explore_states, explore_races):
        found = search(toy({"h2d": 4, "compute": 4}, [], shared=True), limit=3)  # type: ignore[arg-type]
        assert (found.complete, found.executions) == (False, 3)
        assert "cut off" in str(found)


def test_what_raises_is_an_outcome() -> None:
    def run(device: SimulatedDevice) -> Hashable:
        raise ValueError("no")

    assert set(explore_races(run).outcomes) == {Failure("ValueError: no")}


# ---- the engine ------------------------------------------------------------------------------------------------------


def truth(workload: Workload) -> dict[int, list[int]]:
    """Tokens of depth 1, which are the oracle's where there is one."""
    outcome = run_on(SimulatedDevice(), workload, 1)
    if workload.name not in NO_ORACLE:
        assert agrees(workload, outcome)
    return outcome.tokens()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("name", list(BY_NAME))
def test_every_interleaving_gives_the_tokens_of_depth_1(name: str, depth: int) -> None:
    workload = BY_NAME[name]
    if workload.shapes.capture and depth == 3:
        pytest.skip("a capture in every run takes too long; depths 1 and 2 are covered")
    expected = truth(workload)
    found = explore_states(runs(workload, depth))
    classes = explore_races(runs(workload, depth))
    print(f"{name}, depth {depth}: {found}; by partial orders: {classes}")
    assert found.complete
    assert classes.complete
    (outcome,) = found.outcomes
    if depth > 1:
        cells = f"| {found.interleavings:,} | {found.states} | {found.transitions} | {found.executions} | 1 | 0 | 1 |"
        rows = [r for r in in_document("interleavings") if r.startswith(f"| {name} | {depth} |") and r.endswith(cells)]
        assert rows, f"{cells} is not in the document: run python -m proof.verification_tables --write"
    assert set(classes.outcomes) == {outcome}
    assert (found.races, classes.races, classes.interleavings) == ([], [], 1)
    assert depth == 1 or found.interleavings >= 100
    assert not isinstance(outcome, Failure)
    ends, _ = outcome  # type: ignore[misc]
    for request_id, tokens, reason in ends:
        want = expected[request_id]
        if reason == "abort":  # comes after a number of steps, so that its length depends on the depth
            want, tokens = want[: len(tokens)], tokens[: len(want)]
        assert list(tokens) == want


@pytest.fixture(scope="module")
def tiny_llama() -> Workload:
    from gapless.model.load.loading import load_model
    from models import tiny

    model = load_model(tiny("llama", num_hidden_layers=2), device=torch.device("cpu"), probe=False).model
    return BY_NAME["ends by a token"].but(model=model, kernels=reference_kernels())


@pytest.mark.parametrize("depth", [2, 3])
def test_every_interleaving_of_a_real_model(tiny_llama: Workload, depth: int) -> None:
    expected = run_on(SimulatedDevice(), tiny_llama, 1).tokens()
    found = explore_states(runs(tiny_llama, depth))
    print(f"tiny Llama, depth {depth}: {found}")
    (outcome,) = found.outcomes
    assert {i: list(tokens) for i, tokens, _ in outcome[0]} == expected  # type: ignore[index]
    assert found.races == []


def chooser_of(seed: int, steps: int) -> tuple[str, Chooser]:
    """A third uniform, a third by priorities, a third starving one thread."""
    if seed % 3 == 0:
        return f"RandomChooser({seed})", RandomChooser(seed)
    if seed % 3 == 1:
        changes = seed // 3 % 4
        return f"PriorityChooser({seed}, {changes}, {6 * steps})", PriorityChooser(seed, changes, 6 * steps)
    starved = (HOST, *STREAMS)[seed // 3 % 4]
    return f"Starve({starved!r})", Starve(starved, reverse=seed // 12 % 2 == 1)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_workloads_under_random_schedules(chunk: int) -> None:
    steps = preemptions = 0
    for seed in range(FIRST_SEED + chunk, FIRST_SEED + SEEDS, CHUNKS):
        workload = random_workload(seed)
        outcome = run_on(SimulatedDevice(in_order), workload, 1)
        assert agrees(workload, outcome), f"random_workload({seed}) at depth 1"
        for depth in (2, 3, 4):
            name, chooser = chooser_of(seed + depth, outcome.steps + 2)
            what = f"random_workload({seed}), depth {depth}, {name}"
            detector = RaceDetector()
            try:
                outcome = run_on(SimulatedDevice(chooser, detector), workload, depth)
            except Exception as error:
                error.add_note(what)
                raise
            assert agrees(workload, outcome), what
            assert detector.races == [], what
            steps += outcome.steps
            preemptions += sum(f.num_preemptions for f in outcome.finished.values())
    print(f"chunk {chunk}: {steps} steps, {preemptions} preemptions")
    assert preemptions > 0 or SEEDS < 200


def test_every_workload_is_small_and_together_they_use_everything() -> None:
    reasons, preempted = set(), 0
    for workload in WORKLOADS:
        outcome = run_on(SimulatedDevice(), workload, 1)
        assert 2 <= len(outcome.finished) <= 4
        assert 3 <= outcome.steps <= 6
        reasons |= {f.reason.value for f in outcome.finished.values()}
        preempted += sum(f.num_preemptions for f in outcome.finished.values())
    assert reasons == {"stop", "length", "abort", "error"}
    assert preempted >= 2
