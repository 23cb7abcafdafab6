"""The decoder of one rank among several: sizes from headers, then the network. Refusals name the architecture.

`load.sized_network` calls `Rank.sized` where there are several ranks, and `app.hosts.split_choice` asks
`check_division` before a model is given to them.

Everywhere `config` is that of headrace's decoder, None for mlx-lm's classes; `kv_format` is the K/V format that was
asked for, None for the usual one.

Guard: tests/models/network/test_rank_parts.py.
"""

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
from msgspec import Struct

from headrace.models.architectures.config import DecoderConfig
from headrace.models.architectures.families import architecture_named, architecture_of
from headrace.models.checkpoint.safetensors import Checkpoint
from headrace.models.checkpoint.text_part import text_part
from headrace.models.loading.sized import Sized
from headrace.models.network.decoder import Decoder
from headrace.models.network.decoder_costs import kv_layers
from headrace.models.network.head_decoder import HeadDecoder, TensorHead, head_config, head_parameters
from headrace.models.network.long_rope_decoder import long_rope
from headrace.models.network.make_decoder import stored_kv
from headrace.models.network.mtp import HeadTensors, head_tensors
from headrace.models.network.parameters import Parameters
from headrace.models.network.stage_decoder import Stage, StageDecoder, stage
from headrace.models.network.tensor_decoder import TensorDecoder
from headrace.models.network.tensor_part import TensorPart, tensor_part
from headrace.models.network.weight_arrays import weight_arrays
from headrace.runtime.errors import UsageError
from headrace.runtime.network import Network
from headrace.runtime.ops import Ops, reference
from headrace.runtime.ops.kv_format import KVFormat
from headrace.runtime.ops.read_values import read_ints
from headrace.runtime.ranks.group import Group
from headrace.runtime.ranks.split import Split

_PLAIN_UNIT = 16  # columns that kernels read together


class Rank(Struct, frozen=True):
    """One rank of a group, and the division of the model."""

    group: Group
    split: Split

    def largest(self, number: int) -> int:
        """Return the largest of all ranks' numbers; every rank calls it."""
        return max(read_ints(self.group.all_gather(mx.array([number]))))

    def sized(
        self,
        checkpoint: Checkpoint,
        config: DecoderConfig | None,
        ops: Ops,
        dtype: mx.Dtype,
        kv_format: KVFormat | None,
    ) -> Sized:
        """Return this rank's part of the network, without reading weights. See `sized_network`.

        Raises UsageError for models that cannot be divided.
        """
        if config is None:
            return self._sized_class(checkpoint, ops, kv_format)
        part = _divided(checkpoint, config, self.split, self.group.rank)
        parameters = Parameters(checkpoint, ops, dtype, part.take, _reading(part, checkpoint))
        kv = stored_kv(part.whole, ops, dtype, kv_format)
        head = _HeadPart.of(checkpoint, config, part, ops, dtype)
        weights = parameters.nbytes
        if head is not None:
            weights += head.parameters.nbytes

        def make() -> Decoder:
            decoder: Decoder
            if isinstance(part, Stage):
                decoder = StageDecoder(part, parameters, kv, self.group)
            else:
                decoder = TensorDecoder(part, parameters, kv, self.group)
            if head is not None and decoder.rolls_back:
                decoder.draft_head = head.make_head(decoder, self.group)
            for array in decoder.arrays:  # one after the other, for tensors that are read whole before a part is kept
                mx.eval(array)
            return decoder

        return Sized(make, weights, kv_layers(part.config, kv))

    def _sized_class(self, checkpoint: Checkpoint, ops: Ops, kv_format: KVFormat | None) -> Sized:
        """Return this rank's part of a network of mlx-lm's classes, likewise."""
        from headrace.models.mlx_lm.network import add_head
        from headrace.models.mlx_lm.ranked import RankedMlxLm  # late: imports mlx-lm

        kernels = None if ops is reference else ops
        device = mx.default_device().type
        network = RankedMlxLm(checkpoint, self.split, self.group, device=device, kv=kv_format, kernels=kernels)
        alone = self.split.kind == "pipeline" and self.group.rank == 0  # has all hidden states, table and logits
        head = None
        if alone:
            head = head_tensors(checkpoint)

        def make() -> Network:
            made = network.use_kernels()
            if head is not None:
                made = add_head(made, head, device, kernels)
            for array in made.arrays:  # one after the other: each is read whole before a part is kept
                mx.eval(array)
            return made

        weights = sum(array.nbytes for array in network.arrays)
        if head is not None:
            weights += head.nbytes
        return Sized(make, weights, network.cost.kv)


