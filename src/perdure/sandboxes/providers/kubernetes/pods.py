"""What a sandbox is to Kubernetes: the pod that is asked for, and how one stands.

Pure: JSON in, JSON or words out. Who asks, waits and deletes is the provider.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from perdure.errors import ConfigurationError
from perdure.sandboxes.base import SandboxSpec
from perdure.sandboxes.guest.containers import CAPABILITIES, ROOT, init_command
from perdure.sandboxes.guest.sandbox import FOLDER
from perdure.sandboxes.providers.kubernetes.client import CONTAINER

Pod = Mapping[str, Any]
"""The JSON object of a pod."""

POD_VARIABLE = "PERDURE_KUBERNETES__POD_FILE"
POD_FIELDS = frozenset(
    {
        "affinity", "imagePullSecrets", "nodeSelector", "priorityClassName", "runtimeClassName",
        "schedulerName", "tolerations",
    }
)  # fmt: skip
"""What the cluster's owner may say. All else is the sandbox's, or its walls."""
SCOPE, IDENTITY, NETWORK = "perdure.scope", "perdure.identity", "perdure.network"
SPEC, EXPIRES = "perdure.spec", "perdure.expires"
LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
OUTER_S = 7 * 86400
"""No pod runs longer. Kubernetes lets `activeDeadlineSeconds` only be lowered, so the deadline that
`touch` moves is kept by the first process inside; this one ends what has lost even that."""
GRACE_S = 1
STAYS = {"karpenter.sh/do-not-disrupt": "true"}
"""Other autoscalers leave a pod without a controller where it is anyway."""
AGENT = "1000:1000"


def pod_of(
    spec: SandboxSpec,
    *,
    name: str,
    image: str,
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
) -> dict[str, Any]:
    """The whole object to create."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": dict(labels),
            "annotations": {**STAYS, **annotations},
        },
        "spec": {
            **cluster_fields(),
            "restartPolicy": "Never",
            "activeDeadlineSeconds": max(OUTER_S, 2 * int(spec.ttl_s)),
            "terminationGracePeriodSeconds": GRACE_S,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "hostname": "sandbox",
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [_container(spec, image)],
            "volumes": [
                {"name": "perdure", "emptyDir": {}},
                {"name": "shm", "emptyDir": {"medium": "Memory"}},
            ],
        },
    }


def _container(spec: SandboxSpec, image: str) -> dict[str, Any]:
    limits = spec.limits
    resources = {
        "cpu": f"{limits.cpus:g}",
        "memory": f"{limits.memory_mb}Mi",
        "ephemeral-storage": f"{limits.disk_mb}Mi",
    }
    return {
        "name": CONTAINER,
        "image": image,
        "command": ["python3", *init_command(spec.ttl_s)],
        "workingDir": "/",
        "env": [{"name": "PERDURE_OWNER", "value": ROOT if spec.image else AGENT}],
        "resources": {"requests": resources, "limits": resources},
        "securityContext": {
            "runAsUser": 0,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], "add": list(CAPABILITIES)},
        },
        "volumeMounts": [
            {"name": "perdure", "mountPath": FOLDER},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def cluster_fields() -> dict[str, Any]:
    """What the JSON file of `PERDURE_KUBERNETES__POD_FILE` adds to each pod.

    Raises: ConfigurationError naming the file and what is wrong in it.
    """
    path = os.environ.get(POD_VARIABLE)
    if not path:
        return {}
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{POD_VARIABLE}: {path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{POD_VARIABLE}: {path} must hold one JSON object")
    if strange := sorted(found.keys() - POD_FIELDS):
        known = ", ".join(sorted(POD_FIELDS))
        raise ConfigurationError(
            f"{POD_VARIABLE}: {path} names {', '.join(strange)}; only {known} may be given"
        )
    return found


def annotation(pod: Mapping[str, Any], name: str) -> str:
    return str((pod["metadata"].get("annotations") or {}).get(name, ""))


# -- how it stands --------------------------------------------------------------------------------


NEVER_BEGAN = ("StartError", "ContainerCannotRun")
"""How `Standing.why` begins where no process has run in the container. What others say of its end may
be a command's own words: it can write the file that they are read from."""
NOWHERE = re.compile(r"preemption: 0/(\d+) nodes are available: \1 Preemption is not helpful")


class Standing(NamedTuple):
    """`coming`: made, not up yet. `going`: being deleted, by whomever. `over`: it ended."""

    state: Literal["coming", "up", "going", "over"]
    why: str = ""


class Obstacle(NamedTuple):
    """What a pod waits for, where it is more than time."""

    kind: Literal["node", "image", "container"]
    reason: str
    message: str


def standing(pod: Mapping[str, Any]) -> Standing:
    status = pod.get("status") or {}
    phase = status.get("phase", "Pending")
    if pod["metadata"].get("deletionTimestamp"):
        return Standing("going", _disruption(status) or "it is being deleted")
    if phase == "Succeeded":
        return Standing("over", "its time was over")
    ended = _container_state(status).get("terminated")
    if phase == "Failed" or ended:
        return Standing("over", _failure(status, ended or {}))
    running = phase == "Running" and "running" in _container_state(status)
    return Standing("up" if running else "coming", _disruption(status))


def _failure(status: Mapping[str, Any], ended: Mapping[str, Any]) -> str:
    """Evicted, OOMKilled, DeadlineExceeded, Preempting, NodeLost and the like, in its own words."""
    reasons = [status.get("reason"), ended.get("reason"), _disruption(status)]
    messages = [status.get("message"), ended.get("message")]
    reason = next((one for one in reasons if one), "Failed")
    message = next((one for one in messages if one), "")
    return f"{reason}: {message}" if message else str(reason)


def _disruption(status: Mapping[str, Any]) -> str:
    """Who took it away: preemption, eviction, a taint, the collector of a lost node's pods."""
    for condition in status.get("conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            return f"{condition.get('reason')}: {condition.get('message', '')}".strip()
    return ""


def obstacle(pod: Mapping[str, Any]) -> Obstacle | None:
    """Why a pod that is coming does not come, as far as anything says so."""
    status = pod.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("reason") == "Unschedulable":
            return Obstacle("node", "Unschedulable", str(condition.get("message", "")))
    waiting = _container_state(status).get("waiting") or {}
    reason, message = str(waiting.get("reason", "")), str(waiting.get("message", ""))
    if reason in ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"):
        return Obstacle("image", reason, message)
    if reason in ("CreateContainerConfigError", "CreateContainerError", "RunContainerError"):
        return Obstacle("container", reason, message)
    return None


def _container_state(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of the sandbox: a cluster may add containers of its own, such as a mesh's."""
    statuses = status.get("containerStatuses") or ()
    ours: Mapping[str, Any] = next((one for one in statuses if one.get("name") == CONTAINER), {})
    state: Mapping[str, Any] = ours.get("state") or {}
    return state


def lacks_room(found: Obstacle) -> bool:
    """No node is free; as against: no node may run it, however long one waits."""
    return "Insufficient" in found.message or "Too many pods" in found.message


def fits_nowhere(found: Obstacle) -> bool:
    """A node that has too little for it would have too little without any other pod: so says the
    scheduler of Kubernetes 1.34 on. Older ones do not tell."""
    return "Insufficient" in found.message and NOWHERE.search(found.message) is not None
