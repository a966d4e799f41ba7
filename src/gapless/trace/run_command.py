"""Profile a window of steady steps of a workload and explain its gaps. WORKLOAD is one of `gapless bench`; without
one, --batch and --prompt-len make it. The same window runs without a profiler first, because a profiler slows every
launch, and goes on doing so in its process.
"""

from __future__ import annotations

import argparse
import logging
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapless.bench.command import add_subject_arguments, check_lengths, engine_options, parse_depths
from gapless.bench.subject import make_subject
from gapless.bench.table import headline
from gapless.bench.workloads import Workload, uniform, workload
from gapless.cli.generate import log_to_stderr
from gapless.cli.options import add_options
from gapless.cli.parser import CommandError, Parser, UsageError
from gapless.config import EngineConfig
from gapless.trace.analyze_command import add_step_arguments, explain

if TYPE_CHECKING:
    from gapless.bench.sweep import Subject
    from gapless.engine.client import EngineClient
    from gapless.trace.observe import Window

ENGINES = ("gapless", "transformers-sync", "transformers-async")
TAIL, PEER_TAIL = 24, 300
logger = logging.getLogger("gapless")


def add_arguments(parser: Parser) -> None:
    """The options of ``gapless trace run``."""
    parser.usage = "gapless trace run [WORKLOAD] [OPTION ...]"
    add_subject_arguments(parser)
    parser.add_argument("--engine", choices=ENGINES, default="gapless", help="whose (default: gapless)")
    parser.add_argument("--peer-attention", default="auto", metavar="NAME", help="as for gapless bench")
    parser.add_argument("--depth", default="2", metavar="N", help="of the pipeline (default: 2)")
    text = "requests of the window (default: 32; 8 on a CPU); prompts are as long as a workload's mean context"
    parser.add_argument("--batch", type=int, metavar="N", help=text)
    parser.add_argument("--prompt-len", type=int, metavar="N", help="tokens of each prompt (default: 256)")
    parser.add_argument("--window", type=int, default=50, metavar="N", help="steps to record (default: 50)")
    parser.add_argument("--skip", type=int, default=16, metavar="N", help="steady steps before it (default: 16)")
    parser.add_argument("--stacks", action="store_true", help="record Python lines; slows the host")
    parser.add_argument("--keep", metavar="FILE", help="keep the trace; gzip if its name ends in .gz")
    add_step_arguments(parser)
    add_options(parser, EngineConfig, "engine")


