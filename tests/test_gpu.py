"""On a GPU: the same tokens at every depth, captured or not, chunked or not, preempted or not, and as transformers'."""

from __future__ import annotations

import itertools
import random
import threading
import traceback

import pytest
import torch

from gapless import LLM, SamplingParams
from models import KINDS, tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WORDS = 199


def prompts(count: int = 12, seed: int = 0) -> list[dict[str, list[int]]]:
    rng = random.Random(seed)
    return [{"prompt_token_ids": [rng.randrange(2, WORDS) for _ in range(rng.randint(1, 70))]} for _ in range(count)]


def mixed_params(count: int = 12) -> list[SamplingParams]:
    rng = random.Random(1)
    made = []
    for i in range(count):
        options = {} if i % 2 else {"temperature": 0.9, "top_k": rng.choice([0, 5]), "top_p": rng.choice([1.0, 0.9])}
        made.append(SamplingParams(**{"temperature": 0, "max_tokens": rng.randint(1, 40), "seed": i, **options}))
    return made


def run(model: torch.nn.Module, params: list[SamplingParams], **options: object) -> list[list[int]]:
    defaults = {"device": "cuda", "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128}
    with LLM(model, **{**defaults, "num_kv_blocks": 200, **options}) as llm:
        outputs = llm.generate(prompts(len(params)), params, use_tqdm=False)
        return [o.outputs[0].token_ids for o in outputs]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "lfm2", "qwen4_exp"])
def test_fp32_tokens_do_not_depend_on_depth_graphs_chunks_or_memory(kind: str) -> None:
    model = tiny(kind).cuda()
    params = mixed_params()
    truth = run(model, params, pipeline_depth=1, enforce_eager=True)
    for depth, eager in itertools.product((1, 2, 3), (False, True)):
        assert run(model, params, pipeline_depth=depth, enforce_eager=eager) == truth, (depth, eager)
    assert run(model, params, max_num_batched_tokens=16) == truth
    assert run(model, params, num_kv_blocks=17, pipeline_depth=3) == truth
    assert run(model, params, enable_prefix_caching=False) == truth


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_fp32_greedy_equals_transformers(kind: str) -> None:
    model = tiny(kind).cuda()
    params = [SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)] * 6
    got = run(model, params)
    for prompt, tokens in zip(prompts(6), got, strict=True):
        ids = torch.tensor([prompt["prompt_token_ids"]], device="cuda")
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None}
        expected = model.generate(ids, max_new_tokens=32, min_new_tokens=32, **options)
        assert tokens == expected[0, ids.shape[1] :].tolist()


def in_threads(count: int, work: object) -> list[object]:
    """Results of ``work(i)`` in threads that run at once; the first thread's exception is raised with its traceback."""
    results: dict[int, object] = {}
    errors: list[str] = []

    def body(i: int) -> None:
        try:
            results[i] = work(i)  # type: ignore[operator]
        except BaseException:
            errors.append(f"thread {i}:\n{traceback.format_exc()}")

    threads = [threading.Thread(target=body, args=(i,), name=f"caller {i}") for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), f"{thread.name} hangs"
    assert not errors, "\n".join(errors)
    return [results[i] for i in range(count)]


def test_an_engine_lives_in_a_thread() -> None:
    model, params = tiny("llama").cuda(), mixed_params()
    truth = run(model, params)
    assert in_threads(1, lambda _: run(model, params)) == [truth]


@pytest.mark.parametrize("shared", [True, False])
def test_two_engines_in_two_threads(shared: bool) -> None:
    """Over one model object, whose weights they share, and over two; each is built while the other may run."""
    models = [tiny("llama").cuda()] * 2 if shared else [tiny("llama").cuda() for _ in range(2)]
    params = mixed_params()
    truth = run(models[0], params, pipeline_depth=1)
    assert in_threads(2, lambda i: [run(models[i], params) for _ in range(3)]) == [[truth] * 3] * 2


def test_an_engine_runs_while_others_are_built_and_closed() -> None:
    model, params = tiny("llama").cuda(), mixed_params()
    truth, stop = run(model, params), threading.Event()

    def work(i: int) -> int:
        if i:
            try:
                options = {"num_kv_blocks": None, "gpu_memory_utilization": 0.2}
                return sum(run(model, params, **options) == truth for _ in range(4))
            finally:
                stop.set()
        runs = 0
        options = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128, "num_kv_blocks": 200}
        with LLM(model, device="cuda", **options) as llm:
            while not stop.is_set() or not runs:
                outputs = llm.generate(prompts(), params, use_tqdm=False)
                assert [o.outputs[0].token_ids for o in outputs] == truth
                runs += 1
        return runs

    runs, built = in_threads(2, work)
    assert built == 4
    assert runs


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_second_device() -> None:
    params = mixed_params()
    truth = run(tiny("llama").to("cuda:0"), params)
    torch.cuda.set_device(0)
    model = tiny("llama").to("cuda:1")
    assert run(model, params, device="cuda:1") == truth
    assert run(model, params, device="cuda:1", enforce_eager=True) == truth
    assert torch.cuda.current_device() == 0
    models = [tiny("llama").to(f"cuda:{i}") for i in range(2)]  # here, since making one seeds torch for all threads
    both = in_threads(2, lambda i: run(models[i], params, device=f"cuda:{i}"))
    assert both == [truth, truth]
