"""The Python API from many threads and tasks: one batch, cancelled and dropped answers, forks, exits, memory."""

import asyncio
import gc
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from msgspec.structs import replace

from headrace import AnswerStream, CancelFlag, Completed, EngineError, Model, SamplingParams, TextChunk, load
from headrace.app.answer.answerer import Answerer
from headrace.app.answer.engine_thread import EngineThread
from headrace.app.answer.open_answer import MAX_UNREAD, wait_for_item
from headrace.app.api import _SUBMITTED
from headrace.models.network.decoder import Decoder
from tests.support.mlx_lm_models import config_of, write_mlx_lm_model
from tests.support.patience import PATIENCE_S
from tests.support.tiny_chat import IM_END, write_byte_tokenizer, write_chat_model

pytestmark = pytest.mark.filterwarnings("ignore:headrace runs slow:RuntimeWarning")  # an install without kernels
NEVER_ENDING = SamplingParams(logit_bias={IM_END: -100.0})
LIVELY: Any = {"temperature": 0.9, "seed": 3, "max_tokens": 30, "logit_bias": {IM_END: -100.0}}
PROMPTS = ["one", "two " * 9, "three " * 40, "four", "five " * 3, "six", "seven " * 80, "eight"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def shared(directory: Path) -> Iterator[Model]:
    with load(directory) as model:
        yield model


@pytest.fixture
def model(shared: Model) -> Iterator[Model]:
    yield shared
    wait_until(lambda: open_answers(shared) == 0)


@pytest.fixture(scope="module")
def texts(shared: Model) -> list[str]:
    """The answers to PROMPTS, each alone."""
    return [shared.generate(prompt, **LIVELY).text for prompt in PROMPTS]


def open_answers(model: Model) -> int:
    return model._engine.open_answers


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


class Gate:
    """Steps of all models wait until it is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        step = Answerer.step

        def waiting(answerer: Answerer) -> Any:
            self.reached.set()
            assert self.opened.wait(PATIENCE_S)
            return step(answerer)

        monkeypatch.setattr(Answerer, "step", waiting)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def test_threads_are_answered_in_one_batch(model: Model, texts: list[str], gate: Gate) -> None:
    batches = set()

    def stream(prompt: str) -> str:
        text = ""
        for part in model.chat(prompt, **LIVELY):
            text += part.text
            if isinstance(part, TextChunk):
                batches.add(part.step.record.batch)
        return text

    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        streamed = threads.map(stream, PROMPTS)
        wait_until(lambda: model._engine._inbox.qsize() + model._engine.open_answers >= len(PROMPTS))
        gate.opened.set()
        assert list(streamed) == texts
        assert max(batches) == len(PROMPTS)
        assert list(threads.map(lambda prompt: model.generate(prompt, **LIVELY).text, PROMPTS)) == texts


def test_a_model_is_usable_after_the_thread_that_loaded_it_ended(directory: Path, texts: list[str]) -> None:
    loaded: list[Model] = []
    thread = threading.Thread(target=lambda: loaded.append(load(directory)))
    thread.start()
    thread.join()
    with loaded[0] as model:
        assert model.generate(PROMPTS[0], **LIVELY).text == texts[0]


def test_two_models_answer_at_once(model: Model, tmp_path: Path, texts: list[str]) -> None:
    other = write_chat_model(tmp_path / "other", seed=1)
    with load(other) as second, ThreadPoolExecutor(4) as threads:
        alone = second.generate(PROMPTS[0], **LIVELY).text
        asked = [model, second] * 6
        answers = list(threads.map(lambda each: each.generate(PROMPTS[0], **LIVELY).text, asked))
        assert answers == [texts[0], alone] * 6


def test_tasks_are_answered_in_one_batch(model: Model, texts: list[str]) -> None:
    async def all_answers() -> list[str]:
        answers = await asyncio.gather(*(model.agenerate(prompt, **LIVELY) for prompt in PROMPTS))
        return [answer.text for answer in answers]

    assert asyncio.run(all_answers()) == texts


def test_the_event_loop_runs_during_a_step(model: Model, texts: list[str], gate: Gate) -> None:
    """A step, such as a chunk of a long prompt, waits here for a task of the loop that waits for its answer."""

    async def answer() -> str:
        return "".join([part.text async for part in model.chat(PROMPTS[0], **LIVELY)])

    async def open_gate() -> None:
        while not gate.reached.is_set():
            await asyncio.sleep(0.001)
        gate.opened.set()

    async def both() -> str:
        return (await asyncio.gather(answer(), open_gate()))[0]

    assert asyncio.run(both()) == texts[0]


def test_a_loop_is_woken_once_a_step(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [0]
    step = Answerer.step

    def counted(answerer: Answerer) -> Any:
        steps[0] += 1
        return step(answerer)

    monkeypatch.setattr(Answerer, "step", counted)

    async def answers() -> int:
        loop = asyncio.get_running_loop()
        wakes = [0]
        call_soon = loop.call_soon_threadsafe

        def woken(*args: Any, **options: Any) -> Any:
            wakes[0] += threading.current_thread().name == "headrace engine"
            return call_soon(*args, **options)

        monkeypatch.setattr(loop, "call_soon_threadsafe", woken)

        async def read(prompt: str) -> None:
            async for _ in model.chat(prompt, **LIVELY):
                pass

        await asyncio.gather(*map(read, PROMPTS))
        return wakes[0]

    assert 0 < asyncio.run(answers()) <= steps[0]


def test_a_cancelled_task_ends_its_answer(model: Model, texts: list[str]) -> None:
    async def cancelled() -> AnswerStream:
        stream = model.chat("hi", sampling=NEVER_ENDING)

        async def read() -> None:
            async for _ in stream:
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(EngineError, match="cancelled"):
            await anext(stream)  # not a whole answer that ended here
        return stream

    stream = asyncio.run(cancelled())
    wait_until(lambda: open_answers(model) == 0)
    assert ", open" not in repr(stream)
    assert model.generate(PROMPTS[0], **LIVELY).text == texts[0]


def test_fifty_timeouts_leak_no_sequence(model: Model, texts: list[str]) -> None:
    async def impatient() -> None:
        for count in range(50):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(model.agenerate("hi", sampling=NEVER_ENDING), 0.0002 * count)

    asyncio.run(impatient())
    wait_until(lambda: open_answers(model) == 0)
    assert model.generate(PROMPTS[0], **LIVELY).text == texts[0]


@pytest.mark.parametrize("how", ["closed", "left", "dropped", "with its loop"])
def test_an_abandoned_answer_frees_its_sequence(model: Model, how: str) -> None:
    stream = model.chat("hi", sampling=NEVER_ENDING)
    if how == "closed":
        stream.close()
        assert list(stream) == []
    elif how == "left":
        with stream:
            next(stream)
        assert list(stream) == []
    elif how == "dropped":
        del stream
    else:
        gate = asyncio.new_event_loop()

        async def read(stream: AnswerStream = stream) -> None:
            async for _ in stream:
                pass

        task = gate.create_task(read())
        gate.run_until_complete(asyncio.sleep(0.02))
        gate.close()
        del task, stream
    gc.collect()
    wait_until(lambda: open_answers(model) == 0)


def test_a_loop_closed_after_its_reader_was_woken_ends_the_answer(model: Model) -> None:
    """The wake-up is lost with the loop, and the task is kept from being collected."""
    stream = model.chat("hi", sampling=NEVER_ENDING)
    loop = asyncio.new_event_loop()

    async def read() -> None:
        async for _ in stream:
            pass

    task = loop.create_task(read())
    while not stream._opened._waiting_in:
        loop.run_until_complete(asyncio.sleep(0))
    wait_until(lambda: model._engine.is_paused)  # it has put the wake-up into the loop, which does not run
    loop.close()
    wait_until(lambda: open_answers(model) == 0)
    del task


def test_ctrl_c_ends_the_answer_that_is_waited_for(model: Model, gate: Gate) -> None:
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        wait_until(lambda: sys._current_frames()[main].f_code is wait_for_item.__code__)
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    stream = model.chat("hi", sampling=NEVER_ENDING)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    gate.opened.set()
    with pytest.raises(EngineError, match="interrupted"):
        next(stream)


def test_an_unread_answer_pauses_and_others_are_answered(model: Model) -> None:
    stream = model.chat("hi", sampling=NEVER_ENDING, max_tokens=3 * MAX_UNREAD, speculate="off")
    wait_until(lambda: model._engine.is_paused)
    assert model.generate("hi", max_tokens=2).reason == "length"  # others are answered
    read = list(stream)
    assert isinstance(read[-1], Completed)
    assert read[-1].finished.summary.completion_tokens == 3 * MAX_UNREAD


def test_a_flag_ends_one_of_several_answers(model: Model) -> None:
    cancel = CancelFlag()
    parts = model.chat("hi", sampling=NEVER_ENDING, cancel=cancel)
    others = [model.chat(prompt, **LIVELY) for prompt in PROMPTS[:2]]
    next(parts)
    cancel.set()
    *_, end = parts
    assert isinstance(end, Completed)
    assert end.finished.reason == "cancelled"
    assert [list(other)[-1].finished.reason for other in others] == ["length"] * 2  # type: ignore[union-attr]


def test_a_stop_string_sets_no_flag_of_the_caller(model: Model, texts: list[str]) -> None:
    cancel = CancelFlag()
    stopped = model.generate(PROMPTS[0], **LIVELY, stop=texts[0][2:4], cancel=cancel)
    assert stopped.ended_by == "stop_string"
    assert not cancel


def test_an_error_of_a_step_ends_all_answers_and_the_model_stays_usable(
    directory: Path, monkeypatch: pytest.MonkeyPatch, texts: list[str]
) -> None:
    before = mx.get_active_memory()
    model = load(directory)
    logits = Decoder.logits
    failing = threading.Event()

    def fails(decoder: Decoder, x: mx.array) -> mx.array:
        if failing.is_set():
            raise RuntimeError("the device is gone")
        return logits(decoder, x)

    monkeypatch.setattr(Decoder, "logits", fails)
    streams = [model.chat(prompt, sampling=NEVER_ENDING) for prompt in PROMPTS[:3]]
    for stream in streams:
        next(stream)
    failing.set()
    errors = []
    for stream in streams:
        with pytest.raises(EngineError, match="the device is gone") as raised:
            list(stream)
        errors.append(raised.value)
        assert list(stream) == []
    failing.clear()
    assert model.generate(PROMPTS[0], **LIVELY).text == texts[0]
    model.close()
    assert mx.get_active_memory() <= before  # though the errors are kept
    assert len(set(map(id, errors))) == len(errors)


def test_an_error_of_one_answer_ends_that_answer_alone(
    directory: Path, monkeypatch: pytest.MonkeyPatch, texts: list[str]
) -> None:
    before = mx.get_active_memory()
    model = load(directory)
    prepare = Answerer.prepare

    class Bad(frozenset[int]):
        def __contains__(self, _: object) -> bool:
            raise ValueError("no set")

    def with_bad_stop(answerer: Answerer, *args: Any, **options: Any) -> Any:
        answer = prepare(answerer, *args, **options)
        if answer.request.max_tokens == 7:
            answer.request = replace(answer.request, stop_ids=Bad())
        return answer

    monkeypatch.setattr(Answerer, "prepare", with_bad_stop)
    with ThreadPoolExecutor(2) as threads:
        good = threads.submit(model.generate, PROMPTS[1], **LIVELY)
        with pytest.raises(EngineError, match="no set") as raised:
            model.generate("hi", max_tokens=7)
        assert good.result().text == texts[1]
    model.close()
    assert mx.get_active_memory() <= before
    assert raised.value.__cause__ is not None  # kept, and the model is freed


def test_a_load_that_fails_is_raised_where_it_was_called(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("of this load")

    threads = workers()
    monkeypatch.setattr("headrace.app.api.load_resolved", fails)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError, match="of this load"):
            load(directory)
    assert workers() <= threads + 1


def workers() -> int:
    """Return the number of threads that own a model, or can own the next."""
    return sum(thread.name == "headrace engine" for thread in threading.enumerate())


def test_an_interrupted_load_ends() -> None:
    main = threading.main_thread().ident
    assert main is not None

    def endless() -> Answerer:
        signal.pthread_kill(main, signal.SIGINT)
        while True:
            time.sleep(0.001)

    engines: list[EngineThread] = []

    class Known(EngineThread):
        def stop(self) -> None:
            engines.append(self)
            super().stop()

    with pytest.raises(KeyboardInterrupt):
        Known("endless", endless)
    assert engines[0]._ended.wait(PATIENCE_S)


def test_closing_ends_open_answers_with_an_error(directory: Path) -> None:
    before = mx.get_active_memory()
    with load(directory) as model:
        stream = model.chat("hi", sampling=NEVER_ENDING)
        next(stream)
        assert mx.get_active_memory() > before
    assert mx.get_active_memory() <= before
    with pytest.raises(EngineError, match="tiny was closed before"):
        list(stream)
    assert "closed" in repr(model)
    model.close()
    for use in (model.chat, model.generate, model.complete, model.count_tokens):
        with pytest.raises(EngineError, match="is closed"):
            use("hi")
    with pytest.raises(EngineError, match="is closed"):
        model.batch(["hi"])


def test_closing_ends_the_waits_of_other_threads(directory: Path) -> None:
    model = load(directory)
    with ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(model.generate, prompt, sampling=NEVER_ENDING) for prompt in PROMPTS[:3]]
        waiting.append(threads.submit(model.batch, PROMPTS * 20, sampling=NEVER_ENDING))
        wait_until(lambda: open_answers(model) > 3)
        model.close()
        for each in waiting:
            with pytest.raises(EngineError, match="closed"):
                each.result(PATIENCE_S)


def test_a_dropped_model_is_freed(directory: Path) -> None:
    before = mx.get_active_memory()
    stream = load(directory).chat("hi", sampling=NEVER_ENDING, max_tokens=3)
    assert len(list(stream)) == 4  # the stream keeps the model
    assert mx.get_active_memory() > before
    del stream
    gc.collect()
    wait_until(lambda: mx.get_active_memory() <= before)


def test_a_long_batch_admits_other_requests(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few of its prompts are in the engine at a time: a request of another thread waits for no others."""
    counts = list[int]()
    step = Answerer.step

    def counted(answerer: Answerer) -> Any:
        counts.append(open_answers(model) + model._engine._inbox.qsize())
        return step(answerer)

    monkeypatch.setattr(Answerer, "step", counted)
    prompts = PROMPTS * (_SUBMITTED // 4)
    with ThreadPoolExecutor(1) as threads:
        batch = threads.submit(model.batch, prompts, **{**LIVELY, "max_tokens": 2})
        assert model.generate("hi", max_tokens=1).reason == "length"
        assert len(batch.result(PATIENCE_S)) == len(prompts)
    assert max(counts) <= _SUBMITTED + 1 < len(prompts)


def run(script: str, directory: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    code = f"import sys\nfrom headrace import *\nmodel = load({str(directory)!r})\n{script}"
    arguments = [sys.executable, "-W", "error", "-W", "ignore::RuntimeWarning", "-X", "faulthandler", "-c", code]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=PATIENCE_S, check=False, **options)


NEVER = f"never = {{'logit_bias': {{{IM_END}: -100.0}}}}\n"
ENDS = {
    "after an answer": "print(model.generate('hi', max_tokens=2).reason)",
    "within an answer": NEVER + "stream = model.chat('hi', **never); next(stream); print('length')",
    "in a thread": NEVER
    + "import threading, time\n"
    + "threading.Thread(target=lambda: model.generate('hi', **never), daemon=True).start()\n"
    + "time.sleep(0.05); print('length')",
    "in sixteen threads and a task": NEVER
    + "import asyncio, threading, time\n"
    + "for _ in range(16): threading.Thread(target=lambda: list(model.chat('hi', **never)), daemon=True).start()\n"
    + "async def main():\n    task = asyncio.create_task(model.agenerate('hi', **never)); await asyncio.sleep(0.05)\n"
    + "asyncio.run(main()); print('length')",
    "with an executor": "from concurrent.futures import ThreadPoolExecutor\n"
    + "pool = ThreadPoolExecutor(); answer = pool.submit(model.generate, 'hi', max_tokens=500)\n"
    + "answer.add_done_callback(lambda _: print('length'))",
    "in a handler": "import atexit; atexit.register(lambda: print(model.generate('hi', max_tokens=2).reason))",
    "with several models": NEVER
    + "others = [load({name!r}) for _ in range(3)]\n"
    + "streams = [each.chat('hi', **never) for each in others]; print('length')",
}


@pytest.mark.sampled
@pytest.mark.parametrize("how", ENDS)
def test_a_program_ends_silently(directory: Path, how: str) -> None:
    done = run(ENDS[how].replace("{name!r}", repr(str(directory))), directory)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "length\n")


def test_a_forked_process_has_to_load_the_model(directory: Path) -> None:
    script = """
import multiprocessing, os
def child(queue):
    for use in (lambda: model.generate('hi'), lambda: next(stream)):
        try:
            use()
        except EngineError as error:
            queue.put(str(error))
    model.close()
    queue.put(model.count_tokens('hi'))
stream = model.chat('hi', max_tokens=3)
context = multiprocessing.get_context('fork')
queue = context.Queue()
process = context.Process(target=child, args=(queue,))
process.start()
print(queue.get(), queue.get(), queue.get(), sep='\\n')
process.join()
if os.fork() == 0:
    sys.exit(7)  # with the handlers of the parent
print(process.exitcode, os.waitstatus_to_exitcode(os.wait()[1]), model.generate('hi', max_tokens=2).reason)
"""
    done = run(script, directory)
    assert (done.returncode, done.stderr) == (0, "")
    *errors, count, end = done.stdout.splitlines()
    assert [error.endswith("was loaded before this process was forked") for error in errors] == [True, True]
    assert (count, end) == ("2", "0 7 length")


@pytest.mark.parametrize("name", ["granite", "qwen3.5", "nemotron-h"])
def test_closing_frees_the_states_of_every_kind_of_layer(tmp_path: Path, name: str) -> None:
    directory = write_mlx_lm_model(tmp_path / "model", {**config_of(name), "vocab_size": 260})
    write_byte_tokenizer(directory)
    before = mx.get_active_memory()
    gc.disable()
    try:
        with load(directory) as model:
            model.generate("hi", raw=True, max_tokens=3)
            model.batch(["a", "b"], raw=True, max_tokens=3)
        assert mx.get_active_memory() < before + 1024
    finally:
        gc.enable()


@pytest.mark.nightly
def test_twenty_turns_of_two_models_leak_no_memory(directory: Path, tmp_path: Path) -> None:
    """With garbage collection off: what closing frees, it frees at once."""
    other = write_chat_model(tmp_path / "other", hidden_size=256, num_hidden_layers=8, intermediate_size=2048)
    script = f"""
import gc, os, threading
import mlx.core as mx
model.close()
gc.disable()
def turn():
    for name in ({str(directory)!r}, {str(other)!r}):
        with load(name) as model:
            model.generate('hi', max_tokens=3)
            next(model.chat('hi'))
            list(model.chat('hi', max_tokens=3, schema={{"type": "string", "maxLength": 2}}, stop="x"))
        print(mx.get_active_memory() + mx.get_cache_memory(), end=' ')
    tasks = len(os.listdir('/proc/self/task')) if os.path.isdir('/proc/self/task') else 0
    with open('/proc/self/statm') as file:
        pages = int(file.read().split()[1])
    return pages * os.sysconf('SC_PAGE_SIZE'), tasks, len(os.listdir('/proc/self/fd'))
sizes = [turn() for _ in range(10)]
print()
for size in sizes: print(*size)
"""
    done = run(script, directory)
    assert (done.returncode, done.stderr) == (0, "")
    held, *turns = done.stdout.splitlines()
    assert max(map(int, held.split())) < 1024  # such as a position, which passes share
    sizes = [tuple(map(int, turn.split())) for turn in turns]
    assert len({size[1:] for size in sizes[2:]}) == 1  # threads and open files
    # The least of several turns: a busy machine leaves pages of a turn with the allocator.
    grown = min(size[0] for size in sizes[6:]) - min(size[0] for size in sizes[2:6])
    # A thread may leave an arena of some MB once; the larger network has 20 MB, so a leak of it has 80.
    assert grown < 20 << 20, sizes
