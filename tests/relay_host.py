"""The host's side of a relay as a process of its own, to be killed: HOME IDENTITY CARRIER URL KEY."""

import asyncio
import sys
from pathlib import Path
from typing import cast

from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.sandboxes.relay.relay import CarrierName, Relay
from perdure.settings.tree import Settings


async def main() -> None:
    home, identity, carrier, url, key = sys.argv[1:]
    sandbox = await BubblewrapProvider(Settings(home=Path(home))).attach(identity)
    name = cast(CarrierName, carrier)
    async with Relay(
        sandbox, name, gateway_url=url, session_key=key, reads_are_cheap=True
    ) as relay:
        print(relay.url, flush=True)
        while True:
            await asyncio.sleep(0.1)
            relay.check()


asyncio.run(main())
