"""The race detector names what is not ordered, and nothing else."""

from __future__ import annotations

import pytest
import torch

from gapless.device.base import Access
from proof.operations import Region
from proof.races import RaceDetector
from proof.simulated import SimulatedDevice


class Rig:
    """Host, twin and back buffers of 8 bytes, and a detector."""

    def __init__(self) -> None:
        self.detector = RaceDetector()
        device = self.device = SimulatedDevice(observer=self.detector)
        self.host, self.back = device.host_buffer(8, "host"), device.host_buffer(8, "back")
        self.twin = device.device_buffer((8,), torch.uint8, "twin")

    def up(self, part: slice = slice(None)) -> None:
        self.device.copy_h2d(self.twin[part], self.host[part], "up")

    def down(self, part: slice = slice(None)) -> None:
        self.device.copy_d2h(self.back[part], self.twin[part], "down")

    def work(self, reads: object = None, writes: object = None) -> None:
        as_tuple = lambda x: () if x is None else (x,)  # noqa: E731
        self.device.launch(lambda: None, Access(as_tuple(reads), as_tuple(writes)), "work")

    def edge(self, source: object, target: object) -> None:
        event = self.device.event()
        event.record(source)  # type: ignore[arg-type]
        event.wait(target)  # type: ignore[arg-type]

    def fill(self) -> None:
        with self.device.host_access(Access(writes=(self.host,)), "fill"):
            pass

    def read(self) -> None:
        with self.device.host_access(Access(reads=(self.back,)), "read"):
            pass

    @property
    def races(self) -> list[str]:
        return [f"{r.region.buffer}: {r.first.name} {r.second.name}" for r in self.detector.races]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_write_and_a_read_without_an_event(rig: Rig) -> None:
    rig.up()
    rig.down()
    (race,) = rig.detector.races
    assert race.region == Region("twin", 0, 8, False)
    assert str(race) == (
        "race on twin[0:8]: 'up' of step 0 (h2d) writes it, 'down' of step 0 (d2h) reads it, and nothing orders them. "
        "Missing: an event recorded on h2d after 'up' of step 0 (h2d), "
        "for which d2h waits before 'down' of step 0 (d2h)"
    )


def test_an_event_orders_them(rig: Rig) -> None:
    rig.up()
    rig.edge(rig.device.h2d, rig.device.d2h)
    rig.down()
    assert rig.races == []


def test_edges_chain_over_a_third_stream(rig: Rig) -> None:
    rig.up()
    rig.edge(rig.device.h2d, rig.device.compute)
    rig.edge(rig.device.compute, rig.device.d2h)
    rig.down()
    assert rig.races == []


def test_an_edge_before_the_work_is_none(rig: Rig) -> None:
    rig.edge(rig.device.h2d, rig.device.d2h)
    rig.up()
    rig.down()
    assert rig.races == ["twin: up down"]


def test_an_edge_the_other_way_is_none(rig: Rig) -> None:
    rig.up()
    rig.edge(rig.device.d2h, rig.device.h2d)
    rig.down()
    assert rig.races == ["twin: up down"]


def test_two_reads_do_not_race(rig: Rig) -> None:
    rig.work(reads=rig.twin)
    rig.down()
    assert rig.races == []


def test_disjoint_slices_do_not_race_and_overlapping_ones_do(rig: Rig) -> None:
    rig.up(slice(0, 4))
    rig.work(writes=rig.twin[4:])
    assert rig.races == []
    rig.work(writes=rig.twin[3:5])
    assert rig.races == ["twin: up work"]


def test_one_stream_orders_itself(rig: Rig) -> None:
    rig.work(writes=rig.twin)
    rig.work(reads=rig.twin)
    rig.work(writes=rig.twin)
    assert rig.races == []


def test_the_host_is_ordered_before_what_it_enqueues_later(rig: Rig) -> None:
    rig.fill()
    rig.up()
    assert rig.races == []
    rig.fill()
    assert rig.races == ["host: up fill"]
    assert "the host waits for an event recorded on h2d" in rig.detector.races[0].missing


def test_the_host_is_ordered_after_what_it_waited_for(rig: Rig) -> None:
    rig.down()
    event = rig.device.event()
    event.record(rig.device.d2h)
    event.synchronize()
    rig.read()
    assert rig.races == []
    rig.down()
    rig.read()
    assert rig.races == ["back: down read"]


def test_a_covered_access_is_still_found_through_the_later_one(rig: Rig) -> None:
    rig.work(reads=rig.twin[:2])
    rig.work(writes=rig.twin)
    rig.down()
    assert rig.races == ["twin: work down"]
    assert rig.detector.races[0].first.step == 1


def test_a_write_does_not_hide_behind_a_later_read(rig: Rig) -> None:
    rig.work(writes=rig.twin)
    rig.edge(rig.device.compute, rig.device.h2d)
    rig.work(reads=rig.twin)
    rig.down()  # races with the write, not with the read
    assert [(r.first.name, r.first.step) for r in rig.detector.races] == [("work", 0)]


def test_a_pair_is_reported_once(rig: Rig) -> None:
    for _ in range(5):
        rig.up()
        rig.down()
    assert sorted(rig.races) == ["twin: down up", "twin: up down"]
