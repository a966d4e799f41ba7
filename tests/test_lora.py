"""Adapters in one batch give each request what PEFT gives it alone, whatever runs beside it."""

from __future__ import annotations

import json
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines import check_idle, gated, wait_until
from gapless import LLM, AdapterError, AsyncLLM, ConfigError, RequestError, SamplingParams
from gapless.errors import EngineClosedError
from models import VOCAB_SIZE, tiny
from proof.hash_model import HashModel

peft_adapters = pytest.importorskip("peft_adapters", reason="peft is not installed")
from peft_adapters import KINDS, A, Kind, Oracle, save  # noqa: E402

MODELS = ("llama", "qwen3")
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "max_model_len": 96,
    "block_size": 8,
    "num_kv_blocks": 129,
    "check_model": False,
    "enable_lora": True,
    "max_loras": 3,
    "max_lora_rank": 8,
}
STEPS = 12


class Setting:
    """A tiny model, three adapters in folders, and the oracle."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.model = tiny(kind, num_hidden_layers=2)
        self.folders = {name: save(self.model, made, folder / name) for name, made in KINDS.items()}
        self.oracle = Oracle(self.model, self.folders)
        self._known: dict[Any, list[int]] = {}

    def expected(self, name: str | None, prompt: list[int], steps: int = STEPS) -> list[int]:
        key = name, tuple(prompt), steps
        if key not in self._known:
            self._known[key] = self.oracle.generate(name, prompt, steps)
        return self._known[key]

    def llm(self, *names: str, **changes: Any) -> LLM:
        llm = LLM(self.model, **{**OPTIONS, **changes})
        for name in names:
            llm.load_lora(name, self.folders[name])
        return llm


@pytest.fixture(scope="module", params=MODELS)
def setting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return Setting(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return Setting("llama", tmp_path_factory.mktemp("llama_alone"))


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(2, VOCAB_SIZE) for _ in range(length)]


def params(steps: int = STEPS, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True, **changes)


def run(llm: LLM, work: list[tuple[str | None, list[int]]], steps: int = STEPS) -> list[list[int]]:
    prompts = [{"prompt_token_ids": prompt} for _, prompt in work]
    outputs = llm.generate(prompts, params(steps), use_tqdm=False, lora=[name for name, _ in work])
    return [output.outputs[0].token_ids for output in outputs]


def mix(count: int, seed: int, longest: int = 50) -> list[tuple[str | None, list[int]]]:
    rng = random.Random(seed)
    return [([None, "a", "b", "c"][i % 4], prompt_of(rng, rng.randint(1, longest))) for i in range(count)]


# ---- equal to PEFT ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_mixed_batch_equals_peft(setting: Setting, depth: int) -> None:
    """Chunked prefill (32 tokens a step), none, a, b and c side by side."""
    work = mix(8, seed=1)
    with setting.llm("a", "b", "c", pipeline_depth=depth) as llm:
        got = run(llm, work)
        check_idle(llm)
    assert got == [setting.expected(*item) for item in work]
    alone = {tuple(setting.expected(name, work[0][1])) for name in (None, "a", "b", "c")}
    assert len(alone) == 4, "the adapters must change the answer, or the test says nothing"


def test_drafts_of_the_plain_model_are_verified_with_the_adapter(llama: Setting) -> None:
    work = mix(6, seed=3, longest=20)
    config = {"method": "draft_model", "model": llama.model, "num_speculative_tokens": 3, "min_accepted": 0}
    with llama.llm("a", "b", "c", pipeline_depth=2, speculative=config) as llm:
        got = run(llm, work)
        drafts = llm.stats()[1].drafts
        check_idle(llm)
    assert got == [llama.expected(*item) for item in work]
    assert drafts is not None
    assert 0 < sum(drafts.accepted) < sum(drafts.proposed)


def test_preempted_rows_keep_their_adapter(setting: Setting) -> None:
    work = mix(8, seed=2, longest=30)
    with setting.llm("a", "b", "c", num_kv_blocks=13) as llm:
        got = run(llm, work, 24)
        assert llm.stats()[1].preemptions > 0
    assert got == [setting.expected(*item, 24) for item in work]


def test_logits_equal_peft_to_rounding(setting: Setting) -> None:
    prompt = prompt_of(random.Random(3), 20)
    with setting.llm("a", "b", "c") as llm:
        for name in (None, "a", "b", "c"):
            options = params(1, prompt_logprobs=3)
            (output,) = llm.generate({"prompt_token_ids": prompt}, options, use_tqdm=False, lora=name)
            got = output.prompt_logprobs
            expected = setting.oracle.logits(name, prompt).log_softmax(-1)
            assert got is not None
            for position, token in enumerate(prompt[1:], 1):
                entry = got[position]
                assert entry is not None
                assert entry[token].logprob == pytest.approx(float(expected[position - 1, token]), abs=2e-4)


def test_what_is_added_does_not_depend_on_the_neighbours() -> None:
    """To the bit, in steps of equal size."""
    from gapless.lora import reference
    from gapless.lora.bank import AdapterBank, Part, Site

    bank = AdapterBank([Site(24, (Part("q", 20), Part("k", 12)))], rank=8, slots=3, dtype=torch.float32, ops=reference)
    generator = torch.Generator().manual_seed(0)
    buffer = torch.randn(bank.shape, generator=generator)
    buffer[0] = 0
    bank.bind(buffer)
    x, y = torch.randn(9, 24, generator=generator), torch.randn(9, 32, generator=generator)
    results = []
    for others in ([0] * 8, [1] * 8, [2, 3, 0, 1, 2, 3, 1, 1]):
        slots = torch.tensor([2, *others], dtype=torch.int32)
        masks = [(s, (slots != s)[:, None]) for s in sorted(set(slots.tolist()) - {0})]
        out = y.clone()
        bank.add(0, x, out, reference.TokenSlots(slots, masks))
        results.append(out[0])
        assert torch.equal(out[slots == 0], y[slots == 0])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert not torch.equal(results[0], y[0])


def test_random_traffic_at_every_depth(llama: Setting) -> None:
    seed = 11
    print("seed", seed)
    rng = random.Random(seed)
    work = [(rng.choice([None, "a", "b"]), prompt_of(rng, rng.randint(1, 40))) for _ in range(14)]
    for depth in (1, 2, 4):
        with llama.llm("a", "b", pipeline_depth=depth, max_num_seqs=5, num_kv_blocks=40) as llm:
            assert run(llm, work, 8) == [llama.expected(*item, 8) for item in work]


def test_steps_without_adapters_take_the_other_path(llama: Setting) -> None:
    """A plan says whether any row has an adapter; without one nothing of LoRA runs."""
    with llama.llm("a") as llm:
        bank = llm._client._built.runner.lora.bank  # type: ignore[union-attr]
        calls: list[int] = []
        inner = bank.tokens
        bank.tokens = lambda *arguments: calls.append(1) or inner(*arguments)  # type: ignore[method-assign,func-returns-value]
        prompt = prompt_of(random.Random(4), 9)
        run(llm, [(None, prompt)])
        assert not calls
        run(llm, [("a", prompt)])
        assert len(calls) == STEPS


@pytest.mark.parametrize("kind", ["qwen2", "olmo2", "phi3", "qwen3_moe"])
def test_models_of_other_structure(kind: str, tmp_path: Path) -> None:
    """Biases, norms in other places, merged projections, experts: whatever maps each token once can have an adapter."""
    model = tiny(kind, num_hidden_layers=2)
    targets = {"phi3": ["qkv_proj", "gate_up_proj", "down_proj"], "qwen3_moe": ["q_proj", "o_proj"]}
    folder = save(model, Kind(targets.get(kind, "all-linear"), rank=3, seed=4), tmp_path / "x")
    prompt = prompt_of(random.Random(5), 14)
    with LLM(model, **OPTIONS) as llm:
        llm.load_lora("x", folder)
        got = run(llm, [("x", prompt), (None, prompt)])
    oracle = Oracle(model, {"x": folder})
    assert got == [oracle.generate(name, prompt, STEPS) for name in ("x", None)]
    assert got[0] != got[1]


@pytest.mark.parametrize("kind", MODELS)
def test_merged_products_equal_peft(kind: str, tmp_path: Path) -> None:
    """The fused decoder: q, k, v and gate, up have an A and B each, at their place in the merged product; a kernel that
    ends with SiLU has no place for them and is for others."""
    from torch.nn.functional import linear

    from gapless.model.adapter import TransformersModel
    from gapless.model.ops import reference as ops_reference
    from test_fused import described

    model = tiny(kind, num_hidden_layers=2)
    folders = {name: save(model, made, tmp_path / name) for name, made in KINDS.items()}
    oracle = Oracle(model, folders)
    plain = TransformersModel(model)
    decoder = described(plain, 128)
    decoder.gated = lambda x, w: ops_reference.act_mul(linear(x, w))  # type: ignore[assignment]  # adapters come before
    work = mix(6, seed=12, longest=20)
    with LLM(decoder, **OPTIONS) as llm:
        for name, folder in folders.items():
            llm.load_lora(name, folder)
        assert run(llm, work) == [oracle.generate(*item, STEPS) for item in work]


@pytest.mark.parametrize(("debug", "delays"), [(True, None), (False, 5)])
def test_nothing_undeclared_is_touched(llama: Setting, debug: bool, delays: int | None) -> None:
    """Adapters are declared as read; the copy of one as written. With padded shapes, so that every key is there."""
    import types

    from gapless.device.cpu import CpuDevice
    from gapless.lora import reference
    from gapless.lora.folder import read_adapter
    from gapless.model.adapter import TransformersModel
    from gapless.request.request import LoraRef, cache_key
    from gapless.runner.shapes import graph_shapes
    from proof.harness import Job, SteppedEngine, make_parts, make_request

    model = TransformersModel(llama.model)
    ops: types.ModuleType = reference
    bank = model.enable_lora(slots=2, rank=8, ops=ops)
    device = CpuDevice(debug=debug, delays=delays, max_delay=0.001)
    shapes = graph_shapes(4, 32)
    scheduler, runner = make_parts(model, device, depth=2, num_blocks=17, adapters=bank, shapes=shapes)
    runner.capture(runner.graph_keys())
    assert runner.lora is not None
    jobs, work = [], mix(4, seed=13, longest=14)
    for slot, name in ((1, "a"), (2, "b")):
        runner.lora.stage(read_adapter(llama.folders[name]))
        runner.lora.load(slot)
    for i, (name, prompt) in enumerate(work):
        request = make_request(i, prompt, 3)
        if name in ("a", "b"):
            request.lora = LoraRef(1 + (name == "b"), 1 + (name == "b"), name)
            request.cache_key = cache_key(None, request.lora.id)
        jobs.append(Job(request, at_step=i))
    outcome = SteppedEngine(jobs, scheduler, runner, 2, check=True).run()
    expected = [llama.expected(name if name != "c" else None, prompt, 3) for name, prompt in work]
    assert list(outcome.tokens().values()) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("eager", [False, True])
def test_the_gpu_equals_peft(setting: Setting, depth: int, eager: bool) -> None:
    """Captured, fused, with the kernels; load and unload between and during steps."""
    import copy

    work = mix(8, seed=14)
    options = {**OPTIONS, "device": "cuda", "pipeline_depth": depth, "enforce_eager": eager}
    with LLM(copy.deepcopy(setting.model).cuda(), **options) as llm:
        for name in ("a", "b", "c"):
            llm.load_lora(name, setting.folders[name])
        assert run(llm, work) == [setting.expected(*item) for item in work]
        llm.unload_lora("b")
        llm.load_lora("d", setting.folders["c"])
        again = [("d" if name == "b" else name, prompt) for name, prompt in work]
        expected = [setting.expected("c" if name == "d" else name, prompt) for name, prompt in again]
        assert run(llm, again) == expected


# ---- the prefix cache ---------------------------------------------------------------------------------------------


def test_equal_prompts_with_other_adapters_share_nothing(setting: Setting) -> None:
    prompt = prompt_of(random.Random(6), 40)
    work: list[tuple[str | None, list[int]]] = [(name, prompt) for name in (None, "a", "b", None, "a", "b")]
    with setting.llm("a", "b") as llm:
        assert run(llm, work) == [setting.expected(*item) for item in work]
        before = llm.stats()[1].prefix_hit_tokens
        assert run(llm, work) == [setting.expected(*item) for item in work]
        assert llm.stats()[1].prefix_hit_tokens - before == 6 * 32  # four of the five blocks; one token stays


def test_other_weights_under_an_old_name_hit_nothing(llama: Setting) -> None:
    prompt = prompt_of(random.Random(7), 40)
    with llama.llm() as llm:
        llm.load_lora("x", llama.folders["a"])
        assert run(llm, [("x", prompt)]) == [llama.expected("a", prompt)]
        llm.unload_lora("x")
        llm.load_lora("x", llama.folders["b"])
        before = llm.stats()[1].prefix_hit_tokens
        assert run(llm, [("x", prompt)]) == [llama.expected("b", prompt)]
        assert llm.stats()[1].prefix_hit_tokens == before


def test_what_else_must_be_equal_is_part_of_the_key() -> None:
    from gapless.request.request import cache_key

    assert cache_key(None, 0) == b""
    given = [(None, 1), (None, 2), ("1", 0), ("1", 1), ("1:", 0), ("2:1", 0), ("1", 2)]
    assert len({cache_key(salt, lora_id) for salt, lora_id in given}) == len(given)
    assert cache_key("a", 1) == cache_key("a", 1)
    with pytest.raises(RequestError, match="cache_salt"):
        cache_key("", 1)


def test_salts_and_adapters_together(llama: Setting) -> None:
    prompt = prompt_of(random.Random(15), 40)
    with llama.llm("a", "b") as llm:
        for hits, name, salt in ((0, "a", "x"), (0, "b", "x"), (0, "a", "y"), (32, "a", "x"), (0, "a", None)):
            before = llm.stats()[1].prefix_hit_tokens
            (output,) = llm.generate({"prompt_token_ids": prompt}, params(), use_tqdm=False, lora=name, cache_salt=salt)
            assert output.outputs[0].token_ids == llama.expected(name, prompt)
            assert llm.stats()[1].prefix_hit_tokens - before == hits


# ---- loading and unloading ----------------------------------------------------------------------------------------


def test_adapters_survive_a_pause_and_a_sleep(llama: Setting) -> None:
    """Loading and unloading work meanwhile; a request that is held back counts as one that runs."""
    prompt = prompt_of(random.Random(16), 9)
    results: list[list[int]] = []
    with llama.llm("a", max_loras=2) as llm:
        llm.pause()
        thread = threading.Thread(target=lambda: results.extend(run(llm, [("a", prompt), (None, prompt)])))
        thread.start()
        wait_until(lambda: llm._client.pending == 2, "the requests")
        llm.sleep()
        llm.load_lora("b", llama.folders["b"])
        llm.unload_lora("a")
        with pytest.raises(AdapterError, match="'a', which is unloaded but has requests"):
            llm.load_lora("c", llama.folders["c"])
        llm.wake()
        llm.resume()
        thread.join()
        llm.load_lora("c", llama.folders["c"])
        assert run(llm, [("b", prompt), ("c", prompt)]) == [llama.expected(name, prompt) for name in "bc"]
        check_idle(llm)
    assert results == [llama.expected("a", prompt), llama.expected(None, prompt)]


@pytest.mark.parametrize("mode", ["keep", "finish", "abort"])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_request_that_arrives_in_a_pause_keeps_its_adapter(llama: Setting, mode: Any, depth: int) -> None:
    """Its adapter is unloaded meanwhile, and the one that would take the slot has to wait for it."""
    prompt = prompt_of(random.Random(21), 9)
    results: list[list[int]] = []
    with llama.llm("a", max_loras=1, pipeline_depth=depth) as llm:
        assert run(llm, [("a", prompt)]) == [llama.expected("a", prompt)]
        llm.pause(mode)
        thread = threading.Thread(target=lambda: results.extend(run(llm, [("a", prompt), ("a", prompt[1:])])))
        thread.start()
        wait_until(lambda: llm._client.pending == 2, "the requests")
        llm.unload_lora("a")
        with pytest.raises(AdapterError, match="'a', which is unloaded but has requests"):
            llm.load_lora("b", llama.folders["b"])
        llm.resume()
        thread.join()
        llm.load_lora("b", llama.folders["b"])
        assert run(llm, [("b", prompt)]) == [llama.expected("b", prompt)]
        check_idle(llm)
    assert results == [llama.expected("a", prompt), llama.expected("a", prompt[1:])]


@pytest.mark.parametrize("depth", [1, 3])
def test_load_and_unload_while_others_run(llama: Setting, depth: int) -> None:
    """One thread generates with "a" and without; meanwhile others come and go through the two slots left."""
    work = [(["a", None][i % 2], prompt_of(random.Random(i), 5 + i)) for i in range(6)]
    expected = [llama.expected(name, prompt, 40) for name, prompt in work]
    results: list[list[list[int]]] = []
    with llama.llm("a", pipeline_depth=depth) as llm:
        thread = threading.Thread(target=lambda: results.extend(run(llm, work, 40) for _ in range(3)))
        thread.start()
        for i in range(8):
            name = "bc"[i % 2]
            llm.load_lora(name, llama.folders[name])
            prompt = prompt_of(random.Random(100 + i), 7)
            assert run(llm, [(name, prompt)], 4) == [llama.expected(name, prompt, 4)]
            llm.unload_lora(name)
        thread.join()
        assert llm.loras == ["a"]
        check_idle(llm)
    assert results == [expected] * 3
    with pytest.raises(EngineClosedError):
        llm.unload_lora("a")


@pytest.mark.parametrize("first", ["a", None])
def test_unload_in_use(llama: Setting, first: str | None) -> None:
    """The name goes at once; the request that runs and the one that waits end with the old weights, and only then is
    the slot free."""
    prompts = [prompt_of(random.Random(seed), 6) for seed in (8, 9)]
    work = list(zip((first, "a"), prompts, strict=True))
    results: list[list[int]] = []
    errors: list[AdapterError] = []

    def load_b() -> None:
        try:
            llm.load_lora("b", llama.folders["b"])
        except AdapterError as error:
            errors.append(error)

    with llama.llm("a", max_loras=1, max_num_seqs=1) as llm, gated(llm) as gate:
        gate.open.clear()
        runs = threading.Thread(target=lambda: results.extend(run(llm, work, 30)))
        runs.start()
        wait_until(lambda: llm._client.pending == 2, "the requests")
        wait_until(lambda: llm._client._scheduler.stats.steps > 0, "the first step")
        llm.unload_lora("a")
        assert llm.loras == []
        with pytest.raises(RequestError, match="no adapter of this name is loaded"):
            run(llm, [("a", prompts[0])])
        loads = threading.Thread(target=load_b)
        loads.start()
        wait_until(lambda: not llm._client._engine._inbox.empty(), "the question who uses the adapter")
        gate.open.set()
        loads.join()
        runs.join()
        assert ["'a', which is unloaded but has requests" in str(error) for error in errors] == [True]
        llm.load_lora("b", llama.folders["b"])
        assert run(llm, [("b", prompts[0])]) == [llama.expected("b", prompts[0])]
    assert results == [llama.expected(*item, 30) for item in work]


def test_an_adapter_is_not_written_over_before_it_has_left() -> None:
    """The next one waits for the copy of the last, on the thread of whoever loads it."""
    from gapless.device.base import NOTHING
    from gapless.device.cpu import CpuDevice
    from gapless.lora import reference
    from gapless.lora.bank import AdapterBank, LoraWeights, Part, Site
    from gapless.runner.lora_memory import LoraMemory

    bank = AdapterBank([Site(4, (Part("x", 4),))], rank=2, slots=2, dtype=torch.float32, ops=reference)
    first, second = ({"x": LoraWeights(torch.full((2, 4), v), torch.full((4, 2), v))} for v in (1.0, 2.0))
    device, gate, staged = CpuDevice(), threading.Event(), threading.Event()
    try:
        memory = LoraMemory(device, bank)
        device.launch(lambda: gate.wait(20) and None, NOTHING, "a long step")
        memory.stage(first)
        memory.load(1)
        thread = threading.Thread(target=lambda: (memory.stage(second), staged.set()))
        thread.start()
        assert not staged.wait(0.05)
        gate.set()
        thread.join()
        memory.load(2)
        device.synchronize()
        assert memory.buffer.amax(1).tolist() == [0, 1, 2]
        assert device.copies.waits == 0, "only the loop's thread counts, and it waits once a step"
    finally:
        gate.set()
        device.close()


def test_an_aborted_request_frees_its_adapter(llama: Setting) -> None:
    with llama.llm("a", max_loras=1) as llm:
        client = llm._client
        from gapless.engine.client import Submission

        ended = threading.Event()
        prompt = client.encode({"prompt_token_ids": [5, 6, 7]})
        client.submit(
            [Submission(prompt, params(80), lambda output: ended.set(), lambda e: None, request_id="x", lora="a")]
        )
        llm.unload_lora("a")
        client.abort("x")
        assert ended.wait(20)
        wait_until(lambda: not client._engine.call(lambda: list(client._scheduler.open_requests())), "the abort")
        llm.load_lora("b", llama.folders["b"])
        check_idle(llm)


def test_async_interface(llama: Setting) -> None:
    import asyncio

    prompt = prompt_of(random.Random(9), 10)

    async def main() -> list[int]:
        async with AsyncLLM(llama.model, **OPTIONS) as llm:
            await llm.load_lora("a", llama.folders["a"])
            assert llm.loras == ["a"]
            tokens: list[int] = []
            async for output in llm.generate({"prompt_token_ids": prompt}, params(), mode="final", lora="a"):
                tokens = output.outputs[0].token_ids
            await llm.unload_lora("a")
            with pytest.raises(RequestError, match="Loaded: none"):
                async for _ in llm.generate({"prompt_token_ids": prompt}, params(), lora="a"):
                    pass
            return tokens

    assert asyncio.run(main()) == llama.expected("a", prompt)


# ---- what is refused ----------------------------------------------------------------------------------------------


def test_unknown_adapters_are_refused_at_the_call(llama: Setting) -> None:
    prompts = [{"prompt_token_ids": [5, 6]}, {"prompt_token_ids": [7]}]
    with llama.llm("a") as llm:
        with pytest.raises(RequestError, match=r"prompt 1: lora='aa': no adapter of this name .* Did you mean 'a'"):
            llm.generate(prompts, params(), use_tqdm=False, lora=["a", "aa"])
        with pytest.raises(RequestError, match="2 prompts but 1 values of lora"):
            llm.generate(prompts, params(), use_tqdm=False, lora=["a"])
        with pytest.raises(RequestError, match="prompt 0: lora=7 is not allowed"):
            llm.generate(prompts, params(), use_tqdm=False, lora=7)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="prompt 0: lora=7 is not allowed"):
            llm.generate(prompts, params(), use_tqdm=False, lora=[7, None])  # type: ignore[list-item]
        with pytest.raises(AdapterError, match="loaded already"):
            llm.load_lora("a", llama.folders["b"])
        with pytest.raises(AdapterError, match="name='' is not allowed"):
            llm.load_lora("", llama.folders["b"])
        with pytest.raises(AdapterError, match="'b' cannot be unloaded: no adapter of this name"):
            llm.unload_lora("b")
        assert run(llm, [("a", [5, 6])]) == [llama.expected("a", [5, 6])]
    with LLM(llama.model, **{k: v for k, v in OPTIONS.items() if "lora" not in k}) as llm:
        with pytest.raises(RequestError, match="without enable_lora=True"):
            llm.generate(prompts, params(), use_tqdm=False, lora="a")
        with pytest.raises(AdapterError, match="without enable_lora=True"):
            llm.load_lora("a", llama.folders["a"])


def test_a_model_without_linear_layers_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="enable_lora=True: hash"):
        LLM(HashModel(), **OPTIONS)
    with pytest.raises(ConfigError, match="max_loras=0 is not allowed"):
        LLM(HashModel(), **{**OPTIONS, "max_loras": 0})


@pytest.mark.parametrize("option", [{"max_loras": 4}, {"max_lora_rank": 16}, {"max_loras": 9, "enable_lora": False}])
def test_how_many_adapters_without_any_is_refused(option: dict[str, Any]) -> None:
    name, value = next(iter(option.items()))
    with pytest.raises(ConfigError, match=f"{name}={value} is not allowed without enable_lora=True.*leave {name} out"):
        LLM(HashModel(), **option)


def edited(source: Path, folder: Path, **changes: Any) -> Path:
    shutil.copytree(source, folder)
    options = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**options, **changes}))
    return folder


def test_bad_folders(llama: Setting, tmp_path: Path) -> None:
    good = llama.folders["a"]
    cases: list[tuple[Any, str]] = [
        (5, "path=5 is not allowed: a folder"),
        (tmp_path / "nowhere", "there is no such folder"),
        (tmp_path, "the folder has no adapter_config.json"),
    ]
    refused = {
        "use_dora": (True, "use_dora=True is not allowed: DoRA"),
        "bias": ("lora_only", "bias='lora_only' is not allowed"),
        "lora_bias": (True, "lora_bias=True is not allowed"),
        "modules_to_save": (["lm_head"], r"modules_to_save=\['lm_head'\] is not allowed"),
        "peft_type": ("LOHA", "peft_type='LOHA' is not allowed"),
        "init_lora_weights": ("pissa", "init_lora_weights='pissa' is not allowed"),
        "trainable_token_indices": ([1], "trainable_token_indices"),
        "some_later_invention": ({"x": 1}, "some_later_invention={'x': 1} is not allowed"),
        "r": ("eight", "r='eight' is not allowed"),
        "lora_alpha": (None, "lora_alpha=None is not allowed"),
        "rank_pattern": ({"q_proj": 0}, r"rank_pattern\['q_proj'\]=0 is not allowed"),
        "alpha_pattern": ({"(": 1}, "is no regular expression"),
    }
    for name, (value, message) in refused.items():
        cases.append((edited(good, tmp_path / name, **{name: value}), message))
    cases.append((edited(good, tmp_path / "rank", r=5), "gives it rank 5"))

    def with_weights(name: str, change: Any) -> Path:
        folder = edited(good, tmp_path / name)
        weights = load_file(folder / "adapter_model.safetensors")
        change(weights)
        save_file(weights, folder / "adapter_model.safetensors")
        return folder

    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    cases.append((with_weights("half", lambda w: w.pop(key.format("A"))), "q_proj has lora_B without the other half"))
    cases.append(
        (
            with_weights("nan", lambda w: w[key.format("A")].fill_(float("nan"))),
            "q_proj: its weights are not finite",
        )
    )
    cases.append(
        (with_weights("more", lambda w: w.update({"lm_head.lora_embedding_A": torch.ones(2)})), "lora_embedding_A")
    )
    broken = edited(good, tmp_path / "broken")
    (broken / "adapter_model.safetensors").write_bytes(b"nothing")
    cases.append((broken, "cannot be read"))
    (edited(good, tmp_path / "json") / "adapter_config.json").write_text("{")
    cases.append((tmp_path / "json", "cannot be read"))

    wide = tiny("llama", num_hidden_layers=2, hidden_size=54)
    cases.append((save(wide, A, tmp_path / "wide"), "the adapter belongs to another model"))
    deep = tiny("llama", num_hidden_layers=3)
    cases.append((save(deep, A, tmp_path / "deep"), r"targets 'model.layers.2.*Served: down_proj, gate_proj, k_proj"))
    head = Kind(("lm_head",), rank=4)
    cases.append((save(llama.model, head, tmp_path / "head"), "lm_head"))
    cases.append((save(llama.model, Kind(rank=9), tmp_path / "rank9"), "has rank 9; max_lora_rank=8"))
    with llama.llm() as llm:
        for folder, message in cases:
            with pytest.raises(AdapterError, match=message):
                llm.load_lora("x", folder)
        assert llm.loras == []
        for name in ("a", "b", "c"):
            llm.load_lora(name, llama.folders[name])
        with pytest.raises(AdapterError, match=r"max_loras=3 adapters are loaded: 'a', 'b', 'c'. Unload one"):
            llm.load_lora("d", llama.folders["a"])
        prompt = prompt_of(random.Random(10), 9)
        assert run(llm, [("c", prompt)]) == [llama.expected("c", prompt)]
