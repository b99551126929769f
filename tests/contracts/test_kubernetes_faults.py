"""What a failing cluster does to a sandbox: the real client against the double, one fault each.

After each fault: the operation is right or fails with the type that says what to do, nothing was
made or run twice, and no pod is left.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import (
    ConfigurationError,
    ControlPlaneError,
    InstanceError,
    PerdureError,
    RateLimited,
    SandboxLost,
)
from perdure.sandboxes.base import Exec, ExecState, SandboxSpec
from perdure.sandboxes.providers.kubernetes import kubernetes_errors as kubernetes_failures
from perdure.sandboxes.providers.kubernetes import pod_boot_wait
from perdure.sandboxes.providers.kubernetes import provider as kubernetes
from perdure.sandboxes.providers.kubernetes.provider import KubernetesProvider
from perdure.settings.settings_tree import Settings
from tests.doubles import kubernetes_server
from tests.service_harness import ID, KUBERNETES, SPEC, Bench, Service, impatient

CREATE, EXEC = KUBERNETES.create, KUBERNETES.execute
READ = "GET .*/pods/[^/]+$"
DELETE = "DELETE .*/pods/"
PASSING: dict[str, dict[str, Any]] = {
    "401 once": {"status": 401},
    "409 of a quota": {"status": 409, "body": {"reason": "Conflict", "message": "try again"}},
    "429 with Retry-After": {"status": 429, "headers": {"Retry-After": "1"}},
    "503 HTML": {"status": 503, "body": "<html>no backend</html>"},
    "reset": {"reset": True},
    "black hole": {"hang": True},
}
FITS_NOWHERE = (
    "0/3 nodes are available: 1 node(s) had untolerated taint {control-plane: }, 2 Insufficient cpu. "
    "preemption: 0/3 nodes are available: 3 Preemption is not helpful for scheduling."
)
LOST = ("503 HTML", "reset", "black hole")


@pytest.fixture
def service() -> Service:
    return KUBERNETES


async def refused(bench: Bench) -> PerdureError:
    """The error of a create that cannot succeed. The identity is free afterwards."""
    with pytest.raises(PerdureError) as raised:
        await bench.provider.create(SPEC, ID)
    return raised.value


# -- making ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "when"),
    [
        *((fault, "before") for fault in PASSING if fault not in LOST),
        *((fault, "after") for fault in LOST),
    ],
)
async def test_create_survives_a_passing_fault(bench: Bench, fault: str, when: str) -> None:
    """If the answer to a create is lost, one pod is made, and none is left after it."""
    if fault == "black hole":
        bench.hurry()
    bench.inject(CREATE, when=when, **PASSING[fault])
    async with bench.box() as box:
        said, live = (await box.exec("echo up")).stdout, len(bench.live)

    assert (said, live, bench.live) == (b"up\n", 1, [])


async def test_rights_that_are_missing_are_named(bench: Bench) -> None:
    """A 403 of RBAC stops the run. The error has the cluster's message and names the file to apply."""
    said = 'pods is forbidden: User "worker" cannot create resource "pods"'
    bench.inject(CREATE, status=403, body={"reason": "Forbidden", "message": said})
    error = await refused(bench)

    assert isinstance(error, ConfigurationError)
    assert said in str(error)
    assert kubernetes_failures.ROLE in str(error)


async def test_credentials_that_never_worked_are_refused(bench: Bench, tmp_path: Path) -> None:
    """401 from the first call on is a configuration error."""
    bench.inject(".*", status=401)
    with pytest.raises(ConfigurationError, match="KUBECONFIG"):
        await KubernetesProvider(Settings(home=tmp_path / "new")).create(SPEC, ID)


