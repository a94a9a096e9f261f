"""A real Prometheus that scrapes a coordinator, and what the dashboards ask it."""

import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elche.torchrun import free_port

ROOT = Path(__file__).resolve().parents[2]
DASHBOARDS = ROOT / "docker" / "grafana" / "dashboards"
PROMETHEUS = ROOT / "docker" / "prometheus"
VARIABLE = re.compile(r"\$(\w+)")
CHOICES = re.compile(r"label_values\((.+), (\w+)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One query of a dashboard, with its variables in it."""

    dashboard: str
    panel: str
    expr: str
    is_instant: bool
    is_by_rank: bool
    """Whether it is to have a series for each rank."""

    def __str__(self) -> str:
        return f"{self.dashboard} / {self.panel}: {self.expr}"


def dashboards() -> list[dict[str, Any]]:
    """All that are committed."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(DASHBOARDS.glob("*.json"))]


def queries(values: Mapping[str, str]) -> list[Query]:
    """What all panels ask. `values`: variable -> value."""
    return [
        Query(
            dashboard=page["title"],
            panel=panel["title"],
            expr=filled_in(target["expr"], values),
            is_instant=target["instant"],
            is_by_rank=target["range"] and "{{rank}}" in target["legendFormat"],
        )
        for page in dashboards()
        for panel in page["panels"]
        for target in panel.get("targets", [])
    ]


def events(values: Mapping[str, str]) -> list[str]:
    """What the dashboards ask for the marks of events."""
    return [
        filled_in(event["target"]["expr"], values)
        for page in dashboards()
        for event in page["annotations"].get("list", [])
    ]


def choices(values: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """(variable, series, label) of each variable: the label's values are what one can choose."""
    for page in dashboards():
        for variable in page["templating"].get("list", []):
            found = CHOICES.fullmatch(variable["query"]["query"])
            assert found, variable
            yield variable["name"], filled_in(found[1], values), found[2]


def filled_in(expr: str, values: Mapping[str, str]) -> str:
    """The query with its variables' values. Raises KeyError for one that has none."""
    return VARIABLE.sub(lambda found: values[found[1]], expr)


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A client of its HTTP API."""

    url: str

    def get(self, path: str, **parameters: object) -> Any:
        """The answer's data. Raises AssertionError with what Prometheus says when it refuses."""
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters, doseq=True)}"
        try:
            with urllib.request.urlopen(address, timeout=400) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None

    def series(self, query: Query, *, window_s: float = 30.0) -> list[dict[str, Any]]:
        """What the panel would show: series with at least one value that is a number."""
        now_s = time.time()
        if query.is_instant:
            rows = self.get("query", query=query.expr, time=now_s)["result"]
            return [row for row in rows if row["value"][1] != "NaN"]
        rows = self.get("query_range", query=query.expr, start=now_s - window_s, end=now_s, step=1)["result"]
        return [row for row in rows if any(value != "NaN" for _, value in row["values"])]


def configuration(folder: Path, target: str, scrape_s: int) -> Path:
    """The committed configuration, with another target, as often as given, and a token of its own."""
    text = (PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8")
    token = folder / "token"
    token.write_text("none", encoding="utf-8")
    for pattern, instead in (
        (r"coordinator:7718", target),
        (r"credentials_file: \S+", f"credentials_file: {token}"),
        (r"(scrape|evaluation)_interval: \S+", rf"\1_interval: {scrape_s}s"),
        (r"\S*rules/\*\.yml", f"{PROMETHEUS}/rules/*.yml"),
    ):
        text, count = re.subn(pattern, instead, text)
        assert count, f"prometheus.yml has no {pattern}"
    path = folder / "prometheus.yml"
    path.write_text(text, encoding="utf-8")
    return path


@contextmanager
def prometheus(folder: Path, target: str, *, scrape_s: int = 1) -> Iterator[Prometheus]:
    """A Prometheus that scrapes `target` (host and port), with the committed rules."""
    address = f"127.0.0.1:{free_port()}"
    options = {
        "config.file": configuration(folder, target, scrape_s),
        "storage.tsdb.path": folder / "tsdb",
        "web.listen-address": address,
        "log.level": "warn",
    }
    log = folder / "prometheus.log"
    command = ["prometheus", *(f"--{name}={value}" for name, value in options.items())]
    with log.open("w") as log_file, subprocess.Popen(command, stdout=log_file, stderr=log_file) as process:
        try:
            end_s = time.monotonic() + 20
            while not _is_ready(address):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < end_s, log.read_text()
                time.sleep(0.1)
            yield Prometheus(f"http://{address}")
        finally:
            process.terminate()


def _is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/-/ready", timeout=400) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
