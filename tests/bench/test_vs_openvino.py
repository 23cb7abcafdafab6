"""OpenVINO GenAI as a peer: settings, threads and logits. The fake has its calls and is fastest at known settings."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.app.bench.measure import peers
from headrace.runtime.errors import EngineError, UsageError
from headrace.runtime.ops import native
from tests.bench import vs_openvino
from tests.conftest import TEST_HOME
from tests.support.tiny_chat import write_chat_model

FAKE = """
import os
import numpy

class Tensor:
    def __init__(self, data): self.data = data

class Compiled:
    def __init__(self, settings): self.settings = settings
    def get_property(self, name):
        most = int(os.environ.get("FAKE_MOST_THREADS", "1000")) if name == "INFERENCE_NUM_THREADS" else None
        return self.settings[name] if most is None else min(self.settings[name], most)
    def create_infer_request(self): return self
    def reset_state(self): self.fed = 0
    def infer(self, inputs):
        ids = inputs["input_ids"]
        assert inputs["attention_mask"].shape == (1, self.fed + ids.shape[1])
        assert inputs["position_ids"][0].tolist() == list(range(self.fed, self.fed + ids.shape[1]))
        self.fed += ids.shape[1]
        return {"logits": numpy.zeros((*ids.shape, int(os.environ["FAKE_VOCABULARY"])), numpy.float32)}

class Core:
    def get_property(self, device, name): return ["FP32", *os.environ.get("FAKE_HALF", "BF16").split()]
    def read_model(self, path):
        assert os.path.exists(path)
        return path
    def compile_model(self, model, device, settings): return Compiled(settings)
"""

FAKE_GENAI = """
import os, time
from types import SimpleNamespace
StreamingStatus = SimpleNamespace(RUNNING=0)
now = 0.0
time.perf_counter = lambda: now  # a clock that the load of the machine does not move

def wait(seconds):
    global now
    now += seconds

def delay(settings, attention):
    slow = settings["KV_CACHE_PRECISION"] != "f16", settings["DYNAMIC_QUANTIZATION_GROUP_SIZE"] != 32, attention != "PA"
    return 0.002 + 0.02 * sum(slow)

class SchedulerConfig: ...
class StreamerBase: ...

class GenerationConfig:
    def __init__(self, max_new_tokens, ignore_eos, do_sample, apply_chat_template):
        assert ignore_eos and not do_sample and not apply_chat_template
        self.count = max_new_tokens

class Tokenizer:
    def __init__(self, folder): ...
    def get_vocab(self): return dict.fromkeys(range(64))

class LLMPipeline:
    def __init__(self, path, device, *, enable_save_ov_model=False, **settings):
        self.settings = settings
        if enable_save_ov_model:
            if open(path, "rb").read() != b"GGUF":
                raise RuntimeError("Unsupported architecture:\\n mamba")
            open(os.path.join(os.path.dirname(path), "openvino_model.xml"), "w").close()
            with open(os.environ["FAKE_FOLDERS"], "a") as out:
                out.write(os.path.dirname(path))
    def generate(self, ids, options, streamer):
        for _ in range(options.count):
            wait(delay(self.settings, self.settings["ATTENTION_BACKEND"]))
            streamer.write(0)

class Handle:
    def __init__(self, count): self.left, self.given = count, 0
    def read_all(self): return [SimpleNamespace(generated_ids=[0] * self.given)]

class ContinuousBatchingPipeline:
    def __init__(self, folder, scheduler, device, settings):
        assert scheduler.enable_prefix_caching and scheduler.num_kv_blocks * 32 >= scheduler.max_num_batched_tokens
        self.settings, self.running = settings, []
    def add_request(self, number, ids, options):
        self.running.append(Handle(options.count))
        return self.running[-1]
    def has_non_finished_requests(self): return bool(self.running)
    def step(self):
        wait(delay(self.settings, "PA"))
        for one in self.running:
            one.given += 1
        self.running = [one for one in self.running if one.given < one.left]
