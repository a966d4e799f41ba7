"""Memory of ``gapless generate --file`` against the number of prompts: it must not grow with it.

    python benchmarks/job_memory.py [--prompts 200000] [--model smollm2]

A tiny random model is made unless one is given. Prints prompts done, resident MiB, and results a second, every few
seconds, and ends with 1 if the second half took more than 64 MiB beyond the first.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def tiny(folder: Path) -> Path:
    """A Llama of a hundred thousand parameters, with the tokenizer of the tests."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from engines import model, tokenizer

    model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def resident_mib(pid: int) -> float:
    """Of a process, 0 once it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS")), 0.0)


def main() -> int:
    """Run one job and watch it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=200_000)
    parser.add_argument("--model")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = options.model or str(tiny(folder / "model"))
        source, target = folder / "in.jsonl", folder / "out.jsonl"
        with source.open("w", encoding="utf-8") as file:
            for i in range(options.prompts):
                file.write(f'{{"id": "p{i}", "prompt": "hello {i % 97}", "max_tokens": 1}}\n')
        command = [sys.executable, "-m", "gapless", "generate", "--model", model, "--device", "cpu", "--file", source]
        limits = ["--max-model-len", "128", "--num-kv-blocks", "2049", "--no-check-model", "--output", target]
        start = time.perf_counter()
        with subprocess.Popen([*command, *limits]) as process:
            seen: list[tuple[int, float]] = []
            while process.poll() is None:
                time.sleep(2.0)
                done = target.read_bytes().count(b"\n") if target.exists() else 0
                if memory := resident_mib(process.pid):
                    seen.append((done, memory))
                    rate = done / (time.perf_counter() - start)
                    print(f"{done:9d} prompts {memory:8.1f} MiB {rate:8.1f}/s", flush=True)
        first = max((m for done, m in seen if done <= options.prompts // 2), default=0.0)
        growth = max(m for _, m in seen) - first
        print(f"the second half took {growth:.1f} MiB beyond the first")
        return process.returncode or int(growth > 64)


if __name__ == "__main__":
    raise SystemExit(main())
