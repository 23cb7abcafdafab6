"""A malicious hub: nothing is written outside its cache, no token goes to another host, its files are refused."""

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.models.registry.fetch_hub import fetch_header, fetch_hub
from headrace.models.registry.hub_id import HubId
from headrace.runtime.errors import FetchError, HeadraceError
from tests.support.checkpoints import WHOLE_CONFIG, shard, tensor
from tests.support.gguf_models import write_gguf
from tests.support.hub_server import HubServer

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # huggingface_hub keeps its connections open

WEIGHTS = shard({"a": tensor("U8", [100_000], 0)}, 100_000)
MODEL = {"config.json": json.dumps(WHOLE_CONFIG).encode(), "model.safetensors": WEIGHTS, "tokenizer.json": b"{}"}
HUB = HubId("org/name")
OUTSIDE = ("../../../../evil", "/tmp/headrace-evil", "..", "a/../../../../evil", "\\..\\evil", "x" * 300, "", "\0")


def refused(tmp_path: Path) -> str:
    """Fetching fails in one line, and leaves nothing but the cache."""
    with pytest.raises(HeadraceError) as caught:
        fetch_hub(HUB)
    assert {path.name for path in tmp_path.iterdir()} <= {"cache"}
    assert not Path("/tmp/headrace-evil").exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def of_info(change: Callable[[dict[str, Any]], None]) -> Any:
    """A lie about what the API says of the repository."""

    def lie(request: str, status: int, body: bytes, headers: dict[str, str]) -> Any:
        if "/api/models/" in request and status == 200:
            told = json.loads(body)
            if isinstance(told, dict):
                change(told)
            body = json.dumps(told).encode()
        return status, body, headers

    return lie


def of_headers(**lies: str) -> Any:
    """A lie in the headers of files."""

    def lie(request: str, status: int, body: bytes, headers: dict[str, str]) -> Any:
        named = {name.replace("_", "-"): value for name, value in lies.items()}
        return status, body, {**headers, **named} if "/resolve/" in request else headers

    return lie


@pytest.mark.parametrize("name", [*OUTSIDE[:6], "main"])
def test_a_commit_that_is_no_hash_is_refused(hub: HubServer, tmp_path: Path, name: str) -> None:
    hub.add("org/name", MODEL)
    hub.lie = of_info(lambda told: told.update(sha=name))
    assert "hub" in refused(tmp_path)


@pytest.mark.parametrize("header", ["X_Repo_Commit", "ETag", "X_Linked_ETag"])
@pytest.mark.parametrize("name", OUTSIDE[:6])
def test_paths_in_headers_are_refused(hub: HubServer, tmp_path: Path, header: str, name: str) -> None:
    hub.add("org/name", MODEL)
    hub.lie = of_headers(**{header: f'"{name}"' if "ETag" in header else name})
    refused(tmp_path)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/model.safetensors", "model/../../../x.safetensors", "model\0.safetensors"]
)
def test_file_names_that_leave_the_folder_write_nothing(hub: HubServer, tmp_path: Path, name: str) -> None:
    hub.add("org/name", MODEL)
    entry = {"rfilename": name, "size": 4, "blobId": "0" * 40}
    hub.lie = of_info(lambda told: told["siblings"].append(entry))
    with contextlib.suppress(HeadraceError):
        fetch_hub(HUB)  # it is not chosen
    assert {path.name for path in tmp_path.iterdir()} <= {"cache"}


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_files_that_differ_from_their_digest_are_refused(hub: HubServer, tmp_path: Path, name: str) -> None:
    hub.add("org/name", MODEL)
    key = hashlib.sha256(MODEL[name]).hexdigest() if name.endswith(".safetensors") else name

    def lie(request: str, status: int, body: bytes, headers: dict[str, str]) -> Any:
        return status, body[::-1] if request.startswith("GET") and request.endswith(key) else body, headers

    hub.lie = lie
    assert "damaged" in refused(tmp_path)
    hub.lie = lambda _request, *told: told
    files = fetch_hub(HUB)
    assert (files.folder / name).read_bytes() == MODEL[name]


@pytest.mark.sampled(always=["api/models"])  # JSON, in memory; the others are files
@pytest.mark.parametrize(
    "end",
    ["config.json", "tokenizer.json", hashlib.sha256(WEIGHTS).hexdigest(), "api/models/org/name"],
)
def test_an_endless_body_is_refused_before_300_mib(hub: HubServer, tmp_path: Path, end: str) -> None:
    hub.add("org/name", MODEL)
    hub.endless.add(end)
    refused(tmp_path)
    assert hub.sent_without_end < 300 << 20
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 300 << 20


def test_an_endless_gguf_is_read_up_to_its_header(hub: HubServer, tmp_path: Path) -> None:
    """Its header is read in parts, of which no more is taken than was asked for."""
    content = write_gguf(tmp_path / "m.gguf", "llama").read_bytes() + bytes(2 << 20)
    hub.add("org/name", {"m-Q8_0.gguf": content})
    hub.endless.add(hashlib.sha256(content).hexdigest())
    assert fetch_header(HUB).container is not None
    assert hub.sent_without_end < 64 << 20


def test_an_endless_config_is_refused(hub: HubServer) -> None:
    hub.add("org/name", MODEL)
    hub.endless.add("config.json")
    with pytest.raises(FetchError):
        fetch_header(HUB)
    assert hub.sent_without_end < 300 << 20


@pytest.mark.parametrize(
    "to",
    [
        "http://localhost:{port}/cdn/{sha}",
        "file:///etc/passwd",
        "ftp://localhost/x",
        "http://[::1",
        "//",
        "javascript:x",
        "gopher://x",
    ],
)
def test_the_hub_token_is_not_sent_to_other_hosts(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.add("org/name", MODEL)
    port = hub.url.rsplit(":", 1)[1]
    sha = hashlib.sha256(WEIGHTS).hexdigest()

    def lie(request: str, status: int, body: bytes, headers: dict[str, str]) -> Any:
        if "/resolve/" in request and request.endswith(".safetensors"):
            headers = {**headers, "Location": to.format(port=port, sha=sha)}
        return status, body, headers

    hub.lie = lie
    if "cdn" in to:
        fetch_hub(HUB)
    else:
        refused(tmp_path)
    assert hub.tokens
    assert not any("/cdn/" in request for request in hub.tokens)


@pytest.mark.parametrize(
    "change",
    [
        {"siblings": None},
        {"siblings": [{}]},
        {"siblings": [1]},
        {"siblings": {"a": 1}},
        {"sha": None},
        {"sha": 7},
        {"cardData": 3},
        {"id": None},
    ],
)
def test_malformed_answers_write_no_files(hub: HubServer, tmp_path: Path, change: dict[str, Any]) -> None:
    hub.add("org/name", MODEL)
    hub.lie = of_info(lambda told: told.update(change))
    with contextlib.suppress(HeadraceError):
        fetch_hub(HUB)
    assert {path.name for path in tmp_path.iterdir()} <= {"cache"}
