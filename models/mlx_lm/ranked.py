"""mlx-lm's classes on several ranks: tensor parallel by a class's `shard`, pipelines by mlx-lm's `PipelineMixin`.

A class divides itself. Shards are equal; so are the parts of a pipeline, unless its `pipeline` takes numbers of layers
(`split`). In a pipeline the last rank has the first layers, and every rank embedding and head. All ranks compute the
logits of a pass.

Guards: tests/models/network/test_ranks.py, and tests/models/mlx_lm/test_deepseek_v4.py for refusals.
"""

from collections.abc import Callable, Mapping
from inspect import signature

import mlx.core as mx
import mlx.nn as nn

from headrace.models.architectures.fields import text_section
from headrace.models.checkpoint.safetensors import Checkpoint
from headrace.models.mlx_lm.costs import measure
from headrace.models.mlx_lm.fixes import class_name
from headrace.models.mlx_lm.load import of_config
from headrace.models.mlx_lm.long_rope import LongRope
from headrace.models.mlx_lm.mtp import text_model
from headrace.models.mlx_lm.network import MlxLmNetwork
from headrace.runtime.errors import UsageError
from headrace.runtime.kv.cache import KVPass
from headrace.runtime.ops import Ops
from headrace.runtime.ops.kv_format import KVFormat
from headrace.runtime.ranks.group import Group
from headrace.runtime.ranks.split import Split

_UNTESTED = ("muse_spark",)  # needs a Mac's GPU


class RankedMlxLm(MlxLmNetwork):
    """A rank's part of an mlx-lm model."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        split: Split,
        group: Group,
        *,
        device: mx.DeviceType,
        kv: KVFormat | None,
        kernels: Ops | None,
    ) -> None:
        self._group = group
        self._is_staged = split.kind == "pipeline"

        # The base class calls this before it measures the rest, for which it reads `_whole_shares`.
        def divide(model: nn.Module) -> None:
            self._whole_shares = measure(model, checkpoint.config).shares  # collectives cannot be traced
            _division(split, group.raw)(model)

        super().__init__(checkpoint, device=device, kv=kv, kernels=kernels, divide=divide)

    def embed(self, tokens: mx.array) -> mx.array:
        """Give every rank the tokens (B, T): rank 0 has them, and zeros the others."""
        summed = self._group.all_sum(tokens.astype(mx.uint32))
        mx.async_eval(summed)  # a stage that receives its input does not depend on them
        return summed

    def layers(self, x: mx.array, kv: KVPass) -> mx.array:
        """See `MlxLmNetwork`. Hands the pass to the device, as the other ranks do at this point."""
        out = super().layers(x, kv)
        wanted = any(row.logits or row.hidden for row in kv.rows)
        if self._is_staged or wanted:  # a stage's output is sent within the logits
            mx.async_eval(out)
        else:
            mx.async_eval(kv.arrays)
        return out

    def follow(self, kv: KVPass) -> list[mx.array]:
        """Run rank 0's pass on this part; return what to evaluate."""
        self.layers(self.embed(mx.zeros((1, sum(row.count for row in kv.rows)), mx.uint32)), kv)
        kv.advance()
        return kv.arrays


def ways(model: nn.Module, config: Mapping[str, object]) -> list[str]:
    """Return the ways in which an mlx-lm model can be divided."""
    if config.get("model_type") in _UNTESTED or LongRope.of(model, config) is not None:
        return []
    stages = getattr(text_model(model), "model", None)
    known = []
    if hasattr(model, "shard"):
        known.append("tensor")
    if hasattr(stages, "pipeline"):
        known.append("pipeline")
    return known


def check_classes(checkpoint: Checkpoint, split: Split) -> None:
    """Raise UsageError if the model's class cannot be divided so. Reads no weight."""
    name = class_name(checkpoint.config)
    model = of_config(checkpoint.config)
    known = ways(model, checkpoint.config)
    if split.kind not in known:
        if not known:
            raise UsageError(f"several ranks: {name} runs on one machine only", "start it without --hosts")
        raise UsageError(f"{split.kind}: {name} cannot be divided so", f"--split {known[0]} divides it")

    # A class divides heads evenly, but not the one head of latents.
    text = text_section(checkpoint.config)
    heads = [text.get(key) for key in ("num_attention_heads", "num_key_value_heads") if not text.get("kv_lora_rank")]
    if split.kind == "tensor":
        ranks = len(split.shares)
        if len(set(split.shares)) > 1:
            raise UsageError(f"tensor parallel: {name} divides evenly only")
        if any(isinstance(count, int) and count % ranks for count in heads):
            raise UsageError(f"tensor parallel: {ranks} ranks cannot share the heads of {name}")

    # Divide a model without weights for each rank.
    try:
        for rank in range(len(split.shares)):
            _division(split, _UnconnectedGroup(rank, len(split.shares)))(
                of_config(checkpoint.config) if rank else model
            )
    except UsageError:
        raise
    except Exception as error:  # classes raise anything
        raise UsageError(f"{split.kind}: {name} cannot be divided so: {error!s:.80}") from error


class _UnconnectedGroup:
    """A group to divide a model for, without a connection."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def _division(split: Split, group: "mx.distributed.Group | _UnconnectedGroup | None") -> Callable[[nn.Module], None]:
    """Return a function that leaves a model this rank's part."""

    def divide(model: nn.Module) -> None:
        if split.kind == "tensor":
            model.shard(group)
            return
        stages = text_model(model).model
        counts = [len(layers) for layers in split.ranges(len(stages.layers))]
        if "split" in signature(stages.pipeline).parameters:
            stages.pipeline(group, counts)
        elif len(set(split.shares)) == 1:
            stages.pipeline(group)
        else:
            raise UsageError(f"pipeline: mlx-lm's class of {model.args.model_type} divides evenly only")

    return divide
