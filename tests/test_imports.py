"""Imports point down or sideways, and what plans needs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rooms import FLOOR_OF, INSIDE, NEEDS_TORCH, PLANS

SOURCE = Path(__file__).parent.parent / "src"


def modules() -> list[Path]:
    return sorted((SOURCE / "gapless").rglob("*.py"))


def module_name(path: Path) -> str:
    parts = list(path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(name: str) -> bool:
    path = SOURCE.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def imports(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Line, absolute name, and whether it happens at import: not in a function, not for types only."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]

    def walk(node: ast.AST, at_import: bool) -> Iterator[tuple[int, str, bool]]:
        for child in ast.iter_child_nodes(node):
            now = at_import and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                now = False
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield child.lineno, alias.name, now
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else []
                source = ".".join([*base, *([child.module] if child.module else [])])
                for alias in child.names:  # `from gapless import llm` names a module too
                    whole = f"{source}.{alias.name}"
                    yield child.lineno, whole if is_module(whole) else source, now
            else:
                yield from walk(child, now)

    return walk(ast.parse(path.read_text(encoding="utf-8")), True)


def part(name: str) -> str | None:
    """``kv`` for ``gapless.cache.block_pool``; None for what is not a module of ours."""
    first, _, rest = name.partition(".")
    head = rest.split(".")[0]
    known = (SOURCE / "gapless" / head).is_dir() or (SOURCE / "gapless" / f"{head}.py").is_file()
    return head if first == "gapless" and head and known else None


def floor_inside(name: str) -> int | None:
    """Of a module in a room with floors of its own; the files that no floor names are the top."""
    _, room, *rest = [*name.split("."), ""]
    if room not in INSIDE or not rest[0]:
        return None
    return next((i for i, names in enumerate(INSIDE[room]) if rest[0] in names), len(INSIDE[room]))


@pytest.mark.parametrize("path", modules(), ids=module_name)
def test_imports_point_down(path: Path) -> None:
    name = module_name(path)
    own = part(name)
    if own is None:  # gapless/__init__.py hands out the public names of every room, the upper ones lazily
        above = [name for _, name, now in imports(path) if now and (p := part(name)) and FLOOR_OF[p] > 0]
        assert not above
        return
    assert own in FLOOR_OF, f"{own} is on no floor: give it its place in ROOMS"
    for line, other, _ in imports(path):
        room = part(other)
        if room is None:
            continue
        assert FLOOR_OF[room] <= FLOOR_OF[own], f"{path}:{line}: {own} imports {other}, which is above it"
        if room == own:
            here, there = floor_inside(name), floor_inside(other)
            assert here is None or there is None or there <= here, f"{path}:{line}: {name} imports {other}, above it"


def test_no_circle_of_imports() -> None:
    names = {module_name(path): path for path in modules()}
    uses = {
        name: {other for _, other, _ in imports(path) if other in names and other != name} - {"gapless"}
        for name, path in names.items()
    }
    done: list[str] = []
    while free := [name for name in uses if name not in done and not uses[name] - set(done)]:
        done += free
    assert not sorted(set(uses) - set(done)), "these import each other, or stand above some that do"


def test_few_files_lie_loose() -> None:
    loose = list((SOURCE / "gapless").glob("*.py"))
    assert len(loose) <= 7, "a new file belongs into a room"


def test_the_check_itself() -> None:
    assert part("gapless.cache.block_pool") == "cache"
    assert part("gapless.EngineConfig") is None
    assert part("numpy.random") is None
    pools = SOURCE / "gapless" / "cache" / "block_pools.py"
    assert any(name == "gapless.cache.block_pool" for _, name, _ in imports(pools))
    lazy = [(name, now) for _, name, now in imports(SOURCE / "gapless" / "engine" / "build.py") if "cuda" in name]
    assert lazy
    assert not any(now for _, now in lazy)


@pytest.mark.parametrize("path", modules(), ids=module_name)
def test_what_plans_imports_no_torch(path: Path) -> None:
    name = module_name(path)
    if part(name) in PLANS and name not in NEEDS_TORCH:
        heavy = {"torch", "transformers", "triton"}
        assert not [name for _, name, _ in imports(path) if name.split(".")[0] in heavy]


@pytest.mark.parametrize(
    "name",
    ["scheduler.scheduler", "engine.engine", "request.messages", "cli", "cli.generate", "text.outputs"],
)
def test_torch_stays_out(name: str) -> None:
    code = f"import sys, gapless.{name}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
