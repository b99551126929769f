"""The cluster's side of the kubernetes provider agrees with what the provider asks for."""

from typing import Any

import pytest
import yaml

from perdure.sandboxes.base import Network, SandboxSpec
from perdure.sandboxes.providers.kubernetes import client as kubernetes_client
from perdure.sandboxes.providers.kubernetes import failures as kubernetes_failures
from perdure.sandboxes.providers.kubernetes import pods as kubernetes_pods
from perdure.settings.tree import KubernetesSettings
from tests.paths import ROOT

FILE = ROOT / kubernetes_failures.ROLE
ALL: list[dict[str, Any]] = list(yaml.safe_load_all(FILE.read_text()))
OBJECTS: dict[str, dict[str, Any]] = {one["kind"]: one for one in reversed(ALL)}
"""The first of each kind: of the namespaces, the sandboxes'."""
CALLS = {
    "pods": {"create", "read", "delete", "annotate", "listed"},
    "pods/exec": {"run"},
}
VERBS = {"read": {"get"}, "annotate": {"patch"}, "listed": {"list"}, "run": {"get", "create"}}


def test_every_call_of_the_provider_is_known_here() -> None:
    """A new call cannot go without its verb."""
    calls = {name for name in vars(kubernetes_client.PodApi) if name[0] != "_"}

    assert calls - {"api", "sockets", "namespace", "request_s"} == set().union(*CALLS.values())


def test_sandboxes_have_their_own_namespace_the_providers_default() -> None:
    """Without an edit, the file works for a worker that sets no namespace."""
    kinds = {
        one["kind"]
        for one in ALL
        if one["metadata"].get("namespace", one["metadata"]["name"])
        == KubernetesSettings().namespace
    }

    assert kinds == {"Namespace", "NetworkPolicy", "Role", "RoleBinding", "ResourceQuota"}


def test_workers_in_the_cluster_run_outside_of_the_closed_namespace() -> None:
    """A pod runs as an account of its own namespace; that of the sandboxes has no network."""
    account = OBJECTS["ServiceAccount"]["metadata"]
    (subject,) = OBJECTS["RoleBinding"]["subjects"]
    namespaces = {one["metadata"]["name"] for one in ALL if one["kind"] == "Namespace"}

    assert account["namespace"] != OBJECTS["NetworkPolicy"]["metadata"]["namespace"]
    assert (subject["name"], subject["namespace"]) == (account["name"], account["namespace"])
    assert account["namespace"] in namespaces


@pytest.mark.parametrize("resource", CALLS)
def test_the_role_allows_the_calls_and_no_more(resource: str) -> None:
    """Each verb of the Role is one that the provider's calls need."""
    (rule,) = [rule for rule in OBJECTS["Role"]["rules"] if rule["resources"] == [resource]]
    needed = set().union(*(VERBS.get(call, {call}) for call in CALLS[resource]))

    assert set(rule["verbs"]) == needed


@pytest.mark.parametrize("network", Network)
def test_the_policy_closes_every_sandbox_but_those_that_ask(network: Network) -> None:
    """A pod without network is selected and nothing is let in or out; one with the host's is not."""
    policy = OBJECTS["NetworkPolicy"]["spec"]
    (term,) = policy["podSelector"]["matchExpressions"]
    labels = {kubernetes_pods.NETWORK: str(network)}

    assert policy.keys() == {"podSelector", "policyTypes"}  # no rule: nothing passes
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    assert term["operator"] == "NotIn"
    assert (labels[term["key"]] not in term["values"]) is (network is Network.NONE)


def test_a_pod_passes_the_namespaces_security() -> None:
    """What a sandbox asks for is within the baseline: its capabilities, no host, no privilege."""
    baseline = {
        "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD",
        "NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
    }  # fmt: skip
    pod = kubernetes_pods.pod_of(
        SandboxSpec("/testbed"), name="p", image="i", labels={}, annotations={}, cluster={}
    )["spec"]
    (container,) = pod["containers"]
    security = container["securityContext"]
    kinds = {kind for volume in pod["volumes"] for kind in volume} - {"name"}

    assert set(security["capabilities"]["add"]) <= baseline
    assert security["allowPrivilegeEscalation"] is False
    assert kinds == {"emptyDir"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
