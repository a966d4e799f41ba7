"""Every metric that dashboards look for is there under its name, and says what has happened."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from engines import OPTIONS, model, wait_until
from gapless.cache.spec import KVSpec, StateSpec, VectorSpec
from gapless.engine.stats import EngineStats
from gapless.scheduler.read_counters import ReadCounters
from gapless.scheduler.stats import SchedulerStats
from gapless.server.estimates import ModelSizes
from gapless.server.metrics import Metrics
from gapless.server.top.reading import Reading
from gapless.server.wire import Step
from live_server import LiveServer, serving

GAUGES = """num_requests_running num_requests_waiting num_requests_waiting_by_reason{reason} kv_cache_usage_perc
    engine_sleep_state{sleep_state} lora_requests_info{max_lora} cache_config_info{block_size} inflight_steps
    queue_peak{queue} open_http_requests"""
COUNTERS = """prompt_tokens generation_tokens request_success{finished_reason} num_preemptions prefix_cache_queries
    prefix_cache_hits prompt_tokens_cached corrupted_requests admission_rejections{reason}
    estimated_flops_per_gpu estimated_read_bytes_per_gpu estimated_write_bytes_per_gpu
    gpu_busy_seconds{phase} gpu_idle_seconds{cause} step_host_seconds{stage} steps held_steps overrun_tokens
    gpu_syncs gpu_copies{direction} gpu_copied_bytes{direction}"""
HISTOGRAMS = """time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds
    e2e_request_latency_seconds request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds
    request_inference_time_seconds request_prompt_tokens request_generation_tokens request_params_n
    request_params_max_tokens request_max_num_generation_tokens iteration_tokens_total request_num_preemptions
    request_prefill_kv_computed_tokens"""
LABELS = {
    "num_requests_waiting_by_reason": {"capacity", "deferred"},
    "request_success": {"stop", "length", "abort", "error"},
    "admission_rejections": {"max_num_queued_reqs", "max_num_queued_tokens"},
    "gpu_busy_seconds": {"prefill", "decode"},
    "gpu_idle_seconds": {"no_work", "host", "masks"},
    "queue_peak": {"inbox", "messages", "grammars"},
    "gpu_copies": {"h2d", "d2h"},
    "gpu_copied_bytes": {"h2d", "d2h"},
}
"""The label values that must be there."""
PROMPT, NEW = 100, 11


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with serving(dev_routes=True) as live:
        yield live


def read(server: LiveServer) -> Reading:
    return Reading.of(0.0, server.client.get("/metrics").text)


def settled(server: LiveServer) -> Reading:
    """Once nothing runs and the last counters have come."""
    wait_until(lambda: not server.front_end.tickets and server.engine.stats.in_flight == 0, "the end")
    wait_until(lambda: read(server).value("steps_total") == server.engine.stats.steps, "the counters")
    return read(server)


def complete(server: LiveServer, prompt: list[int], new: int) -> None:
    body = {"prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True}
    answer = server.post("/v1/completions", body)
    assert answer.json()["usage"]["completion_tokens"] == new, answer.text


def test_all_names_are_there_before_the_first_request(server: LiveServer) -> None:
    reading = read(server)
    assert reading.prefix == "gapless:"
    for kind, names in (("gauge", GAUGES), ("counter", COUNTERS), ("histogram", HISTOGRAMS)):
        for word in names.split():
            name, _, label = word.rstrip("}").partition("{")
            sample = {"gauge": name, "counter": f"{name}_total", "histogram": f"{name}_bucket"}[kind]
            rows = reading.samples.get(reading.prefix + sample)
            assert rows, f"{kind} {sample}"
            for own, value in rows:
                assert own["model_name"] == "tiny"
                assert own["engine"] == "0"
                assert value >= 0
                assert not label or label in own
            if name in LABELS:
                assert {own[label] for own, _ in rows} >= LABELS[name]
            if kind == "histogram":
                assert reading.value(f"{name}_count") == reading.value(f"{name}_bucket", le="+Inf")


def test_values_of_one_request(server: LiveServer) -> None:
    """A prompt of 100 tokens in chunks of 64 and 36, and 11 new ones: 12 steps, of which the first 2 compute it."""
    before = settled(server)
    complete(server, list(range(2, 2 + PROMPT)), NEW)
    after = settled(server)

    def grown(name: str, **labels: str) -> float:
        return (after.value(name, **labels) or 0.0) - (before.value(name, **labels) or 0.0)

    steps, tokens = 2 + NEW - 1, PROMPT + NEW - 1
    assert grown("steps_total") == grown("gpu_syncs_total") == steps
    assert grown("gpu_copies_total", direction="h2d") == grown("gpu_copies_total", direction="d2h") == steps
    assert grown("gpu_copied_bytes_total", direction="h2d") > 4 * tokens
    assert grown("gpu_busy_seconds_total", phase="prefill") > 0
    assert grown("gpu_busy_seconds_total", phase="decode") > 0
    assert grown("iteration_tokens_total_sum") == tokens
    assert grown("request_prefill_kv_computed_tokens_sum") == PROMPT
    assert grown("request_prefill_kv_computed_tokens_count") == 1
    # The model by hand: which tables and products it has.
    own = model()
    config = own.config
    assert not config.tie_word_embeddings
    numbers = sum(p.numel() for p in own.parameters())
    table = config.hidden_size * config.vocab_size
    heads, layers = config.num_attention_heads * config.head_dim, config.num_hidden_layers
    kv = 2 * layers * config.num_key_value_heads * config.head_dim * 4  # bytes of a position
    contexts = [64, *range(PROMPT, PROMPT + NEW)]  # at the end of each step
    pairs = sum(range(1, PROMPT + NEW))  # token p sees p + 1
    flops = 2 * (numbers - 2 * table) * tokens + 2 * table * steps + 4 * layers * heads * pairs
    assert grown("estimated_flops_per_gpu_total") == flops
    assert grown("estimated_read_bytes_per_gpu_total") == steps * 4 * (numbers - table) + kv * sum(contexts)
    assert grown("estimated_write_bytes_per_gpu_total") == kv * tokens

    complete(server, list(range(2, 2 + PROMPT)), 1)  # all of its blocks are found but the last one
    last, block = settled(server), OPTIONS["block_size"]
    found = PROMPT // block * block
    for name, want in (
        ("prefix_cache_hits_total", found),
        ("prompt_tokens_cached_total", found),
        ("prefix_cache_queries_total", PROMPT),
        ("request_prefill_kv_computed_tokens_sum", PROMPT - found),
    ):
        assert (last.value(name) or 0.0) - (after.value(name) or 0.0) == want, name


def test_why_requests_wait(server: LiveServer) -> None:
    def waiting() -> tuple[float, dict[str, float]]:
        reading = read(server)
        return reading.value("num_requests_waiting") or 0.0, reading.by("num_requests_waiting_by_reason", "reason")

    def start(count: int) -> list[threading.Thread]:
        threads = [threading.Thread(target=complete, args=(server, [3 + i, 5], 30)) for i in range(count)]
        for thread in threads:
            thread.start()
        return threads

    settled(server)
    assert server.client.post("/pause", params={"mode": "keep"}).status_code == 200
    threads = start(3)
    wait_until(lambda: waiting() == (3, {"capacity": 0, "deferred": 3}), "requests that wait for the end of a pause")
    assert server.client.post("/resume").status_code == 200
    for thread in threads:
        thread.join()
    settled(server)
    assert waiting() == (0, {"capacity": 0, "deferred": 0})
    with server.gated() as gate:  # all completions of a request come in one turn, and the first step does not end
        gate.open.clear()
        body = {"prompt": [3, 5], "n": OPTIONS["max_num_seqs"] + 2, "max_tokens": 3}
        thread = threading.Thread(target=server.post, args=("/v1/completions", body))
        thread.start()
        wait_until(lambda: waiting() == (2, {"capacity": 2, "deferred": 0}), "requests that wait for a place")
        assert read(server).value("num_requests_running") == OPTIONS["max_num_seqs"]
        gate.open.set()
        thread.join()


def test_a_time_without_work_is_counted_while_it_lasts(server: LiveServer) -> None:
    def counted() -> tuple[float, float, float]:
        """When it was asked, when it was answered, and the counter."""
        asked = time.monotonic()
        reading = read(server)
        total = (reading.value(f"gpu_{what}_seconds_total") or 0.0 for what in ("busy", "idle"))
        return asked, time.monotonic(), sum(total)

    complete(server, [3, 5], 2)
    settled(server)
    before = counted()
    wait_until(lambda: counted()[2] > before[2], "a sign of life that says that nothing runs")
    before = counted()
    wait_until(lambda: counted()[2] > before[2] + 1.0, "the counter")
    after = counted()
    print(f"{before=} {after=}")
    assert after[0] - before[1] - 0.01 < after[2] - before[2] < after[1] - before[0] + 0.01
    told = read(server).value("gpu_idle_seconds_total", cause="no_work") or 0.0
    start = time.monotonic()
    complete(server, [3, 5], 2)
    settled(server)
    again = read(server).value("gpu_idle_seconds_total", cause="no_work") or 0.0
    assert told <= again < told + (time.monotonic() - start) + 0.5  # what was told in advance is not told twice


def test_a_sign_of_life_within_a_step_loses_nothing() -> None:
    metrics = Metrics("gapless", "m")
    for steps, computed, generated, busy in ((1, 64, 0, 1.0), (1, 100, 1, 2.0), (2, 110, 2, 3.0)):
        stats = SchedulerStats(tokens_computed=computed, generated_tokens=generated)
        metrics.step(Step(None, EngineStats(steps=steps, in_flight=1, busy=busy), stats))
    found = Reading.of(0.0, metrics.text().decode())
    assert found.value("iteration_tokens_total_sum") == 110
    assert found.value("iteration_tokens_total_count") == 2
    assert found.value("inter_token_latency_seconds_count") == 2
    assert found.value("inter_token_latency_seconds_sum") == 2 * 2.0


def test_options_of_the_cache(server: LiveServer) -> None:
    rows = read(server).samples["gapless:cache_config_info"]
    ((labels, value),) = rows
    assert value == 1
    assert labels["block_size"] == str(OPTIONS["block_size"])
    assert labels["kv_cache_dtype"] == "auto"
    assert labels["num_gpu_blocks"] == str(OPTIONS["num_kv_blocks"] - 1)  # the null block holds nothing


class Shapes:
    """A model of all kinds of layers, as far as sizes go."""

    vocab_size, dtype, weight_bytes = 1000, torch.bfloat16, 2 * 50_000
    kv_specs = (
        KVSpec(2, 8, 8, "bfloat16"),
        KVSpec(2, 8, 8, "bfloat16", window=4),
        VectorSpec(6, "bfloat16", window=3),
        StateSpec((4, 4), "float32", slots=3),
    )


def test_estimates_of_all_kinds_of_layers() -> None:
    sizes = ModelSizes.of(Shapes(), (None, 3, 4))
    done = SchedulerStats(steps=2, tokens_computed=10, reads=ReadCounters(3, [100, 30, 40], [200, 31, 41]))
    found = sizes.estimate(done)
    kv, conv, state = 2 * 16 * 2, 6 * 2, 16 * 4
    assert found.read == 2 * Shapes.weight_bytes + 100 * kv + 30 * conv + 40 * kv + 3 * state
    assert found.written == 10 * (2 * kv + conv) + 3 * state
    # No config: as many query heads as key heads, and all weights for each token.
    assert found.flops == 10 * 2 * 50_000 + 200 * 2 * 2 * 16 + 31 * 2 * 6 + 41 * 2 * 2 * 16
