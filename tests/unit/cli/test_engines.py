"""`perdure engines` without a cluster and without a gateway."""

import asyncio
import json
import time
from pathlib import Path

import pytest

from perdure.cli.main import invoke
from perdure.engines.engine_roster import Roster, StoredRoster, roster_key
from perdure.engines.engine_state import EngineRecord, EngineState, name_of
from perdure.home_folder import load_secret
from perdure.serving.replica_plan import EnginePlan, ReplicaPool, write_plan
from perdure.serving.replica_status import PoolStatus, ReplicaStatus, write_status
from perdure.settings.settings_tree import Settings
from perdure.stack.engine_presence import has_added_engines, has_no_ready_engine
from perdure.storage.store_url import open_store


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return Settings(home=tmp_path)


def seen(settings: Settings, seconds_ago: float) -> None:
    """Write the status of a manager of one replica."""
    status = PoolStatus(
        replicas=(ReplicaStatus(index=0, state="ready", engine="10.0.0.7:8000"),),
        at=time.time() - seconds_ago,
    )
    pool, store = ReplicaPool(roster_key(load_secret(settings)), "policy"), open_store(settings)
    asyncio.run(write_plan(store, pool, EnginePlan(model="scripted")))
    asyncio.run(write_status(store, pool, status))


@pytest.mark.parametrize(("seconds_ago", "told"), [(5.0, False), (7200.0, True)])
def test_an_old_status_of_replicas_is_marked_as_old(
    settings: Settings, capsys: pytest.CaptureFixture[str], seconds_ago: float, told: bool
) -> None:
    """If a status is two hours old, the list says so and names the command that starts the manager."""
    seen(settings, seconds_ago)
    invoke(["engines", "list"])

    said = capsys.readouterr().out
    assert "10.0.0.7:8000" in said
    assert ("120 min ago" in said, "engines up" in said) == (told, told)


def test_adding_an_engine_ends_its_drain(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `add` says, the engine takes sessions again."""
    for words in (["add", "http://h:1"], ["drain", "h:1"], ["add", "http://h:1"]):
        invoke(["engines", *words])
    capsys.readouterr()
    invoke(["engines", "list", "--json"])

    (engine,) = json.loads(capsys.readouterr().out)["engines"]
    assert (engine["state"], engine["drain_by"]) == ("starting", None)


def named_by_settings(settings: Settings, url: str) -> None:
    """Put an engine into the roster that the settings of an ended gateway named."""

    def with_it(roster: Roster) -> Roster:
        engine = EngineRecord(
            name=name_of(url), url=url, model="m", generation=1, state=EngineState.READY,
            from_settings=True,
        )  # fmt: skip
        return roster.having(engine)

    shared = StoredRoster(open_store(settings), roster_key(load_secret(settings)))
    asyncio.run(shared.change(with_it))


@pytest.mark.parametrize(("here", "foreign"), [("", True), ("http://h:1=2,http://h:3", False)])
def test_engines_of_another_gateways_settings_are_told_apart(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    here: str,
    foreign: bool,
) -> None:
    """No gateway started here would use them, so neither `list` nor `run` counts on them."""
    named_by_settings(settings, "http://h:1")
    monkeypatch.setenv("PERDURE_ENGINE__URL", here)
    invoke(["engines", "list"])

    assert ("not used by this gateway" in capsys.readouterr().out) == foreign
    assert not has_added_engines(settings)


def test_engines_that_were_added_and_are_not_ready_are_known(settings: Settings) -> None:
    """`run` continues and says that rollouts wait for an engine."""
    invoke(["engines", "add", "http://h:1"])

    assert (has_added_engines(settings), has_no_ready_engine(settings)) == (True, True)


def test_an_engine_can_be_named_by_its_url(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    """`drain` and `remove` take the URL that `add` took."""
    codes = [invoke(["engines", word, "http://h:1/v1"]) for word in ("add", "drain", "remove")]

    assert codes == [0, 0, 0]
    assert capsys.readouterr().out.splitlines()[-1] == "h:1 is removed."


def test_a_judge_is_added_next_to_the_policy(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    """The list says which model and which run each engine serves."""
    judge = ["--model", "judge", "--tokenizer", "qwen3", "--run", "eval-*"]
    codes = [
        invoke(["engines", "add", *words])
        for words in (["http://h:1"], ["http://h:2", *judge], ["http://h:3", "--model", "user"])
    ]
    refused = capsys.readouterr().err
    invoke(["engines", "list"])
    one, two = capsys.readouterr().out.splitlines()[:2]

    assert codes == [0, 0, 2]
    assert "the model user is new: give its tokenizer with --tokenizer" in refused
    assert ("model policy" in one, "run" in one) == (True, False)
    assert ("model judge" in two, "run eval-*" in two) == (True, True)


def test_a_tokenizer_that_cannot_be_read_is_refused(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the option and what it accepts."""
    words = ["--model", "judge", "--tokenizer", str(tmp_path / "absent")]

    assert invoke(["engines", "add", "http://h:1", *words]) == 2
    assert "--tokenizer is" in capsys.readouterr().err
    assert not has_added_engines(settings)


def test_a_second_model_on_ray_needs_its_tokenizer(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    """The refusal comes before a cluster is started."""
    words = ["engines", "up", "--model", "org/judge-8b", "--served-model", "judge"]

    assert invoke(words) == 2
    assert "the model judge is new: give its tokenizer with --tokenizer" in capsys.readouterr().err
