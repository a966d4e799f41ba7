"""A GGUF file, or all files of a split one, as values and tensors; what is cut, missing or no GGUF is named."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gapless.errors import ConfigError
from gapless.model.load.files import some

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GgufFile:
    """What a file holds.

    Attributes:
        path: of the file, the first of several.
        architecture: ``general.architecture``.
        values: by key; a list for an array.
        tensors: by name: what ``gguf.dequantize`` takes, ``(data, type)``.
    """

    path: Path
    architecture: str
    values: dict[str, Any]
    tensors: dict[str, tuple[Any, Any]]


def read_gguf(path: Path) -> GgufFile:
    """Read the tables of a file, and of its other parts; the data of tensors are mapped, not read.

    Raises:
        ConfigError: naming the file, and the tensor where it ends.
    """
    first = _read(path)
    count = int(first.values.get("split.count") or 1)
    paths = _parts(path, count) if count > 1 else [path]
    parts = [first if part == path else _read(part) for part in paths]
    tensors: dict[str, tuple[Any, Any]] = {}
    for part in parts:
        tensors |= part.tensors
    expected = first.values.get("split.tensors.count")
    if count > 1 and expected not in (None, len(tensors)):
        raise ConfigError(f"model={str(path)!r}: its {count} files hold {len(tensors)} tensors, not {expected}")
    head = parts[0]
    architecture = head.values.get("general.architecture")
    if not isinstance(architecture, str):
        raise ConfigError(f"model={str(path)!r}: the file has no general.architecture")
    kind = head.values.get("general.type", "model")
    if kind != "model":
        raise ConfigError(f"model={str(path)!r}: general.type={kind!r} is not allowed: only a model is read")
    return GgufFile(paths[0], architecture, head.values, tensors)


def _parts(path: Path, count: int) -> list[Path]:
    match = _PART.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise ConfigError(
            f"model={str(path)!r}: the file is one of {count}, but its name does not end in -00001-of-{count:05}.gguf, "
            "by which the others would be found"
        )
    paths = [path.with_name(f"{match[1]}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise ConfigError(f"model={str(path)!r}: {len(missing)} of its {count} files are missing: {some(missing)}")
    return paths


def _read(path: Path) -> GgufFile:
    import gguf

    where = f"model={str(path)!r}"

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
            for field in fields:
                _, name, _, dims, kind, offset = field.parts
                elements, width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind[0])]
                size = 1
                for dim in dims.tolist():
                    size *= dim
                if start_offs + int(offset[0]) + size // elements * width > len(self.data):
                    raise ConfigError(
                        f"{where}: the file is cut: it ends before tensor {bytes(name).decode('utf-8', 'replace')} "
                        "does. Fetch it again"
                    )
            super()._build_tensors(start_offs, fields)

    try:
        reader = Reader(path)
        values = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {str(t.name): (t.data, t.tensor_type) for t in reader.tensors}
    except ConfigError:
        raise
    except Exception as error:  # a broken table leads the reader anywhere
        why = str(error) or type(error).__name__
        raise ConfigError(f"{where}: cannot be read as GGUF: {why}. Fetch it again") from error
    return GgufFile(path, "", values, tensors)
