"""A real vLLM on CPU, placed by Ray, under a whole rollout; part of `make test-serving` (slow)."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from perdure.episodes import assemble, turns
from perdure.storage.local import LocalStore
from tests.real.test_vllm import (
    CONTEXT,
    PREFILL_TOLERANCE,
    SERVER,
    _rescored,
    _toy,
    home,
    installed,
    perdure,
)

__all__ = ["home", "installed"]  # fixtures
TURNS = 3
FIRST_ADDED = 151_643
"""Of Qwen's ids: `<|endoftext|>` and what follows it."""


async def _up(installed: Path, home: Path) -> None:
    arguments = f"--enforce-eager --max-model-len {CONTEXT}"
    words = ["--model", str(installed / "model"), "--gpus-per-replica", "0"]
    words += ["--executable", str(installed / "venv/bin/vllm"), "--vllm-args", arguments]
    for name, value in SERVER.items():
        words += ["--env", f"{name}={value}"]
    await perdure(home, "engines", "up", "--cpus-per-replica", "0.5", *words)


async def test_a_rollout_through_gateway_and_ray_holds_what_vllm_sampled(
    installed: Path, home: Path
) -> None:
    """mini-swe-agent plays three turns on a replica that Ray placed: vLLM reads the same ids from
    the system message's text, and a second pass gives each sampled token its recorded logprob."""
    await _toy(home)
    wishes = ("sampling.max_tokens_per_turn=32", f"agent_options.step_limit={TURNS}")
    chosen = [word for wish in wishes for word in ("--set", wish)]
    env = {"PERDURE_ENGINE_KIND": "vllm"}
    try:
        await _up(installed, home)
        await perdure(home, "run", "toys/add", "--run-id", "noise", *chosen, "--wait", **env)
        url = await _engine_url(home)
        await _check(LocalStore(home / "store"), url)
    finally:
        await perdure(home, "down")
        await perdure(home, "engines", "down")


async def _engine_url(home: Path) -> str:
    (path,) = (path for path in (home / "store/engines").glob("*.replicas.json"))
    engine: str = json.loads(path.read_text())["replicas"][0]["engine"]
    return f"http://{engine}"


async def _check(store: LocalStore, url: str) -> None:
    (episode,) = await assemble.read_run(store, "noise")
    assert episode.turns_key is not None
    recorded = turns.decode((await store.get(episode.turns_key)).data)
    assert len(recorded) == TURNS
    async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
        for turn in recorded:
            prompt, sampled = list(turn.prompt_ids), list(turn.completion_ids)
            again = await _rescored(client, url, [*prompt, *sampled], len(prompt))
            assert list(turn.logprobs) == pytest.approx(again, abs=PREFILL_TOLERANCE)
        for run in _plain_runs(list(recorded[-1].prompt_ids)):
            text = (await _ask(client, f"{url}/detokenize", {"model": "policy", "tokens": run}))[
                "prompt"
            ]
            asked = {"model": "policy", "prompt": text, "add_special_tokens": False}
            read = (await _ask(client, f"{url}/tokenize", asked))["tokens"]
            literal = any(token >= FIRST_ADDED for token in read)
            # An added token's name in plain text is text to us, for an agent may print it; vLLM's
            # route reads the token. Such a run is compared as text.
            back = (await _ask(client, f"{url}/detokenize", {"model": "policy", "tokens": read}))[
                "prompt"
            ]
            assert (back == text) if literal else (read == run)


def _plain_runs(ids: list[int]) -> list[list[int]]:
    """What stands between the added tokens of the template, without what the policy sampled."""
    runs: list[list[int]] = [[]]
    for token in ids:
        if token >= FIRST_ADDED:
            runs.append([])
        else:
            runs[-1].append(token)
    return [run for run in runs if run][:2]


async def _ask(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = (await client.post(url, json=body)).raise_for_status().json()
    return answer
