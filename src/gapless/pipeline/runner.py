"""The runner: turns a StepPlan into work on three streams (`launch`), and a finished step into tokens (`wait`).

One step is one H2D copy, a forward and a sample, one D2H copy:

    h2d      copy slot.host -> slot.device ; record h2d_done
    compute  wait h2d_done ; forward ; sample ; record compute_done
    d2h      wait compute_done ; copy slot.out -> slot.out_host ; record d2h_done

A step whose tokens grammars restrict is enqueued in two calls. `launch` ends after the forward; `sample` brings the
masks by a second H2D copy, and enqueues the rest:

    h2d      copy masks host -> device ; record masks.done
    compute  wait masks.done ; masks into the rows ; sample ; record compute_done

In a step with drafts a third graph, ``draft``, comes before the forward. Copies and events are the same.

`launch` never blocks. `wait` blocks on the d2h_done of one slot, and is the only place that does. All persistent state
(the arena with token table, block tables and parameters; the KV pool; the adapters) and the indices derived from it are
written by the compute stream only; the runner owns these tensors and hands their addresses to nobody but the kernels.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from gapless.attention.context import AttentionContext
from gapless.device.arena import arena_views
from gapless.device.base import NOTHING, Access, Device, DeviceError, Event
from gapless.device.counts import CopyCounts
from gapless.kv.groups import group_of
from gapless.kv.spec import StateSpec
from gapless.lora.bank import AdapterBank
from gapless.model.base import CausalModel
from gapless.pipeline.kernels import Kernels
from gapless.pipeline.layout import StepInputs, slot_layout, step_inputs
from gapless.pipeline.lora import LoraMemory
from gapless.pipeline.masks import MaskRegion, mask_inputs
from gapless.pipeline.prepare import StepIndices
from gapless.pipeline.shapes import Shapes
from gapless.pipeline.slot import Ring, Slot
from gapless.plan import COMBINATIONS, I32, Feature, RowLayout, StepPlan, Word, covering
from gapless.speculative.base import DraftIndices, Sequences, Speculation

_DRAWS = Feature.SAMPLE | Feature.FILTER


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Timing events on the compute stream: before the first and after the last work of a step; of a step that is held
    also when it began to wait for masks, and when they had come."""

    start: Event
    end: Event
    held: Event
    masked: Event


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A launched step."""

    plan: StepPlan
    slot: Slot
    watch: Stopwatch
    padded: int  # S of its graphs
    num_logits: int  # L of its graphs; S without drafts


def _logits_of(plan: StepPlan) -> I32:
    """Int32 ``[S, W]``: which of the logits of a step with drafts are each sequence's; what it has not is repeated."""
    j = np.arange(plan.width, dtype=np.int32)
    if not plan.few:
        places: I32 = np.arange(plan.num_seqs, dtype=np.int32)[:, None] * np.int32(plan.width) + j
        return places
    ends: I32 = np.cumsum(plan.query_lens, dtype=np.int32)[:, None]
    last: I32 = np.minimum(ends - plan.query_lens[:, None] + j, ends - 1)
    return last


@dataclass(frozen=True, slots=True)
class StepResult:
    """A finished step: its plan and one token per sequence, -1 where the logits were not finite.

    ``records`` are the log-probabilities ``[S, Record.COUNT]``, None if the plan's features do not name them. For both
    of a step with drafts see `gapless.scheduler.Scheduler.commit`.
    """

    plan: StepPlan
    tokens: I32
    busy_ms: float  # first to last work of the step on the compute stream, without ``held_ms``
    idle_ms: float  # from the end of the step before to the start of this one; 0 for the first
    records: I32 | None = None
    held_ms: float = 0.0  # the compute stream had nothing to do between forward and sample, for want of masks


class Key(NamedTuple):
    """Everything that a captured graph bakes in, but for the slot. Sizes are padded; a sample's T is its logits.

    ``half`` is ``forward`` or ``sample``, in steps with drafts also ``draft``, and in steps with grammars ``mask``.
    ``width`` and ``few`` are as in the plan; ``few`` bounds the tokens of a sequence by ``width``.
    """

    half: str
    num_tokens: int
    num_seqs: int
    decode_only: bool
    features: Feature = Feature.GREEDY
    lora: bool = False  # of a forward: some row has an adapter
    width: int = 1
    few: bool = False


NO_STEP = StepPlan(
    step=0,
    rows=np.zeros(0, np.int32),
    starts=np.zeros(0, np.int32),
    query_lens=np.zeros(0, np.int32),
    samples=np.zeros(0, np.bool_),
    input_ids=np.zeros(0, np.int32),
    carry=np.zeros(0, np.bool_),
    updates=np.zeros((0, 2), np.int32),
    features=Feature.GREEDY,
)
"""Nothing but padding: it names the null row and the null block alone."""


class Runner:
    """See the module.

    Args:
        device: where it runs.
        model: on that device.
        layout: of the persistent rows.
        num_blocks: of each group's pool; one number if they are equal.
        depth: slots in the ring.
        max_num_tokens, max_updates: the largest step that a plan may ask for.
        kernels: prepare and sample, for this device.
        shapes: how steps are padded, and whether they are captured.
        processed_logprobs: of which logits, see `gapless.sampling.logprobs`.
        masks: have memory and graphs for steps that are held.
        adapters: the model's, if requests may run with LoRA adapters.
        speculation: drafts, or None; with them the layout has room for K tokens more than a request may have.
    """

    def __init__(
        self,
        device: Device,
        model: CausalModel,
        layout: RowLayout,
        *,
        num_blocks: int | Sequence[int],
        depth: int,
        max_num_tokens: int,
        max_updates: int,
        kernels: Kernels,
        shapes: Shapes,
        processed_logprobs: bool = False,
        masks: bool = True,
        adapters: AdapterBank | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self.device = device
        self.model = model
        self.layout = layout
        self._kernels = kernels
        self._shapes = shapes
        self._processed_logprobs = processed_logprobs
        self._width = width = 1 if speculation is None else speculation.num_drafts + 1
        max_tokens, max_seqs = shapes.largest(max_num_tokens, layout.max_num_seqs, width)
        self._ring = Ring([Slot(device, i, max_tokens, max_seqs, max_updates, width) for i in range(depth)])
        self._masks = [MaskRegion(device, i, layout) for i in range(depth if masks else 0)]
        self._arena = arena_views(device.device_buffer((layout.num_words,), torch.int32, "arena"), layout)
        self._num_blocks = [num_blocks] * layout.num_groups if isinstance(num_blocks, int) else list(num_blocks)
        self._group_of_layer = tuple(
            group_of(spec.window, layout.windows) if spec.paged else 0 for spec in model.kv_specs
        )
        self._kv: list[torch.Tensor] = []
        self._take_pool()
        t, s, g = max_tokens, max_seqs, layout.num_groups
        ints = device.device_buffer(((2 + g) * t + 2 * s,), torch.int64, "indices")
        lens = device.device_buffer((s,), torch.int32, "seq_lens")
        slots, rest = ints[2 * t : (2 + g) * t].view(g, t), ints[(2 + g) * t :]
        self._indices = StepIndices(ints[:t], ints[t : 2 * t], slots, lens, rest[:s], rest[s:])
        self._logits = device.device_buffer((s * width, model.vocab_size), model.dtype, "logits")
        self.lora = None if adapters is None else LoraMemory(device, adapters)
        self._index_buffers: tuple[torch.Tensor, ...] = (ints, lens)
        self._speculation = speculation
        if speculation is not None:
            self._proposer = speculation.make_proposer(device, layout, self._num_blocks, s)
            words = device.device_buffer((s * (2 * width + 1),), torch.int32, "draft_words")
            places = device.device_buffer((2 * s * width,), torch.int64, "draft_places")
            n = s * width
            self._draft_indices = DraftIndices(
                words[:s], words[s : s + n], words[s + n :], places[:n], places[n:], width
            )
            self._index_buffers = (ints, lens, words, places)
        self._bind()
        self._mask_access = [Access((region.device, self._arena.words), (self._arena.words,)) for region in self._masks]
        self._captured: dict[tuple[int, Key], Callable[[], None]] = {}
        # One more than slots: the end of the step before is still needed when a step has been waited for.
        self._watches = [Stopwatch(*(device.event(timing=True) for _ in range(4))) for _ in range(depth + 1)]
        self._last: Stopwatch | None = None

    def _take_pool(self) -> None:
        """The KV pools, zeroed."""
        for i, (spec, group) in enumerate(zip(self.model.kv_specs, self._group_of_layer, strict=True)):
            if isinstance(spec, StateSpec):
                shape = spec.shape(self.layout.num_rows)
            else:
                shape = spec.shape(self._num_blocks[group], self.layout.block_size)
            self._kv.append(self.device.device_buffer(shape, getattr(torch, spec.dtype), f"kv{i}"))

    def _bind(self) -> None:
        """Say what the parts of a step touch."""
        state = (self._arena.words, *self._kv, *self._index_buffers, self._logits)
        if self._speculation is not None:
            state = (*state, *self._proposer.state)
            self._draft_access = [Access((slot.device, *state), state) for slot in self._ring.slots]
        read = state if self.lora is None else (*state, self.lora.buffer)
        self._forward_access = [Access((slot.device, *read), state) for slot in self._ring.slots]
        self._sample_access = [
            Access((slot.device, *state, slot.out), (self._arena.words, slot.out)) for slot in self._ring.slots
        ]

    # ---- the step -------------------------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> StepInFlight:
        """Enqueue a step; one that has constrained sequences up to its forward only. Never blocks."""
        device, slot = self.device, self._ring.take()
        watch = self._watches[plan.step % len(self._watches)]
        t, s = self._shapes.pad(plan)
        layout = slot_layout(t, s)
        with device.host_access(slot.filling, "fill"):
            used = slot.fill(plan, layout, self.layout.null_row)

        device.copy_h2d(*slot.used(used), "h2d")
        slot.h2d_done.record(device.h2d)

        slot.h2d_done.wait(device.compute)
        watch.start.record(device.compute)
        width, few = plan.width, plan.few
        if plan.drafts is not None and plan.drafts.any():
            draft = self._work(Key("draft", t, s, False, self._draft_features(plan.features), False, width, few), slot)
            device.launch(draft, self._draft_access[slot.index], "draft")
        forward = self._work(Key("forward", t, s, plan.decode_only, Feature.GREEDY, plan.lora, width, few), slot)
        device.launch(forward, self._forward_access[slot.index], "forward")
        num_logits = s if width == 1 else t if few else s * width
        step = StepInFlight(plan, slot, watch, s, num_logits)
        if plan.constrained is None:
            self._end(step)
        else:
            watch.held.record(device.compute)
        return step

    def sample(self, step: StepInFlight, write: Callable[[I32], I32]) -> None:
        """Enqueue what `launch` has left out. ``write`` is called while the forward runs; see `MaskRegion.fill`."""
        device, masks, watch = self.device, self._masks[step.slot.index], step.watch
        with device.host_access(masks.filling, "masks"):
            used = masks.fill(write)
        device.copy_h2d(masks.device[:used], masks.host[:used], "masks")
        masks.done.record(device.h2d)
        masks.done.wait(device.compute)
        watch.masked.record(device.compute)
        device.launch(self._work(self._mask_key, step.slot), self._mask_access[step.slot.index], "mask")
        self._end(step)

    def _end(self, step: StepInFlight) -> None:
        """Sample, and bring the tokens."""
        device, slot, plan, s = self.device, step.slot, step.plan, step.padded
        # Where sizes are exact nothing is captured, and what nobody asks for need not be paid for.
        features = covering(plan.features) if self._shapes.seq_buckets else plan.features
        sample = self._work(Key("sample", step.num_logits, s, False, features, False, plan.width, plan.few), slot)
        device.launch(sample, self._sample_access[slot.index], "sample")
        step.watch.end.record(device.compute)
        slot.compute_done.record(device.compute)

        slot.compute_done.wait(device.d2h)
        drafts_of = s if plan.width > 1 else 0
        device.copy_d2h(*slot.used_out(step.num_logits, bool(plan.features & Feature.LOGPROBS), drafts_of), "d2h")
        slot.d2h_done.record(device.d2h)

    def wait(self, step: StepInFlight) -> StepResult:
        """Block until the step's tokens are on the host, and copy them out of the slot."""
        slot = step.slot
        slot.d2h_done.synchronize()
        with self.device.host_access(slot.reading, "read"):
            has_records = bool(step.plan.features & Feature.LOGPROBS)
            if step.plan.width == 1:
                tokens = slot.read(step.plan.num_seqs)
                records = slot.read_records(step.plan.num_seqs, step.padded) if has_records else None
            else:
                where = _logits_of(step.plan), step.padded, step.num_logits
                tokens = slot.read_drafts(*where)
                records = slot.read_draft_records(*where) if has_records else None
        watch, last = step.watch, self._last
        self._last = watch
        held = 0.0 if step.plan.constrained is None else watch.held.elapsed_ms(watch.masked)
        busy = watch.start.elapsed_ms(watch.end) - held
        idle = last.end.elapsed_ms(watch.start) if last is not None else 0.0
        return StepResult(step.plan, tokens, busy, max(idle, 0.0), records, held)

    @property
    def copies(self) -> CopyCounts:
        """Of the device, counted on."""
        return self.device.copies

    @property
    def _mask_key(self) -> Key:
        return Key("mask", 0, self.layout.max_num_seqs, False)

    # ---- between steps --------------------------------------------------------------------------------------------

    def run_alone(self, work: Callable[[], None], name: str) -> None:
        """Run ``work`` on the compute stream and wait for it. Only while no step is in flight."""
        self.device.launch(work, NOTHING, name)
        self.device.synchronize()

    def drop_memory(self) -> None:
        """Let go of the graphs and of the KV pool. Only while no step is in flight; see `gapless.pipeline.sleeping`."""
        self.device.synchronize()
        self._captured.clear()
        for i in range(len(self._kv)):
            self.device.release_buffer(f"kv{i}")
        self._kv.clear()
        if self._speculation is not None:
            self._proposer.drop_pool()
            self._draft_access = []
        self._forward_access, self._sample_access = [], []

    def take_memory(self) -> None:
        """Take the KV pool again, and capture what was captured at start; every kernel is compiled by now."""
        self._take_pool()
        if self._speculation is not None:
            self._proposer.take_pool()
        self._bind()
        if self._shapes.capture:
            keys = self.graph_keys()
            self._warm(keys)
            self.capture(keys, run=False)

    def _warm(self, keys: list[Key]) -> None:
        """Run the smallest key of each kind without a token. Libraries keep a handle and a workspace for each thread
        that calls them, which a capture may not be the first to ask for; and this thread has only replayed.

        Not the masks: they call no library, and their region of the slot still holds those of an earlier step, which
        would be written to rows that others have by now.
        """
        slot = self._ring.slots[0]
        kinds = [key for key in keys if key.half != "mask"]
        smallest = {(key.half, key.decode_only, key.lora, key.width, key.few): key for key in kinds}
        with self.device.thread_context():
            for key in smallest.values():
                slot.fill(NO_STEP, slot_layout(key.num_tokens, key.num_seqs), self.layout.null_row)
                slot.device.copy_(slot.host)
                self._build(key, slot)()
            self.device.synchronize()

    # ---- start --------------------------------------------------------------------------------------------------

    def graph_keys(self) -> list[Key]:
        """Everything that a step can ask for: forwards by shape, samples by width and features. Largest first, so
        that later captures find their memory in the pool."""
        shapes = self._shapes
        widest = shapes.seq_buckets[-1]
        forwards = [Key("forward", t, widest, False) for t in shapes.token_buckets]
        forwards += [Key("forward", s, s, True) for s in shapes.seq_buckets]
        if self.lora is not None:  # before those without, because they need more memory
            forwards = [key._replace(lora=True) for key in forwards] + forwards
        samples = [Key("sample", s, s, False, f) for s in shapes.seq_buckets for f in COMBINATIONS]
        masks = [self._mask_key] if self._masks else []
        return sorted(forwards + samples + masks + self._draft_keys(), key=lambda key: -key.num_tokens)

    def _draft_keys(self) -> list[Key]:
        """Those of steps with drafts: without a prompt by S and how many draft; with one by T."""
        if self._speculation is None:
            return []
        shapes, w = self._shapes, self._width
        few = [(t, s, True) for s in shapes.seq_buckets for t in shapes.few_tokens(s, w)]
        mixed = [(t, shapes.seq_buckets[-1], False) for t in shapes.token_buckets]
        logits = [*few, (shapes.seq_buckets[-1] * w, shapes.seq_buckets[-1], False)]
        draws = (Feature.GREEDY, _DRAWS) if self._proposer.samples else (Feature.GREEDY,)
        keys = []
        for half, sizes, features in (
            ("draft", few + mixed, draws), ("forward", few + mixed, (Feature.GREEDY,)), ("sample", logits, COMBINATIONS)
        ):  # fmt: skip
            loras = (True, False) if half == "forward" and self.lora is not None else (False,)
            keys += [
                Key(half, t, s, False, f, lora, w, bounded)
                for lora in loras
                for t, s, bounded in sizes
                for f in features
            ]
        return keys

    def _draft_features(self, features: Feature) -> Feature:
        return _DRAWS if self._proposer.samples and features & Feature.SAMPLE else Feature.GREEDY

    def capture(
        self, keys: list[Key], progress: Callable[[list[Key]], Iterable[Key]] = iter, *, run: bool = True
    ) -> None:
        """Run each key once, so that every kernel is compiled, and capture it for each slot.

        The slots hold zeros, that is a step of no tokens: all of it is padding. Without ``run`` the kernels must have
        been compiled, and what the slots hold does not matter.
        """
        with self.device.thread_context():
            for key in progress(keys):
                for slot in self._ring.slots:
                    work = self._build(key, slot)
                    if slot.index == 0 and run:
                        work()
                        self.device.synchronize()
                    if self._shapes.capture:
                        self._captured[slot.index, key] = self.device.capture(work)
            self.device.synchronize()

    def thread_context(self) -> AbstractContextManager[None]:
        """Entered by the loop's thread."""
        return self.device.thread_context()

    def close(self) -> None:
        """Finish what is in flight and give the memory back, also if somebody still refers to this runner."""
        if self.device.closed:
            return
        with contextlib.suppress(DeviceError):  # told to whoever waited for the step
            self.device.synchronize()  # no graph is destroyed under a step that runs
        self._captured.clear()
        if self.lora is not None:
            self.lora.close()
        del self._ring, self._arena, self._kv, self._indices, self._logits, self._forward_access, self._sample_access
        del self._index_buffers, self._masks, self._mask_access
        if self._speculation is not None:
            del self._proposer, self._draft_indices, self._draft_access
        del self.model
        self.device.close()

    # ---- what is enqueued -----------------------------------------------------------------------------------------

    def _work(self, key: Key, slot: Slot) -> Callable[[], None]:
        if not self._shapes.capture:
            return self._build(key, slot)
        return self._captured[slot.index, key]

    def _build(self, key: Key, slot: Slot) -> Callable[[], None]:
        if key.half == "mask":
            inputs = mask_inputs(self._masks[slot.index].device, self.layout)
            return lambda: self._kernels.mask(inputs, self._arena.words, self.layout)
        if key.half == "draft":
            return self._draft(key, slot)
        return self._forward(key, slot) if key.half == "forward" else self._sample(key, slot)

    def _forward(self, key: Key, slot: Slot) -> Callable[[], None]:
        layout = slot_layout(key.num_tokens, key.num_seqs)
        step = step_inputs(slot.device, layout)
        indices = self._indices.cut(layout.num_tokens, layout.num_seqs)
        logits = self._logits[: layout.num_seqs]
        row_loras = self._arena.params[:, Word.LORA] if key.lora else None
        logits_index = indices.logits_index
        if key.width > 1:
            num_logits = key.num_tokens if key.few else key.num_seqs * key.width
            drafts = self._draft_indices.cut(key.num_seqs, num_logits, key.few)
            logits, logits_index = self._logits[:num_logits], drafts.logits_index

        tables = [(indices.slot_mapping[g], self._arena.block_tables[g]) for g in range(self.layout.num_groups)]

        def context_of(slot_mapping: torch.Tensor, block_tables: torch.Tensor) -> AttentionContext:
            return AttentionContext(
                kv_caches=self._kv,
                slot_mapping=slot_mapping,
                query_start_loc=step.query_start_loc,
                seq_lens=indices.seq_lens,
                rows=step.rows,
                block_tables=block_tables,
                block_size=self.layout.block_size,
                decode_only=key.decode_only,
                row_loras=row_loras,
                token_table=self._arena.token_table,
                max_query_len=key.width if key.few else None,
            )

        def work() -> None:
            if key.width > 1:
                self._prepare_drafts(step, indices, drafts)
            else:
                self._kernels.prepare(step, self._arena, self.layout, indices)
            context, *others = (context_of(*table) for table in tables)
            if others:
                context.group_of_layer, context.others = self._group_of_layer, tuple(others)
            self.model.forward(indices.input_ids, indices.positions, context, logits_index, logits)
            if self._speculation is not None and not key.decode_only and not key.few:
                self._proposer.follow(indices.input_ids, indices.positions, context)

        return work

    def _sample(self, key: Key, slot: Slot) -> Callable[[], None]:
        # Rows and flags lie before the tokens in the slot, at places that depend on the number of sequences alone.
        s, n, width = key.num_seqs, key.num_tokens, key.width
        step = step_inputs(slot.device, slot_layout(s, s))
        logits = self._logits[:n]
        out, records = slot.tokens_out(n), slot.records_out(n, s if width > 1 else 0)
        rows, positions, flags = step.rows, self._indices.sample_positions[:s], step.flags
        if width > 1:
            drafts = self._draft_indices.cut(s, n, key.few)
            rows, positions, flags = drafts.rows, drafts.positions, drafts.flags

        def work() -> None:
            self._kernels.sample(
                logits, self._arena.words, self.layout, rows, positions, flags, key.features, out, records,
                processed_logprobs=self._processed_logprobs,
            )  # fmt: skip
            if width > 1 and self._speculation is not None:
                self._speculation.kernels.accept(
                    self._sequences(step), drafts, self._indices.input_ids, out, *slot.counts_out(s, n)
                )

        return work

    # ---- steps with drafts ----------------------------------------------------------------------------------------

    def _sequences(self, step: StepInputs) -> Sequences:
        return Sequences(step.rows, step.starts, step.flags, step.query_start_loc, self._arena, self.layout)

    def _draft(self, key: Key, slot: Slot) -> Callable[[], None]:
        step = step_inputs(slot.device, slot_layout(key.num_tokens, key.num_seqs))

        def work() -> None:
            self._kernels.apply_updates(step, self._arena)
            self._proposer.propose(self._sequences(step), key.features)

        return work

    def _prepare_drafts(self, step: StepInputs, indices: StepIndices, drafts: DraftIndices) -> None:
        """As `Kernels.prepare`, between finding the true starts and what follows from the drafts."""
        assert self._speculation is not None
        kernels, sequences = self._speculation.kernels, self._sequences(step)
        kernels.place(sequences, drafts.starts)
        self._kernels.prepare(dataclasses.replace(step, starts=drafts.starts), self._arena, self.layout, indices)
        kernels.expand(sequences, indices.positions, drafts)
