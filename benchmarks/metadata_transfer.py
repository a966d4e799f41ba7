"""What it costs to send the metadata of hybrid layers from pageable memory: a published measurement, on this engine.

    python benchmarks/metadata_transfer.py                      # batches 1, 8 and 32, drafts on
    python benchmarks/metadata_transfer.py --device cpu --tiny  # what a laptop can show

A small random Qwen4-Exp decodes with drafts, and its layers need to know the row of each packed token. The two ways
differ in nothing else, and give the same tokens, which is checked:

    pageable   the loop's thread builds the rows of sequences with drafts, of the others, and where their tokens are, as
               small tensors, and copies each with ``.to(device)``: pageable memory, for which the call waits
    slot       as this engine works: derived on the device from what the slot's one copy brought

Per batch: first each way alone, without a profiler, for tokens per second; then a profile of steady steps of each. The
profile of a GPU gives, per step, the time from first to last work (the activity span), the calls that wait for a
stream, and the sum of kernel times. vLLM's pull request 55054 made this change for the same layers, and reported
11.185 -> 9.272 ms, 2 -> 0 calls, unchanged kernel time, and up to 9.9 % more output tokens per second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gapless import LLM
from gapless.bench.environment import environment
from gapless.bench.measure import run_once, warm
from gapless.bench.table import headline
from gapless.bench.workloads import Workload, uniform
from gapless.engine.client import EngineClient
from gapless.trace.analyze import analyze
from gapless.trace.chrome import TraceError
from gapless.trace.observe import Window
from gapless.trace.record import CpuRecorder, GpuRecorder
from gapless.trace.recording import load
from gapless.trace.steps import find_steps

WAYS = ("pageable", "slot")
SKIP = 12
SMALL: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 128, "linear_num_key_heads": 8, "linear_num_value_heads": 16,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts": 32, "num_experts_per_tok": 4,
    "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256, "hc_count": 4, "hc_lowrank": 64,
    "ple_layer_ids": [2, 6], "ple_embed_dim": 1024, "ngram_vocab_size_base": 100_000, "indexer_n_heads": 4,
    "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 512, "indexer_compress_ratio": 16,
    "max_position_embeddings": 4096,
}  # fmt: skip
TINY: dict[str, Any] = {
    **SMALL, "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "hc_count": 2, "hc_lowrank": 8, "ple_layer_ids": [1, 3], "ple_embed_dim": 64, "ngram_vocab_size_base": 1000,
    "indexer_head_dim": 16, "indexer_budget": 64,
}  # fmt: skip


def random_model(tiny: bool, device: torch.device, dtype: torch.dtype) -> Any:
    """Made on its device; nothing is zero that would hide a part."""
    from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

    config = Qwen4ExpTextConfig(
        **(TINY if tiny else SMALL),
        split_ngram_parts=1,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    torch.manual_seed(0)
    with device:
        model: Any = Qwen4ExpForCausalLM._from_config(config, dtype=dtype, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if "ple.conv1d" in name:
            parameter.data.normal_(std=0.3)
    return model.eval().requires_grad_(False)


class PageableMetadata:
    """Builds the rows of packed tokens on the host, step by step, and copies them from pageable memory.

    The switch of this benchmark: it replaces what `gapless.model.token_rows.PackedStep.token_rows` derives on the
    device by a buffer that it fills before each forward, and is installed before the graphs are captured.
    """

    def __init__(self) -> None:
        self.rows: torch.Tensor | None = None
        self.copies = 0
        self._plan: Any = None

    def install(self, runner: Any) -> None:
        """Into a runner that has captured nothing yet."""
        ring = runner._ring.slots[0]
        size = runner.state.indices.input_ids.shape[0]
        self.rows = torch.full((size,), runner.layout.null_row, dtype=torch.int64, device=ring.device.device)
        model, device, launch, rows = runner.graphs.model, runner.device, runner.launch, self.rows
        forward, put, null_row = model.forward, device.launch, runner.layout.null_row

        def noted(plan: Any) -> Any:
            self._plan = plan
            return launch(plan)

        def fed(input_ids: torch.Tensor, positions: torch.Tensor, context: Any, *rest: Any) -> None:
            context.scratch["packed/token_rows"] = rows[: len(input_ids)]
            forward(input_ids, positions, context, *rest)

        def built(work: Callable[[], None], access: Any, name: str) -> None:
            plan = self._plan

            def both() -> None:
                self.build(plan, null_row)
                work()

            put(both if name == "forward" else work, access, name)

        vars(runner)["launch"], vars(device)["launch"] = noted, built
        runner.graphs.model = _Fed(model, fed)

    def build(self, plan: Any, null_row: int) -> None:
        """On the compute stream, before the step's forward."""
        assert self.rows is not None
        target = self.rows.device
        first = np.cumsum(plan.query_lens, dtype=np.int64) - plan.query_lens
        drafts = getattr(plan, "drafts", None)
        drafts = np.zeros(len(plan.rows), bool) if drafts is None else drafts
        self.rows.fill_(null_row)
        for part, width in ((drafts, int(getattr(plan, "width", 1))), (~drafts & (plan.query_lens == 1), 1)):
            if part.any():
                rows = torch.from_numpy(plan.rows[part].astype(np.int64)).to(target)  # what this measures
                places = torch.from_numpy(first[part]).to(target)
                self.copies += 2
                self.rows[places[:, None] + torch.arange(width, device=target)] = rows[:, None]
        long = ~drafts & (plan.query_lens > 1)
        if long.any():
            rows = torch.from_numpy(np.repeat(plan.rows[long], plan.query_lens[long]).astype(np.int64)).to(target)
            spans = zip(first[long], plan.query_lens[long], strict=True)
            places = torch.from_numpy(np.concatenate([np.arange(a, a + n) for a, n in spans])).to(target)
            self.copies += 2
            self.rows[places] = rows