def run(arguments: argparse.Namespace) -> int:
    """Time, profile, explain."""
    log_to_stderr(logging.WARNING if arguments.quiet else logging.INFO)
    names = arguments.rest
    if len(names) > 1:
        raise UsageError(f"one workload at a time, not {', '.join(names)}")
    depths, options = parse_depths(arguments.depth), engine_options(arguments)
    check_lengths(arguments)
    if len(depths) > 1:
        raise UsageError(f"--depth {arguments.depth}: a profile is of one depth")
    if arguments.window < 2 or arguments.skip < 0:
        raise UsageError("--window must be at least 2, and --skip at least 0")
    named = workload(names[0]) if names else None
    from gapless.bench.environment import environment

    subject = make_subject(arguments, options)
    load = _window_load(arguments, named, subject)
    about = environment()
    print(headline(about))
    what = f"{arguments.engine}, depth {depths[0]}" if arguments.engine == "gapless" else arguments.engine
    requests = f"{load.batch} request{'' if load.batch == 1 else 's'} at a context of {load.prompt_lens[0]} and more"
    print(f"{subject.name}, {requests}, {what}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(arguments.keep or Path(folder) / "trace.json")
        step_busy = None
        if arguments.engine == "gapless":
            step_ms, step_busy = _record_own(subject, load, depths[0], arguments, path)
        else:
            step_ms = _record_peer(subject, load, arguments, path)
        by_events = "" if step_busy is None else f", step-busy {100 * step_busy:.2f} % by events on the device"
        print(f"without a profiler: {step_ms:.3f} ms a step{by_events}", flush=True)
        extra = {"environment": about, "model": subject.name, "workload": load.name, "batch": load.batch}
        extra |= {"step_busy_by_events": step_busy}
        extra |= {"context": load.prompt_lens[0], "depth": depths[0], "engine": arguments.engine}
        title = f"{subject.name}, {load.name}: {requests}, {what}"
        explain(path, arguments, step_ms, floor=_floor(subject, load), extra=extra, title=title)
        if arguments.keep:
            print(f"trace: {path}")
    return 0


def _floor(subject: Subject, load: Workload) -> float | None:
    from gapless.bench.environment import read_bandwidth
    from gapless.bench.models import floor_ms

    return floor_ms(subject.model, load, read_bandwidth(str(subject.device)))


def _window_load(arguments: argparse.Namespace, named: Workload | None, subject: Subject) -> Workload:
    """As many requests as the workload, with prompts of its mean context, and just enough new tokens."""
    small = subject.device.type == "cpu"
    budget = subject.options.get("max_num_batched_tokens", 8192)
    if named is None:
        batch, prompt_len = arguments.batch or (8 if small else 32), arguments.prompt_len or (64 if small else 256)
        name = "custom"
    else:
        pairs = list(zip(named.prompt_lens, named.output_lens, strict=True))
        batch, name = arguments.batch or named.batch, named.name
        prompt_len = arguments.prompt_len or round(sum(p + o / 2 for p, o in pairs) / len(pairs))
    prefill = math.ceil(batch * prompt_len / budget) + 1
    new_tokens = prefill + arguments.skip + arguments.window
    new_tokens += TAIL if arguments.engine == "gapless" else PEER_TAIL  # starting a profile takes time too
    load = uniform(name, batch, prompt_len, new_tokens)
    return replace(load, vocab=min(load.vocab, subject.model.config.vocab_size))


def _record_own(
    subject: Subject, load: Workload, depth: int, arguments: argparse.Namespace, path: Path
) -> tuple[float, float]:
    """Milliseconds of a step and step-busy, both without a profiler."""
    from gapless.bench.measure import warm
    from gapless.trace.record import CpuRecorder, GpuRecorder

    with subject.engine([load], depth) as client:
        warm(client, load)
        plain = _windowed(client, load, arguments, salt=0)
        recorder = GpuRecorder(arguments.stacks) if subject.device.type == "cuda" else CpuRecorder(client)
        client._engine.call(recorder.prepare)
        watched = _windowed(client, load, arguments, salt=1, begin=recorder.begin, end=recorder.end)
        recorder.write(path, watched.seen)
    return plain.seen.step_ms, plain.seen.step_busy


def _windowed(
    client: EngineClient, load: Workload, arguments: argparse.Namespace, salt: int, **edges: Callable[[], None]
) -> Window:
    from gapless.bench.measure import run_once
    from gapless.trace.observe import Window

    window = Window(client, load.batch, arguments.skip, arguments.window, **edges)
    with window.watching():
        run_once(client, load, salt)
    if not window.done.is_set():
        raise CommandError(
            f"no {arguments.window} steady steps of {load.batch} requests: lower --batch, --window or --prompt-len, "
            "or give the KV cache more memory"
        )
    return window


def _record_peer(subject: Subject, load: Workload, arguments: argparse.Namespace, path: Path) -> float:
    """The peer's steps cannot be watched, so its window is a stretch of time after its prompts have been computed."""
    import torch.profiler as profiler

    from gapless.bench.peer import Peer
    from gapless.trace.chrome import read_events
    from gapless.trace.export import finish

    cuda = subject.device.type == "cuda"
    kinds = [profiler.ProfilerActivity.CPU, *([profiler.ProfilerActivity.CUDA] if cuda else [])]
    mode = arguments.engine.removeprefix("transformers-")
    with Peer(subject, load, mode, arguments.peer_attention).started() as peer:
        figures = peer.measure(load.limited(arguments.skip + arguments.window))
        step_ms = float(figures.decode_ms_per_step or 0.0)
        before = (figures.prefill_s or 0.0) + 1e-3 * step_ms * arguments.skip
        with profiler.profile(activities=kinds):
            pass
        profile: Any = profiler.profile(activities=kinds, with_stack=arguments.stacks)
        peer.submit(load, 2)
        time.sleep(before)
        profile.start()
        time.sleep(1e-3 * step_ms * arguments.window)
        idle = peer.finished_any()
        profile.stop()
        if cuda and idle:
            raise CommandError("the peer's requests ended before the window did: lower --window or --skip")
    raw = path.with_name(path.name + ".raw.json")
    try:
        profile.export_chrome_trace(str(raw))
        finish(read_events(raw), path)
    finally:
        raw.unlink(missing_ok=True)
    return step_ms
