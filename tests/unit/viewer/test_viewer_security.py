"""Only authorized requests are answered, and hostile text stays text."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from perdure.storage.local_store import LocalStore
from perdure.viewer.viewer_security import is_loopback
from tests.checkout_paths import ROOT
from tests.hostile_text import CORPUS
from tests.store_with_runs import message, turns, write_rollout
from tests.unit.viewer.conftest import TOKEN, Show

ONE = "/runs/made/rollouts/h11-0.14.0/0"
TEMPLATES = sorted((ROOT / "src" / "perdure" / "viewer" / "templates").glob("*.html"))


async def test_the_token_opens_once_and_a_cookie_afterwards(client: httpx.AsyncClient) -> None:
    """Pages need the token; a redirect then moves it from the URL into a cookie."""
    assert (await client.get("/")).status_code == 401
    assert (await client.get("/static/view.js")).status_code == 401
    assert (await client.get("/", params={"token": "x" * 40})).status_code == 401

    answer = await client.get("/runs/made?by=group&token=" + TOKEN)

    assert answer.status_code == 303
    assert answer.headers["location"] == "/runs/made?by=group"
    assert "HttpOnly" in answer.headers["set-cookie"]
    assert (await client.get("/")).status_code == 200


async def test_the_address_after_the_token_stays_on_this_host(client: httpx.AsyncClient) -> None:
    """`//host/` as a path does not redirect to another host."""
    answer = await client.get("http://127.0.0.1:8236//evil.example/?token=" + TOKEN)

    assert answer.headers["location"] == "/evil.example/"


@pytest.mark.parametrize(
    ("host", "answered"),
    [
        ("127.0.0.1:8236", True),
        ("localhost:9000", True),
        ("[::1]:8236", True),
        ("evil.example", False),
        ("evil.example:8236", False),
        ("127.0.0.1.evil.example", False),
        ("localhost@evil.example", False),
        ("evil.example#@127.0.0.1", False),
        ("127.0.0.1/evil.example", False),
        ("", False),
        ("[", False),
    ],
)
async def test_a_foreign_host_is_refused_even_with_the_cookie(
    client: httpx.AsyncClient, host: str, answered: bool
) -> None:
    """A page whose name was rebound to this host sends its own host name, and is refused."""
    await client.get("/", params={"token": TOKEN})

    assert is_loopback(host) == answered
    assert ((await client.get("/", headers={"Host": host})).status_code == 200) == answered


async def test_it_only_reads(client: httpx.AsyncClient) -> None:
    """Only GET and HEAD are answered."""
    await client.get("/", params={"token": TOKEN})

    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert (await client.request(method, "/runs/made")).status_code == 405


async def test_every_answer_has_the_policy(client: httpx.AsyncClient) -> None:
    """Refusals and missing pages too; the policy allows no inline script and no other host."""
    before = await client.get("/")
    await client.get("/", params={"token": TOKEN})

    for answer in (before, await client.get("/"), await client.get("/runs/no-such-run")):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "path",
    [
        "/runs/..%2f..%2fetc",
        "/runs/made/rollouts/..%2f/0",
        "/runs/made/rollouts/x/99999",
        "/runs/%0a",
    ],
)
async def test_other_names_show_nothing(client: httpx.AsyncClient, path: str) -> None:
    """A URL that names no run and no rollout gives a 404, not an internal error."""
    await client.get("/", params={"token": TOKEN})

    assert (await client.get(path)).status_code == 404


class Elements(HTMLParser):
    """Collects the elements that a browser would see in a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.links: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.links |= {value or "" for name, value in attrs if name in ("href", "src", "action")}


async def test_hostile_text_is_text_on_every_page(store: LocalStore, show: Show) -> None:
    """Injected markup in messages, calls, patches, logs, test names, failures and queries creates
    no element, attribute or URL, and no text is hidden or reversed."""
    clean = await _seen(store, show, "clean", ("fine",))
    dirty = await _seen(store, show, "dirty", CORPUS)

    assert dirty.tags <= clean.tags
    assert dirty.attributes <= clean.attributes
    assert all(link.startswith(("/", "?")) and not link.startswith("//") for link in dirty.links)


async def _seen(store: LocalStore, show: Show, run: str, texts: tuple[str, ...]) -> Elements:
    found = Elements()
    every = "\n".join(texts)
    said = turns(texts=(every, every))
    more = [
        said[0].model_copy(
            update={
                "index": 50 + number,
                "chain": "agent-" + _utf8(text),
                "parent_chain": "main",
                "engine": _utf8(text),
                "new_messages": _json([message(text, text, tool_calls=[_call(text)])]),
                "answer": _json(message("assistant", text, reasoning_content=text, tool_calls=[_call(text)])),
            }
        )
        for number, text in enumerate(texts)
    ]  # fmt: skip
    well_formed = _utf8(every)
    await write_rollout(
        store, run, said=[*said, *more], patch=_utf8(every).encode(),
        log=_utf8(every).encode(), failing=well_formed, reason=well_formed,
    )  # fmt: skip
    await write_rollout(store, run, sample=1, failure=well_formed, said=more)
    one = f"/runs/{run}/rollouts/h11-0.14.0"
    pages = [f"/runs/{run}", one, f"{one}/0", f"{one}/0?page=2", f"{one}/1", f"{one}/0/tokens"]
    pages += [f"{one}/0/patch", f"{one}/0/tests", f"{one}/0/files", f"{one}/0/beside/1"]
    pages += [f"/runs/{run}?q={_quoted(text)}" for text in texts[:3]]
    pages += [f"/search?q={_quoted(text)}&ending={_quoted(text)}" for text in texts]
    for page in pages:
        text = await show(page)
        assert not set(text) & set("\x00\x1b\u202e\u2066\u200b\x02\x03")
        found.feed(text)
    return found


def _call(text: str) -> dict[str, object]:
    return {
        "id": text,
        "function": {"name": text, "arguments": _json({text: text, "command": text})},
    }


def _utf8(text: str) -> str:
    """Without JSON escapes, half of a surrogate pair cannot be written."""
    return text.encode("utf-8", "replace").decode()


def _json(value: object) -> str:
    return json.dumps(value)


def _quoted(text: str) -> str:
    return quote(_utf8(text))


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_templates_turn_nothing_off(template: Path) -> None:
    """No template marks a value as safe, contains a script or a style, or leaves an attribute's
    value unquoted."""
    text = template.read_text()

    assert not re.search(r"\|\s*safe|autoescape|style=|\son\w+=", text)
    assert not re.search(r"=\s*{{", text)
    assert re.findall(r"<script[^>]*>(.*?)</script>", text, re.S) in ([], [""])
