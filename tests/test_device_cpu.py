"""The CPU device's streams and events mean what CUDA's mean."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from gapless.device.base import Access, DeviceError, UndeclaredAccessError
from gapless.device.cpu import CpuDevice


@pytest.fixture
def device():
    device = CpuDevice()
    yield device
    device.close()


def run(device: CpuDevice, work, *, name: str = "work") -> None:
    device.launch(work, Access(), name)


def done(device: CpuDevice, stream) -> None:
    event = device.event()
    event.record(stream)
    event.synchronize()


def test_a_stream_is_first_in_first_out_and_on_one_thread(device: CpuDevice) -> None:
    order: list[tuple[int, int]] = []
    for i in range(200):
        run(device, lambda i=i: order.append((i, threading.get_ident())))
    done(device, device.compute)
    assert [i for i, _ in order] == list(range(200))
    assert len({t for _, t in order} | {threading.get_ident()}) == 2


def test_launch_and_copies_do_not_wait_for_the_device(device: CpuDevice) -> None:
    gate = threading.Event()
    host, twin = device.host_buffer(8, "host"), device.device_buffer((8,), torch.uint8, "twin")
    event = device.event()
    run(device, gate.wait)
    event.record(device.compute)
    event.wait(device.h2d)
    device.copy_h2d(twin, host, "copy")
    copied = device.event()
    copied.record(device.h2d)
    assert not event.query()
    assert not copied.query()
    host.fill_(7)  # the copy runs later and sees this: host and device are different memory
    gate.set()
    copied.synchronize()
    assert twin.tolist() == [7] * 8
    host.fill_(9)
    assert twin.tolist() == [7] * 8
    assert (device.copies.h2d, device.copies.h2d_bytes, device.copies.d2h) == (1, 8, 0)


def test_an_event_that_was_never_recorded_is_complete(device: CpuDevice) -> None:
    event = device.event()
    assert event.query()
    event.synchronize()
    event.wait(device.h2d)  # no effect
    done(device, device.h2d)


def test_a_wait_binds_to_the_record_that_is_latest_when_it_is_called(device: CpuDevice) -> None:
    first, second = threading.Event(), threading.Event()
    event, seen = device.event(), []
    run(device, first.wait)
    event.record(device.compute)
    event.wait(device.d2h)  # bound to the first record
    run(device, second.wait)
    event.record(device.compute)
    waiter = device.event()
    waiter.record(device.d2h)
    first.set()
    waiter.synchronize()  # does not hang, although the second record is not reached
    seen.append(event.query())
    second.set()
    event.synchronize()
    assert seen == [False]
    assert event.query()


def test_a_wait_before_the_record_has_no_effect(device: CpuDevice) -> None:
    gate, event = threading.Event(), device.event()
    event.wait(device.h2d)
    run(device, gate.wait)
    event.record(device.compute)
    done(device, device.h2d)
    assert not event.query()
    gate.set()


def test_work_after_a_wait_sees_what_came_before_the_record(device: CpuDevice) -> None:
    for _ in range(50):
        seen: list[int] = []
        event = device.event()
        run(device, lambda seen=seen: (time.sleep(0.0005), seen.append(1)))
        event.record(device.compute)
        event.wait(device.h2d)
        host, twin = torch.zeros(1, dtype=torch.uint8), torch.ones(1, dtype=torch.uint8)
        device.copy_h2d(twin, host, "copy")
        copied = device.event()
        copied.record(device.h2d)
        copied.synchronize()
        assert seen == [1]


def test_an_error_is_sticky_and_nothing_runs_after_it(device: CpuDevice) -> None:
    ran: list[int] = []

    def bad() -> None:
        raise ZeroDivisionError("first")

    run(device, bad, name="the guilty one")
    run(device, lambda: ran.append(1))
    event = device.event()
    event.record(device.compute)
    event.wait(device.d2h)
    later = device.event()
    later.record(device.d2h)
    for _ in range(2):
        with pytest.raises(DeviceError, match="first") as caught:
            later.synchronize()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert "the guilty one" in str(caught.value.__cause__.__notes__)
    assert ran == []
    with pytest.raises(DeviceError):
        device.synchronize()


def test_close_finishes_queued_work_and_ends_the_threads() -> None:
    before = set(threading.enumerate())
    device = CpuDevice(delays=3)
    ran: list[int] = []
    for i in range(20):
        run(device, lambda i=i: ran.append(i))
    device.close()
    device.close()
    assert ran == list(range(20))
    assert set(threading.enumerate()) == before
    with pytest.raises(RuntimeError, match="closed"):
        run(device, lambda: None)


def test_elapsed_time_is_between_records(device: CpuDevice) -> None:
    a, b = device.event(timing=True), device.event(timing=True)
    with pytest.raises(RuntimeError, match="recorded"):
        a.elapsed_ms(b)
    a.record(device.compute)
    run(device, lambda: time.sleep(0.01))
    b.record(device.compute)
    b.synchronize()
    assert 9 < a.elapsed_ms(b) < 1000


def test_delays_keep_the_order() -> None:
    device = CpuDevice(delays=random.Random(0).randrange(1000), max_delay=0.001)
    order: list[int] = []
    for i in range(20):
        run(device, lambda i=i: order.append(i))
    device.synchronize()
    device.close()
    assert order == list(range(20))


class TestDebug:
    """Debug mode finds what a piece of work touches without declaring it."""

    @pytest.fixture
    def buffers(self):
        device = CpuDevice(debug=True)
        a = device.device_buffer((4,), torch.int32, "a")
        b = device.device_buffer((4,), torch.int32, "b")
        a.copy_(torch.arange(4))
        yield device, a, b
        device.close()

    def attempt(self, device: CpuDevice, work, access: Access) -> None:
        device.launch(work, access, "work")
        device.synchronize()

    def test_declared_work_passes(self, buffers) -> None:
        device, a, b = buffers
        self.attempt(device, lambda: b.copy_(a), Access((a,), (b,)))
        assert b.tolist() == [0, 1, 2, 3]
        self.attempt(device, lambda: b[:2].add_(a[2:]), Access((a[2:], b[:2]), (b[:2],)))
        assert b.tolist() == [2, 4, 2, 3]

    @pytest.mark.parametrize(
        ("reads", "writes"), [("", "b"), ("a", ""), ("half", "b"), ("ab", "")], ids=str
    )
    def test_undeclared_work_fails(self, buffers, reads: str, writes: str) -> None:
        device, a, b = buffers
        named = {"": (), "a": (a,), "b": (b,), "half": (a[:2],), "ab": (a, b)}
        with pytest.raises(DeviceError) as caught:
            self.attempt(device, lambda: b.copy_(a), Access(named[reads], named[writes]))
        assert isinstance(caught.value.__cause__, UndeclaredAccessError)
        assert a.tolist() == [0, 1, 2, 3]
