"""Weights that change under an engine: who sees which, what is refused, and that nothing restarts or grows."""

from __future__ import annotations

import asyncio
import copy
import gc
import threading
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import nn

from engines import OPTIONS, check_idle, gated, options, wait_until
from gapless import LLM, AsyncLLM, ConfigError, SamplingParams, WeightError
from gapless.device.cpu import CpuDevice
from gapless.model.adapter import TransformersModel
from gapless.model.weights import Weights
from models import tiny
from proof.harness import Job, Outcome, SteppedEngine, make_parts, make_request
from proof.hash_model import HashModel
from test_fused import described

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [5, 6, 7, 8, 9, 10, 11, 12, 13]}, {"prompt_token_ids": [3]}]


def run(llm: LLM, prompts: Any = None, params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(PROMPTS if prompts is None else prompts, params, use_tqdm=False)
    return [o.outputs[0].token_ids for o in outputs]


def reference(model: Any, params: SamplingParams = GREEDY) -> list[list[int]]:
    """Greedy tokens of the model alone, one whole forward for each."""
    found = []
    for prompt in PROMPTS:
        ids = list(prompt["prompt_token_ids"])
        with torch.no_grad():
            for _ in range(params.max_tokens or 0):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        found.append(ids[len(prompt["prompt_token_ids"]) :])
    return found


def train(model: Any, optimizer: Any) -> float:
    """One step away from what the model does now."""
    model.train()
    ids = torch.randint(2, 190, (2, 12), generator=torch.Generator().manual_seed(0))
    loss = model(ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.eval()
    return float(loss.detach())


def engine_of(model: Any, **changes: Any) -> LLM:
    return LLM(model, **{**OPTIONS, **changes})


# ---- a trainer's model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 3])
def test_an_optimizer_s_steps_are_used_after_one_call(depth: int) -> None:
    model = tiny("llama")
    attention = model.config._attn_implementation
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with engine_of(model, pipeline_depth=depth) as llm:
        before = run(llm)
        assert before == reference(model)
        losses = []
        for round in range(3):
            losses.append(train(model, optimizer))
            assert llm.update_weights() == round + 1 == llm.weight_version
            assert llm._client._scheduler.pool.num_published == 0
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            assert [o.outputs[0].token_ids for o in outputs] == reference(model)
            assert {(o.first_weight_version, o.weight_version) for o in outputs} == {(round + 1, round + 1)}
        assert losses[2] < losses[0]  # it trains on
        assert run(llm) != before
        check_idle(llm)
    assert model.config._attn_implementation == attention
    assert all(p.requires_grad for p in model.parameters())
    assert train(model, optimizer) < losses[0]


def test_replaced_storage_is_copied_to_the_old_address() -> None:
    """``.data`` assigned, a new Parameter, a move to another dtype and back: the trainer need not care."""
    model = tiny("qwen3")
    other = tiny("qwen3", seed=7)
    with engine_of(model) as llm:
        weights = llm._client._built.runner.weights
        assert weights is not None
        addresses = {name: t.data_ptr() for name, t in weights._tensors.items()}
        model.model.layers[0].self_attn.q_proj.weight.data = other.model.layers[0].self_attn.q_proj.weight.data
        model.model.layers[1].mlp.down_proj.weight = nn.Parameter(other.model.layers[1].mlp.down_proj.weight.data)
        model.double()
        model.float()
        llm.update_weights()
        assert run(llm) == reference(model)
        model.load_state_dict(other.state_dict(), assign=True)
        llm.update_weights()
        assert run(llm) == reference(other)
        assert {name: t.data_ptr() for name, t in weights._tensors.items()} == addresses


def test_a_model_that_no_longer_fits_is_refused_by_name() -> None:
    model = tiny("llama")
    with engine_of(model) as llm:
        before = run(llm)
        norm, kept = model.model.norm, model.model.norm.weight.data
        norm.weight.data = torch.ones(7)
        with pytest.raises(WeightError, match=r"'model.norm.weight' has the shape \(7,\).*\(48,\)"):
            llm.update_weights()
        norm.weight.data = kept
        model.extra = nn.Linear(2, 2)
        with pytest.raises(WeightError, match=r"'extra.weight' now.*Merge"):
            llm.update_weights()
        del model.extra
        head = model.lm_head
        del model.lm_head
        with pytest.raises(WeightError, match=r"'lm_head.weight'.*none now"):
            llm.update_weights()
        model.lm_head = head
        assert llm.weight_version == 0
        assert run(llm) == before


def test_engines_over_one_model_share_its_merged_layers() -> None:
    """And the caller's model stays what it was: same values, same gradients' owners, can be saved."""
    model = tiny("qwen2")
    values = copy.deepcopy(model.state_dict())
    decoders = []
    for _ in range(2):
        plain = TransformersModel(model)
        decoders.append(described(plain))
    one, two = (decoder.decoder.layers[0] for decoder in decoders)
    qkv, again = one.attention.qkv, two.attention.qkv
    assert qkv.data.data_ptr() == again.data.data_ptr() == model.model.layers[0].self_attn.q_proj.weight.data_ptr()
    assert qkv.shape == again.shape
    assert torch.equal(qkv.data, again.data)
    assert qkv.bias is not None
    assert again.bias is not None
    assert torch.equal(qkv.bias, again.bias)
    assert one.mlp.up.data.data_ptr() == two.mlp.up.data.data_ptr()
    assert all(torch.equal(values[name], tensor) for name, tensor in model.state_dict().items())


def test_new_values_reach_merged_layers() -> None:
    model, other = tiny("qwen2"), tiny("qwen2", seed=3)
    plain = TransformersModel(model)
    decoder = described(plain)
    Weights(plain.module, model).prepare(other.state_dict()).apply()
    attention = other.model.layers[1].self_attn
    expected = torch.cat([getattr(attention, f"{n}_proj").weight for n in "qkv"])
    assert torch.equal(decoder.decoder.layers[1].attention.qkv.data, expected)
    assert torch.equal(model.lm_head.weight, other.lm_head.weight)


def test_a_loaded_model_can_be_saved(tmp_path: Any) -> None:
    model = tiny("llama")
    plain = TransformersModel(model)
    described(plain)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


# ---- given tensors -------------------------------------------------------------------------------------------------


def test_given_tensors(tmp_path: Any) -> None:
    model, other = tiny("llama"), tiny("llama", seed=5)
    model.save_pretrained(tmp_path)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        before = run(llm)
        with pytest.raises(WeightError, match="loaded this model itself"):
            llm.update_weights()
        state = other.state_dict()
        bad: list[tuple[Any, str]] = [
            (
                {**state, "model.norm.wight": state["model.norm.weight"]},
                r"no tensor 'model.norm.wight'.*'model.norm.we",
            ),
            ({**state, "lm_head.weight": torch.zeros(3, 4)}, r"'lm_head.weight' has the shape \(3, 4\)"),
            ({**state, "lm_head.weight": state["lm_head.weight"].long()}, r"'lm_head.weight' is torch.int64"),
            ({**state, "lm_head.weight": state["lm_head.weight"].to("meta")}, "meta tensor"),
            ({**state, "lm_head.weight": [1.0]}, "list, not a tensor"),
            (list(state.values()), r"pairs \(name, tensor\)"),
            ("weights.safetensors", r"an entry of type str.*pairs \(name, tensor\)"),
            (5, r"weights of type int are not allowed.*pairs \(name, tensor\)"),
            (other, r"LlamaForCausalLM are not allowed: give its state_dict\(\)"),
        ]
        for given, message in bad:
            with pytest.raises(WeightError, match=message):
                llm.update_weights(given)
        with pytest.raises(ConfigError, match="recompute"):
            llm.update_weights(state, recompute=1)  # type: ignore[arg-type]
        assert llm.weight_version == 0
        assert run(llm) == before
        assert llm.update_weights((name, tensor.double()) for name, tensor in state.items()) == 1
        assert run(llm) == reference(other)
        llm.update_weights({"lm_head.weight": model.lm_head.weight})  # some of them
        other.lm_head.weight.data.copy_(model.lm_head.weight.data)
        assert run(llm) == reference(other)


def test_two_values_for_a_tied_tensor() -> None:
    model = tiny("llama", tie_word_embeddings=True)
    with engine_of(model) as llm:
        new = torch.randn_like(model.lm_head.weight)
        with pytest.raises(WeightError, match="one tensor in this model"):
            llm.update_weights({"lm_head.weight": new, "model.embed_tokens.weight": new + 1})
        llm.update_weights({"lm_head.weight": new, "model.embed_tokens.weight": new.clone()})
        assert torch.equal(model.lm_head.weight, new)  # it is the caller's model


# ---- an update between the steps of a request ----------------------------------------------------------------------


class SaltedHash(HashModel):
    """Its weights are one number, which it keeps in the cache with each token."""

    salt = 0

    def forward(self, input_ids: torch.Tensor, *rest: Any) -> None:
        super().forward(input_ids + self.vocab_size * self.salt, *rest)


class UpdatedEngine(SteppedEngine):
    """Changes the weights before each of the steps ``at``, counted by launches."""

    def __init__(self, at: list[int], recompute: bool, sleeps: bool, *args: Any) -> None:
        super().__init__(*args)
        self.at, self.recompute, self.sleeps = at, recompute, sleeps

    def _schedule(self) -> Any:
        if self.at and len(self.outcome.plans) == self.at[0]:
            self.at.pop(0)
            self.control.alone(self.change, Future())
        return super()._schedule()

    def change(self) -> None:
        self._runner.graphs.model.salt += 1
        self.scheduler.new_weights(recompute=self.recompute)
        self.scheduler.check()
        if self.sleeps:
            self.scheduler.preempt_all()
            self._runner.drop_memory()
            self._runner.take_memory()

    def _receive(self, block: bool) -> None:
        if not (block and self.control.turn()):
            super()._receive(block)


def updated(depth: int, *, recompute: bool, sleeps: bool = False, delays: int | None = None) -> Outcome:
    model = SaltedHash()
    jobs = [Job(make_request(i, [2 + i] * (3 + 9 * i), 24, streaming=i % 2 == 0)) for i in range(4)]
    scheduler, runner = make_parts(model, CpuDevice(delays=delays), depth=depth)
    outcome = UpdatedEngine([6, 17], recompute, sleeps, jobs, scheduler, runner, depth, True).run()
    assert scheduler.pool.available == scheduler.pool.capacity
    return outcome


@pytest.mark.parametrize("recompute", [True, False])
def test_depths_agree_around_an_update(recompute: bool) -> None:
    expected = updated(1, recompute=recompute)
    for depth in (2, 3):
        got = updated(depth, recompute=recompute, delays=depth)
        assert got.tokens() == expected.tokens()
        assert got.finished.keys() == expected.finished.keys()
        for i, end in got.finished.items():
            assert end.weight_versions == expected.finished[i].weight_versions
    assert {f.weight_versions for f in expected.finished.values()} >= {(0, 2)}


def test_recompute_uses_the_new_weights_for_the_whole_past() -> None:
    """Each token against the oracle, which is told when each request saw the updates, and nothing else."""
    model = SaltedHash()
    prompt = [2] * 3

    def drew(past: list[int], salts: list[int]) -> int:
        return model.next_token([t + model.vocab_size * s for t, s in zip(past, salts, strict=True)])

    for recompute in (True, False):
        new = updated(3, recompute=recompute).finished[0].token_ids.tolist()
        fits = []
        for first in range(1, len(new)):
            for second in range(first + 1, len(new)):
                salts = [0] * first + [1] * (second - first) + [2] * (len(new) - second)
                for i, salt in enumerate(salts):
                    past = prompt + new[:i]
                    # Without, a token's key and value are of the step that read it, which drew the next one.
                    read_by = [salt] * len(past) if recompute else [0] * len(prompt) + salts[1 : i + 1]
                    if drew(past, read_by) != new[i]:
                        break
                else:
                    fits.append((first, second))
        assert len(fits) == 1, fits
        assert recompute or fits == [(6, 17)]  # nothing delays it: a token a step


def test_sleep_between_steps_changes_nothing() -> None:
    assert updated(3, recompute=True, sleeps=True).tokens() == updated(1, recompute=True).tokens()


def test_what_was_cached_with_old_weights_is_never_found() -> None:
    """Also not the blocks that a running request fills after the update from an old past."""
    model = tiny("llama")
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with engine_of(model) as llm, gated(llm) as gate:
        done: list[Any] = []
        thread = threading.Thread(target=lambda: done.extend(llm.generate(PROMPTS[:1], long, use_tqdm=False)))
        thread.start()
        wait_until(lambda: gate.passed > 5, "some steps")
        llm.pause()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.2)
        llm.update_weights(recompute=False)
        llm.resume()
        thread.join()
        (output,) = done
        assert (output.first_weight_version, output.weight_version) == (0, 1)
        ids = PROMPTS[0]["prompt_token_ids"] + output.outputs[0].token_ids
        hits = llm.stats()[1].prefix_hit_tokens
        run(llm, [{"prompt_token_ids": ids}], SamplingParams(max_tokens=1))
        assert llm.stats()[1].prefix_hit_tokens == hits
        check_idle(llm)


def test_versions_of_a_stream() -> None:
    async def whole() -> None:
        async with AsyncLLM(**options()) as llm:
            seen = []
            with gated(llm) as gate:
                async for output in llm.generate(
                    "hello", SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
                ):
                    if not seen:
                        gate.open.clear()
                        update = asyncio.create_task(llm.update_weights({}))
                        await asyncio.sleep(0.05)
                        assert not update.done()  # a step is in flight
                        gate.open.set()
                        assert await update == 1
                    seen.append((output.first_weight_version, output.weight_version))
            assert seen[0] == (0, 0)
            assert seen[-1] == (0, 1)
            assert seen == sorted(seen)
            outputs = [o async for o in llm.generate("hello", GREEDY, mode="delta")]
            assert {(o.first_weight_version, o.weight_version) for o in outputs} == {(1, 1)}
            await asyncio.to_thread(check_idle, llm)

    asyncio.run(asyncio.wait_for(whole(), 60))


def test_twenty_rounds_leave_nothing_behind() -> None:
    model = tiny("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)

    def tensors() -> int:
        gc.collect()
        return sum(type(o) in (torch.Tensor, nn.Parameter) for o in gc.get_objects())

    with engine_of(model) as llm:
        counts, threads = [], threading.active_count()
        for _ in range(20):
            train(model, optimizer)
            llm.update_weights()
            run(llm, params=params)
            llm.update_weights(state)
            run(llm, params=params)
            counts.append(tensors())
        assert llm.weight_version == 40
        assert counts[-1] == counts[1], counts
        assert threading.active_count() == threads
        check_idle(llm)
