"""The pages of a run, a group and a rollout."""

import json
import re
from pathlib import Path

import pytest

from perdure import home_folder
from perdure.rollouts.run_pages import finish_run, prepare_run
from perdure.rollouts.stage_services import Services
from perdure.settings.settings_tree import Settings
from perdure.storage import store_keys
from perdure.storage.local_store import LocalStore
from perdure.types import Budget, RunRequest
from tests.store_with_runs import TEST, write_rollout
from tests.unit.viewer.conftest import Show

ONE = "/runs/made/rollouts/h11-0.14.0/0"


@pytest.fixture
async def run(store: LocalStore) -> None:
    """Two samples of one instance, one failed rollout, and an open one."""
    await write_rollout(store, sample=0)
    await write_rollout(store, sample=1, resolved=True)
    await write_rollout(store, instance="click-8.1.3", failure="sandbox p-1a died")
    await write_rollout(store, instance="jinja-3", ended=False)


@pytest.mark.usefixtures("run")
async def test_lists_lead_from_runs_to_rollouts(show: Show) -> None:
    """The list of runs links to the run, and its rows to rollouts with outcome, reward and cause."""
    assert 'href="/runs/made"' in await show("/")
    page = await show("/runs/made")
    assert f'href="{ONE}"' in page
    assert "sandbox: sandbox p-1a died" in page
    assert "open: capture" in page
    assert "3 of 4 rollouts finished" in page


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ("ending=resolved", ["h11-0.14.0/1"]),
        ("ending=open", ["jinja-3/0"]),
        ("boundary=sandbox", ["click-8.1.3/0"]),
        ("instance=h11", ["h11-0.14.0/0", "h11-0.14.0/1"]),
        ("instance=h11&ending=unresolved", ["h11-0.14.0/0"]),
        ("order=reward&instance=h11", ["h11-0.14.0/1", "h11-0.14.0/0"]),
        ("ending=%27+OR+1--", []),
        ("page=999999999999", ["click-8.1.3/0", "h11-0.14.0/0", "h11-0.14.0/1", "jinja-3/0"]),
    ],
)
async def test_filters(show: Show, query: str, shown: list[str]) -> None:
    """A filter keeps the matching rollouts in the requested order."""
    page = await show(f"/runs/made?{query}")
    found = re.findall(r'class="open" href="/runs/made/rollouts/([^"?]+)', page)
    assert found == shown


@pytest.mark.usefixtures("run")
async def test_next_and_previous_stay_within_the_filter(show: Show) -> None:
    """A rollout opened from a filtered list links to the next one of that list."""
    page = await show(f"{ONE}?instance=h11")
    assert 'data-key="n" href="/runs/made/rollouts/h11-0.14.0/1?instance=h11"' in page
    assert 'data-key="p"' not in page


@pytest.mark.usefixtures("run")
async def test_groups(show: Show) -> None:
    """Rows of groups have their samples; the group's page links pairs of them."""
    assert "1 of 2" in await show("/runs/made?by=group")
    page = await show("/runs/made/rollouts/h11-0.14.0")
    assert f'href="{ONE}/beside/1"' in page


@pytest.mark.usefixtures("run")
async def test_a_trajectory(show: Show) -> None:
    """Thinking is folded, calls and edits are shown, a sub-agent follows the turn that started it,
    and each turn says whether it is trained, or why not."""
    page = await show(ONE)
    assert re.search(
        r"<details><summary>26 characters</summary><pre>Look at the headers first", page
    )
    assert "pytest -x tests/test_headers.py" in page
    assert '<span class="del">-lengths = value\n</span>' in page
    assert "sub-agent agent-7" in page
    assert "started by main after turn 1" in page
    assert "not trained: unused: the agent did not use this answer" in page
    assert "not trained: side" in page
    order = [page.index(f'id="turn-{n}"') for n in (0, 1, 2, 3)]
    assert order == sorted(order)


@pytest.mark.usefixtures("run")
async def test_tokens(show: Show) -> None:
    """Tokens are colored by mask, logprob or version, and show their id and logprob."""
    assert '<span class="t m1"' in await show(f"{ONE}/tokens")
    page = await show(f"{ONE}/tokens?by=logprob")
    assert re.search(r'class="t l\d" title="id \d+ · logprob -\d\.\d{3} · version \d"', page)
    assert re.search(r'class="t v\d"', await show(f"{ONE}/tokens?by=version&segment=0"))


@pytest.mark.usefixtures("run")
async def test_tokens_are_read_with_the_tokenizer_of_the_rollouts_model(
    store: LocalStore, show: Show
) -> None:
    """A judge's ids have no text in the policy's tokenizer."""
    identity = json.dumps({"engine.tokenizer": "/models/absent"}).encode()
    await store.put("runs/made/rollouts/h11-0.14.0/0/identity.json", identity)

    assert "unknown tokenizer" in await show(f"{ONE}/tokens")
    assert "unknown tokenizer" not in await show(f"{ONE.removesuffix('0')}1/tokens")


