"""Dashboards and alerts against the real Prometheus, a real job, and Grafana's own types."""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elche_client import Client
from support.prometheus import DASHBOARDS, PROMETHEUS, ROOT, Prometheus, choices, events, prometheus, queries
from support.real_processes import Mark, agent, coordinator

pytestmark = pytest.mark.system
HERE = Path(__file__).parent / "grafana"
LIMIT_S = 400.0
# What has no data here, and why. Everything else must have some.
WITHOUT_DATA = {
    r"elche_rank_gpu_\w+": "only NVML has it, and there is no GPU",
}


def test_prometheus_keeps_the_label_job() -> None:
    text = (PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8")
    assert "honor_labels: true" in text, "else Prometheus renames elche's label `job` to `exported_job`"


def run(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_alerts_fire_when_they_should_and_only_then() -> None:
    run("promtool", "check", "rules", *map(str, (PROMETHEUS / "rules").glob("*.yml")))
    run("promtool", "test", "rules", *map(str, (PROMETHEUS / "tests").glob("*.yml")))


def test_every_alert_has_a_test_and_says_what_to_do() -> None:
    rules = (PROMETHEUS / "rules" / "elche.yml").read_text(encoding="utf-8")
    tests = (PROMETHEUS / "tests" / "elche_test.yml").read_text(encoding="utf-8")
    alerts = re.split(r"- alert: ", rules)[1:]
    for alert in alerts:
        name = alert.split()[0]
        assert f'alertname="{name}"' in tests, f"{name} is not tested"
        for part in ("severity: ", "summary: ", "description: "):
            assert part in alert, f"{name} has no {part}"


def test_dashboards_are_what_grafana_expects(tmp_path: Path) -> None:
    for name in ("package.json", "package-lock.json", "dashboard.ts"):
        shutil.copy(HERE / name, tmp_path)
    run("npm", "ci", "--omit=dev", "--no-audit", "--no-fund", "--ignore-scripts", cwd=tmp_path)
    pages = []
    for path in DASHBOARDS.glob("*.json"):
        page = tmp_path / f"{path.stem}.ts"
        text = (
            f"import type {{ Checked }} from './dashboard';\nexport const page: Checked = {path.read_text('utf-8')};\n"
        )
        page.write_text(text, encoding="utf-8")
        pages.append(page.name)
    assert pages
    options = ("--noEmit", "--strict", "--skipLibCheck", "--target", "es2022")
    modules = ("--module", "esnext", "--moduleResolution", "bundler")
    run("node_modules/.bin/tsc", *options, *modules, *pages, cwd=tmp_path)


def test_dashboards_are_fresh() -> None:
    run(sys.executable, "tools/dashboards", "--check")


# With a job that trains as long as the tests below last


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, str]]:
    """A Prometheus with a job that trains on two ranks, one of them slower, and the job's id."""
    mark, folder = Mark(), tmp_path_factory.mktemp("grafana")
    shutil.copy(HERE / "job.py", folder)
    with coordinator(mark, folder) as one, agent(mark, folder, one.address), Client(one.address, token="") as client:
        target = one.page_url.removeprefix("http://").split("/")[0]
        with prometheus(folder, target) as server:
            job = client.submit(folder / "job.py", num_ranks=2, slow_factors={1: 2.0})
            yield server, job.id
            job.cancel()
            list(job.watch())  # to its end
    mark.assert_none_left()


def values(job: str) -> dict[str, str]:
    """The dashboards' variables, as Grafana would fill them in."""
    return {"job": job, "rank": ".*", "__rate_interval": "5s", "__interval": "1s", "__range": "60s"}


def is_expected_empty(expr: str) -> bool:
    return any(re.search(pattern, expr) for pattern in WITHOUT_DATA)


def test_every_panel_of_every_dashboard_has_data(scraped: tuple[Prometheus, str]) -> None:
    server, job = scraped
    waiting = [query for query in queries(values(job)) if not is_expected_empty(query.expr)]
    assert len(waiting) > 50
    end_s = time.monotonic() + LIMIT_S
    while waiting and time.monotonic() < end_s:
        time.sleep(1)
        waiting = [query for query in waiting if len(server.series(query)) < (2 if query.is_by_rank else 1)]
    assert not waiting, "without data:\n" + "\n".join(map(str, waiting))
    for query in queries(values(job)):
        if is_expected_empty(query.expr):
            assert server.series(query) == [], f"has data, so it needs no exception: {query}"
    for expr in events(values(job)):  # these happen or not; Prometheus must understand them
        server.get("query", query=expr)


def test_variables_offer_the_job_and_its_ranks(scraped: tuple[Prometheus, str]) -> None:
    server, job = scraped
    offered = {
        name: server.get(f"label/{label}/values", **{"match[]": series}) for name, series, label in choices(values(job))
    }
    assert offered == {"job": [job], "rank": ["0", "1"]}


def test_prometheus_evaluates_every_rule(scraped: tuple[Prometheus, str]) -> None:
    server, _ = scraped
    end_s = time.monotonic() + LIMIT_S
    rules = []
    while time.monotonic() < end_s:
        rules = [rule for group in server.get("rules")["groups"] for rule in group["rules"]]
        if all(rule["health"] != "unknown" for rule in rules):
            break
        time.sleep(0.5)
    assert len(rules) > 10
    assert {rule["name"]: rule.get("lastError", "") for rule in rules if rule["health"] != "ok"} == {}
    firing = [rule["name"] for rule in rules if rule.get("state") == "firing"]
    assert firing == []
