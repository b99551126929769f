"""The contract of every sandbox provider, as tests: subclass `SandboxContract` and give `provider`.

    class TestMine(SandboxContract):
        @pytest.fixture
        def provider(self, tmp_path): return MyProvider(tmp_path)

Run it with pytest and asyncio_mode=auto. If your provider talks to a service, keep the fixture cheap:
each test boots one or two sandboxes under its own identities and kills them.
"""

import asyncio
import hashlib
import multiprocessing
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from perdure.errors import ConfigurationError, NotFound, PerdureError, SandboxLost
from perdure.sandboxes.base import Exec, ExecState, Sandbox, SandboxProvider, SandboxSpec
from perdure.sandboxes.relay.host_relay import Relay
from perdure.testing.local_server import served
from perdure.types import Limits

WORKDIR = "/testbed"
LABELS = {"run": "contract", "rollout": "rollout/contract/x/0", "attempt": "1"}
LIMITS = Limits(memory_mb=512, cpus=2, pids=256, disk_mb=64, output_mb=1)
LONG = ["sleep", "600"]
LONG_S = 60.0

BACKGROUND_TREE = """
for how in "setsid -f" ""; do
    name=lock${how:+-apart}
    $how flock $name sh -c "touch held-$name; exec sleep 600" &
done
until [ -e held-lock ] && [ -e held-lock-apart ]; do sleep 0.01; done
echo all running
sleep 600
"""
"""A child, and a child in its own session whose parent has ended. Each holds a lock."""

AGENT = """
import http.client, sys
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=60)
for body in ("first", "second"):
    connection.request("POST", "/v1/messages", body)
    kept = connection.sock
    print(connection.getresponse().read().decode())
    assert connection.sock is kept, "the connection was closed"
"""
"""Two model calls on one connection."""

TREE_IS_GONE = "flock -w 60 lock true && flock -w 60 lock-apart true"


def fresh_identity() -> str:
    return f"contract-{uuid4().hex[:12]}"


@contextmanager
def raises(kind: type[PerdureError]) -> Iterator[None]:
    """Like pytest.raises, so that the library does not import pytest."""
    try:
        yield
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised")