"""


Run = Callable[[list[str]], dict[str, Any]]


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A comparison of a tiny model with the fake."""
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    monkeypatch.setenv("FAKE_FOLDERS", str(tmp_path / "folders"))
    for name, text in (("openvino", FAKE), ("openvino_genai", FAKE_GENAI)):
        (tmp_path / "fake").mkdir(exist_ok=True)
        (tmp_path / "fake" / f"{name}.py").write_text(text)
    (tmp_path / "fake" / "openvino_genai-9.9.dist-info").mkdir()
    (tmp_path / "fake" / "openvino_genai-9.9.dist-info" / "METADATA").write_text("Name: openvino-genai\nVersion: 9.9\n")
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    model = write_chat_model(tmp_path / "tiny")
    gguf = str(tmp_path / "some.gguf")
    return [gguf, sys.executable, "-m", str(model), "-p", "8", "-n", "4", "-r", "1", "--json"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the script with arguments and return its document."""
    monkeypatch.setattr(peers, "OPENERS", dict(peers.OPENERS))

    def measured(arguments: list[str]) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["openvino", *arguments])
        vs_openvino.main()
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return measured


def theirs(found: dict[str, Any]) -> dict[str, Any]:
    engine: dict[str, Any] = next(entry for entry in found["engines"] if entry["engine"] == "openvino")
    return engine


def test_the_fastest_settings_of_openvino_are_found_and_named(run: Run, arguments: list[str], tmp_path: Path) -> None:
    found = run([*arguments, "-d", "0,8", "--batch", "1,3"])
    engine = theirs(found)
    assert engine["version"] == "9.9"
    for test in ("pp8", "pp8 @ d8", "tg4", "tg4 @ d8", "tg4 x3", "tg4 x3 @ d8"):
        assert engine["settings"][f"{test} with"].split()[:2] == ["f16", "32"], test
        assert engine["settings"][f"{test} with"].endswith("PA"), test
    assert engine["settings"]["ATTENTION_BACKEND"] == "PA or SDPA"
    assert {(ratio["test"], ratio["depth"]) for ratio in found["ratios"]} >= {("pp8", 0), ("tg4 x3", 8)}
    assert not Path((tmp_path / "folders").read_text()).exists()  # the converted model is gone


def test_whole_prompts_run_without_paged_attention_if_faster(run: Run, arguments: list[str], tmp_path: Path) -> None:
    fake = tmp_path / "fake" / "openvino_genai.py"
    fake.write_text(fake.read_text().replace('attention != "PA"', 'attention == "PA"'))
    settings = theirs(run([*arguments, "-d", "0,8", "--batch", "1,3"]))["settings"]
    contiguous = {name for name, value in settings.items() if name.endswith("with") and value.endswith("SDPA")}
    assert contiguous == {"pp8 with", "tg4 with", "tg4 @ d8 with"}


def test_the_thread_count_of_openvino_is_checked(
    run: Run, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native.status().available:
        pytest.skip("needs the native kernels")
    assert theirs(run([*arguments, "--peer-threads", "5"]))["threads"] == 5
    monkeypatch.setenv("FAKE_MOST_THREADS", "1")
    before = native.status().threads
    try:
        with pytest.raises(UsageError, match=r"openvino decodes on 1 thread"):
            run([*arguments, "--threads", "2"])
    finally:
        native.set_threads(before or 0)


def test_settings_follow_kv_format_and_processor(
    run: Run, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_HALF", "FP16")
    engine = theirs(run([*arguments, "--kv", "q8"]))
    assert engine["settings"]["KV_CACHE_PRECISION"] == "u8"
    assert engine["settings"]["tg4 with"] == "u8 32 f32 PA"
    with pytest.raises(UsageError, match="openvino has no comparable K/V format q4"):
        run([*arguments, "--kv", "q4"])


def test_an_unsupported_model_is_refused_with_openvinos_message(run: Run, arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "some.gguf").write_bytes(b"other")
    with pytest.raises(EngineError, match="Unsupported architecture: mamba"):
        run(arguments)
    assert not list(tmp_path.glob("headrace-openvino-*"))


def test_a_missing_interpreter_is_named(run: Run, arguments: list[str]) -> None:
    arguments[1] = "/nowhere/python"
    with pytest.raises(EngineError, match="/nowhere/python"):
        run(arguments)


@pytest.mark.peer
def test_an_installed_openvino_converts_measures_and_answers(
    run: Run, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    python = os.environ.get("HEADRACE_TEST_OPENVINO_PYTHON")
    gguf = next(TEST_HOME.glob("*.gguf"), None)
    if not python or gguf is None:
        pytest.skip("HEADRACE_TEST_OPENVINO_PYTHON names no Python with openvino-genai")
    monkeypatch.delenv("PYTHONPATH")
    engine = theirs(run([str(gguf), python, *arguments[2:], "-p", "0"]))
    assert engine["threads"] == (native.status().threads or engine["threads"])
    assert engine["settings"]["tg4 with"]
