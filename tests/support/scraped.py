"""Series as Prometheus would have scraped them from real coordinators, and which of the committed alerts they fire.

A scrape is a minute of the story, however long it took: what comes between two of them is said by the story, not by a
clock.
"""

import json
import subprocess
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

RULES = Path(__file__).resolve().parents[2] / "docker" / "prometheus" / "rules" / "elche.yml"
OF_THIS_MACHINE = ("elche_coordinator_loop_lag_seconds", "elche_coordinator_disk_free_bytes")
"""What says how busy and how full the machine is on which tests run."""
Labels = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Scraped:
    """All scrapes so far, by series: a value for each minute, None where there was none."""

    minutes: int = 0
    series: dict[tuple[str, Labels], list[float | None]] = field(default_factory=dict)

    def scrape(self, **pages: str) -> None:
        """A minute more: what the coordinators of these names and URLs say now; one that does not answer is down."""
        for instance, url in pages.items():
            try:
                with urllib.request.urlopen(f"{url}/metrics", timeout=400) as answer:
                    self._take(instance, answer.read().decode())
                    self._add("up", (("instance", instance), ("job", "elche")), 1.0)
            except OSError:
                self._add("up", (("instance", instance), ("job", "elche")), 0.0)
        self.minutes += 1

    def _take(self, instance: str, text: str) -> None:
        for family in text_string_to_metric_families(text):
            if family.type == "histogram" or not family.name.startswith("elche_") or family.name in OF_THIS_MACHINE:
                continue
            for sample in family.samples:
                labels = {"job": "elche", "instance": instance} | sample.labels  # as honor_labels keeps them
                self._add(sample.name, tuple(sorted(labels.items())), sample.value)

    def _add(self, name: str, labels: Labels, value: float) -> None:
        values = self.series.setdefault((name, labels), [])
        values += [None] * (self.minutes - len(values))
        values.append(value)

    def last(self, name: str, **labels: str) -> float:
        """The newest value of the first series of this name with these labels; 0 where there is none."""
        for (known, has), values in self.series.items():
            if known == name and labels.items() <= dict(has).items() and len(values) == self.minutes and values[-1]:
                return values[-1]
        return 0.0

    def fires(self, folder: Path, alerts: Iterable[str], *, but_for: int = 0) -> None:
        """Asserts that these alerts, and no others, fire at some time, but for the last `but_for` minutes."""
        expected = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(alerts)]
        expr = 'group by (alertname) (max_over_time(ALERTS{alertstate="firing"}[1d]))'
        story = {
            "interval": "1m",
            "input_series": [
                {"series": f"{name}{_text(labels)}", "values": " ".join(_tokens(values, self.minutes))}
                for (name, labels), values in self.series.items()
            ],
            "promql_expr_test": [
                {"expr": expr, "eval_time": f"{self.minutes - 1 - but_for}m", "exp_samples": expected}
            ],
        }
        tests = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [story]}
        path = folder / "story.yml"
        path.write_text(json.dumps(tests), encoding="utf-8")  # which is YAML, too
        done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def _text(labels: Labels) -> str:
    return "{" + ", ".join(f"{name}={json.dumps(value)}" for name, value in labels) + "}"


def _tokens(values: list[float | None], minutes: int) -> list[str]:
    """As promtool writes a series: what ends is stale, as Prometheus marks it."""
    tokens: list[str] = []
    for value in [*values, *[None] * (minutes - len(values))]:
        is_end = value is None and tokens and tokens[-1] not in ("_", "stale")
        tokens.append("stale" if is_end else "_" if value is None else repr(value))
    return tokens
