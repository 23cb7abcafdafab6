"""K/V formats side by side: comparable peers, and llama.cpp's options."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from headrace.app.bench.measure.child_process import ChildProcess
from headrace.app.bench.measure.kv_formats import check_formats, check_memory, kv_ratios, peer_kv_type
from headrace.app.bench.measure.llama_bench import LlamaBench
from headrace.app.bench.measure.peers import CHILDREN
from headrace.app.bench.measure.plan import Test
from headrace.app.bench.measure.records import Result
from headrace.app.bench.show.formats import kv_ratio_line
from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.cost.costs import shape_to_run, working_memory
from headrace.models.loading.load import LoadedModel
from headrace.runtime.errors import NotEnoughMemoryError, UsageError
from headrace.runtime.machine import memory
from tests.app.cli.test_bench import LLAMA_BENCH
from tests.app.cli.test_bench_threads import FAKE
from tests.support.bench import bench_result
from tests.support.tiny import write_model

# Reports its options in its settings, as the real one does.
TELLS = LLAMA_BENCH.replace('"flash_attn": True', '"flash_attn": True, "type_k": options.get("-ctk", "f16")')

# Recurrent state: entries can be removed all or not at all. Its context reports how many it holds.
RECURRENT = """
held = 0
def llama_batch_get_one(array, count): return count
def llama_decode(ctx, count):
    global held
    held += count
    return 0
def llama_memory_seq_rm(memory, sequence, first, last):
    global held
    assert sequence >= 0  # all sequences at once: the real one leaves its cells taken
    if 0 < first < held:
        return False
    held = min(held, max(first, 0))
    return True
def llama_perf_context(ctx): return SimpleNamespace(t_eval_ms=1e3, n_eval=held)
"""


@pytest.mark.parametrize(
    ("formats", "peers", "message"),
    [
        (["q5"], [], "q5"),
        (["auto", "q8"], [], "--kv auto"),
        (["f16", "q8"], ["llama.cpp"], "--vs"),
        (["q4"], ["llama.cpp"], r"llama\.cpp.*\bq4"),
        (["auto"], ["llama.cpp"], r"llama\.cpp.*\bauto"),
        (["q8"], ["llama.cpp", "mlx-lm"], r"mlx-lm.*\bq8"),
    ],
)
def test_incomparable_formats_are_refused(formats: list[str], peers: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_formats(formats, peers)


def test_comparable_formats_are_accepted() -> None:
    for formats, peers in ((["f16", "q8", "q4"], []), (["auto"], []), (["q8"], ["llama.cpp"]), (["f16"], ["mlx-lm"])):
        check_formats(formats, peers)


def test_formats_are_compared_with_the_first_round_by_round() -> None:
    def entry(model: str, samples: list[float], depth: int = 0, engine: str = "headrace") -> Result:
        return bench_result(engine=engine, model=model, depth=depth, samples=samples)

    models = cast(list[LoadedModel], [SimpleNamespace(name="m f16"), SimpleNamespace(name="m q8")])
    results = [
        entry("m f16", [100, 50]),
        entry("m q8", [120, 60, 1]),
        entry("m q8", [10, 10], depth=9),
        entry("m q8", [999, 999], engine="mlx-lm"),
        entry("other", [7, 7]),
    ]
    (ratio,) = kv_ratios(results, models)
    assert (ratio.model, ratio.base, ratio.depth, ratio.pairs) == ("m q8", "m f16", 0, 2)
    assert ratio.ratio == pytest.approx(1.2)
    assert kv_ratio_line(ratio) == "tg4: m q8 1.20x of m f16 (1.20 to 1.20)"
    assert kv_ratios(results, models[:1]) == []


@pytest.mark.parametrize(("kv", "flashes"), [("f16", {"0", "1"}), ("q8", {"1"})])
def test_llama_bench_gets_the_same_format(tmp_path: Path, kv: str, flashes: set[str]) -> None:
    program = tmp_path / "llama-bench"
    script = f"open({str(tmp_path / 'told')!r}, 'a').write(json.dumps(options) + chr(10))\nprint("
    program.write_text(TELLS.replace("print(", script, 1).replace("{str", "{{str").format(python=sys.executable))
    program.chmod(0o755)
    peer = LlamaBench("m", str(program), "some.gguf", 2, peer_kv_type(kv))
    assert peer.setup.settings["kv_type"] == peer_kv_type(kv)
    test = Test(0, 4)
    peer.warm_up(test)
    peer.measure(test)
    told = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    assert {options.get("-ctv", "f16") for options in told} == {peer_kv_type(kv)}
    assert {options["-fa"] for options in told} == flashes


@pytest.mark.parametrize(("kv", "flash"), [("f16", "on or off, the faster for each test"), ("q8", "on")])
def test_llama_cpp_python_gets_the_same_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv: str, flash: str
) -> None:
    (tmp_path / "llama_cpp.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    script = str(CHILDREN / "llama_cpp_child.py")
    command = [sys.executable, script, "some.gguf", "64", "2", peer_kv_type(kv)]
    child = ChildProcess("llama.cpp", "m", command, threads=2, tunes=True)
    try:
        assert child.setup.settings["kv_type"] == peer_kv_type(kv)
        assert child.setup.settings["flash_attention"] == flash
        child.warm_up(Test(0, 4))
        assert len(child.measure(Test(0, 4)).latencies_s) == 3
    finally:
        child.close()


def test_llama_cpp_tunes_no_flash_attention_without_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = """
fed = 0
def llama_model_is_recurrent(model): return True
def llama_batch_get_one(array, count): return count
def llama_decode(ctx, count):
    global fed
    fed += count
    return 0
