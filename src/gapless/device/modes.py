"""PyTorch's modes of the calling thread, set aside while an engine is made or given weights.

A caller may stand in ``inference_mode``, ``autocast`` or another default device or dtype. Tensors that are made and
modules that are run there would differ for the rest of the engine's life. Its own threads begin with none of them; what
is global to the process (default dtype, deterministic algorithms) is put back at the end of the block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def plain_modes() -> Iterator[None]:
    """Within the block PyTorch behaves as in a fresh process."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device() != torch.device("cpu"):
            stack.enter_context(torch.device("cpu"))
        if (dtype := torch.get_default_dtype()) != torch.float32:
            stack.callback(torch.set_default_dtype, dtype)
            torch.set_default_dtype(torch.float32)
        if torch.are_deterministic_algorithms_enabled():
            warns = torch.is_deterministic_algorithms_warn_only_enabled()
            stack.callback(torch.use_deterministic_algorithms, True, warn_only=warns)
            torch.use_deterministic_algorithms(False)
        yield
