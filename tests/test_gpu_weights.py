"""On a GPU: graphs follow weights that change, an update waits for the trainer's stream, and memory comes and goes."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from gapless import LLM, SamplingParams
from models import tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MIB = 2**20
OPTIONS: dict[str, Any] = {"device": "cuda", "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128}
SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64, "initializer_range": 0.1,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [5, 6, 7, 8, 9, 10, 11, 12, 13] * n} for n in (1, 4)]
SHAPES = [("llama", torch.float32), ("qwen3", torch.bfloat16), ("qwen2", torch.bfloat16), ("gpt_oss", torch.float32)]


def make(kind: str, dtype: torch.dtype, **changes: Any) -> Any:
    sizes = {} if kind == "gpt_oss" else SIZES
    return tiny(kind, **{**sizes, **changes}).cuda().to(dtype)


def run(llm: LLM) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def fresh(model: Any) -> list[list[int]]:
    """What an engine made now gives: the same kernels over the same values."""
    with LLM(copy.deepcopy(model), num_kv_blocks=64, **OPTIONS) as llm:
        return run(llm)


def train(model: Any, optimizer: Any) -> float:
    ids = torch.randint(2, 190, (2, 12), generator=torch.Generator().manual_seed(0)).cuda()
    loss = model(ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def free() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize(("kind", "dtype"), SHAPES)
@pytest.mark.parametrize("depth", [1, 3])
def test_graphs_follow_an_optimizer(kind: str, dtype: torch.dtype, depth: int) -> None:
    model = make(kind, dtype)
    attention = model.config._attn_implementation
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with LLM(model, num_kv_blocks=64, pipeline_depth=depth, **OPTIONS) as llm:
        before = run(llm)
        assert before == fresh(model)
        for round in range(2):
            train(model, optimizer)
            assert llm.update_weights() == round + 1
            assert llm._client._scheduler.pool.num_published == 0
            assert run(llm) == fresh(model)
        assert run(llm) != before
    assert model.config._attn_implementation == attention
    train(model, optimizer)


def test_an_update_waits_for_the_trainer_s_stream() -> None:
    model = make("qwen3", torch.bfloat16)
    other = make("qwen3", torch.bfloat16, initializer_range=0.2)
    stream = torch.cuda.Stream()
    with LLM(model, num_kv_blocks=64, **OPTIONS) as llm:
        run(llm)
        with torch.cuda.stream(stream), torch.no_grad():
            torch.cuda._sleep(200_000_000)  # about 0.1 s
            for parameter in model.parameters():
                parameter.mul_(1.3)
            llm.update_weights()
        assert run(llm) == fresh(model)
        with torch.cuda.stream(stream), torch.no_grad():
            torch.cuda._sleep(200_000_000)
            new = {name: tensor * 1.0 for name, tensor in other.state_dict().items()}
            llm.update_weights(new)
        del new
        assert run(llm) == fresh(other)
        llm.update_weights(
            {name: tensor.float().cpu() for name, tensor in make("qwen3", torch.bfloat16).state_dict().items()}
        )
        assert run(llm) == fresh(make("qwen3", torch.bfloat16))


def test_a_trainer_that_moves_its_model_away_and_back() -> None:
    model = make("qwen2", torch.bfloat16)
    with LLM(model, num_kv_blocks=64, **OPTIONS) as llm:
        before = run(llm)
        model.cpu()
        llm.reset_prefix_cache()  # or other chunks round otherwise
        assert run(llm) == before  # the engine keeps its storage
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.3)
        llm.update_weights()  # from the host
        model.cuda()
        assert run(llm) == fresh(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        llm.update_weights()  # from other addresses
        assert run(llm) == fresh(model)


def test_twenty_rounds_do_not_grow() -> None:
    """By the allocator's count and by the driver's."""
    model = make("llama", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with LLM(model, num_kv_blocks=64, **OPTIONS) as llm:
        counts = []
        for _ in range(20):
            train(model, optimizer)
            optimizer.zero_grad()
            llm.update_weights()
            run(llm)
            counts.append((free(), torch.cuda.memory_allocated()))
    assert counts[-1][1] == counts[2][1], counts
    assert counts[2][0] - counts[-1][0] < 16 * MIB, counts


def test_sleep_gives_cache_and_graphs_back() -> None:
    model = make("qwen3", torch.bfloat16)
    block = 3 * 2 * 2 * 64 * 2 * 16  # bytes: layers, k and v, heads, head size, bf16, tokens
    with LLM(model, num_kv_blocks=1024 * MIB // block, **OPTIONS) as llm:
        want = run(llm)
        llm.sleep()
        llm.wake()  # the first time, libraries take a workspace for the thread of the loop, and keep it
        awake = free()
        graphs = len(llm._client._built.runner.graphs.captured)
        assert graphs > 0
        for _ in range(3):
            llm.sleep()
            assert free() - awake > 1000 * MIB
            assert not llm._client._built.runner.graphs.captured
            llm.wake()
            assert len(llm._client._built.runner.graphs.captured) == graphs
            assert run(llm) == want
        assert awake - free() < 32 * MIB


def test_level_2_moves_the_weights_to_the_host_and_back(tmp_path: Path) -> None:
    make("llama", torch.bfloat16, hidden_size=1024, intermediate_size=8192, num_hidden_layers=4).cpu().save_pretrained(
        tmp_path
    )
    with LLM(str(tmp_path), num_kv_blocks=64, **OPTIONS) as llm:
        want = run(llm)
        weights = llm._client.model.weight_bytes
        assert weights > 100 * MIB
        awake = free()
        llm.sleep(1)
        light = free()
        llm.sleep(2)
        assert free() - light > 0.9 * weights
        llm.wake()
        assert run(llm) == want
        assert awake - free() < 32 * MIB


def test_a_wake_without_memory_can_be_repeated() -> None:
    from gapless import ConfigError

    model = make("qwen3", torch.bfloat16)
    block = 3 * 2 * 2 * 64 * 2 * 16
    with LLM(model, num_kv_blocks=512 * MIB // block, **OPTIONS) as llm:
        want = run(llm)
        llm.sleep()
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 64 * MIB) / total)
        try:
            with pytest.raises(ConfigError, match="too little memory"):
                llm.wake()
            assert llm.is_sleeping
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        llm.wake()
        assert run(llm) == want
