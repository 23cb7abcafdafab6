"""Result files (resumed, put in order, refused) and result streams."""

import io
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.app.batch.output import ResultFile, ResultStream, line_of
from headrace.app.batch.parse import BadLine, BatchDefaults, BatchLine, parse_lines
from headrace.app.batch.result import digest_of, failure
from headrace.runtime.errors import ContextLimitError, HeadraceError, NotEnoughMemoryError, UsageError

LINES = parse_lines([b'{"prompt": "%d"}' % number for number in range(6)], BatchDefaults())
NUMBERS = {line.digest: line.number for line in LINES}


def good(line: BatchLine | BadLine) -> dict[str, Any]:
    return {"line": line.number, "request": line.digest, "text": "é\n\x1b", "error": None}


def bad(line: BatchLine | BadLine) -> dict[str, Any]:
    return failure(line, UsageError("no"))


def numbers(path: Path) -> list[int]:
    return [json.loads(line)["line"] for line in path.read_bytes().splitlines()]


def opened(path: Path, *, in_order: bool = False) -> ResultFile:
    file = ResultFile(path)
    file.begin(NUMBERS, in_order=in_order)
    return file


def test_a_result_is_one_line_of_ascii() -> None:
    data = line_of(good(LINES[0]))
    assert data.isascii()
    assert (data.count(b"\n"), data.count(b"\x1b")) == (1, 0)


@pytest.mark.parametrize(
    ("error", "code", "status", "kind"),
    [
        (UsageError("no"), "invalid_request", 400, "invalid_request_error"),
        (ContextLimitError("too long"), "context_length_exceeded", 400, "invalid_request_error"),
        (NotEnoughMemoryError("too large"), "not_enough_memory", 507, "server_error"),
        (HeadraceError("the answer failed"), "failed", 500, "server_error"),
    ],
)
def test_errors_have_the_status_of_their_class(error: HeadraceError, code: str, status: int, kind: str) -> None:
    plain = failure(LINES[0], error)
    assert plain["error"] == {"code": code, "message": str(error)}
    found = failure(replace(LINES[0], form="chat.completion"), error)
    assert (found["response"]["status_code"], found["error"]["code"]) == (status, code)
    assert found["response"]["body"] == {"error": {"message": str(error), "type": kind, "param": None, "code": code}}


def test_answers_are_kept_and_errors_are_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "out"
    file = opened(path)
    file.write(LINES[2], good(LINES[2]))
    file.write(LINES[0], bad(LINES[0]))
    file.write(LINES[1], good(LINES[1]))
    file.close()
    assert numbers(path) == [3, 1, 2]
    path.chmod(0o640)
    file = opened(path)
    assert file.answered == {LINES[1].digest, LINES[2].digest}
    assert numbers(path) == [3, 2]
    file.write(LINES[0], good(LINES[0]))
    file.close()
    assert numbers(path) == [3, 2, 1]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_resume_in_order_after_failed_lines(tmp_path: Path) -> None:
    path = tmp_path / "out"
    written = [good(LINES[4]), bad(LINES[0]), good(LINES[2]), bad(LINES[3]), good(LINES[1])]
    path.write_bytes(b"".join(map(line_of, written)))
    file = opened(path, in_order=True)
    for number in (3, 0, 5):
        file.write(LINES[number], good(LINES[number]))
    file.close()
    assert path.read_bytes() == b"".join(line_of(good(line)) for line in LINES)


