"""Deliberate faults, as edits of the engine's own source: function, old text, new text.

An edit whose old text is not found exactly once is an error, so that a fault cannot silently become none when the
engine changes. `test_mutations.py` says how each is caught.
"""

from __future__ import annotations
import __future__

import contextlib
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from gapless.runner.kernels import Kernels

RUNNER, SLOT = "gapless.runner.runner:Runner", "gapless.runner.slot:Slot"
SCHEDULER, ROWS = "gapless.scheduler.scheduler:Scheduler", "gapless.batch.row_table:RowTable"
STATES = "gapless.scheduler.row_states:RowStates"
POOL, PREFIX = "gapless.cache.block_pool:BlockPool", "gapless.cache.prefix_cache:PrefixCache"
BLOCKS = "gapless.cache.block_tables:BlockTables"
STEADY, PREPARE = "gapless.scheduler.steady:SteadyDecode", "gapless.runner.prepare:"
SAMPLE, ENGINE = "gapless.sampling.reference:", "gapless.engine.engine:Engine"


@dataclass(frozen=True)
class Edit:
    """``where`` is ``module:class``, with nothing behind the colon for a function of the module."""

    where: str
    function: str
    old: str
    new: str


@dataclass(frozen=True)
class Fault:
    """``harmless`` is the proof that no schedule shows it, for those that none does."""

    name: str
    rule: str
    edits: tuple[Edit, ...]
    harmless: str = ""
    seeds: tuple[int, ...] = ()  # of `random_workload` that show it, if no small workload does


def _edited(function: FunctionType, edits: list[Edit]) -> FunctionType:
    source = textwrap.dedent(inspect.getsource(function))
    for edit in edits:
        if source.count(edit.old) != 1:
            raise AssertionError(
                f"{edit.where}.{edit.function} holds {edit.old!r} {source.count(edit.old)} times, not once: the engine "
                "has changed, so change the fault"
            )
        source = source.replace(edit.old, edit.new)
    flags = __future__.annotations.compiler_flag
    names: dict[str, Any] = {}
    exec(compile(source, f"<{function.__qualname__} with a fault>", "exec", flags), function.__globals__, names)
    made: FunctionType = names[function.__name__]
    return made


@contextlib.contextmanager
def applied(fault: Fault) -> Iterator[Kernels | None]:
    """The engine with the fault. Gives the kernels if the fault lies in one of them: the caller hands them on."""
    by_function: dict[tuple[str, str], list[Edit]] = {}
    for edit in fault.edits:
        by_function.setdefault((edit.where, edit.function), []).append(edit)
    kernels: dict[str, FunctionType] = {}
    with contextlib.ExitStack() as undo:
        for (where, name), edits in by_function.items():
            module_name, _, class_name = where.partition(":")
            target: Any = importlib.import_module(module_name)
            if not class_name:
                kernels[name] = _edited(getattr(target, name), edits)
                continue
            target = getattr(target, class_name)
            original = target.__dict__[name]
            setattr(target, name, _edited(original, edits))
            undo.callback(setattr, target, name, original)
        yield _kernels(kernels)


def _kernels(made: dict[str, FunctionType]) -> Kernels | None:
    if not made:
        return None
    from proof.fast_kernels import KERNELS

    return Kernels(made.get("prepare", KERNELS.prepare), made.get("sample_and_store", KERNELS.sample))


def _one(where: str, function: str, old: str, new: str) -> tuple[Edit, ...]:
    return (Edit(where, function, old, new),)


DEPTH_LOOP = "range(depth)])"
D2H_COPY = 'device.copy_d2h(*slot.used_out(step.num_logits, bool(plan.features & Feature.LOGPROBS), counts), "d2h")'
H2D_RECORD, D2H_RECORD = "slot.h2d_done.record(device.h2d)", "slot.d2h_done.record(device.d2h)"
SHARE = "    for s in self._ring.slots:\n        s.{0} = self._ring.slots[0].{0}\n    self.state = "

RELEASE = "    self.blocks.release(row)\n"
STILL_SENT = f"    sent = int(self.blocks.sent[row])\n{RELEASE}    self.blocks.sent[row] = sent\n"
PLANNED = "    if not (states.preempted or builder.full)"

