"""Prometheus metrics. Names have vLLM's endings, under a prefix of one's own, so that its dashboards can be used.

All of this runs on the event loop's thread: once for a step, once for the end of a request, never for a token. The
engine's counters come with its messages and are only copied. What must be counted here is kept in plain lists; the
client library writes it down when somebody asks.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from gapless.engine.stats import EngineStats
from gapless.request.outputs import RequestMetrics
from gapless.request.sampling_params import SamplingParams
from gapless.scheduler.stats import SchedulerStats
from gapless.server.estimates import Estimates
from gapless.server.frontend import FrontEnd
from gapless.server.ticket import Ticket
from gapless.server.wire import Step

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
PER_TOKEN = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5),
    *(10, 20, 40, 80),
)
LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
POWERS = tuple(2**i for i in range(15))
COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000)
N = (1, 2, 5, 10, 20)


class Histogram:
    """Counts by bucket, for one thread. One call may stand for many equal values."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """``times`` values that are ``value``."""
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus writes them."""
        total, found = 0, list[tuple[str, float]]()
        for bound, count in zip((*map(repr, map(float, self.bounds)), "+Inf"), self.counts, strict=True):
            total += count
            found.append((bound, total))
        return found


HISTOGRAMS: dict[str, tuple[Sequence[float], str]] = {
    "time_to_first_token_seconds": (TTFT, "From a request's arrival to its first token."),
    "inter_token_latency_seconds": (PER_TOKEN, "Between two tokens of a request: from step to step."),
    "request_time_per_output_token_seconds": (PER_TOKEN, "Mean time per token after a request's first."),
    "e2e_request_latency_seconds": (LATENCY, "From a request's arrival to its end."),
    "request_inference_time_seconds": (LATENCY, "From a request's arrival to its end, for those that had a token."),
    "request_queue_time_seconds": (LATENCY, "From a sequence's arrival to the planning of its first step."),
    "request_prefill_time_seconds": (LATENCY, "From a request's arrival to its first token, the queue included."),
    "request_decode_time_seconds": (LATENCY, "From a request's first token to its last."),
    "request_prompt_tokens": (COUNTS, "Tokens of a prompt."),
    "request_generation_tokens": (COUNTS, "New tokens of a request."),
    "request_params_n": (N, "Parameter n."),
    "request_params_max_tokens": (COUNTS, "Parameter max_tokens."),
    "request_max_num_generation_tokens": (COUNTS, "New tokens of a request's longest completion."),
    "request_prefill_kv_computed_tokens": (COUNTS, "Tokens of a sequence's prompt that no prefix held."),
    "request_num_preemptions": (N, "Preemptions of a request."),
    "iteration_tokens_total": (POWERS, "Tokens computed in a step."),
}
"""Name: bounds, and what it says."""


def _active(engine: EngineStats) -> float:
    """Seconds in which there was work."""
    return engine.busy + engine.idle_host + engine.idle_masks


