"""An S3 server in memory that answers after a fixed time and counts its requests.

    python -m benchmarks.s3_server --latency 0.03

It supports what the store needs: conditional PUT, GET with a range, HEAD, DELETE, multi-object delete and
lists. `GET /-/counts` returns the requests and the bytes written so far; `GET /-/names` returns both by
kind of object.
"""

import argparse
import asyncio
import hashlib
import json
import re
import socket
from collections import Counter
from urllib.parse import parse_qs
from xml.sax.saxutils import escape, unescape

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

PAGE = 1000


class MemoryS3:
    """One bucket for every path."""

    def __init__(self, latency_s: float) -> None:
        self._latency_s = latency_s
        self._objects: dict[str, bytes] = {}
        self._counts: Counter[str] = Counter()
        self._asked: Counter[str] = Counter()
        self._moved: Counter[str] = Counter()
        """Requests, and bytes of request and response bodies, by method and kind of object."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        answer = await self._answer(request)
        await answer(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        if request.url.path == "/-/counts":
            size = sum(map(len, self._objects.values()))
            held = {"objects": len(self._objects), "held": size}
            return JSONResponse({**self._counts, **held})
        if request.url.path == "/-/names":
            return JSONResponse({k: [n, self._moved[k]] for k, n in self._asked.items()})
        body = await request.body()
        await asyncio.sleep(self._latency_s)
        _, _, key = request.url.path.lstrip("/").partition("/")
        if request.method == "GET" and "list-type" in request.query_params:
            prefix = request.query_params.get("prefix", "")
            listed = self._list(parse_qs(request.url.query))
            return self._counted("LIST", prefix, listed, len(listed.body))
        if request.method == "PUT":
            content = _content(request, body)
            stored = self._put(key, content, request.headers)
            return self._counted("PUT", key, stored, len(content))
        if request.method == "POST":
            names = [unescape(name) for name in re.findall("<Key>(.*?)</Key>", body.decode())]
            for name in names:
                self._objects.pop(name, None)
            done = Response("<DeleteResult/>", media_type="application/xml")
            return self._counted("DELETE MANY", names[0], done, len(body))
        if request.method == "DELETE":
            self._objects.pop(key, None)
            return self._counted("DELETE", key, Response(status_code=204), 0)
        if request.method == "HEAD" and key in self._objects:
            data = self._objects[key]
            about = {"content-length": str(len(data)), "etag": _etag(data)}
            return self._counted("HEAD", key, Response(headers=about), 0)
        found = self._get(key, request.headers.get("range"))
        return self._counted(request.method, key, found, len(found.body))

    def _counted(self, method: str, key: str, answer: Response, size: int) -> Response:
        self._counts[f"{method} {_kind(key)}"] += 1
        what = f"{method} {_name(key)}"
        self._asked[what] += 1
        self._moved[what] += size
        return answer

    def _put(self, key: str, data: bytes, headers: object) -> Response:
        if headers.get("if-none-match") == "*" and key in self._objects:  # type: ignore[attr-defined]  # starlette's
            return _error(412, "PreconditionFailed")
        self._objects[key] = data
        self._counts["bytes"] += len(data)
        return Response(headers={"etag": _etag(data)})

    def _get(self, key: str, wanted: str | None) -> Response:
        if key not in self._objects:
            return _error(404, "NoSuchKey")
        data = self._objects[key]
        if not wanted:
            return Response(data, headers={"etag": _etag(data)})
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        part = data[int(first) : int(last) + 1]
        place = {"content-range": f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"}
        return Response(part, 206, headers={"etag": _etag(data), **place})

    def _list(self, query: dict[str, list[str]]) -> Response:
        prefix = query.get("prefix", [""])[0]
        after = query.get("continuation-token", query.get("start-after", [""]))[0]
        keys = sorted(k for k in self._objects if k.startswith(prefix) and k > after)
        page, more = keys[:PAGE], len(keys) > PAGE
        following = (
            f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        )
        entries = "".join(f"<Contents><Key>{escape(key)}</Key></Contents>" for key in page)
        truncated = f"<IsTruncated>{str(more).lower()}</IsTruncated>"
        text = f"<ListBucketResult>{truncated}{following}{entries}</ListBucketResult>"
        return Response(text, media_type="application/xml")


def _kind(key: str) -> str:
    """The purpose of an object. Leases and results are `other`."""
    if "/journal/" not in key:
        return "other"
    return "record" if key.rpartition("/")[2] else "session"


def _name(key: str) -> str:
    """The name of an object in its folder, without the parts that differ between rollouts."""
    if (kind := _kind(key)) != "other":
        return f"journal {kind}"
    folder, _, name = key.rpartition("/")
    return re.sub(r"[0-9a-f]{8,}|\d+", "*", name or f"{folder.rpartition('/')[2]}/")


def _content(request: Request, body: bytes) -> bytes:
    """The object: boto3 may send it in chunks with checksums."""
    if "aws-chunked" not in request.headers.get("content-encoding", ""):
        return body
    parts: list[bytes] = []
    position = 0
    while True:
        end = body.index(b"\r\n", position)
        size = int(body[position:end].split(b";")[0], 16)
        if not size:
            return b"".join(parts)
        parts.append(body[end + 2 : end + 2 + size])
        position = end + 2 + size + 2


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


def _error(status: int, code: str) -> Response:
    return Response(f"<Error><Code>{code}</Code></Error>", status, media_type="application/xml")


async def _serve(latency_s: float, host: str) -> None:
    listener = socket.create_server((host, 0), backlog=1024)
    config = uvicorn.Config(MemoryS3(latency_s), log_config=None, access_log=False, lifespan="off")
    print(json.dumps({"url": f"http://{host}:{listener.getsockname()[1]}"}), flush=True)
    await uvicorn.Server(config).serve([listener])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.s3_server")
    parser.add_argument("--latency", type=float, default=0.03, help="seconds per request")
    parser.add_argument("--host", default="127.0.0.1")
    options = parser.parse_args()
    asyncio.run(_serve(options.latency, options.host))


if __name__ == "__main__":
    main()
