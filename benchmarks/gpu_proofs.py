"""What the engine promises on a GPU, shown by measurement; each section prints its result and goes on.

    python benchmarks/gpu_proofs.py --out benchmarks/results/gpu_proofs.json
    python benchmarks/gpu_proofs.py --only memory,tokens --shapes qwen3-0.6b

profile  calls of the runtime per step, from the profiler, steady and mixed, in a process of its own
memory   the graph pool and the driver's memory with one, two and three slots
tokens   every greedy token of a random model within 0.25 logit of the best by transformers' own forward
real     the same for 64 prompts of SmolLM2, if `make model` has brought it
loading  memory on the host while shards go to the GPU, in a process of its own
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gapless import LLM, SamplingParams

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

MIB = 2**20
ALLOWED_GAP = 0.25
SECTIONS = ("profile", "memory", "tokens", "real", "loading")


def random_prompts(count: int, length: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """Ids below ``vocab``; lengths from a quarter of ``length`` up to it."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(rng.randint(length // 4, length))] for _ in range(count)]


def give_back() -> None:
    """Whatever nothing refers to."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


# ---- profile ----------------------------------------------------------------------------------------------------


def profile_proof(shape: str, depth: int = 2, *, inject: bool = False, batch: int = 32) -> dict[str, Any]:
    """Calls per step in steady decode and in mixed traffic. Slows this process: give it one of its own.

    Args:
        shape: of the model.
        depth: of the pipeline.
        inject: put a pageable copy into every step, to see that it is found.
        batch: requests of the steady part.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    from gapless.bench.models import random_model
    from step_watch import mixed_traffic, read_trace

    model = random_model(shape, torch.device("cuda"), torch.bfloat16)
    options = {"max_num_seqs": batch, "max_num_batched_tokens": 512, "max_model_len": 512}
    result: dict[str, Any] = {"shape": shape, "depth": depth, "batch": batch}
    with LLM(model, device="cuda", pipeline_depth=depth, check_model=False, **options) as llm:
        prompts = [{"prompt_token_ids": p} for p in random_prompts(batch, 64, 1000)]
        params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
        mixed_traffic(llm, 20, 1000, seed=1)
        if inject:
            runner = llm._client._built.runner
            launch = runner.launch

            def faulty(plan: Any) -> Any:
                torch.ones(4).to("cuda", non_blocking=True)
                return launch(plan)

            runner.launch = faulty
        works = {
            "steady": lambda: llm.generate(prompts, params, use_tqdm=False),
            "mixed": lambda: mixed_traffic(llm, 200, 1000),
        }
        for name, work in works.items():
            with profiler(activities=[ProfilerActivity.CUDA]) as recording:
                work()
                time.sleep(0.05)  # the last step ends before the profiler itself waits for the device
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "trace.json"
                recording.export_chrome_trace(str(path))
                calls = read_trace(path, skip=20)
            problems = calls.problems(0 if name == "steady" else depth)
            print(f"{name} {calls}\n  problems: {problems or 'none'}", flush=True)
            result[name] = {**calls.to_dict(), "problems": problems}
    return result


# ---- memory -----------------------------------------------------------------------------------------------------


def memory_of_engine(model: Any, **options: Any) -> dict[str, Any]:
    """What an engine takes of the device, in bytes: in all by the driver's count, and its parts."""
    give_back()
    before, total = torch.cuda.mem_get_info()
    start = time.perf_counter()
    llm = LLM(model, check_model=False, **options)
    seconds = time.perf_counter() - start
    try:
        torch.cuda.synchronize()
        after = torch.cuda.mem_get_info()[0]
        parts = _parts(llm._client._built.runner)
    finally:
        llm.close()
        del llm
        give_back()
    whole = {"engine_bytes": before - after, "device_bytes": total - after, "seconds": seconds}
    return {"depth": options.get("pipeline_depth"), **parts, **whole}


