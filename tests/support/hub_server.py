"""A small stand-in for the Hugging Face hub on loopback, with the endpoints and headers that its client uses.

It follows the hub's HTTP interface: model info, the tree of a commit, `resolve` with `ETag` and `X-Repo-Commit`, a
redirect for large files, `Range`, and errors in `X-Error-Code` and `X-Error-Message`.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repository:
    files: dict[str, bytes] = field(default_factory=dict)
    # (status, {header: value}) as the response to every request, or only to those for a file's content.
    refusal: tuple[int, dict[str, str]] | None = None
    file_refusal: tuple[int, dict[str, str]] | None = None


@dataclass
class Hub:
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, Range
    cut_once: set[str] = field(default_factory=set)  # files whose next response breaks off half-way
    hang: set[str] = field(default_factory=set)  # files whose response stops half-way, with the connection left open
    hanging: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def fetched(self) -> list[str]:
        """The names of the files whose content was requested, in order."""
        return [path.rsplit("/", 1)[1] for method, path, _ in self.requests if method == "GET" and "/api/" not in path]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: object) -> None:
        """Log nothing: `Hub.requests` has the requests."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            return self._api("/".join(parts[2:4]), parts[4:])
        if parts[0] == "cdn":
            return self._content("/".join(parts[1:3]), parts[3])
        if parts[2] == "resolve":
            return self._resolve("/".join(parts[:2]), "/".join(parts[4:]))
        return self._refuse(404, {})

    def _api(self, name: str, rest: list[str]) -> None:
        repository = self.hub.repositories.get(name)
        if repository is None:
            return self._refuse(404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        if repository.refusal:
            return self._refuse(*repository.refusal)
        if rest[:1] == ["revision"] and rest[1] not in ("main", COMMIT):
            return self._refuse(404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
        if rest[:1] == ["tree"]:
            return self._json([self._entry(path, data) for path, data in repository.files.items()])
        return self._json({"id": name, "sha": COMMIT, "siblings": [{"rfilename": path} for path in repository.files]})

    def _entry(self, path: str, data: bytes) -> dict:
        entry = {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        if path.endswith(".safetensors"):
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return entry

    def _resolve(self, name: str, path: str) -> None:
        repository = self.hub.repositories[name]
        if repository.file_refusal:
            return self._refuse(*repository.file_refusal)
        if not path.endswith(".safetensors"):
            return self._content(name, path)
        data = repository.files[path]
        self.send_response(302)
        self.send_header("Location", f"{self.hub.url}/cdn/{name}/{path}")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("X-Linked-Etag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Linked-Size", str(len(data)))
        self.send_header("Content-Length", "0")
        return self.end_headers()

    def _content(self, name: str, path: str) -> None:
        data = self.hub.repositories[name].files[path]
        start = 0
        if asked := self.headers.get("Range"):
            start = int(asked.removeprefix("bytes=").split("-")[0])
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        else:
            self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if self.command == "GET":
            self._body(path, data[start:])

    def _body(self, path: str, data: bytes) -> None:
        if path in self.hub.cut_once or path in self.hub.hang:
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.close_connection = True
            if path in self.hub.hang:
                self.hub.hanging.set()
                self.hub.released.wait(60)
            self.hub.cut_once.discard(path)
        else:
            self.wfile.write(data)

    def _json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": "0", **headers}.items():
            self.send_header(key, value)
        self.end_headers()


@contextmanager
def serve() -> Iterator[Hub]:
    """Serve an empty `Hub` on a free port of loopback until the block ends."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        server.server_close()
