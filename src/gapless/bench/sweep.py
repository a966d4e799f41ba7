"""Running workloads on engines of several depths over one set of weights, and on peers, in one process."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from gapless.bench.environment import read_bandwidth
from gapless.bench.measure import Figures, measure, warm
from gapless.bench.models import floor_ms
from gapless.bench.workloads import Workload
from gapless.config import EngineConfig
from gapless.engine.client import EngineClient

logger = logging.getLogger("gapless")


@dataclass(slots=True)
class Subject:
    """What is measured.

    Attributes:
        model: a ``transformers`` model, on its device.
        name: of the shape or of the model.
        options: of `EngineConfig` that the user gave.
        random_weights: then there is nothing that a parity probe could find.
    """

    model: Any
    name: str
    device: torch.device
    options: dict[str, Any] = field(default_factory=dict)
    random_weights: bool = True

    def config(self, loads: Sequence[Workload], depth: int) -> EngineConfig:
        """Just large enough for the workloads, where the user did not say otherwise."""
        options = {
            "device": str(self.device),
            "max_num_seqs": max(load.batch for load in loads),
            "max_model_len": max(load.longest for load in loads),
            **({"check_model": False} if self.random_weights else {}),
            **self.options,
            "pipeline_depth": depth,
        }
        options.setdefault("max_num_batched_tokens", max(8192, options["max_num_seqs"]))
        return EngineConfig.from_dict(options)

    @contextmanager
    def engine(self, loads: Sequence[Workload], depth: int) -> Iterator[EngineClient]:
        """An engine that is closed, and its memory given back, at the end."""
        start = time.perf_counter()
        client = EngineClient(self.model, self.config(loads, depth), tokenizer=None)
        logger.info("depth %d: engine ready in %.1f s", depth, time.perf_counter() - start)
        try:
            yield client
        finally:
            client.close()
            del client
            free()


def free() -> None:
    """Give the memory of what is gone back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


Row = dict[str, Any]


def row_of(figures: Figures, subject: Subject, load: Workload) -> Row:
    """Figures as they go into a table and a result file."""
    floor = floor_ms(subject.model, load, read_bandwidth(str(subject.device)))
    return {**figures.to_dict(), "shape": subject.name, "floor_ms": floor, "rate": load.rate}


def sweep(
    subject: Subject, loads: Sequence[Workload], depths: Sequence[int], show: Callable[[Row], None] = lambda row: None
) -> list[Row]:
    """Every workload at every depth; an engine for each depth.

    Prompts differ between the runs of a workload, so that none is found in the prefix cache.
    """
    rows = []
    for depth in depths:
        with subject.engine(loads, depth) as client:
            for load in loads:
                warm(client, load)
                rows.append(row_of(measure(client, load), subject, load))
                show(rows[-1])
    return rows
