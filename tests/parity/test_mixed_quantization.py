"""A copy with a format for each projection is the same model in mlx-lm's classes, for the families of one table."""

import json
from itertools import cycle
from pathlib import Path

import mlx.core as mx
import pytest

from headrace.models.architectures.config import DecoderConfig
from headrace.models.architectures.families import architecture_of
from headrace.models.checkpoint.quantization import Groups
from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.checkpoint.text_part import text_part
from headrace.models.loading.mixed_quantization import plain_model, write_mixed
from headrace.models.network.decoder import Decoder
from headrace.models.registry.progress import silent
from headrace.runtime.errors import UnsupportedModelError
from tests.parity.test_mlx_lm_families import PROMPT, difference, logits_of, logits_of_class, stock
from tests.support.mlx_lm_models import MODELS, config_of, write_mlx_lm_model
from tests.support.mtp_models import CONFIGS, write_model
from tests.support.tiny import load_decoder

pytestmark = pytest.mark.peer

_FORMATS = (Groups(8, 32), Groups(6, 32))


def _source(directory: Path, name: str) -> Path:
    """Write a family's model, with experts of a width that has whole groups."""
    text = json.dumps(config_of(name))
    config = json.loads(text.replace('"moe_intermediate_size": 48', '"moe_intermediate_size": 64'))
    return write_mlx_lm_model(directory, config)


def _copy(plain: Path, copy: Path) -> Path:
    """Write a copy with the formats in turn; return it."""
    model = plain_model(open_checkpoint(plain), "tiny")
    assert model.parts
    copy.mkdir()
    write_mixed(model, list(zip(model.parts, cycle(_FORMATS), strict=False)), {}, copy, silent)
    return copy


def _scoring_modules(config: DecoderConfig) -> set[str]:
    """Return the routers and the gates of shared experts."""
    modules: set[str] = set()
    for index, layer in enumerate(config.stored):
        if layer.experts is None:
            continue
        names = {layer.experts.router, layer.experts.shared_gate}
        modules |= {f"model.layers.{index}.mlp.{name}" for name in names if name is not None}
    return modules


def _quantized_modules(directory: Path) -> set[str]:
    tensors = text_part(open_checkpoint(directory)).tensors
    return {name.removesuffix(".scales") for name in tensors if name.endswith(".scales")}


def _nearest(ours: mx.array, theirs: mx.array, decoder: Decoder) -> tuple[mx.array, mx.array]:
    """Return all rows of logits, or the half that agrees best where an indexer's rounded scores choose entries."""
    if not decoder.kv_shape.indexed:
        return ours, theirs
    rows = mx.argsort(mx.abs(ours - theirs).max(axis=-1)[0])[: ours.shape[1] // 2]
    return ours[:, rows], theirs[:, rows]


@pytest.mark.sampled(32)
@pytest.mark.parametrize("name", MODELS)
def test_a_mixed_copy_gives_the_logits_of_mlx_lm(tmp_path: Path, name: str) -> None:
    plain = _source(tmp_path / "plain", name)
    if architecture_of(text_part(open_checkpoint(plain)).config).loses_corrections:
        with pytest.raises(UnsupportedModelError, match="corrections"):
            _copy(plain, tmp_path / "copy")
        return
    copy = _copy(plain, tmp_path / "copy")
    decoder = load_decoder(copy)
    assert not _scoring_modules(decoder.config) & _quantized_modules(copy)
    ours, theirs = _nearest(logits_of(decoder, PROMPT), logits_of_class(stock(copy), PROMPT), decoder)
    assert difference(ours, theirs) < 1e-3


@pytest.mark.sampled
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_copy_of_a_publishers_form_keeps_the_logits(tmp_path: Path, kind: str) -> None:
    """Norms, names and layouts are converted; the head is left out."""
    write_model(tmp_path / "plain", kind)
    copy = _copy(tmp_path / "plain", tmp_path / "copy")
    tokens = [token % 64 for token in PROMPT]
    ours = logits_of(load_decoder(copy), tokens)
    assert difference(ours, logits_of_class(stock(copy), tokens)) < 1e-3
    before = logits_of(load_decoder(tmp_path / "plain"), tokens)
    rows = mx.sort(mx.abs(ours - before).max(axis=-1)[0])  # of few tokens, rounding selects other experts
    assert rows[len(tokens) // 2].item() < 0.3