class SandboxContract:
    """The suite. Override a flag if your provider promises less."""

    hides_environment: bool = True
    """Commands cannot see the worker's environment variables."""
    reaches_gateway: bool = True
    """`SandboxSpec.gateway` (a unix socket of this host) is supported."""
    bounds_memory: bool = True
    """`Limits.memory_mb` is enforced. False if the image or template sets the memory."""
    shortest_life_s: float | None = 1.0
    """A sandbox renewed for this many seconds ends soon after them. None if that takes minutes."""
    large_file_mb: int = 200
    at_once: int = 64
    """How many sandboxes are created, used and killed at the same time."""

    @asynccontextmanager
    async def box(
        self, provider: SandboxProvider, spec: SandboxSpec | None = None
    ) -> AsyncIterator[Sandbox]:
        identity = fresh_identity()
        try:
            yield await provider.create(spec or self.spec(), identity)
        finally:
            await provider.kill(identity)

    def spec(self, tree: Path | None = None) -> SandboxSpec:
        return SandboxSpec(workdir=WORKDIR, tree=tree, limits=LIMITS, labels=LABELS, ttl_s=600)

    # -- identity -----------------------------------------------------------------------------

    async def test_provider_is_ready(self, provider: SandboxProvider) -> None:
        """On a host where the suite runs, check() reports no problem."""
        missing = provider.check()

        assert list(missing) == []

    async def test_create_twice_adopts(self, provider: SandboxProvider) -> None:
        """A second create of an identity returns the same sandbox with its files."""
        async with self.box(provider) as first:
            await first.write_file("mark", b"first")
            second = await provider.create(self.spec(), first.identity)

            assert await second.read_file("mark") == b"first"

    async def test_concurrent_creates_make_one_box(self, provider: SandboxProvider) -> None:
        """Concurrent creates of one identity return the same sandbox."""
        identity = fresh_identity()
        try:
            boxes = await asyncio.gather(
                *(provider.create(self.spec(), identity) for _ in range(4))
            )
            await boxes[0].write_file("mark", b"shared")

            assert [await box.read_file("mark") for box in boxes] == [b"shared"] * 4
        finally:
            await provider.kill(identity)

    async def test_lost_answer_makes_no_second_box(self, provider: SandboxProvider) -> None:
        """If the process that created a sandbox dies before it reads the answer, a repeated create
        returns that sandbox, and there is only one."""
        identity, run = fresh_identity(), fresh_identity()
        spec = replace(self.spec(), labels={**LABELS, "run": run})
        try:
            await _die_in_another_process(_create_and_die, provider, spec, identity)
            again = await provider.create(spec, identity)

            assert await again.read_file("mark") == b"of the lost create"
            assert [info.identity for info in await provider.list({"run": run})] == [identity]
        finally:
            await provider.kill(identity)

    async def test_attach_finds_it(self, provider: SandboxProvider) -> None:
        """attach returns a working handle to a sandbox that another caller created."""
        async with self.box(provider) as box:
            again = await provider.attach(box.identity)

            assert (again.identity, again.workdir) == (box.identity, box.workdir)

    async def test_temporary_files_are_its_own(self, provider: SandboxProvider) -> None:
        """Files in one sandbox's `tmp` do not appear in another sandbox."""
        name = f"perdure-contract-{uuid4().hex}"
        async with self.box(provider) as first:
            await first.put(f"{first.tmp}/{name}", b"here")
            found = await first.exec(["cat", f"{first.tmp}/{name}"])
        async with self.box(provider) as second:
            gone = await second.exec(["ls", f"{second.tmp}/{name}", f"/tmp/{name}"])

        assert (found.stdout, gone.stdout) == (b"here", b"")

    async def test_attach_to_nothing_is_not_found(self, provider: SandboxProvider) -> None:
        """attach to an identity that was never used raises NotFound, not SandboxLost."""
        with raises(NotFound):
            await provider.attach(fresh_identity())

    async def test_kill_under_a_watch_is_told(self, provider: SandboxProvider) -> None:
        """A wait for a command ends when its sandbox is killed."""
        async with self.box(provider) as box:
            await box.start("long", Exec(LONG))
            waiting = asyncio.create_task(box.wait("long", timeout_s=60))
            await box.kill()
            try:
                cause = (await waiting).cause
            except SandboxLost:
                cause = "sandbox"

            assert cause == "sandbox"

    async def test_kill_is_idempotent(self, provider: SandboxProvider) -> None:
        """A second kill succeeds, and the sandbox is no longer listed."""
        async with self.box(provider) as box:
            await box.kill()
            await provider.kill(box.identity)

            assert box.identity not in {info.identity for info in await provider.list()}

    async def test_killed_sandbox_is_lost(self, provider: SandboxProvider) -> None:
        """A start in a killed sandbox raises SandboxLost, not a generic error."""
        async with self.box(provider) as box:
            await box.kill()

            with raises(SandboxLost):
                await box.start("x", Exec(["true"]))

    async def test_old_handle_is_fenced(self, provider: SandboxProvider) -> None:
        """After another worker has attached to a sandbox and killed it, a start through the first
        worker's handle raises SandboxLost."""
        async with self.box(provider) as old:
            await old.exec(["true"])
            await (await provider.attach(old.identity)).kill()

            with raises(SandboxLost):
                await old.start("late", Exec(["true"]))

    async def test_identity_can_be_used_again_after_kill(self, provider: SandboxProvider) -> None:
        """After a kill the identity is free, and a new sandbox has none of the old files."""
        async with self.box(provider) as box:
            await box.write_file("mark", b"old")
            await box.kill()
            again = await provider.create(self.spec(), box.identity)

            with raises(NotFound):
                await again.read_file("mark")

    async def test_list_filters_by_labels(self, provider: SandboxProvider) -> None:
        """list returns the sandboxes that match the labels, as alive, with all their labels."""
        wanted = {**LABELS, "run": fresh_identity()}
        async with self.box(provider), self.box(provider, replace(self.spec(), labels=wanted)) as b:
            found = [
                (info.identity, info.alive, dict(info.labels))
                for info in await provider.list({"run": wanted["run"]})
            ]

            assert found == [(b.identity, True, wanted)]

    async def test_touch_sets_the_deadline(self, provider: SandboxProvider) -> None:
        """touch sets the remaining lifetime from now; it does not add to the old one."""
        async with self.box(provider) as box:
            await box.touch(3600)
            await box.touch(3600)
            (info,) = [i for i in await provider.list() if i.identity == box.identity]

            assert 3000 < info.expires - info.created < 4200

    async def test_ends_by_itself(self, provider: SandboxProvider) -> None:
        """A sandbox ends at its deadline without a sweeper."""
        if self.shortest_life_s is None:
            return
        async with self.box(provider) as box:
            await box.start("long", Exec(LONG))
            await box.touch(self.shortest_life_s)

            with raises(SandboxLost):
                while True:
                    await box.exec(["true"])
                    await asyncio.sleep(0.1)

    async def test_many_sandboxes_at_once(self, provider: SandboxProvider) -> None:
        """Many sandboxes work at the same time, each with its own result."""

        async def use(number: int) -> bytes:
            async with self.box(provider) as box:
                return (await box.exec(f"echo {number}")).stdout

        said = await asyncio.gather(*(use(number) for number in range(self.at_once)))

        assert said == [b"%d\n" % number for number in range(self.at_once)]

    async def test_a_relay_carries_model_calls(self, provider: SandboxProvider) -> None:
        """Calls leave a sandbox that cannot reach the gateway; the agent's connection stays open."""

        async def gateway(request: Request) -> Response:
            body = await request.body()

            async def parts() -> AsyncIterator[bytes]:
                yield b"heard "
                yield body

            return StreamingResponse(parts())

        routes = [Route("/healthz", gateway), Route("/v1/messages", gateway, methods=["POST"])]
        async with served(Starlette(routes=routes)) as url, self.box(provider) as box:
            near = provider.sees_host
            async with Relay(box, gateway_url=url, session_key="k", reads_are_cheap=near) as relay:
                argv = ["python3", "-c", AGENT, relay.url.rsplit(":", 1)[1]]
                said = await box.exec(argv, check=True, timeout=LONG_S)

            assert said.stdout == b"heard first\nheard second\n"

    # -- results --------------------------------------------------------------------------------

    async def test_exit_codes_are_exit_codes(self, provider: SandboxProvider) -> None:
        """Every exit code is reported as an exit code, 137 included."""
        async with self.box(provider) as box:
            codes = [(await box.exec(f"exit {code}")).status.code for code in (0, 1, 127, 137, 255)]

            assert codes == [0, 1, 127, 137, 255]

    async def test_death_by_signal_is_no_exit(self, provider: SandboxProvider) -> None:
        """A command killed by a signal reports the signal and no exit code."""
        async with self.box(provider) as box:
            ends = []
            for signum in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGPIPE):
                status = (await box.exec(f"kill -{int(signum)} $$")).status
                ends.append((status.state, status.signal, status.code))

            assert ends == [(ExecState.KILLED, signum, None) for signum in (9, 15, 2, 13)]

    async def test_unknown_exec_id_is_not_found(self, provider: SandboxProvider) -> None:
        """Polling a command that was never started raises NotFound, not SandboxLost."""
        async with self.box(provider) as box:
            with raises(NotFound):
                await box.poll("never")

    async def test_second_start_runs_nothing(self, provider: SandboxProvider) -> None:
        """An exec id runs once, however often it is started, also if the starts are concurrent."""
        async with self.box(provider) as box:
            argv = ["bash", "-c", "echo ran >>count"]
            await asyncio.gather(*(box.start("once", Exec(argv)) for _ in range(5)))
            await box.wait("once")
            await box.start("once", Exec(argv))
            await asyncio.gather(*(box.exec(["true"]) for _ in range(5)))  # the queue is empty

            assert await box.read_file("count") == b"ran\n"

    async def test_exec_id_with_other_argv_is_refused(self, provider: SandboxProvider) -> None:
        """An exec id cannot be reused for another command."""
        async with self.box(provider) as box:
            await box.start("once", Exec(["true"]))

            with raises(ConfigurationError):
                await box.start("once", Exec(["false"]))

    async def test_results_stay(self, provider: SandboxProvider) -> None:
        """A finished command's result and output can be read again by a new handle."""
        async with self.box(provider) as box:
            await box.start("kept", Exec(["bash", "-c", "echo out; exit 3"]))
            await box.wait("kept")
            again = await provider.attach(box.identity)

            assert ((await again.poll("kept")).code, await again.output("kept")) == (3, b"out\n")

    async def test_wait_gives_up_in_time(self, provider: SandboxProvider) -> None:
        """wait returns RUNNING when its timeout has passed; the command continues."""
        async with self.box(provider) as box:
            await box.start("long", Exec(LONG))
            status = await box.wait("long", timeout_s=0.05)

            assert status.state is ExecState.RUNNING

    async def test_many_at_once(self, provider: SandboxProvider) -> None:
        """Sixteen concurrent commands each have their own output and exit code."""
        async with self.box(provider) as box:
            results = await asyncio.gather(*(box.exec(f"echo {n}; exit {n}") for n in range(16)))

            assert [(r.status.code, r.stdout) for r in results] == [
                (n, b"%d\n" % n) for n in range(16)
            ]

    async def test_missing_program_fails(self, provider: SandboxProvider) -> None:
        """A program that does not exist gives a failed command with a reason on stderr."""
        async with self.box(provider) as box:
            result = await box.exec(["no-such-program"])

            assert (result.status.ok, b"no-such-program" in result.stderr) == (False, True)

    async def test_users(self, provider: SandboxProvider) -> None:
        """Commands run as the agent, and files belong to the agent, unless another user is named. An
        unknown user is refused."""
        async with self.box(provider) as box:
            own, named = await box.exec("id -u"), await box.exec("id -u", user="agent")

            assert own.stdout == named.stdout
            for user in box.users:
                await box.write_file(f"of-{user}", b"kept", user=user)
                owner = await box.exec(["stat", "-c", "%u", f"of-{user}"])
                assert owner.stdout == (await box.exec("id -u", user=user)).stdout
                assert await box.read_file(f"of-{user}", user=user) == b"kept"
            with raises(ConfigurationError):
                await box.exec("true", user="nobody-of-this-name")
            with raises(ConfigurationError):
                await box.write_file("f", b"", user="nobody-of-this-name")
            with raises(ConfigurationError):
                await box.read_file("own", user="nobody-of-this-name")

    async def test_memory_is_bounded(self, provider: SandboxProvider) -> None:
        """A command that takes more memory than the limit fails; its sandbox continues."""
        if not self.bounds_memory:
            return
        async with self.box(provider) as box:
            taken = await box.exec(["python3", "-c", "len(bytearray(1 << 30))"])
            after = await box.exec("echo on")

            assert (taken.status.ok, after.stdout) == (False, b"on\n")

    # -- killing --------------------------------------------------------------------------------

    async def test_timeout_kills_the_whole_tree(self, provider: SandboxProvider) -> None:
        """At the deadline, children die too, even those in their own session."""
        async with self.box(provider) as box:
            await box.start("tree", Exec(["bash", "-c", BACKGROUND_TREE], timeout_s=2))
            status = await box.wait("tree", timeout_s=60)
            held = await box.output("tree")
            gone = (await box.exec(TREE_IS_GONE)).status

            assert (status.cause, held, gone.ok) == ("timeout", b"all running\n", True)

    async def test_a_time_limit_moves_later(self, provider: SandboxProvider) -> None:
        """A command whose time limit was extended dies at the later limit."""
        async with self.box(provider) as box:
            for name in ("longer", "long"):
                await box.start(name, Exec(LONG, timeout_s=10))
            await box.extend("longer", 600)
            await box.extend("longer", 1)
            await box.extend("long", 12)
            moved = await box.wait("long", timeout_s=60)
            still = await box.poll("longer")
            await box.extend("long", 600)

            assert moved.cause == "timeout"
            assert moved.seconds is not None
            assert moved.seconds > 11
            assert not still.done
            with raises(NotFound):
                await box.extend("never", 600)

    async def test_sigkill_reaches_the_whole_tree(self, provider: SandboxProvider) -> None:
        """signal(SIGKILL) ends a command and all its processes; a second one succeeds."""
        async with self.box(provider) as box:
            await box.start("tree", Exec(["bash", "-c", BACKGROUND_TREE]))
            await self.until(box, "tree", b"all running\n")
            await box.signal("tree", signal.SIGKILL)
            await box.signal("tree", signal.SIGKILL)
            status = await box.wait("tree", timeout_s=60)
            gone = (await box.exec(TREE_IS_GONE)).status

            assert (status.cause, gone.ok) == ("signal", True)

    async def test_sigkill_after_the_end_reaches_what_was_left(
        self, provider: SandboxProvider
    ) -> None:
        """SIGKILL to a finished command ends its background processes."""
        async with self.box(provider) as box:
            left = BACKGROUND_TREE.replace("sleep 600\n", "exit 0\n")
            await box.start("tree", Exec(["bash", "-c", left]))
            status = await box.wait("tree", timeout_s=60)
            held = (await box.exec("flock -n lock true")).status
            await box.signal("tree", signal.SIGKILL)
            gone = (await box.exec(TREE_IS_GONE)).status

            assert (status.code, held.ok, gone.ok) == (0, False, True)

    async def test_end_all_ends_what_any_command_left(self, provider: SandboxProvider) -> None:
        """end_all ends running commands and background processes; the sandbox takes new commands."""
        async with self.box(provider) as box:
            left = BACKGROUND_TREE.replace("sleep 600\n", "exit 0\n")
            await box.start("left", Exec(["bash", "-c", left]))
            await box.start("long", Exec(LONG))
            done = await box.wait("left", timeout_s=60)
            await box.end_all()
            status = await box.wait("long", timeout_s=60)
            gone = (await box.exec(TREE_IS_GONE)).status

            assert (done.code, status.state, gone.ok) == (0, ExecState.KILLED, True)

    async def test_gentle_signal_can_be_handled(self, provider: SandboxProvider) -> None:
        """A command may catch SIGTERM; the result is then its own exit code."""
        async with self.box(provider) as box:
            script = "trap 'exit 7' TERM; echo ready; while :; do sleep 0.01; done"
            await box.start("trap", Exec(["bash", "-c", script]))
            await self.until(box, "trap", b"ready\n")
            await box.signal("trap", signal.SIGTERM)

            assert (await box.wait("trap")).code == 7

    async def test_background_child_does_not_hold_the_result(
        self, provider: SandboxProvider
    ) -> None:
        """A child that keeps stdout open does not delay the result, and outlives its command."""
        async with self.box(provider) as box:
            result = await box.exec("flock lock sleep 600 & until ! flock -n lock true; do :; done")
            still_there = (await box.exec("flock -n lock true")).status

            assert (result.status.code, still_there.code) == (0, 1)

    async def test_too_much_output_is_killed(self, provider: SandboxProvider) -> None:
        """A command that writes more than its limit is killed, and its output is cut there."""
        async with self.box(provider) as box:
            result = await box.exec(["yes"])

            assert (result.status.cause, len(result.stdout)) == ("output", LIMITS.output_mb << 20)

    # -- a worker dies ----------------------------------------------------------------------------

    async def test_survives_its_worker(self, provider: SandboxProvider) -> None:
        """After kill -9 of the process that started a command, another one reads its result."""
        async with self.box(provider) as box:
            argv = ["bash", "-c", "until [ -e go ]; do sleep 0.01; done; echo went; exit 5"]
            await _start_elsewhere(provider, box.identity, "orphan", argv)
            await box.write_file("go", b"")
            status = await box.wait("orphan")

            assert (status.code, await box.output("orphan")) == (5, b"went\n")

    async def test_deadline_needs_no_worker(self, provider: SandboxProvider) -> None:
        """A command's timeout is enforced even if the worker that set it is dead."""
        async with self.box(provider) as box:
            await _start_elsewhere(provider, box.identity, "orphan", LONG, timeout_s=0.5)

            assert (await box.wait("orphan", timeout_s=60)).cause == "timeout"

    # -- streams and files ------------------------------------------------------------------------

    async def test_output_is_readable_by_offset_while_it_grows(
        self, provider: SandboxProvider
    ) -> None:
        """A watcher reads the output so far, and later only the new part."""
        async with self.box(provider) as box:
            script = "printf one; until [ -e go ]; do sleep 0.01; done; printf two"
            await box.start("grow", Exec(["bash", "-c", script]))
            await self.until(box, "grow", b"one")
            await box.write_file("go", b"")
            await box.wait("grow")

            assert await box.output("grow", offset=3) == b"two"

    async def test_output_that_is_not_there_yet_is_waited_for(
        self, provider: SandboxProvider
    ) -> None:
        """A sandbox with `waits_inside` returns output that is written later; others return nothing."""
        async with self.box(provider) as box:
            script = "until [ -e go ]; do sleep 0.01; done; printf one; exec sleep 600"
            await box.start("late", Exec(["bash", "-c", script]))
            heard = asyncio.create_task(box.next_output("late", 0, wait_s=60))
            if not box.waits_inside:
                await heard
            await box.write_file("go", b"")

            assert await heard == (b"one" if box.waits_inside else b"")

    async def test_streams_are_separate_bytes(self, provider: SandboxProvider) -> None:
        """stdout and stderr come back separately, byte for byte."""
        async with self.box(provider) as box:
            result = await box.exec(r"printf '\xff\0out'; printf '\xfeerr' >&2")

            assert (result.stdout, result.stderr) == (b"\xff\0out", b"\xfeerr")

    async def test_stdin_is_given_and_ends(self, provider: SandboxProvider) -> None:
        """stdin carries bytes and then ends. Without stdin, a reader sees the end at once."""
        async with self.box(provider) as box:
            await box.start("given", Exec(["cat"], stdin=b"\0bytes\xff"))
            await box.start("none", Exec(["cat"]))
            await asyncio.gather(box.wait("given"), box.wait("none"))

            assert (await box.output("given"), await box.output("none")) == (b"\0bytes\xff", b"")

    async def test_environment_and_folder(self, provider: SandboxProvider) -> None:
        """env adds to the spec's variables and overrides them; cwd defaults to the workdir."""
        spec = replace(self.spec(), env={"A": "spec", "B": "spec"})
        async with self.box(provider, spec) as box:
            value = "it's $HOME\nand more"
            result = await box.exec('printf "%s,%s," "$A" "$B"; pwd', env={"B": value})
            await box.exec("mkdir sub")
            inner = await box.exec("pwd", cwd=f"{box.workdir}/sub")

            assert (result.stdout.decode(), inner.stdout.decode()) == (
                f"spec,{value},{box.workdir}\n",
                f"{box.workdir}/sub\n",
            )

    async def test_any_variable_can_be_set(self, provider: SandboxProvider) -> None:
        """Variables that the loader or a shell treats specially arrive like all others."""
        names = ("LD_LIBRARY_PATH", "IFS", "UID", "PATH", "BASH_ENV")
        async with self.box(provider) as box:
            env = {name: f"/value/{name}:/usr/bin" for name in names}
            seen = (await box.exec(["env"], env=env)).stdout.decode().splitlines()

            assert {f"{name}={value}" for name, value in env.items()} <= set(seen)

    async def test_worker_environment_stays_outside(self, provider: SandboxProvider) -> None:
        """No command sees a secret from the worker's environment."""
        if not self.hides_environment:
            return
        os.environ["PERDURE_TEST_CONTRACT_SECRET"] = "leaked"
        try:
            async with self.box(provider) as box:
                seen = (await box.exec("env; tr '\\0' '\\n' </proc/1/environ")).stdout

                assert b"leaked" not in seen
        finally:
            del os.environ["PERDURE_TEST_CONTRACT_SECRET"]

    async def test_files_round_trip_as_bytes(
        self, provider: SandboxProvider, tmp_path: Path
    ) -> None:
        """put and get carry any bytes; put creates parents, takes host files and sets the mode."""
        data = bytes(range(256)) * 5000
        (tmp_path / "host.bin").write_bytes(data)
        async with self.box(provider) as box:
            await box.put("a/b/c.bin", tmp_path / "host.bin", mode=0o755)
            seen = (await box.exec("sha256sum a/b/c.bin; stat -c %a a/b/c.bin")).stdout.split()
            part = await box.get("a/b/c.bin", offset=255, limit=3)

            assert (seen[0], seen[2], part, await box.get("a/b/c.bin")) == (
                hashlib.sha256(data).hexdigest().encode(),
                b"755",
                b"\xff\0\1",
                data,
            )

    async def test_large_file_is_streamed(self, provider: SandboxProvider, tmp_path: Path) -> None:
        """A large file is streamed in and arrives complete; any part of it can be read back."""
        path, size = tmp_path / "large", self.large_file_mb << 20
        with path.open("wb") as file:
            for number in range(self.large_file_mb):
                file.write(random.Random(number).randbytes(1 << 20))
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            file.seek(size - 1000)
            tail = file.read()
        roomy = LIMITS.model_copy(update={"disk_mb": 3 * self.large_file_mb, "memory_mb": 2048})
        async with self.box(provider, replace(self.spec(), limits=roomy)) as box:
            await box.put("large", path)
            inside = (await box.exec("sha256sum large", check=True)).stdout.split()[0]

            assert (inside.decode(), await box.get("large", size - 1000)) == (digest, tail)

    async def test_put_replaces(self, provider: SandboxProvider) -> None:
        """put over an existing file leaves the new bytes and no other file."""
        async with self.box(provider) as box:
            await box.write_file("d/f", "long old text")
            await box.write_file("d/f", "new")

            assert (await box.exec("ls -A d; cat d/f")).stdout == b"f\nnew"

    async def test_missing_file_is_not_found(self, provider: SandboxProvider) -> None:
        """Reading a missing file raises NotFound and never returns empty bytes."""
        async with self.box(provider) as box:
            with raises(NotFound):
                await box.get("nothing")

    async def test_tree_appears_and_is_never_changed(
        self, provider: SandboxProvider, tmp_path: Path
    ) -> None:
        """The spec's tree is writable at the workdir, and the original never changes."""
        tree = tmp_path / "tree"
        (tree / "folder").mkdir(parents=True)
        (tree / "folder/file").write_text("base")
        async with self.box(provider, self.spec(tree)) as box:
            result = await box.exec(
                "cat folder/file; echo changed >folder/file; mv folder moved; cat moved/file",
                check=True,
            )

            assert (result.stdout, (tree / "folder/file").read_text()) == (b"basechanged\n", "base")

    async def test_check_raises_on_failure(self, provider: SandboxProvider) -> None:
        """exec(check=True) turns a failed command into an exception that shows its stderr."""
        async with self.box(provider) as box:
            try:
                await box.exec("echo why >&2; exit 1", check=True)
            except RuntimeError as error:
                shown = str(error)

            assert "why" in shown

    async def test_async_with_kills(self, provider: SandboxProvider) -> None:
        """Leaving `async with` kills the sandbox."""
        identity = fresh_identity()
        async with await provider.create(self.spec(), identity) as box:
            await box.exec(["true"])

        with raises(NotFound):
            await provider.attach(identity)

    # -- the gateway ------------------------------------------------------------------------------

    async def test_gateway_answers_and_may_restart(
        self, provider: SandboxProvider, short_folder: Path
    ) -> None:
        """Commands reach the gateway's socket at gateway_url, also after the gateway has restarted."""
        if not self.reaches_gateway:
            return
        socket = short_folder / "gateway.sock"
        async with self.box(provider, replace(self.spec(), gateway=socket)) as box:
            answers = []
            for name in (b"first", b"second"):
                async with _gateway(socket, name):
                    answers.append((await box.exec(_ask(box.gateway_url))).stdout)

            assert answers == [b"first got ping\n", b"second got ping\n"]

    # -- helpers ----------------------------------------------------------------------------------

    async def until(self, box: Sandbox, exec_id: str, expected: bytes) -> None:
        """Wait until a running command has written exactly `expected`."""
        while await box.output(exec_id) != expected:
            assert not (await box.poll(exec_id)).done
            await asyncio.sleep(0.01)


