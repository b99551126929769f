"""The key of an engine is tried before work starts, and a stack runs with the key it was started with."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from perdure.cli.commands.doctor import examine
from perdure.errors import ConfigurationError
from perdure.settings.settings_tree import Settings
from perdure.stack.engine_presence import check_same_engine, key_digest
from perdure.stack.stack_state import StackState, read, write

RIGHT, WRONG = "sk-right-0123456789abcdefghij", "sk-wrong-0123456789abcdefghij"


class Endpoint(BaseHTTPRequestHandler):
    """Lists its models for one key, sent as OpenAI or as Anthropic wants it."""

    def do_GET(self) -> None:
        sent = self.headers["x-api-key"] or self.headers["authorization"] or ""
        known = sent.removeprefix("Bearer ") == RIGHT
        body = b'{"data": []}' if known else b'{"error": {"message": "bad key %s"}}' % sent.encode()
        self.send_response(200 if known else 401)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        """It has no token route, and sees no key there."""
        assert not self.headers["authorization"]
        self.send_response(404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Tests print nothing."""


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("api", ["OPENAI", "ANTHROPIC"])
def test_doctor_tries_the_key(
    tmp_path: Path, endpoint: str, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that the endpoint refuses is missing: the variable is named, the key is never shown."""
    monkeypatch.setenv(f"{api}_BASE_URL", endpoint)
    found = []
    for key in (WRONG, RIGHT):
        monkeypatch.setenv(f"{api}_API_KEY", key)
        findings = list(examine(Settings(home=tmp_path)))
        found += [finding for finding in findings if finding.name == "engine"]

    assert [finding.level for finding in found] == ["missing", "ok"]
    assert "answered 401" in found[0].detail
    assert f"Check the key in {api}_API_KEY" in found[0].detail
    assert WRONG not in str(found)


def test_doctor_tries_the_key_that_a_rollout_would_use(
    tmp_path: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of kind `auto`, a server without a token endpoint gets OpenAI's key."""
    monkeypatch.setenv("OPENAI_API_KEY", WRONG)
    settings = Settings(home=tmp_path, engine={"url": endpoint})
    wrong = next(one for one in examine(settings) if one.name == "engine")
    monkeypatch.setenv("OPENAI_API_KEY", RIGHT)
    right = next(one for one in examine(settings) if one.name == "engine")

    assert (wrong.level, right.level) == ("missing", "ok")
    assert "Check the key in OPENAI_API_KEY" in wrong.detail


def running(settings: Settings, url: str) -> StackState:
    named = {"url": url, "kind": "auto", "model": "", "tokenizer": settings.engine.tokenizer}
    return StackState(
        *("ready", 1, 1, "t", "default", "", "http://gateway", url),
        engine_settings=named,
        engine_key=key_digest(settings),
    )


@pytest.mark.parametrize("started_with", [WRONG, ""])
def test_a_stack_with_another_key_is_not_used(
    tmp_path: Path, started_with: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A changed key is refused with the fix, and the stack's state has neither key."""
    monkeypatch.setenv("OPENAI_BASE_URL", "http://a/v1")
    monkeypatch.setenv("OPENAI_API_KEY", started_with)
    settings = Settings(home=tmp_path)
    state = running(settings, "http://a/v1")
    check_same_engine(settings, state)

    monkeypatch.setenv("OPENAI_API_KEY", RIGHT)
    with pytest.raises(
        ConfigurationError, match=r"OPENAI_API_KEY has changed.*run `perdure down`"
    ) as told:
        check_same_engine(settings, state)

    assert not any(key in f"{asdict(state)} {told.value}" for key in (RIGHT, WRONG))
    monkeypatch.delenv("OPENAI_API_KEY")
    check_same_engine(settings, state)  # a shell without the key uses the stack's


def test_a_stack_of_an_earlier_version_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state does not say which key it was started with."""
    monkeypatch.setenv("OPENAI_BASE_URL", "http://a/v1")
    monkeypatch.setenv("OPENAI_API_KEY", RIGHT)
    settings = Settings(home=tmp_path)
    write(settings, running(settings, "http://a/v1"))
    file = tmp_path / "run" / "state.json"
    state = json.loads(file.read_bytes())
    del state["engine_key"]
    file.write_text(json.dumps(state))

    earlier = read(settings)

    assert earlier is not None
    check_same_engine(settings, earlier)
