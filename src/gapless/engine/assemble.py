"""From a worker to an engine: divide the memory, capture, wire scheduler, runner and loop.

A worker is one process's share of the runner's side: a model on a device. It has said what its model is, and opens a
runner once it is told how many blocks there are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gapless.batch.row_layout import RowLayout
from gapless.batch.row_params import COMBINATIONS
from gapless.cache.groups import KVGroup
from gapless.cache.sizing import given_blocks, split_memory
from gapless.cache.spec import LayerSpec, StateSpec, format_key
from gapless.config import EngineConfig
from gapless.device.memory import available_bytes, require
from gapless.engine.engine import Engine
from gapless.errors import ConfigError
from gapless.request.messages import StepMessage
from gapless.runner.base import StepRunner
from gapless.runner.keys import Key
from gapless.scheduler.scheduler import Scheduler

logger = logging.getLogger("gapless")

GIB = 2**30
CPU_CACHE_BYTES = GIB
"""What a KV cache takes of a laptop's memory unless told otherwise: more, up to four times as much, if a request of
the full length needs it."""
SPARE_BYTES = 512 * 2**20
"""Left free on a GPU beside the share that the user gave: for the driver, and for what a capture still takes."""

Progress = Callable[[list[Key]], Any]


class ModelFacts(Protocol):
    """What the engine's side knows of a model; a `CausalModel` has it."""

    name: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class Worker(Protocol):
    """See the module. All of it is plain data, but for `open`.

    Attributes:
        model: of which it is.
        config: with what the model and the device fill in.
        specs: of all layers that keep a past, those of a draft model too.
        groups, layout: made from these.
        embeds_width: of the embeddings that prompts may bring; 0 if they cannot.
        on_gpu: whether the cache takes a device's own memory.
    """

    model: Any
    config: EngineConfig
    specs: tuple[LayerSpec, ...]
    groups: tuple[KVGroup, ...]
    layout: RowLayout
    embeds_width: int
    on_gpu: bool

    def open(self, num_blocks: int | tuple[int, ...]) -> StepRunner:
        """A runner with so many blocks in each group's pool.

        Raises:
            ConfigError, MemoryError: its buffers cannot be had.
        """
        ...


@dataclass(slots=True)
class Built:
    """An engine, not started yet, and what it was built from."""

    engine: Engine
    scheduler: Scheduler
    runner: StepRunner
    model: Any  # `ModelFacts`; None once the engine is closed
    config: EngineConfig
    layout: RowLayout
    num_blocks: tuple[int, ...]  # of each group of layers, the null blocks among them
    embeds_width: int = 0  # of the embeddings that prompts may bring


def assemble(
    worker: Worker,
    publish: Callable[[StepMessage], None],
    on_death: Callable[[BaseException], None],
    *,
    check: bool = False,
    progress: Progress = iter,
) -> Built:
    """An engine over ``worker``; see `gapless.engine.build.build`."""
    config = worker.config
    if not worker.on_gpu:
        _refuse_rows(worker)
    num_blocks = _num_blocks(worker)
    if not worker.on_gpu:
        _refuse_cache(worker, num_blocks)
    runner = worker.open(num_blocks)
    try:
        _capture(runner, progress, config.pipeline_depth)
        scheduler = Scheduler(config, worker.layout, num_blocks, prefix_root=format_key(worker.specs))
        engine = Engine(scheduler, runner, config.pipeline_depth, publish, on_death, check=check)
    except BaseException:
        runner.close()
        raise
    _tell_of_memory(worker, scheduler)
    return Built(engine, scheduler, runner, worker.model, config, worker.layout, num_blocks, worker.embeds_width)


def _row_bytes(worker: Worker) -> int:
    """Of what a host keeps for each row, all rows together: words on both sides, logits, recurrent states."""
    layout, vocabulary = worker.layout, int(worker.model.vocab_size)
    states = sum(spec.bytes_per_row for spec in worker.specs if isinstance(spec, StateSpec))
    return 8 * layout.num_words + layout.num_rows * (4 * vocabulary + states)


def _refuse_rows(worker: Worker) -> None:
    """A GPU says itself that memory is short; the kernel of a host would end the process."""
    config = worker.config
    what = f"the state of max_num_seqs={config.max_num_seqs} rows of {config.max_model_len} tokens"
    require(None, _row_bytes(worker), what, "Lower max_num_seqs or max_model_len")


def _refuse_cache(worker: Worker, num_blocks: tuple[int, ...]) -> None:
    blocks = sum(n * group.bytes_per_token for n, group in zip(num_blocks, worker.groups, strict=True))
    size = worker.config.block_size * blocks + _row_bytes(worker)
    what = f"the KV cache of {num_blocks[0]} blocks, with the rows,"
    require(None, size, what, "Lower kv_cache_memory_bytes or num_kv_blocks, or leave them out")


