"""Reads the state of pods, and builds them, without a cluster."""

import json
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import ConfigurationError, ControlPlaneError, PerdureError, RateLimited
from perdure.sandboxes.base import SandboxSpec
from perdure.sandboxes.guest.service_retries import Conflict, Missing
from perdure.sandboxes.providers.kubernetes import pods
from perdure.sandboxes.providers.kubernetes.kubernetes_client import CommandOutput
from perdure.sandboxes.providers.kubernetes.kubernetes_errors import ErrorAnswer, typed
from perdure.sandboxes.providers.kubernetes.provider import KubernetesProvider
from perdure.settings.settings_tree import Settings


def pod(phase: str, *, state: dict[str, Any] | None = None, **status: Any) -> dict[str, Any]:
    statuses = [{"name": "sandbox", "state": state}] if state is not None else []
    return {"metadata": {}, "status": {"phase": phase, "containerStatuses": statuses, **status}}


def condition(kind: str, status: str, reason: str, message: str = "") -> list[dict[str, str]]:
    return [{"type": kind, "status": status, "reason": reason, "message": message}]


UNSTARTED = {"terminated": {"exitCode": 128, "reason": "StartError", "message": "no python3"}}
OOM = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
PREEMPTED = condition("DisruptionTarget", "True", "PreemptionByScheduler", "for p2")


@pytest.mark.parametrize(
    ("said", "state", "why"),
    [
        (pod("Pending"), "coming", ""),
        (pod("Pending", state={"waiting": {"reason": "ContainerCreating"}}), "coming", ""),
        (pod("Running", state={"running": {}}), "up", ""),
        (pod("Unknown"), "coming", ""),
        (pod("Succeeded"), "over", "it reached its deadline"),
        (pod("Failed", reason="Evicted", message="disk"), "over", "Evicted: disk"),
        (pod("Failed", reason="DeadlineExceeded"), "over", "DeadlineExceeded"),
        (pod("Failed", state=OOM), "over", "OOMKilled"),
        (pod("Failed", state=UNSTARTED), "over", f"{pods.NEVER_BEGAN[0]}: no python3"),
        (pod("Running", state=OOM), "over", "OOMKilled"),
        (pod("Failed", conditions=PREEMPTED), "over", "PreemptionByScheduler: for p2"),
    ],
)
def test_the_state_of_a_pod_is_read(said: dict[str, Any], state: str, why: str) -> None:
    """Its phase, its container's state and the cause of its disruption, as the cluster reports."""
    assert pods.state_of(said) == (state, why)


def test_containers_that_the_cluster_adds_are_not_asked() -> None:
    """A service mesh's proxy sorts first by name, and keeps running after the sandbox has ended."""
    said = pod("Running", state=OOM)
    proxy = {"name": "istio-proxy", "state": {"running": {}}}
    said["status"]["containerStatuses"].insert(0, proxy)

    assert pods.state_of(said) == ("over", "OOMKilled")


def test_a_pod_that_is_being_deleted_is_going_whatever_its_phase() -> None:
    """The phase of a pod on a lost node stays Running for ever."""
    said = pod("Running", state={"running": {}}, conditions=PREEMPTED)
    said["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"

    assert pods.state_of(said) == ("going", "PreemptionByScheduler: for p2")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"hostNetwork": true}', "sets hostNetwork"),
        ("[]", "one JSON object"),
        ("{", "cannot be read"),
    ],
)
def test_a_pod_file_cannot_weaken_isolation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    """The file may set only where and how a pod is placed; the error names the file and the field."""
    (tmp_path / "pod.json").write_text(text)
    monkeypatch.setenv(pods.POD_VARIABLE, str(tmp_path / "pod.json"))

    with pytest.raises(ConfigurationError, match=said):
        pods.cluster_fields(Settings().kubernetes)
    assert any(said in line for line in KubernetesProvider(Settings(home=tmp_path)).check())


def test_a_pod_file_adds_to_every_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod has the tolerations and the runtime class that the cluster's file gives."""
    wanted = {"runtimeClassName": "gvisor", "tolerations": [{"operator": "Exists"}]}
    (tmp_path / "pod.json").write_text(json.dumps(wanted))
    monkeypatch.setenv(pods.POD_VARIABLE, str(tmp_path / "pod.json"))
    cluster = pods.cluster_fields(Settings().kubernetes)
    made = pods.pod_of(
        SandboxSpec("/x"),
        name="p",
        image="i",
        labels={},
        annotations={},
        cluster=cluster,
        sidecar_images={},
    )

    assert {name: made["spec"][name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("status", "reason", "message", "kind"),
    [
        (401, "Unauthorized", "Unauthorized", ControlPlaneError),
        (403, "Forbidden", "cannot create resource", ConfigurationError),
        (403, "Forbidden", "exceeded quota: pods, used: pods=3", RateLimited),
        (403, "Forbidden", 'violates PodSecurity "restricted:latest"', ConfigurationError),
        (404, "NotFound", 'pods "x" not found', Missing),
        (404, "", "default backend - 404", ControlPlaneError),
        (409, "AlreadyExists", 'pods "x" already exists', Conflict),
        (409, "Conflict", "the object has been modified", ControlPlaneError),
        (422, "Invalid", "spec.x: Required value", ConfigurationError),
        (429, "TooManyRequests", "", RateLimited),
        (500, "InternalError", "etcdserver: request timed out", ControlPlaneError),
    ],
)
def test_each_refusal_of_the_api_has_its_error_type(
    status: int, reason: str, message: str, kind: type[PerdureError]
) -> None:
    """The status and its reason decide: repeat, queue, adopt, or report a wrong setting."""
    found = typed(ErrorAnswer(status, reason, message, None), "create", key_works=True)

    assert type(found) is kind


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (None, None),
        ({"status": "Success"}, 0),
        ({"status": "Failure", "details": {"causes": [{"reason": "ExitCode", "message": "3"}]}}, 3),
        ({"status": "Failure", "message": "container not found"}, None),
    ],
)
def test_a_commands_end_is_read_as_the_api_says_it(status: Any, code: int | None) -> None:
    """A cut socket and a failed API call give no exit code."""
    assert CommandOutput(b"", b"", status).code == code
