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
    """The text between the marks: the main architectures by row, the others by what was found of them."""
    found = {o.model_type: o for o in outcomes}
    lines = [f"transformers {version}, fp32 on a CPU.", "", "| model | type | outcome | difference | KV cache |"]
    lines.append("|---|---|---|---|---|")
    for model_type, label in MAIN.items():
        if model_type in found:
            o = found[model_type]
            lines.append(f"| {label} | `{model_type}` | {o.result} | {_cell(o.text)} | {_groups(o)} |")
    for result, title in RESULTS.items():
        alike: dict[tuple[str, str], list[str]] = {}
        for o in sorted(found.values(), key=lambda o: o.model_type):
            if o.result == result and o.model_type not in MAIN:
                alike.setdefault((_cell(o.text), _groups(o)), []).append(f"`{o.model_type}`")
        if alike:
            lines += ["", f"## {title}", "", "| what | KV cache | types |", "|---|---|---|"]
            lines += [f"| {what} | {groups} | {' '.join(types)} |" for (what, groups), types in alike.items()]
    return "\n".join(lines)


def parse(text: str) -> list[Outcome]:
    """The outcomes of a text that `render` made."""
    outcomes, titles, result = [], {title: result for result, title in RESULTS.items()}, ""
    for line in text.splitlines():
        if line.startswith("## "):
            result = titles[line.removeprefix("## ")]
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        types = re.findall(r"`([^`]+)`", cells[2 if result else 1]) if len(cells) > 2 else []
        what = cells[0 if result else 3].replace("\\|", "|") if types else ""
        groups = cells[1 if result else 4] if types else ""
        windows = tuple(None if w == "all" else int(w) for w in re.findall(r"all|\d+", groups))
        outcomes += [Outcome(name, result or cells[2], what, windows) for name in types]
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
