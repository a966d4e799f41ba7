"""The documents name what exists, and all of it."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

import lines
import rooms

ROOT = Path(__file__).parent.parent

SOURCE = ROOT / "src" / "gapless"
DOCS = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in sorted(ROOT.glob("docs/*.md"))}
DOCS["CONTRIBUTING.md"] = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
ARCHITECTURE = DOCS["docs/architecture.md"]
MODULE = re.compile(r"`([\w/]+\.py)`")


def without_blocks(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.S)


@cache
def all_tests() -> set[str]:
    found = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        functions = (n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))
        found |= {f"{path.name}::{f.name}" for f in functions}
    return found


@cache
def members() -> dict[str, set[str]]:
    """Methods and attributes of each class of the package."""
    found: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                names = found.setdefault(node.name, set())
                for n in ast.walk(node):
                    if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)):
                        names.add(n.name)
                    elif isinstance(n, ast.Name):
                        names.add(n.id)
                    elif isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store):
                        names.add(n.attr)
    return found


def test_what_a_step_passes_through_can_be_read() -> None:
    counts = lines.core()
    assert len(counts) <= lines.MAX_FILES
    assert sum(counts.values()) <= lines.MAX_LINES, "run python tools/lines.py; move what is optional behind a seam"


def test_the_map_of_rooms_is_of_now() -> None:
    assert rooms.updated(ARCHITECTURE) == ARCHITECTURE, "run python tools/rooms.py"


@pytest.mark.parametrize("name", DOCS)
def test_files_and_modules_exist(name: str) -> None:
    bare = name == "docs/architecture.md"  # elsewhere a name without a folder may be a user's file
    for path in [p for p in MODULE.findall(DOCS[name]) if bare or "/" in p]:
        places = (ROOT / path, SOURCE / path, *SOURCE.glob(f"*/{path}"))
        assert any(place.exists() for place in places), f"{name} names {path}"
    for path in re.findall(r"\.venv/bin/python (?:-m pytest )?(\S+\.py)|^ +python (\S+\.py)", DOCS[name], re.M):
        assert (ROOT / "".join(path)).exists(), f"{name} runs {path}"


@pytest.mark.parametrize("name", DOCS)
def test_named_tests_exist(name: str) -> None:
    named = set(re.findall(r"`(test_\w+\.py::\w+)`", DOCS[name]))
    assert named <= all_tests(), f"{name} names {sorted(named - all_tests())}"


def test_every_pitfall_has_a_test() -> None:
    rows = re.findall(r"^\| (?!what can|-)(.*) \|$", DOCS["docs/pitfalls.md"], re.M)
    assert len(rows) >= 28
    for row in rows:
        assert re.search(r"`test_\w+\.py::\w+`$", row), row


def test_every_rule_has_a_proof() -> None:
    rules = re.split(r"^\*\*\d+\. ", ARCHITECTURE.split("## The ten ownership rules")[1].split("\n## ")[0], flags=re.M)
    assert len(rules) == 11
    for rule in rules[1:]:
        assert "\nKept in `" in rule
        assert re.search(r"`test_\w+\.py::\w+`", rule)


@pytest.mark.parametrize("name", DOCS)
def test_named_members_exist(name: str) -> None:
    for whole in re.findall(r"`([A-Z]\w+\.\w+)(?:\(\))?`", without_blocks(DOCS[name])):
        owner, member = whole.split(".")
        assert member in members().get(owner, set()), f"{name} names {whole}"


@pytest.mark.parametrize("name", DOCS)
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", DOCS[name]):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        place = (ROOT / name).parent / path if path else ROOT / name
        assert place.exists(), f"{name} links to {target}"
        if anchor:
            heads = re.findall(r"^#+ (.*)$", place.read_text("utf-8"), re.M)
            anchors = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in anchors, f"{name} links to {target}"


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in re.findall(r"^    make (\w+)", DOCS["CONTRIBUTING.md"], re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_dependencies_are_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    text = DOCS["docs/dependencies.md"]
    tables = re.split(r"^## ", text, flags=re.M)
    needs, extras = (next(part for part in tables if part.startswith(head)) for head in ("What the library", "Extras"))

    def listed(part: str) -> set[str]:
        cells = re.findall(r"^\| ([^|]*`[^|]*)\|", part, re.M)
        return {name for cell in cells for name in re.findall(r"`([\w-]+)`", cell)}

    def plain(requirements: list[str]) -> set[str]:
        return {re.match(r"[\w-]+", requirement)[0] for requirement in requirements}  # type: ignore[index]

    assert listed(needs) == plain(project["dependencies"])
    optional = [r for requirements in project["optional-dependencies"].values() for r in requirements]
    assert listed(extras) == plain(optional)


def test_what_is_imported_is_explained() -> None:
    known = set(re.findall(r"`([\w-]+)`", DOCS["docs/dependencies.md"])) | {"gapless"}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names.append(node.module)
            outside = {n.split(".")[0] for n in names} - set(sys.stdlib_module_names)
            assert outside <= known, f"{path}: {sorted(outside - known)}"


def test_each_entry_of_the_log_has_its_parts() -> None:
    index, *entries = re.split(r"^## ", DOCS["docs/LOG.md"], flags=re.M)[1:]
    assert index.startswith("Index\n")
    assert entries
    for entry in entries:
        head = entry.splitlines()[0]
        assert re.match(r"\d{4}-\d\d-\d\d\. \S", head), head
        places = [entry.find(f"**{part}.**") for part in ("Prediction", "Measurement", "Outcome")]
        assert -1 not in places, head
        assert places == sorted(places), head
