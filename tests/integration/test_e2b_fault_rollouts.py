"""Whole rollouts on an E2B that fails: the real SDK and worker, one fault or one kind of it each.

All are started together, and each is judged by itself: it ends right, or with the type that says
what to do and no reward; its agent was started once in each sandbox; nothing of it is left.
"""

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from perdure.episodes.episode import Episode
from perdure.types import Outcome, RolloutRequest, RolloutStatus
from tests import counting_agent, service_harness
from tests.certificates import Authority
from tests.doubles.http2_proxy import behind_http2
from tests.service_harness import E2B
from tests.stack.host_requirements import why_not_here
from tests.stack.running_stack import Stack, running
from tests.stack.wait_until import PATIENCE_S, until

pytestmark = [pytest.mark.temporal, pytest.mark.asyncio(loop_scope="module")]

CREATE, LIST, INFO, DELETE = E2B.create, "GET /v2/sandboxes", "GET /sandboxes/", "DELETE "
EXEC, UPLOAD, DATA = E2B.execute, E2B.upload, "/process|/files|/health"
DATE = {"Retry-After": "Wed, 01 Jan 2020 00:00:00 GMT"}
NOT_OPEN = {"message": "The sandbox is running but port is not open", "code": 502}
NOT_FOUND = {"message": "The sandbox was not found", "code": 502}

ALL_S = 5 * PATIENCE_S
"""The cases run at the same time: the first that is looked at may be the last that is over."""

Rules = Sequence[Mapping[str, Any]]
SOLVED = (RolloutStatus.GRADED, Outcome.RESOLVED, 1.0)
UNSOLVED = (RolloutStatus.GRADED, Outcome.UNRESOLVED, 0.0)
FAILED = (RolloutStatus.FAILED, None, None)


def conflict(word: str) -> dict[str, Any]:
    body = {"code": 409, "message": word, "error_code": word}
    return {"match": CREATE, "when": "after", "status": 409, "body": body}


def everywhere(**rule: Any) -> Rules:
    """Once at each kind of call, in the middle of the commands too."""
    routes = {CREATE: 0, LIST: 1, INFO: 0, EXEC: 3, UPLOAD: 0, DELETE: 0}
    return [{"match": match, "skip": skip, **rule} for match, skip in routes.items()]


@dataclass(frozen=True)
class Case:
    rules: Rules
    ends: tuple[RolloutStatus, Outcome | None, float | None] = SOLVED
    does: str = "right"
    attempts: int = 1
    fails_with: str = ""
    purpose: str = ""
    """Only its sandbox of this purpose meets the rules: `agent-1`, `grade-1`."""


