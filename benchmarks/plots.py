"""Pictures of the documentation from the figures in ``benchmarks/results``. Needs matplotlib.

    python benchmarks/plots.py            # writes docs/*.svg for every result that is there
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
QUIET, NOISY, INK, GRID = "#3b6ea5", "#d1793b", "#333333", "#dddddd"


def _style() -> Any:
    """matplotlib's pyplot, writing SVG that does not change from run to run."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.hashsalt": "gapless", "font.size": 10, "text.color": INK, "axes.edgecolor": INK})
    return pyplot


def _bare(axes: Any, lines: str = "both", sides: tuple[str, ...] = ("top", "right")) -> None:
    axes.set_axisbelow(True)
    axes.grid(axis=lines, color=GRID, linewidth=0.8)
    for side in sides:
        axes.spines[side].set_visible(False)


def _where(result: dict[str, Any]) -> str:
    gpu: str = result["environment"]["gpu"]
    return result["environment"]["cpu"] if gpu == "none" else gpu


def _save(pyplot: Any, figure: Any, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    figure.savefig(target, metadata={"Date": None})
    pyplot.close(figure)


NAMES = {
    "decode_ms": ("ms per decode step", 1.0),
    "host_ms": ("host, ms per step", 1.0),
    "prompt_s": ("prompt, ms", 1e3),
}
AXES = {"requests": "requests", "layers": "layers of a narrow model", "context": "tokens of context, one request"}


def growth(result: dict[str, Any], target: Path) -> None:
    """Each curve's points, and its laws as lines."""
    import numpy as np

    pyplot = _style()
    curves = result["curves"]
    size = (3.6 * len(curves), 3.4)
    figure, panels = pyplot.subplots(1, len(curves), figsize=size, layout="constrained", squeeze=False)
    for axes, (name, curve) in zip(panels[0], curves.items(), strict=True):
        n = np.array([p["n"] for p in curve["points"]], float)
        for (key, law), colour in zip(curve["laws"].items(), (QUIET, NOISY), strict=False):
            label, scale = NAMES[key]
            dense = np.geomspace(law.get("from", n.min()), n.max(), 200)
            line = law["a"] + law.get("b", 0.0) * dense + law.get("c", 0.0) * dense**2
            axes.plot(dense, scale * line, color=colour, linewidth=1.2, zorder=1)
            label = f"{label}; law {law['law']}, worst point {100 * law['worst']:.0f} % off"
            axes.plot(n, [scale * p[key] for p in curve["points"]], "o", color=colour, markersize=4.5, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel(AXES[name])
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}k" if value >= 1024 else f"{value:g}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_formatter(lambda value, _: "")
        axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(0, 1.2))
        _bare(axes)
    figure.suptitle(f"{result['shape']}, depth {result['depth']}: {_where(result)}", fontsize=10)
    _save(pyplot, figure, target)


def mixed_load(result: dict[str, Any], target: Path) -> None:
    """Time to the first token and between tokens at each depth: median, 90th and 99th percentile."""
    pyplot = _style()
    rows, load = result["figures"], result["load"]
    figure, panels = pyplot.subplots(1, 2, figsize=(7.6, 3.4), layout="constrained")
    for axes, key, title in zip(
        panels, ("ttft_ms", "itl_ms"), ("to the first token, ms", "between tokens, ms"), strict=True
    ):
        for i, (name, colour) in enumerate((("p50", QUIET), ("p90", "#7aa6d1"), ("p99", NOISY))):
            bars = axes.bar([x + 0.27 * (i - 1) for x in range(len(rows))], [r[key][name] for r in rows], 0.25,
                            color=colour, label=name)  # fmt: skip
            axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
        axes.set_xticks(range(len(rows)), [f"depth {r['depth']}\nbusy {100 * r['step_busy']:.1f} %" for r in rows])
        axes.set_title(title, fontsize=10)
        axes.margins(y=0.15)
        axes.tick_params(length=0)
        _bare(axes, "y", ("top", "right", "left"))
    panels[0].legend(frameon=False, fontsize=9, ncols=3)
    what = f"{load['prompt_len']} + {load['output_len']} tokens, {load['rate']:g} requests a second, {load['arrivals']}"
    figure.suptitle(f"{load['shape']}, {what}: {_where(result)}", fontsize=10)
    _save(pyplot, figure, target)


LANES = {"wait": "#e3e3e3", "receive": "#8fb38f", "commit": "#4c9a5f", "publish": "#2f6b3f", "schedule": "#d9a441",
         "launch": NOISY}  # fmt: skip


def timelines(result: dict[str, Any], target: Path) -> None:
    """A few steps at depth 1 above as many at depth 2, on one scale: the host's lane and the device's."""
    pyplot = _style()
    from matplotlib.patches import Patch

    depths = result["depths"]
    figure, panels = pyplot.subplots(2, 1, figsize=(9.2, 2.9), layout="constrained", sharex=True)
    for axes, (depth, run) in zip(panels, sorted(depths.items()), strict=True):
        for name, colour in LANES.items():
            bars = [(a, b - a) for a, b in run["lanes"].get(name, [])]
            axes.broken_barh(bars, (0.6, 0.8), facecolors=colour, linewidth=0)
        bars = [(a, b - a) for a, b in run["lanes"]["compute"]]
        axes.broken_barh(bars, (-0.4, 0.8), facecolors=QUIET, linewidth=0)
        for (_, end), (begin, _) in zip(run["lanes"]["compute"], run["lanes"]["compute"][1:], strict=False):
            if begin - end > 0.01:
                axes.axvspan(end, begin, 0.02, 0.98, color="#f4c7c3", zorder=0)
        axes.set_yticks([0, 1], ["GPU", "host"])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(-0.5, 1.5)
        mode = "synchronous" if depth == "1" else "asynchronous"
        axes.set_title(f"depth {depth}, {mode}: GPU busy {100 * run['step_busy']:.1f} %", fontsize=10, loc="left")
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    panels[1].set_xlabel("ms", fontsize=9)
    panels[1].set_xlim(0, max(run["ms"] for run in depths.values()))
    keys = [Patch(color=QUIET, label="step"), *(Patch(color=c, label=n) for n, c in LANES.items())]
    keys.append(Patch(color="#f4c7c3", label="GPU idle"))
    title = f"{result['title']}; {_where(result)}, under a profiler, which slows launches"
    figure.legend(handles=keys, fontsize=8, ncols=len(keys), loc="outside lower center", frameon=False)
    figure.suptitle(title, fontsize=9, x=0.01, ha="left")
    _save(pyplot, figure, target)


PLOTS = {"timelines": timelines, "growth": growth, "mixed_load": mixed_load}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    args = parser.parse_args()
    for name, plot in PLOTS.items():
        source = next(iter(sorted(args.results.glob(f"*{name}.json"))), args.results / f"{name}.json")
        if source.exists():
            plot(json.loads(source.read_text()), args.docs / f"{name}.svg")
            print(args.docs / f"{name}.svg")
        else:
            print(f"{source} is not there")


if __name__ == "__main__":
    main()
