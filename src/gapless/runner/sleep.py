"""Sleep and wake of a runner: its graphs and the KV pool go, and come back at other addresses.

Called on the loop's thread while no step is in flight. The rows (tokens, block tables, parameters) and the slots stay:
they are small, and a request goes on from them. What the cache held is lost, so the scheduler must have taken all
blocks back before. Nothing is compiled at wake, and almost nothing runs: a capture alone is cheap.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from gapless.device.base import Device
from gapless.errors import ConfigError
from gapless.model.weights import Weights
from gapless.runner.graphs import Graphs
from gapless.runner.recapture import recapture
from gapless.runner.state import State


class Sleep:
    """See the module.

    Args:
        device, state, graphs: of the runner.
        weights: of its model, or None.
    """

    def __init__(self, device: Device, state: State, graphs: Graphs, weights: Weights | None) -> None:
        self._device, self._state, self._graphs, self._weights = device, state, graphs, weights

    def sleep(self, level: int) -> None:
        """Give the KV pool and the graphs back, and with level 2 the weights."""
        with _exclusive(self._device):
            if self._weights is not None and level == 2:
                self._weights.to_host()  # first: it can fail, and nothing has changed then
            self._drop()

    def wake(self) -> None:
        """Take all of it again and capture.

        Raises:
            ConfigError: the memory is not there; the runner sleeps on, and this may be tried again.
        """
        weights = self._weights
        with _exclusive(self._device):
            moved = weights is not None and weights.asleep
            try:
                if weights is not None:
                    weights.to_device()
                self._state.take_pools()
                recapture(self._graphs)
            except BaseException as error:
                if moved and weights is not None:
                    self._drop(weights)
                else:
                    self._drop()
                if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
                    raise ConfigError(
                        f"wake() found too little memory on {self._device.torch_device}, and the engine sleeps on: "
                        f"{str(error).splitlines()[0]} Free memory, and call wake() again"
                    ) from error
                raise

    def recapture(self) -> None:
        """Capture anew what was captured, whose forwards have changed."""
        with _exclusive(self._device):
            self._device.synchronize()
            self._graphs.drop()
            recapture(self._graphs)

    def _drop(self, weights: Weights | None = None) -> None:
        self._device.synchronize()
        self._graphs.drop()
        self._state.drop_pools()
        if weights is not None:
            weights.to_host()
        self._device.trim()


@contextlib.contextmanager
def _exclusive(device: Device) -> Iterator[None]:
    """No other engine captures meanwhile, and no collector frees a graph in the middle of a capture."""
    if device.torch_device.type != "cuda":
        yield
        return
    from gapless.device.cuda import EXCLUSIVE, no_collection

    with EXCLUSIVE, no_collection():
        yield
