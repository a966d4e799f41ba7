"""An engine that is driven turn by turn, and a model of what every request must see. For `test_state_machine.py`.

The loop is the engine's own, made a generator; runner, slots and kernels are real, on the simulated device. The model
knows what was asked and what the plans say was computed when; it works out each token from that alone.
"""

from __future__ import annotations
import __future__

import inspect
import random
import textwrap
from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from drafts import REFERENCE, OracleProposer
from gapless.batch.plan import StepPlan
from gapless.batch.row_layout import NULL_BLOCK, RowLayout
from gapless.batch.row_params import Feature, Word
from gapless.batch.row_updates import request_updates
from gapless.cache.groups import group_windows
from gapless.config import EngineConfig
from gapless.engine.engine import Engine, StepResult
from gapless.request.messages import Finished, StepMessage
from gapless.request.outputs import FinishReason
from gapless.request.request import Request
from gapless.runner.runner import Runner
from gapless.runner.shapes import EXACT
from gapless.sampling.reference import sample
from gapless.scheduler.scheduler import Scheduler
from gapless.speculative.base import Speculation
from gapless.speculative_config import SpeculativeConfig
from grammars import allowed
from proof.choosers import RandomChooser
from proof.fast_kernels import KERNELS, FastHashModel, FastWindowModel
from proof.hash_model import HashModel
from proof.simulated import SimulatedDevice

VOCAB = 61
BAD = 60
"""A sequence that holds this token has no finite logits. The model never chooses it."""
MAX_TURNS = 3000


class TwoPeaks(FastHashModel):
    """Its weights are one number, which each token leaves in the cache. The second most likely token is close behind
    the first, so that a penalty changes the choice."""

    salt = 0

    def forward(self, input_ids: torch.Tensor, *rest: Any) -> None:
        super().forward(input_ids + VOCAB * self.salt, *rest)

    def finish(self, s: int, keys: np.ndarray, values: np.ndarray, logits: np.ndarray) -> None:
        super().finish(s, keys, values, logits)
        logits[s] = peaks(int(logits[s].argmax()), bool((keys[:, 0] % VOCAB == BAD).any()))


class TwoPeaksWindows(FastWindowModel):
    """The same with groups of layers, two of them with windows. It does not know `BAD`."""

    salt = 0

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: Any, index: Any, out: Any) -> None:
        super().forward(input_ids + VOCAB * self.salt, positions, context, index, out)
        for row in out.numpy():
            row[:] = peaks(int(row.argmax()), False)


class TwoPeaksDrafts(HashModel):
    """The same, with logits for any token. It does not know `BAD` either."""

    salt = 0

    def forward(self, input_ids: torch.Tensor, *rest: Any) -> None:
        super().forward(input_ids + VOCAB * self.salt, *rest)

    def logits(self, h: int) -> torch.Tensor:
        return torch.from_numpy(peaks(h % VOCAB, False))


class GuessingProposer(OracleProposer):
    """Drafts that are right as far as a random place, for requests without parameters."""

    def __init__(self, model: TwoPeaksDrafts, num_drafts: int, seed: int) -> None:
        super().__init__([], num_drafts, seed, VOCAB)
        self._model = model

    def _drafts(self, tokens: list[int]) -> list[int]:
        whole = list(tokens)
        for _ in range(random.Random(f"{self._seed} {tokens}").randint(0, self._num_drafts)):
            whole.append(self._model.next_token([t + VOCAB * self._model.salt for t in whole]))
        self._truths = [whole]
        return super()._drafts(tokens)


def peaks(first: int, bad: bool) -> np.ndarray:
    """Logits of one sequence whose hash is ``first``."""
    if bad:
        return np.full(VOCAB, np.nan, np.float32)
    logits = np.zeros(VOCAB, np.float32)
    first %= BAD
    logits[(31 * first + 7) % BAD] = 19
    logits[first] = 20
    return logits


@dataclass
class Tracked:
    """What the model knows of a request.

    Attributes:
        versions: of the weights that computed each position's key and value.
        first: the oldest of all versions that a token of the output rests on.
        grammar: what its output must match, if anything.
        stop_at: the consumer ends the request when it sees this token, as a stop string does.
        epoch: of the prefix cache when its past began to be computed, for the last time.
        arrived: the loop has it.
        may_abort: somebody has asked for its end.
        must_end: the loop has been told so.
        due: how else it must end in this very turn.
    """

    request: Request
    stop_at: int | None = None
    grammar: str | None = None
    drawn: list[int] = field(default_factory=list)
    streamed: list[int] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    preemptions: int = 0
    first: int | None = None
    last: int | None = None
    epoch: int = 0
    arrived: bool = False
    may_abort: bool = False
    must_end: bool = False
    due: FinishReason | None = None
    end: Finished | None = None

    @property
    def tokens(self) -> list[int]:
        prompt: list[int] = self.request.prompt_token_ids.tolist()
        return prompt + self.drawn