def _parts(runner: Any) -> dict[str, int]:
    pool = idle = reserved = 0
    for segment in torch.cuda.memory_snapshot():
        reserved += segment["total_size"]
        if tuple(segment["segment_pool_id"]) == tuple(runner.device.pool):
            pool += segment["total_size"]
        else:
            idle += segment["total_size"] - segment["allocated_size"]
    slot = runner._ring.slots[0]
    return {
        "graphs": len(runner.graphs.captured),
        "pool_bytes": pool,
        "kv_bytes": sum(t.nbytes for t in runner.state.kv),
        "slot_device_bytes": slot.device.nbytes + slot.out.nbytes,
        "slot_pinned_bytes": slot.host.nbytes + slot.out_host.nbytes,
        "cached_and_idle_bytes": idle,
        "reserved_bytes": reserved,
    }


def memory_proof(shapes: Sequence[str], depths: Sequence[int] = (1, 2, 3)) -> dict[str, Any]:
    """For each shape a row per depth, and ratios to the first depth."""
    from gapless.bench.models import random_model

    result: dict[str, Any] = {}
    for shape in shapes:
        model = random_model(shape, torch.device("cuda"), torch.bfloat16)
        options = {"device": "cuda", "max_num_seqs": 32, "max_model_len": 4096, "num_kv_blocks": 4096}
        memory_of_engine(model, pipeline_depth=1, **options)  # what is taken once: kernels, workspaces
        rows = [memory_of_engine(model, pipeline_depth=depth, **options) for depth in depths]
        for row in rows:
            mib = {name.removesuffix("_bytes"): row[name] / MIB for name in row if name.endswith("_bytes")}
            print(
                f"{shape} depth {row['depth']}: {row['graphs']} graphs, pool {mib['pool']:.0f} MiB; by the driver: "
                f"engine {mib['engine']:.0f} MiB (KV {mib['kv']:.0f}), device in all {mib['device']:.0f} MiB; a slot "
                f"{mib['slot_device']:.2f} MiB on the device, {mib['slot_pinned']:.2f} pinned; cached and idle "
                f"{mib['cached_and_idle']:.0f} MiB; ready in {row['seconds']:.1f} s",
                flush=True,
            )
        ratios = {
            what: [row[f"{what}_bytes"] / max(rows[0][f"{what}_bytes"], 1) for row in rows]
            for what in ("pool", "engine", "device")
        }
        each = {
            row["depth"]: (row["engine_bytes"] - rows[0]["engine_bytes"]) / MIB / (row["depth"] - rows[0]["depth"])
            for row in rows[1:]
        }
        ok = all(r <= 1.05 for what in ("pool", "device") for r in ratios[what])
        print(f"{shape} ratios to depth {depths[0]}: {ratios}; MiB of each further slot by the driver: {each}; ok={ok}")
        result[shape] = {"rows": rows, "ratios": ratios, "mib_per_further_slot": each, "ok": ok}
        del model
        give_back()
    return result


# ---- tokens -----------------------------------------------------------------------------------------------------


