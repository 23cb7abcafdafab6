"""Multi-token prediction heads of checkpoints: their tensors.

At position t, with the last hidden state of t and token t + 1, a head predicts token t + 2:

    x = projection [norm(embedding of t + 1), norm(hidden state of t)]    (B, T, 2E) -> (B, T, E)
    hidden = norm(layer(x)), logits = output projection(hidden)           the model's table and output projection

The head's layer becomes the only one of a decoder (`models.network.head_decoder`), or of a model of mlx-lm's class
(`models.mlx_lm.mtp`). The hidden states are the input of the output projection, after the last norm, as in vLLM and
SGLang; draft tokens after the first take the head's own ones.

Source: DeepSeek-AI, DeepSeek-V3 Technical Report, section 2.2, arXiv:2412.19437.

Guard: tests/models/network/test_mtp.py.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from headrace.models.architectures.architecture import HeadNames
from headrace.models.architectures.families import architecture_of
from headrace.models.architectures.fields import text_section
from headrace.models.checkpoint.safetensors import Checkpoint
from headrace.models.checkpoint.shard_header import TensorInfo
from headrace.models.network.tensors import HEAD_INPUT

if TYPE_CHECKING:
    import mlx.core as mx

_OUTER = ("", "language_model.", "model.")  # prefixes of conversions
_LAYER = "model.layers.0."  # in the model of one layer
_SHARED = ("embed_tokens.", "shared_head.head.")  # copies of the model's own
# Config keys that make the only layer one of full attention, and of experts if the network has any.
_ONE_LAYER = {
    "num_hidden_layers": 1, "num_nextn_predict_layers": 0, "first_k_dense_replace": 0, "full_attention_interval": 1,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "layer_types": ["full_attention"],
}  # fmt: skip


class HeadTensors(Struct, frozen=True):
    """A head's tensors in a checkpoint."""

    checkpoint: Checkpoint  # with the config of the model of one layer
    renamed: Mapping[str, str]  # stored names -> names in that model
    hidden_first: bool  # the projection's input begins with the hidden state
    shifts: bool  # norms are stored minus one

    @property
    def infos(self) -> dict[str, TensorInfo]:
        """The tensors, by stored name."""
        return {name: self.checkpoint.tensors[name] for name in self.renamed}

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, as stored."""
        return sum(info.nbytes for info in self.infos.values())


def head_tensors(checkpoint: Checkpoint) -> HeadTensors | None:
    """Return the tensors of a checkpoint's head; None if it has none that headrace knows. Headers only."""
    config = checkpoint.config
    start = _prefix(checkpoint.config, checkpoint.tensors)
    if start is None:
        return None
    names, prefix = start

    # Names in the model of one layer: its joined input in place of a table, its last norm, and the layer as the first.
    ends = {
        names.embedding_norm: f"{HEAD_INPUT}.embedding_norm",
        names.hidden_norm: f"{HEAD_INPUT}.hidden_norm",
        names.projection: f"{HEAD_INPUT}.projection",
        names.norm: "model.norm",
    }
    renamed: dict[str, str] = {}
    for name in checkpoint.tensors:
        rest = name.removeprefix(prefix)
        module, _, part = rest.rpartition(".")
        if rest == name or rest.startswith(_SHARED):
            continue
        if module in ends:
            renamed[name] = f"{ends[module]}.{part}"
        elif rest.startswith(names.layer):
            renamed[name] = _LAYER + rest.removeprefix(names.layer)
    if f"{HEAD_INPUT}.projection.weight" not in renamed.values():
        return None

    # The config of that model
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = {**config, "text_config": {**text, **_ONE_LAYER}}
    else:
        config = {**config, **_ONE_LAYER}
    # MLX's conversions turn convolutions to (C, width, 1), and add the one that norms are stored without.
    is_original = any(
        name.endswith("conv1d.weight") and info.shape[-1] != 1 for name, info in checkpoint.tensors.items()
    )
    return HeadTensors(
        checkpoint=replace(checkpoint, config=config),
        renamed=renamed,
        hidden_first=names.hidden_first,
        shifts=names.centred and is_original,
    )


def without_head(arrays: "Mapping[str, mx.array]", config: Mapping[str, object]) -> "dict[str, mx.array]":
    """Return the arrays without those of a head, which some classes refuse."""
    head = _prefix(config, arrays)
    if head is None:
        return dict(arrays)
    _, prefix = head
    return {name: array for name, array in arrays.items() if not name.startswith(prefix)}


def _prefix(config: Mapping[str, object], names: Collection[str]) -> tuple[HeadNames, str] | None:
    """Return the family's names and the prefix of the head's tensors, if there are any."""
    text = text_section(config)
    head = architecture_of(config).head
    if head is None or not isinstance(text, Mapping):
        return None
    inner = head.prefix.format(text.get("num_hidden_layers"))
    for outer in _OUTER:
        if any(name.startswith(outer + inner) for name in names):
            return head, outer + inner
    return None
