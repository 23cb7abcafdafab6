"""Logits of peers against float32. The fakes give every token the same logit."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.runtime import ops
from headrace.runtime.errors import EngineError, UsageError
from headrace.runtime.ops import native
from tests.bench import engine_quality
from tests.bench.test_vs_openvino import FAKE, FAKE_GENAI, Run
from tests.support.tiny_chat import write_chat_model

VOCAB = 260  # of the tiny chat model

FAKE_LLAMA = """
import ctypes, os
from types import SimpleNamespace
__version__ = "fake"
WIDTH = int(os.environ["FAKE_VOCABULARY"])
state = SimpleNamespace(length=0, rows=0)

class Llama:
    def __init__(self, path, *, n_ctx, n_threads, n_threads_batch, **_options):
        self._ctx = SimpleNamespace(ctx=(n_threads, n_threads_batch))
    def n_vocab(self): return WIDTH

def llama_n_threads(ctx): return ctx[0]
def llama_n_threads_batch(ctx): return ctx[1]
def llama_get_memory(ctx): return None
def llama_memory_clear(memory, data): state.length = 0
def llama_synchronize(ctx): ...
def llama_batch_init(count, *_):
    return SimpleNamespace(n_tokens=0, token=[0] * count, pos=[0] * count, n_seq_id=[0] * count,
                           seq_id=[[9] for _ in range(count)], logits=[0] * count)

def llama_decode(ctx, batch):
    count = batch.n_tokens
    right = batch.pos[:count] == list(range(state.length, state.length + count)) and batch.seq_id[0] == [0]
    state.length += count
    state.rows = sum(batch.logits[:count])
    return 0 if right and batch.logits[count - 1] else 1

def llama_get_logits(ctx):
    return ctypes.cast((ctypes.c_float * (state.rows * WIDTH))(), ctypes.POINTER(ctypes.c_float))
"""

# Parameters have more fields than ik_llama.py declares; the last ones have to arrive as they left.
FAKE_IK = r"""
#include <cstdint>
#include <cstdlib>
extern "C" {
struct model_params { long fields[20]; };
struct context_params { uint32_t seed, ctx, batch, ubatch, seqs, threads, threads_batch; double fields[40]; };
struct batch {
    int32_t count; int32_t *token; float *embd; int32_t *pos, *seqs, **seq; int8_t *logits; int32_t last[3];
};
struct context { context_params params; int length; int rows; };
void llama_backend_init() {}
int llama_n_vocab(void *) { return WIDTH; }
model_params llama_model_default_params() { model_params params{}; params.fields[19] = 19; return params; }
context_params llama_context_default_params() { context_params params{}; params.fields[39] = 39; return params; }
void *llama_model_load_from_file(const char *, model_params params) {
    return params.fields[19] == 19 ? malloc(1) : nullptr;
}
context *llama_init_from_model(void *, context_params params) {
    return params.fields[39] == 39 && params.ctx ? new context{params, 0, 0} : nullptr;
}
uint32_t llama_n_threads(context *c) { return c->params.threads; }
uint32_t llama_n_threads_batch(context *c) { return c->params.threads_batch; }
void llama_kv_cache_clear(context *c) { c->length = 0; }
void llama_synchronize(context *) {}
batch llama_batch_init(int count, int, int) {
    auto seq = new int32_t *[count];
    for (int i = 0; i < count; i++) seq[i] = new int32_t[1];
    return {0, new int32_t[count], nullptr, new int32_t[count], new int32_t[count], seq, new int8_t[count], {1, 2, 3}};
}
int llama_decode(context *c, batch b) {
    c->rows = 0;
    for (int i = 0; i < b.count; i++) {
        if (b.pos[i] != c->length + i || b.seqs[i] != 1 || b.seq[i][0] != 0) return 1;
        c->rows += b.logits[i];
    }
    c->length += b.count;
    return b.last[2] == 3 ? 0 : 1;
}
float *llama_get_logits(context *c) { return static_cast<float *>(calloc(c->rows * WIDTH, sizeof(float))); }
}
"""

pytestmark = pytest.mark.skipif(not native.status().available, reason="needs the native kernels")


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    fakes = {"llama_cpp": FAKE_LLAMA, "openvino": FAKE, "openvino_genai": FAKE_GENAI}
    (tmp_path / "fake" / "openvino_genai-9.9.dist-info").mkdir(parents=True)
    (tmp_path / "fake" / "openvino_genai-9.9.dist-info" / "METADATA").write_text("Name: openvino-genai\nVersion: 9.9\n")
    for name, text in fakes.items():
        (tmp_path / "fake" / f"{name}.py").write_text(text)
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    monkeypatch.setenv("FAKE_FOLDERS", str(tmp_path / "folders"))
    monkeypatch.setenv("FAKE_VOCABULARY", str(VOCAB + 3))  # padded, as some engines do
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    model = write_chat_model(tmp_path / "tiny", context=600)
    return [
        str(tmp_path / "some.gguf"), "-m", str(model), "-d", "0,150", "-n", "40", "--json",
        "--llama-python", sys.executable, "--openvino-python", sys.executable,
    ]  # fmt: skip


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the script with arguments and return its document."""

    def compared(arguments: list[str]) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["engine_quality", *arguments])
        engine_quality.main()
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return compared


