"""`headrace quantize` on mixtures of experts: formats of stacks, active bytes, and what mlx-lm reads."""

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from click.testing import CliRunner

from headrace.app.cli.models import models
from headrace.app.quantize import quantize as run_module
from headrace.app.quantize.sensitivity import Excerpt, importances_of
from headrace.models.checkpoint.quantization import Groups
from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.cost.shape_sources import shape_of_checkpoint
from headrace.models.loading.load import load_model
from headrace.models.loading.mixed_quantization import plain_model
from headrace.models.network.decoder import Decoder
from tests.app.quantize.test_quantize import document
from tests.parity.test_mlx_lm_families import difference, logits_of
from tests.support.mlx_lm_models import config_of, write_mlx_lm_model
from tests.support.tiny import VARIANTS, load_decoder
from tests.support.tiny_chat import write_byte_tokenizer, write_chat_model

_SHORT = 24  # tokens measured and scored
_VOCAB = 260  # of the byte tokenizer
_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
# "model.layers.0.mlp.switch_mlp.gate_proj.weight": the mixture, the projection
_STACK = re.compile(r"(.+)\.switch_mlp\.(gate_proj|up_proj|down_proj)\.weight")


@pytest.fixture(autouse=True)
def _few_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(run_module, "MEASURED", _SHORT)
    monkeypatch.setattr(run_module, "SCORED", _SHORT)


def _publish(directory: Path, names: dict[str, str]) -> None:
    """Store experts one by one, as publishers do. names: of projections, by MLX's."""
    stored = mx.load(str(directory / "model.safetensors"))
    assert isinstance(stored, dict)
    published: dict[str, mx.array] = {}
    for name, array in stored.items():
        match = _STACK.fullmatch(name)
        if match is None:
            published[name] = array
            continue
        for number, matrix in enumerate(array):
            published[f"{match[1]}.experts.{number}.{names.get(match[2], match[2])}.weight"] = matrix
    mx.save_safetensors(str(directory / "model.safetensors"), published)


def _write(directory: Path, family: str) -> Path:
    """Write a tiny mixture with a tokenizer, in the form of its publisher."""
    if family in VARIANTS:
        write_chat_model(directory, **VARIANTS[family])
    else:
        config: dict[str, Any] = {**config_of(family), "vocab_size": _VOCAB, "max_position_embeddings": 4096}
        if "moe_intermediate_size" in config:
            config["moe_intermediate_size"] = 64
        write_mlx_lm_model(directory, config)
        write_byte_tokenizer(directory)
    _publish(directory, _MIXTRAL if family == "mixtral" else {})
    return directory


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of three layers, one of them dense."""
    return _write(tmp_path_factory.mktemp("written") / "tiny", "qwen3-moe")


@pytest.fixture
def measured(written: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, whose parts are measured by the first test that needs it."""
    monkeypatch.setenv("HEADRACE_HOME", str(written.parent / "home"))
    return written


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral", "olmoe", "gpt-oss", "deepseek-v3", "glm4-lite"])
def test_a_mixture_is_the_same_model_in_mlx_lm(tmp_path: Path, family: str) -> None:
    from mlx_lm.utils import load

    source = _write(tmp_path / "tiny", family)
    found = document(source, "--bits", 4.6, "-o", tmp_path / "out")
    stacks = {name: entry for name, entry in found["modules"].items() if "switch_mlp" in name or ".experts." in name}
    assert stacks
    for name, entry in stacks.items():
        assert entry == found["modules"].get(name.replace("up_proj", "gate_proj"), entry)
    assert not [name for name in found["modules"] if name.endswith((".gate", ".router"))]

    model, *_ = load(str(tmp_path / "out"))
    theirs = model(mx.array([[5, 6, 7]])).astype(mx.float32)
    assert difference(logits_of(load_decoder(tmp_path / "out"), [5, 6, 7]), theirs) < 1e-3


def test_a_step_reads_the_active_experts_alone(measured: Path, tmp_path: Path) -> None:
    source = measured
    found = document(source, "--bits", 4.6, "-o", tmp_path / "out")
    model = plain_model(open_checkpoint(source), "tiny")
    shares = {part.name: part.share for part in model.parts}
    assert shares["model.layers.0.mlp.switch_mlp.gate_up"] == shares["model.layers.0.mlp.switch_mlp.down_proj"]
    assert float(shares["model.layers.0.mlp.switch_mlp.gate_up"]) == pytest.approx(2 / 6)
    assert (shares["model.layers.1.mlp.gate_up"], shares["model.embed_tokens"]) == (1, 0)

    def saved(part: Any) -> Any:
        [groups] = {Groups(**found["modules"][module]) for module in part.shapes}
        return part.share * (model.plain_bytes(part) - part.nbytes(groups))

    before = shape_of_checkpoint(model.checkpoint).cost.weight_bytes
    assert found["weight_bytes_per_step"] == before - round(sum(map(saved, model.parts)))


def test_a_speed_counts_active_experts(measured: Path, tmp_path: Path) -> None:
    source = measured
    chip = ("--chip", "M4 Pro")
    large = document(source, "--bits", 8, *chip, "-o", tmp_path / "large")
    small = document(source, "--bits", 2.9, *chip, "-o", tmp_path / "small")
    wanted = (large["predicted"]["tokens_per_second"] + small["predicted"]["tokens_per_second"]) / 2
    between = document(source, "--at-least", f"{wanted} tok/s", *chip, "-o", tmp_path / "between")
    assert between["predicted"]["tokens_per_second"] >= wanted
    assert small["weight_bytes"] < between["weight_bytes"] < large["weight_bytes"]


def test_experts_without_tokens_have_the_mean_importance(written: Path) -> None:
    loaded = load_model(written, name="tiny")
    assert isinstance(loaded.network, Decoder)
    importances = importances_of(loaded.network, Excerpt([7], [8]))  # a token reaches two experts of six
    for name, columns in (("gate_up", 64), ("down_proj", 96)):
        rows = importances[f"model.layers.0.mlp.switch_mlp.{name}"]
        assert rows.shape == (6, columns)
        mean = rows.mean(axis=0)
        away = mx.abs(rows - mean).max(axis=-1)
        assert (away < 1e-5 * mx.abs(mean).max()).sum().item() >= 4
        assert rows.min().item() >= 0


def test_the_store_shows_a_mixture(measured: Path) -> None:
    found = document(measured, "--bits", 4.5)
    shown = CliRunner().invoke(models, ["show", found["name"]], catch_exceptions=False).output
    assert f"{found['kl']['value']:.4f} nats of KL" in shown
    listed = CliRunner().invoke(models, ["list", found["name"]], catch_exceptions=False).output
    assert f"{found['bits_per_weight']:.2f} bits, mixed" in listed
