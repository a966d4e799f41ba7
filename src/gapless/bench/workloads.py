"""Workloads: prompts, how many new tokens each gets, and when they arrive.

The named ones have prompts of random ids and no end-of-sequence, so that their work is fixed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from gapless.errors import ConfigError, did_you_mean
from gapless.request.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts and how many new tokens each gets.

    Attributes:
        prompt_lens, output_lens: one entry per request.
        temperature: 0 is greedy.
        vocab: ids are drawn below it.
        seed: of the prompts and of the arrivals.
        rate: requests a second; they arrive at random, as independent callers do. None: all at once.
        fixed_prompts: ids to use instead of random ones.
    """

    name: str
    prompt_lens: tuple[int, ...]
    output_lens: tuple[int, ...]
    temperature: float = 0.0
    vocab: int = 10_000
    seed: int = 0
    fixed_prompts: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    rate: float | None = None

    @property
    def batch(self) -> int:
        """Requests."""
        return len(self.prompt_lens)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(p + o for p, o in zip(self.prompt_lens, self.output_lens, strict=True))

    @property
    def uniform(self) -> bool:
        """All requests have the same lengths."""
        return len(set(self.prompt_lens)) == len(set(self.output_lens)) == 1

    def prompts(self, salt: int = 0) -> list[list[int]]:
        """Token ids; another ``salt`` gives other prompts, so that no run finds them in the prefix cache."""
        if self.fixed_prompts and not salt:
            return [list(p) for p in self.fixed_prompts]
        rng = random.Random(f"{self.seed}/{salt}")
        return [[rng.randrange(self.vocab) for _ in range(n)] for n in self.prompt_lens]

    def arrivals(self) -> list[float]:
        """Seconds after the start at which each request is handed in."""
        if self.rate is None:
            return [0.0] * self.batch
        rng, now, times = random.Random(self.seed), 0.0, []
        for _ in range(self.batch):
            times.append(now)
            now += rng.expovariate(self.rate)
        return times

    def params(self, new_tokens: int | None = None) -> list[SamplingParams]:
        """One for each request; ``new_tokens`` overrides their lengths."""
        return [
            SamplingParams(temperature=self.temperature, max_tokens=new_tokens or n, ignore_eos=True)
            for n in self.output_lens
        ]

    def limited(self, new_tokens: int) -> Workload:
        """The same with at most that many new tokens each; one that got shorter says so in its name."""
        lens = tuple(min(n, new_tokens) for n in self.output_lens)
        return self if lens == self.output_lens else replace(self, name=f"{self.name}/{new_tokens}", output_lens=lens)


def uniform(name: str, batch: int, prompt_len: int, output_len: int) -> Workload:
    """``batch`` equal requests."""
    return Workload(name, (prompt_len,) * batch, (output_len,) * batch)


def nano() -> Workload:
    """The benchmark that nano-vllm publishes: 256 ragged prompts, 133,966 output tokens, temperature 0.6."""
    rng = random.Random(0)
    prompts = tuple(tuple(rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))) for _ in range(256))
    outputs = tuple(rng.randint(100, 1024) for _ in range(256))
    return Workload("nano", tuple(map(len, prompts)), outputs, temperature=0.6, fixed_prompts=prompts)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "long": lambda: uniform("long", 32, 3584, 512),
    "seed": lambda: uniform("seed", 32, 256, 8192),
    "mid": lambda: uniform("mid", 32, 256, 512),
    "one": lambda: uniform("one", 1, 128, 256),
    "wide": lambda: uniform("wide", 256, 512, 256),
    "nano": nano,
    "small1": lambda: uniform("small1", 1, 128, 512),
    "small32": lambda: uniform("small32", 32, 128, 512),
    "small256": lambda: uniform("small256", 256, 512, 256),
    "alone": lambda: uniform("alone", 1, 128, 256),
    "team": lambda: uniform("team", 32, 256, 256),
    "crowd": lambda: uniform("crowd", 256, 512, 128),
    "cpu": lambda: uniform("cpu", 8, 64, 32),
}


def workload(name: str) -> Workload:
    """By name.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in WORKLOADS:
        raise ConfigError(f"unknown workload {name!r}.{did_you_mean(name, WORKLOADS)} Known: {', '.join(WORKLOADS)}")
    return WORKLOADS[name]()
