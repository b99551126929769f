"""RolloutGroupWorkflow: the n rollouts of one instance that share a baseline (GRPO)."""

import asyncio
from datetime import timedelta
from functools import partial
from typing import Any

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from perdure.client import search_attribute_keys as attributes
    from perdure.client import temporal_names
    from perdure.rollouts.activity_messages import Truncation
    from perdure.types import EpisodeRef, GroupRequest, GroupResult, RolloutRequest, replacement
    from workflows import web_ui_markdown
    from workflows.child_rollouts import OpenChildren, play_rollout
    from workflows.web_ui import ChildrenPage, Links
    from workflows.workflow_failures import changed, check_own_id, is_evicted_from_cache, parse

MAX_WAIT_S = 30.0


@workflow.defn(name=temporal_names.GROUP)
class RolloutGroupWorkflow:
    """Ends at its quorum or deadline. Stragglers are cancelled, or continue without the group."""

    def __init__(self) -> None:
        self.episodes: list[EpisodeRef] = []
        self.total = 0
        self.group: GroupRequest | None = None
        """The request, with all changes so far."""
        self.open_children = OpenChildren()
        self.page: ChildrenPage | None = None

    @workflow.run
    async def run(self, request: Any = None) -> GroupResult:
        group = parse(GroupRequest, request)
        check_own_id(group.workflow_id)
        self.group, self.total = group, group.n_samples
        self.page = _page(group)
        self.page.show()
        if not attributes.are_set(workflow.info().typed_search_attributes):
            workflow.upsert_search_attributes(attributes.updates_of(group.rollout))
        tasks = [asyncio.create_task(self._play(group, k)) for k in range(group.n_samples)]
        try:
            await self._until_enough(group)
        finally:
            if not is_evicted_from_cache():
                await self._settle(tasks, group)
        await workflow.wait_condition(workflow.all_handlers_finished)
        group = self.group
        quorum = group.quorum or group.n_samples
        return GroupResult(
            group_id=group.group_id,
            graded=self._graded(),
            quorum_met=self._graded() >= quorum,
            episodes=tuple(sorted(self.episodes, key=lambda e: e.sample_index)),
        )

    @workflow.signal(name=temporal_names.SPENT)
    async def spent(self) -> None:
        """The run's budget is used up."""
        await self.open_children.stop()

    @workflow.signal(name=temporal_names.TRUNCATE)
    async def truncate(self, truncation: Truncation) -> None:
        """The run's time is over."""
        await self.open_children.truncate(truncation)

    @workflow.update
    async def change(self, fields: Any) -> dict[str, Any]:
        """Change the quorum or the deadline: `fields` are fields of GroupRequest."""
        await workflow.wait_condition(lambda: self.group is not None)
        assert self.group is not None, "it was waited for"
        self.group = changed(self.group, fields)
        workflow.upsert_memo({temporal_names.CHANGED: self.group.changeable()})
        return self.progress()

    @workflow.query
    def progress(self) -> dict[str, Any]:
        return {
            "total": self.total,
            "done": len(self.episodes),
            "graded": self._graded(),
            "episodes": [e.model_dump(mode="json", exclude_defaults=True) for e in self.episodes],
        }

    @workflow.update
    async def wait_progress(self, cursor: int) -> list[EpisodeRef]:
        """The episodes after the first `cursor` ones. Waits up to 30 s for at least one."""
        try:
            await workflow.wait_condition(
                lambda: len(self.episodes) > cursor or len(self.episodes) >= self.total,
                timeout=timedelta(seconds=MAX_WAIT_S),
                timeout_summary="a client waits for the next episode",
            )
        except TimeoutError:
            return []
        return self.episodes[cursor:]

    @wait_progress.validator
    def _cursor_is_sane(self, cursor: int) -> None:
        if cursor < 0:
            raise ValueError("cursor must be 0 or more")

    async def _play(self, group: GroupRequest, sample_index: int) -> None:
        keep = group.stragglers == "keep"
        rollout: RolloutRequest | None = group.sample(sample_index)
        while rollout is not None:
            episode = await play_rollout(rollout, self.open_children, abandon=keep)
            replaces = group.without_verdict == "replace"
            rollout = replacement(rollout, episode, group.rollout.round) if replaces else None
        self.episodes.append(episode)
        if self.page is not None:
            self.page.add(episode)

    async def _until_enough(self, group: GroupRequest) -> None:
        """Wait for the quorum or the deadline, following changes of either."""
        began = workflow.time()
        while True:
            waits_for = self.group or group
            try:
                await workflow.wait_condition(
                    partial(self._waits_no_more, waits_for),
                    timeout=_left(waits_for, workflow.time() - began),
                    timeout_summary="deadline of the group",
                )
            except TimeoutError:
                workflow.logger.info("deadline reached with %d graded", self._graded())
                return
            if self.group is waits_for:
                return

    def _waits_no_more(self, group: GroupRequest) -> bool:
        """Whether the group has enough rollouts, or its quorum or deadline has changed."""
        quorum = group.quorum or group.n_samples
        enough = self._graded() >= quorum or len(self.episodes) >= self.total
        return enough or self.group is not group

    async def _settle(self, tasks: list[asyncio.Task[None]], group: GroupRequest) -> None:
        """Cancel the open rollouts and wait for their episodes, unless stragglers are kept."""
        open_tasks = [task for task in tasks if not task.done()]
        if group.stragglers == "keep":
            return
        for task in open_tasks:
            task.cancel()
        if open_tasks:
            await asyncio.gather(*open_tasks, return_exceptions=True)

    def _graded(self) -> int:
        return sum(e.reward is not None for e in self.episodes)


def _left(group: GroupRequest, waited_s: float) -> timedelta | None:
    """Time left until the deadline."""
    if group.deadline_s is None:
        return None
    return timedelta(seconds=max(0.0, group.deadline_s - waited_s))


def _page(group: GroupRequest) -> ChildrenPage:
    rollout, links = group.rollout, Links.here()
    headline = (
        f"**{web_ui_markdown.escaped(rollout.instance)}** · {group.n_samples} samples"
        f" · agent {web_ui_markdown.quoted(rollout.agent)} · run {links.run(rollout.run_id)}"
    )
    return ChildrenPage(rollout.run_id, headline, group.n_samples, links)
