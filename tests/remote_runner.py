"""A runner in a process of its own: every call of `StepRunner` goes there as bytes, and its result comes back so.

`Proxy` is what the engine's side holds. `launch` and `sample` are sent and not answered, so that steps are in flight as
ever; what went wrong in them is told at the next answer. `serve` is the other end: it has model, device and runner.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from gapless.batch.plan import StepPlan
from gapless.config import EngineConfig
from gapless.device.base import DeviceError
from gapless.device.counts import CopyCounts
from gapless.engine.assemble import Built, assemble
from gapless.engine.build import LocalWorker
from gapless.runner.base import MaskBuffer
from gapless.runner.keys import Key

FACTS = ("config", "specs", "groups", "layout", "embeds_width", "on_gpu")


@dataclasses.dataclass
class Facts:
    name: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


@dataclasses.dataclass
class Result:
    plan: StepPlan
    tokens: Any
    records: Any
    busy_ms: float
    idle_ms: float
    mask_wait_ms: float


def serve(connection: Connection, config: EngineConfig) -> None:
    """The process of the runner, from its first to its last call."""
    from engines import model

    torch.set_num_threads(1)
    worker = LocalWorker(model(), config, torch.device("cpu"))
    facts = Facts(worker.model.name, worker.model.vocab_size, worker.model.eos_token_ids)
    connection.send_bytes(pickle.dumps((facts, *(getattr(worker, name) for name in FACTS))))
    runner = worker.open(pickle.loads(connection.recv_bytes()))
    steps: dict[int, Any] = {}
    updates: list[Any] = []
    failed: BaseException | None = None

    def sample(number: int, rows: Any, masks: Any) -> None:
        with runner.masks(steps[number]) as lent:
            lent.masks[: len(rows)], lent.rows = masks, rows
        runner.sample(steps[number])

    def wait(number: int) -> tuple[Any, ...]:
        r = runner.wait(steps.pop(number))
        return r.tokens, r.records, r.busy_ms, r.idle_ms, r.mask_wait_ms, dataclasses.astuple(runner.copies)

    def prepare(weights: Any) -> int:
        updates.append(runner.prepare_weights(weights))
        return len(updates) - 1

    silent: dict[str, Callable[..., Any]] = {
        "launch": lambda number, plan: steps.update({number: runner.launch(plan)}),
        "sample": sample,
    }
    answered: dict[str, Callable[..., Any]] = {
        "wait": wait,
        "prepare_weights": prepare,
        "update_weights": lambda number: runner.update_weights(updates[number]),
    }
    with runner.thread_context():
        while True:
            name, arguments = pickle.loads(connection.recv_bytes())
            if name == "close":
                break
            answer: tuple[bool, Any]
            try:
                if failed is not None:
                    raise failed
                if name in silent:
                    silent[name](*arguments)
                    continue
                found = getattr(runner, name) if name not in answered else answered[name]
                answer = True, found(*arguments) if callable(found) else found
            except BaseException as error:
                if name in silent:
                    failed = error
                    continue
                answer = False, error
            connection.send_bytes(pickle.dumps(answer))
    runner.close()


class Proxy:
    """Implements `StepRunner`."""

    def __init__(self, connection: Connection, process: Any, mask_shape: tuple[int, int]) -> None:
        self.process = process
        self._connection, self._mask_shape = connection, mask_shape
        self._lock = threading.Lock()  # calls come from several threads
        self._steps: dict[int, StepPlan] = {}
        self._filled: dict[int, tuple[Any, Any]] = {}
        self.copies = CopyCounts()
        self.lora_slots: int = self._ask("lora_slots")
        self.owns_weights: bool = self._ask("owns_weights")

    def _send(self, name: str, *arguments: Any) -> None:
        try:
            self._connection.send_bytes(pickle.dumps((name, arguments)))
        except OSError as error:
            raise DeviceError("the runner's process is gone") from error

    def _ask(self, name: str, *arguments: Any) -> Any:
        with self._lock:
            self._send(name, *arguments)
            try:
                fine, value = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError) as error:
                raise DeviceError("the runner's process is gone") from error
        if not fine:
            raise value
        return value

    def launch(self, plan: StepPlan) -> int:
        self._steps[plan.step] = plan
        with self._lock:
            self._send("launch", plan.step, plan)
        return plan.step

    @contextlib.contextmanager
    def masks(self, step: int) -> Iterator[MaskBuffer]:
        lent = MaskBuffer(np.zeros(self._mask_shape, np.int32), np.zeros(0, np.int32))
        yield lent
        self._filled[step] = lent.rows, lent.masks[: len(lent.rows)]

    def sample(self, step: int) -> None:
        with self._lock:
            self._send("sample", step, *self._filled.pop(step))

    def wait(self, step: int) -> Result:
        *result, copies = self._ask("wait", step)
        for field, value in zip(dataclasses.fields(CopyCounts), copies, strict=True):
            setattr(self.copies, field.name, value)
        return Result(self._steps.pop(step), *result)

    def lora_modules(self) -> list[str]:
        names: list[str] = self._ask("lora_modules")
        return names

    def check_lora(self, adapter: Any) -> None:
        self._ask("check_lora", adapter)

    def stage_lora(self, adapter: Any) -> None:
        self._ask("stage_lora", adapter)

    def load_lora(self, slot: int) -> None:
        self._ask("load_lora", slot)

    def prepare_weights(self, weights: Any) -> int:
        number: int = self._ask("prepare_weights", None if weights is None else dict(weights))
        return number

    def update_weights(self, update: int) -> None:
        self._ask("update_weights", update)

    def sleep(self, level: int) -> None:
        self._ask("sleep", level)

    def wake(self) -> None:
        self._ask("wake")

    def graph_keys(self) -> list[Key]:
        keys: list[Key] = self._ask("graph_keys")
        return keys

    def capture(self, keys: Sequence[Key]) -> None:
        self._ask("capture", keys)

    def memory(self) -> tuple[int, int]:
        found: tuple[int, int] = self._ask("memory")
        return found

    def thread_context(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def close(self) -> None:
        with contextlib.suppress(DeviceError):
            self._send("close")
        self.process.join(20)
        self.process.kill()
        self._connection.close()


class RemoteWorker:
    """Implements `Worker`."""

    layout: Any

    def __init__(self, config: EngineConfig) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, config), daemon=True)
        self._process.start()
        theirs.close()  # so that its death is the end of the pipe
        facts = pickle.loads(self._connection.recv_bytes())
        self.model, *rest = facts
        vars(self).update(zip(FACTS, rest, strict=True))

    def open(self, num_blocks: int | tuple[int, ...]) -> Proxy:
        self._connection.send_bytes(pickle.dumps(num_blocks))
        return Proxy(self._connection, self._process, (self.layout.max_num_seqs, self.layout.mask_words))


def build(model: Any, config: EngineConfig, publish: Any, on_death: Any, **options: Any) -> Built:
    """In place of `gapless.engine.build.build`; the other process makes its own model."""
    return assemble(RemoteWorker(config), publish, on_death, check=True)
