"""The published conformance run of a sandbox provider on the user's own account: the contract, then a
burst. `perdure sandboxes check` runs it.

Its sandboxes belong to a home of their own, so it never sees those of runs, and no run or sweep sees
its sandboxes.
"""

import asyncio
import contextlib
import inspect
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from perdure.errors import AccountExhausted, ConfigurationError, PerdureError
from perdure.sandboxes.base import SandboxProvider, SandboxSpec
from perdure.testing.sandbox_burst import BurstResult, all_of, run_burst
from perdure.testing.sandbox_contract import LABELS, LIMITS, WORKDIR, SandboxContract
from perdure.testing.sandbox_meter import MeteredProvider
from perdure.types import AccountCaps, Frozen

TTL_S = 300.0
"""Time limit of each sandbox. The provider enforces it if this process is killed."""
LONGEST_TTL_S = 3600.0
"""Time limit of one sandbox, on which the contract tests `touch`."""
TEST_S = 240.0
"""Seconds that one promise may take."""
TESTS_AT_ONCE = 4
SETTLE_S = 15.0
"""Seconds after the last kill for which a provider may still list a sandbox."""
HOUR_S = 3600.0

PARTS: Mapping[str, Sequence[str]] = {
    "lost answers": (
        "create_twice_adopts",
        "concurrent_creates_make_one_box",
        "lost_answer_makes_no_second_box",
        "second_start_runs_nothing",
        "exec_id_with_other_argv_is_refused",
        "kill_is_idempotent",
    ),
    "re-attach with fencing": (
        "attach_finds_it",
        "attach_to_nothing_is_not_found",
        "results_stay",
        "survives_its_worker",
        "old_handle_is_fenced",
        "killed_sandbox_is_lost",
        "kill_under_a_watch_is_told",
        "identity_can_be_used_again_after_kill",
    ),
    "time limits": (
        "touch_sets_the_deadline",
        "ends_by_itself",
        "deadline_needs_no_worker",
        "a_time_limit_moves_later",
        "timeout_kills_the_whole_tree",
    ),
    "resource limits": ("memory_is_bounded", "too_much_output_is_killed"),
    "leaks": (
        "async_with_kills",
        "end_all_ends_what_any_command_left",
        "sigkill_reaches_the_whole_tree",
        "sigkill_after_the_end_reaches_what_was_left",
        "temporary_files_are_its_own",
        "worker_environment_stays_outside",
    ),
}
"""Tests of the contract by subject. All others are in OTHER_PART."""
OTHER_PART = "commands and files"
PREFIX = "test_"


@dataclass(frozen=True)
class Bounds:
    """What a check may use. Money is in dollars."""

    burst: int
    limit_s: float
    price_per_hour: float | None = None
    """Of one sandbox."""
    max_cost: float | None = None

    @property
    def most_sandboxes(self) -> int:
        """Each test of the contract makes at most two."""
        return 1 + 2 * len(contract_tests()) + self.burst

    @property
    def most_seconds(self) -> float:
        """Of all sandboxes together, if none were killed and each ended at its own time limit."""
        return (self.most_sandboxes - 1) * TTL_S + LONGEST_TTL_S

    def cost(self, seconds: float) -> float | None:
        return None if self.price_per_hour is None else seconds / HOUR_S * self.price_per_hour

    def check(self) -> None:
        """Raises: ConfigurationError if the check could cost more than `max_cost`."""
        if self.max_cost is None:
            return
        worst = self.cost(self.most_seconds)
        if worst is None:
            raise ConfigurationError(
                "--max-cost needs --price: dollars per sandbox-hour in your provider's price list"
            )
        if worst > self.max_cost:
            raise ConfigurationError(
                f"--max-cost {self.max_cost:g}: if nothing could be killed, {self.most_sandboxes} sandboxes"
                f" would live for {self.most_seconds / HOUR_S:.1f} hours in total and cost {worst:.2f}"
                " dollars; lower --burst or raise --max-cost"
            )


class PartResult(Frozen):
    part: str
    kept: int
    failed: int
    not_run: int
    """Not promised by this provider, or the check stopped before."""


