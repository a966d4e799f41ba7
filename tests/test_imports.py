"""Imports point down or sideways, and what plans needs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
LAYERS = [
    {"checks", "config", "errors", "request", "speculative_config", "structured", "plan", "messages"},
    {"device"},
    {"kv"},
    {"grammar", "drafting", "outbox", "prefill", "prefix", "roster", "row_blocks", "row_words", "rows", "scheduler"}
    | {"stats", "steady", "step_builder", "versions", "volume", "waiting"},
    {"model", "attention", "sampling", "speculative", "lora"},
    {"pipeline"},
    {"control", "holding", "engine", "build"},
    {"adapters", "client", "llm", "async_llm", "pace", "text", "cli", "__main__"},
    {"bench", "coverage", "trace", "server", "top", "verify"},
]
"""From the bottom up. A module or package that is not here fails the test: give it its place."""
LAYER_OF = {name: layer for layer, names in enumerate(LAYERS) for name in names}
NO_TORCH = LAYERS[0] | LAYERS[2] | LAYERS[3] | {"control", "holding", "engine"}


def modules() -> list[Path]:
    return sorted((SOURCE / "gapless").rglob("*.py"))


def module_name(path: Path) -> str:
    parts = list(path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


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
                    yield child.lineno, whole if source == "gapless" else source, now
            else:
                yield from walk(child, now)

    return walk(ast.parse(path.read_text(encoding="utf-8")), True)


def part(name: str) -> str | None:
    """``kv`` for ``gapless.kv.pool``; None for what is not a module of ours."""
    first, _, rest = name.partition(".")
    head = rest.split(".")[0]
    known = (SOURCE / "gapless" / head).is_dir() or (SOURCE / "gapless" / f"{head}.py").is_file()
    return head if first == "gapless" and head and known else None


@pytest.mark.parametrize("path", modules(), ids=module_name)
def test_imports_point_down(path: Path) -> None:
    own = part(module_name(path))
    if own is None:  # gapless/__init__.py hands out the public names of every layer, the upper ones lazily
        above = [name for _, name, now in imports(path) if now and (p := part(name)) and LAYER_OF[p] > 0]
        assert not above
        return
    assert own in LAYER_OF, f"{own} is in no layer: give it its place in LAYERS"
    for line, name, _ in imports(path):
        other = part(name)
        if other is not None:
            assert LAYER_OF[other] <= LAYER_OF[own], f"{path}:{line}: {own} imports {name}, which is above it"


def test_the_check_itself() -> None:
    assert part("gapless.kv.pool") == "kv"
    assert part("gapless.EngineConfig") is None
    assert part("numpy.random") is None
    assert any(name == "gapless.kv.pool" for _, name, _ in imports(SOURCE / "gapless" / "row_blocks.py"))
    lazy = [(name, now) for _, name, now in imports(SOURCE / "gapless" / "build.py") if "cuda" in name]
    assert lazy
    assert not any(now for _, now in lazy)


@pytest.mark.parametrize("path", modules(), ids=module_name)
def test_what_plans_imports_no_torch(path: Path) -> None:
    if part(module_name(path)) in NO_TORCH:
        heavy = {"torch", "transformers", "triton"}
        assert not [name for _, name, _ in imports(path) if name.split(".")[0] in heavy]


@pytest.mark.parametrize("name", ["scheduler", "engine", "messages", "cli", "cli.generate", "text.outputs"])
def test_torch_stays_out(name: str) -> None:
    code = f"import sys, gapless.{name}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
