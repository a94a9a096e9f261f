"""The manifests as kustomize renders them: each object is one that the API takes, and what it names is there."""

import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from client.test_kubeflow import receiver

from support.api_schemas import check, pod_templates
from support.documented import blocks
from support.node import Object, rendered
from support.policies import may_reach, policies_of
from support.real_processes import Mark, agent, command, coordinator

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
MADE_BY_HAND = {"elche-token", "elche-agent-token", "elche-store", "elche-viewer-token"}
"""Secrets that the page has users make."""

every_folder = pytest.mark.parametrize("folder", ["base", "overlays/gpu", "overlays/standby", "jobset", "kubeflow"])


@every_folder
def test_each_object_is_one_that_the_api_takes(folder: str) -> None:
    for one in rendered(FOLDER / folder):
        check(one)


@pytest.mark.parametrize(
    ("kind", "place", "value"),
    [
        ("Deployment", ("spec", "template", "spec", "containers", 0, "comand"), ["sh"]),
        ("StatefulSet", ("spec", "replicas"), "2"),
        ("Certificate", ("spec", "dnsName"), ["elche"]),
        ("PodMonitor", ("spec", "podMetricsEndpoints", 0, "interval"), "soon"),
    ],
)
def test_what_the_api_would_refuse_is_found(kind: str, place: tuple[Any, ...], value: object) -> None:
    (one, *_) = [one for one in rendered(FOLDER / "overlays/standby") if one["kind"] == kind]
    inside = one
    for step in place[:-1]:
        inside = inside[step]
    inside[place[-1]] = value
    with pytest.raises((kubernetes_validate.ValidationError, jsonschema.ValidationError)):
        check(one)


@every_folder
def test_names_are_those_of_others(folder: str) -> None:
    """Selectors find pods; secrets, claims, accounts and services that are named are there."""
    objects = rendered(FOLDER / folder)
    named = {(one["kind"], one["metadata"]["name"]) for one in objects}
    templates = list(pod_templates(objects))
    labels = [template.get("metadata", {}).get("labels", {}) for template in templates]
    for one in objects:
        spec = one.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector") or {}
        wanted = selector.get("matchLabels", selector)
        assert not wanted or any(wanted.items() <= has.items() for has in labels), one["metadata"]["name"]
        if one["kind"] == "StatefulSet":
            assert ("Service", spec["serviceName"]) in named
    by_certificates = {one["spec"]["secretName"] for one in objects if one["kind"] == "Certificate"}
    for spec in (template["spec"] for template in templates):
        for volume in spec.get("volumes", ()):
            if secret := volume.get("secret"):
                assert secret["secretName"] in MADE_BY_HAND | by_certificates
            if claim := volume.get("persistentVolumeClaim"):
                assert ("PersistentVolumeClaim", claim["claimName"]) in named
            if config := volume.get("configMap"):
                assert ("ConfigMap", config["name"]) in named
        mounted = {mount["name"] for one in containers(spec) for mount in one.get("volumeMounts", ())}
        claims = {"data"} if ("StatefulSet", "elche-coordinator") in named else set()
        assert mounted <= {volume["name"] for volume in spec.get("volumes", ())} | claims
        if account := spec.get("serviceAccountName"):
            assert ("ServiceAccount", account) in named


@pytest.mark.parametrize("number", range(2))
def test_the_overlays_that_the_page_shows(tmp_path: Path, number: int) -> None:
    """Each object is one that the API takes; images, and the job's file, are the user's."""
    for name in ("deploy", "docker", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name)
    mine = tmp_path / "deploy" / "kubernetes" / "mine"
    mine.mkdir()
    page = "docs/clusters/kubernetes.md"
    text = [text for where, text in blocks("yml") if where == page and "kind: Kustomization" in text][number]
    (mine / "kustomization.yaml").write_text(text)
    (mine / "train.py").write_text("job = 'mine'\n")
    objects = rendered(mine)
    for one in objects:
        check(one)
    texts = json.dumps(objects)
    wanted, other = [("REGISTRY/elche-worker:0.1.0", "elche-worker:latest"), ("job = 'mine'", "digits")][number]
    assert wanted in texts
    assert other not in texts


