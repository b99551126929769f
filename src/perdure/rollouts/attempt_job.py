"""One attempt of a rollout, resolved once, with everything that its stages need.

Owns the names, keys and placements of an attempt. The stages do the work.
"""

import functools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from pydantic import BaseModel

from perdure import tracing
from perdure.agents.base import Agent, AgentTask
from perdure.errors import NotFound
from perdure.instances import instance_catalog
from perdure.instances.environment_builder import Prepared
from perdure.rollouts import stage_checkpoints
from perdure.rollouts.activity_messages import Attempt
from perdure.rollouts.admission.account_client import Admission, SignalAccount
from perdure.rollouts.stage_services import Services
from perdure.sandboxes import phase_specs
from perdure.sandboxes.base import SandboxProvider, identity_of
from perdure.sandboxes.phase_specs import PhasePlacement
from perdure.storage import store_keys
from perdure.types import (
    CalibrationState,
    Instance,
    McpServers,
    PhaseName,
    RolloutRequest,
    SimulatedUser,
    conversation_user,
)

Model = TypeVar("Model", bound=BaseModel)


class ActivityAttempt(Protocol):
    """The activity attempt that runs a stage. A stage sees nothing else of Temporal."""

    @property
    def number(self) -> int:
        """1 for the first try, one more for each retry."""
        ...

    @property
    def signal_account(self) -> SignalAccount: ...

    @property
    def play(self) -> str:
        """Id of the workflow run."""
        ...

    def now(self) -> float:
        """Unix seconds by Temporal's clock, so that a wrong host clock ends no rollout."""
        ...

    def is_cancelled_on_purpose(self) -> bool:
        """Inside `except CancelledError`: a user or the workflow cancelled, so undo the work."""
        ...

    def is_superseded(self) -> bool:
        """Inside `except CancelledError`: neither the workflow nor a worker shutdown cancelled it.

        Its heartbeats were late, so Temporal may have started another try.
        """
        ...

    async def workflow_may_be_open(self) -> bool:
        """False only when the server says that the workflow is closed."""
        ...

    def report(self, **progress: object) -> None:
        """Show these values in the Web UI with the next heartbeat."""
        ...


@dataclass(frozen=True)
class SandboxPlan:
    """Where the sandbox of one phase is created, and the permit it needs."""

    placement: PhasePlacement
    provider: SandboxProvider
    admission: Admission


