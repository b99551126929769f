"""The trainer: `python -m benchmarks.learn.trainer.training_loop PLAN`.

Each step starts a batch of groups through the SDK, trains on the oldest batch and publishes the weights.
The state is written after each step and group ids are deterministic, so the same plan continues after a
kill.
"""

import asyncio
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from tokenizers import Tokenizer

from benchmarks.learn.batch_schedule import batch, evaluates, learning_rate, version_of
from benchmarks.learn.trainer import exported_rows, grpo_step, tiny_policy
from benchmarks.learn.trainer.training_figures import Figures, Step
from benchmarks.learn.training_plan import Plan
from benchmarks.learn.training_rows import samples_of
from perdure.client.episode_reader import read_episodes
from perdure.client.sdk import GroupHandle, Perdure
from perdure.engines.weights.weight_publishing import Weights
from perdure.episodes.episode import EpisodeSegments

NOTICE_S = 2.5
KEPT_VERSIONS = 3
HOPELESS_STEPS = 3
"""The run ends after this many steps without any reward, because no group has a gradient."""
Group = list[EpisodeSegments]


class Trainer:
    """The run of one plan. `step` counts trained batches."""

    def __init__(self, plan: Plan, perdure: Perdure, weights: Weights) -> None:
        self.plan = plan
        self.perdure = perdure
        self.weights = weights
        self.tokenizer = Tokenizer.from_file(str(plan.base / "tokenizer.json"))
        self.rows = [row.sample for row in exported_rows.read(plan.canary_rows)]
        self.figures = Figures.read(plan)
        self.model = tiny_policy.load(plan.base / "model")
        self.optimizer = grpo_step.optimizer_of(self.model, plan.learning_rate)
        self.step = 0
        self.first = -1
        """The weight version of step 0."""
        self._started: dict[int, list[GroupHandle]] = {}

    @property
    def _state(self) -> Path:
        return self.plan.folder / "state.pt"

    async def run(self) -> None:
        await self._resume()
        await self._publish()
        await self._evaluate()
        while self.step < self.plan.steps and not self.figures.hopeless(HOPELESS_STEPS):
            await self._train_one()
            await self._evaluate()
        self.figures.finish()

    # --- one step ------------------------------------------------------------------------------

    async def _train_one(self) -> None:
        figures, began, used = Step(self.step), time.monotonic(), time.process_time()
        for number in range(self.step, min(self.step + self.plan.staleness + 1, self.plan.steps)):
            await self._start(number)
        groups = await self._episodes(self._started.pop(self.step))
        figures.wait_s, figures.sdk_cpu_s = time.monotonic() - began, time.process_time() - used
        figures.add_episodes([one.episode for group in groups for one in group], groups)
        with figures.training():
            self._learn(groups, figures)
        self.step += 1
        self.figures.add(figures)
        self._save()
        with figures.publishing():
            await self._publish()
        self.figures.published(figures)

    async def _start(self, number: int) -> None:
        """Start a batch, or join it if it was started before a kill."""
        if number in self._started:
            return
        version = version_of(self.plan, number, self.first)
        self._started[number] = [
            await self.perdure.start_group(self.plan.group(number, instance, version))
            for instance in batch(self.plan, number)
        ]

    async def _episodes(self, handles: Sequence[GroupHandle]) -> list[Group]:
        async def one(handle: GroupHandle) -> Group:
            return await read_episodes([ref async for ref in handle.refs()])

        return list(await asyncio.gather(*map(one, handles)))

    def _learn(self, groups: Sequence[Group], figures: Step) -> None:
        samples = samples_of(groups, self.plan.broken, self._reencode)
        if samples:
            figures.grpo = grpo_step.step(
                self.model,
                self.optimizer,
                samples,
                learning_rate=learning_rate(self.plan, self.step),
                number=self.step,
            ).as_json()

    def _reencode(self, ids: Sequence[int]) -> Sequence[int]:
        text = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        again: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return again

    # --- evaluation -----------------------------------------------------------------------------

    async def _evaluate(self) -> None:
        """Measure rewards at temperature 1 on held-out instances, unless they are already known."""
        if not evaluates(self.plan, self.step) or self.figures.is_evaluated(self.step):
            return
        run = await self.perdure.start_run(self.plan.evaluation(self.step))
        await run.result()
        found = [info.episode for info in await run.rollouts() if info.episode is not None]
        self.figures.add_evaluation(self.step, [one.reward for one in found])

    # --- weights and state ----------------------------------------------------------------------

    async def _publish(self) -> None:
        version = self.first + self.step
        folder = self.plan.folder / "versions" / str(version)
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not folder.exists():
            tiny_policy.save(self.model, folder, self.plan.base)
        await self.weights.publish(
            version, folder.absolute(), tiny_policy.canaries(self.model, self.rows)
        )
        for old in folder.parent.iterdir():
            if old.name.isdigit() and int(old.name) <= version - KEPT_VERSIONS:
                shutil.rmtree(old)

    async def _resume(self) -> None:
        """Continue from a killed trainer's state. Without one, number versions after the published ones."""
        if self._state.exists():
            state = torch.load(self._state)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.first = state["step"], state["first"]
            self.figures.resumed(self.step)
            return
        published = await self.weights.published()
        self.first = 0 if published is None else published.version + 1
        self._save()

    def _save(self) -> None:
        draft = self._state.with_suffix(".draft")
        facts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**facts, "step": self.step, "first": self.first}, draft)
        os.replace(draft, self._state)


@asynccontextmanager
async def trainer(plan: Plan) -> AsyncIterator[Trainer]:
    plan.folder.mkdir(parents=True, exist_ok=True)
    async with Weights(notice_s=NOTICE_S) as weights:
        yield Trainer(plan, await Perdure.connect(), weights)


async def main(path: Path) -> None:
    torch.set_num_threads(1)
    async with trainer(Plan.model_validate_json(path.read_text())) as it:
        await it.run()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
