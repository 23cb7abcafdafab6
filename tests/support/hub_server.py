"""A small local model hub with the HTTP protocol that downloads need.

    with HubServer() as hub:
        hub.add("org/name", {"config.json": b"{}", "model.safetensors": weights})
        point_at(hub.url, cache, monkeypatch)

Files ending in .safetensors or .gguf are large-file objects: they have a sha256 and are served by redirect from
/cdn with Range support; other files are served directly. `requests` lists each request as "METHOD path".
"""

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

_LARGE = (".safetensors", ".gguf")
Lie = Callable[[str, int, bytes, dict[str, str]], tuple[int, bytes, dict[str, str]]]


@dataclass
class Repo:
    """One repository at one commit."""

    files: dict[str, bytes]
    commit: str
    licence: str = "mit"
    gated: bool = False  # its card is public, its files are not
    private: bool = False
    revisions: set[str] = field(default_factory=lambda: {"main"})


class HubServer:
    """The server, in a thread during the `with` block."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[str] = []
        self.truncate: set[str] = set()  # file names whose next transfer breaks off half-way
        self.damage: set[str] = set()  # file names that are served with other bytes than they should have
        self.stall: threading.Event | None = None  # set: transfers stop half-way until the client leaves
        self.pace_s = 0.0  # seconds that every 64 KiB of a large file take
        self.status: int | None = None  # answer everything with this
        # ("METHOD path", status, body, headers) -> what is sent in their place
        self.lie: Lie = lambda _request, status, body, headers: (status, body, headers)
        self.endless: set[str] = set()  # ends of paths whose body has no end, of which this much was sent at most:
        self.sent_without_end = 0
        self.whole = False  # ignore ranges
        self.sent = 0  # bytes of bodies
        self.tokens: list[str] = []  # "METHOD path" of requests that came with a token
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{port}"
        # Another host name, as the real one is: redirects within the hub's own host are followed for metadata too.
        self.cdn = f"http://localhost:{port}/cdn"

    def add(self, name: str, files: dict[str, bytes], **facts: Any) -> Repo:
        """Publish `files` as a new commit of the repository `name`."""
        digest = hashlib.sha1(b"".join(key.encode() + files[key] for key in sorted(files)), usedforsecurity=False)
        self.repos[name] = Repo(files, digest.hexdigest(), **facts)
        return self.repos[name]

    def fetched(self, name: str) -> int:
        """Return the number of times the content of file `name` was sent."""
        repo_files = {unquote(line).rsplit("/", 1)[-1] for line in self.requests if line.startswith("GET")}
        large = [hashlib.sha256(repo.files[name]).hexdigest() for repo in self.repos.values() if name in repo.files]
        names = {name, *large} & repo_files
        return sum(line.startswith("GET") and unquote(line).rsplit("/", 1)[-1] in names for line in self.requests)

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def point_at(url: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point huggingface_hub, which reads its environment at import, at this hub and cache folder."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(cache / "agent_harnesses.json"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.delenv("HF_TOKEN", raising=False)


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        """Ignore clients that were killed or disconnected."""


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body that waits for the acknowledgement of its headers takes 40 ms

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {urlsplit(self.path).path}")
        if "Authorization" in self.headers:
            self.hub.tokens.append(self.hub.requests[-1])
        parts = path.strip("/").split("/")
        if self.hub.status is not None:
            self._error(self.hub.status)
        elif parts[:2] == ["api", "models"] and len(parts) >= 4:
            self._api("/".join(parts[2:4]), parts[4:])
        elif parts[0] == "cdn":
            self._large(parts[1])
        elif len(parts) >= 5 and parts[2] == "resolve":
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self._error(404)

    def _repo(self, name: str, revision: str | None) -> Repo | None:
        repo = self.hub.repos.get(name)
        if repo is None or repo.private:
            self._error(401, "RepoNotFound")
            return None
        if revision is not None and revision not in repo.revisions and revision != repo.commit:
            self._error(404, "RevisionNotFound")
            return None
        return repo

    def _api(self, name: str, rest: list[str]) -> None:
        revision = "/".join(rest[1:]) if rest else None
        repo = self._repo(name, revision)
        if repo is None:
            return
        listing = [_entry(file, content) for file, content in sorted(repo.files.items())]
        if rest[:1] == ["tree"]:
            tree = [
                {"type": "file", "path": file, "size": entry["size"], "oid": entry["blobId"]}
                | ({"lfs": {**entry["lfs"], "oid": entry["lfs"]["sha256"]}} if "lfs" in entry else {})
                for file, entry in ((entry["rfilename"], entry) for entry in listing)
            ]
            self._json(tree)
            return
        self._json(
            {
                "id": name,
                "sha": repo.commit,
                "private": False,
                "gated": "manual" if repo.gated else False,
                "tags": [],
                "cardData": {"license": repo.licence},
                "siblings": listing,
            }
        )

    def _resolve(self, name: str, revision: str, file: str) -> None:
        repo = self._repo(name, revision)
        if repo is None:
            return
        if repo.gated:
            self._error(401, "GatedRepo")
        elif file not in repo.files:
            self._error(404, "EntryNotFound")
        else:
            content = repo.files[file]
            entry = _entry(file, content)
            headers = {"X-Repo-Commit": repo.commit, "ETag": f'"{entry["blobId"]}"'}
            if "lfs" in entry:
                sha256 = entry["lfs"]["sha256"]
                headers |= {
                    "X-Linked-Size": str(len(content)),
                    "X-Linked-ETag": f'"{sha256}"',
                    "Location": f"{self.hub.cdn}/{sha256}",
                }
                self._send(302, b"", headers)
            else:
                self._send(200, content, headers)

    def _large(self, sha256: str) -> None:
        for repo in self.hub.repos.values():
            for file, content in repo.files.items():
                if hashlib.sha256(content).hexdigest() == sha256:
                    self._transfer(file, bytes(len(content)) if file in self.hub.damage else content)
                    return
        self._error(404)

    def _transfer(self, file: str, content: bytes) -> None:
        asked = self.headers.get("Range")
        asked = None if self.hub.whole else asked
        begin, _, last = (asked or "bytes=0-").removeprefix("bytes=").partition("-")
        body = content[int(begin) : int(last) + 1 if last else None]
        headers = {"Accept-Ranges": "bytes"}
        if asked:
            headers["Content-Range"] = f"bytes {begin}-{int(begin) + len(body) - 1}/{len(content)}"
        if file in self.hub.truncate or self.hub.stall is not None:
            self.hub.truncate.discard(file)
            self._send(206 if asked else 200, body[: len(body) // 2], headers, promised=len(body))
            self.close_connection = True
            if self.hub.stall is not None:
                self.hub.stall.set()
                self.connection.settimeout(30)
                with contextlib.suppress(OSError):
                    self.rfile.read(1)  # returns when the client goes away
        else:
            self._send(206 if asked else 200, body, headers)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, code: str | None = None) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": code} if code else {}
        self._send(status, b"{}", {"Content-Type": "application/json", **headers})

    def _send(self, status: int, body: bytes, headers: dict[str, str], promised: int | None = None) -> None:
        path = unquote(urlsplit(self.path).path)
        status, body, headers = self.hub.lie(f"{self.command} {path}", status, body, headers)
        self.send_response(status)
        if self.command == "GET" and any(path.endswith(end) for end in self.hub.endless):
            self._send_without_end(body, headers)
            return
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body) if promised is None else promised))
        self.end_headers()
        if self.command != "HEAD":
            for start in range(0, len(body), 1 << 16):
                self.hub.sent += self.wfile.write(body[start : start + (1 << 16)])
                time.sleep(self.hub.pace_s)
            self.wfile.flush()

    def _send_without_end(self, body: bytes, headers: dict[str, str]) -> None:
        """Send the body, then zeros until the client disconnects."""
        self.close_connection = True
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)
            while self.hub.sent_without_end < 1 << 30:
                self.hub.sent_without_end += self.wfile.write(bytes(1 << 20))


def _entry(file: str, content: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    entry: dict[str, Any] = {"rfilename": file, "size": len(content), "blobId": blob}
    if file.endswith(_LARGE):
        entry["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry
