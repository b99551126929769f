"""Runs, groups and rollouts in the Temporal Web UI: details in Markdown, search attributes.

Details add nothing to the history. Their size is limited, whatever the number of rollouts, because
the UI sends them as part of a URL.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from perdure.client import search_attribute_keys as attributes
    from perdure.client import temporal_names
    from perdure.rollouts.activity_messages import AgentRun, Booted, Captured, GradedPatch
    from perdure.types import (
        EpisodeRef,
        Failure,
        Outcome,
        RolloutRequest,
        RolloutStatus,
        RunStatus,
    )
    from workflows import outcome_summary, web_ui_markdown

VIEWER = "perdure_viewer"
"""Name of the extern function that gives a worker's workflows the address of `perdure view`."""
LISTED = 10
"""Children per table in the details: the worst ones and the last ones."""
SENTENCE = 400
"""Characters of a failure's message, which ends with the fix."""
SHOWN_EVENT_LINES = 30
"""Number of a rollout's latest event lines in the details."""


@dataclass(frozen=True)
class Links:
    """Links to pages of this namespace and of the viewer."""

    namespace: str
    viewer: str = ""
    """Address of `perdure view`; empty if none is known."""

    @classmethod
    def here(cls) -> "Links":
        """Links for the running workflow. Its worker knows the viewer's address."""
        known = workflow.extern_functions().get(VIEWER)
        return cls(workflow.info().namespace, str(known()) if known is not None else "")

    def workflow(self, label: str, workflow_id: str) -> str:
        return web_ui_markdown.of_workflow(label, self.namespace, workflow_id)

    def run(self, run_id: str) -> str:
        return self.workflow(run_id, f"run/{run_id}")

    def rollout_lists(self, run_id: str) -> str:
        """Links to lists of a run's rollouts that a person may look for."""
        of_run = f"{attributes.RUN.name}='{run_id}' AND WorkflowType='{temporal_names.ROLLOUT}'"
        filters = {
            "open": "ExecutionStatus='Running'",
            "open in a later attempt": f"ExecutionStatus='Running' AND {attributes.ATTEMPT.name}>1",
            "failed": "ExecutionStatus='Failed'",
        }
        links = (
            web_ui_markdown.of_list(label, self.namespace, f"{of_run} AND {one}")
            for label, one in filters.items()
        )
        return " · ".join(links)

    def rollout_link(self, label: str, run_id: str, instance_id: str, sample: int) -> str:
        """A link to a rollout's page in the viewer; empty without a viewer."""
        if not self.viewer:
            return ""
        url = f"{self.viewer}/runs/{run_id}/rollouts/{instance_id}/{sample}"
        return web_ui_markdown.of_page(label, url)


class RolloutPage:
    """Collects one line per event and updates the workflow's current details."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.headline = ""
        self.open_with = ""
        self.current = "starting"
        self.number = 0
        self.evidence = ""
        self.requested_version: int | None = None
        self.reason = ""
        """Why the rollout is parked."""
        self.found = ""
        """The verdict, on one line."""
        self._run: AgentRun | None = None
        self._graded: GradedPatch | None = None
        self._listed = ("waiting", 1)

    def open(self, rollout: RolloutRequest) -> None:
        self.requested_version = rollout.policy_version
        links = Links.here()
        rollout_of = rollout.run_id, rollout.instance_id, rollout.sample_index
        command = f"`perdure show {'/'.join(map(str, rollout_of))}`"
        seen = links.rollout_link("in the viewer", *rollout_of)
        self.open_with = f"{seen} or {command}" if seen else command
        self.headline = (
            f"**{web_ui_markdown.escaped(rollout.instance)}** · sample {rollout.sample_index}"
            f" · agent {web_ui_markdown.quoted(rollout.agent)} · run {links.run(rollout.run_id)}"
        )
        self._show()
        if attributes.are_set(workflow.info().typed_search_attributes):
            return  # the client has set them at the start, which saves an event
        workflow.upsert_search_attributes(attributes.updates_of(rollout))

    def stage(self, name: str, attempt: int) -> None:
        self.current, self.number = name, attempt
        self._show()
        if self._listed != (name, attempt):
            self._list()

    def booting(self, attempt: int) -> None:
        """Called by a signal that the boot sends if it takes longer than a moment."""
        if self.current == "waiting":
            self.stage("boot", attempt)

    def _list(self) -> None:
        stage, attempt = self.current, self.number
        changed: list[Any] = [attributes.STAGE.value_set(stage)]
        if attempt != self._listed[1]:
            changed.append(attributes.ATTEMPT.value_set(attempt))
        self._listed = stage, attempt
        workflow.upsert_search_attributes(changed)

    def waits(self, step: str) -> None:
        attempt, _, purpose = step.partition("-")
        self._add(f"waits for a permit of the sandbox account (attempt {attempt}, {purpose})")

    def parked(self, attempt: int, reason: str) -> None:
        self.reason = reason
        self._add(f"parked without a sandbox: {web_ui_markdown.quoted(reason, SENTENCE)}")
        self.stage("parked", attempt)

    def booted(self, booted: Booted) -> None:
        self.evidence = booted.uri
        self._add(
            f"sandbox up{f' on {web_ui_markdown.quoted(booted.host)}' if booted.host else ''}"
        )

    def spent(self) -> None:
        self._add("the run's budget is used up: the agent stops")

    def truncated(self, cause: str) -> None:
        self._add(f"{cause} is reached: the rollout stops")

    def agent(self, run: AgentRun) -> None:
        self._run = run
        self._add(
            f"agent **{run.end.value}**: {run.turns} turns, {run.tokens} sampled tokens,"
            f" {run.seconds:.1f} s"
        )
        if run.detail:
            self._add(f"the agent's last line: {web_ui_markdown.quoted(run.detail)}")
        if run.unanswered:
            self._add(
                f"its last model call got no answer: {web_ui_markdown.quoted(run.unanswered)}"
            )

    def captured(self, captured: Captured) -> None:
        files = f"{captured.files} file{'' if captured.files == 1 else 's'}"
        size = "empty" if captured.empty else f"{captured.size} bytes in {files}"
        self._add(f"diff captured: {size}{' (over the size cap)' if captured.too_large else ''}")

    def graded(self, graded: GradedPatch) -> None:
        self._graded = graded
        has_reason = graded.reason and not graded.failing  # otherwise both name the same tests
        reason = f": {web_ui_markdown.quoted(graded.reason)}" if has_reason else ""
        reward = "none" if graded.reward is None else f"{graded.reward:g}"
        self._add(f"**{graded.verdict}**, reward {reward}{reason}")
        if graded.failing:
            more = graded.failing_count - len(graded.failing)
            shown = ", ".join(map(web_ui_markdown.quoted, graded.failing))
            self._add(f"failing tests: {shown}{f' and {more} more' if more > 0 else ''}")

    def lost(self, attempt: int, failure: Failure) -> None:
        self._add(f"**lost** attempt {attempt}, {_told(failure)}")

    def evicted(self, count: int) -> None:
        self._add(f"worker shut down, work handed over ({count})")

    def verdict(self, status: RolloutStatus, failure: Failure | None) -> str:
        """The episode's verdict on one line, used as the summary of the activity that writes it."""
        run, graded = self._run, self._graded
        has_verdict = status is RolloutStatus.GRADED and graded is not None
        return outcome_summary.line(
            graded.verdict if has_verdict and graded else status.value,
            reward=graded.reward if has_verdict and graded else None,
            turns=run.turns if run else 0,
            tokens=run.tokens if run else 0,
            failure=failure,
        )

    def close(self, episode: EpisodeRef) -> None:
        final: list[Any] = [
            attributes.STAGE.value_set("done"),
            attributes.OUTCOME.value_set(episode.ending),
            attributes.ATTEMPT.value_set(episode.attempts),
        ]
        if episode.reward is not None:
            final.append(attributes.REWARD.value_set(episode.reward))
        if self.requested_version is None and episode.policy_version_max is not None:
            final.append(attributes.POLICY_VERSION.value_set(episode.policy_version_max))
        if episode.failure is not None:
            final.append(
                attributes.FAILURE.value_set(
                    f"{episode.failure.boundary.value}:{episode.failure.type}"
                )
            )
        workflow.upsert_search_attributes(final)
        workflow.upsert_memo({"episode": episode.model_dump(mode="json", exclude_defaults=True)})
        self.current = "done"
        self.evidence = episode.uri
        self.found = _verdict(episode)
        if episode.status is not RolloutStatus.GRADED:
            why = _told(episode.failure) if episode.failure else ""
            known = any(line.endswith(why) for line in self.lines[-1:])
            more = "" if known or not why else f", {why}"
            self._add(f"ended as **{episode.status.value}**, reward: none{more}")
        self._show()

    def state(self) -> dict[str, Any]:
        return {
            "stage": self.current,
            "attempt": self.number,
            "evidence": self.evidence,
            "story": self.lines,
        }

    def _add(self, line: str) -> None:
        self.lines.append(line)
        self._show()

    def _show(self) -> None:
        earlier = len(self.lines) - SHOWN_EVENT_LINES
        told = [f"({earlier} earlier lines)"] if earlier > 0 else []
        body = "\n".join(f"- {line}" for line in (*told, *self.lines[-SHOWN_EVENT_LINES:]))
        waits = " for a free seat on a host" if self.current == "waiting" else ""
        now = self.found or f"stage **{self.current}**{waits}, attempt {max(self.number, 1)}"
        # A browser cannot open a path on another host's disk.
        where = (
            "" if self.evidence.startswith("file:") else web_ui_markdown.quoted(self.evidence, 500)
        )
        there = f"\n\nEvidence: {where}" if where else ""
        opened = f"\n\nTurns, patch, tests, logs: {self.open_with}"
        workflow.set_current_details(f"{self.headline}\n\n{now}\n\n{body}{there}{opened}")


