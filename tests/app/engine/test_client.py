"""The engine process with a tiny real model: answers, failures, and its end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
from msgspec.structs import replace

from headrace.app.answer.options import AnswerOptions
from headrace.app.config.load_options import ModelSpec
from headrace.app.engine.client import EngineClient
from headrace.app.engine.commands import Generate, PrefetchPrompt
from headrace.app.engine.events import (
    Abandoned,
    ContextFull,
    Damaged,
    Delta,
    Died,
    Done,
    Dropped,
    Event,
    Failed,
    LoadProgress,
    Prefill,
    PrefixCached,
    PromptCounted,
    Pulled,
    PullFailed,
    Ready,
    Repeats,
)
from headrace.app.engine.host import EngineHost
from headrace.app.engine.link import log_path
from headrace.models.text.encoding import EncodingStoppedError
from headrace.models.text.thinking import read_tags
from headrace.runtime.engine.request import CancelFlag
from headrace.runtime.errors import EngineError
from tests.support.damaged import install_damaged
from tests.support.gguf_models import write_gguf
from tests.support.hosted import begin
from tests.support.patience import PATIENCE_S
from tests.support.tiny_chat import IM_END, write_chat_model

E = TypeVar("E")
HELLO = [{"role": "user", "content": "hello"}]
ENDLESS = AnswerOptions(temperature=1.0, seed=1, logit_bias={IM_END: -100})  # until the context is full
NO_END = AnswerOptions(logit_bias={IM_END: -100})
ROOMY = 100_000  # tokens of context: half a minute of the tiny model, so that what is stopped was still going on
LETTERS = AnswerOptions(logit_bias={ord(letter) - 33: 100 for letter in "abcdefghijklmnopqrstuvwxyz"})  # greedy
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def client() -> Iterator[EngineClient]:
    client = EngineClient()
    yield client
    client.close()


@pytest.fixture
def ready(client: EngineClient, model: Path) -> EngineClient:
    client.start(ModelSpec(str(model), context=ROOMY))
    until(client, Ready)
    return client


def until(client: EngineClient, wanted: type[E], seen: list[Event] | None = None) -> E:
    """Poll until an event of this type; `seen` gets the events up to it, later ones stay queued."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        events = client.poll()
        for place, event in enumerate(events, 1):
            if seen is not None:
                seen.append(event)
            if isinstance(event, wanted):
                client._backlog[:0] = events[place:]
                return event
            assert not isinstance(event, Died), log_path().read_text()
        time.sleep(0.005)
    raise AssertionError(f"no {wanted.__name__} came; {log_path().read_text()}")


