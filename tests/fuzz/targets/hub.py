"""A local hub with changed responses: nothing is written outside the cache."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from headrace.models.registry.fetch_hub import fetch_hub
from headrace.models.registry.hub_id import HubId
from tests.fuzz.mutate import TEXTS, json_bytes, mutated_bytes, mutated_value
from tests.support.checkpoints import WHOLE_CONFIG, shard, tensor
from tests.support.hub_server import HubServer, point_at

_MODEL = {
    "config.json": json.dumps(WHOLE_CONFIG).encode(),
    "model.safetensors": shard({"a": tensor("U8", [400], 0)}, 400),
    "tokenizer.json": b"{}",
}
_HEADERS = (
    "ETag", "X-Linked-ETag", "X-Linked-Size", "X-Repo-Commit", "Location", "Accept-Ranges", "Content-Range",
    "Content-Type",
)  # fmt: skip
_HEADER_VALUES = (
    *(text for text in TEXTS if text.isascii()and text.isprintable()), "../../../../evil", "/tmp/headrace-evil",
    '"../x"', "-1", "99999999999", "http://localhost:1/", "file:///etc/passwd", "//evil", "bytes 0-1/2", "gzip",
    "W/\"x\"", "0"*40, "0"*64,
)  # fmt: skip


class Answers:
    """JSON of the API, headers and bytes of files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._hub = HubServer()
        self._hub.__enter__()
        self._hub.add("org/name", _MODEL)
        point_at(self._hub.url, folder / "cache", pytest.MonkeyPatch())

    def make(self, chance: random.Random) -> tuple[str, int, str, str]:
        where = chance.choice(("api", "api", "api", "header", "bytes"))
        return where, chance.getrandbits(32), chance.choice(_HEADERS), chance.choice(_HEADER_VALUES)

    def run(self, given: tuple[str, int, str, str]) -> None:
        where, seed, header, told = given

        def lie(request: str, status: int, body: bytes, headers: dict[str, str]) -> Any:
            chance = random.Random(f"{seed}{request.rsplit(':', 1)[0]}")
            if where == "api" and "/api/" in request and status == 200:
                body = json_bytes(chance, mutated_value(chance, json.loads(body)))
            elif where == "header" and "/api/" not in request and chance.random() < 0.7:
                headers = {**headers, header: told}
            elif where == "bytes" and request.startswith("GET") and chance.random() < 0.5:
                body = mutated_bytes(chance, body)
            return status, body, headers

        self._hub.lie = lie
        try:
            fetch_hub(HubId("org/name"))
        finally:
            self._hub.requests.clear()
            left = {path.name for path in self._folder.iterdir()} - {"cache"}
            shutil.rmtree(self._folder / "cache", ignore_errors=True)
            assert not left, left
            assert not Path("/tmp/headrace-evil").exists()
