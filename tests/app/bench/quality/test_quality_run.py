"""`bench --quality`: the engine's own passes over a text, held against a computation without any engine."""

import json
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner, Result

from headrace.app.bench.quality.text import passages, read_text
from headrace.app.cli.bench.command import bench
from headrace.models.loading.forcing import TeacherForcing
from headrace.models.text.tokenizer import Tokenizer
from headrace.runtime import ops
from headrace.runtime.errors import UsageError
from headrace.runtime.ops import native
from tests.support.numpy_decoder import logits as plain_logits
from tests.support.tiny import VOCAB, load_decoder, quantize_model, write_model
from tests.support.tiny_chat import write_byte_tokenizer, write_chat_model
from tests.test_docs import check, sections

SMALL = ("-d", "0,150", "-n", "40")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("plain") / "tiny", context=600)


@pytest.fixture(scope="module")
def quantized(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = quantize_model(plain, tmp_path_factory.mktemp("quantized") / "tiny4")
    write_byte_tokenizer(directory)
    return directory


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(bench, ("--quality", *arguments), catch_exceptions=False, standalone_mode=False)


def weights_of(directory: Path) -> dict[str, Any]:
    """As float64, quantized ones dequantized."""
    stored = mx.load(str(directory / "model.safetensors"))
    assert isinstance(stored, dict)
    found = {}
    for name, array in stored.items():
        module, _, kind = name.rpartition(".")
        if kind in ("scales", "biases"):
            continue
        if (scales := stored.get(f"{module}.scales")) is not None:
            array = mx.dequantize(array, scales, stored[f"{module}.biases"], group_size=32, bits=4)
        found[name] = np.array(array, np.float64)
    return found


def expected(directory: Path, tokens: list[int], scored: int) -> Any:
    """Log probabilities of the last rows, (scored, V), by the plain computation."""
    logits = plain_logits(json.loads((directory / "config.json").read_text()), weights_of(directory), tokens)[-scored:]
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.sampled
@pytest.mark.parametrize("variant", ["llama", "gemma3"])  # gemma3: with a window, behind which entries are dropped
def test_scored_logits_equal_the_numpy_decoders(tmp_path: Path, variant: str) -> None:
    directory = write_model(tmp_path, variant)
    tokens = [(7 * i * i + 3 * i + 5) % VOCAB for i in range(190)]
    network = load_decoder(directory, native if native.status().available else native.reference)
    forced = TeacherForcing(network, len(tokens))
    whole = plain_logits(json.loads((directory / "config.json").read_text()), weights_of(directory), tokens)
    for depth in (0, 150, 20):
        forced.begin(tokens[:depth])
        for phase in ("prefill", "decode", "prefill"):  # each finds the context as it was
            pieces = list(forced.score(tokens[depth:], phase))
            found = np.concatenate([np.array(piece) for piece in pieces])
            assert max(piece.shape[0] for piece in pieces) <= 128
            assert np.abs(found - whole[depth:]).max() / np.abs(whole).max() < 3e-3
    forced.end()


def test_divergences_of_quantized_weights_follow_the_definition(plain: Path, quantized: Path) -> None:
    done = invoke("-m", str(plain), "--against", str(quantized), *SMALL, "--json")
    found = json.loads(done.stdout)
    assert done.return_value == 0
    described = sections("quality-json.md")
    check(described["Document"], found, own_section=("device", "reference", "against", "results"))
    for entry in found["results"]:
        check(described["An entry of results"], entry)
    every, *each = found["results"]
    conditions = [(depth, phase) for depth in (0, 150) for phase in ("prefill", "decode")]
    assert [(entry["depth"], entry["phase"]) for entry in each] == conditions
    assert (every["depth"], every["tokens"]) == (None, 160)
    found_at = passages(read_text(None), Tokenizer.load(plain), (0, 150), 40, 600, asked=True)
    sums = []
    for entry in each:
        passage = found_at[entry["depth"]]
        p, q = (expected(model, [*passage.context, *passage.fed], 40) for model in (plain, quantized))
        kl = (np.exp(p) * (p - q)).sum(-1)
        sums.append(kl.mean())
        rows = np.arange(40)
        assert entry["kl_mean"]["value"] == pytest.approx(kl.mean(), rel=0.02)
        assert entry["kl_p99"]["value"] == pytest.approx(np.quantile(kl, 0.99), rel=0.05)
        assert entry["top1_agreement"]["value"] == pytest.approx((p.argmax(-1) == q.argmax(-1)).mean(), abs=0.06)
        more = (p - q)[rows, passage.targets].mean()
        assert entry["perplexity_ratio"]["value"] == pytest.approx(np.exp(more), rel=2e-3)
        assert entry["reference_perplexity"] == pytest.approx(np.exp(-p[rows, passage.targets].mean()), rel=2e-3)
        assert entry["kl_mean"]["low"] < entry["kl_mean"]["value"] < entry["kl_mean"]["high"]
    assert every["kl_mean"]["value"] == pytest.approx(np.mean(sums), rel=0.02)


@pytest.mark.sampled
@pytest.mark.parametrize("changes", [{}, {"rope_traditional": True}], ids=["headrace", "mlx-lm"])
def test_a_model_has_no_divergence_from_itself(changes: dict[str, Any], tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "tiny", context=600, **changes)
    twin = tmp_path / "twin"
    twin.symlink_to(model)
    found = json.loads(invoke("-m", str(model), "--against", str(twin), *SMALL, "--json").stdout)
    assert {entry["kl_max"] for entry in found["results"]} == {0.0}
    assert {entry["top1_agreement"]["value"] for entry in found["results"]} == {1.0}
    assert {entry["perplexity_ratio"]["value"] for entry in found["results"]} == {1.0}


@pytest.mark.skipif(not ops.select().supports_packed(32), reason="needs operations that read packed K/V")
def test_formats_of_kv_cost_the_more_the_fewer_bits_they_have(plain: Path) -> None:
    found = json.loads(invoke("-m", str(plain), *SMALL, "--json").stdout)
    every = {entry["variant"]: entry for entry in found["results"] if entry["depth"] is None}
    assert list(every) == ["q8", "k8v4", "q4"]
    q8, k8v4, q4 = every.values()
    assert 0 < q8["kl_mean"]["value"] < k8v4["kl_mean"]["value"] < q4["kl_mean"]["value"]
    assert q8["kl_mean"]["value"] < 1e-3
    for entry, share in ((q8, 0.54), (k8v4, 0.47), (q4, 0.41)):  # heads of 32: the fifth bits are those of 64
        assert entry["kind"] == "kv"
        assert entry["kv_bytes_ratio"] <= share
        assert entry["weight_bytes_per_step"] == found["reference"]["weight_bytes_per_step"]
    phases = {(entry["variant"], entry["depth"], entry["phase"]): entry for entry in found["results"]}
    for kind in every:  # both ways through the kernels lose about as much
        a, b = (phases[kind, 150, phase]["kl_mean"]["value"] for phase in ("prefill", "decode"))
        assert 0.3 < a / b < 3


def test_formats_that_a_model_cannot_have_are_left_out_by_name(tmp_path: Path) -> None:
    """mlx-lm's caches have as many bits for keys as for values."""
    model = write_chat_model(tmp_path / "tiny", context=600, rope_traditional=True)
    done = invoke("-m", str(model), "-d", "0", "-n", "8", "--json")
    found = json.loads(done.stdout)
    assert done.return_value == 0
    assert {entry["variant"] for entry in found["results"]} == {"q8", "q4"}
    assert any(note.startswith("left out: K/V cannot be k8v4 here") for note in found["notes"])
    with pytest.raises(UsageError, match="k8v4"):
        invoke("-m", str(model), "-d", "0", "-n", "8", "--kv", "q8,k8v4")


def test_a_model_that_has_no_format_but_f16_has_nothing_to_compare(tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "tiny", context=600, head_dim=16, rope_traditional=True)
    with pytest.raises(UsageError, match="q8"):
        invoke("-m", str(model), "-d", "0", "-n", "8")


def test_the_same_tokens_are_scored_at_every_depth(plain: Path) -> None:
    tokenizer = Tokenizer.load(plain)
    found = passages("x" * 50 + "abcdefgh", tokenizer, (0, 10, 49), 8, 600, asked=True)
    assert {tuple(passage.targets) for passage in found.values()} == {tuple(tokenizer.encode("abcdefgh"))}
    assert {tuple(passage.fed) for passage in found.values()} == {tuple(tokenizer.encode("xabcdefg"))}
    assert [len(passage.context) for passage in found.values()] == [0, 10, 49]
    with pytest.raises(UsageError, match=r"58 tokens.*\b8\b.*\b50$"):
        passages("x" * 50 + "abcdefgh", tokenizer, (0, 50), 8, 600, asked=True)
    with pytest.raises(UsageError, match="16 tokens"):
        passages("x" * 50, tokenizer, (9,), 8, 16, asked=True)
    assert list(passages("x" * 50, tokenizer, (0, 8, 9), 8, 16, asked=False)) == [0, 8]


def test_a_text_begins_after_bos_if_the_model_has_one(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.load(plain)
    monkeypatch.setattr(Tokenizer, "_bos_prefix", [256])
    found = passages("x" * 50 + "abcdefgh", tokenizer, (0, 1, 10), 8, 600, asked=True)
    assert found[0].fed == [256, *tokenizer.encode("abcdefg")]
    assert found[1].context == [256]
    assert found[10].context == [256, *tokenizer.encode("x" * 9)]
    assert {len(passage.fed) for passage in found.values()} == {8}


def test_the_shipped_text_is_long_enough_for_the_default_depths() -> None:
    """At 4.3 characters a token: more than tokenizers with large vocabularies make of code, numbers and prose."""
    from headrace.app.bench.quality.text import DEPTHS, SCORED

    assert len(read_text(None)) / 4.3 > max(DEPTHS) + SCORED


@pytest.mark.parametrize("form", ["table", "md"])
def test_every_output_format_has_every_condition(plain: Path, quantized: Path, form: str) -> None:
    printed = invoke("-m", str(plain), "--against", str(quantized), "-d", "0,150", "-n", "8", "-o", form).stdout
    for depth, phase in ((0, "prefill"), (0, "decode"), (150, "prefill"), (150, "decode")):
        assert f"d{depth} {phase}" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--profile",), "--profile"),
        (("--vs", "mlx-lm"), "--vs"),
        (("-n", "1"), "-n"),
        (("-m", "a", "-m", "b"), "-m"),
        (("--text", "/nowhere/text"), "/nowhere/text"),
    ],
)
def test_options_of_speed_measurements_are_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        invoke("--against", "x", *arguments)