class BrokenPromise(Frozen):
    test: str
    promise: str
    problem: str


class SandboxCheck(Frozen):
    """What a check found. It contains no key, address or path once it is redacted."""

    provider: str
    perdure: str
    sdk: str
    """Version of the provider's SDK; empty if it has none."""
    host_cpus: int
    started_at: str
    """UTC."""
    seconds: float
    parts: list[PartResult]
    broken: list[BrokenPromise]
    not_promised: dict[str, str]
    """Test -> why it was left out."""
    burst: BurstResult | None
    """Null if the check stopped before it."""
    caps: AccountCaps
    """Known limits of the account, by which the burst was admitted."""
    sandboxes: int
    sandbox_seconds: float
    price_per_hour: float | None
    burst_cost: float | None
    estimated_cost: float | None
    """Of the contract and the burst."""
    most_cost: float | None
    """The cost if no sandbox could have been killed."""
    left_behind: int
    """Sandboxes that the provider still listed after every one was killed. Must be 0."""
    left_by_earlier: int
    """Sandboxes of an earlier check that was killed. They were removed first."""
    stopped: str
    """Why the check ended early; empty if it did not."""

    @property
    def passed(self) -> bool:
        burst = self.burst
        complete = burst is not None and burst.created == burst.wanted and not burst.failures
        return complete and not self.broken and not self.left_behind and not self.stopped


class CheckedContract(SandboxContract):
    """The contract, made cheap enough for an account that costs money."""

    large_file_mb = 16

    def spec(self, tree: Path | None = None) -> SandboxSpec:
        return replace(super().spec(tree), ttl_s=TTL_S)


def contract_tests() -> list[str]:
    """All tests of the contract but the one of many sandboxes, which is the burst."""
    names = (name.removeprefix(PREFIX) for name in dir(SandboxContract) if name.startswith(PREFIX))
    return [name for name in names if name != "many_sandboxes_at_once"]


async def check(
    provider: SandboxProvider, bounds: Bounds, caps: AccountCaps, tell: Callable[[str], None]
) -> SandboxCheck:
    """Run the contract and the burst, and leave no sandbox behind, also if it is cancelled.

    `provider`: with a home of its own; every sandbox that it lists is killed.

    Raises: ConfigurationError, AccountExhausted and the like if the account gives no sandbox.
    """
    bounds.check()
    started, began = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()), time.monotonic()
    left_by_earlier = await _kill_all(provider)
    metered = MeteredProvider(provider, bounds.most_sandboxes)
    not_promised, problems = _not_promised(provider), dict[str, str]()
    burst, stopped = None, ""
    try:
        async with asyncio.timeout(bounds.limit_s) as limit:
            await _use_one(metered)
            await _run_contract(metered, not_promised, problems, tell)
            provider.waits_at_caps = False
            spec = CheckedContract().spec()
            burst = await run_burst(metered, spec, bounds.burst, caps)
    except BaseException as error:
        if not (isinstance(error, TimeoutError) and limit.expired()):
            with contextlib.suppress(PerdureError):
                await _kill_all(provider)
            raise
        stopped = f"its time limit of {bounds.limit_s / 60:g} minutes has passed: raise --minutes"
    left_behind = await _left_behind(provider)
    return SandboxCheck(
        provider=provider.name,
        perdure=metadata.version("perdure"),
        sdk=_sdk_version(provider.name),
        host_cpus=os.cpu_count() or 1,
        started_at=started,
        seconds=time.monotonic() - began,
        parts=_parts(problems),
        broken=[
            BrokenPromise(test=name, promise=_promise(name), problem=problem)
            for name, problem in sorted(problems.items())
            if problem
        ],
        not_promised=not_promised,
        burst=burst,
        caps=caps,
        sandboxes=metered.created,
        sandbox_seconds=metered.seconds,
        price_per_hour=bounds.price_per_hour,
        burst_cost=bounds.cost(burst.sandbox_seconds) if burst else None,
        estimated_cost=bounds.cost(metered.seconds),
        most_cost=bounds.cost(bounds.most_seconds),
        left_behind=left_behind,
        left_by_earlier=left_by_earlier,
        stopped=stopped,
    )


