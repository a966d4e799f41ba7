"""Outcomes as the tables of docs/models.md, and back."""

from __future__ import annotations

import re
from collections.abc import Iterable

from architectures.compare import Outcome

MAIN = {
    "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3", "phi3": "Phi-3",
    "olmo2": "OLMo 2", "granite": "Granite", "gemma2": "Gemma 2", "gemma3_text": "Gemma 3", "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3-MoE", "gpt_oss": "gpt-oss",
}  # fmt: skip
"""The architectures that are always tried, and what they are called."""
RESULTS = {
    "equal": "Equal to transformers",
    "differs": "Different from transformers",
    "fails": "Fails in the engine",
    "refused": "Refused at load",
    "not small": "Not tried: no small model",
    "no end": "Not tried: took too long",
}
BEGIN, END = "<!-- coverage: made by `python tools/coverage.py --all --write` -->", "<!-- end of coverage -->"


def render(outcomes: Iterable[Outcome], version: str) -> str:
    """The text between the marks."""
    found = {o.model_type: o for o in outcomes}
    lines = [f"transformers {version}, fp32 on a CPU.", "", "| model | type | outcome | difference | KV cache |"]
    lines.append("|---|---|---|---|---|")
    for model_type, label in MAIN.items():
        if model_type in found:
            o = found[model_type]
            lines.append(f"| {label} | `{model_type}` | {o.result} | {_cell(o.text)} | {_groups(o)} |")
    for result, title in RESULTS.items():
        others = [o for o in found.values() if o.result == result and o.model_type not in MAIN]
        if not others:
            continue
        lines += ["", f"## {title}", "", "| class | type | what | KV cache |", "|---|---|---|---|"]
        for o in sorted(others, key=lambda o: o.model_type):
            lines.append(f"| {o.name} | `{o.model_type}` | {_cell(o.text)} | {_groups(o)} |")
    return "\n".join(lines)


def parse(text: str) -> list[Outcome]:
    """The outcomes of a text that `render` made."""
    outcomes, titles, result = [], {title: result for result, title in RESULTS.items()}, ""
    for line in text.splitlines():
        if line.startswith("## "):
            result = titles[line.removeprefix("## ")]
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) < 4 or not cells[1].startswith("`"):
            continue
        what = cells[3].replace("\\|", "|") if not result else cells[2].replace("\\|", "|")
        windows = tuple(None if w == "all" else int(w) for w in re.findall(r"all|\d+", cells[-1]))
        outcomes.append(Outcome(cells[1].strip("`"), result or cells[2], what, windows, cells[0]))
    return outcomes


def between(document: str) -> str:
    """What stands between the document's marks."""
    return document.partition(f"{BEGIN}\n")[2].partition(f"\n{END}")[0]


def replaced(document: str, text: str) -> str:
    """The document with another text between its marks."""
    before, _, rest = document.partition(f"{BEGIN}\n")
    return f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _groups(o: Outcome) -> str:
    return ", ".join("all" if w is None else f"window {w}" for w in o.windows)
