"""Draws docs/pictures/throughput.svg from the first table of docs/benchmarks.md, or checks that it is fresh."""

import re

from fresh import ROOT, write

DOCS = ROOT / "docs"
TARGET = DOCS / "pictures" / "throughput.svg"
NAMES = ("elche", "static step counts, tuned by hand", "local SGD, equal steps", "data parallel (as DDP)")
COLUMNS = ("two unequal devices", "after their speeds have swapped")
LEFT, WIDTH, LINE, ROW = 235, 190, 20, 26
STYLE = (
    "text{font:13px sans-serif;fill:#24292f}.bar{fill:#2f6fb5}.rest{fill:#8c959f;opacity:.25}.name-0{font-weight:bold}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.bar{fill:#6aa5e8}}"
)


def fractions() -> list[list[float]]:
    """By row of the table, percent of the bound: steady, and after the swap."""
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    lines = page.partition("| steady |")[2].partition("\n\n")[0].splitlines()
    rows = [[re.findall(r"([\d.]+) %", cell)[0] for cell in line.split("|")[2:4]] for line in lines[2:]]
    return [list(map(float, row)) for row in rows]


def drawing() -> str:
    """A bar for each row and column, on what there could be without any communication."""
    parts = ["<title>Samples per second, in percent of what the devices could do without communication</title>"]
    parts += [f'<text x="{LEFT + column * (WIDTH + 60)}" y="15">{name}</text>' for column, name in enumerate(COLUMNS)]
    for row, (name, percents) in enumerate(zip(NAMES, fractions(), strict=True)):
        top = LINE + 8 + row * ROW
        parts.append(f'<text class="name-{row}" x="0" y="{top + 13}">{name}</text>')
        for column, percent in enumerate(percents):
            left = LEFT + column * (WIDTH + 60)
            parts += [
                f'<rect class="rest" x="{left}" y="{top}" width="{WIDTH}" height="16"/>',
                f'<rect class="bar" x="{left}" y="{top}" width="{WIDTH * percent / 100:.1f}" height="16"/>',
                f'<text x="{left + WIDTH + 6}" y="{top + 13}">{percent:.0f} %</text>',
            ]
    size = f"0 0 {LEFT + 2 * (WIDTH + 60)} {LINE + 8 + len(NAMES) * ROW}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}"><style>{STYLE}</style>'
    return "\n".join([head, *parts, "</svg>", ""])


if __name__ == "__main__":
    write(TARGET, drawing())