def _num_blocks(worker: Worker) -> tuple[int, ...]:
    """Blocks of each group's pool, the null blocks among them."""
    config, layout, groups = worker.config, worker.layout, worker.groups
    sizes = {
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "block_size": config.block_size,
    }
    useful = layout.max_num_seqs * layout.max_blocks + 1  # every row at full length
    if config.num_kv_blocks is not None:
        return given_blocks(groups, config.num_kv_blocks, **sizes)
    what = "kv_cache_memory_bytes"
    if config.kv_cache_memory_bytes is not None:
        budget = config.kv_cache_memory_bytes
    elif worker.on_gpu:
        budget, what = _free_after_trial(worker), "gpu_memory_utilization"
    else:
        one = (layout.max_blocks + 1) * config.block_size * sum(group.bytes_per_token for group in groups)
        budget = min(max(CPU_CACHE_BYTES, one), 4 * CPU_CACHE_BYTES)
        if (free := available_bytes()) is not None:
            budget = min(budget, free // 4)
    counts = split_memory(groups, max(budget, 0), **sizes, most=useful)
    if min(counts) < 2:
        size = config.block_size * sum(group.bytes_per_token for group in groups)
        raise ConfigError(
            f"{what} leaves {budget / GIB:.2f} GiB for the KV cache, but one block of {config.block_size} tokens takes "
            f"{size / GIB:.3f} GiB. Raise {what}, or lower max_num_batched_tokens={config.max_num_batched_tokens} or "
            f"max_num_seqs={config.max_num_seqs}"
        )
    return counts


def _free_after_trial(worker: Worker) -> int:
    """Bytes for the KV pool: capture the largest graphs on a tiny pool, see what they took, and drop them."""
    config, runner = worker.config, None
    try:
        runner = worker.open(2)
        keys = list(runner.graph_keys())
        largest = [key for key in keys if key.part == "sample" and key.features == COMBINATIONS[-1]][:1]
        runner.capture(keys[:1] + [key for key in keys if key.decode_only][:1] + largest)
        free, total = runner.memory()
    except MemoryError as error:
        raise ConfigError(
            f"out of memory at the largest step, of {config.max_num_batched_tokens} tokens and {config.max_num_seqs} "
            f"requests. Lower max_num_batched_tokens (try {config.max_num_batched_tokens // 2}) or max_num_seqs (try "
            f"{max(config.max_num_seqs // 2, 1)})"
        ) from error
    finally:
        if runner is not None:
            runner.close()
    used = total - free
    return int(total * config.gpu_memory_utilization) - used - SPARE_BYTES


def _capture(runner: StepRunner, progress: Progress, depth: int) -> None:
    keys = list(runner.graph_keys())
    if not keys:
        return
    logger.info("capturing %d graphs; a new machine compiles their kernels first, for up to a minute", len(keys))
    start, (before, _) = time.perf_counter(), runner.memory()
    try:
        for key in progress(keys):
            runner.capture([key])
    except MemoryError as error:
        raise ConfigError(
            "out of memory while capturing: lower gpu_memory_utilization by 0.05, or use enforce_eager"
        ) from error
    after, _ = runner.memory()
    logger.info(
        "%d graphs for %d slots in %.1f s, %.2f GiB",
        len(keys) * depth, depth, time.perf_counter() - start, (before - after) / GIB,
    )  # fmt: skip


def _tell_of_memory(worker: Worker, scheduler: Scheduler) -> None:
    config, specs, layout = worker.config, worker.specs, worker.layout
    longest = config.max_model_len or 0
    for group, pool in zip(worker.groups, scheduler.blocks.pools, strict=True):
        tokens, size = pool.capacity * config.block_size, config.block_size * group.bytes_per_token
        kept = longest if group.window is None else group.window
        logger.info(
            "KV cache%s in %s: %d tokens in %d blocks of %d, %.2f GiB; %.1f requests of the full %d tokens fit at once",
            "" if group.window is None else f" of {len(group.layers)} layers with a window", _formats(specs, group),
            tokens, pool.capacity, config.block_size, pool.num_blocks * size / GIB, tokens / kept, kept,
        )  # fmt: skip
    if state := sum(spec.bytes_per_row for spec in specs if isinstance(spec, StateSpec)):
        logger.info("recurrent state: %.2f GiB for %d rows", layout.num_rows * state / GIB, config.max_num_seqs)


def _formats(specs: Sequence[LayerSpec], group: KVGroup) -> str:
    """In what the group's layers keep the past."""
    return " and ".join(sorted({specs[i].dtype for i in group.layers})) or "nothing"
