"""What all tests share: the small real model, and skips that are seen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from live_server import LiveServer


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct; skips the test if `make model` has not brought it."""
    from gapless.model.load.smollm2 import smollm2_folder

    folder = smollm2_folder()
    if not folder.exists():
        pytest.skip("SmolLM2 is not in the cache: `make model` brings it")
    return folder


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """A server of a tiny model, with the usual options."""
    from live_server import serving

    with serving() as live:
        yield live


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` are skipped where there is no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Torch keeps to one thread in each worker of ``pytest -n``: more would fight for the cores."""
    if hasattr(item.config, "workerinput"):
        import torch

        torch.set_num_threads(1)