@dataclass(frozen=True)
class Job:
    """One attempt of one rollout, with everything that its stages need."""

    services: Services
    activity_attempt: ActivityAttempt
    request: RolloutRequest
    attempt: int
    workflow_run_id: str
    permit: str
    """The step for which the account has granted a sandbox; empty if none yet."""
    stop: bool
    """The agent stage only stops its agent."""
    row: Instance | NotFound
    """The instance, or the error that says how to get it."""
    calibration: CalibrationState | None = None
    """What calibration found about the row in its grading sandboxes. If the row is proved,
    `instance` has the test lists and twins of the calibration record."""
    without_twin: Mapping[str, str] = field(default_factory=dict)
    """FAIL_TO_PASS test -> why calibration found no twin for it."""

    @classmethod
    async def of(
        cls,
        services: Services,
        attempt: Attempt,
        activity_attempt: ActivityAttempt,
        *,
        first: bool = False,
    ) -> "Job":
        """`first`: this is the rollout's first stage, which reads the row from the store.

        Raises: ConfigurationError; InstanceError if the stored row is not an instance.
        """
        ref, play = attempt.request.instance, activity_attempt.play
        row: Instance | NotFound | None
        row = None if first else services.memory.recall(play, ref, Instance)
        if row is None:
            try:
                row = await instance_catalog.load(services.store, ref)
                services.memory.keep(play, ref, row)
            except NotFound as error:
                row = error
        return cls(
            services=services,
            activity_attempt=activity_attempt,
            request=attempt.request,
            attempt=attempt.attempt,
            workflow_run_id=attempt.workflow_run_id,
            permit=attempt.permit,
            stop=attempt.stop,
            row=row,
        )

    @functools.cached_property
    def agent_sandbox(self) -> SandboxPlan:
        """Raises: ConfigurationError."""
        return self._plan("agent")

    @functools.cached_property
    def grade_sandbox(self) -> SandboxPlan:
        """Resolved at first use. If that fails, the cleanup can still kill the agent's sandbox.

        Raises: ConfigurationError.
        """
        return self._plan("grade")

    def next_attempt(self) -> "Job":
        return replace(self, attempt=self.attempt + 1)

    @property
    def instance(self) -> Instance:
        """Raises: NotFound naming the instance and how to get it."""
        if isinstance(self.row, NotFound):
            raise self.row
        return self.row

    @property
    def agent(self) -> Agent:
        """Raises: ConfigurationError for an unknown name."""
        return self.services.agent(self.request.agent)

    @property
    def agent_identity(self) -> str:
        """The sandbox that the agent stage boots; also the id of the attempt's gateway session."""
        return self.session_of(self.attempt)

    @property
    def grade_identities(self) -> tuple[str, ...]:
        """The sandboxes of the grading's runs, in the order in which the runs start. That order is
        random, so a name says nothing about the tests of a run."""
        first = identity_of(self.request.run_id, self.request.workflow_id, "grade", self.attempt)
        return first, *(f"{first}-{n + 2}" for n in range(3 * self.request.twin_pairs - 1))

    def session_of(self, attempt: int) -> str:
        return identity_of(self.request.run_id, self.request.workflow_id, "agent", attempt)

    @property
    def agent_step(self) -> str:
        """The step whose permit the agent's sandbox needs."""
        return f"{self.attempt}-agent"

    @property
    def grade_step(self) -> str:
        return f"{self.attempt}-grade"

    def labels(self, phase: PhaseName) -> dict[str, str]:
        return {
            "app": "perdure",
            "run": self.request.run_id,
            "rollout": self.request.workflow_id,
            "attempt": str(self.attempt),
            "purpose": phase,
            "owner": self.services.host,
        }

    def key(self, name: str) -> str:
        """Store key of a file of this attempt."""
        return f"{store_keys.attempt(self.request, self.attempt)}/{name}"

    async def read(self, name: str, model: type[Model]) -> Model | None:
        """The checkpoint of this attempt, or None if the step is not done."""
        return await stage_checkpoints.read(self.services.store, self.key(name), model)

    async def write(self, name: str, result: Model) -> Model:
        """Store the checkpoint unless another try was first. Returns what is stored."""
        return await stage_checkpoints.write(self.services.store, self.key(name), result)

    async def recall(self, name: str, model: type[Model]) -> Model | None:
        """Like `read`, but cached in this process, for a checkpoint that never changes."""
        memory, play, key = self.services.memory, self.activity_attempt.play, self.key(name)
        known = memory.recall(play, key, model)
        if known is None and (known := await self.read(name, model)) is not None:
            memory.keep(play, key, known)
        return known

    async def once(
        self, name: str, model: type[Model], work: Callable[["Job"], Awaitable[Model]]
    ) -> Model:
        """The checkpoint of this attempt. If there is none, run `work` and store its result."""
        done = await self.read(name, model)
        return done if done is not None else await self.write(name, await work(self))

    async def prepared(self, plan: SandboxPlan, instance: Instance | None = None) -> Prepared:
        """The environment of the instance for a sandbox of this plan. Builds it if necessary.
        `instance`: a copy with another environment; by default the row itself."""
        build = self.placement("environment")
        environments = self.services.environments(plan.placement.provider, build.provider)
        with tracing.span("prepare environment"):
            return await environments.prepare(
                instance or self.instance,
                limits=build.limits,
                network=build.network,
                sandbox_limits=plan.placement.limits,
                allowed_hosts=build.allowed_hosts,
            )

    @property
    def agent_budget_s(self) -> float:
        """The request's, or the task's own if that is shorter."""
        own, budget = self.instance.agent_timeout_s, self.request.agent_budget_s
        return budget if own is None else min(own, budget)

    @property
    def mcp_servers(self) -> McpServers:
        """The servers of the instance, replaced and joined by those of the request."""
        return {**self.instance.mcp_servers, **self.request.mcp_servers}

    @property
    def user(self) -> SimulatedUser | None:
        """Who answers the agent's turns; None if the task is the only message, or no model reads it.

        Raises: ConfigurationError naming the field.
        """
        if not self.agent.needs_model:
            return None
        return conversation_user(self.instance.user, self.request.user)

    def task(self, *, workdir: str, gateway_url: str | None, session_key: str) -> AgentTask:
        request, instance = self.request, self.instance
        return AgentTask(
            instance=instance,
            workdir=workdir,
            gateway_url=gateway_url,
            session_key=session_key,
            model=request.model,
            sampling=request.sampling,
            budget_s=self.agent_budget_s,
            mcp_servers=self.mcp_servers,
            options=request.agent_options,
            has_user=self.user is not None,
        )

    def _plan(self, phase: PhaseName) -> SandboxPlan:
        placement, services = self.placement(phase), self.services
        return SandboxPlan(
            placement=placement,
            provider=services.provider(placement.provider),
            admission=Admission.of(
                services, placement.provider, self.request, self.activity_attempt.signal_account
            ),
        )

    def placement(self, phase: PhaseName) -> PhasePlacement:
        known = self.row if isinstance(self.row, Instance) else None
        return phase_specs.place(self.request, known, phase)
