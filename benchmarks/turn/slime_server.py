"""Runs inside slime's environment: its Anthropic adapter on a loopback port.

    slime_server.py <engine url>

Adapter, routing tree and HTTP are slime's own. The tokenizer is Perdure's, with the two methods that
slime calls. SGLang's parsers are missing, so slime's own fallback parser, which is cheaper, reads the
output. torch and ray are empty modules, because slime only uses their types' names.
"""

import asyncio
import json
import sys

from benchmarks.peers.inside_slime import ChatTokenizer  # this import must precede slime's

from aiohttp import web  # isort: skip
from slime.agent.adapters.anthropic import AnthropicAdapter  # isort: skip


async def serve(engine_url: str) -> None:
    adapter = AnthropicAdapter(tokenizer=ChatTokenizer(), sglang_url=engine_url)
    adapter.open_session("s")
    runner = web.AppRunner(adapter.app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    print(json.dumps({"event": "listens", "port": port}), file=sys.stderr, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
