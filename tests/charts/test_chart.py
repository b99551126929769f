"""The Helm chart, rendered by a Go template engine in Python and checked against Kubernetes' own schemas.

`make test-charts` brings both from PyPI: no Helm and no cluster are needed.
"""

import asyncio
import json
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from perdure.settings.settings_loader import fields, variable
from tests.checkout_paths import ROOT
from workers.health_endpoints import answering
from workers.worker_process import ROLES

CHART = ROOT / "infra" / "helm" / "perdure"
SANDBOXES = list(yaml.safe_load_all((ROOT / "infra/k8s/sandboxes.yaml").read_text()))
VERSIONS = ("1.32", "1.37")
DIGEST = "sha256:" + "1" * 64
ENGINES = {"enabled": True, "image": f"r/perdure-engine@{DIGEST}"}
OLDER = {"v1": {"tag": "0.0.9"}}
FILES: dict[str, Any] = {
    "volumes": [{"name": "keys", "secret": {"secretName": "perdure-keys"}}],
    "volumeMounts": [{"name": "keys", "mountPath": "/keys", "readOnly": True}],
}
PLACEMENT: dict[str, Any] = {
    "imagePullSecrets": [{"name": "registry"}],
    "nodeSelector": {"pool": "spot"},
    "tolerations": [{"key": "spot", "operator": "Exists"}],
}
OF_THE_CHART = {
    "PERDURE_HOME", "PERDURE_GATEWAY__HOST", "PERDURE_GATEWAY__PORT", "PERDURE_METRICS__HOST",
    "PERDURE_METRICS__PORT", "PERDURE_DEPLOYMENT__BUILD_ID",
}  # fmt: skip
"""Settings that `settings` of the values cannot change."""

gotpl = pytest.importorskip("gotpl", reason="run by `make test-charts`")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="run by `make test-charts`")


def _merged(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = {k: v for k, v in over.items() if not isinstance(v, dict)}
    deep = {k: _merged(base.get(k) or {}, v) for k, v in over.items() if isinstance(v, dict)}
    return base | both | deep


def rendered(namespace: str = "anywhere", **values: Any) -> list[dict[str, Any]]:
    """All objects of the chart, as `helm template perdure --namespace NAMESPACE` makes them."""
    texts = _texts(namespace, values)
    return [
        one
        for name in sorted(texts)
        if name.endswith(".yaml")
        for one in yaml.safe_load_all(texts[name])
        if one
    ]


def _texts(namespace: str, values: Mapping[str, Any]) -> Mapping[str, str]:
    return _rendered(namespace, json.dumps(values))


@cache
def _rendered(namespace: str, values: str) -> Mapping[str, str]:
    from gotpl.exts.helm import HelmTemplateEngine

    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    context = {
        "Values": _merged(yaml.safe_load((CHART / "values.yaml").read_text()), json.loads(values)),
        "Release": {"Name": "perdure", "Namespace": namespace},
        "Chart": {"Name": chart["name"], "Version": chart["version"]},
    }
    sources = {path.name: path.read_text() for path in sorted((CHART / "templates").iterdir())}
    engine = HelmTemplateEngine.from_sources(sources)
    names = [name for name in sources if name.endswith((".yaml", ".txt"))]
    found: dict[str, str] = engine.render({name: context for name in names})
    return found


def _pods(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Deployment -> what its pods are."""
    return {n: one["spec"]["template"]["spec"] for n, one in _of("Deployment", objects).items()}


def _pods_of_engines(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The Ray head, and the nodes with GPUs."""
    spec = _of("RayCluster", objects)["perdure-engines"]["spec"]
    groups = {"head": spec["headGroupSpec"], "gpu": spec["workerGroupSpecs"][0]}
    return {name: group["template"]["spec"] for name, group in groups.items()}


def _of(kind: str, objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in objects if one["kind"] == kind}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"image": {"digest": DIGEST}, "engines": ENGINES},
        {"autoscaling": {"enabled": True}, "sandbox": "e2b", "settings": {"E2B_X": "1"}},
        {"build": "v2", "olderBuilds": OLDER, **FILES, **PLACEMENT},
    ],
    ids=["as it is", "with engines", "on E2B", "two builds"],
)
def test_every_object_fits_the_schema_of_kubernetes(values: dict[str, Any], version: str) -> None:
    """Strictly: a field that the API does not know is refused. KubeRay's own objects are left out."""
    found = [one for one in rendered(**values) if one["apiVersion"] != "ray.io/v1"]
    for one in found:
        kubernetes_validate.validate(one, version, strict=True)

    assert len(found) > 10


