"""`python -m benchmarks.view`: the first page of a large run, and search in it.

The run is made: episodes with 200 tests, 12 turns of 1,500 characters and a manifest each, on a local store.
Pages are asked for in this process, so that only the viewer's work counts. The yardstick is what no page
can do without: reading and parsing the run's manifest.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from benchmarks.report.__main__ import made_episode
from perdure.episodes import turns_parquet
from perdure.episodes.manifest import build_manifest, counted
from perdure.settings.load import load_settings
from perdure.storage import keys
from perdure.storage.local import LocalStore
from perdure.types import Turn
from perdure.viewer.app import create_app
from perdure.viewer.index import Index
from perdure.viewer.pages import Pages

RUN, TOKEN = "big", "t" * 40
SAMPLES, TURNS, CHARS, VARIANTS = 4, 12, 1500, 40
LIMIT_S = 3600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, nargs="+", default=[5_000, 10_000])
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for rollouts in asked.rollouts:
        with tempfile.TemporaryDirectory() as folder:
            make_run(Path(folder) / "store", rollouts)
            rows += asyncio.run(measure(Path(folder), rollouts))
    if asked.json:
        print(json.dumps(rows, indent=1))
        return
    print("| rollouts | what | seconds | CPU seconds | x the manifest |\n|---|---|---|---|---|")
    for row in rows:
        print("| {rollouts} | {what} | {seconds} | {cpu_s} | {ratio} |".format(**row))


def make_run(store: Path, rollouts: int) -> None:
    """Written without the store's fsync, which would take longer than all that is measured."""
    drawn = random.Random(0)
    turns = [turns_parquet.encode(_turns(drawn, number)) for number in range(VARIANTS)]
    first = made_episode(RUN, "project__repo-00000", 0, drawn)
    episodes = []
    for number in range(rollouts):
        instance = f"project__repo-{number // SAMPLES:05d}"
        named = {"instance": f"made/{instance}", "sample_index": number % SAMPLES}
        episode = first.model_copy(update={**named, "started_at": float(number)})
        folder = store / keys.rollout(RUN, instance, number % SAMPLES)
        attempt = folder / "attempts" / "1"
        attempt.mkdir(parents=True)
        (attempt / "turns.parquet").write_bytes(turns[number % VARIANTS])
        for name in ("sandbox.json", "agent.json", "patch.json", "patch.diff", "stdout"):
            (attempt / name).touch()
        (folder / "episode.json").write_text(episode.model_dump_json(indent=1))
        episodes.append(episode)
    manifest = json.dumps(build_manifest(RUN, [counted(episode) for episode in episodes]), indent=1)
    (store / keys.manifest(RUN)).write_text(manifest)


def _turns(drawn: random.Random, variant: int) -> list[Turn]:
    words = [f"{drawn.choice('bcdfghkl')}{drawn.randint(0, 4000)}" for _ in range(CHARS // 6)]
    text = " ".join([*words, "common", f"rare{variant}"])
    said = json.dumps([{"role": "tool", "content": text}])
    return [Turn(index=n, new_messages=said, trainable=False) for n in range(TURNS)]


async def measure(folder: Path, rollouts: int) -> list[dict[str, Any]]:
    store = LocalStore(folder / "store")
    index = Index(folder / "index.sqlite")
    rows: list[dict[str, Any]] = []
    rare = min(100, len(range(7, rollouts, VARIANTS)))

    async def nothing(workflow_id: str) -> str:
        return ""

    async def timed(what: str, act: Callable[[], Awaitable[Any]]) -> None:
        began, cpu = time.perf_counter(), time.process_time()
        await act()
        seconds, used = time.perf_counter() - began, time.process_time() - cpu
        first = rows[0]["cpu_s"] if rows else used
        ratio = round(used / first, 1)
        row = {"what": what, "seconds": round(seconds, 3), "cpu_s": round(used, 3), "ratio": ratio}
        rows.append({"rollouts": rollouts, **row})

    pages = Pages(load_settings(), store, index, nothing)
    transport = httpx.ASGITransport(app=create_app(pages, TOKEN))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:1") as client:

        async def page(address: str, shown: int) -> None:
            text = (await client.get(address)).text
            assert text.count('class="open"') == shown, address

        async def manifest() -> None:
            json.loads((await store.get(keys.manifest(RUN))).data)

        await client.get("/static/view.css", params={"token": TOKEN})  # it reads no run
        await timed("the manifest alone", manifest)
        await timed("first page, no index", lambda: page(f"/runs/{RUN}", 100))
        await timed("all searchable", lambda: pages.readings.bring(RUN, LIMIT_S))
        await timed("page", lambda: page(f"/runs/{RUN}", 100))
        await timed("page by tokens", lambda: page(f"/runs/{RUN}?order=sampled", 100))
        await timed("last page", lambda: page(f"/runs/{RUN}?page=999999", 100))
        await timed("search: one in forty", lambda: page(f"/runs/{RUN}?q=rare7", rare))
        await timed("search: a word of all", lambda: page(f"/runs/{RUN}?q=common", 100))
        await timed("search of all runs", lambda: page("/search?q=rare7", rare))
    size = index.path.stat().st_size
    rows.append(
        {
            "rollouts": rollouts,
            "what": f"index: {size >> 20} MB",
            "seconds": "",
            "cpu_s": "",
            "ratio": "",
        }
    )
    await pages.aclose()
    return rows


if __name__ == "__main__":
    main()
