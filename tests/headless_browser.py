"""Headless Chromium, driven over its debugging pipe: no driver, no port, no other program."""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--remote-debugging-pipe", "--hide-scrollbars", "--force-color-profile=srgb"),
)
PLACE = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4);"
    " os.execv(sys.argv[3], sys.argv[3:])"
)
"""The browser reads its pipe from descriptor 3 and writes to 4."""
LIMIT_S = 120.0
KEYS = {"Enter": {"code": "Enter", "text": "\r", "windowsVirtualKeyCode": 13}}


class Browser:
    """One tab. Every wait has an end."""

    def __init__(self, process: subprocess.Popen[bytes], reads: int, writes: int) -> None:
        self._process = process
        self._reads, self._writes = reads, writes
        self._held = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []
        self._session = ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Load a page, whole."""
        self._loaded(lambda: self._call("Page.navigate", url=url))

    def press(self, key: str, *, loads: bool = False) -> None:
        """Press and release a key; `loads`: and wait for the page that it leads to."""
        more = KEYS.get(key, {"text": key})

        def act() -> None:
            self._call("Input.dispatchKeyEvent", type="keyDown", key=key, **more)
            self._call("Input.dispatchKeyEvent", type="keyUp", key=key)

        if loads:
            self._loaded(act)
        else:
            act()

    def click(self, selector: str) -> None:
        """Click, and wait for the page that it leads to."""
        self._loaded(lambda: self.ask(f"document.querySelector({json.dumps(selector)}).click()"))

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page. Raises: AssertionError for an error there."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until it is true."""
        end = time.monotonic() + LIMIT_S
        while not self.ask(f"Boolean({expression})"):
            assert time.monotonic() < end, f"never: {expression}"
            self._receive(0.05)

    def settle(self, quiet_s: float = 3.0) -> None:
        """Wait until nothing of the page has happened for so long."""
        end = time.monotonic() + LIMIT_S
        while self._receive(quiet_s):
            assert time.monotonic() < end, "the page never rests"

    @property
    def path(self) -> str:
        return str(self.ask("location.pathname + location.search + location.hash"))

    def asked_for(self) -> list[str]:
        """Addresses of all requests so far."""
        sent = (one for one in self.events if one["method"] == "Network.requestWillBeSent")
        return [str(one["params"]["request"]["url"]) for one in sent]

    def refusals(self) -> list[str]:
        """What the policy of a page refused so far."""
        told = (one["params"]["entry"] for one in self.events if one["method"] == "Log.entryAdded")
        return [str(one["text"]) for one in told if one["source"] == "security"]

    def picture(self, path: Path, width: int, height: int, *, dark: bool = False) -> None:
        """What the window shows, as PNG."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                   deviceScaleFactor=1, mobile=False)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        shot = self._call("Page.captureScreenshot", format="png", optimizeForSpeed=False)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _loaded(self, act: Any) -> None:
        seen = len(self.events)
        act()
        end = time.monotonic() + LIMIT_S
        while not any(one["method"] == "Page.loadEventFired" for one in self.events[seen:]):
            assert time.monotonic() < end, "the page never loaded"
            self._receive(1.0)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        call: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            call["sessionId"] = self._session
        os.write(self._writes, json.dumps(call).encode() + b"\0")
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            for message in self._receive(1.0):
                if message.get("id") == self._number:
                    assert "error" not in message, message["error"]
                    result: dict[str, Any] = message["result"]
                    return result
        raise AssertionError(f"no answer to {method}")

    def _receive(self, seconds: float) -> list[dict[str, Any]]:
        """What arrived; events are noted."""
        if select.select([self._reads], [], [], seconds)[0]:
            data = os.read(self._reads, 1 << 20)
            assert data, "the browser has ended"
            self._held += data
        *whole, self._held = self._held.split(b"\0")
        messages = [json.loads(one) for one in whole]
        self.events += [one for one in messages if "method" in one]
        return messages


@contextlib.contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """A browser of its own, with its files in `folder`."""
    assert CHROMIUM is not None
    their_in, our_out = os.pipe()
    our_in, their_out = os.pipe()
    ends = [fcntl.fcntl(one, fcntl.F_DUPFD, 10) for one in (their_in, their_out)]

    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            PLACE,
            *map(str, ends),
            CHROMIUM,
            *FLAGS,
            f"--user-data-dir={folder}",
        ],
        pass_fds=ends,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for one in (their_in, their_out, *ends):
        os.close(one)
    try:
        yield Browser(process, our_in, our_out)
    finally:
        process.kill()
        process.wait()
        os.close(our_in)
        os.close(our_out)
