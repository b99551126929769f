"""What a run was asked to be: everything that can change its outcome, kept when it first starts.

A later start under the same run id must ask for the same; otherwise it is refused with what differs.
Whoever starts it: `prepare_run` compares. The command line compares beforehand, to refuse at once.
The endpoint's address may change, and policy versions are the trainer's business.
"""

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib import resources

from perdure.client.asked import Identity, differences, of_run, refuse
from perdure.engines.reported import reported
from perdure.errors import NotFound
from perdure.settings.tree import Settings
from perdure.storage import keys
from perdure.storage.base import Store
from perdure.types import RunRequest

READS_AT_ONCE = 32
FIX = "--new starts another run, and so does another --run-id"


async def identity_of(
    settings: Settings,
    store: Store,
    request: RunRequest,
    refs: Sequence[str],
    engine: Mapping[str, str],
) -> Identity:
    """Of a run of these instances. `engine`: as of `engine_settings`; empty: it is not asked."""
    found = {**of_run(request), **await _instances(store, refs)}
    agent = request.rollout_request("any/instance").agent
    if (version := _agent_version(agent)) is not None:
        found["agent.version"] = version
    return found | (await reported(settings, engine) if engine else {})


async def keep(store: Store, run_id: str, identity: Identity) -> None:
    """Of a run that starts; the first one stays. Raises: ConfigurationError, as `check`."""
    data = json.dumps(identity, indent=1).encode()
    if not await store.put_if_absent(keys.run_identity(run_id), data):
        await check(store, run_id, identity)


async def check(store: Store, run_id: str, identity: Identity) -> None:
    """Raises: ConfigurationError if the run was asked to be another."""
    try:
        before: Identity = json.loads((await store.get(keys.run_identity(run_id))).data)
    except NotFound:
        return
    refuse(f"run {run_id}", differences(before, identity), FIX)


async def _instances(store: Store, refs: Sequence[str]) -> Identity:
    """A digest of each row; a row that is absent fails its rollouts, not the run."""
    slots = asyncio.Semaphore(READS_AT_ONCE)

    async def one(ref: str) -> str:
        async with slots:
            try:
                data = (await store.get(keys.instance(ref))).data
            except NotFound:
                return "absent"
        return hashlib.sha256(data).hexdigest()[:16]

    digests = await asyncio.gather(*(one(ref) for ref in refs))
    return {f"instance.{ref}": digest for ref, digest in zip(refs, digests, strict=True)}


def _agent_version(agent: str) -> str | None:
    """Digest of the packages that it is installed from; None for one without such a list."""
    digest = hashlib.sha256()
    names = [one for one in resources.files("perdure.agents.locks").iterdir() if one.is_file()]
    mine = sorted(
        (one for one in names if one.name.split(".")[0] == agent), key=lambda one: one.name
    )
    for one in mine:
        digest.update(one.read_bytes())
    return digest.hexdigest()[:12] if mine else None
