"""The host's side of a relay as a process of its own, to be killed: HOME IDENTITY URL KEY."""

import asyncio
import sys
from pathlib import Path

from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.sandboxes.relay.host_relay import Relay
from perdure.settings.settings_tree import Settings


async def main() -> None:
    home, identity, url, key = sys.argv[1:]
    sandbox = await BubblewrapProvider(Settings(home=Path(home))).attach(identity)
    async with Relay(sandbox, gateway_url=url, session_key=key, reads_are_cheap=True) as relay:
        print(relay.url, flush=True)
        while True:
            await asyncio.sleep(0.1)
            relay.check()


asyncio.run(main())
