"""Where the value of a setting comes from, what a child process gets, and what is never shown."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from perdure.cli.main import cli
from perdure.errors import ConfigurationError
from perdure.settings import process_environment, settings_loader, variable_aliases
from perdure.settings.settings_tree import Settings
from perdure.types import RolloutRequest

SECRET = "do-not-show-me-0123456789"


@pytest.fixture(autouse=True)
def nothing_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory, without Perdure's variables and aliases."""
    monkeypatch.chdir(tmp_path)
    known = {one.name for one in variable_aliases.ALIASES}
    for name in list(process_environment.variables()):
        if name.startswith("PERDURE_") or name in known:
            monkeypatch.delenv(name)


def test_a_variable_comes_before_an_alias_and_that_before_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each place is used if the places before it have no value, and its name is reported."""
    Path("perdure.toml").write_text("[gateway]\nport = 1\n")
    found = [settings_loader.load_settings()]
    origins = [str(settings_loader.origin("gateway.port", found[-1]))]
    for name, value in (("SHIM_PORT", "2"), ("PERDURE_GATEWAY__PORT", "3")):
        monkeypatch.setenv(name, value)
        found.append(settings_loader.load_settings())
        origins.append(str(settings_loader.origin("gateway.port", found[-1])))

    assert [one.gateway.port for one in found] == [1, 2, 3]
    assert origins == ["perdure.toml", "SHIM_PORT", "PERDURE_GATEWAY__PORT"]


@pytest.mark.parametrize("alias", variable_aliases.SETTINGS, ids=lambda alias: str(alias.name))
def test_an_alias_sets_what_its_row_names(
    alias: variable_aliases.Alias, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every alias sets its setting."""
    monkeypatch.setenv(alias.name, "7")

    assert str(settings_loader.value(settings_loader.load_settings(), alias.stands_for)) == "7"


def test_aliases_of_fields_name_fields_of_a_request() -> None:
    """A renamed field would leave its alias without a target."""
    fields = {one.stands_for.partition(".")[0] for one in variable_aliases.FIELDS}

    assert fields <= RolloutRequest.model_fields.keys()


def test_each_variable_is_either_honoured_or_refused() -> None:
    """Each variable is in exactly one of the two tables."""
    assert (
        not {one.name for one in variable_aliases.ALIASES} & variable_aliases.NOT_APPLICABLE.keys()
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[gatewy]\nport = 1\n",
            "perdure.toml: 'gatewy' is not a setting: did you mean 'gateway'?",
        ),
        ("[gateway]\nprot = 1\n", "'gateway.prot' is not a setting: did you mean 'gateway.port'?"),
        ("gateway = 1\n", "perdure.toml: 'gateway' is a table: write [gateway]"),
        ("[slots]\nboot = 0\n", "perdure.toml: slots.boot=0: input should be greater"),
        ("[slots\n", "perdure.toml: Expected"),
    ],
)
def test_a_mistake_in_the_file_is_named_by_its_key(text: str, said: str) -> None:
    """The message has the file, the key and what to write."""
    Path("perdure.toml").write_text(text)

    with pytest.raises(ConfigurationError) as refused:
        settings_loader.load_settings()

    assert said in str(refused.value)


def test_a_group_has_no_variable_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is only one way to write a setting."""
    monkeypatch.setenv("PERDURE_GATEWAY", '{"port": 1}')

    with pytest.raises(ConfigurationError, match="PERDURE_GATEWAY is not a setting"):
        settings_loader.load_settings()


def test_kubernetes_may_name_a_service_like_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that a cluster adds for a service named `perdure-gateway` are not misspelled
    settings."""
    monkeypatch.setenv("PERDURE_GATEWAY_PORT", "tcp://10.0.0.1:80")
    monkeypatch.setenv("PERDURE_GATEWAY_SERVICE_HOST", "10.0.0.1")

    assert settings_loader.load_settings().gateway.port == 18001


def test_a_child_process_has_the_same_settings_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values from the file, an alias or a relative path apply in another folder without them."""
    Path("perdure.toml").write_text(
        f'secret = "{SECRET}"\nstore = "results"\n[sandbox.caps.e2b]\nlive = 3\n'
        '[sandbox.open_hours]\ne2b = "22:00-06:00"\n[engine.limits.requests]\nminute = 500\n'
        '[kubernetes]\npod_file = "pod.json"\n[metrics]\nport = 9\n'
    )
    monkeypatch.setenv("SWE_BOOT_CONCURRENCY", "6")
    monkeypatch.setenv("PERDURE_HOME", "here")
    resolved = settings_loader.load_settings()
    child = settings_loader.for_child(resolved, process_environment.variables())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    Path("perdure.toml").write_text("[slots]\ngrade = 5\n")
    for name in list(process_environment.variables()):
        monkeypatch.delenv(name)
    for name, value in child.items():
        monkeypatch.setenv(name, value)
    found = settings_loader.load_settings()

    assert found == resolved.model_copy(
        update={"home": tmp_path / "here", "store": str(tmp_path / "results")}
    ).changed(kubernetes={"pod_file": tmp_path / "pod.json"})


def test_the_secret_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither `perdure settings`, nor the copy in run.json, nor a log of the object contains it."""
    monkeypatch.setenv("PERDURE_SECRET", SECRET)
    resolved = Settings()
    printed = [CliRunner().invoke(cli, ["settings", *more]).output for more in ((), ("--json",))]
    shown = [*printed, resolved.model_dump_json(), str(resolved), repr(resolved)]

    assert resolved.secret.get_secret_value() == SECRET
    assert "PERDURE_SECRET=**********" in printed[0]
    assert [text for text in shown if SECRET in text] == []


def test_a_wrong_secret_is_refused_without_its_value() -> None:
    """A secret of the wrong type is named by its key only."""
    Path("perdure.toml").write_text("secret = [12345]\n")

    with pytest.raises(ConfigurationError) as refused:
        settings_loader.load_settings()

    assert "12345" not in str(refused.value)
    assert "secret" in str(refused.value)


def test_another_tools_variable_must_be_listed() -> None:
    """A variable that the page does not list cannot be read."""
    with pytest.raises(LookupError, match="FOREIGN"):
        process_environment.foreign("SOME_TOOLS_VARIABLE")
