"""Builds a dataset from its recipe: finds entries, builds environments, calibrates, stores
instances.

It shares environments with the workers of this home, so none is built twice.
"""

import asyncio
import fnmatch
import functools
import itertools
import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from perdure.errors import ConfigurationError, InstanceError, NotFound, RetryHere, SandboxLost
from perdure.instances import calibration_record, instance_catalog
from perdure.instances.calibration_proof import Calibrate, Calibrated, CalibrationReport
from perdure.instances.calibration_record import Calibration
from perdure.instances.environment_builder import Environments
from perdure.instances.recipes import git_history, patch_series, release_pairs
from perdure.instances.recipes.dataset_recipe import Recipe
from perdure.instances.recipes.recipe_candidate import (
    DIGEST,
    Candidate,
    Rejection,
    accept,
    digest_of,
    reject,
    rejected,
)
from perdure.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec
from perdure.storage.base import Store
from perdure.types import CalibrationState, Instance, Limits

LIMITS = Limits(memory_mb=4096)
TTL_S = 3600.0


@dataclass(frozen=True)
class Built:
    """The result for one entry: its instance, or the problem. `report` is None if an instance in
    the store was kept."""

    instance_id: str
    seconds: float
    instance: Instance | None = None
    report: CalibrationReport | None = None
    problem: str = ""


def candidates_of(recipe: Recipe, folder: Path, *, demo: bool = False) -> list[Candidate]:
    """The entries of the recipe in `folder`. For `releases`, the first pair of every package comes
    before any second pair.


    Raises: InstanceError, RetryHere.
    """
    found: list[Candidate] = [
        release_pairs.ReleasePair(pair) for pair in recipe.pairs if pair.demo or not demo
    ]
    rounds = itertools.zip_longest(*(releases.pairs for releases in recipe.releases))
    found += [release_pairs.ReleasePair(pair) for pair in itertools.chain(*rounds) if pair]
    for history in recipe.histories:
        found += git_history.candidates(history, folder)
    if (series := recipe.patches) is not None:
        found += [patch_series.PatchRow(series, name) for name in series.rows]
    return found


def chosen(
    candidates: Sequence[Candidate], only: Sequence[str], limit: int | None = None
) -> list[Candidate]:
    """The candidates whose instance id matches one of the globs, at most `limit`.

    Raises: ConfigurationError.
    """
    found = [
        one
        for one in candidates
        if not only or any(fnmatch.fnmatch(one.instance_id, glob) for glob in only)
    ]
    if not found:
        known = ", ".join(one.instance_id for one in candidates)
        raise ConfigurationError(
            f"--include matches no entry of the recipe: {known or 'it has none'}"
        )
    return found[:limit]


async def build_all(
    builder: "Builder", candidates: Sequence[Candidate], *, rebuild: bool = False, jobs: int = 0
) -> AsyncIterator[Built]:
    """Build `jobs` entries at a time (0: one per core), and yield each result as it completes.

    An entry that cannot be built gives a result with a `problem`, not an exception.
    """
    slots = asyncio.Semaphore(jobs or os.cpu_count() or 1)

    async def one(candidate: Candidate) -> Built:
        async with slots:
            return await builder.build(candidate, rebuild=rebuild)

    tasks = [asyncio.ensure_future(one(candidate)) for candidate in candidates]  # in this order
    try:
        for next_one in asyncio.as_completed(tasks):
            yield await next_one
    finally:  # each canceled task ends its sandboxes
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Builder:
    """Makes and calibrates the instances of one dataset on this host."""

    def __init__(
        self,
        home: Path,
        store: Store,
        provider: SandboxProvider,
        recipe: Recipe,
        calibrate: Calibrate,
        *,
        build_hosts: str = "",
    ) -> None:
        self.store = store
        self.provider = provider
        self.recipe = recipe
        self.calibrate = calibrate
        self.environments = Environments(
            home / "environments", store, provider, build_hosts=build_hosts
        )

    async def build(self, candidate: Candidate, *, rebuild: bool) -> Built:
        """Make and calibrate the row. Unless `rebuild`, a row in the store is kept, and an entry
        that was rejected is not tried again."""
        started = time.monotonic()
        ref = f"{self.recipe.name}/{candidate.instance_id}"
        facts = digest_of(candidate)
        try:
            if not rebuild:
                if (kept := await self._kept(ref, facts)) is not None:
                    return Built(candidate.instance_id, 0.0, kept)
                if (earlier := await rejected(self.store, ref)) and earlier.facts == facts:
                    return Built(candidate.instance_id, 0.0, problem=earlier.problem)
            found = await self._made(candidate, facts)
        except InstanceError as error:
            await reject(self.store, ref, Rejection(facts=facts, problem=str(error)))
            return Built(candidate.instance_id, time.monotonic() - started, problem=str(error))
        except (RetryHere, SandboxLost) as error:
            return Built(candidate.instance_id, time.monotonic() - started, problem=str(error))
        seconds = time.monotonic() - started
        return Built(candidate.instance_id, seconds, found.instance, found.report)

    async def _made(self, candidate: Candidate, facts: str) -> Calibrated:
        instance = self.recipe.apply_defaults(await candidate.make(self.recipe.name, self.store))
        metadata = {**instance.metadata, DIGEST: facts}
        instance = instance.model_copy(update={"metadata": metadata})
        await self.environments.prepare(instance)
        found = await self.calibrate(instance, functools.partial(self._sandbox, instance))
        await instance_catalog.save(self.store, found.instance)
        record = _record(found.instance, found.report, self.provider.name)
        await calibration_record.save(self.store, record)
        await accept(self.store, found.instance.ref)
        return found

    async def _kept(self, ref: str, facts: str) -> Instance | None:
        """The instance in the store, if it was built from the same facts."""
        try:
            kept = await instance_catalog.load(self.store, ref)
        except NotFound:
            return None
        return kept if kept.metadata.get(DIGEST) == facts else None

    async def _sandbox(self, instance: Instance, purpose: str) -> Sandbox:
        prepared = await self.environments.prepare(instance)
        spec = SandboxSpec(
            workdir=prepared.workdir,
            tree=prepared.tree,
            image=prepared.image,
            mounts=prepared.mounts,
            env=prepared.env,
            limits=LIMITS,
            labels={"app": "perdure", "purpose": f"calibrate-{purpose}"},
            ttl_s=TTL_S,
        )
        return await self.provider.create(spec, f"p-cal-{uuid4().hex[:24]}")


def _record(instance: Instance, report: CalibrationReport, sandbox: str) -> Calibration:
    """The calibration record of a built row; building runs the same proof."""
    grading = instance.grading
    return Calibration(
        instance=instance.ref,
        instance_sha256=calibration_record.digest_of(instance),
        sandbox=sandbox,
        state=CalibrationState.PROVED,
        runs=report.runs,
        gold_resolved=report.runs,
        fail_to_pass=grading.fail_to_pass,
        pass_to_pass=grading.pass_to_pass,
        base_passes=True if grading.pass_to_pass else None,
        longest_run_s=report.longest_run_s,
        twin_draws=grading.twin_draws,
        canary=grading.canary,
        without_twin=dict(report.without_twins),
        variants=report.variants,
    )