class Metrics(Collector):
    """See the module.

    Args:
        prefix: before each name, with a colon.
        model_name: a label of each.
    """

    def __init__(self, prefix: str, model_name: str) -> None:
        self._prefix = prefix
        self._labels = {"model_name": model_name, "engine": "0"}
        self._histograms = {name: Histogram(bounds) for name, (bounds, _) in HISTOGRAMS.items()}
        self._finished = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        self._http: dict[tuple[str, str, int], int] = {}
        self._http_seconds: dict[tuple[str, str], Histogram] = {}
        self._step = Step(None, EngineStats(), SchedulerStats())  # counters are there, and zero, from the start
        self._counted = self._step  # the latest with a step that none before it had: a sign of life is not one
        self._stepped = 0.0  # when the latest step was heard of
        self._resting = False  # nothing has happened since
        self._no_work = 0.0  # seconds that were told
        self.front_end: FrontEnd | None = None
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    # ---- recording ------------------------------------------------------------------------------------------------

    def submitted(self, params: Sequence[SamplingParams]) -> None:
        """A request was taken."""
        for p in params:
            self._histograms["request_params_n"].observe(p.n)
            self._histograms["request_params_max_tokens"].observe(p.max_tokens or 0)

    def step(self, step: Step) -> None:
        """A message of the engine."""
        before, self._step = self._counted, step
        if step.message is not None:
            for seconds, tokens in zip(step.message.waits, step.message.prefills, strict=True):
                self._histograms["request_queue_time_seconds"].observe(seconds)
                self._histograms["request_prefill_kv_computed_tokens"].observe(tokens)
        steps = step.engine.steps - before.engine.steps
        if steps <= 0:
            self._resting = step.engine.steps > 0 and step.engine.in_flight == 0
            return
        self._counted, self._stepped, self._resting = step, time.monotonic(), False
        computed = step.scheduler.tokens_computed - before.scheduler.tokens_computed
        self._histograms["iteration_tokens_total"].observe(computed / steps, steps)
        # Steps follow one another without a gap that is not counted, so that this is the time from step to step, and a
        # row that decodes gets a token in each.
        seconds = _active(step.engine) - _active(before.engine)
        generated = step.scheduler.generated_tokens - before.scheduler.generated_tokens
        self._histograms["inter_token_latency_seconds"].observe(seconds / steps, generated)

    def finished(self, ticket: Ticket) -> None:
        """A request has ended."""
        aborted = ticket.sequences - len(ticket.reasons)
        for reason in (*ticket.reasons, *("abort" for _ in range(aborted))):
            self._finished[reason] = self._finished.get(reason, 0) + 1
        for i, group in enumerate(ticket.groups):
            self._request(group.metrics, len(group.prompt_token_ids), list(ticket.generated.get(i, {}).values()))

    def _request(self, metrics: RequestMetrics, prompt_tokens: int, generated: list[int]) -> None:
        observe = {name: histogram.observe for name, histogram in self._histograms.items()}
        observe["request_prompt_tokens"](prompt_tokens)
        observe["request_generation_tokens"](sum(generated))
        longest = max(generated, default=0)
        observe["request_max_num_generation_tokens"](longest)
        observe["request_num_preemptions"](metrics.num_preemptions)
        first, end, arrival = metrics.first_token_time, metrics.finished_time, metrics.arrival_time
        if first is not None:
            observe["time_to_first_token_seconds"](first - arrival)
            observe["request_prefill_time_seconds"](first - arrival)
        if end is None:
            return
        observe["e2e_request_latency_seconds"](end - arrival)
        if first is not None:
            observe["request_inference_time_seconds"](end - arrival)
            observe["request_decode_time_seconds"](end - first)
            if longest > 1:  # completions of a request run side by side
                observe["request_time_per_output_token_seconds"]((end - first) / (longest - 1))

    def http(self, method: str, path: str, status: int, seconds: float) -> None:
        """A request was answered, to its last byte, or was given up by its client."""
        key = (method, path, status)
        self._http[key] = self._http.get(key, 0) + 1
        histogram = self._http_seconds.get((method, path))
        if histogram is None:
            histogram = self._http_seconds[method, path] = Histogram(LATENCY)
        histogram.observe(seconds)

    # ---- writing --------------------------------------------------------------------------------------------------

    def text(self) -> bytes:
        """All metrics, in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Called by the client library."""
        yield from self._histogram_families()
        yield from self._counters()
        yield from self._gauges()
        yield from self._http_families()

    def _name(self, name: str) -> str:
        return f"{self._prefix}:{name}"

    def _histogram_families(self) -> Iterator[Metric]:
        for name, (_, text) in HISTOGRAMS.items():
            family = HistogramMetricFamily(self._name(name), text, labels=list(self._labels))
            histogram = self._histograms[name]
            family.add_metric(list(self._labels.values()), histogram.buckets(), histogram.sum)
            yield family

    def _http_families(self) -> Iterator[Metric]:
        answers = CounterMetricFamily("http_requests", "Answers.", labels=["method", "handler", "status"])
        for (method, path, status), count in self._http.items():
            answers.add_metric([method, path, str(status)], count)
        yield answers
        text = "From a request's head to the last byte of its answer."
        seconds = HistogramMetricFamily("http_request_duration_seconds", text, labels=["method", "handler"])
        for (method, path), histogram in self._http_seconds.items():
            seconds.add_metric([method, path], histogram.buckets(), histogram.sum)
        yield seconds

    def _family(self, kind: type[Metric], name: str, text: str, values: dict[str, float], label: str = "") -> Metric:
        names = [*self._labels, *([label] if label else [])]
        family = kind(self._name(name), text, labels=names)  # type: ignore[call-arg]
        for value, amount in values.items():
            family.add_metric([*self._labels.values(), *([value] if label else [])], amount)  # type: ignore[attr-defined]
        return family

    def _counters(self) -> Iterator[Metric]:
        def counter(name: str, text: str, values: dict[str, float], label: str = "") -> Metric:
            return self._family(CounterMetricFamily, name, text, values, label)

        finished = {reason: float(count) for reason, count in self._finished.items()}
        yield counter("request_success", "Completions that have ended.", finished, "finished_reason")
        rejected = self.front_end.rejected if self.front_end is not None else {}
        yield counter(
            "admission_rejections",
            "Requests that were refused because the queue was full.",
            {reason: float(count) for reason, count in rejected.items()},
            "reason",
        )
        engine, scheduler = self._step.engine, self._step.scheduler
        for name, text, value in (
            ("prompt_tokens", "Tokens of prompts.", scheduler.prompt_tokens),
            ("generation_tokens", "New tokens.", scheduler.generated_tokens),
            ("num_preemptions", "Preemptions.", scheduler.preemptions),
            ("corrupted_requests", "Requests in which no token could be chosen.", scheduler.corrupted),
            ("prefix_cache_queries", "Tokens of prompts that were looked up.", scheduler.prompt_tokens),
            ("prefix_cache_hits", "Tokens of prompts that were found.", scheduler.prefix_hit_tokens),
            ("prompt_tokens_cached", "Tokens of prompts that were not computed.", scheduler.prefix_hit_tokens),
            ("overrun_tokens", "Tokens computed past the end of a request.", scheduler.overrun_tokens),
            ("steps", "Steps.", engine.steps),
            ("held_steps", "Steps that waited for masks of structured output.", engine.held_steps),
            ("gpu_syncs", "Waits of the host for the device: one for each step.", engine.copies.waits),
        ):
            yield counter(name, text, {"": float(value)})
        copies = engine.copies
        numbers, sizes = (copies.h2d, copies.d2h), (copies.h2d_bytes, copies.d2h_bytes)
        for name, text, pair in (
            ("gpu_copies", "Copies between host and device that were asked for.", numbers),
            ("gpu_copied_bytes", "Bytes of these copies.", sizes),
        ):
            yield counter(name, text, dict(zip(("h2d", "d2h"), map(float, pair), strict=True)), "direction")
        model = None if self.front_end is None else self.front_end.ready.sizes
        done = Estimates() if model is None else model.estimate(scheduler)
        for name, text, amount in (
            ("flops", "Estimate, from counts and the model's sizes: operations.", done.flops),
            ("read_bytes", "Estimate: bytes read, of weights once a step and of keys and values.", done.read),
            ("write_bytes", "Estimate: bytes of keys, values and states that were written.", done.written),
        ):
            yield counter(f"estimated_{name}_per_gpu", text, {"": float(amount)})
        if (drafts := scheduler.drafts) is not None:
            places = {str(i): float(n) for i, n in enumerate(drafts.accepted)}
            for name, text, total in (
                ("spec_decode_num_drafts", "Steps of a row that had drafts.", drafts.steps),
                ("spec_decode_num_draft_tokens", "Drafts.", sum(drafts.proposed)),
                ("spec_decode_num_accepted_tokens", "Drafts that were right.", sum(drafts.accepted)),
            ):
                yield counter(name, text, {"": float(total)})
            name = "spec_decode_num_accepted_tokens_per_pos"
            yield counter(name, "Drafts that were right, by their place.", places, "position")
        busy = {"prefill": engine.busy_prompts, "decode": engine.busy - engine.busy_prompts}
        text = "Time in which a step ran on the device; prefill: it computed several tokens of a prompt, or scored one."
        yield counter("gpu_busy_seconds", text, busy, "phase")
        # The engine counts a time without work when it is over. Here it grows meanwhile: a rate is of its own window.
        rest = time.monotonic() - self._stepped if self._resting else 0.0
        self._no_work = max(self._no_work, engine.idle_no_work + rest)
        idle = {"host": engine.idle_host, "masks": engine.idle_masks, "no_work": self._no_work}
        yield counter("gpu_idle_seconds", "Time in which the device had nothing to do.", idle, "cause")
        host = dict(engine.host)
        yield counter("step_host_seconds", "Time of the loop's thread; wait is for the device.", host, "stage")

    def _adapters(self, front_end: FrontEnd) -> Metric:
        """Which adapters requests run with and wait for; its value is when it was asked."""
        running = {t.lora for t in front_end.tickets if t.lora is not None and t.started}
        waiting = {t.lora for t in front_end.tickets if t.lora is not None and not t.started}
        labels = {
            **self._labels,
            "max_lora": str(front_end.ready.options.get("max_loras") or 0),
            "running_lora_adapters": ",".join(sorted(running)),
            "waiting_lora_adapters": ",".join(sorted(waiting - running)),
        }
        family = GaugeMetricFamily(self._name("lora_requests_info"), "Adapters in use.", labels=list(labels))
        family.add_metric(list(labels.values()), time.time())
        return family

    def _gauges(self) -> Iterator[Metric]:
        def gauge(name: str, text: str, values: dict[str, float], label: str = "") -> Metric:
            return self._family(GaugeMetricFamily, name, text, values, label)

        front_end, step = self.front_end, self._step
        level = 0 if front_end is None else front_end.sleep_level
        states = {name: float(i == level) for i, name in enumerate(("awake", "cache_released", "weights_offloaded"))}
        yield gauge("engine_sleep_state", "1 for the state that it is in.", states, "sleep_state")
        if front_end is None:
            return
        yield self._adapters(front_end)
        scheduler = step.scheduler
        deferred = scheduler.waiting if front_end.paused or level else scheduler.deferred
        yield gauge("num_requests_running", "Sequences in the batch.", {"": float(scheduler.running)})
        yield gauge("num_requests_waiting", "Sequences that wait.", {"": float(scheduler.waiting)})
        yield gauge(
            "num_requests_waiting_by_reason",
            "Sequences that wait: for a place (capacity), or for the end of a pause or a sleep (deferred).",
            {"capacity": float(scheduler.waiting - deferred), "deferred": float(deferred)},
            "reason",
        )
        yield gauge("kv_cache_usage_perc", "Share of the KV cache in use, from 0 to 1.", {"": scheduler.kv_use})
        yield gauge(
            "inflight_steps", "Steps that were launched and have not ended.", {"": float(step.engine.in_flight)}
        )
        now = step.engine
        peaks = {"inbox": now.inbox_peak, "messages": now.messages_peak, "grammars": now.grammars_peak}
        text = "Most entries so far of queues that have no bound: calls for the loop, messages, grammars to make."
        yield gauge("queue_peak", text, {name: float(peak) for name, peak in peaks.items()}, "queue")
        yield gauge("open_http_requests", "HTTP requests before the engine.", {"": float(len(front_end.tickets))})
        options = front_end.ready.options
        names = (
            *("block_size", "num_kv_blocks", "max_num_seqs", "max_num_batched_tokens", "pipeline_depth"),
            *("kv_cache_dtype",),
            *("enable_prefix_caching", "gpu_memory_utilization", "kv_cache_memory_bytes"),
        )
        labels = {**self._labels, **{n: str(options.get(n)) for n in names}}
        labels["num_gpu_blocks"] = str(scheduler.blocks_total)
        info = GaugeMetricFamily(self._name("cache_config_info"), "Options of the engine.", labels=list(labels))
        info.add_metric(list(labels.values()), 1)
        yield info
