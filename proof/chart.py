"""The picture of `proof.simulate`: idle share against the host's time, a line for each depth. Plain SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 420, 64, 96, 44, 56
COLOURS = ("#b5482a", "#3b6ea5", "#4f8a4c", "#7b5aa6", "#8a7a3a", "#333333")


def idle_chart(title: str, ratios: Sequence[float], idle: Mapping[int, Sequence[float]]) -> str:
    """SVG text. ``idle[depth][i]`` is the idle share at ``ratios[i]``, host over device."""
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    most = ratios[-1]

    def x(ratio: float) -> float:
        return LEFT + wide * ratio / most

    def y(share: float) -> float:
        return TOP + high * (1 - share / 0.6)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="14">{title}</text>',
    ]
    for i in range(7):
        at = y(i / 10)
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + wide}" y1="{at:.1f}" y2="{at:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{i * 10} %</text>')
    for i in range(7):
        ratio = most * i / 6
        parts.append(f'<text x="{x(ratio):.1f}" y="{TOP + high + 20}" text-anchor="middle">{ratio:.2g}</text>')
    parts.append(
        f'<text x="{LEFT + wide / 2}" y="{HEIGHT - 12}" text-anchor="middle">host time / device time of a step</text>'
    )
    taken: list[float] = []
    for (depth, shares), colour in zip(sorted(idle.items()), COLOURS, strict=False):
        points = " ".join(f"{x(r):.1f},{y(min(s, 0.6)):.1f}" for r, s in zip(ratios, shares, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        at = y(min(shares[-1], 0.6)) + 4
        while any(abs(at - other) < 14 for other in taken):  # labels of lines that end together
            at += 14
        taken.append(at)
        parts.append(f'<text x="{LEFT + wide + 8}" y="{at:.1f}" fill="{colour}">depth {depth}</text>')
    return "\n".join([*parts, "</svg>", ""])
