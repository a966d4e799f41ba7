"""LoadedAdapters: which LoRA adapters an engine has, under which names, and in which slots.

Called from any thread. Two promises:

    A slot that some request still runs with, or waits to, is never overwritten. Unloading takes the name away at once;
    requests that were accepted before run to their end with the old weights, and only then is the slot free. Whether
    they have ended is asked of the scheduler when a slot is needed, on the loop's thread; nothing counts along.

    Nothing waits for a request: where no slot is free, loading is refused, and the message says what to do.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from gapless.engine.engine import Engine
from gapless.errors import AdapterError, RequestError, did_you_mean
from gapless.lora.folder import read_adapter
from gapless.request.request import LoraRef
from gapless.runner.base import StepRunner
from gapless.scheduler.scheduler import Scheduler

OFF = "this engine was started without enable_lora=True"


class LoadedAdapters:
    """See the module.

    Args:
        runner: of the engine.
        allow_missing: names or patterns of modules that an adapter may lack.
    """

    def __init__(
        self, engine: Engine, scheduler: Scheduler, runner: StepRunner, allow_missing: Sequence[str] = ()
    ) -> None:
        self._allow_missing = allow_missing
        self._engine = engine
        self._scheduler = scheduler
        self._runner = runner
        self._slots = runner.lora_slots
        self._ids = itertools.count(1)
        self._names: dict[str, LoraRef] = {}
        self._unloaded: list[LoraRef] = []  # their slots are free as soon as no request runs with them
        self._loading = threading.Lock()  # one at a time: there is one staging buffer
        self._lock = threading.Lock()  # of the two collections above; also held from a request's check to its hand-over

    @property
    def names(self) -> list[str]:
        """Of what is loaded, in the order of loading."""
        with self._lock:
            return list(self._names)

    def load(self, name: str, path: str | Path) -> None:
        """Read a PEFT folder and put it on the device, while requests run.

        Raises:
            AdapterError: the folder, its options or its shapes do not do, the name is taken, or no slot is free.
            EngineDeadError, EngineClosedError: no more work is taken.
        """
        runner = self._runner
        if not self._slots:
            raise AdapterError(f"adapter {name!r} cannot be loaded: {OFF}")
        if not isinstance(name, str) or not name:
            raise AdapterError(f"name={name!r} is not allowed: a string that is not empty")
        if not isinstance(path, (str, os.PathLike)):
            raise AdapterError(f"path={path!r} is not allowed: a folder that PEFT saved")
        self._engine.raise_if_dead()
        with self._loading:
            self._refuse_taken(name)
            adapter = read_adapter(path, runner.lora_modules(), self._allow_missing)
            try:
                runner.check_lora(adapter)
            except AdapterError as error:
                raise AdapterError(f"adapter {str(path)!r}: {error}") from None
            with self._lock:
                slot = self._free_slot(self._slots)
            runner.stage_lora(adapter)
            self._engine.call(lambda: runner.load_lora(slot))
            with self._lock:
                self._names[name] = LoraRef(next(self._ids), slot, name)

    def unload(self, name: str) -> None:
        """Take the name away at once. Requests that run with the adapter, or wait to, are not disturbed; its slot can
        be used again when the last of them has ended.

        Raises:
            AdapterError: there is no such adapter.
            EngineDeadError, EngineClosedError: the engine has ended.
        """
        self._engine.raise_if_dead()
        with self._lock:
            ref = self._names.pop(name, None)
            if ref is None:
                raise AdapterError(f"adapter {name!r} cannot be unloaded: {self._unknown(name)}")
            self._unloaded.append(ref)

    @contextlib.contextmanager
    def locked(self, names: Sequence[str | None]) -> Iterator[list[LoraRef | None]]:
        """The adapters of these names. Requests with them must be handed to the engine before the block ends: so none
        of them can be overlooked when a slot is sought."""
        if not any(name is not None for name in names):
            yield [None] * len(names)
            return
        with self._lock:
            yield [self._names.get(name) if isinstance(name, str) else None for name in names]

    def refuse_unknown(self, name: object) -> None:
        """Raise `RequestError` for a name that is not loaded; for use within `locked`."""
        if not self._slots:
            raise RequestError(f"lora={name!r} is not allowed: {OFF}")
        if not isinstance(name, str):
            raise RequestError(f"lora={name!r} is not allowed: the name of a loaded adapter, or None")
        if name not in self._names:
            raise RequestError(f"lora={name!r}: {self._unknown(name)}")

    def _unknown(self, name: str) -> str:
        loaded = ", ".join(map(repr, self._names)) or "none"
        return f"no adapter of this name is loaded.{did_you_mean(str(name), self._names)} Loaded: {loaded}"

    def _refuse_taken(self, name: str) -> None:
        with self._lock:
            if name in self._names:
                raise AdapterError(f"adapter {name!r} is loaded already: unload it first, or choose another name")

    def _free_slot(self, slots: int) -> int:
        """A slot that no adapter has and no request runs with."""
        if self._unloaded:
            # No request can be on its way meanwhile: the lock is held, and the inbox keeps its order.
            used = self._engine.call(lambda: {r.lora.id for r in self._scheduler.open_requests() if r.lora is not None})
            self._unloaded = [ref for ref in self._unloaded if ref.id in used]
        taken = {ref.slot for ref in (*self._names.values(), *self._unloaded)}
        for slot in range(1, slots + 1):
            if slot not in taken:
                return slot
        still = "".join(f", and {ref.name!r}, which is unloaded but has requests" for ref in self._unloaded)
        raise AdapterError(
            f"max_loras={slots} adapters are loaded: {', '.join(map(repr, self._names)) or 'none'}{still}. Unload one, "
            "wait for its requests, or start the engine with a larger max_loras"
        )
