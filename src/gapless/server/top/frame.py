"""One frame of `gapless top`, for `rich` to lay out."""

from __future__ import annotations

from collections.abc import Iterable

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gapless.server.top.reading import Difference, percentile

BAR = 20
STEP_COUNTS = {"copies": "copies", "waits": "syncs"}
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


def _bar(share: float | None) -> ProgressBar:
    return ProgressBar(total=1.0, completed=min(max(share or 0.0, 0.0), 1.0), width=BAR)


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


def _latencies(change: Difference) -> Table:
    table = Table(box=None, pad_edge=False, header_style="", padding=(0, 2, 0, 0))
    table.add_column("latency", no_wrap=True, overflow="ignore")
    for name in (*(f"p{p}" for p in PERCENTILES), "mean"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, metric in LATENCIES:
        buckets = change.buckets(metric)
        table.add_row(name, *(seconds(percentile(buckets, p)) for p in PERCENTILES), seconds(change.mean(metric)))
    return table


class _Rows:
    """A label and what belongs to it, on as many lines as the width asks for."""

    def __init__(self) -> None:
        self.grid = Table.grid(padding=(0, 3, 0, 0))
        self.grid.add_column(no_wrap=True, min_width=8)
        self.grid.add_column()

    def add(self, label: str, *items: str | RenderableType) -> None:
        self.grid.add_row(label, Columns(items, padding=(0, 3, 0, 0)))


def frame(change: Difference, title: Iterable[str]) -> RenderableType:
    """The whole screen.

    Args:
        change: what happened since an earlier reading; gauges are of the later one.
        title: parts of the first line, after the name of the command.
    """
    now = change.now
    kv = now.value("kv_cache_usage_perc")
    ends = change.rates("request_success_total", "finished_reason")
    ended = ", ".join(f"{reason} {rate:.1f}" for reason, rate in ends.items() if rate) or "none"
    rejected = change.rate("admission_rejections_total")
    deferred = now.value("num_requests_waiting_by_reason", reason="deferred")
    rows = _Rows()
    _gpu(change, rows)
    rows.add(
        "requests",
        f"running {_number(now.value('num_requests_running'), 0)}",
        f"waiting {_number(now.value('num_requests_waiting'), 0)}",
        *([f"of them held back {deferred:.0f}"] if deferred else []),
        f"ended per s: {ended}",
        *([f"refused per s: {rejected:.1f}"] if rejected else []),
    )
    rows.add(
        "tokens/s",
        f"prompt {_rate(change.rate('prompt_tokens_total'))}",
        f"new {_rate(change.rate('generation_tokens_total'))}",
    )
    rows.add(
        "KV cache",
        _percent(kv),
        _bar(kv),
        f"prefix hits {_percent(change.share('prefix_cache_hits_total', 'prefix_cache_queries_total'))}",
        f"preemptions/s {_number(change.rate('num_preemptions_total'))}",
    )
    parts: list[RenderableType] = [Text("   ".join(["gapless top", *title]), "bold"), "", rows.grid, ""]
    parts.append(_latencies(change))
    steps = change.grown("steps_total")
    if steps:
        host = change.rates("step_host_seconds_total", "stage")
        stages = [f"{stage} {seconds(rate * change.seconds / steps)}" for stage, rate in host.items() if rate]
        stages[:1] = [f"host: {part}" for part in stages[:1]]
        per_step = _Rows()
        per_step.add("per step", *stages)
        parts += ["", per_step.grid]
    return Group(*parts)


def _gpu(change: Difference, rows: _Rows) -> None:
    """Busy, idle and why: shares of the time that the server counted, else nothing."""
    busy = change.grown("gpu_busy_seconds_total")
    idle = {cause: rate * change.seconds for cause, rate in change.rates("gpu_idle_seconds_total", "cause").items()}
    if busy is None:
        return
    total = busy + sum(idle.values())
    share = busy / total if total > 0 else None
    causes = [f"{cause} {_percent(value / total if total > 0 else None)}" for cause, value in idle.items()]
    causes[:1] = [f"idle: {cause}" for cause in causes[:1]]
    rows.add("GPU busy", _percent(share), _bar(share), *causes)
    each = {what: change.share(f"gpu_{name}_total", "steps_total") for what, name in STEP_COUNTS.items()}
    rows.add(
        "steps/s",
        _rate(change.rate("steps_total")),
        f"in flight {_number(change.now.value('inflight_steps'), 0)}",
        f"overrun {_percent(change.share('overrun_tokens_total', 'generation_tokens_total'))} of new tokens",
        *(f"{what}/step {count:.1f}" for what, count in each.items() if count is not None),
    )
    if (flops := change.rate("estimated_flops_per_gpu_total")) is not None:
        read, written = (change.rate(f"estimated_{what}_bytes_per_gpu_total") for what in ("read", "write"))
        rows.add(
            "estimate", scaled(flops, "FLOP/s"), f"read {scaled(read, 'B/s')}", f"written {scaled(written, 'B/s')}"
        )
