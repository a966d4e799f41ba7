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


def disturbance(result: dict[str, Any], target: Path) -> None:
    """Decode time per step at each depth, undisturbed and with every core busy."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.hashsalt": "gapless", "font.size": 10, "text.color": INK, "axes.edgecolor": INK})
    times = {(r["depth"], r["disturbed"]): r["decode_ms_per_step"] for r in result["figures"]}
    depths = sorted({depth for depth, _ in times})
    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    width = 0.36
    for disturbed, colour, label in ((False, QUIET, "undisturbed"), (True, NOISY, "every core of the host busy")):
        have = [(i, times[d, disturbed]) for i, d in enumerate(depths) if (d, disturbed) in times]
        places = [i + (width / 2 if disturbed else -width / 2) for i, _ in have]
        bars = axes.bar(places, [ms for _, ms in have], width * 0.94, color=colour, label=label)
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=9)
    names = []
    for depth in depths:
        kept = result["kept"].get(str(depth), result["kept"].get(depth))
        name = f"depth {depth}" + (" (synchronous)" if depth == 1 else "")
        names.append(name + (f"\nkeeps {100 * kept:.1f} % of its speed" if kept else ""))
    axes.set_xticks(range(len(depths)), names)
    axes.set_ylabel("ms per decode step")
    axes.set_ylim(0, 1.25 * max(times.values()))
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.tick_params(length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    first, environment = result["figures"][0], result["environment"]
    axes.set_title(
        f"{first['shape']}, {first['workload']}: {environment['gpu']}, {result['processes']} busy processes on "
        f"{result['cores']} cores",
        fontsize=10,
    )
    axes.legend(frameon=False, loc="upper right", ncols=2, fontsize=9)
    target.parent.mkdir(exist_ok=True)
    figure.savefig(target, metadata={"Date": None})
    pyplot.close(figure)


PLOTS = {"disturbance": disturbance}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    args = parser.parse_args()
    for name, plot in PLOTS.items():
        source = args.results / f"{name}.json"
        if source.exists():
            plot(json.loads(source.read_text()), args.docs / f"{name}.svg")
            print(args.docs / f"{name}.svg")
        else:
            print(f"{source} is not there")


if __name__ == "__main__":
    main()
