"""Writes the alerts as an object of the Prometheus operator, for Kubernetes, or checks that it is fresh."""

from pathlib import Path

from fresh import ROOT, write

SOURCE = ROOT / "docker" / "prometheus" / "rules" / "elche.yml"
TARGET = ROOT / "deploy" / "kubernetes" / "components" / "monitoring" / "rules.yaml"
HEAD = f"""\
# Written by tools/{Path(__file__).name}: docker/prometheus/rules/{SOURCE.name}, for the Prometheus operator.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata: {{name: elche}}
spec:
"""


def text() -> str:
    """The object: the file with the rules, as it is, is its `spec`."""
    lines = SOURCE.read_text(encoding="utf-8").splitlines()
    return HEAD + "".join(f"  {line}\n" if line else "\n" for line in lines)


if __name__ == "__main__":
    write(TARGET, text())
