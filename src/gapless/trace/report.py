"""A report as text, for people."""

from __future__ import annotations

from collections.abc import Iterator

from gapless.trace.analyze import Report
from gapless.trace.causes import HOST, LATENCY, NO_WORK, SYNC

EXPLAIN = {
    "between nodes": "between dependent kernels, or shorter than the threshold",
    "copy": "a copy ran, and no kernel",
    "sync": "the host was in a call that blocks until the device is done",
    "host": "the host worked, and had not yet launched the next work",
    "nothing to do": "the host waited for requests",
    "launch latency": "from the begin of the launching call to its first work",
    "unknown": "the profile does not say",
}


def percent(share: float | None) -> str:
    """``99.4 %``."""
    return "n/a" if share is None else f"{100 * share:.2f} %"


def render(report: Report) -> str:
    """The whole report."""
    return "\n".join(_lines(report)) + "\n"


def _lines(r: Report) -> Iterator[str]:
    yield f"device {r.device}, {r.steps} steps ({r.steps_found_by}), span {r.span_ms:.3f} ms"
    for note in r.notes:
        yield f"note: {note}"
    yield ""
    yield f"kernel-busy under the profiler {percent(r.kernel_busy):>10}   kernels and copies; idle {percent(r.idle)}"
    yield f"kernels alone                  {percent(r.compute_busy):>10}"
    if r.undisturbed_busy is not None:
        step = f"{r.busy_ms_per_step:.3f} ms of work in a step of {r.undisturbed_step_ms:.3f} ms without a profiler"
        yield f"kernel-busy undisturbed        {percent(r.undisturbed_busy):>10}   {step}"
    if r.step_busy is not None:
        yield f"step-busy in this trace        {percent(r.step_busy):>10}   first to last node of each step"
    yield ""
    yield f"per step: span {r.span_ms_per_step:.3f} ms" + (
        f", activity span {r.activity_span_ms_per_step:.3f} ms" if r.activity_span_ms_per_step is not None else ""
    ) + f", kernel time {r.kernel_ms_per_step:.3f} ms"
    gap = "" if r.gap_us_per_node is None else f", gap {r.gap_us_per_node:.2f} us per node"
    yield f"          {r.nodes_per_step:.1f} kernels{gap}"
    for copy in r.copies:
        flag = "   <- pageable: the host waits" if copy["pageable"] else ""
        size = f"{copy['bytes_per_step']:.0f} bytes, {copy['us_per_step']:.1f} us"
        yield f"          {copy['per_step']:.2f} x {copy['name']}, {size}{flag}"
    for call in r.launches:
        yield f"          {call.per_step:.2f} x {call.name}, {call.ms_per_step:.3f} ms of the host"
    yield ""
    if r.syncs or r.sync_lines:
        yield "the host waits for the device, per step:"
        for call in r.sync_lines or r.syncs:
            yield f"          {call.per_step:.2f} x {call.name}, {call.ms_per_step:.3f} ms"
    else:
        yield "the host waits for the device in no call of the window"
    if r.phases:
        yield "host, ms per step: " + ", ".join(f"{phase} {ms:.3f}" for phase, ms in r.phases.items())
    yield ""
    yield from _causes(r)
    if r.top_kernels:
        yield ""
        yield "kernels by time, per step:"
        for row in r.top_kernels:
            yield f"  {row['ms_per_step']:9.3f} ms {row['per_step']:8.1f} x  {row['name'][:80]}"


def _causes(r: Report) -> Iterator[str]:
    total = sum(r.causes_ms.values())
    of = f"{r.no_kernel_ms:.3f} ms of {r.span_ms:.3f} ms"
    yield f"time without a kernel: {of}, by cause (threshold {r.threshold_us:g} us)"
    for cause, ms in r.causes_ms.items():
        if ms > 0 or cause in (SYNC, HOST):
            share = ms / r.span_ms if r.span_ms else 0.0
            yield f"  {cause:15} {ms:10.3f} ms {percent(share):>9}   {EXPLAIN[cause]}"
            if cause in (SYNC, HOST, NO_WORK, LATENCY):
                for row in [d for d in r.details if d["cause"] == cause and d["detail"]][:6]:
                    yield f"      {row['ms']:10.3f} ms   {row['detail']}"
    yield f"  {'sum':15} {total:10.3f} ms {percent(total / r.span_ms if r.span_ms else 0.0):>9}"
    if r.opened_by_ms:
        yield "gaps that opened while the host waited in a call (it could not launch ahead):"
        for name, ms in list(r.opened_by_ms.items())[:6]:
            yield f"  {ms:10.3f} ms   {name}"
    if r.largest_gaps:
        yield "largest gaps:"
        for gap in r.largest_gaps[:5]:
            by_name: dict[str, float] = {}
            for piece in gap["pieces"]:
                name = f"{piece['cause']} {piece['detail']}".strip()
                by_name[name] = by_name.get(name, 0.0) + piece["ms"]
            longest = sorted(by_name.items(), key=lambda item: -item[1])[:3]
            parts = ", ".join(f"{name} {ms:.3f}" for name, ms in longest)
            yield f"  {gap['ms']:8.3f} ms at {gap['at_ms']:.3f} ms: {parts}"
