"""Provider, limits and network of each phase: which field wins, and what is refused before a boot."""

from pathlib import Path
from typing import Any

import pytest

from perdure.cli.runs.run_request import fields_of
from perdure.client.request_comparison import differences, outcome_fields
from perdure.errors import ConfigurationError
from perdure.sandboxes import phase_specs
from perdure.sandboxes.base import Network
from perdure.sandboxes.phase_specs import INSTALL_LIMITS
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.sandboxes.providers.docker.provider import DockerProvider
from perdure.sandboxes.providers.e2b.provider import E2BProvider
from perdure.sandboxes.providers.local import LocalProvider
from perdure.sandboxes.providers.modal.provider import ModalProvider
from perdure.settings.settings_tree import Settings
from perdure.types import (
    Build,
    Environment,
    Instance,
    Phases,
    RolloutRequest,
    Source,
    SourceKind,
)


def request(**fields: Any) -> RolloutRequest:
    return RolloutRequest.model_validate({"run_id": "r", "instance": "d/i", **fields})


def instance(**said: Any) -> Instance:
    source = Source(kind=SourceKind.BLOB, key="k")
    fields = {"instance_id": "i", "dataset": "d", "problem_statement": "x", "source": source}
    return Instance.model_validate({**fields, "phases": said})


def test_the_phase_of_the_request_overrides_the_instance_and_the_instance_the_rollout() -> None:
    """Field by field: a phase of the request, then of the instance, then `sandbox` and `limits`."""
    asked = request(
        sandbox="local",
        limits={"memory_mb": 1000, "pids": 100, "cpus": 1},
        phases={"grade": {"limits": {"memory_mb": 3000}}},
    )
    row = instance(grade={"provider": "podman", "limits": {"memory_mb": 2000, "pids": 200}})
    place = phase_specs.place(asked, row, "grade")

    assert (place.provider, place.limits.memory_mb, place.limits.pids, place.limits.cpus) == (
        "podman",
        3000,
        200,
        1,
    )


def test_the_requests_provider_overrides_the_instances() -> None:
    """The request decides where its phases run, even if the instance prefers another provider."""
    asked = request(sandbox="local", phases={"agent": {"provider": "bubblewrap"}})

    assert phase_specs.place(asked, instance(agent={"provider": "podman"}), "agent").provider == (
        "bubblewrap"
    )


def test_a_phase_without_fields_is_as_the_rollout_says() -> None:
    """A phase that no field names has the rollout's provider and limits, and no network."""
    asked = request(sandbox="podman", limits={"memory_mb": 512})

    assert phase_specs.place(asked, instance(), "agent") == phase_specs.PhasePlacement(
        "podman", asked.limits, Network.NONE
    )


def test_environments_are_built_with_limits_of_their_own() -> None:
    """The rollout's limits are not the build's; `phases.environment` changes limits and network."""
    asked = request(limits={"memory_mb": 64}, phases={"environment": {"network": "none"}})
    place = phase_specs.place(
        asked, instance(environment={"limits": {"disk_mb": 99}}), "environment"
    )

    assert place.limits == INSTALL_LIMITS.model_copy(update={"disk_mb": 99})
    assert place.network is Network.NONE


def test_an_instance_opens_no_network_by_itself() -> None:
    """If the instance asks for a network, the request must grant or deny it, or it is refused."""
    row = instance(agent={"network": "host"})
    with pytest.raises(ConfigurationError, match=r"phases\.agent\.network"):
        phase_specs.place(request(), row, "agent")
    refused = request(phases={"agent": {"network": "none"}})

    assert phase_specs.place(refused, row, "agent").network is Network.NONE


@pytest.mark.parametrize(
    ("fields", "row", "named"),
    [
        ({"phases": {"grade": {"provider": "podmann"}}}, {}, "podmann"),
        ({"limits": {"gpu": "T4"}}, {}, "limits.gpu"),
        ({}, {"agent": {"limits": {"gpu": "T4"}}}, "instance phases.agent.limits.gpu"),
        ({}, {"environment": {"limits": {"gpu": "T4"}}}, "phases.environment.limits.gpu"),
        ({"sandbox": "local", "limits": {"disk_mb": 99}}, {}, "limits.disk_mb"),
        (
            {"sandbox": "local"},
            {"grade": {"limits": {"disk_mb": 99}}},
            "instance phases.grade.limits.disk_mb",
        ),
        (
            {"phases": {"agent": {"provider": "local", "network": "none"}}},
            {},
            "phases.agent.network",
        ),
        ({"phases": {"agent": {"network": "host"}}}, {}, "phases.agent.network"),
        ({"phases": {"environment": {"provider": "local"}}}, {}, "phases.environment.provider"),
        ({"phases": {"grade": {"network": "index"}}}, {}, "phases.grade.network"),
        ({}, {"environment": {"network": "host"}}, "phases.environment.network"),
        ({"sandbox": "local", "phases": {"agent": {"network": ["a.org"]}}}, {}, "a list of hosts"),
        (
            {"phases": {"agent": {"provider": "e2b", "network": ["a.org:22"]}}},
            {},
            "phases.agent.network: e2b cannot use this list of hosts",
        ),
    ],
)
def test_a_field_that_the_provider_cannot_enforce_is_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], row: dict[str, Any], named: str
) -> None:
    """The error names the field of a wrong provider, or of a limit or network that it lacks."""
    made: dict[str, Any] = {"local": LocalProvider, "bubblewrap": BubblewrapProvider}
    made |= {"e2b": E2BProvider}

    def providers(name: str) -> Any:
        if name not in made:
            raise ConfigurationError(f"unknown sandbox {name!r}")
        return made[name](Settings(home=tmp_path, sandbox={"allow_local": True}))

    with pytest.raises(ConfigurationError) as refused:
        phase_specs.check(request(**fields), instance(**row), providers)

    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "fix"),
    [({"network": "bridge"}, "PERDURE_DOCKER__NETWORK"), ({"runtime": "runsc"}, "runsc")],
)
def test_docker_refuses_lists_that_its_settings_undo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], fix: str
) -> None:
    """So does an engine elsewhere. One of this host with plain settings takes lists."""
    asked = request(phases={"agent": {"provider": "docker", "network": ["a.org"]}})

    def check(**docker: str) -> None:
        made = DockerProvider(Settings(home=tmp_path, docker=docker))
        phase_specs.check(asked, instance(), lambda _: made)

    monkeypatch.setenv("DOCKER_HOST", "unix:///run/docker.sock")
    check()
    with pytest.raises(ConfigurationError, match=fix):
        check(**settings)
    monkeypatch.setenv("DOCKER_HOST", "tcp://192.0.2.7:2376")
    with pytest.raises(ConfigurationError, match="use an engine of this host"):
        check()


