"""Memory and time of ``gapless trace analyze`` on a large trace. One is made, read in a process of its own, deleted.

    python benchmarks/trace_memory.py --gigabytes 1

The trace is as torch.profiler writes it for an engine without graphs, with stacks: 330 launches a step, each with its
kernel, three Python functions, and the arrow between call and kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LAYERS, PER_LAYER = 32, 10
KERNEL = "void at::native::vectorized_elementwise_kernel<4, add<c10::BFloat16>, std::array<char*, 3ul> >(int, {})"
INNER = ("torch/nn/modules/module.py(1773): _call_impl", "<built-in method linear>")


def step(number: int) -> Iterator[dict[str, Any]]:
    """The events of one step of 20 ms."""
    at, link = 20_000.0 * number, 1000 * number
    host = {"pid": 4242, "tid": 4250}
    for i in range(LAYERS * PER_LAYER + 10):
        t = at + 50.0 * i
        name = f"model/layer.py({i % PER_LAYER * 7}): part" if i < LAYERS * PER_LAYER else f"model/head.py({i}): last"
        for depth, frame in enumerate((name, *INNER)):
            arguments = {"Python parent id": 7 * i, "Python id": 7 * i + depth, "Ev Idx": link + i}
            yield {"ph": "X", "cat": "python_function", "name": frame, **host, "ts": t + depth, "dur": 45.0 - 2 * depth,
                   "args": arguments}  # fmt: skip
        link += 1
        kernel = KERNEL.format(i % PER_LAYER if i < LAYERS * PER_LAYER else i)
        yield {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", **host, "ts": t + 10, "dur": 6.0,
               "args": {"External id": link, "cbid": 211, "correlation": link}}  # fmt: skip
        yield {"ph": "X", "cat": "kernel", "name": kernel, "pid": 0, "tid": 7, "ts": t + 20, "dur": 28.0,
               "args": {"External id": link, "queued": 0, "device": 0, "context": 1, "stream": 7, "correlation": link,
                        "registers per thread": 32, "shared memory": 0, "blocks per SM": 1.2, "warps per SM": 4.8,
                        "grid": [160, 1, 1], "block": [128, 1, 1], "est. achieved occupancy %": 8}}  # fmt: skip
        yield {"ph": "s", "id": link, **host, "ts": t + 10, "cat": "ac2g", "name": "ac2g"}
        yield {"ph": "f", "id": link, "pid": 0, "tid": 7, "ts": t + 20, "cat": "ac2g", "name": "ac2g", "bp": "e"}
    yield {"ph": "X", "cat": "cuda_runtime", "name": "cudaStreamSynchronize", **host, "ts": at + 16_600, "dur": 200.0,
           "args": {"correlation": link + 1}}  # fmt: skip


def make(path: Path, size: int) -> tuple[int, int]:
    """Steps and bytes."""
    count = 0
    with path.open("w", encoding="utf-8") as file:
        file.write('{"schemaVersion": 1, "traceEvents": [\n')
        while file.tell() < size:
            file.write(",\n".join(json.dumps(event) for event in step(count)) + ",\n")
            count += 1
        file.write('{"ph": "M", "name": "end", "args": {}}\n]}\n')
        return count, file.tell()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, default=None, help="for the trace (default: the system's for short use)")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path, page = Path(folder) / "trace.json", Path(folder) / "trace.html"
        steps, size = make(path, int(args.gigabytes * 1e9))
        command = [sys.executable, "-m", "gapless", "trace", "analyze", str(path), "--html", str(page)]
        start = time.perf_counter()
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        seconds = time.perf_counter() - start
        result = {
            "bytes": size,
            "steps": steps,
            "seconds": seconds,
            "cpu_seconds": resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime,
            "peak_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
            "page_bytes": page.stat().st_size,
        }
        print("\n".join(done.stdout.splitlines()[:12]))
    print(f"{size / 1e9:.2f} GB, {steps} steps: {seconds:.1f} s, {result['cpu_seconds']:.1f} of a processor, "
          f"at most {result['peak_bytes'] / 1e9:.2f} GB of memory")  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
