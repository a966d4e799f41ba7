"""The README's table of figures comes from the result files."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("results_table", ROOT / "tools" / "results_table.py")
assert spec is not None
assert spec.loader is not None
tool: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


def write(folder: Path, name: str, date: str, **row: Any) -> None:
    base = {"shape": "s", "workload": "mid", "depth": 2, "tokens_per_s": 10.0}
    base |= {"decode_ms_per_step": 2.0, "floor_ms": 1.0}
    environment = {"gpu": "G", "date": date, "commit": "abc", "driver": "5", "torch": "2", "transformers": "5"}
    data = {"environment": environment, "figures": [{**base, **row}]}
    (folder / name).write_text(json.dumps(data))


def test_the_newest_counts(tmp_path: Path) -> None:
    write(tmp_path, "b.json", "2026-01-01", tokens_per_s=1.0)
    write(tmp_path, "a.json", "2026-01-02", tokens_per_s=2.0, step_busy=0.999)
    write(tmp_path, "c.json", "2026-01-01", workload="long", depth=1, tokens_per_s=3.0)
    (tmp_path / "kernels.json").write_text(json.dumps([{"other": 1}]))
    text = tool.render(tool.newest(tmp_path))
    assert [line.split("|")[2].strip() for line in text.splitlines() if line.startswith("| s")] == ["long", "mid"]
    assert "99.90" in text
    assert "50.0" in text
    assert "driver 5" in text
    assert tool.render({}) == "No results yet."


def test_markers() -> None:
    begin, end = "<!-- x: made by tools/results_table.py -->", "<!-- end of x -->"
    text = f"a\n{begin}\nold\n{end}\nb\n"
    once = tool.updated(text, "x", "new")
    assert "old" not in once
    assert tool.updated(once, "x", "new") == once
    assert once.startswith("a\n")
    assert once.endswith("\nb\n")
    with pytest.raises(ValueError, match="needs one line"):
        tool.updated("no markers", "x", "new")


def test_the_documents_are_up_to_date() -> None:
    for path, text in tool.documents().items():
        assert path.read_text(encoding="utf-8") == text, "run python tools/results_table.py"