class ChildrenPage:
    """The ended rollouts of a run, a shard or a group: counts, the worst and the last ones."""

    def __init__(self, run_id: str, headline: str, total: int, links: Links) -> None:
        self._run_id, self._headline, self._total = run_id, headline, total
        self._links = links
        self._counts: Counter[str] = Counter()
        self._worst: list[EpisodeRef] = []
        self._last: deque[EpisodeRef] = deque(maxlen=LISTED)

    def add(self, episode: EpisodeRef) -> None:
        ending = episode.ending
        self._counts[ending] += 1
        if ending != Outcome.RESOLVED:
            self._worst = sorted([*self._worst, episode], key=outcome_summary.worst_first_key)[
                :LISTED
            ]
        self._last.append(episode)
        self.show()

    def show(self) -> None:
        workflow.set_current_details(self.text())

    def text(self) -> str:
        parts = [self._headline, _counted(self._counts, self._total)]
        if self._counts.total() <= LISTED:
            tables = {"": sorted(self._last, key=outcome_summary.worst_first_key)}
        else:
            tables = {"The worst:": self._worst, "The last:": [*reversed(self._last)]}
        for title, episodes in tables.items():
            parts += [one for one in (title, self._table(episodes)) if one]
        return "\n\n".join(parts)

    def _table(self, episodes: Iterable[EpisodeRef]) -> str:
        rows = [*map(self._row, episodes)]
        return "\n".join(["| rollout | verdict |", "|---|---|", *rows]) if rows else ""

    def _row(self, one: EpisodeRef) -> str:
        name, run = f"{one.instance_id} #{one.sample_index}", self._run_id
        link = self._links.workflow(name, f"rollout/{run}/{one.instance_id}/{one.sample_index}")
        seen = self._links.rollout_link("view", run, one.instance_id, one.sample_index)
        return f"| {link}{seen and f' · {seen}'} | {_verdict(one)} |"


class ShardsPage:
    """A run that is cut into shards: total counts, and a row for each of the last shards."""

    def __init__(self, run_id: str, headline: str, total: int, links: Links) -> None:
        self._run_id, self._headline, self._total = run_id, headline, total
        self._links = links

    def show(self, counts: Mapping[str, int], reports: Mapping[int, RunStatus]) -> None:
        rows = ["| shard | rollouts |", "|---|---|"]
        for number, report in sorted(reports.items())[-2 * LISTED :]:
            link = self._links.workflow(f"shard {number}", f"run/{self._run_id}/shard/{number}")
            rows.append(f"| {link} | {_counted(counted(report), report.total)} |")
        table = "\n".join(rows)
        workflow.set_current_details(
            f"{self._headline}\n\n{_counted(counts, self._total)}\n\n"
            f"Each shard's page lists its worst and its last rollouts.\n\n{table}"
        )


def _told(failure: Failure) -> str:
    return f"{failure.boundary.value}: {web_ui_markdown.quoted(failure.message, SENTENCE)}"


def counted(status: RunStatus) -> dict[str, int]:
    """Ended rollouts by outcome, or by status if they have no outcome."""
    without = {k: n for k, n in status.by_status.items() if k != RolloutStatus.GRADED}
    return {**status.by_outcome, **without}


def _counted(counts: Mapping[str, int], total: int) -> str:
    told = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    return f"{sum(counts.values())} of {total} rollouts have ended{told and f': {told}'}"


def _verdict(episode: EpisodeRef) -> str:
    ending, _, rest = outcome_summary.of_episode(episode).partition(" · ")
    return f"**{ending}**{rest and f' · {web_ui_markdown.escaped(rest)}'}"
