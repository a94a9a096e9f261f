"""The chart as Helm renders it: objects as of kustomize, values that are refused, what an upgrade leaves alone."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from support.api_schemas import check, pod_templates
from support.documented import blocks
from support.helm import CHART, helm, template
from support.node import Object, rendered
from support.policies import may_reach, policies_of

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
PAGE = "docs/clusters/kubernetes.md"
ROW = re.compile(
    r"^\| `(?P<folder>base|(?:overlays|components)/\w+)` \| (?P<values>(?:`[\w.]+=\w+`(?:, )?)+|none) \|$", re.M
)
COMPONENT = """
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: elche
resources: [{root}/base]
components: [{root}/{folder}]
"""


def documented() -> dict[str, tuple[str, ...]]:
    """By folder the values that stand for it, as the page says."""
    found = ROW.finditer((ROOT / PAGE).read_text())
    return {one["folder"]: tuple(re.findall(r"`(.*?)`", one["values"])) for one in found}


every_set = pytest.mark.parametrize("folder", documented())


def options(folder: str) -> list[str]:
    return [part for value in documented()[folder] for part in ("--set", value)]


def by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
    found = {(one["kind"], one["metadata"]["name"]): one for one in objects}
    assert len(found) == len(objects)
    return found


def test_each_overlay_and_component_has_its_values() -> None:
    folders = (one.parent.relative_to(FOLDER) for one in FOLDER.glob("[oc][vo]*/*/kustomization.yaml"))
    assert documented().keys() == {"base", *map(str, folders)}


@every_set
def test_its_objects_are_those_of_kustomize(folder: str, tmp_path: Path) -> None:
    where = FOLDER / folder
    if folder.startswith("components"):
        root = "/".join([".."] * (len(tmp_path.parts) - 1)) + str(FOLDER)
        (tmp_path / "kustomization.yaml").write_text(COMPONENT.format(root=root, folder=folder))
        where = tmp_path
    wanted, found = by_name(rendered(where)), by_name(template(*options(folder)))
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        assert found[name] == one


@every_set
def test_helm_has_no_remark_on_it(folder: str) -> None:
    said = helm("lint", "--strict", str(CHART), *options(folder))
    assert "1 chart(s) linted, 0 chart(s) failed" in said
    assert "[WARNING]" not in said


def test_names_within_are_those_of_its_namespace() -> None:
    objects = template(*options("overlays/standby"), namespace="ml")
    assert {one["metadata"]["namespace"] for one in objects} == {"ml"}
    (names,) = [one["spec"]["dnsNames"] for one in objects if one.get("spec", {}).get("dnsNames")]
    assert "elche.ml.svc" in names
    assert "elche.elche.svc" not in names


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """The values that the page shows."""
    (text,) = [text for page, text in blocks("yml") if page == PAGE and "kind:" not in text]
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


def test_the_values_that_the_page_shows(mine: Path) -> None:
    """Each class of devices has agents of its own, which no other class's selector finds; they average with all."""
    helm("lint", "--strict", str(CHART), "--values", str(mine))
    objects = template("--values", str(mine))
    for one in objects:
        check(one)
    pools = yaml.safe_load(mine.read_text())["pools"]
    classes = {one["metadata"]["name"]: one["spec"] for one in objects if one["kind"] == "Deployment"}
    assert classes.keys() == {"elche-agent", *(f"elche-agent-{name}" for name in pools)}
    for name, spec in classes.items():
        labels = spec["template"]["metadata"]["labels"]
        assert [
            other for other, one in classes.items() if one["selector"]["matchLabels"].items() <= labels.items()
        ] == [name]
        assert policies_of(objects, labels, "Egress")
        assert all(
            may_reach(objects, labels, one["template"]["metadata"]["labels"], 40_000) for one in classes.values()
        )
        assert may_reach(objects, labels, {"app.kubernetes.io/name": "elche-coordinator"}, 7717)
        (container,) = spec["template"]["spec"]["containers"]
        assert container["image"] == "REGISTRY/elche-worker:0.1.0"
    for name, differs in pools.items():
        spec = classes[f"elche-agent-{name}"]
        (container,) = spec["template"]["spec"]["containers"]
        assert f"class={name}" in container["args"]
        assert spec["replicas"] == differs["replicas"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == str(differs["gpus"])


EVERY_VALUE = {
    "coordinator": {
        "args": ["--quota", "*=4"],
        "env": [{"name": "ELCHE_KEEP_JOBS", "value": "5"}],
        "storage": {"className": "fast"},
        "nodeSelector": {"on": "demand"},
        "tolerations": [{"key": "one", "operator": "Exists"}],
        "priorityClassName": "high",
    },
    "agent": {
        "replicas": None,
        "args": ["--share", "2"],
        "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
        "resources": {"limits": {"memory": "8Gi"}},
        "sharedMemory": "4Gi",
        "runsClaim": "runs",
        "terminationGracePeriodSeconds": 20,
        "nodeSelector": {"gpu": "a100"},
        "tolerations": [{"key": "spot", "operator": "Exists"}],
        "priorityClassName": "low",
        "gpus": 1,
    },
    "pools": {"cpu": {"gpus": 0, "replicas": 0, "nodeSelector": {"kind": "c7"}, "image": {"tag": "2"}}},
    "image": {"pullPolicy": "Always", "pullSecrets": ["registry"]},
    "tokens": {"coordinator": "one", "agent": "two"},
    "disruptionBudget": {"agents": ""},
    "networkPolicy": {"agentEgress": [{"ports": [{"port": 9000}]}]},
    "serviceAccounts": {"coordinator": {"a/b": "c"}, "agent": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/x"}},
}


def test_every_value_comes_to_an_object_that_the_api_takes(tmp_path: Path) -> None:
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump(EVERY_VALUE))
    objects = template("--values", str(path), *options("components/certificates"))
    for one in objects:
        check(one)
    found, text = by_name(objects), json.dumps(objects)
    for value in (
        "--quota",
        "ELCHE_KEEP_JOBS",
        "NCCL_DEBUG",
        "eks.amazonaws.com/role-arn",
        "a/b",
        "registry",
        "Always",
    ):
        assert f'"{value}"' in text
    assert ("PodDisruptionBudget", "elche-agent") not in found
    spec = found["StatefulSet", "elche-coordinator"]["spec"]
    assert spec["volumeClaimTemplates"][0]["spec"]["storageClassName"] == "fast"
    pod = spec["template"]["spec"]
    assert (pod["nodeSelector"], pod["priorityClassName"]) == ({"on": "demand"}, "high")
    assert {one["secret"]["secretName"] for one in pod["volumes"] if "secret" in one} == {
        "one",
        "elche-coordinator-tls",
    }
    agents, others = found["Deployment", "elche-agent"]["spec"], found["Deployment", "elche-agent-cpu"]["spec"]
    assert "replicas" not in agents
    pod = agents["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 20
    (container,) = pod["containers"]
    assert container["args"][-4:] == ["--grace", "15", "--share", "2"]
    assert container["resources"]["limits"] == {"memory": "8Gi", "ephemeral-storage": "100Gi", "nvidia.com/gpu": "1"}
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert volumes["runs"]["persistentVolumeClaim"] == {"claimName": "runs"}
    assert volumes["shared-memory"]["emptyDir"]["sizeLimit"] == "4Gi"
    assert volumes["token"]["secret"]["secretName"] == "two"
    assert [one["key"] for one in pod["tolerations"]] == ["nvidia.com/gpu", "spot"]
    (container,) = others["template"]["spec"]["containers"]
    assert (others["replicas"], container["image"]) == (0, "elche-worker:2")
    assert others["template"]["spec"]["nodeSelector"] == {"kind": "c7"}, "not that of `agent` beside it"
    assert "nvidia.com/gpu" not in container["resources"]["limits"]
    for labels in (one["metadata"]["labels"] for one in pod_templates(objects)):
        assert may_reach(objects, labels, None, 9000) is ("agent" in labels["app.kubernetes.io/name"])


SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


def places(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in values.items():
        yield (*path, name)
        if isinstance(value, dict):
            yield from places(value, (*path, name))


def changed(path: tuple[str, ...], change: Callable[[dict[str, Any], str], None]) -> dict[str, Any]:
    """The values after a change of what is at a place."""
    values: dict[str, Any] = json.loads(json.dumps(VALUES))
    inside = values
    for name in path[:-1]:
        inside = inside[name]
    change(inside, path[-1])
    return values


def add_another(values: dict[str, Any], name: str) -> None:
    values[f"{name}s"] = values[name]


def test_a_value_that_is_misspelt_is_refused() -> None:
    jsonschema.validate(VALUES, SCHEMA)
    free = {"requests", "limits"}  # below them resources have names of the cluster
    for path in (path for path in places(VALUES) if not free & set(path[:-1])):
        with pytest.raises(jsonschema.ValidationError, match=f"'{path[-1]}s' was unexpected"):
            jsonschema.validate(changed(path, add_another), SCHEMA)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("agents.gpus=1", "additional properties 'agents' not allowed"),
        ("agent.gpu=1", "at '/agent': additional properties 'gpu' not allowed"),
        ("pools.a100.replica=1", "at '/pools/a100': additional properties 'replica' not allowed"),
        ("pools.A_100.replicas=1", "'A_100' does not match pattern"),
        ("agent.replicas=two", "at '/agent/replicas': got string, want"),
        ("agent.terminationGracePeriodSeconds=5", "minimum: got 5, want 6"),
        ("agent.image.tag=null", "at '/agent/image': missing property 'tag'"),
        ("coordinator=null", "missing property 'coordinator'"),
        ("coordinator.storage.size=20GB", "'20GB' does not match pattern"),
        ("disruptionBudget.agents=half", "'half' does not match pattern"),
        ("agent.env[0].name=A,agent.env[0].value=1", "at '/agent/env/0/value': got number, want string"),
    ],
)
def test_helm_says_what_is_wrong_with_a_value(value: str, why: str) -> None:
    with pytest.raises(AssertionError) as refused:
        template("--set", value)
    reasons = [line.strip() for line in str(refused.value).splitlines() if line.lstrip().startswith("- ")]
    # Below Helm's own two lines. The parts that must be there are listed at the schema's root, and names are no values.
    (reason,) = (one for one in reasons if not one.endswith(("'allOf' failed", "invalid propertyName 'A_100'")))
    assert why in reason


def test_what_may_be_taken_out_may_be() -> None:
    """Helm takes `null` for that."""
    out = ("coordinator.args", "coordinator.env", "coordinator.tolerations", "coordinator.nodeSelector", "agent.args")
    out += ("agent.env", "agent.resources", "agent.tolerations", "agent.nodeSelector", "agent.runsClaim", "pools")
    out += ("agent.replicas", "image.pullPolicy", "image.pullSecrets", "networkPolicy.agentEgress")
    template(*[part for name in out for part in ("--set", f"{name}=null")])
    template("--set", "agent.tolerations=null", "--set", "agent.gpus=1")


@every_set
def test_an_upgrade_changes_images_and_nothing_else(folder: str, tmp_path: Path) -> None:
    """No object, claim or secret has another name, none is made anew, and a pod is replaced only for its image."""
    newer = Path(shutil.copytree(CHART, tmp_path / "elche"))
    (newer / "Chart.yaml").write_text((CHART / "Chart.yaml").read_text().replace("0.1.0", "0.2.0"))
    images = [f"{part}.image.tag" for part in ("coordinator", "agent")]
    before = template(*options(folder), *(part for one in images for part in ("--set-string", f"{one}=0.1.0")))
    after = template(
        *options(folder),
        "--is-upgrade",
        *(part for one in images for part in ("--set-string", f"{one}=0.2.0")),
        chart=newer,
    )
    assert before != after
    assert json.loads(json.dumps(after).replace(":0.2.0", ":0.1.0")) == before


@every_set
def test_what_kubernetes_lets_nobody_change_is_as_it_was_first(folder: str) -> None:
    """Of a set and a Deployment that are there: another one would have to be made, without the claim of the first."""
    found = by_name(template(*options(folder)))
    assert not [name for kind, name in found if kind == "Secret"], "Helm would own them"
    claims = [one["metadata"] for (kind, _), one in found.items() if kind == "PersistentVolumeClaim"]
    assert all(one["annotations"]["helm.sh/resource-policy"] == "keep" for one in claims), "gone with the release"
    spec = found["StatefulSet", "elche-coordinator"]["spec"]
    assert spec["selector"] == {"matchLabels": {"app.kubernetes.io/name": "elche-coordinator"}}
    assert (spec["serviceName"], spec["podManagementPolicy"]) == ("elche-coordinator", "Parallel")
    size = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "20Gi"}}}
    assert spec["volumeClaimTemplates"] == [{"metadata": {"name": "data"}, "spec": size}]
    spec = found["Deployment", "elche-agent"]["spec"]
    assert spec["selector"] == {"matchLabels": {"app.kubernetes.io/name": "elche-agent"}}


def test_what_to_type_next_is_what_the_page_says() -> None:
    said = helm("install", "elche", str(CHART), "--namespace", "elche", "--dry-run=client").partition("NOTES:\n")[2]
    steps = [line.strip() for line in said.splitlines() if line.startswith("  ")]
    assert len(steps) > 5
    page = (ROOT / PAGE).read_text()
    for step in steps:
        assert f"    {step}\n" in page


def test_what_to_type_next_is_about_what_was_chosen() -> None:
    install = ("install", "elche", str(CHART), "--namespace", "ml", "--dry-run=client")
    said = helm(*install, *options("overlays/standby"), "--set", "coordinator.image.repository=r/c")
    said = said.partition("NOTES:\n")[2]
    for name in ("elche-store", "elche-token", "elche-agent-token", "elche-viewer-token"):
        assert f"kubectl -n ml create secret generic {name} " in said
    assert "--tls tls" in said
    assert "in no registry" not in said