class _Fed:
    """A model whose forward is another."""

    def __init__(self, model: Any, forward: Callable[..., None]) -> None:
        self._model, self.forward = model, forward

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@contextlib.contextmanager
def switched(way: str) -> Iterator[PageableMetadata | None]:
    """Engines that are built inside take this way."""
    if way == "slot":
        yield None
        return
    from gapless.engine import build

    original, metadata = build.Runner, PageableMetadata()

    def make(*args: Any, **kwargs: Any) -> Any:
        runner = original(*args, **kwargs)
        metadata.install(runner)
        return runner

    build.Runner = make  # type: ignore[misc,assignment]
    try:
        yield metadata
    finally:
        build.Runner = original  # type: ignore[misc]


class SteadyWindow(Window):
    """Steps of an unchanged batch, however many drafts they carry."""

    def _after_commit(self, time: float) -> None:
        if self._waits is None:
            now = self._scheduler.snapshot()
            steady = now.running == self._batch and now.waiting == 0 and self._seen_prompts()
            self._steady = self._steady + 1 if steady else 0
            if self._steady > self._skip:
                self._begin()
                self._waits = []
            return
        super()._after_commit(time)

    def _seen_prompts(self) -> bool:
        """Every running row has computed its prompt."""
        rows, running = self._scheduler.rows, self._scheduler.roster.running
        return bool((rows.known[running] > rows.prompt_len[running]).all())


@dataclass
class Row:
    """One line of the table; None where this machine cannot say."""

    batch: int
    way: str
    tokens_per_s: float
    step_ms: float
    activity_span_ms: float | None = None
    syncs: float | None = None
    kernel_ms: float | None = None
    h2d_per_step: float | None = None


def throughput(client: EngineClient, work: Workload) -> tuple[float, list[list[int]]]:
    """Output tokens per second of a whole run, and the tokens."""
    run = run_once(client, work, salt=1)
    return run.tokens / run.wall_s, [list(output.outputs[0].token_ids) for output in run.outputs]


def profile(client: EngineClient, work: Workload, steps: int, gpu: bool) -> tuple[Any, float]:
    """The report of a window of steady steps, and milliseconds of a step in it."""
    recorder = GpuRecorder(False) if gpu else CpuRecorder(client)
    client._engine.call(recorder.prepare)
    window = SteadyWindow(client, work.batch, SKIP, steps, recorder.begin, recorder.end)
    with window.watching():
        run_once(client, work, salt=1)
    if not window.done.is_set():
        raise SystemExit(f"no {steps} steady steps of {work.batch} requests: raise --new-tokens")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorder.write(path, window.seen)
        recording = load(path)
        try:
            report, _ = analyze(recording, find_steps(recording))
        except TraceError:
            report, _ = analyze(recording, find_steps(recording, count=steps))
    return report, window.seen.step_ms


