"""What a strict API server of Kubernetes would refuse by its schema."""

from collections.abc import Iterator
from pathlib import Path

import jsonschema
import kubernetes_validate
import yaml

from support.node import Object

VERSION = "1.32"
KINDS = yaml.safe_load((Path(__file__).parents[1] / "system" / "kubernetes" / "kinds.yaml").read_text())


def check(one: Object) -> None:
    """Raises for what it would refuse."""
    own = KINDS.get(f"{one['apiVersion']} {one['kind']}")
    if own is None:
        kubernetes_validate.validate(one, VERSION, strict=True)
        return
    assert one.keys() == {"apiVersion", "kind", "metadata", "spec"}
    jsonschema.validate(one["spec"], own)
    for template in job_templates(one):
        metadata = {"name": "one", **template.get("metadata", {})}
        as_job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": template["spec"]}
        kubernetes_validate.validate(as_job, VERSION, strict=True)


def pod_templates(objects: list[Object]) -> Iterator[Object]:
    for one in objects:
        if one["kind"] in ("Deployment", "StatefulSet"):
            yield one["spec"]["template"]
        for template in job_templates(one):
            yield template["spec"]["template"]


def job_templates(one: Object) -> list[Object]:
    """Of a JobSet, or of the template of one."""
    spec = one.get("spec", {})
    spec = spec["template"]["spec"] if one["kind"] == "ClusterTrainingRuntime" else spec
    return [job["template"] for job in spec.get("replicatedJobs", ())]