@pytest.mark.parametrize("cut", [1, 2, 30, 60])
def test_a_torn_line_is_dropped(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "out"
    whole = line_of(good(LINES[0]))
    path.write_bytes(whole + line_of(good(LINES[1]))[:-cut])
    file = opened(path)
    file.close()
    assert path.read_bytes() == whole
    assert file.answered == {LINES[0].digest}


def test_a_complete_file_is_not_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(line_of(good(LINES[0])))
    inode = path.stat().st_ino
    opened(path).close()
    assert path.stat().st_ino == inode


@pytest.mark.parametrize(
    "text",
    ["my notes\n", '{"prompt": "1"}\n', "[" * 99_999 + "\n", "{}\n", "\n", '{"request": 1}\n', "my notes", '{"id": "a'],
)
def test_a_file_with_other_lines_is_refused_and_unchanged(text: str, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    before = line_of(good(LINES[0])) + text.encode()
    path.write_bytes(before)
    with pytest.raises(UsageError, match="line 2"):
        ResultFile(path)
    assert path.read_bytes() == before


def test_results_of_other_requests_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out"
    before = line_of(good(LINES[0])) + line_of(good(LINES[1]))[:-5]
    path.write_bytes(before)
    file = ResultFile(path)
    with pytest.raises(UsageError, match="all 1 results"):
        file.begin({LINES[1].digest: 1}, in_order=False)
    file.close()
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_results_of_changed_lines_are_moved_and_the_others_kept(tmp_path: Path) -> None:
    path = tmp_path / "out"
    aside = tmp_path / "out.replaced"
    path.write_bytes(b"".join(line_of(good(line)) for line in LINES[:4]))
    path.chmod(0o600)
    aside.write_bytes(b"earlier\n")
    file = ResultFile(path)
    file.begin({line.digest: line.number for line in LINES[1:3]}, in_order=True)
    assert (file.replaced, file.replaced_path) == (2, aside)
    assert file.answered == {line.digest for line in LINES[1:3]}
    file.close()
    assert numbers(path) == [2, 3]
    assert aside.read_bytes() == b"earlier\n" + line_of(good(LINES[0])) + line_of(good(LINES[3]))


def test_no_result_is_dropped_where_it_cannot_be_moved(tmp_path: Path) -> None:
    path = tmp_path / "out"
    before = b"".join(line_of(good(line)) for line in LINES[:2])
    path.write_bytes(before)
    (tmp_path / "out.replaced").symlink_to(tmp_path / "notes")
    file = ResultFile(path)
    with pytest.raises(HeadraceError, match=r"out\.replaced"):
        file.begin({LINES[0].digest: 1}, in_order=False)
    file.close()
    assert path.read_bytes() == before
    assert not (tmp_path / "notes").exists()


def test_two_processes_cannot_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(line_of(bad(LINES[0])))
    first = ResultFile(path)
    with pytest.raises(UsageError, match="batch"):
        ResultFile(path)
    first.begin(NUMBERS, in_order=False)  # writes the file anew, which is another file then
    with pytest.raises(UsageError, match="batch"):
        ResultFile(path)
    first.close()
    ResultFile(path).close()


def test_partial_rewrites_are_deleted_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "out"
    others = [tmp_path / name for name in (".out.bak", ".out.123", "out.123", ".out.headrace-x")]
    for name in (*others, tmp_path / ".out.headrace-123", tmp_path / ".out.headrace-4194999"):
        name.write_text("half")
    opened(path).close()
    assert set(tmp_path.iterdir()) == {path, *others}


def test_in_order_a_file_is_put_in_order_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "out"
    file = opened(path, in_order=True)
    for index in (4, 0, 3):
        file.write(LINES[index], good(LINES[index]))
    assert numbers(path) == [5, 1, 4]  # there at once, whatever happens
    file.close()
    assert numbers(path) == [1, 4, 5]
    file = opened(path, in_order=True)
    for index in (1, 2):
        file.write(LINES[index], bad(LINES[index]))
    file.close()
    assert numbers(path) == [1, 2, 3, 4, 5]


def test_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    target = tmp_path / "target"
    link = tmp_path / "link"
    target.write_bytes(line_of(bad(LINES[0])))
    link.symlink_to(target)
    opened(link).close()
    assert link.is_symlink()
    assert target.read_bytes() == b""


def test_an_unwritable_path_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not/no"):
        ResultFile(tmp_path / "not" / "no")
    with pytest.raises(UsageError, match=re.escape(str(tmp_path))):
        ResultFile(tmp_path)
    with pytest.raises(UsageError, match="/ cannot be written: Is a directory"):
        ResultFile(Path("/"))


def test_fifos_and_devices_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero"), Path(os.devnull)):
        with pytest.raises(UsageError, match=path.name):
            ResultFile(path)
        assert not path.is_file()


def test_an_endless_line_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out"
    before = line_of(good(LINES[0]))
    path.write_bytes(before[:-1] * 3)
    monkeypatch.setattr("headrace.app.batch.output._LONGEST", 2 * len(before))
    with pytest.raises(UsageError, match="line 1"):
        ResultFile(path)


def test_a_stream_in_order_waits_for_the_line_before() -> None:
    said = io.StringIO()
    stream = ResultStream(said, [1, 3, 4, 6])
    for index in (2, 5):
        stream.write(LINES[index], good(LINES[index]))
    assert said.getvalue() == ""
    stream.write(LINES[0], good(LINES[0]))
    assert [json.loads(line)["line"] for line in said.getvalue().splitlines()] == [1, 3]
    stream.close()
    assert [json.loads(line)["line"] for line in said.getvalue().splitlines()] == [1, 3, 6]


def test_the_results_of_both_forms_name_their_request() -> None:
    raw = b'{"custom_id": "a", "body": {"messages": [{"role": "user", "content": "hi"}]}}'
    (line,) = parse_lines([raw], BatchDefaults())
    for one in (line, LINES[0]):
        said = failure(one, UsageError("no", "try this"))
        assert digest_of(json.loads(line_of(said))) == (one.digest, False)
    assert said["error"] == {"code": "invalid_request", "message": "no", "hint": "try this"}