def test_speed_measurements_take_no_quality_options() -> None:
    with pytest.raises(UsageError, match="--quality"):
        CliRunner().invoke(bench, ("--against", "x"), catch_exceptions=False, standalone_mode=False)


def test_another_vocabulary_is_refused(plain: Path, tmp_path: Path) -> None:
    other = write_chat_model(tmp_path / "other", context=600)
    file = other / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(UsageError, match=r"other.*vocabulary.*tiny"):
        invoke("-m", str(plain), "--against", str(other), *SMALL)


def test_a_tokenizer_with_ids_beyond_the_vocabulary_is_named(tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "model", vocab_size=96)
    with pytest.raises(UsageError, match="the text has token ids outside the vocabulary of 96"):
        invoke("-m", str(model), "-n", "8", "-d", "0")


def test_ctrl_c_keeps_the_conditions_that_are_done(
    plain: Path, quantized: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score = TeacherForcing.score
    begun = []

    def interrupted(self: TeacherForcing, fed: Any, phase: Any) -> Any:
        begun.append(phase)
        if len(begun) == 7:  # two networks: in the fourth condition
            raise KeyboardInterrupt
        return score(self, fed, phase)

    monkeypatch.setattr(TeacherForcing, "score", interrupted)
    done = invoke("-m", str(plain), "--against", str(quantized), *SMALL, "--json")
    found = json.loads(done.stdout)
    assert done.return_value == 130
    assert found["interrupted"]
    conditions = [(entry["depth"], entry["phase"]) for entry in found["results"]]
    assert conditions == [(None, None), (0, "prefill"), (0, "decode"), (150, "prefill")]
    begun[:] = [None] * 6
    with pytest.raises(click.Abort):
        invoke("-m", str(plain), "--against", str(quantized), *SMALL)
