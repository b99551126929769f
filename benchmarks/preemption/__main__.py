"""`python -m benchmarks.preemption`: what a killed engine, or a killed gateway, costs in tokens and time.

Two scripted engines run as processes, with a modelled time per token and for prefill. All agents run
their turns at once. In the middle of the run one engine, or one of two gateways, gets signal 9. Tokens
sent are counted by each engine's log; tokens recorded are those that agents got. On the plain side an
agent uses one engine and repeats a broken call at the other one.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.preemption.deployment import SECRET, WORDS, Deployment
from perdure.engines.clients.connections import Connections
from perdure.engines.clients.token_server import EngineRequest, StreamBroken
from perdure.engines.clients.vllm import VllmEngine
from perdure.engines.pool.salvage import Salvage
from perdure.gateway.base import SessionSpec
from perdure.gateway.control import GatewayControl
from perdure.home import Secrets

BREATH_S = 0.3


@dataclass(frozen=True)
class Job:
    agents: int = 16
    turns: int = 6
    tokens: int = 240
    """Approximate length of a completion in tokens."""
    opening: int = 2000
    """Approximate length of an agent's first prompt in tokens."""


@dataclass
class Crowd:
    """What all agents of a side saw."""

    turns: int = 0
    recorded: int = 0
    errors: int = 0
    """Failed answers: an error status or a broken connection."""
    failed: int = 0
    """Agents that gave up."""


@dataclass(frozen=True)
class Result:
    side: str
    sampled: int
    again: int
    """Tokens that an engine sent and that are in no answer, or were sent twice."""
    errors: int
    failed: int
    first_token_s: tuple[float, float]
    """p50 and p95 seconds to the first token of undisturbed turns, from the request's arrival at the engine."""
    resumed_s: tuple[float, float]
    """The same of broken turns, from the kill to the first token elsewhere."""
    broken: int

    @property
    def share(self) -> float:
        return self.again / self.sampled


async def side(name: str, job: Job) -> Result:
    gateways = {"plain": 0, "gateway killed": 2}.get(name, 1)
    with tempfile.TemporaryDirectory(prefix="pd-") as folder:
        async with Deployment(Path(folder), gateways, job.tokens) as deployment:
            crowd = Crowd()
            play = _plain if name == "plain" else _through_gateway
            kills = {"undisturbed": None, "gateway killed": deployment.kill_gateway}
            kill = kills.get(name, deployment.kill_engine)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(play(deployment, job, crowd))
                if kill is not None:
                    tasks.create_task(_in_the_middle(job, crowd, kill))
            return _result(name, deployment, crowd)


async def _in_the_middle(job: Job, crowd: Crowd, kill: Callable[[], None]) -> None:
    while crowd.turns < job.agents * job.turns * 0.4:
        await asyncio.sleep(0.01)
    await asyncio.sleep(
        job.tokens / 100
    )  # half a turn, so that calls which began just now are running
    await asyncio.to_thread(kill)


async def _through_gateway(deployment: Deployment, job: Job, crowd: Crowd) -> None:
    async with GatewayControl(deployment.url, Secrets.of(SECRET)) as control:
        specs = [
            SessionSpec(
                session_id=f"a-{n}", turns_key=f"turns/{n}", labels={"group": f"g-{n // 4}"}
            )
            for n in range(job.agents)
        ]
        for spec in specs:
            await control.open(spec)
        await asyncio.gather(
            *(
                _agent(deployment.url, control.key(s.session_id), job, n, crowd)
                for n, s in enumerate(specs)
            )
        )
        for spec in specs:
            crowd.recorded += (await control.get(spec.session_id)).tokens


