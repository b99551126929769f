"""`python -m benchmarks.channel`: bits a second from one sandbox to another through shared files.

The sender knows random bits, the receiver prints what it got. Both mount one read-only folder, whose
pages are on disk before each message, as most of a host's /usr is. The baseline is the provider
`local`, whose processes nothing restricts. `bits/s` is the information in what was received (random
guesses are 0), divided by the time that both sides took, without their starts.
"""

import argparse
import asyncio
import json
import math
import os
import secrets
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import structlog

from benchmarks.benchmark_options import add_output, words
from benchmarks.channel import channel_ends
from benchmarks.channel.channel_ends import CHANNELS, STRIDE, TRAINING
from benchmarks.scratch_folder import scratch_folder
from perdure.sandboxes.base import Exec, Mount, Sandbox, SandboxSpec
from perdure.settings.settings_tree import SandboxSettings, Settings
from perdure.types import Limits
from perdure.variant_registry import SANDBOXES, load

PROVIDERS = ("local", "bubblewrap", "podman")
SHARED = "/opt/shared"
ENDS = Path(channel_ends.__file__).read_text()


@dataclass
class Received:
    """What one channel carried between two sandboxes of one provider."""

    pairs: Counter[str] = field(default_factory=Counter)
    """Sent and received bit, such as `10` -> how often."""
    seconds: float = 0.0
    refused: str = ""
    """The receiver's error."""

    @property
    def wrong(self) -> float:
        return (self.pairs["01"] + self.pairs["10"]) / self.pairs.total()

    @property
    def a_second(self) -> float:
        return information(self.pairs) * self.pairs.total() / self.seconds if self.seconds else 0.0


def information(pairs: Counter[str]) -> float:
    """The bits that a received bit tells about the sent one. Below the chance of a sample: 0."""
    total = pairs.total()
    sent, got = Counter[str](), Counter[str]()
    for pair, count in pairs.items():
        sent[pair[0]] += count
        got[pair[1]] += count
    bits = sum(
        count / total * math.log2(count * total / (sent[pair[0]] * got[pair[1]]))
        for pair, count in pairs.items()
    )
    return bits if bits * total * 2 * math.log(2) > CHANCE else 0.0


CHANCE = 10.83
"""Two independent bits seem to be related as much as this (chi squared) once in a thousand times."""


async def measure(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Received]:
    settings = Settings(home=folder / "home", sandbox=SandboxSettings(allow_local=True))
    provider = load("sandbox", SANDBOXES, name)(settings)
    if missing := provider.check():
        raise RuntimeError(missing[0])
    shared = folder / "shared"
    target = str(shared) if name == "local" else SHARED
    spec = SandboxSpec("/testbed", mounts=(Mount(shared, target),), limits=Limits(memory_mb=1024))
    found = {channel: Received() for channel in options.channels}
    for _ in range(options.rounds):
        for channel, received in found.items():
            await cool(shared / "pages")
            names = [f"channel-{uuid4().hex[:12]}" for _ in range(2)]
            try:
                sender, receiver = [await provider.create(spec, name) for name in names]
                await transmit(sender, receiver, channel, target, options.bits, received)
            finally:
                for identity in names:
                    await provider.kill(identity)
    return found


async def transmit(  # noqa: PLR0917
    sender: Sandbox, receiver: Sandbox, channel: str, folder: str, count: int, received: Received
) -> None:
    sent = "01" * (TRAINING // 2) + "".join(secrets.choice("01") for _ in range(count))
    program, nonce = ["python3", "-c", ENDS], uuid4().hex
    await sender.start("send", Exec([*program, "send", channel, folder, nonce, sent]))
    while not (told := await sender.output("send")).endswith(b"\n"):
        if (await sender.wait("send", timeout_s=0.05)).done:
            raise RuntimeError((await sender.output("send", "stderr")).decode())
    result = await receiver.exec([*program, "receive", channel, folder, nonce, str(len(sent))])
    if not result.status.ok:
        received.refused = result.stderr.decode().strip().splitlines()[-1]
        return
    seconds, bits = result.stdout.decode().split()
    received.seconds += float(told.split()[0]) + float(seconds)
    received.pairs.update(a + b for a, b in zip(sent[TRAINING:], bits[TRAINING:], strict=True))


def write_shared(folder: Path, bits: int) -> None:
    folder.mkdir()
    for number in range(bits + TRAINING):
        (folder / f"lock-{number}").touch()
    with (folder / "pages").open("wb") as file:
        for _ in range(bits + TRAINING):
            file.write(os.urandom(STRIDE))
    for path in (folder, *folder.parents[:-1]):
        if path.stat().st_uid == os.getuid() and path != Path("/tmp"):
            path.chmod(path.stat().st_mode | 0o055)


async def cool(path: Path) -> None:
    """Write the file back and evict it. Raises: RuntimeError if it stays in memory."""
    with path.open("rb") as file:
        for _ in range(100):
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            try:
                os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
            except BlockingIOError:
                return
            await asyncio.sleep(0.05)  # a killed receiver may still map it
    raise RuntimeError(f"{path} stays in memory; set TMPDIR to a folder on a disk")


def report(found: dict[str, dict[str, Received]]) -> None:
    print("| provider | channel | wrong | bits/s |\n|---|---|---|---|")
    for provider, channels in found.items():
        for channel, received in channels.items():
            refused = received.refused and not received.pairs
            wrong = received.refused if refused else f"{received.wrong:.1%}"
            print(f"| {provider} | {channel} | {wrong} | {received.a_second:,.0f} |")
    load = ", ".join(f"{value:.0f}" for value in os.getloadavg())
    print(f"\nload at the end: {load}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--providers", type=words, default=PROVIDERS, metavar=",".join(PROVIDERS))
    parser.add_argument("--channels", type=words, default=tuple(CHANNELS), metavar="NAME,NAME")
    parser.add_argument("--bits", type=int, default=1024, help="in each message")
    parser.add_argument("--rounds", type=int, default=4, help="messages on each channel")
    add_output(parser)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("error"))
    found: dict[str, dict[str, Received]] = {}
    with scratch_folder("pd-", keep=options.keep) as folder:
        write_shared(folder / "shared", options.bits)
        for name in options.providers:
            try:
                found[name] = asyncio.run(measure(name, folder, options))
            except RuntimeError as error:
                print(f"{name}: not measured: {error}", file=sys.stderr)
    report(found)
    if options.json:
        rows = {name: {c: vars(r) for c, r in channels.items()} for name, channels in found.items()}
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