CASES: dict[str, Case] = {
    "a passing 401": Case(everywhere(status=401)),
    "a 401 that the proxy caches": Case(
        [{"match": EXEC, "status": 401, "refuse_for_s": 5, "skip": 4}]
    ),
    "403": Case(
        [{"match": EXEC, "status": 403, "times": None}], FAILED, fails_with="Configuration"
    ),
    "404 early": Case([{"match": INFO, "status": 404}]),
    "502 not found, early": Case([{"match": EXEC, "status": 502, "body": NOT_FOUND, "times": 3}]),
    "no such template": Case(
        [{"match": CREATE, "status": 404, "times": None}], FAILED, fails_with="Configuration"
    ),
    "408": Case(everywhere(status=408)),
    "408 after the work": Case(everywhere(status=408, when="after")),
    "409 mismatch": Case([conflict("idempotency_request_mismatch")]),
    "409 in progress": Case([conflict("idempotency_in_progress")]),
    "409 outcome unknown": Case([conflict("idempotency_outcome_unknown")]),
    "413": Case(
        [{"match": UPLOAD, "status": 413, "times": None}], FAILED, fails_with="Configuration"
    ),
    "429 with seconds": Case(everywhere(status=429, headers={"Retry-After": "1"})),
    "429 with a date": Case(everywhere(status=429, headers=DATE)),
    "500 JSON": Case(everywhere(status=500)),
    "500 HTML": Case(everywhere(status=500, body="<html>oops</html>")),
    "502": Case(everywhere(status=502)),
    "502 after the work": Case(everywhere(status=502, when="after")),
    "503": Case(everywhere(status=503)),
    "504 after the work": Case(everywhere(status=504, when="after")),
    "507": Case(
        [{"match": UPLOAD, "status": 507, "times": None}], FAILED, fails_with="Configuration"
    ),
    "reset before the work": Case(everywhere(reset=True)),
    "reset after the work": Case(everywhere(reset=True, when="after")),
    "black hole": Case([{"match": CREATE, "hang": True}, {"match": EXEC, "hang": True, "skip": 5}]),
    "slow boot": Case([{"match": CREATE, "when": "after", "delay_s": 6}]),
    "stuck in creating": Case([{"match": CREATE, "hang": True, "times": 2}]),
    "streams cut": Case([{"match": EXEC, "stream": "cut", "skip": 2, "times": 5}]),
    "streams without an end": Case([{"match": EXEC, "stream": "no_end", "times": 8}]),
    "streams end as unavailable": Case([{"match": EXEC, "stream": "unavailable", "times": 8}]),
    "streams truncated": Case([{"match": EXEC, "stream": "truncated", "skip": 2, "times": 8}]),
    "streams silent": Case([{"match": EXEC, "stream": "silent", "skip": 4, "times": 2}]),
    "every exit code empty": Case([{"match": EXEC, "stream": "empty_end", "times": None}]),
    "every exit code empty, a wrong patch": Case(
        [{"match": EXEC, "stream": "empty_end", "times": None}], UNSOLVED, does="wrong"
    ),
    "every exit code empty, an agent that fails": Case(
        [{"match": EXEC, "stream": "empty_end", "times": None}],
        FAILED,
        does="fails",
        fails_with="AgentError",
    ),
    "every command run twice": Case([{"match": EXEC, "twice": True, "times": None}]),
    "uploads missing": Case([{"match": UPLOAD, "upload": "missing", "times": 2}]),
    "uploads short": Case([{"match": UPLOAD, "upload": "short", "times": 2}]),
    "killed at the k-th command": Case(
        [{"match": EXEC, "kill": True, "skip": 9}], attempts=2, purpose="agent-1"
    ),
    "killed in the middle of grading": Case(
        [{"match": EXEC, "kill": True, "skip": 7}], purpose="grade-1"
    ),
    "running, with a dead daemon": Case(
        [{"match": DATA, "status": 502, "body": NOT_OPEN, "skip": 8, "times": None}],
        attempts=2,
        purpose="agent-1",
    ),
    "deletes refused": Case([{"match": DELETE, "status": 500, "times": 4}]),
}


