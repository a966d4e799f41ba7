"""The runner: turns a StepPlan into work on three streams (`launch`), and a finished step into tokens (`wait`).

One step is one H2D copy, a forward and a sample, one D2H copy:

    h2d      copy slot.host -> slot.device ; record h2d_done
    compute  wait h2d_done ; forward ; sample ; record compute_done
    d2h      wait compute_done ; copy slot.out -> slot.out_host ; record d2h_done

A step whose tokens grammars restrict is enqueued in two calls. `launch` ends after the forward; `sample` brings the
masks by a second H2D copy, and enqueues the rest:

    h2d      copy masks host -> device ; record masks.done
    compute  wait masks.done ; masks into the rows ; sample ; record compute_done

In a step with drafts a third graph, ``draft``, comes before the forward, see `gapless.runner.draft_steps`. Copies and
events are the same.

The engine knows all this as a `gapless.runner.base.StepRunner`.

`launch` never blocks. `wait` blocks on the d2h_done of one slot, and is the only place that does. What outlives a step
is `State`'s, what is enqueued `Graphs`'; both hand addresses to nobody but the kernels.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch

from gapless.batch.plan import SeqFlag, StepPlan
from gapless.batch.row_layout import I32, RowLayout
from gapless.batch.row_params import Feature, covering
from gapless.batch.slot_layout import slot_layout
from gapless.device.base import Device, DeviceError, Event
from gapless.device.counts import CopyCounts
from gapless.lora.bank import AdapterBank
from gapless.model.base import CausalModel
from gapless.model.weights import Weights
from gapless.runner import draft_steps
from gapless.runner.base import MaskBuffer
from gapless.runner.draft_steps import num_logits
from gapless.runner.graphs import Graphs
from gapless.runner.kernels import Kernels
from gapless.runner.keys import MASK, Key
from gapless.runner.masks import MaskRegion
from gapless.runner.shapes import Shapes
from gapless.runner.sleep import Sleep
from gapless.runner.slot import Ring, Slot
from gapless.runner.state import State
from gapless.runner.upkeep import Upkeep
from gapless.speculative.base import Speculation

NO_ROWS = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Timing events on the compute stream: before the first and after the last work of a step; of a step that
    awaits masks also when it began to wait, and when they had come."""

    start: Event
    end: Event
    forward_done: Event
    masked: Event


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A launched step."""

    plan: StepPlan
    slot: Slot
    watch: Stopwatch
    padded: int  # S of its graphs
    num_logits: int  # L of its graphs; S without drafts


@dataclass(frozen=True, slots=True)
class StepResult:
    """A finished step: its plan and one token per sequence, -1 where the logits were not finite.

    ``records`` are the log-probabilities ``[S, Record.COUNT]``, None if the plan's features do not name them. For both
    of a step with drafts see `gapless.scheduler.scheduler.Scheduler.commit`.
    """

    plan: StepPlan
    tokens: I32
    busy_ms: float  # first to last work of the step on the compute stream, without ``mask_wait_ms``
    idle_ms: float  # from the end of the step before to the start of this one; 0 for the first
    records: I32 | None = None
    mask_wait_ms: float = 0.0  # the compute stream had nothing to do between forward and sample, for want of masks


class Runner(Upkeep):
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
        masks: have memory and graphs for steps that await masks.
        adapters: the model's, if requests may run with LoRA adapters.
        embeds: see `State`.
        speculation: drafts, or None; with them the layout has room for K tokens more than a request may have.
        weights: the model's, if they can be changed and put to sleep.
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
        embeds: tuple[int, int] = (0, 0),
        weights: Weights | None = None,
    ) -> None:
        self.device = device
        self.weights = weights
        self.layout = layout
        self._shapes = shapes
        query_width = 1 if speculation is None else speculation.query_width
        max_tokens, max_seqs = shapes.largest(max_num_tokens, layout.max_num_seqs, query_width)
        self._ring = Ring([Slot(device, i, max_tokens, max_seqs, max_updates, query_width) for i in range(depth)])
        self._masks = [MaskRegion(device, i, layout) for i in range(depth if masks else 0)]
        self.state = State(
            device,
            model,
            layout,
            num_blocks=[num_blocks] * layout.num_groups if isinstance(num_blocks, int) else list(num_blocks),
            max_tokens=max_tokens,
            max_seqs=max_seqs,
            adapters=adapters,
            speculation=speculation,
            embeds=embeds,
            depth=depth,
        )
        self.graphs = Graphs(
            device,
            model,
            layout,
            self.state,
            self._ring.slots,
            self._masks,
            kernels=kernels,
            shapes=shapes,
            processed_logprobs=processed_logprobs,
        )
        self._sleep = Sleep(device, self.state, self.graphs, weights)
        # One more than slots: the end of the step before is still needed when a step has been waited for.
        self._watches = [Stopwatch(*(device.event(timing=True) for _ in range(4))) for _ in range(depth + 1)]
        self._last: Stopwatch | None = None

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
        if plan.embeds is not None and self.state.embeds is not None:
            self.state.embeds.upload(plan.embeds, slot.index)
        queries = plan.query_width, plan.max_query_len
        drafts = self.state.drafts if plan.query_width > 1 else None
        if drafts is not None and plan.having(SeqFlag.DRAFTS).any():
            self.graphs.launch(Key("draft", t, s, False, drafts.features(plan.features), False, *queries), slot)
        self.graphs.launch(Key("forward", t, s, plan.decode_only, Feature.GREEDY, plan.lora, *queries), slot)
        step = StepInFlight(plan, slot, watch, s, num_logits(t, s, *queries))
        if plan.constrained is None:
            self._end(step)
        else:
            watch.forward_done.record(device.compute)
        return step

    @contextlib.contextmanager
    def masks(self, step: StepInFlight) -> Iterator[MaskBuffer]:
        """Lends the slot's own masks, which are filled while the forward runs."""
        region = self._masks[step.slot.index]
        with self.device.host_access(region.filling, "masks"):
            lent = MaskBuffer(region.masks, NO_ROWS)
            yield lent
            region.name_rows(lent.rows)

    def sample(self, step: StepInFlight) -> None:
        """Enqueue what `launch` has left out."""
        device, masks, watch = self.device, self._masks[step.slot.index], step.watch
        used = masks.used
        device.copy_h2d(masks.device[:used], masks.host[:used], "masks")
        masks.done.record(device.h2d)
        masks.done.wait(device.compute)
        watch.masked.record(device.compute)
        self.graphs.launch(MASK, step.slot)
        self._end(step)

    def _end(self, step: StepInFlight) -> None:
        """Sample, and bring the tokens."""
        device, slot, plan, s = self.device, step.slot, step.plan, step.padded
        # Where sizes are exact nothing is captured, and what nobody asks for need not be paid for.
        features = covering(plan.features) if self._shapes.seq_buckets else plan.features
        queries = plan.query_width, plan.max_query_len
        self.graphs.launch(Key("sample", step.num_logits, s, False, features, False, *queries), slot)
        step.watch.end.record(device.compute)
        slot.compute_done.record(device.compute)

        slot.compute_done.wait(device.d2h)
        counts = 2 * s if plan.query_width > 1 else 0
        device.copy_d2h(*slot.used_out(step.num_logits, bool(plan.features & Feature.LOGPROBS), counts), "d2h")
        slot.d2h_done.record(device.d2h)

    def wait(self, step: StepInFlight) -> StepResult:
        """Block until the step's tokens are on the host, and copy them out of the slot."""
        slot, plan = step.slot, step.plan
        slot.d2h_done.synchronize()
        with self.device.host_access(slot.reading, "read"):
            if plan.query_width > 1:
                tokens, records = draft_steps.read(slot, plan, step.padded, step.num_logits)
            else:
                tokens, records = slot.read(plan.num_seqs), None
                if plan.features & Feature.LOGPROBS:
                    records = slot.read_records(plan.num_seqs, step.padded)
        watch, last = step.watch, self._last
        self._last = watch
        mask_wait = 0.0 if plan.constrained is None else watch.forward_done.elapsed_ms(watch.masked)
        busy = watch.start.elapsed_ms(watch.end) - mask_wait
        idle = last.end.elapsed_ms(watch.start) if last is not None else 0.0
        return StepResult(plan, tokens, busy, max(idle, 0.0), records, mask_wait)

    @property
    def copies(self) -> CopyCounts:
        """Of the device, counted on."""
        return self.device.copies

    # ---- start and end --------------------------------------------------------------------------------------------

    def graph_keys(self) -> list[Key]:
        """See `gapless.runner.keys.graph_keys`; nothing where sizes are exact."""
        return self.graphs.keys() if self._shapes.seq_buckets else []

    def capture(self, keys: Sequence[Key]) -> None:
        """See `Graphs.capture`."""
        try:
            self.graphs.capture(keys)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error

    def memory(self) -> tuple[int, int]:
        """Free and all, once what the runs before captures took is given back."""
        if self.device.torch_device.type == "cuda":
            torch.cuda.empty_cache()
            return torch.cuda.mem_get_info(self.device.torch_device)
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page

    def thread_context(self) -> AbstractContextManager[None]:
        """Entered by the loop's thread."""
        return self.device.thread_context()

    def close(self) -> None:
        """Finish what is in flight and give the memory back, also if somebody still refers to this runner."""
        if self.device.closed:
            return
        with contextlib.suppress(DeviceError):  # told to whoever waited for the step
            self.device.synchronize()  # no graph is destroyed under a step that runs
        self.graphs.drop()
        if self.lora is not None:
            self.lora.close()
        del self._ring, self._masks, self._sleep, self.state, self.graphs
        self.weights = None  # they go when nobody else holds them
        self.device.close()
