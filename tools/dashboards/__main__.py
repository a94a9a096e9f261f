"""Writes docker/grafana/dashboards/*.json from the code beside this file, or checks that they are fresh.

The library has a release for each version of Grafana; left to itself pip takes the one for the oldest.
"""

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path

from cluster import cluster
from coordinator import coordinator
from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from job import job
from ranks import ranks

LIBRARY, PINNED = "grafana-foundation-sdk", "1769699379!11.6.0"
FOLDER = Path(__file__).resolve().parents[2] / "docker" / "grafana" / "dashboards"


def pages() -> dict[str, str]:
    """The text of each file, by its name."""
    dashboards = (cluster(), job(), ranks(), coordinator())
    return {f"{dashboard.build().uid}.json": _text(dashboard) for dashboard in dashboards}


def _text(dashboard: Dashboard) -> str:
    page = json.loads(json.dumps(dashboard.build(), cls=JSONEncoder))
    # What the library writes and Grafana's own types do not have.
    for choice in page["templating"].get("list", []):
        for name in ("auto", "auto_min", "auto_count"):
            choice.pop(name, None)
    for panel in page["panels"]:
        panel.get("options", {}).pop("footer", None)
    return json.dumps(page, sort_keys=True, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tools/dashboards", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file is stale")
    if version(LIBRARY) != PINNED:
        sys.exit(f"these dashboards need {LIBRARY}=={PINNED}, not {version(LIBRARY)}")
    is_check, texts = parser.parse_args().check, pages()
    committed = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")}
    stale = sorted(name for name in texts.keys() | committed.keys() if texts.get(name) != committed.get(name))
    if is_check and stale:
        sys.exit(f"stale in docker/grafana/dashboards: {', '.join(stale)}; run `make generated`")
    if not is_check:
        FOLDER.mkdir(parents=True, exist_ok=True)
        for name in stale:
            if name in texts:
                (FOLDER / name).write_text(texts[name], encoding="utf-8")
            else:
                (FOLDER / name).unlink()


if __name__ == "__main__":
    main()
