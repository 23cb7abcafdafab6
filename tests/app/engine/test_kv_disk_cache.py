"""The KV disk cache: a reopened chat is hardly prefilled and continues alike, also with damaged files."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.app.answer.options import AnswerOptions
from headrace.app.config.load_options import ModelSpec
from headrace.app.config.settings import save_setting
from headrace.app.engine.client import EngineClient
from headrace.app.engine.commands import Generate
from headrace.app.engine.events import Delta, Died, Done, Event, Ready
from headrace.app.engine.host import EngineHost
from headrace.app.sessions.kv_cache import delete_kv_cache
from headrace.runtime.config.paths import kept_chats_dir
from headrace.runtime.engine.request import CancelFlag
from headrace.runtime.ops import BLOCK, native
from tests.models.mlx_lm.test_forgetting import FORGETFUL
from tests.models.mlx_lm.test_network import write
from tests.support.hosted import begin
from tests.support.patience import PATIENCE_S
from tests.support.tiny_chat import CONTROL, write_byte_tokenizer, write_chat_model

pytestmark = pytest.mark.skipif(not native.status().available, reason="only the kernels' K/V are in blocks")
LONG = {"role": "user", "content": "tell me of the mill race and of the wheel that it drives " * 10}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("tiny") / "chat", context=4096)


def opened(model: Path) -> EngineHost:
    return EngineHost.load(ModelSpec(str(model)), lambda *_: None)


def ask(host: EngineHost, messages: list[dict[str, str]]) -> tuple[str, Done]:
    events: list[Event] = []
    begin(host, Generate(1, messages, AnswerOptions(max_tokens=8)), CancelFlag(), events.append)
    while host.busy:
        host.step(events.append)
    (done,) = (event for event in events if isinstance(event, Done))
    return "".join(event.text for event in events if isinstance(event, Delta)), done


def again(said: str) -> list[dict[str, str]]:
    return [LONG, {"role": "assistant", "content": said}, {"role": "user", "content": "more"}]


def never() -> bool:
    return False


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write(
        tmp_path_factory.mktemp("hybrid"),
        {**FORGETFUL["lfm2"], "vocab_size": 256 + len(CONTROL), "max_position_embeddings": 4096},
    )
    write_byte_tokenizer(directory)
    return directory


@pytest.mark.parametrize("kind", ["model", "hybrid"])
def test_a_stored_chat_is_loaded_from_disk(kind: str, request: pytest.FixtureRequest) -> None:
    model: Path = request.getfixturevalue(kind)
    host = opened(model)
    said, first = ask(host, [LONG])
    assert host._disk_cache.write_due
    host.idle.write_disk_cache(never)
    assert not host._disk_cache.write_due
    expected, _ = ask(host, again(said))

    whole, _ = ask(opened(model), again(said))
    assert whole == expected
    text, done = ask(opened(model), again(said))
    assert text == expected
    assert done.end.summary.reused_tokens >= (first.end.summary.prompt_tokens // BLOCK) * BLOCK
    assert done.end.summary.prefill_tokens < 2 * BLOCK


@pytest.mark.parametrize("harm", ["cut", "changed", "empty"])
def test_a_damaged_file_is_computed_again(model: Path, harm: str) -> None:
    host = opened(model)
    said, _ = ask(host, [LONG])
    host.idle.write_disk_cache(never)
    expected, _ = ask(host, again(said))
    files = sorted(kept_chats_dir().iterdir())
    assert len(files) > 3
    for file in files[::2]:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content if harm == "changed" else content[: len(content) // 3 if harm == "cut" else 0])
    assert ask(opened(model), again(said))[0] == expected


def test_writing_kv_to_disk_stops_at_the_next_request(model: Path) -> None:
    host = opened(model)
    ask(host, [LONG])
    for blocks in (1, 3):
        asked = iter([False] * (blocks - (blocks == 3)) + [True] * 9)
        host.idle.write_disk_cache(lambda asked=asked: next(asked))
        assert host._disk_cache.write_due
        assert len(list(kept_chats_dir().iterdir())) == blocks
    host.idle.write_disk_cache(never)
    assert not host._disk_cache.write_due


def test_a_chat_answered_before_the_cache_was_deleted_is_not_written(model: Path) -> None:
    host = opened(model)
    ask(host, [LONG])
    asked = iter([False, False])
    host.idle.write_disk_cache(lambda: next(asked, True))
    assert len(list(kept_chats_dir().iterdir())) == 2
    time.sleep(0.05)  # file times have steps of some milliseconds
    delete_kv_cache()
    host.idle.write_disk_cache(never)
    assert not host._disk_cache.write_due
    assert list(kept_chats_dir().iterdir()) == []
    time.sleep(0.05)
    ask(host, [LONG])
    host.idle.write_disk_cache(never)
    assert len(list(kept_chats_dir().iterdir())) > 2


def test_kv_on_disk_is_not_shared_by_other_weights_or_a_disabled_store(model: Path, tmp_path: Path) -> None:
    host = opened(model)
    said, _ = ask(host, [LONG])
    host.idle.write_disk_cache(never)
    other = write_chat_model(tmp_path / "other", context=4096)
    assert ask(opened(other), again(said))[1].end.summary.reused_tokens == 0
    save_setting("chat", "kept_gb", 0.0)
    none = opened(model)
    assert ask(none, again(said))[1].end.summary.reused_tokens == 0
    assert not none._disk_cache.write_due


@pytest.fixture
def clients() -> Iterator[list[EngineClient]]:
    opened: list[EngineClient] = []
    yield opened
    for client in opened:
        client.close()


def until(client: EngineClient, wanted: type[Any], seen: list[Event]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for event in client.poll():
            seen.append(event)
            assert not isinstance(event, Died)
            if isinstance(event, wanted):
                return event
        time.sleep(0.01)
    raise AssertionError(f"no {wanted.__name__}")


def test_kv_are_reused_by_the_next_process(
    model: Path, clients: list[EngineClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.app.engine.client._LAST_S", PATIENCE_S)  # what is to be written takes what it takes
    said = ""
    for messages in ([LONG], None):
        client = EngineClient()
        clients.append(client)
        client.start(ModelSpec(str(model)))
        seen: list[Event] = []
        until(client, Ready, seen)
        client.submit(Generate(1, messages or again(said), AnswerOptions(max_tokens=8)))
        done = until(client, Done, seen)
        said = said or "".join(event.text for event in seen if isinstance(event, Delta))
        blocks = done.end.summary.prompt_tokens // BLOCK
        client.close()  # at once: it is written now
    assert done.end.summary.reused_tokens >= (blocks - 1) * BLOCK
