"""Planning by simulation: which share of the time a GPU waits for the host, and what a deeper pipeline gains.

The loop's calls of one step (fill, copy, three events, work, copy back, wait) are made on a simulated device with a
virtual clock, in the order in which `gapless.runner.runner` makes them; nothing is computed. The host's time of a
step is split in two: before its launch (plan and fill) and after its wait (commit and publish).

Without jitter the result is a formula: a step takes ``max(device, host)`` at any depth from 2 on, and
``device + host + latency`` at depth 1. The simulation is for what a formula does not tell: how much of the host's and
the device's irregularity each further step in flight absorbs.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass

import torch

from gapless.device.base import NOTHING
from proof.operations import Operation
from proof.simulated import SimulatedDevice

BEFORE_LAUNCH = 0.6
"""Share of the host's time of a step that lies before its launch."""


@dataclass(frozen=True, slots=True)
class Times:
    """What one step costs, in milliseconds.

    Attributes:
        host: the host's work, all of it.
        device: first to last work on the compute stream.
        latency: from a launch to the begin of its work, and from the end of the work until the host goes on.
        jitter, device_jitter: standard deviation of host and device as a share of the mean; log-normal.
        pause, pause_every: the host stops for ``pause`` ms every so many steps on average (a garbage collection,
            another process); 0 for never.
    """

    host: float
    device: float
    latency: float = 0.0
    jitter: float = 0.0
    device_jitter: float = 0.0
    pause: float = 0.0
    pause_every: float = 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of a long run: ``busy`` is the share of the time in which a step ran on the device."""

    depth: int
    step_ms: float
    busy: float

    @property
    def idle(self) -> float:
        """Share of the time in which the device waited for the host."""
        return 1 - self.busy


def _varied(rng: random.Random, mean: float, jitter: float) -> float:
    if jitter == 0 or mean == 0:
        return mean
    variance = math.log1p(jitter * jitter)
    return rng.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))


def _work() -> None:
    """Nothing is computed."""


def predict(times: Times, depth: int, *, steps: int = 2000, seed: int = 0) -> Prediction:
    """Simulate ``steps`` steps with ``depth`` of them in flight."""
    rng = random.Random(seed)

    def cost(operation: Operation) -> float:
        if operation.name == "work":
            return _varied(rng, times.device, times.device_jitter)
        if operation.name not in ("fill", "commit"):
            return times.latency / 2
        share = BEFORE_LAUNCH if operation.name == "fill" else 1 - BEFORE_LAUNCH
        pause = 0.0
        if operation.name == "fill" and times.pause_every and rng.random() * times.pause_every < 1:
            pause = times.pause
        return _varied(rng, times.host * share, times.jitter) + pause

    device = SimulatedDevice(costs=cost, scramble=False)
    host, twin = device.host_buffer(4, "host"), device.device_buffer((4,), torch.uint8, "twin")
    uploaded, computed = device.event(), device.event()
    in_flight: deque[tuple[int, int]] = deque()
    starts, ends, done = ([device.event(timing=True) for _ in range(depth + 1)] for _ in range(3))
    busy, launched, first, last = 0.0, 0, 0.0, 0.0
    for waited in range(steps):
        while len(in_flight) < depth and launched < steps:
            slot = launched % (depth + 1)
            with device.host_access(NOTHING, "fill"):
                pass
            device.copy_h2d(twin, host, "h2d")
            uploaded.record(device.h2d)
            uploaded.wait(device.compute)
            starts[slot].record(device.compute)
            device.launch(_work, NOTHING, "work")
            ends[slot].record(device.compute)
            computed.record(device.compute)
            computed.wait(device.d2h)
            device.copy_d2h(host, twin, "d2h")
            done[slot].record(device.d2h)
            in_flight.append((launched, slot))
            launched += 1
        _, slot = in_flight.popleft()
        done[slot].synchronize()
        busy += starts[slot].elapsed_ms(ends[slot])
        last = device.now
        if waited == 0:
            first, busy = last, 0.0  # the span is from the end of the first step to that of the last
        with device.host_access(NOTHING, "commit"):
            pass
    span = last - first
    return Prediction(depth, span / (steps - 1), min(busy / span, 1.0))
