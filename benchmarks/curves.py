"""Draws what `virtual_convergence` has kept: the metric of each way against virtual time, as an SVG picture.

Each way is drawn at the rate at which it ends best, as the mean over its seeds.

    python benchmarks/curves.py virtual_convergence.jsonl text 2 docs/pictures/text-two-ranks.svg
"""

import argparse
import json
import statistics
from collections import defaultdict
from itertools import cycle
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 420
LEFT, TOP, RIGHT, BOTTOM = 60, 20, 170, 45
COLOURS = ("#222222", "#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")
FIRST_SHOWN = 0.15
"""What comes before this part of a training is not drawn; it would leave no room for the rest."""

Curve = list[tuple[float, float]]
"""(virtual seconds, metric) of each result on the way."""


def curves(kept: list[dict[str, Any]], task: str, num_ranks: int) -> dict[str, Curve]:
    """The mean curve of the one device and of each way on so many ranks, by name."""
    runs: dict[tuple[str, float], list[list[list[float]]]] = defaultdict(list)
    for one in kept:
        of, ranks, way, rate, _ = one["case"]
        if of == task and ranks in (1, num_ranks):
            runs["one device" if ranks == 1 else way, rate].append(one["curve"])
    is_better = max if task == "digits" else min
    best: dict[str, float] = {}
    for way, _ in runs:
        ends = {rate: statistics.mean(run[-1][2] for run in some) for (of, rate), some in runs.items() if of == way}
        best[way] = is_better(ends, key=lambda rate, ends=ends: ends[rate])  # type: ignore[misc]
    found = {}
    for way, rate in best.items():
        some = runs[way, rate]
        points = list(zip(*(run[-min(map(len, some)) :] for run in some), strict=True))
        found[way] = [(statistics.mean(one[0] for one in at), statistics.mean(one[2] for one in at)) for at in points]
    return found


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kept", type=Path)
    parser.add_argument("task", choices=("text", "digits", "transformer"))
    parser.add_argument("ranks", type=int)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    kept = [json.loads(line) for line in options.kept.read_text().splitlines()]
    metric = "held-out accuracy" if options.task == "digits" else "held-out nats per byte"
    options.out.write_text(picture(curves(kept, options.task, options.ranks), metric))


if __name__ == "__main__":
    main()
