"""How many bytes a checkpoint's weights will take, from the headers of its files: before anything is read."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import torch

from gapless.device.memory import require

_WIDTH = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_FLOATS = ("F64", "F32", "F16", "BF16")


def checkpoint_bytes(folder: Path, dtype: torch.dtype | None) -> int:
    """Bytes of all tensors of a folder's safetensors; 0 where a header cannot be read, which loading will tell.

    Args:
        dtype: that floating-point numbers become; None keeps their own.
    """
    total = 0
    for file in _files(folder):
        try:
            with file.open("rb") as stream:
                (length,) = struct.unpack("<Q", stream.read(8))
                header = json.loads(stream.read(min(length, 2**28)))
            for name, entry in header.items():
                if name != "__metadata__":
                    width = _WIDTH.get(entry["dtype"], 1)
                    if dtype is not None and entry["dtype"] in _FLOATS:
                        width = dtype.itemsize
                    total += width * math.prod(entry["shape"])
        except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError):
            return 0
    return total


def _files(folder: Path) -> list[Path]:
    """Those that ``transformers`` reads: the ones of the index, or the one file; others may hold the same again."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        try:
            return [folder / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
        except (ValueError, KeyError, TypeError, AttributeError):
            return []
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))


def refuse_too_large(source: str, dtype: torch.dtype | None, device: torch.device) -> None:
    """Raise `ConfigError` if the weights of a folder, or of a name that is in the Hub's cache, do not fit."""
    folder = Path(source)
    if not folder.is_dir():
        from transformers.utils import cached_file

        try:
            cached = cached_file(source, "config.json", local_files_only=True)
        except (OSError, ValueError):
            return
        if not isinstance(cached, str):
            return
        folder = Path(cached).parent
    smaller = "a smaller model" if dtype in (torch.float16, torch.bfloat16) else "dtype='bfloat16' or a smaller model"
    require(device, checkpoint_bytes(folder, dtype), f"the weights of {source}", f"Take {smaller}, or free memory")