async def _agent(url: str, key: str, job: Job, number: int, crowd: Crowd) -> None:
    """Repeat the identical body after an error, as an SDK does."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": _opening(job, number // 4)}]
    headers = {"authorization": f"Bearer {key}"}
    await asyncio.sleep(random.Random(number).uniform(0, job.tokens / 50))
    async with httpx.AsyncClient(base_url=url, timeout=600, headers=headers) as client:
        for turn in range(job.turns):
            body = {"model": "policy", "messages": messages}

            async def ask(body: dict[str, Any] = body) -> httpx.Response:
                return (await client.post("/v1/chat/completions", json=body)).raise_for_status()

            answer = await _patiently(ask, crowd)
            if answer is None:
                return
            crowd.turns += 1
            message = answer.json()["choices"][0]["message"]
            messages = [*messages, message, {"role": "user", "content": f"Go on, {turn}."}]


async def _patiently(
    ask: Callable[[], Awaitable[httpx.Response]], crowd: Crowd
) -> httpx.Response | None:
    for _ in range(10):
        try:
            return await ask()
        except httpx.HTTPError:
            crowd.errors += 1
            await asyncio.sleep(BREATH_S)
    crowd.failed += 1
    return None


async def _plain(deployment: Deployment, job: Job, crowd: Crowd) -> None:
    """Each agent uses one engine; after a break it repeats the whole call at the other one."""
    async with contextlib.aclosing(Connections()) as connections:
        targets = [VllmEngine(url, url, connections) for url in deployment.engine_urls]
        await asyncio.gather(*(_plain_agent(targets, job, n, crowd) for n in range(job.agents)))


async def _plain_agent(targets: list[VllmEngine], job: Job, number: int, crowd: Crowd) -> None:
    own, at = random.Random(number), number // 4
    prompt = [random.Random(number // 4).randrange(1000, 140_000) for _ in range(job.opening)]
    await asyncio.sleep(own.uniform(0, job.tokens / 50))
    for turn in range(job.turns):
        tries = 0
        while True:
            salvage = Salvage()
            ask = EngineRequest("policy", prompt, {}, f"a-{number}", f"a-{number}-{turn}-{tries}")
            try:
                await targets[at % 2].sample(ask, salvage, lambda: None)
            except StreamBroken:
                crowd.errors, at, tries = crowd.errors + 1, at + 1, tries + 1
                await asyncio.sleep(BREATH_S)
            else:
                break
        crowd.turns += 1
        crowd.recorded += len(salvage.ids)
        prompt = [*prompt, *salvage.ids, *(own.randrange(1000, 140_000) for _ in range(8))]


def _opening(job: Job, group: int) -> str:
    return f"Task {group}. " + WORDS * (job.opening // 20)


def _result(name: str, deployment: Deployment, crowd: Crowd) -> Result:
    tries = deployment.sampled()
    sampled = sum(one.tokens for one in tries)
    killed = deployment.killed_at or float("inf")
    calm = [one.first - one.arrived for one in tries if one.first and one.first < killed]
    cut = (
        {one.request_id for one in tries if one.arrived < killed} if deployment.killed_at else set()
    )
    resumed = _resumed(deployment, name, cut)
    return Result(
        name,
        sampled,
        sampled - crowd.recorded,
        crowd.errors,
        crowd.failed,
        _p50_p95(calm),
        _p50_p95(resumed),
        len(resumed),
    )


def _resumed(deployment: Deployment, name: str, cut: set[str]) -> list[float]:
    """Seconds from the kill to the first token of each broken turn's next try."""
    after = [
        one for one in deployment.sampled() if one.arrived >= deployment.killed_at > 0 and one.first
    ]
    if (
        name == "gateway killed"
    ):  # the repeated call is a new request, the first of its session there
        firsts: dict[str, float] = {}
        broken = {name.rpartition("-")[0] for name in _unfinished(deployment, cut)}
        for one in sorted(after, key=lambda one: one.arrived):
            session = one.request_id.rpartition("-")[0]
            if session in broken and one.first is not None:
                firsts.setdefault(session, one.first - deployment.killed_at)
        return list(firsts.values())
    tries = [one for one in after if one.request_id.rpartition("-")[0] in cut or _retried(one, cut)]
    return [one.first - deployment.killed_at for one in tries if one.first is not None]


def _retried(one: Any, cut: set[str]) -> bool:
    """The plain side numbers its tries from 0."""
    head, _, number = one.request_id.rpartition("-")
    return number == "1" and f"{head}-0" in cut


def _unfinished(deployment: Deployment, cut: set[str]) -> set[str]:
    """Tries that stopped at the kill."""
    longest = max(one.tokens for one in deployment.sampled())
    return {
        one.request_id
        for one in deployment.sampled()
        if one.request_id in cut and one.tokens < longest
    }


def _p50_p95(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return (values or [0.0])[0], (values or [0.0])[0]
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return cuts[9], cuts[18]


SIDES = ("undisturbed", "engine killed", "gateway killed", "plain")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.preemption", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--json", action="store_true")
    for name, value in asdict(Job()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    options = vars(parser.parse_args())
    rounds, sides, as_json = (options.pop(name) for name in ("rounds", "sides", "json"))
    results = [
        asyncio.run(side(name, Job(**options))) for _ in range(rounds) for name in sides.split(",")
    ]
    if as_json:
        print(json.dumps([asdict(result) for result in results], indent=1))
        return
    print(
        f"{'side':16} {'sampled':>8} {'again':>6} {'share':>7} {'errors':>6} {'failed':>6} "
        f"{'broken':>6} {'first token s':>16} {'after the kill s':>18}"
    )
    for r in sorted(results, key=lambda r: r.side):
        print(
            f"{r.side:16} {r.sampled:8} {r.again:6} {r.share:7.2%} {r.errors:6} {r.failed:6} "
            f"{r.broken:6} {r.first_token_s[0]:7.3f} / {r.first_token_s[1]:6.3f} "
            f"{r.resumed_s[0]:8.3f} / {r.resumed_s[1]:7.3f}"
        )


if __name__ == "__main__":
    main()