def options(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Of both engines."""
    chosen: dict[str, Any] = {
        "device": str(device),
        "max_num_seqs": max(arguments.batches),
        "max_model_len": 2048 if not arguments.tiny else 512,
        "max_num_batched_tokens": 2048 if not arguments.tiny else 256,
        "pipeline_depth": arguments.depth,
        "kv_cache_memory_bytes": 2**30 if not arguments.tiny else 2**26,
        "check_model": False,
    }
    if arguments.drafts:
        # Drafts of every row in every step: acceptance decides nothing here.
        chosen["speculative"] = {"num_speculative_tokens": arguments.drafts, "min_accepted": 0}
    return chosen


def markdown(rows: list[Row]) -> str:
    """The table in the form in which the original was published: before, after, change."""
    lines = ["| batch | figure | pageable | slot | change |", "|---:|---|---:|---:|---:|"]
    by_key = {(row.batch, row.way): row for row in rows}
    figures = [
        ("GPU activity span / step", "activity_span_ms", "{:.3f} ms"),
        ("stream synchronisations / step", "syncs", "{:.2f}"),
        ("summed kernel time / step", "kernel_ms", "{:.3f} ms"),
        ("host-to-device copies / step", "h2d_per_step", "{:.2f}"),
        ("step without a profiler", "step_ms", "{:.3f} ms"),
        ("output throughput", "tokens_per_s", "{:.0f} tokens/s"),
    ]
    for batch in sorted({row.batch for row in rows}):
        before, after = by_key[batch, "pageable"], by_key[batch, "slot"]
        for title, name, form in figures:
            a, b = getattr(before, name), getattr(after, name)
            texts = ["n/a" if value is None else form.format(value) for value in (a, b)]
            change = f"{100 * (b - a) / a:+.1f} %" if a and b is not None else "-"
            lines.append(f"| {batch} | {title} | {texts[0]} | {texts[1]} | {change} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batches", type=lambda t: [int(n) for n in t.split(",")], default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=20, help="steady steps to profile (default: 20)")
    parser.add_argument("--drafts", type=int, default=3, help="of each row and step; 0 for none (default: 3)")
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=400)
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--tiny", action="store_true", help="a model that a CPU can run")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    name = ("cuda" if torch.cuda.is_available() else "cpu") if arguments.device == "auto" else arguments.device
    device = torch.device(name)
    gpu = device.type == "cuda"
    model = random_model(arguments.tiny, device, torch.bfloat16 if gpu else torch.float32)
    about = environment()
    print(headline(about), flush=True)
    rows: dict[tuple[int, str], Row] = {}
    loads = [
        replace(uniform("metadata", batch, arguments.prompt_len, arguments.new_tokens), vocab=model.config.vocab_size)
        for batch in arguments.batches
    ]
    with contextlib.ExitStack() as stack:
        engines: dict[str, LLM] = {}
        for way in WAYS:
            with switched(way):
                engines[way] = stack.enter_context(LLM(model, tokenizer=None, **options(arguments, device)))
        tokens: dict[tuple[int, str], list[list[int]]] = {}
        for load_ in loads:
            for way in WAYS:
                warm(engines[way]._client, load_)
            for way in (*WAYS, *WAYS[::-1]):  # either way is first once
                client = engines[way]._client
                before = client.stats()[0].steps
                rate, got = throughput(client, load_)
                steps = client.stats()[0].steps - before
                new = sum(map(len, got))
                row = Row(load_.batch, way, rate, 1e3 * new / rate / steps)
                old = rows.get((load_.batch, way))
                if old is None or old.tokens_per_s < rate:
                    rows[load_.batch, way] = row
                tokens[load_.batch, way] = got
            if tokens[load_.batch, "pageable"] != tokens[load_.batch, "slot"]:
                print(f"note: the tokens of batch {load_.batch} differ between the two ways", flush=True)
        for load_ in loads:  # a profile slows what comes after it in its process, so all of them come last
            for way in WAYS:
                report, _ = profile(engines[way]._client, load_, arguments.steps, gpu)
                row = rows[load_.batch, way]
                row.kernel_ms = report.kernel_ms_per_step
                row.activity_span_ms = report.activity_span_ms_per_step
                if gpu:
                    row.syncs = sum(call.per_step for call in report.syncs if "StreamSynchronize" in call.name)
                    row.h2d_per_step = sum(copy["per_step"] for copy in report.copies if "HtoD" in copy["name"])
    print(markdown(list(rows.values())))
    if not gpu:
        print(
            "note: on a CPU no copy has to be waited for; the two ways differ by noise, and only a GPU's figures count"
        )
    if arguments.json:
        data = {"environment": about, "arguments": vars(arguments) | {"json": None}}
        data["rows"] = [asdict(row) for row in rows.values()]
        arguments.json.write_text(json.dumps(data, indent=1, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