class Sleeper:
    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def sleep(self, level: int) -> None:
        self.runner.sleep(1)

    def wake(self) -> None:
        self.runner.wake()


def by_turns() -> Any:
    """`Engine._loop` as a generator that stops after each turn."""
    source = textwrap.dedent(inspect.getsource(Engine._loop))
    last = "        self._publish()\n"
    assert source.endswith(last), "the loop has changed, so change this"
    source = source.removesuffix(last) + last + "        yield\n"
    names: dict[str, Any] = {}
    flags = __future__.annotations.compiler_flag
    exec(compile(source, "<Engine._loop by turns>", "exec", flags), Engine._loop.__globals__, names)
    return names["_loop"]


class DrivenEngine(Engine):
    """Each phase is watched; see the module."""

    loop_by_turns = by_turns()

    def __init__(
        self, *, depth: int, num_blocks: int, seed: int, windows: bool, num_drafts: int, **options: Any
    ) -> None:
        defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": 8, "max_model_len": 64}
        speculation = None
        self.model: Any = TwoPeaksWindows((None, 10, 3)) if windows else TwoPeaks(VOCAB)
        if num_drafts:
            self.model = TwoPeaksDrafts(VOCAB)
            options["speculative"] = SpeculativeConfig(num_speculative_tokens=num_drafts, min_accepted=seed % 2 * 0.5)
            proposer = GuessingProposer(self.model, num_drafts, seed)
            speculation = Speculation(num_drafts, REFERENCE, lambda *_: proposer)
        config = EngineConfig(**{**defaults, **options})
        assert config.max_model_len is not None
        self.num_drafts = num_drafts
        groups = group_windows(self.model.kv_specs, config.max_model_len)
        longest = config.max_model_len + num_drafts
        self.layout = RowLayout(config.max_num_seqs, longest, config.block_size, VOCAB, groups)
        self.device = SimulatedDevice(RandomChooser(seed))
        runner = Runner(
            self.device,
            self.model,
            self.layout,
            num_blocks=num_blocks,
            depth=depth,
            max_num_tokens=config.max_num_batched_tokens,
            max_updates=6000,
            kernels=KERNELS,
            shapes=EXACT,
            speculation=speculation,
        )
        scheduler = Scheduler(config, self.layout, num_blocks)
        super().__init__(scheduler, runner, depth, self.take, self.died, check=True)
        self.runner = runner
        self.sleeper = Sleeper(runner)
        self.requests: dict[int, Tracked] = {}
        self.futures: list[tuple[str, Future[Any]]] = []
        self.flying: list[tuple[StepPlan, dict[int, tuple[int, list[int]]]]] = []
        self.block_of: dict[tuple[int, int], tuple[bytes, int]] = {}  # of a group: whose salt, and in which epoch
        self.epoch = 0  # of the prefix cache
        self.reused = 0  # blocks that were found
        self.accepted = 0  # drafts
        self.faults: list[str] = []
        self.broken = False
        self.turns: Generator[None, None, None] = type(self).loop_by_turns(self)

    def died(self, error: BaseException) -> None:
        raise error

    # ---- what is asked --------------------------------------------------------------------------------------------

    def ask_for(self, what: str, start: Any) -> None:
        """A message with a future, which must be done when no step is in flight, and by the end at the latest."""
        done: Future[Any] = Future()

        def ended(done: Future[Any]) -> None:
            if self.flying and what != "pause finish":  # which a resume ends at any time
                self.faults.append(f"{what} is over while steps are in flight")

        done.add_done_callback(ended)
        self.futures.append((what, done))
        self._put(lambda: start(done))

    def add(self, tracked: Tracked) -> None:
        self.scheduler.refuse_what_never_fits(len(tracked.request.prompt_token_ids), tracked.request.max_tokens)
        self.requests[tracked.request.id] = tracked

        def arrive() -> None:
            tracked.arrived = True

        self._put(arrive)
        self.submit([tracked.request])

    def must_end(self, tracked: Tracked) -> None:
        tracked.may_abort = True
        tracked.must_end = tracked.arrived

    def abort(self, request_id: int) -> None:
        tracked = self.requests.get(request_id)
        if tracked is not None:
            tracked.may_abort = True
            self._put(lambda: self.must_end(tracked))
        self.finish(request_id, FinishReason.ABORT)

    def pause(self, mode: Any) -> None:
        def start(done: Future[None]) -> None:
            if mode == "abort":
                for tracked in self.requests.values():
                    if tracked.arrived:
                        self.must_end(tracked)
            self.control.pause(mode, done)

        self.ask_for(f"pause {mode}", start)

    def resume(self) -> None:
        self._put(self.control.resume)

    def sleep(self) -> None:
        def forget() -> None:
            self.epoch += 1

        self.ask_for("sleep", lambda done: self.control.sleep(1, self.sleeper, done))
        self.ask_for("after sleep", lambda done: self.control.alone(forget, done))

    def wake(self) -> None:
        self._put(lambda: self.control.wake(self.sleeper))

    def update(self, recompute: bool) -> None:
        def change() -> int:
            self.model.salt += 1
            self.epoch += 1
            return self.scheduler.new_weights(recompute=recompute)

        self.ask_for("update", lambda done: self.control.alone(change, done))

    def reset(self) -> None:
        def forget() -> None:
            self.scheduler.reset_prefix_cache()
            self.epoch += 1

        self._put(forget)

    # ---- turns ----------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        self._put(lambda: None)  # an idle loop waits for a message
        self.broken = True
        next(self.turns)
        self.scheduler.check()
        assert not self.faults, self.faults
        for tracked in self.requests.values():
            ended = tracked.end is not None
            assert ended or not (tracked.due or tracked.must_end), f"{tracked} has not ended"
        self.broken = False

    @property
    def idle(self) -> bool:
        return not (self.flying or self.scheduler.has_requests or not self._inbox.empty())

    def settle(self) -> None:
        """Let everything end; nothing may be left."""
        self.wake()
        self.resume()
        for _ in range(MAX_TURNS):
            self.turn()
            if not self.flying and self.control.stopped:  # a pause or sleep that waited for steps has begun only now
                self.wake()
                self.resume()
            elif self.idle and all(done.done() for _, done in self.futures):
                break
        else:
            raise AssertionError(f"still running: {[t for t in self.requests.values() if t.end is None]}")
        for what, done in self.futures:
            assert done.exception() is None, what
        assert all(tracked.end is not None for tracked in self.requests.values())
        scheduler = self.scheduler
        scheduler.check()
        assert all(pool.available == pool.capacity for pool in scheduler.blocks.pools)
        assert scheduler.rows.num_free == len(scheduler.rows.requests)
        assert scheduler.stats.requests_finished == len(self.requests)
        stats = scheduler.snapshot()
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
        assert self.device.copies.h2d == stats.steps + self.stats.held_steps
        assert self.device.copies.d2h == stats.steps
        drawn = sum(len(t.drawn) for t in self.requests.values())
        assert stats.generated_tokens == drawn

    # ---- what is seen ---------------------------------------------------------------------------------------------

    def _launch(self, plan: StepPlan) -> tuple[Any, bool]:
        assert not self.control.stopped, "a step in a pause or a sleep"
        words = plan.updates[:, 0]
        assert len(np.unique(words)) == len(words), "a word is named twice"
        r, size, now = self.scheduler.rows, self.layout.block_size, self.model.salt
        draws: dict[int, tuple[int, list[int]]] = {}
        for s, row in enumerate(plan.rows.tolist()):
            tracked = self.requests[int(r.ids[row])]
            start = int(plan.starts[s])
            end = start + int(plan.query_lens[s])
            versions, key = tracked.versions, tracked.request.cache_key
            if not versions or tracked.preemptions != r.preemptions[row]:
                tracked.preemptions = int(r.preemptions[row])
                for place in self.blocks_at(row, 0, start // size):
                    assert self.block_of[place] == (key, self.epoch), "a block of another salt, or of before a reset"
                    self.reused += 1
                versions[:] = [now] * start
                tracked.epoch = self.epoch
            if self.num_drafts:  # where a sequence ends only the device knows; with drafts every update recomputes
                versions[:] = [now]
                end = int(self.scheduler.blocks.num_blocks[row]) * size
            else:
                assert start <= len(versions), "positions are left out"
                versions[start:] = [now] * (end - start)
            written = self.blocks_at(row, start // size, -(-end // size))
            assert len(written) == (-(-end // size) - start // size) * self.layout.num_groups
            for place in written:
                self.block_of[place] = (key, tracked.epoch)
            if plan.draws[s]:
                draws[tracked.request.id] = (end, list(versions))
        self.flying.append((plan, draws))
        return super()._launch(plan)

    def blocks_at(self, row: int, first: int, end: int) -> list[tuple[int, int]]:
        """Group and number of the blocks that the row's table names in these places."""
        tables = self.scheduler.blocks.tables[:, row, first:end]
        return [(group, block) for group, table in enumerate(tables.tolist()) for block in table if block != NULL_BLOCK]

    def _commit(self, result: StepResult) -> None:
        plan, draws = self.flying.pop(0)
        assert plan is result.plan
        r = self.scheduler.rows
        if self.scheduler._steady is not None:
            self.scheduler._steady.flush()
        live = {int(r.ids[row]) for row in plan.rows.tolist() if not r.finished[row]}
        drew = plan.draws.nonzero()[0]
        for s, (request_id, (place, versions)) in zip(drew.tolist(), draws.items(), strict=True):
            tracked = self.requests[request_id]
            if request_id not in live:
                continue
            if not self.num_drafts:
                self.drew(tracked, place, versions, int(result.tokens[s]))
                continue
            tokens = result.tokens[s].tolist()
            several = tokens[: tokens[plan.query_width]] if plan.query_width > 1 else [tokens]
            assert several
            self.accepted += len(several) - 1
            for token in several:
                if tracked.due is None:
                    place = len(tracked.tokens)
                    self.drew(tracked, place, versions * place, token)
        super()._commit(result)

    def drew(self, tracked: Tracked, place: int, versions: list[int], token: int) -> None:
        request, tokens = tracked.request, tracked.tokens
        assert place == len(tokens), "a token of another position"
        want = expected(self.model, tracked, self.layout, tokens, versions)
        assert token == want, f"{request.id} at {place}: {token} instead of {want}"
        assert tracked.due is None
        if token < 0:
            tracked.due = FinishReason.ERROR
            return
        tracked.drawn.append(token)
        tracked.last = versions[-1]
        tracked.first = min(versions) if tracked.first is None else min(tracked.first, *versions)
        if token in request.stop_token_ids:
            tracked.due = FinishReason.STOP
        elif len(tracked.drawn) == request.max_tokens:
            tracked.due = FinishReason.LENGTH

    def take(self, message: StepMessage) -> None:
        if message.prompts is not None:
            for i, position in zip(message.prompts.ids.tolist(), message.prompts.positions.tolist(), strict=True):
                tracked = self.requests[i]
                assert tracked.end is None
                tracked.scored.append(position)
        for i, token in zip(message.ids.tolist(), message.tokens.tolist(), strict=True):
            tracked = self.requests[i]
            assert tracked.end is None, "a token after the end"
            assert tracked.request.streaming
            tracked.streamed.append(token)
            assert tracked.streamed == tracked.drawn[: len(tracked.streamed)]
            if token == tracked.stop_at and not tracked.may_abort:
                self.abort(i)  # the loop hears of it in its next turn
        for end in message.finished:
            self.ended(self.requests[end.id], end)

    def ended(self, tracked: Tracked, end: Finished) -> None:
        assert tracked.end is None, "a second end"
        tracked.end = end
        request = tracked.request
        assert end.token_ids.tolist() == tracked.drawn
        if end.reason is FinishReason.ABORT:
            assert tracked.may_abort
            assert tracked.due is None
        else:
            assert end.reason is tracked.due
            if request.streaming:
                assert tracked.streamed == tracked.drawn
            if request.prompt_logprobs is not None and tracked.due is not FinishReason.ERROR:
                assert tracked.scored == list(range(1, len(request.prompt_token_ids)))
        assert tracked.scored == list(range(1, len(tracked.scored) + 1))
        assert (end.stop_token is not None) == (end.reason is FinishReason.STOP)
        assert (end.error is not None) == (end.reason is FinishReason.ERROR)
        if tracked.drawn:
            assert end.weight_versions[1] == tracked.last
            assert tracked.first is not None
            assert end.weight_versions[0] <= tracked.first
            if not end.num_preemptions and request.prompt_logprobs is None:
                assert end.weight_versions[0] == tracked.first


def expected(model: Any, tracked: Tracked, layout: RowLayout, tokens: list[int], versions: list[int]) -> int:
    """The next token, -1 for none: from the tokens so far and the weights that read each of them."""
    assert len(versions) == len(tokens)
    first = model.next_token([t + VOCAB * v for t, v in zip(tokens, versions, strict=True)])
    logits = torch.from_numpy(peaks(first, isinstance(model, TwoPeaks) and BAD in tokens))[None]
    request, place = tracked.request, len(tokens)
    params = request.params
    if bool(logits.isnan().any()):
        return -1
    if params.repetition_penalty != 1:
        logits[0, sorted(set(tokens))] /= params.repetition_penalty
    if place < len(request.prompt_token_ids) + params.min_tokens:
        logits[0, list(request.stop_token_ids)] = -torch.inf
    if tracked.grammar is not None:
        masked = torch.ones(VOCAB, dtype=torch.bool)
        masked[allowed(tracked.grammar, tracked.drawn)] = False
        logits[0, masked] = -torch.inf
    if not params.temperature:
        return int(logits.argmax())
    words = torch.zeros(1, int(Word.COUNT), dtype=torch.int32)
    for word, value in request_updates(request, layout, 0).tolist():
        if 0 <= word - layout.params_at < int(Word.COUNT):
            words[0, word - layout.params_at] = value
    return int(sample(logits, words, torch.tensor([place]), Feature.SAMPLE | Feature.FILTER))