FAULTS = [
    # ---- events
    Fault(
        "compute does not wait for h2d_done",
        "events",
        _one(RUNNER, "launch", "slot.h2d_done.wait(device.compute)", "pass"),
    ),
    Fault(
        "d2h does not wait for compute_done",
        "events",
        _one(RUNNER, "_end", "slot.compute_done.wait(device.d2h)", "pass"),
    ),
    Fault("the host does not wait for d2h_done", "7", _one(RUNNER, "wait", "slot.d2h_done.synchronize()", "pass")),
    Fault(
        "h2d_done is recorded before the copy",
        "events",
        (
            Edit(RUNNER, "launch", "    device.copy_h2d(", f"    {H2D_RECORD}\n    device.copy_h2d("),
            Edit(RUNNER, "launch", "    slot.h2d_done.record(device.h2d)\n\n", "\n"),
        ),
    ),
    Fault(
        "h2d_done is recorded on the compute stream",
        "events",
        _one(RUNNER, "launch", "slot.h2d_done.record(device.h2d)", "slot.h2d_done.record(device.compute)"),
    ),
    Fault(
        "compute_done is recorded before the sampler",
        "events",
        (
            Edit(
                RUNNER, "_end", "    self.graphs.launch(",
                "    slot.compute_done.record(device.compute)\n    self.graphs.launch(",
            ),
            Edit(RUNNER, "_end", "    slot.compute_done.record(device.compute)\n\n", "\n"),
        ),
    ),
    Fault(
        "d2h_done is recorded before the copy",
        "events",
        _one(RUNNER, "_end", f"    {D2H_COPY}\n    {D2H_RECORD}\n", f"    {D2H_RECORD}\n    {D2H_COPY}\n"),
    ),
    Fault(
        "compute waits for the other slot's h2d_done",
        "events",
        _one(
            RUNNER, "launch", "slot.h2d_done.wait(device.compute)",
            "self._ring.slots[slot.index - 1].h2d_done.wait(device.compute)",
        ),
    ),
    Fault(
        "the host waits for the newest step, not the oldest",
        "7",
        _one(RUNNER, "wait", "slot.d2h_done.sync", "self._ring.slots[self._ring._next - 1].d2h_done.sync"),
        harmless="d2h is one FIFO stream: the newest step's copy ends after all older ones. Only the overlap is lost.",
    ),
    # ---- slots
    Fault("the ring is one slot short", "3", _one(RUNNER, "__init__", DEPTH_LOOP, "range(max(depth - 1, 1))])")),
    Fault(
        "one more step in flight than slots",
        "3",
        _one(ENGINE, "_loop", "len(in_flight) < self._depth", "len(in_flight) <= self._depth"),
    ),
    Fault(
        "the slot is filled after its copy was enqueued",
        "3",
        (
            Edit(
                RUNNER, "launch", '    with device.host_access(slot.filling, "fill"):\n',
                '    device.copy_h2d(slot.device, slot.host, "h2d")\n'
                '    with device.host_access(slot.filling, "fill"):\n',
            ),
            Edit(RUNNER, "launch", '    device.copy_h2d(*slot.used(used), "h2d")\n', ""),
        ),
    ),
    Fault(
        "all slots share one device twin",
        "2",
        _one(RUNNER, "__init__", "    self.state = ", SHARE.format("device")),
    ),
    Fault(
        "the output lies in the shared graph pool",
        "9",
        _one(RUNNER, "__init__", "    self.state = ", SHARE.format("out")),
    ),
    Fault("a view of pinned output is handed out", "2", _one(SLOT, "read", ".copy()", "")),
    # ---- persistent state
    Fault(
        "the token table is written on the H2D stream",
        "1",
        _one(
            RUNNER, "launch", "    slot.h2d_done.record(device.h2d)\n",
            "    n = min(plan.num_tokens, layout.carry - layout.input_ids)\n"
            "    to = int(plan.rows[0]) * self.layout.max_model_len + int(plan.starts[0])\n"
            "    n = min(n, int(plan.query_lens[0]), int((~plan.carry).sum()))\n"
            "    words = self.state.arena.words[to : to + n]\n"
            "    ids = slot.host[layout.input_ids : layout.input_ids + n]\n"
            '    device.copy_h2d(words, ids, "h2d table") if n else None\n'
            "    slot.h2d_done.record(device.h2d)\n",
        ),
    ),
    Fault(
        "padding tokens write block 1, not the null block",
        "9",
        _one(PREPARE, "prepare", ".long(), NULL_BLOCK)", ".long(), 1)"),
    ),
    Fault(
        "padding sequences name row 0, not the null row",
        "9",
        _one(RUNNER, "launch", "slot.fill(plan, layout, self.layout.null_row)", "slot.fill(plan, layout, 0)"),
        harmless="a padding sequence has no tokens, length 0 and no sample flag: its row is neither read nor written.",
    ),
    Fault(
        "the sampler stores a token for sequences that draw none",
        "8",
        _one(SAMPLE, "sample_and_store", "stored = flags & (token >= 0)", "stored = (token >= 0)"),
        harmless="the place is a prompt position, which the step that computes it writes first, or a generated one, "
        "whose token is drawn again and is the same (but for rounding, so the flag is needed on a real model).",
    ),
    # ---- carry-over
    Fault(
        "carried ids are taken by position in the previous batch",
        "8",
        (
            Edit(
                PREPARE, "prepare",
                "ids = torch.where(step.carry.bool(), arena.token_table[rows, positions], step.input_ids)",
                "last = prepare.__dict__.setdefault('last', None)\n"
                "    at = arena.token_table[last[0], last[1]] if last is not None else step.input_ids[:1]\n"
                "    ids = torch.where(step.carry.bool(), at[seq.clamp_max(len(at) - 1)], step.input_ids)",
            ),
            Edit(
                PREPARE, "prepare", "out.sample_positions.copy_(out.seq_lens)",
                "out.sample_positions.copy_(out.seq_lens)\n    prepare.last = (step.rows.long(), out.seq_lens.long())",
            ),
        ),
    ),
    Fault(
        "only the newest unknown id is carried",
        "8",
        _one(
            STATES, "launch", "carry = positions >= r.known[flat_rows]",
            "carry = (positions >= r.known[flat_rows]) & (positions == r.total[flat_rows] - 1)",
        ),
        seeds=(467,),
    ),
    Fault(
        "nothing is carried in a steady phase",
        "8",
        _one(
            STEADY, "next_plan", "known = None if self._in_flight else",
            "known = np.zeros(len(self._rows), np.int32) if self._in_flight else",
        ),
    ),
    # ---- rows
    Fault(
        "a row is given away before its last d2h",
        "4",
        (
            Edit(STATES, "release", "if self.rows.in_flight[row]:", "if False:"),
            Edit(ROWS, "release", "if self.in_flight[row]:", "if False:"),
        ),
    ),
    Fault(
        "the overrun of a finished request is not dropped",
        "6",
        _one(SCHEDULER, "_take", "drew = plan.draws & ~r.finished[plan.rows]", "drew = plan.draws.copy()"),
    ),
    Fault(
        "a finished request is finished again by an abort",
        "6",
        _one(SCHEDULER, "finish", "if row is not None and not self.rows.finished[row]:", "if row is not None:"),
        seeds=(3,),
    ),
    # ---- blocks
    Fault(
        "a preempted row's table is not sent again",
        "4",
        _one(STATES, "preempt", RELEASE, STILL_SENT),
    ),
    Fault(
        "a preempted row keeps its place in the step",
        "4",
        _one(SCHEDULER, "_schedule_decodes", "kept = np.isin(ready, states.running)", "kept = np.isin(ready, ready)"),
        seeds=(24,),
    ),
    Fault(
        "a new row keeps the block table of the one before",
        "4",
        _one(STATES, "finish", RELEASE, STILL_SENT),
    ),
    Fault(
        "a new block of a steady batch is not sent",
        "4",
        _one(BLOCKS, "append", "part[:, 1] = new", "part[:, 1] = 0"),
    ),
    Fault(
        "a request's blocks are freed when its last step is launched",
        "4",
        _one(
            SCHEDULER, "schedule", PLANNED,
            "    r, rows, ends = self.rows, plan.rows, plan.starts + plan.query_lens\n"
            "    for row in rows[(r.total[rows] == r.limit[rows]) & (ends == r.limit[rows] - 1)].tolist():\n"
            "        self.blocks.release(row)\n"
            "        r.blocks_hashed[row] = 10**6\n" + PLANNED,
        ),
        harmless="the last step reads them on the compute stream, a later owner writes them on the same stream, later.",
    ),
    Fault(
        "a block stays published when it gets a new owner",
        "5",
        (
            Edit(POOL, "allocate", "del by_key[keys[block]]", "pass"),
            Edit(POOL, "allocate", "keys[block] = ROOT", "pass"),
        ),
    ),
    Fault(
        "blocks of a window are freed too early",
        "4",
        _one(BLOCKS, "free_passed", "np.maximum(lowest + 1 - window, 0)", "np.maximum(lowest + size - window, 0)"),
    ),
    Fault(
        "all groups write where the first one does",
        "4",
        _one(PREPARE, "prepare", "out.slot_mapping.copy_(blocks * ", "out.slot_mapping.copy_(blocks[:1] * "),
    ),
    # ---- prefix cache
    Fault(
        "a hit lacks the first block of the window",
        "5",
        _one(PREFIX, "_longest", "end * self._size + 1 - window", "(end + 1) * self._size + 1 - window"),
    ),
    Fault(
        "a generated block is published at launch",
        "5",
        (
            Edit(PREFIX, "publish", "min(computed, int(r.known[row]))", "min(computed, int(r.total[row]))"),
            Edit(
                SCHEDULER, "schedule", PLANNED,
                "    states.prefixes.publish_generated(plan.rows.tolist())\n" + PLANNED,
            ),
        ),
        seeds=(129,),
    ),
    Fault(
        "a failed row's blocks stay in the prefix cache",
        "5",
        _one(STATES, "finish", "if failed:", "if False:"),
    ),
    Fault(
        "a block is published before its last token is computed",
        "5",
        _one(PREFIX, "publish", "min(computed, int(r.known[row]))", "(min(computed, int(r.known[row])) + size - 1)"),
    ),
    Fault(
        "a hit may leave nothing to compute",
        "5",
        _one(PREFIX, "hit", "(int(self._rows.known[row]) - 1) //", "int(self._rows.known[row]) //"),
        seeds=(194,),
    ),
    Fault(
        "the hash of a block leaves its parent out",
        "5",
        _one(
            PREFIX, "_hashes", "block_keys(hashes[-1] if have else self._root, contents, self._rows.cache_keys[row])",
            "[block_keys(self._root, [one], self._rows.cache_keys[row])[0] for one in contents]",
        ),
    ),
]  # fmt: skip
