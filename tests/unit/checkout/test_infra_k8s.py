"""The cluster's side of the kubernetes provider agrees with what the provider asks for."""

import ipaddress
from typing import Any

import pytest
import yaml

from perdure.sandboxes.base import Network, SandboxSpec
from perdure.sandboxes.providers.kubernetes import kubernetes_client
from perdure.sandboxes.providers.kubernetes import kubernetes_errors as kubernetes_failures
from perdure.sandboxes.providers.kubernetes import pods as kubernetes_pods
from perdure.settings.settings_tree import KubernetesSettings
from perdure.types import SharedFolder, Sidecar
from tests.checkout_paths import ROOT

FILE = ROOT / kubernetes_failures.ROLE
ALL: list[dict[str, Any]] = list(yaml.safe_load_all(FILE.read_text()))
OBJECTS: dict[str, dict[str, Any]] = {one["kind"]: one for one in reversed(ALL)}
"""The first of each kind: of the namespaces, the sandboxes'."""
CALLS = {
    "pods": {"create", "read", "delete", "annotate", "listed"},
    "pods/exec": {"run"},
    "pods/log": {"log"},
}
VERBS = {
    "read": {"get"}, "annotate": {"patch"}, "listed": {"list"}, "run": {"get", "create"}, "log": {"get"},
}  # fmt: skip


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


def _policies() -> list[dict[str, Any]]:
    return [one["spec"] for one in ALL if one["kind"] == "NetworkPolicy"]


def test_every_pod_of_the_namespace_is_closed() -> None:
    """One policy selects all pods and has no rule, so that only what another one opens passes."""
    closed = [one for one in _policies() if one["podSelector"] == {}]

    assert [(set(one), set(one["policyTypes"])) for one in closed] == [
        ({"podSelector", "policyTypes"}, {"Ingress", "Egress"})
    ]


@pytest.mark.parametrize(
    "address",
    ["10.96.0.1", "10.244.1.7", "172.20.0.1", "192.168.1.1", "127.0.0.1", "169.254.169.254",
     "100.100.0.1", "fd00:ec2::254", "fe80::1", "::1"],
)  # fmt: skip
def test_a_pod_with_an_open_network_reaches_nothing_of_the_cluster(address: str) -> None:
    """Services, other pods, nodes and metadata are closed to it as well; no Temporal answers it."""
    (opened,) = [one for one in _policies() if one["podSelector"]]
    blocks = [
        peer["ipBlock"] for rule in opened["egress"] for peer in rule["to"] if "ipBlock" in peer
    ]
    found = ipaddress.ip_address(address)

    assert opened["podSelector"] == {"matchLabels": {kubernetes_pods.NETWORK: str(Network.HOST)}}
    assert opened["policyTypes"] == ["Egress"]
    for block in blocks:
        assert found not in ipaddress.ip_network(block["cidr"]) or any(
            found in ipaddress.ip_network(refused) for refused in block["except"]
        )


def test_a_pod_with_an_open_network_reaches_the_internet_and_its_names() -> None:
    """Public addresses of both families pass, and the cluster's name server alone inside it."""
    (opened,) = [one for one in _policies() if one["podSelector"]]
    peers = [peer for rule in opened["egress"] for peer in rule["to"]]
    blocks = [peer["ipBlock"] for peer in peers if "ipBlock" in peer]
    inside = [rule for rule in opened["egress"] if "ipBlock" not in rule["to"][0]]

    for address in ("151.101.0.223", "2a04:4e42::223"):
        found = ipaddress.ip_address(address)
        assert any(
            found in ipaddress.ip_network(block["cidr"])
            and not any(found in ipaddress.ip_network(refused) for refused in block["except"])
            for block in blocks
        )
    assert [{port["port"] for port in rule["ports"]} for rule in inside] == [{53}]


def test_a_pod_passes_the_namespaces_security() -> None:
    """What a sandbox and its sidecars ask for is within the baseline: their capabilities, no host, no
    privilege."""
    baseline = {
        "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD",
        "NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
    }  # fmt: skip
    db = Sidecar(image="db", folders=(SharedFolder(name="data", target="/data"),))
    pod = kubernetes_pods.pod_of(
        SandboxSpec("/testbed", sidecars={"db": db}),
        name="p",
        image="i",
        labels={},
        annotations={},
        cluster={},
        sidecar_images={"db": "db"},
    )["spec"]
    containers = [*pod["containers"], *pod["initContainers"]]
    kinds = {kind for volume in pod["volumes"] for kind in volume} - {"name"}

    for security in (container["securityContext"] for container in containers):
        assert set(security["capabilities"]["add"]) <= baseline
        assert security["allowPrivilegeEscalation"] is False
    assert len(containers) == 2
    assert kinds == {"emptyDir"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
