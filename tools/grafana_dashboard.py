"""Write deploy/grafana-dashboard.json: what the server exports, on one page.

    python tools/grafana_dashboard.py

The file is made from the list below, and a test fails if the two differ or if a query names what is not exported.
Queries take the prefix of the metrics' names from a variable of the dashboard, so that it serves servers of another
prefix too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).parent.parent / "deploy" / "grafana-dashboard.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WHERE = 'model_name=~"$model",instance=~"$instance"'
HOST = 'cause="host"'
Panel = tuple[str, str, int, str, list[tuple[str, str]]]


def rate(name: str, by: str = "", of: str = "") -> str:
    """Growth per second, summed over what is chosen."""
    labels = WHERE + (f",{of}" if of else "")
    grouped = f"sum by ({by})" if by else "sum"
    return f"{grouped} (rate(${{prefix}}:{name}{{{labels}}}[$__rate_interval]))"


def gauge(name: str, how: str = "sum") -> str:
    """A gauge over what is chosen."""
    return f"{how} (${{prefix}}:{name}{{{WHERE}}})"


def quantiles(name: str) -> list[tuple[str, str]]:
    """Median, 90th and 99th percentile of a histogram."""
    found = [(f"p{100 * q:g}", f"histogram_quantile({q}, {rate(f'{name}_bucket', 'le')})") for q in (0.5, 0.9, 0.99)]
    return [*found, ("mean", f"{rate(f'{name}_sum')} / {rate(f'{name}_count')}")]


STEPS = rate("steps_total")
BUSY, IDLE = rate("gpu_busy_seconds_total"), rate("gpu_idle_seconds_total")
PANELS: list[Panel] = [
    # title, unit, width of 24, description, (legend, query)
    ("GPU busy", "percentunit", 6, "Share of the counted time in which a step ran.", [
        ("", f"{BUSY} / ({BUSY} + {IDLE})")]),
    ("GPU waits for the host", "percentunit", 6, "The share that this engine is made to keep at zero.", [
        ("", f"{rate('gpu_idle_seconds_total', of=HOST)} / ({BUSY} + {IDLE})")]),
    ("Running", "short", 6, "Sequences in the batch.", [("", gauge("num_requests_running"))]),
    ("Waiting", "short", 6, "Sequences that wait for a place.", [("", gauge("num_requests_waiting"))]),
    ("GPU time", "percentunit", 12, "Busy, with prompts or without, and idle by cause.", [
        ("busy: {{phase}}", rate("gpu_busy_seconds_total", "phase")),
        ("idle: {{cause}}", rate("gpu_idle_seconds_total", "cause"))]),
    ("Host time per step", "s", 12, "Of the loop's thread, by stage; wait is for the GPU.", [
        ("{{stage}}", f"{rate('step_host_seconds_total', 'stage')} / on () group_left {STEPS}")]),
    ("Copies and waits per step", "short", 12, "One copy each way, and one wait; masks and adapters add copies.", [
        ("{{direction}}", f"{rate('gpu_copies_total', 'direction')} / on () group_left {STEPS}"),
        ("waits", f"{rate('gpu_syncs_total')} / {STEPS}")]),
    ("Copied bytes per second", "Bps", 12, "Between host and GPU.", [
        ("{{direction}}", rate("gpu_copied_bytes_total", "direction"))]),
    ("Tokens per second", "short", 12, "Prompts, new ones, and those computed past an end.", [
        ("prompt", rate("prompt_tokens_total")), ("new", rate("generation_tokens_total")),
        ("overrun", rate("overrun_tokens_total"))]),
    ("Requests", "short", 12, "In the batch, waiting, and open at the server.", [
        ("running", gauge("num_requests_running")),
        ("waiting: {{reason}}", gauge("num_requests_waiting_by_reason", "sum by (reason)")),
        ("open", gauge("open_http_requests"))]),
    ("Time to first token", "s", 12, "From arrival.", quantiles("time_to_first_token_seconds")),
    ("Time between tokens", "s", 12, "From step to step.", quantiles("inter_token_latency_seconds")),
    ("Whole request", "s", 12, "From arrival to end.", quantiles("e2e_request_latency_seconds")),
    ("Ends per second", "short", 12, "By reason, and refused ones.", [
        ("{{finished_reason}}", rate("request_success_total", "finished_reason")),
        ("refused: {{reason}}", rate("admission_rejections_total", "reason"))]),
    ("KV cache in use", "percentunit", 12, "Of the fullest engine.", [("", gauge("kv_cache_usage_perc", "max"))]),
    ("Prefix cache hits", "percentunit", 12, "Share of the prompts' tokens.", [
        ("", f"{rate('prefix_cache_hits_total')} / {rate('prefix_cache_queries_total')}")]),
    ("Steps", "short", 12, "Per second, and launched ones that have not ended.", [
        ("per second", STEPS), ("in flight", gauge("inflight_steps")),
        ("preemptions", rate("num_preemptions_total"))]),
    ("Tokens per step", "short", 12, "Computed in one step.", quantiles("iteration_tokens_total")),
    ("Estimated operations per second", "flops", 12, "From counts and the model's sizes, not measured.", [
        ("", rate("estimated_flops_per_gpu_total"))]),
    ("Estimated memory traffic", "Bps", 12, "Weights once a step, keys and values; not measured.", [
        ("read", rate("estimated_read_bytes_per_gpu_total")),
        ("written", rate("estimated_write_bytes_per_gpu_total"))]),
]  # fmt: skip


def dashboard() -> dict[str, Any]:
    """The dashboard's model, as Grafana imports it."""
    panels, x, y = list[dict[str, Any]](), 0, 0
    for i, (title, unit, width, text, queries) in enumerate(PANELS, 1):
        height = 4 if width == 6 else 8
        panels.append(
            {
                "id": i,
                "title": title,
                "description": text,
                "type": "stat" if width == 6 else "timeseries",
                "datasource": SOURCE,
                "gridPos": {"x": x, "y": y, "w": width, "h": height},
                "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
                "options": {"legend": {"displayMode": "list", "placement": "bottom"}} if width != 6 else {},
                "targets": [
                    {"refId": chr(65 + j), "datasource": SOURCE, "expr": query, "legendFormat": legend or "__auto"}
                    for j, (legend, query) in enumerate(queries)
                ],
            }
        )
        x += width
        if x == 24:
            x, y = 0, y + height

    def values(name: str, label: str) -> dict[str, Any]:
        query = f"label_values(${{prefix}}:request_success_total, {label})"
        return {
            "name": name, "label": name, "type": "query", "datasource": SOURCE, "query": query, "refresh": 2,
            "includeAll": True, "multi": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"},
        }  # fmt: skip

    return {
        "uid": "gapless-server",
        "title": "gapless server",
        "tags": ["gapless", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "label": "data source", "type": "datasource", "query": "prometheus"},
                {"name": "prefix", "label": "prefix", "type": "textbox", "query": "gapless",
                 "current": {"text": "gapless", "value": "gapless"}},
                values("model", "model_name"),
                values("instance", "instance"),
            ]
        },
        "panels": panels,
    }  # fmt: skip


def text() -> str:
    """The file."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    OUTPUT.write_text(text(), encoding="utf-8")
    print(OUTPUT)
