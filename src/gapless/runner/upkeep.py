"""Upkeep: what a runner does between steps. Its adapters and weights change, and its memory goes and comes back.

Called while no step is in flight, but for what is prepared on another thread: `prepare_weights`, and adapters until
`load_lora`, which the compute stream orders.
"""

from __future__ import annotations

from collections.abc import Mapping

from gapless.device.base import NOTHING, Device
from gapless.device.modes import plain_modes
from gapless.errors import AdapterError, WeightError
from gapless.lora.bank import LoraWeights
from gapless.model.adapter import TransformersModel
from gapless.model.weights import Named, Weights, WeightUpdate
from gapless.runner.graphs import Graphs
from gapless.runner.lora_memory import LoraMemory
from gapless.runner.sleep import Sleep
from gapless.runner.state import State


class Upkeep:
    """See the module. The steps are `gapless.runner.runner.Runner`'s, which makes all of these."""

    device: Device
    state: State
    graphs: Graphs
    weights: Weights | None
    _sleep: Sleep

    # ---- adapters -------------------------------------------------------------------------------------------------

    @property
    def lora(self) -> LoraMemory | None:
        """The adapters, if requests may run with them."""
        return self.state.lora

    @property
    def lora_slots(self) -> int:
        """How many adapters fit."""
        return 0 if self.lora is None else self.lora.bank.slots

    def lora_modules(self) -> list[str]:
        """See `AdapterBank.modules`."""
        return self._adapters.bank.modules

    def check_lora(self, adapter: Mapping[str, LoraWeights]) -> None:
        """See `AdapterBank.check`."""
        self._adapters.bank.check(adapter)

    def stage_lora(self, adapter: Mapping[str, LoraWeights]) -> None:
        """See `LoraMemory.stage`."""
        with plain_modes():
            self._adapters.stage(adapter)

    def load_lora(self, slot: int) -> None:
        """See `LoraMemory.load`."""
        self._adapters.load(slot)

    @property
    def _adapters(self) -> LoraMemory:
        if self.lora is None:
            raise AdapterError("this engine was started without enable_lora=True")
        return self.lora

    # ---- weights and memory, while no step is in flight -----------------------------------------------------------

    @property
    def owns_weights(self) -> bool:
        """No caller shares them."""
        return self.weights is not None and self.weights.owned

    def prepare_weights(self, weights: Named | None) -> WeightUpdate:
        """See `Weights.prepare`; for another thread."""
        if self.weights is None:
            if weights is not None:
                kind = type(self.graphs.model).__name__
                raise WeightError(f"{kind} is no transformers model: change its weights yourself")
            return WeightUpdate(())
        with plain_modes():
            return self.weights.prepare(weights, follow=self._reads_modules)

    @property
    def _reads_modules(self) -> bool:
        """Every step runs the Python of the model's own modules."""
        return isinstance(self.graphs.model, TransformersModel) and not self.graphs.shapes.capture

    def update_weights(self, update: WeightUpdate) -> None:
        """On the compute stream, and waited for."""
        if self.weights is not None and self.weights.asleep:
            raise WeightError("the weights are on the host since sleep(level=2): call wake() first")
        self.device.launch(update.apply, NOTHING, "weights")
        self.device.synchronize()

    def sleep(self, level: int) -> None:
        """See `gapless.runner.sleep`."""
        self._sleep.sleep(level)

    def wake(self) -> None:
        """See `gapless.runner.sleep`."""
        self._sleep.wake()
