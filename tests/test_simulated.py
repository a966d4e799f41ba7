"""The simulated device: streams, events and the host mean what they mean elsewhere; runs replay; time is virtual."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gapless.device.base import Access, DeviceError
from gapless.runner.kernels import reference_kernels
from grammars import constrain, regex
from proof.choosers import PriorityChooser, RandomChooser, Replay, Starve
from proof.fast_kernels import KERNELS
from proof.harness import Job, make_request
from proof.operations import HOST, Operation, in_order
from proof.races import RaceDetector
from proof.simulated import SimulatedDevice
from proof.simulated_runs import outcome_key, random_workload, run_on
from proof.small_workloads import WORKLOADS


def put(device: SimulatedDevice, order: list[str], name: str) -> None:
    device.launch(lambda: order.append(name), Access(), name)


def one_byte_buffers(device: SimulatedDevice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return device.host_buffer(1, "a"), device.device_buffer((1,), torch.uint8, "b"), device.host_buffer(1, "c")


def done(device: SimulatedDevice, stream: object) -> None:
    event = device.event()
    event.record(stream)  # type: ignore[arg-type]
    event.synchronize()


def test_nothing_runs_before_the_host_waits() -> None:
    device, order = SimulatedDevice(), list[str]()
    for name in "abc":
        put(device, order, name)
    assert order == []
    done(device, device.compute)
    assert order == ["a", "b", "c"]


def test_a_wait_runs_only_what_it_must() -> None:
    device, order = SimulatedDevice(), list[str]()
    put(device, order, "a")
    first = device.event()
    first.record(device.compute)
    put(device, order, "b")
    first.synchronize()
    assert order == ["a"]
    device.close()
    assert order == ["a", "b"]


def test_a_stream_is_first_in_first_out_under_any_chooser() -> None:
    for seed in range(20):
        device, order = SimulatedDevice(RandomChooser(seed)), list[str]()
        for i in range(10):
            put(device, order, str(i))
        device.synchronize()
        assert order == [str(i) for i in range(10)]


def test_an_event_orders_two_streams_under_any_chooser() -> None:
    for seed in range(20):
        device = SimulatedDevice(RandomChooser(seed))
        host, twin = device.host_buffer(4, "host"), device.device_buffer((4,), torch.uint8, "twin")
        back = device.host_buffer(4, "back")
        with device.host_access(Access(writes=(host,)), "fill"):
            host.fill_(seed)
        device.copy_h2d(twin, host, "up")
        event = device.event()
        event.record(device.h2d)
        event.wait(device.d2h)
        device.copy_d2h(back, twin, "down")
        done(device, device.d2h)
        with device.host_access(Access(reads=(back,)), "read"):
            assert back.tolist() == [seed] * 4


def test_without_the_event_some_chooser_swaps_them() -> None:
    seen = set()
    for seed in range(20):
        device = SimulatedDevice(RandomChooser(seed))
        host, twin, back = one_byte_buffers(device)
        host.fill_(7)
        device.copy_h2d(twin, host, "up")
        device.copy_d2h(back, twin, "down")
        device.synchronize()
        seen.add(back.item())
    assert seen == {0, 7}


def test_a_wait_binds_to_the_record_that_is_latest_when_it_is_called() -> None:
    device, order = SimulatedDevice(), list[str]()
    event = device.event()
    event.wait(device.d2h)  # never recorded: no effect
    assert event.query()
    put(device, order, "a")
    event.record(device.compute)
    event.wait(device.d2h)
    put(device, order, "b")
    event.record(device.compute)
    done(device, device.d2h)
    assert order == ["a"]
    assert not event.query()
    event.synchronize()
    assert order == ["a", "b"]


def test_an_error_is_sticky_and_nothing_runs_after_it() -> None:
    device, order = SimulatedDevice(), list[str]()

    def bad() -> None:
        raise ZeroDivisionError("first")

    device.launch(bad, Access(), "the guilty one")
    put(device, order, "later")
    for _ in range(2):
        with pytest.raises(DeviceError, match="first") as caught:
            done(device, device.compute)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert "'the guilty one' of step 0" in str(caught.value.__cause__.__notes__)
    assert order == []
    device.close()
    with pytest.raises(RuntimeError, match="closed"):
        put(device, order, "after the end")


def test_a_wait_for_nothing_is_an_error_and_not_a_hang() -> None:
    device = SimulatedDevice()
    never, later = device.event(), device.event()
    never.record(device.compute)
    device._compute.queue.clear()  # as if the record were lost
    never.wait(device.h2d)
    later.record(device.h2d)
    with pytest.raises(RuntimeError, match="no stream can reach"):
        later.synchronize()


def test_what_the_host_has_read_is_poisoned() -> None:
    device = SimulatedDevice()
    back = device.host_buffer(2, "back")
    with device.host_access(Access(reads=(back,)), "read"):
        view, copy = back.numpy(), back.numpy().copy()
    assert copy.tolist() == [0, 0]
    assert view.tolist() == [0xA5, 0xA5]


def test_an_access_outside_of_every_buffer_is_refused() -> None:
    device = SimulatedDevice()
    device.host_buffer(8, "host")
    with pytest.raises(RuntimeError, match="no part of a buffer"):
        device.launch(lambda: None, Access((torch.zeros(3),)), "work")


def test_the_choices_of_a_run_replay_it() -> None:
    workload = WORKLOADS[0]
    for seed in range(5):
        first = SimulatedDevice(RandomChooser(seed))
        a = outcome_key(run_on(first, workload, 2))
        second = SimulatedDevice(Replay(first.choices))
        assert outcome_key(run_on(second, workload, 2)) == a
        assert second.choices == first.choices
    with pytest.raises(RuntimeError, match="choice 0"):
        run_on(SimulatedDevice(Replay(["d2h"])), workload, 2)


def test_priorities_and_starvation_order_the_streams() -> None:
    options = [Operation(name, name, 0, ()) for name in (HOST, "h2d", "compute", "d2h")]
    for name in (HOST, "h2d", "compute", "d2h"):
        assert options[Starve(name)(options)].stream != name
        assert Starve(name)([Operation(name, name, 0, ())]) == 0
    chooser = PriorityChooser(3, changes=0, length=10)
    assert len({chooser(options) for _ in range(10)}) == 1
    falling = PriorityChooser(3, changes=2, length=10)
    assert len({falling(options) for _ in range(10)}) == 3


def test_virtual_time_follows_the_edges_and_not_the_chooser() -> None:
    cost = {"up": 1.0, "work": 5.0, "down": 2.0, "fill": 0.5}
    for chooser in (in_order, RandomChooser(1), Starve("h2d")):
        device = SimulatedDevice(chooser, costs=lambda o: cost[o.name])
        host, twin, back = one_byte_buffers(device)
        start, end, up, down = (device.event(timing=True) for _ in range(4))
        for _ in range(2):
            with device.host_access(Access(writes=()), "fill"):
                pass
            device.copy_h2d(twin, host, "up")
            up.record(device.h2d)
            up.wait(device.compute)
            start.record(device.compute)
            device.launch(lambda: None, Access((twin,), (twin,)), "work")
            end.record(device.compute)
            end.wait(device.d2h)
            device.copy_d2h(back, twin, "down")
            down.record(device.d2h)
        down.synchronize()
        # The second work waits for the first: 0.5 + 1 + 5 + 5 + 2; its copies lie beside the first.
        assert device.now == pytest.approx(13.5)
        assert start.elapsed_ms(end) == pytest.approx(5.0)


def test_numpy_kernels_are_the_reference() -> None:
    for seed in range(60):
        workload = random_workload(seed)
        fast = outcome_key(run_on(SimulatedDevice(), workload, 2))
        assert outcome_key(run_on(SimulatedDevice(), workload.but(kernels=reference_kernels()), 2)) == fast, seed
    assert KERNELS.prepare is not reference_kernels().prepare


def test_the_whole_engine_is_watched() -> None:
    """Every buffer of the engine is named by some operation, the graph pool included."""
    (captured,) = [w for w in WORKLOADS if w.shapes.capture]
    detector = RaceDetector()
    device = SimulatedDevice(in_order, detector)
    buffers: set[str] = set()
    register = device._register
    device._register = lambda buffer, name: (buffers.add(name), register(buffer, name))[1]  # type: ignore[method-assign]
    written = Job(constrain(make_request(99, [3, 4], 6), regex("[a-z]+")))
    run_on(device, captured.but(jobs=lambda: [*captured.jobs(), written]), 2)
    assert set(detector.checked) == buffers
    assert "graph pool" in buffers
    assert detector.races == []
    assert min(detector.checked.values()) > 1
    assert np.sum(list(detector.checked.values())) > detector.operations
