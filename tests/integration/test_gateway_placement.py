"""Two gateway processes, two engines, connections to either: a group's prompt is prefilled as rarely as
with one process, and a session's KV cache is found by whichever process is asked."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from perdure.gateway.base import SessionSpec
from perdure.testing.scripted_engine import CacheModel, ScriptedEngine
from tests.gateway_pool import Pool

GROUPS, SAMPLES, TURNS = 4, 4, 3
OPENING = "You fix one bug in a repository, and you do it with care. " * 40
SCRIPT = {"default": {"turns": [{"content": "I look at the next file. " * 4}]}}


async def _agent(pool: Pool, spec: SessionSpec, key: str) -> None:
    """A new connection for each turn, which either process may take."""
    task = f"{OPENING} Group {spec.labels['group']}."
    messages: list[dict[str, Any]] = [{"role": "user", "content": task}]
    headers = {"authorization": f"Bearer {key}"}
    for turn in range(TURNS):
        async with httpx.AsyncClient(base_url=pool.url, timeout=120, headers=headers) as client:
            body = json.dumps({"model": "policy", "messages": messages})
            answer = await client.post("/v1/chat/completions", content=body)
        message = answer.raise_for_status().json()["choices"][0]["message"]
        messages += [message, {"role": "user", "content": f"{spec.session_id} goes on, {turn}."}]


async def _play(home: Path, processes: int) -> float:
    """Prompt tokens that an engine found in its cache, of all."""
    specs = [
        SessionSpec(session_id=f"{g}-{n}", turns_key=f"turns/{g}-{n}", labels={"group": f"g{g}"})
        for g in range(GROUPS)
        for n in range(SAMPLES)
    ]
    small = CacheModel(block=16)
    async with (
        ScriptedEngine(SCRIPT, cache=small) as one,
        ScriptedEngine(SCRIPT, cache=small) as two,
    ):
        urls = f"{one.url},{two.url}"
        async with Pool([home] * processes, urls) as pool, pool.control() as control:
            for spec in specs:
                await control.open(spec)
            agents = (_agent(pool, spec, control.key(spec.session_id)) for spec in specs)
            await asyncio.gather(*agents)
            for spec in specs:
                await control.close(spec.session_id)
        caches = (one.cache, two.cache)
        return sum(cache.hits for cache in caches) / sum(cache.queries for cache in caches)


@pytest.mark.longer
async def test_two_processes_hit_the_caches_as_one_does(tmp_path: Path) -> None:
    """Within 5 % of one process's hits, though each turn may come to either."""
    alone = await _play(tmp_path / "one", 1)
    both = await _play(tmp_path / "two", 2)

    assert both >= 0.95 * alone
