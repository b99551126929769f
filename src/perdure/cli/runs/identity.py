"""What a run was asked to be: everything that can change its outcome, kept when it first starts.

A later start under the same run id must ask for the same; otherwise it is refused with what differs.
The endpoint's address may change, and policy versions are the trainer's business.
"""

import asyncio
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

from perdure.cli.runs.request import needs_model
from perdure.client.server import given_address
from perdure.errors import ConfigurationError, NotFound
from perdure.settings import environment
from perdure.settings.tree import Settings
from perdure.stack import lifecycle
from perdure.stack.plan import SCRIPTED, engine_settings
from perdure.storage import keys
from perdure.storage.base import Store
from perdure.types import RunRequest

Identity = dict[str, str]
"""Dotted name -> value as text, so that a difference names one thing."""

OF_ONE_START = {
    *("run_id", "instance", "sample_index", "group_id", "round", "schema_version"),
    *("policy_version", "max_staleness", "expires_at", "heartbeat_timeout_s"),
}
"""Fields of a rollout that do not decide its outcome, or are the trainer's."""
ASK_S = 5.0
READS_AT_ONCE = 32
SHOWN = 12
"""Differences in an error message."""


async def identity_of(
    settings: Settings, store: Store, request: RunRequest, refs: Sequence[str]
) -> Identity:
    """Of a run of these instances, with the engine of this home."""
    rollout = request.rollout_request("any/instance")
    asked = rollout.model_dump(mode="json", exclude=OF_ONE_START)
    found = {"samples": str(request.n_samples), **dict(_flat("", asked))}
    found |= await _instances(store, refs)
    if (version := _agent_version(rollout.agent)) is not None:
        found["agent.version"] = version
    if needs_model(rollout.agent) and given_address(settings) is None:
        found |= _engine(settings)
    return found


async def keep(store: Store, run_id: str, identity: Identity) -> None:
    """Of a run that was just started; the first one stays."""
    await store.put_if_absent(keys.run_identity(run_id), json.dumps(identity, indent=1).encode())


async def check(store: Store, run_id: str, identity: Identity) -> None:
    """Raises: ConfigurationError if the run was asked to be another. One without an identity was started
    by another program; it is joined."""
    try:
        before: Identity = json.loads((await store.get(keys.run_identity(run_id))).data)
    except NotFound:
        return
    if changes := differences(before, identity):
        more = f"\n  and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
        told = "".join(f"\n  {line}" for line in changes[:SHOWN])
        raise ConfigurationError(
            f"run {run_id} was started as something else:{told}{more}\n"
            "--new starts another run, and so does another --run-id"
        )


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """`name: old -> new`. A name that only one side knows counts for instances alone: another version
    of Perdure has other fields, and an endpoint may not say what it serves."""
    lines = []
    for name in dict.fromkeys((*before, *now)):
        old, new = before.get(name), now.get(name)
        if old == new or (None in (old, new) and not name.startswith("instance.")):
            continue
        lines.append(f"{name}: {old or 'not in it'} -> {new or 'not in it'}")
    return lines


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, one in value.items():
            yield from _flat(f"{prefix}.{name}" if prefix else name, one)
    else:
        yield prefix, json.dumps(value)


async def _instances(store: Store, refs: Sequence[str]) -> Identity:
    """A digest of each row."""
    slots = asyncio.Semaphore(READS_AT_ONCE)

    async def one(ref: str) -> str:
        async with slots:
            data = (await store.get(keys.instance(ref))).data
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


def _engine(settings: Settings) -> Identity:
    """The model that the stack of this home samples, as its endpoint reports it."""
    state = lifecycle.running(settings)
    named = state.engine_settings if state is not None else engine_settings(settings)
    url, model = named.get("url", ""), named.get("model", "")
    if url.startswith(SCRIPTED):
        return {"engine.model": url}
    served = _served(url.split(",")[0].partition("=")[0], settings)
    of_name = [one for one in served if one.get("id") == model]
    one = (of_name or served or [{}])[0]
    found = {"engine.model": model or one.get("id"), "engine.root": one.get("root")}
    if served:
        found["engine.tokenizer"] = named.get("tokenizer")
    return {name: value for name, value in found.items() if isinstance(value, str) and value}


def _served(url: str, settings: Settings) -> list[dict[str, Any]]:
    """What `GET /models` lists; empty if the endpoint does not say, or is Anthropic's."""
    if not url.startswith("http") or url == environment.foreign("ANTHROPIC_BASE_URL"):
        return []
    import httpx

    hosted = "OPENAI_API_KEY" if url == environment.foreign("OPENAI_BASE_URL") else ""
    key = environment.named(settings.engine.api_key_env or hosted)
    base = url.rstrip("/")
    try:
        answer = httpx.get(
            f"{base if base.endswith('/v1') else f'{base}/v1'}/models",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=ASK_S,
        )
        listed = answer.raise_for_status().json()["data"]
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return []
    return [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
