"""What adapters cost: milliseconds per decode step without LoRA, and with 0, 1 and more adapters in the batch.

    python benchmarks/lora.py --model ~/.cache/gapless/SmolLM2-135M-Instruct
    python benchmarks/lora.py --model ./llama-8b --batch 32 --rank 16 --adapters 1,4

All rows decode. On a GPU a step's time is that of the device, by events; on a CPU it is the processor time of the
process, which other programs change less than the clock on the wall. Lines are measured in turn, several times; the
median and the smallest are told. "off" has enable_lora=False. Adapters are random, on all linear layers that can have
one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from gapless import LLM, SamplingParams
from gapless.bench.environment import environment

PROMPT = 16


def make_adapter(llm: LLM, rank: int, seed: int, folder: Path) -> Path:
    """A PEFT folder for every part of the engine's model."""
    generator, weights = torch.Generator().manual_seed(seed), {}
    bank = llm._client._built.runner.lora.bank  # type: ignore[union-attr]
    for site in bank.sites:
        for part in site.parts:
            name = f"base_model.model.{part.name}"
            weights[f"{name}.lora_A.weight"] = torch.randn(rank, site.inputs, generator=generator) / site.inputs**0.5
            weights[f"{name}.lora_B.weight"] = 0.01 * torch.randn(part.outputs, rank, generator=generator)
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    options = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(options))
    return folder


def step_ms(llm: LLM, names: list[str | None], batch: int, steps: int) -> float:
    """Milliseconds per step of ``batch`` rows; row i has adapter ``names[i % len(names)]``.

    A run of few steps is subtracted from one of more, so that prompts and the first steps do not count.
    """
    prompts: list[Any] = [{"prompt_token_ids": [5 + i, *range(10, 9 + PROMPT)]} for i in range(batch)]

    def busy(tokens: int) -> tuple[float, int]:
        before, count = clock(), llm.stats()[0].steps
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        llm.generate(prompts, params, use_tqdm=False, lora=[names[i % len(names)] for i in range(batch)])
        return clock() - before, llm.stats()[0].steps - count

    def clock() -> float:
        on_cpu = llm._client.model.device.type == "cpu"
        return time.process_time() if on_cpu else llm.stats()[0].busy

    short, few = busy(4)
    long, many = busy(4 + steps)
    return (long - short) / (many - few) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", default="1,4", help="numbers of adapters in a batch, with commas")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    counts = [int(n) for n in options.adapters.split(",")]
    shared = {
        "device": options.device,
        "max_num_seqs": options.batch,
        "max_num_batched_tokens": max(256, options.batch * PROMPT),
        "max_model_len": PROMPT + options.steps + 8,
        "num_kv_blocks": options.batch * (-(-(PROMPT + options.steps + 8) // 16)) + 1,  # two engines share the device
        "enable_prefix_caching": False,
        "check_model": False,
    }
    cases: dict[str, list[str | None]] = {"off": [None], "0": [None]}
    cases |= {str(n): [f"a{i}" for i in range(n)] for n in counts}
    times: dict[str, list[float]] = {name: [] for name in cases}
    with (
        tempfile.TemporaryDirectory() as scratch,
        LLM(options.model, **shared) as off,
        LLM(options.model, enable_lora=True, max_loras=max(counts), max_lora_rank=options.rank, **shared) as on,
    ):
        for i in range(max(counts)):
            on.load_lora(f"a{i}", make_adapter(on, options.rank, i, Path(scratch) / str(i)))
        for _ in range(options.repeat):
            for name, names in cases.items():
                times[name].append(step_ms(off if name == "off" else on, names, options.batch, options.steps))
    least = min(times["off"])
    print(f"{'adapters':>9} {'ms/step':>9} {'smallest':>9} {'against off':>12}")
    for name, values in times.items():
        print(f"{name:>9} {statistics.median(values):9.3f} {min(values):9.3f} {min(values) / least:11.3f}x")
    if options.out:
        about = {"environment": environment(), "options": {**vars(options), "out": None}, "ms_per_step": times}
        options.out.write_text(json.dumps(about, indent=1, default=str))


if __name__ == "__main__":
    main()
