"""How much memory a process may still take, so that too much is refused in words and not by the kernel's killer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gapless.errors import ConfigError

if TYPE_CHECKING:
    import torch

GIB = 2**30
HOST_SPARE = 256 * 2**20
"""Left for what is not counted: activations, the interpreter, libraries."""


def host_available(root: Path = Path("/")) -> int | None:
    """Bytes that this process can still take: what the kernel says is available, or less where a control group limits.

    Not a share of a total: on a virtual machine whose memory grows with its use the total says little. None where the
    system tells nothing (it is no Linux).
    """
    try:
        text = (root / "proc/meminfo").read_text(encoding="ascii")
        words = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        free = int(words["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    return min([free, *_left_in_groups(root)])


def _left_in_groups(root: Path) -> Iterator[int]:
    """Of each control group with a limit, from this process's own up to the root; file cache in it can be dropped."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0" and not controllers:
            top, most, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top, most, used = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = top / path.lstrip("/")
        while True:
            left = _left(folder, most, used)
            if left is not None:
                yield left
            if folder == top or top not in folder.parents:
                break
            folder = folder.parent


def _left(folder: Path, most: str, used: str) -> int | None:
    try:
        limit = (folder / most).read_text(encoding="ascii").strip()
        if limit == "max":
            return None
        usage = int((folder / used).read_text(encoding="ascii"))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
        cache = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
        return max(int(limit) - usage + cache, 0)
    except (OSError, ValueError):
        return None  # another layout, as in a container that sees its own group as the root


def available_bytes(device: torch.device | None = None) -> int | None:
    """Bytes on a device that nobody has taken, without one on the host; None if that is not known."""
    if device is not None and device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    host = host_available()
    return None if host is None else max(host - HOST_SPARE, 0)


def require(device: torch.device | None, size: int, what: str, way: str) -> None:
    """Refuse what does not fit, before it is taken.

    Args:
        what: needs ``size`` bytes.
        way: what to do about it.

    Raises:
        ConfigError: with both numbers.
    """
    free = available_bytes(device)
    if free is not None and size > free:
        where = "this machine" if device is None or device.type == "cpu" else str(device)
        raise ConfigError(
            f"out of memory: {what} takes {size / GIB:.2f} GiB, and {free / GIB:.2f} GiB are available on {where}. "
            f"{way}"
        )
