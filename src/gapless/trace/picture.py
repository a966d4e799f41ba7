"""Pictures of a timeline: one self-contained HTML page, or a PNG."""

from __future__ import annotations

import html
import json
from importlib import resources
from pathlib import Path
from typing import Any

from gapless.errors import UnavailableError

COLOURS = {
    "between nodes": "#c9c9c9",
    "copy": "#8e6bbf",
    "sync": "#d62f2f",
    "host": "#f08a24",
    "nothing to do": "#9fb8c8",
    "launch latency": "#e8c51b",
    "unknown": "#444444",
}
LANES = {"stream": "#2f7fb8", "phase": "#4c9a5f", "call": "#7a8a99"}


def write_html(data: dict[str, Any], path: Path) -> None:
    """One page that needs no network: drag to move, wheel to zoom, hover for a span's name."""
    page = resources.files("gapless.trace").joinpath("timeline.html").read_text(encoding="utf-8")
    text = json.dumps({**data, "colours": COLOURS, "lane_colours": LANES}, separators=(",", ":"))
    text = text.replace("<", "\\u003c")  # a name may hold </script>
    path.write_text(page.replace("@TITLE@", html.escape(data["title"])).replace("@DATA@", text), encoding="utf-8")


def write_png(data: dict[str, Any], path: Path, steps: int = 4) -> None:
    """The first steps as a picture for reports.

    Raises:
        UnavailableError: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise UnavailableError("--png needs matplotlib: pip install 'gapless[plot]'") from error
    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    ms = data["unit"] / 1e3
    edges = [*data["steps"], data["window"][1]]
    low, high = data["window"][0], edges[min(steps, len(edges) - 1)]
    pad = 0.04 * (high - low)
    low, high = max(low - pad, 0), high + pad
    lanes = [lane for lane in data["lanes"] if any(a + n > low and a < high for a, n, _ in spans(lane))]
    figure, axes = pyplot.subplots(figsize=(12, 1.2 + 0.32 * len(lanes)), layout="constrained")
    for row, lane in enumerate(lanes):
        inside = [(a, n, name) for a, n, name in spans(lane) if a + n > low and a < high]
        kind = lane["kind"]
        causes = [data["names"][name].partition("\n")[0] for _, _, name in inside]
        colours = [COLOURS[c] for c in causes] if kind == "gaps" else LANES[kind]
        bars = [((a - low) * ms, max(n, 6e-4 * (high - low)) * ms) for a, n, _ in inside]
        axes.broken_barh(bars, (row - 0.38, 0.76), facecolors=colours, linewidth=0)
    for step in data["steps"]:
        if low <= step <= high:
            axes.axvline((step - low) * ms, color="#999999", linewidth=0.6, linestyle=":", zorder=0)
    axes.set_yticks(range(len(lanes)), [lane["name"] for lane in lanes], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, (high - low) * ms)
    axes.set_xlabel("ms")
    axes.set_title(data["title"], fontsize=10, loc="left")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    shown = [Patch(color=COLOURS[c], label=f"{c} {value:.2f} ms") for c, value in data["causes"] if value > 0]
    if shown:
        axes.legend(handles=shown, fontsize=8, ncols=4, loc="upper left", bbox_to_anchor=(0, -0.12), frameon=False,
                    title="time without a kernel, whole window", title_fontsize=8, alignment="left")  # fmt: skip
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def spans(lane: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Begin, length and name of each span of a lane."""
    flat, at, out = lane["spans"], 0, []
    for i in range(0, len(flat), 3):
        at += flat[i]
        out.append((at, flat[i + 1], flat[i + 2]))
    return out
