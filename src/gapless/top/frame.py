"""One frame of `gapless top`, as lines of text."""

from __future__ import annotations

from gapless.top.exposition import Difference, percentile

BAR = 20
LATENCIES = (
    ("first token", "time_to_first_token_seconds"),
    ("between tokens", "inter_token_latency_seconds"),
    ("whole request", "e2e_request_latency_seconds"),
)
PERCENTILES = (50, 90, 99)


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


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


def frame(change: Difference, title: str) -> list[str]:
    """Lines without colours.

    Args:
        change: what happened since an earlier reading; gauges are of the later one.
        title: the first line.
    """
    now = change.now
    kv = now.value("kv_cache_usage_perc")
    ends = change.rates("request_success_total", "finished_reason")
    ended = ", ".join(f"{reason} {rate:.1f}" for reason, rate in ends.items() if rate) or "none"
    rejected = change.rate("admission_rejections_total")
    lines = [
        title,
        "",
        *_gpu(change),
        f"requests   running {_number(now.value('num_requests_running'), 0)}   "
        f"waiting {_number(now.value('num_requests_waiting'), 0)}   ended per s: {ended}"
        + (f"   refused per s: {rejected:.1f}" if rejected else ""),
        f"tokens/s   prompt {_number(change.rate('prompt_tokens_total'), 0)}   "
        f"new {_number(change.rate('generation_tokens_total'), 0)}",
        f"KV cache   {_percent(kv):>7} {_bar(kv)}   "
        f"prefix hits {_percent(change.share('prefix_cache_hits_total', 'prefix_cache_queries_total'))}   "
        f"preemptions/s {_number(change.rate('num_preemptions_total'))}",
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
        parts = [f"{stage} {seconds(rate * change.seconds / steps)}" for stage, rate in host.items()]
        lines += ["", "host per step   " + "   ".join(parts)]
    return lines


def _gpu(change: Difference) -> list[str]:
    """Busy, idle and why: shares of the time that the server counted, else nothing."""
    busy = change.grown("gpu_busy_seconds_total")
    idle = {cause: rate * change.seconds for cause, rate in change.rates("gpu_idle_seconds_total", "cause").items()}
    if busy is None:
        return []
    total = busy + sum(idle.values())
    share = busy / total if total > 0 else None
    causes = "   ".join(f"{cause} {_percent(value / total if total > 0 else None)}" for cause, value in idle.items())
    return [
        f"GPU busy   {_percent(share):>7} {_bar(share)}   idle: {causes}",
        f"steps/s    {_number(change.rate('steps_total'), 0)}   "
        f"in flight {_number(change.now.value('inflight_steps'), 0)}   "
        f"overrun {_percent(change.share('overrun_tokens_total', 'generation_tokens_total'))} of new tokens",
    ]
