"""Draws curves as an SVG image, for the docs."""

from __future__ import annotations

import math

COLORS = ["#3b6ea5", "#d98c3f", "#5a9e5a", "#c0504d", "#8064a2", "#7f6a4f", "#d477b0", "#808080"]
COLORS += ["#a8a83a", "#3aa8a8"]
WIDTH, HEIGHT, LEFT, TOP = 300, 260, 50, 64  # of a panel, and where the first one begins

Points = list[tuple[float, float]]


def draw(title: str, panels: dict[str, dict[str, Points]], ticks: dict[float, str], y: str) -> str:
    """Panels side by side with the same curves; x is logarithmic, y is from 0 to 100."""
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    colors = dict(zip(names, COLORS, strict=False))
    low, high = math.log(min(ticks)), math.log(max(ticks))
    width = LEFT + len(panels) * (WIDTH + 40) + 190
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{TOP + HEIGHT + 50}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{TOP + HEIGHT + 50}" fill="white"/>',
        f'<text x="8" y="20" font-size="13" font-weight="bold">{title}</text>',
    ]
    for at, (panel, curves) in enumerate(panels.items()):
        left = LEFT + at * (WIDTH + 40)

        def place(x: float, y: float, left: int = left) -> str:
            across = (math.log(x) - low) / (high - low)
            return f"{left + WIDTH * across:.0f} {TOP + HEIGHT * (1 - min(y, 100) / 100):.0f}"

        lines.append(text(left, TOP - 12, f"{panel}: {y}"))
        for level in range(0, 101, 20):
            down = TOP + HEIGHT * (1 - level / 100)
            lines.append(f'<path d="M{left} {down:.0f}h{WIDTH}" stroke="#dddddd"/>')
            lines.append(text(left - 6, down + 4, str(level), "end"))
        for x, tick in ticks.items():
            lines.append(text(int(place(x, 0).split()[0]), TOP + HEIGHT + 18, tick, "middle"))
        for name, points in curves.items():
            path = "L".join(place(*point) for point in points)
            thick = 3 if name.startswith("minloader") else 1.5
            lines.append(
                f'<path d="M{path}" fill="none" stroke="{colors[name]}" stroke-width="{thick}"/>'
            )
    for at, (name, color) in enumerate(colors.items()):
        down = TOP + 20 + 20 * at
        lines.append(f'<rect x="{width - 188}" y="{down}" width="12" height="4" fill="{color}"/>')
        lines.append(text(width - 170, down + 6, name))
    return "\n".join([*lines, "</svg>", ""])


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{words}</text>'