def llama_perf_context(ctx): return SimpleNamespace(t_eval_ms=1e3, n_eval=fed)
"""
    (tmp_path / "llama_cpp.py").write_text(FAKE + counting)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = [sys.executable, str(CHILDREN / "llama_cpp_child.py"), "some.gguf", "64", "2", "f16"]
    child = ChildProcess("llama.cpp", "m", command, threads=2, tunes=True)
    try:
        assert child.setup.settings["flash_attention"] == "on"
        child.warm_up(Test(0, 8))  # 4 tokens, then all 8
        assert child.measure(Test(0, 8)).own_tokens_per_second == 4 + 8 + 8
    finally:
        child.close()


def test_llama_cpp_prefills_hybrid_models_anew_at_each_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama_cpp.py").write_text(FAKE + RECURRENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = [sys.executable, str(CHILDREN / "llama_cpp_child.py"), "some.gguf", "64", "2", "q8_0"]
    child = ChildProcess("llama.cpp", "m", command, threads=2, tunes=False)
    try:
        for depth in (16, 16, 8, 0):
            assert child.measure(Test(0, 4, depth)).own_tokens_per_second == depth + 4
    finally:
        child.close()


def test_caches_of_all_measured_formats_must_fit_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(write_model(tmp_path, "llama"))

    def model(per_token: int) -> LoadedModel:
        cost = SimpleNamespace(weight_bytes=1 << 30, kv_bytes=lambda tokens: per_token * tokens)
        return cast(LoadedModel, SimpleNamespace(network=SimpleNamespace(cost=cost), checkpoint=checkpoint))

    both = [model(1 << 20), model(1 << 19)]
    free = 1500 * (1 << 20) + working_memory(shape_to_run(checkpoint))
    monkeypatch.setattr(memory, "budget", lambda: memory.MemoryBudget(2 * free, free, 0, "available RAM"))
    check_memory(both, 1000)
    check_memory(both[:1], 1001)
    with pytest.raises(NotEnoughMemoryError, match="KV cache for 1,001 tokens"):
        check_memory(both, 1001)
