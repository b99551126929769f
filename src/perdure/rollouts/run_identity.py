"""The identity of a run or a rollout: everything that can change its outcome.

The first start stores it. A later start under the same id is refused, with the differences, if its
identity is another. `prepare_run` compares runs and the boot stage compares rollouts, whichever
program starts them. The command line also compares runs, to refuse at once. The endpoint's address
may change.
"""

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib import resources

from perdure.client.request_comparison import Identity, differences, outcome_fields, refuse
from perdure.engines.hosted_sampling import check_hosted_sampling, hosted_kind
from perdure.engines.reported_model import reported
from perdure.errors import NotFound, PreconditionFailed, StoreUnavailable
from perdure.rollouts.request_models import engine_of_roster
from perdure.settings.settings_tree import Settings
from perdure.storage import store_keys
from perdure.storage.base import Store
from perdure.types import RolloutRequest

READS_AT_ONCE = 32
INSTANCE = "instance."
"""Prefix of the fields that are digests of rows."""
FIX = "use --new or another --run-id to start another run"
FIX_OF_ROLLOUT = "use another run_id for this request"
WORKFLOW_RUN = "workflow_run_id"
"""The workflow run that stored a rollout's identity. It is never compared with itself."""
MAKES_A_PATCH = (
    *("agent", "model", "sampling", "policy_version", "max_staleness", "too_stale"),
    *("user.messages", "user.model", "user.instruction"),
)
"""Prefixes of the fields that a regrade must share with the rollout that made the patch."""


async def identity_of(
    settings: Settings,
    store: Store,
    request: RolloutRequest,
    refs: Sequence[str],
    engine: Mapping[str, str],
) -> Identity:
    """Identity of rollouts of `request` over the instances `refs`.

    `engine`: from `engine_settings`; if empty, the endpoint is not asked.
    Raises: ConfigurationError for sampling parameters that a hosted API does not have.
    """
    if kind := hosted_kind(engine):
        check_hosted_sampling(request.sampling, kind, engine.get("url", ""))
    found = {**outcome_fields(request), **await _instances(store, refs)}
    if (version := _agent_version(request.agent)) is not None:
        found["agent.version"] = version
    if not engine:
        return found
    of_roster = await engine_of_roster(settings, store, request, engine)
    return found | (of_roster or await reported(settings, engine, request.model))


async def keep(store: Store, run_id: str, identity: Identity) -> dict[str, str]:
    """Store the identity of a run that starts. The first one stays. Returns what `check` does.

    Raises: IdentityDiffers.
    """
    data = json.dumps(identity, indent=1).encode()
    if await store.put_if_absent(store_keys.run_identity(run_id), data):
        return {}
    return await check(store, run_id, identity)


async def check(store: Store, run_id: str, identity: Identity) -> dict[str, str]:
    """The instances that the run was started without, with their digests.

    Raises: IdentityDiffers if the run was started with another identity.
    """
    before = await _kept(store, store_keys.run_identity(run_id))
    if before is None:
        return {}
    refuse(f"run {run_id}", differences(before, identity), FIX)
    added = (name for name in identity if name.startswith(INSTANCE) and name not in before)
    return {name.removeprefix(INSTANCE): identity[name] for name in added}


async def add_instances(store: Store, run_id: str, added: Mapping[str, str]) -> None:
    """Add instances to the identity. Add them to the run's list first: after a kill between the two
    writes, the next try then still counts them as added. Raises: StoreUnavailable; retry the
    call."""
    if not added:
        return
    key = store_keys.run_identity(run_id)
    stored = await store.get(key)
    more = {f"{INSTANCE}{ref}": digest for ref, digest in added.items()}
    data = json.dumps({**json.loads(stored.data), **more}, indent=1).encode()
    try:
        await store.put(key, data, if_match=stored.etag)
    except PreconditionFailed as error:
        raise StoreUnavailable(str(error)) from error


async def keep_rollout(store: Store, request: RolloutRequest, play: str, now: Identity) -> None:
    """Store the identity of a rollout before it boots or is graded. The first one stays.

    `play`: the workflow run. Raises: IdentityDiffers, like `check_rollout`.
    """
    data = json.dumps({**now, WORKFLOW_RUN: play}, indent=1).encode()
    if not await store.put_if_absent(store_keys.rollout_identity(request), data):
        await check_rollout(store, request, play, now)


async def check_rollout(store: Store, request: RolloutRequest, play: str, now: Identity) -> None:
    """Raises: IdentityDiffers if the store has this rollout with another identity.

    A regrade of a captured patch may use another grader or row: only what made the patch counts.
    """
    before = await _kept(store, store_keys.rollout_identity(request))
    if before is None or before.pop(WORKFLOW_RUN, "") == play:
        return
    if request.start_at == "grade":
        before, now = _made_the_patch(before), _made_the_patch(outcome_fields(request))
    what = request.workflow_id.replace("/", " ", 1)
    refuse(what, differences(before, now), FIX_OF_ROLLOUT)


def _made_the_patch(identity: Identity) -> Identity:
    return {name: value for name, value in identity.items() if name.startswith(MAKES_A_PATCH)}


async def _kept(store: Store, key: str) -> Identity | None:
    try:
        found: Identity = json.loads((await store.get(key)).data)
    except NotFound:
        return None
    return found


async def _instances(store: Store, refs: Sequence[str]) -> Identity:
    """A digest of each row. A missing row fails its rollouts, not the run."""
    slots = asyncio.Semaphore(READS_AT_ONCE)

    async def one(ref: str) -> str:
        async with slots:
            try:
                data = (await store.get(store_keys.instance(ref))).data
            except NotFound:
                return "absent"
        return hashlib.sha256(data).hexdigest()[:16]

    digests = await asyncio.gather(*(one(ref) for ref in refs))
    return {f"{INSTANCE}{ref}": digest for ref, digest in zip(refs, digests, strict=True)}


def _agent_version(agent: str) -> str | None:
    """Digest of the agent's package lock files; None for an agent without them."""
    digest = hashlib.sha256()
    names = [one for one in resources.files("perdure.agents.locks").iterdir() if one.is_file()]
    mine = sorted(
        (one for one in names if one.name.split(".")[0] == agent), key=lambda one: one.name
    )
    for one in mine:
        digest.update(one.read_bytes())
    return digest.hexdigest()[:12] if mine else None