def test_artifacts_are_on_a_volume_that_agents_and_the_coordinator_mount(tmp_path: Path) -> None:
    for name in ("deploy", "docker"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (mine := tmp_path / "deploy" / "kubernetes" / "mine").mkdir()
    text = "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [../overlays/standby]\n"
    (mine / "kustomization.yaml").write_text(f"{text}components: [../components/artifacts]\n")
    objects = rendered(mine)
    for one in objects:
        check(one)
    pods = [one["spec"]["template"]["spec"] for one in objects if one["kind"] in ("StatefulSet", "Deployment")]
    for pod in pods:
        (claim,) = [one["persistentVolumeClaim"] for one in pod["volumes"] if one["name"] == "artifacts"]
        assert claim == {"claimName": "elche-artifacts"}
        (mount,) = [one for one in pod["containers"][0]["volumeMounts"] if one["name"] == "artifacts"]
        assert mount["mountPath"] == "/artifacts"
    places = [
        one.get("value") for pod in pods for one in pod["containers"][0]["env"] if one["name"] == "ELCHE_ARTIFACTS"
    ]
    assert places == ["/artifacts"]


def test_two_coordinators_can_be_drained_and_upgraded() -> None:
    """What Kubernetes' controllers make of the objects, by their published rules: one that stands by is ready, so the
    budget lets either go, and a rolling update comes to both.
    """
    objects = {
        (one["kind"], one["metadata"]["name"]): one["spec"]
        for one in rendered(FOLDER / "overlays/standby")
        if "spec" in one
    }
    of_set, budget = objects["StatefulSet", "elche-coordinator"], objects["PodDisruptionBudget", "elche-coordinator"]
    (coordinator,) = of_set["template"]["spec"]["containers"]
    for name, path in (("readinessProbe", "/readyz"), ("livenessProbe", "/healthz"), ("startupProbe", "/healthz")):
        assert coordinator[name]["httpGet"] == {"path": path, "port": "http", "scheme": "HTTPS"}, name
    num_ready = of_set["replicas"]  # who leads, and who stands by (`system/test_standby.py`)
    assert num_ready - (of_set["replicas"] - budget["maxUnavailable"]) == 1, "one may be evicted"
    assert of_set["updateStrategy"] == {"type": "RollingUpdate"}, "the next one follows when one is ready"
    kinds = of_set["template"]["spec"]["affinity"]["podAntiAffinity"]
    assert kinds.keys() == {"preferredDuringSchedulingIgnoredDuringExecution"}, "of two nodes one may have both"
    labels = of_set["template"]["metadata"]["labels"]
    (rule,) = objects["NetworkPolicy", "elche-coordinator"]["ingress"]
    assert any(
        one["podSelector"]["matchLabels"].items() <= labels.items() for one in rule["from"] if "podSelector" in one
    ), "they reach each other"
    service = objects["Service", "elche"]
    assert service["clusterIP"] == "None", "clients see both, and take the one that listens"
    assert service["ports"][0]["appProtocol"] == "https"


@pytest.mark.parametrize("folder", ["base", "overlays/standby"])
def test_pods_that_are_not_ready_keep_no_node(folder: str) -> None:
    """While no coordinator answers, no agent is ready, and none could be evicted: a drain of their nodes waited for the
    coordinator, whose pod may wait for a node.
    """
    budgets = [one for one in rendered(FOLDER / folder) if one["kind"] == "PodDisruptionBudget"]
    assert budgets
    assert {one["spec"]["unhealthyPodEvictionPolicy"] for one in budgets} == {"AlwaysAllow"}


CLUSTER_WIDE = {"ClusterTrainingRuntime"}


@every_folder
def test_all_of_it_is_in_one_namespace(folder: str) -> None:
    """Which is not among it: who deletes this would delete all volumes and secrets."""
    objects = rendered(FOLDER / folder)
    assert "Namespace" not in {one["kind"] for one in objects}
    assert {one["metadata"].get("namespace") for one in objects if one["kind"] not in CLUSTER_WIDE} == {"elche"}


@every_folder
def test_pods_fit_the_restricted_standard(folder: str) -> None:
    """As the namespace's label demands; and each has time to leave, no token of the API, an image that it cannot write,
    and bounds of memory and disk.
    """
    for template in pod_templates(rendered(FOLDER / folder)):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert spec["terminationGracePeriodSeconds"] >= 30
        for one in containers(spec):
            assert one["securityContext"]["allowPrivilegeEscalation"] is False
            assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert one["securityContext"]["readOnlyRootFilesystem"] is True
            assert "/tmp" in {mount["mountPath"] for mount in one["volumeMounts"]}
            for kind in ("requests", "limits"):
                assert {"memory", "ephemeral-storage"} <= one["resources"][kind].keys()


@every_folder
def test_a_policy_says_what_each_pod_reaches_and_by_whom_it_is_reached(folder: str) -> None:
    objects = rendered(FOLDER / folder)
    for labels in (template["metadata"]["labels"] for template in pod_templates(objects)):
        for direction in ("Ingress", "Egress"):
            assert policies_of(objects, labels, direction), labels
        assert may_reach(objects, labels, None, 53), "names are found"
        assert not may_reach(objects, labels, None, 80), "clouds' metadata services have the nodes' credentials"
        assert not may_reach(objects, {"app": "other"}, labels, 7717)


@pytest.mark.parametrize(("folder", "has_database"), [("base", False), ("overlays/standby", True)])
def test_pods_reach_what_they_need(folder: str, has_database: bool) -> None:
    objects = rendered(FOLDER / folder)
    agent, coordinator = ({"app.kubernetes.io/name": f"elche-{one}"} for one in ("agent", "coordinator"))
    assert may_reach(objects, agent, agent, 40_000), "they average on any port"
    assert may_reach(objects, agent, coordinator, 7717)
    assert may_reach(objects, coordinator, coordinator, 7717), "`elche` in one of them finds the other"
    assert may_reach(objects, {"elche-client": "true"}, coordinator, 7718)
    assert may_reach(objects, agent, None, 443), "buckets"
    assert not may_reach(objects, coordinator, None, 443)
    assert not may_reach(objects, coordinator, agent, 40_000)
    assert may_reach(objects, coordinator, None, 5432) is has_database
    job = {"app.kubernetes.io/name": "elche-job"}
    for one in ("jobset", "kubeflow"):
        assert may_reach(rendered(FOLDER / one), job, job, 40_000)


def containers(spec: Object) -> list[Object]:
    return [*spec.get("initContainers", ()), *spec["containers"]]


def test_dashboards_are_those_of_compose() -> None:
    maps = [one for one in rendered(FOLDER / "overlays/standby") if one["kind"] == "ConfigMap"]
    found = {name: json.loads(text) for one in maps for name, text in one["data"].items()}
    files = ROOT.glob("docker/grafana/dashboards/*.json")
    assert found == {path.name: json.loads(path.read_text()) for path in files}


def test_kubeflow_is_told_how_far_a_job_is(tmp_path: Path, mark: Mark) -> None:
    with receiver(tmp_path) as (pod, taken), coordinator(mark, tmp_path) as one, agent(mark, tmp_path, one.address):
        job = str(shutil.copy(ROOT / "tests/processes/jobs/linear.py", tmp_path / "linear.py"))
        watching = ("submit", job, "--ranks", "1", "--watch", "--coordinator", one.address)
        done = command(mark, "elche_client", *watching, cwd=tmp_path, env=pod, limit_s=400)
    assert done.code == 0, done.err
    assert (taken[-1]["progressPercentage"], taken[-1]["estimatedRemainingSeconds"]) == (100, 0)
    assert {"loss", "mse"} <= {one["name"] for one in taken[-1]["metrics"]}