def greedy(llm: LLM, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
    """Greedy tokens of each prompt, all at once."""
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [o.outputs[0].token_ids for o in outputs]


def score(model: Any, prompts: Sequence[list[int]], outputs: Sequence[list[int]], what: str) -> dict[str, Any]:
    """Gaps by transformers' forward in the model's dtype and in fp32."""
    from rescore import own_noise, rescore

    result: dict[str, Any] = {}
    own = rescore(model, prompts, outputs)
    print(f"{what}, reference in {model.dtype}: {own}", flush=True)
    result["own_dtype"] = own.to_dict()
    result["ok"] = own.max <= ALLOWED_GAP
    if model.dtype != torch.float32:
        try:
            wide = copy.deepcopy(model).float()
            gaps = rescore(wide, prompts, outputs)
            print(f"{what}, reference in fp32: {gaps}", flush=True)
            result["fp32"] = gaps.to_dict()
            result["reference_to_fp32"] = own_noise(model, wide, prompts, outputs)
            print(f"{what}, the reference's own choices in fp32: max {result['reference_to_fp32']:.4f}", flush=True)
            del wide
        except torch.OutOfMemoryError:
            print(f"{what}: no memory for a copy in fp32")
        give_back()
    return result


def tokens_proof(shape: str, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """8 prompts x 64 tokens of a random model, at depth 2, and once more chunked with a small budget."""
    from gapless.bench.models import random_model

    model = random_model(shape, torch.device(device), dtype)
    prompts = random_prompts(8, 200, min(10_000, model.config.vocab_size))
    result: dict[str, Any] = {}
    for name, budget in (("whole prompts", 2048), ("chunks of 64", 64)):
        options = {"max_num_seqs": 8, "max_num_batched_tokens": budget, "max_model_len": 512, "num_kv_blocks": 300}
        with LLM(model, device=device, check_model=False, **options) as llm:
            outputs = greedy(llm, prompts, 64)
        give_back()
        result[name] = score(model, prompts, outputs, f"{shape}, {name}")
    result["ok"] = all(part["ok"] for part in result.values())
    return result


TOPICS = (
    "the tides", "a lighthouse", "photosynthesis", "the Roman roads", "sourdough bread", "prime numbers", "bees",
    "the moons of Jupiter", "a stolen violin", "glaciers", "chess openings", "the Silk Road", "volcanoes", "libraries",
    "a robot gardener", "steam engines",
)  # fmt: skip
REQUESTS = (
    "Explain {} in three sentences.",
    "Write a short story about {}.",
    "List five surprising facts about {}.",
    "{} matter because",
)


def real_proof(device: str = "cuda", dtype: torch.dtype = torch.bfloat16, new_tokens: int = 64) -> dict[str, Any]:
    """64 prompts of SmolLM2, three quarters of them as chats, all at once."""
    from transformers import AutoModelForCausalLM

    from gapless.model.load.smollm2 import smollm2_folder

    folder = smollm2_folder()
    if not folder.exists():
        print("real: SmolLM2 is not in the cache, `make model` brings it")
        return {"skipped": True}
    options = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "max_model_len": 1024, "num_kv_blocks": 2000}
    name = str(dtype).removeprefix("torch.")
    with LLM(str(folder), device=device, dtype=name, **options) as llm:
        prompts = []
        for request in REQUESTS:
            for topic in TOPICS:
                text = request.format(topic)
                if request.startswith("{}"):
                    ids = llm.tokenizer(text[0].upper() + text[1:])["input_ids"]
                else:
                    message = [{"role": "user", "content": text}]
                    ids = llm._client.encode_chat(message).token_ids
                prompts.append(list(ids))
        outputs = greedy(llm, prompts, new_tokens)
        print(f"real: {llm.tokenizer.decode(outputs[0])!r}")
    give_back()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device).eval()
    return score(model, prompts, outputs, f"SmolLM2, {len(prompts)} prompts")


# ---- loading ----------------------------------------------------------------------------------------------------