async def _use_one(provider: SandboxProvider) -> None:
    """Raises: PerdureError if the account gives no sandbox, or one without the contract's tools."""
    identity = f"check-{os.urandom(6).hex()}"
    spec = SandboxSpec(WORKDIR, limits=LIMITS, labels=LABELS, ttl_s=TTL_S)
    try:
        box = await provider.create(spec, identity)
        missing = await box.exec(
            "for one in python3 flock sha256sum; do command -v $one >&2 || echo $one; done"
        )
        if missing.stdout:
            names = ", ".join(missing.stdout.decode().split())
            raise ConfigurationError(
                f"the sandboxes of {provider.name} lack {names}: set an image or template that has them"
            )
    finally:
        await provider.kill(identity)


def _not_promised(provider: SandboxProvider) -> dict[str, str]:
    left_out = {}
    if not provider.host_bound:
        left_out["gateway_answers_and_may_restart"] = (
            "a sandbox on another host cannot open this host's socket"
        )
    if "memory_mb" not in provider.limits:
        left_out["memory_is_bounded"] = "the image or template sets the memory"
    if not provider.isolated:
        left_out["worker_environment_stays_outside"] = "the provider does not isolate"
    return left_out


async def _run_contract(
    provider: SandboxProvider,
    not_promised: Mapping[str, str],
    problems: dict[str, str],
    tell: Callable[[str], None],
) -> None:
    """Fill `problems`: test -> why it failed, empty if it passed. Raises: AccountExhausted."""
    tests = [name for name in contract_tests() if name not in not_promised]
    places = asyncio.Semaphore(TESTS_AT_ONCE)

    async def run(name: str) -> None:
        async with places:
            problems[name] = await _problem(provider, name)
        said = problems[name] or "kept"
        tell(f"  {len(problems)} of {len(tests)}: {name.replace('_', ' ')}: {said}")

    await all_of(run(name) for name in tests)


async def _problem(provider: SandboxProvider, name: str) -> str:
    test = getattr(CheckedContract(), PREFIX + name)
    with tempfile.TemporaryDirectory(prefix="pd-") as folder:
        fixtures = {"provider": provider, "tmp_path": Path(folder), "short_folder": Path(folder)}
        wanted = {one: fixtures[one] for one in inspect.signature(test).parameters}
        try:
            async with asyncio.timeout(TEST_S):
                await test(**wanted)
        except AccountExhausted:
            raise
        except Exception as error:  # a provider of the user's may raise anything
            return _shown(error)
    return ""


def _shown(error: Exception) -> str:
    """The error, or the line that failed if it says nothing."""
    line = traceback.extract_tb(error.__traceback__)[-1].line
    return f"{type(error).__name__}: {str(error) or line}"[:500]


def _promise(name: str) -> str:
    return " ".join((inspect.getdoc(getattr(SandboxContract, PREFIX + name)) or "").split())


def _parts(problems: Mapping[str, str]) -> list[PartResult]:
    named = {name for names in PARTS.values() for name in names}
    rest = [name for name in contract_tests() if name not in named]
    found = []
    for part, names in {**PARTS, OTHER_PART: rest}.items():
        run = [name for name in names if name in problems]
        failed = sum(problems[name] != "" for name in run)
        found.append(
            PartResult(
                part=part,
                kept=len(run) - failed,
                failed=failed,
                not_run=len(names) - len(run),
            )
        )
    return found


async def _kill_all(provider: SandboxProvider) -> int:
    """Kill every sandbox of this home; return how many there were."""
    found = await provider.list()
    await all_of(provider.kill(info.identity) for info in found)
    return len(found)


async def _left_behind(provider: SandboxProvider) -> int:
    end = time.monotonic() + SETTLE_S
    while await provider.list() and time.monotonic() < end:
        await asyncio.sleep(0.5)
    return await _kill_all(provider)


def _sdk_version(name: str) -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return ""