async def test_credentials_that_were_renewed_are_read_again(bench: Bench) -> None:
    """Tokens of a cloud login last minutes, so the file is read again after a 401."""
    path = bench.server.kubeconfig
    known = json.loads(path.read_text())
    known["users"][0]["user"]["token"] = "renewed"
    path.write_text(json.dumps(known))
    bench.inject(".*", status=401)
    await bench.provider.list()
    sent = [entry["headers"].get("Authorization") for entry in bench.server.faults.log]

    assert sent[-2:] == [None, "Bearer renewed"]


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("{", {}),
        ("words", {}),
        ("", {"certificate-authority-data": "no base64!"}),
        ("", {"certificate-authority-data": "aGVsbG8="}),
    ],
    ids=["no YAML", "no object", "no base64", "no certificate"],
)
async def test_a_file_that_is_no_kubeconfig_is_named(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, fields: Any
) -> None:
    """A broken kubeconfig is not retried: the first error names the variable to correct."""
    known = json.loads(bench.server.kubeconfig.read_text())
    known["clusters"][0]["cluster"] |= {"server": "https://127.0.0.1:1", **fields}
    (tmp_path / "broken").write_text(text or json.dumps(known))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "broken"))

    with pytest.raises(ConfigurationError, match="KUBECONFIG"):
        await KubernetesProvider(Settings(home=tmp_path / "new")).list()


async def test_every_call_goes_by_the_kubeconfigs_proxy(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands' sockets use the proxy too: only the proxy can reach the cluster."""
    known = json.loads(bench.server.kubeconfig.read_text())
    cluster = known["clusters"][0]["cluster"]
    async with _proxy_of(cluster["server"]) as url:
        cluster |= {"server": "http://cluster.invalid", "proxy-url": url}
        (tmp_path / "behind").write_text(json.dumps(known))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "behind"))
        async with bench.box() as box:
            assert (await box.exec("echo up")).stdout == b"up\n"


