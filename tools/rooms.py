"""The rooms of the package and the floors that they stand on, and the map of them in docs/architecture.md.

    python tools/rooms.py    writes the map as the tree is now

`tests/test_imports.py` holds the imports to it: they point down or sideways, never up.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "gapless"

ROOMS = [
    ["errors", "speculative_config", "config", "request", "device"],
    ["batch"],
    ["cache"],
    ["scheduler", "grammar"],
    ["attention", "sampling"],
    ["lora"],
    ["model"],
    ["speculative", "text"],
    ["runner"],
    ["engine"],
    ["llm", "async_llm"],
    ["cli", "__main__"],
    ["bench"],
    ["trace", "server"],
]
"""Floors from the bottom up, with the rooms on each. A room that is not here fails the test: give it its place."""
INSIDE = {
    "model": [
        ["ops", "base", "embedding", "token_rows", "python_state", "weights"],
        ["products"],
        ["parts"],
        ["hybrid", "lora_hooks"],
        ["run"],
    ],
}
"""The same for the folders in a room; its other files are above these."""
FLOOR_OF = {name: floor for floor, names in enumerate(ROOMS) for name in names}
PLANS = {"errors", "speculative_config", "config", "request", "batch", "cache", "scheduler", "grammar", "engine"}
"""Rooms that know no torch, but for the modules of `NEEDS_TORCH`."""
NEEDS_TORCH = {"gapless.batch.arena", "gapless.batch.slot_layout", "gapless.engine.build"}

BEGIN, END = "<!-- rooms: written by tools/rooms.py -->", "<!-- rooms: end -->"


def purpose(path: Path) -> str:
    """The first sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    sentence = re.split(r"(?<=\.)\s", " ".join(text.split("\n\n")[0].split()), maxsplit=1)[0]
    return sentence.rstrip(".").replace("``", "`")


def modules(room: Path) -> str:
    """Names of the modules below a folder; those of its folders in brackets behind theirs."""
    files = sorted(path.stem for path in room.glob("*.py") if path.name != "__init__.py")
    folders = sorted(path for path in room.iterdir() if (path / "__init__.py").is_file())
    inner = (f"`{folder.name}/` ({modules(folder)})" for folder in folders)
    return ", ".join([*(f"`{name}`" for name in files), *inner])


def room_map() -> str:
    """The table, from the top floor down."""
    lines = ["| floor | room | what it is | modules |", "|---|---|---|---|"]
    for floor, names in reversed(list(enumerate(ROOMS))):
        for name in names:
            room = SOURCE / name
            if room.is_dir():
                lines.append(f"| {floor} | `{name}/` | {purpose(room / '__init__.py')} | {modules(room)} |")
            else:
                lines.append(f"| {floor} | `{name}.py` | {purpose(SOURCE / f'{name}.py')} | |")
    return "\n".join(lines)


def updated(document: str) -> str:
    """The document with the map of now between its marks."""
    before, rest = document.split(BEGIN)
    return f"{before}{BEGIN}\n{room_map()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    architecture = ROOT / "docs" / "architecture.md"
    architecture.write_text(updated(architecture.read_text(encoding="utf-8")), encoding="utf-8")
