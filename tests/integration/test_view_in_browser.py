"""`perdure view` as a person uses it: Chromium, the keyboard, and trajectories that attack the reader."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.reports.report_html import page
from perdure.reports.report_tables import Section
from perdure.storage.local_store import LocalStore
from tests.headless_browser import CHROMIUM, Browser, browsing
from tests.hostile_text import CORPUS
from tests.store_with_runs import turns, write_rollout

pytestmark = [pytest.mark.longer, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]
ONE = "/runs/made/rollouts/h11-0.14.0/0"
SLIPPED_IN = """(() => {
  const script = document.createElement("script");
  const image = document.createElement("img");
  try { script.append("window.pwned = 1"); image.setAttribute("onerror", "window.pwned = 2"); } catch { }
  image.src = "http://127.0.0.1:9/x.png";
  document.body.append(script, image);
})()"""
ATTACK = "\n".join(CORPUS).encode("utf-8", "replace").decode()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two samples, one open rollout, and a run whose every text is hostile."""
    folder = tmp_path_factory.mktemp("home")
    store = LocalStore(folder / "store")

    async def write() -> None:
        await write_rollout(store)
        await write_rollout(store, sample=1, resolved=True)
        await write_rollout(store, "later", "jinja-3", ended=False)
        await write_rollout(
            store,
            "dirty",
            said=turns((ATTACK, ATTACK)),
            patch=ATTACK.encode(),
            log=ATTACK.encode(),
            failing=ATTACK,
            reason=ATTACK,
        )
        await write_rollout(store, "dirty", sample=1, failure=ATTACK)

    asyncio.run(write())
    return folder


@pytest.fixture(scope="module")
def address(home: Path) -> Iterator[str]:
    """What the command prints."""
    environment = {**os.environ, "PERDURE_HOME": str(home), "PERDURE_STORE": str(home / "store")}
    command = [sys.executable, "-m", "perdure.cli.main", "view", "made", "--port", "0"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        yield line.split(" at ")[1].strip()
    finally:
        process.terminate()
        process.wait(30)
        process.stderr.close()


@pytest.fixture(scope="module")
def browser(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """It came in by the address with the token."""
    with browsing(tmp_path_factory.mktemp("chromium")) as found:
        found.open(address)
        yield found


@pytest.fixture
def origin(address: str) -> str:
    return address.split("/runs", maxsplit=1)[0]


def test_a_run_is_walked_by_keyboard(browser: Browser, origin: str) -> None:
    """From the list to a rollout, through its parts, to the next one and up; the token left the address."""
    browser.open(f"{origin}/runs/made")
    browser.until("document.querySelectorAll('tr[data-row]').length == 2")
    browser.press("j")
    browser.press("Enter", loads=True)
    assert browser.path == ONE

    browser.press("e")
    assert browser.ask("[...document.querySelectorAll('main details')].every((one) => one.open)")
    browser.press("j")
    assert browser.ask("document.querySelector('.at').id") == "turn-0"
    for key, part in (
        ("2", "/tokens"),
        ("3", "/patch"),
        ("4", "/tests"),
        ("5", "/files"),
        ("1", ""),
    ):
        browser.press(key, loads=True)
        assert browser.path == ONE + part
    browser.press("n", loads=True)
    assert browser.path == f"{ONE[:-1]}1"
    browser.press("u", loads=True)
    assert browser.path == ONE[:-2]
    assert "token" not in browser.path


def test_a_permalink_leads_to_a_turn_and_search_to_permalinks(
    browser: Browser, origin: str
) -> None:
    """The address of a turn opens at it; words lead to the turn that has them."""
    browser.open(f"{origin}{ONE}?turn=3#turn-3")
    assert browser.ask("document.querySelector(':target').id") == "turn-3"
    assert browser.ask(
        "document.querySelector(':target').getBoundingClientRect().top < innerHeight"
    )

    browser.open(f"{origin}/runs/made")
    browser.until("document.querySelector('.facts').innerText.includes('2 searchable')")
    browser.press("/")
    for letter in "normalized":
        browser.press(letter)
    browser.press("Enter", loads=True)
    browser.click(".hit a")
    assert browser.path == f"{ONE}?turn=2#turn-2"


def test_a_page_follows_what_still_runs(browser: Browser, origin: str, home: Path) -> None:
    """The verdict appears without a reload; what a reader has opened stays open."""
    browser.open(f"{origin}/runs/later/rollouts/jinja-3/0")
    browser.press("e")
    assert "running" in browser.ask("document.querySelector('main').innerText")

    asyncio.run(write_rollout(LocalStore(home / "store"), "later", "jinja-3"))

    browser.until("document.querySelector('main').innerText.includes('unresolved')")
    assert browser.ask("document.querySelector('main details').open")


def test_no_injection_runs(browser: Browser, origin: str, tmp_path: Path) -> None:
    """On no page of a hostile run does a script run, is the policy needed, or is another host asked; nor in
    a report's file."""
    browser.open(f"{origin}/")
    one = "/runs/dirty/rollouts/h11-0.14.0"
    pages = ["/runs/dirty", "/runs/dirty?q=pwned", "/search?q=pwned", one, f"{one}/1"]
    pages += [f"{one}/0{part}" for part in ("", "/tokens", "/patch", "/tests", "/beside/1")]
    for where in pages:
        browser.open(origin + where)
        assert "pwned" in browser.ask("document.documentElement.innerText") or where == one
        assert browser.ask("window.pwned === undefined")
    browser.press("e")
    browser.press("j")
    report = tmp_path / "report.html"
    section = Section(title=ATTACK, columns=(ATTACK,), rows=((ATTACK,),), note=ATTACK)
    report.write_text(page(ATTACK, [section], [], ATTACK))
    browser.open(report.as_uri())

    assert browser.ask("window.pwned === undefined")
    assert browser.refusals() == []
    known = (origin, "file://", "about:")
    assert [url for url in browser.asked_for() if not url.startswith(known)] == []


def test_a_script_that_slipped_in_would_not_run(browser: Browser, origin: str) -> None:
    """The policy alone stops inline scripts, handlers, and requests to other hosts."""
    browser.open(f"{origin}{ONE}")
    browser.ask(SLIPPED_IN)

    assert browser.ask("window.pwned === undefined")
    refused = " ".join(browser.refusals())
    assert "TrustedScript" in refused
    assert "img-src" in refused
