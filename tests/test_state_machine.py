"""Random programs against the engine: whatever is asked in whatever order, every token is the right one, every request
ends once, and nothing is left.

Two machines. `Turns` drives the loop itself, turn by turn, with the real pipeline on the simulated device, and checks
after each turn. `Threads` talks to a whole engine from outside, on real threads with random pauses.
GAPLESS_MACHINE_SECONDS=300 runs the first one that long, with other seeds each time, and the second a third of that.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import gapless.engine.build as build_module
from engines import check_idle, tokenizer, wait_until
from gapless import RequestOutput, SamplingParams
from gapless.config import EngineConfig
from gapless.device.cpu import CpuDevice
from gapless.engine.client import EngineClient, Submission
from gapless.engine.control import PAUSE_MODES
from gapless.request.request import cache_key
from gapless.text.outputs import RequestGroup, accumulate
from grammars import EOS, constrain, regex
from machine import BAD, DrivenEngine, Tracked
from proof.fast_kernels import FastHashModel
from proof.harness import make_request

SECONDS = float(os.environ.get("GAPLESS_MACHINE_SECONDS", "0"))
EXAMPLES = 5
KINDS = ("plain", "windows", "grammars", "drafts", "everything")
SHARED = [(5 * i + 3) % 59 for i in range(64)]
MAX_LEN = 64
GRAMMARS = [regex("[0-9]{3}-[a-f]+"), regex("(ab|cd)*"), regex("([a-z]{2,5},)*")]


def random_request(rng: random.Random, number: int, kind: str, pasts: list[list[int]]) -> Tracked:
    """Prompts share beginnings, or go on from what another has said. Every parameter that the scheduler looks at comes
    up, and some that end a request; what makes the sampler slow in the kind "everything" only."""
    max_tokens = rng.choice([1, 2, 3, rng.randint(4, 24)])
    if kind == "drafts":  # or there is nothing to draft
        max_tokens = rng.choice([2, rng.randint(4, 24), rng.randint(12, 30)])
    own = [rng.randint(0, 59) for _ in range(rng.choice([0, rng.randint(0, 20)]))]
    prompt = (SHARED[: rng.choice([0, 16, 17, rng.randint(0, 40)])] + own or [7])[: MAX_LEN - max_tokens]
    if pasts and rng.random() < 0.4:
        prompt = (rng.choice(pasts) + own)[: MAX_LEN - max_tokens]
    if kind not in ("windows", "drafts") and rng.random() < 0.05:
        prompt[-1] = BAD
    params: dict[str, Any] = {}
    grammar = rng.choice(GRAMMARS) if kind in ("grammars", "drafts", "everything") and rng.random() < 0.4 else None
    if kind == "drafts":
        params["speculative"] = rng.choice([None, None, False])
    if kind == "everything" or (kind == "drafts" and rng.random() < 0.3):
        if rng.random() < 0.4:
            params |= {"temperature": rng.choice([1.0, 5.0]), "top_k": rng.choice([0, 2])}
        if grammar is None and rng.random() < 0.4:
            params["min_tokens"] = rng.randint(1, min(max_tokens, 3))
        if rng.random() < 0.4:
            params["repetition_penalty"] = 1.25
        if rng.random() < 0.2:
            params["logprobs"] = 0
    stops = tuple(rng.sample(range(60), rng.choice([0, 0, 3, 8])))
    if grammar is not None:
        stops = tuple({EOS, *stops})
    request = make_request(number, prompt, max_tokens, stop=stops, streaming=rng.random() < 0.7, **params)
    request.priority = rng.choice([0, 0, 0, -1, 5])
    request.cache_key = cache_key(rng.choice([None, None, None, "a", "b"]))
    request.prompt_logprobs = 0 if kind == "everything" and rng.random() < 0.2 else None
    if grammar is not None:
        constrain(request, grammar)
    return Tracked(request, rng.choice([None, rng.randint(0, 59)]), grammar)


class Turns(RuleBasedStateMachine):
    """See `machine.DrivenEngine` for what is checked."""

    kind = "plain"  # of the requests and the model; see `random_request`
    engine: DrivenEngine | None = None

    @initialize(
        depth=st.integers(1, 4),
        num_blocks=st.sampled_from([9, 9, 11, 17, 40]),
        seqs=st.integers(1, 6),
        budget=st.sampled_from([4, 9, 16, 64]),
        caching=st.booleans(),
        num_drafts=st.integers(1, 4),
        seed=st.integers(0, 2**20),
    )
    def make(
        self,
        depth: int,
        num_blocks: int,
        seqs: int,
        budget: int,
        caching: bool,
        num_drafts: int,
        seed: int,
    ) -> None:
        kind = self.kind
        self.engine = DrivenEngine(
            depth=depth,
            num_blocks=num_blocks + (kind == "drafts"),
            seed=seed,
            max_num_seqs=seqs,
            max_num_batched_tokens=max(budget, seqs * (1 + num_drafts) if kind == "drafts" else seqs),
            enable_prefix_caching=caching,
            max_model_len=MAX_LEN,
            windows=kind == "windows",
            num_drafts=num_drafts if kind == "drafts" else 0,
        )
        self.next_id = 0
        self.add(3, seed)  # a program may have been drawn without the rules that add

    @rule(count=st.integers(1, 4), seed=st.integers(0, 2**20))
    def add(self, count: int, seed: int) -> None:
        assert self.engine is not None
        rng = random.Random(seed)
        pasts = [tracked.tokens for tracked in list(self.engine.requests.values())[-4:] if BAD not in tracked.tokens]
        for _ in range(count):
            self.engine.add(random_request(rng, self.next_id, self.kind, pasts))
            self.next_id += 1

    add_more = add  # half of all rules make work, and the others have something to disturb
    add_again = add

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        assert self.engine is not None
        self.engine.abort(data.draw(st.integers(0, self.next_id)))

    @rule(
        what=st.sampled_from(
            [
                *[("pause", "keep"), ("pause", "abort"), ("pause", "finish"), ("resume",), ("sleep",), ("wake",)],
                *[("update", True), ("update", False), ("reset",)],
            ]
        )
    )
    def control(self, what: tuple[Any, ...]) -> None:
        assert self.engine is not None
        if what == ("update", False) and self.engine.num_drafts:
            what = ("update", True)
        getattr(self.engine, what[0])(*what[1:])

    @rule(count=st.integers(1, 12))
    def turns(self, count: int) -> None:
        assert self.engine is not None
        for _ in range(count):
            self.engine.turn()

    more_turns = turns

    @precondition(lambda self: self.engine is not None and self.engine.control.stopped)
    @rule()
    def go_on(self) -> None:
        """Or most of a run would be held."""
        assert self.engine is not None
        self.engine.wake()
        self.engine.resume()
        self.engine.turn()

    def teardown(self) -> None:
        engine = self.engine
        if engine is None or engine.broken:
            return
        engine.settle()
        engine.runner.close()
        stats = engine.scheduler.stats
        SEEN["runs"] += 1
        SEEN["steps"] += stats.steps
        SEEN["requests"] += len(engine.requests)
        SEEN["preemptions"] += stats.preemptions
        SEEN["overrun"] += stats.overrun_tokens
        SEEN["reused blocks"] += engine.reused
        SEEN["accepted drafts"] += engine.accepted
        SEEN["updates"] += engine.model.salt
        for tracked in engine.requests.values():
            assert tracked.end is not None
            SEEN[tracked.end.reason.value] += 1


# ---- from outside, on threads ---------------------------------------------------------------------------------------


class SaltedText(FastHashModel):
    """Over a vocabulary that has a text; its weights are one number."""

    salt = 0

    def forward(self, input_ids: torch.Tensor, *rest: Any) -> None:
        super().forward(input_ids + self.vocab_size * self.salt, *rest)


@dataclass
class Asked:
    """A request and everything that came for it, in order."""

    prompt: list[int]
    params: SamplingParams
    mode: str
    group: RequestGroup | None = None
    outputs: list[RequestOutput] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    may_abort: bool = False


class Threads(RuleBasedStateMachine):
    """A whole engine with random pauses on every stream. Requests come from this thread, what holds the engine from
    three others; outputs are taken on the engine's."""

    client: EngineClient | None = None

    @initialize(
        depth=st.integers(1, 3),
        num_blocks=st.sampled_from([9, 12, 40]),
        seqs=st.integers(1, 6),
        seed=st.integers(0, 2**20),
    )
    def make(self, depth: int, num_blocks: int, seqs: int, seed: int) -> None:
        self.model = SaltedText(len(tokenizer()))
        config = EngineConfig(
            device="cpu",
            pipeline_depth=depth,
            num_kv_blocks=num_blocks,
            max_num_seqs=seqs,
            max_num_batched_tokens=16,
            max_model_len=MAX_LEN,
            block_size=8,
        )
        self.before = set(threading.enumerate())
        device = partial(CpuDevice, delays=seed, max_delay=0.0003)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build_module, "CpuDevice", device)
            self.client = EngineClient(self.model, config, tokenizer())
        self.client._engine._check = True
        self.asked: list[Asked] = []
        self.pool = ThreadPoolExecutor(3)
        self.waits: list[Future[Any]] = []
        self.submit(3, seed)

    @rule(count=st.integers(1, 5), seed=st.integers(0, 2**20))
    def submit(self, count: int, seed: int) -> None:
        assert self.client is not None
        rng = random.Random(seed)
        asked = [random_text_request(rng) for _ in range(count)]
        groups = self.client.submit(
            [
                Submission(
                    self.client.encode({"prompt_token_ids": a.prompt}),
                    a.params,
                    a.outputs.append,
                    a.errors.append,
                    a.mode,  # type: ignore[arg-type]
                    rng.choice([None, "label"]),
                    rng.choice([0, 0, 3]),
                    rng.choice([None, None, "salt"]),
                )
                for a in asked
            ]
        )
        for a, group in zip(asked, groups, strict=True):
            a.group = group
        self.asked += asked

    submit_more = submit

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        assert self.client is not None
        if data.draw(st.booleans()):
            for asked in self.asked:
                assert asked.group is not None
                asked.may_abort |= asked.group.request_id == "label"
            self.client.abort("label")
        elif self.asked:
            asked = data.draw(st.sampled_from(self.asked))
            assert asked.group is not None
            asked.may_abort = True
            self.client.abort_group(asked.group)

    @rule(what=st.sampled_from(["keep", "abort", "finish", "resume", "sleep", "wake", "update", "update", "reset"]))
    def control(self, what: str) -> None:
        client = self.client
        assert client is not None
        if what == "abort":
            for asked in self.asked:
                asked.may_abort = True

        def change() -> None:
            self.model.salt += 1

        def act() -> None:
            if what in PAUSE_MODES:
                client.pause(what)  # type: ignore[arg-type]
            elif what == "sleep":
                client.sleep(1)
            elif what == "update":
                client.update_weights(SimpleNamespace(apply=change), recompute=True)  # type: ignore[arg-type]
            elif what == "reset":
                client.reset_prefix_cache()
            else:
                getattr(client, what)()

        self.waits.append(self.pool.submit(act))
        if what == "abort":
            self.until(lambda: self.waits[-1].done())  # or it would also end what comes after it

    @rule(milliseconds=st.integers(0, 8))
    def pass_time(self, milliseconds: int) -> None:
        time.sleep(milliseconds / 1e3)

    @rule()
    def go_on(self) -> None:
        assert self.client is not None
        self.client.wake()
        self.client.resume()

    def until(self, condition: Callable[[], bool]) -> None:
        """Whatever holds the engine is ended meanwhile."""
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end, "it hangs"
            self.go_on()
            time.sleep(0.001)

    def teardown(self) -> None:
        client = self.client
        if client is None:
            return
        self.until(lambda: client.pending == 0 and all(wait.done() for wait in self.waits))
        self.go_on()
        for wait in self.waits:
            wait.result()
        check_idle(SimpleNamespace(_client=client))
        assert client.stats()[1].requests_finished == sum(a.params.n for a in self.asked)
        client.close()
        self.pool.shutdown()
        wait_until(lambda: set(threading.enumerate()) == self.before, "the threads to end")
        for asked in self.asked:
            check_text(asked, self.model)
            SEEN["texts"] += 1


