"""Services that make sandboxes, played in the test's own process, and a bench to break them on.

`tests.doubles` defines what each double plays; each test states its own promise.
"""

import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from perdure.sandboxes.base import Sandbox, SandboxSpec
from perdure.sandboxes.guest import service_retries
from perdure.sandboxes.guest.service_provider import ServiceProvider
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.sandboxes.providers.daytona import daytona_errors as daytona_failures
from perdure.sandboxes.providers.daytona import provider as daytona
from perdure.sandboxes.providers.e2b import e2b_errors as e2b_failures
from perdure.sandboxes.providers.e2b import provider as e2b
from perdure.sandboxes.providers.kubernetes import kubernetes_errors as kubernetes_failures
from perdure.sandboxes.providers.kubernetes import provider as kubernetes
from perdure.sandboxes.providers.modal import modal_errors as modal_failures
from perdure.sandboxes.providers.modal import provider as modal
from perdure.settings.settings_tree import Settings
from perdure.testing.sandbox_contract import SandboxContract
from perdure.types import Limits
from tests.doubles import daytona_server, e2b_server, kubernetes_server, modal_server

ID = "p-fault-agent-1"
SPEC = SandboxSpec("/testbed", labels={"run": "r1"}, limits=Limits(output_mb=1), ttl_s=300)
REQUEST_S = 30.0
HURRY_S = 1.0


@dataclass(frozen=True)
class Service:
    """What differs between services. Requests as `Rule.match`."""

    name: str
    sdk: str
    """The module that the provider imports."""
    provider: Callable[[Settings], ServiceProvider]
    variables: Callable[[str, Path], Mapping[str, str]]
    """The variables by which its SDK finds the double at a URL, with its state in a folder."""
    failures: ModuleType
    double: ModuleType
    create: str
    execute: str
    upload: str
    list: str
    key: str
    image: str
    """The variable that names the image of a sandbox without one."""
    read: str
    """The request that reads one sandbox."""
    renew: str
    """The request that moves its deadline."""
    end: str
    """The request that ends it."""
    look_up: str = ""
    """The request that looks up a create whose answer was lost; empty if the create is repeated."""
    refusals: int = 1
    """How often its SDK sends a call before it reports that the key was refused."""
    upload_refusals: Mapping[int, str] = field(
        default_factory=lambda: {413: "larger than the service accepts", 507: "disk is full"}
    )
    """Status -> words of our error, for uploads that the service cannot take."""

    def made(self, home: Path) -> ServiceProvider:
        provider = self.provider(Settings(home=home))
        provider.request_s = REQUEST_S
        return provider


E2B = Service(
    "e2b",
    "e2b",
    e2b.E2BProvider,
    lambda url, _: {"E2B_API_URL": url, "E2B_SANDBOX_URL": url, "E2B_API_KEY": "e2b_" + "0" * 40},
    e2b_failures,
    e2b_server,
    create="POST /v2/sandboxes$",
    execute="POST /process.Process/Start",
    upload="POST /files",
    list="GET /v2/sandboxes",
    key="E2B_API_KEY",
    image="PERDURE_E2B__TEMPLATE",
    read="GET /sandboxes/",
    renew="POST /sandboxes/",
    end="DELETE",
)
DAYTONA = Service(
    "daytona",
    "daytona",
    daytona.DaytonaProvider,
    lambda url, _: {"DAYTONA_API_URL": f"{url}/api", "DAYTONA_API_KEY": "dtn_0"},
    daytona_failures,
    daytona_server,
    create="POST /api/sandbox$",
    execute="POST /toolbox/.*/process/execute",
    upload="POST /toolbox/.*/files/bulk-upload",
    list=r"GET /api/sandbox($|\?)",
    key="DAYTONA_API_KEY",
    image="PERDURE_DAYTONA__SNAPSHOT",
    read="GET /api/sandbox/",
    renew="(POST|PUT) /api/sandbox/",
    end="DELETE",
    look_up="GET /api/sandbox/",
)
KUBERNETES = Service(
    "kubernetes",
    "kubernetes_asyncio",
    kubernetes.KubernetesProvider,
    lambda _, state: {
        "KUBECONFIG": str(state / "kubeconfig"),
        "PERDURE_KUBERNETES__SCOPE": "tests",
    },
    kubernetes_failures,
    kubernetes_server,
    create="POST .*/pods$",
    execute="GET .*/exec$",
    upload="GET .*/exec$",
    list="GET .*/pods$",
    key="KUBECONFIG",
    image="PERDURE_KUBERNETES__IMAGE",
    read="GET .*/pods/",
    renew="PATCH",
    end="DELETE",
)
MODAL = Service(
    "modal",
    "modal",
    modal.ModalProvider,
    lambda url, _: {
        "MODAL_SERVER_URL": url,
        "MODAL_TOKEN_ID": "ak-0",
        "MODAL_TOKEN_SECRET": "as-0",
    },
    modal_failures,
    modal_server,
    create="/SandboxCreateV2$",
    execute="/TaskExecStart$",
    upload="/TaskExecStdinWriteStream$",
    list="/SandboxListV2$",
    key="MODAL_TOKEN_ID",
    image="PERDURE_MODAL__IMAGE",
    read="/SandboxGetFromNameV2$",
    renew="/SandboxTagsSetV2$",
    end="/SandboxTerminateV2$",
    refusals=2,
    upload_refusals={507: "disk is full"},
)
SERVICES = (E2B, DAYTONA, MODAL)
"""Those whose failures are tested alike."""


