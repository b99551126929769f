"""The Helm chart, rendered by a Go template engine in Python and checked against Kubernetes' own schemas.

`make test-charts` brings both from PyPI: no Helm and no cluster are needed.
"""

from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from perdure.settings.settings_loader import fields, variable
from tests.checkout_paths import ROOT
from workers.worker_process import ROLES

CHART = ROOT / "infra" / "helm" / "perdure"
VERSIONS = ("1.32", "1.37")
DIGEST = "sha256:" + "1" * 64
ENGINES = {"enabled": True, "image": f"r/perdure-engine@{DIGEST}"}

gotpl = pytest.importorskip("gotpl", reason="run by `make test-charts`")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="run by `make test-charts`")


def _merged(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = {k: v for k, v in over.items() if not isinstance(v, dict)}
    deep = {k: _merged(base.get(k) or {}, v) for k, v in over.items() if isinstance(v, dict)}
    return base | both | deep


def rendered(**values: Any) -> list[dict[str, Any]]:
    """All objects of the chart, as `helm template perdure` makes them."""
    from gotpl.exts.helm import HelmTemplateEngine

    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    context = {
        "Values": _merged(yaml.safe_load((CHART / "values.yaml").read_text()), values),
        "Release": {"Name": "perdure", "Namespace": "perdure-workers"},
        "Chart": {"Name": chart["name"], "Version": chart["version"]},
    }
    sources = {path.name: path.read_text() for path in sorted((CHART / "templates").iterdir())}
    engine = HelmTemplateEngine.from_sources(sources)
    names = [name for name in sources if name.endswith(".yaml")]
    texts = engine.render({name: context for name in names})
    return [one for name in names for one in yaml.safe_load_all(texts[name]) if one]


def _of(kind: str, objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in objects if one["kind"] == kind}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"image": {"digest": DIGEST}, "engines": ENGINES},
        {"autoscaling": {"enabled": False}, "sandbox": "e2b", "settings": {"E2B_X": "1"}},
    ],
    ids=["as it is", "with engines", "on E2B"],
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
    objects = rendered()
    commands = [
        one["command"]
        for deployment in _of("Deployment", objects).values()
        for one in deployment["spec"]["template"]["spec"]["containers"]
    ]
    scaled = _of("HorizontalPodAutoscaler", objects)

    for role in ROLES:
        assert ["python", "-m", "workers", role] in commands
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
