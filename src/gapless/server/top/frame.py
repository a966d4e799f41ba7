"""One frame of `gapless top`, as lines of text."""

from __future__ import annotations

from collections.abc import Iterable

from gapless.server.top.exposition import Difference, percentile

BAR = 20
LABEL, GAP = 8, "   "
LATENCIES = (
    ("first token", "time_to_first_token_seconds"),
    ("between tokens", "inter_token_latency_seconds"),
    ("whole request", "e2e_request_latency_seconds"),
)
PERCENTILES = (50, 90, 99)


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _rate(value: float | None) -> str:
    return _number(value, 1 if value is not None and value < 10 else 0)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _bar(share: float | None) -> str:
    full = round(BAR * min(max(share or 0.0, 0.0), 1.0))
    return "[" + "#" * full + "." * (BAR - full) + "]"


def seconds(value: float | None) -> str:
    """With a unit that leaves few digits."""
    if value is None:
        return "-"
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if value * factor < 1000:
            return f"{value * factor:.3g} {unit}"
    return f"{value:.1f} s"


def scaled(value: float | None, unit: str) -> str:
    """A rate with a prefix of its unit that leaves three digits."""
    if value is None:
        return "-"
    for prefix, factor in (("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12)):
        if value < 999.5 * factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value / 1e15:.3g} P{unit}"


def _line(label: str, items: Iterable[str], width: int) -> list[str]:
    """A label and what belongs to it, on as many lines as the width asks for."""
    lines = [f"{label:<{LABEL}}"]
    for i, item in enumerate(items):
        if i and len(lines[-1]) + len(GAP) + len(item) > width:
            lines.append(" " * LABEL)
        lines[-1] += GAP + item
    return lines


def frame(change: Difference, title: Iterable[str], width: int = 120) -> list[str]:
    """Lines without colours.

    Args:
        change: what happened since an earlier reading; gauges are of the later one.
        title: parts of the first line, after the name of the command.
        width: that lines should not exceed; what belongs together is not broken.
    """
    now = change.now
    kv = now.value("kv_cache_usage_perc")
    ends = change.rates("request_success_total", "finished_reason")
    ended = ", ".join(f"{reason} {rate:.1f}" for reason, rate in ends.items() if rate) or "none"
    rejected = change.rate("admission_rejections_total")
    deferred = now.value("num_requests_waiting_by_reason", reason="deferred")
    requests = [
        f"running {_number(now.value('num_requests_running'), 0)}",
        f"waiting {_number(now.value('num_requests_waiting'), 0)}",
        *([f"of them held back {deferred:.0f}"] if deferred else []),
        f"ended per s: {ended}",
        *([f"refused per s: {rejected:.1f}"] if rejected else []),
    ]
    tokens = [
        f"prompt {_rate(change.rate('prompt_tokens_total'))}",
        f"new {_rate(change.rate('generation_tokens_total'))}",
    ]
    cache = [
        f"{_percent(kv):>7} {_bar(kv)}",
        f"prefix hits {_percent(change.share('prefix_cache_hits_total', 'prefix_cache_queries_total'))}",
        f"preemptions/s {_number(change.rate('num_preemptions_total'))}",
    ]
    lines = [
        *_line("gapless top", title, width),
        "",
        *_gpu(change, width),
        *_line("requests", requests, width),
        *_line("tokens/s", tokens, width),
        *_line("KV cache", cache, width),
        "",
        f"{'latency':<16}" + "".join(f"{f'p{p}':>10}" for p in PERCENTILES) + f"{'mean':>10}",
    ]
    for name, metric in LATENCIES:
        buckets = change.buckets(metric)
        cells = [seconds(percentile(buckets, p)) for p in PERCENTILES]
        lines.append(f"{name:<16}" + "".join(f"{c:>10}" for c in [*cells, seconds(change.mean(metric))]))
    steps = change.grown("steps_total")
    if steps:
        host = change.rates("step_host_seconds_total", "stage")
        parts = [f"{stage} {seconds(rate * change.seconds / steps)}" for stage, rate in host.items() if rate]
        parts[:1] = [f"host: {part}" for part in parts[:1]]
        lines += ["", *_line("per step", parts, width)]
    return lines


def _gpu(change: Difference, width: int) -> list[str]:
    """Busy, idle and why: shares of the time that the server counted, else nothing."""
    busy = change.grown("gpu_busy_seconds_total")
    idle = {cause: rate * change.seconds for cause, rate in change.rates("gpu_idle_seconds_total", "cause").items()}
    if busy is None:
        return []
    total = busy + sum(idle.values())
    share = busy / total if total > 0 else None
    causes = [f"{cause} {_percent(value / total if total > 0 else None)}" for cause, value in idle.items()]
    causes[:1] = [f"idle: {cause}" for cause in causes[:1]]
    steps = [
        _rate(change.rate("steps_total")),
        f"in flight {_number(change.now.value('inflight_steps'), 0)}",
        f"overrun {_percent(change.share('overrun_tokens_total', 'generation_tokens_total'))} of new tokens",
    ]
    for what, name in (("copies", "gpu_copies_total"), ("waits", "gpu_syncs_total")):
        if (each := change.share(name, "steps_total")) is not None:
            steps.append(f"{what}/step {each:.1f}")
    lines = _line("GPU busy", [f"{_percent(share):>7} {_bar(share)}", *causes], width)
    lines += _line("steps/s", steps, width)
    if (flops := change.rate("estimated_flops_per_gpu_total")) is not None:
        read, written = (change.rate(f"estimated_{what}_bytes_per_gpu_total") for what in ("read", "write"))
        parts = [scaled(flops, "FLOP/s"), f"read {scaled(read, 'B/s')}", f"written {scaled(written, 'B/s')}"]
        lines += _line("estimate", parts, width)
    return lines
