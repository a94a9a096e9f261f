"""Writes the tables and pictures of docs/convergence.md and defaults.md from kept runs; what is missing is run first.

    python benchmarks/convergence_report.py            # all; hours from nothing, seconds from the kept runs
    python benchmarks/convergence_report.py --only means-text-2    # a table that no page has is printed

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. The runs are those of `virtual_convergence`.
"""

import argparse
import re
import sys
from pathlib import Path

from virtual_convergence import Runs, Table

HERE = Path(__file__).resolve().parent
KEPT = HERE / "kept" / "convergence.jsonl"
BEFORE = HERE / "kept" / "convergence_before.jsonl"
"""Runs of ranks that took results in the middle of a batch: of the tables "means", which were not made again."""
PAGES = [HERE.parent / "docs" / name for name in ("convergence.md", "defaults.md")]
PICTURES = HERE.parent / "docs" / "pictures"

PEERS = {
    "default": "elche",
    "local": "local SGD, steps tuned by hand",
    "uneven": "data parallel, batches tuned by hand",
    "ddp": "data parallel",
    "diloco": "DiLoCo",
}
SHORT = {
    "default": "at the defaults: overlapped",
    "blocking+anchor:1+overhead:0.5": "blocking, rounds of one batch of the slowest",
    "blocking+anchor:2+overhead:0.5": "blocking, rounds of two",
}
FEWER = {way: PEERS[way] for way in ("default", "local", "uneven", "ddp")}
LONGER = {"len:1.05": "elche, 5 % more samples", "len:1.1": "elche, 10 % more samples"}
MEANS = {
    "default": "the default: `adascale`, short rounds",
    "samples": "weighted by samples",
    "moments": 'averaged moments (`optimizer_state="average"`)',
    "replaced": "averaged moments that become the result's, without newer steps",
    "work:1/0.5": "outer Nesterov by the round's work",
    "ema:0.5": "an average over rounds is exported (EMA, 0.5 in ten batches)",
    "mean": "the mean instead",
    "apart": "directions and norms apart instead, by rows",
    "whole": "directions and norms apart instead, of the whole model",
    "mean+anchor:10": "the mean, rounds of ten batches",
    "mean+anchor:10+work:1.4/0.5": "the mean, rounds of ten batches, outer Nesterov by the round's work",
}
FOR_FOUR = ("default", "samples", "moments", "work:1/0.5", "ema:0.5", "apart", "mean+anchor:10")
FOR_DIGITS = (*FOR_FOUR, "mean")


def some(ways: tuple[str, ...]) -> dict[str, str]:
    return {way: MEANS[way] for way in ways}


ELCHE = {"default": "at the defaults"}
TABLES = {
    "text-2": Table("text", 2, ELCHE),
    "text-4": Table("text", 4, ELCHE),
    "digits-2": Table("digits", 2, ELCHE, held_out=20),
    "digits-4": Table("digits", 4, ELCHE, held_out=20),
    "transformer-2": Table("transformer", 2, ELCHE, (2.0, 3.0, 4.5), 1, 6),
    "transformer-4": Table("transformer", 4, ELCHE, (2.0, 3.0, 4.5), 1, 6),
    "muon-2": Table("muon", 2, ELCHE, (2.0, 3.0, 4.5), 1, 4),
    "short-transformer-2": Table("transformer", 2, SHORT, (2.0, 3.0, 4.5), 1, 3),
    "short-transformer-4": Table(
        "transformer", 4, {**SHORT, "len:1.2": "at the defaults, 20 % more samples"}, (2.0, 3.0, 4.5), 1, 3
    ),
    "short-text-2": Table("text", 2, SHORT, (1.5,), 1, 5),
    "short-text-4": Table("text", 4, SHORT, (1.5,), 1, 5),
    "short-digits-2": Table("digits", 2, SHORT, (2.0,), 1),
    "short-digits-4": Table("digits", 4, SHORT, (2.0,), 1),
    "peers-text-2": Table("text", 2, PEERS, (1.0, 1.5, 2.0), 1),
    "peers-text-4": Table("text", 4, PEERS, (1.0, 1.5, 2.0), 1, 6),
    "longer-text-2": Table("text", 2, LONGER, (1.5,), 1),
    "longer-text-4": Table("text", 4, LONGER, (1.5,), 1, 6),
    "peers-digits-2": Table("digits", 2, PEERS, (1.0, 2.0, 3.0), 1),
    "peers-digits-4": Table("digits", 4, PEERS, (1.0, 2.0, 3.0), 1),
    "peers-transformer-2": Table("transformer", 2, FEWER, (2.0, 3.0, 4.5), 1, 6),
    "peers-transformer-4": Table(
        "transformer", 4, {"default": PEERS["default"], "ddp": PEERS["ddp"]}, (2.0, 3.0, 4.5), 1, 6
    ),
    "means-text-2": Table("text", 2, MEANS, (1.5,), 1, 6),
    "means-text-4": Table("text", 4, some(FOR_FOUR), (1.5,), 1, 6),
    "means-digits-2": Table("digits", 2, some(FOR_DIGITS), (2.0,), 1),
    "means-digits-4": Table("digits", 4, some(FOR_DIGITS), (2.0,), 1),
}
DRAWN = [name for name in TABLES if name.startswith("peers")]


def with_table(page: str, name: str, lines: list[str]) -> str:
    """The page with a table in the place of what was there."""
    between = re.compile(rf"(<!-- table: {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not between.search(page):
        raise SystemExit(f"there is no table {name}")
    return between.sub(lambda found: found[1] + "\n".join(lines) + "\n" + found[2], page)


def page_of(pages: dict[Path, str], name: str) -> Path | None:
    """The page that has the table; None if none has it."""
    return next((path for path, page in pages.items() if f"<!-- table: {name} -->" in page), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=TABLES, help="one table")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a table would change")
    options = parser.parse_args()
    pages = {path: path.read_text() for path in PAGES}
    before = dict(pages)
    for name in [options.only] if options.only else TABLES:
        path = page_of(pages, name)
        if path is None and not options.only:
            continue
        runs = Runs(TABLES[name], BEFORE if name.startswith("means") else KEPT, may_run=not options.check)
        if path is None:
            print("\n".join(runs.lines()))
            continue
        pages[path] = with_table(pages[path], name, runs.lines())
        if name in DRAWN and not options.check:
            (PICTURES / f"{name}.svg").write_text(runs.drawing())
        print(name, file=sys.stderr)
    for path, page in pages.items():
        if options.check and page != before[path]:
            raise SystemExit(f"{path.name} is not what the kept runs say: run benchmarks/convergence_report.py")
        path.write_text(page)


if __name__ == "__main__":
    main()
