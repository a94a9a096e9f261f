"""Writes the alerts as an object of the Prometheus operator, for Kubernetes, or checks that it is fresh."""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
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


def main() -> None:
    """Exit code 1 when the file is not fresh."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        TARGET.write_text(text(), encoding="utf-8")
    elif TARGET.read_text(encoding="utf-8") != text():
        sys.exit(f"{TARGET.relative_to(ROOT)} is not fresh: run `make generated`")


if __name__ == "__main__":
    main()
