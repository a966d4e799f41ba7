"""Grammars in the loop: every depth gives what a grammar followed token by token gives, and neighbours see nothing."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest
import torch

from gapless.batch.row_layout import RowLayout
from gapless.grammar.matcher import Grammar, fill_masks
from gapless.request.outputs import FinishReason
from gapless.runner.masks import ROWS_AT, apply_masks, mask_inputs
from grammars import CHARACTERS, EOS, VOCAB, allowed, constrain, expected, matcher, regex, schema, text
from proof.choosers import RandomChooser
from proof.explore import explore_states
from proof.fast_kernels import FastHashModel
from proof.harness import Job, make_request, run_jobs
from proof.hash_model import HashModel, sequence_hash
from proof.mutations import ENGINE, RUNNER, SCHEDULER, Edit, Fault, applied
from proof.races import RaceDetector
from proof.simulated import SimulatedDevice
from proof.simulated_runs import Workload, run_on, runs


class Model(HashModel):
    """Random logits, the same for the same tokens."""

    def __init__(self) -> None:
        super().__init__(VOCAB, peaked=False)

    def logits_of(self, tokens: list[int]) -> torch.Tensor:
        return self.logits(sequence_hash(tokens))


MODEL = Model()
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5, "pattern": "^[a-z]*$"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
GRAMMARS = [regex("[0-9]{3}-[a-f]+"), regex("(ab|cd)*"), schema(PERSON), schema({"enum": ["red", 12, None]})]


def jobs(seed: int, *, plain: bool = True, params: dict[str, Any] | None = None) -> tuple[list[Job], dict[int, str]]:
    rng = random.Random(seed)
    made, grammars = [], {}
    for i in range(7):
        prompt = [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 40))]
        own = dict(params or {})
        request = make_request(i, prompt, rng.choice([1, 5, 30]), stop=(EOS,), **own)
        constrained, grammar, at_step = rng.random() < 0.5, rng.choice(GRAMMARS), rng.choice([0, 0, 4, 9])
        if constrained:
            grammars[i] = grammar
            constrain(request, grammar)
        if constrained or plain:
            made.append(Job(request, at_step))
    return made, grammars


@pytest.mark.parametrize("seed", range(3))
def test_every_depth_gives_what_the_grammar_followed_alone_gives(seed: int) -> None:
    print(f"seed {seed}")
    made, grammars = jobs(seed)
    want = {j.request.id: expected(MODEL, j.request, grammars[j.request.id]) for j in made if j.request.id in grammars}
    assert want
    for depth in (1, 2, 3, 4):
        outcome = run_jobs(jobs(seed)[0], MODEL, depth=depth, delays=seed if depth == 3 else None, num_blocks=30)
        tokens = outcome.tokens()
        for i, line in want.items():
            assert tokens[i] == line
            assert outcome.finished[i].reason is (FinishReason.STOP if line[-1] == EOS else FinishReason.LENGTH)
        assert outcome.streamed == {i: t for i, t in tokens.items() if t}


def test_rows_without_a_grammar_are_not_touched_by_those_with_one() -> None:
    made, grammars = jobs(1)
    alone = run_jobs([j for j in made if j.request.id not in grammars], MODEL, depth=2).tokens()
    mixed = run_jobs(jobs(1)[0], MODEL, depth=3).tokens()
    assert alone
    assert alone == {i: t for i, t in mixed.items() if i not in grammars}


@pytest.mark.parametrize("depth", [2, 3])
def test_a_batch_without_grammars_is_never_held(depth: int) -> None:
    made, grammars = jobs(2)
    outcome = run_jobs([j for j in made if j.request.id not in grammars], MODEL, depth=depth)
    assert all(plan.constrained is None for plan in outcome.plans)


@pytest.mark.parametrize("depth", [1, 3])
def test_preempted_rows_follow_their_grammars(depth: int) -> None:
    grammar = regex("([a-d]{3}-)+")

    def many() -> list[Job]:
        return [Job(constrain(make_request(i, [2 + i] * 20, 40, stop=(EOS,)), grammar)) for i in range(8)]

    outcome = run_jobs(many(), MODEL, depth=depth, num_blocks=13, max_num_seqs=8)
    assert sum(f.num_preemptions for f in outcome.finished.values()) > 0
    for job in many():
        assert outcome.tokens()[job.request.id] == expected(MODEL, job.request, grammar)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_sampled_outputs_parse_and_do_not_depend_on_the_depth(depth: int) -> None:
    options = {"temperature": 1.0, "top_k": 20, "min_p": 0.01, "logprobs": 2, "repetition_penalty": 1.1}
    made, grammars = jobs(5, params=options)
    outcome = run_jobs(made, MODEL, depth=depth)
    truth = run_jobs(jobs(5, params=options)[0], MODEL, depth=1)
    assert outcome.tokens() == truth.tokens()
    for i, end in outcome.finished.items():
        if i in grammars and end.reason is FinishReason.STOP:
            written = text(end.token_ids.tolist())
            if grammars[i] == GRAMMARS[2]:
                assert set(json.loads(written)) == {"name", "age"}
            elif grammars[i] == GRAMMARS[0]:
                assert re.fullmatch("[0-9]{3}-[a-f]+", written)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_aborted_at_any_time_it_is_a_prefix(depth: int) -> None:
    truth = run_jobs(jobs(3)[0], MODEL, depth=1).tokens()
    for after in range(0, 12, 3):
        made = [Job(j.request, j.at_step, after if j.request.id % 2 else None) for j in jobs(3)[0]]
        for i, tokens in run_jobs(made, MODEL, depth=depth).tokens().items():
            assert tokens == truth[i][: len(tokens)]
            assert i % 2 or tokens == truth[i]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_row_whose_mask_is_empty_ends_alone_with_an_error(depth: int) -> None:
    digits = [id for id in range(VOCAB) if text([id]).isdigit()]

    def made() -> list[Job]:
        stuck = constrain(make_request(0, [5, 6], 20, stop=(EOS,)), regex("[0-9]{3}-[a-f]+"), digits)
        other = constrain(make_request(1, [7], 20, stop=(EOS,)), GRAMMARS[0])
        return [Job(stuck), Job(other), Job(make_request(2, [8], 9))]

    outcome = run_jobs(made(), MODEL, depth=depth)
    assert outcome.finished[0].reason is FinishReason.ERROR
    assert "allowed_token_ids" in str(outcome.finished[0].error)
    assert re.fullmatch("[0-9]{3}", text(outcome.tokens()[0]))
    assert outcome.tokens()[1] == expected(MODEL, made()[1].request, GRAMMARS[0])
    assert outcome.tokens()[2] == run_jobs([made()[2]], MODEL, depth=1).tokens()[2]


@pytest.mark.parametrize("depth", [1, 3])
def test_without_an_end_token_the_end_of_the_grammar_ends_the_request(depth: int) -> None:
    keep = [id for id in range(VOCAB) if id != EOS]  # as with ignore_eos
    made = [Job(constrain(make_request(0, [5, 6], 20), regex("[0-9]{3}"), keep)), Job(make_request(1, [7], 9))]
    outcome = run_jobs(made, MODEL, depth=depth)
    assert outcome.finished[0].reason is FinishReason.STOP
    assert re.fullmatch("[0-9]{3}", text(outcome.tokens()[0]))


def test_an_end_before_min_tokens_is_an_error_of_that_request() -> None:
    made = [Job(constrain(make_request(0, [5, 6], 20, stop=(EOS,), min_tokens=6), regex("[0-9]{3}")))]
    end = run_jobs(made, MODEL, depth=2).finished[0]
    assert end.reason is FinishReason.ERROR
    assert "min_tokens" in str(end.error)
    assert len(end.token_ids) == 3


def small() -> list[Job]:
    return [
        Job(make_request(1, [9, 8], 6)),
        Job(constrain(make_request(0, [5, 6, 7], 5, stop=(EOS,)), regex("[0-9]{2}-[a-f]"))),
    ]


WORKLOAD = Workload("grammar", small, model=FastHashModel())


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_nothing_undeclared_is_touched(depth: int) -> None:
    truth = run_jobs(small(), MODEL, depth=1).tokens()
    assert run_jobs(small(), MODEL, depth=depth, debug=True).tokens() == truth


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_order_of_the_streams_changes_a_token(depth: int) -> None:
    detector = RaceDetector()
    truth = run_on(SimulatedDevice(), WORKLOAD, 1).tokens()
    assert len(truth[0]) == 5
    assert run_on(SimulatedDevice(observer=detector), WORKLOAD, depth).tokens() == truth
    assert not detector.races
    for seed in range(10):
        assert run_on(SimulatedDevice(RandomChooser(seed)), WORKLOAD, depth).tokens() == truth


def test_every_order_of_the_streams_gives_one_outcome() -> None:
    found = explore_states(runs(WORKLOAD, 2))
    assert found.complete
    assert not found.races
    assert len(found.outcomes) == 1


MASKS = "gapless.scheduler.masks:GrammarMasks"
FAULTS = {
    "compute does not wait for the masks": Edit(RUNNER, "sample", "masks.done.wait(device.compute)", "pass"),
    "the masks' event is recorded before their copy": Edit(
        RUNNER,
        "sample",
        '    device.copy_h2d(masks.device[:used], masks.host[:used], "masks")\n    masks.done.record(device.h2d)\n',
        '    masks.done.record(device.h2d)\n    device.copy_h2d(masks.device[:used], masks.host[:used], "masks")\n',
    ),
    "masks are computed before older steps are committed": Edit(ENGINE, "_loop", " and len(in_flight) == 1", ""),
    "a step is planned behind one without masks": Edit(SCHEDULER, "schedule", "if self._masks.awaited:", "if False:"),
    "a mask goes to the row of another request": Edit(MASKS, "fill", "return rows", "return rows * 0"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught(name: str) -> None:
    truth = run_on(SimulatedDevice(), WORKLOAD, 1).tokens()
    detector = RaceDetector()
    with applied(Fault(name, "", (FAULTS[name],))):
        try:
            tokens = run_on(SimulatedDevice(observer=detector), WORKLOAD, 3).tokens()
        except (AssertionError, RuntimeError, IndexError, ValueError):
            return
    assert detector.races or tokens != truth


def test_masks_reach_their_rows_and_no_other() -> None:
    layout = RowLayout(5, 16, 8, 1000)
    rng = np.random.default_rng(0)
    words = torch.from_numpy(rng.integers(0, 2**31, 4 + 8 + 5 * layout.mask_words).astype(np.int32))
    words[0] = 3
    words[ROWS_AT : ROWS_AT + 5] = torch.tensor([4, 0, 2, 1, 1], dtype=torch.int32)
    arena = torch.zeros(layout.num_words, dtype=torch.int32)
    inputs = mask_inputs(words, layout)
    apply_masks(inputs, arena, layout)
    allowed = arena[layout.allowed_at :].view(layout.num_rows, -1)
    assert torch.equal(allowed[[4, 0, 2]], inputs.masks[:3])
    assert not allowed[[1, 3, 5]].any()
    assert not arena[: layout.allowed_at].any()


@pytest.mark.parametrize("failing", [(), (0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)])
def test_masks_stand_in_the_rows_of_their_grammars(failing: tuple[int, ...]) -> None:
    """Whichever of several has failed: the others' masks are those of each grammar alone."""
    words = [regex("ab"), regex("[0-9]x"), regex("(cd|e)*")]
    said = [[CHARACTERS.index(c) + 2] for c in ("a", "7", "c")]
    grammars = [Grammar(matcher(word)) for word in words]
    outputs = [np.array(BAD_START if i in failing else said[i], np.int32) for i in range(3)]
    masks = np.zeros((3, 2), np.int32)
    ends = fill_masks(grammars, outputs, masks)
    for i, mask in enumerate(masks):
        if i in failing:
            assert ends[i] is not None
            assert ends[i].reason is FinishReason.ERROR
            assert (mask == -1).all()
        else:
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB]
            assert ends[i] is None
            assert np.flatnonzero(bits).tolist() == allowed(words[i], said[i])


BAD_START = [CHARACTERS.index("z") + 2]  # which none of these grammars allows
