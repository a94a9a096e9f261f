"""Draws the metric of ways to average against virtual time, as an SVG picture."""

import statistics
from itertools import cycle
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 420
LEFT, TOP, RIGHT, BOTTOM = 60, 20, 170, 45
COLOURS = ("#222222", "#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")
FIRST_SHOWN = 0.15
"""What comes before this part of a training is not drawn; it would leave no room for the rest."""

Curve = list[tuple[float, float]]
"""(virtual seconds, metric) of each result on the way."""


def curves(runs: list[list[list[float]]]) -> Curve:
    """The mean of runs' curves, each of (virtual seconds, samples, metric)."""
    points = list(zip(*(run[-min(map(len, runs)) :] for run in runs), strict=True))
    return [(statistics.mean(one[0] for one in at), statistics.mean(one[2] for one in at)) for at in points]


def picture(found: dict[str, Curve], metric: str) -> str:
    """The curves as SVG, with their names and what they end at."""
    shown = {way: [one for one in curve if one[0] >= FIRST_SHOWN * curve[-1][0]] for way, curve in found.items()}
    times = [at_s for curve in shown.values() for at_s, _ in curve]
    values = [value for curve in shown.values() for _, value in curve]
    low, high, last_s = min(values), max(values), max(times)

    def x(at_s: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * at_s / last_s

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">']
    parts.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>')
    for step in range(5):
        at_s, value = last_s * step / 4, low + (high - low) * step / 4
        parts.append(f'<text x="{x(at_s):.0f}" y="{HEIGHT - 25}" font-size="12" text-anchor="middle">{at_s:.0f}</text>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.0f}" font-size="12" text-anchor="end">{value:.2f}</text>')
        parts.append(f'<path d="M{LEFT} {y(value):.0f}H{WIDTH - RIGHT}" stroke="#dddddd"/>')
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 6}" font-size="12">virtual seconds; {escape(metric)}</text>')
    for row, ((way, curve), colour) in enumerate(zip(shown.items(), cycle(COLOURS), strict=False)):
        line = "L".join(f"{x(at_s):.1f} {y(value):.1f}" for at_s, value in curve)
        parts.append(f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<circle cx="{x(curve[-1][0]):.1f}" cy="{y(curve[-1][1]):.1f}" r="4" fill="{colour}"/>')
        at = TOP + 16 + 20 * row
        parts.append(f'<path d="M{WIDTH - RIGHT + 10} {at - 4}h18" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 34}" y="{at}" font-size="12">{escape(way)} {curve[-1][1]:.3f}</text>')
    return "\n".join([*parts, "</svg>", ""])