def loading_proof(folder: Path, device: str = "cuda", *, mib: int = 2000, shard_mib: int = 500) -> dict[str, Any]:
    """Save a random model in shards, load it in another process, and watch that process' memory from here."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layers = max(1, round(mib * MIB / 2 / (2048 * 2048 * 4 + 3 * 2048 * 8192)))
    config = LlamaConfig(
        vocab_size=8192, hidden_size=2048, intermediate_size=8192, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=16, head_dim=128, eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    weights = sum(p.nbytes for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=f"{shard_mib}MB")
    del model
    give_back()
    shards = [path.stat().st_size for path in Path(folder).glob("*.safetensors")]
    command = [sys.executable, __file__, "--load-child", str(folder), "--device", device]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdin is not None
    while (line := child.stdout.readline()) and "ready" not in line:
        pass
    first = _resident(child.pid)
    peak = dict(first)
    child.stdin.write("\n")
    child.stdin.flush()
    while child.poll() is None:
        now = _resident(child.pid)
        if not now:
            break
        peak = {name: max(peak[name], value) for name, value in now.items() if name in peak}
        time.sleep(0.001)
    said = child.stdout.read()
    child.wait(timeout=60)
    if child.returncode:
        raise RuntimeError(f"loading failed: {said}")
    result = {
        "weights_mib": weights / MIB,
        "shards": len(shards),
        "shard_mib": max(shards) / MIB,
        "peak_anonymous_mib": (peak["RssAnon"] - first["RssAnon"]) / MIB,
        "peak_file_mib": (peak["RssFile"] - first["RssFile"]) / MIB,
        "peak_shared_mib": (peak["RssShmem"] - first["RssShmem"]) / MIB,
        "child": said.strip(),
    }
    result["ok"] = result["peak_anonymous_mib"] + result["peak_shared_mib"] < 1.3 * result["shard_mib"]
    print(
        f"loading {result['weights_mib']:.0f} MiB in {len(shards)} shards of at most {result['shard_mib']:.0f} MiB: "
        f"{said.strip()}; host memory rose by {result['peak_anonymous_mib']:.0f} MiB anonymous and "
        f"{result['peak_shared_mib']:.0f} MiB shared at most (and {result['peak_file_mib']:.0f} MiB of mapped file "
        f"pages, which the system takes back at will); ok={result['ok']}",
        flush=True,
    )
    return result


def _resident(pid: int) -> dict[str, int]:
    """Bytes of a process that are in memory, by kind; empty when it has gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    found = dict(line.split(":", 1) for line in lines if line.startswith("Rss"))
    return {name: int(value.split()[0]) * 1024 for name, value in found.items()}


def load_child(folder: str, device: str) -> None:
    """Warm the device up, say ready, wait for a line, load, say how long it took."""
    from transformers import AutoModelForCausalLM  # noqa: F401  imported before memory is counted

    from gapless.model.load.loading import load_model

    x = torch.ones(512, 512, dtype=torch.bfloat16, device=device)
    (x @ x).sum().item()
    x.cpu()
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.perf_counter()
    loaded = load_model(folder, device=torch.device(device), probe=False)
    if device != "cpu":
        torch.cuda.synchronize()
    print(f"loaded to {loaded.model.device} in {time.perf_counter() - start:.1f} s", flush=True)
    sys.stdout.flush()


# ---- all --------------------------------------------------------------------------------------------------------


def in_own_process(section: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Run one section in a process and read its result."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--only", section, "--here", "--out", str(out), *arguments]
        subprocess.run(command, check=True, timeout=300)
        result: dict[str, Any] = json.loads(out.read_text())[section]
        return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--shape", default="llama-8b", help="of the profile and of the random model's tokens")
    parser.add_argument("--shapes", default="llama-8b,qwen3-0.6b", help="of the memory section")
    parser.add_argument("--depth", type=int, default=2, help="of the profile")
    parser.add_argument("--inject", action="store_true", help="profile: put a fault into every step")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--load-child", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load_child:
        load_child(args.load_child, args.device)
        return 0

    def profile() -> dict[str, Any]:
        if args.here or args.only == "profile":
            return profile_proof(args.shape, args.depth, inject=args.inject)
        return in_own_process("profile", ["--shape", args.shape, "--depth", str(args.depth)])

    def loading() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            return loading_proof(Path(folder), args.device)

    sections = {
        "profile": profile,
        "memory": lambda: memory_proof(args.shapes.split(",")),
        "tokens": lambda: tokens_proof(args.shape, args.device),
        "real": lambda: real_proof(args.device),
        "loading": loading,
    }
    results: dict[str, Any] = {}
    failed = []
    for name in args.only.split(","):
        start = time.perf_counter()
        try:
            results[name] = sections[name]()
        except Exception as error:
            failed.append(name)
            results[name] = {"error": repr(error)}
            traceback.print_exc()
        give_back()
        print(f"--- {name}: {time.perf_counter() - start:.1f} s", flush=True)
        if args.out:
            args.out.write_text(json.dumps(results, indent=1, default=str) + "\n")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
