"""Every engine of a comparison has the same number of threads: the peers are asked what they use.

The fake binding does what llama-cpp-python does when nobody names a number: half of the cores decode.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from headrace.app.bench.measure.setup import EngineSetup, check_threads
from headrace.app.cli.bench.command import bench
from headrace.runtime.errors import UsageError
from headrace.runtime.ops import native
from tests.support.tiny_chat import write_chat_model

FAKE = """
import ctypes, multiprocessing, os, time
from types import SimpleNamespace
__version__ = "fake"
llama_token = ctypes.c_int32

class Llama:
    def __init__(self, path, *, n_ctx, n_threads=None, n_threads_batch=None, n_batch=512, n_ubatch=512, type_k=1,
                 type_v=1, flash_attn=False, **_options):
        if type_v != 1 and not flash_attn:
            raise ValueError("quantized values take flash attention")
        if type_k != type_v:
            raise ValueError("of different kinds")
        cores = multiprocessing.cpu_count()
        most = int(os.environ.get("FAKE_LLAMA_MOST_THREADS", "1000"))
        self.used = (min(most, n_threads or max(cores // 2, 1)), min(most, n_threads_batch or cores))
        self._model = SimpleNamespace(model=None)
        self._ctx = SimpleNamespace(ctx=SimpleNamespace(used=self.used, batch=n_batch, ubatch=n_ubatch))

    def n_vocab(self):
        return 64

    def generate(self, tokens, *, temp, **_options):
        guesses = self.draft_model.num_pred_tokens
        for number in range(1000):
            if number % (guesses + 1) == 0:
                time.sleep(0.002 + 0.001 * guesses)
            yield 7 if number < 20 else 258

def llama_n_threads(ctx): return ctx.used[0]
def llama_n_threads_batch(ctx): return ctx.used[1]
def llama_n_batch(ctx): return ctx.batch
def llama_n_ubatch(ctx): return ctx.ubatch
def llama_decode(ctx, batch): return 0
def llama_perf_context(ctx): return SimpleNamespace(t_eval_ms=0, t_p_eval_ms=0)
def nothing(*_): return 0
for name in ("get_memory", "sampler_chain_init", "sampler_chain_default_params", "sampler_chain_add",
             "sampler_init_greedy", "memory_seq_rm", "synchronize", "batch_get_one", "sampler_sample",
             "perf_context_reset", "model_is_recurrent"):
    globals()["llama_" + name] = nothing
"""


FAKE_LOOKUP = """
class LlamaPromptLookupDecoding:
    def __init__(self, max_ngram_size=2, num_pred_tokens=10):
        self.num_pred_tokens = num_pred_tokens
"""


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A comparison of a tiny model with the fake."""
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    (tmp_path / "fake" / "llama_cpp").mkdir(parents=True)
    (tmp_path / "fake" / "llama_cpp" / "__init__.py").write_text(FAKE)
    (tmp_path / "fake" / "llama_cpp" / "llama_speculative.py").write_text(FAKE_LOOKUP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    model = write_chat_model(tmp_path / "tiny")
    return [
        "-m", str(model), "-p", "8", "-n", "4", "-r", "1", "--no-pg", "--vs", "llama.cpp",
        "--llama-python", sys.executable, "--llama-model", str(tmp_path / "some.gguf"), "--json",
    ]  # fmt: skip


def run(arguments: list[str]) -> dict[str, Any]:
    done = CliRunner().invoke(bench, arguments, catch_exceptions=False, standalone_mode=False)
    found = json.loads(done.stdout)
    assert {entry["engine"] for entry in found["results"]} == {"headrace", "llama.cpp"}, found["notes"]
    return {entry["engine"]: entry for entry in found["engines"]}


needs_kernels = pytest.mark.skipif(not native.status().available, reason="needs the native kernels")


@needs_kernels
def test_workloads_are_answered_with_its_prompt_lookup(arguments: list[str]) -> None:
    lengths = ("-p", "8", "-n", "4", "--no-pg")
    asked = [word for word in arguments if word not in lengths]
    done = CliRunner().invoke(
        bench, [*asked, "--speculate", "--workload", "prose"], catch_exceptions=False, standalone_mode=False
    )
    found = json.loads(done.stdout)
    theirs = [entry for entry in found["results"] if entry["engine"] == "llama.cpp"]
    ours = [entry for entry in found["results"] if entry["engine"] == "headrace"]
    assert [entry["test"] for entry in theirs] == ["prose", "prose t1"], found["notes"]
    assert all(entry["speculation"] is None for entry in theirs)
    assert theirs[0]["prompt_tokens"] == ours[0]["prompt_tokens"] > 0
    assert [len(entry["repetitions"][0]["itl_ms"]) for entry in theirs] == [20, 20]  # to the end of turn
    assert [ratio["test"] for ratio in found["ratios"]] == ["prose", "prose t1"]
    assert any("prompt lookup decoding" in note for note in found["notes"])


@pytest.mark.sampled
@needs_kernels
@pytest.mark.parametrize("asked", [None, 1, 3])
def test_a_peer_has_as_many_threads_as_we_have(arguments: list[str], asked: int | None) -> None:
    before = native.status().threads
    try:
        engines = run([*arguments, *(["--threads", str(asked)] if asked else [])])
        ours = native.status().threads
    finally:
        native.set_threads(before or 0)
    assert asked in (None, ours)
    for engine in ("headrace", "llama.cpp"):
        assert (engines[engine]["threads"], engines[engine]["threads_batch"]) == (ours, ours)


@needs_kernels
def test_another_number_is_given_where_it_is_asked_for(arguments: list[str]) -> None:
    assert run([*arguments, "--peer-threads", "5"])["llama.cpp"]["threads"] == 5


@needs_kernels
def test_a_peer_that_takes_fewer_is_refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_LLAMA_MOST_THREADS", "1")
    before = native.status().threads
    try:
        with pytest.raises(UsageError, match=r"llama\.cpp decodes on 1 thread\b.*\b2") as caught:
            run([*arguments, "--threads", "2"])
    finally:
        native.set_threads(before or 0)
    assert caught.value.hint is not None
    assert "--peer-threads" in caught.value.hint


def test_batch_threads_count_too_and_unknown_numbers_do_not() -> None:
    ours = EngineSetup("headrace", "m", threads=4, threads_batch=4)
    check_threads([ours, EngineSetup("mlx-lm", "m"), EngineSetup("llama.cpp", "m", threads=4, threads_batch=4)], None)
    check_threads([EngineSetup("headrace", "m"), EngineSetup("llama.cpp", "m", threads=4, threads_batch=4)], None)
    with pytest.raises(UsageError, match="prefills on 8"):
        check_threads([ours, EngineSetup("llama.cpp", "m", threads=4, threads_batch=8)], None)
    with pytest.raises(UsageError, match="--peer-threads is 2"):
        check_threads([ours, EngineSetup("llama.cpp", "m", threads=4, threads_batch=4)], 2)


@pytest.mark.peer
def test_the_real_binding_reports_its_threads(with_peer: Callable[[str], list[str]]) -> None:
    engines = run(with_peer("HEADRACE_TEST_LLAMA_PYTHON"))
    assert engines["llama.cpp"]["threads"] == (native.status().threads or engines["llama.cpp"]["threads"])
    assert "faster" in engines["llama.cpp"]["settings"]["flash_attention"]