def _ask(gateway_url: str | None) -> str:
    assert gateway_url is not None
    host, port = gateway_url.removeprefix("http://").split(":")
    return f"exec 3<>/dev/tcp/{host}/{port}; echo ping >&3; cat <&3"


@asynccontextmanager
async def _gateway(socket: Path, name: bytes) -> AsyncIterator[None]:
    """A server on the socket that answers one line, with its name."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(name + b" got " + await reader.readline())
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_unix_server(answer, socket)
    async with server:
        yield
    socket.unlink(missing_ok=True)


async def _start_elsewhere(
    provider: SandboxProvider,
    identity: str,
    exec_id: str,
    argv: Sequence[str],
    timeout_s: float | None = None,
) -> None:
    """Start the command from another process, which then dies by SIGKILL."""
    await _die_in_another_process(_start_and_die, provider, identity, exec_id, argv, timeout_s)


async def _die_in_another_process(work: Callable[..., None], *given: object) -> None:
    process = multiprocessing.get_context("spawn").Process(target=work, args=given)
    process.start()
    try:
        await asyncio.to_thread(process.join)
    finally:  # if the test was cancelled, the process must not create a sandbox after the last kill
        process.kill()
        process.join()
    assert process.exitcode == -signal.SIGKILL


def _create_and_die(provider: SandboxProvider, spec: SandboxSpec, identity: str) -> None:
    async def create() -> None:
        box = await provider.create(spec, identity)
        await box.write_file("mark", b"of the lost create")

    asyncio.run(create())
    os.kill(os.getpid(), signal.SIGKILL)


def _start_and_die(
    provider: SandboxProvider,
    identity: str,
    exec_id: str,
    argv: Sequence[str],
    timeout_s: float | None,
) -> None:
    async def start() -> None:
        box = await provider.attach(identity)
        await box.start(exec_id, Exec(argv, timeout_s=timeout_s))

    asyncio.run(start())
    os.kill(os.getpid(), signal.SIGKILL)
