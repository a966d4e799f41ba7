"""Features in pairs: each two of them meet in a request whose tokens are those of the plain run.

Requests of random features share engines that are short of blocks, are paused and get their weights anew meanwhile.
What a request really met is noted by watching its steps: a pause while it ran, a hit in the prefix cache, a draft that
was accepted. The plain run is the same request alone, at depth 1, without drafts and prefix cache, each of ``n`` by
itself, and without its stop string. `pytest tests/test_pairs.py -s` prints the table of what met how often.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engines import tokenizer
from gapless import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from gapless.batch.plan import StepPlan
from gapless.engine.client import Submission
from gapless.engine.engine import StepResult
from gapless.request.outputs import CompletionOutput
from models import tiny

peft_adapters = pytest.importorskip("peft_adapters", reason="peft is not installed")
from peft_adapters import A, B, save  # noqa: E402

FEATURES = (
    "drafts", "lora", "grammar", "penalties", "logprobs", "prompt_logprobs", "n", "stop string", "prefix hit",
    "preemption", "pause", "weight update", "window", "priority",
)  # fmt: skip
PAIRS = [frozenset(pair) for pair in itertools.combinations(FEATURES, 2)]
IMPOSSIBLE = {
    frozenset({"drafts", "grammar"}): "what a grammar allows is known one token at a time, so such a row never drafts",
    frozenset({"prefix hit", "prompt_logprobs"}): "a prompt is scored by computing it, all of it",
}
"""Pairs that no request can have, and why. The test also fails if one of them occurs."""
WINDOW = 9
TOLERANCE = 1e-3
GOLDEN = 0x9E3779B97F4A7C15  # between the seeds of one request's completions
SECONDS = 200.0
OPTIONS: dict[str, Any] = {
    "device": "cpu", "max_num_batched_tokens": 32, "max_model_len": 96, "block_size": 8, "check_model": False,
    "enable_lora": True, "max_loras": 2,
}  # fmt: skip
SHARED = [[(7 * i + 3 * j) % 300 + 3 for i in range(24)] for j in range(3)]


@dataclass
class Asked:
    """A request. ``features`` are those that it asks for."""

    prompt: list[int]
    params: dict[str, Any]
    lora: str | None
    priority: int
    features: set[str]
    plain: list[CompletionOutput] = field(default_factory=list)
    plain_prompt: Any = None


class Watch:
    """Notes what each of an engine's requests meets, by the engine's own plans and results."""

    def __init__(self, llm: LLM) -> None:
        self.met: dict[int, set[str]] = defaultdict(set)
        engine, self.rows = llm._client._engine, llm._client._scheduler.rows
        launch, commit, new_weights = engine._launch, engine._commit, llm._client._scheduler.new_weights
        started: set[int] = set()

        def watched_launch(plan: StepPlan) -> Any:
            for row, start in zip(plan.rows.tolist(), plan.starts.tolist(), strict=True):
                number = int(self.rows.ids[row])
                if start and number not in started:
                    self.met[number].add("prefix hit")
                started.add(number)
                if self.rows.preemptions[row]:
                    self.met[number].add("preemption")
                if self.rows.total[row] > WINDOW + 8:
                    self.met[number].add("window")
            return launch(plan)

        def watched_commit(result: StepResult) -> None:
            plan = result.plan
            if plan.query_width > 1:
                for row, drawn in zip(plan.rows.tolist(), result.tokens.tolist(), strict=True):
                    if drawn[plan.query_width] > 1:
                        self.met[int(self.rows.ids[row])].add("drafts")
            commit(result)

        def watched_weights(**options: Any) -> int:
            self.note("weight update")
            return int(new_weights(**options))

        engine._launch, engine._commit = watched_launch, watched_commit  # type: ignore[method-assign]
        llm._client._scheduler.new_weights = watched_weights  # type: ignore[method-assign]

    def note(self, what: str) -> None:
        """Of each request that has drawn a token and has not ended; while no step is in flight."""
        for row, request in enumerate(self.rows.requests):
            if request is not None and not self.rows.finished[row] and self.rows.known[row] > self.rows.prompt_len[row]:
                self.met[request.id].add(what)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, list[LLM]]]:
    """The plain one, and busy ones of three depths."""
    model = tiny("qwen2_window", vocab_size=len(tokenizer()), num_hidden_layers=2, sliding_window=WINDOW)
    folders = {name: save(model, kind, tmp_path_factory.mktemp(name)) for name, kind in (("a", A), ("b", B))}
    common = {"model": model, "tokenizer": tokenizer(), **OPTIONS}
    plain = LLM(**common, pipeline_depth=1, max_num_seqs=2, num_kv_blocks=65, enable_prefix_caching=False)
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "min_ngram": 1, "min_accepted": 0.0}
    short = {"max_num_seqs": 5, "num_kv_blocks": 21}
    busy = [LLM(**common, **short, pipeline_depth=depth, speculative=drafts) for depth in (1, 2, 3)]
    for llm in (plain, *busy):
        for name, folder in folders.items():
            llm.load_lora(name, Path(folder))
    yield plain, busy
    for llm in (plain, *busy):
        llm.close()


def ask(rng: random.Random, wanted: frozenset[str]) -> Asked:
    """A random request that asks for the wanted features, as far as one can ask for them, and for a few others."""

    def has(name: str, share: float = 0.2) -> bool:
        return name in wanted or rng.random() < share

    features = {
        name
        for name in ("lora", "grammar", "penalties", "logprobs", "prompt_logprobs", "n", "stop string", "priority")
        if has(name)
    }
    if "drafts" in wanted:
        features.discard("grammar")
    few = has("drafts", 0.4) and "grammar" not in features
    params: dict[str, Any] = {
        "temperature": rng.choice([0, 0, 0.8]), "seed": rng.randrange(2**32), "max_tokens": rng.randint(14, 40),
        "ignore_eos": "grammar" not in features,
    }  # fmt: skip
    if "grammar" in features:
        params["structured_outputs"] = StructuredOutputsParams(regex=rng.choice(["[a-f]{12,30}", "([a-z]{2,4},){4,9}"]))
    elif few:  # text that repeats itself, for drafts
        params["allowed_token_ids"] = rng.sample(range(3, 300), 3)
    if "penalties" in features:
        params |= rng.choice([{"repetition_penalty": 1.2}, {"presence_penalty": 0.6, "frequency_penalty": 0.3}])
    if "logprobs" in features:
        params["logprobs"] = rng.choice([0, 2])
    if "prompt_logprobs" in features:
        params["prompt_logprobs"] = rng.choice([0, 2])
    if "n" in features:
        params["n"] = 2
    own = [rng.randrange(3, 300) for _ in range(rng.randint(1, 8))]
    prompt = rng.choice(SHARED)[: rng.choice([8, 17, 24])] + own
    lora = rng.choice(["a", "b"]) if "lora" in features else None
    return Asked(prompt, params, lora, rng.choice([-1, 3]) if "priority" in features else 0, features)


def run_plain(llm: LLM, asked: Asked, rng: random.Random) -> None:
    """Fill in what it must give; its stop string is taken from its own text."""
    for i in range(asked.params.get("n", 1)):
        seed = (asked.params["seed"] + i * GOLDEN) % 2**64
        params = SamplingParams(**{**asked.params, "n": 1, "seed": seed})
        (output,) = llm.generate({"prompt_token_ids": asked.prompt}, params, use_tqdm=False, lora=asked.lora)
        asked.plain.append(output.outputs[0])
        asked.plain_prompt = asked.plain_prompt or output.prompt_logprobs
    if "stop string" in asked.features:
        text = asked.plain[0].text
        at = rng.randint(len(text) // 2, max(len(text) - 2, len(text) // 2))
        asked.params["stop"] = text[at : at + rng.randint(1, 3)] or "never"


def compare(asked: Asked, output: RequestOutput, what: str) -> set[str]:
    """Whether it is what the plain run gave. The stop string, if one ended it."""
    met: set[str] = set()
    stop = asked.params.get("stop")
    assert len(output.outputs) == len(asked.plain)
    for got, plain in zip(output.outputs, asked.plain, strict=True):
        count = len(got.token_ids)
        assert got.token_ids == plain.token_ids[:count], what
        if stop is not None and stop in plain.text:
            assert got.text == plain.text[: plain.text.index(stop)], what
            assert (got.finish_reason, got.stop_reason) == ("stop", stop), what
            met.add("stop string")
        else:
            assert (got.text, got.finish_reason) == (plain.text, plain.finish_reason), what
            assert count == len(plain.token_ids), what
        if plain.logprobs is not None:
            assert got.logprobs is not None
            assert len(got.logprobs) == count, what
            check_logprobs(got.logprobs, plain.logprobs[:count], what)
    if asked.plain_prompt is not None:
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(asked.plain_prompt), what
        check_logprobs(output.prompt_logprobs[1:], asked.plain_prompt[1:], what)
    return met


def check_logprobs(got: Any, plain: Any, what: str) -> None:
    for mine, other in zip(got, plain, strict=True):
        assert len(mine) == len(other), what
        for token in mine.keys() & other.keys():  # two that are nearly equal may change places at the end
            assert mine[token].logprob == pytest.approx(other[token].logprob, abs=TOLERANCE), what
        assert next(iter(mine)) == next(iter(other)), what


def run_busy(llm: LLM, watch: Watch, wave: list[Asked], rng: random.Random, what: str) -> Counter[frozenset[str]]:
    """All of them in two halves, with a pause and new weights between two of their steps."""
    client = llm._client
    futures: list[Future[RequestOutput]] = [Future() for _ in wave]
    groups: list[Any] = []

    def submit(first: int, end: int) -> None:
        groups.extend(
            client.submit(
                [
                    Submission(
                        client.encode({"prompt_token_ids": asked.prompt}), SamplingParams(**asked.params),
                        future.set_result, future.set_exception, priority=asked.priority, lora=asked.lora,
                    )
                    for asked, future in zip(wave[first:end], futures[first:end], strict=True)
                ]
            )
        )  # fmt: skip

    half = len(wave) // 2
    submit(0, half)
    for at in (half, len(wave)):
        time.sleep(rng.uniform(0.01, 0.08))
        llm.pause("keep")
        watch.note("pause")
        if rng.random() < 0.5:
            llm.update_weights(recompute=True)
        llm.resume()
        submit(at, len(wave) if at == half else at)
    llm.update_weights(recompute=True)
    met: Counter[frozenset[str]] = Counter()
    for asked, future, group in zip(wave, futures, groups, strict=True):
        found = compare(asked, future.result(60), f"{what}: {asked}")
        for number in group.ids:
            features = asked.features - {"stop string"} | found | watch.met[number]
            if number != group.ids[0]:
                features.discard("prompt_logprobs")
            met.update(frozenset(pair) for pair in itertools.combinations(sorted(features), 2))
    return met


def table(met: Counter[frozenset[str]]) -> str:
    """How often each two met; ``-`` for a pair that cannot be."""
    lines = [f"{'':<16}" + "".join(f"{name[:9]:>10}" for name in FEATURES[1:])]
    for i, name in enumerate(FEATURES[:-1]):
        pairs = [frozenset({name, other}) for other in FEATURES[i + 1 :]]
        cells = ["-" if pair in IMPOSSIBLE else str(met[pair]) for pair in pairs]
        lines.append(f"{name:<16}" + " " * 10 * i + "".join(f"{cell:>10}" for cell in cells))
    return "\n".join(lines)


def test_every_two_features_meet_and_tokens_are_those_of_the_plain_run(engines: tuple[LLM, list[LLM]]) -> None:
    plain, busy = engines
    watches = [Watch(llm) for llm in busy]
    met: Counter[frozenset[str]] = Counter()
    end = time.monotonic() + SECONDS
    for seed in itertools.count():
        missing = [pair for pair in PAIRS if not met[pair] and pair not in IMPOSSIBLE]
        if not missing or time.monotonic() > end:
            break
        rng = random.Random(seed)
        wave = [ask(rng, missing[(seed + i) % len(missing)]) for i in range(8)]
        for asked in wave:
            run_plain(plain, asked, rng)
        i = seed % len(busy)
        met += run_busy(busy[i], watches[i], wave, rng, f"seed {seed}, depth {i + 1}")
    print(f"\n{table(met)}\nseeds 0 to {seed - 1}")
    assert not [sorted(pair) for pair in missing], "these never met"
    assert not [sorted(pair) for pair in IMPOSSIBLE if met[pair]], "these are not impossible"