@pytest.mark.usefixtures("run")
async def test_patch_tests_and_files(show: Show) -> None:
    """The patch is colored; the log opens at the failing test; only the rollout's files are shown."""
    assert '<span class="del">-        lengths = value\n</span>' in await show(f"{ONE}/patch")
    page = await show(f"{ONE}/tests")
    assert TEST in page
    assert re.search(r'<span class="line names" id="found"><i>402</i>_+ test_content_length', page)
    assert "0001 collected" not in page
    key = "runs/made/rollouts/h11-0.14.0/0/attempts/1/agent/stdout"
    assert "own output" in await show(f"{ONE}/files?file={key}")
    other = "runs/made/rollouts/click-8.1.3/0/attempts/1/agent/stdout"
    assert "own output" not in await show(f"{ONE}/files?file={other}")
    assert "root:" not in await show(f"{ONE}/files?file=/etc/passwd")


async def test_tests_say_why_a_reward_is_withheld(store: LocalStore, show: Show) -> None:
    """Signals are text of the agent, so they are escaped."""
    marked = {"signals": ("<b>.py: f_back (frames)",), "withheld": "unverified, has signals"}
    await write_rollout(store, "marked", graded=marked)

    page = await show("/runs/marked/rollouts/h11-0.14.0/0/tests")

    assert "signal: &lt;b&gt;.py: f_back (frames)" in page
    assert "reward withheld: unverified, has signals" in page


async def test_named_rewards(store: LocalStore, show: Show) -> None:
    """A rollout has each by name; its group has mean, standard deviation and each sample's."""
    for sample, value in enumerate((0.25, 0.75)):
        named = {"tidy <b>": value}
        await write_rollout(store, "many", sample=sample, graded={"named_rewards": named})
    await write_rollout(store, "many", sample=2)
    row = '<td>tidy &lt;b&gt;</td><td class="n">0.5</td><td class="n">0.354</td><td class="n">0.25</td><td class="n">0.75</td><td class="n"></td>'

    assert "<span>tidy &lt;b&gt; 0.25</span>" in await show("/runs/many/rollouts/h11-0.14.0/0")
    assert row in await show("/runs/many/rollouts/h11-0.14.0")


@pytest.mark.usefixtures("run")
async def test_two_samples_side_by_side(show: Show) -> None:
    """The page pairs the turns and compares the patches."""
    page = await show(f"{ONE}/beside/1")
    assert 'id="left-0"' in page
    assert 'id="right-0"' in page
    assert "Patches: identical" in page
    assert "first difference" not in page


@pytest.mark.usefixtures("run")
async def test_an_open_rollout_is_shown_as_far_as_it_is(show: Show) -> None:
    """It shows the current step and reloads; a finished one does not."""
    page = await show("/runs/made/rollouts/jinja-3/0")
    assert "running: the agent works in rollout/made/jinja-3/0" in page
    assert 'data-live="3"' in page
    assert 'data-live="0"' in await show(ONE)


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(("samples", "stopped"), [(2, False), (9, True)])
async def test_a_run_that_its_budget_stopped_says_so(
    store: LocalStore, show: Show, samples: int, stopped: bool
) -> None:
    """Its page and the list of runs say so; those of a complete run do not."""
    instances = ["first-steps/h11-0.14.0"]
    budget = Budget(tokens=1)
    run = RunRequest(run_id="made", instances=tuple(instances), n_samples=samples, budget=budget)
    document = {"request": run.model_dump(mode="json")}
    await store.put(store_keys.run("made"), json.dumps(document).encode())
    await store.put(store_keys.run_instances("made"), json.dumps(instances).encode())
    await finish_run(store, run)

    assert ("stopped by its budget" in await show("/runs/made")) is stopped
    assert ("stopped by its budget" in await show("/")) is stopped


async def test_a_stopped_run_that_goes_on_is_not_stopped(
    store: LocalStore, show: Show, tmp_path: Path
) -> None:
    """After a larger budget its page is live again, and reports give no reason for a stop."""
    settings = Settings(home=tmp_path / "home", store=store.url)
    home_folder.keep_private(settings)
    await write_rollout(store)
    await store.put(store_keys.instance("first-steps/h11-0.14.0"), b"{}")
    run = RunRequest(
        run_id="made",
        instances=("first-steps/h11-0.14.0",),
        n_samples=9,
        rollout={"agent": "nop", "sandbox": "bubblewrap"},
        budget=Budget(tokens=1),
    )
    await prepare_run(Services(settings), run)
    stopped = (await finish_run(store, run)).stopped
    larger = run.model_copy(update={"budget": Budget(tokens=10**9)})
    await prepare_run(Services(settings), larger)
    page = await show("/runs/made")

    assert stopped.startswith("it has used")
    assert ("stopped by its budget" in page, 'data-live="0"' in page) == (False, False)
    assert json.loads((await store.get(store_keys.manifest("made"))).data)["stopped"] == ""