def test_a_wrong_field_is_refused() -> None:
    """So that the test above can fail."""
    [broken] = _of("Service", rendered()).values()
    broken["spec"]["portz"] = []

    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[0], strict=True)


def test_every_stage_has_workers_a_budget_for_disruptions_and_an_autoscaler() -> None:
    """All roles are there, and what scales looks at the age of a queue."""
    objects = rendered(autoscaling={"enabled": True})
    commands = [one["command"] for pod in _pods(objects).values() for one in pod["containers"]]
    scaled = _of("HorizontalPodAutoscaler", objects)

    for role in ROLES:
        assert [c[:4] for c in commands].count(["python", "-m", "workers", role]) == 1
    assert _of("PodDisruptionBudget", objects).keys() == _of("Deployment", objects).keys()
    assert {
        name: one["spec"]["metrics"][0]["external"]["metric"]["selector"]["matchLabels"]["stage"]
        for name, one in scaled.items()
    } == {"perdure-agent": "boot", "perdure-grade": "grade", "perdure-io": "io"}


def test_pods_are_contained_and_deployed_by_digest() -> None:
    """No root, no capability, a read-only root; the digest where one is given."""
    for one in _of("Deployment", rendered(image={"digest": DIGEST})).values():
        spec = one["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        for container in spec["containers"]:
            assert container["image"] == f"REGISTRY/perdure@{DIGEST}"
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_every_variable_of_ours_is_a_setting() -> None:
    """A setting that is renamed breaks the chart here, not in a cluster."""
    known = {variable(path) for path in fields()}
    given = {
        env["name"]
        for one in _of("Deployment", rendered()).values()
        for container in one["spec"]["template"]["spec"]["containers"]
        for env in container["env"]
        if env["name"].startswith("PERDURE_")
    }

    assert given <= known
    assert "PERDURE_STORE" in given


def test_only_its_own_reach_an_engine_and_nothing_a_worker() -> None:
    """But Prometheus: workers listen on their metrics ports alone."""
    policies = _of("NetworkPolicy", rendered(engines=ENGINES))
    ports = policies["perdure-workers"]["spec"]["ingress"][0]["ports"]

    assert [(one["port"], one["endPort"]) for one in ports] == [(9464, 9471)]
    assert policies["perdure-engines"]["spec"]["ingress"][0]["from"]


@pytest.mark.parametrize("sandbox", ["kubernetes", "e2b"])
def test_workers_have_an_account_of_their_own_namespace(sandbox: str) -> None:
    """Kubernetes makes no pod of a missing account. Its rights are those of infra/k8s, where sandboxes
    are pods; elsewhere it has none."""
    objects = rendered(sandbox=sandbox)
    workers = [pod for name, pod in _pods(objects).items() if name != "perdure-gateway"]
    bindings = list(_of("RoleBinding", objects).values())

    assert {pod["serviceAccountName"] for pod in workers} == set(_of("ServiceAccount", objects))
    assert {pod["automountServiceAccountToken"] for pod in workers} == {sandbox == "kubernetes"}
    assert [one["subjects"] for one in bindings] == [
        [{"kind": "ServiceAccount", "name": "perdure-worker", "namespace": "anywhere"}]
    ] * (sandbox == "kubernetes")
    roles = {(one["kind"], one["metadata"]["name"], one["metadata"]["namespace"])
             for one in SANDBOXES if one["kind"] == "Role"}  # fmt: skip
    for one in bindings:
        assert ("Role", one["roleRef"]["name"], one["metadata"]["namespace"]) in roles


def test_an_account_of_the_clusters_own_is_used() -> None:
    """For example one that may use a bucket."""
    objects = rendered(serviceAccountName="ours")
    [binding] = _of("RoleBinding", objects).values()

    assert not _of("ServiceAccount", objects)
    assert binding["subjects"][0]["name"] == "ours"


def test_programs_can_write_their_caches() -> None:
    """uv, which installs agents, writes below its user's home, and the root is read-only."""
    made = re.findall(
        r"useradd .*--create-home (\w+)", (ROOT / "infra/images/Dockerfile").read_text()
    )
    for name, pod in _pods(rendered()).items():
        empty = {one["name"] for one in pod["volumes"] if "emptyDir" in one}
        for container in pod["containers"]:
            writable = {m["mountPath"] for m in container["volumeMounts"] if m["name"] in empty}
            assert {f"/home/{made[-1]}", "/tmp"} <= writable, name


def test_every_setting_reaches_all_pods_once() -> None:
    """Those that the chart owns are refused, because a second value would be ignored."""
    given = {variable(path): f"value of {path}" for path in fields()}
    values = {name: value for name, value in given.items() if name not in OF_THE_CHART}
    objects = rendered(settings=values, engines=ENGINES)
    for name, pod in {**_pods(objects), **_pods_of_engines(objects)}.items():
        for container in pod["containers"]:
            seen = [(one["name"], one["value"]) for one in container["env"]]
            assert set(values.items()) <= set(seen), name
            assert len(dict(seen)) == len(seen)
    for name in sorted(OF_THE_CHART):
        with pytest.raises(Exception, match=f"settings.{name}: the chart sets it"):
            rendered(settings={name: "x"})


def test_a_setting_of_several_values_can_be_written_as_yaml() -> None:
    """It becomes the JSON that docs/settings.md asks for."""
    caps = {"e2b": {"live": 20}}
    [pod, *_] = _pods(rendered(settings={"PERDURE_SANDBOX__CAPS": caps})).values()
    env = {one["name"]: one["value"] for one in pod["containers"][0]["env"]}

    assert json.loads(env["PERDURE_SANDBOX__CAPS"]) == caps


def test_files_and_placement_reach_all_pods() -> None:
    """Keys, certificates, pull secrets, and nodes with taints."""
    for pod in _pods(rendered(**FILES, **PLACEMENT)).values():
        assert {key: pod[key] for key in PLACEMENT} == PLACEMENT
        assert FILES["volumes"][0] in pod["volumes"]
        assert all(FILES["volumeMounts"][0] in one["volumeMounts"] for one in pod["containers"])


def _may_call(peer: Mapping[str, Any], namespace: str, labels: Mapping[str, str]) -> bool:
    spaces = peer.get(
        "namespaceSelector", {"matchLabels": {"kubernetes.io/metadata.name": "anywhere"}}
    )
    here = spaces.get("matchLabels", {}).get("kubernetes.io/metadata.name", namespace) == namespace
    wanted = peer.get("podSelector", {}).get("matchLabels", {})
    return bool(here and wanted.items() <= labels.items())


@pytest.mark.parametrize(
    ("namespace", "labels", "admitted"),
    [
        ("anywhere", {"perdure": "worker", "release": "perdure"}, True),
        ("perdure-sandboxes", {}, True),
        ("monitoring", {"app.kubernetes.io/name": "prometheus"}, True),
        ("training", {"perdure": "client"}, True),
        ("training", {}, False),
        ("anywhere", {}, False),
    ],
)
def test_the_gateway_admits_prometheus_and_clients(
    namespace: str, labels: dict[str, str], admitted: bool
) -> None:
    """Trainers read episodes through it, and its pods are annotated for Prometheus."""
    [rule] = _of("NetworkPolicy", rendered())["perdure-gateway"]["spec"]["ingress"]

    assert any(_may_call(peer, namespace, labels) for peer in rule["from"]) == admitted


@pytest.mark.parametrize("polling", [False, True])
async def test_probes_ask_the_worker(polling: bool, tmp_path: Path) -> None:
    """The commands of the chart against a worker's endpoints: alive at once, ready once it polls."""
    [_, *workers] = sorted(_pods(rendered()).items(), key=lambda one: one[0] != "perdure-gateway")
    probed = {}
    for _, pod in workers:
        for container in pod["containers"]:
            *_, flag, socket = container["command"]
            assert flag == "--health"
            for kind in ("livenessProbe", "readinessProbe"):
                *command, asked, path = container[kind]["exec"]["command"]
                assert asked == socket
                probed[kind] = (*command, path)
    async with answering(tmp_path / "health", lambda: polling):
        codes = {kind: await _code(probed[kind], tmp_path / "health") for kind in probed}
    codes["gone"] = await _code(probed["livenessProbe"], tmp_path / "health")

    assert codes["livenessProbe"] == 0
    assert (codes["readinessProbe"] == 0) is polling
    assert codes["gone"] != 0


async def _code(command: tuple[str, ...], socket: Path) -> int:
    program, *arguments, path = command
    assert program == "python"
    run = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, str(socket), path, stderr=asyncio.subprocess.DEVNULL
    )
    return await run.wait()