def random_text_request(rng: random.Random) -> Asked:
    words = rng.choice(["hello world ", "the quick brown fox "])
    words += rng.choice(["", "jumps ", "stop "]) * rng.randint(0, 3)
    params = SamplingParams(
        n=rng.choice([1, 1, 1, 2]),
        temperature=rng.choice([0, 0, 0.5]),  # the most likely token is so likely that both choose it
        max_tokens=rng.choice([1, 2, rng.randint(3, 20)]),
        stop=rng.choice([(), (), ("a",), ("e", "th"), ("qu",)]),
        stop_token_ids=rng.sample(range(3, 300), rng.choice([0, 0, 10])),
    )
    prompt = tokenizer()(words + rng.choice("abcdef"))["input_ids"]
    return Asked(prompt[-40:], params, rng.choice(["final", "stream", "delta"]))


def check_text(asked: Asked, model: SaltedText) -> None:
    """One end; tokens of the weights that the output names; a text that is theirs, cut where it says."""
    assert not asked.errors, asked.errors
    assert [o.finished for o in asked.outputs].count(True) == 1
    assert asked.outputs[-1].finished
    if asked.mode == "delta":
        output = asked.outputs[0]
        for delta in asked.outputs[1:]:
            accumulate(output, delta)
    else:
        output = asked.outputs[-1]
    assert len(output.outputs) == asked.params.n
    stops = asked.params.stop_strings
    for completion in output.outputs:
        ids, reason, why = completion.token_ids, completion.finish_reason, completion.stop_reason
        version = output.first_weight_version
        for i, token in enumerate(ids):
            past = asked.prompt + ids[:i]
            while model.next_token([t + model.vocab_size * version for t in past]) != token:
                version += 1
                assert version <= output.weight_version, f"token {i} of {ids} is of no version up to {version - 1}"
        assert len(ids) <= asked.params.max_tokens  # type: ignore[operator]
        ends = {*asked.params.stop_token_ids, *model.eos_token_ids}
        assert not ends & set(ids[:-1])
        if reason == "abort":
            assert asked.may_abort
            continue
        ended = bool(ids) and ids[-1] in ends and why not in stops
        text = tokenizer().decode(ids[: len(ids) - ended], skip_special_tokens=True)
        if reason == "stop" and why in stops:
            before = tokenizer().decode(ids[:-1], skip_special_tokens=True)
            assert not any(stop in before for stop in stops)
            assert completion.text == text[: text.index(why)]
        else:
            assert ended == (reason == "stop")
            assert reason == "stop" or len(ids) == asked.params.max_tokens
            assert completion.text == text
            assert not any(stop in text for stop in stops)


