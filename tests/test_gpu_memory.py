"""On a GPU: what an engine takes, that it comes back, what it says when there is too little; loading by shards."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gapless import LLM, SamplingParams
from gapless.errors import ConfigError
from models import tiny

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from gpu_proofs import loading_proof, memory_of_engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MIB = 2**20
OPTIONS: dict[str, Any] = {"device": "cuda", "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128}
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def free() -> int:
    """The driver's count. Nothing is done here to help memory to come back."""
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


@pytest.fixture
def little_memory() -> Iterator[Any]:
    """PyTorch may take so many more MiB."""
    total = torch.cuda.mem_get_info()[1]

    def limit(mib: int) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + mib * MIB) / total)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


def test_memory_comes_back_on_close() -> None:
    """While the closed engine is still referred to, and no collector or cache is called from here."""
    model = tiny("llama").cuda()
    size = 3 * 2 * 2 * 8 * 4 * 16  # bytes of a block: layers, k and v, heads, head size, fp32, tokens
    blocks = 2048 * MIB // size

    def cycle() -> tuple[LLM, int]:
        llm = LLM(model, num_kv_blocks=blocks, **OPTIONS)
        llm.generate({"prompt_token_ids": [5, 6, 7]}, SHORT, use_tqdm=False)
        inside = free()
        llm.close()
        return llm, inside

    kept = [cycle()[0]]
    before = free()
    for _ in range(3):
        llm, inside = cycle()
        kept.append(llm)
        assert before - inside >= 2000 * MIB, "the pool was not taken: the test proves nothing"
        assert before - free() < 64 * MIB, f"{(before - free()) / MIB:.0f} MiB did not come back"


def test_a_failed_engine_gives_memory_back(little_memory: Any) -> None:
    model = tiny("llama").cuda()
    LLM(model, num_kv_blocks=64, **OPTIONS).close()
    gc.collect()
    torch.cuda.empty_cache()
    before = free()
    little_memory(1024)
    with pytest.raises(ConfigError):
        LLM(model, num_kv_blocks=10**6, **OPTIONS)
    gc.collect()
    torch.cuda.empty_cache()
    assert before - free() < 64 * MIB


def test_slots_share_one_pool() -> None:
    model = tiny("llama", num_hidden_layers=4, hidden_size=512, num_attention_heads=8, intermediate_size=2048).cuda()
    options = {**OPTIONS, "max_num_batched_tokens": 4096, "num_kv_blocks": 200}
    one, two, three = (memory_of_engine(model, pipeline_depth=depth, **options) for depth in (1, 2, 3))
    assert one["pool_bytes"] > 0
    assert two["graphs"] == 2 * one["graphs"]
    assert two["pool_bytes"] <= 1.05 * one["pool_bytes"]
    assert three["pool_bytes"] <= 1.05 * one["pool_bytes"]


def test_out_of_memory_at_capture_names_what_to_lower(little_memory: Any) -> None:
    model = tiny("llama").cuda()
    little_memory(1024)
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens .*2097152"):
        LLM(model, **{**OPTIONS, "max_num_batched_tokens": 2**22})
    torch.cuda.set_per_process_memory_fraction(1.0)
    with LLM(model, num_kv_blocks=64, **OPTIONS) as llm:  # and the process goes on
        llm.generate({"prompt_token_ids": [5, 6, 7]}, SHORT, use_tqdm=False)


@pytest.mark.parametrize("option", ["num_kv_blocks", "kv_cache_memory_bytes"])
def test_out_of_memory_for_the_pool_names_its_option(option: str, little_memory: Any) -> None:
    model = tiny("llama").cuda()
    little_memory(512)
    # Many rows, so that a pool that large is of use and is not cut down.
    options = {**OPTIONS, "max_num_seqs": 4096, "max_num_batched_tokens": 4096, "max_model_len": 512}
    with pytest.raises(ConfigError, match=option):
        LLM(model, **{**options, option: 400_000 if option == "num_kv_blocks" else 2**32})


def test_out_of_memory_while_loading_is_explained(tmp_path: Path, little_memory: Any) -> None:
    model = tiny("llama", hidden_size=1024, num_attention_heads=8, intermediate_size=8192, num_hidden_layers=8)
    model.save_pretrained(tmp_path)
    del model
    little_memory(256)
    with pytest.raises(ConfigError, match=r"weights|memory"):
        LLM(str(tmp_path), **OPTIONS)


def test_shards_load_straight_to_the_gpu(tmp_path: Path) -> None:
    """2 GB in shards of 500 MB: the memory that loading takes on the host, file pages aside, stays near one shard."""
    result = loading_proof(tmp_path, device="cuda")
    assert result["shards"] >= 4
    assert result["weights_mib"] > 1800
    assert result["peak_anonymous_mib"] < 1.3 * result["shard_mib"], result