def test_every_engine_is_compared_with_float32(run: Run, arguments: list[str]) -> None:
    found = run(arguments)
    every = {entry["variant"]: entry for entry in found["results"] if entry["depth"] is None}
    assert list(every) == ["headrace", "llama.cpp", "openvino", "openvino f32"]
    for peer in ("llama.cpp", "openvino", "openvino f32"):
        assert every[peer]["perplexity"] == pytest.approx(VOCAB)  # the padding is cut off
        assert every[peer]["kl_mean"]["value"] > every["headrace"]["kl_mean"]["value"]
        assert every[peer]["weight_bytes_per_step"] is None
    assert 0 < every["headrace"]["kl_mean"]["value"] < 1e-3
    each = [entry for entry in found["results"] if entry["depth"] is not None]
    assert {(entry["depth"], entry["phase"]) for entry in each} == {
        (depth, phase) for depth in (0, 150) for phase in ("prefill", "decode")
    }
    assert all(entry["tokens_per_second"] > 0 and math.isfinite(entry["tokens_per_second"]) for entry in each[:4])
    engines = {engine["engine"]: engine for engine in found["engines"]}
    assert engines["openvino"]["settings"]["KV_CACHE_PRECISION"] == "u8"
    assert engines["openvino f32"]["settings"]["KV_CACHE_PRECISION"] == "f32"
    assert engines["llama.cpp"]["threads"] == native.status().threads


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_ik_llama_cpp_is_read_through_its_library(run: Run, arguments: list[str], tmp_path: Path) -> None:
    build = tmp_path / "build"
    (build / "src").mkdir(parents=True)
    (build / "ggml" / "src").mkdir(parents=True)
    source = tmp_path / "fake.cpp"
    source.write_text(FAKE_IK)
    library = build / "src" / "libllama.so"
    command = ["c++", "-std=c++17", "-shared", "-fPIC", f"-DWIDTH={VOCAB + 3}", "-o", library, source]
    subprocess.run(command, check=True)
    shutil.copy(library, build / "ggml" / "src" / "libggml.so")
    found = run([*arguments[:-4], "-d", "0", "--ik-build", str(build)])
    (peer,) = (entry for entry in found["results"] if entry["depth"] is None and entry["variant"] == "ik_llama.cpp")
    assert peer["perplexity"] == pytest.approx(VOCAB)
    (engine,) = (engine for engine in found["engines"] if engine["engine"] == "ik_llama.cpp")
    assert (engine["threads"], engine["version"]) == (native.status().threads, "unknown")


def test_threads_are_those_asked_for(run: Run, arguments: list[str]) -> None:
    before = native.status().threads
    try:
        assert {engine["threads"] for engine in run([*arguments, "--threads", "1"])["engines"]} == {1}
    finally:
        native.set_threads(before or 0)


def test_a_missing_interpreter_is_named(run: Run, arguments: list[str]) -> None:
    with pytest.raises(EngineError, match="/nowhere/python"):
        run(["/nowhere/python" if word == sys.executable else word for word in arguments])


def test_a_smaller_vocabulary_is_refused(run: Run, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VOCABULARY", str(VOCAB - 1))
    with pytest.raises(EngineError, match=r"llama\.cpp: .* logits a token"):
        run(arguments)


def test_float32_takes_the_native_kernels(run: Run, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "select", lambda: ops.reference)
    with pytest.raises(UsageError, match="float32"):
        run(arguments)
