"""Predict how long the GPU waits for the host at each depth, from the time that a step costs either of them. Measure
those with `gapless bench` (host ms/step, device ms/step); nothing is run on a GPU here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gapless.cli import script
from gapless.cli.parser import Parser, UsageError


def add_arguments(parser: Parser) -> None:
    """The options."""
    parser.usage = "python -m proof.simulate --host-ms MS --device-ms MS [OPTION ...]"
    parser.add_argument("--host-ms", type=float, required=True, metavar="MS", help="the host's work for one step")
    parser.add_argument("--device-ms", type=float, required=True, metavar="MS", help="the device's work for one step")
    parser.add_argument("--depth", default="1,2,3,4", metavar="N,N", help="steps in flight (default: %(default)s)")
    text = "standard deviation of the host's time, as a share of it (default: 0)"
    parser.add_argument("--jitter", type=float, default=0.0, metavar="X", help=text)
    text = "the same for the device's time (default: 0)"
    parser.add_argument("--device-jitter", type=float, default=0.0, metavar="X", help=text)
    text = "from launch to work, and back to the host, together (default: 0)"
    parser.add_argument("--latency-ms", type=float, default=0.0, metavar="MS", help=text)
    parser.add_argument("--pause-ms", type=float, default=0.0, metavar="MS", help="now and then the host stops so long")
    text = "steps between two pauses, on average (default: %(default)s)"
    parser.add_argument("--pause-every", type=float, default=100.0, metavar="N", help=text)
    parser.add_argument("--steps", type=int, default=2000, metavar="N", help="to simulate (default: %(default)s)")
    parser.add_argument("--batch", type=int, metavar="N", help="tokens of a step, for tokens per second")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the jitter (default: 0)")
    text = "draw idle against host/device time, for these depths, as SVG"
    parser.add_argument("--plot", metavar="FILE", help=text)


def run(arguments: argparse.Namespace) -> int:
    """Print a line for each depth."""
    if arguments.prompts:
        raise UsageError(f"{arguments.prompts[0]!r}: this command takes options only")
    depths = _depths(arguments.depth)
    for name in ("host_ms", "device_ms"):
        if not 0 < getattr(arguments, name) < float("inf"):
            raise UsageError(f"--{name.replace('_', '-')} must be a number of milliseconds above 0")
    for name in ("jitter", "device_jitter", "latency_ms", "pause_ms"):
        if not 0 <= getattr(arguments, name) < float("inf"):
            raise UsageError(f"--{name.replace('_', '-')} must be 0 or more")
    if arguments.pause_every < 1 or arguments.steps < 10:
        raise UsageError("--pause-every must be 1 or more, --steps 10 or more")

    from proof.planning import Times, predict

    times = Times(
        arguments.host_ms,
        arguments.device_ms,
        arguments.latency_ms,
        arguments.jitter,
        arguments.device_jitter,
        arguments.pause_ms,
        arguments.pause_every if arguments.pause_ms else 0.0,
    )
    found = [predict(times, depth, steps=arguments.steps, seed=arguments.seed) for depth in depths]
    rate = "  tokens/s" if arguments.batch else ""
    print(f"depth  ms/step  GPU idle %  steps/s{rate}  of 1,000 GPUs idle")
    for p in found:
        tokens = f"  {1000 * arguments.batch / p.step_ms:8,.0f}" if arguments.batch else ""
        print(
            f"{p.depth:5d}  {p.step_ms:7.3f}  {100 * p.idle:10.2f}  {1000 / p.step_ms:7.1f}{tokens}"
            f"  {1000 * p.idle:18.0f}"
        )
    if arguments.plot:
        _plot(Path(arguments.plot), times, depths, arguments.seed)
    return 0


def _depths(text: str) -> list[int]:
    try:
        depths = [int(word) for word in text.split(",")]
    except ValueError:
        depths = []
    if not depths or min(depths) < 1 or max(depths) > 64:
        raise UsageError(f"--depth {text!r}: numbers from 1 to 64, with commas between them")
    return depths


def _plot(target: Path, times: object, depths: list[int], seed: int) -> None:
    from dataclasses import replace

    from proof.chart import idle_chart
    from proof.planning import Times, predict

    assert isinstance(times, Times)
    ratios = [i / 20 for i in range(31)]
    idle = {
        depth: [
            predict(replace(times, host=max(ratio, 1e-6) * times.device), depth, steps=400, seed=seed).idle
            for ratio in ratios
        ]
        for depth in depths
    }
    title = f"GPU idle; host jitter {100 * times.jitter:.0f} %, device jitter {100 * times.device_jitter:.0f} %"
    target.write_text(idle_chart(title, ratios, idle), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(script("python -m proof.simulate", sys.modules[__name__]))