def said(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def gone(pid: int) -> bool:
    """Return whether a child process is gone and reaped."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def ended(pid: int) -> bool:
    """Return whether an orphan has ended; it may still be a zombie."""
    stat = Path(f"/proc/{pid}/stat")
    return gone(pid) or (stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] == "Z")


def eventually(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return true()


def test_a_model_is_loaded_and_answers(client: EngineClient, model: Path) -> None:
    assert (client.state, client.card) == ("stopped", None)
    client.start(ModelSpec(str(model), context=2048))
    client.submit(Generate(1, HELLO, replace(ENDLESS, max_tokens=40)))  # waits for the model
    events: list[Event] = []
    done = until(client, Done, events)
    assert isinstance(events[0], LoadProgress)
    (card,) = (event.card for event in events if isinstance(event, Ready))
    assert client.card == card
    assert (client.state, card.name, card.kind, card.context_limit) == ("ready", "chat", "headrace", 2048)
    assert card.kv_bytes_per_token == card.cost.kv_bytes_per_token > 0
    assert card.machine.usable_cores >= 1
    deltas = [event for event in events if isinstance(event, Delta)]
    assert [record.index for delta in deltas for record in delta.records] == list(range(40))
    assert deltas[0].text or not deltas[0].records[1:]
    assert (done.id, done.end.reason, done.end.summary.completion_tokens) == (1, "length", 40)
    assert done.end.summary.ttft_s is not None
    summary = done.end.summary
    known = summary.queue_s + summary.tokenize_s + summary.prefill_s + (summary.first_step_s or 0)
    assert done.end.summary.ttft_s >= known > card.load_s  # it was waited for
    prefills = [event for event in events if isinstance(event, Prefill)]
    assert prefills[-1].prefill_s == summary.prefill_s
    first = prefills[0]
    assert 0 < first.waited_s <= summary.queue_s
    assert first.tokenize_s == summary.tokenize_s > 0


def test_the_next_turn_reuses_the_conversation(ready: EngineClient) -> None:
    events: list[Event] = []
    ready.submit(Generate(1, HELLO, replace(ENDLESS, max_tokens=30)))
    first = until(ready, Done, events)
    answer = said(events)
    again = [*HELLO, {"role": "assistant", "content": answer}, {"role": "user", "content": "go on"}]
    events.clear()
    ready.submit(Generate(2, again, replace(ENDLESS, max_tokens=5)))
    done = until(ready, Done, events)
    assert done.end.summary.reused_tokens >= first.end.summary.prompt_tokens
    prefills = [event for event in events if isinstance(event, Prefill)]
    assert prefills[0].reused == done.end.summary.reused_tokens
    reuse = prefills[0].reuse
    assert reuse is not None
    assert (reuse.reused, reuse.dropped) == (done.end.summary.reused_tokens, 0)
    assert reuse.difference is None or reuse.difference.position == reuse.reused, "a byte that is no text"
    assert all(event.reuse is None for event in prefills[1:])
    assert "".join(step.text for event in events if isinstance(event, Delta) for step in event.steps) == said(events)

    events.clear()
    edited = [{"role": "user", "content": HELLO[0]["content"] + "?"}]
    ready.submit(Generate(3, edited, AnswerOptions(max_tokens=1)))
    done = until(ready, Done, events)
    reuse = next(event.reuse for event in events if isinstance(event, Prefill))
    assert reuse is not None
    assert reuse.difference is not None
    assert (reuse.dropped, reuse.reused) == (0, reuse.difference.position)
    assert (reuse.difference.earlier_token, reuse.difference.prompt_token) == ("<|im_end|>", "?")


def test_prefetched_tokens_stay_cached(ready: EngineClient) -> None:
    ready.prefetch(PrefetchPrompt(HELLO, id=3, files=("ab", "", "abc")))
    events: list[Event] = []
    held = until(ready, PrefixCached, events)
    (counted,) = (event for event in events if isinstance(event, PromptCounted))
    assert (counted.id, counted.tokens) == (3, held.tokens + 1)
    assert tuple(counted.files) == (2, 0, 3)  # bytes are its tokens
    assert 0 < counted.message < counted.tokens <= counted.longest
    assert held.used_bytes <= held.allocated_bytes
    ready.submit(Generate(1, HELLO, AnswerOptions(max_tokens=2)))
    done = until(ready, Done)
    assert done.end.summary.reused_tokens == held.tokens == done.end.summary.prompt_tokens - 1

    seen: list[Event] = []
    ready.prefetch(PrefetchPrompt(HELLO, id=4, count_only=True))
    ready.prefetch(PrefetchPrompt([{"role": "user"}]))  # what the template cannot take is for Generate to complain of
    ready.prefetch(PrefetchPrompt([*HELLO, {"role": "assistant", "content": "x" * ROOMY}]))  # past the context limit
    ready.submit(Generate(2, HELLO, AnswerOptions(max_tokens=1)))
    until(ready, Done, seen)
    assert not [event for event in seen if isinstance(event, Failed | ContextFull)]


def test_a_continued_answer_equals_an_uninterrupted_one(ready: EngineClient) -> None:
    whole: list[Event] = []
    ready.submit(Generate(1, HELLO, replace(LETTERS, max_tokens=24)))
    until(ready, Done, whole)
    half: list[Event] = []
    ready.submit(Generate(2, HELLO, replace(LETTERS, max_tokens=10)))
    until(ready, Done, half)
    rest: list[Event] = []
    ready.submit(Generate(3, HELLO, replace(LETTERS, max_tokens=14), begun=read_tags(said(half))))
    done = until(ready, Done, rest)
    assert len(said(whole)) == 24
    assert said(half) + said(rest) == said(whole)
    assert done.end.summary.reused_tokens == done.end.summary.prompt_tokens - 1  # all but the token that is fed anyway


@pytest.mark.sampled
@pytest.mark.parametrize("wait_for", [None, Prefill, Delta])
def test_an_answer_can_be_cancelled_in_every_phase(ready: EngineClient, wait_for: type[Event] | None) -> None:
    prompt = [{"role": "user", "content": "hello " * 200}]
    ready.submit(Generate(1, prompt, ENDLESS))
    if wait_for is not None:
        until(ready, wait_for)
    ready.cancel()
    ended = until(ready, cast(type[Done | Abandoned], Done | Abandoned))  # before its prompt was encoded, or after
    assert isinstance(ended, Abandoned) or ended.end.reason == "cancelled"
    ready.submit(Generate(2, HELLO, replace(ENDLESS, max_tokens=3)))
    assert until(ready, Done).end.summary.completion_tokens == 3


def test_an_answer_cancelled_before_its_prompt_is_encoded_is_abandoned(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise EncodingStoppedError("the tokenizer was stopped")

    host = EngineHost.load(ModelSpec(str(model)), lambda *_: None)
    monkeypatch.setattr(host._answerer.chat_prompt, "encode", stopped)
    sent: list[Event] = []
    begin(host, Generate(7, HELLO, NO_END), CancelFlag(), sent.append)
    assert sent == [Abandoned(7)]
    assert not host.busy


def test_only_stages_before_loading_count_as_a_download(client: EngineClient, model: Path, tmp_path: Path) -> None:
    is_download: dict[str, bool] = {}
    sizes = {"hidden": 256, "inner": 256, "heads": 4, "kv_heads": 4, "head_dim": 64}
    for name in (model, write_gguf(tmp_path / "tiny.gguf", "llama", matrices="Q3_K", **sizes)):
        events: list[Event] = []
        client.start(ModelSpec(str(name)))
        until(client, Ready, events)
        is_download |= {event.stage: event.is_download for event in events if isinstance(event, LoadProgress)}
    assert {stage for stage, download in is_download.items() if not download} == {"starting", "loading weights"}
    assert is_download["converting"]


def test_a_process_that_cannot_be_started_is_reported(
    ready: EngineClient, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without memory, or after Python was removed."""
    monkeypatch.setattr(sys, "executable", str(model / "gone"))
    ready.restart()
    assert (ready.state, ready.card) == ("dead", None)
    (died,) = ready.poll()
    assert isinstance(died, Died)
    assert "no process can be started: No such file" in died.message
    with pytest.raises(EngineError):
        ready.submit(Generate(1, HELLO))
    with pytest.raises(EngineError):
        ready.pull("smollm2-135m")
    monkeypatch.undo()
    ready.restart()
    until(ready, Ready)


def test_a_request_that_waits_for_the_model_is_cancelled(client: EngineClient, model: Path) -> None:
    client.start(ModelSpec(str(model), context=ROOMY))
    client.submit(Generate(1, HELLO, ENDLESS))
    client.submit(Generate(2, HELLO, replace(ENDLESS, max_tokens=3)))
    client.cancel(1)
    assert client.state == "loading"
    events: list[Event] = []
    done = until(client, Done, events)
    assert events[0] == Abandoned(1)
    assert (done.id, done.end.reason) == (2, "length")
    assert not [event for event in events[1:] if getattr(event, "id", None) == 1]


def test_the_engine_answers_after_failures(ready: EngineClient) -> None:
    bad: list[dict[str, Any]] = [
        {"options": AnswerOptions(stop=("x",), logit_bias={10**8: 1.0})},
        {"messages": [{"role": "wizard", "content": "x"}]},
        {"messages": []},
    ]
    for number, change in enumerate(bad):
        ready.submit(Generate(**{"id": number, "messages": HELLO, **change}))
        failed = until(ready, Failed)
        assert failed.id == number
        assert "\n" not in failed.message
    ready.submit(Generate(99, HELLO, replace(ENDLESS, max_tokens=2)))
    assert until(ready, Done).id == 99


def test_damaged_weights_are_reported(client: EngineClient, model: Path) -> None:
    install_damaged(model)
    client.start(ModelSpec("mine", context=64))
    damaged = until(client, Damaged)
    assert "mine is damaged" in damaged.message
    assert "models rm mine" in (damaged.hint or "")
    client.submit(Generate(1, HELLO, replace(ENDLESS, max_tokens=3)))
    assert until(client, Done).end.reason == "length"


def test_a_stop_string_ends_the_answer(ready: EngineClient) -> None:
    events: list[Event] = []
    ready.submit(Generate(1, HELLO, replace(NO_END, max_tokens=20)))
    until(ready, Done, events)
    text = said(events)
    events.clear()
    ready.submit(Generate(2, HELLO, replace(NO_END, max_tokens=20, stop=(text[5:8],))))
    assert until(ready, Done, events).end.reason == "stop"
    assert said(events) == text[: text.index(text[5:8])]


def test_the_context_limit_is_never_passed_silently(client: EngineClient, model: Path) -> None:
    client.start(ModelSpec(str(model), context=400))
    turns = [{"role": "system", "content": "brief"}]
    for i in range(4):
        turns += [{"role": "user", "content": f"{i}" * 60}, {"role": "assistant", "content": "a" * 60}]
    turns.append({"role": "user", "content": "last"})
    client.submit(Generate(1, turns, ENDLESS))
    full = until(client, ContextFull)
    assert full.prompt_tokens > full.limit == 400
    assert full.last_turn_fits
    events: list[Event] = []
    client.submit(Generate(2, turns, ENDLESS, drop_oldest=True))
    done = until(client, Done, events)
    (dropped,) = (event for event in events if isinstance(event, Dropped))
    assert dropped.messages in (2, 4, 6)
    assert done.end.summary.prompt_tokens <= 300
    assert (done.end.reason, done.end.is_full, done.last_turn_fits) == ("length", True, True)
    client.submit(Generate(3, [{"role": "user", "content": "x" * 500}], ENDLESS, drop_oldest=True))
    assert until(client, ContextFull).id == 3
    brief = [{"role": "user", "content": "0"}, {"role": "assistant", "content": "a"}]
    client.submit(Generate(5, [*brief, {"role": "user", "content": "x" * 200}], ENDLESS))
    done = until(client, Done)
    assert (done.end.is_full, done.last_turn_fits) == (True, False)
    client.submit(Generate(4, [*turns[:-1], {"role": "user", "content": "x" * 500}], ENDLESS))
    assert not until(client, ContextFull).last_turn_fits


def test_a_model_that_cannot_be_loaded(client: EngineClient, tmp_path: Path, model: Path) -> None:
    for name in ("no-such-model-anywhere", str(tmp_path)):
        client.start(ModelSpec(name))
        failed = until(client, Failed)
        assert failed.id is None
        assert "\n" not in failed.message
        assert client.state == "failed"
        with pytest.raises(EngineError):
            client.submit(Generate(1, HELLO))
    client.start(ModelSpec(str(model), context=256))
    until(client, Ready)


def test_switching_models_ends_running_answers(ready: EngineClient, model: Path) -> None:
    old = ready.pid
    assert old is not None
    ready.submit(Generate(1, HELLO, ENDLESS))
    until(ready, Delta)
    ready.start(ModelSpec(str(model), context=512))
    assert gone(old)
    assert until(ready, Abandoned).id == 1
    assert until(ready, Ready).card.context_limit == 512


@pytest.mark.sampled
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_killed_engine_is_reported_once_and_restarts(ready: EngineClient, number: signal.Signals) -> None:
    ready.submit(Generate(1, HELLO, ENDLESS))
    until(ready, Delta)
    pid = ready.pid
    assert pid is not None
    os.kill(pid, number)
    died = until(ready, Died)
    assert number.name in died.message
    assert "\n" not in died.message
    assert gone(pid)
    assert (ready.state, ready.card, ready.pid) == ("dead", None, None)
    assert ready.poll() == []
    with pytest.raises(EngineError):
        ready.submit(Generate(2, HELLO))
    ready.restart()
    ready.submit(Generate(3, HELLO, replace(ENDLESS, max_tokens=2)))
    assert until(ready, Done).id == 3


def test_the_engine_ignores_ctrl_c_and_hangups(ready: EngineClient) -> None:
    pid = ready.pid
    assert pid is not None
    assert os.getsid(pid) == pid != os.getsid(0)  # no terminal sends it anything
    os.kill(pid, signal.SIGINT)
    ready.submit(Generate(1, HELLO, replace(ENDLESS, max_tokens=3)))
    assert until(ready, Done).end.summary.completion_tokens == 3


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_nothing_the_engine_prints_reaches_the_terminal(ready: EngineClient) -> None:
    fds = Path(f"/proc/{ready.pid}/fd")
    assert [str((fds / str(n)).readlink()) for n in range(3)] == ["/dev/null", str(log_path()), str(log_path())]


def test_closing_ends_the_process(client: EngineClient, model: Path) -> None:
    client.start(ModelSpec(str(model)))
    pid = client.pid
    assert pid is not None
    client.close()
    client.close()
    assert gone(pid)
    assert client.state == "stopped"


@pytest.mark.parametrize("moment", ["loading", "answering"])
def test_the_engine_does_not_outlive_the_chat(model: Path, moment: str) -> None:
    script = (
        "import sys, time\nfrom headrace.app.engine.client import EngineClient\n"
        "from headrace.app.answer.options import AnswerOptions\nfrom headrace.app.engine.commands import *\n"
        "client = EngineClient(); client.start(ModelSpec(sys.argv[1])); print(client.pid, flush=True)\n"
        f"client.submit(Generate(1, {HELLO!r}, {ENDLESS!r}))\n"
        "while True:\n"
        "    for event in client.poll(): print(type(event).__name__, flush=True)\n"
        "    time.sleep(0.01)\n"
    )
    chat = subprocess.Popen([sys.executable, "-c", script, str(model)], stdout=subprocess.PIPE, cwd=ROOT)
    assert chat.stdout is not None
    engine = int(chat.stdout.readline())
    while moment == "answering" and b"Delta" not in chat.stdout.readline():
        pass
    chat.kill()
    chat.communicate()
    assert eventually(lambda: ended(engine))


def test_a_project_folder_named_app_is_not_imported(
    client: EngineClient, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__init__.py").write_text("raise SystemExit('somebody else\\'s code ran')")
    monkeypatch.chdir(tmp_path)
    client.start(ModelSpec(str(model)))
    until(client, Ready)


def test_a_fetch_in_the_background_ends_or_is_stopped(client: EngineClient, model: Path) -> None:
    client.pull(str(model))
    with pytest.raises(EngineError, match="still being fetched"):
        client.pull("another")
    assert until(client, Pulled).name == str(model)
    client.pull("no-such-model-anywhere")
    failed = until(client, PullFailed)
    assert failed.name == "no-such-model-anywhere"
    assert "\n" not in failed.message
    client.pull("no-such-model-anywhere")
    client.cancel_pull()
    assert until(client, PullFailed).message.endswith("was stopped")
    assert client.state == "stopped"  # of the engine nothing was asked


def test_polling_and_sending_do_not_block_while_the_engine_hangs(ready: EngineClient) -> None:
    pid = ready.pid
    assert pid is not None
    ready.submit(Generate(1, HELLO, ENDLESS))
    until(ready, Delta)
    os.kill(pid, signal.SIGSTOP)
    try:
        for _ in range(50):
            ready.poll()
        ready.cancel()
        assert ready.state == "ready"
    finally:
        os.kill(pid, signal.SIGCONT)
    assert until(ready, Done).end.reason == "cancelled"


def test_the_client_needs_no_mlx() -> None:
    script = (
        "import sys, headrace.app.engine.client, headrace.app.chat.conversation, headrace.models.text.events\n"
        "assert not {'mlx', 'textual', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_a_loop_is_reported_once(ready: EngineClient) -> None:
    seen: list[Event] = []
    ready.submit(Generate(1, HELLO, AnswerOptions(temperature=0, max_tokens=600, logit_bias={7: 1000})))
    until(ready, Done, seen)
    assert [event for event in seen if isinstance(event, Repeats)] == [Repeats(1)]


def test_thinking_ends_with_its_budget_also_in_a_continued_answer(client: EngineClient, tmp_path: Path) -> None:
    template = write_chat_model(tmp_path / "thinker") / "chat_template.jinja"
    template.write_text(template.read_text() + "{% if add_generation_prompt %}<think>{% endif %}{# </think> #}")
    client.start(ModelSpec(str(tmp_path / "thinker")))
    until(client, Ready)
    options = AnswerOptions(temperature=0, max_tokens=20, thinking=5, logit_bias={66: 1000})  # nothing but c
    for number, before, answer in ((1, "", "<think>\nccccc</think>ccc"), (2, "<think>\nx", "ccccc</think>ccc")):
        seen: list[Event] = []
        client.submit(Generate(number, HELLO, options, begun=read_tags(before)))
        until(client, Done, seen)
        assert said(seen).startswith(answer)
    client.submit(Generate(3, HELLO, AnswerOptions(chat_template_kwargs={"mood": "glad"})))
    assert "chat_template_kwargs.mood" in until(client, Failed).message