# ---- both -----------------------------------------------------------------------------------------------------------

SEEN: Counter[str] = Counter()
ALL = ("steps", "preemptions", "overrun", "reused blocks", "updates")
ENDS = ("stop", "length", "abort")


def run_for(machine: type[RuleBasedStateMachine], examples: int, steps: int, seconds: float) -> None:
    start = time.monotonic()
    while True:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                print_blob=True,
            ),
        )
        if time.monotonic() - start >= seconds:
            return


@pytest.mark.timeout(300 + 3 * SECONDS)
@pytest.mark.parametrize("kind", KINDS)
def test_turns(kind: str) -> None:
    SEEN.clear()
    run_for(type("Turns", (Turns,), {"kind": kind}), EXAMPLES, 50, SECONDS / len(KINDS))
    print(dict(SEEN))
    drafts = ("accepted drafts",) if kind == "drafts" else ()
    if SECONDS:
        assert all(SEEN[what] for what in (*ALL, *ENDS, *drafts)), SEEN
    assert SEEN["requests"]
    assert SEEN["steps"]


@pytest.mark.timeout(300 + 3 * SECONDS)
def test_threads() -> None:
    SEEN.clear()
    run_for(Threads, EXAMPLES, 25, SECONDS / 3)
    print(dict(SEEN))
    assert SEEN["texts"]