@dataclass
class Field:
    """The stack, the double, and what was started on them."""

    stack: Stack
    server: Any
    url: str
    requests: dict[str, RolloutRequest]

    def digest(self, request: RolloutRequest) -> str:
        return self.stack.identity(request, "agent").rpartition("-agent-")[0]

    def inject(self, request: RolloutRequest, rules: Rules, purpose: str = "") -> None:
        about = f"{self.digest(request)}-{purpose}"
        self.server.faults.add([{"about": about, **rule} for rule in rules])

    def never_met(self, request: RolloutRequest) -> list[str]:
        own = [rule for rule in self.server.faults.rules if self.digest(request) in rule.about]
        return [rule.match for rule in own if not rule.hits]

    def alive(self, request: RolloutRequest) -> list[str]:
        found = [str(record["metadata"]) for record in self.server.sandboxes.all()]
        return [text for text in found if self.digest(request) in text]

    async def start(
        self, name: str, rules: Rules = (), purpose: str = "", **options: Any
    ) -> RolloutRequest:
        chosen = {"mark": self.stack.mark, **options}
        run_id = re.sub(r"[^a-z0-9]+", "-", name.lower())
        request = self.stack.request(
            run_id,
            sandbox="e2b",
            agent=counting_agent.NAME,
            agent_options=chosen,
        )
        self.inject(request, rules, purpose)
        await self.stack.perdure.start_rollout(request)
        self.requests[name] = request
        return request

    async def ended(self, request: RolloutRequest) -> Episode:
        await until(lambda: self.stack.is_over(request), f"{request.run_id} is over", ALL_S)
        return await self.stack.episode(request)

    async def starts(self, request: RolloutRequest) -> list[int]:
        """Of the agent, by each sandbox whose evidence could be kept."""
        folder = [name for name in await self.stack.files(request) if name.endswith("starts.log")]
        attempts = [int(name.split("/")[1]) for name in folder]
        return [len(await self.stack.lines(request, "starts.log", n)) for n in attempts]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def field_(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Field]:
    if missing := why_not_here():
        pytest.skip(missing)
    folder: Path = tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patch:
        async with (
            service_harness.serving(E2B, folder / "server", patch) as (server, url),
            running(folder / "stack", workers=0) as stack,
        ):
            await stack.start_worker("tests.impatient_worker")
            yield Field(stack, server, url, {})


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.of(tmp_path_factory.mktemp("authority"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def together(field_: Field, request: pytest.FixtureRequest) -> Field:
    """Every selected case, started at once."""
    chosen = [item for item in request.session.items if item.path == request.path]
    specs = [getattr(item, "callspec", None) for item in chosen]
    names = {spec.params.get("case") for spec in specs if spec is not None}
    for name, case in CASES.items():
        if name in names:
            await field_.start(name, case.rules, case.purpose, does=case.does)
    return field_


@pytest.mark.longer
@pytest.mark.parametrize("case", CASES)
async def test_rollout_ends_right_or_says_why(together: Field, case: str) -> None:
    """The verdict is the true one, or the failure's type says what to do; nothing runs or is left."""
    wanted, request = CASES[case], together.requests[case]
    episode = await together.ended(request)
    failure = episode.failure.type if episode.failure else ""

    assert (episode.status, episode.outcome, episode.reward) == wanted.ends, (
        episode,
        together.stack.last_words(),
    )
    assert failure.startswith(wanted.fails_with) if wanted.fails_with else not failure, failure
    assert len(episode.attempts) == wanted.attempts, episode
    assert set(await together.starts(request)) <= {1}
    assert together.never_met(request) == []
    await until(lambda: not together.alive(request), "no sandbox of it is alive")


@pytest.mark.longer
async def test_list_that_lags_makes_nothing_twice(field_: Field) -> None:
    """Nothing is listed for ten minutes: one sandbox each for agent and grader, and none is left."""
    made = _creates(field_)
    field_.server.settings["list_lag_s"] = 600
    request = await field_.start("list lags")
    episode = await field_.ended(request)
    field_.server.settings["list_lag_s"] = 0

    assert (episode.outcome, _creates(field_) - made) == (Outcome.RESOLVED, 2)
    assert field_.alive(request) == []


@pytest.mark.longer
async def test_account_full_of_others_is_waited_for(field_: Field) -> None:
    """Other people's sandboxes fill the account: refused, then solved when some of them are gone."""
    field_.server.settings.update(max_live=20, others_live=20)
    request = await field_.start("full of others")
    made = _creates(field_)
    await until(lambda: _creates(field_) > made, "a create was refused")
    field_.server.settings.update(others_live=0)
    episode = await field_.ended(request)
    field_.server.settings.update(max_live=None)

    assert (episode.outcome, len(episode.attempts)) == (Outcome.RESOLVED, 1)
    assert field_.alive(request) == []


@pytest.mark.longer
@pytest.mark.parametrize("hours", [-3, 3])
async def test_a_wrong_clock_of_the_service_ends_no_sandbox(field_: Field, hours: int) -> None:
    """A service hours ahead or behind: the reaper leaves the living one alone, and it is solved."""
    field_.server.settings["clock_offset_s"] = hours * 3600
    request = await field_.start(f"clock {'behind' if hours < 0 else 'ahead'}", after_s=4)
    await field_.stack.at(request, "run_agent")
    swept = await field_.stack.sweep(grace_s=600)
    episode = await field_.ended(request)
    field_.server.settings["clock_offset_s"] = 0

    assert (swept.killed, episode.outcome, len(episode.attempts)) == (0, Outcome.RESOLVED, 1)


@pytest.mark.longer
@pytest.mark.parametrize("when", ["before", "after"])
async def test_server_that_goes_away(
    field_: Field, authority: Authority, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """GOAWAY over TLS and HTTP/2, the request seen to or not: solved in one attempt, nothing left."""
    async with behind_http2(field_.url, authority.tls()) as url:
        for name, value in E2B.variables(url, field_.server.state).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
        await field_.stack.kill_all(*field_.stack.workers)
        await field_.stack.start_worker("tests.impatient_worker")
        faults = everywhere(goaway=True, when=when)
        request = await field_.start(f"goaway {when}", faults)
        episode = await field_.ended(request)

    assert (episode.outcome, len(episode.attempts)) == (Outcome.RESOLVED, 1)
    assert await field_.starts(request) == [1]
    assert (field_.never_met(request), field_.alive(request)) == ([], [])


def _creates(field_: Field) -> int:
    return sum(entry["line"] == "POST /v2/sandboxes" for entry in field_.server.faults.log)
