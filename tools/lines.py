"""How much there is to read: the files that a step passes through, and the rest of the package.

    python tools/lines.py

`CORE` is what one must read to know what a step does: the loop, the scheduler, the batch, the blocks, the runner, a
slot, its graphs. What is optional is not in it (drafts, grammars, scores of prompts, adapters, sleep, the prefix
cache), and neither are containers and sizes that one may look up (the queue, statistics, words of parameters, keys of
graphs, what fits in the pools).
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent / "src" / "gapless"
CORE = (
    "engine/engine.py",
    "scheduler/scheduler.py",
    "scheduler/row_states.py",
    "scheduler/prefill.py",
    "scheduler/step_builder.py",
    "scheduler/steady.py",
    "scheduler/step_message.py",
    "cache/block_tables.py",
    "cache/block_pool.py",
    "batch/plan.py",
    "batch/row_layout.py",
    "batch/row_table.py",
    "batch/slot_layout.py",
    "runner/runner.py",
    "runner/slot.py",
    "runner/graphs.py",
    "runner/state.py",
    "runner/prepare.py",
)
"""In the order in which a step passes through them."""
MAX_LINES, MAX_FILES = 3000, 18


def lines(path: Path) -> int:
    """Of a file, blank ones and documentation among them."""
    return len(path.read_text().splitlines())


def core() -> dict[str, int]:
    """Lines of each file of `CORE`."""
    return {name: lines(ROOT / name) for name in CORE}


def main() -> None:
    """Print the core by file, and the rest by room."""
    of_core = core()
    for name, count in of_core.items():
        print(f"{count:6}  {name}")
    print(f"{sum(of_core.values()):6}  core, {len(of_core)} files (at most {MAX_LINES} in {MAX_FILES})")
    rest: dict[str, int] = {}
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        if name not in of_core:
            room = name.split("/")[0]
            rest[room] = rest.get(room, 0) + lines(path)
    print(f"{sum(rest.values()):6}  rest: " + ", ".join(f"{room} {count}" for room, count in sorted(rest.items())))


if __name__ == "__main__":
    main()
