"""Every deliberate fault is caught by the race detector or by the checker, or is proved harmless and is never seen."""

from __future__ import annotations

import pytest

from proof.choosers import RandomChooser
from proof.mutations import FAULTS, Edit, Fault, applied
from proof.simulated import SimulatedDevice
from proof.simulated_runs import agrees, random_workload, run_on
from proof.verification_tables import RUNS, WORKLOADS, _small, fault_row, in_document

REAL = [fault for fault in FAULTS if not fault.harmless]
HARMLESS = [fault for fault in FAULTS if fault.harmless]


@pytest.mark.parametrize("fault", REAL, ids=lambda f: f.name)
def test_a_fault_is_caught_as_the_document_says(fault: Fault) -> None:
    row = fault_row(fault)
    assert "NOT CAUGHT" not in row
    assert row in in_document("faults"), "run python -m proof.verification_tables --write"


@pytest.mark.parametrize("fault", HARMLESS, ids=lambda f: f.name)
def test_a_harmless_fault_is_never_seen(fault: Fault) -> None:
    for workload in WORKLOADS:
        for depth in (1, 2, 3, 4):
            assert _small(fault, workload, depth) is None
    for seed in range(60):
        with applied(fault) as kernels:
            workload = random_workload(seed)
            run = workload.but(kernels=kernels) if kernels else workload
            for depth in (2, 3):
                assert agrees(workload, run_on(SimulatedDevice(RandomChooser(seed)), run, depth)), (seed, depth)
    assert fault_row(fault) in in_document("faults"), "run python -m proof.verification_tables --write"


def test_the_document_lists_these_faults_and_no_others() -> None:
    names = [row.split(" | ")[0].removeprefix("| ") for row in in_document("faults")[2:]]
    assert names == [fault.name for fault in FAULTS]
    assert len(REAL) >= 15


def test_nothing_is_caught_without_a_fault() -> None:
    edit = Edit("gapless.scheduler.scheduler:Scheduler", "commit", "states, steady = ", "states, steady = ")
    nothing = Fault("nothing", "", (edit,))
    for workload in WORKLOADS:
        for depth in (1, 2, 3, 4):
            assert _small(nothing, workload, depth) is None
    assert RUNS > 1


def test_an_edit_that_finds_nothing_is_an_error() -> None:
    with pytest.raises(AssertionError, match="0 times, not once"), applied(
        Fault("gone", "", (Edit("gapless.scheduler.scheduler:Scheduler", "commit", "no such text", ""),))
    ):
        pass
