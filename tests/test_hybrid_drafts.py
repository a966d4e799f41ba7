"""Drafts on models with convolutions, recurrences and sparse attention: whatever is taken back changes no token."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from drafts import oracle
from gapless import LLM, SamplingParams
from gapless.errors import ConfigError
from gapless.model.adapter import TransformersModel
from gapless.speculative_config import SpeculativeConfig
from models import HYBRID_KINDS, VOCAB_SIZE
from proof.harness import Job, Outcome, run_jobs
from test_hybrid_engine import assert_greedy, own, some_jobs

MOST = 3
each_kind = pytest.mark.parametrize("kind", HYBRID_KINDS)


@cache
def wrapped(kind: str, num_drafts: int = MOST) -> TransformersModel:
    return TransformersModel(own(kind), max_model_len=128, num_drafts=num_drafts)


def options(kind: str) -> dict[str, Any]:
    return {"enable_prefix_caching": all(spec.paged for spec in wrapped(kind).kv_specs)}


@cache
def truth(kind: str, seed: int, steps: int) -> Outcome:
    """Without drafts, at depth 1."""
    return run_jobs(some_jobs(5, seed=seed, steps=steps), wrapped(kind), depth=1, **options(kind))


def drafted(kind: str, jobs: list[Job], plain: Outcome, seed: int, k: int = MOST, **more: Any) -> Outcome:
    """With an oracle's drafts, spoilt at random places."""
    whole = [[*job.request.prompt_token_ids.tolist(), *plain.tokens()[job.request.id]] for job in jobs]
    return run_jobs(
        jobs,
        wrapped(kind, k),
        speculative=SpeculativeConfig(num_speculative_tokens=k, min_accepted=0),
        speculation=oracle(whole, k, seed, VOCAB_SIZE),
        **options(kind),
        **more,
    )


@each_kind
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_drafts_change_no_token(kind: str, depth: int) -> None:
    """Prompts in chunks beside rows with drafts, every number of them accepted."""
    plain = truth(kind, 0, 18)
    for job in some_jobs(5, steps=18):
        assert_greedy(kind, job.request.prompt_token_ids.tolist(), plain.tokens()[job.request.id])
    outcome = drafted(kind, some_jobs(5, steps=18), plain, 7, depth=depth, max_num_batched_tokens=21, delays=depth)
    assert outcome.tokens() == plain.tokens()
    stats = outcome.stats.drafts
    assert stats is not None
    assert all(0 < a < p for a, p in zip(stats.accepted, stats.proposed, strict=True)), stats


@each_kind
def test_preempted_with_drafts_in_flight(kind: str) -> None:
    plain = truth(kind, 1, 20)
    jobs = some_jobs(5, seed=1, steps=20)
    outcome = drafted(kind, jobs, plain, 3, depth=3, num_blocks=13)
    assert outcome.tokens() == plain.tokens()
    assert sum(finished.num_preemptions for finished in outcome.finished.values()) > 0


@pytest.mark.parametrize("kind", ["lfm2", "qwen4_exp"])
def test_one_draft(kind: str) -> None:
    plain = truth(kind, 0, 18)
    assert drafted(kind, some_jobs(5, steps=18), plain, 2, k=1, depth=2).tokens() == plain.tokens()


@pytest.mark.parametrize("kind", ["lfm2", "qwen4_exp"])
def test_nothing_undeclared_is_touched_with_drafts(kind: str) -> None:
    plain = truth(kind, 0, 4)
    jobs = some_jobs(2, steps=4)
    assert drafted(kind, jobs, plain, 2, depth=2, debug=True).tokens().items() <= plain.tokens().items()


@pytest.mark.parametrize("kind", ["lfm2", "qwen4_exp"])
def test_llm_with_drafts(kind: str) -> None:
    """Through the public interface, drafts looked up in the text."""
    prompts = [{"prompt_token_ids": [5, 6, 7, 1] * n} for n in (3, 6)]
    params = SamplingParams(temperature=0, max_tokens=16)
    common: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "max_num_seqs": 4, "num_kv_blocks": 40}
    with LLM(own(kind), **common) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    with LLM(own(kind), speculative="ngram,num_speculative_tokens=3,min_accepted=0", **common) as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == expected


def test_what_cannot_go_back_is_refused() -> None:
    common: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "max_num_seqs": 4, "num_kv_blocks": 40}
    with pytest.raises(ConfigError, match=r"num_speculative_tokens=6: .* states for 3 tokens"):
        LLM(wrapped("qwen4_exp"), tokenizer=None, speculative={"num_speculative_tokens": 6}, **common)
    with pytest.raises(ConfigError, match=r"speculative\.model=.* keeps convolution"):
        LLM(own("lfm2"), speculative={"method": "draft_model", "model": own("lfm2")}, **common)
