"""The peer that is always at hand: the continuous batching of ``transformers``, by its public interface.

Sync and async are its own two loops; async needs a GPU. Written for 5.17 to 5.24, whose configurations differ in names
only: an option that a version does not have is left out.
"""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from gapless.bench.measure import WARM_TOKENS, Figures
from gapless.bench.peer_attention import attention
from gapless.bench.sweep import Row, Subject, free, row_of
from gapless.bench.workloads import Workload
from gapless.errors import BenchmarkError

BLOCK_SIZE = 256
logger = logging.getLogger("gapless")


def compare(
    subject: Subject, loads: Sequence[Workload], peers: Sequence[str], attention_name: str, show: Callable[[Row], None]
) -> list[Row]:
    """Every workload on every peer. ``transformers`` is both of its loops where both can run."""
    modes: list[str] = []
    for peer in peers:
        if peer == "transformers":
            modes += ["sync", "async"] if subject.device.type == "cuda" else ["sync"]
        else:
            modes.append(peer.removeprefix("transformers-"))
    rows = []
    for mode in dict.fromkeys(modes):
        for load in loads:
            if load.rate is not None:
                raise BenchmarkError("--rate and --compare do not go together yet: the peer gets all requests at once")
            with Peer(subject, load, mode, attention_name).started() as engine:
                rows.append(row_of(engine.measure(), subject, load))
            show(rows[-1])
    return rows


class Peer:
    """One workload on one of its loops.

    Args:
        mode: ``sync`` or ``async``.
        attention_name: see `gapless.bench.peer_attention.attention`.
    """

    def __init__(self, subject: Subject, load: Workload, mode: str, attention_name: str = "auto") -> None:
        if mode == "async" and subject.device.type != "cuda":
            raise BenchmarkError("transformers' asynchronous batching needs CUDA: use transformers-sync")
        import transformers

        self.name = f"transformers {transformers.__version__} {mode}"
        self._subject, self._load, self._mode = subject, load, mode
        self._attention = attention_name
        self._manager: Any = None
        self.steps = 0

    @contextmanager
    def started(self) -> Iterator[Peer]:
        """Its engine, warmed up, and stopped at the end."""
        with torch.no_grad(), attention(self._subject.model, self._attention, self._subject.device):
            self._manager = manager = self._make()
            try:
                start = time.perf_counter()
                if self._subject.device.type == "cuda":
                    manager.warmup()
                manager.start()
                self.run(self._load.limited(WARM_TOKENS), 100)
                chosen = self._subject.model.config._attn_implementation
                logger.info("%s (%s): ready in %.1f s", self.name, chosen, time.perf_counter() - start)
                yield self
            finally:
                manager.stop(block=True, timeout=60, hard_stop=True)
                manager.destroy()
                self._manager = manager = None
                free()

    def measure(self, load: Workload | None = None) -> Figures:
        """As `gapless.bench.measure.measure`; of a part of the workload, if one is given."""
        load = load or self._load
        prefill = self.run(load, 1, new_tokens=1)[0] if load.uniform else None
        self.steps = 0
        wall, tokens = self.run(load, 0)
        decode = None
        if prefill is not None and load.output_lens[0] > 1:
            decode = 1e3 * (wall - prefill) / (load.output_lens[0] - 1)
        return Figures(
            workload=load.name,
            depth={"sync": 1, "async": 2}[self._mode],
            wall_s=wall,
            output_tokens=tokens,
            steps=self.steps,
            prefill_s=prefill,
            decode_ms_per_step=decode,
            mean_ms_per_step=1e3 * wall / self.steps if self.steps else None,
            engine=self.name,
        )

    def submit(self, load: Workload, salt: int, new_tokens: int | None = None) -> list[str]:
        """Hand all requests in."""
        return [
            self._manager.add_request(ids, max_new_tokens=new_tokens or n, eos_token_id=-1)
            for ids, n in zip(load.prompts(salt), load.output_lens, strict=True)
        ]

    def run(self, load: Workload, salt: int, new_tokens: int | None = None) -> tuple[float, int]:
        """Seconds and new tokens of one run."""
        start = time.perf_counter()
        tokens = self.collect(self.submit(load, salt, new_tokens))
        wall = time.perf_counter() - start
        expected = sum(new_tokens or n for n in load.output_lens)
        if tokens != expected:
            raise BenchmarkError(f"{self.name} made {tokens} tokens, not {expected}")
        return wall, tokens

    def finished_any(self) -> bool:
        """Whether a request has ended that nobody has collected."""
        return self._manager.get_result(timeout=0.001) is not None

    def collect(self, requests: Sequence[str]) -> int:
        """Wait for all of them; their new tokens."""
        waiting, tokens = set(requests), 0
        while waiting:
            result = self._manager.get_result(timeout=1.0)
            if result is None:
                if not self._manager.is_running():
                    raise BenchmarkError(f"{self.name} stopped: see its log")
                continue
            if result.is_finished() and result.request_id in waiting:
                waiting.discard(result.request_id)
                if result.error is not None:
                    raise BenchmarkError(f"{self.name}: {result.error}")
                tokens += len(result.generated_tokens)
        return tokens

    def _make(self) -> Any:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        load, known = self._load, inspect.signature(ContinuousBatchingConfig).parameters
        flash = "flash" in str(self._subject.model.config._attn_implementation)
        budget = 8192 if flash else 256  # without a flash kernel it builds a mask of tokens x cache
        blocks = sum(
            math.ceil((p + o + 1) / BLOCK_SIZE) + 1 for p, o in zip(load.prompt_lens, load.output_lens, strict=True)
        )
        options = {
            "num_blocks": blocks,
            "page_size" if "page_size" in known else "block_size": BLOCK_SIZE,
            "max_batch_tokens": max(budget, load.batch),
            "max_requests_per_batch": load.batch,
            "use_async_batching": self._mode == "async",
            "auto_switch_to_flash": False,
            "safety_margin": 0.0,  # there are blocks for every request
        }
        if flash and self._attention in ("auto", "builtin-flash"):
            options["max_blocks_per_request"] = 0  # its decode path needs a kernel that reads the paged cache
        sampling = {"do_sample": True, "temperature": load.temperature} if load.temperature else {"do_sample": False}
        generation = GenerationConfig(max_new_tokens=max(load.output_lens), eos_token_id=-1, **sampling)
        return self._subject.model.init_continuous_batching(
            generation_config=generation,
            continuous_batching_config=ContinuousBatchingConfig(**{k: v for k, v in options.items() if k in known}),
        )
