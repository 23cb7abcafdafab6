"""Weights of a checkpoint for headrace's decoder: matrices, quantized or plain, and vectors.

Arrays stay lazy: MLX reads them from the file on evaluation. Shapes are checked against the config; every problem
raises a CheckpointError naming the tensor. Each tensor is returned once and then released, so that loading needs no
second copy.

Guard: tests/models/network/test_parameters.py.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import mlx.core as mx
from msgspec import Struct
from msgspec.structs import replace

from headrace.models.architectures.families import architecture_of
from headrace.models.architectures.fields import Fields
from headrace.models.checkpoint.quantization import layer_quantization
from headrace.models.checkpoint.safetensors import Checkpoint
from headrace.models.checkpoint.text_part import TextCheckpoint, text_part
from headrace.models.network.adapted import AdaptedOps, Change, Changes, Factors, joined, low_rank_products
from headrace.models.network.stacks import with_stacks
from headrace.models.network.tensors import Tensor
from headrace.models.network.weight_arrays import loaded, weight_arrays
from headrace.runtime.errors import CheckpointError, UnsupportedModelError
from headrace.runtime.ops import Ops, Weight


class PreparedModules(Struct, frozen=True):
    """A weight as prepared for the operations, and the modules that it is made of."""

    # Bytes of the weight; the weight itself where they are not known yet, since it is read with others. Other weights
    # are not referenced here: some are joined, and then freed.
    size: int | Weight
    rows: Mapping[str, int]  # of each module
    count: int = 1  # experts in a stack, else 1


def module_bytes(prepared: Iterable[PreparedModules]) -> Counter[str]:
    """Return the bytes of each module; of a stack, those of one expert.

    Weights that are read together (`runtime.ops.native.read_together`) have no bytes before that.
    """
    sizes = Counter[str]()
    for part in prepared:
        nbytes = part.size if isinstance(part.size, int) else part.size.nbytes
        all_rows = sum(part.rows.values())
        for module, rows in part.rows.items():
            sizes[module] += nbytes * rows // all_rows // part.count
    return sizes


class Parameters:
    """Tensors of the text part by module path.

    ops, dtype: that the weights are prepared for.
    take: returns a rank's part of tensors.
    read: reads the checkpoint's; parts of files are read one after the other.
    part: of the checkpoint, if not its text.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        ops: Ops,
        dtype: mx.Dtype,
        take: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        read: Callable[[Checkpoint], dict[str, Any]] = weight_arrays,
        part: TextCheckpoint | None = None,
    ) -> None:
        adapter = None  # it changes the text only
        if part is None:
            part = text_part(checkpoint)
            adapter = checkpoint.adapter
        arrays = read(checkpoint)
        # Parts of files, and a GGUF's weights, which are converted, are read once prepared, and released (`_prepared`).
        self._at_once = read is not weight_arrays or bool(checkpoint.gguf)
        self._quantization = part.quantization
        self._ops = ops
        self._dtype = dtype
        self._arrays = with_stacks({name: arrays[stored] for name, stored in part.stored.items()})
        self._taken: dict[str, Weight] = {}  # by module: read, and not returned yet
        self._changes = Changes(adapter, part.stored)  # of an adapter, not read yet
        self._ones: dict[int, mx.array] = {}  # by size
        # By prepared weight that an adapter changes, and that stays as stored: the arrays of its products, and factors
        # where the operations do not add these by themselves.
        self._adapted: dict[Weight, list[mx.array]] = {}
        self._factors: dict[Weight, Factors] = {}
        self.prepared: list[PreparedModules] = []  # all weights that were returned
        # MLX's conversions turn convolutions, add what norms are stored without, and apply multipliers.
        taps = (array.shape for name, array in self._arrays.items() if name.endswith("conv1d.weight"))
        self._whole_norms = any(shape[-1] == 1 for shape in taps)
        if part.whole_norms is not None:
            self._whole_norms = part.whole_norms
        architecture = architecture_of(part.config)
        fields = Fields(part.config)
        if architecture.turn is not None:
            self._arrays = architecture.turn(self._arrays, fields)
        if architecture.multiply is not None:
            if adapter is not None:
                raise UnsupportedModelError(
                    f"headrace applies no adapter to {architecture.name}, whose weights it multiplies by factors",
                    "merge the adapter into its base, and load the result",
                )
            self._arrays = architecture.multiply(self._arrays, fields, self._whole_norms)
        if take is not None:
            self._arrays = take(self._arrays)

    @property
    def ops(self) -> Ops:
        """The operations; with an adapter those that add its products where these do not."""
        if not self._changes.exist:
            return self._ops
        return AdaptedOps(self._ops, self._factors)

    @property
    def dtype(self) -> mx.Dtype:
        """Type of activations and vectors."""
        return self._dtype

    def check_adapter(self) -> list[mx.array]:
        """Return the arrays of changes that were not merged. Raises UnsupportedModelError if one was left out."""
        self._changes.check_taken()
        return [array for arrays in self._adapted.values() for array in arrays]

    def refuse_factors(self, weights: Iterable[Weight]) -> None:
        """Raise UnsupportedModelError if an adapter changes one of these, which an operation uses as stored.

        A change of a plain weight is merged into it.
        """
        if any(weight in self._adapted for weight in weights):
            raise UnsupportedModelError(
                "the adapter changes a quantized router or projection of experts, to which headrace applies no adapter",
                "merge the adapter into its base, and load the result",
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors not yet returned, as stored."""
        return sum(array.nbytes for array in self._arrays.values())

    def matrix(self, module: str, rows: int, columns: int, *, exact: bool = False) -> Weight:
        """Return the projection `module`, N = rows by K = columns, prepared for the operations (`exact`: see there)."""
        weight = self._stored(module, rows, columns)
        return self._prepared(weight, {module: rows}, [self._changes.take(module, rows, columns)], exact=exact)

    def tensor(self, prefix: str, tensor: Tensor) -> Weight:
        """Return one matrix of a layer."""
        return self.matrix(f"{prefix}.{tensor.name}", tensor.rows, tensor.columns)

    def fused(self, prefix: str, tensors: Sequence[Tensor], order: mx.array | None = None) -> list[Weight]:
        """Return projections of one input stacked into one matrix; those with different quantization stay apart.

        order: the stored row of each row of the stack, within its module; None: as stored.
        """
        columns = tensors[0].columns
        # The stored modules with their rows: those of the tensors, or one that has several of them.
        modules: list[tuple[str, int]] = []
        for name, members in groupby(tensors, lambda tensor: tensor.whole):
            parts_of_whole = [(f"{prefix}.{tensor.name}", tensor.rows) for tensor in members]
            whole = f"{prefix}.{name}"
            if f"{whole}.weight" in self:
                parts_of_whole = [(whole, sum(rows for _, rows in parts_of_whole))]
            modules += parts_of_whole

        # Their weights, and an adapter's changes, in the wanted order of rows
        parts = []
        changes = []
        start = 0
        for module, rows in modules:
            part = self._stored(module, rows, columns)
            change = self._changes.take(module, rows, columns)
            if order is not None:
                module_order = order[start : start + rows] - start
                part = _reordered(part, module_order)
                change = change and change.rows(module_order)
            parts.append(part)
            changes.append(change)
            start += rows

        # One matrix where all are of one kind: a kernel reads its input once.
        if len({_kind(part) for part in parts}) == 1 and len(parts) > 1:
            return [self._prepared(_joined(parts, mx.concatenate), dict(modules), changes)]
        return [
            self._prepared(part, {module: rows}, [change])
            for (module, rows), part, change in zip(modules, parts, changes, strict=True)
        ]

    def gated(self, prefix: str, tensor: Tensor, heads: int) -> tuple[Tensor, Weight]:
        """Take apart a projection that has D rows and then D gates of each head.

        Returns the tensor, from now on without gates, for `fused`; and the gates (H * D, K), prepared.
        """
        module = f"{prefix}.{tensor.name}"
        rows = tensor.rows // 2
        head_dim = rows // heads
        whole = self._stored(module, tensor.rows, tensor.columns)
        indices = (mx.arange(heads)[:, None] * 2 * head_dim + mx.arange(head_dim)).flatten()
        change = self._changes.take(module, tensor.rows, tensor.columns)
        gate_order = indices + head_dim
        gate = self._prepared(_reordered(whole, gate_order), {module: rows}, [change and change.rows(gate_order)])
        self._taken[module] = _reordered(whole, indices)
        self._changes.keep(module, change and change.rows(indices))
        return replace(tensor, rows=rows), gate

    def halves_of_heads(
        self, prefix: str, whole: Tensor, above: Tensor, below: Tensor, heads: int
    ) -> tuple[Weight, Weight]:
        """Return two stacks, a matrix for each head in both.

        They are stored as such, or as `whole`: rows of both for each head, the first to be transposed, which takes it
        in half precision if it is quantized.

        prefix: of the layer's tensors.
        whole: the matrix with the rows of both.
        above, below: the stacks.
        heads: number of matrices in each.
        """
        names = [f"{prefix}.{part.name}" for part in (above, below)]
        if f"{prefix}.{whole.name}.weight" not in self:
            first, second = (
                self._stored(name, part.rows // heads, part.columns, (heads,))
                for name, part in zip(names, (above, below), strict=True)
            )
            return self._prepared(first, {names[0]: above.rows}), self._prepared(second, {names[1]: below.rows})
        stored = self._stored(f"{prefix}.{whole.name}", whole.rows, whole.columns)

        def part(rows: slice) -> Weight:
            def cut(array: mx.array) -> mx.array:
                return mx.contiguous(array.reshape(heads, whole.rows // heads, -1)[:, rows])

            return _mapped(stored, cut)

        first = part(slice(above.columns))
        second = part(slice(above.columns, None))
        plain = first.data
        if first.scales is not None:
            plain = mx.dequantize(
                first.data, first.scales, first.biases, first.group_size, first.bits, mode=first.mode
            ).astype(mx.float16)
        # A transposed matrix cannot stay quantized: its groups would lie along the other axis.
        turned = Weight(mx.contiguous(plain.swapaxes(1, 2)))
        return self._prepared(turned, {names[0]: above.rows}), self._prepared(second, {names[1]: below.rows})

    def router(self, prefix: str, tensor: Tensor) -> Weight:
        """Return a router of experts or streams, for products in float32.

        Small errors of its scores select other experts, and a router has few weights. See `Tensor.scores`.
        """
        return self.matrix(f"{prefix}.{tensor.name}", tensor.rows, tensor.columns, exact=True)

    def stack(self, prefix: str, tensor: Tensor) -> Weight:
        """Return experts' projections as one stack, also of single stored ones.

        Raises UnsupportedModelError for single ones with different quantization.
        """
        module = f"{prefix}.{tensor.name}"
        single = f"{prefix}.{tensor.single}"
        if f"{module}.weight" in self:
            stack = self._stored(module, tensor.rows, tensor.columns, (tensor.count,))
        else:
            stack = self._stacked(single, tensor)
        return self._prepared(stack, {module: tensor.rows}, count=tensor.count)

    def _stacked(self, single: str, tensor: Tensor) -> Weight:
        """Return the stack (X, N, K) of experts that are stored one by one. single: module, with {} for the number."""
        parts = [self._stored(single.format(i), tensor.rows, tensor.columns) for i in range(tensor.count)]
        if len({_kind(part) for part in parts}) > 1:
            raise UnsupportedModelError(f"{single.format(0)} and the other experts are quantized differently")
        return _joined(parts, mx.stack)

    def vector(self, name: str, size: int, offset: float = 0.0, dtype: mx.Dtype | None = None) -> mx.array:
        """Return a norm's weight (size,) in the compute dtype, or in `dtype`, plus `offset` added in float32.

        It may be stored with axes of one (Kimi Linear).
        """
        stored = self._arrays.get(name)
        shape: tuple[int, ...] = (size,)
        if stored is not None and stored.size == size:
            shape = tuple(stored.shape)
        array = self._pop(name, shape).flatten()
        if offset and not self._whole_norms:
            array = array.astype(mx.float32) + offset
        return array.astype(dtype or self._dtype)

    def table(self, name: str, rows: int, columns: int) -> mx.array:
        """Return numbers (rows, columns) that no product takes, in the compute dtype."""
        return self._pop(name, (rows, columns)).astype(self._dtype)

    def ones(self, size: int) -> mx.array:
        """Return the weight (size,) of a norm that has none; the same array for all of them."""
        if size not in self._ones:
            self._ones[size] = mx.ones((size,), self._dtype)
        return self._ones[size]

    def number(self, name: str, default: float | None = None) -> float:
        """Return a parameter that is one number."""
        if name not in self and default is not None:
            return default
        value: Any = math.nan
        if name in self:
            array = self._pop(name, tuple(self._arrays[name].shape))
            if array.size == 1:
                value = array.astype(mx.float32).item()
        if not math.isfinite(value):
            raise CheckpointError(f"the checkpoint has no number {name}, which its config.json requires")
        return float(value)

    def taps(self, module: str, channels: int, width: int) -> tuple[mx.array, mx.array | None]:
        """Return the weight (width, channels) and the bias, if any, of a convolution of each channel by itself."""
        shape = (channels, width, 1) if self._whole_norms else (channels, 1, width)
        array = self._pop(f"{module}.weight", shape)
        bias = None
        if f"{module}.bias" in self:
            bias = self.vector(f"{module}.bias", channels)
        return mx.contiguous(array.reshape(channels, width).T).astype(self._dtype), bias

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def _prepared(
        self,
        weight: Weight,
        modules: Mapping[str, int],
        changes: Sequence[Change | None] = (),
        *,
        exact: bool = False,
        count: int = 1,
    ) -> Weight:
        """Prepare a weight for the operations.

        modules, count: see `PreparedModules`.
        changes: an adapter's, of each module; empty: it has none.
        """
        prepared = self._ops.prepare(weight, self._dtype, exact=exact)
        products = low_rank_products(changes, modules.values()) if changes else []
        if products:
            arrays = self._ops.add_low_rank(prepared, products)
            if arrays is None:
                both = joined(changes, list(modules.values()))
                factors = Factors(*(self._ops.prepare(Weight(factor), self._dtype) for factor in both))
                self._factors[prepared] = factors
                arrays = [*factors.a.arrays, *factors.b.arrays]
            self._adapted[prepared] = arrays
        self.prepared.append(PreparedModules(prepared.nbytes or prepared, modules, count))
        if self._at_once:
            mx.eval(prepared.arrays)  # releases what has been read
        return prepared

    def _stored(self, module: str, rows: int, columns: int, stack: tuple[int, ...] = ()) -> Weight:
        """Take a projection as stored, (*stack, rows, columns). stack: (X,) of experts."""
        if module in self._taken:
            return self._taken.pop(module)
        bias = None
        if f"{module}.bias" in self:
            bias = self._pop(f"{module}.bias", (*stack, rows))
        if f"{module}.scales" not in self:
            return Weight(self._plain(module, rows, columns, stack), bias=bias)
        kind = layer_quantization(self._quantization, module)
        groups = (*stack, rows, columns // kind.group_size)
        data = self._pop(f"{module}.weight", (*stack, rows, columns * kind.bits // 32))
        scales = self._pop(f"{module}.scales", groups)
        affine = kind.mode == "affine"
        biases = None
        if affine:
            biases = self._pop(f"{module}.biases", groups)
        if data.dtype != mx.uint32 or (scales.dtype == mx.uint8) == affine:
            raise CheckpointError(f"{module} is quantized, but not stored as {kind.mode} is: U32, and scales as fit it")
        if f"{module}.global_scale" in self:
            raise UnsupportedModelError(f"{module} has one more scale for all of it, which headrace does not read")
        return Weight(data, scales, biases, kind.bits, kind.group_size, bias, kind.mode)

    def _plain(self, module: str, rows: int, columns: int, stack: tuple[int, ...]) -> mx.array:
        """Return a matrix (rows, columns), or a stack of them, that is not quantized, with an adapter's change."""
        data = self._pop(f"{module}.weight", (*stack, rows, columns))
        if not mx.issubdtype(data.dtype, mx.floating):
            raise CheckpointError(f"{module}.weight is stored as {data.dtype}, which is no weight")
        if stack:
            return data
        change = self._changes.take(module, rows, columns)
        if change is None:
            return data
        return change.merged(data)

    def _pop(self, name: str, shape: tuple[int, ...]) -> mx.array:
        """Take a tensor of this shape. Raises CheckpointError without one."""
        array = self._arrays.pop(name, None)  # released once it is prepared
        if array is None:
            raise CheckpointError(f"the checkpoint has no tensor {name}, which its config.json requires")
        if tuple(array.shape) != shape:
            raise CheckpointError(f"tensor {name} has shape {tuple(array.shape)}, config.json implies {shape}")
        return loaded(array)


def _kind(weight: Weight) -> tuple[object, ...]:
    """Return the properties that weights must share to be joined."""
    return weight.bits, weight.group_size, weight.mode, weight.data.dtype, weight.bias is None


def _reordered(weight: Weight, order: mx.array) -> Weight:
    """Return a weight with its rows in this order."""
    return _mapped(weight, lambda array: array[order])


def _mapped(weight: Weight, change: Callable[[mx.array], mx.array]) -> Weight:
    """Return a weight with all its arrays changed."""
    arrays: dict[str, Any] = {name: getattr(weight, name) for name in ("data", "scales", "biases", "bias")}
    changed: dict[str, Any] = {name: change(array) for name, array in arrays.items() if array is not None}
    return replace(weight, **changed)


def _joined(parts: list[Weight], join: Callable[..., mx.array]) -> Weight:
    """Join weights of one kind: `mx.concatenate` along rows, `mx.stack` to a stack."""

    def joined(arrays: list[mx.array | None]) -> mx.array | None:
        present = [array for array in arrays if array is not None]
        if not present:
            return None
        return join(present, axis=0)

    data = joined([part.data for part in parts])
    assert data is not None
    return Weight(
        data,
        joined([part.scales for part in parts]),
        joined([part.biases for part in parts]),
        parts[0].bits,
        parts[0].group_size,
        joined([part.bias for part in parts]),
        parts[0].mode,
    )
