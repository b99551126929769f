"""Builds the pod of a sandbox, and reads a pod's state.

Pure functions on JSON. The provider makes the calls.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from perdure.errors import ConfigurationError
from perdure.sandboxes.base import SandboxSpec
from perdure.sandboxes.guest.container_options import CAPABILITIES, ROOT, init_command
from perdure.sandboxes.guest.guest_sandbox import FOLDER
from perdure.sandboxes.image_names import json_object
from perdure.sandboxes.providers.kubernetes import pod_sidecars
from perdure.sandboxes.providers.kubernetes.kubernetes_client import CONTAINER
from perdure.settings.settings_tree import KubernetesSettings

Pod = Mapping[str, Any]
"""The JSON object of a pod."""

POD_VARIABLE = "PERDURE_KUBERNETES__POD_FILE"
POD_FIELDS = frozenset(
    {
        "affinity", "imagePullSecrets", "nodeSelector", "priorityClassName", "runtimeClassName",
        "schedulerName", "tolerations",
    }
)  # fmt: skip
"""Fields of the pod that the cluster's owner may set. The others belong to the sandbox's isolation."""
SCOPE, IDENTITY, NETWORK = "perdure.scope", "perdure.identity", "perdure.network"
SPEC, EXPIRES = "perdure.spec", "perdure.expires"
LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
OUTER_S = 7 * 86400
"""Seconds after which Kubernetes ends any pod. `activeDeadlineSeconds` can only be lowered, so the first
process inside enforces the deadline that `touch` moves; this one is the last resort."""
GRACE_S = 1
STAYS = {"karpenter.sh/do-not-disrupt": "true"}
"""For Karpenter. Other autoscalers do not move a pod without a controller."""
AGENT = "1000:1000"


def pod_of(
    spec: SandboxSpec,
    *,
    name: str,
    image: str,
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    cluster: Mapping[str, Any],
    sidecar_images: Mapping[str, str],
) -> dict[str, Any]:
    """The whole object to create. `sidecar_images`: sidecar -> what its node pulls."""
    folders = [
        *spec.folders,
        *(one for sidecar in spec.sidecars.values() for one in sidecar.folders),
    ]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": dict(labels),
            "annotations": {**STAYS, **annotations},
        },
        "spec": {
            **cluster,
            "restartPolicy": "Never",
            "activeDeadlineSeconds": max(OUTER_S, 2 * int(spec.ttl_s)),
            "terminationGracePeriodSeconds": GRACE_S,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "hostname": "sandbox",
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [_container(spec, image)],
            **pod_sidecars.pod_fields(spec.sidecars, sidecar_images, spec.limits),
            "volumes": [
                {"name": "perdure", "emptyDir": {}},
                {"name": "shm", "emptyDir": {"medium": "Memory"}},
                *pod_sidecars.folder_volumes(folders, spec.limits),
            ],
        },
    }


def _container(spec: SandboxSpec, image: str) -> dict[str, Any]:
    return {
        "name": CONTAINER,
        "image": image,
        "command": ["python3", *init_command(spec.ttl_s)],
        "workingDir": "/",
        "env": [{"name": "PERDURE_OWNER", "value": ROOT if spec.image else AGENT}],
        "resources": pod_sidecars.resources_of(spec.limits),
        "securityContext": {
            "runAsUser": 0,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], "add": list(CAPABILITIES)},
        },
        "volumeMounts": [
            {"name": "perdure", "mountPath": FOLDER},
            {"name": "shm", "mountPath": "/dev/shm"},
            *pod_sidecars.folder_mounts(spec.folders),
        ],
    }


def cluster_fields(settings: KubernetesSettings) -> dict[str, Any]:
    """The fields that the JSON file of `PERDURE_KUBERNETES__POD_FILE` adds to each pod.

    Raises: ConfigurationError naming the file and what is wrong in it.
    """
    path = settings.pod_file
    if path is None:
        return {}
    found = json_object(path, POD_VARIABLE)
    if strange := sorted(found.keys() - POD_FIELDS):
        known = ", ".join(sorted(POD_FIELDS))
        raise ConfigurationError(
            f"{POD_VARIABLE}: {path} sets {', '.join(strange)}; it may set only {known}"
        )
    return found


def annotation(pod: Mapping[str, Any], name: str) -> str:
    return str((pod["metadata"].get("annotations") or {}).get(name, ""))


def own_spec(pod: Mapping[str, Any]) -> dict[str, Any]:
    """What the annotation SPEC holds."""
    return dict(json.loads(annotation(pod, SPEC) or "{}"))


def sidecar_failure(pod: Mapping[str, Any]) -> pod_sidecars.Failure | None:
    return pod_sidecars.failure(pod, own_spec(pod).get("sidecars") or {})


# -- its state --------------------------------------------------------------------------------


NEVER_BEGAN = ("StartError", "ContainerCannotRun")
"""How `PodState.why` begins if no process has run in the container. Other reasons may be forged: a
command can write the file that they are read from."""
NOWHERE = re.compile(r"preemption: 0/(\d+) nodes are available: \1 Preemption is not helpful")


class PodState(NamedTuple):
    """`coming`: made, but not up yet. `going`: being deleted. `over`: it has ended."""

    state: Literal["coming", "up", "going", "over"]
    why: str = ""


class Obstacle(NamedTuple):
    """Why a pod does not come up."""

    kind: Literal["node", "image", "container"]
    reason: str
    message: str
    image: str = ""


def state_of(pod: Mapping[str, Any]) -> PodState:
    status = pod.get("status") or {}
    phase = status.get("phase", "Pending")
    if pod["metadata"].get("deletionTimestamp"):
        return PodState("going", _disruption(status) or "it is being deleted")
    if phase == "Succeeded":
        return PodState("over", "it reached its deadline")
    if (failed := sidecar_failure(pod)) is not None:
        return PodState("over", f"its sidecar {failed.sidecar!r} {failed.what}")
    ended = _container_state(status).get("terminated")
    if phase == "Failed" or ended:
        return PodState("over", _failure(status, ended or {}))
    running = phase == "Running" and "running" in _container_state(status)
    return PodState("up" if running else "coming", _disruption(status))


def _failure(status: Mapping[str, Any], ended: Mapping[str, Any]) -> str:
    """Evicted, OOMKilled, DeadlineExceeded, Preempting, NodeLost and the like, as the API reports it."""
    reasons = [status.get("reason"), ended.get("reason"), _disruption(status)]
    messages = [status.get("message"), ended.get("message")]
    reason = next((one for one in reasons if one), "Failed")
    message = next((one for one in messages if one), "")
    return f"{reason}: {message}" if message else str(reason)


def _disruption(status: Mapping[str, Any]) -> str:
    """What removed it: preemption, eviction, a taint, or the collector of a lost node's pods."""
    for condition in status.get("conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            return f"{condition.get('reason')}: {condition.get('message', '')}".strip()
    return ""


def obstacle(pod: Mapping[str, Any]) -> Obstacle | None:
    """Why a `coming` pod does not run yet, if its status says so."""
    status = pod.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("reason") == "Unschedulable":
            return Obstacle("node", "Unschedulable", str(condition.get("message", "")))
    containers = [*(pod["spec"].get("initContainers") or ()), *pod["spec"]["containers"]]
    images = {one["name"]: str(one.get("image", "")) for one in containers}
    ours = {CONTAINER, *(own_spec(pod).get("sidecars") or {})}
    for one in (*(status.get("initContainerStatuses") or ()), *_statuses(status)):
        waiting = (one.get("state") or {}).get("waiting") or {}
        reason, message = str(waiting.get("reason", "")), str(waiting.get("message", ""))
        name = one.get("name")
        if name not in ours:  # a cluster may add others, such as a service mesh's
            continue
        if reason in ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"):
            return Obstacle("image", reason, message, images[name])
        if reason in ("CreateContainerConfigError", "CreateContainerError", "RunContainerError"):
            return Obstacle("container", reason, message)
    return None


def _container_state(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of the sandbox's container. A cluster may add others, such as a service mesh's."""
    ours = next((one for one in _statuses(status) if one.get("name") == CONTAINER), {})
    state: Mapping[str, Any] = ours.get("state") or {}
    return state


def _statuses(status: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return status.get("containerStatuses") or ()


def lacks_room(found: Obstacle) -> bool:
    """No node has room now, although one may have room later."""
    return "Insufficient" in found.message or "Too many pods" in found.message


def fits_nowhere(found: Obstacle) -> bool:
    """Even an empty node is too small for it. Schedulers before Kubernetes 1.34 do not report that."""
    return "Insufficient" in found.message and NOWHERE.search(found.message) is not None