def test_an_upgrade_leaves_the_replicas_to_the_autoscaler() -> None:
    """Helm would otherwise set the number of the values again. Without it, that number holds."""
    for enabled in (True, False):
        objects = rendered(autoscaling={"enabled": enabled})
        scaled = set(_of("HorizontalPodAutoscaler", objects))
        counted = {n for n, one in _of("Deployment", objects).items() if "replicas" in one["spec"]}
        assert counted == set(_of("Deployment", objects)) - scaled
        assert bool(scaled) is enabled


def test_two_builds_run_side_by_side() -> None:
    """The second build's workers are added; those of the first stay as they were, to the letter."""
    scaling = {"enabled": True}
    first = rendered(build="v1", image={"tag": "0.0.9"}, autoscaling=scaling)
    both = rendered(build="v2", image={"digest": DIGEST}, olderBuilds=OLDER, autoscaling=scaling)
    before, after = _of("Deployment", first), _of("Deployment", both)
    old = {name: one for name, one in after.items() if name.endswith("-v1")}
    new = {name: one for name, one in after.items() if name.endswith("-v2")}
    env = [
        e
        for one in new.values()
        for c in one["spec"]["template"]["spec"]["containers"]
        for e in c["env"]
    ]

    assert old == {name: one for name, one in before.items() if name.endswith("-v1")}
    assert len(after) == len(new) + len(old) + 1  # the gateway belongs to no build
    assert {"name": "PERDURE_DEPLOYMENT__BUILD_ID", "value": "v2"} in env
    assert {n.rpartition("-")[2] for n in _of("HorizontalPodAutoscaler", both)} == {"v2"}


def test_the_volume_of_the_engines_head_is_made_or_named() -> None:
    """Its tables must survive a restart."""
    made, named = (rendered(engines=ENGINES | more) for more in ({}, {"headStorageClaim": "mine"}))
    claims = [
        _of("RayCluster", one)["perdure-engines"]["spec"]["gcsFaultToleranceOptions"]["storage"]
        for one in (made, named)
    ]

    assert claims == [{"claimName": "perdure-gcs"}, {"claimName": "mine"}]
    assert list(_of("PersistentVolumeClaim", made)) == ["perdure-gcs"]
    assert not _of("PersistentVolumeClaim", named)


def test_the_notes_name_what_is_needed_and_a_first_rollout() -> None:
    """With the values that were given."""
    notes = _texts("anywhere", {"sandbox": "e2b", "secretName": "keys", "build": "v2"})["NOTES.txt"]

    assert "the Secret keys" in notes
    assert "--sandbox e2b" in notes
    assert "infra/k8s" not in notes
    assert "--build-id v2" in notes
