"""A trainer without credentials for the store reads episodes, and nothing else, through a
gateway."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.client.episode_reader import read_episodes
from perdure.client.gateway_episodes import GatewayEpisodes
from perdure.episodes import turns_parquet
from perdure.episodes.episode import EpisodeParts
from perdure.episodes.trajectory_segments import cut
from perdure.errors import ConfigurationError, GatewayUnavailable, NotFound
from perdure.gateway.base import control_token
from perdure.home_folder import episodes_token
from perdure.storage import store_keys
from perdure.testing.local_gateway import LocalGateway
from perdure.types import (
    EpisodeRef,
    Grade,
    Outcome,
    Rewards,
    RolloutRequest,
    RolloutStatus,
    Turn,
)
from tests.stored_episodes import store_episode

REQUEST = RolloutRequest(run_id="r", instance="d/i-1")
TURNS = (Turn(index=0, prompt_ids=(1,), completion_ids=(2, 3), logprobs=(-0.5, -0.25)),)


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[LocalGateway]:
    engine = {"url": "http://127.0.0.1:9", "kind": "vllm"}
    async with LocalGateway(tmp_path, engine=engine) as found:
        yield found


async def written(gateway: LocalGateway) -> EpisodeRef:
    key = f"{store_keys.attempt(REQUEST, 1)}/turns.parquet"
    await gateway.store.put(key, turns_parquet.encode(TURNS))
    parts = EpisodeParts(
        request=REQUEST,
        status=RolloutStatus.GRADED,
        grade=Grade(outcome=Outcome.RESOLVED, rewards=Rewards(binary=1.0)),
        started_at=0.0,
        finished_at=1.0,
        turns=TURNS,
        turns_key=key,
    )
    segments = cut(TURNS)
    episode = await store_episode(gateway.store, parts, segments)
    return episode.ref(gateway.store.url)


@pytest.mark.parametrize("keep_unused", [False, True])
async def test_episodes_equal_those_in_the_store(keep_unused: bool, gateway: LocalGateway) -> None:
    """This holds for the stored arrays, and for segments cut again from the turns."""
    ref = await written(gateway)
    through = GatewayEpisodes(gateway.url, gateway.secret)

    found = await read_episodes([ref], through, keep_unused=keep_unused)

    assert found == await read_episodes([ref], gateway.store, keep_unused=keep_unused)
    assert found[0].segments[0].response_ids == (2, 3)


async def test_the_settings_name_the_gateway(
    gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer needs the gateway's address and the home's secret, but no settings of the store."""
    ref = await written(gateway)
    monkeypatch.setenv("PERDURE_STORE", gateway.url)
    monkeypatch.setenv("PERDURE_SECRET", gateway.secret.decode())

    assert [one.episode.reward for one in await read_episodes([ref])] == [1.0]


async def test_other_objects_are_not_read(gateway: LocalGateway) -> None:
    """The route refuses rosters and patches, whatever the path looks like."""
    await gateway.store.put("engines/a.json", b"{}")
    through = GatewayEpisodes(gateway.url, gateway.secret)
    for key in ("engines/a.json", "runs/r/run.json", "runs/r/rollouts/../../engines/a.json"):
        with pytest.raises(NotFound):
            await through.get(key)


async def test_only_the_episodes_token_is_accepted(gateway: LocalGateway) -> None:
    """The control token is refused, and the episodes token opens no control route."""
    ref = await written(gateway)
    wrong = GatewayEpisodes(gateway.url, b"another secret of a home")
    with pytest.raises(ConfigurationError, match="PERDURE_SECRET"):
        await read_episodes([ref], wrong)

    assert episodes_token(gateway.secret) != control_token(gateway.secret)


async def test_a_gateway_that_is_away_is_told(tmp_path: Path) -> None:
    """The caller can repeat the call."""
    away = GatewayEpisodes("http://127.0.0.1:9", b"the secret of a home")
    with pytest.raises(GatewayUnavailable, match="cannot be read"):
        await away.get(store_keys.run("r"))
