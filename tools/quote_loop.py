"""Put `Engine._loop` as it is now into the README's first block of Python."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent


def loop_source() -> str:
    """The code of the loop, dedented."""
    source = (ROOT / "src" / "gapless" / "engine" / "engine.py").read_text(encoding="utf-8")
    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    (node,) = (function for function in functions if function.name == "_loop")
    return textwrap.dedent("\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno]))


if __name__ == "__main__":
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    block = f"```python\n{loop_source()}\n```"
    readme.write_text(re.sub(r"```python\n.*?```", lambda _: block, text, count=1, flags=re.S), encoding="utf-8")
