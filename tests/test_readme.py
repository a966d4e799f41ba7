"""The README quotes the code, and what it names exists."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

import pytest

from gapless.cli.generate import add_arguments
from gapless.cli.parser import Parser
from proof.mutations import FAULTS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_loop_is_the_code() -> None:
    source = (ROOT / "src" / "gapless" / "engine" / "engine.py").read_text(encoding="utf-8")
    (node,) = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and n.name == "_loop")
    lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
    quote = f"```python\n{textwrap.dedent(chr(10).join(lines))}\n```"
    assert quote in README, "`make readme` quotes it anew"
    assert len(lines) <= 40, "the loop fits on a screen"


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#]+)\)", README))
def test_links_lead_somewhere(target: str) -> None:
    assert (ROOT / target).exists()


@pytest.mark.parametrize("command", re.findall(r"^    make (\w+)", README, re.M))
def test_make_targets_exist(command: str) -> None:
    assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text(), re.M)


@pytest.mark.parametrize("line", re.findall(r"gapless generate (--model .*)", README))
def test_commands_parse(line: str) -> None:
    parser = Parser(prog="gapless generate")
    add_arguments(parser)
    words = [quoted or plain for quoted, plain in re.findall(r'"([^"]+)"|(\S+)', line)]
    arguments = parser.parse(words, "prompts")
    assert arguments.file is None or (ROOT / arguments.file).exists()


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, re.S))
def test_python_blocks_compile(block: str) -> None:
    compile(block, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_numbers_of_architectures_are_those_of_the_tables() -> None:
    models = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    head, equal, *others = (
        [kind for row in re.findall(r"^\| .*\|$", part, re.M) for kind in re.findall(r"`([^`]+)`", row)]
        for part in re.split(r"^## ", models.partition("<!-- coverage")[2], flags=re.M)
    )
    right = {*equal, *(kind for kind in head if f"`{kind}` | equal" in models)}
    known = {kind for kinds in (head, equal, *others) for kind in kinds}
    assert f"of {len(known)} architectures of `transformers` {len(right)} were tried and equal" in README
    refused, untried = map(len, others)
    assert f"{refused} are refused by name, {untried} could not be tried" in README


def test_number_of_faults_is_that_of_the_table() -> None:
    assert f"{len(FAULTS)} deliberate faults" in README
