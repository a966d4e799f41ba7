"""Sleep and wake of a runner: its graphs and the KV pool go, and come back at other addresses.

Called on the loop's thread while no step is in flight. The rows (tokens, block tables, parameters) and the slots stay:
they are small, and a request goes on from them. What the cache held is lost, so the scheduler must have taken all
blocks back before. Nothing is compiled at wake, and almost nothing runs: a capture alone is cheap.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch

from gapless.errors import ConfigError
from gapless.model.weights import Weights
from gapless.runner.runner import Runner


def put_to_sleep(runner: Runner, weights: Weights | None = None) -> None:
    """Give the KV pool and the graphs back, and the ``weights`` if they are given."""
    with _exclusive(runner):
        if weights is not None:
            weights.to_host()  # first: it can fail, and nothing has changed then
        runner.drop_memory()
        runner.device.trim()


def wake(runner: Runner, weights: Weights | None = None) -> None:
    """Take all of it again and capture.

    Raises:
        ConfigError: the memory is not there; the runner sleeps on, and this may be tried again.
    """
    with _exclusive(runner):
        moved = weights is not None and weights.asleep
        try:
            if weights is not None:
                weights.to_device()
            runner.take_memory()
        except BaseException as error:
            runner.drop_memory()
            if moved and weights is not None:
                weights.to_host()
            runner.device.trim()
            if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
                raise ConfigError(
                    f"wake() found too little memory on {runner.device.torch_device}, and the engine sleeps on: "
                    f"{str(error).splitlines()[0]} Free memory, and call wake() again"
                ) from error
            raise


@contextlib.contextmanager
def _exclusive(runner: Runner) -> Iterator[None]:
    """No other engine captures meanwhile, and no collector frees a graph in the middle of a capture."""
    if runner.device.torch_device.type != "cuda":
        yield
        return
    from gapless.device.cuda import EXCLUSIVE

    with EXCLUSIVE:
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()
