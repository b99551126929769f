"""The pods of sandboxes are what the API accepts, field by field."""

import pytest

from perdure.sandboxes.base import SandboxSpec
from perdure.sandboxes.providers.kubernetes import pods
from perdure.types import Healthcheck, SharedFolder, Sidecar

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="run by `make test-charts`")
VERSIONS = ("1.32", "1.37")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_pod_with_sidecars_is_valid(version: str) -> None:
    data = SharedFolder(name="data", target="/data", read_only=True)
    db = Sidecar(
        image="postgres:16",
        entrypoint=("sh", "-c"),
        command=("exec postgres",),
        env={"A": "b"},
        workdir="/tmp",
        user="999:999",
        aliases=("database",),
        healthcheck=Healthcheck(command=("pg_isready",), timeout_s=0.5),
        folders=(data,),
    )
    job = Sidecar(image="i", completes=True, depends_on={"db": "healthy"})
    spec = SandboxSpec(workdir="/w", image="main", sidecars={"job": job, "db": db}, folders=(data,))
    pod = pods.pod_of(
        spec,
        name="perdure-box",
        image="main",
        labels={},
        annotations={},
        cluster={},
        sidecar_images={"db": "postgres:16", "job": "i"},
    )
    kubernetes_validate.validate(pod, version, strict=True)

    assert [one["name"] for one in pod["spec"]["initContainers"]] == ["db", "job"]
    pod["spec"]["initContainers"][0]["startupProbe"]["exec"] = "pg_isready"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, version, strict=True)
