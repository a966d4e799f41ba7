"""What lies in a model's folder, looked at before anything is loaded: its config, and the tables of its weight files.

A file that is cut, empty or missing is named here, with the tensor where it ends. No torch.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from gapless.errors import ConfigError

INDEX = "model.safetensors.index.json"
MAX_HEADER = 100 * 2**20
"""Bytes of the table at the head of a file of safetensors; the format's own limit."""
ADAPTER_CONFIG = "adapter_config.json"


def read_json(path: Path, model: str) -> dict[str, Any]:
    """An object of JSON.

    Raises:
        ConfigError: naming the file and the place where it breaks.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model={model!r}: {path.name} cannot be read: {error}. Fetch or write it again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"model={model!r}: {path.name} holds {type(value).__name__}, not a JSON object")
    return value


def read_config(folder: Path, model: str) -> dict[str, Any]:
    """The ``config.json`` of a model's folder.

    Raises:
        ConfigError: there is none, it cannot be read, or the folder is an adapter's.
    """
    if (folder / ADAPTER_CONFIG).is_file():
        base = read_json(folder / ADAPTER_CONFIG, model).get("base_model_name_or_path")
        raise ConfigError(
            f"model={model!r}: the folder is an adapter ({ADAPTER_CONFIG}), not a model. Give its base model"
            f"{f', {base!r},' if base else ''} with enable_lora=True, and load the adapter with load_lora (the "
            "command: --lora NAME=FOLDER)"
        )
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"model={model!r}: the folder has no config.json, so it is not a Hugging Face model")
    return read_json(path, model)


def check_weight_files(folder: Path, model: str) -> None:
    """Refuse a folder whose weight files are not all there and whole.

    Raises:
        ConfigError: naming the file, and the first tensor that it lacks.
    """
    files = sorted(folder.glob("*.safetensors"))
    if (folder / INDEX).is_file():
        places = read_json(folder / INDEX, model).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise ConfigError(f"model={model!r}: {INDEX} has no weight_map from tensors to files")
        named = sorted(set(places.values()))
        missing = [name for name in named if not (folder / name).is_file()]
        if missing:
            lost = [tensor for tensor, name in places.items() if name in missing]
            raise ConfigError(
                f"model={model!r}: {len(missing)} of the {len(named)} files that {INDEX} names are missing: "
                f"{some(missing)}; with them {len(lost)} tensors: {some(lost)}"
            )
        files = [folder / name for name in named]
    if not files:
        raise ConfigError(f"model={model!r}: the folder has no *.safetensors; only this format of weights is read")
    for path in files:
        check_safetensors(path, model)


def check_safetensors(path: Path, model: str) -> None:
    """Refuse a file that is no safetensors, or whose data end before its table says.

    Raises:
        ConfigError: naming the file and the tensor.
    """
    where = f"model={model!r}: {path.name}"
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
        if length > min(MAX_HEADER, size - 8):
            raise ConfigError(f"{where} ({size} bytes) cannot be read as safetensors: it has no whole table of tensors")
        try:
            table = json.loads(file.read(length))
            ends = {name: int(entry["data_offsets"][1]) for name, entry in table.items() if name != "__metadata__"}
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{where} cannot be read as safetensors: its table of tensors is broken") from error
    cut = [name for name, end in ends.items() if end > size - 8 - length]
    if cut:
        raise ConfigError(
            f"{where} is cut: it has {size} bytes of {8 + length + max(ends.values())}, so that {len(cut)} of its "
            f"{len(ends)} tensors are not whole: {some(cut)}. Fetch it again"
        )


def some(names: list[str], most: int = 5) -> str:
    """The first few of many names, and how many more there are."""
    names = sorted(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
