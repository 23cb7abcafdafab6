"""Every benchmark script runs in its smallest form; results are ignored."""

import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from headrace.models.gguf.container import open_container
from headrace.models.registry.catalog import load_catalog
from headrace.runtime import ops
from headrace.runtime.ops import native
from tests.bench import graph_counts, kv_rounding, to_q4_0
from tests.support.gguf_layered_models import write_layered
from tests.support.tiny_chat import write_chat_model

HERE = Path(__file__).parent
COVERED = {
    "cpu_pairs",
    "graph_counts",
    "kernels",
    "make_family",
    "make_model",
    "metal_simulator",
    "speculation_draws",
    "speculation_pairs",
    "step_parts",
    "telemetry_overhead",
} | {
    "kv_peak",
    "kv_rounding",
    "pass_parts",
    "serve",
    "speculation_replay",
    "structured",
    "text_flow",
    "to_q4_0",
    "turns",
    "ui_tax",
    "widths",
}
# llama_cpu, llama_cpp_logits and openvino_child need a peer's interpreter; three scripts have tests of their own.
# chosen_bits takes minutes with the smallest model.
NOT_SCRIPTS = {
    "chosen_bits",
    "family_shapes",
    "llama_cpu",
    "llama_cpp_logits",
    "openvino_child",
    "published_shapes",
    "shapes",
    "__init__",
    "engine_quality",
    "ik_llama",
    "vs_ik_llama",
    "vs_openvino",
}