class _HeadPart(Struct, frozen=True):
    """A rank's part of a multi-token prediction head.

    tensors: of the whole head, in the checkpoint.
    parameters: those that this rank reads.
    part: its part in tensor parallelism; None for all of the head.
    """

    tensors: HeadTensors
    parameters: Parameters
    part: TensorPart | None

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        config: DecoderConfig,
        part: TensorPart | Stage,
        ops: Ops,
        dtype: mx.Dtype,
    ) -> "_HeadPart | None":
        """Return a rank's part; None if the model has no head, or this rank has nothing of it.

        In tensor parallel it is divided as each layer is. In a pipeline rank 0 has all of it, beside embedding and
        output projection.
        """
        if architecture_named(config.architecture).head is None or (isinstance(part, Stage) and part.rank):
            return None
        if (tensors := head_tensors(checkpoint)) is None:
            return None
        if isinstance(part, Stage):
            return cls(tensors, head_parameters(tensors, ops, dtype), None)
        own_part = tensor_part(head_config(tensors), part.split, part.rank, part.unit)
        read = _reading(part, checkpoint)
        return cls(tensors, head_parameters(tensors, ops, dtype, own_part.take, read), own_part)

    def make_head(self, network: Decoder, group: Group) -> HeadDecoder:
        """Return the head of a rank's network."""
        hidden_first = self.tensors.hidden_first
        if self.part is None:
            head = HeadDecoder(head_config(self.tensors), self.parameters)
            return head.of(network, hidden_first=hidden_first)
        head = TensorHead(self.part, self.parameters, None, group)
        return head.of(network, hidden_first=hidden_first)


def check_division(checkpoint: Checkpoint, config: DecoderConfig | None, split: Split) -> None:
    """Raise UsageError, or UnsupportedModelError for a cut group, if the model cannot be divided so. Reads headers."""
    if config is None:
        from headrace.models.mlx_lm.ranked import check_classes  # late: imports mlx-lm

        check_classes(checkpoint, split)
        return
    for rank in range(len(split.shares)):
        # The results are dropped: making them raises the errors.
        part = _divided(checkpoint, config, split, rank)
        Parameters(checkpoint, reference, mx.float32, part.take, _reading(part, checkpoint))
        _HeadPart.of(checkpoint, config, part, reference, mx.float32)


def _divided(checkpoint: Checkpoint, config: DecoderConfig, split: Split, rank: int) -> TensorPart | Stage:
    """Return one rank's part of a decoder. Raises UsageError for models that cannot be divided."""
    named = checkpoint.config.get("model_type")
    if long_rope(config) is not None or not config.splits:
        raise UsageError(
            f"several ranks: a {named} of this variant runs on one machine only",
            "start it without --hosts",
        )
    if split.kind not in config.splits and split.kind == "pipeline":
        raise UsageError(
            f"{split.kind}: layers of this {named} run several times in a step",
            "--split tensor divides every layer",
        )
    if split.kind not in config.splits:
        raise UsageError(
            f"{split.kind}: a {named} normalizes numbers of all ranks together inside its layers",
            "--split pipeline gives each rank whole layers",
        )
    if split.kind == "pipeline":
        return stage(config, split, rank)
    return tensor_part(config, split, rank, _unit(text_part(checkpoint).quantization))


def _reading(part: TensorPart | Stage, checkpoint: Checkpoint) -> Callable[[Checkpoint], dict[str, Any]]:
    """Return the way to read tensors: as parts of files for tensor parallel, unless they are changed first."""
    architecture = architecture_of(text_part(checkpoint).config)
    changes = architecture.multiply is not None or architecture.turn is not None
    if isinstance(part, Stage) or changes or checkpoint.gguf:
        return weight_arrays
    from headrace.models.checkpoint.file_parts import file_parts  # late: imports numpy

    return file_parts


def _unit(quantization: Mapping[str, object] | None) -> int:
    """Return the columns of the largest quantized groups."""
    sections = [quantization, *(quantization or {}).values()]
    sizes = [
        int(section["group_size"]) for section in sections if isinstance(section, dict) and "group_size" in section
    ]
    return max([_PLAIN_UNIT, *sizes])
