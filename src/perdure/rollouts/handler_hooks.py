"""Calls `init` and `run` of a data source's handler and keeps their results for later stages."""

import asyncio
import inspect
import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, JsonValue

from perdure.data_source_handlers import (
    AgentHandler,
    HookFailed,
    LLMConfig,
    runs_own_agent,
    wrap_hook_call,
    wrong_return_error,
)
from perdure.errors import Boundary, ConfigurationError, SandboxLost
from perdure.rollouts.attempt_job import Job
from perdure.sandboxes.base import Sandbox

RESULTS = "run_results.json"
STARTED = "run_started"
LIMITS = ("max_steps", "max_turns", "step_limit")
"""Agent options that limit the number of iterations."""


class Initialised(BaseModel):
    """What `init` returned, in the memory of this process."""

    model_config = ConfigDict(arbitrary_types_allowed=True, frozen=True)

    runtime: Any
    metadata: Any
    config: Any

    @property
    def stored_metadata(self) -> JsonValue:
        """The metadata that another process can read; None if it is not JSON."""
        try:
            return json.loads(json.dumps(self.metadata)) if self.metadata is not None else None
        except (TypeError, ValueError):
            return None


def handler_of(job: Job) -> AgentHandler:
    return job.services.handler(job.instance.data_source)


async def init(job: Job, sandbox: Sandbox) -> Initialised:
    """Raises: HookFailed; ConfigurationError unless `init` returns three values."""
    handler, instance = handler_of(job), job.instance
    options = job.request.agent_options
    limits = (options.get(name) for name in LIMITS)
    limit = next((one for one in limits if isinstance(one, int)), 1)
    with wrap_hook_call(handler, "init", sandbox):
        made = await handler.init(
            instance,
            await _llm_config(job),
            sid=job.request.workflow_id,
            max_iterations=limit,
        )
    if not isinstance(made, tuple) or len(made) != 3:
        raise wrong_return_error(handler, "init", "(runtime, metadata, config)", made)
    runtime, metadata, config = made
    return Initialised(runtime=runtime, metadata=metadata, config=config)


def remember(job: Job, made: Initialised) -> None:
    job.services.memory.keep(job.activity_attempt.play, job.key("init"), made)


def remembered(job: Job) -> Initialised | None:
    return job.services.memory.recall(job.activity_attempt.play, job.key("init"), Initialised)


async def run(job: Job, sandbox: Sandbox) -> None:
    """Run the handler's own agent, once in this attempt, and keep its results.

    Raises: SandboxLost if it failed, or if an earlier try started it and left no results: its
    partial work has changed the sandbox. ConfigurationError unless `run` returns an object.
    """
    handler, store = handler_of(job), job.services.store
    if not await store.put_if_absent(job.key(STARTED), b"\n"):
        if await store.exists(job.key(RESULTS)):
            return
        raise SandboxLost(
            f"an earlier try of `run` of the handler {handler.name!r} left no results: it starts again "
            "in a new sandbox",
            boundary=Boundary.AGENT,
        )
    made = remembered(job)
    if made is None:
        made = await init(job, sandbox)
        remember(job, made)
    try:
        with wrap_hook_call(handler, "run", sandbox):
            results = await handler.run(made.runtime, made.metadata, made.config, job.instance)
    except HookFailed as error:
        raise SandboxLost(str(error), boundary=Boundary.AGENT) from error
    finally:
        await _close(made.runtime, sandbox)
    if not isinstance(results, Mapping):
        raise wrong_return_error(handler, "run", "an object such as {'git_patch': ...}", results)
    try:
        data = json.dumps(dict(results), default=str).encode()  # `default`: any value
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"`run` of the handler {handler.name!r} must return an object with string keys: {error}"
        ) from error
    await store.put_if_absent(job.key(RESULTS), data)


async def results_of(job: Job) -> dict[str, Any] | None:
    """What the handler's own `run` returned in this attempt; None if the request's agent ran."""
    if not runs_own_agent(handler_of(job)) or not await job.services.store.exists(job.key(RESULTS)):
        return None
    found: dict[str, Any] = json.loads((await job.services.store.get(job.key(RESULTS))).data)
    return found


async def _llm_config(job: Job) -> LLMConfig | None:
    if not job.agent.needs_model:
        return None
    services, request = job.services, job.request
    url = (await services.gateways.urls())[0]
    key = services.gateway.key(job.agent_identity)
    return LLMConfig(request.model, f"{url}/v1", key, request.sampling)


async def _close(runtime: Any, sandbox: Sandbox) -> None:
    """Close a runtime that the handler made. The rollout kills its sandbox after the capture."""
    close = getattr(runtime, "close", None)
    if runtime is sandbox or not callable(close):
        return
    closing = await asyncio.to_thread(close) if not inspect.iscoroutinefunction(close) else close()
    if inspect.isawaitable(closing):
        await closing
