"""StepRunner: what the engine's side asks of the runner's, in this process or in another.

All arguments and results are plain data: arrays, plans, names, and tensors where weights travel. No function and no
object of the engine goes over, so that a call can be sent; what a call gives back to be named later (a launched step,
a checked update) is opaque to the engine. Threads: the loop's, unless a method says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from gapless.batch.plan import StepPlan
from gapless.batch.row_layout import I32
from gapless.device.counts import CopyCounts
from gapless.runner.keys import Key

if TYPE_CHECKING:
    from gapless.lora.bank import LoraWeights
    from gapless.model.weights import Named


class StepResult(Protocol):
    """A finished step. ``busy_ms`` is from its first to its last work on the device, ``idle_ms`` the gap before it,
    ``mask_wait_ms`` a gap within it, which is not in ``busy_ms``."""

    @property
    def plan(self) -> StepPlan: ...
    @property
    def tokens(self) -> I32: ...
    @property
    def records(self) -> I32 | None: ...
    @property
    def busy_ms(self) -> float: ...
    @property
    def idle_ms(self) -> float: ...
    @property
    def mask_wait_ms(self) -> float: ...


@dataclass(slots=True)
class MaskBuffer:
    """Lent to be filled: bits ``masks [R, W]``, the first of them those of the rows ``rows [n]``, to be set."""

    masks: I32
    rows: I32


class StepRunner(Protocol):
    """See the module."""

    # ---- the step: `launch` and `sample` never block, `wait` is the only call that does

    @property
    def copies(self) -> CopyCounts:
        """Copies and waits so far, counted on."""
        ...

    def launch(self, plan: StepPlan) -> Any:
        """Enqueue a step; one with grammars up to its forward. Gives what names the step."""
        ...

    def masks(self, step: Any) -> AbstractContextManager[MaskBuffer]:
        """Where the masks of a step that awaits them go."""
        ...

    def sample(self, step: Any) -> None:
        """Enqueue the rest of a step whose masks are there."""
        ...

    def wait(self, step: Any) -> StepResult:
        """Block until the step's tokens are on the host."""
        ...

    # ---- adapters

    @property
    def lora_slots(self) -> int:
        """How many adapters fit; 0 if requests cannot have any."""
        ...

    def lora_modules(self) -> list[str]:
        """Names of all that can have an adapter. Any thread."""
        ...

    def check_lora(self, adapter: Mapping[str, LoraWeights]) -> None:
        """Any thread.

        Raises:
            AdapterError: it does not fit this model.
        """
        ...

    def stage_lora(self, adapter: Mapping[str, LoraWeights]) -> None:
        """Any thread, one at a time: bring a checked adapter near the device. Blocks until the one before has left."""
        ...

    def load_lora(self, slot: int) -> None:
        """Enqueue the copy of the staged adapter to ``slot``, from 1 on. Never blocks."""
        ...

    # ---- weights and memory; while no step is in flight, but for `prepare_weights`

    @property
    def owns_weights(self) -> bool:
        """The model is this engine's alone."""
        ...

    def prepare_weights(self, weights: Named | None) -> Any:
        """Check new weights, on the thread whose CUDA streams they were made on. Gives what names the update.

        Raises:
            WeightError: naming the tensor; nothing has changed.
        """
        ...

    def update_weights(self, update: Any) -> None:
        """Put checked weights in place."""
        ...

    def sleep(self, level: int) -> None:
        """Give the KV pool and the graphs back; with level 2 the weights too, if they are the engine's own."""
        ...

    def wake(self) -> None:
        """Take all of it again.

        Raises:
            ConfigError: the memory is not there; it sleeps on.
        """
        ...

    # ---- start and end

    def graph_keys(self) -> Sequence[Key]:
        """All that is to be captured, the largest first; nothing where steps are not captured."""
        ...

    def capture(self, keys: Sequence[Key]) -> None:
        """Compile and capture.

        Raises:
            MemoryError: the device's memory does not suffice.
        """
        ...

    def memory(self) -> tuple[int, int]:
        """Bytes of the device's memory that nobody has, and all of them."""
        ...

    def thread_context(self) -> AbstractContextManager[None]:
        """Entered by the loop's thread once."""
        ...

    def close(self) -> None:
        """Finish what is in flight; threads and memory come back. Safe to call twice."""
        ...
