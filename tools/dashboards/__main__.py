"""Writes docker/grafana/dashboards/*.json from the code beside this file, or checks that they are fresh.

The library has a release for each version of Grafana; left to itself pip takes the one for the oldest.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from cluster import cluster
from coordinator import coordinator
from fresh import ROOT, write_all
from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from job import job
from ranks import ranks

LIBRARY, PINNED = "grafana-foundation-sdk", "1769699379!11.6.0"
FOLDER = ROOT / "docker" / "grafana" / "dashboards"


def pages() -> dict[Path, str]:
    """The text of each file."""
    dashboards = (cluster(), job(), ranks(), coordinator())
    return {FOLDER / f"{dashboard.build().uid}.json": _text(dashboard) for dashboard in dashboards}


def _text(dashboard: Dashboard) -> str:
    page = json.loads(json.dumps(dashboard.build(), cls=JSONEncoder))
    # What the library writes and Grafana's own types do not have.
    for choice in page["templating"].get("list", []):
        for name in ("auto", "auto_min", "auto_count"):
            choice.pop(name, None)
    for panel in page["panels"]:
        panel.get("options", {}).pop("footer", None)
    return json.dumps(page, sort_keys=True, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    if version(LIBRARY) != PINNED:
        sys.exit(f"these dashboards need {LIBRARY}=={PINNED}, not {version(LIBRARY)}")
    write_all(pages(), FOLDER.glob("*.json"))