@contextlib.asynccontextmanager
async def _proxy_of(server: str) -> AsyncIterator[str]:
    """The URL of an HTTP proxy that joins every connection with this server."""
    host, port = server.removeprefix("http://").split(":")

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pipe(reader, ours), pipe(theirs, writer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as proxy:
        yield f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"


async def test_a_proxy_that_is_not_spoken_to_is_refused(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong proxy URL is not retried. The error names the field, without the password."""
    known = json.loads(bench.server.kubeconfig.read_text())
    known["clusters"][0]["cluster"]["proxy-url"] = "socks5://me:password@127.0.0.1:1"
    (tmp_path / "socks").write_text(json.dumps(known))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "socks"))

    with pytest.raises(ConfigurationError, match="proxy-url of KUBECONFIG") as raised:
        await KubernetesProvider(Settings(home=tmp_path / "new")).list()
    assert "password" not in str(raised.value)


async def test_a_login_that_fails_for_a_moment_is_tried_again(bench: Bench, tmp_path: Path) -> None:
    """If the program that renews a token fails for a moment, the call is repeated."""
    path, flag = bench.server.kubeconfig, tmp_path / "failed-once"
    script = (
        f"test -e {flag} || {{ touch {flag}; echo no answer >&2; exit 1; }}; cat {tmp_path}/said"
    )
    version = "client.authentication.k8s.io/v1"
    said = {"apiVersion": version, "kind": "ExecCredential", "status": {"token": "new"}}
    (tmp_path / "said").write_text(json.dumps(said))
    known = json.loads(path.read_text())
    login = {"apiVersion": version, "command": "sh", "args": ["-c", script]}
    known["users"][0]["user"]["exec"] = login
    path.write_text(json.dumps(known))
    bench.inject(".*", status=401, times=2)
    await bench.provider.list()

    assert bench.server.faults.log[-1]["headers"]["Authorization"] == "Bearer new"


@pytest.mark.parametrize("waits", [True, False])
async def test_a_quota_is_waited_for_or_told(
    bench: Bench, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full namespace is RateLimited, not a configuration error: other sandboxes must end first."""
    impatient(monkeypatch, 3.0)
    bench.provider.waits_at_caps = waits
    bench.server.settings["max_pods"] = 0
    error = await refused(bench)

    assert isinstance(error, RateLimited)
    assert (error.limit, len(bench.asked("POST")) > 1) == ("concurrency", waits)


async def test_a_quota_that_our_own_pod_fills_refuses_it_nothing(bench: Bench) -> None:
    """The API checks the quota before the name. After a lost answer the pod itself may fill the
    quota, so no other pod has to end first."""
    bench.provider.waits_at_caps = False
    bench.server.settings["max_pods"] = 1
    bench.inject(CREATE, when="after", reset=True)
    async with bench.box() as box:
        assert (await box.exec("echo up")).stdout == b"up\n"


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("0/3 nodes are available: 3 Insufficient memory.", RateLimited),
        (FITS_NOWHERE.replace("3 Pre", "1 Pre"), RateLimited),
        ("0/3 nodes are available: 3 node(s) had untolerated taint {gpu: 1}.", ConfigurationError),
    ],
)
async def test_a_pod_that_no_node_takes_is_deleted(
    bench: Bench, said: str, kind: type[PerdureError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lack of room is RateLimited, so that callers queue. A taint is a configuration error."""
    monkeypatch.setattr(pod_boot_wait, "ROOM_S", 0.3)
    bench.inject(CREATE, state="Unschedulable", body=said)
    error = await refused(bench)

    assert (type(error), said in str(error), bench.live) == (kind, True, [])


async def test_a_pod_that_is_larger_than_every_node_is_a_persons_to_see(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If even an empty node is too small, the wait ends unless a larger node is added in time."""
    monkeypatch.setattr(pod_boot_wait, "ROOM_S", 0.0)
    monkeypatch.setattr(pod_boot_wait, "LARGER_S", 0.3)
    bench.inject(CREATE, state="Unschedulable", body=FITS_NOWHERE)
    error = await refused(bench)

    assert (type(error), bench.live) == (ConfigurationError, [])
    assert "add larger nodes" in str(error)


async def test_a_larger_node_may_come_late(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """An autoscaler that adds a larger node gets more time than a wait for room."""
    monkeypatch.setattr(pod_boot_wait, "ROOM_S", 0.0)
    bench.inject(CREATE, state="Unschedulable", state_s=0.5, body=FITS_NOWHERE)
    async with bench.box() as box:
        assert (await box.exec("echo up")).stdout == b"up\n"


async def test_a_node_may_come_late(bench: Bench) -> None:
    """A create waits for a pod that waits for a node."""
    bench.inject(CREATE, state="Unschedulable", state_s=0.5)
    async with bench.box() as box:
        assert (await box.exec("echo up")).stdout == b"up\n"


@pytest.mark.parametrize("reason", ["ErrImagePull", "InvalidImageName"])
async def test_an_image_that_is_not_there_ends_its_instance(bench: Bench, reason: str) -> None:
    """It is not retried, and the pod is deleted."""
    bench.inject(CREATE, state=reason)
    error = await refused(bench)

    assert (type(error), bench.live) == (InstanceError, [])


async def test_an_image_without_python_ends_its_instance(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the first process cannot start, the error blames the image."""
    said = 'exec: "python3": executable file not found in $PATH'
    monkeypatch.setitem(kubernetes_server.FAILED, "StartError", said)
    bench.inject(CREATE, state="StartError")
    error = await refused(bench)

    assert isinstance(error, InstanceError)
    assert "lacks python3" in str(error)


async def test_an_image_without_shell_tools_ends_its_instance(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the first look inside fails before a command has run, the error blames the image."""
    _without_programs(bench, monkeypatch)
    error = await refused(bench)

    assert isinstance(error, InstanceError)
    assert "shell tool" in str(error)


async def test_a_command_that_breaks_its_sandbox_costs_it_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that is missing after commands have run is not blamed on the image."""
    async with bench.box() as box:
        _without_programs(bench, monkeypatch)
        with pytest.raises(SandboxLost, match="removed"):
            await box.exec("true")


async def test_the_words_of_a_pod_that_ended_blame_no_image(bench: Bench) -> None:
    """Commands can forge the message with which the cluster reports the end."""
    bench.inject(CREATE, state="Evicted", body="sh: python3: not found")
    error = await refused(bench)

    assert isinstance(error, SandboxLost)


def _without_programs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, shells in pods find no program."""
    with_input = bench.server._with_input

    async def broken(box: Any, exec_id: str, argv: Any) -> Any:
        return await with_input(box, exec_id, ["sh", "-c", f"PATH=/none; {argv[2]}", *argv[3:]])

    monkeypatch.setattr(bench.server, "_with_input", broken)


async def test_a_registry_that_is_down_is_another_matter(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node retries for a while; then the caller does."""
    monkeypatch.setattr(pod_boot_wait, "PULL_S", 0.3)
    bench.inject(CREATE, state="ErrImagePull", body="dial tcp: i/o timeout")
    error = await refused(bench)

    assert (type(error), bench.live) == (ControlPlaneError, [])


async def test_a_network_that_is_open_is_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster that does not enforce the policy is refused: the sandbox checks it from inside."""
    monkeypatch.setattr(kubernetes, "CLOSED_S", 0.1)
    bench.server.settings["open_network"] = 1.0
    error = await refused(bench)

    assert (type(error), bench.live) == (ConfigurationError, [])
    assert "NetworkPolicy" in str(error)


async def test_a_network_that_cannot_be_looked_at_is_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the API server's address inside, the provider cannot check the network."""
    box_of = type(bench.server)._box

    def untold(self: Any, *given: Any) -> SandboxSpec:
        spec: SandboxSpec = box_of(self, *given)
        return replace(
            spec, env={name: spec.env[name] for name in spec.env if "_SERVICE_" not in name}
        )

    monkeypatch.setattr(type(bench.server), "_box", untold)
    error = await refused(bench)

    assert (type(error), bench.live) == (ConfigurationError, [])
    assert "KUBERNETES_SERVICE_HOST" in str(error)


@pytest.mark.parametrize("call", [READ, DELETE])
async def test_a_proxys_404_is_no_word_on_a_pod(bench: Bench, call: str) -> None:
    """Only the API's own 404 means that a pod is gone; a proxy's does not."""
    box = await bench.provider.create(SPEC, ID)
    bench.inject(call, status=404, body="<html>default backend</html>")
    await (await bench.provider.attach(ID)).exec("true")
    await box.kill()

    assert bench.live == []


async def test_a_pod_on_its_way_out_frees_its_name(bench: Bench) -> None:
    """A create waits while the old pod is still terminating, and then makes a new one."""
    bench.server.settings["delete_s"] = 0.5
    async with bench.box() as box:
        await box.write_file("mark", b"old")
        name = bench.server.sandboxes.all()[0]["pod"]["metadata"]["name"]
        await bench.provider._call("delete", lambda it: it.delete(name, 1))  # type: ignore[attr-defined]
        again = await bench.provider.create(SPEC, ID)

        assert (await again.exec("ls")).stdout == b""


# -- commands -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "when"),
    [
        ("429 with Retry-After", "before"),
        ("reset", "before"),
        ("reset", "after"),
    ],
)
async def test_a_command_runs_once_whatever_happens_to_its_socket(
    bench: Bench, fault: str, when: str
) -> None:
    """A start whose answer is lost, before or after it ran, is repeated and runs nothing twice."""
    async with bench.box() as box:
        bench.inject(EXEC, when=when, **PASSING[fault])
        await box.start("once", Exec(["bash", "-c", "echo ran >>count; exit 3"]))
        status = await box.wait("once", 60)

        assert (status.state, status.code, await bench.count(box)) == (
            ExecState.EXITED,
            3,
            b"ran\n",
        )


@pytest.mark.parametrize("how", ["cut", "no_end", "truncated"])
async def test_a_socket_that_lies_changes_no_result(bench: Bench, how: str) -> None:
    """A socket that is cut, tells no end, or loses output never turns a failure into a success."""
    async with bench.box() as box:
        bench.inject(EXEC, stream=how, times=2)
        result = await box.exec("echo ran >>count; echo out; exit 7")

        assert (result.status.code, result.stdout, await bench.count(box)) == (
            7,
            b"out\n",
            b"ran\n",
        )


@pytest.mark.parametrize(
    ("how", "when"),
    [("OutOfcpu", "before"), ("OOMKilled", "after"), ("Evicted", "after"), ("Preempted", "after")],
)
async def test_a_pod_that_is_taken_away_is_lost_with_the_reason(
    bench: Bench, how: str, when: str
) -> None:
    """The pod is evicted, out of memory or preempted, before its command or during it."""
    async with bench.box() as box:
        bench.inject(EXEC, kill=True, state=how, when=when)
        with pytest.raises(SandboxLost, match="Preempt" if how == "Preempted" else how):
            await box.exec("echo on")


async def test_a_node_that_is_silent_for_long_is_gone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running pod that has not answered for long is lost, and its kill does not wait for the
    node."""
    monkeypatch.setattr(kubernetes, "SILENT_S", 0.3)
    monkeypatch.setattr(kubernetes, "GONE_S", 0.3)
    async with bench.box() as box:
        bench.inject(EXEC, kill=True, state="NodeLost")
        with pytest.raises(SandboxLost, match="has not answered"):
            await box.exec("echo on")

    assert bench.live == []


async def test_upload_cut_short_is_sent_again(bench: Bench, tmp_path: Path) -> None:
    """A file whose socket breaks arrives whole."""
    (tmp_path / "large").write_bytes(bytes(range(256)) * 2000)
    async with bench.box() as box:
        bench.inject(EXEC, stream="cut")
        await box.put("large", tmp_path / "large")

        assert await box.get("large") == (tmp_path / "large").read_bytes()


async def test_no_order_stands_in_a_url(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Server logs show only the path and the length of an upload."""
    with_input, sent = bench.server._with_input, []

    async def noted(box: Any, exec_id: str, argv: Any) -> Any:
        sent.append(" ".join(argv))
        return await with_input(box, exec_id, argv)

    monkeypatch.setattr(bench.server, "_with_input", noted)
    async with bench.box() as box:
        await box.put("private-name", b"x" * 100_000)

    assert max(map(len, sent)) < 200
    assert not any("python3" in line for line in sent)


# -- finding --------------------------------------------------------------------------------------


async def test_a_list_that_lags_hides_nothing_from_its_owner(bench: Bench) -> None:
    """Create, attach and kill use the name and need no list."""
    bench.server.settings["list_lag_s"] = 3600.0
    async with bench.box() as box:
        await box.write_file("mark", b"first")
        again = await bench.provider.create(SPEC, ID)
        listed = await bench.provider.list()

        assert (await again.read_file("mark"), listed) == (b"first", [])

    assert bench.live == []


async def test_other_deployments_are_left_alone(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same identity in another scope is another sandbox, which is never listed or killed."""
    async with bench.box() as box:
        monkeypatch.setenv("PERDURE_KUBERNETES__SCOPE", "others")
        others = KUBERNETES.made(tmp_path / "home")
        await others.kill(ID)
        seen = await others.list()

        assert (seen, (await box.exec("echo on")).stdout) == ([], b"on\n")


async def test_labels_that_kubernetes_does_not_take_come_back(bench: Bench) -> None:
    """A rollout's name has slashes; as a label value it would be refused."""
    labels = {"run": "r1", "rollout": "rollout/r1/a b/0", "attempt": "1"}
    async with bench.box(replace(SPEC, labels=labels)):
        (info,) = await bench.provider.list({"rollout": labels["rollout"]})

        assert info.labels == labels
