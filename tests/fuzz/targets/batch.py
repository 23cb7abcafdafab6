"""Batch input lines and continued result files: targets `batch-line` and `batch-output` of `tests.fuzz.target`."""

import json
import random
from pathlib import Path
from typing import Any

from headrace.app.answer.options import AnswerOptions
from headrace.app.batch.output import ResultFile, line_of
from headrace.app.batch.parse import BadLine, BatchDefaults, BatchLine, parse_lines
from headrace.app.batch.result import failure
from headrace.runtime.errors import HeadraceError
from tests.fuzz.mutate import json_bytes, mutated_bytes, mutated_value, text

_OPTIONS = {
    "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1, "presence_penalty": 0.5,
    "frequency_penalty": 0.5, "logit_bias": {"50": -100}, "seed": 7, "max_tokens": 16, "stop": ["\n", "x"],
    "thinking": False,
}  # fmt: skip
_ASKED = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
_LINES: tuple[dict[str, Any], ...] = (
    {"id": "q1", "prompt": "Why?", "system": "Be brief.", **_OPTIONS},
    {"id": 3, "messages": _ASKED, "temperature": 0.5},
    {"prompt": "Once", "raw": True, "stop": "x"},
    {"custom_id": "q", "method": "POST", "url": "/v1/chat/completions",
     "body": {"model": "tiny", "messages": _ASKED, "n": 1, "stream": False, "user": "u", **_OPTIONS}},
    {"custom_id": "r", "url": "/v1/completions", "body": {"prompt": "Once", "max_completion_tokens": 9}},
)  # fmt: skip
_DEFAULTS = BatchDefaults(options=AnswerOptions(max_tokens=9), system="short", model="tiny", names=frozenset({"tiny"}))


class Lines:
    """A few input lines. Each is accepted or refused, and can be answered with a failure."""

    def __init__(self, folder: Path) -> None:
        pass

    def make(self, chance: random.Random) -> list[bytes]:
        return [self._line(chance) for _ in range(chance.choice((1, 1, 3)))]

    def _line(self, chance: random.Random) -> bytes:
        document = mutated_value(chance, chance.choice(_LINES))
        if chance.random() < 0.2 and isinstance(document, dict):
            document["prompt"] = text(chance)
        raw = json_bytes(chance, document)
        if chance.random() < 0.2:
            raw = mutated_bytes(chance, raw)
        return raw

    def run(self, given: list[bytes]) -> None:
        for line in parse_lines(given, _DEFAULTS):
            assert isinstance(line, BatchLine | BadLine)
            error = HeadraceError("x")
            if isinstance(line, BadLine):
                error = line.error
                assert "\n" not in str(error)
                str(error).encode()  # no half of a surrogate pair
            written = line_of(failure(line, error))
            assert written.count(b"\n") == 1
            assert json.loads(written)


class OutputFile:
    """A result file with changed bytes: continued, or refused and left unchanged."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "out.jsonl"
        self._lines = parse_lines([json_bytes(random.Random(0), line) for line in _LINES], _DEFAULTS)
        self._numbers = {line.digest: line.number for line in self._lines}
        answered = [
            {"line": line.number, "id": 1, "request": line.digest, "text": "x", "error": None}
            for line in self._lines[:3]
        ]
        self._documents = [*answered, *(failure(line, HeadraceError("no")) for line in self._lines[3:])]

    def make(self, chance: random.Random) -> tuple[bytes, bool]:
        """Return a file, and whether its results have to be in the order of the lines."""
        documents: Any = self._documents
        if chance.random() < 0.5:
            documents = mutated_value(chance, self._documents)
        written = b"".join(json_bytes(chance, document) + b"\n" for document in documents)
        return mutated_bytes(chance, written, words=[b"\n", b"{}\n", b"[" * 3000]), chance.random() < 0.5

    def run(self, given: tuple[bytes, bool]) -> None:
        written, in_order = given
        self._path.write_bytes(written)
        try:
            file = ResultFile(self._path)
            try:
                file.begin(self._numbers, in_order=in_order)
                for line in self._lines:
                    if line.digest not in file.answered:
                        file.write(line, failure(line, HeadraceError("again")))
            finally:
                file.close()
        except HeadraceError:
            assert self._path.read_bytes() == written
            raise
        digests = [json.loads(line) for line in self._path.read_bytes().split(b"\n")[:-1]]
        assert len(digests) == len(self._lines)