def run(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    import_module(f"tests.bench.{name}").main()


def test_every_script_is_covered() -> None:
    scripts = {path.stem for path in HERE.glob("*.py") if not path.stem.startswith("test_")}
    assert scripts - NOT_SCRIPTS == COVERED


@pytest.mark.nightly
@pytest.mark.peer
def test_graph_counts_prints_its_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for families in ("FAMILIES", "PACKED", "BATCHED"):
        monkeypatch.setattr(f"tests.bench.graph_counts.{families}", ("llama",))
    monkeypatch.setattr("tests.bench.graph_counts.OTHERS", {})
    monkeypatch.setattr("tests.bench.graph_counts.RULES", {"temperature": graph_counts.RULES["temperature"]})
    run("graph_counts", monkeypatch)
    assert "llama, mixed bits" in capsys.readouterr().out


@pytest.mark.peer
def test_metal_simulator_finds_no_model_slower_than_mlx_lms_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No model is slower than with mlx-lm's counts, and none of its K/V are copied."""
    from tests.bench import metal_simulator as simulator

    models = {"llama-3.2-1b": "llama", "gemma-3-1b": "gemma3", "qwen3-30b-a3b": "qwen3-moe"}
    counts = simulator.counts_of(set(models.values()))
    for model, family in models.items():
        shape = load_catalog()[model].step_shape
        for chip in map(simulator.chip_of, simulator.CHIPS):
            (own, copies), (other, _) = simulator.speeds(shape, counts[family], 512, chip)
            assert own >= other > 0
            assert copies == 0
    monkeypatch.setattr(simulator, "counts_of", lambda _: counts)
    monkeypatch.setattr(simulator, "MODELS", {"llama-3.2-1b": "llama"})
    run("metal_simulator", monkeypatch)
    assert "llama-3.2-1b" in capsys.readouterr().out


@pytest.mark.skipif(not native.status().available, reason="needs the native kernels")
def test_make_family_writes_a_gguf_that_cpu_pairs_times(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("make_family", monkeypatch, "tiny", str(tmp_path))
    container = open_container(tmp_path / "tiny.gguf")
    assert container.tensors["blk.0.shortconv.conv.weight"].shape == (64, 3)
    monkeypatch.setattr("tests.bench.cpu_pairs._PROMPT", 60)
    run("cpu_pairs", monkeypatch, str(tmp_path), "tiny", "--turns")
    native.set_threads(0)
    cold, second = capsys.readouterr().out.splitlines()
    assert cold.startswith("60 tokens: first one after ")
    assert second.startswith("118 tokens: ")


@pytest.mark.skipif(not native.status().available, reason="needs the native kernels")
def test_kernels_prints_a_step_at_each_depth(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.bench.kernels.STREAMED_BYTES", 1 << 20)
    monkeypatch.setattr("tests.bench.widths.WIDTHS", {4: (32,), 6: (16,)})
    run("kernels", monkeypatch, "--shape", "tiny", "--threads", "1", "--seconds", "0.001")
    native.set_threads(0)
    assert "step at depth  4096" in capsys.readouterr().out


def test_structured_prints_decode_speed_with_a_grammar(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("structured", monkeypatch, str(write_chat_model(tmp_path / "tiny")), "--rounds", "1", "--tokens", "9")
    assert "decode speed with a grammar of any text against free" in capsys.readouterr().out


@pytest.mark.skipif(not native.status().available, reason="needs the native kernels")
def test_pass_parts_prints_sequences_and_depth(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("pass_parts", monkeypatch, "--shape", "tiny", "--sequences", "1,3", "--depth", "130", "--times", "2")
    assert "3 sequences, depth 130" in capsys.readouterr().out


@pytest.mark.skipif(not native.status().available, reason="needs the native kernels")
def test_step_parts_prints_the_parts_of_each_depth(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(write_chat_model(tmp_path / "tiny"))
    run("step_parts", monkeypatch, model, "--depths", "0,40", "--steps", "4", "--rounds", "2", "--temperature", "1")
    parts = capsys.readouterr().out
    assert parts.count("between regions") == 2
    assert "depth 40" in parts


@pytest.mark.nightly
def test_speculation_draws_prints_a_biased_rule(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("speculation_draws", monkeypatch, "200")
    assert "a biased rule" in capsys.readouterr().out


@pytest.mark.skipif(not ops.select().supports_packed(32), reason="needs operations that read packed K/V")
def test_kv_peak_prints_its_peak(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("kv_peak", monkeypatch, "-m", str(write_chat_model(tmp_path / "tiny")), "-p", "40", "--kv", "q8")
    assert '"kv": "q8", "tokens": 40' in capsys.readouterr().out


def test_kv_rounding_prints_a_row_for_each_form(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.bench.kv_rounding.MEASURED", 40)
    model = str(write_chat_model(tmp_path / "tiny", head_dim=32))
    run("kv_rounding", monkeypatch, "-m", model, "-n", "20", "q4", "q4, both principal, feedback", "keys, centred")
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == ["| q4", "| q4, both principal, feedback", "| keys, centred"]
    assert all(float(row.split(" | ")[1]) > 0 for row in rows)


@pytest.mark.parametrize("form", ["keys, centred", "keys, principal", "keys, principal, feedback"])
def test_kv_rounding_takes_the_constant_part_of_keys_apart(form: str) -> None:
    generator = np.random.default_rng(0)
    constant = 5 * generator.normal(size=(2, 1, 64))
    keys = constant + generator.normal(size=(2, 300, 64))
    queries = generator.normal(size=(2, 300, 64)) * np.linspace(0.01, 1, 64)
    side = kv_rounding.Side(keys, keys[:, 0], kv_rounding.moments(queries))

    def loss(rounding: kv_rounding.Rounding) -> float:
        """Return the mean square of the errors of scores."""
        errors = kv_rounding.LayerRounding(side, rounding).apply(keys) - keys
        return float(np.square(queries @ errors.swapaxes(1, 2)).mean())

    used = kv_rounding.FORMS["keys"]["keys"]
    assert loss(kv_rounding.FORMS[form]["keys"]) < 0.2 * loss(used)
    assert loss(used._replace(bits=8)) < 0.01 * loss(used)


def test_speculation_replay_prints_its_rounds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("speculation_replay", monkeypatch, str(write_chat_model(tmp_path / "tiny")), "--tokens", "24")
    assert "edit     at 0:   24 tokens" in capsys.readouterr().out


def test_speculation_pairs_prints_its_gains(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(write_chat_model(tmp_path / "tiny"))
    run("speculation_pairs", monkeypatch, model, "--rounds", "1", "--tokens", "8", "--workload", "edit")
    native.set_threads(0)
    assert "edit     at 0:    8 tokens" in capsys.readouterr().out


def test_make_model_writes_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run("make_model", monkeypatch, "tiny", str(tmp_path / "made"))
    assert any(tmp_path.iterdir())


def test_telemetry_overhead_prints_its_share(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("telemetry_overhead", monkeypatch, str(write_chat_model(tmp_path / "tiny")))
    assert "of a step" in capsys.readouterr().out


@pytest.fixture
def installed(default_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Return a home of the tests with the default model."""
    home = default_model.parents[2]
    (home / "cache").mkdir(exist_ok=True)
    monkeypatch.setenv("HEADRACE_HOME", str(home))


@pytest.mark.nightly
@pytest.mark.real
@pytest.mark.usefixtures("installed")
def test_text_flow_prints_updates_a_second(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("text_flow", monkeypatch, "--rounds", "1", "--tokens", "120")
    assert "times a second" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.real
@pytest.mark.usefixtures("installed")
def test_turns_prints_the_ttft_of_each_turn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("turns", monkeypatch, "--turns", "2", "--rounds", "1", "--pauses", "0")
    assert "TTFT of turn 2" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.real
@pytest.mark.usefixtures("installed")
def test_ui_tax_compares_the_chat_with_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("tests.bench.ui_tax._KEYS", 2)
    run("ui_tax", monkeypatch, "--rounds", "1", "--tokens", "30", "--size", "100x30")
    assert "app / run --json" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.real
@pytest.mark.usefixtures("installed")
def test_serve_compares_clients_with_a_batch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("serve", monkeypatch, "--rounds", "1", "--tokens", "16", "--agent", "300")
    assert "8 clients over bench batch 8" in capsys.readouterr().out


def test_q4_1_becomes_q4_0(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    old = write_layered(tmp_path / "old.gguf", "lfm2", matrices="Q4_1")
    new = tmp_path / "new.gguf"
    to_q4_0.convert(str(old), str(new))
    before = gguf.GGUFReader(old)
    after = gguf.GGUFReader(new)
    kinds = [tensor.tensor_type.name for tensor in after.tensors]
    assert "Q4_1" not in kinds
    assert kinds == [tensor.tensor_type.name.replace("Q4_1", "Q4_0") for tensor in before.tensors]
    assert kinds.count("Q4_0") > 10
    assert after.fields.keys() == before.fields.keys()
    for one, other in zip(before.tensors, after.tensors, strict=True):
        values = [gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in (one, other)]
        assert abs(values[0] - values[1]).max() <= 0.2 * abs(values[0]).max()
