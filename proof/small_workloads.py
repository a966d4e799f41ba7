"""Workloads of 2 to 4 requests and 4 to 6 steps that together use every way in which a request comes, goes and waits.

Lengths are for blocks of 8 tokens.
"""

from __future__ import annotations

from typing import Any

from gapless.runner.shapes import graph_shapes
from proof.fast_kernels import FailingHashModel, FastWindowModel
from proof.harness import Job, make_request
from proof.simulated_runs import Workload, oracle, prompt, stop_after

SHARED = prompt(99, 8)
WIDE = {"max_num_batched_tokens": 64}
WINDOW_MODEL = FastWindowModel((None, 3))


def _stopping(request_id: int, tokens: list[int], count: int, at_step: int = 0) -> Job:
    """Ends by a token after ``count`` new ones, so that steps in flight overrun."""
    request = make_request(request_id, tokens, count + 4, stop=(stop_after(tokens, count),))
    return Job(request, at_step)


def arrivals() -> list[Job]:
    return [Job(make_request(i, prompt(i, 3 + i), 2 + i % 2), at_step=i) for i in range(3)]


def ends() -> list[Job]:
    return [_stopping(0, prompt(3, 5), 2), Job(make_request(1, prompt(4, 4), 4))]


def row_reuse() -> list[Job]:
    return [_stopping(0, prompt(5, 9), 1), _stopping(1, prompt(6, 4), 2), Job(make_request(2, prompt(7, 5), 1))]


def preemption() -> list[Job]:
    return [Job(make_request(i, prompt(20 + i, 15), 3)) for i in range(2)]


def block_boundary() -> list[Job]:
    return [Job(make_request(i, prompt(30 + i, 6), 5)) for i in range(2)]


def abort() -> list[Job]:
    jobs = [Job(make_request(0, prompt(8, 6), 8), abort_after=2), Job(make_request(1, prompt(9, 4), 4), at_step=1)]
    return [*jobs, Job(make_request(2, prompt(10, 2), 2), at_step=2)]


def prefixes() -> list[Job]:
    jobs = [Job(make_request(0, SHARED + prompt(11, 2), 2)), Job(make_request(1, SHARED + prompt(12, 5), 2))]
    return [*jobs, Job(make_request(2, SHARED, 1), at_step=2)]


def generated_prefixes() -> list[Job]:
    """The second finds a block that the first has generated in part; the third must not, although it holds what
    unknown tokens look like: placeholders."""
    first = prompt(14, 6)
    new = oracle(Job(make_request(0, first, 4)))
    second = make_request(1, first + new[:3] + prompt(15, 1), 1)
    third = make_request(2, [*first, 0, 0, 5], 1)
    return [Job(make_request(0, first, 4)), Job(second, at_step=3), Job(third, at_step=3)]


def other_parents() -> list[Job]:
    """The third has the first block of one and the second block of the other."""
    a, b, c, d = (prompt(40 + i, 8) for i in range(4))
    jobs = [Job(make_request(i, [*blocks, 7 + i], 1)) for i, blocks in enumerate((a + b, c + d))]
    return [*jobs, Job(make_request(2, [*c, *b, 9], 2), at_step=1)]


def evictions() -> list[Job]:
    """Blocks are published, evicted and looked up again."""
    prompts = [prompt(50, 8), prompt(51, 17), prompt(50, 8)]
    return [Job(make_request(i, [*p, 5 + i], 2), at_step=2 * i) for i, p in enumerate(prompts)]


def failing() -> list[Job]:
    """The first fails, the second has the same first block."""
    return [Job(make_request(0, [*SHARED, FailingHashModel.BAD], 3)), Job(make_request(1, [*SHARED, 4], 2), at_step=4)]


def mixed_lengths() -> list[Job]:
    """A short prompt joins, in a padded step, one whose first block is full."""
    return [Job(make_request(0, prompt(60, 9), 3)), Job(make_request(1, prompt(61, 2), 2), at_step=1)]


def sampled() -> list[Job]:
    hot: dict[str, Any] = {"temperature": 1.0, "top_k": 5, "min_tokens": 2}
    return [Job(make_request(0, prompt(16, 4), 4, stop=(1,), **hot)), Job(make_request(1, prompt(17, 3), 3))]


def window_moves_on() -> list[Job]:
    """The first leaves a block of its window behind, which the second takes at once; there are three in all."""
    jobs = [Job(make_request(0, prompt(80, 12), 6)), Job(make_request(1, prompt(81, 12), 3), at_step=1)]
    return [*jobs, Job(make_request(2, prompt(82, 3), 2), at_step=2)]


def window_prefixes() -> list[Job]:
    """The second goes on where the first was, with the last block of the window's layer and both of the other."""
    first = SHARED + prompt(83, 10)
    return [Job(make_request(0, first, 2)), Job(make_request(1, [*first[:17], 7], 3), at_step=1)]


def with_logprobs() -> list[Job]:
    """Each has something that only the general sampler can do."""
    made = [
        make_request(0, prompt(70, 4), 4, logprobs=2, temperature=0.8),
        make_request(1, prompt(71, 3), 3, presence_penalty=1.5, frequency_penalty=0.5, temperature=0.9),
        make_request(2, prompt(72, 2), 2, logit_bias={7: 30.0}, logprobs=0),
    ]
    return [Job(request, at_step=i) for i, request in enumerate(made)]


WORKLOADS = [
    Workload("arrivals", arrivals),
    Workload("ends by a token", ends),
    Workload("row reuse", row_reuse, options={"max_num_seqs": 1}),
    Workload("preemption", preemption, num_blocks=6, options=WIDE),
    Workload("abort", abort),
    Workload("shared prefixes, chunks", prefixes, options={"max_num_batched_tokens": 12}),
    Workload("generated prefix", generated_prefixes),
    Workload("preemption, no prefixes", preemption, num_blocks=6, options=WIDE | {"enable_prefix_caching": False}),
    Workload("block boundary", block_boundary),
    Workload("other parents", other_parents, options=WIDE),
    Workload("evictions", evictions, num_blocks=4, options=WIDE),
    Workload("a row fails", failing, options=WIDE, model=FailingHashModel()),
    Workload("sampling", sampled),
    Workload("log-probabilities, penalties", with_logprobs),
    Workload(
        "a window moves on",
        window_moves_on,
        num_blocks=(9, 4),
        options=WIDE | {"enable_prefix_caching": False},
        model=WINDOW_MODEL,
    ),
    Workload("prefix behind a window", window_prefixes, options=WIDE, model=WINDOW_MODEL),
    Workload("captured graphs", mixed_lengths, shapes=graph_shapes(2, 16), options={"max_num_batched_tokens": 16}),
]
BY_NAME = {workload.name: workload for workload in WORKLOADS}