def test_a_builder_without_a_proxy_refuses_a_list(tmp_path: Path) -> None:
    """Before a sandbox boots, and only for rows whose Dockerfile it would build."""
    asked = request(sandbox="modal", phases={"environment": {"network": ["a.org"]}})
    row = instance()
    built = row.model_copy(update={"environment": Environment(build=Build(path="/c"))})
    modal = ModalProvider(Settings(home=tmp_path))
    phase_specs.check(asked, row, lambda _: modal)

    with pytest.raises(ConfigurationError, match="builds of modal take no list of hosts"):
        phase_specs.check(asked, built, lambda _: modal)


def test_local_is_refused_without_its_setting(tmp_path: Path) -> None:
    """No request boots a sandbox without isolation unless the host's setting allows it."""
    with pytest.raises(ConfigurationError, match=r"phases\.agent.*ALLOW_LOCAL=true"):
        phase_specs.check(
            request(sandbox="local"), instance(), lambda _: LocalProvider(Settings(home=tmp_path))
        )


def test_builds_reach_the_package_index_unless_the_request_says_otherwise() -> None:
    """Neither `none` nor the host's network is the default of a build."""
    asked = request(phases={"environment": {"network": "host"}})
    listed = request(phases={"environment": {"network": ["deb.debian.org"]}})
    place = phase_specs.place(listed, instance(), "environment")

    assert phase_specs.place(request(), instance(), "environment").network is Network.INDEX
    assert phase_specs.place(asked, instance(), "environment").network is Network.HOST
    assert (place.network, place.allowed_hosts) == (Network.LISTED, ("deb.debian.org",))


def test_a_default_limit_refuses_no_provider(tmp_path: Path) -> None:
    """A provider that cannot enforce a limit is refused only if a field sets that limit."""
    phase_specs.check(
        request(sandbox="local"),
        instance(),
        lambda _: LocalProvider(Settings(home=tmp_path, sandbox={"allow_local": True})),
    )


def test_a_phase_is_written_on_the_command_line() -> None:
    """`--set phases.grade.provider=podman` is the same field as in JSON."""
    fields = fields_of(["phases.grade.provider=podman", "phases.agent.limits.memory_mb=512"], {})
    asked = request(**fields)

    assert asked.phases.grade.provider == "podman"
    assert phase_specs.place(asked, None, "agent").limits.memory_mb == 512


@pytest.mark.parametrize("network", [["http://a.org"], [], "internet", {"allow": ["a.org"]}])
def test_a_wrong_network_is_refused_by_its_field(network: Any) -> None:
    """Before any sandbox boots, by the model that every door uses."""
    with pytest.raises(ConfigurationError, match=r"agent\.network: "):
        Phases(agent={"network": network})


def test_a_list_of_hosts_is_part_of_the_identity() -> None:
    """In one spelling, so the same list in another order joins the run and another list does not."""
    one, same, other, none = (
        outcome_fields(request(phases={"agent": {"network": hosts}}))
        for hosts in (["b.org", "A.org"], ["a.org", "b.org"], ["a.org"], None)
    )

    assert differences(one, same) == []
    assert len(differences(one, other)) == len(differences(none, one)) == 1


def test_a_row_may_list_only_hosts_that_the_setting_covers() -> None:
    """Rows come from elsewhere. A list of the request is the operator's own."""
    row = instance(agent={"network": ["x.a.org", "10.1.2.0/24:443"]})
    of_row = phase_specs.place(request(), row, "agent")
    own = phase_specs.place(request(phases={"agent": {"network": ["b.org"]}}), row, "agent")

    phase_specs.check_row_hosts(of_row, "agent", "d/i", "*.a.org, 10.1.0.0/16")
    phase_specs.check_row_hosts(own, "agent", "d/i", "")
    with pytest.raises(ConfigurationError, match=r"ROW_HOSTS=10\.1\.2\.0/24:443"):
        phase_specs.check_row_hosts(of_row, "agent", "d/i", "x.a.org")