@asynccontextmanager
async def serving(
    service: Service, folder: Path, patch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Any, str]]:
    """Run the double (server, url) where the SDK finds it, and end its sandboxes afterwards."""
    pytest.importorskip(service.sdk)
    if missing := BubblewrapProvider(Settings(home=folder)).check():
        pytest.skip(missing[0])
    async with service.double.serving(folder) as (server, url):
        for name, value in service.variables(url, folder).items():
            patch.setenv(name, value)
        if service is DAYTONA:
            _let_contexts_go_by_http(patch)
        try:
            yield server, url
        finally:
            for info in await server.guests.list({}):
                await server.guests.kill(info.identity)


def _let_contexts_go_by_http(patch: pytest.MonkeyPatch) -> None:
    """Daytona's SDK uploads build contexts over TLS only, which the double does not speak."""
    from daytona._async import object_storage
    from obstore.store import S3Store

    def store(**given: Any) -> S3Store:
        given["client_options"] = {**given["client_options"], "allow_http": True}
        return S3Store(**given)

    patch.setattr(object_storage, "S3Store", store)


class ServiceContract(SandboxContract):
    """The sandbox contract, kept by the real SDK against the double."""

    service: Service
    reaches_gateway = False  # by a relay, not by a socket of this host

    @pytest.fixture
    def short_folder(self, tmp_path: Path) -> Path:
        return tmp_path

    @pytest.fixture
    async def provider(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[ServiceProvider]:
        async with serving(self.service, tmp_path / "server", monkeypatch) as (server, _):
            yield self.service.provider(Settings(home=tmp_path / "home"))
        left = [box.identity for box in await server.guests.list()]
        assert left == [], "boxes of the double outlive their sandboxes"


class Bench:
    """A provider, its double, and the double's true state."""

    def __init__(self, service: Service, provider: ServiceProvider, server: Any) -> None:
        self.service, self.provider, self.server = service, provider, server

    def inject(self, match: str, **rule: Any) -> None:
        self.server.faults.add([{"match": match, **rule}])

    def hurry(self) -> None:
        """For tests in which a call is never answered: give that call up sooner. All others may take
        the time that this host needs."""
        faults = self.server.faults

        class Hurried(type(self.provider)):  # type: ignore[misc]
            @property
            def request_s(self) -> float:
                return REQUEST_S if all(rule.hits for rule in faults.rules) else HURRY_S

        self.provider.__class__ = Hurried

    @property
    def live(self) -> list[str]:
        """With sandboxes that are being made, without those that are being destroyed."""
        records = self.server.sandboxes.all()
        return [record["id"] for record in records if record.get("state") != "destroying"]

    def asked(self, match: str) -> list[float]:
        """The times of requests that match this regular expression."""
        return [entry["at"] for entry in self.server.faults.log if re.search(match, entry["line"])]

    @asynccontextmanager
    async def box(self, spec: SandboxSpec = SPEC) -> AsyncIterator[Sandbox]:
        try:
            yield await self.provider.create(spec, ID)
        finally:
            await self.provider.kill(ID)

    async def count(self, box: Sandbox) -> bytes:
        return await box.read_file("count")


@asynccontextmanager
async def benched(
    service: Service, folder: Path, patch: pytest.MonkeyPatch
) -> AsyncIterator[Bench]:
    """Each fault that is injected must have been met."""
    patch.setattr(service.failures, "REFUSAL_PASSES_S", 0.7)  # the double caches refusals 0.5 s
    patch.setattr(service.failures, "RELEASE_S", 0.2)
    async with serving(service, folder / "server", patch) as (server, _):
        provider = service.made(folder / "home")
        await provider.list()  # the key has worked once
        yield Bench(service, provider, server)
        assert all(rule.hits for rule in server.faults.rules), "a fault was never met"


def impatient(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Seconds after which a call is given up."""
    defaults = service_retries.retry_transient.__kwdefaults__ or {}
    patch.setattr(
        service_retries.retry_transient, "__kwdefaults__", {**defaults, "patience_s": seconds}
    )
