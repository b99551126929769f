"""SWE-bench Multimodal rows in the layout of swebench 5: binary files by URL."""

import base64
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from perdure.errors import InstanceError
from perdure.graders.protocols.test_lists import SwebenchGrader
from perdure.instances.rows.formats import multimodal
from perdure.instances.rows.row_conversion import to_instance

PIXELS = bytes(range(256))
PATCH = (
    "diff --git a/test/a.js b/test/a.js\n--- a/test/a.js\n+++ b/test/a.js\n@@ -1 +1 @@\n-a\n+b\n"
)
ROW: dict[str, Any] = {
    "instance_id": "chartjs__Chart.js-1",
    "repo": "chartjs/Chart.js",
    "version": "4.0",
    "problem_statement": "The line is dotted.",
    "patch": PATCH,
    "test_patch": PATCH,
    "FAIL_TO_PASS": '["draws"]',
    "PASS_TO_PASS": "[]",
    "image": "docker.io/swebench/sweb.eval.x86_64.chartjs_1776_chart.js-1:latest",
    "log_parser": "parse_log_chart_js",
    "eval_type": "fail_only",
    "eval_script": (
        "#!/bin/bash\nset -uxo pipefail\ncd /testbed\n: '>>>>> Start Test Output'\npnpm test\n"
        ": '>>>>> End Test Output'\n"
    ),
}


class Files(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        found = self.path == "/a.png"
        self.send_response(200 if found else 404)
        self.end_headers()
        self.wfile.write(PIXELS if found else b"")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def files() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Files)
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    serving.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    serving.join()
    server.server_close()


def test_binary_files_of_both_patches_are_fetched(files: str) -> None:
    """They become hidden files of the row; metadata names the statement's pictures."""
    inline = {"path": "test/b.png", "content": base64.b64encode(b"\0b").decode()}
    assets = {
        "test_patch": [{"path": "test/a.png", "url": f"{files}/a.png"}],
        "patch": [inline],
        "problem_statement": ["https://example.invalid/bug.png"],
    }
    instance = to_instance({**ROW, "image_assets": assets}, "d", 1)
    SwebenchGrader().validate(instance)

    assert instance.grading.files == {"test/a.png": PIXELS, "test/b.png": b"\0b"}
    assert instance.grading.eval_type == "fail_only"
    assert instance.metadata["images"] == ["https://example.invalid/bug.png"]
    assert instance.data_source == "swe-bench-multimodal"


@pytest.mark.parametrize(
    ("assets", "said"),
    [
        ({"test_patch": ["https://x/a.png"]}, "test_patch`: give a list of"),
        ({"test_patch": [{"url": "https://x"}]}, "`path` is None"),
        ({"test_patch": [{"path": "../a", "url": "https://x"}]}, "`path` is '../a'"),
        ({"test_patch": [{"path": ".git/config", "url": "https://x"}]}, "below the repository"),
        ({"test_patch": [{"path": "a", "url": "file:///etc/passwd"}]}, "give an http address"),
        ({"test_patch": [{"path": "a", "content": "%"}]}, "cannot be read.*base64"),
        ({"videos": ["a"]}, "unknown key `videos`"),
    ],
)
def test_error_names_the_asset(assets: dict[str, Any], said: str) -> None:
    """An asset with a bad path or without content is refused with its row and field."""
    with pytest.raises(InstanceError, match=f"row 17 has a bad `image_assets.*{said}"):
        to_instance({**ROW, "image_assets": assets}, "d", 17)


def test_an_address_without_a_file_is_named(files: str) -> None:
    """The error has the server's answer and both fixes."""
    assets = {"patch": [{"path": "a", "url": f"{files}/b.png"}]}
    with pytest.raises(InstanceError, match=r"/b.png' cannot be read: .*404.*`content` in base64"):
        to_instance({**ROW, "image_assets": assets}, "d", 17)


def test_too_many_bytes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit covers all files of a row, because its instance contains them."""
    monkeypatch.setattr(multimodal, "MAX_BYTES", 3)
    two = [{"path": name, "content": base64.b64encode(b"12").decode()} for name in "ab"]
    with pytest.raises(InstanceError, match=r"`image_assets\.patch`: its files exceed"):
        to_instance({**ROW, "image_assets": {"patch": two}}, "d", 17)
