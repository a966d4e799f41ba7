"""The kernels under compute-sanitizer: memcheck (accesses out of bounds) and racecheck (hazards in shared memory).

    python benchmarks/sanitizer.py                     # plain run, then both tools; exit code 0 when all are clean
    python benchmarks/sanitizer.py --tools racecheck --only decode,sample

Small cases of each kernel, with every feature at least once. The plain run compiles them, so that the tools load them
from Triton's cache, and compares their results with the references. For memcheck each tensor is an allocation of its
own, so that one step beyond its end is seen.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent / "tests"
sys.path.insert(0, str(TESTS))
TOOLS = ("memcheck", "racecheck")

Work = Callable[[bool], None]
"""Launches a case; when its argument is true, also compares its results."""


def decode_and_mixed() -> Iterator[tuple[str, Work]]:
    """Attention: decode, mixed and several query tokens, whole and split, merged in both ways."""
    import torch

    import test_attention_triton as t
    from gapless.attention import triton as entry
    from gapless.attention.triton_prefill import PrefillConfig

    def case(shape: Any, **options: Any) -> Work:
        def work(compare: bool) -> None:
            made = t.Case(shape, seed=1, device="cuda")
            if compare:
                made.check(**options)
            else:
                entry.write_kv(made.k, made.v, made.cache, made.context.slot_mapping)
                entry.attend_cached(made.q, made.cache, made.context, made.params, **options)

        return work

    d, m = t.DECODE, t.MIXED
    decodes = [
        d,
        replace(d, padding=(2, 2), d=80, hq=3, hk=1, block=16),
        replace(d, hq=32, hk=2, window=20, sinks=True),
        replace(d, hq=2, hk=2, softcap=3.0, block=64, padding=(1, 1), sinks=True),
        replace(d, dtype=torch.bfloat16, d=64),
    ]
    for i, shape in enumerate(decodes):
        for last in (True, False):
            yield f"decode/{i}/{last}", case(shape, decode_config=t.small_decode(last_arriver_merges=last))
    mixed = [
        m,
        replace(m, hq=3, hk=1, d=80, padding=(0, 0)),
        replace(m, window=6, sinks=True, block=16),
        replace(m, softcap=2.0, hq=8, hk=1, padding=(1, 40)),
        replace(m, hq=2, hk=2, window=30, softcap=4.0, sinks=True, dtype=torch.bfloat16, d=64),
    ]
    small = PrefillConfig(16, 16, 4, 1)
    for i, shape in enumerate(mixed):
        config = t.small_decode(last_arriver_merges=bool(i % 2))
        yield f"prefill/{i}", case(shape, decode_config=config, prefill_config=small)
    several = t.Shape(((5, 40), (1, 3), (4, 0), (2, 20)), hq=8, padding=(1, 3), window=9, sinks=True)
    for option in ("max_query_len", "split_query_len"):
        yield f"prefill/{option}", case(several, **{option: 5}, decode_config=t.small_decode())
    # As they are launched in use: the device's own configurations, every head size.
    for size, heads in ((64, (14, 2)), (80, (4, 4)), (96, (9, 3)), (128, (8, 2)), (256, (4, 2))):
        common = {"hq": heads[0], "hk": heads[1], "d": size, "block": 16, "dtype": torch.bfloat16}
        yield f"decode/head {size}", case(replace(d, **common))
        yield f"prefill/head {size}", case(replace(m, **common))
    yield "decode/fp32", case(replace(d, hq=8, d=128, block=16))
    yield "prefill/fp32", case(replace(m, hq=8, d=128, block=16))


def samplers() -> Iterator[tuple[str, Work]]:
    """Sampling with each set of features, and the store of the tokens."""
    import torch

    import test_sampling_triton as t
    from gapless.batch.row_params import Feature
    from gapless.sampling.triton import sample

    def drawing(features: Any, vocab: int, dtype: torch.dtype) -> Work:
        def work(compare: bool) -> None:
            logits, rows = t.random_batch(vocab, vocab, 5)
            if compare and features == t.ALL:
                t.check(logits.to(dtype), rows, features)
            words, positions = t.params(rows)
            sample(logits.to(dtype).cuda(), words.cuda(), positions.cuda(), features)

        return work

    def storing(compare: bool) -> None:
        t.test_store_equals_reference()

    draws = (Feature.GREEDY, Feature.SAMPLE, Feature.SAMPLE | Feature.FILTER)
    for features in [*draws, *(d | Feature.MIN_TOKENS for d in draws), t.ALL]:
        yield f"sample/{int(features)}", drawing(features, 4200, torch.bfloat16)
    yield "sample/one token", drawing(t.ALL, 1, torch.float32)
    yield "sample/fp32", drawing(t.ALL, 5000, torch.float32)
    yield "sample/store", storing


def prepares() -> Iterator[tuple[str, Work]]:
    """The start of a step."""
    import test_prepare_triton as t

    for i, made in enumerate(t.CASES):
        yield f"prepare/{i}", lambda compare, made=made: t.Step(0, *made).run(triton=True)


def operations() -> Iterator[tuple[str, Work]]:
    """Norms, rotary embedding with the cache write, SiLU; the products of small batches."""
    import torch

    import test_ops as t
    from gapless.model.ops import triton as ops_triton

    def norms(dtype: torch.dtype, size: int) -> Work:
        def work(compare: bool) -> None:
            x, residual = t.randn(6, 2 * size, dtype=dtype)[:, :size], t.randn(6, size, dtype=dtype, seed=1)
            weight = t.randn(size, dtype=dtype, seed=2)
            for scaling in (0, 1, 2):
                ops_triton.rms_norm(x, weight, 1e-6, scaling)
                ops_triton.add_rms_norm(x, residual, weight, 1e-6, scaling)
            ops_triton.act_mul(t.randn(3, 2 * size, dtype=dtype))

        return work

    def rope(dtype: torch.dtype, heads: int, kv: int, size: int, rotary: int, norm: bool, scaling: int) -> Work:
        def work(compare: bool) -> None:
            t.test_triton_rope(dtype, heads, kv, size, rotary, norm, scaling, None, False)

        return work

    for dtype in (torch.float32, torch.bfloat16):
        for size in (48, 640):
            yield f"ops/norms {dtype} {size}", norms(dtype, size)
        yield f"ops/rope {dtype}", rope(dtype, 4, 2, 16, 16, False, False)
        yield f"ops/rope with norms {dtype}", rope(dtype, 6, 1, 20, 12, True, True)
    if (TESTS / "test_gemm_triton.py").exists():
        import test_gemm_triton as g

        def chain(m: int, h: int, f: int, config: Any, dtype: torch.dtype) -> Work:
            def work(compare: bool) -> None:
                made = g.Chain(m, h, f, seed=1, dtype=dtype, device="cuda")
                got = made.fused(config)
                if compare and dtype == torch.float32:
                    for mine, want in zip(got, made.unfused(), strict=True):
                        torch.testing.assert_close(mine, want, atol=2e-4, rtol=2e-4)

            return work

        for i, (m, h, f, config) in enumerate(g.CASES):
            yield f"gemm/{i}", chain(m, h, f, config, torch.float32)
        usual = g.GemmConfig(True, 64, 128, split=2, preload=True, prefetch=128)
        yield "gemm/bf16", chain(9, 256, 512, usual, torch.bfloat16)


GROUPS = (decode_and_mixed, samplers, prepares, operations)


def run_cases(only: list[str], compare: bool) -> int:
    """Launch all cases; returns how many failed."""
    import torch

    failed = count = 0
    for group in GROUPS:
        try:
            cases = list(group())
        except Exception:
            traceback.print_exc()
            failed += 1
            continue
        for name, work in cases:
            if only and name.split("/")[0] not in only:
                continue
            count += 1
            try:
                work(compare)
                torch.cuda.synchronize()
            except Exception:
                failed += 1
                print(f"case {name}:", flush=True)
                traceback.print_exc()
    print(f"{count} cases, {failed} failed", flush=True)
    return failed


def under(tool: str | None, only: str, timeout: float) -> dict[str, Any]:
    """Run the cases in a process, plain or under a tool."""
    command = [sys.executable, str(Path(__file__).resolve()), "--run", "--only", only]
    env = dict(os.environ)
    if tool is None:
        command.append("--compare")
    else:
        program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        # Only the first lines of each report; the API's own refusals, which PyTorch probes for, are no faults.
        options = ["--report-api-errors", "no", "--print-limit", "20", "--error-exitcode", "9"]
        command = [program, "--tool", tool, "--target-processes", "application-only", *options, *command]
        if tool == "memcheck":
            env["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    start = time.perf_counter()
    try:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run(command, env=env, **pipes, text=True, errors="replace", timeout=timeout)
        lines, code = done.stdout.splitlines(), done.returncode
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        lines, code = (output.decode(errors="replace") if isinstance(output, bytes) else output).splitlines(), 124
    seconds = time.perf_counter() - start
    name = tool or "plain"
    told = [line for line in lines if "SUMMARY" in line or line.startswith("========= COMPUTE") or " cases, " in line]
    print(f"--- {name}: exit code {code}, {seconds:.1f} s")
    print("\n".join(told or lines[-15:]))
    clean = code == 0 and (tool is None or any("SUMMARY: 0 " in line or "(0 errors" in line for line in lines))
    if not clean:
        print("\n".join(lines[:120]))
    return {"clean": clean, "exit_code": code, "seconds": round(seconds, 1), "summary": told}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--only", default="", help="decode, prefill, sample, prepare, ops, gemm")
    parser.add_argument("--timeout", type=float, default=150, help="seconds for each run")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compare", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        return min(run_cases([x for x in args.only.split(",") if x], args.compare), 1)
    results = {"plain": under(None, args.only, args.timeout)}
    for tool in args.tools.split(","):
        results[tool] = under(tool, args.only, args.timeout)
        if args.out:
            args.out.write_text(json.dumps(results, indent=1) + "\n")
    return int(not all(result["clean"] for result in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
