"""Writes the Helm chart's dashboards, alerts and table of values from their sources, or checks that they are fresh."""

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import yaml
from fresh import ROOT, write_all

CHART = ROOT / "deploy" / "helm" / "elche"
BEGIN, END = "<!-- Written by `make generated` from values.yaml. -->\n", "<!-- As far as here. -->\n"


def copies() -> dict[Path, str]:
    """Helm reads no file outside a chart, and Flux follows no link out of one."""
    sources = [*(ROOT / "docker/grafana/dashboards").glob("*.json"), ROOT / "docker/prometheus/rules/elche.yml"]
    return {CHART / "files" / one.name: one.read_text(encoding="utf-8") for one in sources}


def rows(node: yaml.MappingNode, lines: list[str], path: str = "") -> Iterator[tuple[str, str, str]]:
    """(name, default, what it is) of each value that has a comment above it, and of each group that has one."""
    for key, value in node.value:
        name, comment = path + key.value, comment_above(key, lines)
        is_group = isinstance(value, yaml.MappingNode) and any(comment_above(one, lines) for one, _ in value.value)
        if not is_group and not comment:
            sys.exit(f"{CHART.relative_to(ROOT)}/values.yaml: {name} has no comment that says what it is")
        if comment:
            yield name, "" if is_group else default(yaml.safe_load(yaml.serialize(value))), comment
        if is_group:
            yield from rows(value, lines, f"{name}.")


def comment_above(key: yaml.Node, lines: list[str]) -> str:
    """The lines that begin with # directly above a key, as one."""
    found: list[str] = []
    for line in reversed(lines[: key.start_mark.line]):
        if not line.strip().startswith("#"):
            break
        found.insert(0, line.strip(" #"))
    return " ".join(found)


def default(value: object) -> str:
    """A value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
    return "empty" if value == "" else f"`{text.splitlines()[0]}`"


def readme() -> str:
    """The page with its table anew."""
    before, _, rest = (CHART / "README.md").read_text(encoding="utf-8").partition(BEGIN)
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    table = [f"| `{name}` | {value} | {what} |\n" for name, value, what in rows(yaml.compose(text), text.splitlines())]
    return (
        f"{before}{BEGIN}\n| value | default | what |\n|---|---|---|\n{''.join(table)}\n{END}{rest.partition(END)[2]}"
    )


def check_version() -> None:
    """The chart has the version of the package."""
    package = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    if not chart["version"] == chart["appVersion"] == package:
        sys.exit(
            f"{CHART.relative_to(ROOT)}/Chart.yaml: version and appVersion are not {package}, as in pyproject.toml"
        )


if __name__ == "__main__":
    check_version()
    write_all({**copies(), CHART / "README.md": readme()}, (CHART / "files").iterdir())
